"""McpTools against a real MCP server, over stdio and over streamable HTTP alike: listing, calling, and how a
call fails. What only one transport can do wrong is in ``test_mcp_http.py`` and ``test_mcp_stdio.py``."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import pytest
import pytest_asyncio

from harness_service.adapters.mcp_tools import MESSAGE_MAX_CHARS, McpTools
from harness_service.core.catalogue import McpServer
from harness_service.core.invocation import failed_call
from harness_service.core.tool_failure import ToolFailure
from harness_service.ports import ToolOutcome
from tests.tool_sim import CONTRACTS, Sim, contract, http_tool_server
from turnfence.axes import CallStatus, FailureKind, SideEffect

MAX_RESULT_BYTES = 50_000


@dataclass
class Served:
    """One server and the adapter that talks to it."""

    sim: Sim
    tools: McpTools

    async def call(
        self, tool: str, arguments: Any = None, *, key: str = "", timeout: float = 10.0
    ) -> ToolOutcome:
        given = arguments if isinstance(arguments, str) else json.dumps(arguments or {})
        return await self.tools.call(contract(tool), given, idempotency_key=key, timeout=timeout)


@pytest_asyncio.fixture(params=["stdio", "http"], scope="module", loop_scope="session")
async def shared(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Served]:
    """One server for all tests of this module, since a start takes half a second."""
    sim = Sim(tmp_path_factory.mktemp("sim") / "told")
    if request.param == "stdio":
        async for served in _served(sim, sim.stdio()):
            yield served
        return
    with http_tool_server(sim) as server:
        async for served in _served(sim, McpServer("sim", url=server.url)):
            yield served


async def _served(sim: Sim, server: McpServer) -> AsyncIterator[Served]:
    absent = contract("no_such_tool")
    tools = McpTools([server], [*CONTRACTS, absent], max_result_bytes=MAX_RESULT_BYTES)
    try:
        yield Served(sim, tools)
    finally:
        await tools.close()


@pytest.fixture
def served(shared: Served) -> Served:
    """The shared server, told nothing."""
    shared.sim.forget()
    return shared


# --- what is offered, what comes back -------------------------------------------------------------


async def test_tools_are_listed_under_their_catalogue_names_with_the_servers_schemas(served: Served) -> None:
    schemas = await served.tools.schemas()
    assert set(schemas) == {tool.name for tool in CONTRACTS}  # and not sim.no_such_tool
    offered = schemas["sim.write_thing"]
    assert offered.name == "sim__write_thing"
    assert offered.description == "Write a thing; it can be found again."
    assert offered.input_schema["required"] == ["title"]
    assert offered.input_schema["properties"]["title"]["type"] == "string"


async def test_a_structured_result_comes_back_as_it_was_given(served: Served) -> None:
    told = {"名字": "磁盘", "nested": {"list": [1, 2.5, None, True, "x"]}, "big": 2**60}
    served.sim.tell("read_fact", result=told)
    outcome = await served.call("read_fact", {"name": "disk"})
    assert outcome.failure is None
    assert json.loads(outcome.result_json) == told
    assert "名字" in outcome.result_json  # not escaped: a result is measured in bytes
    assert outcome.message == ""
    assert outcome.duration_ms >= 0


async def test_plain_text_comes_back_as_text(served: Served) -> None:
    outcome = await served.call("read_odd")
    assert json.loads(outcome.result_json) == {"text": "plain words"}


async def test_several_texts_are_joined_and_other_content_is_left_out(served: Served) -> None:
    image = {"type": "image", "data": "AAAA", "mimeType": "image/png"}
    texts = [{"type": "text", "text": "one"}, image, {"type": "text", "text": "two"}]
    served.sim.tell("read_odd", result={"content": texts})
    assert json.loads((await served.call("read_odd")).result_json) == {"text": "one\ntwo"}


async def test_a_result_with_nothing_in_it_is_an_empty_text(served: Served) -> None:
    served.sim.tell("read_odd", result={"content": []})
    assert json.loads((await served.call("read_odd")).result_json) == {"text": ""}


async def test_the_idempotency_key_travels_in_meta(served: Served) -> None:
    await served.call("write_thing", {"title": "disk full", "request_id": "k-1"}, key="k-1")
    called, applied = served.sim.events("write_thing")
    assert (called["event"], called["key"], called["request_id"]) == ("called", "k-1", "k-1")
    assert (applied["event"], applied["key"], applied["title"]) == ("applied", "k-1", "disk full")


async def test_calls_at_the_same_time_get_each_their_own_answer(served: Served) -> None:
    names = [f"fact-{number}" for number in range(20)]
    outcomes = await asyncio.gather(*(served.call("read_fact", {"name": name}) for name in names))
    assert [json.loads(outcome.result_json)["name"] for outcome in outcomes] == names


# --- every way to fail ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """What the server does, which failure that is, and what it makes of a read and of a write."""

    told: dict[str, Any]
    failure: ToolFailure
    kind: FailureKind
    read: CallStatus
    write: CallStatus


ROWS = {
    "tool_error": Row(
        {"mode": "error"},
        ToolFailure.MCP_TOOL_ERROR,
        FailureKind.BUSINESS_FAILURE,
        CallStatus.FAILED,
        CallStatus.FAILED,
    ),
    "invalid_params": Row(
        {"mode": "rpc_error", "code": -32602},
        ToolFailure.MCP_PARAMETER_ERROR,
        FailureKind.PARAMETER_FAILURE,
        CallStatus.FAILED,
        CallStatus.FAILED,
    ),
    "internal_error": Row(
        {"mode": "rpc_error", "code": -32603},
        ToolFailure.MCP_RPC_ERROR,
        FailureKind.UNKNOWN,
        CallStatus.FAILED,
        CallStatus.UNKNOWN,
    ),
    "a_code_of_its_own": Row(
        {"mode": "rpc_error", "code": 1234},
        ToolFailure.MCP_RPC_ERROR,
        FailureKind.UNKNOWN,
        CallStatus.FAILED,
        CallStatus.UNKNOWN,
    ),
    "time_out": Row(
        {"mode": "hang"},
        ToolFailure.TIMEOUT,
        FailureKind.TIMEOUT,
        CallStatus.TIMEOUT,
        CallStatus.UNKNOWN,
    ),
    "too_large": Row(
        {"mode": "large", "bytes": MAX_RESULT_BYTES},
        ToolFailure.TOO_LARGE,
        FailureKind.UNKNOWN,
        CallStatus.FAILED,
        CallStatus.UNKNOWN,
    ),
}


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS.keys())
async def test_a_failing_call_is_the_row_of_the_table_that_it_is(served: Served, row: Row) -> None:
    served.sim.tell("write_plain", **row.told)
    outcome = await served.call(
        "write_plain", {"title": "x"}, timeout=0.3 if "hang" in row.told.values() else 10
    )
    assert (outcome.failure, outcome.result_json) == (row.failure, "")
    assert outcome.message
    assert failed_call(row.failure, SideEffect.NONE).status is row.read
    assert failed_call(row.failure, SideEffect.WRITE).status is row.write
    assert failed_call(row.failure, SideEffect.WRITE).kind is row.kind
    assert served.sim.happened("write_plain").count("called") == 1


async def test_a_tool_errors_own_words_come_along(served: Served) -> None:
    served.sim.tell("read_fact", mode="error")
    assert "the tool says no" in (await served.call("read_fact", {"name": "x"})).message


async def test_a_tools_words_are_bounded(served: Served) -> None:
    content = [{"type": "text", "text": "no " * 10_000}]
    served.sim.tell("read_odd", result={"content": content, "isError": True})
    outcome = await served.call("read_odd")
    assert outcome.failure is ToolFailure.MCP_TOOL_ERROR
    assert len(outcome.message) == MESSAGE_MAX_CHARS


async def test_a_result_of_just_the_limit_is_taken_and_one_byte_more_is_not(served: Served) -> None:
    overhead = len('{"text":""}')
    served.sim.tell("read_fact", mode="large", bytes=MAX_RESULT_BYTES - overhead)
    outcome = await served.call("read_fact", {"name": "x"})
    assert outcome.failure is None
    assert len(outcome.result_json.encode()) == MAX_RESULT_BYTES
    served.sim.tell("read_fact", mode="large", bytes=MAX_RESULT_BYTES - overhead + 1)
    assert (await served.call("read_fact", {"name": "x"})).failure is ToolFailure.TOO_LARGE


@pytest.mark.parametrize("arguments", ["", "{}"])
async def test_no_arguments_are_an_empty_object(served: Served, arguments: str) -> None:
    assert (await served.call("read_odd", arguments)).failure is None


UNSENDABLE = {
    "null": "null",
    "a_list": "[]",
    "a_text": '"{}"',
    "half_an_object": "{",
    "no_json": "not json",
    "too_deep": "[" * 2000,
    "not_a_number": '{"name": NaN}',
    "infinite": '{"name": 1e400}',
    "twice_the_same_key": '{"name": "a", "name": "b"}',
    "half_a_character": '{"name": "\\ud800"}',
    "more_than_64_bits": '{"name": 9223372036854775808}',
}


@pytest.mark.parametrize("arguments", UNSENDABLE.values(), ids=UNSENDABLE.keys())
async def test_C125_arguments_that_cannot_be_sent_as_they_are_are_not_sent(
    served: Served, arguments: str
) -> None:
    outcome = await served.call("read_fact", arguments)
    assert outcome.failure is ToolFailure.MCP_PARAMETER_ERROR
    assert served.sim.events() == []


async def test_a_tool_that_the_server_does_not_offer_is_not_called(served: Served) -> None:
    outcome = await served.call("no_such_tool")
    assert outcome.failure is ToolFailure.UNREACHABLE
    assert "no_such_tool" in outcome.message


async def test_a_tool_of_a_server_that_is_not_configured_is_not_called(served: Served) -> None:
    outcome = await served.tools.call(
        contract("read_fact", server="elsewhere"), "{}", idempotency_key="", timeout=5
    )
    assert outcome.failure is ToolFailure.UNREACHABLE
    assert "elsewhere" in outcome.message


# --- giving up on a call leaves the others alone --------------------------------------------------


async def test_a_call_that_timed_out_is_over_at_its_time_and_the_next_one_works(served: Served) -> None:
    served.sim.tell("write_plain", mode="hang")
    outcome = await served.call("write_plain", {"title": "x"}, timeout=0.2)
    assert outcome.failure is ToolFailure.TIMEOUT
    assert 200 <= outcome.duration_ms < 2000
    assert (await served.call("read_fact", {"name": "x"})).failure is None


async def test_cancelling_the_caller_ends_the_call_at_once_and_nothing_else(served: Served) -> None:
    served.sim.tell("write_plain", mode="apply_then_hang")
    served.sim.tell("read_fact", mode="slow", seconds=0.3)
    other = asyncio.create_task(served.call("read_fact", {"name": "other"}))
    call = asyncio.create_task(served.call("write_plain", {"title": "x"}))
    await served.sim.seen("applied", "write_plain")
    call.cancel()
    async with asyncio.timeout(1):
        with pytest.raises(asyncio.CancelledError):
            await call
    assert json.loads((await other).result_json)["name"] == "other"
    assert (await served.call("read_fact", {"name": "later"})).failure is None
    assert served.sim.happened("write_plain") == ["called", "applied"]


async def test_a_refused_call_does_not_disturb_one_that_is_in_flight(served: Served) -> None:
    """Over HTTP a refusal has a status that can also mean a lost session."""
    served.sim.tell("write_plain", mode="apply_then_hang")
    write = asyncio.create_task(served.call("write_plain", {"title": "x"}))
    await served.sim.seen("applied", "write_plain")
    for code in (-32602, -32600, -32601):
        served.sim.tell("read_fact", mode="rpc_error", code=code)
        assert (await served.call("read_fact", {"name": "x"})).failure is not None
    served.sim.open_gate("write_plain")
    assert (await write).failure is None


async def test_a_call_that_has_no_time_is_not_sent(served: Served) -> None:
    await served.tools.schemas()
    outcome = await served.call("write_plain", {"title": "x"}, timeout=0)
    assert outcome.failure is ToolFailure.UNREACHABLE
    assert served.sim.events() == []
