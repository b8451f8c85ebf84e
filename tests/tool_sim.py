"""Starts ``tests/tool_server.py``, tells it what to do, and can break the line to it.

``Sim`` is the folder of one server: what it is told and what happened. ``http_tool_server`` is a server
process on a free port. ``HttpLine`` stands between a caller and such a server and spoils the answers to
tool calls on order, as a broken network or a gateway would; everything else it passes on.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import sys
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from harness_service.core.catalogue import McpServer, ToolContract
from tests.servers import PrivateServer, free_port

SCRIPT = Path(__file__).parent / "tool_server.py"
TOOLS = ("read_fact", "write_thing", "write_plain", "find_thing", "read_odd", "surroundings")


def contract(remote_name: str, server: str = "sim") -> ToolContract:
    return ToolContract(f"{server}.{remote_name}", server, remote_name)


CONTRACTS = tuple(contract(name) for name in TOOLS)


class Sim:
    """One server's folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    @property
    def command(self) -> tuple[str, ...]:
        """How to start it over stdio."""
        return ("python", str(SCRIPT), str(self.folder))

    def stdio(self, key: str = "sim") -> McpServer:
        return McpServer(key, command=self.command)

    def tell(self, tool: str, **behaviour: Any) -> None:
        (self.folder / f"{tool}.json").write_text(json.dumps(behaviour), encoding="utf-8")

    def open_gate(self, tool: str) -> None:
        (self.folder / f"{tool}.gate").touch()

    def forget(self) -> None:
        """As if nothing had been told and nothing had happened."""
        for file in self.folder.iterdir():
            file.unlink()

    def events(self, tool: str = "") -> list[dict[str, Any]]:
        log = self.folder / "log.jsonl"
        text = log.read_text(encoding="utf-8") if log.exists() else ""
        lines = text[: text.rfind("\n") + 1].splitlines()  # the last one may be half written
        events = [json.loads(line) for line in lines]
        return [event for event in events if not tool or event["tool"] == tool]

    def happened(self, tool: str) -> list[str]:
        """The names of a tool's events, in order."""
        return [event["event"] for event in self.events(tool)]

    async def seen(self, event: str, tool: str, seconds: float = 10.0) -> dict[str, Any]:
        """Wait until it happened."""
        async with asyncio.timeout(seconds):
            while True:
                for found in self.events(tool):
                    if found["event"] == event:
                        return found
                await asyncio.sleep(0.005)  # between two looks at the other process's log


class HttpToolServer(PrivateServer):
    """A server process over streamable HTTP; ``url`` is its endpoint."""

    def __init__(self, sim: Sim, port: int) -> None:
        self.port = port
        self.url = f"http://127.0.0.1:{port}/mcp"
        command = [sys.executable, str(SCRIPT), str(sim.folder), "--http", str(port)]
        super().__init__("tool_server", sim.folder.parent, command, self._connect)

    def _connect(self) -> None:
        with socket.create_connection(("127.0.0.1", self.port), timeout=1):
            pass


@contextlib.contextmanager
def http_tool_server(sim: Sim, port: int | None = None) -> Iterator[HttpToolServer]:
    """A running server; without ``port``, on any free one."""
    server = HttpToolServer(sim, port or free_port())
    try:
        server.start()
        yield server
    finally:
        server.kill()


# --- a line that breaks ---------------------------------------------------------------------------


@dataclass
class Exchange:
    """One HTTP request on the line, and what can be done with it."""

    head: bytes
    body: bytes
    writer: asyncio.StreamWriter
    upstream_port: int

    @property
    def rpc_method(self) -> str:
        """``tools/call`` and the like; empty for what carries no JSON-RPC request."""
        return str(json.loads(self.body).get("method", "")) if self.body else ""

    async def asked(self) -> bytes:
        """The server's whole answer."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.upstream_port)
        try:
            lines = self.head.split(b"\r\n")
            kept = [line for line in lines if line and not line.lower().startswith(b"connection:")]
            writer.write(b"\r\n".join([*kept, b"Connection: close", b"", b""]) + self.body)
            return await reader.read()
        finally:
            writer.close()

    async def pass_on(self) -> None:
        self.writer.write(await self.asked())
        await self.writer.drain()

    async def answer(self, status: int, body: bytes = b"", kind: str = "text/plain") -> None:
        """Answer in the server's place; it hears nothing of the request."""
        self.writer.write(self.headers(status, kind, len(body)) + body)
        await self.writer.drain()

    @staticmethod
    def headers(status: int, kind: str, length: int | None) -> bytes:
        lines = [f"HTTP/1.1 {status} X", f"Content-Type: {kind}", "Connection: close"]
        if length is not None:
            lines.append(f"Content-Length: {length}")
        return "\r\n".join([*lines, "", ""]).encode()

    def cut(self) -> None:
        """Reset the connection."""
        self.writer.transport.abort()


Spoiler = Callable[[Exchange], Awaitable[None]]


class HttpLine:
    """``async with HttpLine(port) as line``: what stands between ``line.url`` and the server at ``port``.

    ``spoil`` handles the requests that call a tool; None: they pass. ``handshake``: the server is shown as
    one that knows the older protocol only, with sessions.
    """

    def __init__(self, upstream_port: int, *, handshake: bool = False) -> None:
        self.spoil: Spoiler | None = None
        self.seen: list[str] = []  # the JSON-RPC methods that came by
        self.url = ""
        self._upstream_port = upstream_port
        self._handshake = handshake
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.StreamWriter] = set()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}/mcp"
        return self

    async def __aexit__(self, *_: object) -> None:
        self.stop_listening()
        for writer in list(self._open):
            writer.transport.abort()

    def stop_listening(self) -> None:
        """From now on connections are refused."""
        assert self._server is not None
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open.add(writer)
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            exchange = Exchange(head, await reader.readexactly(_length(head)), writer, self._upstream_port)
            method = exchange.rpc_method
            self.seen.append(method)
            if method == "server/discover" and self._handshake:
                await exchange.answer(404)
            elif method == "tools/call" and self.spoil is not None:
                await self.spoil(exchange)
            else:
                await exchange.pass_on()
        except (OSError, asyncio.IncompleteReadError):
            pass  # one of the two ends went away
        finally:
            self._open.discard(writer)
            writer.close()


def _length(head: bytes) -> int:
    for line in head.lower().split(b"\r\n"):
        if line.startswith(b"content-length:"):
            return int(line.split(b":")[1])
    return 0
