"""The port StateStore over a real gRPC channel: answers, errors as themselves, deadlines, streams."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

import grpc
import msgspec
import pytest

from harness_service.adapters.state_client import GrpcStateStore
from state_service.session import Session
from turnfence import records as r
from turnfence.axes import CancelReason, ProcessingStage, RunState
from turnfence.codec import to_message
from turnfence.common.v1 import events_pb2, run_pb2
from turnfence.errors import Reason, TurnfenceError
from turnfence.serving.rpc_edge import ErrorEdge
from turnfence.state.v1 import run_service_pb2, state_pb2

TURN = r.TurnRef("o", "c", "run", 3, "token", 7)


class Answers:
    """What the service does, by method name: a message, an exception, a list to stream, or a coroutine."""

    def __init__(self) -> None:
        self.by_method: dict[str, Any] = {}
        self.by_request: dict[str, Any] = {}  # coroutines that look at the request
        self.seen: list[Any] = []
        self.sessions = 0
        self.break_sessions = 0  # that end after their first message, unanswered
        self.ended = asyncio.Event()

    async def unary(self, method: str, request: Any) -> Any:
        self.seen.append(request)
        if method in self.by_request:
            return await self.by_request[method](request)
        answer = self.by_method[method]
        if isinstance(answer, Exception):
            raise answer
        return await answer() if callable(answer) else answer

    async def step(self, name: str, request: Any) -> Any:
        """The same, as a call in a session."""
        return await self.unary(name.title().replace("_", ""), request)

    async def stream(self, method: str, request: Any) -> AsyncIterator[Any]:
        self.seen.append(request)
        try:
            for item in self.by_method[method]:
                if isinstance(item, Exception):
                    raise item
                yield item
            if method == "WatchEvents" and self.by_method.get("hold"):
                await asyncio.Event().wait()
        finally:
            self.ended.set()


def _handlers(answers: Answers, service: Any, module: Any) -> grpc.GenericRpcHandler:
    methods: dict[str, Any] = {}
    for method in service.methods:
        request_type = getattr(module, method.input_type.name)
        response = getattr(module, method.output_type.name).SerializeToString
        if method.name in ("ReadPayload", "WatchEvents"):

            async def streaming(request: Any, _context: Any, name: str = method.name) -> AsyncIterator[Any]:
                async for item in answers.stream(name, request):
                    yield item

            methods[method.name] = grpc.unary_stream_rpc_method_handler(
                streaming, request_type.FromString, response
            )
        elif method.name == "Session":

            async def session(requests: Any, _context: Any) -> AsyncIterator[Any]:
                answers.sessions += 1
                if answers.break_sessions:
                    answers.break_sessions -= 1
                    await anext(requests)
                    raise TurnfenceError(Reason.STATE_UNAVAILABLE)
                async with aclosing(Session(answers.step, asyncio.Event()).run(requests)) as responses:
                    async for item in responses:
                        yield item

            methods[method.name] = grpc.stream_stream_rpc_method_handler(
                session, request_type.FromString, response
            )
        else:

            async def unary(request: Any, _context: Any, name: str = method.name) -> Any:
                return await answers.unary(name, request)

            methods[method.name] = grpc.unary_unary_rpc_method_handler(
                unary, request_type.FromString, response
            )
    return grpc.method_handlers_generic_handler(service.full_name, methods)


@asynccontextmanager
async def store() -> AsyncIterator[tuple[GrpcStateStore, Answers]]:
    answers = Answers()
    server = grpc.aio.server(interceptors=[ErrorEdge()])
    state: Any = state_pb2.DESCRIPTOR.services_by_name["StateService"]
    runs: Any = run_service_pb2.DESCRIPTOR.services_by_name["RunService"]
    server.add_generic_rpc_handlers(
        (_handlers(answers, state, state_pb2), _handlers(answers, runs, run_service_pb2))
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    client = GrpcStateStore(f"127.0.0.1:{port}")
    try:
        yield client, answers
    finally:
        await client.close()
        await server.stop(0)


async def test_a_record_goes_out_and_its_answer_comes_back() -> None:
    async with store() as (client, answers):
        answers.by_method["RenewLease"] = to_message(
            r.RenewLeaseResponse(lease_until=5_000, cancel=CancelReason.USER_REQUESTED),
            state_pb2.RenewLeaseResponse,
        )
        got = await client.renew_lease(r.RenewLeaseRequest(TURN), timeout=5)
        assert got == r.RenewLeaseResponse(lease_until=5_000, cancel=CancelReason.USER_REQUESTED)
        (sent,) = answers.seen
        assert (sent.turn.version, sent.turn.seen_seq, sent.turn.lease_token) == (3, 7, "token")


@pytest.mark.parametrize(
    "reason",
    [
        Reason.STATE_FENCED,
        Reason.STATE_LOST,
        Reason.CONVERSATION_BUSY,
        Reason.MESSAGE_ID_REUSED,
        Reason.NOT_FOUND,
        Reason.INTERNAL,
    ],
)
async def test_an_error_arrives_as_itself(reason: Reason) -> None:
    async with store() as (client, answers):
        answers.by_method["Flush"] = TurnfenceError(reason, metadata={"held": "4"})
        with pytest.raises(TurnfenceError) as caught:
            await client.flush(r.FlushRequest(TURN, 1), timeout=5)
    assert caught.value.reason is reason
    assert caught.value.metadata == {"held": "4"}


async def test_a_service_that_is_not_there_is_unavailable_at_once() -> None:
    client = GrpcStateStore("127.0.0.1:1")
    try:
        async with asyncio.timeout(10):
            with pytest.raises(TurnfenceError) as caught:
                await client.flush(r.FlushRequest(TURN, 1), timeout=60)
    finally:
        await client.close()
    assert caught.value.reason is Reason.STATE_UNAVAILABLE


async def test_an_answer_that_takes_too_long_is_unavailable() -> None:
    async with store() as (client, answers):

        async def never() -> None:
            await asyncio.Event().wait()

        answers.by_method["OpenNode"] = never
        with pytest.raises(TurnfenceError) as caught:
            await client.open_node(r.OpenNodeRequest(TURN, "t", "n"), timeout=0.1)
    assert caught.value.reason is Reason.STATE_UNAVAILABLE


async def test_a_cancelled_call_stays_cancelled() -> None:
    async with store() as (client, answers):
        begun = asyncio.Event()

        async def never() -> None:
            begun.set()
            await asyncio.Event().wait()

        answers.by_method["Flush"] = never
        task = asyncio.create_task(client.flush(r.FlushRequest(TURN, 1), timeout=30))
        await begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


async def test_a_payload_comes_in_chunks() -> None:
    async with store() as (client, answers):
        answers.by_method["ReadPayload"] = [
            state_pb2.ReadPayloadResponse(chunk=b"a" * 1000, total_bytes=1500),
            state_pb2.ReadPayloadResponse(chunk=b"b" * 500, total_bytes=1500),
        ]
        got = await client.read_payload(r.ReadPayloadRequest(TURN, "t", "e"), timeout=5)
        assert got == b"a" * 1000 + b"b" * 500
        answers.by_method["ReadPayload"] = []
        assert await client.read_payload(r.ReadPayloadRequest(TURN, "t", "e"), timeout=5) == b""


async def test_half_a_payload_is_no_payload() -> None:
    async with store() as (client, answers):
        answers.by_method["ReadPayload"] = [state_pb2.ReadPayloadResponse(chunk=b"a", total_bytes=2)]
        with pytest.raises(TurnfenceError) as caught:
            await client.read_payload(r.ReadPayloadRequest(TURN, "t", "e"), timeout=5)
    assert caught.value.reason is Reason.STATE_UNAVAILABLE


def _watched() -> list[run_service_pb2.WatchEventsResponse]:
    event = r.TurnEvent(1, "run", "c", r.Status(ProcessingStage.ROUTING))
    ended = r.Run("run", run_state=RunState.SUCCESS)
    return [
        run_service_pb2.WatchEventsResponse(event=to_message(event, events_pb2.TurnEvent)),
        run_service_pb2.WatchEventsResponse(ended=to_message(ended, run_pb2.Run)),
    ]


async def test_events_are_watched_until_the_run_has_ended() -> None:
    async with store() as (client, answers):
        answers.by_method["WatchEvents"] = _watched()
        watched = client.watch_events(r.WatchEventsRequest("o", "u", "run"), timeout=5)
        got = [item async for item in watched]
    assert [type(item) for item in got] == [r.TurnEvent, r.Run]


async def test_an_error_ends_a_watch_as_itself() -> None:
    async with store() as (client, answers):
        answers.by_method["WatchEvents"] = [_watched()[0], TurnfenceError(Reason.NOT_FOUND)]
        watched = client.watch_events(r.WatchEventsRequest("o", "u", "run"), timeout=5)
        assert isinstance(await anext(watched), r.TurnEvent)
        with pytest.raises(TurnfenceError) as caught:
            await anext(watched)
    assert caught.value.reason is Reason.NOT_FOUND


async def test_whoever_stops_watching_ends_the_call() -> None:
    async with store() as (client, answers):
        answers.by_method |= {"WatchEvents": _watched()[:1], "hold": True}
        watched: Any = client.watch_events(r.WatchEventsRequest("o", "u", "run"), timeout=30)
        await anext(watched)
        await watched.aclose()
        async with asyncio.timeout(5):
            await answers.ended.wait()


async def test_get_run() -> None:
    async with store() as (client, answers):
        run = r.Run("run", run_state=RunState.RUNNING, version=4)
        answers.by_method["GetRun"] = run_service_pb2.GetRunResponse(run=to_message(run, run_pb2.Run))
        assert await client.get_run(r.GetRunRequest("o", "u", "run"), timeout=5) == run


# --- the session ----------------------------------------------------------------------------------


async def test_many_calls_share_one_stream_and_each_gets_its_own_answer() -> None:
    async with store() as (client, answers):

        async def echo(request: Any) -> Any:
            return state_pb2.FlushResponse(data_seq=request.sequence)

        answers.by_request["Flush"] = echo
        turns = [msgspec.structs.replace(TURN, run_id=f"run-{n % 7}") for n in range(200)]
        got = await asyncio.gather(
            *(client.flush(r.FlushRequest(turn, n + 1), timeout=5) for n, turn in enumerate(turns))
        )
        assert [answer.data_seq for answer in got] == list(range(1, 201))
        assert answers.sessions == 1


async def test_the_calls_of_one_run_are_served_in_order_and_a_heartbeat_passes_them() -> None:
    async with store() as (client, answers):
        first, second = asyncio.Event(), asyncio.Event()
        served: list[int] = []

        async def gated(request: Any) -> Any:
            await (first if request.sequence == 1 else second).wait()
            served.append(request.sequence)
            return state_pb2.FlushResponse(data_seq=request.sequence)

        answers.by_request["Flush"] = gated
        answers.by_method["RenewLease"] = state_pb2.RenewLeaseResponse()
        flushes = [asyncio.create_task(client.flush(r.FlushRequest(TURN, n), timeout=5)) for n in (1, 2)]
        second.set()
        await client.renew_lease(r.RenewLeaseRequest(TURN), timeout=5)
        assert served == []
        first.set()
        await asyncio.gather(*flushes)
        assert served == [1, 2]


async def test_a_call_whose_stream_broke_is_sent_again_under_its_identity() -> None:
    async with store() as (client, answers):
        answers.break_sessions = 1
        answers.by_method["Flush"] = state_pb2.FlushResponse(data_seq=4)
        got = await client.flush(r.FlushRequest(TURN, 1), timeout=5)
        assert got.data_seq == 4
        assert answers.sessions == 2


async def test_a_call_that_two_streams_lost_is_unavailable_and_the_next_one_is_served() -> None:
    async with store() as (client, answers):
        answers.break_sessions = 2
        answers.by_method["Flush"] = state_pb2.FlushResponse(data_seq=4)
        with pytest.raises(TurnfenceError) as caught:
            await client.flush(r.FlushRequest(TURN, 1), timeout=5)
        assert caught.value.reason is Reason.STATE_UNAVAILABLE
        assert (await client.flush(r.FlushRequest(TURN, 1), timeout=5)).data_seq == 4
