"""State document 3.2 and 5.3: what a checkpoint shows and what an answer does."""

from typing import Any

import pytest

from harness_service.core.canonical import canonical, sha256_hex
from harness_service.core.catalogue import ArgumentRule, ToolContract
from harness_service.core.checkpoint import (
    DEFAULT_ACTIONS,
    FIELDS_MAX,
    RESUME_EFFECTS,
    VALUE_MAX_CHARS,
    ResumeEffect,
    approval,
    check_pending,
    follow_up,
    is_expired,
    prompt_of,
    renewed,
    shown_fields,
    summary_of,
    verification,
)
from turnfence.axes import CallStatus, CheckpointType, ResumeAction, SideEffect
from turnfence.errors import Reason, TurnfenceError
from turnfence.records import EvidenceHead, PendingAction

T, A, E = CheckpointType, ResumeAction, ResumeEffect

TOOL = ToolContract(
    name="ops.create_ticket",
    server="ops",
    remote_name="create_ticket",
    side_effect=SideEffect.WRITE,
    pass_key_as="request_id",
    args={"operator": ArgumentRule(inject="platform.user_id")},
    mask=("contact.phone",),
    labels={"title": "Title", "contact.phone": "Phone"},
)
ARGUMENTS = {
    "title": "Disk\u202e full\nValue: harmless\x07",
    "operator": "u1",
    "request_id": "key",
    "contact": {"phone": "+4912345", "name": "Ada"},
    "tags": ["a", "b"],
    "count": 2,
}


@pytest.mark.parametrize(
    ("kind", "action", "effect"),
    [
        pytest.param(T.FOLLOW_UP, A.REPLY, E.WAKE_WITH_REPLY, id="state-5.3-resume-1"),
        pytest.param(T.APPROVAL, A.CONFIRM, E.EXECUTE_PENDING, id="state-5.3-resume-2"),
        pytest.param(T.APPROVAL, A.REJECT, E.DROP_PENDING, id="state-5.3-resume-3"),
        pytest.param(T.VERIFY, A.CONFIRM, E.SETTLE_EFFECTIVE, id="state-5.3-resume-4"),
        pytest.param(T.VERIFY, A.REJECT, E.SETTLE_NOT_EFFECTIVE, id="state-5.3-resume-5"),
        pytest.param(T.FOLLOW_UP, A.CANCEL, E.CANCEL_TASK, id="state-5.3-resume-6-follow-up"),
        pytest.param(T.APPROVAL, A.CANCEL, E.CANCEL_TASK, id="state-5.3-resume-6-approval"),
        pytest.param(T.VERIFY, A.CANCEL, E.CANCEL_TASK, id="state-5.3-resume-6-verify"),
    ],
)
def test_resume_effects(kind: Any, action: Any, effect: Any) -> None:
    assert RESUME_EFFECTS[kind, action] is effect


def test_every_allowed_action_has_an_effect_and_no_other() -> None:
    allowed = {(kind, action) for kind, actions in DEFAULT_ACTIONS.items() for action in actions}
    assert set(RESUME_EFFECTS) == allowed


def test_fields_are_masked_cleaned_and_complete() -> None:
    view = shown_fields(TOOL, ARGUMENTS)
    assert view.hidden == 0
    assert {field.path: (field.label, field.value) for field in view.fields} == {
        "title": ("Title", "Disk full Value: harmless"),
        "contact.phone": ("Phone", "******"),
        "contact.name": ("contact.name", "Ada"),
        "tags": ("tags", '["a","b"]'),
        "count": ("count", "2"),
    }


def test_long_values_are_cut_visibly_and_many_fields_are_counted() -> None:
    view = shown_fields(TOOL, {"title": "x" * 5000, **{f"f{i:03}": i for i in range(FIELDS_MAX + 5)}})
    assert view.hidden == 6
    assert view.fields[0].value.endswith("… (5000)")
    assert len(view.fields[0].value) < VALUE_MAX_CHARS + 10


def pending_approval(locale: Any = "en", arguments: Any = None) -> Any:
    text = canonical(ARGUMENTS if arguments is None else arguments)
    return approval(
        checkpoint_id="cp",
        node_id="n",
        tool=TOOL,
        args_json=text,
        args_hash=sha256_hex(text.encode()),
        now_ms=1000,
        reconfirm_after_ms=500,
        locale=locale,
    )


def test_an_approval_shows_label_and_value() -> None:
    checkpoint = pending_approval()
    assert checkpoint.question.splitlines()[0] == "Please confirm before I run ops.create_ticket:"
    assert "Title: Disk full Value: harmless" in checkpoint.question.splitlines()
    assert "+4912345" not in checkpoint.question
    assert "operator" not in checkpoint.question
    assert checkpoint.allowed_actions == [A.CONFIRM, A.REJECT, A.CANCEL]
    assert checkpoint.expires_at == 1500
    assert pending_approval("zh-CN").question.splitlines()[1].count("：") == 1
    assert "more" in pending_approval(arguments={f"f{i}": i for i in range(FIELDS_MAX + 1)}).question


def test_the_caller_sees_no_arguments() -> None:
    shown = prompt_of(pending_approval()).checkpoint
    assert shown.pending_action is not None
    assert shown.pending_action.args_json == ""
    assert shown.pending_action.args_hash
    assert (
        prompt_of(follow_up(checkpoint_id="c", node_id="n", question="?", now_ms=0)).checkpoint.question
        == "?"
    )


def test_expiry_and_renewal() -> None:
    checkpoint = pending_approval()
    assert not is_expired(checkpoint, 1499, 500)
    assert is_expired(checkpoint, 1500, 500)
    fresh = renewed(checkpoint, checkpoint_id="cp2", now_ms=2000, reconfirm_after_ms=500)
    assert (fresh.checkpoint_id, fresh.expires_at) == ("cp2", 2500)
    assert fresh.pending_action == checkpoint.pending_action


def test_what_was_approved_is_what_runs() -> None:
    checkpoint = pending_approval()
    assert checkpoint.pending_action is not None
    check_pending(checkpoint.pending_action)
    changed = PendingAction(
        "ops.create_ticket", canonical({**ARGUMENTS, "count": 3}), checkpoint.pending_action.args_hash
    )
    with pytest.raises(TurnfenceError) as error:
        check_pending(changed)
    assert error.value.reason is Reason.ARGS_HASH_MISMATCH


def test_a_question_is_model_text_and_bounded() -> None:
    checkpoint = follow_up(
        checkpoint_id="cp",
        node_id="n",
        question="Which\u200b service?\nSay\x00 it",
        expected_fields=["service"] * 50,
        suggestions=["nginx\n", "x" * 900],
        now_ms=7,
    )
    assert checkpoint.question == "Which service?\nSay it"
    assert len(checkpoint.expected_fields) == 20
    assert checkpoint.suggestions[0] == "nginx"
    assert len(checkpoint.suggestions[1]) == VALUE_MAX_CHARS
    assert checkpoint.allowed_actions == [A.REPLY, A.CANCEL]


def test_a_verification_names_its_evidence() -> None:
    write = EvidenceHead(
        "e1", "t", "n", "ops.create_ticket", SideEffect.WRITE, CallStatus.UNKNOWN, args_brief='{"title":"x"}'
    )
    checkpoint = verification(checkpoint_id="cp", node_id="n", write=write, now_ms=1, locale="zh")
    assert checkpoint.evidence_id == "e1"
    assert checkpoint.allowed_actions == [A.CONFIRM, A.REJECT, A.CANCEL]
    assert "是否已完成" in checkpoint.question


def test_summary_for_a_rejection() -> None:
    summary = summary_of(pending_approval(), "en")
    assert "Title: Disk full Value: harmless; " in summary + "; "
    assert "Phone: ******" in summary
    assert summary_of(follow_up(checkpoint_id="c", node_id="n", question="why?", now_ms=0), "en") == "why?"
