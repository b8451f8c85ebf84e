"""C158: the clock is set in the middle of a turn. Order is by version and index, and a lease is for the store
to measure: nothing but the times that are shown goes back."""

from __future__ import annotations

import pytest

from tests.conftest import Stores
from tests.contract.turns import SHORT_LEASE, refused
from tests.contract.work import Work
from tests.state.direct import talking
from tests.state.sql_bench import SqlBench
from turnfence.axes import Durability
from turnfence.errors import Reason
from turnfence.serving.process import SystemClock

HOUR = 3_600_000


class Unsteady(SystemClock):
    """The machine's clock, and what somebody has set it off by."""

    def __init__(self) -> None:
        self.off_ms = 0

    def now_ms(self) -> int:
        return super().now_ms() + self.off_ms


@pytest.mark.parametrize("off_ms", [-HOUR, HOUR])
async def test_C158_a_clock_that_is_set_changes_no_order_and_no_lease(
    bench: SqlBench, stores: Stores, off_ms: int
) -> None:
    clock = Unsteady()
    async with talking(bench, stores.redis_url, clock) as talk:
        first, work = await talk.begin("one"), Work()
        await first.flush(*work.opened(), first.reply("two"))
        clock.off_ms = off_ms
        await refused(talk.begin("too early"), Reason.CONVERSATION_BUSY)
        assert (
            await first.persist(first.reply("three"), *work.suspended())
        ).durability is Durability.PERSISTED
        dead = await talk.begin("four", lease=SHORT_LEASE)
        last = await talk.begin_after_lease("five")
        assert last.ref.version == dead.ref.version + 1
        said = [message.text for message in last.snapshot.dialogue]
        assert said == ["one", "two", "three", "four", "five"]
        assert (await last.persist(last.reply("six"))).durability is Durability.PERSISTED
