"""McpTools and the server processes that it starts: their start, their death, their end, what they inherit,
and answers that are not what the protocol says."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from structlog.testing import capture_logs

from harness_service.adapters import mcp_tools
from harness_service.adapters.mcp_tools import McpTools
from harness_service.core.catalogue import McpServer, ToolContract
from harness_service.core.invocation import failed_call
from harness_service.core.tool_failure import ToolFailure
from harness_service.ports import ToolOutcome
from tests.tool_sim import CONTRACTS, Sim, contract
from turnfence.axes import CallStatus, SideEffect

RAW_SERVER = Path(__file__).parent.parent / "raw_tool_server.py"


@pytest.fixture
def sim(tmp_path: Path) -> Sim:
    return Sim(tmp_path / "told")


@pytest.fixture(autouse=True)
def logged() -> Iterator[list[Any]]:
    """What is logged, as data: to show a failed start's traceback costs more than the start."""
    with capture_logs() as lines:
        yield lines


@asynccontextmanager
async def connected(
    *servers: McpServer, contracts: Iterable[ToolContract] = CONTRACTS, **options: Any
) -> AsyncIterator[McpTools]:
    tools = McpTools(servers, contracts, **options)
    try:
        yield tools
    finally:
        await tools.close()


async def call(
    tools: McpTools, tool: ToolContract | str, arguments: Any = None, *, timeout: float = 10.0
) -> ToolOutcome:
    named = contract(tool) if isinstance(tool, str) else tool
    return await tools.call(named, json.dumps(arguments or {}), idempotency_key="k", timeout=timeout)


async def pid_of(tools: McpTools) -> int:
    return int(json.loads((await call(tools, "surroundings")).result_json)["pid"])


async def gone(pid: int, seconds: float = 5.0) -> None:
    """Wait until no such process is left, not even as a zombie."""
    async with asyncio.timeout(seconds):
        while psutil.pid_exists(pid):  # noqa: ASYNC110  the process table tells nobody
            await asyncio.sleep(0.01)


# --- a server that cannot start -------------------------------------------------------------------

NOT_STARTING: Mapping[str, tuple[str, ...]] = {
    "no_such_program": ("/nonexistent/server",),
    "ends_at_once": ("python", "-c", "raise SystemExit(3)"),
    "says_what_is_no_mcp": ("python", "-c", "print('hello'); input()"),
    "never_answers": ("python", "-c", "import sys; sys.stdin.read()"),
}


@pytest.mark.parametrize("command", NOT_STARTING.values(), ids=NOT_STARTING.keys())
async def test_a_server_that_cannot_start_leaves_its_tools_out_and_the_others_in(
    sim: Sim, command: tuple[str, ...]
) -> None:
    broken = McpServer("broken", command=command)
    contracts = [*CONTRACTS, contract("read_fact", server="broken")]
    async with connected(broken, sim.stdio(), contracts=contracts, connect_timeout=6) as tools:
        await tools.start()
        assert set(await tools.schemas()) == {tool.name for tool in CONTRACTS}
        assert (await call(tools, "read_fact", {"name": "x"})).failure is None
        outcome = await call(tools, contract("read_fact", server="broken"), timeout=8)
        assert outcome.failure is ToolFailure.UNREACHABLE
        assert failed_call(outcome.failure, SideEffect.WRITE).status is CallStatus.FAILED


async def test_a_call_whose_time_ends_while_the_server_starts_was_not_sent(sim: Sim) -> None:
    waiting = McpServer("sim", command=NOT_STARTING["never_answers"])
    async with connected(waiting, connect_timeout=1) as tools:
        outcome = await call(tools, "write_thing", {"title": "x"}, timeout=0.1)
        assert outcome.failure is ToolFailure.UNREACHABLE
        assert 100 <= outcome.duration_ms < 900


async def test_a_failed_start_is_repeated_after_the_documented_pauses(sim: Sim, tmp_path: Path) -> None:
    assert mcp_tools.RESTART_PAUSES[:2] == (0.0, 1.0)
    starts = tmp_path / "starts"
    starts.touch()
    script = f"open({str(starts)!r}, 'a').write('.'); raise SystemExit(1)"
    async with connected(McpServer("sim", command=("python", "-c", script))) as tools:
        for count in (1, 2):  # the first failure is followed by no pause
            assert (await call(tools, "read_fact")).failure is ToolFailure.UNREACHABLE
            assert starts.read_text() == "." * count
        failed_at = time.monotonic()
        while starts.read_text() == "..":
            outcome = await call(tools, "read_fact")
            assert outcome.failure is ToolFailure.UNREACHABLE
            if starts.read_text() == "..":
                assert outcome.duration_ms < 500  # left alone, and the caller is told so at once
            assert time.monotonic() - failed_at < 10
            await asyncio.sleep(0.02)  # a caller that keeps trying
        assert time.monotonic() - failed_at >= 0.9


async def test_a_server_that_can_start_at_last_is_used(sim: Sim, tmp_path: Path) -> None:
    allowed = tmp_path / "allowed"
    script = (
        "import os, sys; os.path.exists(sys.argv[1]) or sys.exit(1); os.execv(sys.executable, sys.argv[2:])"
    )
    command = ("python", "-c", script, str(allowed), sys.executable, *sim.command[1:])
    async with connected(McpServer("sim", command=command)) as tools:
        assert await tools.schemas() == {}
        allowed.touch()
        assert set(await tools.schemas()) == {tool.name for tool in CONTRACTS}
        assert (await call(tools, "read_fact", {"name": "x"})).failure is None


# --- a server that dies ---------------------------------------------------------------------------


@pytest.mark.parametrize(("mode", "events"), [("die", ["called"]), ("apply_then_die", ["called", "applied"])])
async def test_C068_a_server_that_dies_during_a_call_leaves_open_whether_it_took_effect(
    sim: Sim, mode: str, events: list[str]
) -> None:
    async with connected(sim.stdio()) as tools:
        sim.tell("write_plain", mode=mode)
        outcome = await call(tools, "write_plain", {"title": "x"})
        assert outcome.failure is ToolFailure.IO_ERROR
        assert failed_call(outcome.failure, SideEffect.WRITE).status is CallStatus.UNKNOWN
        assert failed_call(outcome.failure, SideEffect.NONE).status is CallStatus.FAILED
        assert sim.happened("write_plain") == events  # once: nothing is sent twice


async def test_every_call_in_flight_learns_of_the_death(sim: Sim) -> None:
    async with connected(sim.stdio()) as tools:
        sim.tell("read_fact", mode="hang")
        waiting = [asyncio.create_task(call(tools, "read_fact", {"name": "x"})) for _ in range(3)]
        pid = (await sim.seen("called", "read_fact"))["pid"]
        os.kill(pid, signal.SIGKILL)
        async with asyncio.timeout(5):
            outcomes = await asyncio.gather(*waiting)
        assert {outcome.failure for outcome in outcomes} == {ToolFailure.IO_ERROR}


async def test_the_call_after_a_death_starts_the_server_again_and_succeeds(sim: Sim) -> None:
    async with connected(sim.stdio()) as tools:
        sim.tell("write_plain", mode="die")
        for _ in range(3):  # however often it dies: each of these starts was a success
            assert (await call(tools, "write_plain", {"title": "x"})).failure is ToolFailure.IO_ERROR
            assert (await call(tools, "read_fact", {"name": "x"})).failure is None
        assert len({event["pid"] for event in sim.events("write_plain")}) == 3


async def test_a_server_that_died_while_idle_is_started_again(sim: Sim) -> None:
    async with connected(sim.stdio()) as tools:
        first = await pid_of(tools)
        os.kill(first, signal.SIGKILL)
        await gone(first)
        assert await pid_of(tools) != first
        assert set(await tools.schemas()) == {tool.name for tool in CONTRACTS}


async def test_a_frozen_server_is_a_time_out(sim: Sim) -> None:
    async with connected(sim.stdio()) as tools:
        pid = await pid_of(tools)
        os.kill(pid, signal.SIGSTOP)
        try:
            outcome = await call(tools, "write_plain", {"title": "x" * 100_000}, timeout=0.3)
        finally:
            os.kill(pid, signal.SIGCONT)
        assert outcome.failure is ToolFailure.TIMEOUT
        assert (await call(tools, "read_fact", {"name": "x"})).failure is None


# --- the end --------------------------------------------------------------------------------------


async def test_close_leaves_no_process_behind(sim: Sim) -> None:
    tools = McpTools([sim.stdio()], CONTRACTS)
    pid = await pid_of(tools)
    assert psutil.pid_exists(pid)
    await tools.close()
    assert not psutil.pid_exists(pid)


async def test_close_ends_a_server_that_does_not_want_to_end(tmp_path: Path) -> None:
    """It ignores the end of its input and SIGTERM, and it has a child."""
    pids = tmp_path / "pids"
    script = (
        "import signal, subprocess, sys, os; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
        "child = subprocess.Popen([sys.executable, '-c', 'import signal; signal.pause()']);"
        f"open({str(pids)!r}, 'w').write(f'{{os.getpid()}} {{child.pid}}\\n');"
        "[signal.pause() for _ in iter(int, 1)]"
    )
    tools = McpTools([McpServer("sim", command=("python", "-c", script))], CONTRACTS)
    await tools.start()
    async with asyncio.timeout(10):
        while not (pids.exists() and pids.read_text().endswith("\n")):  # noqa: ASYNC110  another process writes
            await asyncio.sleep(0.01)
    async with asyncio.timeout(40):
        await tools.close()
    for pid in pids.read_text().split():
        await gone(int(pid))


async def test_close_ends_calls_in_flight_and_refuses_later_ones(sim: Sim) -> None:
    tools = McpTools([sim.stdio()], CONTRACTS)
    sim.tell("write_plain", mode="apply_then_hang")
    write = asyncio.create_task(call(tools, "write_plain", {"title": "x"}))
    pid = (await sim.seen("applied", "write_plain"))["pid"]
    await tools.close()
    async with asyncio.timeout(5):
        assert (await write).failure is ToolFailure.IO_ERROR
    await gone(pid)
    assert (await call(tools, "read_fact")).failure is ToolFailure.UNREACHABLE
    assert await tools.schemas() == {}
    await tools.close()  # a second time: nothing to do


async def test_closing_what_was_never_used_starts_nothing(sim: Sim) -> None:
    await McpTools([sim.stdio()], CONTRACTS).close()
    assert sim.events() == []


async def test_the_process_outlives_the_caller_that_happened_to_start_it(sim: Sim) -> None:
    async with connected(sim.stdio()) as tools:
        sim.tell("read_fact", mode="hang")
        first = asyncio.create_task(call(tools, "read_fact", {"name": "x"}))
        pid = (await sim.seen("called", "read_fact"))["pid"]
        first.cancel()
        await asyncio.wait([first])
        assert await pid_of(tools) == pid


# --- what a server inherits -----------------------------------------------------------------------


async def test_a_server_does_not_inherit_the_services_secrets(
    sim: Sim, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = "canary-7f3a"
    secrets = (
        "TURNFENCE_MODEL__API_KEY",
        "TURNFENCE_REDIS_URL",
        "TURNFENCE_SQL_URL",
        "AWS_SECRET",
        "DESK_TOKEN",
    )
    for name in secrets:
        monkeypatch.setenv(name, secret)
    monkeypatch.setenv("TURNFENCE_OPS_LOG_DIRS", "/var/log/app")
    monkeypatch.setenv("TURNFENCE_DATA_DIR", "/data")
    async with connected(sim.stdio()) as tools:
        environment = json.loads((await call(tools, "surroundings")).result_json)["environment"]
    assert secret not in json.dumps(environment)
    assert environment["TURNFENCE_OPS_LOG_DIRS"] == "/var/log/app"
    assert environment["TURNFENCE_DATA_DIR"] == "/data"
    assert environment["PATH"] == os.environ["PATH"]


async def test_a_given_environment_is_used_in_place_of_the_services(sim: Sim) -> None:
    given = {**os.environ, "TURNFENCE_OPS_TICKETS": "/elsewhere/tickets.db", "TURNFENCE_MODEL__API_KEY": "x"}
    async with connected(sim.stdio(), env=given) as tools:
        environment = json.loads((await call(tools, "surroundings")).result_json)["environment"]
    assert environment["TURNFENCE_OPS_TICKETS"] == "/elsewhere/tickets.db"
    assert "TURNFENCE_MODEL__API_KEY" not in environment


# --- answers that are not what the protocol says --------------------------------------------------


def answered(structured: str, content: str = "[]", more: str = "") -> str:
    result = f'{{"content": {content}, "structuredContent": {structured}{more}}}'
    return f'{{"jsonrpc": "2.0", "id": $ID, "result": {result}}}'


WRONG_FORMS: Mapping[str, tuple[str, ToolFailure]] = {
    "not_the_declared_structure": (answered('{"n": "one"}'), ToolFailure.UNKNOWN_CALL),
    "no_structure_at_all": (
        '{"jsonrpc": "2.0", "id": $ID, "result": {"content": []}}',
        ToolFailure.UNKNOWN_CALL,
    ),
    "a_list_as_structure": (answered("[1]"), ToolFailure.UNKNOWN_CALL),
    "content_that_is_no_list": (answered('{"n": 1}', '"x"'), ToolFailure.UNKNOWN_CALL),
    "content_of_an_unknown_type": (answered('{"n": 1}', '[{"type": "smell"}]'), ToolFailure.UNKNOWN_CALL),
    "not_a_number": (answered('{"n": 1, "v": NaN}'), ToolFailure.UNKNOWN_CALL),
    "infinite": (answered('{"n": 1, "v": 1e400}'), ToolFailure.UNKNOWN_CALL),
    # What cannot be told to be the answer is none: the call runs into its time limit.
    "no_json": ("Traceback (most recent call last):", ToolFailure.TIMEOUT),
    "another_calls_id": ('{"jsonrpc": "2.0", "id": 99999, "result": {}}', ToolFailure.TIMEOUT),
    "a_number_as_result": ('{"jsonrpc": "2.0", "id": $ID, "result": 7}', ToolFailure.TIMEOUT),
    "half_a_character": (answered('{"n": 1, "v": "\\ud800"}'), ToolFailure.TIMEOUT),
    "nested_too_deep": (answered(f'{{"n": 1, "v": {"[" * 1500}{"]" * 1500}}}'), ToolFailure.TIMEOUT),
}


ODD = ToolContract("raw.odd", "raw", "odd")


class Told:
    """What the server that answers anything shall answer."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self.server = McpServer("raw", command=("python", str(RAW_SERVER), str(file)))

    def say(self, text: str) -> None:
        self._file.write_text(text, encoding="utf-8")


@pytest.fixture
def told(tmp_path: Path) -> Told:
    return Told(tmp_path / "answer")


@pytest.mark.parametrize(("answer", "failure"), WRONG_FORMS.values(), ids=WRONG_FORMS.keys())
async def test_an_answer_of_a_wrong_form_says_nothing_about_the_effect(
    told: Told, answer: str, failure: ToolFailure
) -> None:
    async with connected(told.server, contracts=[ODD]) as tools:
        told.say(answer)
        await tools.schemas()
        outcome = await call(tools, ODD, timeout=0.3 if failure is ToolFailure.TIMEOUT else 10)
        assert (outcome.failure, outcome.result_json) == (failure, "")
        assert failed_call(failure, SideEffect.WRITE).status is CallStatus.UNKNOWN
        told.say(answered('{"n": 1}'))
        assert (await call(tools, ODD)).result_json == '{"n":1}'  # and the connection still stands


async def test_noise_on_the_wire_is_passed_over(told: Told) -> None:
    told.say("starting up…\n\n[1, 2]\n" + answered('{"n": 1}') + "\n" + answered('{"n": 2}'))
    async with connected(told.server, contracts=[ODD]) as tools:
        for _ in range(3):
            assert (await call(tools, ODD)).result_json == '{"n":1}'


async def test_numbers_come_back_as_they_were_written(told: Told) -> None:
    told.say(answered('{"n": 1, "big": 9007199254740993, "tenth": 0.1, "one": 1.0}'))
    async with connected(told.server, contracts=[ODD]) as tools:
        outcome = await call(tools, ODD)
    assert outcome.result_json == '{"n":1,"big":9007199254740993,"tenth":0.1,"one":1.0}'


async def test_a_tool_error_without_text_gives_its_structure_as_words(told: Told) -> None:
    told.say(answered('{"why": "配额"}', more=', "isError": true'))
    async with connected(told.server, contracts=[ODD]) as tools:
        outcome = await call(tools, ODD)
    assert (outcome.failure, outcome.message) == (ToolFailure.MCP_TOOL_ERROR, '{"why": "配额"}')
