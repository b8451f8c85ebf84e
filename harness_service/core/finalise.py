"""What the caller reads at the end of a turn: typed content, with ``text`` ready to show."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from harness_service.core.checkpoint import prompt_of, summary_of
from harness_service.core.draft import DiagnosisDraft, to_facts
from harness_service.core.evidence_guard import citation
from harness_service.core.replies import FAILURE_REPLY, FALLBACK_REPLY, Reply, say
from harness_service.core.task import LEFT_BEHIND, LeftBehind, RunEnd
from turnfence.axes import FailureReason, FallbackType, ResumeAction, TaskStatus, TurnStatus
from turnfence.records import (
    ChatReply,
    Content,
    DiagnosisReport,
    EvidenceHead,
    Fact,
    Failure,
    Fallback,
    KnowledgeAnswer,
    KnowledgeSource,
    Notice,
    TaskCheckpoint,
)


def left_behind(end: RunEnd, open_checkpoint: TaskCheckpoint | None = None) -> LeftBehind:
    """The row of the table, with its one open cell filled: WAITING if a checkpoint stays open."""
    row = LEFT_BEHIND[end]
    if row.turn_status is not None:
        return row
    return LeftBehind(row.focus_node, row.task, TurnStatus.WAITING if open_checkpoint else TurnStatus.DONE)


def report(draft: DiagnosisDraft, evidence: Mapping[str, EvidenceHead], locale: str) -> Content:
    """A released conclusion with the facts and the evidence it rests on. The draft has passed all guards."""
    if not draft.conclusion:
        raise ValueError("a report needs a conclusion")
    body = DiagnosisReport(
        conclusion=draft.conclusion,
        facts=list(to_facts(draft)),
        evidence=[citation(evidence[evidence_id]) for evidence_id in draft.cited],
        recommendations=list(draft.recommendations),
    )
    text = _blocks(
        draft.conclusion,
        _listed(Reply.FACTS, [fact.text for fact in body.facts], locale),
        _listed(Reply.RECOMMENDATIONS, body.recommendations, locale),
    )
    return Content(body, text)


def fallback(
    kind: FallbackType, verified: Sequence[Fact], missing_info: Sequence[str], locale: str
) -> Content:
    """A typed fallback: verified facts and what is missing, never a conclusion."""
    explanation = say(FALLBACK_REPLY[kind], locale)
    body = Fallback(kind, list(verified), list(missing_info), explanation)
    text = _blocks(
        explanation,
        _listed(Reply.FACTS, [fact.text for fact in verified], locale),
        _listed(Reply.MISSING_INFO, missing_info, locale),
    )
    return Content(body, text)


def question(checkpoint: TaskCheckpoint) -> Content:
    """A suspension: the checkpoint's prompt, its pending action masked."""
    return Content(prompt_of(checkpoint), _blocks(checkpoint.question, "\n".join(checkpoint.suggestions)))


def notice(
    code: Reply, locale: str, *, prompt: TaskCheckpoint | None = None, values: Mapping[str, str] | None = None
) -> Content:
    """A sentence of the runtime; ``prompt``: the checkpoint that is open is shown below it."""
    text = _blocks(say(code, locale, **(values or {})), prompt.question if prompt else "")
    return Content(Notice(code.value, text), text)


def chat(text: str) -> Content:
    """Model text, marked as what it is."""
    return Content(ChatReply(text), text)


def knowledge(text: str, sources: Sequence[KnowledgeSource], locale: str) -> Content:
    """An answer with what it cites; with no sources: that nothing was found, in the runtime's words."""
    if not sources:
        nothing = say(Reply.NOTHING_FOUND, locale)
        return Content(KnowledgeAnswer(nothing), nothing)
    cited = [f"{source.title} ({source.location})" for source in sources]
    return Content(KnowledgeAnswer(text, list(sources)), _blocks(text, _listed(Reply.SOURCES, cited, locale)))


def failure(reason: FailureReason, locale: str) -> Failure:
    """The uniform public text of a failed run."""
    return Failure(reason, say(FAILURE_REPLY[reason], locale))


def task_ended_by_user(
    checkpoint: TaskCheckpoint | None,
    action: ResumeAction,
    unresolved: Iterable[EvidenceHead],
    locale: str,
) -> Content:
    """The reply to REJECT and CANCEL (and CANCEL_TASK: no checkpoint); writes nobody knows are named."""
    named = [f"{head.tool_name}: {head.args_brief} ({head.evidence_id})" for head in unresolved]
    if action is ResumeAction.REJECT and checkpoint is not None:
        code, text = Reply.REJECTED, say(Reply.REJECTED, locale, summary=summary_of(checkpoint, locale))
    else:
        code, text = Reply.TASK_CANCELLED, say(Reply.TASK_CANCELLED, locale)
    text = _blocks(text, _listed(Reply.UNRESOLVED_WRITES, named, locale))
    return Content(Notice(code.value, text), text)


def closing_status(left: LeftBehind) -> TaskStatus | None:
    """The terminal status that a left-behind task must be closed with; None: it stays open."""
    ends = (TaskStatus.SUCCEEDED, TaskStatus.FAILED, TaskStatus.CANCELED)
    return left.task if left.task in ends else None


def _listed(heading: Reply, items: Sequence[str], locale: str) -> str:
    return "\n".join([say(heading, locale), *(f"- {item}" for item in items)]) if items else ""


def _blocks(*blocks: str) -> str:
    return "\n\n".join(block for block in blocks if block)
