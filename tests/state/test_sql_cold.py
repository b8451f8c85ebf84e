"""What a persist writes is what a load gives back: field by field, once, and from one moment. The same on
both stores."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from state_service.adapters import sql_claim, sql_load
from state_service.adapters.sql_tables import run_trace, task_checkpoint, task_resume_record
from state_service.ports import Commit, ConversationRows, RunEnd
from tests.contract.turns import NOW, new_id
from tests.state.sql_bench import AWKWARD, SqlBench, Story, batch, message
from tests.state.sql_records import (
    EDGE,
    NODE,
    PRIOR,
    SPACE,
    checkpoint,
    defaults_of,
    entity,
    expected,
    full_head,
    full_run,
    record,
    task,
    trace,
    whole,
)
from turnfence import records as r
from turnfence.axes import Durability, IntentType, ReleaseOutcome, RunState


def test_the_records_of_these_tests_have_no_field_at_its_default() -> None:
    turn = r.TurnRef(organ_id="o", conversation_id="c", run_id="r", version=1, lease_token="t")
    records: list[msgspec.Struct] = [
        *(task(), NODE, SPACE, EDGE, PRIOR, checkpoint(), trace(1), entity(), record()),
        *(message(turn), full_head(turn)),
    ]
    assert {type(one).__name__: defaults_of(one) for one in records if defaults_of(one)} == {}
    run = full_run(turn)
    assert defaults_of(run) == ["message_id", "durability"]  # other columns' and other tables'


async def loaded(bench: SqlBench, story: Story, **limits: int) -> ConversationRows:
    rows = await bench.cold.load_conversation(
        story.scope, **({"dialogue_max": 60, "records_max": 20} | limits)
    )
    assert rows is not None
    return rows


# --- what a persist writes ------------------------------------------------------------------------


async def test_everything_comes_back_as_it_was_and_a_repeat_changes_nothing(
    bench: SqlBench, story: Story
) -> None:
    turn = await story.begin(3)
    given = whole(story, turn)
    assert await bench.cold.persist(turn, given, now_ms=NOW) is Commit.DONE
    before = await bench.dump(story.scope.organ_id)
    rows = await loaded(bench, story)
    assert rows == expected(story, turn, given)
    assert await bench.cold.load_task(story.scope, "t1") == rows.task
    assert await bench.cold.call_payload(story.scope, "t1", "e2") == AWKWARD
    assert await bench.cold.persist(turn, given, now_ms=NOW) is Commit.DONE
    assert await bench.dump(story.scope.organ_id) == before
    assert await loaded(bench, story) == rows


async def test_a_run_comes_back_on_every_axis(bench: SqlBench, story: Story) -> None:
    start = story.start()
    await story.claim(3, start)
    turn = story.turn(3, start.run_id)
    given = whole(story, turn)
    assert not await bench.cold.committed(story.scope.organ_id, turn.run_id)
    await bench.cold.persist(turn, given, now_ms=NOW)
    assert await bench.cold.committed(story.scope.organ_id, turn.run_id)
    run = full_run(turn, message_id=start.message_id, durability=Durability.PERSISTED)
    organ_id = story.scope.organ_id
    assert await bench.cold.run(organ_id, story.user_id, turn.run_id) == run
    found = await bench.cold.run_by_message(organ_id, start.message_id)
    assert found == (run, start.input_hash, story.user_id)
    assert await bench.cold.closing_events(organ_id, turn.run_id) == given.run_ends[0].closing_events
    for other in (
        await bench.cold.run(organ_id, new_id(), turn.run_id),
        await bench.cold.run(organ_id, story.user_id, new_id()),
        await bench.cold.run(new_id(), story.user_id, turn.run_id),
        await bench.cold.run_by_message(new_id(), start.message_id),
    ):
        assert other is None
    assert await bench.cold.closing_events(organ_id, new_id()) == ()
    assert not await bench.cold.committed(new_id(), turn.run_id)


async def test_what_a_batch_does_not_name_stays(bench: SqlBench, story: Story) -> None:
    turn = await story.begin(3)
    given = whole(story, turn)
    await bench.cold.persist(turn, given, now_ms=NOW)
    before = await loaded(bench, story)
    await bench.cold.persist(turn, batch(turn, active_task_id="t1", run_ends=()), now_ms=NOW)
    assert await loaded(bench, story) == before


async def test_an_older_stamp_never_replaces_a_newer_one(bench: SqlBench, story: Story) -> None:
    turn = await story.begin(3)
    await bench.cold.persist(turn, batch(turn, title="new", persist_seq=9), now_ms=NOW)
    older = batch(turn, title="old", data_version=2, persist_seq=4, active_task_id="t9")
    before = await bench.dump(story.scope.organ_id)
    assert await bench.cold.persist(turn, older, now_ms=NOW) is Commit.OLDER
    assert await bench.dump(story.scope.organ_id) == before
    row = (await loaded(bench, story)).row
    assert (row.title, row.state_version, row.persist_seq, row.active_task_id) == ("new", 3, 9, "")


async def test_the_message_that_a_task_sprang_from_gets_its_id(bench: SqlBench, story: Story) -> None:
    turn = await story.begin(1)
    said = [message(turn, idx=idx, task_id=name) for idx, name in enumerate(["", "t0", ""])]
    for one in said:
        await bench.cold.insert_message(turn, one)
    tasks = tuple(task(task_id=f"t{i}", source_message_id=said[i - 1].message_id) for i in (1, 2))
    await bench.cold.persist(turn, batch(turn, tasks=tasks), now_ms=NOW)
    found = [one.task_id for one in (await loaded(bench, story)).dialogue]
    assert found == ["t1", "t0", ""]  # only where it had none


async def test_a_consumed_checkpoint_is_gone_for_good(bench: SqlBench, story: Story) -> None:
    turn = await story.begin(1)
    asked = checkpoint()
    base = batch(turn, active_task_id="t1", tasks=(task(),), run_ends=())
    first = msgspec.structs.replace(base, checkpoints={"t1": asked})
    await bench.cold.persist(turn, first, now_ms=NOW)
    gone = msgspec.structs.replace(base, checkpoints_gone=(asked.checkpoint_id,))
    await bench.cold.persist(turn, gone, now_ms=NOW)
    rows = (await loaded(bench, story)).task
    assert rows is not None
    assert rows.checkpoint is None
    (stored,) = await bench.rows(task_checkpoint, story.scope.organ_id)
    assert stored["delete_flag"] == 1
    fresh = checkpoint(question="once more?")
    await bench.cold.persist(turn, msgspec.structs.replace(base, checkpoints={"t1": fresh}), now_ms=NOW)
    rows = await bench.cold.load_task(story.scope, "t1")
    assert rows is not None
    assert rows.checkpoint == fresh


async def test_a_resume_is_recorded_once(bench: SqlBench, story: Story) -> None:
    turn = await story.begin(1)
    given = whole(story, turn)
    for _ in range(2):
        await bench.cold.persist(turn, given, now_ms=NOW)
    (row,) = await bench.rows(task_resume_record, story.scope.organ_id)
    assert (row["resume_action"], row["acted_at"], row["user_id"]) == ("CONFIRM", NOW, story.user_id)


async def test_entities_go_come_back_and_keep_their_order(bench: SqlBench, story: Story) -> None:
    turn = await story.begin(1)
    # Each step: what is seen, and what is removed.
    steps = [(["host:b", "host:a"], []), (["host:c"], []), (["host:a"], ["host:b"]), (["host:b"], [])]
    for sequence, (seen, removed) in enumerate(steps):
        entries: dict[str, r.EntityEntry | None] = dict.fromkeys(removed)
        entries |= {key: entity(display_name=str(sequence)) for key in seen}
        given = batch(turn, persist_seq=sequence, entities=entries, run_ends=())
        await bench.cold.persist(turn, given, now_ms=NOW)
        if sequence == 2:
            assert [*(await loaded(bench, story)).entities] == ["host:a", "host:c"]
    found = (await loaded(bench, story)).entities
    names = [(key, entry.display_name) for key, entry in found.items()]
    assert names == [("host:b", "3"), ("host:a", "2"), ("host:c", "1")]


# --- what a load reads ----------------------------------------------------------------------------


async def test_what_is_not_there_is_none(bench: SqlBench, story: Story) -> None:
    limits = {"dialogue_max": 9, "records_max": 9}
    assert await bench.cold.load_conversation(story.scope, **limits) is None
    assert await bench.cold.load_task(story.scope, "t1") is None
    turn = await story.begin(1)
    await bench.cold.persist(turn, whole(story, turn), now_ms=NOW)
    elsewhere = Story(bench.cold, organ_id=story.scope.organ_id)
    assert await bench.cold.load_task(elsewhere.scope, "t1") is None
    await bench.delete(story.scope)
    assert await bench.cold.load_conversation(story.scope, **limits) is None


async def test_a_load_reads_the_newest_of_what_is_limited(bench: SqlBench, story: Story) -> None:
    said, tasks = [], []
    for version in (1, 2):
        turn = await story.begin(version)
        said += [message(turn, idx=idx, created_at=NOW - 100 * version - idx) for idx in range(3)]
        tasks += [
            task(task_id=f"t{version}{place}", finished_at=NOW + 10 * version + place) for place in range(2)
        ]
        given = batch(
            turn,
            messages=tuple(said[-3:]),
            tasks=(*tasks[-2:], task(task_id=f"open{version}", finished_at=None)),
            records={one.task_id: record(one.task_id) for one in tasks[-2:]},
        )
        await bench.cold.persist(turn, given, now_ms=NOW)
    rows = await loaded(bench, story, dialogue_max=4, records_max=3)
    assert rows.dialogue == tuple(said[-4:])
    assert [one.task_id for one in rows.records] == ["t21", "t20", "t11"]
    assert rows.task is None  # none is active


async def test_a_load_is_of_one_moment(bench: SqlBench, story: Story) -> None:
    turn = await story.begin(1)
    await bench.cold.persist(turn, batch(turn, title="before", run_ends=()), now_ms=NOW)
    later = batch(turn, title="after", messages=(message(turn),), run_ends=())

    async def read_with_a_persist_in_between(connection: Any) -> tuple[Any, ...]:
        row = await sql_claim.find(connection, story.scope)
        assert await bench.cold.persist(turn, later, now_ms=NOW) is Commit.DONE
        again = await sql_claim.find(connection, story.scope)
        said = await sql_load.dialogue(connection, story.scope, 9)
        assert row is not None
        assert again is not None
        return row["title"], again["title"], len(said)

    assert await bench.transactions.read(read_with_a_persist_in_between) == ("before", "before", 0)
    assert (await loaded(bench, story)).row.title == "after"


@pytest.mark.parametrize(
    ("changed", "published", "found"),
    [
        ({}, AWKWARD, True),
        ({}, "", False),
        ({"intent": IntentType.SYSTEM_CHAT}, AWKWARD, False),
        ({"release_outcome": ReleaseOutcome.FALLBACK}, AWKWARD, False),
        ({"release_outcome": None}, AWKWARD, False),
    ],
)
async def test_the_previous_turn_counts_if_it_was_a_released_diagnosis(
    bench: SqlBench, story: Story, changed: dict[str, Any], published: str, found: bool
) -> None:
    assert await bench.cold.previous_turn(story.scope) is None
    first = await story.begin(1)
    released = RunEnd(run=full_run(first), closing_events=(), prepared=True, published_result="first")
    await bench.cold.persist(first, batch(first, run_ends=(released,)), now_ms=NOW)
    second = await story.begin(2)
    end = RunEnd(
        run=full_run(second, **changed), closing_events=(), prepared=True, published_result=published
    )
    await bench.cold.persist(second, batch(second, run_ends=(end,)), now_ms=NOW)
    await story.begin(3)  # it runs: it is not the previous one
    wanted = r.PreviousTurn(
        run_id=second.run_id, query="hello", published_result=published, finished_at=NOW + 5
    )
    assert await bench.cold.previous_turn(story.scope) == (wanted if found else None)


# --- outside the fence ----------------------------------------------------------------------------


async def test_a_late_note_is_appended_though_the_fence_has_moved(bench: SqlBench, story: Story) -> None:
    turn = await story.begin(1)
    await story.begin(2)
    for text in ("first", "second"):  # a repeat does not replace
        note = trace(1_000_001, attributes={"text": text})
        await bench.cold.append_late_trace(story.scope, turn.run_id, note)
    (row,) = await bench.rows(run_trace, story.scope.organ_id)
    assert (row["run_id"], row["sequence"], row["attributes"]) == (
        turn.run_id,
        1_000_001,
        '{"text":"first"}',
    )


async def test_an_abandoned_run_has_an_end_without_a_commit(bench: SqlBench, story: Story) -> None:
    turn = await story.begin(1)
    run = full_run(turn, run_state=RunState.CANCELLED, agent_id="", started_at=None, task_id="")
    await bench.cold.give_up(story.scope, RunEnd(run=run, closing_events=(), prepared=False))
    found = await bench.cold.run(story.scope.organ_id, story.user_id, turn.run_id)
    assert found is not None
    assert (found.run_state, found.durability, found.agent_id, found.started_at) == (
        RunState.CANCELLED,
        None,
        "ops",  # what the start wrote is not blanked
        NOW,
    )
    assert not await bench.cold.committed(story.scope.organ_id, turn.run_id)
