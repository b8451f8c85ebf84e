"""Owns the task of every running turn; an RPC only follows a run (quality.md).

Whoever edits this file keeps three rules. A turn's task is cancelled by nobody but ``drain``, and by it only
after its time is up: disconnect, cancel, deadline and shutdown all enter at ``LiveRun.cancel`` and the turn
winds down by itself. A slow reader never slows the turn: its queue is bounded and drops what may be lost.
Between looking a run up and holding it there is no ``await``: a run must not lose its last caller in between.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable

import structlog

from harness_service.core.input_hash import input_hash
from harness_service.core.stream import StreamSession
from harness_service.ports import Clock
from harness_service.settings import LimitSettings
from harness_service.turn_types import Turn, TurnRequest
from turnfence import records as r
from turnfence.axes import CancelReason, StreamState
from turnfence.errors import Reason, TurnfenceError
from turnfence.serving.logs import get_logger

_log = get_logger(__name__)

# What a reader that falls behind may miss (wire.md); content, failure, done, metadata and gap it never does.
_MAY_BE_LOST = (r.Status, r.Progress)
_LOG_EVENTS_MAX = 2000  # of one run, kept for callers that attach to it
_LAST_WORDS = 1.0  # seconds for a torn task to clean up


class EventQueue:
    """Events in order, bounded: above ``limit`` the oldest event that may be lost is dropped."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._events: deque[r.TurnEvent] = deque()

    def put(self, event: r.TurnEvent) -> None:
        self._events.append(event)
        if len(self._events) > self._limit:
            self._drop_one()

    def after(self, sequence: int) -> list[r.TurnEvent]:
        return [event for event in self._events if event.sequence > sequence]

    def take(self) -> list[r.TurnEvent]:
        taken = list(self._events)
        self._events.clear()
        return taken

    def __len__(self) -> int:
        return len(self._events)

    def _drop_one(self) -> None:
        for index, event in enumerate(self._events):
            if isinstance(event.kind, _MAY_BE_LOST):
                del self._events[index]
                return


class Follower:
    """One reader of a run: iterate it for batches of whatever is ready; it ends when the run has ended."""

    def __init__(self, limit: int, on_close: Callable[[Follower], None]) -> None:
        self._queue = EventQueue(limit)
        self._on_close = on_close
        self._ready = asyncio.Event()
        self._ended = False

    def put(self, event: r.TurnEvent) -> None:
        self._queue.put(event)
        self._ready.set()

    def end(self) -> None:
        """No event will come after those that are queued."""
        self._ended = True
        self._ready.set()

    def close(self) -> None:
        """The reader is gone."""
        self._on_close(self)

    def __aiter__(self) -> Follower:
        return self

    async def __anext__(self) -> list[r.TurnEvent]:
        while not self._queue:
            if self._ended:
                raise StopAsyncIteration
            self._ready.clear()
            await self._ready.wait()
        return self._queue.take()


class Hold:
    """A caller's interest in a run: when the last caller lets go of it, the run is cancelled."""

    def __init__(self, run: LiveRun) -> None:
        self._run: LiveRun | None = run

    def release(self, reason: CancelReason) -> None:
        """Let go, for ``reason`` if the run is still going. Only the first call counts."""
        run, self._run = self._run, None
        if run is not None:
            run._released(self, reason)


class LiveRun:
    """One running turn: the channel its story speaks through, and what its callers follow."""

    def __init__(
        self, request: TurnRequest, said: str, clock: Clock, *, follower_events: int, names_conversation: bool
    ) -> None:
        self.request = request
        self.said = said  # input hash of the message
        self.names_conversation = names_conversation
        self._clock = clock
        self._stream = StreamSession(request.run_id, request.conversation_id)
        self._log = EventQueue(_LOG_EVENTS_MAX)
        self._follower_events = follower_events
        self._followers: set[Follower] = set()
        self._holds: set[Hold] = set()
        self._cancel_reason: CancelReason | None = None
        self._cancel_asked = asyncio.Event()
        self._ended = False
        self._task: asyncio.Task[r.Run] | None = None

    # --- TurnChannel: what the turn uses ---

    def publish(self, kind: r.EventKind) -> r.TurnEvent:
        event = self._stream.emit(kind, self._clock.now_ms())
        self._hand_over(event)
        return event

    def replay(self, events: list[r.TurnEvent]) -> None:
        """Events that have their numbers already: those of another, recorded run, instead of this one's, or
        this run's own closing events, which were recorded before anybody may see them."""
        for event in events:
            if event.run_id != self._stream.run_id and self._stream.state is StreamState.NEW:
                self._stream = StreamSession(event.run_id, event.conversation_id)
            self._hand_over(self._stream.pass_on(event))

    @property
    def cancel_reason(self) -> CancelReason | None:
        return self._cancel_reason

    async def cancelled(self) -> CancelReason:
        await self._cancel_asked.wait()
        assert self._cancel_reason is not None
        return self._cancel_reason

    # --- what its owner and its callers use ---

    def cancel(self, reason: CancelReason) -> bool:
        """Ask the turn to stop. The first reason wins; False: there was one, or the run has ended."""
        if self._cancel_reason is not None or self._ended:
            return False
        self._cancel_reason = reason
        self._cancel_asked.set()
        _log.info("run asked to stop", run_id=self.request.run_id, cancel_reason=reason.value)
        return True

    def follow(self, after: int = 0) -> Follower:
        """A reader of the events with a sequence above ``after``, those that happened already included."""
        follower = Follower(self._follower_events, self._followers.discard)
        for event in self._log.after(after):
            follower.put(event)
        if self._ended:
            follower.end()
        else:
            self._followers.add(follower)
        return follower

    def hold(self) -> Hold:
        hold = Hold(self)
        self._holds.add(hold)
        return hold

    @property
    def ended(self) -> bool:
        return self._ended

    @property
    def stream_state(self) -> StreamState:
        return self._stream.state

    async def outcome(self) -> r.Run:
        """Wait for the run's end. Raises the ``TurnfenceError`` it ended with before its first event, and
        whatever else broke it; cancelling the waiter leaves the run alone."""
        assert self._task is not None
        await asyncio.wait({self._task})
        if self._task.cancelled():
            raise _stopping()
        return self._task.result()

    def _hand_over(self, event: r.TurnEvent) -> None:
        self._log.put(event)
        for follower in self._followers:
            follower.put(event)

    def _released(self, hold: Hold, reason: CancelReason) -> None:
        self._holds.discard(hold)
        if not self._holds:
            self.cancel(reason)

    def _end(self) -> None:
        self._ended = True
        for follower in self._followers:
            follower.end()
        self._followers.clear()


class LiveRuns:
    """Every turn that runs in this process."""

    def __init__(self, turn: Turn, clock: Clock, limits: LimitSettings) -> None:
        self._turn = turn
        self._clock = clock
        self._limits = limits
        self._by_message: dict[tuple[str, str], LiveRun] = {}
        self._tasks: dict[asyncio.Task[r.Run], LiveRun] = {}
        self._draining = False

    def __len__(self) -> int:
        return len(self._by_message)

    def start(self, request: TurnRequest, *, names_conversation: bool = True) -> LiveRun:
        """Start a turn, or attach to the one that runs this very message already.

        Raises MESSAGE_ID_REUSED when the message id is that of another running message, OVERLOADED above
        the limits per process, organisation and user, STATE_UNAVAILABLE (retry elsewhere) while stopping.
        """
        said = input_hash(request.text, request.action, request.checkpoint_id)
        key = (request.principal.organ_id, request.message_id)
        running = self._by_message.get(key)
        if running is not None:
            if not _is_same_message(running, request, said, names_conversation):
                raise TurnfenceError(Reason.MESSAGE_ID_REUSED)
            return running
        if self._draining:
            raise _stopping()
        self._check_limits(request.principal)
        run = LiveRun(
            request,
            said,
            self._clock,
            follower_events=self._limits.follower_events,
            names_conversation=names_conversation,
        )
        self._by_message[key] = run
        run._task = asyncio.create_task(self._live(run, key), name=f"run {request.run_id}")
        self._tasks[run._task] = run
        run._task.add_done_callback(self._forget)
        return run

    async def drain(self, timeout: float) -> None:
        """Take no new turn, ask all to stop (SHUTDOWN), wait ``timeout`` seconds, tear what is left."""
        self._draining = True
        for run in self._tasks.values():
            run.cancel(CancelReason.SHUTDOWN)
        left = await _unfinished(self._tasks, timeout)
        for task in left:
            _log.error("run torn at shutdown", run_id=self._tasks[task].request.run_id)
            task.cancel()
        await _unfinished(left, _LAST_WORDS)

    async def _live(self, run: LiveRun, key: tuple[str, str]) -> r.Run:
        structlog.contextvars.bind_contextvars(
            run_id=run.request.run_id,
            conversation_id=run.request.conversation_id,
            organ_id=run.request.principal.organ_id,
        )
        try:
            return await self._turn(run.request, run)
        finally:
            # Forgotten before its readers are told: a repeat from here on is answered from the record.
            del self._by_message[key]
            run._end()

    def _forget(self, task: asyncio.Task[r.Run]) -> None:
        run = self._tasks.pop(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, TurnfenceError):
            _log.error("turn broke", run_id=run.request.run_id, exc_info=error)

    def _check_limits(self, principal: r.Principal) -> None:
        runs = [run.request.principal for run in self._by_message.values()]
        in_organ = [other for other in runs if other.organ_id == principal.organ_id]
        of_user = [other for other in in_organ if other.user_id == principal.user_id]
        for scope, count, limit in (
            ("user", len(of_user), self._limits.runs_per_user),
            ("organ", len(in_organ), self._limits.runs_per_organ),
            ("process", len(runs), self._limits.runs),
        ):
            if count >= limit:
                raise TurnfenceError(Reason.OVERLOADED, metadata={"scope": scope, "limit": str(limit)})


def _is_same_message(run: LiveRun, request: TurnRequest, said: str, names_conversation: bool) -> bool:
    """A repeat names the same conversation, or none: the answer to the very first call may be lost."""
    same_place = not names_conversation or request.conversation_id == run.request.conversation_id
    return run.said == said and run.request.principal == request.principal and same_place


def _stopping() -> TurnfenceError:
    return TurnfenceError(
        Reason.OVERLOADED, status="UNAVAILABLE", message="This process is stopping; call again."
    )


async def _unfinished(tasks: Iterable[asyncio.Task[r.Run]], timeout: float) -> set[asyncio.Task[r.Run]]:
    """The tasks that are not done after ``timeout`` seconds."""
    waited = set(tasks)
    return (await asyncio.wait(waited, timeout=timeout))[1] if waited else waited
