"""A model that follows runbooks: the same situation gives the same answer, without a network or a key.

A runbook is a procedure in the catalogue's ``runbooks`` section::

    match → steps (tools with argument templates, questions, outputs; each with a condition)
          → facts and conclusions with conditions → the draft

The format is described in ``harness_service/catalogue/README.md`` and read by ``runbook_format``; here is
how each of the model's calls (catalogue.md) is answered. Only ``ChatRequest.briefing`` is read, never the
messages' prose: what a tool or a user wrote can fill a hole in a sentence, and steer nothing else.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from harness_service.adapters.runbook_format import Runbook, RunbookKind, read_runbooks
from harness_service.adapters.runbook_walk import (
    FINISH,
    REPORT,
    Call,
    Toolbox,
    draft,
    report_call,
    walk,
    wire_name,
)
from harness_service.core.catalogue import Catalogue
from harness_service.core.literals import corpus_of, missing
from harness_service.ports import (
    Briefing,
    ChatReply,
    ChatRequest,
    ModelCall,
    ModelFailed,
    TokenUsage,
    ToolCallRequest,
)
from turnfence.axes import IntentType, SemanticVerdict, TurnMode

CHARACTERS_PER_TOKEN = 4


class RunbookModel:
    """A ``ChatModel`` over the catalogue's runbooks. Raises ``RunbookInvalid`` for a faulty one."""

    def __init__(self, catalogue: Catalogue) -> None:
        self._catalogue = catalogue
        self._runbooks = read_runbooks(catalogue.runbooks)
        self._answers: Mapping[ModelCall, Callable[[ChatRequest], str]] = {
            ModelCall.TURN_DECISION: self._turn_decision,
            ModelCall.TASK_PLAN: self._task_plan,
            ModelCall.DIAGNOSIS_DRAFT: self._diagnosis_draft,
            ModelCall.SYSTEM_ANSWER: self._system_answer,
            ModelCall.KNOWLEDGE_ANSWER: self._knowledge_answer,
            ModelCall.EVIDENCE_REPAIR: self._evidence_repair,
            ModelCall.SEMANTIC_VERDICT: self._semantic_verdict,
        }

    async def complete(self, request: ChatRequest, *, timeout: float) -> ChatReply:
        """Answer at once. Raises ``ModelFailed`` when the briefing lacks what the call is about."""
        if request.call is ModelCall.NODE_STEP:
            calls = self._node_step(request)
            return ChatReply("", calls, _usage(request, "".join(call.arguments_json for call in calls)))
        text = self._answers[request.call](request)
        return ChatReply(text, (), _usage(request, text))

    async def close(self) -> None:
        """Nothing is held."""

    # --- routing and planning ---------------------------------------------------------------------

    def _turn_decision(self, request: ChatRequest) -> str:
        briefing = request.briefing
        decision = _routed(briefing, self._candidates(briefing), self._titles(briefing))
        return _json(msgspec.to_builtins(decision))

    def _candidates(self, briefing: Briefing) -> tuple[Runbook, ...]:
        """Runbooks of the agents that may be chosen, and those that need none."""
        return tuple(
            runbook
            for runbook in self._runbooks
            if not runbook.agent or not briefing.agents or runbook.agent in briefing.agents
        )

    def _titles(self, briefing: Briefing) -> list[str]:
        tasks = [runbook for runbook in self._candidates(briefing) if runbook.kind is RunbookKind.TASK]
        return [_title(runbook, _language(briefing)) for runbook in tasks]

    def _task_plan(self, request: ChatRequest) -> str:
        briefing = request.briefing
        chosen = _planned(self._of_agent(briefing), briefing.request or briefing.text)
        nodes: list[dict[str, Any]] = []
        for runbook in chosen:
            skill = self._catalogue.skills[runbook.skill]
            title = _title(runbook, _language(briefing))
            nodes.append(
                {
                    "key": runbook.name,
                    "title": title,
                    "objective": skill.objective or title,
                    "skill": runbook.skill,
                    "target": skill.target,
                    "depends_on": [nodes[-1]["key"]] if nodes else [],
                }
            )
        return _json({"nodes": nodes or self._first_skill(briefing)})

    def _of_agent(self, briefing: Briefing) -> tuple[Runbook, ...]:
        return tuple(
            runbook
            for runbook in self._runbooks
            if runbook.kind is RunbookKind.TASK and briefing.agent_id in ("", runbook.agent)
        )

    def _first_skill(self, briefing: Briefing) -> list[dict[str, Any]]:
        """A plan must have a node; this one ends saying that no runbook matches."""
        agent = self._catalogue.agents.get(briefing.agent_id)
        if agent is None:
            raise ModelFailed(f"no agent '{briefing.agent_id}' to plan for")
        skill = self._catalogue.skills[agent.skills[0]]
        title = skill.title or skill.key
        return [
            {
                "key": skill.key,
                "title": title,
                "objective": skill.objective or title,
                "skill": skill.key,
                "target": skill.target,
                "depends_on": [],
            }
        ]

    # --- a node -----------------------------------------------------------------------------------

    def _node_step(self, request: ChatRequest) -> tuple[ToolCallRequest, ...]:
        briefing = request.briefing
        return tuple(
            ToolCallRequest(f"call_{briefing.round}_{index}", call.name, _json(call.arguments))
            for index, call in enumerate(self._next_calls(request))
        )

    def _next_calls(self, request: ChatRequest) -> tuple[Call, ...]:
        briefing = request.briefing
        language = _language(briefing)
        runbook = self._runbook_of_node(briefing)
        if runbook is None:
            return (_finish(_nothing_matches(briefing, language)),)
        tools = self._toolbox(request)
        walked = walk(runbook, briefing, language, tools)
        if not briefing.stop_required:
            if tools.offered(REPORT) and (report := report_call(briefing, walked.facts, language)):
                return (report,)
            if walked.calls:
                return walked.calls
        return (_finish(draft(runbook, walked, briefing, language)),)

    def _runbook_of_node(self, briefing: Briefing) -> Runbook | None:
        """The skill's runbook that the request asks for; else what this turn's text or the title does."""
        own = [runbook for runbook in self._of_agent(briefing) if runbook.skill == briefing.skill]
        for said in (briefing.request, briefing.text, briefing.node_title):
            if chosen := _planned(own, said):
                return chosen[0]
        return next((runbook for runbook in own if _has_title(runbook, briefing.node_title)), None)

    def _toolbox(self, request: ChatRequest) -> Toolbox:
        offered = {tool.name for tool in request.tools}
        return Toolbox(
            writes=lambda tool: self._catalogue.tools[tool].is_write,
            offered=lambda tool: not offered or wire_name(tool) in offered,
        )

    def _diagnosis_draft(self, request: ChatRequest) -> str:
        """Several nodes' drafts as one: ``briefing.draft`` is their list, or ``{"drafts": […]}``."""
        given = request.briefing.draft
        drafts = given.get("drafts") if isinstance(given, Mapping) else given
        if not isinstance(drafts, Sequence) or not all(isinstance(one, Mapping) for one in drafts):
            raise ModelFailed("the briefing has no drafts to join")
        return _json(_joined(drafts))

    # --- answers ----------------------------------------------------------------------------------

    def _system_answer(self, request: ChatRequest) -> str:
        briefing = request.briefing
        language = _language(briefing)
        runbook = _best(self._of_kind(RunbookKind.CHAT), briefing.text)
        answer = (
            runbook.answer.text(language, self._chat_context(briefing))
            if runbook and runbook.answer
            else None
        )
        return answer or _capabilities(self._titles(briefing), language)

    def _knowledge_answer(self, request: ChatRequest) -> str:
        briefing = request.briefing
        language = _language(briefing)
        books = self._of_kind(RunbookKind.KNOWLEDGE)
        runbook = _best(books, briefing.text) or next(iter(books), None)
        words = (runbook.answer if briefing.passages else runbook.not_found) if runbook else None
        opening = words.text(language, self._chat_context(briefing)) if words else None
        if not briefing.passages:
            return opening or _phrase("not_found", language)
        cited = [
            f"[{number}] {passage.title} ({passage.location}):\n{passage.excerpt.strip()}"
            for number, passage in enumerate(briefing.passages[:_PASSAGES], start=1)
        ]
        return "\n\n".join([opening or _phrase("found", language), *cited])

    def _of_kind(self, kind: RunbookKind) -> list[Runbook]:
        return [runbook for runbook in self._runbooks if runbook.kind is kind]

    def _chat_context(self, briefing: Briefing) -> dict[str, Any]:
        return {
            "text": briefing.text,
            "language": _language(briefing),
            "capabilities": self._titles(briefing),
            "previous_result": briefing.previous_result or None,
        }

    # --- guards -----------------------------------------------------------------------------------

    def _evidence_repair(self, request: ChatRequest) -> str:
        """The draft without what cannot be cited; without facts there is no conclusion either."""
        given = request.briefing.draft
        if not isinstance(given, Mapping) or not isinstance(given.get("draft"), Mapping):
            raise ModelFailed("the briefing has no draft to repair")
        citable = frozenset(given.get("citable", ()))
        return _json(_repaired(given["draft"], citable, given.get("problems", ())))

    def _semantic_verdict(self, request: ChatRequest) -> str:
        given = request.briefing.draft
        if not isinstance(given, Mapping):
            raise ModelFailed("the briefing has no conclusion to judge")
        return _json(_judged(given))


# --- routing --------------------------------------------------------------------------------------


class _Decision(msgspec.Struct, frozen=True):
    mode: TurnMode
    intent: IntentType = IntentType.SYSTEM_CHAT
    agent_id: str = ""
    goal_summary: str = ""
    reply: str = ""


_CANCEL = re.compile(
    r"\W*(please\s+|请)?(cancel|abort|forget|drop|stop|never\s*mind|取消|放弃|算了|不用了|停止|终止)"
    r"(\s*(it|this|that|the task|everything|任务|当前任务|吧|了))*\W*",
    re.IGNORECASE,
)
_INTENTS = {
    RunbookKind.TASK: IntentType.DIAGNOSIS,
    RunbookKind.KNOWLEDGE: IntentType.KNOWLEDGE_QUERY,
    RunbookKind.CHAT: IntentType.SYSTEM_CHAT,
}


def _routed(briefing: Briefing, candidates: Sequence[Runbook], titles: Sequence[str]) -> _Decision:
    """One decision from the text and what is open; the first line that fits wins."""
    language = _language(briefing)
    open_task = briefing.has_task or briefing.has_checkpoint
    going_on = _Decision(TurnMode.CONTINUE_TASK, IntentType.DIAGNOSIS, briefing.agent_id)
    if _CANCEL.fullmatch(briefing.text):
        reply = _phrase("nothing_open", language)
        return (
            _Decision(TurnMode.CANCEL_TASK, agent_id=briefing.agent_id)
            if open_task
            else _Decision(TurnMode.REPLY_ONLY, reply=reply)
        )
    # While the user is asked something, his text is the answer unless it is plainly an order.
    heard = [one for one in candidates if not briefing.has_checkpoint or one.match.orders(briefing.text)]
    chosen = _best(heard, briefing.text, briefing.agent_id)
    if chosen is None:
        reply = _phrase("unclear", language) + " " + _capabilities(titles, language)
        return going_on if open_task else _Decision(TurnMode.UNCERTAIN, reply=reply)
    if chosen.kind is not RunbookKind.TASK:
        return _Decision(TurnMode.REPLY_ONLY, _INTENTS[chosen.kind], briefing.agent_id)
    if open_task and chosen == _best([one for one in candidates if one.skill], briefing.request):
        return going_on
    own = [one for one in candidates if one.agent == chosen.agent and one.kind is RunbookKind.TASK]
    goal = "; ".join(_title(runbook, language) for runbook in _planned(own, briefing.text))
    return _Decision(_opening(briefing, chosen), IntentType.DIAGNOSIS, chosen.agent, goal)


def _opening(briefing: Briefing, chosen: Runbook) -> TurnMode:
    if briefing.has_task or briefing.has_checkpoint:
        same_agent = briefing.agent_id in ("", chosen.agent)
        return TurnMode.REPLACE_TASK if same_agent else TurnMode.SWITCH_AGENT
    return TurnMode.START_WITH_CONTEXT if briefing.previous_result else TurnMode.START_FRESH


def _best(runbooks: Iterable[Runbook], said: str, agent: str = "") -> Runbook | None:
    """The matching runbook of the highest priority, then ``agent``'s own, then of the longest hit."""
    scored = [
        ((runbook.priority, not agent or runbook.agent in ("", agent), length), runbook)
        for runbook in runbooks
        if (length := runbook.match.length(said))
    ]
    return max(scored, key=lambda one: one[0])[1] if scored else None


_CLAUSE_ENDS = re.compile(r"\b(?:and|then)\b|[,;，；。]|然后|并且|并|再", re.IGNORECASE)


def _planned(runbooks: Sequence[Runbook], said: str) -> list[Runbook]:
    """One runbook for each skill that a clause of the text asks for, in the text's order."""
    chosen: dict[str, Runbook] = {}
    for clause in _CLAUSE_ENDS.split(said):
        if runbook := _best(runbooks, clause):
            chosen.setdefault(runbook.skill, runbook)
    whole = _best(runbooks, said)
    return list(chosen.values()) or ([whole] if whole else [])


# --- drafts ---------------------------------------------------------------------------------------


def _finish(content: dict[str, Any]) -> Call:
    return Call(FINISH, {"draft": content})


def _nothing_matches(briefing: Briefing, language: str) -> dict[str, Any]:
    missing = [_phrase("no_runbook", language)]
    return {"conclusion": None, "facts": [], "missing_info": missing, "recommendations": []}


def _joined(drafts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    conclusions = [one["conclusion"] for one in drafts if one.get("conclusion")]
    return {
        "conclusion": " ".join(conclusions) or None,
        **{
            part: _distinct(item for one in drafts for item in one.get(part, ()))
            for part in ("facts", "missing_info", "recommendations")
        },
    }


def _distinct(items: Iterable[Any]) -> list[Any]:
    return list({_json(item): item for item in items}.values())


def _repaired(
    found: Mapping[str, Any], citable: frozenset[str], problems: Iterable[object]
) -> dict[str, Any]:
    blamed = {hit[1] for problem in problems if (hit := _BLAMED.match(str(problem)))}
    facts = []
    for index, fact in enumerate(found.get("facts", ())):
        kept = [one for one in fact.get("evidence_ids", ()) if one in citable]
        # A fact whose evidence may all be cited is blamed for what it says: it cannot be kept.
        wrong = str(index) in blamed and kept == list(fact.get("evidence_ids", ()))
        if kept and not wrong:
            facts.append({"text": fact["text"], "evidence_ids": kept})
    return {
        "conclusion": found.get("conclusion") if facts else None,
        "facts": facts,
        "missing_info": list(found.get("missing_info", ())),
        "recommendations": list(found.get("recommendations", ())),
    }


_BLAMED = re.compile(r"facts\[(\d+)\]")
_UNUSABLE = frozenset({"failed", "refused", "unknown", "error"})


def _judged(given: Mapping[str, Any]) -> dict[str, str]:
    """SUPPORTED when everything that the conclusion states literally stands in what it cites.

    Words are not judged: a runbook's words are its author's, only what fills their holes is found.
    """
    conclusion = str(given.get("conclusion") or "")
    evidence = [
        one for one in given.get("evidence", ()) if str(one.get("status", "")).lower() not in _UNUSABLE
    ]
    said = [*(fact.get("text") for fact in given.get("facts", ())), *(one.get("result") for one in evidence)]
    absent = [literal.text for literal in missing(conclusion, corpus_of(said))]
    if not conclusion or not evidence:
        reason = "no usable evidence is cited" if conclusion else "there is no conclusion"
    else:
        reason = f"not in the cited evidence: {', '.join(absent)}" if absent else ""
    verdict = SemanticVerdict.UNSUPPORTED if reason else SemanticVerdict.SUPPORTED
    return {"verdict": verdict.value, "reason": reason or "everything it states is in the cited evidence"}


# --- words ----------------------------------------------------------------------------------------

_PASSAGES = 3
_CHINESE = re.compile("[\u4e00-\u9fff]")

_PHRASES = {
    "en": {
        "nothing_open": "There is no open task to cancel.",
        "unclear": "I am not sure what you want me to do.",
        "capabilities": "I can: {titles}.",
        "no_runbook": "which procedure to follow: no runbook matches this request",
        "found": "This is what the knowledge base says:",
        "not_found": "The knowledge base has nothing about this.",
    },
    "zh": {
        "nothing_open": "当前没有可以取消的任务。",
        "unclear": "我不确定您想让我做什么。",
        "capabilities": "我可以：{titles}。",
        "no_runbook": "应执行哪个流程：没有与该请求匹配的运行手册",
        "found": "知识库中的相关内容：",
        "not_found": "知识库中没有相关内容。",
    },
}
_SEPARATORS = {"en": "; ", "zh": "；"}


def _language(briefing: Briefing) -> str:
    """Chinese for a Chinese text, whatever the client says; else the locale's language."""
    said = briefing.request + briefing.text
    return "zh" if _CHINESE.search(said) else re.split("[-_]", briefing.locale)[0].lower() or "en"


def _phrase(key: str, language: str) -> str:
    return _PHRASES.get(language, _PHRASES["en"])[key]


def _capabilities(titles: Sequence[str], language: str) -> str:
    listed = _SEPARATORS.get(language, "; ").join(titles)
    return _phrase("capabilities", language).format(titles=listed)


def _title(runbook: Runbook, language: str) -> str:
    return runbook.title.text(language, {}) or runbook.name


def _has_title(runbook: Runbook, title: str) -> bool:
    return bool(title) and any(one.text({}) == title for one in runbook.title.by_language.values())


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _usage(request: ChatRequest, reply: str) -> TokenUsage:
    asked = sum(len(message.content) for message in request.messages)
    return TokenUsage(
        prompt_tokens=-(-asked // CHARACTERS_PER_TOKEN),
        completion_tokens=-(-len(reply) // CHARACTERS_PER_TOKEN),
        estimated=True,
    )
