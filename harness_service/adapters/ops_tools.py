"""The bundled MCP server: real readings of this machine, and one real write (tickets).

``python -m harness_service.adapters.ops_tools`` serves over stdio, ``--http PORT`` over streamable HTTP on
loopback. Read tools change nothing. Log search stays below ``TURNFENCE_OPS_LOG_DIRS`` (colon-separated,
default ``/var/log``), port checks stay on loopback, tickets lie in SQLite (``TURNFENCE_OPS_TICKETS``,
default ``tickets.db`` in ``TURNFENCE_DATA_DIR``).
"""

from __future__ import annotations

import argparse
import os
import secrets
import socket
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import psutil
from mcp.server import MCPServer
from mcp.server.mcpserver import Context
from mcp.server.mcpserver.exceptions import ToolError
from mcp.server.mcpserver.tools import Tool
from pydantic import BaseModel, Field, create_model

IDEMPOTENCY_META = "turnfence/idempotency-key"
_LOG_BYTES_MAX = 8 * 1024 * 1024  # how much of a log's end is searched
_LINE_CHARS_MAX = 400
_LOOPBACK = ("127.0.0.1", "localhost", "::1")

_TOOLS: list[Tool] = []
F = TypeVar("F", bound=Callable[..., Any])


def _tool(function: F) -> F:
    """Offer a function as a tool that refuses what is no argument of it: a misspelt filter, if it were
    dropped, would find everything."""
    tool = Tool.from_function(function)
    loose = tool.fn_metadata.arg_model
    strict = create_model(loose.__name__, __base__=loose, __cls_kwargs__={"extra": "forbid"})
    tool.fn_metadata.arg_model = strict
    tool.parameters = strict.model_json_schema()
    _TOOLS.append(tool)
    return function


Limit = Annotated[int, Field(ge=1, le=100, description="How many to return at most.")]


class CpuLoad(BaseModel):
    percent: float = Field(description="Busy share of all processors over the last 0.2 s, in percent.")
    processors: int = Field(description="Number of logical processors.")
    load_1m: float = Field(description="Load average of the last minute.")
    load_5m: float
    load_15m: float


class MemoryUsage(BaseModel):
    percent: float = Field(description="Used share of physical memory, in percent.")
    total_bytes: int
    available_bytes: int
    swap_percent: float


class FileSystem(BaseModel):
    path: str = Field(description="Where it is mounted.")
    percent: float = Field(description="Used share, in percent.")
    total_bytes: int
    free_bytes: int


class DiskUsage(BaseModel):
    filesystems: list[FileSystem]


class Process(BaseModel):
    pid: int
    name: str
    cpu_percent: float = Field(description="Processor share over the last 0.2 s; 100 is one whole processor.")
    memory_bytes: int = Field(description="Resident memory.")


class Processes(BaseModel):
    processes: list[Process]


class LogLine(BaseModel):
    line: int = Field(description="Number of the line within what was searched.")
    text: str


class LogMatches(BaseModel):
    path: str
    pattern: str
    searched_bytes: int = Field(description="Size of the searched end of the file.")
    matches: list[LogLine] = Field(description="The last matching lines, oldest first.")


class PortState(BaseModel):
    host: str
    port: int
    open: bool = Field(description="Whether something accepts TCP connections there.")


class Ticket(BaseModel):
    id: str
    title: str
    service: str
    description: str
    severity: str
    request_id: str
    created_at_seconds: int = Field(description="Unix time.")


class OpenedTicket(Ticket):
    status: Literal["created", "existing"] = Field(description="existing: the same request made it before.")


class Tickets(BaseModel):
    items: list[Ticket]


@_tool
def cpu_load() -> CpuLoad:
    """How busy this host's processors are."""
    one, five, fifteen = psutil.getloadavg()
    return CpuLoad(
        percent=psutil.cpu_percent(interval=0.2),
        processors=psutil.cpu_count() or 1,
        load_1m=round(one, 2),
        load_5m=round(five, 2),
        load_15m=round(fifteen, 2),
    )


@_tool
def memory_usage() -> MemoryUsage:
    """How much of this host's memory is used."""
    memory = psutil.virtual_memory()
    return MemoryUsage(
        percent=memory.percent,
        total_bytes=memory.total,
        available_bytes=memory.available,
        swap_percent=psutil.swap_memory().percent,
    )


@_tool
def disk_usage() -> DiskUsage:
    """How full this host's file systems are."""
    found: dict[str, FileSystem] = {}
    for partition in psutil.disk_partitions(all=False) or []:
        usage = _usage(partition.mountpoint)
        if usage is not None:
            found.setdefault(partition.device, usage)
    root = _usage("/")
    if root is not None and all(one.path != "/" for one in found.values()):
        found["/"] = root
    return DiskUsage(filesystems=sorted(found.values(), key=lambda one: -one.percent))


def _usage(path: str) -> FileSystem | None:
    """None for what this user may not look at, or what has no size."""
    try:
        usage = psutil.disk_usage(path)
    except OSError:
        return None
    if not usage.total:
        return None
    return FileSystem(path=path, percent=usage.percent, total_bytes=usage.total, free_bytes=usage.free)


@_tool
def top_processes(limit: Limit = 5, by: Literal["cpu", "memory"] = "cpu") -> Processes:
    """The processes of this host that use most processor time or memory."""
    running = list(psutil.process_iter())
    for process in running:
        _measured(process)
    time.sleep(0.2)  # noqa: TID251  processor use is measured over a span of time
    rows = [row for process in running if (row := _measured(process)) is not None]
    rows.sort(key=lambda row: row.cpu_percent if by == "cpu" else row.memory_bytes, reverse=True)
    return Processes(processes=rows[:limit])


def _measured(process: psutil.Process) -> Process | None:
    """None when it has ended meanwhile, or may not be looked at."""
    try:
        with process.oneshot():
            return Process(
                pid=process.pid,
                name=process.name(),
                cpu_percent=process.cpu_percent(),
                memory_bytes=process.memory_info().rss,
            )
    except psutil.Error:
        return None


@_tool
def search_log(
    path: Annotated[str, Field(description="Whole path of the log file.", max_length=1000)],
    pattern: Annotated[str, Field(description="Plain text to look for; case counts not.", max_length=200)],
    limit: Limit = 20,
) -> LogMatches:
    """Search the end of a log file of this host for a text."""
    file = _log_file(path)
    with file.open("rb") as log:
        size = log.seek(0, os.SEEK_END)
        log.seek(max(0, size - _LOG_BYTES_MAX))
        searched = log.read(_LOG_BYTES_MAX)
    wanted = pattern.casefold()
    matches = [
        LogLine(line=number, text=line[:_LINE_CHARS_MAX])
        for number, line in enumerate(searched.decode(errors="replace").splitlines(), 1)
        if wanted in line.casefold()
    ]
    return LogMatches(path=str(file), pattern=pattern, searched_bytes=len(searched), matches=matches[-limit:])


def _log_file(path: str) -> Path:
    """The real file, if it lies in a folder that may be searched: links and dots are resolved first."""
    file = Path(path).resolve()
    allowed = os.environ.get("TURNFENCE_OPS_LOG_DIRS", "/var/log").split(":")
    if not any(file.is_relative_to(Path(folder).resolve()) for folder in allowed if folder):
        raise ToolError("this file is not in a folder that may be searched")
    if not file.is_file():
        raise ToolError("there is no such file")
    return file


@_tool
def check_port(
    port: Annotated[int, Field(ge=1, le=65535)],
    host: Annotated[str, Field(description="This host: 127.0.0.1, localhost or ::1.")] = "127.0.0.1",
) -> PortState:
    """Whether something listens on a port of this host."""
    if host not in _LOOPBACK:
        raise ToolError("only this host's own ports can be checked")
    try:
        with socket.create_connection((host, port), timeout=2):
            return PortState(host=host, port=port, open=True)
    except OSError:
        return PortState(host=host, port=port, open=False)


@_tool
def create_ticket(
    context: Context,
    title: Annotated[str, Field(min_length=1, max_length=200)],
    service: Annotated[str, Field(min_length=1, max_length=100, description="What the ticket is about.")],
    description: Annotated[str, Field(max_length=4000)] = "",
    severity: Literal["", "low", "medium", "high"] = "",
    request_id: Annotated[str, Field(max_length=200, description="The same request makes one ticket.")] = "",
) -> OpenedTicket:
    """Open a ticket. Asked again with the same request id, it answers with the ticket it opened."""
    key = request_id or _idempotency_key(context) or secrets.token_hex(16)
    row = (secrets.token_hex(4), title, service, description, severity, key, int(time.time()))
    with _tickets() as tickets:
        made = tickets.execute(
            "INSERT INTO ticket (id, title, service, description, severity, request_id, created_at)"
            " VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT (request_id) DO NOTHING",
            row,
        ).rowcount
        (found,) = tickets.execute("SELECT * FROM ticket WHERE request_id = ?", (key,)).fetchall()
    return OpenedTicket(status="created" if made else "existing", **_ticket(found).model_dump())


def _idempotency_key(context: Context) -> str:
    meta = context.request_context.meta or {}
    return str(dict(meta).get(IDEMPOTENCY_META, ""))


@_tool
def find_ticket(
    title: Annotated[str, Field(max_length=200)] = "",
    id: Annotated[str, Field(max_length=64)] = "",  # noqa: A002  the name that callers use
    request_id: Annotated[str, Field(max_length=200)] = "",
) -> Tickets:
    """Find tickets by part of their title, by id, or by the request that made them; without any, all."""
    with _tickets() as tickets:
        rows = tickets.execute(
            "SELECT * FROM ticket WHERE (? = '' OR instr(lower(title), lower(?)) > 0)"
            " AND (? = '' OR id = ?) AND (? = '' OR request_id = ?) ORDER BY created_at DESC LIMIT 100",
            (title, title, id, id, request_id, request_id),
        ).fetchall()
    return Tickets(items=[_ticket(row) for row in rows])


def _ticket(row: sqlite3.Row) -> Ticket:
    return Ticket(
        id=row["id"],
        title=row["title"],
        service=row["service"],
        description=row["description"],
        severity=row["severity"],
        request_id=row["request_id"],
        created_at_seconds=row["created_at"],
    )


@contextmanager
def _tickets() -> Iterator[sqlite3.Connection]:
    """One transaction on the tickets' database, which is made at its first use."""
    folder = Path(os.environ.get("TURNFENCE_DATA_DIR", ".turnfence"))
    path = Path(os.environ.get("TURNFENCE_OPS_TICKETS") or folder / "tickets.db")
    path.parent.mkdir(parents=True, exist_ok=True)
    with closing(sqlite3.connect(path, timeout=5)) as connection, connection:
        connection.row_factory = sqlite3.Row
        connection.execute(
            "CREATE TABLE IF NOT EXISTS ticket (id TEXT PRIMARY KEY, title TEXT NOT NULL,"
            " service TEXT NOT NULL, description TEXT NOT NULL, severity TEXT NOT NULL,"
            " request_id TEXT NOT NULL UNIQUE, created_at INTEGER NOT NULL)"
        )
        yield connection


def _server() -> MCPServer:
    return MCPServer("turnfence-ops", log_level="ERROR", tools=_TOOLS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--http", type=int, metavar="PORT", help="serve over HTTP on 127.0.0.1 instead of stdio"
    )
    port = parser.parse_args().http
    if port is None:
        _server().run()
    else:
        _server().run("streamable-http", host="127.0.0.1", port=port)


if __name__ == "__main__":
    main()
