"""Walking a runbook: from what a node has observed to what it does next, and to its draft.

Nothing is remembered between rounds. Each round walks the steps from the top over the observations, so
a node that is resumed in another process, after a crash or after the user's answer goes on the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec

from harness_service.adapters.runbook_format import (
    AskStep,
    OutputStep,
    Runbook,
    Sentence,
    Step,
    ToolStep,
    names_in,
)
from harness_service.adapters.templates import Template
from harness_service.ports import Briefing, Observation

REPORT = "builtin_report_progress"
ASK = "builtin_ask_user"
OUTPUT = "builtin_output_set"
FINISH = "builtin_finish"

_SETTLED = frozenset({"ok", "empty", "reused"})  # a result that can be read
_REPORTABLE = "ok"  # empty and repeated results are judged by the harness itself


class Call(msgspec.Struct, frozen=True):
    """A tool call to ask for, by wire name."""

    name: str
    arguments: dict[str, Any]


class Fact(msgspec.Struct, frozen=True):
    text: str
    evidence_id: str
    gained: bool


class Toolbox(msgspec.Struct, frozen=True):
    """What the walk may call, asked by catalogue name."""

    writes: Callable[[str], bool]
    offered: Callable[[str], bool]


class Walk(msgspec.Struct, frozen=True):
    """``calls``: what comes next; none: the steps are done. ``gaps``: steps without a result."""

    context: Mapping[str, Any]
    calls: tuple[Call, ...]
    facts: tuple[Fact, ...]
    gaps: tuple[str, ...]


def wire_name(tool: str) -> str:
    return tool.replace(".", "__")


def walk(runbook: Runbook, briefing: Briefing, language: str, tools: Toolbox) -> Walk:
    walker = _Walker(runbook, briefing, language, tools)
    for step in runbook.steps:
        if not walker.passed(step):
            break
    return Walk(walker.context(), tuple(walker.calls), walker.facts(), tuple(walker.gaps))


def report_call(briefing: Briefing, facts: Iterable[Fact], language: str) -> Call | None:
    """The progress report owed for the last round's results; None when nothing is owed.

    Only the last round can owe one, since nothing else is called before a report, or a result that a
    refusal names: a crash came between it and its report. A node that is resumed remembers its evidence
    and not its reports, and a refused report would be refused again.
    """
    said = {fact.evidence_id: fact for fact in facts}
    reports = [
        {
            "evidence_id": seen.evidence_id,
            "gain": "GAINED" if fact.gained else "NO_GAIN",
            "fact": fact.text,
        }
        for seen in _unreported(briefing.observations, briefing.round - 1)
        for fact in [
            said.get(seen.evidence_id) or Fact(_NOTHING_NEW.get(language, _NOTHING_NEW["en"]), "", False)
        ]
    ]
    return Call(REPORT, {"reports": reports}) if reports else None


def draft(runbook: Runbook, walked: Walk, briefing: Briefing, language: str) -> dict[str, Any]:
    """The runbook's draft from what is known; without a conclusion once a finish was refused."""
    refused = [seen for seen in briefing.observations if seen.tool == FINISH and seen.status == "refused"]
    conclusions = [] if refused else _said(runbook.conclusions, walked.context, language)
    return {
        "conclusion": conclusions[0] if conclusions else None,
        "facts": [{"text": fact.text, "evidence_ids": [fact.evidence_id]} for fact in walked.facts],
        "missing_info": [*_said(runbook.missing_info, walked.context, language), *walked.gaps],
        "recommendations": _said(runbook.recommendations, walked.context, language),
    }


_NOTHING_NEW = {"en": "The result adds nothing to this procedure.", "zh": "该结果没有带来新信息。"}

_GAPS = {
    "en": {
        "unavailable": "{tool} is not available",
        "refused": "{tool} could not be called",
        "failed": "{tool} failed",
        "unknown": "whether {tool} took effect is not known",
        "unanswered": "no answer to: {question}",
    },
    "zh": {
        "unavailable": "{tool} 不可用",
        "refused": "{tool} 未能调用",
        "failed": "{tool} 调用失败",
        "unknown": "{tool} 是否已生效尚不清楚",
        "unanswered": "没有得到回答：{question}",
    },
}


class _Walker:
    def __init__(self, runbook: Runbook, briefing: Briefing, language: str, tools: Toolbox) -> None:
        self._runbook = runbook
        self._briefing = briefing
        self._language = language
        self._tools = tools
        self._replies = [reply for reply in briefing.user_replies if reply != briefing.request]
        self._asked = 0
        self._pending: set[str] = set()
        self._bound: dict[str, Observation] = {}
        self._answers: dict[str, str] = {}
        self._captured = _captured(runbook, briefing)
        self.calls: list[Call] = []
        self.gaps: list[str] = []

    def context(self) -> dict[str, Any]:
        context: dict[str, Any] = {
            "text": self._briefing.text,
            "request": self._briefing.request,
            "language": self._language,
            "inputs": dict(self._briefing.inputs),
            "replies": self._replies,
            "answers": self._answers,
            "captured": self._captured,
            "previous_result": self._briefing.previous_result or None,
            "capabilities": [],
            "status": {name: seen.status for name, seen in self._bound.items()},
            "args": {name: seen.arguments for name, seen in self._bound.items()},
        }
        context |= {step.name: None for step in self._runbook.tool_steps}
        context |= {name: seen.result for name, seen in self._bound.items()}
        for name, expression in self._runbook.let.items():
            context[name] = expression.value(context)
        return context

    def facts(self) -> tuple[Fact, ...]:
        context = self.context()
        steps = {step.name: step for step in self._runbook.tool_steps}
        facts = []
        for name, seen in self._bound.items():
            step = steps[name]
            says = step.empty_fact if seen.status == "empty" else step.fact
            said = says.text(self._language, context) if says else None
            if said and seen.evidence_id:
                gained = step.gained is None or step.gained.holds(context)
                facts.append(Fact(said, seen.evidence_id, gained))
        return tuple(facts)

    def passed(self, step: Step) -> bool:
        """Whether the walk goes on behind ``step``; False: what was asked for must come back first."""
        if self._waits_for_results(step):
            return False
        if step.when is not None and not step.when.holds(self.context()):
            return True
        match step:
            case ToolStep():
                return self._tool(step)
            case AskStep():
                return self._ask(step)
            case OutputStep():
                return self._output(step)

    def _waits_for_results(self, step: Step) -> bool:
        if not self._pending:
            return False
        if not isinstance(step, ToolStep):
            return True
        reads = self._with_lets(names_in(step.when) | names_in(step.args))
        return bool(reads & (self._pending | {"status", "args"}))

    def _with_lets(self, names: frozenset[str]) -> frozenset[str]:
        lets = names & self._runbook.let.keys()
        return names.union(*(self._with_lets(self._runbook.let[name].names - {name}) for name in lets))

    def _tool(self, step: ToolStep) -> bool:
        arguments = _rendered(step.args, self.context())
        seen = self._observations(step, arguments)
        if seen and seen[-1].status in _SETTLED:
            self._bound[step.name] = seen[-1]
            return True
        if seen and not _worth_another(step, seen, arguments):
            return self._gap(seen[-1].status, tool=step.tool)
        if not self._tools.offered(step.tool):
            return self._gap("unavailable", tool=step.tool)
        if not self._tools.writes(step.tool):
            self.calls.append(Call(wire_name(step.tool), arguments))
            self._pending.add(step.name)
            return True
        if not self.calls:  # a write goes alone: it may wait for the user's approval
            self.calls.append(Call(wire_name(step.tool), arguments))
        return False

    def _observations(self, step: ToolStep, arguments: Mapping[str, Any]) -> list[Observation]:
        demanded = _demanded(self._briefing.observations)
        seen = [
            one
            for one in self._briefing.observations
            if one.tool in (step.tool, wire_name(step.tool))
            and not (one.status == "refused" and any(evidence in one.reason for evidence in demanded))
        ]
        only = sum(other.tool == step.tool for other in self._runbook.tool_steps) == 1
        return seen if only else [one for one in seen if _covers(one.arguments, arguments)]

    def _ask(self, step: AskStep) -> bool:
        if self.calls:
            return False
        place = self._asked
        self._asked += 1
        if place < len(self._replies):
            self._answers[step.name] = self._replies[place].strip()
            return True
        asked = sum(seen.tool == ASK for seen in self._briefing.observations)
        question = step.ask.text(self._language, self.context())
        if question is None or asked > place or not self._tools.offered(ASK):
            return self._gap("unanswered", question=question or step.name)
        suggestions = [one.text(self._language, self.context()) for one in step.suggestions]
        arguments = {
            "question": question,
            "expected_fields": list(step.fields),
            "suggestions": [suggestion for suggestion in suggestions if suggestion],
        }
        self.calls.append(Call(ASK, arguments))
        return False

    def _output(self, step: OutputStep) -> bool:
        value = step.value.value(self._language, self.context())
        done = any(
            seen.tool == OUTPUT and _covers(seen.arguments, {"name": step.output})
            for seen in self._briefing.observations
        )
        if value is not None and not done and self._tools.offered(OUTPUT):
            self.calls.append(Call(OUTPUT, {"name": step.output, "value": value}))
        return True

    def _gap(self, kind: str, **words: str) -> bool:
        self.gaps.append(_GAPS.get(self._language, _GAPS["en"])[kind].format(**words))
        return True


def _worth_another(step: ToolStep, seen: list[Observation], arguments: Mapping[str, Any]) -> bool:
    """A refused call is made again only with other arguments, a failed one ``attempts`` times."""
    last = seen[-1]
    if last.status == "refused":
        return not any(one.status == "refused" and _covers(one.arguments, arguments) for one in seen)
    return last.status == "failed" and sum(one.status == "failed" for one in seen) < step.attempts


def _unreported(observations: Iterable[Observation], last_round: int) -> list[Observation]:
    seen = list(observations)
    reports = [one for one in seen if one.tool == REPORT]
    named = {
        report.get("evidence_id")
        for one in reports
        if isinstance(one.arguments, Mapping)
        for report in one.arguments.get("reports", ())
        if isinstance(report, Mapping)
    }
    since = max((one.round for one in reports), default=last_round)
    return [
        one
        for one in seen
        if one.evidence_id
        and one.status == _REPORTABLE
        and one.evidence_id not in named
        and (one.round >= max(since, last_round) or one.evidence_id in _demanded(seen))
    ]


def _demanded(observations: Iterable[Observation]) -> frozenset[str]:
    """Evidence without which calls are refused: the refusals' reasons name it."""
    seen = list(observations)
    reasons = " ".join(one.reason for one in seen if one.status == "refused" and one.tool != REPORT)
    return frozenset(one.evidence_id for one in seen if one.evidence_id and one.evidence_id in reasons)


def _captured(runbook: Runbook, briefing: Briefing) -> dict[str, str]:
    """The first hit of each capture, looked for in the newest text first."""
    texts = (briefing.text, briefing.request)
    hits = {
        name: [hit[1].strip() for said in texts for pattern in patterns if (hit := pattern.search(said))]
        for name, patterns in runbook.capture.items()
    }
    return {name: found[0] for name, found in hits.items() if found and found[0]}


def _rendered(value: Any, context: Mapping[str, Any]) -> Any:
    """Arguments with their holes filled; what is null is left out."""
    if isinstance(value, Template):
        return value.value(context)
    if isinstance(value, Mapping):
        rendered = {key: _rendered(item, context) for key, item in value.items()}
        return {key: item for key, item in rendered.items() if item is not None}
    if isinstance(value, tuple):
        return [item for item in (_rendered(one, context) for one in value) if item is not None]
    return value


def _covers(actual: Any, wanted: Mapping[str, Any]) -> bool:
    """The actual arguments have more than the wanted ones: the platform adds its own."""
    return isinstance(actual, Mapping) and all(
        key in actual and actual[key] == item for key, item in wanted.items()
    )


def _said(sentences: Iterable[Sentence], context: Mapping[str, Any], language: str) -> list[str]:
    said = [
        sentence.text.text(language, context)
        for sentence in sentences
        if sentence.when is None or sentence.when.holds(context)
    ]
    return [text for text in said if text]
