"""SettleCalls and ReadPayload: what a call brought is kept, once, whatever its size, and read by its own
conversation only."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from tests.contract.turns import SHORT_LEASE, Talk, Turn, refused
from tests.contract.work import Work, at_work, done, ended, heads_of, next_turn
from turnfence import records as r
from turnfence.axes import CallStatus, FailureKind, SideEffect, WriteDecision
from turnfence.errors import Reason

KIB = 1024
CHUNK = 256 * KIB
PAYLOAD_MAX = 4 * KIB * KIB


def settlement(head: r.EvidenceHead, payload_json: str = "", request_json: str = "{}") -> r.Settlement:
    return r.Settlement(
        task_id=head.task_id,
        node_id=head.node_id,
        evidence=head,
        payload_json=payload_json,
        request_json=request_json,
    )


def text_of(size: int, letter: str = "x") -> str:
    """A JSON string of that many bytes."""
    wide = len(letter.encode())
    count, rest = divmod(size - 2, wide)
    return '"' + letter * count + "y" * rest + '"'


# --- outcomes -------------------------------------------------------------------------------------

FULL: dict[str, Any] = {
    "extract_counts": {"host": 2, "disk": 0},
    "args_brief": "host: web-1 “😀”",
    "result_brief": "up 3 days\nload 0.2",
    "error_code": "E-17",
    "entities": '{"host:web-1":{"displayName":"web-1"}}',
    "detail": "as it was",
    "artifact": True,
    "call_id": "call_1",
    "duration": 2**40,
    "empty": False,
}
OUTCOMES: dict[str, tuple[CallStatus, dict[str, Any]]] = {
    "success": (CallStatus.SUCCESS, {"business_ok": True, **FULL}),
    "empty": (CallStatus.SUCCESS, {"business_ok": True, "empty": True}),
    "business_failure": (
        CallStatus.SUCCESS,
        {"business_ok": False, "failure_kind": FailureKind.BUSINESS_FAILURE},
    ),
    "failed": (CallStatus.FAILED, {"failure_kind": FailureKind.TRANSPORT_FAILURE, "error_code": "E1"}),
    "timeout": (CallStatus.TIMEOUT, {"failure_kind": FailureKind.TIMEOUT}),
    "cancelled": (CallStatus.CANCELLED, {}),
    "unknown": (CallStatus.UNKNOWN, {"failure_kind": FailureKind.UNKNOWN}),
}


@pytest.mark.parametrize("effect", SideEffect)
@pytest.mark.parametrize(("status", "how"), OUTCOMES.values(), ids=OUTCOMES)
async def test_an_outcome_is_kept_as_it_was_given(
    talk: Talk, status: CallStatus, how: dict[str, Any], effect: SideEffect
) -> None:
    turn, work = await at_work(talk)
    head = work.read(turn) if effect is SideEffect.NONE else work.write(turn)
    if effect is SideEffect.WRITE:
        await turn.register(head)
    before = turn.ref.seen_seq
    answer = await turn.settle_all(settlement(ended(head, status, **how), '{"up":true}'))
    stored = msgspec.structs.replace(ended(head, status, **how), payload_bytes=len('{"up":true}'))
    assert answer.evidence == [stored]
    assert answer.data_seq > before
    assert await heads_of(turn, work) == {head.evidence_id: stored}
    following = await next_turn(turn, work)
    assert await heads_of(following, work) == {head.evidence_id: stored}
    unresolved = status is CallStatus.UNKNOWN and effect is SideEffect.WRITE
    assert following.snapshot.unresolved_writes == ([stored] if unresolved else [])


async def test_several_calls_are_settled_in_one_step(talk: Talk) -> None:
    turn, work = await at_work(talk)
    write, reads = work.write(turn), [work.read(turn, round=number) for number in (1, 2)]
    await turn.register(write)
    before = turn.ref.seen_seq
    answer = await turn.settle_all(settlement(done(write), "1"), *(settlement(head, "2") for head in reads))
    assert answer.data_seq == before + 1
    stored = {head.evidence_id: head for head in answer.evidence}
    assert list(stored) == [head.evidence_id for head in (write, *reads)]
    assert await heads_of(turn, work) == stored


async def test_of_calls_settled_together_all_are_kept_or_none(talk: Talk) -> None:
    turn, work = await at_work(talk)
    good, bad = work.read(turn), work.read(turn, status=CallStatus.STARTED)
    error = await refused(turn.settle_all(settlement(good), settlement(bad)), Reason.INVALID_REQUEST)
    assert [violation.field for violation in error.violations] == ["settlements[1].evidence.status"]
    assert await heads_of(turn, work) == {}


async def test_what_a_dead_turn_had_settled_is_there_in_the_next(talk: Talk) -> None:
    dead, work = await at_work(talk, lease=SHORT_LEASE)
    stored = await dead.settle(work.read(dead), '{"up":1}')
    turn = await talk.begin_after_lease("again")
    assert await heads_of(turn, work) == {stored.evidence_id: stored}
    assert await turn.read_payload(work.task_id, stored.evidence_id) == b'{"up":1}'


# --- repetition -----------------------------------------------------------------------------------


async def test_a_repeated_settlement_gets_the_same_answer_and_is_kept_once(talk: Talk) -> None:
    turn, work = await at_work(talk)
    head = work.write(turn)
    await turn.register(head)
    first = await turn.settle(done(head), '{"n":1}')
    assert await turn.settle(done(head), '{"n":1}') == first
    answers = await asyncio.gather(*(turn.settle(done(head), '{"n":1}') for _ in range(5)))
    assert answers == [first] * 5
    assert await heads_of(turn, work) == {head.evidence_id: first}
    following = await next_turn(turn, work)
    assert await heads_of(following, work) == {head.evidence_id: first}
    assert await following.read_payload(work.task_id, head.evidence_id) == b'{"n":1}'


LATE: dict[str, CallStatus] = {
    status.value.lower(): status
    for status in (CallStatus.UNKNOWN, CallStatus.UNKNOWN_PRE_CALL, CallStatus.FAILED, CallStatus.CANCELLED)
}


@pytest.mark.parametrize("later", [False, True], ids=["same_turn", "next_turn"])
@pytest.mark.parametrize("status", LATE.values(), ids=LATE)
async def test_what_is_settled_stays_settled(talk: Talk, status: CallStatus, later: bool) -> None:
    """A settlement that was late, and says something else, changes nothing: the first one counts."""
    turn, work = await at_work(talk)
    head = work.write(turn)
    await turn.register(head)
    stored = await turn.settle(done(head), '{"n":1}')
    if later:
        turn = await next_turn(turn, work)
    assert await turn.settle(ended(head, status), '{"n":2}') == stored
    for _ in range(2):
        assert await heads_of(turn, work) == {head.evidence_id: stored}
        assert await turn.read_payload(work.task_id, head.evidence_id) == b'{"n":1}'
        assert (await turn.register(work.write(turn))).decision is WriteDecision.REUSED
        turn = await next_turn(turn, work)
        assert turn.snapshot.unresolved_writes == []


async def test_settlements_of_one_call_at_once_agree_on_one_outcome(talk: Talk) -> None:
    turn, work = await at_work(talk)
    head = work.write(turn)
    await turn.register(head)
    said = [done(head, result_brief=f"answer {number}") for number in range(6)]
    answers = await asyncio.gather(*(turn.settle(one) for one in said))
    assert answers == [answers[0]] * 6
    assert await heads_of(turn, work) == {head.evidence_id: answers[0]}
    assert await heads_of(await next_turn(turn, work), work) == {head.evidence_id: answers[0]}


VERDICTS: dict[str, tuple[CallStatus, dict[str, Any], WriteDecision]] = {
    "effective": (CallStatus.SUCCESS, {"business_ok": True}, WriteDecision.REUSED),
    "not_effective": (CallStatus.FAILED, {}, WriteDecision.PROCEED),
}


@pytest.mark.parametrize("later", [False, True], ids=["same_turn", "next_turn"])
@pytest.mark.parametrize(("status", "how", "decision"), VERDICTS.values(), ids=VERDICTS)
async def test_C026_an_unknown_outcome_is_resolved_once_somebody_knows(
    talk: Talk, status: CallStatus, how: dict[str, Any], decision: WriteDecision, later: bool
) -> None:
    turn, work = await at_work(talk)
    head = work.write(turn)
    await turn.register(head)
    unknown = await turn.settle(ended(head, CallStatus.UNKNOWN))
    if later:
        turn = await next_turn(turn, work)
        assert turn.snapshot.unresolved_writes == [unknown]
    resolved = await turn.settle(ended(unknown, status, **how))
    assert resolved.status is status
    following = await next_turn(turn, work)
    assert following.snapshot.unresolved_writes == []
    assert await heads_of(following, work) == {head.evidence_id: resolved}
    assert (await following.register(work.write(following))).decision is decision


async def test_C088_two_unknown_writes_are_resolved_one_after_the_other(talk: Talk) -> None:
    turn, work = await at_work(talk)
    heads = [work.write(turn, idempotency_key=key * 64) for key in "ab"]
    for head in heads:
        await turn.register(head)
    await turn.settle_all(*(settlement(ended(head, CallStatus.UNKNOWN)) for head in heads))
    for left in (heads, heads[1:], []):
        turn = await next_turn(turn, work)
        unresolved = turn.snapshot.unresolved_writes
        assert {head.evidence_id for head in unresolved} == {head.evidence_id for head in left}
        if left:
            await turn.settle(done(left[0]))


# --- payloads -------------------------------------------------------------------------------------


SIZES = [2, 1000, CHUNK, CHUNK + 1, 512 * KIB, 512 * KIB + 1, PAYLOAD_MAX]


async def pieces_of(turn: Turn, work: Work, evidence_id: str) -> tuple[list[int], bytes]:
    """The lengths of the chunks, and all of them together; each must tell the whole's length."""
    request = r.ReadPayloadRequest(turn=turn.ref, task_id=work.task_id, evidence_id=evidence_id)
    pieces = await turn.client.read_payload(request)
    whole = b"".join(piece.chunk for piece in pieces)
    assert {piece.total_bytes for piece in pieces} == {len(whole)}
    return [len(piece.chunk) for piece in pieces], whole


@pytest.mark.parametrize("letter", ["x", "服"], ids=["ascii", "chinese"])
@pytest.mark.parametrize("size", SIZES)
async def test_C052_a_payload_is_read_back_byte_by_byte_in_chunks(talk: Talk, size: int, letter: str) -> None:
    turn, work = await at_work(talk)
    payload = text_of(size, letter)
    stored = await turn.settle(work.read(turn), payload)
    assert (stored.status, stored.payload_bytes) == (CallStatus.SUCCESS, size)
    assert bool(stored.payload_id) == (size > CHUNK)
    whole, rest = divmod(size, CHUNK)
    expected = [CHUNK] * whole + ([rest] if rest else [])
    assert await pieces_of(turn, work, stored.evidence_id) == (expected, payload.encode())
    following = await next_turn(turn, work)
    assert await pieces_of(following, work, stored.evidence_id) == (expected, payload.encode())


NUMBERS = '{"z":0.1,"a":1.0,"big":9007199254740993,"zero":-0,"huge":1e400,"same":1,"same":2}'


async def test_C127_a_payload_is_text_and_never_numbers(talk: Talk) -> None:
    turn, work = await at_work(talk)
    stored = await turn.settle(work.read(turn), NUMBERS)
    assert await turn.read_payload(work.task_id, stored.evidence_id) == NUMBERS.encode()
    following = await next_turn(turn, work)
    assert await following.read_payload(work.task_id, stored.evidence_id) == NUMBERS.encode()


@pytest.mark.parametrize("effect", SideEffect)
async def test_a_payload_above_the_limit_fails_its_evidence_and_never_the_turn(
    talk: Talk, effect: SideEffect
) -> None:
    """A write has happened all the same, and is not repeated for the size of its answer."""
    turn, work = await at_work(talk)
    head = work.read(turn) if effect is SideEffect.NONE else work.write(turn)
    if effect is SideEffect.WRITE:
        await turn.register(head)
    stored = await turn.settle(done(head), text_of(PAYLOAD_MAX + 1))
    kept = CallStatus.SUCCESS if effect is SideEffect.WRITE else CallStatus.FAILED
    assert (stored.status, stored.error_code) == (kept, Reason.STATE_WRITE_FAILED.value)
    assert (stored.payload_id, stored.payload_bytes) == ("", PAYLOAD_MAX + 1)
    assert str(PAYLOAD_MAX) in stored.detail
    await refused(turn.read_payload(work.task_id, stored.evidence_id), Reason.NOT_FOUND)
    if effect is SideEffect.WRITE:
        assert (await turn.register(work.write(turn))).decision is WriteDecision.REUSED
    assert await heads_of(await next_turn(turn, work), work) == {stored.evidence_id: stored}


async def test_what_has_no_payload_is_not_found(talk: Talk) -> None:
    turn, work = await at_work(talk)
    bare, full = work.read(turn), work.read(turn)
    await turn.settle_all(settlement(bare), settlement(full, '"canary"'))
    other = Work()
    await turn.flush(*other.opened())
    for task_id, evidence_id in (
        (work.task_id, bare.evidence_id),
        (work.task_id, "nobody"),
        (other.task_id, full.evidence_id),
    ):
        await refused(turn.read_payload(task_id, evidence_id), Reason.NOT_FOUND)


@pytest.mark.parametrize("size", [10, CHUNK + 1, 600 * KIB], ids=["inline", "by_pointer", "apart"])
@pytest.mark.parametrize("same_organisation", [True, False], ids=["user", "organisation"])
async def test_a_payload_is_read_by_its_own_conversation_only(
    talk: Talk, same_organisation: bool, size: int
) -> None:
    turn, work = await at_work(talk)
    stored = await turn.settle(work.read(turn), text_of(size))
    await turn.persist(*work.suspended())
    stranger = Talk(talk.client, organ_id=talk.organ_id if same_organisation else "")
    theirs = await stranger.begin()
    await refused(theirs.read_payload(work.task_id, stored.evidence_id), Reason.NOT_FOUND)
    opened = await theirs.open_node(work.task_id, work.node_id)
    assert opened.evidence == []
