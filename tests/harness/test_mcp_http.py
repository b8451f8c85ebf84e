"""McpTools over streamable HTTP: what the network and gateways do to a call, and what of it is provably not
sent. The server is real; between it and the adapter stands a line that breaks on order."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from harness_service.adapters.mcp_tools import McpTools
from harness_service.core.catalogue import McpServer
from harness_service.core.invocation import failed_call
from harness_service.core.tool_failure import ToolFailure
from harness_service.ports import ToolOutcome
from tests.servers import free_port
from tests.tool_sim import (
    CONTRACTS,
    Exchange,
    HttpLine,
    HttpToolServer,
    Sim,
    Spoiler,
    contract,
    http_tool_server,
)
from turnfence.axes import CallStatus, SideEffect

MAX_RESULT_BYTES = 50_000


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Sim, HttpToolServer]]:
    sim = Sim(tmp_path_factory.mktemp("sim") / "told")
    with http_tool_server(sim) as server:
        yield sim, server


@pytest.fixture
def sim(shared: tuple[Sim, HttpToolServer]) -> Sim:
    shared[0].forget()
    return shared[0]


@pytest.fixture
def server(shared: tuple[Sim, HttpToolServer]) -> HttpToolServer:
    return shared[1]


@pytest.fixture(autouse=True)
def logged() -> Iterator[list[Any]]:
    """What is logged, as data: to show a failed start's traceback costs more than the start."""
    with capture_logs() as lines:
        yield lines


@asynccontextmanager
async def connected(
    url: str, headers: dict[str, str] | None = None, **options: Any
) -> AsyncIterator[McpTools]:
    server = McpServer("sim", url=url, headers=headers or {})
    tools = McpTools([server], CONTRACTS, max_result_bytes=MAX_RESULT_BYTES, **options)
    try:
        yield tools
    finally:
        await tools.close()


async def call(tools: McpTools, tool: str, arguments: Any = None, *, timeout: float = 10.0) -> ToolOutcome:
    return await tools.call(contract(tool), json.dumps(arguments or {}), idempotency_key="k", timeout=timeout)


async def write(tools: McpTools, *, timeout: float = 10.0) -> ToolOutcome:
    return await call(tools, "write_plain", {"title": "x"}, timeout=timeout)


# --- what can go wrong on the way -----------------------------------------------------------------


async def reset_after_the_effect(exchange: Exchange) -> None:
    await exchange.asked()
    exchange.cut()


async def reset_instead_of_an_answer(exchange: Exchange) -> None:
    exchange.cut()


async def close_instead_of_an_answer(exchange: Exchange) -> None:
    exchange.writer.close()


async def half_an_answer(exchange: Exchange) -> None:
    answer = await exchange.asked()
    exchange.writer.write(answer[: answer.index(b"\r\n\r\n") + 10])
    await exchange.writer.drain()
    exchange.cut()


async def what_is_no_http(exchange: Exchange) -> None:
    exchange.writer.write(b"SSH-2.0-OpenSSH_9.6\r\n")
    await exchange.writer.drain()


async def an_endless_answer(exchange: Exchange) -> None:
    exchange.writer.write(exchange.headers(200, "application/json", None) + b'{"jsonrpc": "2.0", "x": "')
    while True:
        exchange.writer.write(b"x" * 65536)
        await exchange.writer.drain()


async def an_endless_stream(exchange: Exchange) -> None:
    exchange.writer.write(exchange.headers(200, "text/event-stream", None))
    while True:
        exchange.writer.write(b"event: message\ndata: " + b"x" * 65536)
        await exchange.writer.drain()


async def a_stream_that_ends_without_an_answer(exchange: Exchange) -> None:
    exchange.writer.write(exchange.headers(200, "text/event-stream", None) + b": ping\n\n")
    await exchange.writer.drain()


def status(number: int, body: bytes = b"", kind: str = "text/plain") -> Spoiler:
    async def answered(exchange: Exchange) -> None:
        await exchange.answer(number, body, kind)

    return answered


U = CallStatus.UNKNOWN
F = CallStatus.FAILED
SPOILED: dict[str, tuple[Spoiler, ToolFailure, CallStatus]] = {
    "C068_reset_after_the_effect": (reset_after_the_effect, ToolFailure.IO_ERROR, U),
    "C070_reset_after_the_request": (reset_instead_of_an_answer, ToolFailure.IO_ERROR, U),
    "closed_after_the_request": (close_instead_of_an_answer, ToolFailure.IO_ERROR, U),
    "half_an_answer": (half_an_answer, ToolFailure.IO_ERROR, U),
    "no_http": (what_is_no_http, ToolFailure.IO_ERROR, U),
    "endless_answer": (an_endless_answer, ToolFailure.TOO_LARGE, U),
    "endless_stream": (an_endless_stream, ToolFailure.TOO_LARGE, U),
    "stream_without_an_answer": (a_stream_that_ends_without_an_answer, ToolFailure.IO_ERROR, U),
    "not_logged_in": (status(401), ToolFailure.AUTH, F),
    "not_allowed": (status(403, b"<html>no</html>", "text/html"), ToolFailure.AUTH, F),
    "too_many_requests": (status(429), ToolFailure.RATE_LIMIT, F),
    "server_error": (status(500), ToolFailure.MCP_RPC_ERROR, U),
    "bad_gateway": (status(502), ToolFailure.MCP_RPC_ERROR, U),
    "gateway_timeout": (status(504), ToolFailure.MCP_RPC_ERROR, U),
    "not_found": (status(404), ToolFailure.MCP_RPC_ERROR, U),
    "page_in_place_of_an_answer": (
        status(200, b"<html>hi</html>", "text/html"),
        ToolFailure.MCP_RPC_ERROR,
        U,
    ),
    "no_json": (status(200, b"{", "application/json"), ToolFailure.MCP_RPC_ERROR, U),
    "accepted_and_nothing_more": (status(202), ToolFailure.MCP_RPC_ERROR, U),
}


@pytest.mark.parametrize(("spoil", "failure", "write_status"), SPOILED.values(), ids=SPOILED.keys())
async def test_a_spoiled_answer_is_the_row_that_it_is_and_the_next_call_works(
    sim: Sim, server: HttpToolServer, spoil: Spoiler, failure: ToolFailure, write_status: CallStatus
) -> None:
    async with HttpLine(server.port) as line, connected(line.url) as tools:
        await tools.schemas()
        line.spoil = spoil
        outcome = await write(tools)
        assert (outcome.failure, outcome.result_json) == (failure, "")
        assert failed_call(failure, SideEffect.WRITE).status is write_status
        assert line.seen.count("tools/call") == 1  # nothing is sent twice
        line.spoil = None
        assert (await call(tools, "read_fact", {"name": "x"})).failure is None


async def test_a_spoiled_call_does_not_disturb_one_that_is_in_flight(
    sim: Sim, server: HttpToolServer
) -> None:
    async with HttpLine(server.port) as line, connected(line.url) as tools:
        sim.tell("write_plain", mode="apply_then_hang")
        in_flight = asyncio.create_task(write(tools))
        await sim.seen("applied", "write_plain")
        for spoil in (reset_instead_of_an_answer, status(404), status(400), status(500)):
            line.spoil = spoil
            assert (await call(tools, "read_fact", {"name": "x"})).failure is not None
        sim.open_gate("write_plain")
        assert (await in_flight).failure is None


# --- a server that is not there -------------------------------------------------------------------


async def test_a_refused_connection_is_provably_before_the_first_byte(sim: Sim) -> None:
    async with connected(f"http://127.0.0.1:{free_port()}/mcp") as tools:
        assert await tools.schemas() == {}
        outcome = await write(tools)
        assert outcome.failure is ToolFailure.UNREACHABLE
        assert failed_call(outcome.failure, SideEffect.WRITE).status is F


async def test_a_server_that_went_away_is_unreachable_and_its_tools_are_gone_until_it_is_back(
    tmp_path: Path,
) -> None:
    sim = Sim(tmp_path / "told")
    with http_tool_server(sim) as server:
        async with connected(server.url) as tools:
            assert set(await tools.schemas()) == {tool.name for tool in CONTRACTS}
            server.kill()
            outcome = await write(tools)
            assert outcome.failure is ToolFailure.UNREACHABLE
            assert await tools.schemas() == {}
            server.start()
            assert set(await tools.schemas()) == {tool.name for tool in CONTRACTS}
            assert (await write(tools)).failure is None
            assert sim.happened("write_plain") == ["called", "applied"]


@pytest.mark.parametrize(("mode", "events"), [("die", ["called"]), ("apply_then_die", ["called", "applied"])])
async def test_C068_a_server_that_dies_during_a_call_leaves_open_whether_it_took_effect(
    tmp_path: Path, mode: str, events: list[str]
) -> None:
    sim = Sim(tmp_path / "told")
    sim.tell("write_plain", mode=mode)
    with http_tool_server(sim) as server:
        async with connected(server.url) as tools:
            outcome = await write(tools)
            assert outcome.failure is ToolFailure.IO_ERROR
            assert failed_call(outcome.failure, SideEffect.WRITE).status is U
            assert sim.happened("write_plain") == events


async def test_looking_for_the_rest_of_a_broken_answer_proves_nothing(
    sim: Sim, server: HttpToolServer
) -> None:
    """The answer is a stream that can be taken up again (its events have ids); it breaks after the effect,
    and nobody listens any more when the client asks for the rest. The call itself was sent."""
    async with HttpLine(server.port) as line, connected(line.url) as tools:

        async def breaks_off(exchange: Exchange) -> None:
            await exchange.asked()
            head = exchange.headers(200, "text/event-stream", None)
            exchange.writer.write(head + b"id: 1\nretry: 1\ndata:\n\n")
            await exchange.writer.drain()
            line.stop_listening()

        await tools.schemas()
        line.spoil = breaks_off
        outcome = await write(tools)
        assert sim.happened("write_plain") == ["called", "applied"]
        assert outcome.failure is ToolFailure.IO_ERROR


# --- sessions of the older protocol ---------------------------------------------------------------


async def test_a_server_of_the_older_protocol_serves_the_same(sim: Sim, server: HttpToolServer) -> None:
    async with HttpLine(server.port, handshake=True) as line, connected(line.url) as tools:
        assert set(await tools.schemas()) == {tool.name for tool in CONTRACTS}
        assert "initialize" in line.seen
        outcome = await write(tools)
        assert json.loads(outcome.result_json)["status"] == "created"
        assert sim.events("write_plain")[0]["key"] == "k"
        sim.tell("write_plain", mode="rpc_error", code=-32602)
        assert (await write(tools)).failure is ToolFailure.MCP_PARAMETER_ERROR
        assert line.seen.count("initialize") == 1


async def test_a_session_that_the_server_forgot_costs_one_call_and_is_made_anew(tmp_path: Path) -> None:
    sim = Sim(tmp_path / "told")
    with http_tool_server(sim) as server:
        async with HttpLine(server.port, handshake=True) as line, connected(line.url) as tools:
            await tools.schemas()
            server.kill()
            server.start()
            outcome = await write(tools)
            assert outcome.failure is ToolFailure.MCP_RPC_ERROR
            assert sim.happened("write_plain") == []
            assert (await write(tools)).failure is None
            assert line.seen.count("initialize") == 2


# --- headers --------------------------------------------------------------------------------------


async def test_header_values_come_from_the_environment(sim: Sim, server: HttpToolServer) -> None:
    headers = {"Authorization": "env:DESK_TOKEN", "X-Team": "night shift"}
    async with connected(server.url, headers, env={"DESK_TOKEN": "Bearer canary-91c"}) as tools:
        got = json.loads((await call(tools, "surroundings")).result_json)["headers"]
    assert got["authorization"] == "Bearer canary-91c"
    assert got["x-team"] == "night shift"


async def test_a_header_whose_variable_is_not_set_is_refused_by_name(server: HttpToolServer) -> None:
    with pytest.raises(ValueError, match=r"sim: header Authorization needs DESK_TOKEN"):
        async with connected(server.url, {"Authorization": "env:DESK_TOKEN"}, env={}):
            pass


async def test_a_secret_header_is_neither_logged_nor_told(
    sim: Sim, server: HttpToolServer, logged: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    secret = "canary-91c"
    caplog.set_level("DEBUG")
    async with (
        HttpLine(server.port) as line,
        connected(line.url, {"Authorization": "env:DESK_TOKEN"}, env={"DESK_TOKEN": secret}) as tools,
    ):
        line.spoil = status(401)
        outcome = await write(tools)
        line.spoil = reset_instead_of_an_answer
        broken = await write(tools)
        line.stop_listening()
        refused = await write(tools)
        assert await tools.schemas() == {}
        told = [outcome.message, broken.message, refused.message, repr(tools._connections)]
    assert secret not in repr((told, logged))
    assert secret not in "".join(record.getMessage() for record in caplog.records)


async def test_a_server_that_refuses_the_token_at_the_start_is_a_matter_of_auth(
    sim: Sim, server: HttpToolServer
) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(Exchange.headers(401, "text/plain", 0))
        await writer.drain()
        writer.close()

    gate = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with gate, connected(f"http://127.0.0.1:{gate.sockets[0].getsockname()[1]}/mcp") as tools:
        assert await tools.schemas() == {}
        assert (await write(tools)).failure is ToolFailure.AUTH
