"""The content a caller reads."""

from typing import Any

import pytest

from harness_service.core.draft import DiagnosisDraft, DraftFact
from harness_service.core.finalise import (
    chat,
    closing_status,
    failure,
    fallback,
    knowledge,
    left_behind,
    notice,
    question,
    report,
    task_ended_by_user,
)
from harness_service.core.replies import Reply
from harness_service.core.task import LEFT_BEHIND, RunEnd
from turnfence.axes import (
    CallStatus,
    CheckpointType,
    EvidenceStatus,
    FailureReason,
    FallbackType,
    ResumeAction,
    SideEffect,
    TaskStatus,
    TurnStatus,
)
from turnfence.records import (
    ChatReply,
    CheckpointPrompt,
    DiagnosisReport,
    EvidenceHead,
    Fact,
    Fallback,
    KnowledgeAnswer,
    KnowledgeSource,
    Notice,
    PendingAction,
    ShownField,
    TaskCheckpoint,
)

HEAD = EvidenceHead(
    "e1",
    "t",
    "n",
    "ops.disk",
    SideEffect.NONE,
    CallStatus.SUCCESS,
    business_ok=True,
    result_brief="b",
    finished_at=4,
)
APPROVAL = TaskCheckpoint(
    "cp",
    CheckpointType.APPROVAL,
    "n",
    question="Confirm?",
    pending_action=PendingAction("ops.write", '{"secret":1}', "h"),
    fields=[ShownField("Title", "x")],
)


def test_report() -> None:
    draft = DiagnosisDraft("Disk full.", (DraftFact("99%", ("e1",)),), (), ("clean",))
    content = report(draft, {"e1": HEAD}, "en")
    assert isinstance(content.body, DiagnosisReport)
    assert content.body.evidence[0].status is EvidenceStatus.EVIDENCE_FOUND
    assert content.body.evidence[0].observed_at == 4
    assert content.text == "Disk full.\n\nWhat was found:\n- 99%\n\nRecommendations:\n- clean"
    with pytest.raises(ValueError, match="needs a conclusion"):
        report(DiagnosisDraft(), {}, "en")


@pytest.mark.parametrize("kind", FallbackType)
@pytest.mark.parametrize("locale", ["en", "zh-CN"])
def test_fallback(kind: Any, locale: Any) -> None:
    content = fallback(kind, [Fact("99%", ["e1"])], ["which host?"], locale)
    assert isinstance(content.body, Fallback)
    assert content.body.type is kind
    assert content.text.startswith(content.body.explanation)
    assert "- 99%" in content.text
    assert "- which host?" in content.text


def test_question() -> None:
    content = question(APPROVAL)
    assert isinstance(content.body, CheckpointPrompt)
    assert "secret" not in repr(content)
    assert content.text == "Confirm?"


def test_notice() -> None:
    content = notice(Reply.CHOOSE_ACTION, "zh-CN", prompt=APPROVAL)
    assert content.body == Notice("CHOOSE_ACTION", content.text)
    assert content.text == "请先在页面上选择要执行的操作\n\nConfirm?"
    assert notice(Reply.NO_PENDING_ACTION, "en").text == "There is nothing waiting for your confirmation."


def test_chat_and_knowledge() -> None:
    assert chat("hi").body == ChatReply("hi")
    source = KnowledgeSource("Disks", "disks.md", "…")
    answer = knowledge("Clean them.", [source], "en")
    assert answer.body == KnowledgeAnswer("Clean them.", [source])
    assert answer.text == "Clean them.\n\nSources:\n- Disks (disks.md)"
    nothing = knowledge("I made this up.", [], "en")
    assert nothing.text == "I found nothing about this in the knowledge base."
    assert "made this up" not in repr(nothing)


@pytest.mark.parametrize("reason", FailureReason)
def test_failure(reason: Any) -> None:
    said = failure(reason, "en")
    assert said.reason is reason
    assert said.message


def test_rejection_as_the_document_words_it() -> None:
    content = task_ended_by_user(APPROVAL, ResumeAction.REJECT, [], "zh-CN")
    assert content.text == "已取消，未执行：Title：x。如需换个做法，直接告诉我。"


def test_D46_cancel_lists_what_is_unresolved() -> None:
    content = task_ended_by_user(APPROVAL, ResumeAction.CANCEL, [HEAD], "en")
    assert content.text == "The task was cancelled.\n\nActions whose outcome is unknown:\n- ops.disk:  (e1)"
    assert task_ended_by_user(None, ResumeAction.CANCEL, [], "en").text == "The task was cancelled."


@pytest.mark.parametrize(
    ("checkpoint", "status"),
    [
        pytest.param(None, TurnStatus.DONE, id="harness-ends-8-done"),
        pytest.param(APPROVAL, TurnStatus.WAITING, id="harness-ends-8-waiting"),
    ],
)
def test_beside_a_task(checkpoint: Any, status: Any) -> None:
    assert left_behind(RunEnd.UNTOUCHED, checkpoint).turn_status is status
    assert left_behind(RunEnd.RELEASED, checkpoint) == LEFT_BEHIND[RunEnd.RELEASED]


@pytest.mark.parametrize(
    ("end", "status"),
    [
        (RunEnd.RELEASED, TaskStatus.SUCCEEDED),
        (RunEnd.ENDED_BY_USER, TaskStatus.CANCELED),
        (RunEnd.BUDGET_FALLBACK, TaskStatus.FAILED),
        (RunEnd.FAILED, TaskStatus.FAILED),
        (RunEnd.SUSPENDED, None),
        (RunEnd.CANCELLED, None),
        (RunEnd.INTERRUPTED, None),
        (RunEnd.FENCED, None),
        (RunEnd.UNTOUCHED, None),
        (RunEnd.FAILED_BESIDE, None),
    ],
)
def test_which_tasks_are_closed(end: Any, status: Any) -> None:
    assert closing_status(left_behind(end)) is status
