"""Group commits: writes of many conversations share a commit, and none of them knows."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from sqlalchemy import event, select

from state_service.adapters import sql_groups
from state_service.adapters.sql_tables import chat_conversation
from state_service.ports import S2, ColdCall, S2Result, StoreCorrupt
from tests.contract.turns import new_id
from tests.state.sql_bench import SqlBench, Story, message, write_head
from turnfence import records as r
from turnfence.axes import CallStatus

MANY = 100


class Commits:
    """How many transactions a bench commits."""

    def __init__(self, bench: SqlBench) -> None:
        self.count = 0
        event.listen(bench.engine.sync_engine, "commit", self._committed)

    def _committed(self, _: object) -> None:
        self.count += 1


async def turns(bench: SqlBench, count: int) -> list[r.TurnRef]:
    return [await Story(bench.cold).begin(1) for _ in range(count)]


def done(head: r.EvidenceHead) -> ColdCall:
    return ColdCall(msgspec.structs.replace(head, status=CallStatus.SUCCESS, business_ok=True), "", '"done"')


async def test_writes_that_come_together_are_committed_together(bench: SqlBench) -> None:
    at = await turns(bench, MANY)
    heads = [write_head(turn) for turn in at]
    commits = Commits(bench)
    cold = bench.cold
    said = await asyncio.gather(*(cold.insert_message(turn, message(turn)) for turn in at))
    registered = await asyncio.gather(
        *(cold.register_call(turn, head, "{}") for turn, head in zip(at, heads, strict=True))
    )
    settled = await asyncio.gather(
        *(cold.settle_calls(turn, [done(head)]) for turn, head in zip(at, heads, strict=True))
    )
    assert said == settled == [True] * MANY
    assert registered == [S2Result(S2.INSERTED, head) for head in heads]
    assert commits.count <= 3 * (MANY // sql_groups.LARGEST + 2)
    for turn, head in zip(at, heads, strict=True):
        dump = await bench.dump(turn.organ_id)
        assert [row["message_id"] for row in dump["chat_message"]] != []
        assert [(row["call_id"], row["call_status"]) for row in dump["tool_call_record"]] == [
            (head.evidence_id, "SUCCESS")
        ]


async def test_each_write_of_a_group_has_its_own_answer(bench: SqlBench) -> None:
    """Fenced, registered before, barred, new: one does not decide for another."""
    story = Story(bench.cold)
    old = await story.begin(1)
    await story.begin(2)
    again, barred, new = await turns(bench, 3)
    known, first, second = write_head(again), write_head(barred), write_head(barred)
    await bench.cold.register_call(again, known, "{}")
    await bench.cold.register_call(barred, first, "{}")
    late = write_head(old)
    answers = await asyncio.gather(
        bench.cold.register_call(old, late, "{}"),
        bench.cold.register_call(again, known, "{}"),
        bench.cold.register_call(barred, second, "{}"),
        bench.cold.register_call(new, write_head(new), "{}"),
    )
    kinds = [answer.kind for answer in answers]
    assert kinds == [S2.FENCED, S2.MINE, S2.DUPLICATE, S2.INSERTED]
    assert answers[2].head == first


async def test_many_registrations_of_one_write_have_one_winner(bench: SqlBench) -> None:
    turn = await Story(bench.cold).begin(1)
    heads = [write_head(turn) for _ in range(20)]
    answers = await asyncio.gather(*(bench.cold.register_call(turn, head, "{}") for head in heads))
    kinds = sorted(answer.kind for answer in answers)
    assert kinds == [S2.DUPLICATE] * 19 + [S2.INSERTED]


async def test_a_conversation_that_is_locked_keeps_nobody_else_waiting(bench: SqlBench) -> None:
    if bench.is_sqlite:
        pytest.xfail("SQLite has one writer: there is no lock of a row")
    held, *free = await turns(bench, 9)
    row = select(chat_conversation.c.id).where(chat_conversation.c.organ_id == held.organ_id)
    async with bench.engine.begin() as holder:
        await holder.execute(row.with_for_update())
        waits = asyncio.create_task(bench.cold.insert_message(held, message(held)))
        others = await asyncio.gather(*(bench.cold.insert_message(t, message(t)) for t in free))
        assert others == [True] * len(free)
        assert not waits.done()
    assert await waits


async def test_a_group_that_fails_is_done_one_by_one(bench: SqlBench) -> None:
    """One call id in two conversations: the unique key refuses it, and only its own registration."""
    at = await turns(bench, 6)
    owner = at[0]
    taken = write_head(owner)
    await bench.cold.register_call(owner, taken, "{}")
    elsewhere = await Story(bench.cold, organ_id=owner.organ_id).begin(1)
    thief = msgspec.structs.replace(write_head(elsewhere), evidence_id=taken.evidence_id)
    answers = await asyncio.gather(
        bench.cold.register_call(elsewhere, thief, "{}"),
        *(bench.cold.register_call(turn, write_head(turn, tool_name=new_id()), "{}") for turn in at[1:]),
        return_exceptions=True,
    )
    assert isinstance(answers[0], StoreCorrupt)
    assert [answer.kind for answer in answers[1:] if isinstance(answer, S2Result)] == [S2.INSERTED] * 5


async def test_a_caller_that_is_cancelled_leaves_its_write_whole(bench: SqlBench) -> None:
    at = await turns(bench, 8)
    writes = [asyncio.create_task(bench.cold.insert_message(turn, message(turn))) for turn in at]
    await asyncio.sleep(0)  # they are under way
    for write in writes[::2]:
        write.cancel()
    answers = await asyncio.gather(*writes, return_exceptions=True)
    assert [isinstance(answer, asyncio.CancelledError) for answer in answers] == [True, False] * 4
    for turn in at:
        assert len((await bench.dump(turn.organ_id))["chat_message"]) == 1
