"""State document 5.6, D71."""

import json
from typing import Any

import pytest

from harness_service.core.catalogue import Skill
from harness_service.core.delegation import (
    check_delegation,
    delegate,
    delegates_of,
    failed_result,
    family_of,
    normalised,
)
from harness_service.core.notes import AWAITING, is_reserved
from turnfence.axes import EdgeType, NodeStatus
from turnfence.errors import Reason, TurnfenceError
from turnfence.records import TaskEdge, TaskNode

SKILL = Skill("look", title="Look", delegatable=True)
INITIATOR = TaskNode("i", skill_key="main", objective="Find it", status=NodeStatus.RUNNING)


def refused(
    initiator: Any, skill: Any, objective: Any, nodes: Any = (), edges: Any = (), **limits: Any
) -> Any:
    with pytest.raises(TurnfenceError) as error:
        check_delegation(initiator, skill, objective, list(nodes), list(edges), **limits)
    return error.value.reason


def child(node_id: Any, status: Any, objective: Any = "why?", skill: Any = "look", depth: Any = 1) -> Any:
    return TaskNode(node_id, skill_key=skill, objective=objective, status=status, delegate_depth=depth)


@pytest.mark.parametrize("skill", [None, Skill("x", delegatable=False)])
def test_only_what_is_offered(skill: Any) -> None:
    assert refused(INITIATOR, skill, "q") is Reason.DELEGATE_FORBIDDEN


def test_only_so_deep_and_so_many() -> None:
    deep = child("d", NodeStatus.RUNNING, depth=2)
    assert refused(deep, SKILL, "q") is Reason.DELEGATE_FORBIDDEN
    check_delegation(deep, SKILL, "q", [deep], [], max_depth=3)
    many = [TaskNode(str(i)) for i in range(64)]
    assert refused(INITIATOR, SKILL, "q", many) is Reason.DELEGATE_FORBIDDEN


@pytest.mark.parametrize("status", [NodeStatus.FAILED, NodeStatus.CANCELLED])
def test_what_failed_is_not_asked_again(status: Any) -> None:
    edge = TaskEdge("d", "i", EdgeType.DELEGATE)
    nodes = [INITIATOR, child("d", status)]
    assert refused(INITIATOR, SKILL, "  WHY? ", nodes, [edge]) is Reason.DELEGATE_REPEATED
    check_delegation(INITIATOR, SKILL, "where?", nodes, [edge])


def test_what_succeeded_may_be_asked_again() -> None:
    edge = TaskEdge("d", "i", EdgeType.DELEGATE)
    check_delegation(INITIATOR, SKILL, "why?", [INITIATOR, child("d", NodeStatus.DONE)], [edge])


def test_D71_nobody_asks_what_somebody_above_is_asking() -> None:
    top = TaskNode("i", skill_key="look", objective="Find  it", status=NodeStatus.WAITING_DELEGATE)
    below = child("d", NodeStatus.RUNNING, objective="other", skill="other")
    edge = TaskEdge("d", "i", EdgeType.DELEGATE)
    assert refused(below, SKILL, "find it", [top, below], [edge]) is Reason.DELEGATE_FORBIDDEN
    check_delegation(below, SKILL, "something else", [top, below], [edge])


def test_the_graph_after_a_delegation() -> None:
    made = delegate(INITIATOR, SKILL, "why?", node_id="d", now_ms=3)
    assert (made.delegate.status, made.delegate.delegate_depth) == (NodeStatus.READY, 1)
    assert made.edge == TaskEdge("d", "i", EdgeType.DELEGATE)
    assert made.initiator.status is NodeStatus.WAITING_DELEGATE
    assert made.initiator.depends_on == ["d"]
    assert delegates_of("i", [made.delegate, made.initiator], [made.edge]) == [made.delegate]


def test_the_family_reaches_all_depths() -> None:
    nodes = [INITIATOR, child("d", NodeStatus.DONE), child("e", NodeStatus.DONE, depth=2), TaskNode("x")]
    edges = [
        TaskEdge("d", "i", EdgeType.DELEGATE),
        TaskEdge("e", "d", EdgeType.DELEGATE),
        TaskEdge("x", "i", EdgeType.NORMAL),
    ]
    assert family_of("i", nodes, edges) == {"i", "d", "e"}


def test_a_failed_delegate_leaves_a_note() -> None:
    note = json.loads(failed_result(child("d", NodeStatus.FAILED)))
    assert (note["status"], note["objective"]) == ("FAILED", "why?")
    assert normalised(" A  b ") == "a b"


def test_reserved_notes() -> None:
    assert is_reserved(AWAITING)
    assert is_reserved("fact:e1")
    assert not is_reserved("mine")
