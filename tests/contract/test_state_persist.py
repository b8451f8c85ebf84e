"""PersistTurn and what follows from it: the end is durable once, its owner can read it, and the next turn
starts from it."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import msgspec
import pytest

from tests.contract.turns import NOW, SHORT_LEASE, Talk, Turn, collect, new_id, refused
from tests.contract.work import at_work, done, heads_of, next_turn, sourced
from turnfence import records as r
from turnfence.axes import (
    CheckpointType,
    Durability,
    EdgeType,
    FailureReason,
    IntentType,
    NodeStatus,
    ReleaseOutcome,
    ResumeAction,
    RunState,
    TaskStatus,
    TerminationReason,
    TurnStatus,
)
from turnfence.errors import Reason

# --- the end --------------------------------------------------------------------------------------


async def test_a_persisted_outcome_is_read_back_as_it_was_given(talk: Talk) -> None:
    turn = await talk.begin("hello", agent_id="ops")
    answer = await turn.persist(turn.reply())
    assert (answer.durability, answer.already_persisted) == (Durability.PERSISTED, False)
    assert answer.data_seq > turn.ref.seen_seq
    assert await talk.get_run(turn.run_id) == turn.outcome(durability=Durability.PERSISTED)


async def test_an_outcome_is_read_by_its_owner_only(talk: Talk) -> None:
    turn = await talk.turn()
    elsewhere = Talk(talk.client, conversation_id=talk.conversation_id)
    for organ_id, user_id, run_id in (
        (talk.organ_id, new_id(), turn.run_id),
        (elsewhere.organ_id, talk.user_id, turn.run_id),
        (talk.organ_id, talk.user_id, new_id()),
    ):
        error = await refused(talk.client.get_run(organ_id, user_id, run_id), Reason.NOT_FOUND)
        assert error.metadata == {}


async def test_a_running_run_is_read_as_far_as_it_has_come(talk: Talk) -> None:
    turn = await talk.begin(agent_id="ops")
    run = await talk.get_run(turn.run_id)
    assert (run.run_state, run.durability, run.version) == (RunState.RUNNING, None, 1)
    so_far = turn.outcome(run_state=RunState.RUNNING, turn_status=None, release_outcome=None, answer=None)
    await turn.flush(r.PutRun(run=so_far))
    assert await talk.get_run(turn.run_id) == so_far
    await turn.persist()
    assert (await talk.get_run(turn.run_id)).run_state is RunState.SUCCESS


async def test_C034_a_persist_repeated_after_its_answer_was_lost_is_a_success(talk: Talk) -> None:
    turn, work = await at_work(talk)
    request = turn.persist_request(turn.reply("once"), work.closed())
    first = await talk.client.persist(request)
    assert [record.task_id for record in first.closed] == [work.task_id]
    again = await talk.client.persist(request)
    assert (again.durability, again.already_persisted) == (Durability.PERSISTED, True)
    following = await talk.begin("next")
    late = await talk.client.persist(request)
    assert (late.durability, late.already_persisted) == (Durability.PERSISTED, True)
    assert (await following.flush(r.PutConversation(title="undisturbed"))).data_seq > 0
    assert [m.text for m in following.snapshot.dialogue] == ["hello", "once", "next"]
    assert [record.task_id for record in following.snapshot.records] == [work.task_id]
    assert following.begun.recovery == r.Recovery()


async def test_one_persist_sent_many_times_at_once_ends_the_turn_once(talk: Talk) -> None:
    turn, work = await at_work(talk)
    request = turn.persist_request(turn.reply("once"), work.closed())
    answers = await asyncio.gather(*(talk.client.persist(request) for _ in range(40)))
    assert {answer.durability for answer in answers} == {Durability.PERSISTED}
    following = await talk.begin("next")
    assert [m.text for m in following.snapshot.dialogue] == ["hello", "once", "next"]
    assert [record.task_id for record in following.snapshot.records] == [work.task_id]


async def test_C040_a_message_repeated_after_its_turn_gets_the_recorded_outcome(talk: Talk) -> None:
    turn = await talk.turn(message_id="m-1")
    answer = await talk.client.begin(talk.request(message_id="m-1"))
    assert answer.existing_run == turn.outcome(durability=Durability.PERSISTED)


async def test_C004_a_persist_after_a_newer_begin_keeps_nothing_of_the_turns_end(talk: Talk) -> None:
    old, work = await at_work(talk, lease=SHORT_LEASE)
    new = await talk.begin_after_lease("new")
    error = await refused(old.persist(old.reply("late"), work.closed()), Reason.STATE_FENCED)
    assert error.retry_after is None
    run = await talk.get_run(old.run_id)
    assert (run.run_state, run.termination_reason) == (RunState.FAILED, TerminationReason.INTERRUPTED)
    assert (run.durability, run.answer) == (None, None)
    await new.persist()
    following = await talk.begin("after")
    assert following.task.metadata.status is TaskStatus.RUNNING
    assert following.snapshot.records == []
    assert [m.text for m in following.snapshot.dialogue] == ["hello", "new", "after"]


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"run_state": None}, "outcome.run_state"),
        ({"run_state": RunState.RUNNING}, "outcome.run_state"),
        ({"run_id": "another"}, "outcome.run_id"),
    ],
)
async def test_an_outcome_is_this_runs_end(talk: Talk, changed: dict[str, Any], field: str) -> None:
    turn = await talk.begin()
    error = await refused(turn.persist(outcome=turn.outcome(**changed)), Reason.INVALID_REQUEST)
    assert [violation.field for violation in error.violations] == [field]
    assert (await turn.persist()).durability is Durability.PERSISTED


# --- the task's end -------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [TaskStatus.SUCCEEDED, TaskStatus.FAILED, TaskStatus.CANCELED])
async def test_C038_a_closed_task_leaves_its_record_and_nothing_else(talk: Talk, status: TaskStatus) -> None:
    turn, work = await at_work(talk)
    await turn.settle(work.read(turn), '"found"')
    closed = work.closed(status)
    answer = await turn.persist(closed)
    assert answer.closed == [closed.record]
    following = await talk.begin("next")
    assert following.snapshot.task is None
    assert following.snapshot.conversation.active_task_id == ""
    assert following.snapshot.records == [closed.record]
    assert await heads_of(following, work) == {}


async def test_records_are_newest_first(talk: Talk) -> None:
    works = []
    for place in range(3):
        turn, work = await at_work(talk)
        await turn.persist(work.closed(closed_at=NOW + place))
        works.append(work.task_id)
    records = (await talk.begin()).snapshot.records
    assert [record.task_id for record in records] == works[::-1]


# --- what the next turn starts from ---------------------------------------------------------------


async def test_C046_the_next_turn_starts_from_all_that_was_put(talk: Talk) -> None:
    turn, work = await at_work(talk)
    entry = r.EntityEntry(display_name="web-1 “é”", attrs_json='{"cpu":8.0}', mentions=2, seen_at=NOW)
    prior = r.Prior(tasks=[work.closed().record], entities={"host:web 1/é": entry}, reason="same host")
    checkpoint = work.approval("a" * 64)
    nodes = [work.node(status=NodeStatus.SUSPENDED), work.node("n2", status=NodeStatus.PENDING)]
    edge = work.edge("n1", "n2", EdgeType.DELEGATE)
    metadata = work.task(status=TaskStatus.SUSPENDED, suspended_at=NOW)
    write = work.write(turn)
    await turn.register(write)
    stored = await turn.settle(done(write))
    await turn.flush(
        r.PutEntity(entity_type="host", entity_id="web 1/é", entry=entry),
        r.PutEntity(entity_type="host", entity_id="gone", entry=entry),
        r.PutSessionShared(name="zone", value=sourced('"eu"', ref="e1")),
        r.PutTaskShared(task_id=work.task_id, name="host", value=sourced('{"n":1.0}')),
        r.PutPrior(task_id=work.task_id, prior=prior),
    )
    await turn.flush(r.PutEntity(entity_type="host", entity_id="gone", entry=None))
    await turn.persist(
        r.PutTask(task=metadata),
        *(r.PutNode(task_id=work.task_id, node=node) for node in nodes),
        r.PutEdge(task_id=work.task_id, edge=edge),
        r.PutCheckpoint(task_id=work.task_id, checkpoint=checkpoint),
    )
    following = await talk.begin("next")
    snapshot = following.snapshot
    assert following.begun.recovery == r.Recovery()
    assert snapshot.entities == {"host:web 1/é": entry}
    assert snapshot.shared == {"zone": sourced('"eu"', ref="e1")}
    task = following.task
    assert (task.metadata, task.edges, task.checkpoint, task.prior) == (metadata, [edge], checkpoint, prior)
    assert sorted(task.nodes, key=lambda node: node.node_id) == nodes
    assert task.shared == {"host": sourced('{"n":1.0}')}
    assert task.writes == {
        f"restart|{write.idempotency_key}": r.WriteIndexEntry(
            evidence_id=write.evidence_id, status=stored.status, business_ok=True
        )
    }


async def test_the_last_turn_is_shown_to_the_next_if_it_published_a_diagnosis(talk: Talk) -> None:
    report = r.DiagnosisReport(conclusion="the disk is full", recommendations=["clean up"])
    published: dict[str, Any] = {
        "intent": IntentType.DIAGNOSIS,
        "answer": r.Content(body=report, text="the disk is full"),
    }
    turn = await talk.begin("why is it slow?")
    assert turn.begun.previous_turn is None
    await turn.persist(outcome=turn.outcome(**published))
    following = await talk.begin("and now?")
    assert following.begun.previous_turn == r.PreviousTurn(
        run_id=turn.run_id,
        query="why is it slow?",
        published_result=r.to_json(report),
        finished_at=NOW + 456,
    )
    await following.persist(outcome=following.outcome(**published, release_outcome=ReleaseOutcome.FALLBACK))
    third = await talk.begin("hm")
    assert third.begun.previous_turn is None, "the last turn published a fallback"
    await third.persist()
    assert (await talk.begin()).begun.previous_turn is None, "the last turn was a chat"


async def test_a_nodes_history_goes_on_across_turns(talk: Talk) -> None:
    turn, work = await at_work(talk)
    at_node: dict[str, Any] = {"task_id": work.task_id, "node_id": work.node_id}
    actions = [
        r.NodeAction(round=n, kind="BUILTIN", name=f"a{n}", at=NOW, call_id=f"k{n}") for n in (1, 2, 3)
    ]
    spaces = [
        r.PutNodeSpace(**at_node, inputs={"host": sourced('"web-1"')}, rounds=1, actions=actions[:2]),
        r.PutNodeSpace(**at_node, outputs={"up": sourced("true")}, tokens=2**40, actions=actions[2:]),
        r.PutNodeSpace(**at_node, state={"note": '"slow"', "large": f'"{"x" * 70_000}"'}, rounds=2),
    ]
    for space in spaces:
        await turn.flush(space)
    await turn.flush(turn.reply("which disk?", **at_node, round=2), turn.reply("elsewhere"))
    asked = work.approval("", type=CheckpointType.FOLLOW_UP, pending_action=None, question="which disk?")
    await turn.persist(*work.suspended(), r.PutCheckpoint(task_id=work.task_id, checkpoint=asked))
    following = await talk.begin("sda", action=ResumeAction.REPLY, checkpoint_id=asked.checkpoint_id)
    message = following.begun.user_message
    assert message is not None
    assert (message.task_id, message.node_id, message.round) == (work.task_id, work.node_id, 3)
    answer = r.ConsumeCheckpoint(
        task_id=work.task_id,
        checkpoint_id=asked.checkpoint_id,
        message_id=message.message_id,
        action=ResumeAction.REPLY,
    )
    await following.flush(answer)
    for _ in range(2):
        opened = await following.open_node(work.task_id, work.node_id)
        assert opened.space == r.NodeSpace(
            inputs=spaces[0].inputs,
            outputs=spaces[1].outputs,
            state=spaces[2].state,
            rounds=2,
            tokens=2**40,
            actions=actions,
        )
        assert [(m.text, m.round) for m in opened.dialogue] == [("which disk?", 2), ("sda", 3)]
        following = await next_turn(following, work)


# --- a turn that is given up ----------------------------------------------------------------------


async def test_a_turn_that_is_given_up_has_its_end_and_frees_the_conversation(talk: Talk) -> None:
    turn, work = await at_work(talk)
    await turn.flush(turn.reply("half an answer"))
    assert (await turn.abandon()).released
    run = await talk.get_run(turn.run_id)
    assert (run.run_state, run.durability) == (RunState.CANCELLED, None)
    assert run.termination_reason is TerminationReason.USER_REQUESTED
    following = await talk.begin("next")
    assert following.begun.recovery.ended_runs == []
    assert following.begun.recovery.recovered_changes > 0
    assert following.begun.recovery.nodes_reset == [work.node_id]
    assert [m.text for m in following.snapshot.dialogue] == ["hello", "half an answer", "next"]
    assert await talk.get_run(turn.run_id) == run
    assert (await turn.abandon()).released is False
    assert await talk.get_run(turn.run_id) == run


async def test_giving_up_is_safe_to_repeat_and_the_first_end_counts(talk: Talk) -> None:
    turn = await talk.begin()
    await turn.abandon()
    run = await talk.get_run(turn.run_id)
    assert (await turn.abandon(termination_reason=TerminationReason.CLIENT_DISCONNECTED)).released
    assert await talk.get_run(turn.run_id) == run
    await talk.begin("next")
    assert await talk.get_run(turn.run_id) == run


async def test_a_turn_that_was_persisted_cannot_be_given_up(talk: Talk) -> None:
    turn = await talk.turn()
    assert (await turn.abandon()).released is False
    assert await talk.get_run(turn.run_id) == turn.outcome(durability=Durability.PERSISTED)


async def test_C014_a_turn_that_never_heard_of_its_begin_can_be_given_up(talk: Talk) -> None:
    """The caller lost BeginTurn's answer: it gives the run up by its id, and the conversation is free."""
    request = talk.request("lost")
    turn = await talk.begin_by(request)
    await turn.abandon()
    assert (await talk.begin("again")).ref.version == turn.ref.version + 1
    unknown = r.AbandonTurnRequest(
        organ_id=talk.organ_id,
        conversation_id=talk.conversation_id,
        run_id=(never := new_id()),
        outcome=turn.outcome(run_id=never, run_state=RunState.FAILED),
    )
    assert (await talk.client.abandon(unknown)).released is False
    await refused(talk.get_run(never), Reason.NOT_FOUND)


# --- events ---------------------------------------------------------------------------------------


def progress(turn: Turn, text: str) -> r.AppendEvent:
    return r.AppendEvent(event=turn.event(r.Progress(node_id="n1", text=text)))


async def test_events_are_watched_from_any_place_while_the_run_goes_on_and_after_it(talk: Talk) -> None:
    turn = await talk.begin()
    watcher = asyncio.create_task(collect(talk.watch(turn.run_id)))
    said = [progress(turn, f"step {number}") for number in (1, 2, 3)]
    await turn.flush(said[0])
    await turn.flush(*said[1:])
    request = turn.persist_request()
    await talk.client.persist(request)
    events = [*(change.event for change in said), *request.closing_events]
    run = await talk.get_run(turn.run_id)
    *seen, ended = await watcher
    assert seen == events
    assert isinstance(ended, r.Run)
    assert msgspec.structs.replace(ended, durability=run.durability) == run, "it may be pending still"
    for after in (0, 1, 3, 4, 5, 6, 1000):
        assert await collect(talk.watch(turn.run_id, after)) == [*events[after:], run]


async def test_events_are_watched_by_the_runs_owner_only(talk: Talk) -> None:
    turn = await talk.turn()
    await refused(collect(talk.watch(turn.run_id, user_id=new_id())), Reason.NOT_FOUND)
    await refused(collect(talk.watch(new_id())), Reason.NOT_FOUND)


async def test_who_watches_a_run_that_dies_sees_its_end(talk: Talk) -> None:
    dead = await talk.begin(lease=SHORT_LEASE)
    await dead.flush(said := progress(dead, "working"))
    watcher = asyncio.create_task(collect(talk.watch(dead.run_id)))
    await talk.begin_after_lease("next")
    event, failure, end, run = await watcher
    assert event == said.event
    assert isinstance(failure, r.TurnEvent)
    assert isinstance(failure.kind, r.Failure)
    assert (failure.sequence, failure.kind.reason) == (2, FailureReason.INTERRUPTED)
    assert isinstance(end, r.TurnEvent)
    assert isinstance(end.kind, r.Done)
    assert (end.sequence, end.kind.release_outcome) == (3, ReleaseOutcome.FAILED)
    assert isinstance(run, r.Run)
    assert (run.run_state, run.turn_status) == (RunState.FAILED, TurnStatus.FAILED)
    assert await collect(talk.watch(dead.run_id, 1)) == [failure, end, run]


# --- the lease ------------------------------------------------------------------------------------


async def test_a_renewed_lease_keeps_the_conversation(talk: Talk) -> None:
    lease = 600
    turn = await talk.begin(lease=lease)
    before = time.time()
    renewed = await turn.renew()
    assert renewed.cancel is None
    assert renewed.lease_until is not None
    assert renewed.lease_until / 1000 > before + lease / 1000
    error = await refused(talk.begin("other"), Reason.CONVERSATION_BUSY)
    assert error.retry_after is not None
    assert error.retry_after > lease / 1000


async def test_a_lease_is_renewed_by_its_holder_only(talk: Talk) -> None:
    turn = await talk.begin()
    good = turn.ref
    for change in ({"lease_token": "f" * 32}, {"run_id": "another"}):
        turn.ref = msgspec.structs.replace(good, **change)
        await refused(turn.renew(), Reason.STATE_FENCED)
    turn.ref = good
    assert (await turn.renew()).lease_until is not None
