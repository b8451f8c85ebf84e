"""TurnScope: one running turn's view of its conversation, and the only way it writes (state document 1.1).

What changes is put into the view and into the queue of the next flush in one step, so the two cannot
drift apart. Flushes are numbered and sent one at a time; each answer's data sequence is carried by
the next write. Nothing is sent once the run has ended, but settlements and the turn's own end.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import msgspec

from harness_service.core.budget import RunBudget
from harness_service.core.catalogue import Catalogue
from harness_service.core.run import RunLifecycle
from harness_service.ports import ChatModel, Clock, KnowledgeBase, OfferedTool, StateStore, ToolProvider
from harness_service.settings import Settings
from harness_service.turn_types import TurnChannel, TurnRequest
from turnfence import records as r
from turnfence.axes import (
    CallStatus,
    CancelReason,
    CollectionState,
    IntentType,
    ProcessingStage,
    RunState,
    SemanticVerdict,
    StopReason,
    StreamState,
    TraceEventStatus,
    TraceEventType,
    TracePhase,
    TurnMode,
)
from turnfence.errors import Reason, TurnfenceError

T = TypeVar("T")


class Deps(msgspec.Struct, frozen=True):
    """What every turn of this process shares. ``guard_model`` judges, ``model`` does the rest."""

    state: StateStore
    model: ChatModel
    guard_model: ChatModel
    tools: ToolProvider
    knowledge: KnowledgeBase
    catalogue: Catalogue
    clock: Clock
    settings: Settings


class Axes(msgspec.Struct):
    """The run's axes as they come to be known."""

    intent: IntentType | None = None
    turn_mode: TurnMode | None = None
    stop_reason: StopReason | None = None
    collection_state: CollectionState | None = None
    semantic_verdict: SemanticVerdict | None = None
    agent_id: str = ""
    task_id: str = ""
    error_code: str = ""


class TurnScope:
    """The state of one turn. Its view is public for reading; it changes through ``record`` alone."""

    def __init__(
        self,
        deps: Deps,
        request: TurnRequest,
        channel: TurnChannel,
        lifecycle: RunLifecycle,
        budget: RunBudget,
        begun: r.BeginTurnResponse,
        *,
        started_at: int,
        lease_until: float,
    ) -> None:
        assert begun.turn is not None
        assert begun.snapshot is not None
        self.deps = deps
        self.request = request
        self.channel = channel
        self.lifecycle = lifecycle
        self.budget = budget
        self.turn = begun.turn
        self.user_message = begun.user_message
        self.previous_turn = begun.previous_turn
        self.truncated = begun.truncated
        self.axes = Axes(agent_id=request.agent_id)
        self.started_at = started_at
        self.lease_until = lease_until
        snapshot = begun.snapshot
        self.conversation = snapshot.conversation
        self.dialogue = list(snapshot.dialogue)
        self.records = list(snapshot.records)
        self.entities = dict(snapshot.entities)
        self.session_shared = dict(snapshot.shared)
        self.unresolved = list(snapshot.unresolved_writes)
        self.write_requests = dict(snapshot.unresolved_requests)  # evidence id → arguments as sent
        self.task: TaskView | None = TaskView(snapshot.task) if snapshot.task is not None else None
        self.evidence: dict[str, r.EvidenceHead] = {}
        self.touched = False  # a task was opened or continued
        self.focus_node = ""
        self.last_sequence = 0
        self._pending: list[r.StateChange] = []
        self._flush_sequence = 1
        self._trace_sequence = 1
        self._sending = asyncio.Lock()
        self._schemas: dict[str, OfferedTool] | None = None

    # --- what happened ------------------------------------------------------------------------

    def record(self, *changes: r.StateChange) -> None:
        """Put changes into the view and into the next flush."""
        for change in changes:
            _APPLY.get(type(change), _no_view)(self, change)
            self._pending.append(change)

    def emit(self, kind: r.EventKind) -> r.TurnEvent:
        """Show an event to the followers, and record it with the next flush."""
        event = self.channel.publish(kind)
        self.last_sequence = event.sequence
        self._pending.append(r.AppendEvent(event=event))
        return event

    def touch(self) -> None:
        """From here on the turn's end is also the task's affair."""
        self.touched = True

    def focus(self, node_id: str) -> None:
        self.touched = True
        self.focus_node = node_id

    def stage(self, stage: ProcessingStage) -> None:
        self.emit(r.Status(stage=stage))

    def trace(
        self,
        kind: TraceEventType,
        phase: TracePhase,
        status: TraceEventStatus = TraceEventStatus.SUCCEEDED,
        *,
        started_at: int | None = None,
        node_id: str = "",
        evidence_id: str = "",
        **attributes: str,
    ) -> None:
        """One event of the run's timeline: no user text, no arguments in its attributes."""
        now = self.deps.clock.now_ms()
        self._pending.append(
            r.AppendTrace(
                trace=r.TraceEvent(
                    sequence=self._trace_sequence,
                    type=kind,
                    phase=phase,
                    status=status,
                    started_at=now if started_at is None else started_at,
                    duration=None if started_at is None else max(0, now - started_at),
                    node_id=node_id,
                    evidence_id=evidence_id,
                    attributes=attributes,
                )
            )
        )
        self._trace_sequence += 1

    def new_id(self) -> str:
        return secrets.token_hex(16)

    def now(self) -> int:
        return self.deps.clock.now_ms()

    # --- boundaries ---------------------------------------------------------------------------

    def check_active(self) -> None:
        """Raise ``RunAborted`` when the run is over; never between a write's call and its settlement."""
        self.lifecycle.check_active(self.deps.clock.monotonic())

    def check_lease(self) -> None:
        """The holder's own deadline: after it no tool call, flush or persist is started (D7)."""
        if self.deps.clock.monotonic() >= self.lease_until:
            self.lifecycle.cancel(CancelReason.FENCED)
        self.check_active()

    def ensure_lease(self) -> None:
        """For the turn's own end, when the run is over: raise STATE_FENCED once the lease has passed."""
        if self.deps.clock.monotonic() >= self.lease_until:
            raise TurnfenceError(Reason.STATE_FENCED, detail="the lease has passed")

    async def while_active(self, work: Coroutine[Any, Any, T]) -> T:
        """Wait for ``work``, but no longer than the run lives: then it is cancelled at once and
        ``RunAborted`` is raised. For model calls, read tools and guards; never for a write."""
        task = asyncio.create_task(work)
        ended = asyncio.Event()
        loop = asyncio.get_running_loop()
        forget = self.lifecycle.on_end(lambda _: loop.call_soon_threadsafe(ended.set))
        waiter = asyncio.create_task(ended.wait())
        try:
            await asyncio.wait({task, waiter}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            self.check_active()
            raise AssertionError("the run ended, and is active")
        finally:
            forget()
            for unfinished in (task, waiter):
                if not unfinished.done():
                    unfinished.cancel()
            await asyncio.gather(task, waiter, return_exceptions=True)

    # --- writing ------------------------------------------------------------------------------

    async def flush(self) -> None:
        """Send what is pending under the fence; nothing pending sends nothing."""
        self.check_lease()
        async with self._sending:
            if not self._pending:
                return
            changes = [*self._pending, r.PutRun(run=self.run_so_far())]
            self._pending = []
            request = r.FlushRequest(turn=self.turn, sequence=self._flush_sequence, changes=changes)
            response = await self.send(self.deps.state.flush, request)
            self._flush_sequence += 1
            self._saw(response.data_seq)

    async def register(
        self,
        head: r.EvidenceHead,
        request_json: str,
        consume: r.ConsumeCheckpoint | None,
    ) -> r.RegisterWriteResponse:
        """S2. What is pending goes first, so that the registration never precedes its own node."""
        await self.flush()
        async with self._sending:
            request = r.RegisterWriteRequest(
                turn=self.turn,
                task_id=head.task_id,
                node_id=head.node_id,
                evidence=head,
                request_json=request_json,
                consume_checkpoint=consume,
            )
            response = await self.send(self.deps.state.register_write, request)
            self._saw(response.data_seq)
        if consume is not None and response.decision == "PROCEED":
            _consume(self, consume)
        return response

    async def settle(self, *settlements: r.Settlement) -> list[r.EvidenceHead]:
        """S3: whatever became of the run; repeated until the fence is lost or the lease has passed."""
        async with self._sending:
            request = r.SettleCallsRequest(turn=self.turn, settlements=list(settlements))
            response = await self.send(self.deps.state.settle_calls, request)
            self._saw(response.data_seq)
        for head in response.evidence:
            self.evidence[head.evidence_id] = head
            self._note_settled(head)
        return response.evidence

    def _note_settled(self, head: r.EvidenceHead) -> None:
        open_states = (CallStatus.STARTED, CallStatus.UNKNOWN)
        self.unresolved = [h for h in self.unresolved if h.evidence_id != head.evidence_id]
        if head.side_effect == "WRITE" and head.status in open_states:
            self.unresolved.append(head)

    async def persist(
        self, changes: list[r.StateChange], outcome: r.Run, closing: list[r.TurnEvent]
    ) -> r.PersistTurnResponse:
        """The turn's end, in one call: what is pending, the last changes, the outcome."""
        async with self._sending:
            for change in changes:
                _APPLY.get(type(change), _no_view)(self, change)
            request = r.PersistTurnRequest(
                turn=self.turn,
                sequence=self._flush_sequence,
                changes=[*self._pending, *changes],
                outcome=outcome,
                closing_events=closing,
            )
            response = await self.send(self.deps.state.persist_turn, request)
            self._pending = []
            return response

    def _saw(self, data_seq: int) -> None:
        self.turn = msgspec.structs.replace(self.turn, seen_seq=max(self.turn.seen_seq, data_seq))

    async def send(self, call: Callable[..., Coroutine[Any, Any, T]], request: Any) -> T:
        """One call to the state service, repeated under its identity while it is unreachable and the
        lease holds. Never torn: the caller that stops waiting does not stop the write."""
        timeout = self.deps.settings.state.call_timeout
        while True:
            task = asyncio.create_task(call(request, timeout=timeout))
            try:
                return await asyncio.shield(task)
            except asyncio.CancelledError:
                await asyncio.gather(task, return_exceptions=True)
                raise
            except TurnfenceError as error:
                if error.reason is Reason.STATE_FENCED:
                    self.lifecycle.cancel(CancelReason.FENCED)
                retry = error.reason is Reason.STATE_UNAVAILABLE
                if not retry or self.deps.clock.monotonic() + RETRY_PAUSE >= self.lease_until:
                    raise
            await asyncio.sleep(RETRY_PAUSE)

    # --- views --------------------------------------------------------------------------------

    def run_so_far(self) -> r.Run:
        """The run's axes while it is RUNNING."""
        return r.Run(
            run_id=self.request.run_id,
            conversation_id=self.turn.conversation_id,
            message_id=self.request.message_id,
            agent_id=self.axes.agent_id,
            task_id=self.axes.task_id,
            version=self.turn.version,
            query_cut=self.truncated,
            intent=self.axes.intent,
            turn_mode=self.axes.turn_mode,
            run_state=RunState.RUNNING,
            error_code=self.axes.error_code,
            stop_reason=self.axes.stop_reason,
            collection_state=self.axes.collection_state,
            semantic_verdict=self.axes.semantic_verdict,
            stream_state=StreamState.OPEN,
            limits=self.budget.limits,
            usage=self.budget.usage(max(0, self.now() - self.started_at)),
            started_at=self.started_at,
        )

    def artifacts(self) -> list[r.ArtifactRef]:
        """The task's artifacts: payloads of tools that the catalogue marks ``artifact``."""
        return [
            r.ArtifactRef(evidence_id=head.evidence_id, name=head.tool_name, bytes=head.payload_bytes)
            for head in self.evidence.values()
            if head.artifact and head.status is CallStatus.SUCCESS and head.business_ok
        ]

    async def schemas(self) -> dict[str, OfferedTool]:
        """The tools that can be reached, asked for once a turn."""
        if self._schemas is None:
            self._schemas = dict(await self.while_active(_schemas(self.deps.tools)))
        return self._schemas


RETRY_PAUSE = 0.1  # seconds between two tries of one call


async def _schemas(tools: ToolProvider) -> dict[str, OfferedTool]:
    return dict(await tools.schemas())


class TaskView:
    """The active task as the turn sees it."""

    def __init__(self, state: r.TaskState) -> None:
        self.metadata = state.metadata
        self.nodes = {node.node_id: node for node in state.nodes}
        self.edges = list(state.edges)
        self.checkpoint = state.checkpoint
        self.shared = dict(state.shared)
        self.prior = state.prior
        self.writes = dict(state.writes)
        self.closed = False

    @property
    def task_id(self) -> str:
        return self.metadata.task_id


# --- how a change shows in the view -----------------------------------------------------------


def _no_view(scope: TurnScope, change: Any) -> None:
    """Changes that no later step of the turn reads back."""


def _append_message(scope: TurnScope, change: r.AppendMessage) -> None:
    scope.dialogue.append(change.message)


def _put_conversation(scope: TurnScope, change: r.PutConversation) -> None:
    active = change.active_task_id
    scope.conversation = msgspec.structs.replace(
        scope.conversation,
        title=scope.conversation.title if change.title is None else change.title,
        active_task_id=scope.conversation.active_task_id if active is None else active,
    )


def _put_task(scope: TurnScope, change: r.PutTask) -> None:
    if scope.task is None or scope.task.task_id != change.task.task_id:
        scope.task = TaskView(r.TaskState(metadata=change.task))
    else:
        scope.task.metadata = change.task
    scope.axes.task_id = change.task.task_id


def _put_node(scope: TurnScope, change: r.PutNode) -> None:
    if scope.task is not None and scope.task.task_id == change.task_id:
        scope.task.nodes[change.node.node_id] = change.node


def _put_edge(scope: TurnScope, change: r.PutEdge) -> None:
    if scope.task is not None and scope.task.task_id == change.task_id:
        scope.task.edges.append(change.edge)


def _put_checkpoint(scope: TurnScope, change: r.PutCheckpoint) -> None:
    if scope.task is not None and scope.task.task_id == change.task_id:
        scope.task.checkpoint = change.checkpoint


def _consume(scope: TurnScope, change: r.ConsumeCheckpoint) -> None:
    task = scope.task
    checkpoint = task.checkpoint if task is not None else None
    if task is not None and checkpoint is not None and checkpoint.checkpoint_id == change.checkpoint_id:
        task.checkpoint = None


def _put_task_shared(scope: TurnScope, change: r.PutTaskShared) -> None:
    if scope.task is not None and scope.task.task_id == change.task_id:
        scope.task.shared[change.name] = change.value


def _put_session_shared(scope: TurnScope, change: r.PutSessionShared) -> None:
    scope.session_shared[change.name] = change.value


def _put_prior(scope: TurnScope, change: r.PutPrior) -> None:
    if scope.task is not None and scope.task.task_id == change.task_id:
        scope.task.prior = change.prior


def _put_entity(scope: TurnScope, change: r.PutEntity) -> None:
    key = f"{change.entity_type}:{change.entity_id}"
    if change.entry is None:
        scope.entities.pop(key, None)
    else:
        scope.entities[key] = change.entry


def _close_task(scope: TurnScope, change: r.CloseTask) -> None:
    if scope.task is not None and scope.task.task_id == change.task_id:
        scope.task.metadata = msgspec.structs.replace(
            scope.task.metadata,
            status=change.status,
            final_message=change.final_message,
            finished_at=change.closed_at,
        )
        scope.task.checkpoint = None
        scope.task.closed = True


_APPLY: dict[type[Any], Callable[[TurnScope, Any], None]] = {
    r.AppendMessage: _append_message,
    r.PutConversation: _put_conversation,
    r.PutTask: _put_task,
    r.PutNode: _put_node,
    r.PutEdge: _put_edge,
    r.PutCheckpoint: _put_checkpoint,
    r.ConsumeCheckpoint: _consume,
    r.PutTaskShared: _put_task_shared,
    r.PutSessionShared: _put_session_shared,
    r.PutPrior: _put_prior,
    r.PutEntity: _put_entity,
    r.CloseTask: _close_task,
}
