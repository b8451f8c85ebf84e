"""The sweeper, as the process that an operator starts: it finishes what nobody comes back to finish."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

from state_service.adapters.sql_engine import Transactions, create_engine
from state_service.adapters.sql_upkeep import SqlUpkeep
from state_service.ports import Scope
from tests.contract.test_state_history import Reader, worked
from tests.contract.turns import SHORT_LEASE, Talk, collect, refused
from tests.contract.work import Work
from tests.state.rig import Rig
from turnfence import records as r
from turnfence.axes import Durability, RunState, TerminationReason
from turnfence.errors import Reason

LEASE_MS = 1000  # services.SHORT_LEASE: what the sweeper waits for before it takes a run for dead


def swept(rig: Rig, **environment: str) -> dict[str, int]:
    """``python -m state_service sweep``: what it says it did."""
    done = subprocess.run(
        [sys.executable, "-m", "state_service", "sweep"],
        env={**os.environ, **rig.service.environment, **environment},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return {name: int(count) for name, count in re.findall(r"(\w+) (\d+)", done.stdout)}


async def sweep_until(rig: Rig, reached: Callable[[], Any]) -> None:
    """Sweep again and again: what is dead is known only by the time that has passed."""
    async with asyncio.timeout(20):
        while not await reached():
            swept(rig)


async def test_a_run_whose_process_died_ends_interrupted_and_who_watches_it_is_told(
    rig: Rig, talk: Talk
) -> None:
    work = Work()
    turn = await talk.begin("work", lease=SHORT_LEASE)
    await turn.flush(*work.opened())
    watching = asyncio.create_task(collect(talk.watch(turn.run_id)))

    async def ended() -> bool:
        return (await talk.get_run(turn.run_id)).run_state is not RunState.RUNNING

    await sweep_until(rig, ended)
    run = await talk.get_run(turn.run_id)
    assert (run.run_state, run.termination_reason) == (RunState.FAILED, TerminationReason.INTERRUPTED)
    async with asyncio.timeout(10):
        *events, last = await watching
    assert last == run
    assert [type(event.kind) for event in events if isinstance(event, r.TurnEvent)] == [r.Failure, r.Done]
    await refused(turn.flush(work.note("late")), Reason.STATE_FENCED)
    following = await talk.begin("next")
    assert following.begun.recovery is not None
    assert following.begun.recovery.ended_runs == []
    assert following.task.metadata.task_id == work.task_id


async def test_a_turn_that_is_alive_is_left_alone(rig: Rig, talk: Talk) -> None:
    turn = await talk.begin("long work")

    async def old_enough() -> bool:
        return swept(rig)["busy"] > 0

    await sweep_until(rig, old_enough)
    await turn.flush(*Work().opened())
    assert (await turn.persist()).durability is Durability.PERSISTED


async def test_a_turn_whose_commit_is_pending_is_persisted_with_its_own_end(frail: Rig) -> None:
    talk = Talk(frail.client)
    turn = await talk.begin("work")
    with stopped(frail):
        assert (await turn.persist(turn.reply("done"))).durability is Durability.PENDING

    async def persisted() -> bool:
        return (await talk.get_run(turn.run_id)).durability is Durability.PERSISTED

    await sweep_until(frail, persisted)
    assert (await talk.get_run(turn.run_id)).run_state is RunState.SUCCESS
    texts = [message.text for message in (await Reader(talk).messages()).messages]
    assert texts == ["done", "work"]


@contextlib.contextmanager
def stopped(rig: Rig) -> Iterator[None]:
    rig.database().pause()
    try:
        yield
    finally:
        rig.database().resume()


async def test_two_sweepers_at_once_do_the_work_once(rig: Rig, talk: Talk) -> None:
    turn = await talk.begin("work", lease=SHORT_LEASE)
    loop = asyncio.get_running_loop()

    async def ended() -> bool:
        await asyncio.gather(*(loop.run_in_executor(None, swept, rig) for _ in range(2)))
        return (await talk.get_run(turn.run_id)).run_state is not RunState.RUNNING

    await sweep_until(rig, ended)
    events = [item for item in await collect(talk.watch(turn.run_id)) if isinstance(item, r.TurnEvent)]
    assert [type(event.kind) for event in events] == [r.Failure, r.Done]


async def test_a_deletion_that_was_cut_short_is_finished(rig: Rig, talk: Talk) -> None:
    await worked(talk)
    engine = create_engine(rig.service.environment["TURNFENCE_SQL_URL"], timeout=5, connections=1)
    transactions = Transactions(engine, timeout=5)
    try:
        upkeep = SqlUpkeep(transactions)
        scope = Scope(talk.organ_id, talk.conversation_id)
        assert await upkeep.bury(scope, talk.user_id, 1) is not None
        assert swept(rig)["erased"] == 1
        assert await upkeep.erase_some(scope, 10) == 0
        assert swept(rig)["erased"] == 0
    finally:
        await transactions.close()
    await refused(talk.begin("again"), Reason.CONVERSATION_DELETED)
    assert set(rig.ttls(talk)) == {"state"}


async def test_retention_forgets_what_is_older_than_it_says(rig: Rig, talk: Talk) -> None:
    turn, _ = await worked(talk)
    assert swept(rig, TURNFENCE_RETENTION__CONVERSATIONS="1h")["erased"] == 0
    assert (await talk.get_run(turn.run_id)).run_state is RunState.SUCCESS
    assert swept(rig, TURNFENCE_RETENTION__CONVERSATIONS="1ms", TURNFENCE_SWEEPER__BATCH="1000")["erased"] > 0
    await refused(talk.get_run(turn.run_id), Reason.NOT_FOUND)


async def test_serve_sweeps_by_itself(rig: Rig, talk: Talk) -> None:
    turn = await talk.begin("work", lease=SHORT_LEASE)
    rig.service.environment["TURNFENCE_SWEEPER__INTERVAL"] = "100ms"
    try:
        await rig.crash()
        async with asyncio.timeout(10):
            *_, ended = await collect(talk.watch(turn.run_id))
        assert isinstance(ended, r.Run)
        assert ended.termination_reason is TerminationReason.INTERRUPTED
    finally:
        del rig.service.environment["TURNFENCE_SWEEPER__INTERVAL"]
        await rig.crash()
