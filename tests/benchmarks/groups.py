"""G7: registrations and settlements of 64 conversations at once, committed in groups and one by one."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Sequence

import msgspec
from sqlalchemy.ext.asyncio import AsyncConnection

from state_service.adapters import sql_calls, sql_claim
from state_service.adapters.sql_calls import Registration
from state_service.ports import ColdCall
from tests import servers
from tests.benchmarks.meters import CpuMeter, Result, median
from tests.contract.turns import NOW
from tests.state.sql_bench import SqlBench, Story, opened, write_head
from turnfence import records as r
from turnfence.axes import CallStatus

TOGETHER, WRITES, ROUNDS = 64, 10, 3
Do = Callable[[SqlBench, r.TurnRef, r.EvidenceHead], Awaitable[None]]


def settled(head: r.EvidenceHead) -> ColdCall:
    return ColdCall(msgspec.structs.replace(head, status=CallStatus.SUCCESS, business_ok=True), "", '"done"')


async def in_groups(bench: SqlBench, turn: r.TurnRef, head: r.EvidenceHead) -> None:
    await bench.cold.register_call(turn, head, "{}")
    await bench.cold.settle_calls(turn, [settled(head)])


async def alone(bench: SqlBench, turn: r.TurnRef, head: r.EvidenceHead) -> None:
    """The same statements, each write in a transaction of its own."""

    async def register(connection: AsyncConnection) -> None:
        assert await sql_claim.lock(connection, turn) is not None
        await sql_calls.register(connection, [Registration(turn, head, "{}")], NOW)

    async def settle(connection: AsyncConnection) -> None:
        assert await sql_claim.lock(connection, turn) is not None
        await sql_calls.settle(connection, turn, [settled(head)], NOW)

    await bench.transactions.write(register)
    await bench.transactions.write(settle)


async def one_round(bench: SqlBench, cold: servers.PrivateMariaDB, do: Do) -> tuple[float, float]:
    """Writes a second, and CPU seconds of this process and the database."""
    turns = [await Story(bench.cold).begin(1) for _ in range(TOGETHER)]

    async def writes(turn: r.TurnRef) -> None:
        for number in range(WRITES):
            await do(bench, turn, write_head(turn, idempotency_key=f"{number:064d}"))

    cpu, start = CpuMeter([os.getpid(), cold.pid()]), time.perf_counter()
    await asyncio.gather(*(writes(turn) for turn in turns))
    return TOGETHER * WRITES / (time.perf_counter() - start), cpu.seconds()


async def group_commits(cold: servers.PrivateMariaDB) -> list[Result]:
    rates: dict[str, list[float]] = {"groups": [], "alone": []}
    cpus: dict[str, list[float]] = {"groups": [], "alone": []}
    async with opened(cold.fresh_url(), connections=16) as bench:
        ways: Sequence[tuple[str, Do]] = (("groups", in_groups), ("alone", alone))
        for _ in range(ROUNDS):
            for name, do in ways:
                rate, cpu = await one_round(bench, cold, do)
                rates[name].append(rate)
                cpus[name].append(cpu)
    fast, slow = median(rates["groups"]), median(rates["alone"])
    told = f"{fast:.0f} against {slow:.0f} writes/s"
    cpu_ratio = median(cpus["groups"]) / median(cpus["alone"])
    return [
        Result(f"G7 write rate at {TOGETHER}, groups / alone", fast / slow, 1.4, False, told),
        Result(f"G7 CPU at {TOGETHER}, groups / alone", cpu_ratio, 0.7, True),
    ]
