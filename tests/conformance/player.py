"""One turn of a scripted agent against the real state service: begin, verify, perhaps one write, persist.

A generator of what it does next: a call, or a place where it may be paused. Whoever drives it sends the
call's answer or throws its error; what it is not told it sends again.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from tests.contract.turns import NOW, Turn, hash_of
from tests.contract.work import Work, ended
from turnfence import records as r
from turnfence.axes import CallStatus, NodeStatus, ResumeAction, TaskStatus, WriteDecision
from turnfence.errors import Reason, TurnfenceError

if TYPE_CHECKING:
    from tests.conformance.world import RealWorld

Call = Callable[[], Awaitable[Any]]
Script = Generator[Call | None, Any, None]  # None: a pause
SENDS = 5
UNHEARD = frozenset({Reason.STATE_UNAVAILABLE, Reason.DEADLINE_EXCEEDED, Reason.INTERNAL})
ARGS = '{"host":"web-1"}'
OPEN = frozenset({CallStatus.STARTED, CallStatus.UNKNOWN, CallStatus.UNKNOWN_PRE_CALL})


class GivenUp(Exception):
    """No answer while the lease lasted."""


@dataclass(frozen=True)
class Plan:
    writes: bool = False
    key: str = "a"  # "b" needs an approval
    outcome: str = "ok"  # of the tool: ok, reset-after, reset-before, refused, late
    leaves_node: bool = False
    closes: bool = False  # its task


class Player:
    def __init__(self, world: RealWorld, run: str, plan: Plan) -> None:
        self.world, self.run, self.plan = world, run, plan
        self.request = world.talk.request("hello", run_id=run, message_id=f"{run}-user", lease=None)
        self.turn: Turn | None = None
        self.work = Work()
        self.heads: dict[str, r.EvidenceHead] = {}
        self.losses = world.losses
        self.script = self._turn()
        self.call: Call | None = None

    # --- the script --------------------------------------------------------------------------------

    def _turn(self) -> Script:
        world = self.world
        try:
            yield from self._play()
        except GivenUp:
            world.note_end(self.run, "UNKNOWN")
            yield from self._give_up()
        except TurnfenceError as error:
            if error.reason is Reason.CONVERSATION_BUSY:
                world.note_end(self.run, "REFUSED")
            elif error.reason is Reason.STATE_FENCED:
                world.note_end(self.run, "FENCED", self.losses)
            elif error.reason is Reason.STATE_LOST:
                world.note_end(self.run, "LOST", self.losses)
                yield from self._give_up()
            else:
                raise

    def _give_up(self) -> Script:
        if self.turn is None:
            return
        try:
            yield self.turn.abandon
        except TurnfenceError as error:
            if error.reason not in UNHEARD:
                raise  # else: best effort, the next begin ends it

    def _send(self, call: Call) -> Generator[Call | None, Any, Any]:
        """Repeated under its identity while there is no answer and the lease lasts."""
        for _ in range(SENDS):
            try:
                return (yield call)
            except TurnfenceError as error:
                if error.reason not in UNHEARD:
                    raise
                if self.turn is not None and self.run not in self.world.leases:
                    break
        raise GivenUp

    def _play(self) -> Script:
        world, plan = self.world, self.plan
        world.leases.add(self.run)
        begun: r.BeginTurnResponse = yield from self._send(lambda: world.client.begin(self.request))
        if begun.existing_run is not None:
            world.note_end(self.run, "REFUSED")
            return
        turn = self.turn = Turn(world.talk, self.request, begun)
        world.look_at_the_view(self.run)
        yield from self._start(turn)
        world.note_told(f"{self.run}.progress", self.losses)
        yield from self._verify(turn)
        asks = ""
        if plan.writes:
            asks = yield from self._write(turn)
        yield from self._end(turn, asks)

    def _start(self, turn: Turn) -> Script:
        task = turn.snapshot.task
        changes: list[r.StateChange] = [self._says("progress")]
        if task is None:
            changes += self.work.opened()
        else:
            self.work.task_id = task.metadata.task_id
            node = self.work.node(status=NodeStatus.RUNNING)
            changes.append(r.PutNode(task_id=self.work.task_id, node=node))
        yield from self._send(self._flush(turn, changes))
        opened: r.OpenNodeResponse = yield from self._send(
            lambda: turn.open_node(self.work.task_id, self.work.node_id)
        )
        self.heads = {head.evidence_id: head for head in turn.snapshot.unresolved_writes}
        self.heads |= {head.evidence_id: head for head in opened.evidence}

    def _flush(self, turn: Turn, changes: list[r.StateChange]) -> Call:
        sequence = turn.sequence
        return lambda: turn.flush(*changes, sequence=sequence)

    def _says(self, what: str) -> r.AppendMessage:
        assert self.turn is not None
        return self.turn.reply(what, message_id=f"{self.run}-{what}")

    def _verify(self, turn: Turn) -> Script:
        """Settle writes of unknown outcome, as far as the tool can tell."""
        for evidence_id, head in sorted(self.heads.items()):
            if head.status is not CallStatus.UNKNOWN:
                continue
            yield None
            verdict = self.world.verdict_on(head)
            if verdict is not None:
                yield from self._settle(turn, evidence_id, verdict)

    def _settle(self, turn: Turn, evidence_id: str, status: CallStatus) -> Script:
        head = self.heads[evidence_id]
        settled = ended(head, status, business_ok=True if status is CallStatus.SUCCESS else None)
        stored: r.EvidenceHead = yield from self._send(lambda: turn.settle(settled))
        self.heads[evidence_id] = stored

    def _write(self, turn: Turn) -> Generator[Call | None, Any, str]:
        """S2 → lease check → the call → S3. Answers the approval to ask for, or ''."""
        world, plan = self.world, self.plan
        key = hash_of(plan.key)
        for head in self.heads.values():
            mine = head.idempotency_key == key
            if mine and (head.status in OPEN or (head.status is CallStatus.SUCCESS and self._is_ours(head))):
                return ""
        consume = None
        if plan.key == "b":
            task = turn.snapshot.task
            checkpoint = task.checkpoint if task is not None else None
            if checkpoint is None:
                return f"{self.run}-ask"
            consume = r.ConsumeCheckpoint(
                task_id=self.work.task_id,
                checkpoint_id=checkpoint.checkpoint_id,
                message_id=self.request.input.message_id,
                action=ResumeAction.CONFIRM,
                acted_at=NOW,
                user_id=world.talk.user_id,
            )
        head = self.work.write(
            turn, evidence_id=f"{self.run}-1", idempotency_key=key, args_hash=hash_of(ARGS)
        )
        self.heads[head.evidence_id] = head
        try:
            registered: r.RegisterWriteResponse = yield from self._send(
                lambda: turn.register(head, ARGS, consume)
            )
        except GivenUp:
            yield from self._settle(turn, head.evidence_id, CallStatus.UNKNOWN_PRE_CALL)
            raise
        except TurnfenceError as error:
            if error.reason is not Reason.ARGS_HASH_MISMATCH:
                raise
            return ""  # Redis went back, and the approval with it
        if registered.decision is not WriteDecision.PROCEED:
            del self.heads[head.evidence_id]
            return ""
        yield None
        if self.run not in world.leases:
            yield from self._settle(turn, head.evidence_id, CallStatus.CANCELLED)
            raise GivenUp
        status = world.call_tool(self.run, head, plan.outcome, consume.checkpoint_id if consume else "")
        yield from self._settle(turn, head.evidence_id, status)
        return ""

    def _is_ours(self, head: r.EvidenceHead) -> bool:
        return head.task_id == self.work.task_id

    def _end(self, turn: Turn, asks: str) -> Script:
        world, work, plan = self.world, self.work, self.plan
        status = NodeStatus.RUNNING if plan.leaves_node else NodeStatus.DONE
        changes: list[r.StateChange] = [self._says("reply")]
        if plan.closes and not asks and not any(head.status in OPEN for head in self.heads.values()):
            changes.append(work.closed())
            world.nodes[self.run] = ""
        else:
            changes += [
                r.PutTask(task=work.task(status=TaskStatus.SUSPENDED, suspended_at=NOW)),
                r.PutNode(task_id=work.task_id, node=work.node(status=status)),
            ]
            world.nodes[self.run] = status.value
        if asks:
            checkpoint = msgspec.structs.replace(work.approval(hash_of(ARGS)), checkpoint_id=asks)
            changes.append(r.PutCheckpoint(task_id=work.task_id, checkpoint=checkpoint))
        request = turn.persist_request(*changes)
        yield None
        answer: r.PersistTurnResponse = yield from self._send(
            lambda: world.client.persist(msgspec.structs.replace(request, turn=turn.ref))
        )
        assert answer.durability is not None
        world.note_end(self.run, answer.durability.value, self.losses)
        world.note_told(f"{self.run}.reply", self.losses)
