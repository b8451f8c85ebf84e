"""The task graph: state document 3.2, 5.11, D73, D75, C130."""

from typing import Any

import pytest

from harness_service.core.graph import (
    InvalidGraph,
    advanced,
    all_ended,
    blocked,
    check_graph,
    check_loaded,
    closed_with_task,
    has_cycle,
    next_node,
    runnable,
)
from harness_service.core.node import TERMINAL
from turnfence.axes import EdgeType, NodeStatus, TaskStatus
from turnfence.errors import Reason, TurnfenceError
from turnfence.records import TaskEdge, TaskNode

S = NodeStatus


def node(node_id: Any, status: Any = S.PENDING, depth: Any = 0) -> Any:
    return TaskNode(node_id, status=status, delegate_depth=depth)


def normal(upstream: Any, downstream: Any) -> Any:
    return TaskEdge(upstream, downstream, EdgeType.NORMAL)


def delegated(delegate: Any, initiator: Any) -> Any:
    return TaskEdge(delegate, initiator, EdgeType.DELEGATE)


@pytest.mark.parametrize("upstream", S)
def test_state_3_2_edge_normal(upstream: Any) -> None:
    """A normal edge lets the downstream run when the upstream is DONE or SKIPPED."""
    nodes = [node("a", upstream), node("b")]
    free = [n.node_id for n in advanced(nodes, [normal("a", "b")], 1) if n.node_id == "b"]
    assert free == (["b"] if upstream in (S.DONE, S.SKIPPED) else [])


@pytest.mark.parametrize("delegate", S)
def test_state_3_2_edge_delegate(delegate: Any) -> None:
    """A delegate's edge lets the initiator go on at any end of the delegate."""
    nodes = [node("d", delegate, 1), node("i", S.WAITING_DELEGATE)]
    free = [n for n in advanced(nodes, [delegated("d", "i")], 1) if n.node_id == "i"]
    assert [n.status for n in free] == ([S.READY] if delegate in TERMINAL else [])


def test_all_upstreams_count() -> None:
    edges = [normal("a", "c"), normal("b", "c")]
    assert next_node([node("a", S.DONE), node("b", S.RUNNING), node("c")], edges) is None
    found = next_node([node("a", S.DONE), node("b", S.SKIPPED), node("c")], edges)
    assert found is not None
    assert found.node_id == "c"


def test_one_at_a_time_in_plan_order_delegates_first() -> None:
    nodes = [node("a", S.READY), node("b"), node("d", S.READY, 1), node("r", S.RUNNING)]
    assert [n.node_id for n in runnable(nodes, [])] == ["d", "a", "b"]
    chosen = next_node(nodes, [])
    assert chosen is not None
    assert chosen.node_id == "d"


def test_what_hangs_on_a_failure_is_blocked() -> None:
    nodes = [node("a", S.FAILED), node("b"), node("c"), node("x")]
    edges = [normal("a", "b"), normal("b", "c")]
    assert [n.node_id for n in blocked(nodes, edges)] == ["b", "c"]
    assert blocked([node("d", S.FAILED, 1), node("i", S.READY)], [delegated("d", "i")]) == []


@pytest.mark.parametrize("task", [TaskStatus.SUCCEEDED, TaskStatus.FAILED, TaskStatus.CANCELED])
def test_D73_a_tasks_end_ends_every_node(task: Any) -> None:
    closed = closed_with_task([node(s.value, s) for s in S], task, 7)
    open_ones = [s for s in S if s not in TERMINAL]
    assert [n.node_id for n in closed] == [s.value for s in open_ones]
    unneeded = S.SKIPPED if task is TaskStatus.SUCCEEDED else S.CANCELLED
    expected = {s.value: unneeded if s in (S.PENDING, S.READY) else S.CANCELLED for s in open_ones}
    assert {n.node_id: n.status for n in closed} == expected
    assert all(n.finished_at == 7 for n in closed)


@pytest.mark.parametrize("task", [TaskStatus.RUNNING, TaskStatus.SUSPENDED])
def test_only_an_end_closes(task: Any) -> None:
    with pytest.raises(ValueError, match="no end of a task"):
        closed_with_task([], task, 1)


@pytest.mark.parametrize(
    ("nodes", "edges", "fault"),
    [
        pytest.param([], [], "at least one", id="C130-empty"),
        pytest.param([node(str(i)) for i in range(65)], [], "more than 64", id="C130-too-many"),
        pytest.param([node("a"), node("a")], [], "same id", id="C130-duplicate"),
        pytest.param([node("a")], [normal("a", "a")], "itself", id="C130-self"),
        pytest.param([node("a")], [normal("x", "a")], "unknown", id="C130-unknown"),
        pytest.param([node("a"), node("b")], [normal("a", "b"), normal("b", "a")], "circle", id="C130-cycle"),
    ],
)
def test_bad_graphs(nodes: Any, edges: Any, fault: Any) -> None:
    with pytest.raises(InvalidGraph, match=fault):
        check_graph(nodes, edges)


def test_a_diamond_is_fine() -> None:
    edges = [normal("a", "b"), normal("a", "c"), normal("b", "d"), normal("c", "d")]
    check_graph([node(x) for x in "abcd"], edges)
    assert not has_cycle("abcd", edges)
    assert has_cycle("abcd", [*edges, normal("d", "a")])


@pytest.mark.parametrize(
    ("nodes", "edges", "current"),
    [
        pytest.param([node("a")], [], "lost", id="D75-current-missing"),
        pytest.param([node("a")], [normal("lost", "a")], "a", id="D75-edge-to-nothing"),
        pytest.param([node("a", S.WAITING_DELEGATE)], [], "a", id="D75-waits-for-nobody"),
        pytest.param([node("a"), node("b")], [normal("a", "b"), normal("b", "a")], "a", id="D75-cycle"),
    ],
)
def test_a_broken_graph_is_said_to_be_broken(nodes: Any, edges: Any, current: Any) -> None:
    with pytest.raises(TurnfenceError) as error:
        check_loaded(nodes, edges, current)
    assert error.value.reason is Reason.DELEGATE_BROKEN


def test_a_sound_graph_loads() -> None:
    check_loaded([], [], "")
    check_loaded([node("i", S.WAITING_DELEGATE), node("d", S.READY, 1)], [delegated("d", "i")], "i")


def test_all_ended() -> None:
    assert all_ended([node("a", S.DONE), node("b", S.CANCELLED)])
    assert not all_ended([node("a", S.DONE), node("b", S.READY)])
