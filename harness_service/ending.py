"""The end of a turn: one terminal state, one row of "what each end leaves behind", one persist, and
only then the content (harness design, D65)."""

from __future__ import annotations

import msgspec

from harness_service.core import task as tasks
from harness_service.core.node import OPEN, NodeEvent, moved
from harness_service.core.release import (
    FAILURE_REASONS,
    ReleaseDecision,
    StreamEnd,
    ending_of,
    turn_status,
)
from harness_service.core.replies import FAILURE_REPLY, say
from harness_service.core.run import Termination
from harness_service.core.task import RunEnd, TaskStep, run_end
from harness_service.scope import TaskView, TurnScope
from turnfence import records as r
from turnfence.axes import (
    DialogueRole,
    Durability,
    FailureReason,
    MessageType,
    NodeStatus,
    ReleaseOutcome,
    RunState,
    StreamState,
    TaskStatus,
    TerminationReason,
    TraceEventStatus,
    TraceEventType,
    TracePhase,
    TurnStatus,
)
from turnfence.errors import Reason, TurnfenceError
from turnfence.serving.logs import get_logger

_log = get_logger(__name__)


class TurnEnd(msgspec.Struct, frozen=True):
    """What the pipeline came to. Without ``release`` there is nothing to show: the run's terminal
    state says why. ``checkpoint``: the task is suspended with it; ``node_event``: how the focus node
    moves then. ``consume``: the answer that ended the task."""

    content: r.Content | None = None
    release: ReleaseDecision | None = None
    task_touched: bool = False
    node_id: str = ""
    node_result: str = ""
    checkpoint: r.TaskCheckpoint | None = None
    node_event: NodeEvent = NodeEvent.LOOP_SUSPENDED
    ended_by_user: bool = False
    consume: r.ConsumeCheckpoint | None = None


async def finish(scope: TurnScope, end: TurnEnd) -> r.Run:
    """Set the terminal state, persist, show. Returns the run as it ended; never raises."""
    termination = _terminate(scope, end)
    outcome = _outcome(termination, end)
    content = end.content if outcome in (ReleaseOutcome.SUCCESS, ReleaseOutcome.FALLBACK) else None
    row = run_end(
        termination.state,
        termination.reason,
        outcome,
        task_touched=end.task_touched,
        suspended=end.checkpoint is not None,
        ended_by_user=end.ended_by_user,
    )
    scope.trace(
        TraceEventType.RUN_FINISHED,
        TracePhase.RUN,
        started_at=scope.started_at,
        run_state=termination.state.value,
        reason=termination.reason.value,
        release_outcome=outcome.value,
    )
    reply = content.text if content else _failure_text(scope, termination)
    changes = [*_task_changes(scope, end, row, reply), *_reply(scope, termination, outcome, reply)]
    run = _run(scope, termination, outcome, end, content)
    closing = _closing_events(scope, run, content, termination)
    if termination.reason in (TerminationReason.FENCED, TerminationReason.STATE_UNAVAILABLE):
        return await _end_outside(scope, run, closing, termination)
    return await _persist(scope, run, closing, changes)


def _terminate(scope: TurnScope, end: TurnEnd) -> Termination:
    """First terminal wins: a release that comes after a cancel is dropped."""
    if end.release is not None and end.release.outcome is not ReleaseOutcome.FAILED:
        scope.lifecycle.succeed()
    else:
        scope.lifecycle.end(end.release.reason if end.release else TerminationReason.INTERNAL_FAILURE)
    termination = scope.lifecycle.termination
    assert termination is not None
    return termination


def _outcome(termination: Termination, end: TurnEnd) -> ReleaseOutcome:
    if termination.state is RunState.CANCELLED:
        return ReleaseOutcome.CANCELLED
    released = end.release.outcome if end.release else ReleaseOutcome.FAILED
    if termination.state is RunState.SUCCESS:
        return released
    exhausted = termination.state is RunState.BUDGET_EXHAUSTED
    return released if exhausted and released is ReleaseOutcome.FALLBACK else ReleaseOutcome.FAILED


def _failure_text(scope: TurnScope, termination: Termination) -> str:
    reason = FAILURE_REASONS[termination.reason]
    return say(FAILURE_REPLY[reason], scope.request.locale) if reason else ""


# --- what the end leaves behind -------------------------------------------------------------------


def _task_changes(scope: TurnScope, end: TurnEnd, row: RunEnd, reply: str) -> list[r.StateChange]:
    task = scope.task
    if task is None or task.closed or not end.task_touched:
        return []
    now = scope.now()
    if row is RunEnd.SUSPENDED and end.checkpoint is not None:
        node = task.nodes[end.node_id]
        if node.status is not NodeStatus.SUSPENDED:  # a question may take another's place
            node = moved(node, end.node_event, now)
        scope.trace(
            TraceEventType.CHECKPOINT_OPENED,
            TracePhase.TASK,
            node_id=end.node_id,
            checkpoint_id=end.checkpoint.checkpoint_id,
            checkpoint_type=end.checkpoint.type.value,
        )
        return list(tasks.suspend_task(task.metadata, node, end.checkpoint, now).persist)
    step = _closing_step(scope, task, end, row, reply, now)
    if step is None:
        return []
    scope.trace(TraceEventType.TASK_CLOSED, TracePhase.TASK, status=TraceEventStatus.SUCCEEDED, end=row.value)
    return list(step.persist)


_GOES_ON = (RunEnd.CANCELLED, RunEnd.INTERRUPTED)

# How the focus node ends with its task.
_FOCUS_EVENTS = {
    RunEnd.RELEASED: NodeEvent.LOOP_DONE,
    RunEnd.ENDED_BY_USER: NodeEvent.USER_CANCELLED,
    RunEnd.BUDGET_FALLBACK: NodeEvent.TURN_FAILED,
    RunEnd.FAILED: NodeEvent.TURN_FAILED,
}


def _closing_step(
    scope: TurnScope, task: TaskView, end: TurnEnd, row: RunEnd, reply: str, now: int
) -> TaskStep | None:
    nodes = list(task.nodes.values())
    if row in _GOES_ON:
        return tasks.hand_back(task.metadata, nodes, now)
    left = tasks.LEFT_BEHIND[row]
    if left.task is None or left.task is TaskStatus.SUSPENDED:
        return None
    event = _FOCUS_EVENTS[row]
    nodes = [
        moved(node, event, now, result=end.node_result or None)
        if node.node_id == end.node_id and _applies(node.status, event)
        else node
        for node in nodes
    ]
    return tasks.close_task(
        task.metadata,
        nodes,
        left.task,
        final_message=reply,
        now_ms=now,
        entities=scope.entities,
        artifacts=scope.artifacts(),
        consume=end.consume,
    )


def _applies(status: NodeStatus, event: NodeEvent) -> bool:
    return status is NodeStatus.RUNNING if event is NodeEvent.LOOP_DONE else status in OPEN


def _reply(
    scope: TurnScope, termination: Termination, outcome: ReleaseOutcome, text: str
) -> list[r.StateChange]:
    """The turn's answer in the dialogue; what was cancelled is not in the history (D66)."""
    if not text or termination.state is RunState.CANCELLED:
        return []
    return [
        r.AppendMessage(
            message=r.DialogueMessage(
                message_id=scope.new_id(),
                role=DialogueRole.AGENT,
                type=MessageType.AGENT_REPLY,
                text=text,
                trace_id=scope.request.run_id,
                task_id=scope.axes.task_id,
                created_at=scope.now(),
                release_outcome=outcome,
            )
        )
    ]


def _run(
    scope: TurnScope,
    termination: Termination,
    outcome: ReleaseOutcome,
    end: TurnEnd,
    content: r.Content | None,
) -> r.Run:
    task = scope.task
    status = _task_status(task, end, termination, outcome)
    stream = ending_of(termination, outcome).stream_end
    now = scope.now()
    return msgspec.structs.replace(
        scope.run_so_far(),
        run_state=termination.state,
        termination_reason=termination.reason,
        release_outcome=outcome,
        fallback_type=end.release.fallback_type if end.release and content else None,
        turn_status=turn_status(
            termination.state, outcome, status, task_touched=end.task_touched or _is_waiting(task)
        ),
        stream_state=StreamState.DISCONNECTED if stream is StreamEnd.NONE else StreamState.TERMINAL,
        usage=scope.budget.usage(max(0, now - scope.started_at)),
        finished_at=now,
        answer=content,
    )


def _is_waiting(task: TaskView | None) -> bool:
    return task is not None and task.checkpoint is not None


def _task_status(
    task: TaskView | None, end: TurnEnd, termination: Termination, outcome: ReleaseOutcome
) -> TaskStatus | None:
    """The task's status as this end leaves it."""
    if task is None:
        return None
    if not end.task_touched:
        return task.metadata.status
    row = run_end(
        termination.state,
        termination.reason,
        outcome,
        suspended=end.checkpoint is not None,
        ended_by_user=end.ended_by_user,
    )
    return tasks.LEFT_BEHIND[row].task


def _closing_events(
    scope: TurnScope, run: r.Run, content: r.Content | None, termination: Termination
) -> list[r.TurnEvent]:
    """content or failure, and done, numbered before anybody sees them. A cancelled run has none."""
    assert run.release_outcome is not None
    assert run.turn_status is not None
    if ending_of(termination, run.release_outcome).stream_end in (
        StreamEnd.STATUS_CANCELLED,
        StreamEnd.NONE,
    ):
        return []
    kinds: list[r.EventKind] = []
    if content is not None:
        kinds.append(content)
    else:
        reason = FAILURE_REASONS[termination.reason] or FailureReason.INTERNAL
        kinds.append(r.Failure(reason=reason, message=say(FAILURE_REPLY[reason], scope.request.locale)))
    kinds.append(
        r.Done(
            release_outcome=run.release_outcome,
            turn_status=run.turn_status,
            usage=run.usage,
            checkpoint_id=_open_checkpoint_id(scope, run, content),
        )
    )
    return [
        r.TurnEvent(
            sequence=scope.last_sequence + place,
            run_id=scope.request.run_id,
            conversation_id=scope.turn.conversation_id,
            time=scope.now(),
            kind=kind,
        )
        for place, kind in enumerate(kinds, start=1)
    ]


def _open_checkpoint_id(scope: TurnScope, run: r.Run, content: r.Content | None) -> str:
    """What a waiting task waits for: the question just asked, or the one that this turn did not answer."""
    if content is not None and isinstance(content.body, r.CheckpointPrompt):
        return content.body.checkpoint.checkpoint_id
    if run.turn_status is not TurnStatus.WAITING or scope.task is None or scope.task.checkpoint is None:
        return ""
    return scope.task.checkpoint.checkpoint_id


# --- persist and show -----------------------------------------------------------------------------


async def _persist(
    scope: TurnScope, run: r.Run, closing: list[r.TurnEvent], changes: list[r.StateChange]
) -> r.Run:
    try:
        scope.ensure_lease()
        answer = await scope.persist(changes, run, closing)
    except TurnfenceError as error:
        _log.warning("turn not persisted", reason=error.reason.value, detail=error.detail)
        reason = (
            TerminationReason.FENCED
            if error.reason is Reason.STATE_FENCED
            else TerminationReason.STATE_UNAVAILABLE
        )
        scope.axes.error_code = error.log_code
        return await _void(scope, run, reason)
    _show(scope, closing, answer.durability)
    return msgspec.structs.replace(run, durability=answer.durability)


async def _void(scope: TurnScope, run: r.Run, reason: TerminationReason) -> r.Run:
    """What could not be persisted does not count: the caller sees a failure, never the content."""
    failed = Termination(RunState.FAILED, reason)
    voided = msgspec.structs.replace(
        run,
        run_state=failed.state,
        termination_reason=reason,
        release_outcome=ReleaseOutcome.FAILED,
        fallback_type=None,
        turn_status=turn_status(failed.state, ReleaseOutcome.FAILED, None),
        error_code=scope.axes.error_code,
        answer=None,
    )
    return await _end_outside(scope, voided, _closing_events(scope, voided, None, failed), failed)


async def _end_outside(
    scope: TurnScope, run: r.Run, closing: list[r.TurnEvent], termination: Termination
) -> r.Run:
    """An end that the fence or the stores keep out: recorded as far as they let it, then shown."""
    if termination.reason is TerminationReason.STATE_UNAVAILABLE:
        request = r.AbandonTurnRequest(
            organ_id=scope.turn.organ_id,
            conversation_id=scope.turn.conversation_id,
            run_id=scope.turn.run_id,
            outcome=run,
            closing_events=closing,
        )
        try:
            await scope.deps.state.abandon_turn(request, timeout=1.0)
        except TurnfenceError as error:
            _log.warning("end not recorded", reason=error.reason.value, detail=error.detail)
    _show(scope, closing, None)
    return run


def _show(scope: TurnScope, closing: list[r.TurnEvent], durability: Durability | None) -> None:
    for event in closing:
        if isinstance(event.kind, r.Done):
            event = msgspec.structs.replace(
                event, kind=msgspec.structs.replace(event.kind, durability=durability)
            )
        scope.channel.replay([event])
