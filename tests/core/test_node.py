"""State document 3.2 (NodeStatus) and 5.11 (transitions), every cell."""

from typing import Any

import pytest

from harness_service.core.node import (
    MOVES,
    OPEN,
    RELEASES_DOWNSTREAM,
    SCHEDULABLE,
    TERMINAL,
    IllegalTransition,
    NodeEvent,
    moved,
    transition,
)
from turnfence.axes import NodeStatus
from turnfence.records import TaskNode

S, E = NodeStatus, NodeEvent


@pytest.mark.parametrize(
    ("status", "schedulable", "releases", "terminal"),
    [
        pytest.param(S.PENDING, True, False, False, id="state-3.2-node-1"),
        pytest.param(S.READY, True, False, False, id="state-3.2-node-2"),
        pytest.param(S.RUNNING, False, False, False, id="state-3.2-node-3"),
        pytest.param(S.WAITING_DELEGATE, False, False, False, id="state-3.2-node-4"),
        pytest.param(S.SUSPENDED, False, False, False, id="state-3.2-node-5"),
        pytest.param(S.DONE, False, True, True, id="state-3.2-node-6"),
        pytest.param(S.SKIPPED, False, True, True, id="state-3.2-node-7"),
        pytest.param(S.FAILED, False, False, True, id="state-3.2-node-8"),
        pytest.param(S.CANCELLED, False, False, True, id="state-3.2-node-9"),
    ],
)
def test_what_a_status_allows(status: Any, schedulable: Any, releases: Any, terminal: Any) -> None:
    assert (status in SCHEDULABLE, status in RELEASES_DOWNSTREAM, status in TERMINAL) == (
        schedulable,
        releases,
        terminal,
    )


@pytest.mark.parametrize(
    ("event", "origin", "to", "stops", "stops_as_delegate"),
    [
        pytest.param(E.SELECTED, S.READY, S.RUNNING, False, False, id="state-5.11-1"),
        pytest.param(E.LOOP_DONE, S.RUNNING, S.DONE, False, False, id="state-5.11-2"),
        pytest.param(E.LOOP_SUSPENDED, S.RUNNING, S.SUSPENDED, True, True, id="state-5.11-3"),
        pytest.param(E.LOOP_WAITING_DELEGATE, S.RUNNING, S.WAITING_DELEGATE, False, False, id="state-5.11-4"),
        pytest.param(E.LOOP_FAILED, S.RUNNING, S.FAILED, True, False, id="state-5.11-5"),
        pytest.param(E.LOOP_CANCELLED, S.RUNNING, S.CANCELLED, True, False, id="state-5.11-6-loop"),
        pytest.param(E.USER_CANCELLED, S.SUSPENDED, S.CANCELLED, True, False, id="state-5.11-6-cancel"),
        pytest.param(E.USER_REJECTED, S.SUSPENDED, S.CANCELLED, True, False, id="state-5.11-6-reject"),
        pytest.param(E.UPSTREAM_SATISFIED, S.PENDING, S.READY, False, False, id="state-5.11-outside-1"),
        pytest.param(E.USER_RESPONDED, S.SUSPENDED, S.READY, False, False, id="state-5.11-outside-2"),
        pytest.param(E.DELEGATE_ENDED, S.WAITING_DELEGATE, S.READY, False, False, id="state-5.11-outside-3"),
        pytest.param(E.INTERRUPTED, S.RUNNING, S.READY, False, False, id="state-5.11-outside-4"),
        pytest.param(E.VALUES_PRESENT, S.PENDING, S.SKIPPED, False, False, id="state-5.11-outside-5"),
        pytest.param(E.WRITE_UNKNOWN, S.READY, S.SUSPENDED, True, True, id="state-5.11-outside-6"),
        pytest.param(E.TURN_FAILED, S.RUNNING, S.FAILED, True, True, id="state-5.11-outside-7"),
    ],
)
def test_moves(event: Any, origin: Any, to: Any, stops: Any, stops_as_delegate: Any) -> None:
    assert (transition(origin, event).status, transition(origin, event).stops_graph) == (to, stops)
    assert transition(origin, event, is_delegate=True).stops_graph is stops_as_delegate


@pytest.mark.parametrize("event", E)
@pytest.mark.parametrize("status", S)
def test_every_cell(event: Any, status: Any) -> None:
    if status in MOVES[event].origins:
        assert transition(status, event).status is MOVES[event].to
    else:
        with pytest.raises(IllegalTransition):
            transition(status, event)


@pytest.mark.parametrize("event", E)
@pytest.mark.parametrize("status", sorted(TERMINAL))
def test_an_end_is_final(event: Any, status: Any) -> None:
    with pytest.raises(IllegalTransition):
        transition(status, event)


def test_open_and_terminal_are_all() -> None:
    assert set(S) == OPEN | TERMINAL
    assert not OPEN & TERMINAL


def test_a_node_keeps_its_first_start_and_gets_its_end() -> None:
    node = moved(TaskNode("n", status=S.READY), E.SELECTED, 5)
    node = moved(moved(node, E.INTERRUPTED, 6), E.SELECTED, 7)
    assert (node.started_at, node.finished_at) == (5, None)
    node = moved(node, E.LOOP_DONE, 9, result="{}")
    assert (node.status, node.finished_at, node.result) == (S.DONE, 9, "{}")


def test_a_failed_node_says_why() -> None:
    node = moved(TaskNode("n", status=S.RUNNING), E.LOOP_FAILED, 5, error_code="X", error_message="y")
    assert (node.status, node.error_code, node.error_message) == (S.FAILED, "X", "y")
