"""Delegation: a node hands a question to a read-only skill and waits for its end (state 5.6)."""

from __future__ import annotations

import json
from collections.abc import Sequence

import msgspec

from harness_service.core.catalogue import Skill
from harness_service.core.graph import NODES_MAX
from harness_service.core.node import NodeEvent, moved
from turnfence.axes import EdgeType, NodeStatus
from turnfence.errors import Reason, TurnfenceError
from turnfence.records import TaskEdge, TaskNode

DELEGATE_MAX_DEPTH = 2


class Delegation(msgspec.Struct, frozen=True):
    """The inserted node, the edge to it, and the initiator: WAITING_DELEGATE, depending on it.

    The story also notes ``notes.AWAITING`` = the delegate's id in the initiator's space.
    """

    delegate: TaskNode
    edge: TaskEdge
    initiator: TaskNode


def check_delegation(
    initiator: TaskNode,
    skill: Skill | None,
    objective: str,
    nodes: Sequence[TaskNode],
    edges: Sequence[TaskEdge],
    *,
    max_depth: int = DELEGATE_MAX_DEPTH,
    nodes_max: int = NODES_MAX,
) -> None:
    """DELEGATE_FORBIDDEN: not offered, too deep, too many nodes, or the same question further up the
    chain (D71). DELEGATE_REPEATED: this initiator's same question has failed before."""
    if skill is None or not skill.delegatable:
        raise TurnfenceError(Reason.DELEGATE_FORBIDDEN, detail="the skill cannot be delegated to")
    if initiator.delegate_depth >= max_depth:
        raise TurnfenceError(Reason.DELEGATE_FORBIDDEN, detail=f"deeper than {max_depth}")
    if len(nodes) >= nodes_max:
        raise TurnfenceError(Reason.DELEGATE_FORBIDDEN, detail=f"more than {nodes_max} nodes")
    asked = (skill.key, normalised(objective))
    if asked in [(node.skill_key, normalised(node.objective)) for node in _chain(initiator, nodes, edges)]:
        raise TurnfenceError(Reason.DELEGATE_FORBIDDEN, detail="the same question is being worked on")
    for earlier in delegates_of(initiator.node_id, nodes, edges):
        failed = earlier.status in (NodeStatus.FAILED, NodeStatus.CANCELLED)
        if failed and asked == (earlier.skill_key, normalised(earlier.objective)):
            raise TurnfenceError(Reason.DELEGATE_REPEATED)


def delegate(initiator: TaskNode, skill: Skill, objective: str, *, node_id: str, now_ms: int) -> Delegation:
    """The changes of a delegation that ``check_delegation`` has allowed; the initiator is RUNNING."""
    waiting = moved(initiator, NodeEvent.LOOP_WAITING_DELEGATE, now_ms)
    return Delegation(
        delegate=TaskNode(
            node_id=node_id,
            title=skill.title,
            objective=objective,
            skill_key=skill.key,
            status=NodeStatus.READY,
            delegate_depth=initiator.delegate_depth + 1,
        ),
        edge=TaskEdge(node_id, initiator.node_id, EdgeType.DELEGATE),
        initiator=msgspec.structs.replace(waiting, depends_on=[*waiting.depends_on, node_id]),
    )


def delegates_of(node_id: str, nodes: Sequence[TaskNode], edges: Sequence[TaskEdge]) -> list[TaskNode]:
    """The nodes that ``node_id`` delegated to, directly."""
    ids = {e.from_node_id for e in edges if e.type is EdgeType.DELEGATE and e.to_node_id == node_id}
    return [node for node in nodes if node.node_id in ids]


def family_of(node_id: str, nodes: Sequence[TaskNode], edges: Sequence[TaskEdge]) -> set[str]:
    """The node and all it delegated to, at any depth: whose evidence counts for its target."""
    family = {node_id}
    for child in delegates_of(node_id, nodes, edges):
        if child.node_id not in family:
            family |= family_of(child.node_id, nodes, edges)
    return family


def failed_result(delegate_node: TaskNode) -> str:
    """The note for the initiator when a delegate did not succeed; shown to the model once (D74)."""
    return json.dumps(
        {
            "node_id": delegate_node.node_id,
            "skill": delegate_node.skill_key,
            "objective": delegate_node.objective,
            "status": delegate_node.status.value,
            "error": delegate_node.error_message or delegate_node.error_code,
        },
        ensure_ascii=False,
    )


def normalised(objective: str) -> str:
    """An objective for comparison: case and spacing do not make it another question."""
    return " ".join(objective.casefold().split())


def _chain(initiator: TaskNode, nodes: Sequence[TaskNode], edges: Sequence[TaskEdge]) -> list[TaskNode]:
    """The initiator and those who are waiting for it, upwards."""
    by_id = {node.node_id: node for node in nodes}
    chain, current = [initiator], initiator.node_id
    while len(chain) <= len(nodes):
        above = [
            by_id[e.to_node_id]
            for e in edges
            if e.type is EdgeType.DELEGATE and e.from_node_id == current and e.to_node_id in by_id
        ]
        if not above:
            break
        chain.append(above[0])
        current = above[0].node_id
    return chain
