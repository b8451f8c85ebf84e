"""The story without its wire: what the service does, on the stores of a test."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from state_service.adapters import redis_connect
from state_service.adapters.sql_history import SqlHistory
from state_service.adapters.sql_upkeep import SqlUpkeep
from state_service.conversation import begin, persist, writes
from state_service.conversation.stores import Rules, Stores
from state_service.ports import Clock
from tests.contract.turns import StateClient, Talk, new_id
from tests.state.sql_bench import SqlBench
from turnfence import records as r
from turnfence.serving.process import SystemClock


class Direct(StateClient):
    """The calls of the write path, made in this process."""

    def __init__(self, stores: Stores) -> None:
        self.stores = stores

    async def begin(self, request: r.BeginTurnRequest) -> r.BeginTurnResponse:
        return await begin.begin_turn(self.stores, request)

    async def flush(self, request: r.FlushRequest) -> r.FlushResponse:
        return await persist.flush(self.stores, request)

    async def register(self, request: r.RegisterWriteRequest) -> r.RegisterWriteResponse:
        return await writes.register_write(self.stores, request)

    async def settle(self, request: r.SettleCallsRequest) -> r.SettleCallsResponse:
        return await writes.settle_calls(self.stores, request)

    async def persist(self, request: r.PersistTurnRequest) -> r.PersistTurnResponse:
        return await persist.persist_turn(self.stores, request)


@asynccontextmanager
async def talking(cold: SqlBench, redis_url: str, clock: Clock | None = None) -> AsyncIterator[Talk]:
    """A conversation over that database and a hot store that is well."""
    hot = redis_connect.connect(redis_url, prefix=f"{new_id()}:", socket_timeout=5, max_connections=4)
    clock = clock or SystemClock()
    stores = Stores(
        hot=hot,
        cold=cold.cold,
        history=SqlHistory(cold.transactions, clock),
        upkeep=SqlUpkeep(cold.transactions),
        clock=clock,
        rules=Rules(),
    )
    yield Talk(Direct(stores))
    await hot.close()
