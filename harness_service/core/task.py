"""A task's life: opened, suspended, resumed, abandoned, closed, as typed changes (state 4 and 5.8).

``CloseTask`` and ``PutCheckpoint`` travel only in PersistTurn: a task is closed, and a question
asked, together with the reply that says so. Each function says which of its changes those are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum

import msgspec

from harness_service.core.graph import closed_with_task
from harness_service.core.node import NodeEvent, moved
from turnfence.axes import (
    NodeStatus,
    ReleaseOutcome,
    ResumeAction,
    RunState,
    TaskStatus,
    TerminationReason,
    TurnStatus,
)
from turnfence.records import (
    ArtifactRef,
    CloseTask,
    ConsumeCheckpoint,
    EntityEntry,
    Prior,
    PutCheckpoint,
    PutConversation,
    PutNode,
    PutPrior,
    PutTask,
    StateChange,
    TaskCheckpoint,
    TaskMetadata,
    TaskNode,
    TaskRecord,
    TaskState,
)

SUMMARY_MAX_CHARS = 1000


class RunEnd(StrEnum):
    """The rows of "What each end leaves behind" (harness design)."""

    RELEASED = "RELEASED"
    SUSPENDED = "SUSPENDED"
    ENDED_BY_USER = "ENDED_BY_USER"  # REJECT, CANCEL, CANCEL_TASK
    BUDGET_FALLBACK = "BUDGET_FALLBACK"
    FAILED = "FAILED"  # FAILED, TIMED_OUT, BUDGET_EXHAUSTED without facts
    CANCELLED = "CANCELLED"  # CancelRun, disconnect
    INTERRUPTED = "INTERRUPTED"  # its process died or was stopped, or storage was lost
    FENCED = "FENCED"
    UNTOUCHED = "UNTOUCHED"  # the guard's reply, REPLY_ONLY, UNCERTAIN
    FAILED_BESIDE = "FAILED_BESIDE"  # failed before it touched a task, as when the router failed


class LeftBehind(msgspec.Struct, frozen=True):
    """None: as it was. ``turn_status`` None: DONE, or WAITING if a checkpoint is open."""

    focus_node: NodeStatus | None
    task: TaskStatus | None
    turn_status: TurnStatus | None


LEFT_BEHIND: Mapping[RunEnd, LeftBehind] = {
    RunEnd.RELEASED: LeftBehind(NodeStatus.DONE, TaskStatus.SUCCEEDED, TurnStatus.DONE),
    RunEnd.SUSPENDED: LeftBehind(NodeStatus.SUSPENDED, TaskStatus.SUSPENDED, TurnStatus.WAITING),
    RunEnd.ENDED_BY_USER: LeftBehind(NodeStatus.CANCELLED, TaskStatus.CANCELED, TurnStatus.CANCELLED),
    RunEnd.BUDGET_FALLBACK: LeftBehind(NodeStatus.FAILED, TaskStatus.FAILED, TurnStatus.FAILED),
    RunEnd.FAILED: LeftBehind(NodeStatus.FAILED, TaskStatus.FAILED, TurnStatus.FAILED),
    RunEnd.CANCELLED: LeftBehind(NodeStatus.READY, TaskStatus.RUNNING, TurnStatus.CANCELLED),
    RunEnd.INTERRUPTED: LeftBehind(NodeStatus.READY, TaskStatus.RUNNING, TurnStatus.FAILED),
    RunEnd.FENCED: LeftBehind(None, None, TurnStatus.FAILED),
    RunEnd.UNTOUCHED: LeftBehind(None, None, None),
    RunEnd.FAILED_BESIDE: LeftBehind(None, None, TurnStatus.FAILED),
}

#: Ends of a run after which the next turn may go on with the task.
_REASON_ENDS: Mapping[TerminationReason, RunEnd] = {
    TerminationReason.FENCED: RunEnd.FENCED,
    TerminationReason.INTERRUPTED: RunEnd.INTERRUPTED,
    TerminationReason.SHUTDOWN: RunEnd.INTERRUPTED,
    TerminationReason.STATE_UNAVAILABLE: RunEnd.INTERRUPTED,
    TerminationReason.USER_REQUESTED: RunEnd.CANCELLED,
    TerminationReason.CLIENT_DISCONNECTED: RunEnd.CANCELLED,
}


def run_end(
    state: RunState,
    reason: TerminationReason,
    outcome: ReleaseOutcome,
    *,
    task_touched: bool = True,
    suspended: bool = False,
    ended_by_user: bool = False,
) -> RunEnd:
    """Which row of the table a finished turn is. ``task_touched``: it opened or continued a task."""
    if reason in _REASON_ENDS:
        return _REASON_ENDS[reason]
    if not task_touched:
        return RunEnd.FAILED_BESIDE if outcome is ReleaseOutcome.FAILED else RunEnd.UNTOUCHED
    if outcome is ReleaseOutcome.FAILED:
        return RunEnd.FAILED
    if ended_by_user:
        return RunEnd.ENDED_BY_USER
    if suspended:
        return RunEnd.SUSPENDED
    return RunEnd.BUDGET_FALLBACK if state is RunState.BUDGET_EXHAUSTED else RunEnd.RELEASED


class TaskStep(msgspec.Struct, frozen=True):
    """A task after a step: its new metadata, what may be flushed, and what only PersistTurn may carry."""

    metadata: TaskMetadata
    flush: tuple[StateChange, ...] = ()
    persist: tuple[StateChange, ...] = ()


def open_task(
    *,
    task_id: str,
    agent_id: str,
    goal_summary: str,
    request: str,
    run_id: str,
    source_message_id: str,
    now_ms: int,
    prior: Prior | None = None,
) -> TaskStep:
    """A new RUNNING task, the conversation's active one. ``prior``: only with modes that inherit."""
    metadata = TaskMetadata(
        task_id=task_id,
        status=TaskStatus.RUNNING,
        agent_id=agent_id,
        goal_summary=goal_summary,
        request=request,
        started_at=now_ms,
        trace_id=run_id,
        source_message_id=source_message_id,
    )
    changes: list[StateChange] = [PutTask(metadata), PutConversation(active_task_id=task_id)]
    if prior is not None:
        changes.append(PutPrior(task_id, prior))
    return TaskStep(metadata, flush=tuple(changes))


def focus_on(task: TaskMetadata, node: TaskNode) -> TaskStep:
    """``node`` is what the task is at now."""
    focused = msgspec.structs.replace(task, current_node_id=node.node_id)
    return TaskStep(focused, flush=(PutTask(focused), PutNode(task.task_id, node)))


def suspend_task(task: TaskMetadata, node: TaskNode, checkpoint: TaskCheckpoint, now_ms: int) -> TaskStep:
    """Wait for the user: task and ``node`` (already moved) SUSPENDED, focus on it.

    All of it travels in PersistTurn, with the prompt: a question is never open that nobody was asked.
    """
    if node.status is not NodeStatus.SUSPENDED:
        raise ValueError(f"a task is suspended at a SUSPENDED node, not a {node.status} one")
    suspended = msgspec.structs.replace(
        task, status=TaskStatus.SUSPENDED, current_node_id=node.node_id, suspended_at=now_ms
    )
    return TaskStep(
        suspended,
        persist=(
            PutTask(suspended),
            PutNode(task.task_id, node),
            PutCheckpoint(task.task_id, checkpoint),
        ),
    )


def consumption(
    task_id: str,
    checkpoint: TaskCheckpoint,
    *,
    action: ResumeAction,
    message_id: str,
    user_id: str,
    now_ms: int,
) -> ConsumeCheckpoint:
    """The record that a checkpoint was answered; with CONFIRM of an approval it rides in RegisterWrite."""
    return ConsumeCheckpoint(
        task_id=task_id,
        checkpoint_id=checkpoint.checkpoint_id,
        message_id=message_id,
        action=action,
        acted_at=now_ms,
        user_id=user_id,
    )


def resume_task(
    task: TaskMetadata, node: TaskNode, now_ms: int, consume: ConsumeCheckpoint | None
) -> TaskStep:
    """The user answered: task RUNNING, ``node`` SUSPENDED → READY.

    ``consume`` None: the checkpoint is consumed by RegisterWrite, in the step that registers the write.
    """
    running = msgspec.structs.replace(
        task, status=TaskStatus.RUNNING, current_node_id=node.node_id, suspended_at=None
    )
    changes: list[StateChange] = [
        PutTask(running),
        PutNode(task.task_id, moved(node, NodeEvent.USER_RESPONDED, now_ms)),
    ]
    if consume is not None:
        changes.insert(0, consume)
    return TaskStep(running, flush=tuple(changes))


def close_task(
    task: TaskMetadata,
    nodes: Sequence[TaskNode],
    status: TaskStatus,
    *,
    final_message: str,
    now_ms: int,
    entities: Mapping[str, EntityEntry] | None = None,
    artifacts: Sequence[ArtifactRef] = (),
    consume: ConsumeCheckpoint | None = None,
) -> TaskStep:
    """The task's end: every open node ends with it (D73), and its record. Only PersistTurn carries it.

    ``nodes``: as they are now, the focus node already moved to its own end.
    """
    closed = msgspec.structs.replace(
        task, status=status, final_message=final_message, suspended_at=None, finished_at=now_ms
    )
    record = TaskRecord(
        task_id=task.task_id,
        agent_id=task.agent_id,
        status=status,
        goal=task.goal_summary,
        summary=final_message[:SUMMARY_MAX_CHARS],
        entities=dict(entities or {}),
        artifacts=list(artifacts),
        closed_at=now_ms,
    )
    changes: list[StateChange] = [] if consume is None else [consume]
    changes += [PutNode(task.task_id, node) for node in closed_with_task(nodes, status, now_ms)]
    changes += [
        PutTask(closed),
        CloseTask(task.task_id, status, record, final_message=final_message, closed_at=now_ms),
    ]
    return TaskStep(closed, persist=tuple(changes))


def abandon_task(
    task: TaskState,
    *,
    final_message: str,
    message_id: str,
    user_id: str,
    now_ms: int,
    entities: Mapping[str, EntityEntry] | None = None,
    artifacts: Sequence[ArtifactRef] = (),
) -> TaskStep:
    """Give the task up for another, or for none: CANCELED; an open checkpoint is answered by CANCEL.

    An UNKNOWN write stays UNKNOWN (D46): its evidence is not touched here.
    """
    consume = None
    if task.checkpoint is not None:
        consume = consumption(
            task.metadata.task_id,
            task.checkpoint,
            action=ResumeAction.CANCEL,
            message_id=message_id,
            user_id=user_id,
            now_ms=now_ms,
        )
    return close_task(
        task.metadata,
        task.nodes,
        TaskStatus.CANCELED,
        final_message=final_message,
        now_ms=now_ms,
        entities=entities,
        artifacts=artifacts,
        consume=consume,
    )


def hand_back(task: TaskMetadata, nodes: Sequence[TaskNode], now_ms: int) -> TaskStep:
    """After a cancel or an interruption: RUNNING nodes READY, task RUNNING, so that the next turn goes on."""
    changes: list[StateChange] = [
        PutNode(task.task_id, moved(node, NodeEvent.INTERRUPTED, now_ms))
        for node in nodes
        if node.status is NodeStatus.RUNNING
    ]
    return TaskStep(task, persist=(*changes, PutTask(task)))
