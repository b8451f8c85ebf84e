"""A turn's events as lines for a person. Pure: what is printed, and how, is decided elsewhere."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Any, NamedTuple

from turnfence import records as r
from turnfence.axes import ProcessingStage, ReleaseOutcome, ResumeAction
from turnfence.errors import TurnfenceError

_STAGES = {
    ProcessingStage.ROUTING: "routing",
    ProcessingStage.SYSTEM_RESPONDING: "answering",
    ProcessingStage.KNOWLEDGE_SEARCHING: "searching the knowledge base",
    ProcessingStage.KNOWLEDGE_ANSWERING: "answering from what was found",
    ProcessingStage.DIAGNOSIS_RUNNING: "investigating",
    ProcessingStage.SAFETY_VALIDATING: "checking the conclusion against its evidence",
}
# Controls, bidi overrides, zero-width characters: in a terminal they could rewrite what was shown.
_MISLEADING = frozenset({"Cc", "Cf", "Cs", "Co", "Zl", "Zp"})


class Tone(StrEnum):
    PLAIN = "plain"
    QUIET = "quiet"  # what goes on
    STRONG = "strong"  # the answer, a question
    BAD = "bad"


class Line(NamedTuple):
    text: str
    tone: Tone = Tone.PLAIN


def shown(text: str) -> str:
    """``text`` with every character that could mislead a reader of a terminal written as an escape."""
    return "".join(
        f"\\u{ord(char):04x}" if unicodedata.category(char) in _MISLEADING and char not in "\n\t" else char
        for char in text
    )


def lines_of(event: r.TurnEvent) -> list[Line]:
    """The lines of one event; none for one that has nothing to say to a person."""
    return [Line(shown(line.text), line.tone) for line in _RENDERERS[type(event.kind)](event.kind)]


def _metadata(kind: r.Metadata) -> list[Line]:
    cut = [Line("the message was too long and was cut", Tone.BAD)] if kind.truncated else []
    return [Line(f"conversation {kind.conversation_id}, run {kind.run_id}", Tone.QUIET), *cut]


def _status(kind: r.Status) -> list[Line]:
    return [Line(f"· {_STAGES[kind.stage]}", Tone.QUIET)]


def _progress(kind: r.Progress) -> list[Line]:
    where = f"{kind.node_title}: " if kind.node_title and kind.node_title not in kind.text else ""
    what = kind.text or kind.tool_name
    return [Line(f"· {where}{what}", Tone.QUIET)] if what else []


def _content(kind: r.Content) -> list[Line]:
    tone = Tone.BAD if isinstance(kind.body, r.Fallback) else Tone.STRONG
    lines = [Line(""), Line(kind.text, tone)]
    if isinstance(kind.body, r.CheckpointPrompt):
        lines += _checkpoint(kind.body.checkpoint, kind.text)
    if isinstance(kind.body, r.DiagnosisReport):
        lines += [Line(""), *_evidence(kind.body)]
    return [*lines, Line("")]


def _evidence(report: r.DiagnosisReport) -> list[Line]:
    """What the report rests on: each piece of evidence with the facts that cite it."""
    lines = [Line("Evidence:", Tone.QUIET)]
    for cited in report.evidence:
        facts = [str(n) for n, fact in enumerate(report.facts, 1) if cited.evidence_id in fact.evidence_ids]
        shows = f" for fact {', '.join(facts)}" if facts else ""
        lines.append(Line(f"  {cited.evidence_id}  {cited.tool_name} ({cited.status}){shows}", Tone.QUIET))
    return lines


def _checkpoint(checkpoint: r.TaskCheckpoint, said: str) -> list[Line]:
    """What the answer will decide about, exactly; only what the text has not said already."""
    facts: list[tuple[str, str]] = []
    if checkpoint.pending_action is not None:
        facts.append(("tool", checkpoint.pending_action.tool_name))
        facts.append(("arguments' hash", checkpoint.pending_action.args_hash))
    facts += [(field.label, field.value) for field in checkpoint.fields]
    if checkpoint.expected_fields:
        facts.append(("asked for", ", ".join(checkpoint.expected_fields)))
    unsaid = [(label, value) for label, value in facts if not (label in said and value in said)]
    lines = [Line(f"  {label}: {value}") for label, value in unsaid]
    lines += [Line(f"  {n}) {text}") for n, text in enumerate(checkpoint.suggestions, start=1)]
    actions = ", ".join(action.value for action in checkpoint.allowed_actions)
    return [*lines, Line(f"  waiting for {actions} (checkpoint {checkpoint.checkpoint_id})", Tone.QUIET)]


def _failure(kind: r.Failure) -> list[Line]:
    return [Line(""), Line(f"{kind.message} ({kind.reason})", Tone.BAD), Line("")]


def _done(kind: r.Done) -> list[Line]:
    durability = f", {kind.durability.value.lower()}" if kind.durability else ""
    ended = f"{kind.release_outcome}, task {kind.turn_status}{durability}"
    return [Line(f"{ended}; {_usage(kind.usage)}", Tone.QUIET)]


def _usage(usage: r.Usage) -> str:
    tokens = usage.prompt_tokens + usage.completion_tokens
    about = "about " if usage.tokens_estimated else ""
    spent = f"{usage.model_calls} model calls, {usage.tool_calls} tool calls, {about}{tokens} tokens"
    return spent if usage.duration is None else f"{spent}, {usage.duration / 1000:.1f} s"


def _gap(kind: r.Gap) -> list[Line]:
    return [Line(f"· events {kind.from_sequence} to {kind.to_sequence} are no longer kept", Tone.QUIET)]


_RENDERERS: dict[type, Callable[[Any], list[Line]]] = {
    r.Metadata: _metadata,
    r.Status: _status,
    r.Progress: _progress,
    r.Content: _content,
    r.Failure: _failure,
    r.Done: _done,
    r.Gap: _gap,
}


def lines_of_error(error: TurnfenceError) -> list[Line]:
    again = "" if error.retry_after is None else f" (may be tried again in {error.retry_after:g} s)"
    lines = [Line(f"{error.reason}: {error.message}{again}", Tone.BAD)]
    lines += [Line(f"  {fault.field} {fault.description}", Tone.BAD) for fault in error.violations]
    return [Line(shown(line.text), line.tone) for line in lines]


# --- answering a checkpoint -----------------------------------------------------------------------


class Answer(NamedTuple):
    """What to send; ``action`` None is a plain message, which the service decides about itself."""

    action: ResumeAction | None
    text: str = ""


def question_of(checkpoint: r.TaskCheckpoint) -> str:
    """The prompt at which a checkpoint is answered."""
    choices = [action.value for action in checkpoint.allowed_actions if action is not ResumeAction.REPLY]
    if ResumeAction.REPLY in checkpoint.allowed_actions:
        choices.append("your reply")
    return f"{' / '.join(choices)} (empty: answer later)"


def answer_of(checkpoint: r.TaskCheckpoint, line: str) -> Answer | None:
    """What a typed line answers: an allowed action by its name, a suggestion by its number, else a reply,
    or a plain message where replies are not allowed; None for an empty line. An action is never guessed:
    only its whole name counts, so that nothing is confirmed by a slip."""
    typed = line.strip()
    if not typed:
        return None
    for action in checkpoint.allowed_actions:
        if typed.upper() == action.value and action is not ResumeAction.REPLY:
            return Answer(action)
    reply = ResumeAction.REPLY if ResumeAction.REPLY in checkpoint.allowed_actions else None
    if typed.isascii() and typed.isdigit() and 0 < int(typed) <= len(checkpoint.suggestions):
        return Answer(reply, checkpoint.suggestions[int(typed) - 1])
    return Answer(reply, typed)


# --- the catalogue --------------------------------------------------------------------------------


def lines_of_agents(agents: Sequence[Any], skills: Sequence[Any], tools: Sequence[Any]) -> list[Line]:
    """An indented list of what ListAgents answered."""
    skill_of = {skill.skill_key: skill for skill in skills}
    tool_of = {tool.tool_name: tool for tool in tools}
    lines: list[Line] = []
    for agent in agents:
        lines.append(Line(f"{agent.agent_id}: {agent.title or agent.agent_id}", Tone.STRONG))
        lines += [Line(f"  {agent.description.strip()}")] if agent.description.strip() else []
        for key in agent.skill_keys:
            lines.append(Line(f"  {key}: {skill_of[key].title or key}"))
            lines += [_tool_line(tool_of[name]) for name in skill_of[key].tool_names]
    return [Line(shown(line.text), line.tone) for line in lines]


def _tool_line(tool: Any) -> Line:
    notes = ["asks first"] if tool.confirm else []
    notes += [] if tool.available else ["its server does not answer"]
    note = f" ({', '.join(notes)})" if notes else ""
    return Line(f"    {tool.tool_name}{note}", Tone.PLAIN if tool.available else Tone.BAD)


# --- how a command ends ---------------------------------------------------------------------------

RELEASED, NOT_RELEASED, USAGE = 0, 1, 2


def exit_code(done: r.Done | None) -> int:
    """0 when an answer was released, 1 for a fallback, a failure, or a stream without an end."""
    return RELEASED if done is not None and done.release_outcome is ReleaseOutcome.SUCCESS else NOT_RELEASED
