"""Stores that go away, come back, or come back with less than they had: nobody is lied to, nothing that SQL
has is lost, and nobody waits for ever."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import TypeVar

import grpc
import msgspec
import pytest

from tests.contract.requests import RPCS, Rpc, valid
from tests.contract.turns import SHORT_LEASE, Talk, Turn, collect, refused
from tests.contract.work import Work, at_work, done, ended, heads_of, next_turn, sourced
from tests.servers import PrivateServer
from tests.state.rig import Rig
from turnfence import records as r
from turnfence.axes import (
    CallStatus,
    Durability,
    NodeStatus,
    RunState,
    TaskStatus,
    TerminationReason,
    WriteDecision,
)
from turnfence.errors import Reason, TurnfenceError
from turnfence.rpc_errors import from_rpc_error

pytestmark = [pytest.mark.servers, pytest.mark.crash]

REQUEST = '{"host":"web-1"}'
ANSWER_SECONDS = 15.0  # what a caller waits at most for any answer while a store is away
BACK_SECONDS = 5.0  # until all is well after a store is back (C049)


T = TypeVar("T")


async def soon(call: Callable[[], Awaitable[T]]) -> T:
    """The answer of a call that is repeated while a store is on its way back."""
    deadline = time.monotonic() + BACK_SECONDS
    while True:
        try:
            return await call()
        except TurnfenceError as error:
            if error.reason is not Reason.STATE_UNAVAILABLE or time.monotonic() > deadline:
                raise
            await asyncio.sleep(0.05)


@contextlib.contextmanager
def in_time() -> Iterator[None]:
    before = time.monotonic()
    yield
    assert time.monotonic() - before < ANSWER_SECONDS


@contextlib.contextmanager
def away(store: PrivateServer, how: str) -> Iterator[None]:
    """The store does not answer (its packets are swallowed), or is not there."""
    if how == "paused":
        store.pause()
    else:
        store.kill()
    try:
        yield
    finally:
        if how == "paused":
            store.resume()
        else:
            store.start()


@pytest.fixture
def frail_talk(frail: Rig) -> Talk:
    return Talk(frail.client)


# --- the hot store loses its data -----------------------------------------------------------------

Step = Callable[[Turn, Work], Awaitable[object]]

WRITES: dict[str, Step] = {
    "flush": lambda turn, work: turn.flush(turn.reply("lost")),
    "open_node": lambda turn, work: turn.open_node(work.task_id, work.node_id),
    "register": lambda turn, work: turn.register(work.write(turn)),
    "settle": lambda turn, work: turn.settle(work.read(turn), '"lost"'),
    "read_payload": lambda turn, work: turn.read_payload(work.task_id, "e1"),
    "persist": lambda turn, work: turn.persist(turn.reply("lost"), work.closed()),
}


@pytest.mark.parametrize("loss", ["all", "time"])
@pytest.mark.parametrize("step", WRITES.values(), ids=WRITES)
async def test_C010_a_turn_whose_data_is_gone_is_told_so_and_ends(
    rig: Rig, talk: Talk, step: Step, loss: str
) -> None:
    """Lost whole, or put back to where the turn began; the next turn starts from what SQL has."""
    first, work = await at_work(talk)
    await first.settle(work.read(first, evidence_id="e1"), '"kept"')
    await first.persist(*work.suspended(), r.PutConversation(title="kept"))
    turn = await talk.begin("second", lease=SHORT_LEASE)
    image = rig.image(talk)
    await turn.flush(turn.reply("never persisted"), r.PutConversation(title="lost"))
    if loss == "all":
        rig.flush_all()
    else:
        rig.restore(talk, image)
    error = await refused(step(turn, work), Reason.STATE_LOST)
    assert error.status == "DATA_LOSS"
    await turn.abandon(run_state=RunState.FAILED, termination_reason=TerminationReason.STATE_UNAVAILABLE)
    run = await talk.get_run(turn.run_id)
    assert (run.run_state, run.termination_reason) == (RunState.FAILED, TerminationReason.STATE_UNAVAILABLE)
    following = await talk.begin_after_lease("third")
    assert [m.text for m in following.snapshot.dialogue] == ["hello", "second", "third"]
    assert following.ref.version > turn.ref.version
    assert following.snapshot.conversation.title == "kept"
    assert list(await heads_of(following, work)) == ["e1"]
    assert await following.read_payload(work.task_id, "e1") == b'"kept"'
    await refused(turn.flush(turn.reply("too late")), Reason.STATE_FENCED)
    assert (await following.persist()).durability is Durability.PERSISTED


async def test_C044_after_a_loss_everything_persisted_comes_back_exactly(rig: Rig, talk: Talk) -> None:
    turn, work = await at_work(talk)
    entry = r.EntityEntry(display_name="web-1", attrs_json='{"n":9007199254740993}', mentions=2)
    write = work.write(turn)
    checkpoint = work.approval(write.args_hash)
    await turn.register(write, REQUEST)
    await turn.settle(done(write), '{"z":0.1,"a":-0}')
    await turn.settle(work.read(turn, evidence_id="large"), f'"{"服" * 200_000}"')
    await turn.flush(
        turn.reply("look", task_id=work.task_id, node_id=work.node_id),
        r.PutEntity(entity_type="host", entity_id="web 1", entry=entry),
        r.PutSessionShared(name="zone", value=sourced('"eu"')),
        r.PutTaskShared(task_id=work.task_id, name="host", value=sourced("1.0")),
        r.PutPrior(task_id=work.task_id, prior=r.Prior(reason="same host")),
        r.PutNode(task_id=work.task_id, node=work.node("n2", status=NodeStatus.PENDING)),
        r.PutEdge(task_id=work.task_id, edge=work.edge("n1", "n2")),
        work.note("x" * 70_000),
    )
    await turn.persist(*work.suspended(), r.PutCheckpoint(task_id=work.task_id, checkpoint=checkpoint))
    before = await talk.begin("before")
    space_before = await before.open_node(work.task_id, work.node_id)
    await before.persist()
    rig.flush_all()
    after = await talk.begin("after")
    assert after.begun.recovery.rehydrated == ["conversation", f"task:{work.task_id}"]
    assert after.begun.recovery.ended_runs == []
    assert after.snapshot.dialogue == [*before.snapshot.dialogue, after.begun.user_message]
    for name in ("records", "entities", "shared", "unresolved_writes"):
        assert getattr(after.snapshot, name) == getattr(before.snapshot, name), name
    nodes = {node.node_id: node for node in before.task.nodes}
    assert {node.node_id: node for node in after.task.nodes} == nodes
    assert msgspec.structs.replace(after.task, nodes=before.task.nodes) == before.task
    assert await after.open_node(work.task_id, work.node_id) == space_before
    assert await after.read_payload(work.task_id, write.evidence_id) == b'{"z":0.1,"a":-0}'
    assert len(await after.read_payload(work.task_id, "large")) == 600_002
    assert (await after.register(work.write(after))).decision is WriteDecision.REUSED


async def test_C029_a_write_that_only_sql_knows_is_unknown_and_not_repeated(rig: Rig, talk: Talk) -> None:
    """Its task was never persisted: the write is verified all the same."""
    turn, work = await at_work(talk, lease=SHORT_LEASE)
    started, settled = work.write(turn), work.write(turn, idempotency_key="b" * 64)
    for head in (started, settled):
        await turn.register(head, REQUEST)
    stored = await turn.settle(done(settled), '"done"')
    rig.flush_all()
    following = await talk.begin_after_lease("again")
    unknown = msgspec.structs.replace(started, status=CallStatus.UNKNOWN)
    assert following.begun.recovery.evidence_unknown == [started.evidence_id]
    assert following.snapshot.unresolved_writes == [unknown]
    assert following.snapshot.unresolved_requests == {started.evidence_id: REQUEST}
    assert await heads_of(following, work) == {
        started.evidence_id: unknown,
        settled.evidence_id: stored,
    }
    again = await following.register(work.write(following), REQUEST)
    assert (again.decision, again.evidence) == (WriteDecision.BLOCKED, unknown)
    await following.persist()
    assert (await talk.begin()).snapshot.unresolved_writes == [unknown]


async def test_C032_what_was_flushed_and_never_persisted_leaves_no_half_task(rig: Rig, talk: Talk) -> None:
    turn, work = await at_work(talk, lease=SHORT_LEASE)
    await turn.flush(turn.reply("half an answer"))
    rig.flush_all()
    following = await talk.begin_after_lease("again")
    assert [m.text for m in following.snapshot.dialogue] == ["hello", "again"]
    assert following.snapshot.task is None
    assert following.snapshot.conversation.active_task_id == ""
    assert following.begun.recovery.ended_runs == [turn.run_id]
    assert await heads_of(following, work) == {}


@pytest.mark.parametrize("crashed", [False, True], ids=["C011", "C013_and_a_begin_died"])
async def test_C011_a_hot_store_that_went_back_in_time_lends_nothing_to_the_next_turn(
    rig: Rig, talk: Talk, crashed: bool
) -> None:
    first, work = await at_work(talk)
    await first.persist(*work.suspended())
    image = rig.image(talk)
    second = await talk.begin("second")
    await second.persist(second.reply("the answer"), work.closed())
    rig.restore(talk, image)
    if crashed:
        await talk.begin("third", lease=SHORT_LEASE)
    following = await talk.begin_after_lease("last")
    texts = ["hello", "second", "the answer", *(["third"] if crashed else []), "last"]
    assert [m.text for m in following.snapshot.dialogue] == texts
    assert following.ref.version > second.ref.version
    assert following.snapshot.task is None
    assert [record.task_id for record in following.snapshot.records] == [work.task_id]


async def test_C055_a_task_group_whose_sentinel_is_gone_comes_back_whole(rig: Rig, talk: Talk) -> None:
    turn, work = await at_work(talk)
    checkpoint = work.approval("a" * 64)
    await turn.settle(work.read(turn), '"found"')
    await turn.persist(*work.suspended(), r.PutCheckpoint(task_id=work.task_id, checkpoint=checkpoint))
    before = await talk.begin("before")
    heads = await heads_of(before, work)
    await before.persist()
    with rig.redis() as client:
        base = f"g2rain:rt:{{{talk.organ_id}:{talk.conversation_id}}}:task:{work.task_id}"
        assert client.delete(f"{base}:metadata") == 1
        client.hset(f"{base}:graph", "n9", client.hget(f"{base}:graph", work.node_id))
    after = await talk.begin("after")
    assert after.begun.recovery.rehydrated == [f"task:{work.task_id}"]
    assert after.task == before.task, "nothing of the old group is left between the new"
    assert await heads_of(after, work) == heads
    assert rig.unhealthy(talk) == {}


# --- SQL is away ----------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["paused", "killed"])
@pytest.mark.parametrize("finished_by", ["next_begin", "repeat"])
async def test_a_persist_without_sql_is_pending_and_becomes_persisted_later(
    frail: Rig, frail_talk: Talk, how: str, finished_by: str
) -> None:
    talk = frail_talk
    turn, work = await at_work(talk, message_id="m-pending")
    await turn.settle(work.read(turn), '"found"')
    request = turn.persist_request(turn.reply("the answer"), work.closed())
    with away(frail.database(), how):
        with in_time():
            answer = await talk.client.persist(request)
        assert (answer.durability, answer.closed) == (Durability.PENDING, [])
    pending = await soon(lambda: talk.get_run(turn.run_id))
    assert pending == turn.outcome(durability=Durability.PENDING)
    assert (await collect(talk.watch(turn.run_id)))[-1] == pending
    if finished_by == "repeat":
        assert (await talk.client.persist(request)).durability is Durability.PERSISTED
    else:
        known = await talk.client.begin(talk.request(message_id="m-pending"))
        assert known.existing_run == pending
    following = await talk.begin("next")
    assert following.begun.recovery.ended_runs == []
    assert (following.begun.recovery.recovered_changes > 0) == (finished_by == "next_begin")
    assert await talk.get_run(turn.run_id) == turn.outcome(durability=Durability.PERSISTED)
    assert [m.text for m in following.snapshot.dialogue] == ["hello", "the answer", "next"]
    assert following.snapshot.task is None
    assert [record.task_id for record in following.snapshot.records] == [work.task_id]
    late = await talk.client.persist(request)
    assert (late.durability, late.already_persisted) == (Durability.PERSISTED, True)


async def test_C073_a_write_that_sql_could_not_register_is_not_called_and_blocks_nobody_later(
    frail: Rig, frail_talk: Talk
) -> None:
    turn, work = await at_work(frail_talk)
    head = work.write(turn)
    with away(frail.database(), "killed"):
        with in_time():
            await refused(turn.register(head, REQUEST), Reason.STATE_UNAVAILABLE)
        assert await heads_of(turn, work) == {head.evidence_id: head}
        pre_call = ended(head, CallStatus.UNKNOWN_PRE_CALL)
        await refused(turn.settle(pre_call), Reason.STATE_UNAVAILABLE)
        await turn.flush(turn.reply("the write could not be made"))
    following = await soon(lambda: next_turn(turn, work))
    assert following.begun.recovery.evidence_cancelled == [head.evidence_id]
    again = work.write(following)
    assert (await following.register(again, REQUEST)).decision is WriteDecision.PROCEED


async def test_a_registration_repeated_when_sql_is_back_may_be_called(frail: Rig, frail_talk: Talk) -> None:
    turn, work = await at_work(frail_talk)
    head = work.write(turn)
    with away(frail.database(), "killed"):
        await refused(turn.register(head, REQUEST), Reason.STATE_UNAVAILABLE)
    answer = await soon(lambda: turn.register(head, REQUEST))
    assert (answer.decision, answer.evidence) == (WriteDecision.PROCEED, head)


@pytest.mark.parametrize("gone", ["next_turn", "hot_store"])
async def test_C028_an_outcome_that_sql_did_not_hear_of_reaches_it_later(
    frail: Rig, frail_talk: Talk, gone: str
) -> None:
    talk = frail_talk
    turn, work = await at_work(talk)
    head = work.write(turn)
    await turn.register(head, REQUEST)
    with away(frail.database(), "killed"):
        await refused(turn.settle(done(head), '{"ok":1}'), Reason.STATE_UNAVAILABLE)
    following = await soon(lambda: next_turn(turn, work))
    if gone == "hot_store":
        await following.persist()
        frail.flush_all()
        following = await talk.begin("again")
    stored = (await heads_of(following, work))[head.evidence_id]
    assert (stored.status, following.snapshot.unresolved_writes) == (CallStatus.SUCCESS, [])
    assert await following.read_payload(work.task_id, head.evidence_id) == b'{"ok":1}'


async def test_a_begin_without_sql_is_refused_and_leaves_the_conversation_free(
    frail: Rig, frail_talk: Talk
) -> None:
    talk = frail_talk
    await talk.turn("first")
    with away(frail.database(), "killed"), in_time():
        error = await refused(talk.begin("second"), Reason.STATE_UNAVAILABLE)
        assert error.retry_after is not None
    following = await soon(lambda: talk.begin("third"))
    assert [m.text for m in following.snapshot.dialogue] == ["first", "third"]


# --- the hot store is away ------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["paused", "killed"])
async def test_C049_without_the_hot_store_every_call_is_unavailable_in_time_and_all_is_well_after(
    frail: Rig, frail_talk: Talk, how: str
) -> None:
    """What a store that does not answer does with a call is not known: those are another turn's."""
    talk = frail_talk
    ended_before = await Talk(frail.client).turn()
    victim, its_work = await at_work(Talk(frail.client), lease=SHORT_LEASE)
    turn, work = await at_work(talk)
    await turn.flush(r.PutConversation(title="acknowledged"))

    async def unavailable(rpc: Rpc) -> None:
        request = valid(rpc, victim, its_work)
        if rpc.name == "BeginTurn":
            request.lease.FromMilliseconds(SHORT_LEASE)  # it may take the lock yet
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await rpc.call(frail.client, request)
        assert from_rpc_error(caught.value).reason is Reason.STATE_UNAVAILABLE, rpc.name

    with away(frail.hot, how):
        with in_time():
            await asyncio.gather(*(unavailable(rpc) for rpc in RPCS))
        run = await ended_before.talk.get_run(ended_before.run_id)
        assert run.durability is Durability.PERSISTED, "what SQL alone knows is still told"
    await soon(lambda: turn.flush(turn.reply("still here")))
    await turn.persist(work.closed(TaskStatus.FAILED))
    following = await talk.begin("next")
    assert following.snapshot.conversation.title == "acknowledged"
    assert [m.text for m in following.snapshot.dialogue] == ["hello", "still here", "next"]
    after = await victim.talk.begin_after_lease("next")
    assert (await after.persist()).durability is Durability.PERSISTED


async def test_C050_both_stores_restarted_lose_nothing_that_was_acknowledged(
    frail: Rig, frail_talk: Talk
) -> None:
    turn, work = await at_work(frail_talk)
    head = work.write(turn)
    await turn.register(head, REQUEST)
    frail.hot.kill()
    frail.database().kill()
    frail.hot.start()
    frail.database().start()
    stored = await soon(lambda: turn.settle(done(head), '"done"'))
    following = await next_turn(turn, work)
    assert following.begun.recovery == r.Recovery()
    assert await heads_of(following, work) == {head.evidence_id: stored}
