"""The runbook model: how each of the model's calls is answered from a briefing."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
import yaml

from harness_service.adapters.catalogue_yaml import load_catalogue
from harness_service.adapters.runbook_format import RunbookInvalid, read_runbooks
from harness_service.adapters.runbook_model import RunbookModel
from harness_service.core.catalogue import Catalogue
from harness_service.ports import (
    Briefing,
    ChatMessage,
    ChatReply,
    ChatRequest,
    ModelCall,
    ModelFailed,
    Observation,
    OfferedTool,
    Passage,
)

CATALOGUE = """
mcp_servers: {box: {command: [box]}, lab: {command: [lab]}}
agents:
  ops: {skills: [look, order]}
  lab: {skills: [assay]}
skills:
  look: {tools: [box.size, box.owner], outputs: {finding: {share: SESSION}}, objective: Look into the box}
  order: {tools: [box.order], target: box.order, inputs: {item: {from: [session.finding]}}}
  assay: {tools: [lab.measure]}
tools:
  box.size: {}
  box.owner: {}
  box.order: {side_effect: WRITE}
  lab.measure: {}
runbooks:
  hello: {kind: chat, priority: -5, match: {any: [hello]}, title: Chat, answer: "Hello. Ask me to: {capabilities}."}
  rules:
    kind: knowledge
    priority: 5
    match: {regex: ["^how (do|can)"], order: ["^how "]}
    title: Rules
    answer: {en: "The rules say:", zh: "规则如下："}
    not_found: The rules say nothing.
  check-box:
    kind: task
    agent: ops
    skill: look
    match: {any: [check the box, 检查箱子], order: ["^check the box"]}
    title: {en: Check the box, zh: 检查箱子}
    let: {big: "size.litres > `10`", owner_name: owner.name}
    steps:
      - {tool: box.size, fact: "The box holds {size.litres} litres."}
      - {tool: box.owner, args: {limit: 3}, when: "size.litres > `10`", fact: "{owner_name} owns it.", gained: owner.name,
         empty_fact: "No owner was found."}
      - {output: finding, value: "box of {size.litres} litres"}
    conclusions:
      - {when: "big && owner.name", text: {en: "The box of {owner_name} is big.", zh: "{owner_name} 的箱子很大。"}}
      - {when: "size.litres <= `10`", text: "The box is small: {size.litres} litres."}
    missing_info: [{when: "!size", text: The size.}]
    recommendations: [{when: big, text: Use a smaller box.}]
  order-item:
    kind: task
    agent: ops
    skill: order
    priority: 2
    match: {any: [order, 订购]}
    title: Order an item
    capture: {item: ["order (?:an? )?item called (.+)$"]}
    let: {item: captured.item || answers.item || inputs.item}
    steps:
      - {ask: {en: "What shall I order?", zh: "要订购什么？"}, name: item, when: "!item", fields: [item], suggestions: [A box]}
      - {tool: box.order, name: placed, attempts: 2, when: item, args: {item: "{item}", count: 1}, fact: "Order {placed.id} is placed."}
    conclusions: [{when: placed.id, text: "Order {placed.id} for \\"{placed.item}\\" is placed."}]
  measure: {kind: task, agent: lab, skill: assay, match: {any: [measure], order: [^measure]}, title: Measure,
            steps: [{tool: lab.measure, fact: "{measure.value}"}]}
"""  # noqa: E501


@pytest.fixture(scope="module")
def catalogue(tmp_path_factory: pytest.TempPathFactory) -> Catalogue:
    folder = tmp_path_factory.mktemp("catalogue")
    (folder / "one.yaml").write_text(CATALOGUE, encoding="utf-8")
    return load_catalogue(folder)


@pytest.fixture(scope="module")
def model(catalogue: Catalogue) -> RunbookModel:
    return RunbookModel(catalogue)


async def ask(
    model: RunbookModel, call: ModelCall, tools: tuple[str, ...] = (), **briefing: Any
) -> ChatReply:
    offered = tuple(OfferedTool(name, "", {}) for name in tools)
    request = ChatRequest(call, (ChatMessage("user", "x" * 10),), Briefing(**briefing), offered)
    return await model.complete(request, timeout=1.0)


async def decide(model: RunbookModel, text: str, **briefing: Any) -> dict[str, Any]:
    briefing = {"agents": ("ops", "lab"), **briefing}
    reply = await ask(model, ModelCall.TURN_DECISION, text=text, **briefing)
    decision: dict[str, Any] = json.loads(reply.text)
    assert set(decision) == {"mode", "intent", "agent_id", "goal_summary", "reply"}
    return decision


# --- routing --------------------------------------------------------------------------------------

OPEN: dict[str, Any] = {"agent_id": "ops", "has_task": True, "request": "check the box"}
ASKED: dict[str, Any] = {"agent_id": "ops", "has_task": True, "has_checkpoint": True, "request": "order"}


@pytest.mark.parametrize(
    ("text", "briefing", "mode", "intent", "agent"),
    [
        ("hello", {}, "REPLY_ONLY", "SYSTEM_CHAT", ""),
        ("How do I order?", {}, "REPLY_ONLY", "KNOWLEDGE_QUERY", ""),
        ("please check the box", {}, "START_FRESH", "DIAGNOSIS", "ops"),
        ("检查箱子", {}, "START_FRESH", "DIAGNOSIS", "ops"),
        ("hello, check the box", {}, "START_FRESH", "DIAGNOSIS", "ops"),
        ("check the box", {"previous_result": "done"}, "START_WITH_CONTEXT", "DIAGNOSIS", "ops"),
        ("measure", {"agents": ("lab",)}, "START_FRESH", "DIAGNOSIS", "lab"),
        ("measure", {"agents": ("ops",)}, "UNCERTAIN", "SYSTEM_CHAT", ""),
        ("sing a song", {}, "UNCERTAIN", "SYSTEM_CHAT", ""),
        ("checkthe boxes", {}, "UNCERTAIN", "SYSTEM_CHAT", ""),
        ("cancel", {}, "REPLY_ONLY", "SYSTEM_CHAT", ""),
        ("cancel", OPEN, "CANCEL_TASK", "SYSTEM_CHAT", "ops"),
        ("取消", ASKED, "CANCEL_TASK", "SYSTEM_CHAT", "ops"),
        ("请取消当前任务吧。", OPEN, "CANCEL_TASK", "SYSTEM_CHAT", "ops"),
        ("cancel my order of last week", OPEN, "REPLACE_TASK", "DIAGNOSIS", "ops"),
        ("go on", OPEN, "CONTINUE_TASK", "DIAGNOSIS", "ops"),
        ("check the box again", OPEN, "CONTINUE_TASK", "DIAGNOSIS", "ops"),
        ("order an item", OPEN, "REPLACE_TASK", "DIAGNOSIS", "ops"),
        ("measure", OPEN, "SWITCH_AGENT", "DIAGNOSIS", "lab"),
        ("a red one", ASKED, "CONTINUE_TASK", "DIAGNOSIS", "ops"),
        # an answer may contain the words of another runbook; only an order replaces
        ("please check the box, it says", ASKED, "CONTINUE_TASK", "DIAGNOSIS", "ops"),
        ("check the box", ASKED, "REPLACE_TASK", "DIAGNOSIS", "ops"),
        ("how can I see it?", ASKED, "REPLY_ONLY", "KNOWLEDGE_QUERY", "ops"),
    ],
)
async def test_turn_decision(
    model: RunbookModel, text: str, briefing: dict[str, Any], mode: str, intent: str, agent: str
) -> None:
    decision = await decide(model, text, **briefing)
    assert (decision["mode"], decision["intent"], decision["agent_id"]) == (mode, intent, agent)


async def test_an_uncertain_decision_asks_and_says_what_is_possible(model: RunbookModel) -> None:
    assert "Check the box; Order an item; Measure" in (await decide(model, "sing"))["reply"]
    assert "检查箱子" in (await decide(model, "唱歌"))["reply"]


async def test_the_goal_names_everything_that_was_asked_for(model: RunbookModel) -> None:
    decision = await decide(model, "check the box and then order an item called tape")
    assert decision["goal_summary"] == "Check the box; Order an item"


# --- planning -------------------------------------------------------------------------------------


async def plan(model: RunbookModel, text: str, agent: str = "ops") -> list[dict[str, Any]]:
    reply = await ask(model, ModelCall.TASK_PLAN, request=text, agent_id=agent)
    nodes: list[dict[str, Any]] = json.loads(reply.text)["nodes"]
    return nodes


async def test_a_plan_has_one_node_for_each_skill_in_the_texts_order(model: RunbookModel) -> None:
    first, second = await plan(model, "check the box, then order a new one")
    assert first == {
        "key": "check-box",
        "title": "Check the box",
        "objective": "Look into the box",
        "skill": "look",
        "target": "",
        "depends_on": [],
    }
    assert (second["skill"], second["target"], second["depends_on"]) == ("order", "box.order", ["check-box"])


async def test_one_clause_is_one_node(model: RunbookModel) -> None:
    assert [node["key"] for node in await plan(model, "order an item called check the box")] == ["order-item"]


async def test_a_plan_for_what_no_runbook_knows_still_has_a_node(model: RunbookModel) -> None:
    assert [node["skill"] for node in await plan(model, "sing")] == ["look"]
    with pytest.raises(ModelFailed):
        await plan(model, "sing", agent="nobody")


# --- a node ---------------------------------------------------------------------------------------

CHECK: dict[str, Any] = {
    "agent_id": "ops",
    "skill": "look",
    "request": "check the box",
    "text": "check the box",
}
ORDER: dict[str, Any] = {"agent_id": "ops", "skill": "order", "request": "order", "text": "order"}


def seen(tool: str, result: Any = None, status: str = "ok", at: int = 1, **more: Any) -> Observation:
    nothing = status == "refused" or tool.startswith("builtin_")
    evidence = more.pop("evidence_id", "" if nothing else f"e-{tool}-{at}")
    return Observation(evidence, tool, status, more.pop("arguments", {}), result, round=at, **more)


def report(*evidence: str, at: int = 2, status: str = "ok") -> Observation:
    reports = [{"evidence_id": one, "gain": "GAINED", "fact": "x"} for one in evidence]
    return seen("builtin_report_progress", status=status, at=at, arguments={"reports": reports})


def output(name: str, at: int = 3) -> Observation:
    return seen("builtin_output_set", at=at, arguments={"name": name, "value": "x"})


async def step(
    model: RunbookModel, *observations: Observation, tools: tuple[str, ...] = (), **briefing: Any
) -> list[tuple[str, dict[str, Any]]]:
    reply = await ask(model, ModelCall.NODE_STEP, tools, observations=observations, **briefing)
    assert reply.text == ""
    assert len({call.call_id for call in reply.tool_calls}) == len(reply.tool_calls)
    return [(call.name, json.loads(call.arguments_json)) for call in reply.tool_calls]


async def finished(model: RunbookModel, *observations: Observation, **briefing: Any) -> dict[str, Any]:
    ((name, arguments),) = await step(model, *observations, **briefing)
    assert name == "builtin_finish"
    draft: dict[str, Any] = arguments["draft"]
    assert set(draft) == {"conclusion", "facts", "missing_info", "recommendations"}
    return draft


BIG = seen("box.size", {"litres": 12.5})
SMALL = seen("box.size", {"litres": 4})
OWNER = seen("box.owner", {"name": "Ada"}, at=3, arguments={"limit": 3})


async def test_a_condition_on_a_result_waits_for_it(model: RunbookModel) -> None:
    assert await step(model, **CHECK) == [("box__size", {})]


async def test_a_new_result_is_reported_before_anything_else(model: RunbookModel) -> None:
    wanted = {"evidence_id": "e-box.size-1", "gain": "GAINED", "fact": "The box holds 12.5 litres."}
    assert await step(model, BIG, **CHECK) == [("builtin_report_progress", {"reports": [wanted]})]


async def test_a_condition_that_holds_leads_on(model: RunbookModel) -> None:
    assert await step(model, BIG, report("e-box.size-1"), **CHECK) == [("box__owner", {"limit": 3})]


async def test_a_condition_that_does_not_hold_skips_the_step(model: RunbookModel) -> None:
    calls = await step(model, SMALL, report("e-box.size-1"), **CHECK)
    assert calls == [("builtin_output_set", {"name": "finding", "value": "box of 4 litres"})]


async def test_the_draft_says_what_was_seen_and_cites_it(model: RunbookModel) -> None:
    done = (BIG, report("e-box.size-1"), OWNER, report("e-box.owner-3", at=4), output("finding", at=5))
    assert await finished(model, *done, **CHECK) == {
        "conclusion": "The box of Ada is big.",
        "facts": [
            {"text": "The box holds 12.5 litres.", "evidence_ids": ["e-box.size-1"]},
            {"text": "Ada owns it.", "evidence_ids": ["e-box.owner-3"]},
        ],
        "missing_info": [],
        "recommendations": ["Use a smaller box."],
    }


async def test_the_draft_speaks_the_users_language(model: RunbookModel) -> None:
    done = (BIG, report("e-box.size-1"), OWNER, report("e-box.owner-3", at=4), output("finding"))
    draft = await finished(model, *done, **{**CHECK, "request": "检查箱子"})
    assert draft["conclusion"] == "Ada 的箱子很大。"


async def test_no_gain_is_reported_as_such(model: RunbookModel) -> None:
    nameless = seen("box.owner", {"name": "", "x": 1}, at=3)
    ((_, arguments),) = await step(model, BIG, report("e-box.size-1"), nameless, **CHECK)
    assert [one["gain"] for one in arguments["reports"]] == ["NO_GAIN"]


async def test_an_empty_result_needs_no_report_and_has_its_own_fact(model: RunbookModel) -> None:
    empty = seen("box.owner", None, "empty", at=3)
    draft = await finished(model, BIG, report("e-box.size-1"), empty, output("finding"), **CHECK)
    assert draft["conclusion"] is None
    assert draft["facts"][1] == {"text": "No owner was found.", "evidence_ids": ["e-box.owner-3"]}


async def test_a_refused_report_is_not_repeated(model: RunbookModel) -> None:
    calls = await step(model, SMALL, report("e-box.size-1", status="refused"), **CHECK)
    assert calls[0][0] == "builtin_output_set"


async def test_a_resumed_node_does_not_report_again(model: RunbookModel) -> None:
    """Its evidence is remembered, its reports are not: what is older than a round was reported."""
    assert (await step(model, SMALL, round=2, **CHECK))[0][0] == "builtin_report_progress"
    assert (await step(model, SMALL, round=5, **CHECK))[0][0] == "builtin_output_set"


async def test_a_result_that_a_refusal_names_is_reported_and_the_call_made_again(model: RunbookModel) -> None:
    """A crash came between the result and its report."""
    reason = "the results e-box.size-1 were not judged yet"
    refused = seen("box__owner", status="refused", at=5, reason=reason)
    ((name, arguments),) = await step(model, BIG, refused, round=6, **CHECK)
    assert (name, arguments["reports"][0]["evidence_id"]) == ("builtin_report_progress", "e-box.size-1")
    calls = await step(model, BIG, refused, report("e-box.size-1", at=6), round=7, **CHECK)
    assert calls == [("box__owner", {"limit": 3})]


async def test_a_failed_step_leaves_a_gap_and_no_conclusion(model: RunbookModel) -> None:
    draft = await finished(model, seen("box.size", status="failed"), **CHECK)
    assert draft == {
        "conclusion": None,
        "facts": [],
        "missing_info": ["The size.", "box.size failed"],
        "recommendations": [],
    }


async def test_a_refused_call_is_not_made_again_with_the_same_arguments(model: RunbookModel) -> None:
    draft = await finished(model, seen("box.size", status="refused"), **CHECK)
    assert "box.size could not be called" in draft["missing_info"]


async def test_a_tool_that_is_not_offered_is_a_gap(model: RunbookModel) -> None:
    draft = await finished(model, tools=("builtin_finish", "box__owner"), **CHECK)
    assert "box.size is not available" in draft["missing_info"]


async def test_a_required_stop_is_obeyed_at_once(model: RunbookModel) -> None:
    draft = await finished(model, BIG, stop_required=True, **CHECK)
    assert [fact["evidence_ids"] for fact in draft["facts"]] == [["e-box.size-1"]]


async def test_a_refused_finish_is_followed_by_one_without_a_conclusion(model: RunbookModel) -> None:
    done = (SMALL, report("e-box.size-1"), output("finding"), seen("builtin_finish", status="refused", at=4))
    draft = await finished(model, *done, **CHECK)
    assert draft["conclusion"] is None
    assert draft["facts"]


async def test_what_no_runbook_knows_ends_with_what_is_missing(model: RunbookModel) -> None:
    draft = await finished(model, agent_id="ops", skill="look", request="sing", text="sing")
    assert (draft["conclusion"], draft["facts"]) == (None, [])
    assert "no runbook matches" in draft["missing_info"][0]


# --- questions and writes -------------------------------------------------------------------------

QUESTION = seen("builtin_ask_user", at=1)
PLACED = seen("box.order", {"id": "O-7", "item": "tape"}, at=3)


async def test_what_is_missing_is_asked_for(model: RunbookModel) -> None:
    ((name, arguments),) = await step(model, **ORDER)
    assert name == "builtin_ask_user"
    assert arguments == {
        "question": "What shall I order?",
        "expected_fields": ["item"],
        "suggestions": ["A box"],
    }


@pytest.mark.parametrize(
    ("observations", "briefing"),
    [
        ((QUESTION,), {"user_replies": ("tape",), "text": "tape"}),
        ((QUESTION,), {"user_replies": ("order", "tape"), "text": "tape"}),  # the opening text is no answer
        ((), {"user_replies": ("tape",), "text": "tape"}),  # the question itself was not kept
        ((), {"inputs": {"item": "tape"}}),
        ((), {"text": "order an item called tape"}),
    ],
    ids=["reply", "reply after the request", "reply alone", "input", "captured from the text"],
)
async def test_what_is_known_is_written(
    model: RunbookModel, observations: tuple[Observation, ...], briefing: dict[str, Any]
) -> None:
    calls = await step(model, *observations, **{**ORDER, **briefing})
    assert calls == [("box__order", {"item": "tape", "count": 1})]


async def test_a_question_that_was_refused_is_a_gap(model: RunbookModel) -> None:
    draft = await finished(model, seen("builtin_ask_user", status="refused"), **ORDER)
    assert draft["missing_info"] == ["no answer to: What shall I order?"]


async def test_a_write_that_succeeded_is_concluded(model: RunbookModel) -> None:
    draft = await finished(
        model, QUESTION, PLACED, report("e-box.order-3", at=4), **ORDER, user_replies=("tape",)
    )
    assert draft["conclusion"] == 'Order O-7 for "tape" is placed.'
    assert draft["facts"] == [{"text": "Order O-7 is placed.", "evidence_ids": ["e-box.order-3"]}]


async def test_a_write_that_failed_is_tried_again_as_often_as_it_says(model: RunbookModel) -> None:
    known = {**ORDER, "inputs": {"item": "tape"}}
    first, second = (seen("box.order", status="failed", at=at) for at in (1, 2))
    assert [name for name, _ in await step(model, first, **known)] == ["box__order"]
    assert (await finished(model, first, second, **known))["conclusion"] is None


async def test_a_write_of_unknown_outcome_is_never_repeated(model: RunbookModel) -> None:
    draft = await finished(model, seen("box.order", status="unknown"), **ORDER, inputs={"item": "tape"})
    assert draft["missing_info"] == ["whether box.order took effect is not known"]


async def test_a_refused_write_is_made_again_with_what_the_user_said_since(model: RunbookModel) -> None:
    refused = seen("box.order", status="refused", arguments={"item": "glue", "count": 1})
    calls = await step(model, refused, **{**ORDER, "inputs": {"item": "tape"}})
    assert calls == [("box__order", {"item": "tape", "count": 1})]


# --- drafts, answers and guards -------------------------------------------------------------------


async def test_several_drafts_become_one(model: RunbookModel) -> None:
    fact = {"text": "f", "evidence_ids": ["e"]}
    one = {"conclusion": "A.", "facts": [fact], "missing_info": ["m"], "recommendations": []}
    two = {"conclusion": "B.", "facts": [fact], "missing_info": ["m", "n"], "recommendations": ["r"]}
    reply = await ask(model, ModelCall.DIAGNOSIS_DRAFT, draft={"drafts": [one, two]})
    assert json.loads(reply.text) == {
        "conclusion": "A. B.",
        "facts": [fact],
        "missing_info": ["m", "n"],
        "recommendations": ["r"],
    }


async def test_system_answer(model: RunbookModel) -> None:
    known = await ask(model, ModelCall.SYSTEM_ANSWER, text="hello there")
    assert known.text == "Hello. Ask me to: Check the box, Order an item, Measure."
    other = await ask(model, ModelCall.SYSTEM_ANSWER, text="what now?")
    assert other.text == "I can: Check the box; Order an item; Measure."


async def test_knowledge_answer_cites_what_was_found(model: RunbookModel) -> None:
    passage = Passage("Boxes", "boxes.md#size", "A box holds ten litres.")
    reply = await ask(model, ModelCall.KNOWLEDGE_ANSWER, text="how do boxes work", passages=(passage,))
    assert reply.text == "The rules say:\n\n[1] Boxes (boxes.md#size):\nA box holds ten litres."
    none = await ask(model, ModelCall.KNOWLEDGE_ANSWER, text="how do boxes work")
    assert none.text == "The rules say nothing."


async def test_evidence_repair_keeps_what_can_be_cited(model: RunbookModel) -> None:
    draft = {
        "conclusion": "c",
        "facts": [{"text": "a", "evidence_ids": ["e1", "e9"]}, {"text": "b", "evidence_ids": ["e9"]}],
        "missing_info": ["m"],
        "recommendations": [],
    }
    given = {"draft": draft, "citable": ["e1", "e2"], "problems": ["e9 does not exist"]}
    reply = await ask(model, ModelCall.EVIDENCE_REPAIR, draft=given)
    assert json.loads(reply.text) == {
        "conclusion": "c",
        "facts": [{"text": "a", "evidence_ids": ["e1"]}],
        "missing_info": ["m"],
        "recommendations": [],
    }
    blamed = {**given, "citable": ["e1", "e9"], "problems": ["facts[0]: “7” does not occur"]}
    kept = json.loads((await ask(model, ModelCall.EVIDENCE_REPAIR, draft=blamed)).text)
    assert [fact["text"] for fact in kept["facts"]] == ["b"]
    nothing = await ask(model, ModelCall.EVIDENCE_REPAIR, draft={**given, "citable": []})
    assert json.loads(nothing.text)["conclusion"] is None


EVIDENCE = [
    {"evidence_id": "e1", "tool": "box.size", "status": "ok", "result": {"litres": 12.5, "id": "B-1"}}
]


@pytest.mark.parametrize(
    ("conclusion", "evidence", "verdict"),
    [
        ("Box B-1 holds 12.5 litres.", EVIDENCE, "SUPPORTED"),
        ("Box B-1 holds 12 litres.", EVIDENCE, "UNSUPPORTED"),
        ("Box B-2 holds 12.5 litres.", EVIDENCE, "UNSUPPORTED"),
        ('The box is called "Ada".', EVIDENCE, "UNSUPPORTED"),
        ("The box is fine.", EVIDENCE, "SUPPORTED"),
        ("The box is fine.", [], "UNSUPPORTED"),
        ("The box is fine.", [{**EVIDENCE[0], "status": "failed"}], "UNSUPPORTED"),
        ("", EVIDENCE, "UNSUPPORTED"),
    ],
)
async def test_semantic_verdict(
    model: RunbookModel, conclusion: str, evidence: list[dict[str, Any]], verdict: str
) -> None:
    given = {"conclusion": conclusion, "facts": [], "evidence": evidence}
    answer = json.loads((await ask(model, ModelCall.SEMANTIC_VERDICT, draft=given)).text)
    assert answer["verdict"] == verdict
    assert answer["reason"]


@pytest.mark.parametrize(
    "call", [ModelCall.SEMANTIC_VERDICT, ModelCall.EVIDENCE_REPAIR, ModelCall.DIAGNOSIS_DRAFT]
)
async def test_a_call_about_nothing_fails(model: RunbookModel, call: ModelCall) -> None:
    with pytest.raises(ModelFailed) as caught:
        await ask(model, call)
    assert not caught.value.retryable


async def test_usage_is_estimated_and_marked(model: RunbookModel) -> None:
    reply = await ask(model, ModelCall.SYSTEM_ANSWER, text="hello")
    assert (reply.usage.prompt_tokens, reply.usage.estimated) == (3, True)
    assert reply.usage.completion_tokens == -(-len(reply.text) // 4)


async def test_the_same_briefing_gets_the_same_answer(model: RunbookModel) -> None:
    assert await step(model, BIG, **CHECK) == await step(model, BIG, **CHECK)


# --- the format -----------------------------------------------------------------------------------


def runbook(**changes: Any) -> dict[str, Any]:
    raw = yaml.safe_load(CATALOGUE)["runbooks"]["check-box"]
    return {key: value for key, value in {**raw, "name": "x", **changes}.items() if value is not None}


STEP = {"tool": "box.size", "fact": "f"}


@pytest.mark.parametrize(
    ("changes", "path", "message"),
    [
        ({"kind": "chat"}, "runbooks.x.steps", "has no 'steps'"),
        ({"answer": "a"}, "runbooks.x.answer", "has no 'answer'"),
        ({"agent": None}, "runbooks.x", "needs 'agent'"),
        ({"match": {"none": ["a"]}}, "runbooks.x.match", "never match"),
        ({"let": {"text": "size"}}, "runbooks.x.let.text", "taken"),
        ({"let": {"a": "nothing_here"}}, "runbooks.x.let.a", "nothing is called 'nothing_here'"),
        ({"steps": [{**STEP, "ask": "q"}]}, "runbooks.x.steps.0", "exactly one"),
        ({"steps": [{"tool": "box.size"}]}, "runbooks.x.steps.0", "'fact' is missing"),
        ({"steps": [STEP, STEP]}, "runbooks.x.steps.1", "the name 'size' is taken"),
        ({"steps": [{**STEP, "attempts": 9}]}, "runbooks.x.steps.0.attempts", "outside 1..5"),
        ({"steps": [{**STEP, "args": {"a": None}}]}, "runbooks.x.steps.0.args.a", "cannot be nothing"),
        ({"capture": {"a": ["no group"]}}, "runbooks.x.capture.a.0", "exactly one group"),
        ({"title": {"english": "t"}}, "runbooks.x.title.english", "not a language"),
    ],
)
def test_a_faulty_runbook_is_refused_with_its_path(changes: dict[str, Any], path: str, message: str) -> None:
    with pytest.raises(RunbookInvalid) as caught:
        read_runbooks((runbook(**changes),))
    assert any(".".join(map(str, where)) == path and message in what for where, what in caught.value.problems)


def test_a_model_with_a_faulty_runbook_is_not_made(catalogue: Catalogue) -> None:
    faulty = msgspec.structs.replace(catalogue, runbooks=(runbook(kind="tasks"),))
    with pytest.raises(RunbookInvalid):
        RunbookModel(faulty)


async def test_two_steps_with_one_tool_are_told_apart_by_their_arguments(catalogue: Catalogue) -> None:
    steps = [{**STEP, "name": name, "args": {"n": n}} for n, name in enumerate("ab")]
    conclusion = {"text": "{a.v} then {b.v}"}
    raw = runbook(steps=steps, let=None, conclusions=[conclusion], missing_info=None, recommendations=None)
    model = RunbookModel(msgspec.structs.replace(catalogue, runbooks=(raw,)))
    assert await step(model, **CHECK) == [("box__size", {"n": 0}), ("box__size", {"n": 1})]
    second, first = (
        seen("box.size", {"v": n}, at=1, arguments={"n": n, "added": "by the platform"}, evidence_id=f"e{n}")
        for n in (1, 0)
    )
    draft = await finished(model, second, first, report("e0", "e1"), **CHECK)
    assert draft["conclusion"] == "0 then 1"
