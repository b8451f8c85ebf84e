"""The write path of all turns of this process on one stream to the state service (speed.md).

What is called within one tick of the loop shares a message. When the stream breaks, every call that waits is
sent once more, under its own identity, on a new one; a call that two streams have lost is STATE_UNAVAILABLE.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Any

import grpc
from google.protobuf.message import Message

from turnfence.errors import Reason, TurnfenceError
from turnfence.rpc_errors import from_rpc_error, from_status
from turnfence.state.v1 import state_pb2 as pb

REQUEST_BYTES = 1024 * 1024  # a message is closed above this; one call may be larger
STREAMS_PER_CALL = 2


class _Waiting:
    """A call that was not answered yet."""

    def __init__(self, call: pb.Call) -> None:
        self.call = call
        self.answer: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self.streams = 0  # that it was sent on


class StateSession:
    """``open_stream`` is the stub's ``Session``. The stream is opened by the first call, and again by the
    first one after it broke."""

    def __init__(self, open_stream: Callable[[], Any]) -> None:
        self._open_stream = open_stream
        self._ids = itertools.count(1)
        self._waiting: dict[int, _Waiting] = {}
        self._unsent: list[_Waiting] = []
        self._wake = asyncio.Event()
        self._pump: asyncio.Task[None] | None = None

    async def call(self, name: str, request: Message, timeout: float) -> Message:
        """The response to one request of the write path, by its field's name. Raises what the service
        answers, and STATE_UNAVAILABLE when it does not answer within ``timeout`` seconds."""
        call = pb.Call(id=next(self._ids))
        getattr(call, name).CopyFrom(request)
        call.timeout.FromMilliseconds(max(1, round(timeout * 1000)))
        waiting = _Waiting(call)
        self._waiting[call.id] = waiting
        self._send(waiting)
        try:
            async with asyncio.timeout(timeout):
                return await waiting.answer
        except TimeoutError as error:
            detail = f"{name}: no answer within {timeout:g} s"
            raise TurnfenceError(Reason.STATE_UNAVAILABLE, detail=detail) from error
        finally:
            self._waiting.pop(call.id, None)

    async def close(self) -> None:
        pump, self._pump = self._pump, None
        if pump is not None:
            pump.cancel()
            await asyncio.wait({pump})

    def _send(self, waiting: _Waiting) -> None:
        self._unsent.append(waiting)
        self._wake.set()
        if self._pump is None or self._pump.done():
            self._pump = asyncio.create_task(self._run())

    async def _run(self) -> None:
        """Streams, one after the other, as long as anything is to be sent."""
        while self._unsent:
            await self._one_stream()

    async def _one_stream(self) -> None:
        """From the first message to the end of the stream, whoever ends it."""
        stream = self._open_stream()
        reading = asyncio.create_task(self._read(stream))
        reading.add_done_callback(lambda _: self._wake.set())
        lost: TurnfenceError | None = None
        try:
            while not reading.done():
                self._wake.clear()
                while self._unsent and not reading.done():
                    await stream.write(self._message())
                await self._wake.wait()
            await reading
        except grpc.aio.AioRpcError as error:
            lost = from_rpc_error(error)
        except (asyncio.InvalidStateError, grpc.aio.UsageError):  # written to a stream that has just ended
            lost = None
        finally:
            stream.cancel()
            reading.cancel()
            await asyncio.wait({reading})
            self._again(lost or TurnfenceError(Reason.STATE_UNAVAILABLE, detail="the session ended"))

    def _message(self) -> pb.SessionRequest:
        size, count = 0, 0
        for waiting in self._unsent:
            size, count = size + waiting.call.ByteSize(), count + 1
            waiting.streams += 1
            if size > REQUEST_BYTES:
                break
        sent, self._unsent = self._unsent[:count], self._unsent[count:]
        return pb.SessionRequest(calls=[waiting.call for waiting in sent if not waiting.answer.done()])

    async def _read(self, stream: Any) -> None:
        async for response in stream:
            for reply in response.replies:
                waiting = self._waiting.get(reply.id)
                if waiting is not None and not waiting.answer.done():
                    _settle(waiting.answer, reply)

    def _again(self, lost: TurnfenceError) -> None:
        """What waits is sent on the next stream, unless it had its two."""
        unsent = set(map(id, self._unsent))
        for waiting in list(self._waiting.values()):
            if waiting.answer.done() or id(waiting) in unsent:
                continue
            if waiting.streams >= STREAMS_PER_CALL:
                waiting.answer.set_exception(lost)
            else:
                self._unsent.append(waiting)


def _settle(answer: asyncio.Future[Message], reply: pb.Reply) -> None:
    name = reply.WhichOneof("response")
    if name == "error":
        known = from_status(reply.error)
        answer.set_exception(known or TurnfenceError(Reason.INTERNAL, detail=reply.error.message))
    elif name is None:
        answer.set_exception(TurnfenceError(Reason.INTERNAL, detail="an empty reply"))
    else:
        answer.set_result(getattr(reply, name))
