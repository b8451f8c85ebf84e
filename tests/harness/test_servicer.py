"""HarnessService on a real gRPC server and a loopback socket, over a turn that the test scripts."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, cast

import grpc
import pytest
import structlog
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2
from grpc_status import rpc_status

from harness_service.core.catalogue import Agent, Catalogue
from harness_service.live_runs import LiveRuns
from harness_service.ports import OfferedTool, StateStore, ToolProvider
from harness_service.server import running
from harness_service.servicer import HarnessServicer
from harness_service.settings import LimitSettings, Settings
from harness_service.turn_types import Turn, TurnChannel, TurnRequest
from turnfence import records as r
from turnfence.axes import (
    CancelReason,
    FailureReason,
    ProcessingStage,
    ReleaseOutcome,
    RunState,
    TerminationReason,
    TurnStatus,
)
from turnfence.common.v1 import axes_pb2, events_pb2, run_pb2
from turnfence.errors import Reason, TurnfenceError
from turnfence.harness.v1 import harness_pb2 as pb
from turnfence.harness.v1 import harness_pb2_grpc
from turnfence.rpc_errors import from_rpc_error
from turnfence.serving import logs
from turnfence.serving.listening import CannotListen, announce, check_address

CANARY = "canary-s3cret"
CATALOGUE = Catalogue(agents={"ops": Agent("ops", title="Ops")}, skills={}, tools={}, mcp_servers={})
PRINCIPAL = run_pb2.Principal(organ_id="o", user_id="u")

Story = Turn


class SystemClock:
    def now_ms(self) -> int:
        return 1_700_000_000_000

    def monotonic(self) -> float:
        return 0.0


class OneRun:
    """A state store that knows one run, or raises."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.asked: list[tuple[r.GetRunRequest, float]] = []

    async def get_run(self, request: r.GetRunRequest, *, timeout: float) -> r.Run:
        self.asked.append((request, timeout))
        if self.error is not None:
            raise self.error
        return r.Run(
            request.run_id, run_state=RunState.SUCCESS, release_outcome=ReleaseOutcome.FALLBACK, version=3
        )


class NoTools:
    """A tool provider whose servers are all down."""

    async def schemas(self) -> Mapping[str, OfferedTool]:
        return {}


class Service:
    """A served harness, as its caller and as its owner see it."""

    def __init__(
        self, address: str, channel: grpc.aio.Channel, runs: LiveRuns, servicer: HarnessServicer
    ) -> None:
        self.servicer = servicer
        self.address = address
        self.channel = channel
        self.runs = runs
        self.stub: Any = harness_pb2_grpc.HarnessServiceStub(channel)


@asynccontextmanager
async def serving(
    turn: Story, *, state: OneRun | None = None, limits: LimitSettings | None = None
) -> AsyncIterator[Service]:
    limits = limits or LimitSettings(drain=5)
    runs = LiveRuns(turn, SystemClock(), limits)
    servicer = HarnessServicer(
        runs,
        cast(StateStore, state or OneRun()),
        CATALOGUE,
        cast(ToolProvider, NoTools()),
        reader_stall=limits.reader_stall,
        timeout=5,
    )
    settings = Settings(harness_listen="127.0.0.1:0", limits=limits)
    async with running(servicer, runs, settings) as address, grpc.aio.insecure_channel(address) as channel:
        yield Service(address, channel, runs, servicer)


def ask(**fields: Any) -> pb.RunTurnRequest:
    given: dict[str, Any] = {"principal": PRINCIPAL, "text": "hello"} | fields
    return pb.RunTurnRequest(**given)


def metadata(request: TurnRequest) -> r.Metadata:
    return r.Metadata(request.run_id, request.conversation_id, request.message_id)


async def answered(request: TurnRequest, channel: TurnChannel) -> r.Run:
    channel.publish(metadata(request))
    channel.publish(r.Status(ProcessingStage.ROUTING))
    channel.publish(r.Content(r.ChatReply("hi"), "hi"))
    channel.publish(r.Done(ReleaseOutcome.SUCCESS, TurnStatus.DONE))
    return r.Run(request.run_id, run_state=RunState.SUCCESS)


def refusing(error: Exception) -> Story:
    async def turn(request: TurnRequest, channel: TurnChannel) -> r.Run:
        raise error

    return turn


class Waiting:
    """Says hello and waits for a cancel; what the test asserts on is the reason it was given."""

    def __init__(self) -> None:
        self.requests: list[TurnRequest] = []
        self.reason: asyncio.Future[CancelReason] = asyncio.get_running_loop().create_future()

    async def __call__(self, request: TurnRequest, channel: TurnChannel) -> r.Run:
        self.requests.append(request)
        channel.publish(metadata(request))
        reason = await channel.cancelled()
        self.reason.set_result(reason)
        if reason is CancelReason.SHUTDOWN:
            channel.publish(r.Failure(FailureReason.INTERRUPTED, "stopped"))
            channel.publish(r.Done(ReleaseOutcome.FAILED, TurnStatus.FAILED))
            return r.Run(request.run_id, run_state=RunState.FAILED)
        return r.Run(
            request.run_id,
            run_state=RunState.CANCELLED,
            termination_reason=TerminationReason(reason.value),
        )


async def events(call: Any) -> list[events_pb2.TurnEvent]:
    return [event async for response in call for event in response.events]


async def refused(call: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await events(call) if hasattr(call, "read") else await call
    return caught.value


def kinds(got: list[events_pb2.TurnEvent]) -> list[str | None]:
    return [event.WhichOneof("kind") for event in got]


# --- the stream -------------------------------------------------------------------------------------


async def test_a_turn_streams_its_events_in_order_and_ends_ok() -> None:
    async with serving(answered) as service:
        call = service.stub.RunTurn(ask(conversation_id="c", message_id="m", agent_id="ops"), timeout=5)
        got = await events(call)
        assert await call.code() is grpc.StatusCode.OK
    assert kinds(got) == ["metadata", "status", "content", "done"]
    assert [event.sequence for event in got] == [1, 2, 3, 4]
    assert (got[0].metadata.conversation_id, got[0].metadata.message_id) == ("c", "m")
    assert got[2].content.chat.text == "hi"
    assert got[3].done.release_outcome == axes_pb2.RELEASE_OUTCOME_SUCCESS


async def test_what_happened_is_sent_without_waiting_for_what_comes() -> None:
    turn = Waiting()
    async with serving(turn) as service:
        call = service.stub.RunTurn(ask(), timeout=5)
        first = await call.read()
        assert kinds(list(first.events)) == ["metadata"]
        call.cancel()
        await turn.reason


async def test_the_calls_deadline_is_handed_to_the_turn() -> None:
    turn = Waiting()
    async with serving(turn) as service:
        limited, unlimited = service.stub.RunTurn(ask(), timeout=9), service.stub.RunTurn(ask())
        await limited.read()
        await unlimited.read()
        limited.cancel()
        await turn.reason
        by_limit = sorted(turn.requests, key=lambda request: request.call_deadline is None)
        turn.reason = asyncio.get_running_loop().create_future()
        unlimited.cancel()
        await turn.reason
    assert by_limit[0].call_deadline == pytest.approx(9, abs=2)
    assert by_limit[1].call_deadline is None


async def test_a_failure_after_metadata_ends_the_call_ok() -> None:
    async def failed(request: TurnRequest, channel: TurnChannel) -> r.Run:
        channel.publish(metadata(request))
        channel.publish(r.Failure(FailureReason.MODEL_FAILED, "sorry"))
        channel.publish(r.Done(ReleaseOutcome.FAILED, TurnStatus.FAILED))
        return r.Run(request.run_id, run_state=RunState.FAILED)

    async with serving(failed) as service:
        assert kinds(await events(service.stub.RunTurn(ask(), timeout=5))) == ["metadata", "failure", "done"]


async def test_a_run_that_the_user_cancelled_ends_with_cancelled_and_no_done() -> None:
    turn = Waiting()
    async with serving(turn) as service:
        call = service.stub.RunTurn(ask(message_id="m"), timeout=5)
        assert kinds(list((await call.read()).events)) == ["metadata"]
        run = service.runs.start(turn.requests[0])
        run.cancel(CancelReason.USER_REQUESTED)
        error = await refused_reading(call)
    assert error.code() is grpc.StatusCode.CANCELLED
    answer = from_rpc_error(error)
    assert answer.reason is Reason.CANCELLED
    assert answer.metadata == {"run_id": turn.requests[0].run_id, "termination_reason": "USER_REQUESTED"}


async def refused_reading(call: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await events(_remaining(call))
    return caught.value


# --- attaching --------------------------------------------------------------------------------------


async def test_the_same_message_attaches_and_its_first_caller_may_leave() -> None:
    turn = Waiting()
    async with serving(turn) as service:
        first = service.stub.RunTurn(ask(message_id="m", conversation_id="c"), timeout=5)
        begun = (await first.read()).events[0]
        second = service.stub.RunTurn(ask(message_id="m"), timeout=5)
        again = (await second.read()).events[0]
        assert again.metadata == begun.metadata
        first.cancel()
        reused = await refused(service.stub.RunTurn(ask(message_id="m", text="other"), timeout=5))
        assert reused.code() is grpc.StatusCode.ALREADY_EXISTS
        assert from_rpc_error(reused).reason is Reason.MESSAGE_ID_REUSED
        assert not turn.reason.done()
        second.cancel()
        assert await turn.reason is CancelReason.CLIENT_DISCONNECTED
    assert len(turn.requests) == 1


# --- callers that go away ---------------------------------------------------------------------------


async def test_a_caller_that_cancels_cancels_its_run() -> None:
    turn = Waiting()
    async with serving(turn) as service:
        call = service.stub.RunTurn(ask(), timeout=30)
        await call.read()
        call.cancel()
        async with asyncio.timeout(5):
            assert await turn.reason is CancelReason.CLIENT_DISCONNECTED


async def test_a_caller_whose_connection_breaks_cancels_its_run() -> None:
    turn = Waiting()
    async with serving(turn) as service:
        await service.stub.RunTurn(ask(), timeout=30).read()
        await service.channel.close()
        async with asyncio.timeout(5):
            assert await turn.reason is CancelReason.CLIENT_DISCONNECTED


async def test_a_call_that_passes_its_deadline_cancels_its_run() -> None:
    turn = Waiting()
    async with serving(turn) as service:
        error = await refused(service.stub.RunTurn(ask(), timeout=0.3))
        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        async with asyncio.timeout(5):
            assert await turn.reason in (CancelReason.DEADLINE_EXCEEDED, CancelReason.CLIENT_DISCONNECTED)


async def test_a_reader_that_stalls_cancels_its_run() -> None:
    big = "x" * 500_000
    waiting = Waiting()

    async def flooding(request: TurnRequest, channel: TurnChannel) -> r.Run:
        channel.publish(metadata(request))
        asked = asyncio.create_task(channel.cancelled())
        while not asked.done():
            channel.publish(r.Progress(text=big))
            await asyncio.sleep(0)
        waiting.reason.set_result(await asked)
        return r.Run(request.run_id, run_state=RunState.CANCELLED)

    limits = LimitSettings(reader_stall=0.2, follower_events=8, drain=5)
    async with serving(flooding, limits=limits) as service:
        call = service.stub.RunTurn(ask(), timeout=30)
        await call.read()  # and never again
        async with asyncio.timeout(20):
            assert await waiting.reason is CancelReason.CLIENT_DISCONNECTED
        call.cancel()


# --- statuses ---------------------------------------------------------------------------------------


async def test_all_bad_fields_are_named_and_no_turn_is_started() -> None:
    turn = Waiting()
    async with serving(turn) as service:
        error = await refused(
            service.stub.RunTurn(pb.RunTurnRequest(conversation_id="{", action=cast(Any, 99)), timeout=5)
        )
        answer = from_rpc_error(error)
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert answer.reason is Reason.INVALID_REQUEST
    assert {fault.field for fault in answer.violations} == {
        "principal.organ_id",
        "principal.user_id",
        "conversation_id",
        "text",
        "action",
    }
    assert turn.requests == []


@pytest.mark.parametrize(
    ("reason", "code", "retried"),
    [
        (Reason.CONVERSATION_BUSY, grpc.StatusCode.ABORTED, True),
        (Reason.CONVERSATION_FORBIDDEN, grpc.StatusCode.PERMISSION_DENIED, False),
        (Reason.CONVERSATION_DELETED, grpc.StatusCode.NOT_FOUND, False),
        (Reason.STATE_UNAVAILABLE, grpc.StatusCode.UNAVAILABLE, True),
        (Reason.OVERLOADED, grpc.StatusCode.RESOURCE_EXHAUSTED, True),
        (Reason.STATE_WRITE_FAILED, grpc.StatusCode.INTERNAL, False),
        (Reason.STATE_LOST, grpc.StatusCode.DATA_LOSS, False),
    ],
)
async def test_a_turn_refused_before_metadata_is_a_status(
    reason: Reason, code: grpc.StatusCode, retried: bool
) -> None:
    async with serving(refusing(TurnfenceError(reason, detail=CANARY))) as service:
        error = await refused(service.stub.RunTurn(ask(), timeout=5))
    assert error.code() is code
    status = rpc_status.from_call(cast(Any, error))
    assert status is not None
    packed = {detail.TypeName() for detail in status.details}
    assert ("google.rpc.RetryInfo" in packed) is retried
    info = error_details_pb2.ErrorInfo()
    assert status.details[0].Unpack(info)
    assert (info.domain, info.reason) == ("turnfence", reason.value)
    assert CANARY not in str(status)


async def test_above_the_limit_a_caller_is_told_when_to_retry() -> None:
    turn = Waiting()
    async with serving(turn, limits=LimitSettings(runs_per_user=1, drain=5)) as service:
        running_call = service.stub.RunTurn(ask(), timeout=30)
        await running_call.read()
        error = await refused(service.stub.RunTurn(ask(), timeout=5))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert from_rpc_error(error).retry_after == 2.0
        running_call.cancel()
        await turn.reason


async def test_an_unexpected_exception_never_reaches_the_caller() -> None:
    logs.configure("error", "json", out := io.StringIO())
    try:
        async with serving(refusing(ValueError(CANARY))) as service:
            error = await refused(service.stub.RunTurn(ask(text=CANARY), timeout=5))
    finally:
        logging.getLogger().handlers.clear()
        structlog.reset_defaults()
    answer = from_rpc_error(error)
    assert error.code() is grpc.StatusCode.INTERNAL
    assert answer.reason is Reason.INTERNAL
    assert CANARY not in repr(error)
    lines = [json.loads(line) for line in out.getvalue().splitlines()]
    failed = next(line for line in lines if line["event"] == "call failed")
    assert failed["error_id"] == answer.metadata["error_id"]
    assert failed["error"] == ["ValueError"]
    assert failed["rpc"] == "/turnfence.harness.v1.HarnessService/RunTurn"
    assert CANARY not in out.getvalue()


async def test_bytes_that_are_no_message_are_an_invalid_request() -> None:
    async with serving(answered) as service:
        method: Any = service.channel.unary_stream("/turnfence.harness.v1.HarnessService/RunTurn")
        error = await refused(method(b"\xff\xff\xff", timeout=5))
        get_run: Any = service.channel.unary_unary("/turnfence.harness.v1.HarnessService/GetRun")
        also = await refused(get_run(b"\x0a\xff", timeout=5))
    for one in (error, also):
        assert one.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert from_rpc_error(one).reason is Reason.INVALID_REQUEST


async def test_a_request_above_its_size_limit_is_refused() -> None:
    async with serving(answered) as service:
        error = await refused(service.stub.RunTurn(ask(text="x" * 1_100_000), timeout=5))
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


# --- the other methods ------------------------------------------------------------------------------


async def test_get_run_gives_every_axis_that_is_known() -> None:
    state = OneRun()
    async with serving(answered, state=state) as service:
        got = await service.stub.GetRun(pb.GetRunRequest(principal=PRINCIPAL, run_id="r1"), timeout=3)
    assert got.run.run_state == axes_pb2.RUN_STATE_SUCCESS
    assert got.run.release_outcome == axes_pb2.RELEASE_OUTCOME_FALLBACK
    request, timeout = state.asked[0]
    assert request == r.GetRunRequest("o", "u", "r1")
    assert timeout == pytest.approx(3, abs=0.5)


async def test_get_run_of_an_unknown_run_is_not_found() -> None:
    async with serving(answered, state=OneRun(TurnfenceError(Reason.NOT_FOUND))) as service:
        error = await refused(
            service.stub.GetRun(pb.GetRunRequest(principal=PRINCIPAL, run_id="r"), timeout=5)
        )
    assert error.code() is grpc.StatusCode.NOT_FOUND


async def test_list_agents() -> None:
    async with serving(answered) as service:
        got = await service.stub.ListAgents(pb.ListAgentsRequest(), timeout=5)
    assert [agent.agent_id for agent in got.agents] == ["ops"]


@pytest.mark.parametrize(
    ("method", "request_type"),
    [
        ("WatchRun", pb.WatchRunRequest),
        ("CancelRun", pb.CancelRunRequest),
        ("ExplainRun", pb.ExplainRunRequest),
    ],
)
async def test_what_is_not_served_says_so(method: str, request_type: Any) -> None:
    async with serving(answered) as service:
        call = getattr(service.stub, method)(request_type(principal=PRINCIPAL, run_id="r"), timeout=5)
        error = await refused(call)
    assert error.code() is grpc.StatusCode.UNIMPLEMENTED
    answer = from_rpc_error(error)
    assert (answer.reason, answer.metadata) == (Reason.NOT_SERVED, {"method": method})


# --- the server -------------------------------------------------------------------------------------


async def test_health_and_both_reflections_answer_through_the_interceptor() -> None:
    async with serving(answered) as service:
        health: Any = health_pb2_grpc.HealthStub(service.channel)
        for name in ("", "turnfence.harness.v1.HarnessService"):
            answer = await health.Check(health_pb2.HealthCheckRequest(service=name), timeout=5)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        for version in ("v1", "v1alpha"):
            reflect = service.channel.stream_stream(
                f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
                request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
                response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
            )
            asked = iter([reflection_pb2.ServerReflectionRequest(list_services="")])
            listed = [reply async for reply in reflect(asked, timeout=5)]
            names = [one.name for one in listed[0].list_services_response.service]
            assert "turnfence.harness.v1.HarnessService" in names


async def test_leaving_the_server_lets_running_turns_tell_their_end() -> None:
    turn = Waiting()
    async with serving(turn) as service:
        call = service.stub.RunTurn(ask(), timeout=30)
        await call.read()
        rest = asyncio.create_task(events(_remaining(call)))
        await asyncio.sleep(0)
        await service.runs.drain(5)
        assert kinds(await rest) == ["failure", "done"]
        assert await call.code() is grpc.StatusCode.OK
    assert turn.reason.result() is CancelReason.SHUTDOWN


async def _remaining(call: Any) -> AsyncIterator[Any]:
    while (response := await call.read()) is not grpc.aio.EOF:
        yield response


async def test_two_servers_cannot_share_a_port() -> None:
    async with serving(answered) as service:
        taken = Settings(harness_listen=service.address)
        with pytest.raises(CannotListen, match="cannot be bound"):
            async with running(service.servicer, service.runs, taken):
                pass


@pytest.mark.parametrize(
    ("address", "insecure", "said"),
    [
        ("0.0.0.0:7070", False, "TURNFENCE_INSECURE"),
        ("[::]:7070", False, "TURNFENCE_INSECURE"),
        ("harness.example:7070", False, "TURNFENCE_INSECURE"),
        ("7070", True, "host:port"),
        (":7070", True, "host:port"),
        ("127.0.0.1:", True, "host:port"),
        ("127.0.0.1:http", True, "host:port"),
        ("127.0.0.1:65536", True, "host:port"),
        ("unix:relative.sock", True, "absolute path"),
    ],
)
def test_an_address_that_is_open_or_malformed_is_refused(address: str, insecure: bool, said: str) -> None:
    with pytest.raises(CannotListen, match=said):
        check_address(address, insecure=insecure)


@pytest.mark.parametrize(
    ("address", "insecure"),
    [
        ("127.0.0.1:7070", False),
        ("127.8.8.8:0", False),
        ("[::1]:7070", False),
        ("localhost:7070", False),
        ("unix:/run/h.sock", False),
        ("unix:///run/h.sock", False),
        ("0.0.0.0:7070", True),
    ],
)
def test_loopback_and_unix_sockets_need_no_leave(address: str, insecure: bool) -> None:
    check_address(address, insecure=insecure)


def test_readiness_is_one_line_and_the_end_of_the_pipe() -> None:
    reading, writing = os.pipe()
    announce("127.0.0.1:7", writing)
    with os.fdopen(reading) as ready:
        assert ready.read() == "127.0.0.1:7\n"
