"""State document 5.3, cell by cell, with wire.md's checkpoint_id rules."""

from typing import Any

import pytest

from harness_service.core.checkpoint import DEFAULT_ACTIONS, DEFAULT_RESUME
from harness_service.core.entry_guard import (
    CANCEL_TASK,
    DISPATCH,
    PASS,
    RECONFIRM,
    SWITCH_AGENT,
    VERIFY_FIRST,
    GuardDecision,
    GuardKind,
    decide,
    decide_continue,
    require_checkpoint_id,
    write_to_verify,
)
from harness_service.core.replies import Reply
from turnfence.axes import CallStatus, CheckpointType, ResumeAction, SideEffect
from turnfence.errors import Reason, TurnfenceError
from turnfence.records import EvidenceHead, PendingAction, TaskCheckpoint

DAY = 86_400_000
T = CheckpointType
A = ResumeAction


def checkpoint(kind: Any, *, created_at: Any = 0, expires_at: Any = None) -> Any:
    return TaskCheckpoint(
        checkpoint_id="cp",
        type=kind,
        node_id="n",
        allowed_actions=list(DEFAULT_ACTIONS[kind]),
        pending_action=PendingAction("ops.write", "{}", "hash") if kind is T.APPROVAL else None,
        created_at=created_at,
        expires_at=expires_at,
    )


def unknown_write(
    evidence_id: Any = "e",
    *,
    task_id: Any = "t",
    args_hash: Any = "other",
    status: Any = CallStatus.UNKNOWN,
    started_at: Any = 1,
) -> Any:
    return EvidenceHead(
        evidence_id,
        task_id,
        "n",
        "ops.write",
        SideEffect.WRITE,
        status,
        args_hash=args_hash,
        started_at=started_at,
    )


def guard(**given: Any) -> Any:
    return decide(
        **{
            "action": None,
            "has_text": False,
            "checkpoint": None,
            "now_ms": 1,
            "reconfirm_after_ms": DAY,
            **given,
        }
    )


def resume(action: Any) -> Any:
    return GuardDecision(GuardKind.RESUME, action=action)


def reply(notice: Any, with_prompt: Any = False) -> Any:
    return GuardDecision(GuardKind.REPLY, notice=notice, with_prompt=with_prompt)


@pytest.mark.parametrize(
    ("action", "has_text", "expected"),
    [
        pytest.param(A.CONFIRM, False, reply(Reply.NO_PENDING_ACTION), id="state-5.3-1-confirm"),
        pytest.param(A.REJECT, False, reply(Reply.NO_PENDING_ACTION), id="state-5.3-1-reject"),
        pytest.param(A.CANCEL, True, reply(Reply.NO_PENDING_ACTION), id="state-5.3-1-cancel"),
        pytest.param(A.REPLY, True, PASS, id="state-5.3-2"),
        pytest.param(None, True, PASS, id="state-5.3-3"),
        pytest.param(None, False, reply(Reply.EMPTY_MESSAGE), id="state-5.3-4"),
    ],
)
def test_without_a_checkpoint(action: Any, has_text: Any, expected: Any) -> None:
    assert guard(action=action, has_text=has_text) == expected


NOT_ALLOWED = reply(Reply.ACTION_NOT_ALLOWED, with_prompt=True)
CHOOSE = reply(Reply.CHOOSE_ACTION, with_prompt=True)
WITH_CHECKPOINT = [
    ("state-5.3-1", T.FOLLOW_UP, A.CONFIRM, False, NOT_ALLOWED),
    ("state-5.3-1", T.FOLLOW_UP, A.REJECT, False, NOT_ALLOWED),
    ("state-5.3-1", T.FOLLOW_UP, A.CANCEL, False, resume(A.CANCEL)),
    ("state-5.3-1", T.APPROVAL, A.CONFIRM, False, resume(A.CONFIRM)),
    ("state-5.3-1", T.APPROVAL, A.REJECT, False, resume(A.REJECT)),
    ("state-5.3-1", T.APPROVAL, A.CANCEL, False, resume(A.CANCEL)),
    ("state-5.3-1", T.VERIFY, A.CONFIRM, False, resume(A.CONFIRM)),
    ("state-5.3-1", T.VERIFY, A.REJECT, False, resume(A.REJECT)),
    ("state-5.3-1-D46", T.VERIFY, A.CANCEL, False, resume(A.CANCEL)),
    ("state-5.3-2", T.FOLLOW_UP, A.REPLY, True, resume(A.REPLY)),
    ("state-5.3-2", T.FOLLOW_UP, A.REPLY, False, resume(A.REPLY)),
    ("state-5.3-2-no-question", T.APPROVAL, A.REPLY, True, NOT_ALLOWED),
    ("state-5.3-2-no-question", T.VERIFY, A.REPLY, True, NOT_ALLOWED),
    ("state-5.3-3", T.FOLLOW_UP, None, True, DISPATCH),
    ("state-5.3-3", T.APPROVAL, None, True, DISPATCH),
    ("state-5.3-3", T.VERIFY, None, True, DISPATCH),
    ("state-5.3-4", T.FOLLOW_UP, None, False, resume(A.REPLY)),
    ("state-5.3-4", T.APPROVAL, None, False, CHOOSE),
    ("state-5.3-4", T.VERIFY, None, False, CHOOSE),
]


@pytest.mark.parametrize(
    ("kind", "action", "has_text", "expected"),
    [pytest.param(*row[1:], id=f"{row[0]}-{row[1]}-{row[2]}-{row[3]}") for row in WITH_CHECKPOINT],
)
def test_with_a_checkpoint(kind: Any, action: Any, has_text: Any, expected: Any) -> None:
    assert guard(action=action, has_text=has_text, checkpoint=checkpoint(kind)) == expected


@pytest.mark.parametrize("kind", T)
@pytest.mark.parametrize(
    ("requested", "expected"),
    [
        pytest.param("other", SWITCH_AGENT, id="state-5.3-5"),
        pytest.param("mine", DISPATCH, id="state-5.3-5-same"),
        pytest.param("", DISPATCH, id="state-5.3-5-none"),
    ],
)
def test_another_agent_is_asked_for(kind: Any, requested: Any, expected: Any) -> None:
    decision = guard(has_text=True, checkpoint=checkpoint(kind), requested_agent=requested, task_agent="mine")
    assert decision == expected


@pytest.mark.parametrize(
    ("action", "has_text", "expected"),
    [
        pytest.param(A.CONFIRM, False, RECONFIRM, id="state-5.3-6-confirm-D55"),
        pytest.param(None, False, RECONFIRM, id="state-5.3-6-nothing"),
        pytest.param(None, True, DISPATCH, id="state-5.3-6-text"),
        pytest.param(A.REJECT, False, resume(A.REJECT), id="state-5.3-6-reject-runs-nothing"),
        pytest.param(A.CANCEL, False, resume(A.CANCEL), id="state-5.3-6-cancel-stays-possible"),
    ],
)
@pytest.mark.parametrize("stored", [None, DAY], ids=["by-age", "by-expiry"])
def test_an_expired_approval(action: Any, has_text: Any, expected: Any, stored: Any) -> None:
    old = checkpoint(T.APPROVAL, expires_at=stored)
    assert guard(action=action, has_text=has_text, checkpoint=old, now_ms=DAY) == expected
    fresh = guard(action=A.CONFIRM, checkpoint=old, now_ms=DAY - 1)
    assert fresh == resume(A.CONFIRM)


@pytest.mark.parametrize("kind", [T.FOLLOW_UP, T.VERIFY])
def test_only_approvals_expire(kind: Any) -> None:
    action = A.REPLY if kind is T.FOLLOW_UP else A.CONFIRM
    decision = guard(action=action, checkpoint=checkpoint(kind), now_ms=100 * DAY)
    assert decision == resume(action)


@pytest.mark.parametrize(
    ("action", "active", "expected"),
    [
        pytest.param(A.CONFIRM, T.APPROVAL, reply(Reply.CHECKPOINT_NOT_ACTIVE, True), id="D52-stale-confirm"),
        pytest.param(A.REJECT, T.VERIFY, reply(Reply.CHECKPOINT_NOT_ACTIVE, True), id="D52-stale-reject"),
        pytest.param(A.REPLY, T.FOLLOW_UP, reply(Reply.CHECKPOINT_NOT_ACTIVE, True), id="wire-stale-reply"),
        pytest.param(A.CONFIRM, None, reply(Reply.NO_PENDING_ACTION), id="wire-confirm-without-one"),
        pytest.param(A.REPLY, None, reply(Reply.CHECKPOINT_NOT_ACTIVE), id="wire-reply-without-one"),
    ],
)
def test_an_answer_to_a_checkpoint_that_is_not_active_runs_nothing(
    action: Any, active: Any, expected: Any
) -> None:
    current = checkpoint(active) if active else None
    assert guard(action=action, has_text=True, checkpoint=current, checkpoint_id="stale") == expected


def test_the_active_checkpoint_may_be_named() -> None:
    decision = guard(action=A.CONFIRM, checkpoint=checkpoint(T.APPROVAL), checkpoint_id="cp")
    assert decision == resume(A.CONFIRM)


@pytest.mark.parametrize("action", [A.CONFIRM, A.REJECT])
def test_confirm_and_reject_must_name_their_checkpoint(action: Any) -> None:
    with pytest.raises(TurnfenceError) as error:
        require_checkpoint_id(action, "")
    assert error.value.reason is Reason.INVALID_REQUEST
    assert error.value.violations[0].field == "checkpoint_id"
    require_checkpoint_id(action, "cp")


@pytest.mark.parametrize("action", [None, A.REPLY, A.CANCEL])
def test_others_need_not(action: Any) -> None:
    require_checkpoint_id(action, "")


@pytest.mark.parametrize("action", [None, A.CONFIRM, A.REJECT, A.REPLY])
@pytest.mark.parametrize("has_text", [True, False])
def test_an_unresolved_write_comes_first(action: Any, has_text: Any) -> None:
    assert guard(action=action, has_text=has_text, unresolved_write=unknown_write()) == VERIFY_FIRST


def test_cancel_stays_possible_with_an_unresolved_write() -> None:
    assert guard(action=A.CANCEL, unresolved_write=unknown_write()) == CANCEL_TASK


def test_a_checkpoint_that_is_open_comes_before_an_unresolved_write_of_something_else() -> None:
    decision = guard(
        action=A.CONFIRM, checkpoint=checkpoint(T.APPROVAL), unresolved_write=unknown_write(args_hash="x")
    )
    assert decision == resume(A.CONFIRM)


@pytest.mark.parametrize(
    ("action", "expected"), [(A.CONFIRM, VERIFY_FIRST), (None, VERIFY_FIRST), (A.CANCEL, CANCEL_TASK)]
)
def test_an_approval_is_not_offered_while_the_same_write_is_unknown(action: Any, expected: Any) -> None:
    """D54"""
    same = unknown_write(args_hash="hash")
    assert guard(action=action, checkpoint=checkpoint(T.APPROVAL), unresolved_write=same) == expected


@pytest.mark.parametrize(
    ("kind", "now_ms", "expected"),
    [
        (None, 0, PASS),
        (T.FOLLOW_UP, 0, resume(A.REPLY)),
        (T.APPROVAL, 0, CHOOSE),
        (T.VERIFY, 0, CHOOSE),
        (T.APPROVAL, DAY, RECONFIRM),
    ],
)
def test_text_is_never_a_confirmation(kind: Any, now_ms: Any, expected: Any) -> None:
    """D87: CONTINUE_TASK decided from text resumes a question, and confirms nothing."""
    assert decide_continue(kind and checkpoint(kind), now_ms, DAY) == expected


def test_every_default_action_has_a_default_resume_or_none() -> None:
    assert DEFAULT_RESUME == {T.FOLLOW_UP: A.REPLY, T.APPROVAL: None, T.VERIFY: None}


def test_the_first_unknown_write_of_the_task_is_verified() -> None:
    heads = [
        unknown_write("late", started_at=9),
        unknown_write("first", started_at=2),
        unknown_write("elsewhere", task_id="x", started_at=1),
        unknown_write("running", status=CallStatus.STARTED, started_at=0),
    ]
    found = write_to_verify(heads, "t")
    assert found is not None
    assert found.evidence_id == "first"
    assert write_to_verify(heads, "none") is None
