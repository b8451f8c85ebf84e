"""Session: the write path of many turns, multiplexed on one stream for each harness process (speed.md).

A unary call costs a stream of its own; here what is ready in one tick of the loop shares a message. The calls
of one run are served in the order of arrival, a heartbeat ahead of all; between runs there is no order.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable

from google.protobuf.message import Message

from turnfence.errors import Reason, TurnfenceError, invalid
from turnfence.rpc_errors import to_status
from turnfence.serving.rpc_edge import as_answer
from turnfence.state.v1 import state_pb2 as pb

Step = Callable[[str, Message], Awaitable[Message]]  # name of the request's field, request → response

CALLS_IN_FLIGHT = 1024  # of one stream; above it nothing more is read, and the sender feels it
CALL_SECONDS = 60.0  # of a call that names no time limit
RESPONSE_BYTES = 1024 * 1024  # a message is closed above this; one reply may be larger

HEARTBEAT = "renew_lease"


class Session:
    """One stream. ``closing``, once set, ends it: what was read is still answered."""

    def __init__(self, step: Step, closing: asyncio.Event) -> None:
        self._step = step
        self._closing = closing
        self._replies: list[pb.Reply] = []
        self._ready = asyncio.Event()
        self._places = asyncio.Semaphore(CALLS_IN_FLIGHT)
        self._calls: set[asyncio.Task[None]] = set()
        self._last_of_run: dict[str, asyncio.Task[None]] = {}

    async def run(self, requests: AsyncIterator[pb.SessionRequest]) -> AsyncGenerator[pb.SessionResponse]:
        """Answers in any order, until the sender has no more and all is answered. Who leaves early cancels
        what is under way; the stores finish, or undo, on their own."""
        reading = asyncio.create_task(self._read(requests))
        reading.add_done_callback(lambda _: self._ready.set())
        stopping = asyncio.create_task(self._stop(reading))
        try:
            while self._replies or self._calls or not reading.done():
                await self._ready.wait()
                self._ready.clear()
                while self._replies:
                    yield self._response()
        finally:
            left = {reading, stopping, *self._calls}
            for task in left:
                task.cancel()
            await asyncio.wait(left)

    async def _stop(self, reading: asyncio.Task[None]) -> None:
        await self._closing.wait()
        reading.cancel()

    def _response(self) -> pb.SessionResponse:
        size, count = 0, 0
        for reply in self._replies:
            size, count = size + reply.ByteSize(), count + 1
            if size > RESPONSE_BYTES:
                break
        replies, self._replies = self._replies[:count], self._replies[count:]
        return pb.SessionResponse(replies=replies)

    async def _read(self, requests: AsyncIterator[pb.SessionRequest]) -> None:
        async for request in requests:
            for call in request.calls:
                await self._places.acquire()
                self._begin(call)

    def _begin(self, call: pb.Call) -> None:
        name = call.WhichOneof("request") or ""
        run_id = _run_of(call, name)
        queued = bool(run_id) and name != HEARTBEAT
        task = asyncio.create_task(self._serve(call, name, self._last_of_run.get(run_id) if queued else None))
        self._calls.add(task)
        if queued:
            self._last_of_run[run_id] = task
        task.add_done_callback(lambda done: self._end(done, run_id))

    def _end(self, task: asyncio.Task[None], run_id: str) -> None:
        self._calls.discard(task)
        if self._last_of_run.get(run_id) is task:
            del self._last_of_run[run_id]
        self._places.release()
        self._ready.set()

    async def _serve(self, call: pb.Call, name: str, before: asyncio.Task[None] | None) -> None:
        seconds = call.timeout.ToTimedelta().total_seconds() if call.HasField("timeout") else CALL_SECONDS
        try:
            async with asyncio.timeout(min(seconds, CALL_SECONDS)):
                if before is not None:
                    await asyncio.wait({before})
                reply = pb.Reply(id=call.id)
                getattr(reply, _named(name)).CopyFrom(await self._step(name, getattr(call, name)))
        except TimeoutError:
            late = TurnfenceError(Reason.STATE_UNAVAILABLE, detail=f"no answer within {seconds:g} s")
            reply = pb.Reply(id=call.id, error=to_status(late))
        except Exception as error:  # noqa: BLE001 - the edge of this call: what it is becomes its status
            reply = pb.Reply(id=call.id, error=to_status(as_answer(error)))
        self._replies.append(reply)


def _named(name: str) -> str:
    if not name:
        raise invalid("calls.request", "must be set")
    return name


def _run_of(call: pb.Call, name: str) -> str:
    request = getattr(call, name) if name else None
    turn = getattr(request, "turn", request)
    return str(getattr(turn, "run_id", ""))
