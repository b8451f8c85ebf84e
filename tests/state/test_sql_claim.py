"""The claim, and the fence that it raises: who gets a version, who is refused and why, and that nobody writes
without it. The same on both stores."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest

from state_service.adapters.sql_tables import chat_conversation, diagnosis_run
from state_service.ports import (
    S2,
    CallRow,
    Claim,
    ClaimKind,
    ColdCall,
    Commit,
    ConversationRow,
    RunEnd,
    S2Result,
)
from tests.contract.turns import NOW, hash_of, new_id
from tests.state.sql_bench import SqlBench, Story, batch, message, run_of, write_head
from turnfence import records as r
from turnfence.axes import Durability, RunState


def plain(row: ConversationRow | None) -> ConversationRow:
    assert row is not None
    return msgspec.structs.replace(row, updated_at=None)


async def test_a_first_claim_makes_the_conversation_and_its_run(bench: SqlBench, story: Story) -> None:
    assert await bench.cold.conversation(story.scope) is None
    start = story.start()
    claim = await story.claim(1, start)
    row = ConversationRow(
        user_id=story.user_id,
        title="",
        active_task_id="",
        session_shared={},
        state_version=0,
        persist_seq=0,
        fence_version=1,
        deleted=False,
        fence_trace=start.run_id,
    )
    assert msgspec.structs.replace(claim, row=plain(claim.row)) == Claim(
        ClaimKind.CLAIMED, row=row, fence_version=1
    )
    assert plain(await bench.cold.conversation(story.scope)) == row
    run = await bench.cold.run(story.scope.organ_id, story.user_id, start.run_id)
    assert run is not None
    assert (run.run_state, run.version, run.message_id, run.started_at, run.durability) == (
        RunState.RUNNING,
        1,
        start.message_id,
        NOW,
        None,
    )


async def test_the_same_claim_again_has_the_same_answer_and_no_second_effect(
    bench: SqlBench, story: Story
) -> None:
    await story.begin(1)
    start = story.start()
    first = await story.claim(2, start)
    before = await bench.dump(story.scope.organ_id)
    assert await story.claim(2, start) == first
    assert await bench.dump(story.scope.organ_id) == before


async def test_a_run_that_begins_again_under_a_new_version_moves_there(bench: SqlBench, story: Story) -> None:
    start = story.start()
    await story.claim(1, start)
    claim = await story.claim(2, start)
    assert (claim.kind, claim.fence_version, claim.unfinished) == (ClaimKind.CLAIMED, 2, ())
    run = await bench.cold.run(story.scope.organ_id, story.user_id, start.run_id)
    assert run is not None
    assert run.version == 2
    assert len(await bench.rows(diagnosis_run, story.scope.organ_id)) == 1


async def test_a_claim_brings_what_the_last_persist_may_not_have_known(bench: SqlBench, story: Story) -> None:
    """Of the version that persisted last and of those since; what is older is whole in SQL."""
    zeroth = await story.begin(0)
    await bench.cold.persist(zeroth, batch(zeroth, messages=(message(zeroth),)), now_ms=NOW)
    first = await story.begin(1)
    known = message(first)
    await bench.cold.persist(first, batch(first, messages=(known,)), now_ms=NOW)
    second, third = await story.begin(2), story.start()
    said = [message(second, idx=idx) for idx in (2, 1)]
    for each in said:
        assert await bench.cold.insert_message(second, each)
    head = write_head(second)
    assert await bench.cold.register_call(second, head, "{}") == S2Result(S2.INSERTED, head)
    claim = await story.claim(3, third)
    assert claim.messages == (known, said[1], said[0])
    assert claim.calls == (CallRow(head, 2),)
    assert claim.unfinished == (second.run_id,)
    assert claim.row is not None
    assert (claim.row.state_version, claim.row.fence_version) == (1, 3)


async def test_a_claim_without_a_message_makes_no_run(bench: SqlBench, story: Story) -> None:
    await story.begin(1)
    claim = await story.claim(2, story.start(message_id=""))
    assert claim.kind is ClaimKind.CLAIMED
    assert len(await bench.rows(diagnosis_run, story.scope.organ_id)) == 1


# --- refusals: each writes nothing ----------------------------------------------------------------


@pytest.mark.parametrize("version", [3, 2, 1])
async def test_a_version_that_is_not_above_the_fence_is_behind(
    bench: SqlBench, story: Story, version: int
) -> None:
    await story.begin(3)
    before = await bench.dump(story.scope.organ_id)
    assert await story.claim(version) == Claim(ClaimKind.BEHIND, fence_version=3)
    assert await bench.dump(story.scope.organ_id) == before


async def test_another_users_conversation_is_forbidden(bench: SqlBench, story: Story) -> None:
    await story.begin(1)
    before = await bench.dump(story.scope.organ_id)
    for version in (1, 2):
        assert await story.claim(version, user_id=new_id()) == Claim(ClaimKind.FORBIDDEN)
    assert await bench.dump(story.scope.organ_id) == before


async def test_a_deleted_conversation_stays_deleted(bench: SqlBench, story: Story) -> None:
    await story.begin(1)
    await bench.delete(story.scope)
    before = await bench.dump(story.scope.organ_id)
    assert await story.claim(2) == Claim(ClaimKind.DELETED)
    assert await bench.dump(story.scope.organ_id) == before
    row = await bench.cold.conversation(story.scope)
    assert row is not None
    assert row.deleted


async def test_a_known_message_is_answered_by_its_run(bench: SqlBench, story: Story) -> None:
    start = story.start(input_hash=hash_of("the first"))
    turn = await story.begin(1, run_id=start.run_id, message_id=start.message_id, input_hash=start.input_hash)
    await bench.cold.persist(turn, batch(turn), now_ms=NOW)
    again = msgspec.structs.replace(start, input_hash=hash_of("the second"))
    others = [story, Story(bench.cold, organ_id=story.scope.organ_id)]
    others[1].user_id = story.user_id
    before = await bench.dump(story.scope.organ_id)
    for asked in others:  # in the same conversation, in another of the user, and by the ended run itself
        for run_id in (new_id(), start.run_id):
            claim = await asked.claim(9, msgspec.structs.replace(again, run_id=run_id))
            assert (claim.kind, claim.existing_hash) == (ClaimKind.KNOWN_MESSAGE, start.input_hash)
            assert claim.existing is not None
            found = claim.existing.run_id, claim.existing.run_state, claim.existing.durability
            assert found == (start.run_id, RunState.SUCCESS, Durability.PERSISTED)
    assert await bench.dump(story.scope.organ_id) == before


async def test_a_message_of_another_user_is_known_and_no_more_is_said(bench: SqlBench, story: Story) -> None:
    start = story.start()
    await story.claim(1, start)
    stranger = Story(bench.cold, organ_id=story.scope.organ_id)
    asked = stranger.start(message_id=start.message_id)
    assert await stranger.claim(1, asked) == Claim(ClaimKind.KNOWN_MESSAGE)
    assert await bench.cold.conversation(stranger.scope) is None


async def test_the_same_ids_in_another_organisation_are_others(bench: SqlBench, story: Story) -> None:
    start = story.start()
    await story.claim(5, start)
    elsewhere = Story(bench.cold, conversation_id=story.scope.conversation_id)
    claim = await elsewhere.claim(1, start)
    assert (claim.kind, claim.fence_version) == (ClaimKind.CLAIMED, 1)
    assert await bench.cold.run(elsewhere.scope.organ_id, story.user_id, start.run_id) is None


# --- at once --------------------------------------------------------------------------------------


async def test_claims_at_once_serialise(bench: SqlBench, story: Story) -> None:
    starts = {version: story.start() for version in range(1, 9)}
    claims = await asyncio.gather(*(story.claim(version, start) for version, start in starts.items()))
    kinds = {version: claim.kind for version, claim in zip(starts, claims, strict=True)}
    assert set(kinds.values()) <= {ClaimKind.CLAIMED, ClaimKind.BEHIND}
    assert kinds[8] is ClaimKind.CLAIMED
    (row,) = await bench.rows(chat_conversation, story.scope.organ_id)
    assert (row["fence_version"], row["fence_trace"]) == (8, starts[8].run_id)
    runs = {row["version"] for row in await bench.rows(diagnosis_run, story.scope.organ_id)}
    assert runs == {version for version, kind in kinds.items() if kind is ClaimKind.CLAIMED}


async def test_one_message_in_two_conversations_at_once_is_one_run(bench: SqlBench, story: Story) -> None:
    for _ in range(5):
        shared = new_id()
        stories = [Story(bench.cold, organ_id=story.scope.organ_id) for _ in range(3)]
        claims = await asyncio.gather(*(one.claim(1, one.start(message_id=shared)) for one in stories))
        kinds = sorted(claim.kind.value for claim in claims)
        assert kinds == ["CLAIMED", "KNOWN_MESSAGE", "KNOWN_MESSAGE"]
        made = [await bench.cold.conversation(one.scope) is not None for one in stories]
        assert made == [claim.kind is ClaimKind.CLAIMED for claim in claims]


# --- the fence ------------------------------------------------------------------------------------

Write = Callable[[SqlBench, Story, r.TurnRef], Awaitable[Any]]


async def _settle(bench: SqlBench, story: Story, turn: r.TurnRef) -> Any:
    return await bench.cold.settle_calls(turn, [ColdCall(write_head(turn), "{}", "{}")])


FENCED: dict[str, tuple[Write, Any]] = {
    "insert_message": (lambda b, s, t: b.cold.insert_message(t, message(t)), False),
    "interrupt": (lambda b, s, t: b.cold.interrupt(t, batch(t).run_ends), False),
    "register_call": (lambda b, s, t: b.cold.register_call(t, write_head(t), "{}"), S2Result(S2.FENCED)),
    "settle_calls": (_settle, False),
    "put_payload": (
        lambda b, s, t: b.cold.put_payload(t, payload_id="p", payload_type="OUTPUT", data="{}"),
        False,
    ),
    "persist": (lambda b, s, t: b.cold.persist(t, batch(t), now_ms=NOW), Commit.FENCED),
}


@pytest.mark.parametrize("name", FENCED)
async def test_nothing_is_written_but_by_the_turn_that_holds_the_fence(
    bench: SqlBench, story: Story, name: str
) -> None:
    write, refused = FENCED[name]
    first, second = await story.begin(1), await story.begin(2)
    elsewhere = Story(bench.cold, conversation_id=story.scope.conversation_id)
    outsiders = [
        first,
        msgspec.structs.replace(second, run_id=first.run_id),
        msgspec.structs.replace(second, version=1),
        msgspec.structs.replace(second, version=3),
        msgspec.structs.replace(second, conversation_id=new_id()),
        msgspec.structs.replace(second, organ_id=elsewhere.scope.organ_id),
    ]
    before = await bench.dump(story.scope.organ_id)
    for turn in outsiders:
        assert await write(bench, story, turn) == refused, turn
    assert await bench.dump(story.scope.organ_id) == before
    assert await bench.dump(elsewhere.scope.organ_id) == {}
    assert await write(bench, story, second) != refused
    assert await bench.dump(story.scope.organ_id) != before
    await bench.delete(story.scope)
    assert await write(bench, story, second) == refused


async def test_a_persist_and_the_next_claim_at_once_are_one_after_the_other(bench: SqlBench) -> None:
    for _ in range(5):
        story = Story(bench.cold)
        turn = await story.begin(1)
        done, claim = await asyncio.gather(bench.cold.persist(turn, batch(turn), now_ms=NOW), story.claim(2))
        assert claim.kind is ClaimKind.CLAIMED
        assert claim.row is not None
        first = done is Commit.DONE
        assert claim.row.state_version == (1 if first else 0)
        assert claim.unfinished == (() if first else (turn.run_id,))
        assert await bench.cold.committed(story.scope.organ_id, turn.run_id) is first


async def test_one_persist_by_many_at_once_has_one_effect(bench: SqlBench, story: Story) -> None:
    turn = await story.begin(1)
    whole = batch(turn, messages=(message(turn),), calls=(write_head(turn),))
    done = await asyncio.gather(*(bench.cold.persist(turn, whole, now_ms=NOW) for _ in range(6)))
    assert done == [Commit.DONE] * 6
    counts = {name: len(rows) for name, rows in (await bench.dump(story.scope.organ_id)).items()}
    assert set(counts.values()) == {1}, counts


# --- ends outside the fence -----------------------------------------------------------------------


async def test_an_end_that_a_run_has_stays(bench: SqlBench, story: Story) -> None:
    turn = await story.begin(1)
    await story.begin(2)  # the fence has moved on

    async def state() -> RunState | None:
        run = await bench.cold.run(story.scope.organ_id, story.user_id, turn.run_id)
        assert run is not None
        assert run.durability is None  # it has no commit
        return run.run_state

    def end(run_state: RunState) -> RunEnd:
        return RunEnd(run=run_of(turn, run_state=run_state), closing_events=(), prepared=False)

    await bench.cold.give_up(story.scope, end(RunState.FAILED))
    assert await state() is RunState.FAILED
    await bench.cold.give_up(story.scope, end(RunState.CANCELLED))
    assert await state() is RunState.FAILED
    run = await bench.cold.run(story.scope.organ_id, story.user_id, turn.run_id)
    assert run is not None
    assert (run.agent_id, run.started_at, run.message_id != "") == ("ops", NOW, True)
