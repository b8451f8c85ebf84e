"""G4, G5: a turn after a thousand turns, a step after a thousand steps, and what a turn writes to the logs,
against the least that keeps the same: the same bytes put into the stores with nothing around them."""

from __future__ import annotations

from typing import Any

import redis.asyncio
from sqlalchemy import insert, update
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from state_service.adapters import sql_rows, sql_runs
from state_service.adapters.sql_tables import chat_conversation, chat_message, diagnosis_run, tool_call_record
from state_service.core import keys
from tests import servers
from tests.benchmarks.meters import LogMeter, Result, Stopwatch, median
from tests.contract.turns import NOW, StateClient, Talk, new_id
from tests.contract.work import Work
from turnfence import records as r
from turnfence.axes import CallStatus, DialogueRole, MessageType, SideEffect
from turnfence.records import to_json

TURNS = 1_000
STEPS = 1_000
SAMPLE = 50
FLOOR_TURNS = 100
READING = '{"load": [0.42, 0.40, 0.38], "unit": "1", "host": "web-1"}'


async def turn_of(talk: Talk, steps: int) -> None:
    """A task with some steps, each durable before the next."""
    work = Work()
    turn = await talk.begin("look at it")
    await turn.flush(*work.opened())
    for number in range(steps):
        await turn.settle(work.read(turn), READING)
        await turn.flush(work.note(f"step {number:04d}: the load is normal"))
    await turn.persist(turn.reply("The load is normal."), work.closed())


async def turns(client: StateClient) -> list[Result]:
    talk, watch = Talk(client), Stopwatch()
    for _ in range(TURNS):
        watch.start()
        await turn_of(talk, 1)
        watch.lap()
    first, last = median(watch.laps[5 : 5 + SAMPLE]), median(watch.laps[-SAMPLE:])
    told = f"{first * 1e3:.1f} → {last * 1e3:.1f} ms"
    return [Result(f"G4 turn {TURNS} / the first ones", last / first, 1.15, True, told)]


async def steps(client: StateClient) -> list[Result]:
    turn, work, watch = await Talk(client).begin("look at it", lease=86_400_000), Work(), Stopwatch()
    await turn.flush(*work.opened())
    for number in range(STEPS):
        watch.start()
        await turn.settle(work.read(turn), READING)
        await turn.flush(work.note(f"step {number:04d}: the load is normal"))
        watch.lap()
    await turn.persist(turn.reply("The load is normal."), work.closed())
    first, last = median(watch.laps[10 : 10 + SAMPLE]), median(watch.laps[-SAMPLE:])
    told = f"{first * 1e3:.2f} → {last * 1e3:.2f} ms"
    return [Result(f"G4 step {STEPS} / step 10", last / first, 1.2, True, told)]


async def log_bytes(
    client: StateClient, hot: servers.PrivateRedis, cold: servers.PrivateMariaDB, sql_url: str
) -> list[Result]:
    """Ten steps in a turn; and one long turn, whose bytes have a limit of their own."""
    ours = LogMeter(hot, cold)
    for _ in range(FLOOR_TURNS):
        await turn_of(Talk(client), 10)
    written = ours.bytes() / FLOOR_TURNS
    floor = Floor(hot.url, sql_url)
    least = LogMeter(hot, cold)
    for _ in range(FLOOR_TURNS):
        await floor.turn(10)
    floor_written = least.bytes() / FLOOR_TURNS
    await floor.close()
    long = LogMeter(hot, cold)
    await turn_of(Talk(client), STEPS)
    megabytes = long.bytes() / 1e6
    for meter in (ours, least, long):
        meter.close()
    told = f"{written / 1e3:.0f} KB against {floor_written / 1e3:.0f} KB"
    return [
        Result("G5 log bytes of a turn / the floor", written / floor_written, 1.2, True, told),
        Result(f"G5 MB of a turn of {STEPS} steps", megabytes, 5, True),
    ]


def message(role: DialogueRole, kind: MessageType, text: str, run_id: str) -> r.DialogueMessage:
    return r.DialogueMessage(
        message_id=new_id(), role=role, type=kind, text=text, trace_id=run_id, created_at=NOW
    )


class Floor:
    """The same records at the same moments, written with nothing that keeps them safe."""

    def __init__(self, redis_url: str, sql_url: str) -> None:
        self._redis: Any = redis.asyncio.Redis.from_url(redis_url)
        self._engine: AsyncEngine = create_async_engine(sql_url)

    async def close(self) -> None:
        await self._redis.aclose()
        await self._engine.dispose()

    async def turn(self, steps: int) -> None:
        organ, conversation, run = new_id(), new_id(), new_id()
        at, work = f"{keys.PREFIX}{keys.tag(organ, conversation)}:", Work()
        common = {
            "organ_id": organ, "conversation_id": conversation, "create_time": NOW, "update_time": NOW,
            "version": 1, "delete_flag": 0,
        }  # fmt: skip
        said = message(DialogueRole.USER, MessageType.USER_TEXT, "look at it", run)
        row = {
            "user_id": organ, "title": "", "active_task_id": "", "session_shared": "", "state_version": 0,
            "persist_seq": 0, "fence_version": 1, "fence_trace": run, "last_message_time": NOW,
        }  # fmt: skip
        async with self._engine.begin() as connection:
            await connection.execute(insert(chat_conversation), [common | row])
            started = sql_runs.empty_row() | {
                "run_id": run, "message_id": said.message_id, "input_hash": "", "user_id": organ,
                "agent_id": "ops", "status": "RUNNING", "run_state": "RUNNING", "started_time": NOW,
            }  # fmt: skip
            await connection.execute(insert(diagnosis_run), [common | started])
        await self._redis.hset(at + "state", mapping={"version": 1, "run": run})
        await self._say(at, common, said)
        graph = at + keys.graph(work.task_id)
        await self._redis.hset(graph, mapping={"t": to_json(work.task()), "n1": to_json(work.node())})
        for number in range(steps):
            head = r.EvidenceHead(
                evidence_id=new_id(), task_id=work.task_id, node_id="n1", tool_name="uptime",
                side_effect=SideEffect.NONE, status=CallStatus.SUCCESS, trace_id=run, started_at=NOW,
            )  # fmt: skip
            evidence = at + keys.evidence(work.task_id, "n1")
            await self._redis.hset(evidence, mapping={head.evidence_id: to_json(head)})
            await self._redis.set(at + keys.payload(work.task_id, head.evidence_id), READING)
            async with self._engine.begin() as connection:
                call = sql_rows.to_row(head, sql_rows.CALL) | {"request": "", "response": READING}
                await connection.execute(insert(tool_call_record), [common | call | {"live_key": None}])
            note = {"note": f"step {number:04d}: the load is normal"}
            await self._redis.hset(at + keys.space(work.task_id, "n1"), mapping=note)
        reply = message(DialogueRole.AGENT, MessageType.AGENT_REPLY, "The load is normal.", run)
        await self._say(at, common, reply)
        async with self._engine.begin() as connection:
            ours = chat_conversation.c.conversation_id == conversation
            await connection.execute(update(chat_conversation).where(ours).values(state_version=1))
            ended = update(diagnosis_run).where(diagnosis_run.c.run_id == run)
            await connection.execute(ended.values(run_state="SUCCESS", answer=to_json(reply)))
        await self._redis.delete(graph, evidence, at + keys.space(work.task_id, "n1"))

    async def _say(self, at: str, common: dict[str, Any], said: r.DialogueMessage) -> None:
        await self._redis.lpush(at + "dialogue", to_json(said))
        async with self._engine.begin() as connection:
            row = sql_rows.to_row(said, sql_rows.MESSAGE)
            await connection.execute(insert(chat_message), [common | row])
