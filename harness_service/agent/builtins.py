"""The built-in tools of a node: what the model may do besides calling business tools."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from harness_service.agent.node_run import NodeRun, Observed
from harness_service.core import checkpoint, goal_gate, notes
from harness_service.core import collection as collections
from harness_service.core import draft as drafts
from harness_service.core.arguments import ArgumentsRefused, parse_arguments
from harness_service.core.canonical import canonical
from harness_service.core.draft import DiagnosisDraft, InvalidDraft
from harness_service.ports import OfferedTool
from turnfence import records as r
from turnfence.axes import InformationGain, SourceType, TraceEventStatus, TraceEventType, TracePhase

REPORT_PROGRESS = "builtin_report_progress"
ASK_USER = "builtin_ask_user"
OUTPUT_SET = "builtin_output_set"
STATE_SET = "builtin_state_set"
FINISH = "builtin_finish"


class Finished(msgspec.Struct, frozen=True):
    """The node's loop ended with a draft; ``claimed``: its target was the first write it called."""

    draft: DiagnosisDraft
    claimed: bool = False


class DraftInvalid(msgspec.Struct, frozen=True):
    """The draft was no draft: it is dropped."""

    fault: str


Outcome = Observed | Finished | DraftInvalid | r.TaskCheckpoint


class _Report(msgspec.Struct, frozen=True):
    evidence_id: str
    gain: InformationGain
    fact: str = ""


class _Reports(msgspec.Struct, frozen=True):
    reports: list[_Report]


class _Question(msgspec.Struct, frozen=True):
    question: str
    expected_fields: list[str] = []
    suggestions: list[str] = []


class _Named(msgspec.Struct, frozen=True):
    name: str
    value: Any


class _Draft(msgspec.Struct, frozen=True):
    draft: Any


_TEXT = {"type": "string"}
_TEXTS = {"type": "array", "items": _TEXT}


def _object(required: list[str], **properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "additionalProperties": False,
        "required": required,
        "properties": properties,
    }


OFFERED: Mapping[str, OfferedTool] = {
    tool.name: tool
    for tool in (
        OfferedTool(
            REPORT_PROGRESS,
            "Judge tool results: GAINED with the fact that was learned, or NO_GAIN.",
            _object(
                ["reports"],
                reports={
                    "type": "array",
                    "items": _object(
                        ["evidence_id", "gain", "fact"],
                        evidence_id=_TEXT,
                        gain={"type": "string", "enum": [gain.value for gain in InformationGain]},
                        fact=_TEXT,
                    ),
                },
            ),
        ),
        OfferedTool(
            ASK_USER,
            "Ask the user for what only they can tell; the step waits for the answer.",
            _object(["question"], question=_TEXT, expected_fields=_TEXTS, suggestions=_TEXTS),
        ),
        OfferedTool(
            OUTPUT_SET,
            "Set one of this step's outputs.",
            _object(["name", "value"], name=_TEXT, value={}),
        ),
        OfferedTool(
            STATE_SET,
            "Keep a note of your own for later rounds.",
            _object(["name", "value"], name=_TEXT, value={}),
        ),
        OfferedTool(
            FINISH,
            "End this step with a draft.",
            _object(["draft"], draft=drafts.DRAFT_SCHEMA),
        ),
    )
}


def call_builtin(run: NodeRun, name: str, arguments_json: str, call_id: str) -> Outcome:
    """Carry a built-in call out; a bad one is refused with "reason, next step"."""
    try:
        return _HANDLERS[name](run, parse_arguments(arguments_json), call_id)
    except ArgumentsRefused as refused:
        if name == FINISH:
            return DraftInvalid(refused.reason)
        return run.refuse(name, arguments_json, refused.reason, refused.next_step, call_id)


def _convert(arguments: dict[str, Any], kind: Any) -> Any:
    try:
        return msgspec.convert(arguments, kind)
    except msgspec.ValidationError as fault:
        raise ArgumentsRefused(str(fault), "correct the arguments and call it again") from fault


def _done(run: NodeRun, name: str, arguments: dict[str, Any], call_id: str, result: str) -> Observed:
    run.act("builtin", name, canonical(arguments), result, call_id)
    return Observed(name, "ok", result=result)


def _report_progress(run: NodeRun, arguments: dict[str, Any], call_id: str) -> Observed:
    """Each report is judged alone: a bad one is a violation, the others count."""
    reports: _Reports = _convert(arguments, _Reports)
    faults = []
    for report in reports.reports:
        step = collections.with_report(
            run.collection, report.evidence_id, report.gain, report.fact, run.thresholds
        )
        run.put_collection(step.collection)
        known = report.evidence_id in run.heads
        run.scope.trace(
            TraceEventType.TOOL_PROGRESS,
            TracePhase.TOOL,
            TraceEventStatus.REJECTED if step.fault else TraceEventStatus.SUCCEEDED,
            node_id=run.node.node_id,
            evidence_id=report.evidence_id if known else "",
            gain=report.gain.value,
            rated_by="agent",
        )
        if step.fault is not None:
            faults.append(f"{report.evidence_id[:64]}: {step.fault.value}")
    if faults or not reports.reports:
        return run.refuse(
            REPORT_PROGRESS,
            canonical(arguments),
            "; ".join(faults) or "there is no report in it",
            "report only evidence that you were given and have not rated yet",
            call_id,
        )
    return _done(run, REPORT_PROGRESS, arguments, call_id, "noted")


def _ask_user(run: NodeRun, arguments: dict[str, Any], call_id: str) -> r.TaskCheckpoint:
    question: _Question = _convert(arguments, _Question)
    if not question.question.strip():
        raise ArgumentsRefused("the question is empty", "ask one clear question")
    run.act("builtin", ASK_USER, question.question, "the user was asked", call_id)
    return checkpoint.follow_up(
        checkpoint_id=run.scope.new_id(),
        node_id=run.node.node_id,
        question=question.question,
        expected_fields=question.expected_fields,
        suggestions=question.suggestions,
        now_ms=run.scope.now(),
    )


def _output_set(run: NodeRun, arguments: dict[str, Any], call_id: str) -> Observed:
    named: _Named = _convert(arguments, _Named)
    if named.name not in run.skill.outputs:
        raise ArgumentsRefused(
            "this step has no such output", f"set one of: {', '.join(run.skill.outputs) or 'none'}"
        )
    value = r.Sourced(value_json=canonical(named.value), source=r.Source(type=SourceType.MODEL))
    run.space = msgspec.structs.replace(run.space, outputs={**run.space.outputs, named.name: value})
    run.put_space(outputs={named.name: value})
    return _done(run, OUTPUT_SET, {"name": named.name}, call_id, "set")


def _state_set(run: NodeRun, arguments: dict[str, Any], call_id: str) -> Observed:
    named: _Named = _convert(arguments, _Named)
    if notes.is_reserved(named.name) or len(named.name) > 128:
        raise ArgumentsRefused("this name is reserved, or too long", "choose another name")
    run.put_space(state={named.name: canonical(named.value)})
    return _done(run, STATE_SET, {"name": named.name}, call_id, "noted")


def _finish(run: NodeRun, arguments: dict[str, Any], call_id: str) -> Outcome:
    try:
        draft = drafts.parse_draft(_convert(arguments, _Draft).draft)
    except (InvalidDraft, ArgumentsRefused) as fault:
        return DraftInvalid(str(fault))
    verdict = goal_gate.judge_finish(
        run.node, run.skill.target, list(run.heads.values()), has_conclusion=draft.has_conclusion
    )
    if not verdict.accepted:
        return run.refuse(FINISH, "", verdict.reason, verdict.next_step, call_id)
    run.act("builtin", FINISH, json.dumps({"conclusion": draft.has_conclusion}), "accepted", call_id)
    return Finished(draft, claimed=verdict.target.claimed)


_HANDLERS: Mapping[str, Callable[[NodeRun, dict[str, Any], str], Outcome]] = {
    REPORT_PROGRESS: _report_progress,
    ASK_USER: _ask_user,
    OUTPUT_SET: _output_set,
    STATE_SET: _state_set,
    FINISH: _finish,
}
