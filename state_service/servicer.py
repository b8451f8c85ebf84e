"""The RPCs: check, call, map back. Every line of behaviour is in ``conversation``; every error becomes
a status in ``turnfence.serving.rpc_edge``.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import aclosing, contextmanager
from typing import Any, TypeVar, cast

import msgspec
import structlog
from google.protobuf.message import Message

from state_service import wire
from state_service.conversation import begin, erase, history, nodes, persist, runs, writes
from state_service.conversation.stores import Stores
from state_service.ports import StoreCorrupt, StoreUnavailable
from state_service.session import Session
from turnfence import records as r
from turnfence.codec import to_message
from turnfence.common.v1 import events_pb2, run_pb2
from turnfence.errors import Reason, TurnfenceError
from turnfence.state.v1 import (
    history_service_pb2,
    history_service_pb2_grpc,
    run_service_pb2,
    run_service_pb2_grpc,
    state_pb2,
    state_pb2_grpc,
)

Asked = TypeVar("Asked", bound=msgspec.Struct)
Answered = TypeVar("Answered", bound=msgspec.Struct)
Answer = TypeVar("Answer", bound=Message)
Step = Callable[[Stores, Asked], Awaitable[Answered]]


@contextmanager
def contract_words() -> Iterator[None]:
    """What the stores say becomes what the contract says."""
    try:
        yield
    except StoreUnavailable as error:
        raise TurnfenceError(Reason.STATE_UNAVAILABLE, detail=str(error)) from error
    except StoreCorrupt as error:
        raise TurnfenceError(Reason.STATE_WRITE_FAILED, detail=str(error)) from error


def checked(request: Message, kind: type[Asked]) -> Asked:
    """The request's record; from here on its run and organisation are on every log line of the call."""
    record = wire.checked(request, kind)
    turn = getattr(record, "turn", record)
    structlog.contextvars.bind_contextvars(
        run_id=getattr(turn, "run_id", ""), organ_id=getattr(turn, "organ_id", "")
    )
    return record


async def answer(
    stores: Stores,
    request: Message,
    kind: type[Asked],
    step: Step[Asked, Answered],
    response: type[Answer],
) -> Answer:
    """One unary call: check, step, map back."""
    record = checked(request, kind)
    with contract_words():
        return to_message(await step(stores, record), response)


# The unary steps of the write path, by their names in a Session: its record, what does it, its response.
WRITE_PATH: Mapping[str, tuple[type[Any], Step[Any, Any], type[Any]]] = {
    "begin_turn": (r.BeginTurnRequest, begin.begin_turn, state_pb2.BeginTurnResponse),
    "open_node": (r.OpenNodeRequest, nodes.open_node, state_pb2.OpenNodeResponse),
    "flush": (r.FlushRequest, persist.flush, state_pb2.FlushResponse),
    "register_write": (r.RegisterWriteRequest, writes.register_write, state_pb2.RegisterWriteResponse),
    "settle_calls": (r.SettleCallsRequest, writes.settle_calls, state_pb2.SettleCallsResponse),
    "persist_turn": (r.PersistTurnRequest, persist.persist_turn, state_pb2.PersistTurnResponse),
    "renew_lease": (r.RenewLeaseRequest, persist.renew_lease, state_pb2.RenewLeaseResponse),
    "abandon_turn": (r.AbandonTurnRequest, persist.abandon_turn, state_pb2.AbandonTurnResponse),
}


class StateServicer(state_pb2_grpc.StateServiceServicer):
    """The write path of one turn. ``closing``, once set, ends the sessions."""

    def __init__(self, stores: Stores, closing: asyncio.Event) -> None:
        self._stores = stores
        self._closing = closing

    async def _answer(self, name: str, request: Message) -> Any:
        kind, step, response = WRITE_PATH[name]
        return await answer(self._stores, request, kind, step, response)

    async def BeginTurn(
        self, request: state_pb2.BeginTurnRequest, context: object
    ) -> state_pb2.BeginTurnResponse:
        return cast("state_pb2.BeginTurnResponse", await self._answer("begin_turn", request))

    async def OpenNode(
        self, request: state_pb2.OpenNodeRequest, context: object
    ) -> state_pb2.OpenNodeResponse:
        return cast("state_pb2.OpenNodeResponse", await self._answer("open_node", request))

    async def Flush(self, request: state_pb2.FlushRequest, context: object) -> state_pb2.FlushResponse:
        return cast("state_pb2.FlushResponse", await self._answer("flush", request))

    async def RegisterWrite(
        self, request: state_pb2.RegisterWriteRequest, context: object
    ) -> state_pb2.RegisterWriteResponse:
        return cast("state_pb2.RegisterWriteResponse", await self._answer("register_write", request))

    async def SettleCalls(
        self, request: state_pb2.SettleCallsRequest, context: object
    ) -> state_pb2.SettleCallsResponse:
        return cast("state_pb2.SettleCallsResponse", await self._answer("settle_calls", request))

    async def PersistTurn(
        self, request: state_pb2.PersistTurnRequest, context: object
    ) -> state_pb2.PersistTurnResponse:
        return cast("state_pb2.PersistTurnResponse", await self._answer("persist_turn", request))

    async def RenewLease(
        self, request: state_pb2.RenewLeaseRequest, context: object
    ) -> state_pb2.RenewLeaseResponse:
        return cast("state_pb2.RenewLeaseResponse", await self._answer("renew_lease", request))

    async def AbandonTurn(
        self, request: state_pb2.AbandonTurnRequest, context: object
    ) -> state_pb2.AbandonTurnResponse:
        return cast("state_pb2.AbandonTurnResponse", await self._answer("abandon_turn", request))

    async def ReadPayload(
        self, request: state_pb2.ReadPayloadRequest, context: object
    ) -> AsyncIterator[state_pb2.ReadPayloadResponse]:
        record = checked(request, r.ReadPayloadRequest)
        with contract_words():
            data = await nodes.read_payload(self._stores, record)
        for start in range(0, max(len(data), 1), wire.CHUNK_BYTES):
            yield state_pb2.ReadPayloadResponse(
                chunk=data[start : start + wire.CHUNK_BYTES], total_bytes=len(data)
            )

    async def Session(
        self, request_iterator: AsyncIterator[state_pb2.SessionRequest], context: object
    ) -> AsyncIterator[state_pb2.SessionResponse]:
        session = Session(self._answer, self._closing)
        async with aclosing(session.run(request_iterator)) as responses:
            async for response in responses:
                yield response


class RunServicer(run_service_pb2_grpc.RunServiceServicer):
    """Runs, wherever they execute."""

    def __init__(self, stores: Stores) -> None:
        self._stores = stores

    async def GetRun(
        self, request: run_service_pb2.GetRunRequest, context: object
    ) -> run_service_pb2.GetRunResponse:
        return await answer(self._stores, request, r.GetRunRequest, _get_run, run_service_pb2.GetRunResponse)

    async def WatchEvents(
        self, request: run_service_pb2.WatchEventsRequest, context: object
    ) -> AsyncIterator[run_service_pb2.WatchEventsResponse]:
        record = checked(request, r.WatchEventsRequest)
        with contract_words():
            async with aclosing(runs.watch_events(self._stores, record)) as items:
                async for item in items:
                    yield _watched(item)

    async def RequestCancel(
        self, request: run_service_pb2.RequestCancelRequest, context: object
    ) -> run_service_pb2.RequestCancelResponse:
        return await answer(
            self._stores,
            request,
            r.RequestCancelRequest,
            history.request_cancel,
            run_service_pb2.RequestCancelResponse,
        )

    async def ListRuns(
        self, request: run_service_pb2.ListRunsRequest, context: object
    ) -> run_service_pb2.ListRunsResponse:
        return await answer(
            self._stores,
            request,
            r.ListRunsRequest,
            history.list_runs,
            run_service_pb2.ListRunsResponse,
        )

    async def ListTraceEvents(
        self, request: run_service_pb2.ListTraceEventsRequest, context: object
    ) -> run_service_pb2.ListTraceEventsResponse:
        return await answer(
            self._stores,
            request,
            r.ListTraceEventsRequest,
            history.list_trace_events,
            run_service_pb2.ListTraceEventsResponse,
        )

    async def ListEvidence(
        self, request: run_service_pb2.ListEvidenceRequest, context: object
    ) -> run_service_pb2.ListEvidenceResponse:
        return await answer(
            self._stores,
            request,
            r.ListEvidenceRequest,
            history.list_evidence,
            run_service_pb2.ListEvidenceResponse,
        )

    async def RecordStreamEnd(
        self, request: run_service_pb2.RecordStreamEndRequest, context: object
    ) -> run_service_pb2.RecordStreamEndResponse:
        return await answer(
            self._stores,
            request,
            r.RecordStreamEndRequest,
            history.record_stream_end,
            run_service_pb2.RecordStreamEndResponse,
        )


class HistoryServicer(history_service_pb2_grpc.HistoryServiceServicer):
    """The read side of conversations, and their deletion."""

    def __init__(self, stores: Stores) -> None:
        self._stores = stores

    async def GetConversation(
        self, request: history_service_pb2.GetConversationRequest, context: object
    ) -> history_service_pb2.GetConversationResponse:
        return await answer(
            self._stores,
            request,
            r.GetConversationRequest,
            history.get_conversation,
            history_service_pb2.GetConversationResponse,
        )

    async def ListConversations(
        self, request: history_service_pb2.ListConversationsRequest, context: object
    ) -> history_service_pb2.ListConversationsResponse:
        return await answer(
            self._stores,
            request,
            r.ListConversationsRequest,
            history.list_conversations,
            history_service_pb2.ListConversationsResponse,
        )

    async def ListMessages(
        self, request: history_service_pb2.ListMessagesRequest, context: object
    ) -> history_service_pb2.ListMessagesResponse:
        return await answer(
            self._stores,
            request,
            r.ListMessagesRequest,
            history.list_messages,
            history_service_pb2.ListMessagesResponse,
        )

    async def GetTask(
        self, request: history_service_pb2.GetTaskRequest, context: object
    ) -> history_service_pb2.GetTaskResponse:
        return await answer(
            self._stores,
            request,
            r.GetTaskRequest,
            history.get_task,
            history_service_pb2.GetTaskResponse,
        )

    async def ListTasks(
        self, request: history_service_pb2.ListTasksRequest, context: object
    ) -> history_service_pb2.ListTasksResponse:
        return await answer(
            self._stores,
            request,
            r.ListTasksRequest,
            history.list_tasks,
            history_service_pb2.ListTasksResponse,
        )

    async def DeleteConversation(
        self, request: history_service_pb2.DeleteConversationRequest, context: object
    ) -> history_service_pb2.DeleteConversationResponse:
        return await answer(
            self._stores,
            request,
            r.DeleteConversationRequest,
            erase.delete_conversation,
            history_service_pb2.DeleteConversationResponse,
        )


async def _get_run(stores: Stores, request: r.GetRunRequest) -> r.GetRunResponse:
    return r.GetRunResponse(run=await runs.get_run(stores, request))


def _watched(item: r.TurnEvent | r.Run) -> run_service_pb2.WatchEventsResponse:
    if isinstance(item, r.TurnEvent):
        return run_service_pb2.WatchEventsResponse(event=to_message(item, events_pb2.TurnEvent))
    return run_service_pb2.WatchEventsResponse(ended=to_message(item, run_pb2.Run))
