"""BeginTurn: what a turn starts from, and who may not begin one."""

from __future__ import annotations

import asyncio
import time

import msgspec
import pytest

from tests.contract.turns import (
    SHORT_LEASE,
    StateClient,
    Talk,
    Turn,
    new_id,
    refused,
)
from tests.contract.work import Work, sourced
from turnfence import records as r
from turnfence.axes import DialogueRole, Durability, MessageType, ResumeAction, RunState
from turnfence.errors import Reason

MESSAGE_MAX_BYTES = 4096  # state.message-max-bytes by default
TEXT_MAX_BYTES = 64 * 1024


async def test_the_first_turn_of_a_conversation_has_version_one_and_an_empty_snapshot(talk: Talk) -> None:
    turn = await talk.begin("where is web-1?", agent_id="ops")
    assert (turn.ref.organ_id, turn.ref.conversation_id) == (talk.organ_id, talk.conversation_id)
    assert (turn.ref.run_id, turn.ref.version) == (turn.request.run_id, 1)
    assert turn.ref.lease_token
    message = turn.begun.user_message
    assert message is not None
    assert message.message_id == turn.request.input.message_id
    assert (message.role, message.type) == (DialogueRole.USER, MessageType.USER_TEXT)
    assert (message.text, message.trace_id, message.version) == ("where is web-1?", turn.run_id, 1)
    assert message.created_at is not None
    assert abs(message.created_at / 1000 - time.time()) < 3600
    snapshot = turn.snapshot
    assert snapshot.conversation.user_id == talk.user_id
    assert (snapshot.conversation.version, snapshot.conversation.active_task_id) == (1, "")
    assert snapshot.dialogue == [message]
    assert snapshot.task is None
    assert (snapshot.records, snapshot.unresolved_writes) == ([], [])
    assert (snapshot.entities, snapshot.shared) == ({}, {})
    assert (turn.begun.truncated, turn.begun.previous_turn) == (False, None)
    assert turn.begun.recovery == r.Recovery()


async def test_a_turn_without_text_stores_no_message_but_has_a_run(talk: Talk) -> None:
    turn = await talk.begin("", action=ResumeAction.CONFIRM, checkpoint_id="c1")
    assert turn.begun.user_message is None
    assert turn.snapshot.dialogue == []
    run = await talk.get_run(turn.run_id)
    assert (run.run_state, run.message_id) == (RunState.RUNNING, turn.request.input.message_id)


async def test_the_second_turn_sees_what_the_first_persisted(talk: Talk) -> None:
    first = await talk.begin("first")
    await first.persist(
        first.reply("answer one", message_id="m-reply"),
        r.PutConversation(title="Servers"),
        r.PutSessionShared(name="zone", value=sourced('"eu"')),
        r.PutEntity(entity_type="host", entity_id="web 1", entry=r.EntityEntry(display_name="web-1")),
    )
    second = await talk.begin("second")
    assert second.ref.version > first.ref.version
    assert second.begun.recovery == r.Recovery()
    assert [m.text for m in second.snapshot.dialogue] == ["first", "answer one", "second"]
    assert [m.trace_id for m in second.snapshot.dialogue] == [first.run_id, first.run_id, second.run_id]
    assert second.snapshot.conversation.title == "Servers"
    assert second.snapshot.shared == {"zone": sourced('"eu"')}
    assert second.snapshot.entities == {"host:web 1": r.EntityEntry(display_name="web-1")}


# --- who may not begin ----------------------------------------------------------------------------


async def test_C001_a_second_begin_while_a_turn_runs_is_refused_at_once(talk: Talk) -> None:
    first = await talk.begin()
    before = time.monotonic()
    error = await refused(talk.begin("me too"), Reason.CONVERSATION_BUSY)
    assert time.monotonic() - before < 1.0
    assert error.status == "ABORTED"
    assert error.retry_after is not None
    assert 0 < error.retry_after <= 1
    assert await first.flush(r.PutConversation(title="still mine"))
    assert (await first.persist()).durability is Durability.PERSISTED
    assert (await talk.begin("now")).ref.version == first.ref.version + 1


async def test_another_user_is_refused_and_nothing_is_written(talk: Talk) -> None:
    await talk.turn("mine")
    stranger = new_id()
    request = talk.request("theirs", user_id=stranger)
    error = await refused(talk.client.begin(request), Reason.CONVERSATION_FORBIDDEN)
    assert error.status == "PERMISSION_DENIED"
    assert error.retry_after is None
    await refused(talk.get_run(request.run_id, user_id=stranger), Reason.NOT_FOUND)
    again = await talk.begin("mine again")
    assert again.begun.recovery == r.Recovery()
    assert again.ref.version == 2
    assert [m.text for m in again.snapshot.dialogue] == ["mine", "mine again"]


async def test_another_user_does_not_learn_that_a_turn_is_running(talk: Talk) -> None:
    await talk.begin()
    await refused(talk.client.begin(talk.request(user_id=new_id())), Reason.CONVERSATION_FORBIDDEN)


async def test_C002_the_same_ids_in_another_organisation_are_another_conversation(talk: Talk) -> None:
    other = Talk(talk.client, conversation_id=talk.conversation_id)
    mine = await talk.begin("mine", message_id="m-1", run_id="r-1")
    theirs = await other.begin("theirs", message_id="m-1", run_id="r-1")
    assert (mine.ref.version, theirs.ref.version) == (1, 1)
    assert [m.text for m in theirs.snapshot.dialogue] == ["theirs"]
    assert await theirs.flush(r.PutConversation(title="theirs"))
    assert await mine.flush(r.PutConversation(title="mine"))
    await mine.persist()
    await theirs.persist()
    assert (await talk.begin()).snapshot.conversation.title == "mine"
    assert (await other.begin()).snapshot.conversation.title == "theirs"


# --- a message that is known ----------------------------------------------------------------------


async def test_a_message_whose_run_is_going_answers_that_run(talk: Talk) -> None:
    turn = await talk.begin(message_id="m-going")
    answer = await talk.client.begin(talk.request(message_id="m-going"))
    assert answer.existing_run is not None
    assert answer.turn is None
    assert (answer.existing_run.run_id, answer.existing_run.run_state) == (turn.run_id, RunState.RUNNING)
    assert await turn.flush(r.PutConversation(title="undisturbed"))


async def test_a_message_whose_run_has_ended_answers_it_and_leaves_no_lock(talk: Talk) -> None:
    turn = await talk.turn(message_id="m-done")
    for _ in range(2):
        answer = await talk.client.begin(talk.request(message_id="m-done"))
        assert answer.existing_run == await talk.get_run(turn.run_id)
        assert answer.existing_run.run_state is RunState.SUCCESS
    following = await talk.begin("something new")
    assert following.begun.recovery == r.Recovery()
    assert [m.text for m in following.snapshot.dialogue] == ["hello", "something new"]


async def test_a_message_that_is_known_opens_no_other_conversation(talk: Talk) -> None:
    """The caller lost the answer to its very first call, so it does not know its conversation's id."""
    turn = await talk.turn(message_id="m-first")
    elsewhere = Talk(talk.client, organ_id=talk.organ_id)
    elsewhere.user_id = talk.user_id
    answer = await elsewhere.client.begin(elsewhere.request(message_id="m-first"))
    assert answer.existing_run is not None
    assert answer.existing_run.run_id == turn.run_id
    assert answer.existing_run.conversation_id == talk.conversation_id
    fresh = await elsewhere.begin("fresh")
    assert [m.text for m in fresh.snapshot.dialogue] == ["fresh"]
    assert fresh.begun.recovery == r.Recovery()


@pytest.mark.parametrize("ended", [False, True], ids=["running", "ended"])
async def test_a_message_id_with_other_content_is_refused(talk: Talk, ended: bool) -> None:
    turn = await talk.begin("this", message_id="m-reused")
    if ended:
        await turn.persist()
    error = await refused(
        talk.client.begin(talk.request("that", message_id="m-reused")), Reason.MESSAGE_ID_REUSED
    )
    assert error.status == "ALREADY_EXISTS"
    assert (await talk.get_run(turn.run_id)).run_id == turn.run_id


@pytest.mark.parametrize("ended", [False, True], ids=["running", "ended"])
async def test_another_users_message_id_is_refused_without_its_run(talk: Talk, ended: bool) -> None:
    """Message ids are unique in the organisation; whose run it is stays unknown."""
    turn = await talk.begin(message_id="m-theirs")
    if ended:
        await turn.persist()
    stranger = Talk(talk.client, organ_id=talk.organ_id)
    request = stranger.request(message_id="m-theirs")
    error = await refused(stranger.client.begin(request), Reason.MESSAGE_ID_REUSED)
    assert turn.run_id not in str(error.metadata)
    assert (await stranger.begin("my own")).ref.version == 1


async def test_of_first_calls_at_once_with_one_message_id_in_one_conversation_one_begins(
    talk: Talk,
) -> None:
    """Whoever finds the conversation busy before the winner's run is known repeats, as RetryInfo says."""

    answers = await asyncio.gather(
        *(talk.begin_when_free(talk.request(message_id="m-raced")) for _ in range(8))
    )
    winners = [answer.turn for answer in answers if answer.turn is not None]
    assert len(winners) == 1
    known = [answer.existing_run.run_id for answer in answers if answer.existing_run is not None]
    assert known == [winners[0].run_id] * 7


async def test_of_first_calls_at_once_with_one_message_id_and_no_conversation_one_begins(
    state: StateClient,
) -> None:
    """Each caller made a conversation id of its own: SQL decides, and the losers leave nothing behind."""
    first = Talk(state)
    talks = [Talk(state, organ_id=first.organ_id) for _ in range(8)]
    for talk in talks:
        talk.user_id = first.user_id
    answers = await asyncio.gather(*(talk.client.begin(talk.request(message_id="m-raced")) for talk in talks))
    winners = [answer.turn for answer in answers if answer.turn is not None]
    assert len(winners) == 1
    known = [answer.existing_run.run_id for answer in answers if answer.existing_run is not None]
    assert known == [winners[0].run_id] * 7
    for talk in talks:
        if talk.conversation_id != winners[0].conversation_id:
            fresh = await talk.begin("fresh")
            assert [m.text for m in fresh.snapshot.dialogue] == ["fresh"]
            assert fresh.begun.recovery == r.Recovery()


# --- a begin that is repeated ---------------------------------------------------------------------


async def test_C007_a_begin_repeated_by_its_run_id_gets_the_same_answer(talk: Talk) -> None:
    """Its first answer was lost: the same turn, and no interruption by itself."""
    await talk.turn("before")
    request = talk.request("lost", agent_id="ops")
    first = await talk.begin_by(request)
    second = await talk.begin_by(request)
    assert msgspec.structs.replace(second.ref, seen_seq=0) == msgspec.structs.replace(first.ref, seen_seq=0)
    assert second.ref.seen_seq >= first.ref.seen_seq
    assert second.begun.user_message == first.begun.user_message
    assert second.snapshot.dialogue == first.snapshot.dialogue
    assert second.begun.recovery.ended_runs == []
    assert (await second.flush(second.reply("working"))).data_seq > second.ref.seen_seq - 1
    assert (await second.persist()).durability is Durability.PERSISTED
    third = await talk.begin("after")
    assert [m.text for m in third.snapshot.dialogue] == ["before", "lost", "working", "after"]


async def test_a_begin_repeated_after_its_run_has_ended_never_runs_the_message_twice(talk: Talk) -> None:
    request = talk.request("once")
    turn = await talk.begin_by(request)
    await turn.persist()
    answer = await talk.client.begin(request)
    assert answer.turn is None
    assert answer.existing_run is not None
    assert answer.existing_run.run_state is RunState.SUCCESS


async def test_two_begins_at_once_with_one_run_id_are_one_turn(talk: Talk) -> None:
    request = talk.request("twice")
    turns = await asyncio.gather(*(talk.begin_by(request) for _ in range(4)))
    assert {(turn.ref.version, turn.ref.lease_token) for turn in turns} == {(1, turns[0].ref.lease_token)}
    last = max(turns, key=lambda turn: turn.ref.seen_seq)
    assert (await last.persist()).durability is Durability.PERSISTED
    assert [m.text for m in (await talk.begin("next")).snapshot.dialogue] == ["twice", "next"]


# --- long texts -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "stored"),
    [
        ("a" * MESSAGE_MAX_BYTES, "a" * MESSAGE_MAX_BYTES),
        ("a" * (MESSAGE_MAX_BYTES + 1), "a" * MESSAGE_MAX_BYTES),
        ("a" * (MESSAGE_MAX_BYTES - 1) + "é", "a" * (MESSAGE_MAX_BYTES - 1)),
        ("a" * (MESSAGE_MAX_BYTES - 3) + "😀b", "a" * (MESSAGE_MAX_BYTES - 3)),
        ("服" * 2000, "服" * 1365),
    ],
    ids=["fits", "one-more", "two-byte", "four-byte", "chinese"],
)
async def test_C122_a_long_text_is_cut_between_characters_and_says_so(
    talk: Talk, text: str, stored: str
) -> None:
    turn = await talk.begin(text)
    assert turn.begun.user_message is not None
    assert turn.begun.user_message.text == stored
    assert turn.begun.truncated is (stored != text)
    assert [m.text for m in turn.snapshot.dialogue] == [stored]
    await turn.persist()
    assert (await talk.begin("next")).snapshot.dialogue[0].text == stored


async def test_a_text_of_64_KiB_is_cut_and_one_byte_more_is_refused(talk: Talk) -> None:
    error = await refused(talk.begin("x" * (TEXT_MAX_BYTES + 1)), Reason.INVALID_REQUEST)
    assert [v.field for v in error.violations] == ["input.text"]
    turn = await talk.begin("x" * TEXT_MAX_BYTES)
    assert turn.begun.truncated


# --- a predecessor that is not there any more -----------------------------------------------------


async def _dies(turn: Turn) -> Turn:
    """The turn writes something and is never heard of again."""
    work = Work()
    await turn.flush(*work.opened(), turn.reply("half an answer"))
    return turn


async def test_C014_a_dead_turn_blocks_only_for_its_lease(talk: Talk) -> None:
    dead = await _dies(await talk.begin("first", lease=SHORT_LEASE))
    before = time.monotonic()
    turn = await talk.begin_after_lease("second")
    assert time.monotonic() - before < SHORT_LEASE / 1000 + 2
    assert turn.ref.version > dead.ref.version
    assert turn.begun.recovery.ended_runs == [dead.run_id]
    assert [m.text for m in turn.snapshot.dialogue] == ["first", "half an answer", "second"]
