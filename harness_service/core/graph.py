"""The task graph: which node runs next, which are blocked, what a task's end does to the rest.

One node at a time today; ``runnable`` returns all that could run, so nothing assumes it stays one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from harness_service.core.node import RELEASES_DOWNSTREAM, SCHEDULABLE, TERMINAL, NodeEvent, moved
from turnfence.axes import EdgeType, NodeStatus, TaskStatus
from turnfence.errors import Reason, TurnfenceError
from turnfence.records import TaskEdge, TaskNode

NODES_MAX = 64


class InvalidGraph(ValueError):
    """A plan that is no DAG over its own nodes, or is too large."""


def check_graph(nodes: Sequence[TaskNode], edges: Sequence[TaskEdge], nodes_max: int = NODES_MAX) -> None:
    """Raise InvalidGraph for duplicate or unknown nodes, self edges, cycles, none or too many nodes."""
    ids = [node.node_id for node in nodes]
    if not ids:
        raise InvalidGraph("a task needs at least one node")
    if len(ids) > nodes_max:
        raise InvalidGraph(f"{len(ids)} nodes are more than {nodes_max}")
    if len(set(ids)) != len(ids):
        raise InvalidGraph("two nodes have the same id")
    for edge in edges:
        if edge.from_node_id == edge.to_node_id:
            raise InvalidGraph(f"node {edge.from_node_id} depends on itself")
        if not {edge.from_node_id, edge.to_node_id} <= set(ids):
            raise InvalidGraph(f"edge {edge.from_node_id} → {edge.to_node_id} names an unknown node")
    if has_cycle(ids, edges):
        raise InvalidGraph("the nodes depend on each other in a circle")


def has_cycle(node_ids: Iterable[str], edges: Sequence[TaskEdge]) -> bool:
    """Whether the edges close a circle (Kahn's algorithm)."""
    waiting_for = {
        node_id: {edge.from_node_id for edge in edges if edge.to_node_id == node_id} for node_id in node_ids
    }
    while free := [node_id for node_id, upstream in waiting_for.items() if not upstream]:
        for node_id in free:
            del waiting_for[node_id]
        for upstream in waiting_for.values():
            upstream.difference_update(free)
    return bool(waiting_for)


def is_satisfied(node: TaskNode, status_of: Mapping[str, NodeStatus], edges: Sequence[TaskEdge]) -> bool:
    """Whether every upstream lets the node run: NORMAL when DONE or SKIPPED, DELEGATE at any end."""
    allowing = {EdgeType.NORMAL: RELEASES_DOWNSTREAM, EdgeType.DELEGATE: TERMINAL}
    return all(
        status_of[edge.from_node_id] in allowing[edge.type]
        for edge in edges
        if edge.to_node_id == node.node_id
    )


def advanced(nodes: Sequence[TaskNode], edges: Sequence[TaskEdge], now_ms: int) -> list[TaskNode]:
    """The nodes that an end upstream makes READY, already moved: PENDING and WAITING_DELEGATE ones."""
    status_of = {node.node_id: node.status for node in nodes}
    events = {
        NodeStatus.PENDING: NodeEvent.UPSTREAM_SATISFIED,
        NodeStatus.WAITING_DELEGATE: NodeEvent.DELEGATE_ENDED,
    }
    return [
        moved(node, events[node.status], now_ms)
        for node in nodes
        if node.status in events and is_satisfied(node, status_of, edges)
    ]


def runnable(nodes: Sequence[TaskNode], edges: Sequence[TaskEdge]) -> list[TaskNode]:
    """The nodes that may be selected now: delegates first (somebody waits for them), then plan order."""
    status_of = {node.node_id: node.status for node in nodes}
    free = [node for node in nodes if node.status in SCHEDULABLE and is_satisfied(node, status_of, edges)]
    return sorted(free, key=lambda node: -node.delegate_depth)


def next_node(nodes: Sequence[TaskNode], edges: Sequence[TaskEdge]) -> TaskNode | None:
    """The one node to run next, or None: all ended, or the rest is blocked."""
    return next(iter(runnable(nodes, edges)), None)


def blocked(nodes: Sequence[TaskNode], edges: Sequence[TaskEdge]) -> list[TaskNode]:
    """Schedulable nodes that no further run can free, since something upstream FAILED or was CANCELLED."""
    dead = {node.node_id for node in nodes if node.status in (NodeStatus.FAILED, NodeStatus.CANCELLED)}
    hopeless: set[str] = set()
    while (
        grown := {
            edge.to_node_id
            for edge in edges
            if edge.type is EdgeType.NORMAL and edge.from_node_id in dead | hopeless
        }
        - hopeless
    ):
        hopeless |= grown
    return [node for node in nodes if node.node_id in hopeless and node.status in SCHEDULABLE]


def all_ended(nodes: Sequence[TaskNode]) -> bool:
    return all(node.status in TERMINAL for node in nodes)


def closed_with_task(nodes: Sequence[TaskNode], task_status: TaskStatus, now_ms: int) -> list[TaskNode]:
    """The nodes that a task's end ends too (D73), already moved.

    Never run and not needed any more: SKIPPED when the task SUCCEEDED; everything else: CANCELLED.
    """
    if task_status not in (TaskStatus.SUCCEEDED, TaskStatus.FAILED, TaskStatus.CANCELED):
        raise ValueError(f"{task_status} is no end of a task")
    return [
        moved(
            node,
            NodeEvent.VALUES_PRESENT
            if task_status is TaskStatus.SUCCEEDED and node.status in SCHEDULABLE
            else NodeEvent.USER_CANCELLED,
            now_ms,
        )
        for node in nodes
        if node.status not in TERMINAL
    ]


def check_loaded(nodes: Sequence[TaskNode], edges: Sequence[TaskEdge], current_node_id: str) -> None:
    """A graph that came from the store must make sense, else DELEGATE_BROKEN (D75), not a loop."""
    ids = {node.node_id for node in nodes}
    waiting = {node.node_id for node in nodes if node.status is NodeStatus.WAITING_DELEGATE}
    delegated = {edge.to_node_id for edge in edges if edge.type is EdgeType.DELEGATE}
    sound = (
        all({edge.from_node_id, edge.to_node_id} <= ids for edge in edges)
        and (not current_node_id or not nodes or current_node_id in ids)
        and waiting <= delegated
        and not has_cycle(ids, edges)
    )
    if not sound:
        raise TurnfenceError(Reason.DELEGATE_BROKEN)
