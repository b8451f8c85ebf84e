"""What a state service serves, what it does not, and that it can be asked what it is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from tests.contract.turns import CALL_SECONDS, StateClient
from turnfence.errors import Reason
from turnfence.rpc_errors import from_rpc_error, from_status
from turnfence.state.v1 import history_service_pb2, run_service_pb2, state_pb2


def all_rpcs() -> Iterator[tuple[str, Any]]:
    for module in (state_pb2, run_service_pb2, history_service_pb2):
        for service in module.DESCRIPTOR.services_by_name.values():
            for method in service.methods:
                yield service.name, method


@pytest.mark.parametrize(("service", "method"), list(all_rpcs()), ids=lambda x: getattr(x, "name", x))
async def test_every_rpc_is_served_and_refuses_an_empty_request(
    state: StateClient, service: str, method: Any
) -> None:
    path = f"/turnfence.state.v1.{service}/{method.name}"
    if method.name == "Session":
        await _call_empty(state.channel, path, method)  # a message without calls has no answer
        return
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await _call_empty(state.channel, path, method)
    assert from_rpc_error(caught.value).reason is Reason.INVALID_REQUEST


async def test_a_session_call_without_a_request_is_refused_and_the_others_are_served(
    state: StateClient,
) -> None:
    calls = [state_pb2.Call(id=1), state_pb2.Call(id=2, flush=state_pb2.FlushRequest())]
    request = state_pb2.SessionRequest(calls=calls)
    replies = [reply async for answer in state.state.Session(iter([request])) for reply in answer.replies]
    assert {reply.id for reply in replies} == {1, 2}
    errors = [from_status(reply.error) for reply in replies]
    assert [error.reason for error in errors if error is not None] == [Reason.INVALID_REQUEST] * 2


async def _call_empty(channel: Any, path: str, method: Any) -> None:
    """The RPC with an empty request; raw bytes are all it takes."""
    if method.client_streaming:
        stream: Any = channel.stream_stream(path)(iter([b""]), timeout=CALL_SECONDS)
        async for _ in stream:
            pass
    elif method.server_streaming:
        async for _ in channel.unary_stream(path)(b"", timeout=CALL_SECONDS):
            pass
    else:
        await channel.unary_unary(path)(b"", timeout=CALL_SECONDS)


async def test_health_answers_for_the_server_and_each_service(state: StateClient) -> None:
    stub: Any = health_pb2_grpc.HealthStub(state.channel)
    names = {"", *(f"turnfence.state.v1.{service}" for service, _ in all_rpcs())}
    for name in names:
        answer = await stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=CALL_SECONDS)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING, name


async def test_reflection_names_the_services(state: StateClient) -> None:
    stub: Any = reflection_pb2_grpc.ServerReflectionStub(state.channel)
    call = stub.ServerReflectionInfo(
        iter([reflection_pb2.ServerReflectionRequest(list_services="")]), timeout=CALL_SECONDS
    )
    answers = [answer async for answer in call]
    named = {service.name for service in answers[0].list_services_response.service}
    assert {f"turnfence.state.v1.{service}" for service, _ in all_rpcs()} <= named
    assert "grpc.health.v1.Health" in named
