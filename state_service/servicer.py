"""The RPCs: check, call, map back. Every line of behaviour is in ``conversation``; every error becomes
a status in ``turnfence.serving.rpc_edge``.

What this version does not serve answers UNIMPLEMENTED (NOT_SERVED), and nothing else does.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable
from typing import Any, NoReturn

import structlog

from state_service import wire
from state_service.conversation import begin, nodes, persist, runs, writes
from state_service.conversation.stores import Stores
from state_service.ports import StoreCorrupt, StoreUnavailable
from turnfence import records as r
from turnfence.codec import to_message
from turnfence.common.v1 import events_pb2, run_pb2
from turnfence.errors import Reason, TurnfenceError
from turnfence.state.v1 import (
    history_service_pb2_grpc,
    run_service_pb2,
    run_service_pb2_grpc,
    state_pb2,
    state_pb2_grpc,
)


async def stored(answer: Awaitable[Any]) -> Any:
    """A step's answer, with what its stores say in the contract's words."""
    try:
        return await answer
    except StoreUnavailable as error:
        raise TurnfenceError(Reason.STATE_UNAVAILABLE, detail=str(error)) from error
    except StoreCorrupt as error:
        raise TurnfenceError(Reason.STATE_WRITE_FAILED, detail=str(error)) from error


def _bind(record: Any) -> None:
    """Whose call this is, on every log line of it."""
    turn = getattr(record, "turn", record)
    structlog.contextvars.bind_contextvars(
        run_id=getattr(turn, "run_id", ""), organ_id=getattr(turn, "organ_id", "")
    )


class StateServicer(state_pb2_grpc.StateServiceServicer):
    """The write path of one turn."""

    def __init__(self, stores: Stores) -> None:
        self._stores = stores

    async def _unary(self, request: Any, kind: type[Any], step: Any, response: type[Any]) -> Any:
        record = wire.checked(request, kind)
        _bind(record)
        return to_message(await stored(step(self._stores, record)), response)

    async def BeginTurn(self, request: Any, context: Any) -> state_pb2.BeginTurnResponse:
        wire.check_text(request.input.text)
        return await self._unary(
            request, r.BeginTurnRequest, begin.begin_turn, state_pb2.BeginTurnResponse
        )

    async def OpenNode(self, request: Any, context: Any) -> state_pb2.OpenNodeResponse:
        return await self._unary(request, r.OpenNodeRequest, nodes.open_node, state_pb2.OpenNodeResponse)

    async def Flush(self, request: Any, context: Any) -> state_pb2.FlushResponse:
        wire.check_sequence(request.sequence)
        return await self._unary(request, r.FlushRequest, persist.flush, state_pb2.FlushResponse)

    async def RegisterWrite(self, request: Any, context: Any) -> state_pb2.RegisterWriteResponse:
        return await self._unary(
            request, r.RegisterWriteRequest, writes.register_write, state_pb2.RegisterWriteResponse
        )

    async def SettleCalls(self, request: Any, context: Any) -> state_pb2.SettleCallsResponse:
        return await self._unary(
            request, r.SettleCallsRequest, writes.settle_calls, state_pb2.SettleCallsResponse
        )

    async def ReadPayload(
        self, request: Any, context: Any
    ) -> AsyncIterator[state_pb2.ReadPayloadResponse]:
        record = wire.checked(request, r.ReadPayloadRequest)
        _bind(record)
        data = await stored(nodes.read_payload(self._stores, record))
        for start in range(0, max(len(data), 1), wire.CHUNK_BYTES):
            yield state_pb2.ReadPayloadResponse(
                chunk=data[start : start + wire.CHUNK_BYTES], total_bytes=len(data)
            )

    async def PersistTurn(self, request: Any, context: Any) -> state_pb2.PersistTurnResponse:
        wire.check_sequence(request.sequence)
        return await self._unary(
            request, r.PersistTurnRequest, persist.persist_turn, state_pb2.PersistTurnResponse
        )

    async def RenewLease(self, request: Any, context: Any) -> state_pb2.RenewLeaseResponse:
        return await self._unary(
            request, r.RenewLeaseRequest, persist.renew_lease, state_pb2.RenewLeaseResponse
        )

    async def AbandonTurn(self, request: Any, context: Any) -> state_pb2.AbandonTurnResponse:
        return await self._unary(
            request, r.AbandonTurnRequest, persist.abandon_turn, state_pb2.AbandonTurnResponse
        )

    async def Session(self, request_iterator: Any, context: Any) -> AsyncIterator[Any]:
        _not_served("Session")
        yield  # a generator, as the contract streams


class RunServicer(run_service_pb2_grpc.RunServiceServicer):
    """Runs, wherever they execute."""

    def __init__(self, stores: Stores) -> None:
        self._stores = stores

    async def GetRun(self, request: Any, context: Any) -> run_service_pb2.GetRunResponse:
        record = wire.checked(request, r.GetRunRequest)
        _bind(record)
        run = await stored(runs.get_run(self._stores, record))
        return to_message(r.GetRunResponse(run=run), run_service_pb2.GetRunResponse)

    async def WatchEvents(
        self, request: Any, context: Any
    ) -> AsyncIterator[run_service_pb2.WatchEventsResponse]:
        record = wire.checked(request, r.WatchEventsRequest)
        _bind(record)
        items = runs.watch_events(self._stores, record).__aiter__()
        while True:
            try:
                item = await stored(items.__anext__())
            except StopAsyncIteration:
                return
            yield _watched(item)

    async def RequestCancel(self, request: Any, context: Any) -> Any:
        _not_served("RequestCancel")

    async def ListRuns(self, request: Any, context: Any) -> Any:
        _not_served("ListRuns")

    async def ListTraceEvents(self, request: Any, context: Any) -> Any:
        _not_served("ListTraceEvents")

    async def ListEvidence(self, request: Any, context: Any) -> Any:
        _not_served("ListEvidence")

    async def RecordStreamEnd(self, request: Any, context: Any) -> Any:
        _not_served("RecordStreamEnd")


class HistoryServicer(history_service_pb2_grpc.HistoryServiceServicer):
    """The read side of conversations."""

    async def GetConversation(self, request: Any, context: Any) -> Any:
        _not_served("GetConversation")

    async def ListConversations(self, request: Any, context: Any) -> Any:
        _not_served("ListConversations")

    async def ListMessages(self, request: Any, context: Any) -> Any:
        _not_served("ListMessages")

    async def GetTask(self, request: Any, context: Any) -> Any:
        _not_served("GetTask")

    async def ListTasks(self, request: Any, context: Any) -> Any:
        _not_served("ListTasks")

    async def DeleteConversation(self, request: Any, context: Any) -> Any:
        _not_served("DeleteConversation")


def _not_served(rpc: str) -> NoReturn:
    raise TurnfenceError(Reason.NOT_SERVED, metadata={"rpc": rpc})


def _watched(item: r.TurnEvent | r.Run) -> run_service_pb2.WatchEventsResponse:
    if isinstance(item, r.TurnEvent):
        return run_service_pb2.WatchEventsResponse(event=to_message(item, events_pb2.TurnEvent))
    return run_service_pb2.WatchEventsResponse(ended=to_message(item, run_pb2.Run))
