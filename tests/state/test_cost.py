"""What a turn costs does not grow with its conversation: bytes that Redis took and gave, and statements that
SQL ran, as the servers count them. Nothing is timed."""

from __future__ import annotations

import os
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Any, TypeVar

import pytest

from tests.contract.turns import Talk, Turn
from tests.contract.work import Work
from tests.state.rig import Rig
from turnfence import records as r
from turnfence.axes import Durability

pytestmark = pytest.mark.servers

T = TypeVar("T")
# A thousand turns take a minute: that is for the long run, make soak.
TURNS = int(os.environ.get("TURNFENCE_TURNS", "200"))
MEASURED = (10, 100, TURNS)
GROWTH = 1.1
SAMPLES = 3  # the least of them: whatever else the servers do only adds


@dataclass(frozen=True, order=True)
class Cost:
    redis_bytes: int
    statements: int

    def within(self, other: Cost) -> bool:
        """At most a tenth more than the other."""
        bytes_grow = self.redis_bytes > GROWTH * other.redis_bytes
        return not bytes_grow and self.statements <= GROWTH * other.statements


class Meter:
    def __init__(self, rig: Rig, client: Any) -> None:
        self._rig, self._client = rig, client
        self.costs: dict[str, list[Cost]] = {}

    def _read(self) -> Cost:
        info = self._client.info("stats")
        status = self._rig.database().execute("SHOW GLOBAL STATUS LIKE 'Questions'")
        traffic = info["total_net_input_bytes"] + info["total_net_output_bytes"]
        return Cost(traffic, int(str(status[0][1])))

    async def of(self, name: str, call: Awaitable[T]) -> T:
        """Make the call; what it cost, and the reading of the meter with it, which is always the same."""
        before = self._read()
        answer = await call
        after = self._read()
        cost = Cost(after.redis_bytes - before.redis_bytes, after.statements - before.statements)
        self.costs.setdefault(name, []).append(cost)
        return answer

    def least(self) -> dict[str, Cost]:
        least = {
            name: Cost(min(c.redis_bytes for c in costs), min(c.statements for c in costs))
            for name, costs in self.costs.items()
        }
        self.costs = {}
        return least


async def short_turn(talk: Talk, number: int) -> None:
    """The same in two calls."""
    turn, work = await talk.begin(f"look at it, for the {number:04d}th time"), Work()
    reply = turn.reply(f"The load is {number:04d}.")
    ended = await turn.persist(*work.opened(), work.note("as before"), reply, work.closed())
    assert ended.durability is Durability.PERSISTED


async def whole_turn(talk: Talk, number: int, meter: Meter) -> None:
    """A task of its own: opened, worked on, closed."""
    work = Work()

    turn: Turn = await meter.of("BeginTurn", talk.begin(f"look at it, for the {number:04d}th time"))
    read = work.read(turn)
    await meter.of("Flush", turn.flush(*work.opened(), work.note("as before")))
    await turn.settle(read, '{"load": 42}')
    entity = r.EntityEntry(
        display_name=f"web {number % 10}", task_id=work.task_id, evidence_id=read.evidence_id
    )
    put = r.PutEntity(entity_type="host", entity_id=f"web-{number % 10}", entry=entity)
    await turn.flush(put)
    ended = await meter.of(
        "PersistTurn", turn.persist(turn.reply(f"The load is {number:04d}."), work.closed())
    )
    assert ended.durability is Durability.PERSISTED


@pytest.mark.timeout(300)
async def test_a_turn_costs_the_same_however_many_there_were(frail: Rig) -> None:
    talk = Talk(frail.client)
    costs: dict[int, dict[str, Cost]] = {}
    with frail.redis() as client:
        meter = Meter(frail, client)
        for number in range(1, TURNS + 1):
            mark = next((m for m in MEASURED if m - SAMPLES < number <= m), 0)
            if mark or number % 10 == 0:
                await whole_turn(talk, number, meter)
            else:
                await short_turn(talk, number)
            if number + SAMPLES in MEASURED:
                meter.least()  # what came before is not of interest
            if number == mark:
                costs[mark] = meter.least()
    told = "\n".join(f"turn {mark}: {cost}" for mark, cost in costs.items())
    for name in ("Flush", "PersistTurn"):
        assert costs[100][name].within(costs[10][name]), told
        assert costs[TURNS][name].within(costs[10][name]), told
    assert costs[TURNS]["BeginTurn"].within(costs[100]["BeginTurn"]), told
