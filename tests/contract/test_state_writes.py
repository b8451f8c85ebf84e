"""RegisterWrite: a write is registered before it is called, and one whose outcome nobody knows is never
repeated. What the calls brought is in test_state_settle.py."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import msgspec
import pytest

from tests.contract.turns import SHORT_LEASE, Talk, Turn, hash_of, new_id, refused
from tests.contract.work import Work, at_work, done, ended, heads_of, next_turn
from turnfence import records as r
from turnfence.axes import CallStatus, FailureKind, ResumeAction, TaskStatus, WriteDecision
from turnfence.errors import Reason

PROCEED, REUSED, BLOCKED = WriteDecision.PROCEED, WriteDecision.REUSED, WriteDecision.BLOCKED
IN_FLIGHT, VERIFY = Reason.WRITE_IN_FLIGHT.value, Reason.WRITE_PENDING_VERIFY.value
REQUEST = '{"host":"web-1"}'
MINUTE = 60_000


def now_ms() -> int:
    return int(time.time() * 1000)


# --- registration ---------------------------------------------------------------------------------


async def test_a_registered_write_may_be_called(talk: Talk) -> None:
    turn, work = await at_work(talk)
    before, head = turn.ref.seen_seq, work.write(turn)
    answer = await turn.register(head, REQUEST)
    assert (answer.decision, answer.evidence, answer.code) == (PROCEED, head, "")
    assert answer.data_seq > before
    assert await heads_of(turn, work) == {head.evidence_id: head}


async def test_a_registration_repeated_by_its_evidence_id_gets_the_same_answer(talk: Talk) -> None:
    """Its answer was lost: nothing blocks itself, and there is one write."""
    turn, work = await at_work(talk)
    head = work.write(turn)
    first = await turn.register(head, REQUEST)
    assert await turn.register(head, REQUEST) == first
    answers = await asyncio.gather(*(turn.register(head, REQUEST) for _ in range(5)))
    assert {answer.decision for answer in answers} == {PROCEED}
    assert await heads_of(turn, work) == {head.evidence_id: head}


async def test_a_registration_repeated_after_its_settlement_is_not_called_again(talk: Talk) -> None:
    turn, work = await at_work(talk)
    head = work.write(turn)
    await turn.register(head, REQUEST)
    stored = await turn.settle(done(head), '{"ok":true}')
    again = await turn.register(head, REQUEST)
    assert (again.decision, again.evidence) == (REUSED, stored)
    assert await heads_of(turn, work) == {head.evidence_id: stored}


async def test_C074_of_registrations_of_one_write_at_once_one_may_be_called(talk: Talk) -> None:
    turn, work = await at_work(talk)
    heads = [work.write(turn) for _ in range(8)]
    answers = await asyncio.gather(*(turn.register(head, REQUEST) for head in heads))
    (winner,) = [answer.evidence for answer in answers if answer.decision is PROCEED]
    losers = [answer for answer in answers if answer.decision is not PROCEED]
    assert {(a.decision, a.code, a.evidence.evidence_id) for a in losers} == {
        (BLOCKED, IN_FLIGHT, winner.evidence_id)
    }
    assert await heads_of(turn, work) == {winner.evidence_id: winner}


Decided = tuple[WriteDecision, str]
AFTER: dict[str, tuple[CallStatus, dict[str, Any], Decided, Decided]] = {
    # how the first one ended → what a second one is told in the same turn, and in the next
    "had_its_effect": (CallStatus.SUCCESS, {"business_ok": True}, (REUSED, ""), (REUSED, "")),
    "refused_by_the_business": (
        CallStatus.SUCCESS,
        {"business_ok": False, "failure_kind": FailureKind.BUSINESS_FAILURE},
        (PROCEED, ""),
        (PROCEED, ""),
    ),
    "failed": (CallStatus.FAILED, {"error_code": "E1"}, (PROCEED, ""), (PROCEED, "")),
    "cancelled": (CallStatus.CANCELLED, {}, (PROCEED, ""), (PROCEED, "")),
    "unknown": (CallStatus.UNKNOWN, {}, (BLOCKED, VERIFY), (BLOCKED, VERIFY)),
    "never_called": (CallStatus.UNKNOWN_PRE_CALL, {}, (BLOCKED, VERIFY), (PROCEED, "")),
    "may_still_land": (
        CallStatus.FAILED,
        {"not_before": now_ms() + 10 * MINUTE},
        (BLOCKED, IN_FLIGHT),
        (BLOCKED, IN_FLIGHT),
    ),
    "cannot_land_any_more": (CallStatus.FAILED, {"not_before": 1}, (PROCEED, ""), (PROCEED, "")),
}


@pytest.mark.parametrize("later", [False, True], ids=["same_turn", "next_turn"])
@pytest.mark.parametrize(("status", "how", "same", "following"), AFTER.values(), ids=AFTER)
async def test_C062_what_the_same_write_is_told_follows_from_how_the_first_ended(
    talk: Talk, status: CallStatus, how: dict[str, Any], same: Decided, following: Decided, later: bool
) -> None:
    turn, work = await at_work(talk)
    first = work.write(turn)
    await turn.register(first, REQUEST)
    stored = await turn.settle(ended(first, status, **how))
    if later:
        turn = await next_turn(turn, work)
    second = work.write(turn)
    answer = await turn.register(second, REQUEST)
    assert (answer.decision, answer.code) == (following if later else same)
    assert answer.evidence == (second if answer.decision is PROCEED else stored)
    assert (second.evidence_id in await heads_of(turn, work)) == (answer.decision is PROCEED)


async def test_a_write_that_failed_and_then_had_its_effect_is_not_repeated(talk: Talk) -> None:
    """The index tells of the last one, in the next turn too."""
    turn, work = await at_work(talk)
    failed = work.write(turn)
    await turn.register(failed)
    await turn.settle(ended(failed, CallStatus.FAILED))
    again = work.write(turn, started_at=(failed.started_at or 0) + 1)
    await turn.register(again)
    stored = await turn.settle(done(again))
    for _ in range(2):
        answer = await turn.register(work.write(turn))
        assert (answer.decision, answer.evidence) == (REUSED, stored)
        turn = await next_turn(turn, work)


OTHERS: dict[str, dict[str, Any]] = {
    "tool": {"tool_name": "stop"},
    "key": {"idempotency_key": hash_of("web-2")},
}


@pytest.mark.parametrize("change", OTHERS.values(), ids=OTHERS)
async def test_a_write_is_known_by_its_tool_and_its_key(talk: Talk, change: dict[str, Any]) -> None:
    turn, work = await at_work(talk)
    await turn.register(work.write(turn))
    assert (await turn.register(work.write(turn, **change))).decision is PROCEED


async def test_the_same_write_in_a_new_task_is_a_new_intention(talk: Talk) -> None:
    turn, work = await at_work(talk)
    head = work.write(turn)
    await turn.register(head)
    await turn.settle(done(head))
    other = Work()
    await turn.flush(*other.opened())
    assert (await turn.register(other.write(turn))).decision is PROCEED


@pytest.mark.parametrize("status", [None, CallStatus.UNKNOWN], ids=["started", "unknown"])
async def test_a_new_task_does_not_repeat_a_write_whose_outcome_nobody_knows(
    talk: Talk, status: CallStatus | None
) -> None:
    turn, work = await at_work(talk)
    head = work.write(turn)
    await turn.register(head)
    if status is not None:
        head = await turn.settle(ended(head, status))
    other = Work()
    await turn.flush(*other.opened())
    answer = await turn.register(other.write(turn))
    assert (answer.decision, answer.evidence) == (BLOCKED, head)
    assert await heads_of(turn, other) == {}


async def test_a_closed_task_leaves_its_unknown_write_to_be_verified(talk: Talk) -> None:
    turn, work = await at_work(talk)
    head = work.write(turn)
    await turn.register(head, REQUEST)
    unknown = await turn.settle(ended(head, CallStatus.UNKNOWN))
    await turn.persist(work.closed(TaskStatus.CANCELED))
    turn = await talk.begin("again")
    assert turn.snapshot.task is None
    assert turn.snapshot.unresolved_writes == [unknown]
    other = Work()
    await turn.flush(*other.opened())
    answer = await turn.register(other.write(turn))
    assert (answer.decision, answer.code, answer.evidence) == (BLOCKED, VERIFY, unknown)
    await turn.settle(done(unknown))
    assert (await turn.register(other.write(turn))).decision is PROCEED
    await turn.persist(*other.suspended())
    assert unknown.evidence_id not in {w.evidence_id for w in (await talk.begin()).snapshot.unresolved_writes}


@pytest.mark.parametrize("same_organisation", [True, False], ids=["user", "organisation"])
async def test_C064_another_users_same_write_is_a_write_of_its_own(
    talk: Talk, same_organisation: bool
) -> None:
    turn, work = await at_work(talk)
    head = work.write(turn)
    await turn.register(head)
    await turn.settle(done(head), '{"secret":"canary"}')
    stranger = Talk(talk.client, organ_id=talk.organ_id if same_organisation else "")
    theirs, their_work = await at_work(stranger)
    answer = await theirs.register(their_work.write(theirs))
    assert answer.decision is PROCEED
    assert list(await heads_of(theirs, their_work)) == [answer.evidence.evidence_id]


# --- a write that nobody settled ------------------------------------------------------------------


async def test_C025_a_write_of_a_dead_turn_is_unknown_and_not_repeated(talk: Talk) -> None:
    dead, work = await at_work(talk, lease=SHORT_LEASE)
    head = work.write(dead)
    await dead.register(head, REQUEST)
    turn = await talk.begin_after_lease("again")
    unknown = msgspec.structs.replace(head, status=CallStatus.UNKNOWN)
    assert turn.begun.recovery.evidence_unknown == [head.evidence_id]
    assert turn.snapshot.unresolved_writes == [unknown]
    assert turn.snapshot.unresolved_requests == {head.evidence_id: REQUEST}
    answer = await turn.register(work.write(turn), REQUEST)
    assert (answer.decision, answer.code, answer.evidence) == (BLOCKED, VERIFY, unknown)
    later = await next_turn(turn, work)
    assert later.begun.recovery.evidence_unknown == []
    assert later.snapshot.unresolved_writes == [unknown]


async def test_C028_a_write_that_was_settled_before_its_turn_died_keeps_its_outcome(talk: Talk) -> None:
    dead, work = await at_work(talk, lease=SHORT_LEASE)
    head = work.write(dead)
    await dead.register(head, REQUEST)
    stored = await dead.settle(done(head), '{"ok":1}')
    turn = await talk.begin_after_lease("again")
    assert (turn.begun.recovery.evidence_unknown, turn.snapshot.unresolved_writes) == ([], [])
    assert await heads_of(turn, work) == {head.evidence_id: stored}
    assert await turn.read_payload(work.task_id, head.evidence_id) == b'{"ok":1}'
    assert (await turn.register(work.write(turn))).decision is REUSED


async def test_C073_a_write_that_was_provably_not_called_does_not_block_the_next_turn(talk: Talk) -> None:
    turn, work = await at_work(talk)
    head = work.write(turn)
    await turn.register(head)
    await turn.settle(ended(head, CallStatus.UNKNOWN_PRE_CALL))
    following = await next_turn(turn, work)
    assert following.begun.recovery.evidence_cancelled == [head.evidence_id]
    assert following.snapshot.unresolved_writes == []
    assert (await heads_of(following, work))[head.evidence_id].status is CallStatus.CANCELLED
    assert (await following.register(work.write(following))).decision is PROCEED


async def test_C004_a_settlement_after_the_fence_moved_leaves_the_write_to_be_verified(talk: Talk) -> None:
    old, work = await at_work(talk, lease=SHORT_LEASE)
    head = work.write(old)
    await old.register(head)
    new = await talk.begin_after_lease("new")
    await refused(old.settle(done(head), '"late"'), Reason.STATE_FENCED)
    await refused(old.register(head), Reason.STATE_FENCED)
    assert (await heads_of(new, work))[head.evidence_id].status is CallStatus.UNKNOWN
    following = await next_turn(new, work)
    assert [write.status for write in following.snapshot.unresolved_writes] == [CallStatus.UNKNOWN]
    await refused(following.read_payload(work.task_id, head.evidence_id), Reason.NOT_FOUND)


# --- an approval ----------------------------------------------------------------------------------


async def approved(talk: Talk, **changed: Any) -> tuple[Turn, Work, r.TaskCheckpoint]:
    """The turn in which the user answers the approval that an earlier turn asked for."""
    turn, work = await at_work(talk)
    head = work.write(turn)
    checkpoint = work.approval(head.args_hash, **changed)
    await turn.persist(*work.suspended(), r.PutCheckpoint(task_id=work.task_id, checkpoint=checkpoint))
    answering = await talk.begin("", action=ResumeAction.CONFIRM, checkpoint_id=checkpoint.checkpoint_id)
    assert answering.task.checkpoint == checkpoint
    return answering, work, checkpoint


def consumption(turn: Turn, work: Work, checkpoint_id: str) -> r.ConsumeCheckpoint:
    return r.ConsumeCheckpoint(
        task_id=work.task_id,
        checkpoint_id=checkpoint_id,
        message_id=turn.request.input.message_id,
        action=ResumeAction.CONFIRM,
        acted_at=now_ms(),
        user_id=turn.talk.user_id,
    )


async def test_an_approval_is_used_up_by_the_registration_that_it_allows(talk: Talk) -> None:
    turn, work, checkpoint = await approved(talk)
    head, consume = work.write(turn), consumption(turn, work, checkpoint.checkpoint_id)
    first = await turn.register(head, REQUEST, consume)
    assert first.decision is PROCEED
    assert await turn.register(head, REQUEST, consume) == first
    await turn.settle(done(head))
    following = await next_turn(turn, work)
    assert following.task.checkpoint is None


async def test_C079_an_approval_whose_turn_died_in_the_call_is_not_offered_again(talk: Talk) -> None:
    turn, work, checkpoint = await approved(talk)
    head = work.write(turn)
    await turn.register(head, REQUEST, consumption(turn, work, checkpoint.checkpoint_id))
    await turn.abandon()
    following = await talk.begin("", action=ResumeAction.CONFIRM, checkpoint_id=checkpoint.checkpoint_id)
    assert following.task.checkpoint is None
    assert [write.evidence_id for write in following.snapshot.unresolved_writes] == [head.evidence_id]
    assert (await following.register(work.write(following))).decision is BLOCKED


async def test_a_registration_that_is_blocked_does_not_use_the_approval_up(talk: Talk) -> None:
    turn, work, checkpoint = await approved(talk)
    first = work.write(turn)
    await turn.register(first)
    blocked = await turn.register(
        work.write(turn), REQUEST, consumption(turn, work, checkpoint.checkpoint_id)
    )
    assert blocked.decision is BLOCKED
    await turn.settle(ended(first, CallStatus.FAILED))
    assert (await next_turn(turn, work)).task.checkpoint == checkpoint


@pytest.mark.parametrize(
    ("changed", "args_hash", "reason"),
    [
        ({}, hash_of('{"host":"web-2"}'), Reason.ARGS_HASH_MISMATCH),
        ({"expires_at": 1_700_000_000_000}, hash_of(REQUEST), Reason.APPROVAL_EXPIRED),
    ],
    ids=["C080_other_arguments", "expired"],
)
async def test_an_approval_allows_only_what_was_approved_while_it_lasts(
    talk: Talk, changed: dict[str, Any], args_hash: str, reason: Reason
) -> None:
    turn, work, checkpoint = await approved(talk, **changed)
    head = work.write(turn, args_hash=args_hash)
    consume = consumption(turn, work, checkpoint.checkpoint_id)
    error = await refused(turn.register(head, REQUEST, consume), reason)
    assert error.status == "FAILED_PRECONDITION"
    assert await heads_of(turn, work) == {}
    assert (await next_turn(turn, work)).task.checkpoint == checkpoint


@pytest.mark.parametrize("given", ["replaced", "used_up", "never_there"])
async def test_C077_an_approval_that_is_not_open_allows_nothing(talk: Talk, given: str) -> None:
    turn, work, checkpoint = await approved(talk)
    named = new_id() if given == "never_there" else checkpoint.checkpoint_id
    if given == "used_up":
        await turn.flush(consumption(turn, work, named))
    if given == "replaced":
        other = work.approval(checkpoint.pending_action.args_hash if checkpoint.pending_action else "")
        await turn.flush(r.PutCheckpoint(task_id=work.task_id, checkpoint=other))
    consume = consumption(turn, work, named)
    await refused(turn.register(work.write(turn), REQUEST, consume), Reason.ARGS_HASH_MISMATCH)
    assert await heads_of(turn, work) == {}
