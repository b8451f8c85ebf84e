"""The task plan (catalogue design)."""

import itertools
import json
from typing import Any

import pytest

from harness_service.core.catalogue import Agent, Catalogue, Skill, ToolContract
from harness_service.core.plan import TASK_PLAN_SCHEMA, InvalidPlan, parse_plan, single_node
from turnfence.axes import EdgeType, NodeStatus, SideEffect
from turnfence.records import TaskEdge

READ = ToolContract("ops.read", "ops", "read")
WRITE = ToolContract("ops.write", "ops", "write", side_effect=SideEffect.WRITE)
SKILLS = {
    "look": Skill("look", title="Look", objective="look around", tools=("ops.read",)),
    "act": Skill("act", tools=("ops.read", "ops.write"), target="ops.write"),
    "other": Skill("other"),
}
AGENT = Agent("ops", skills=("look", "act"))
CATALOGUE = Catalogue({"ops": AGENT}, SKILLS, {"ops.read": READ, "ops.write": WRITE}, {})


def ids() -> Any:
    counter = itertools.count(1)
    return lambda: f"n{next(counter)}"


def node(key: Any, skill: Any = "look", **more: Any) -> Any:
    return {
        "key": key,
        "title": "",
        "objective": "",
        "skill": skill,
        "target": None,
        "depends_on": [],
        **more,
    }


def plan(*nodes: Any) -> Any:
    return parse_plan(json.dumps({"nodes": nodes}), AGENT, CATALOGUE, ids())


def test_a_plan() -> None:
    made = plan(node("a", objective="find it"), node("b", "act", title="Do", depends_on=["a", "a"]))
    first, second = made.nodes
    assert (first.node_id, first.title, first.objective, first.status) == (
        "n1",
        "Look",
        "find it",
        NodeStatus.READY,
    )
    assert (second.title, second.target, second.status, second.depends_on) == (
        "Do",
        "ops.write",
        NodeStatus.PENDING,
        ["n1"],
    )
    assert made.edges == (TaskEdge("n1", "n2", EdgeType.NORMAL),)


@pytest.mark.parametrize(
    "nodes",
    [
        pytest.param([], id="nothing"),
        pytest.param([node("a", "other")], id="not-the-agents-skill"),
        pytest.param([node("a", "nowhere")], id="no-skill"),
        pytest.param([node("a"), node("a")], id="same-key"),
        pytest.param([node("a", depends_on=["x"])], id="unknown-dependency"),
        pytest.param([node("a", depends_on=["b"]), node("b", depends_on=["a"])], id="cycle"),
        pytest.param([node("a", target="ops.write")], id="target-not-in-skill"),
        pytest.param([node("a", "act", target="ops.read")], id="target-no-write"),
        pytest.param([node("a", extra=1)], id="unknown-key"),
        pytest.param([node(str(i)) for i in range(65)], id="too-many"),
    ],
)
def test_what_cannot_run_is_no_plan(nodes: Any) -> None:
    with pytest.raises(InvalidPlan):
        plan(*nodes)


def test_not_even_json() -> None:
    with pytest.raises(InvalidPlan):
        parse_plan("let me think", AGENT, CATALOGUE, ids())


def test_one_skill_needs_no_model() -> None:
    made = single_node(Agent("desk", skills=("act",)), CATALOGUE, "do it", ids())
    assert [(n.node_id, n.skill_key, n.objective, n.target) for n in made.nodes] == [
        ("n1", "act", "do it", "ops.write")
    ]


def test_the_schema_asks_for_all() -> None:
    item = TASK_PLAN_SCHEMA["properties"]["nodes"]["items"]
    assert set(item["required"]) == set(item["properties"]) == set(node("a"))
