"""State document 4, 5.3, 5.8; "What each end leaves behind"."""

from typing import Any

import pytest

from harness_service.core.task import (
    LEFT_BEHIND,
    LeftBehind,
    RunEnd,
    abandon_task,
    close_task,
    consumption,
    focus_on,
    hand_back,
    open_task,
    resume_task,
    run_end,
    suspend_task,
)
from turnfence.axes import (
    CheckpointType,
    NodeStatus,
    ReleaseOutcome,
    ResumeAction,
    RunState,
    TaskStatus,
    TerminationReason,
    TurnStatus,
)
from turnfence.records import (
    CloseTask,
    ConsumeCheckpoint,
    Prior,
    PutCheckpoint,
    PutConversation,
    PutNode,
    PutPrior,
    PutTask,
    TaskCheckpoint,
    TaskMetadata,
    TaskNode,
    TaskState,
)

TASK = TaskMetadata("t", TaskStatus.RUNNING, agent_id="ops", goal_summary="goal")
CHECKPOINT = TaskCheckpoint("cp", CheckpointType.APPROVAL, "n")
N, T, U = NodeStatus, TaskStatus, TurnStatus


@pytest.mark.parametrize(
    ("end", "node", "task", "turn"),
    [
        pytest.param(RunEnd.RELEASED, N.DONE, T.SUCCEEDED, U.DONE, id="harness-ends-1"),
        pytest.param(RunEnd.SUSPENDED, N.SUSPENDED, T.SUSPENDED, U.WAITING, id="harness-ends-2"),
        pytest.param(RunEnd.ENDED_BY_USER, N.CANCELLED, T.CANCELED, U.CANCELLED, id="harness-ends-3"),
        pytest.param(RunEnd.BUDGET_FALLBACK, N.FAILED, T.FAILED, U.FAILED, id="harness-ends-4"),
        pytest.param(RunEnd.FAILED, N.FAILED, T.FAILED, U.FAILED, id="harness-ends-5"),
        pytest.param(RunEnd.CANCELLED, N.READY, T.RUNNING, U.CANCELLED, id="harness-ends-6-cancelled"),
        pytest.param(RunEnd.INTERRUPTED, N.READY, T.RUNNING, U.FAILED, id="harness-ends-6-interrupted"),
        pytest.param(RunEnd.FENCED, None, None, U.FAILED, id="harness-ends-7"),
        pytest.param(RunEnd.UNTOUCHED, None, None, None, id="harness-ends-8"),
        pytest.param(RunEnd.FAILED_BESIDE, None, None, U.FAILED, id="failed-beside-a-task"),
    ],
)
def test_what_each_end_leaves_behind(end: Any, node: Any, task: Any, turn: Any) -> None:
    assert LEFT_BEHIND[end] == LeftBehind(node, task, turn)
    assert set(LEFT_BEHIND) == set(RunEnd)


S, R, O = RunState, TerminationReason, ReleaseOutcome  # noqa: E741


@pytest.mark.parametrize(
    ("state", "reason", "outcome", "known", "end"),
    [
        (S.SUCCESS, R.COMPLETED, O.SUCCESS, {}, RunEnd.RELEASED),
        (S.SUCCESS, R.COMPLETED, O.FALLBACK, {}, RunEnd.RELEASED),
        (S.SUCCESS, R.COMPLETED, O.SUCCESS, {"suspended": True}, RunEnd.SUSPENDED),
        (S.SUCCESS, R.COMPLETED, O.SUCCESS, {"ended_by_user": True}, RunEnd.ENDED_BY_USER),
        (S.SUCCESS, R.COMPLETED, O.SUCCESS, {"task_touched": False}, RunEnd.UNTOUCHED),
        (S.BUDGET_EXHAUSTED, R.BUDGET_EXHAUSTED, O.FALLBACK, {}, RunEnd.BUDGET_FALLBACK),
        (S.BUDGET_EXHAUSTED, R.BUDGET_EXHAUSTED, O.FAILED, {}, RunEnd.FAILED),
        (S.TIMED_OUT, R.DEADLINE_EXCEEDED, O.FAILED, {}, RunEnd.FAILED),
        (S.FAILED, R.INTERNAL_FAILURE, O.FAILED, {}, RunEnd.FAILED),
        (S.FAILED, R.MODEL_FAILED, O.FAILED, {"task_touched": False}, RunEnd.FAILED_BESIDE),
        (S.CANCELLED, R.USER_REQUESTED, O.CANCELLED, {}, RunEnd.CANCELLED),
        (S.CANCELLED, R.CLIENT_DISCONNECTED, O.CANCELLED, {}, RunEnd.CANCELLED),
        (S.FAILED, R.SHUTDOWN, O.FAILED, {}, RunEnd.INTERRUPTED),
        (S.FAILED, R.INTERRUPTED, O.FAILED, {}, RunEnd.INTERRUPTED),
        (S.FAILED, R.STATE_UNAVAILABLE, O.FAILED, {}, RunEnd.INTERRUPTED),
        (S.FAILED, R.FENCED, O.FAILED, {}, RunEnd.FENCED),
    ],
)
def test_which_end_a_run_is(state: Any, reason: Any, outcome: Any, known: Any, end: Any) -> None:
    assert run_end(state, reason, outcome, **known) is end


def opened(prior: Any = None) -> Any:
    return open_task(
        task_id="t",
        agent_id="ops",
        goal_summary="goal",
        request="the user's words",
        run_id="r",
        source_message_id="m",
        now_ms=5,
        prior=prior,
    )


def test_open() -> None:
    step = opened()
    assert step.flush == (PutTask(step.metadata), PutConversation(active_task_id="t"))
    assert step.persist == ()
    assert (step.metadata.trace_id, step.metadata.request, step.metadata.started_at) == (
        "r",
        "the user's words",
        5,
    )
    assert opened(Prior(reason="x")).flush[-1] == PutPrior("t", Prior(reason="x"))


def test_focus() -> None:
    step = focus_on(TASK, TaskNode("n"))
    assert step.metadata.current_node_id == "n"
    assert step.flush == (PutTask(step.metadata), PutNode("t", TaskNode("n")))


def test_a_suspension_travels_with_its_prompt() -> None:
    node = TaskNode("n", status=N.SUSPENDED)
    step = suspend_task(TASK, node, CHECKPOINT, 9)
    assert step.flush == ()
    assert step.persist == (PutTask(step.metadata), PutNode("t", node), PutCheckpoint("t", CHECKPOINT))
    assert (step.metadata.status, step.metadata.suspended_at, step.metadata.current_node_id) == (
        T.SUSPENDED,
        9,
        "n",
    )
    with pytest.raises(ValueError, match="SUSPENDED node"):
        suspend_task(TASK, TaskNode("n"), CHECKPOINT, 9)


def answered() -> Any:
    return consumption("t", CHECKPOINT, action=ResumeAction.CONFIRM, message_id="m", user_id="u", now_ms=3)


@pytest.mark.parametrize("consume", [True, False])
def test_resume(consume: Any) -> None:
    suspended = TaskMetadata("t", T.SUSPENDED, suspended_at=1)
    step = resume_task(suspended, TaskNode("n", status=N.SUSPENDED), 4, answered() if consume else None)
    assert (step.metadata.status, step.metadata.suspended_at) == (T.RUNNING, None)
    assert PutNode("t", TaskNode("n", status=N.READY)) in step.flush
    assert (answered() in step.flush) is consume
    assert step.persist == ()


@pytest.mark.parametrize("status", [T.SUCCEEDED, T.FAILED, T.CANCELED])
def test_close(status: Any) -> None:
    nodes = [TaskNode("a", status=N.DONE), TaskNode("b", status=N.READY)]
    step = close_task(TASK, nodes, status, final_message="the reply", now_ms=8)
    assert step.flush == (), "a task's close travels only in PersistTurn"
    (closed,) = [change for change in step.persist if isinstance(change, CloseTask)]
    assert (closed.status, closed.final_message, closed.record.goal) == (status, "the reply", "goal")
    assert closed.record.closed_at == 8
    assert [c.node.node_id for c in step.persist if isinstance(c, PutNode)] == ["b"]


@pytest.mark.parametrize("checkpoint", [CHECKPOINT, None])
def test_abandon(checkpoint: Any) -> None:
    task = TaskState(TASK, nodes=[TaskNode("n", status=N.SUSPENDED)], checkpoint=checkpoint)
    step = abandon_task(task, final_message="given up", message_id="m", user_id="u", now_ms=8)
    assert step.metadata.status is T.CANCELED
    (node,) = [change.node for change in step.persist if isinstance(change, PutNode)]
    assert node.status is N.CANCELLED
    consumed = [change for change in step.persist if isinstance(change, ConsumeCheckpoint)]
    assert [(c.action, c.checkpoint_id, c.message_id) for c in consumed] == (
        [(ResumeAction.CANCEL, "cp", "m")] if checkpoint else []
    )


def test_hand_back() -> None:
    nodes = [TaskNode("a", status=N.RUNNING), TaskNode("b", status=N.PENDING)]
    step = hand_back(TASK, nodes, 3)
    assert step.persist == (PutNode("t", TaskNode("a", status=N.READY)), PutTask(TASK))
