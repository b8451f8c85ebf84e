"""One node's status: what moves it where, and whether the graph stops (state document 5.11).

Editing rule: a move that is not in ``MOVES`` does not exist; add a row, with the statuses it may
start from.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

import msgspec

from turnfence.axes import NodeStatus
from turnfence.records import TaskNode

S = NodeStatus

SCHEDULABLE = frozenset({S.PENDING, S.READY})
RELEASES_DOWNSTREAM = frozenset({S.DONE, S.SKIPPED})
TERMINAL = frozenset({S.DONE, S.SKIPPED, S.FAILED, S.CANCELLED})
OPEN = frozenset(NodeStatus) - TERMINAL


class NodeEvent(StrEnum):
    # The machine of 5.11.
    SELECTED = "SELECTED"
    LOOP_DONE = "LOOP_DONE"
    LOOP_SUSPENDED = "LOOP_SUSPENDED"
    LOOP_WAITING_DELEGATE = "LOOP_WAITING_DELEGATE"
    LOOP_FAILED = "LOOP_FAILED"
    LOOP_CANCELLED = "LOOP_CANCELLED"
    USER_CANCELLED = "USER_CANCELLED"
    USER_REJECTED = "USER_REJECTED"
    # The moves outside it.
    UPSTREAM_SATISFIED = "UPSTREAM_SATISFIED"
    USER_RESPONDED = "USER_RESPONDED"
    DELEGATE_ENDED = "DELEGATE_ENDED"
    INTERRUPTED = "INTERRUPTED"
    VALUES_PRESENT = "VALUES_PRESENT"
    WRITE_UNKNOWN = "WRITE_UNKNOWN"
    TURN_FAILED = "TURN_FAILED"


class Move(msgspec.Struct, frozen=True):
    """``stops_graph`` holds for planned nodes; a delegate's end never stops the graph."""

    origins: frozenset[NodeStatus]
    to: NodeStatus
    stops_graph: bool = False
    delegate_stops_graph: bool = False


MOVES: Mapping[NodeEvent, Move] = {
    NodeEvent.SELECTED: Move(SCHEDULABLE, S.RUNNING),
    NodeEvent.LOOP_DONE: Move(frozenset({S.RUNNING}), S.DONE),
    NodeEvent.LOOP_SUSPENDED: Move(frozenset({S.RUNNING}), S.SUSPENDED, True, delegate_stops_graph=True),
    NodeEvent.LOOP_WAITING_DELEGATE: Move(frozenset({S.RUNNING}), S.WAITING_DELEGATE),
    NodeEvent.LOOP_FAILED: Move(frozenset({S.RUNNING}), S.FAILED, True),
    NodeEvent.LOOP_CANCELLED: Move(frozenset({S.RUNNING}), S.CANCELLED, True),
    NodeEvent.USER_CANCELLED: Move(OPEN, S.CANCELLED, True),
    NodeEvent.USER_REJECTED: Move(OPEN, S.CANCELLED, True),
    NodeEvent.UPSTREAM_SATISFIED: Move(frozenset({S.PENDING}), S.READY),
    NodeEvent.USER_RESPONDED: Move(frozenset({S.SUSPENDED}), S.READY),
    NodeEvent.DELEGATE_ENDED: Move(frozenset({S.WAITING_DELEGATE}), S.READY),
    NodeEvent.INTERRUPTED: Move(frozenset({S.RUNNING}), S.READY),
    NodeEvent.VALUES_PRESENT: Move(SCHEDULABLE, S.SKIPPED),
    NodeEvent.WRITE_UNKNOWN: Move(SCHEDULABLE | {S.RUNNING}, S.SUSPENDED, True, delegate_stops_graph=True),
    NodeEvent.TURN_FAILED: Move(OPEN, S.FAILED, True, delegate_stops_graph=True),
}


class NodeTransition(msgspec.Struct, frozen=True):
    status: NodeStatus
    stops_graph: bool


class IllegalTransition(Exception):
    """The event does not apply to a node in this status; the node is as it was."""


def transition(status: NodeStatus, event: NodeEvent, *, is_delegate: bool = False) -> NodeTransition:
    """Where the event moves a node in ``status``, and whether the graph stops."""
    move = MOVES[event]
    if status not in move.origins:
        raise IllegalTransition(f"{event} does not apply to a node that is {status}")
    return NodeTransition(move.to, move.delegate_stops_graph if is_delegate else move.stops_graph)


def moved(
    node: TaskNode,
    event: NodeEvent,
    now_ms: int,
    *,
    result: str | None = None,
    error_code: str = "",
    error_message: str = "",
) -> TaskNode:
    """The node after the event: first start and end stamped, its result or error set."""
    status = transition(node.status, event, is_delegate=node.delegate_depth > 0).status
    started_at = now_ms if status is S.RUNNING and node.started_at is None else node.started_at
    return msgspec.structs.replace(
        node,
        status=status,
        result=node.result if result is None else result,
        error_code=error_code or node.error_code,
        error_message=error_message or node.error_message,
        started_at=started_at,
        finished_at=now_ms if status in TERMINAL else None,
    )
