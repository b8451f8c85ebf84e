"""C034, C035 by the hundred: the answer of a COMMIT gets lost, half of them applied. Not one turn is called
fenced for it, not one is called interrupted, and everything is there once."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeVar

import pytest

from state_service.adapters.sql_tables import chat_message, diagnosis_run, tool_call_record, turn_commit
from state_service.ports import StoreUnavailable
from tests.contract.turns import Talk
from tests.contract.work import Work, done
from tests.proxy import Proxy, Then
from tests.servers import PrivateRedis
from tests.state.direct import talking
from tests.state.sql_bench import SqlBench
from turnfence.axes import Durability, WriteDecision
from turnfence.errors import Reason, TurnfenceError

pytestmark = [pytest.mark.servers, pytest.mark.crash]

T = TypeVar("T")
COMMIT = b"\x03COMMIT"
TURNS = 50
# Which transaction's COMMIT is hit: each turn meets all of them, applied and not applied in turn.
STEPS = {
    "claim": b"INSERT INTO diagnosis_run",
    "S1": b"INSERT INTO chat_message",
    "S2": b"INSERT INTO tool_call_record",
    "S3": b"UPDATE tool_call_record",
    "persist": b"INSERT INTO turn_commit",
}


@pytest.fixture
async def talk(shaky: SqlBench, valkey: PrivateRedis) -> AsyncIterator[Talk]:
    async with talking(shaky, valkey.url) as talk:
        yield talk


class Losses:
    def __init__(self, network: Proxy) -> None:
        self.network = network
        self.lost = {Then.CUT: 0, Then.CUT_ANSWER: 0}

    async def during(self, step: str, call: Callable[[], Awaitable[T]]) -> T:
        """Lose the answer of one commit in the call, and repeat it under its identity as a harness does."""
        then = min(self.lost, key=self.lost.__getitem__)
        rule = self.network.when(COMMIT, then, armed_by=STEPS[step])
        try:
            return await call()
        except StoreUnavailable:
            return await call()
        except TurnfenceError as error:
            if error.reason is not Reason.STATE_UNAVAILABLE:
                raise
            return await call()
        finally:
            assert rule.met.is_set(), f"{step} did not come to its commit"
            self.network.rules.remove(rule)
            self.lost[then] += 1


async def one_turn(losses: Losses, talk: Talk, number: int) -> None:
    request = talk.request(f"turn {number}")
    turn = await losses.during("claim" if number % 2 else "S1", lambda: talk.begin_by(request))
    assert turn.begun.recovery.ended_runs == []
    work = Work()
    await turn.flush(*work.opened())
    head = work.write(turn)
    registered = await losses.during("S2", lambda: turn.register(head))
    assert registered.decision is WriteDecision.PROCEED
    await losses.during("S3", lambda: turn.settle(done(head), '"done"'))
    persist = turn.persist_request(turn.reply(), work.closed())
    ended = await losses.during("persist", lambda: talk.client.persist(persist))
    assert ended.durability is Durability.PERSISTED


async def test_no_turn_is_fenced_or_interrupted_for_an_answer_that_was_lost(
    sound: SqlBench, network: Proxy, talk: Talk
) -> None:
    losses = Losses(network)
    for number in range(TURNS):
        await one_turn(losses, talk, number)
    assert losses.lost[Then.CUT] + losses.lost[Then.CUT_ANSWER] >= 200
    assert min(losses.lost.values()) >= 100
    tables = {diagnosis_run: 1, chat_message: 2, tool_call_record: 1, turn_commit: 1}
    for table, each in tables.items():
        assert len(await sound.rows(table, talk.organ_id)) == each * TURNS, table.name
