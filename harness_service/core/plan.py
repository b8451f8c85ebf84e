"""The task plan: a model's reply → nodes and edges that can run (catalogue design, ``task_plan``)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from harness_service.core.canonical import JsonRefused, parse_json
from harness_service.core.catalogue import Agent, Catalogue
from harness_service.core.graph import NODES_MAX, InvalidGraph, check_graph
from turnfence.axes import EdgeType, NodeStatus
from turnfence.records import TaskEdge, TaskNode

TASK_PLAN_SCHEMA: dict[str, Any] = {
    "type": "object",
    "additionalProperties": False,
    "required": ["nodes"],
    "properties": {
        "nodes": {
            "type": "array",
            "items": {
                "type": "object",
                "additionalProperties": False,
                "required": ["key", "title", "objective", "skill", "target", "depends_on"],
                "properties": {
                    "key": {"type": "string", "description": "a name for depends_on"},
                    "title": {"type": "string"},
                    "objective": {"type": "string"},
                    "skill": {"type": "string", "description": "one of the agent's skills"},
                    "target": {"type": ["string", "null"], "description": "the write that must be done"},
                    "depends_on": {"type": "array", "items": {"type": "string"}},
                },
            },
        }
    },
}


class InvalidPlan(ValueError):
    """The model's reply is no plan that this agent could run: a failed call."""


class PlannedNode(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    key: str
    skill: str
    title: str = ""
    objective: str = ""
    target: str | None = None
    depends_on: tuple[str, ...] = ()


class _Reply(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    nodes: tuple[PlannedNode, ...]


class Plan(msgspec.Struct, frozen=True):
    nodes: tuple[TaskNode, ...]
    edges: tuple[TaskEdge, ...]


def parse_plan(
    reply: str | Mapping[str, Any],
    agent: Agent,
    catalogue: Catalogue,
    new_id: Callable[[], str],
    nodes_max: int = NODES_MAX,
) -> Plan:
    """The typed plan; InvalidPlan for a skill or target the agent does not have, or for no DAG."""
    try:
        typed = msgspec.convert(parse_json(reply) if isinstance(reply, str) else reply, _Reply)
    except (JsonRefused, msgspec.ValidationError) as fault:
        raise InvalidPlan(str(fault)) from fault
    if len({node.key for node in typed.nodes}) != len(typed.nodes):
        raise InvalidPlan("two nodes have the same key")
    ids = {node.key: new_id() for node in typed.nodes}
    for node in typed.nodes:
        _check_node(node, agent, catalogue, ids)
    nodes = tuple(_task_node(node, ids, catalogue) for node in typed.nodes)
    edges = tuple(
        TaskEdge(ids[upstream], ids[node.key], EdgeType.NORMAL)
        for node in typed.nodes
        for upstream in dict.fromkeys(node.depends_on)
    )
    try:
        check_graph(nodes, edges, nodes_max)
    except InvalidGraph as fault:
        raise InvalidPlan(str(fault)) from fault
    return Plan(nodes, edges)


def single_node(agent: Agent, catalogue: Catalogue, objective: str, new_id: Callable[[], str]) -> Plan:
    """The plan of an agent with one skill, which no model is asked for."""
    (skill,) = agent.skills
    planned = PlannedNode(key=skill, skill=skill, objective=objective)
    return Plan((_task_node(planned, {skill: new_id()}, catalogue),), ())


def _check_node(node: PlannedNode, agent: Agent, catalogue: Catalogue, ids: Mapping[str, str]) -> None:
    if node.skill not in agent.skills:
        raise InvalidPlan(f"node {node.key}: the agent has no such skill")
    if unknown := set(node.depends_on) - set(ids):
        raise InvalidPlan(f"node {node.key} depends on {len(unknown)} unknown nodes")
    writes = {tool.name for tool in catalogue.tools_of(node.skill) if tool.is_write}
    if node.target and node.target not in writes:
        raise InvalidPlan(f"node {node.key}: its target is no write of its skill")


def _task_node(node: PlannedNode, ids: Mapping[str, str], catalogue: Catalogue) -> TaskNode:
    skill = catalogue.skills[node.skill]
    return TaskNode(
        node_id=ids[node.key],
        title=node.title or skill.title or skill.key,
        objective=node.objective or skill.objective,
        skill_key=skill.key,
        target=node.target or skill.target,
        status=NodeStatus.PENDING if node.depends_on else NodeStatus.READY,
        depends_on=[ids[upstream] for upstream in dict.fromkeys(node.depends_on)],
    )
