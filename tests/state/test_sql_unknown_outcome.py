"""A turn's story while the database's answers get lost: success is said when it was applied, and unavailable
otherwise; never that the turn is fenced, and nothing happens twice."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable

import pytest
import redis

from state_service.adapters.sql_tables import chat_message, diagnosis_run, tool_call_record, turn_commit
from state_service.ports import ClaimKind, StoreUnavailable
from tests.contract.turns import CALL_SECONDS, SHORT_LEASE, Talk
from tests.contract.work import at_work, done
from tests.proxy import Proxy, Then
from tests.servers import PrivateRedis
from tests.state.direct import talking
from tests.state.sql_bench import SqlBench, Story
from turnfence import records as r
from turnfence.axes import CallStatus, Durability, RunState, WriteDecision

pytestmark = [pytest.mark.servers, pytest.mark.crash]

COMMIT = b"\x03COMMIT"


@pytest.fixture
async def talk(shaky: SqlBench, valkey: PrivateRedis) -> AsyncIterator[Talk]:
    async with talking(shaky, valkey.url) as talk:
        yield talk


async def counts(sound: SqlBench, talk: Talk) -> dict[str, int]:
    tables = (diagnosis_run, chat_message, tool_call_record, turn_commit)
    return {table.name: len(await sound.rows(table, talk.organ_id)) for table in tables}


# --- persist: it asks, and tries once more --------------------------------------------------------


@pytest.mark.parametrize("then", [Then.CUT_ANSWER, Then.CUT, Then.LOSE_ANSWER])
async def test_a_persist_whose_commit_got_no_answer_is_persisted(
    sound: SqlBench, network: Proxy, talk: Talk, then: Then
) -> None:
    turn, work = await at_work(talk)
    rule = network.when(COMMIT, then, armed_by=b"INSERT INTO turn_commit")
    persisted = await turn.persist(*work.suspended(), turn.reply())
    assert rule.met.is_set()
    assert (persisted.durability, persisted.already_persisted) == (Durability.PERSISTED, False)
    assert await counts(sound, talk) == {
        "diagnosis_run": 1,
        "chat_message": 2,
        "tool_call_record": 0,
        "turn_commit": 1,
    }
    following = await talk.begin("go on")
    assert following.begun.recovery == r.Recovery()
    assert following.task.metadata.task_id == work.task_id


async def test_a_persist_that_was_committed_is_never_fenced_by_who_came_after(
    sound: SqlBench, network: Proxy, talk: Talk
) -> None:
    """Its answer was lost, and before it could try again the next turn took the fence: that is refused."""
    turn, work = await at_work(talk)
    network.when(COMMIT, Then.CUT_ANSWER, armed_by=b"INSERT INTO turn_commit")
    again = network.when(b"SET SESSION sql_mode", Then.HOLD)  # the new connection that it needs
    persisting = asyncio.create_task(turn.persist(*work.suspended()))
    async with asyncio.timeout(CALL_SECONDS):
        await again.met.wait()
    story = Story(sound.cold, organ_id=talk.organ_id, conversation_id=talk.conversation_id)
    assert (await story.claim(turn.ref.version + 1, user_id=talk.user_id)).kind is ClaimKind.CLAIMED
    again.release()
    assert (await persisting).durability is Durability.PERSISTED


async def test_C005_a_commit_that_is_held_comes_before_the_next_turns_claim_or_not_at_all(
    network: Proxy, talk: Talk
) -> None:
    """The lock of the row decides: the next turn's claim waits for the commit, and its view has all of it."""
    turn, work = await at_work(talk, lease=SHORT_LEASE)
    commit = network.when(COMMIT, Then.HOLD, armed_by=b"INSERT INTO turn_commit")
    persisting = asyncio.create_task(turn.persist(*work.suspended(), turn.reply("the last word")))
    claim = network.when(b"SET fence_version", Then.HOLD)
    async with asyncio.timeout(CALL_SECONDS):
        await commit.met.wait()
        following = asyncio.create_task(talk.begin_after_lease("next"))
        await claim.met.wait()
    claim.release()
    commit.release()
    assert (await persisting).durability is Durability.PERSISTED
    said = [message.text for message in (await following).snapshot.dialogue]
    assert said == ["hello", "the last word", "next"]


async def test_C047_a_rehydration_that_takes_too_long_leaves_nothing_half(
    network: Proxy, talk: Talk, valkey: PrivateRedis
) -> None:
    await talk.turn("the first")
    with contextlib.closing(redis.Redis.from_url(valkey.url)) as client:
        of_the_talk = f"*{talk.conversation_id}*"
        client.delete(*client.keys(of_the_talk))
        slow = network.when(b"FROM chat_message", Then.HOLD, armed_by=b"REPEATABLE READ")
        async with asyncio.timeout(CALL_SECONDS):
            await unavailable(talk.client.begin(talk.request("the second")))
        assert slow.met.is_set()
        assert client.keys(of_the_talk + "dialogue") == []
    network.forget()
    turn = await talk.begin("the third")
    assert turn.snapshot.dialogue[0].text == "the first"


async def test_a_persist_that_finds_no_database_is_pending_and_committed_by_the_next_begin(
    sound: SqlBench, network: Proxy, talk: Talk
) -> None:
    turn, work = await at_work(talk)
    await network.stop()
    assert (await turn.persist(*work.suspended(), turn.reply())).durability is Durability.PENDING
    assert not await sound.cold.committed(talk.organ_id, turn.run_id)
    await network.start()
    following = await talk.begin("go on")
    assert following.begun.recovery.ended_runs == []
    run = await sound.cold.run(talk.organ_id, talk.user_id, turn.run_id)
    assert run is not None
    assert (run.run_state, run.durability) == (RunState.SUCCESS, Durability.PERSISTED)
    assert following.task.metadata.task_id == work.task_id


# --- everything else: unavailable, and a repeat goes on from what was applied ---------------------


async def unavailable(call: Awaitable[object]) -> None:
    with pytest.raises(StoreUnavailable):
        await call


@pytest.mark.parametrize("then", [Then.CUT_ANSWER, Then.CUT])
@pytest.mark.parametrize("step", [b"INSERT INTO diagnosis_run", b"INSERT INTO chat_message"])
async def test_a_begin_whose_answer_was_lost_can_be_repeated(
    sound: SqlBench, network: Proxy, talk: Talk, step: bytes, then: Then
) -> None:
    """At the claim, and at the user's message."""
    request = talk.request("hello")
    rule = network.when(COMMIT, then, armed_by=step)
    await unavailable(talk.client.begin(request))
    assert rule.met.is_set()
    turn = await talk.begin_by(request)
    assert turn.run_id == request.run_id
    assert turn.begun.recovery.ended_runs == []
    assert [m.text for m in turn.snapshot.dialogue] == ["hello"]
    assert (await turn.persist(turn.reply())).durability is Durability.PERSISTED
    assert await counts(sound, talk) == {
        "diagnosis_run": 1,
        "chat_message": 2,
        "tool_call_record": 0,
        "turn_commit": 1,
    }


@pytest.mark.parametrize("then", [Then.CUT_ANSWER, Then.CUT])
async def test_a_begin_that_was_given_up_is_no_trouble_to_the_next(
    sound: SqlBench, network: Proxy, talk: Talk, then: Then
) -> None:
    await (await talk.begin("first")).persist()
    given_up = talk.request("lost")
    network.when(COMMIT, then, armed_by=b"INSERT INTO diagnosis_run")
    await unavailable(talk.client.begin(given_up))
    turn = await talk.begin("next")
    claimed = [given_up.run_id] if then is Then.CUT_ANSWER else []
    assert turn.begun.recovery.ended_runs == claimed
    assert (await turn.persist()).durability is Durability.PERSISTED
    assert await sound.cold.committed(talk.organ_id, turn.run_id)


@pytest.mark.parametrize("then", [Then.CUT_ANSWER, Then.CUT])
async def test_a_registration_whose_answer_was_lost_proceeds_when_it_is_repeated(
    sound: SqlBench, network: Proxy, talk: Talk, then: Then
) -> None:
    turn, work = await at_work(talk)
    head = work.write(turn)
    network.when(COMMIT, then, armed_by=b"INSERT INTO tool_call_record")
    await unavailable(turn.register(head))
    for _ in range(2):
        registered = await turn.register(head)
        assert (registered.decision, registered.evidence) == (WriteDecision.PROCEED, head)
    assert (await turn.register(work.write(turn))).decision is WriteDecision.BLOCKED
    assert (await counts(sound, talk))["tool_call_record"] == 1


@pytest.mark.parametrize("then", [Then.CUT_ANSWER, Then.CUT])
async def test_a_settlement_whose_answer_was_lost_is_settled_once(
    sound: SqlBench, network: Proxy, talk: Talk, then: Then
) -> None:
    turn, work = await at_work(talk)
    head = work.write(turn)
    await turn.register(head)
    network.when(COMMIT, then, armed_by=b"UPDATE tool_call_record")
    await unavailable(turn.settle(done(head), '{"ok":true}'))
    settled = await turn.settle(done(head), '{"ok":true}')
    assert settled.status is CallStatus.SUCCESS
    (row,) = await sound.rows(tool_call_record, talk.organ_id)
    assert (row["call_status"], row["live_key"] is None) == ("SUCCESS", False)
    assert (await turn.register(work.write(turn))).decision is WriteDecision.REUSED
    assert (await turn.persist(*work.suspended())).durability is Durability.PERSISTED
