"""The intent decision: what this turn does with the task, and which pipeline answers (state 4)."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

import msgspec

from harness_service.core.canonical import JsonRefused, parse_json
from turnfence.axes import IntentType, TurnMode


class Pipeline(StrEnum):
    """What runs ("The turn" of the harness design)."""

    SYSTEM_CHAT = "SYSTEM_CHAT"  # one model answer, no tools → ChatReply
    KNOWLEDGE = "KNOWLEDGE"  # one search, one answer → KnowledgeAnswer
    CLARIFY = "CLARIFY"  # one question, no task touched → ChatReply
    CANCEL_TASK = "CANCEL_TASK"  # task CANCELED, notice
    TASK = "TASK"  # the task graph, then release


#: Modes that open a new task; whatever task is open is abandoned first.
OPENS_TASK = frozenset(
    {TurnMode.START_FRESH, TurnMode.START_WITH_CONTEXT, TurnMode.REPLACE_TASK, TurnMode.SWITCH_AGENT}
)
#: Modes whose new task inherits what went before. START_FRESH inherits nothing.
INHERITS_PRIOR = frozenset({TurnMode.START_WITH_CONTEXT, TurnMode.REPLACE_TASK, TurnMode.SWITCH_AGENT})

#: (mode, intent) → pipeline, for every pair; ``corrected`` has brought odd pairs into these.
PIPELINES: Mapping[tuple[TurnMode, IntentType], Pipeline] = {
    **{(TurnMode.UNCERTAIN, intent): Pipeline.CLARIFY for intent in IntentType},
    **{(TurnMode.CANCEL_TASK, intent): Pipeline.CANCEL_TASK for intent in IntentType},
    **{
        (mode, intent): Pipeline.TASK
        for mode in OPENS_TASK | {TurnMode.CONTINUE_TASK}
        for intent in IntentType
    },
    (TurnMode.REPLY_ONLY, IntentType.SYSTEM_CHAT): Pipeline.SYSTEM_CHAT,
    (TurnMode.REPLY_ONLY, IntentType.KNOWLEDGE_QUERY): Pipeline.KNOWLEDGE,
    (TurnMode.REPLY_ONLY, IntentType.DIAGNOSIS): Pipeline.SYSTEM_CHAT,
}

#: Where the router's own ``reply`` may be the answer. A knowledge answer always searches first.
_MAY_ANSWER_AT_ONCE = frozenset(
    {(TurnMode.REPLY_ONLY, IntentType.SYSTEM_CHAT), *((TurnMode.UNCERTAIN, intent) for intent in IntentType)}
)

GOAL_MAX_CHARS = 200

TURN_DECISION_SCHEMA: dict[str, Any] = {
    "type": "object",
    "additionalProperties": False,
    "required": ["mode", "intent", "agent_id", "goal_summary", "reply"],
    "properties": {
        "mode": {"type": "string", "enum": [mode.value for mode in TurnMode]},
        "intent": {"type": "string", "enum": [intent.value for intent in IntentType]},
        "agent_id": {"type": ["string", "null"], "description": "one of the listed agents"},
        "goal_summary": {"type": ["string", "null"], "description": "the user's goal in one line"},
        "reply": {"type": ["string", "null"], "description": "only with REPLY_ONLY or UNCERTAIN"},
    },
}


class TurnDecision(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the router decided. ``reply``: REPLY_ONLY and UNCERTAIN may answer at once."""

    mode: TurnMode
    intent: IntentType
    agent_id: str | None = None
    goal_summary: str | None = None
    reply: str | None = None


class InvalidDecision(ValueError):
    """The model's reply is no turn decision: a failed call."""


class DispatchFacts(msgspec.Struct, frozen=True):
    """What the decision is measured against.

    ``task_agent``: the active task's agent, empty when there is no active task. ``requested_agent``:
    the request's. ``agents``: what the catalogue has. ``has_records``: earlier tasks to inherit from.
    """

    agents: tuple[str, ...]
    task_agent: str = ""
    requested_agent: str = ""
    has_records: bool = False

    @property
    def has_task(self) -> bool:
        return bool(self.task_agent)


RESUME_DECISION = TurnDecision(TurnMode.CONTINUE_TASK, IntentType.DIAGNOSIS)
CANCEL_DECISION = TurnDecision(TurnMode.CANCEL_TASK, IntentType.DIAGNOSIS)


def parse_decision(reply: str | Mapping[str, Any]) -> TurnDecision:
    """The typed decision; InvalidDecision for unknown keys, unknown values and wrong types."""
    try:
        return msgspec.convert(parse_json(reply) if isinstance(reply, str) else reply, TurnDecision)
    except (JsonRefused, msgspec.ValidationError) as fault:
        raise InvalidDecision(str(fault)) from fault


def corrected(decision: TurnDecision, facts: DispatchFacts) -> TurnDecision:
    """The nearest decision that can be carried out; its ``agent_id`` is a known agent or None.

    ``reply`` is kept only where it may be the answer, and only for the mode it was written for.
    Nothing is guessed that touches a task: a decision whose agent is not known becomes UNCERTAIN.
    """
    mode = _possible_mode(decision, facts)
    intent = IntentType.DIAGNOSIS if mode in OPENS_TASK | {TurnMode.CONTINUE_TASK} else decision.intent
    if mode is TurnMode.REPLY_ONLY and intent is IntentType.DIAGNOSIS:
        intent = IntentType.SYSTEM_CHAT
    agent = _agent(mode, decision.agent_id, facts)
    if mode in OPENS_TASK and agent is None:
        mode, intent = TurnMode.UNCERTAIN, decision.intent
    goal = decision.goal_summary or ""
    return TurnDecision(
        mode=mode,
        intent=intent,
        agent_id=agent,
        goal_summary=goal[:GOAL_MAX_CHARS] or None,
        reply=decision.reply if mode is decision.mode and (mode, intent) in _MAY_ANSWER_AT_ONCE else None,
    )


def pipeline_of(decision: TurnDecision) -> Pipeline:
    return PIPELINES[decision.mode, decision.intent]


def _possible_mode(decision: TurnDecision, facts: DispatchFacts) -> TurnMode:
    """The mode, given whether there is a task, another agent is asked for, and what is asked."""
    mode = decision.mode
    if mode in OPENS_TASK and decision.intent is not IntentType.DIAGNOSIS:
        return TurnMode.REPLY_ONLY  # chat and questions of knowledge need no task, and end none
    if not facts.has_task:
        mode = _WITHOUT_TASK.get(mode, mode)
        if mode is TurnMode.START_WITH_CONTEXT and not facts.has_records:
            return TurnMode.START_FRESH
        return mode
    if mode in (TurnMode.CONTINUE_TASK, TurnMode.REPLACE_TASK) and _asks_for_other_agent(facts):
        return TurnMode.SWITCH_AGENT
    if mode is TurnMode.SWITCH_AGENT and _agent(mode, decision.agent_id, facts) == facts.task_agent:
        return TurnMode.REPLACE_TASK
    return mode


_WITHOUT_TASK: Mapping[TurnMode, TurnMode] = {
    TurnMode.CONTINUE_TASK: TurnMode.START_FRESH,
    TurnMode.REPLACE_TASK: TurnMode.START_FRESH,
    TurnMode.SWITCH_AGENT: TurnMode.START_FRESH,
}


def _asks_for_other_agent(facts: DispatchFacts) -> bool:
    return bool(facts.requested_agent) and facts.requested_agent != facts.task_agent


def _agent(mode: TurnMode, proposed: str | None, facts: DispatchFacts) -> str | None:
    """Who takes the task, by mode: the task's agent, the caller's wish, the model's choice, the only one."""
    task_agent = facts.task_agent or None
    if mode in (TurnMode.CONTINUE_TASK, TurnMode.REPLACE_TASK):
        candidates = [task_agent, facts.requested_agent, proposed]
    elif mode is TurnMode.SWITCH_AGENT:
        candidates = [facts.requested_agent, proposed]
    else:
        candidates = [facts.requested_agent, proposed, task_agent]
    known = [agent for agent in candidates if agent in facts.agents]
    if known:
        return known[0]
    return facts.agents[0] if len(facts.agents) == 1 else None
