"""Callers that leave, by the thousand (D31): nobody gets an answer that was somebody else's, and the pools
are as full as before."""

from __future__ import annotations

import asyncio
import os
import random

import pytest

from tests.contract.turns import Talk, Turn
from tests.contract.work import Work, at_work
from tests.state.rig import Rig

pytestmark = pytest.mark.servers

CANCELS = int(os.environ.get("TURNFENCE_CANCELS", "4000"))
CONVERSATIONS, TOGETHER = 32, 64
POOL = 32  # connections that a pool may still have to make; a leak would be by the thousand


def canary(turn: Turn) -> str:
    return f"canary of {turn.talk.organ_id}"


class Crowd:
    def __init__(self, turns: list[tuple[Turn, Work]]) -> None:
        self.turns = turns
        self.choose = random.Random(11)  # noqa: S311 - a repeatable schedule

    async def ask(self, turn: Turn, work: Work) -> None:
        """A read through Redis or SQL, whose answer only its own caller may see."""
        opened = await turn.open_node(work.task_id, work.node_id)
        notes = opened.space.state["note"] if opened.space is not None else ""
        assert canary(turn) in notes, notes

    async def write(self, turn: Turn, work: Work) -> None:
        """SQL and Redis; safe to repeat, so safe to leave."""
        head = work.read(turn, evidence_id=f"e-{turn.run_id[:8]}")
        await turn.settle(head, f'"{canary(turn)}"')

    async def leave_some(self) -> int:
        calls = [
            self.choose.choice((self.ask, self.ask, self.write))(*self.choose.choice(self.turns))
            for _ in range(TOGETHER)
        ]
        tasks = [asyncio.create_task(call) for call in calls]
        for _ in range(self.choose.randrange(6)):
            await asyncio.sleep(0)
        left = self.choose.sample(tasks, TOGETHER * 3 // 4)
        cancelled = sum(task.cancel() for task in left)
        for outcome in await asyncio.gather(*tasks, return_exceptions=True):
            assert outcome is None or isinstance(outcome, asyncio.CancelledError), outcome
        return cancelled


def connections(rig: Rig) -> tuple[int, int]:
    """Of Redis and of SQL, as they count them."""
    with rig.redis() as client:
        hot = int(client.info("clients")["connected_clients"])
    ((_, threads),) = rig.database().execute("SHOW GLOBAL STATUS LIKE 'Threads_connected'")
    return hot, int(str(threads))


@pytest.mark.timeout(300)
async def test_no_answer_goes_astray_and_no_connection_is_lost(frail: Rig) -> None:
    turns = [await at_work(Talk(frail.client)) for _ in range(CONVERSATIONS)]
    for turn, work in turns:
        await turn.flush(work.note(canary(turn)))
    crowd = Crowd(turns)
    await asyncio.gather(*(crowd.write(*each) for each in turns))
    before = connections(frail)
    cancelled = 0
    while cancelled < CANCELS:
        cancelled += await crowd.leave_some()
    await asyncio.gather(*(crowd.ask(*each) for each in turns))
    await asyncio.gather(*(crowd.write(*each) for each in turns))
    for turn, work in turns:
        evidence = f"e-{turn.run_id[:8]}"
        assert await turn.read_payload(work.task_id, evidence) == f'"{canary(turn)}"'.encode()
    after = connections(frail)
    assert after[0] <= before[0] + POOL
    assert after[1] <= before[1] + POOL
