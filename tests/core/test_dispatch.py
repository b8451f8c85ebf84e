"""State document 4 (TurnMode) and "The turn": decision → pipeline."""

import json
from typing import Any

import pytest

from harness_service.core.dispatch import (
    INHERITS_PRIOR,
    OPENS_TASK,
    PIPELINES,
    RESUME_DECISION,
    TURN_DECISION_SCHEMA,
    DispatchFacts,
    InvalidDecision,
    Pipeline,
    TurnDecision,
    corrected,
    parse_decision,
    pipeline_of,
)
from turnfence.axes import IntentType, TurnMode

M, I = TurnMode, IntentType  # noqa: E741
FREE = DispatchFacts(agents=("ops", "desk"), has_records=True)
BUSY = DispatchFacts(agents=("ops", "desk"), task_agent="ops", has_records=True)


@pytest.mark.parametrize(
    ("mode", "intent", "pipeline"),
    [
        pytest.param(M.REPLY_ONLY, I.SYSTEM_CHAT, Pipeline.SYSTEM_CHAT, id="harness-turn-1"),
        pytest.param(M.REPLY_ONLY, I.KNOWLEDGE_QUERY, Pipeline.KNOWLEDGE, id="harness-turn-2"),
        pytest.param(M.UNCERTAIN, I.DIAGNOSIS, Pipeline.CLARIFY, id="harness-turn-3"),
        pytest.param(M.CANCEL_TASK, I.SYSTEM_CHAT, Pipeline.CANCEL_TASK, id="harness-turn-4"),
        *[
            pytest.param(mode, I.DIAGNOSIS, Pipeline.TASK, id=f"harness-turn-5-{mode}")
            for mode in (M.START_FRESH, M.START_WITH_CONTEXT, M.CONTINUE_TASK, M.REPLACE_TASK, M.SWITCH_AGENT)
        ],
    ],
)
def test_pipelines(mode: Any, intent: Any, pipeline: Any) -> None:
    assert pipeline_of(TurnDecision(mode, intent)) is pipeline


def test_every_pair_has_a_pipeline() -> None:
    assert set(PIPELINES) == {(mode, intent) for mode in M for intent in I}


@pytest.mark.parametrize("mode", M)
@pytest.mark.parametrize("intent", I)
@pytest.mark.parametrize("facts", [FREE, BUSY], ids=["no-task", "task"])
def test_a_corrected_decision_never_answers_a_diagnosis_without_release(
    mode: Any, intent: Any, facts: Any
) -> None:
    decision = corrected(TurnDecision(mode, intent, agent_id="desk"), facts)
    assert (decision.intent is I.DIAGNOSIS) == (pipeline_of(decision) is Pipeline.TASK) or decision.mode in (
        M.UNCERTAIN,
        M.CANCEL_TASK,
    )
    assert facts.has_task or decision.mode not in (M.CONTINUE_TASK, M.REPLACE_TASK, M.SWITCH_AGENT)
    assert decision.mode not in OPENS_TASK or decision.agent_id in facts.agents


def row(
    facts: Any,
    mode: Any,
    expected_mode: Any,
    *,
    intent: Any = I.DIAGNOSIS,
    agent: Any = None,
    expected_agent: Any = None,
    name: Any,
) -> Any:
    return pytest.param(facts, mode, intent, agent, expected_mode, expected_agent, id=name)


@pytest.mark.parametrize(
    ("facts", "mode", "intent", "agent", "expected_mode", "expected_agent"),
    [
        row(FREE, M.CONTINUE_TASK, M.START_FRESH, agent="ops", expected_agent="ops", name="continue-nothing"),
        row(FREE, M.REPLACE_TASK, M.START_FRESH, agent="ops", expected_agent="ops", name="replace-nothing"),
        row(FREE, M.SWITCH_AGENT, M.START_FRESH, agent="desk", expected_agent="desk", name="switch-nothing"),
        row(FREE, M.START_FRESH, M.UNCERTAIN, agent="nobody", name="unknown-agent-is-asked-for"),
        row(FREE, M.START_FRESH, M.UNCERTAIN, name="no-agent-is-asked-for"),
        row(
            FREE,
            M.START_WITH_CONTEXT,
            M.START_WITH_CONTEXT,
            agent="ops",
            expected_agent="ops",
            name="context",
        ),
        row(BUSY, M.CONTINUE_TASK, M.CONTINUE_TASK, agent="desk", expected_agent="ops", name="continue-own"),
        row(BUSY, M.REPLACE_TASK, M.REPLACE_TASK, expected_agent="ops", name="replace-same-agent"),
        row(BUSY, M.SWITCH_AGENT, M.SWITCH_AGENT, agent="desk", expected_agent="desk", name="switch"),
        row(BUSY, M.SWITCH_AGENT, M.REPLACE_TASK, agent="ops", expected_agent="ops", name="switch-to-itself"),
        row(BUSY, M.SWITCH_AGENT, M.UNCERTAIN, name="switch-to-nobody"),
        row(BUSY, M.START_FRESH, M.START_FRESH, expected_agent="ops", name="start-beside-a-task"),
        row(
            BUSY,
            M.START_FRESH,
            M.REPLY_ONLY,
            intent=I.KNOWLEDGE_QUERY,
            agent="ops",
            expected_agent="ops",
            name="a-question-ends-no-task",
        ),
    ],
)
def test_corrections(
    facts: Any, mode: Any, intent: Any, agent: Any, expected_mode: Any, expected_agent: Any
) -> None:
    decision = corrected(TurnDecision(mode, intent, agent_id=agent), facts)
    assert decision.mode is expected_mode
    assert decision.agent_id == expected_agent


def test_no_context_without_records() -> None:
    facts = DispatchFacts(agents=("ops",))
    assert corrected(TurnDecision(M.START_WITH_CONTEXT, I.DIAGNOSIS), facts).mode is M.START_FRESH


def test_the_only_agent_needs_no_name() -> None:
    assert (
        corrected(TurnDecision(M.START_FRESH, I.DIAGNOSIS), DispatchFacts(agents=("ops",))).agent_id == "ops"
    )


@pytest.mark.parametrize("mode", [M.CONTINUE_TASK, M.REPLACE_TASK])
def test_another_requested_agent_switches(mode: Any) -> None:
    facts = DispatchFacts(agents=("ops", "desk"), task_agent="ops", requested_agent="desk")
    decision = corrected(TurnDecision(mode, I.DIAGNOSIS, agent_id="ops"), facts)
    assert (decision.mode, decision.agent_id) == (M.SWITCH_AGENT, "desk")


def test_the_callers_wish_beats_the_models() -> None:
    facts = DispatchFacts(agents=("ops", "desk"), requested_agent="desk")
    assert corrected(TurnDecision(M.START_FRESH, I.DIAGNOSIS, agent_id="ops"), facts).agent_id == "desk"


def test_only_fresh_starts_inherit_nothing() -> None:
    assert {M.START_FRESH} == OPENS_TASK - INHERITS_PRIOR


def test_a_resume_needs_no_router() -> None:
    assert pipeline_of(RESUME_DECISION) is Pipeline.TASK


def test_parse() -> None:
    reply = {
        "mode": "START_FRESH",
        "intent": "DIAGNOSIS",
        "agent_id": "ops",
        "goal_summary": "g",
        "reply": None,
    }
    expected = TurnDecision(M.START_FRESH, I.DIAGNOSIS, "ops", "g", None)
    assert parse_decision(json.dumps(reply)) == expected
    assert parse_decision(reply) == expected
    assert set(TURN_DECISION_SCHEMA["required"]) == set(TURN_DECISION_SCHEMA["properties"]) == set(reply)


@pytest.mark.parametrize(
    "reply",
    [
        "",
        "START_FRESH",
        "[]",
        '{"mode":"START_FRESH"}',
        '{"intent":"DIAGNOSIS"}',
        '{"mode":"RUN","intent":"DIAGNOSIS"}',
        '{"mode":"UNCERTAIN","intent":"OTHER"}',
        '{"mode":"UNCERTAIN","intent":"DIAGNOSIS","agent_id":7}',
        '{"mode":"UNCERTAIN","intent":"DIAGNOSIS","extra":1}',
        '{"mode":"UNCERTAIN","intent":"DIAGNOSIS"} trailing',
    ],
)
def test_what_does_not_fit_is_a_failed_call(reply: Any) -> None:
    with pytest.raises(InvalidDecision):
        parse_decision(reply)


@pytest.mark.parametrize(
    ("mode", "intent", "kept"),
    [
        (M.REPLY_ONLY, I.SYSTEM_CHAT, True),
        (M.UNCERTAIN, I.DIAGNOSIS, True),
        (M.REPLY_ONLY, I.KNOWLEDGE_QUERY, False),
        (M.START_FRESH, I.SYSTEM_CHAT, False),
        (M.START_FRESH, I.DIAGNOSIS, False),
        (M.CANCEL_TASK, I.DIAGNOSIS, False),
    ],
)
def test_the_router_answers_only_what_needs_nothing_else(mode: Any, intent: Any, kept: Any) -> None:
    decision = corrected(TurnDecision(mode, intent, agent_id="ops", reply="hello"), FREE)
    assert (decision.reply == "hello") is kept
