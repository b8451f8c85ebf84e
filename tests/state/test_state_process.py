"""The state service as a process: killed between any two steps, told to stop, started again. What it has
acknowledged is there, what it holds in Redis will go."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import msgspec
import pytest

from tests.contract.requests import every_change
from tests.contract.turns import LONG_LEASE, SHORT_LEASE, Talk, Turn, collect, refused
from tests.contract.work import Work, done, heads_of
from tests.state.rig import Rig
from turnfence import records as r
from turnfence.axes import CallStatus, Durability, RunState, TerminationReason, WriteDecision
from turnfence.errors import Reason, TurnfenceError

pytestmark = [pytest.mark.servers, pytest.mark.crash]

REQUEST = '{"host":"web-1"}'


class Story:
    """A turn that comes as far as it is told."""

    def __init__(self, turn: Turn) -> None:
        self.turn = turn
        self.work = Work()
        self.write = self.work.write(turn)
        self.stored: r.EvidenceHead | None = None
        self.persist = r.PersistTurnRequest(turn=turn.ref, sequence=1, outcome=turn.outcome())

    async def opens(self) -> None:
        await self.turn.flush(*self.work.opened(), self.turn.reply("half an answer"))

    async def registers(self) -> None:
        assert (await self.turn.register(self.write, REQUEST)).decision is WriteDecision.PROCEED

    async def settles(self) -> None:
        self.stored = await self.turn.settle(done(self.write), '{"ok":true}')

    async def persists(self) -> None:
        self.persist = self.turn.persist_request(self.turn.reply("the answer"), *self.work.suspended())
        answer = await self.turn.client.persist(self.persist)
        assert answer.durability is Durability.PERSISTED

    @property
    def steps(self) -> list[Callable[[], Awaitable[None]]]:
        return [self.opens, self.registers, self.settles, self.persists]


STEPS = ["begun", "opened", "registered", "settled", "persisted"]


async def stories(rig: Rig, lease: int) -> list[tuple[int, Story]]:
    """A story for each step that a turn can have reached, and then the service is killed."""
    told = []
    for reached in range(len(STEPS)):
        story = Story(await Talk(rig.client).begin(lease=lease))
        for step in story.steps[:reached]:
            await step()
        told.append((reached, story))
    await rig.crash()
    return told


async def test_a_turn_goes_on_where_its_service_was_killed(rig: Rig, subtests: pytest.Subtests) -> None:
    """The service remembers nothing of a turn: the stores and the turn do."""
    for reached, story in await stories(rig, LONG_LEASE):
        with subtests.test(STEPS[reached]):
            for step in story.steps[reached:]:
                await step()
            talk = story.turn.talk
            following = await talk.begin("next")
            assert following.begun.recovery == r.Recovery()
            said = ["hello", "half an answer", "the answer", "next"]
            assert [m.text for m in following.snapshot.dialogue] == said
            assert await heads_of(following, story.work) == {story.write.evidence_id: story.stored}
            assert (await talk.get_run(story.turn.run_id)).durability is Durability.PERSISTED


async def test_C031_after_a_kill_the_next_begin_tells_what_was_left_undone(
    rig: Rig, subtests: pytest.Subtests
) -> None:
    """Both processes died at once: the turn is never heard of again."""
    for reached, story in await stories(rig, SHORT_LEASE):
        following = await story.turn.talk.begin_after_lease("next")
        with subtests.test(STEPS[reached]):
            check_recovery(following.begun.recovery, reached, story)
            await check_what_is_left(following, reached, story)


def check_recovery(recovery: r.Recovery, reached: int, story: Story) -> None:
    died = STEPS[reached] != "persisted"
    assert recovery.ended_runs == ([story.turn.run_id] if died else [])
    assert recovery.nodes_reset == ([story.work.node_id] if died and reached >= 1 else [])
    registered = STEPS[reached] == "registered"
    assert recovery.evidence_unknown == ([story.write.evidence_id] if registered else [])
    assert (recovery.recovered_changes > 0) == died
    assert (recovery.rehydrated, recovery.evidence_cancelled) == ([], [])


async def check_what_is_left(following: Turn, reached: int, story: Story) -> None:
    died = STEPS[reached] != "persisted"
    said = ["hello", *["half an answer"][:reached], *([] if died else ["the answer"]), "next"]
    assert [m.text for m in following.snapshot.dialogue] == said
    assert (following.snapshot.task is not None) == (reached >= 1)
    unknown = msgspec.structs.replace(story.write, status=CallStatus.UNKNOWN)
    known = {story.write.evidence_id: story.stored or unknown} if reached >= 2 else {}
    assert await heads_of(following, story.work) == known
    assert following.snapshot.unresolved_writes == ([unknown] if STEPS[reached] == "registered" else [])
    run = await following.talk.get_run(story.turn.run_id)
    assert run.durability is (None if died else Durability.PERSISTED)
    if died:
        assert (run.run_state, run.termination_reason) == (RunState.FAILED, TerminationReason.INTERRUPTED)
    await following.persist()
    again = await following.talk.begin("after")
    assert again.begun.recovery.ended_runs == []


async def test_C079_an_approval_and_its_write_survive_a_kill_together(rig: Rig, talk: Talk) -> None:
    turn, work = await talk.begin(), Work()
    await turn.flush(*work.opened())
    head = work.write(turn)
    checkpoint = work.approval(head.args_hash)
    await turn.persist(*work.suspended(), r.PutCheckpoint(task_id=work.task_id, checkpoint=checkpoint))
    await rig.crash()
    answering = await talk.begin("", lease=SHORT_LEASE)
    assert answering.task.checkpoint == checkpoint
    head = work.write(answering)
    consume = r.ConsumeCheckpoint(
        task_id=work.task_id,
        checkpoint_id=checkpoint.checkpoint_id,
        message_id=answering.request.input.message_id,
        action=checkpoint.allowed_actions[0],
    )
    await answering.register(head, REQUEST, consume)
    await rig.crash()
    following = await talk.begin_after_lease("again")
    assert following.task.checkpoint is None
    assert [write.evidence_id for write in following.snapshot.unresolved_writes] == [head.evidence_id]
    assert following.snapshot.unresolved_requests == {head.evidence_id: REQUEST}


# --- in the middle of a call ----------------------------------------------------------------------


async def flush_until_refused(turn: Turn, texts: list[str]) -> list[r.StateChange]:
    """Flushes one message after the other; returns the changes of the flush that got no answer."""
    while True:
        text = f"m{len(texts) + 1}"
        change = turn.reply(text)
        try:
            await turn.flush(change)
        except TurnfenceError as error:
            if error.reason is not Reason.STATE_UNAVAILABLE:
                raise
            return [change]
        texts.append(text)


@pytest.mark.parametrize("gently", [False, True], ids=["killed", "told_to_stop"])
async def test_C008_what_was_acknowledged_is_there_once_whenever_the_process_ends(
    rig: Rig, talk: Talk, gently: bool
) -> None:
    """The call that got no answer is sent again to the next process, and written once."""
    turn, texts = await talk.begin(), list[str]()
    for _ in range(2):
        flushing = asyncio.create_task(flush_until_refused(turn, texts))
        await rig.end_while_busy(gently=gently)
        unanswered = await flushing
        await rig.reconnect()
        await turn.flush(*unanswered)
        texts.append(f"m{len(texts) + 1}")
    request = turn.persist_request()
    persisting = asyncio.create_task(talk.client.persist(request))
    await rig.end_while_busy(gently=gently)
    await asyncio.gather(persisting, return_exceptions=True)
    await rig.reconnect()
    assert (await talk.client.persist(request)).durability is Durability.PERSISTED
    following = await talk.begin("next")
    expected = ["hello", *texts, "next"][-60:]
    assert [m.text for m in following.snapshot.dialogue] == expected
    assert following.begun.recovery == r.Recovery()


# --- told to stop ---------------------------------------------------------------------------------


async def test_sigterm_ends_the_process_with_exit_code_0(rig: Rig, talk: Talk) -> None:
    await talk.turn()
    written = len(rig.service.log.read_text())
    assert rig.service.stop() == 0
    log = rig.service.log.read_text()[written:]
    assert "stopped" in log
    assert "Traceback" not in log


async def test_sigterm_does_not_wait_for_who_only_watches(rig: Rig, talk: Talk) -> None:
    """A watcher is told to look elsewhere within the time that calls have to end; its run goes on."""
    turn = await talk.begin()
    await turn.flush(r.AppendEvent(event=turn.event(r.Progress(text="step"))))
    watching = talk.watch(turn.run_id)
    first = await anext(watching)
    assert isinstance(first, r.TurnEvent)
    rest = asyncio.create_task(collect(watching))
    before = time.monotonic()
    stopping = asyncio.get_running_loop().run_in_executor(None, rig.service.stop)
    with pytest.raises(TurnfenceError):
        await rest
    assert await stopping == 0
    assert time.monotonic() - before < 10
    await rig.reconnect()
    await turn.persist()
    seen = await collect(talk.watch(turn.run_id))
    assert seen[0] == first
    assert isinstance(seen[-1], r.Run)


# --- nothing stays for ever -----------------------------------------------------------------------


async def test_C061_every_key_has_a_ttl_after_every_step(rig: Rig, talk: Talk) -> None:
    def healthy(step: str) -> None:
        assert rig.unhealthy(talk) == {}, step

    turn, work = await talk.begin(), Work()
    healthy("begin")
    await turn.flush(*work.opened())
    await turn.flush(*every_change(work, turn.run_id))
    healthy("flush of all there is")
    write = work.write(turn)
    await turn.register(write)
    healthy("register")
    await turn.settle(done(write), '"found"')
    healthy("settle")
    await turn.renew()
    healthy("renew")
    await turn.persist(*work.suspended())
    healthy("persist, suspended")
    following = await talk.begin("next", lease=SHORT_LEASE)
    healthy("next begin")
    await following.register(work.write(following, idempotency_key="b" * 64))
    recovering = await talk.begin_after_lease("recover")
    healthy("recovery")
    await recovering.persist(work.closed())
    healthy("persist, closed")
    given_up = await talk.begin("give up")
    await given_up.abandon()
    healthy("abandon")
    rig.flush_all()
    rehydrated = await talk.begin("again")
    healthy("rehydration")
    await rehydrated.persist()
    healthy("the end")


async def test_C016_a_begin_that_is_refused_leaves_no_key_behind(rig: Rig, talk: Talk) -> None:
    await talk.turn(message_id="m-known")
    elsewhere = Talk(talk.client, organ_id=talk.organ_id)
    elsewhere.user_id = talk.user_id
    answer = await elsewhere.client.begin(elsewhere.request(message_id="m-known"))
    assert answer.existing_run is not None
    assert rig.ttls(elsewhere) == {}
    stranger = Talk(talk.client, organ_id=talk.organ_id, conversation_id=talk.conversation_id)
    before = rig.ttls(talk).keys()
    await refused(stranger.begin(), Reason.CONVERSATION_FORBIDDEN)
    assert rig.ttls(talk).keys() == before
