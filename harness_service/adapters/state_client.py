"""The state service over gRPC, as the port ``StateStore`` promises it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable
from typing import Any, TypeVar

import grpc
import msgspec
from google.protobuf.message import Message

from harness_service.adapters.state_session import StateSession
from turnfence import records as r
from turnfence.codec import from_message, to_message
from turnfence.errors import Reason, TurnfenceError
from turnfence.rpc_errors import from_rpc_error
from turnfence.state.v1 import run_service_pb2, run_service_pb2_grpc, state_pb2, state_pb2_grpc

R = TypeVar("R", bound=msgspec.Struct)

_CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", 16 * 1024 * 1024),  # a snapshot with all that is kept of a task
    ("grpc.max_send_message_length", 16 * 1024 * 1024),
    # A state service that was frozen or cut off is noticed between calls too.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 10_000),
    # After a restart of the state service the next turn should not wait for a long back-off.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 500),
)


class GrpcStateStore:
    """One channel to the state service, and one session on it for the write path. Every call has its deadline
    and none waits for a connection: what cannot be reached is STATE_UNAVAILABLE at once, and the caller
    decides whether to repeat."""

    def __init__(self, target: str) -> None:
        self._channel = grpc.aio.insecure_channel(target, options=_CHANNEL_OPTIONS)
        self._state = state_pb2_grpc.StateServiceStub(self._channel)
        self._session = StateSession(self._state.Session)
        self._runs = run_service_pb2_grpc.RunServiceStub(self._channel)

    async def close(self) -> None:
        await self._session.close()
        await self._channel.close()

    async def begin_turn(self, request: r.BeginTurnRequest, *, timeout: float) -> r.BeginTurnResponse:
        message = to_message(request, state_pb2.BeginTurnRequest)
        return from_message(await self._session.call("begin_turn", message, timeout), r.BeginTurnResponse)

    async def open_node(self, request: r.OpenNodeRequest, *, timeout: float) -> r.OpenNodeResponse:
        message = to_message(request, state_pb2.OpenNodeRequest)
        return from_message(await self._session.call("open_node", message, timeout), r.OpenNodeResponse)

    async def flush(self, request: r.FlushRequest, *, timeout: float) -> r.FlushResponse:
        message = to_message(request, state_pb2.FlushRequest)
        return from_message(await self._session.call("flush", message, timeout), r.FlushResponse)

    async def register_write(
        self, request: r.RegisterWriteRequest, *, timeout: float
    ) -> r.RegisterWriteResponse:
        message = to_message(request, state_pb2.RegisterWriteRequest)
        return from_message(
            await self._session.call("register_write", message, timeout), r.RegisterWriteResponse
        )

    async def settle_calls(self, request: r.SettleCallsRequest, *, timeout: float) -> r.SettleCallsResponse:
        message = to_message(request, state_pb2.SettleCallsRequest)
        return from_message(await self._session.call("settle_calls", message, timeout), r.SettleCallsResponse)

    async def read_payload(self, request: r.ReadPayloadRequest, *, timeout: float) -> bytes:
        """The whole payload. STATE_UNAVAILABLE when the stream ended before all of it had come."""
        call = self._state.ReadPayload(to_message(request, state_pb2.ReadPayloadRequest), timeout=timeout)
        chunks: list[bytes] = []
        total = 0
        async for response in _responses(call):
            chunks.append(response.chunk)
            total = response.total_bytes
        payload = b"".join(chunks)
        if len(payload) != total:
            raise TurnfenceError(
                Reason.STATE_UNAVAILABLE, detail=f"payload: {len(payload)} bytes of {total} came"
            )
        return payload

    async def persist_turn(self, request: r.PersistTurnRequest, *, timeout: float) -> r.PersistTurnResponse:
        message = to_message(request, state_pb2.PersistTurnRequest)
        return from_message(await self._session.call("persist_turn", message, timeout), r.PersistTurnResponse)

    async def renew_lease(self, request: r.RenewLeaseRequest, *, timeout: float) -> r.RenewLeaseResponse:
        message = to_message(request, state_pb2.RenewLeaseRequest)
        return from_message(await self._session.call("renew_lease", message, timeout), r.RenewLeaseResponse)

    async def abandon_turn(self, request: r.AbandonTurnRequest, *, timeout: float) -> r.AbandonTurnResponse:
        message = to_message(request, state_pb2.AbandonTurnRequest)
        return from_message(await self._session.call("abandon_turn", message, timeout), r.AbandonTurnResponse)

    async def get_run(self, request: r.GetRunRequest, *, timeout: float) -> r.Run:
        call = self._runs.GetRun(to_message(request, run_service_pb2.GetRunRequest), timeout=timeout)
        return (await _answer(call, r.GetRunResponse)).run

    async def watch_events(
        self, request: r.WatchEventsRequest, *, timeout: float
    ) -> AsyncIterator[r.TurnEvent | r.Run]:
        call = self._runs.WatchEvents(
            to_message(request, run_service_pb2.WatchEventsRequest), timeout=timeout
        )
        async for response in _responses(call):
            if response.WhichOneof("item") == "event":
                yield from_message(response.event, r.TurnEvent)
            elif response.WhichOneof("item") == "ended":
                yield from_message(response.ended, r.Run)


async def _answer(call: Awaitable[Message], kind: type[R]) -> R:
    try:
        message = await call
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error) from error
    return from_message(message, kind)


async def _responses(call: Any) -> AsyncIterator[Any]:
    """What a streaming call answers. Whoever stops reading early ends the call, too: leaving the loop alone
    would not."""
    try:
        async for response in call:
            yield response
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error) from error
    finally:
        call.cancel()
