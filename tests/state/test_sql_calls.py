"""Calls in SQL: a write is registered at most once, what settled stays settled, and payloads are found where
they went. The same on both stores."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from state_service.adapters.sql_calls import live_key
from state_service.adapters.sql_tables import task_node_payload, tool_call_record
from state_service.ports import S2, ColdCall, Commit, S2Result, StoreCorrupt
from tests.contract.turns import NOW, hash_of, new_id
from tests.state.sql_bench import AWKWARD, SqlBench, Story, batch, message, write_head
from tests.state.sql_records import full_head
from turnfence import records as r
from turnfence.axes import CallStatus, SideEffect, TaskStatus

UNSETTLED = [CallStatus.STARTED, CallStatus.UNKNOWN, CallStatus.UNKNOWN_PRE_CALL]


async def heads(bench: SqlBench, story: Story, task_id: str = "t1") -> dict[str, r.EvidenceHead]:
    """The heads of a task as a rehydration reads them."""
    rows = await bench.cold.load_task(story.scope, task_id)
    assert rows is not None
    return {head.evidence_id: head for head in rows.calls}


async def with_task(story: Story, bench: SqlBench) -> r.TurnRef:
    """A turn whose task is in SQL; its fence goes on."""
    turn = await story.begin(1)
    tasks = tuple(r.TaskMetadata(task_id=name, status=TaskStatus.RUNNING) for name in ("t1", "t2"))
    assert await bench.cold.persist(turn, batch(turn, tasks=tasks, run_ends=()), now_ms=NOW) is Commit.DONE
    return turn


async def row(bench: SqlBench, head: r.EvidenceHead, story: Story) -> dict[str, Any]:
    rows = await bench.rows(tool_call_record, story.scope.organ_id)
    (found,) = [row for row in rows if row["call_id"] == head.evidence_id]
    return found


# --- S2 -------------------------------------------------------------------------------------------


async def test_a_registration_is_one_row_and_its_repeat_is_mine(bench: SqlBench, story: Story) -> None:
    turn = await with_task(story, bench)
    head = full_head(turn, status=CallStatus.STARTED)
    assert await bench.cold.register_call(turn, head, AWKWARD) == S2Result(S2.INSERTED, head)
    before = await bench.dump(story.scope.organ_id)
    assert await bench.cold.register_call(turn, head, "{}") == S2Result(S2.MINE, head)
    assert await bench.dump(story.scope.organ_id) == before
    assert await heads(bench, story) == {head.evidence_id: head}
    assert await bench.cold.call_requests(story.scope, [head.evidence_id, new_id()]) == {
        head.evidence_id: AWKWARD
    }


# What a write is when another with the same tool and key comes: (its state, in the task, in another task).
BARS: list[tuple[CallStatus, bool | None, bool, bool]] = [
    (CallStatus.STARTED, None, True, True),
    (CallStatus.UNKNOWN, None, True, True),
    (CallStatus.UNKNOWN_PRE_CALL, None, True, True),
    (CallStatus.SUCCESS, True, True, False),
    (CallStatus.SUCCESS, False, False, False),
    (CallStatus.SUCCESS, None, False, False),
    (CallStatus.FAILED, False, False, False),
    (CallStatus.TIMEOUT, None, False, False),
    (CallStatus.CANCELLED, None, False, False),
]


@pytest.mark.parametrize("place", ["t1", "t2"])
@pytest.mark.parametrize(("status", "business_ok", "here", "elsewhere"), BARS)
async def test_a_write_that_happened_or_may_have_bars_the_next(
    bench: SqlBench,
    story: Story,
    status: CallStatus,
    business_ok: bool | None,
    here: bool,
    elsewhere: bool,
    place: str,
) -> None:
    turn = await with_task(story, bench)
    first = write_head(turn)
    assert (await bench.cold.register_call(turn, first, "{}")).kind is S2.INSERTED
    settled = msgspec.structs.replace(first, status=status, business_ok=business_ok)
    assert await bench.cold.settle_calls(turn, [ColdCall(settled, "", "")])
    second = write_head(turn, task_id=place)
    answer = await bench.cold.register_call(turn, second, "{}")
    barred = here if place == "t1" else elsewhere
    assert answer == (S2Result(S2.DUPLICATE, settled) if barred else S2Result(S2.INSERTED, second))
    found = await heads(bench, story, place)
    assert (second.evidence_id in found) is not barred


@pytest.mark.parametrize(
    "changed",
    [
        {"tool_name": "Restart"},
        {"idempotency_key": hash_of("web-2")},
        {"side_effect": SideEffect.NONE},
    ],
)
async def test_another_tool_key_or_kind_is_not_barred(
    bench: SqlBench, story: Story, changed: dict[str, Any]
) -> None:
    turn = await with_task(story, bench)
    await bench.cold.register_call(turn, write_head(turn, **changed), "{}")
    assert (await bench.cold.register_call(turn, write_head(turn), "{}")).kind is S2.INSERTED


async def test_another_conversation_is_not_barred(bench: SqlBench, story: Story) -> None:
    other = Story(bench.cold, organ_id=story.scope.organ_id)
    turns = await with_task(story, bench), await other.begin(1)
    await bench.cold.register_call(turns[0], write_head(turns[0]), "{}")
    head = write_head(turns[1], task_id="t9")
    assert (await bench.cold.register_call(turns[1], head, "{}")).kind is S2.INSERTED


async def test_registrations_of_one_key_at_once_are_one(bench: SqlBench, story: Story) -> None:
    turn = await with_task(story, bench)
    asked = [write_head(turn) for _ in range(6)]
    answers = await asyncio.gather(*(bench.cold.register_call(turn, head, "{}") for head in asked))
    (first,) = (answer.head for answer in answers if answer.kind is S2.INSERTED)
    others = [answer for answer in answers if answer.kind is not S2.INSERTED]
    assert others == [S2Result(S2.DUPLICATE, first)] * 5
    assert len(await bench.rows(tool_call_record, story.scope.organ_id)) == 1


async def test_evidence_of_another_conversation_is_never_answered_or_changed(
    bench: SqlBench, story: Story
) -> None:
    """Evidence ids are the caller's: one that is known elsewhere must neither leak nor overwrite."""
    other = Story(bench.cold, organ_id=story.scope.organ_id)
    turns = await with_task(story, bench), await other.begin(1)
    theirs = write_head(turns[0])
    await bench.cold.register_call(turns[0], theirs, "{}")
    forged = msgspec.structs.replace(theirs, task_id="t9", status=CallStatus.FAILED)
    assert await bench.cold.settle_calls(turns[1], [ColdCall(forged, "", "{}")])
    with pytest.raises(StoreCorrupt):
        await bench.cold.register_call(turns[1], forged, "{}")
    assert await heads(bench, story) == {theirs.evidence_id: theirs}


# --- S3 -------------------------------------------------------------------------------------------


async def test_a_settlement_updates_its_row_and_keeps_what_it_does_not_say(
    bench: SqlBench, story: Story
) -> None:
    turn = await with_task(story, bench)
    head = full_head(turn, status=CallStatus.STARTED, payload_id="", business_ok=None)
    await bench.cold.register_call(turn, head, '{"host":"web-1"}')
    assert (await row(bench, head, story))["live_key"] == live_key(head)
    done = msgspec.structs.replace(head, status=CallStatus.SUCCESS, business_ok=True, result_brief="")
    for _ in range(2):
        assert await bench.cold.settle_calls(turn, [ColdCall(done, "", AWKWARD)])
        assert await heads(bench, story) == {done.evidence_id: done}
    assert await bench.cold.settle_calls(turn, [ColdCall(done, "", "")])
    assert await bench.cold.call_payload(story.scope, "t1", head.evidence_id) == AWKWARD
    requests = await bench.cold.call_requests(story.scope, [head.evidence_id])
    assert requests == {head.evidence_id: '{"host":"web-1"}'}
    failed = msgspec.structs.replace(done, status=CallStatus.FAILED)
    await bench.cold.settle_calls(turn, [ColdCall(failed, "", "")])
    assert (await row(bench, head, story))["live_key"] is None


async def test_a_call_that_was_not_registered_is_inserted(bench: SqlBench, story: Story) -> None:
    turn = await with_task(story, bench)
    found = [
        full_head(turn, side_effect=SideEffect.NONE, idempotency_key="", payload_id="") for _ in range(2)
    ]
    assert await bench.cold.settle_calls(turn, [ColdCall(head, "{}", "[1]") for head in found])
    assert await heads(bench, story) == {head.evidence_id: head for head in found}


@pytest.mark.parametrize("late", UNSETTLED)
async def test_what_is_settled_is_never_made_unsettled(
    bench: SqlBench, story: Story, late: CallStatus
) -> None:
    turn = await with_task(story, bench)
    done = full_head(turn, payload_id="")
    await bench.cold.settle_calls(turn, [ColdCall(done, "{}", "[1]")])
    before = await bench.dump(story.scope.organ_id)
    again = msgspec.structs.replace(done, status=late, business_ok=None)
    assert await bench.cold.settle_calls(turn, [ColdCall(again, "", "[2]")])
    drained = batch(turn, calls=(again,), call_payloads={again.evidence_id: "[3]"}, run_ends=())
    assert await bench.cold.persist(turn, drained, now_ms=NOW) is Commit.DONE
    assert await bench.dump(story.scope.organ_id) == before


@pytest.mark.parametrize("way", ["settle", "persist"])
async def test_a_second_write_that_happened_is_recorded_though_its_key_is_taken(
    bench: SqlBench, story: Story, way: str
) -> None:
    """Both had an effect, whatever the keys say: a record that cannot be stored would be lost, or would bar
    every later persist of the conversation."""
    turn = await with_task(story, bench)
    one, two, unregistered = (write_head(turn) for _ in range(3))
    await bench.cold.register_call(turn, one, "{}")
    gone = msgspec.structs.replace(one, status=CallStatus.FAILED)
    await bench.cold.settle_calls(turn, [ColdCall(gone, "", "")])
    await bench.cold.register_call(turn, two, "{}")
    ended = [
        msgspec.structs.replace(head, status=CallStatus.SUCCESS, business_ok=True)
        for head in (two, one, unregistered)
    ]
    if way == "settle":
        assert await bench.cold.settle_calls(turn, [ColdCall(head, "{}", "") for head in ended])
    else:
        assert await bench.cold.persist(turn, batch(turn, calls=tuple(ended)), now_ms=NOW) is Commit.DONE
    assert await heads(bench, story) == {head.evidence_id: head for head in ended}
    for head in ended:  # while one of them counts, it bars the next
        answer = await bench.cold.register_call(turn, write_head(turn), "{}")
        assert answer.kind is S2.DUPLICATE
        undone = msgspec.structs.replace(head, status=CallStatus.FAILED)
        await bench.cold.settle_calls(turn, [ColdCall(undone, "", "")])
    assert (await bench.cold.register_call(turn, write_head(turn), "{}")).kind is S2.INSERTED


# --- payloads -------------------------------------------------------------------------------------


async def test_a_payload_is_found_where_it_went(bench: SqlBench, story: Story) -> None:
    turn = await with_task(story, bench)
    inline = full_head(turn, payload_id="", idempotency_key=hash_of("a"))
    large = full_head(turn, idempotency_key=hash_of("b"))
    none = full_head(turn, payload_id="", idempotency_key=hash_of("c"))
    texts = {inline.evidence_id: AWKWARD, large.evidence_id: "😀" * 300_000, none.evidence_id: ""}
    calls = [ColdCall(head, "", texts[head.evidence_id]) for head in (inline, large, none)]
    for _ in range(2):
        assert await bench.cold.settle_calls(turn, calls)
    for evidence_id, text in texts.items():
        assert await bench.cold.call_payload(story.scope, "t1", evidence_id) == (text or None)
        assert await bench.cold.call_payload(story.scope, "t2", evidence_id) is None
    assert await bench.cold.payload(story.scope, large.payload_id) == texts[large.evidence_id]
    assert (await row(bench, large, story))["response"] == ""
    assert len(await bench.rows(task_node_payload, story.scope.organ_id)) == 1


async def test_a_large_field_is_put_once_and_read_in_its_conversation_only(
    bench: SqlBench, story: Story
) -> None:
    turn = await with_task(story, bench)
    for data in (AWKWARD, "{}"):
        assert await bench.cold.put_payload(turn, payload_id="p1", payload_type="OUTPUT", data=data)
    assert await bench.cold.payload(story.scope, "p1") == AWKWARD
    (stored,) = await bench.rows(task_node_payload, story.scope.organ_id)
    assert stored["payload_type"] == "OUTPUT"
    other = Story(bench.cold, organ_id=story.scope.organ_id)
    assert await bench.cold.payload(other.scope, "p1") is None


# --- messages -------------------------------------------------------------------------------------


async def test_a_message_is_stored_once_and_as_it_was_said(bench: SqlBench, story: Story) -> None:
    turn = await story.begin(1)
    said = message(turn)
    for text in (said.text, "something else"):
        assert await bench.cold.insert_message(turn, msgspec.structs.replace(said, text=text))
    assert await bench.cold.node_dialogue(story.scope, "t1", "n1") == (said,)


async def test_a_nodes_dialogue_is_in_order_and_its_own(bench: SqlBench, story: Story) -> None:
    said = []
    for version in (1, 2):
        turn = await story.begin(version)
        asked = [message(turn, idx=idx, created_at=NOW - idx - version) for idx in (3, 1)]
        for each in [*asked, message(turn, node_id="n2"), message(turn, task_id="t2")]:
            await bench.cold.insert_message(turn, each)
        said += [asked[1], asked[0]]
    assert await bench.cold.node_dialogue(story.scope, "t1", "n1") == tuple(said)
    elsewhere = Story(bench.cold, organ_id=story.scope.organ_id)
    assert await bench.cold.node_dialogue(elsewhere.scope, "t1", "n1") == ()
