"""What of one turn the next one may know: a published diagnosis, nothing else (lifecycle 12.2)."""

from __future__ import annotations

import msgspec

from harness_service.core.display import cut
from turnfence.axes import IntentType, ReleaseOutcome
from turnfence.records import Content, DiagnosisReport, PreviousTurn, from_json, to_json

CONTEXT_MAX_CHARS = 4000


def published_result(
    intent: IntentType | None, outcome: ReleaseOutcome | None, answer: Content | None
) -> str:
    """The JSON to publish: only of DIAGNOSIS + SUCCESS with a report; else "".

    A suspension also releases SUCCESS, and publishes nothing.
    """
    if intent is not IntentType.DIAGNOSIS or outcome is not ReleaseOutcome.SUCCESS:
        return ""
    if answer is None or not isinstance(answer.body, DiagnosisReport):
        return ""
    return to_json(answer.body)


def as_context(previous: PreviousTurn | None, max_chars: int = CONTEXT_MAX_CHARS) -> str:
    """The previous turn as text for a prompt; "" when there is none to use."""
    if previous is None or not previous.published_result:
        return ""
    return cut(f"{previous.query}\n{_as_text(previous.published_result)}", max_chars)


def _as_text(published: str) -> str:
    """The conclusion and its facts in words; ids and citations mean nothing to the next turn."""
    try:
        report = from_json(published, DiagnosisReport)
    except msgspec.DecodeError:  # of a release that published another form
        return published
    parts = [report.conclusion, *(f"- {fact.text}" for fact in report.facts), *report.recommendations]
    return "\n".join(parts)
