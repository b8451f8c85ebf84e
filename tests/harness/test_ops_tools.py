"""The bundled host tools as an MCP client sees them: a real process over stdio, real readings of this
machine, and tickets that a request makes once."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from harness_service.adapters.catalogue_yaml import load_catalogue
from harness_service.adapters.mcp_tools import McpTools
from harness_service.core.catalogue import McpServer, ToolContract
from harness_service.core.tool_failure import ToolFailure
from harness_service.ports import ToolOutcome
from harness_service.server import BUNDLED

SERVER = McpServer("ops", command=("python", "-m", "harness_service.adapters.ops_tools"))
NAMES = (
    "cpu_load",
    "memory_usage",
    "disk_usage",
    "top_processes",
    "search_log",
    "check_port",
    "create_ticket",
    "find_ticket",
)
CONTRACTS = tuple(ToolContract(f"ops.{name}", "ops", name) for name in NAMES)
TICKET = {"title": "disk / is full", "service": "billing"}
_keys = itertools.count(1)


def new_key() -> str:
    return f"key-{next(_keys)}"


class Ops:
    """A client of one server process."""

    def __init__(self, tools: McpTools, folder: Path) -> None:
        self.tools = tools
        self.logs = folder / "logs"

    async def outcome(self, name: str, arguments: Any, key: str | None = None) -> ToolOutcome:
        contract = next(c for c in CONTRACTS if c.remote_name == name)
        key = new_key() if key is None else key
        return await self.tools.call(contract, json.dumps(arguments), idempotency_key=key, timeout=30)

    async def call(self, name: str, key: str | None = None, /, **arguments: Any) -> dict[str, Any]:
        outcome = await self.outcome(name, arguments, key)
        assert outcome.failure is None, outcome
        result: dict[str, Any] = json.loads(outcome.result_json)
        return result

    async def refusal(self, name: str, **arguments: Any) -> str:
        outcome = await self.outcome(name, arguments)
        assert outcome.failure is ToolFailure.MCP_TOOL_ERROR, outcome
        return outcome.message

    async def tickets(self, **wanted: str) -> list[dict[str, Any]]:
        items: list[dict[str, Any]] = (await self.call("find_ticket", **wanted))["items"]
        return items


@asynccontextmanager
async def started(folder: Path, tickets: Path | None = None) -> AsyncIterator[Ops]:
    environment = {
        **os.environ,
        "TURNFENCE_OPS_LOG_DIRS": f"{folder / 'logs'}:{folder / 'more logs'}",
        "TURNFENCE_DATA_DIR": str(folder / "data"),
    }
    if tickets is not None:
        environment["TURNFENCE_OPS_TICKETS"] = str(tickets)
    tools = McpTools([SERVER], CONTRACTS, env=environment, connect_timeout=60)
    try:
        yield Ops(tools, folder)
    finally:
        await tools.close()


@pytest.fixture(scope="module")
async def ops(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Ops]:
    """One process for all tests that do not need their own: its start costs more than its calls."""
    folder = tmp_path_factory.mktemp("ops")
    for name in ("logs", "more logs"):
        (folder / name).mkdir()
    async with started(folder) as server:
        yield server


async def test_the_server_offers_what_the_bundled_catalogue_names(ops: Ops) -> None:
    schemas = await ops.tools.schemas()
    assert set(schemas) == set(load_catalogue(BUNDLED).tools) == {f"ops.{name}" for name in NAMES}
    for offered in schemas.values():
        assert len(offered.description) > 10
        assert offered.input_schema["type"] == "object"
        assert offered.input_schema["additionalProperties"] is False
    ticket = schemas["ops.create_ticket"].input_schema
    assert ticket["required"] == ["title", "service"]
    assert set(ticket["properties"]) == {"title", "service", "description", "severity", "request_id"}


# --- readings -------------------------------------------------------------------------------------


async def test_cpu_load_is_this_machines(ops: Ops) -> None:
    reading = await ops.call("cpu_load")
    assert reading["processors"] == os.cpu_count()
    assert 0 <= reading["percent"] <= 100
    for name, now in zip(("load_1m", "load_5m", "load_15m"), os.getloadavg(), strict=True):
        assert reading[name] == pytest.approx(now, abs=2 + now / 2)  # averages: they move slowly


@pytest.fixture
def burner() -> Iterator[int]:
    """A process that uses a whole processor."""
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as process:
        yield process.pid
        process.kill()


async def test_a_busy_processor_shows(ops: Ops, burner: int) -> None:
    reading = await ops.call("cpu_load")
    assert reading["percent"] >= 100 / reading["processors"] / 3  # one of them, and others want it too
    found = (await ops.call("top_processes", limit=100))["processes"]
    (row,) = [process for process in found if process["pid"] == burner]
    assert row["cpu_percent"] > 5


async def test_memory_is_this_machines(ops: Ops) -> None:
    reading = await ops.call("memory_usage")
    memory = psutil.virtual_memory()
    assert reading["total_bytes"] == memory.total
    assert 0 < reading["available_bytes"] < memory.total
    assert reading["available_bytes"] == pytest.approx(memory.available, abs=memory.total / 4)
    assert reading["percent"] == pytest.approx(100 - 100 * reading["available_bytes"] / memory.total, abs=2)
    assert 0 <= reading["swap_percent"] <= 100


async def test_disks_are_this_machines_fullest_first(ops: Ops) -> None:
    found = (await ops.call("disk_usage"))["filesystems"]
    assert found
    for disk in found:
        now = os.statvfs(disk["path"])
        assert disk["total_bytes"] == now.f_blocks * now.f_frsize
        assert 0 <= disk["free_bytes"] <= disk["total_bytes"]
        assert 0 <= disk["percent"] <= 100
    assert [disk["percent"] for disk in found] == sorted((disk["percent"] for disk in found), reverse=True)
    root = os.statvfs("/")
    assert root.f_blocks * root.f_frsize in [disk["total_bytes"] for disk in found]


@pytest.mark.parametrize(("by", "field"), [("cpu", "cpu_percent"), ("memory", "memory_bytes")])
async def test_the_processes_that_use_most_come_first(ops: Ops, by: str, field: str) -> None:
    found = (await ops.call("top_processes", by=by, limit=3))["processes"]
    assert 1 <= len(found) <= 3
    assert [row[field] for row in found] == sorted((row[field] for row in found), reverse=True)
    for row in found:
        assert row["pid"] > 0
        assert row["name"]
        assert 0 <= row["memory_bytes"] < psutil.virtual_memory().total
    assert len((await ops.call("top_processes", by=by))["processes"]) <= 5


async def test_a_process_reads_as_it_is(ops: Ops) -> None:
    found = (await ops.call("top_processes", by="memory", limit=100))["processes"]
    (me,) = [row for row in found if row["pid"] == os.getpid()]
    assert me["name"] == psutil.Process().name()
    assert me["memory_bytes"] == pytest.approx(psutil.Process().memory_info().rss, rel=0.5)


@pytest.fixture
def listening() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


async def test_a_port_is_open_while_somebody_listens(ops: Ops, listening: int) -> None:
    for given in ({}, {"host": "127.0.0.1"}, {"host": "localhost"}):
        state = await ops.call("check_port", port=listening, **given)
        assert state == {"host": given.get("host", "127.0.0.1"), "port": listening, "open": True}


async def test_a_port_is_closed_when_nobody_does(ops: Ops) -> None:
    with socket.socket() as reserved:  # bound and not listening: nobody else can open it meanwhile
        reserved.bind(("127.0.0.1", 0))
        port = reserved.getsockname()[1]
        assert (await ops.call("check_port", port=port))["open"] is False


@pytest.mark.parametrize("host", ["192.0.2.1", "0.0.0.0", "example.org", "127.0.0.2", "", "LOCALHOST\n"])
async def test_only_this_hosts_ports_are_looked_at(ops: Ops, host: str) -> None:
    assert "only this host's own ports" in await ops.refusal("check_port", port=80, host=host)


# --- logs -----------------------------------------------------------------------------------------


async def test_a_log_is_searched_for_plain_text_whatever_its_case(ops: Ops) -> None:
    log = ops.logs / "app.log"
    log.write_bytes("start\nERROR a.b\nerror axb\n错误 Error A.B\n".encode() + b"\xff error a.b\nend")
    result = await ops.call("search_log", path=str(log), pattern="Error a.b")
    assert result == {
        "path": str(log.resolve()),
        "pattern": "Error a.b",
        "searched_bytes": log.stat().st_size,
        "matches": [
            {"line": 2, "text": "ERROR a.b"},
            {"line": 4, "text": "错误 Error A.B"},
            {"line": 5, "text": "\ufffd error a.b"},
        ],
    }
    assert (await ops.call("search_log", path=str(log), pattern="错误"))["matches"][0]["line"] == 4
    assert (await ops.call("search_log", path=str(log), pattern="no such"))["matches"] == []


async def test_of_many_matches_the_last_are_given_and_long_lines_are_cut(ops: Ops) -> None:
    log = ops.logs.parent / "more logs" / "many.log"
    log.write_text("".join(f"hit {n} {'x' * 1000}\n" for n in range(1, 51)), encoding="utf-8")
    matches = (await ops.call("search_log", path=str(log), pattern="hit", limit=2))["matches"]
    assert [(m["line"], m["text"][:6], len(m["text"])) for m in matches] == [
        (49, "hit 49", 400),
        (50, "hit 50", 400),
    ]
    assert len((await ops.call("search_log", path=str(log), pattern="hit"))["matches"]) == 20


async def test_only_the_end_of_a_huge_log_is_searched(ops: Ops) -> None:
    log = ops.logs / "huge.log"
    with log.open("wb") as file:
        file.write(b"walrus at the start\n")
        file.truncate(9 * 1024 * 1024)
        file.seek(0, os.SEEK_END)
        file.write(b"\nwalrus at the end\n")
    result = await ops.call("search_log", path=str(log), pattern="walrus")
    assert [match["text"] for match in result["matches"]] == ["walrus at the end"]
    assert result["searched_bytes"] == 8 * 1024 * 1024


OUTSIDE = (
    "{0}/secret.log",
    "{0}/logs/../secret.log",
    "{0}/logs/link.log",
    "{0}/logs/out/secret.log",
    "{0}/logs2/x",
)


@pytest.mark.parametrize("path", [*OUTSIDE, "/etc/passwd", "/proc/self/environ", "secret.log", "", "~/x"])
async def test_no_file_outside_the_log_folders_can_be_read(ops: Ops, path: str) -> None:
    folder = ops.logs.parent
    (folder / "logs2").mkdir(exist_ok=True)
    for file in (folder / "secret.log", folder / "logs2" / "x"):
        file.write_text("the password\n", encoding="utf-8")
    for link, target in (("link.log", folder / "secret.log"), ("out", folder)):
        if not (ops.logs / link).is_symlink():
            (ops.logs / link).symlink_to(target)
    message = await ops.refusal("search_log", path=path.format(folder), pattern="password")
    assert "not in a folder that may be searched" in message
    assert "the password" not in message


@pytest.mark.parametrize("name", ["missing.log", "", "fifo", "a\x00b"])
async def test_what_is_no_log_file_is_refused_at_once(ops: Ops, name: str) -> None:
    if not (ops.logs / "fifo").exists():
        os.mkfifo(ops.logs / "fifo")  # to open it would wait for ever
    async with asyncio.timeout(10):
        await ops.refusal("search_log", path=f"{ops.logs}/{name}", pattern="x")


# --- tickets --------------------------------------------------------------------------------------


async def test_a_ticket_is_opened_as_it_was_asked_for_and_is_found(ops: Ops) -> None:
    key, before = new_key(), int(time.time())
    asked = {"title": "磁盘 / 100 %", "service": "计费", "description": "it's; DROP\n", "severity": "high"}
    ticket = await ops.call("create_ticket", key, **asked)
    assert ticket["status"] == "created"
    assert {name: ticket[name] for name in asked} == asked
    assert ticket["request_id"] == key  # from the call's _meta
    assert before <= ticket["created_at_seconds"] <= time.time()
    del ticket["status"]
    for wanted in ({"request_id": key}, {"id": ticket["id"]}, {"title": "盘 / 1"}):
        assert await ops.tickets(**wanted) == [ticket]
    assert ticket in await ops.tickets()


@pytest.mark.parametrize("how", ["meta", "argument"])
async def test_one_key_makes_one_ticket_whatever_is_asked_again(ops: Ops, how: str) -> None:
    key = new_key()
    more = {"request_id": key} if how == "argument" else {}
    first = await ops.call("create_ticket", key if how == "meta" else new_key(), **TICKET, **more)
    again = await ops.call(
        "create_ticket", key if how == "meta" else new_key(), title="other", service="other", **more
    )
    assert first["status"] == "created"
    assert again == first | {"status": "existing"}
    assert len(await ops.tickets(request_id=key)) == 1


async def test_the_argument_outranks_the_meta_key(ops: Ops) -> None:
    meta, argument = new_key(), new_key()
    await ops.call("create_ticket", meta, **TICKET, request_id=argument)
    assert await ops.tickets(request_id=meta) == []
    assert len(await ops.tickets(request_id=argument)) == 1


async def test_other_keys_make_other_tickets_and_no_key_makes_one_each_time(ops: Ops) -> None:
    made = [await ops.call("create_ticket", key, **TICKET) for key in (new_key(), new_key(), "", "")]
    assert len({ticket["id"] for ticket in made}) == len(made)
    assert len({ticket["request_id"] for ticket in made}) == len(made)


@pytest.mark.parametrize("processes", [1, 2])
async def test_writes_at_once_with_one_key_make_one_ticket(tmp_path: Path, processes: int) -> None:
    """Also from two processes, on a database that none of them has made yet."""
    database = tmp_path / "deep" / "tickets.db"
    async with started(tmp_path, database) as first, started(tmp_path, database) as second:
        servers = [first, second][:processes]
        for server in servers:
            assert await server.tools.schemas()  # it runs
        writes = [servers[n % processes].call("create_ticket", "one", **TICKET) for n in range(16)]
        tickets = await asyncio.gather(*writes)
        assert sorted(ticket["status"] for ticket in tickets) == ["created"] + ["existing"] * 15
        assert len({ticket["id"] for ticket in tickets}) == 1
        assert len(await servers[-1].tickets()) == 1


async def test_tickets_outlive_the_server(tmp_path: Path) -> None:
    async with started(tmp_path) as server:
        ticket = await server.call("create_ticket", "k", **TICKET)
        assert (tmp_path / "data" / "tickets.db").is_file()
    async with started(tmp_path) as server:
        assert await server.call("create_ticket", "k", **TICKET) == ticket | {"status": "existing"}


@pytest.mark.parametrize(
    "wanted", [{"title": "no such title"}, {"id": "%"}, {"request_id": "' OR '1' = '1"}, {"title": "%"}]
)
async def test_what_is_not_there_is_not_found(tmp_path: Path, ops: Ops, wanted: dict[str, str]) -> None:
    await ops.call("create_ticket", title="plain", service="x")
    assert [ticket for ticket in await ops.tickets(**wanted) if ticket["title"] == "plain"] == []


async def test_all_that_is_asked_of_a_ticket_must_hold(ops: Ops) -> None:
    key = new_key()
    ticket = await ops.call("create_ticket", key, title="Walrus Down", service="x")
    assert len(await ops.tickets(title="walrus", id=ticket["id"], request_id=key)) == 1
    assert await ops.tickets(title="walrus", id=ticket["id"], request_id="other") == []


# --- bad arguments --------------------------------------------------------------------------------

BAD: Mapping[str, tuple[str, dict[str, Any], str]] = {
    "no_title": ("create_ticket", {"service": "x"}, "title"),
    "no_service": ("create_ticket", {"title": "x"}, "service"),
    "empty_title": ("create_ticket", {"title": "", "service": "x"}, "title"),
    "long_title": ("create_ticket", {"title": "x" * 201, "service": "x"}, "title"),
    "long_description": ("create_ticket", {**TICKET, "description": "x" * 4001}, "description"),
    "long_request_id": ("create_ticket", {**TICKET, "request_id": "x" * 201}, "request_id"),
    "unknown_severity": ("create_ticket", {**TICKET, "severity": "HIGH"}, "severity"),
    "number_as_title": ("create_ticket", {"title": 7, "service": "x"}, "title"),
    "no_port": ("check_port", {}, "port"),
    "port_0": ("check_port", {"port": 0}, "port"),
    "port_65536": ("check_port", {"port": 65536}, "port"),
    "text_as_port": ("check_port", {"port": "ssh"}, "port"),
    "limit_101": ("top_processes", {"limit": 101}, "limit"),
    "by_nothing_known": ("top_processes", {"by": "disk"}, "by"),
    "no_path": ("search_log", {"pattern": "x"}, "path"),
    "no_pattern": ("search_log", {"path": "/var/log/x"}, "pattern"),
    "long_pattern": ("search_log", {"path": "/var/log/x", "pattern": "x" * 201}, "pattern"),
    "long_path": ("search_log", {"path": "/" + "x" * 1000, "pattern": "x"}, "path"),
    "list_as_title": ("find_ticket", {"title": []}, "title"),
    "long_id": ("find_ticket", {"id": "x" * 65}, "id"),
    "misspelt_filter": ("find_ticket", {"titel": "x"}, "titel"),  # dropped, it would find every ticket
    "misspelt_detail": ("create_ticket", {**TICKET, "sevrity": "high"}, "sevrity"),
    "an_argument_of_a_tool_that_has_none": ("cpu_load", {"host": "db-1"}, "host"),
}


@pytest.mark.parametrize(("tool", "arguments", "named"), BAD.values(), ids=BAD.keys())
async def test_a_bad_argument_is_refused_by_its_name(
    ops: Ops, tool: str, arguments: dict[str, Any], named: str
) -> None:
    before = len(await ops.tickets())
    message = await ops.refusal(tool, **arguments)
    assert f"\n{named}\n" in message  # as the line of the field that is wrong
    assert len(await ops.tickets()) == before
