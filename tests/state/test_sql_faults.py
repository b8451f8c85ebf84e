"""A database that fails in the middle: what was committed counts once, what was not can be asked for again,
and no driver's error ever passes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text, update
from sqlalchemy.ext.asyncio import AsyncConnection

from state_service.adapters import sql_claim, sql_engine
from state_service.adapters.sql_cold import SqlCold
from state_service.adapters.sql_tables import chat_conversation
from state_service.ports import S2, ClaimKind, ColdCall, Commit, RunEnd, S2Result, StoreUnavailable
from tests import servers
from tests.contract.turns import NOW
from tests.proxy import Proxy, Then
from tests.state import sql_bench
from tests.state.sql_bench import SqlBench, Story, batch, message, run_of, write_head
from tests.state.sql_records import trace

pytestmark = [pytest.mark.servers, pytest.mark.crash]


GIVEN_UP = 8.0  # until which every answer must be there
COMMIT = b"\x03COMMIT"


# --- every write, and what it answers -------------------------------------------------------------

# The second answer is that of a repeat which finds the first one's effect.
Work = Callable[[SqlCold], Awaitable[Any]]


@dataclass(frozen=True)
class Case:
    work: Work
    first: Any
    again: Any


async def _case(name: str, story: Story) -> Case:
    """One write of a turn that holds the fence, ready to be done any number of times."""
    if name == "first claim":
        start = story.start()
        return Case(lambda cold: _claim(cold, story, 1, start), ClaimKind.CLAIMED, ClaimKind.CLAIMED)
    turn = await story.begin(1)
    if name == "next claim":
        start = story.start()
        return Case(lambda cold: _claim(cold, story, 2, start), ClaimKind.CLAIMED, ClaimKind.CLAIMED)
    said, head, event = message(turn), write_head(turn), trace(9)
    whole = batch(turn, messages=(said,), calls=(head,), traces=((turn.run_id, event),))
    ends = [RunEnd(run=run_of(turn), closing_events=(), prepared=False)]
    cases = {
        "insert_message": Case(lambda cold: cold.insert_message(turn, said), True, True),
        "register_call": Case(
            lambda cold: cold.register_call(turn, head, "{}"),
            S2Result(S2.INSERTED, head),
            S2Result(S2.MINE, head),
        ),
        "settle_calls": Case(lambda cold: cold.settle_calls(turn, [ColdCall(head, "{}", "[1]")]), True, True),
        "put_payload": Case(
            lambda cold: cold.put_payload(turn, payload_id="p", payload_type="OUTPUT", data="{}"), True, True
        ),
        "persist": Case(lambda cold: cold.persist(turn, whole, now_ms=NOW), Commit.DONE, Commit.DONE),
        "interrupt": Case(lambda cold: cold.interrupt(turn, ends), True, True),
        "give_up": Case(lambda cold: cold.give_up(story.scope, ends[0]), None, None),
        "append_late_trace": Case(
            lambda cold: cold.append_late_trace(story.scope, turn.run_id, event), None, None
        ),
    }
    return cases[name]


async def _claim(cold: SqlCold, story: Story, version: int, start: Any) -> ClaimKind:
    claim = await cold.claim(story.scope, user_id=story.user_id, version=version, start=start, now_ms=NOW)
    return claim.kind


@pytest.fixture
def story(sound: SqlBench) -> Story:
    return Story(sound.cold)


CASES = [
    "first claim",
    "next claim",
    "insert_message",
    "register_call",
    "settle_calls",
    "put_payload",
    "persist",
    "interrupt",
    "give_up",
    "append_late_trace",
]


def ours(story: Story) -> bytes:
    """What a connection has asked for once it is in a transaction of the story (a fresh one commits too)."""
    return story.scope.organ_id.encode()


async def unavailable(work: Awaitable[Any]) -> None:
    """It is given up in time, with the one error that says so."""
    before = time.monotonic()
    with pytest.raises(StoreUnavailable):
        await work
    assert time.monotonic() - before < GIVEN_UP


# --- the commit -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
async def test_what_was_committed_counts_once_though_its_answer_was_lost(
    sound: SqlBench, shaky: SqlBench, network: Proxy, story: Story, name: str
) -> None:
    case = await _case(name, story)
    before = await sound.dump(story.scope.organ_id)
    rule = network.when(COMMIT, Then.CUT_ANSWER, armed_by=ours(story))
    await unavailable(case.work(shaky.cold))
    assert rule.met.is_set()
    done = await sound.dump(story.scope.organ_id)
    assert done != before, "it was committed"
    assert await case.work(shaky.cold) == case.again
    assert await sound.dump(story.scope.organ_id) == done


@pytest.mark.parametrize("name", CASES)
async def test_what_was_not_committed_has_no_effect_and_can_be_repeated(
    sound: SqlBench, shaky: SqlBench, network: Proxy, story: Story, name: str
) -> None:
    case = await _case(name, story)
    before = await sound.dump(story.scope.organ_id)
    rule = network.when(COMMIT, Then.CUT, armed_by=ours(story))
    await unavailable(case.work(shaky.cold))
    assert rule.met.is_set()
    assert await sound.dump(story.scope.organ_id) == before
    assert await case.work(shaky.cold) == case.first
    assert await sound.dump(story.scope.organ_id) != before


@pytest.mark.parametrize("then", [Then.LOSE_ANSWER, Then.HOLD])
async def test_a_silent_network_is_given_up_in_time(
    sound: SqlBench, shaky: SqlBench, network: Proxy, story: Story, then: Then
) -> None:
    """Nothing says that the answer will never come; the outcome is asked on another connection."""
    turn = await story.begin(1)
    network.when(COMMIT, then, armed_by=ours(story))
    await unavailable(shaky.cold.persist(turn, batch(turn), now_ms=NOW))
    committed = await shaky.cold.committed(story.scope.organ_id, turn.run_id)
    assert committed is (then is Then.LOSE_ANSWER)
    if then is Then.HOLD:
        network.forget()  # a commit that comes late finds no transaction of a client that gave up
    assert await shaky.cold.persist(turn, batch(turn), now_ms=NOW) is Commit.DONE
    assert await sound.cold.committed(story.scope.organ_id, turn.run_id)


async def test_a_statement_that_is_cut_leaves_nothing_half(
    sound: SqlBench, shaky: SqlBench, network: Proxy, story: Story
) -> None:
    """At whichever table a persist is cut: all of it is there after a repeat, and none of it before."""
    turn = await story.begin(1)
    whole = batch(
        turn,
        messages=(message(turn),),
        calls=(write_head(turn),),
        traces=((turn.run_id, trace(1)),),
    )
    before = await sound.dump(story.scope.organ_id)
    for table in (b"chat_message", b"tool_call_record", b"run_trace", b"turn_commit"):
        for then in (Then.CUT, Then.CUT_ANSWER):
            rule = network.when(b"INSERT INTO " + table, then)
            await unavailable(shaky.cold.persist(turn, whole, now_ms=NOW))
            assert rule.met.is_set()
            assert await sound.dump(story.scope.organ_id) == before
    assert await shaky.cold.persist(turn, whole, now_ms=NOW) is Commit.DONE


# --- the connection -------------------------------------------------------------------------------


async def test_connections_that_died_while_idle_are_not_noticed(
    shaky: SqlBench, network: Proxy, story: Story
) -> None:
    turn = await story.begin(1)
    await asyncio.gather(*(shaky.cold.conversation(story.scope) for _ in range(4)))
    made = network.connections
    await network.cut_all()
    assert await shaky.cold.insert_message(turn, message(turn))
    assert network.connections > made


async def test_a_server_that_is_away_is_unavailable_and_welcome_back(
    shaky: SqlBench, network: Proxy, story: Story
) -> None:
    turn = await story.begin(1)
    await network.stop()
    await unavailable(shaky.cold.conversation(story.scope))
    await unavailable(shaky.cold.insert_message(turn, message(turn)))
    await network.start()
    assert await shaky.cold.insert_message(turn, message(turn))


async def test_a_connection_that_the_server_kills_is_unavailable(
    mariadb_private: servers.PrivateMariaDB, shaky: SqlBench, story: Story
) -> None:
    await story.begin(1)

    async def killed(connection: AsyncConnection) -> None:
        number = (await connection.execute(text("SELECT CONNECTION_ID()"))).scalar_one()
        await asyncio.to_thread(mariadb_private.execute, f"KILL CONNECTION {number}")
        await connection.execute(text("SELECT 1"))

    await unavailable(shaky.transactions.write(killed))
    assert await shaky.cold.conversation(story.scope) is not None


@pytest.mark.parametrize(
    ("number", "why"),
    [
        (1290, "the server is a replica now"),
        (1836, "read only"),
        (1317, "the query was interrupted"),
        (1969, "the statement took too long"),
        (1927, "the connection was killed"),
        (1021, "the disk is full"),
        (1047, "a cluster node is not ready"),
        (1226, "the user has used up its resources"),
    ],
)
async def test_a_server_that_cannot_now_is_unavailable_and_not_corrupt(
    shaky: SqlBench, number: int, why: str
) -> None:
    """Errors as the server itself raises them."""

    async def refused(connection: AsyncConnection) -> None:
        signal = f"SIGNAL SQLSTATE 'HY000' SET MYSQL_ERRNO = {number}, MESSAGE_TEXT = '{why}'"
        await connection.execute(text(signal))

    await unavailable(shaky.transactions.write(refused))


# --- locks ----------------------------------------------------------------------------------------


async def test_a_lock_that_is_held_too_long_is_given_up(
    sound: SqlBench, shaky: SqlBench, story: Story, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sql_engine, "TRIES", 2)
    turn = await story.begin(1)
    async with sound.engine.begin() as holder:
        assert await sql_claim.lock(holder, turn)
        await unavailable(shaky.cold.persist(turn, batch(turn), now_ms=NOW))
        await unavailable(shaky.cold.insert_message(turn, message(turn)))
    assert await shaky.cold.persist(turn, batch(turn), now_ms=NOW) is Commit.DONE


async def test_a_lock_that_is_released_in_time_is_waited_for(sound: SqlBench, story: Story) -> None:
    turn = await story.begin(1)
    async with sound.engine.begin() as holder:
        assert await sql_claim.lock(holder, turn)
        persist = asyncio.create_task(sound.cold.persist(turn, batch(turn), now_ms=NOW))
        async with asyncio.timeout(GIVEN_UP):
            while not await _waits_for_lock(holder):  # noqa: ASYNC110 - the server makes it true
                await asyncio.sleep(0.12)  # it looks no oftener
        assert not persist.done()
    assert await persist


async def _waits_for_lock(connection: AsyncConnection) -> bool:
    statement = "SELECT COUNT(*) FROM information_schema.innodb_trx WHERE trx_state = 'LOCK WAIT'"
    return bool((await connection.execute(text(statement))).scalar_one())


async def test_a_deadlock_is_repeated_whole(sound: SqlBench) -> None:
    """Two transactions take two rows crosswise; the server ends one, and both are done in the end."""
    stories = [Story(sound.cold) for _ in range(2)]
    turns = [await story.begin(1) for story in stories]
    tries = 0
    both = asyncio.Barrier(2)

    async def crosswise(connection: AsyncConnection, mine: int) -> str:
        nonlocal tries
        tries += 1
        for step, place in enumerate((mine, 1 - mine)):
            await connection.execute(
                update(chat_conversation)
                .where(chat_conversation.c.organ_id == turns[place].organ_id)
                .values(title=chat_conversation.c.title.concat(str(mine)))
            )
            if step == 0 and tries <= 2:
                await both.wait()
        return "done"

    answers = await asyncio.gather(
        sound.transactions.write(lambda c: crosswise(c, 0)),
        sound.transactions.write(lambda c: crosswise(c, 1)),
    )
    assert [*answers] == ["done", "done"]
    assert tries == 3
    titles = {(await sound.rows(chat_conversation, turn.organ_id))[0]["title"] for turn in turns}
    assert len(titles) == 1
    assert sorted(titles.pop()) == ["0", "1"]


async def test_a_deadlock_without_end_is_unavailable(
    sound: SqlBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sql_engine, "TRIES", 3)
    tries = 0

    async def always(connection: AsyncConnection) -> None:
        nonlocal tries
        tries += 1
        await connection.execute(
            text("SIGNAL SQLSTATE '40001' SET MYSQL_ERRNO = 1213, MESSAGE_TEXT = 'deadlock'")
        )

    await unavailable(sound.transactions.write(always))
    assert tries == 3


async def test_a_file_that_another_holds_is_waited_for_then_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SQLite has one lock for all: whoever waits too long is told so, and never by the driver."""
    monkeypatch.setattr(sql_engine, "TRIES", 2)
    async with sql_bench.opened(f"sqlite:///{tmp_path / 'held.db'}", timeout=0.2) as bench:
        story = Story(bench.cold)
        turn = await story.begin(1)
        async with bench.engine.begin():
            await unavailable(bench.cold.persist(turn, batch(turn), now_ms=NOW))
            assert await bench.cold.conversation(story.scope) is not None  # readers do not wait
            persist = asyncio.create_task(bench.cold.persist(turn, batch(turn), now_ms=NOW))
            assert await bench.cold.conversation(story.scope) is not None
        assert await persist


# --- callers that leave ---------------------------------------------------------------------------


async def test_a_caller_that_leaves_does_not_tear_its_transaction(
    sound: SqlBench, shaky: SqlBench, network: Proxy, story: Story
) -> None:
    """D31: the transaction ends, one way or the other, before its caller is let go; the pool is whole."""
    turn = await story.begin(1)
    rule = network.when(b"INSERT INTO turn_commit", Then.HOLD)
    persist = asyncio.create_task(shaky.cold.persist(turn, batch(turn), now_ms=NOW))
    await rule.met.wait()
    persist.cancel()
    rule.release()
    with pytest.raises(asyncio.CancelledError):
        await persist
    assert await sound.cold.committed(story.scope.organ_id, turn.run_id)
    rows = await asyncio.gather(*(shaky.cold.conversation(story.scope) for _ in range(8)))
    assert None not in rows
