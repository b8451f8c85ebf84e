"""Lifecycle document 12.2 and 15: what the next turn may know."""

from typing import Any

import pytest

from harness_service.core.previous_turn import as_context, published_result
from turnfence.axes import CheckpointType, FallbackType, IntentType, ReleaseOutcome
from turnfence.records import (
    ChatReply,
    CheckpointPrompt,
    Content,
    DiagnosisReport,
    Fact,
    Fallback,
    PreviousTurn,
    TaskCheckpoint,
    from_json,
    to_json,
)

REPORT = Content(DiagnosisReport("full"), "full")
FALLBACK = Content(Fallback(FallbackType.INSUFFICIENT_EVIDENCE), "x")
PROMPT = Content(CheckpointPrompt(TaskCheckpoint("c", CheckpointType.FOLLOW_UP, "n")), "?")


@pytest.mark.parametrize("intent", [*IntentType, None])
@pytest.mark.parametrize("outcome", [*ReleaseOutcome, None])
@pytest.mark.parametrize("answer", [REPORT, FALLBACK, PROMPT, Content(ChatReply("x"), "x"), None])
def test_only_a_successful_diagnosis_is_published(intent: Any, outcome: Any, answer: Any) -> None:
    published = published_result(intent, outcome, answer)
    if intent is IntentType.DIAGNOSIS and outcome is ReleaseOutcome.SUCCESS and answer is REPORT:
        assert from_json(published, DiagnosisReport) == REPORT.body
    else:
        assert published == ""


def test_context() -> None:
    assert as_context(None) == ""
    assert as_context(PreviousTurn("r", "query", "")) == "", "C112: a fallback is no previous turn"
    assert as_context(PreviousTurn("r", "why?", "because")) == "why?\nbecause"
    report = DiagnosisReport("It is full.", [Fact("/ is 99 % full", ["e"])], [], ["Free some space."])
    assert as_context(PreviousTurn("r", "why?", to_json(report))) == (
        "why?\nIt is full.\n- / is 99 % full\nFree some space."
    )
    assert len(as_context(PreviousTurn("r", "why?", "x" * 9000))) == 4000
