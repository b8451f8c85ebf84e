"""Who may run, who may attach, who is told what, and who stops a run."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from harness_service.core.stream import StreamRefused
from harness_service.live_runs import EventQueue, Follower, LiveRuns
from harness_service.settings import LimitSettings
from harness_service.turn_types import Turn, TurnChannel, TurnRequest
from turnfence import records as r
from turnfence.axes import (
    CancelReason,
    FailureReason,
    ProcessingStage,
    ReleaseOutcome,
    ResumeAction,
    RunState,
    StreamState,
    TurnStatus,
)
from turnfence.errors import Reason, TurnfenceError

ROUTING = r.Status(ProcessingStage.ROUTING)
ANSWER = r.Content(r.ChatReply("hi"), "hi")
DONE = r.Done(ReleaseOutcome.SUCCESS, TurnStatus.DONE)

Story = Turn


class FixedClock:
    def now_ms(self) -> int:
        return 42

    def monotonic(self) -> float:
        return 0.0


def metadata(request: TurnRequest) -> r.Metadata:
    return r.Metadata(request.run_id, request.conversation_id, request.message_id)


class Gate:
    """A turn that says hello, then waits until the test lets it go on, or until it is cancelled."""

    def __init__(self) -> None:
        self.open = asyncio.Event()
        self.calls = 0

    async def __call__(self, request: TurnRequest, channel: TurnChannel) -> r.Run:
        self.calls += 1
        channel.publish(metadata(request))
        opened = asyncio.create_task(self.open.wait())
        asked = asyncio.create_task(channel.cancelled())
        await asyncio.wait({opened, asked}, return_when=asyncio.FIRST_COMPLETED)
        opened.cancel()
        asked.cancel()
        if channel.cancel_reason is not None:
            return r.Run(request.run_id, run_state=RunState.CANCELLED)
        channel.publish(ANSWER)
        channel.publish(DONE)
        return r.Run(request.run_id, run_state=RunState.SUCCESS)


def request(
    name: str = "m", *, user: str = "u", organ: str = "o", text: str = "x", **more: Any
) -> TurnRequest:
    given: dict[str, Any] = {
        "principal": r.Principal(organ, user),
        "run_id": f"run-{organ}-{user}-{name}",
        "conversation_id": "c",
        "message_id": name,
        "text": text,
    }
    return TurnRequest(**(given | more))


def live_runs(turn: Story, **limits: Any) -> LiveRuns:
    return LiveRuns(turn, FixedClock(), LimitSettings(**limits))


async def kinds(follower: Follower) -> list[str]:
    return [type(event.kind).__name__ async for batch in follower for event in batch]


def event(sequence: int, kind: r.EventKind) -> r.TurnEvent:
    return r.TurnEvent(sequence, "run", "c", kind)


# --- what a slow reader loses ----------------------------------------------------------------------


def test_a_full_queue_drops_the_oldest_status_or_progress() -> None:
    queue = EventQueue(3)
    queue.put(event(1, r.Metadata("run", "c", "m")))
    for sequence in range(2, 6):
        queue.put(event(sequence, ROUTING))
    queue.put(event(6, ANSWER))
    queue.put(event(7, DONE))
    assert [e.sequence for e in queue.take()] == [1, 6, 7]
    assert len(queue) == 0


def test_a_full_queue_never_drops_what_must_arrive() -> None:
    queue = EventQueue(1)
    must: list[r.EventKind] = [
        r.Metadata("run", "c", "m"),
        r.Gap(2, 3),
        ANSWER,
        r.Failure(FailureReason.INTERNAL, "x"),
        DONE,
    ]
    for sequence, kind in enumerate(must, start=1):
        queue.put(event(sequence, kind))
    assert [e.kind for e in queue.take()] == must


# --- following --------------------------------------------------------------------------------------


async def test_events_are_numbered_timed_and_followed_to_the_end() -> None:
    gate = Gate()
    run = live_runs(gate).start(request())
    follower = run.follow()
    first = await anext(follower)
    assert [(e.sequence, e.time, e.run_id) for e in first] == [(1, 42, "run-o-u-m")]
    gate.open.set()
    assert await kinds(follower) == ["Content", "Done"]
    assert (await run.outcome()).run_state is RunState.SUCCESS
    assert run.stream_state is StreamState.TERMINAL


async def test_a_late_follower_gets_the_events_from_the_start_or_from_where_it_was() -> None:
    gate = Gate()
    run = live_runs(gate).start(request())
    gate.open.set()
    await run.outcome()
    assert await kinds(run.follow()) == ["Metadata", "Content", "Done"]
    assert await kinds(run.follow(after=1)) == ["Content", "Done"]
    assert await kinds(run.follow(after=3)) == []


async def test_a_reader_that_takes_nothing_slows_nobody_and_still_gets_the_end() -> None:
    async def chatty(request: TurnRequest, channel: TurnChannel) -> r.Run:
        channel.publish(metadata(request))
        for _ in range(1_000):
            channel.publish(ROUTING)
        channel.publish(ANSWER)
        channel.publish(DONE)
        return r.Run(request.run_id)

    run = live_runs(chatty, follower_events=8).start(request())
    slow = run.follow()
    await run.outcome()
    got = [e for batch in [await anext(slow)] for e in batch]
    assert len(got) == 8
    assert [type(e.kind).__name__ for e in (got[0], *got[-2:])] == ["Metadata", "Content", "Done"]
    assert got[-1].sequence == 1_003
    assert [e.sequence for e in got] == sorted(e.sequence for e in got)


async def test_a_reader_that_leaves_is_not_fed_any_more() -> None:
    gate = Gate()
    run = live_runs(gate).start(request())
    follower = run.follow()
    await anext(follower)
    follower.close()
    gate.open.set()
    await run.outcome()
    assert run._followers == set()


async def test_an_event_out_of_order_is_refused_and_reaches_nobody() -> None:
    async def wrong(request: TurnRequest, channel: TurnChannel) -> r.Run:
        with pytest.raises(StreamRefused):
            channel.publish(ANSWER)
        channel.publish(metadata(request))
        channel.publish(ANSWER)
        with pytest.raises(StreamRefused):
            channel.publish(ROUTING)
        channel.publish(DONE)
        return r.Run(request.run_id)

    run = live_runs(wrong).start(request())
    await run.outcome()
    assert await kinds(run.follow()) == ["Metadata", "Content", "Done"]


async def test_another_runs_record_is_replayed_with_its_own_ids_and_numbers() -> None:
    recorded = [
        r.TurnEvent(1, "old", "oldc", r.Metadata("old", "oldc", "m")),
        r.TurnEvent(2, "old", "oldc", r.Gap(2, 8)),
        r.TurnEvent(9, "old", "oldc", ANSWER),
        r.TurnEvent(10, "old", "oldc", DONE),
    ]

    async def replaying(request: TurnRequest, channel: TurnChannel) -> r.Run:
        channel.replay(recorded)
        return r.Run("old", run_state=RunState.SUCCESS)

    run = live_runs(replaying).start(request())
    await run.outcome()
    assert [e for batch in [await anext(run.follow())] for e in batch] == recorded


async def test_a_runs_own_closing_events_may_be_numbered_before_they_are_shown() -> None:
    async def closing(request: TurnRequest, channel: TurnChannel) -> r.Run:
        last = channel.publish(metadata(request)).sequence
        ids = (request.run_id, request.conversation_id)
        channel.replay([r.TurnEvent(last + 1, *ids, ANSWER), r.TurnEvent(last + 2, *ids, DONE)])
        return r.Run(request.run_id)

    run = live_runs(closing).start(request())
    await run.outcome()
    assert await kinds(run.follow()) == ["Metadata", "Content", "Done"]


# --- attaching --------------------------------------------------------------------------------------


async def test_the_same_message_attaches_and_the_turn_runs_once() -> None:
    gate = Gate()
    runs = live_runs(gate)
    first = runs.start(request())
    again = runs.start(request(run_id="other"))
    elsewhere = runs.start(request(run_id="other", conversation_id="made"), names_conversation=False)
    assert again is first
    assert elsewhere is first
    gate.open.set()
    await first.outcome()
    assert gate.calls == 1


@pytest.mark.parametrize(
    "other",
    [
        request(text="y"),
        request(action=ResumeAction.REPLY),
        request(checkpoint_id="k"),
        request(conversation_id="d"),
        request(user="v"),
    ],
)
async def test_the_same_message_id_for_another_message_is_refused(other: TurnRequest) -> None:
    gate = Gate()
    runs = live_runs(gate)
    run = runs.start(request())
    with pytest.raises(TurnfenceError) as caught:
        runs.start(other)
    assert caught.value.reason is Reason.MESSAGE_ID_REUSED
    gate.open.set()
    await run.outcome()


async def test_a_message_id_belongs_to_its_organisation() -> None:
    gate = Gate()
    runs = live_runs(gate)
    mine, theirs = runs.start(request()), runs.start(request(organ="p", text="y"))
    assert mine is not theirs
    gate.open.set()
    await mine.outcome()
    await theirs.outcome()


async def test_after_its_end_a_message_is_the_turns_business_again() -> None:
    gate = Gate()
    gate.open.set()
    runs = live_runs(gate)
    first = runs.start(request())
    await first.outcome()
    second = runs.start(request())
    assert second is not first
    await second.outcome()
    assert gate.calls == 2


# --- limits -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limits", "scope"),
    [
        ({"runs_per_user": 2}, "user"),
        ({"runs_per_organ": 2}, "organ"),
        ({"runs": 2}, "process"),
    ],
)
async def test_above_a_limit_a_turn_is_not_started(limits: dict[str, int], scope: str) -> None:
    gate = Gate()
    runs = live_runs(gate, **limits)
    running = [runs.start(request("1")), runs.start(request("2"))]
    with pytest.raises(TurnfenceError) as caught:
        runs.start(request("3"))
    assert caught.value.reason is Reason.OVERLOADED
    assert caught.value.retry_after is not None
    assert caught.value.metadata == {"scope": scope, "limit": "2"}
    assert runs.start(request("1")) is running[0]
    gate.open.set()
    for run in running:
        await run.outcome()
    await runs.start(request("3")).outcome()
    assert len(runs) == 0


async def test_limits_of_one_user_do_not_bind_another() -> None:
    gate = Gate()
    runs = live_runs(gate, runs_per_user=1, runs_per_organ=2)
    started = [
        runs.start(request("1", user="a")),
        runs.start(request("2", user="b")),
        runs.start(request("3", user="a", organ="p")),
    ]
    gate.open.set()
    for run in started:
        await run.outcome()
    assert gate.calls == 3


# --- stopping ---------------------------------------------------------------------------------------


async def test_the_first_reason_to_cancel_wins() -> None:
    run = live_runs(Gate()).start(request())
    assert run.cancel(CancelReason.USER_REQUESTED)
    assert not run.cancel(CancelReason.SHUTDOWN)
    assert run.cancel_reason is CancelReason.USER_REQUESTED
    assert (await run.outcome()).run_state is RunState.CANCELLED


async def test_a_run_that_has_ended_cannot_be_cancelled() -> None:
    gate = Gate()
    gate.open.set()
    run = live_runs(gate).start(request())
    await run.outcome()
    assert not run.cancel(CancelReason.USER_REQUESTED)
    assert run.cancel_reason is None


async def test_a_run_is_cancelled_when_its_last_caller_lets_go() -> None:
    runs = live_runs(Gate())
    run = runs.start(request())
    first, second = run.hold(), runs.start(request()).hold()
    reasons = [run.cancel_reason]
    for hold in (first, first, second):
        hold.release(CancelReason.DEADLINE_EXCEEDED)
        reasons.append(run.cancel_reason)
    assert reasons == [None, None, None, CancelReason.DEADLINE_EXCEEDED]
    await run.outcome()


async def test_cancelling_a_waiter_leaves_the_turn_alone() -> None:
    gate = Gate()
    run = live_runs(gate).start(request())
    waiter = asyncio.create_task(run.outcome())
    follower = run.follow()
    await anext(follower)
    reader = asyncio.create_task(kinds(follower))
    await asyncio.sleep(0)
    waiter.cancel()
    reader.cancel()
    await asyncio.gather(waiter, reader, return_exceptions=True)
    gate.open.set()
    assert (await run.outcome()).run_state is RunState.SUCCESS


async def test_a_turn_that_is_refused_raises_its_error_for_every_caller() -> None:
    async def busy(request: TurnRequest, channel: TurnChannel) -> r.Run:
        await asyncio.sleep(0)
        raise TurnfenceError(Reason.CONVERSATION_BUSY)

    runs = live_runs(busy)
    run = runs.start(request())
    assert runs.start(request()) is run
    assert await kinds(run.follow()) == []
    for _ in range(2):
        with pytest.raises(TurnfenceError, match="CONVERSATION_BUSY"):
            await run.outcome()
    assert len(runs) == 0


async def test_drain_asks_every_turn_to_stop_and_takes_no_new_one() -> None:
    runs = live_runs(Gate())
    started = [runs.start(request("1")), runs.start(request("2"))]
    await runs.drain(5)
    assert {run.cancel_reason for run in started} == {CancelReason.SHUTDOWN}
    assert [(await run.outcome()).run_state for run in started] == [RunState.CANCELLED] * 2
    with pytest.raises(TurnfenceError) as caught:
        runs.start(request("3"))
    assert caught.value.status == "UNAVAILABLE"


async def test_drain_tears_a_turn_that_does_not_stop_in_time() -> None:
    torn = asyncio.Event()

    async def deaf(request: TurnRequest, channel: TurnChannel) -> r.Run:
        channel.publish(metadata(request))
        try:
            await asyncio.Event().wait()
        finally:
            torn.set()
        return r.Run(request.run_id)

    runs = live_runs(deaf)
    run = runs.start(request())
    follower = run.follow()
    await anext(follower)
    await runs.drain(0.01)
    assert torn.is_set()
    assert await kinds(follower) == []
    with pytest.raises(TurnfenceError) as caught:
        await run.outcome()
    assert caught.value.status == "UNAVAILABLE"
    assert len(runs) == 0


async def test_drain_without_runs_returns_at_once() -> None:
    await live_runs(Gate()).drain(60)
