"""Flush: numbered, all or nothing, fenced, bounded."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import msgspec
import pytest

from tests.contract.turns import SHORT_LEASE, Talk, Turn, refused
from tests.contract.work import Work, sourced
from turnfence import records as r
from turnfence.axes import Durability
from turnfence.errors import Reason

FLUSH_MAX_BYTES = 1024 * 1024  # state.flush-max-bytes by default
MAX_OPERATIONS = 2000


async def texts_of_next_turn(talk: Talk, turn: Turn) -> list[str]:
    await turn.persist()
    return [message.text for message in (await talk.begin("next")).snapshot.dialogue]


# --- the sequence ---------------------------------------------------------------------------------


async def test_C008_a_repeated_flush_gets_the_same_answer_and_writes_once(talk: Talk) -> None:
    turn = await talk.begin()
    work = Work()
    note = r.PutNodeSpace(
        task_id=work.task_id,
        node_id=work.node_id,
        actions=[r.NodeAction(round=1, kind="BUILTIN", name="ask")],
    )
    edge = r.PutEdge(task_id=work.task_id, edge=work.edge("n0", "n1"))
    changes = [*work.opened(), turn.reply("once"), note, edge]
    before = turn.ref
    first = await turn.flush(*changes)
    turn.ref = before  # the answer was lost: the repeat knows no more than the first call did
    assert await turn.flush(*changes, sequence=1) == first
    second = await turn.flush(r.PutConversation(title="two"))
    assert second.data_seq == first.data_seq + 1
    assert len((await turn.open_node(work.task_id, work.node_id)).space.actions) == 1
    await turn.persist(*work.suspended())
    following = await talk.begin("next")
    assert [m.text for m in following.snapshot.dialogue] == ["hello", "once", "next"]
    assert following.task.edges == [edge.edge]


async def test_one_flush_sent_twice_at_once_is_written_once(talk: Talk) -> None:
    turn = await talk.begin()
    request = r.FlushRequest(turn=turn.ref, sequence=1, changes=[turn.reply("once")])
    answers = await asyncio.gather(*(talk.client.flush(request) for _ in range(6)))
    assert len({answer.data_seq for answer in answers}) == 1
    turn.sequence = 2
    assert await texts_of_next_turn(talk, turn) == ["hello", "once", "next"]


async def test_a_sequence_with_other_content_is_refused(talk: Talk) -> None:
    """The turn's memory and the store have parted: the turn is over, and says why."""
    turn = await talk.begin()
    await turn.flush(turn.reply("this"))
    error = await refused(turn.flush(turn.reply("that"), sequence=1), Reason.STATE_LOST)
    assert error.status == "DATA_LOSS"
    assert await texts_of_next_turn(talk, turn) == ["hello", "this", "next"]


@pytest.mark.parametrize("sequence", [2, 3, 1_000_000])
async def test_a_gap_in_the_sequence_is_refused_and_nothing_is_written(talk: Talk, sequence: int) -> None:
    turn = await talk.begin()
    await refused(turn.flush(turn.reply("lost"), sequence=sequence), Reason.STATE_LOST)
    assert await texts_of_next_turn(talk, turn) == ["hello", "next"]


async def test_an_older_sequence_changes_nothing(talk: Talk) -> None:
    turn = await talk.begin()
    old = turn.reply("one")
    await turn.flush(old)
    await turn.flush(turn.reply("two"))
    await refused(turn.flush(old, sequence=1), Reason.STATE_LOST)
    assert await texts_of_next_turn(talk, turn) == ["hello", "one", "two", "next"]


async def test_C010_a_store_that_knows_less_than_the_turn_was_told_has_lost_data(talk: Talk) -> None:
    turn, work = await talk.begin(), Work()
    await turn.flush(*work.opened())
    good = turn.ref
    turn.ref = msgspec.structs.replace(good, seen_seq=good.seen_seq + 1)
    await refused(turn.flush(r.PutConversation(title="x")), Reason.STATE_LOST)
    await refused(turn.open_node(work.task_id, work.node_id), Reason.STATE_LOST)
    await refused(turn.register(work.write(turn)), Reason.STATE_LOST)
    await refused(turn.settle(work.read(turn)), Reason.STATE_LOST)
    await refused(turn.read_payload(work.task_id, "e1"), Reason.STATE_LOST)
    await refused(turn.persist(), Reason.STATE_LOST)
    turn.ref = good
    assert (await turn.flush(r.PutConversation(title="y"))).data_seq == good.seen_seq + 1


# --- the fence ------------------------------------------------------------------------------------

Step = Callable[[Turn, Work], Awaitable[object]]

WRITES: dict[str, Step] = {
    "flush": lambda turn, work: turn.flush(turn.reply("from the grave")),
    "open_node": lambda turn, work: turn.open_node(work.task_id, work.node_id),
    "register": lambda turn, work: turn.register(work.write(turn)),
    "settle": lambda turn, work: turn.settle(work.read(turn), '"late"'),
    "read_payload": lambda turn, work: turn.read_payload(work.task_id, "e1"),
    "persist": lambda turn, work: turn.persist(turn.reply("from the grave"), work.closed()),
    "persist_large": lambda turn, work: turn.persist(work.note("x" * 70_000)),
    "flush_large": lambda turn, work: turn.flush(work.note("x" * 70_000)),
    "renew": lambda turn, work: turn.renew(),
}


async def working(talk: Talk, **given: int) -> tuple[Turn, Work]:
    turn, work = await talk.begin("old", **given), Work()
    await turn.flush(*work.opened())
    await turn.settle(work.read(turn, evidence_id="e1"), '"payload"')
    return turn, work


@pytest.mark.parametrize("step", WRITES.values(), ids=WRITES)
async def test_C004_after_a_newer_begin_nothing_of_the_old_turn_counts(talk: Talk, step: Step) -> None:
    old, work = await working(talk, lease=SHORT_LEASE)
    new = await talk.begin_after_lease("new")
    error = await refused(step(old, work), Reason.STATE_FENCED)
    assert error.status == "ABORTED"
    assert error.retry_after is None
    assert (await old.abandon()).released is False
    assert (await new.flush(r.PutConversation(title="undisturbed"))).data_seq == new.ref.seen_seq
    await new.persist()
    after = await talk.begin("after")
    assert [m.text for m in after.snapshot.dialogue] == ["old", "new", "after"]
    assert after.task.metadata.task_id == work.task_id
    assert after.begun.recovery.ended_runs == []
    opened = await after.open_node(work.task_id, work.node_id)
    assert [head.evidence_id for head in opened.evidence] == ["e1"]


@pytest.mark.parametrize("step", WRITES.values(), ids=WRITES)
async def test_a_turn_that_was_persisted_is_over(talk: Talk, step: Step) -> None:
    turn, work = await working(talk)
    await turn.persist(*work.suspended())
    if step is WRITES["persist"] or step is WRITES["persist_large"]:
        again = await step(turn, work)
        assert isinstance(again, r.PersistTurnResponse)
        assert again.already_persisted
    else:
        await refused(step(turn, work), Reason.STATE_FENCED)
    following = await talk.begin("next")
    assert [m.text for m in following.snapshot.dialogue] == ["old", "next"]
    opened = await following.open_node(work.task_id, work.node_id)
    assert ([head.evidence_id for head in opened.evidence], opened.space.state) == (["e1"], {})


@pytest.mark.parametrize("change", [{"version": 2}, {"run_id": "somebody-else"}])
async def test_the_fence_is_version_and_run_together(talk: Talk, change: dict[str, object]) -> None:
    turn = await talk.begin()
    good = turn.ref
    turn.ref = msgspec.structs.replace(good, **change)
    await refused(turn.flush(turn.reply("forged")), Reason.STATE_FENCED)
    turn.ref = good
    assert await texts_of_next_turn(talk, turn) == ["hello", "next"]


async def test_a_turn_whose_lease_ran_out_goes_on_while_nobody_else_has_begun(talk: Talk) -> None:
    """The lock is politeness, the fence is safety."""
    turn = await talk.begin(lease=1)
    stranger = Talk(talk.client)
    await stranger.turn()  # some time passes
    await refused(turn.renew(), Reason.STATE_FENCED)
    await turn.flush(turn.reply("still here"))
    assert (await turn.persist()).durability is Durability.PERSISTED


# --- limits ---------------------------------------------------------------------------------------


async def test_a_flush_above_the_limit_is_refused_whole_and_says_which(talk: Talk) -> None:
    turn = await talk.begin()
    half = r.PutConversation(title="t" * (FLUSH_MAX_BYTES // 2))
    error = await refused(turn.flush(turn.reply("x"), half, half), Reason.STATE_WRITE_FAILED)
    assert error.status == "RESOURCE_EXHAUSTED"
    assert error.metadata["limit"] == "state.flush-max-bytes"
    assert int(error.metadata["size"]) > int(error.metadata["max"]) == FLUSH_MAX_BYTES
    await turn.flush(turn.reply("smaller"))
    assert await texts_of_next_turn(talk, turn) == ["hello", "smaller", "next"]


async def test_a_persist_above_the_limit_is_refused_whole_and_can_be_tried_smaller(talk: Talk) -> None:
    turn = await talk.begin()
    huge = turn.reply("x" * FLUSH_MAX_BYTES)
    error = await refused(turn.persist(huge), Reason.STATE_WRITE_FAILED)
    assert error.status == "RESOURCE_EXHAUSTED"
    assert (await turn.persist(turn.reply("sorry"))).durability is Durability.PERSISTED
    assert [m.text for m in (await talk.begin("next")).snapshot.dialogue] == ["hello", "sorry", "next"]


async def test_a_flush_with_too_many_changes_is_refused_whole(talk: Talk) -> None:
    turn = await talk.begin()
    many = [r.PutSessionShared(name=f"n{i}", value=sourced(str(i))) for i in range(MAX_OPERATIONS)]
    error = await refused(turn.flush(*many), Reason.STATE_WRITE_FAILED)
    assert error.status == "RESOURCE_EXHAUSTED"
    await turn.flush(*many[: MAX_OPERATIONS // 4])
    await turn.persist()
    assert len((await talk.begin()).snapshot.shared) == MAX_OPERATIONS // 4
