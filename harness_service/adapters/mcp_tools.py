"""MCP servers as tools: one connection per server, every failure as a row of the mapping table.

Each connection is opened, held and closed by a task of its own. The SDK ties a connection to the task that
opened it and cancels that task when the server dies; a caller that shared the task could not tell a dead
server from its own cancellation. Callers only borrow the session, so to them a dead server is an error and
``CancelledError`` is always the caller's own.

Whether a failed call may have had an effect depends on one question: was the request handed to the
transport? ``_Delivery`` answers it. It travels with the call in a context variable, through the SDK, to the
two places that know: the stream that hands requests over and the HTTP transport that connects.
"""

from __future__ import annotations

import asyncio
import contextvars
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Final, Self, TextIO, cast

import anyio
import httpx2
import msgspec
from mcp import Client, MCPError, StdioServerParameters, stdio_client
from mcp.client.streamable_http import streamable_http_client
from mcp_types import (
    CONNECTION_CLOSED,
    INVALID_PARAMS,
    METHOD_NOT_FOUND,
    CallToolResult,
    RequestParamsMeta,
    TextContent,
    Tool,
)

from harness_service.core.canonical import JsonRefused, parse_json
from harness_service.core.catalogue import McpServer, ToolContract
from harness_service.core.tool_failure import ToolFailure
from harness_service.ports import OfferedTool, ToolOutcome
from turnfence.serving.logs import get_logger

log = get_logger(__name__)

IDEMPOTENCY_META: Final = "turnfence/idempotency-key"
MESSAGE_MAX_CHARS: Final = 1000  # of a tool's own words in ``ToolOutcome.message``

# What a stdio server inherits besides HOME, PATH and the like; never the service's own secrets.
INHERITED_VARIABLES: Final = ("PYTHONPATH", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "TURNFENCE_DATA_DIR")
INHERITED_PREFIX: Final = "TURNFENCE_OPS_"

# Seconds to leave a server alone after its n-th failed start in a row; the last one repeats.
RESTART_PAUSES: Final = (0.0, 1.0, 2.0, 5.0, 15.0)
_CLOSE_SECONDS: Final = 10.0
_STDERR_KEPT_BYTES: Final = 2000

_FAILURE_OF_STATUS: Final[Mapping[int, ToolFailure]] = {
    401: ToolFailure.AUTH,
    403: ToolFailure.AUTH,
    429: ToolFailure.RATE_LIMIT,
}
_FAILURE_OF_CODE: Final[Mapping[int, ToolFailure]] = {
    INVALID_PARAMS: ToolFailure.MCP_PARAMETER_ERROR,
    CONNECTION_CLOSED: ToolFailure.IO_ERROR,
}
# A server that answers so has forgotten the session, unless the code says that it is about this one call.
_CODE_OF_ONE_CALL: Final[Mapping[int, int]] = {400: INVALID_PARAMS, 404: METHOD_NOT_FOUND}


class McpTools:
    """``ToolProvider`` over MCP servers (catalogue.md; failures: state document 5.4 with D42).

    ``max_result_bytes`` bounds one result, ``connect_timeout`` (seconds) one start of a server: process,
    handshake and listing. ``env`` is where ``env:NAME`` header values and a stdio server's variables come
    from. Raises ``ValueError`` when a header names a variable that is not set.
    """

    def __init__(
        self,
        servers: Iterable[McpServer],
        tools: Iterable[ToolContract],
        *,
        max_result_bytes: int = 4 * 1024 * 1024,
        connect_timeout: float = 20.0,
        env: Mapping[str, str] | None = None,
    ) -> None:
        env = os.environ if env is None else env
        self._tools = tuple(tools)
        self._max_result_bytes = max_result_bytes
        self._connect_timeout = connect_timeout
        self._connections = {
            server.key: _Connection(server.key, _endpoint(server, env, max_result_bytes), connect_timeout)
            for server in servers
        }

    async def start(self) -> None:
        """Begin to start every server, in parallel, without waiting for any."""
        for connection in self._connections.values():
            connection.begin()

    async def schemas(self) -> Mapping[str, OfferedTool]:
        """Every tool of the catalogue that can be reached now; a server that is down leaves its tools out."""
        keys = list(self._connections)
        found = await asyncio.gather(*(self._listing(key) for key in keys))
        listed = dict(zip(keys, found, strict=True))
        return {
            tool.name: _offered(tool, remote)
            for tool in self._tools
            if (remote := listed.get(tool.server, {}).get(tool.remote_name)) is not None
        }

    async def call(
        self, tool: ToolContract, arguments_json: str, *, idempotency_key: str, timeout: float
    ) -> ToolOutcome:
        """One call, at most ``timeout`` seconds including a start of the server; never raises but
        ``CancelledError``. Nothing is sent twice."""
        if timeout <= 0:  # an expired time limit stops a task only at its first pause, when all may be sent
            return _failed(ToolFailure.UNREACHABLE, "there was no time left to call")
        started = time.monotonic()
        delivery = _Delivery()
        token = _DELIVERY.set(delivery)
        try:
            async with asyncio.timeout(timeout):
                outcome = await self._deliver(tool, arguments_json, idempotency_key, delivery)
        except _StartFailed as error:
            outcome = _failed(error.failure, str(error))
        except TimeoutError:
            outcome = _timed_out(delivery, timeout)
        except MCPError as error:
            outcome = _failed(failure_of(error.code, delivery), error.message)
        except Exception as error:  # noqa: BLE001 - whatever the SDK raises is a row of the table
            log.warning("mcp_call_failed", tool=tool.name, error_type=type(error).__name__)
            outcome = _failed(_failure_of_surprise(delivery), f"{type(error).__name__}: {error}")
        finally:
            _DELIVERY.reset(token)
        return msgspec.structs.replace(outcome, duration_ms=round((time.monotonic() - started) * 1000))

    async def close(self) -> None:
        """Close every connection and end every server process that was started here."""
        await asyncio.gather(*(connection.close() for connection in self._connections.values()))

    async def _listing(self, key: str) -> Mapping[str, Tool]:
        try:
            async with asyncio.timeout(self._connect_timeout), self._connections[key].borrowed() as attempt:
                return attempt.session.tools
        except (_StartFailed, TimeoutError) as error:
            log.warning("mcp_server_down", server=key, reason=type(error).__name__)
            return {}

    async def _deliver(
        self, tool: ToolContract, arguments_json: str, key: str, delivery: _Delivery
    ) -> ToolOutcome:
        connection = self._connections.get(tool.server)
        if connection is None:
            return _failed(ToolFailure.UNREACHABLE, f"no MCP server {tool.server!r} is configured")
        arguments = _arguments(arguments_json)
        if arguments is None:
            return _failed(
                ToolFailure.MCP_PARAMETER_ERROR, "the arguments are no JSON object that can be sent"
            )
        # The open map of `_meta`: its type names only the SDK's own keys.
        meta = cast("RequestParamsMeta", {IDEMPOTENCY_META: key})
        for last in (False, True):
            async with connection.borrowed() as attempt:
                if tool.remote_name not in attempt.session.tools:
                    return _failed(
                        ToolFailure.UNREACHABLE, f"{tool.server} offers no tool {tool.remote_name!r}"
                    )
                try:
                    result = await attempt.session.client.call_tool(tool.remote_name, arguments, meta=meta)
                    return outcome_of(result, self._max_result_bytes)
                except MCPError as error:
                    if session_is_lost(error.code, delivery):
                        connection.retire(attempt)
                    # A server that had died before this call is met again after a restart: nothing was sent.
                    if last or delivery.sent or error.code != CONNECTION_CLOSED:
                        raise
        raise AssertionError("the second round returns or raises")


# --- what a result or an error means --------------------------------------------------------------


def outcome_of(result: CallToolResult, max_bytes: int) -> ToolOutcome:
    """The structured content, else the joined text; an error result is MCP_TOOL_ERROR with its words."""
    text = "\n".join(block.text for block in result.content if isinstance(block, TextContent))
    if result.is_error:
        words = text or json.dumps(result.structured_content, ensure_ascii=False)
        return _failed(ToolFailure.MCP_TOOL_ERROR, words)
    content = {"text": text} if result.structured_content is None else result.structured_content
    result_json = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    size = len(result_json.encode())
    if size > max_bytes:
        return _failed(ToolFailure.TOO_LARGE, f"the result has {size} bytes, the limit is {max_bytes}")
    return ToolOutcome(result_json=result_json)


def failure_of(code: int, delivery: _Delivery) -> ToolFailure:
    """The row of an error answer: what is known about its delivery outranks the code it carries."""
    if not delivery.sent or delivery.refused:
        return ToolFailure.UNREACHABLE
    if delivery.too_large:
        return ToolFailure.TOO_LARGE
    if delivery.broken:
        return ToolFailure.IO_ERROR
    by_code = _FAILURE_OF_CODE.get(code, ToolFailure.MCP_RPC_ERROR)
    if delivery.exchanges > 1:
        return by_code  # the last answer was refused at the door, an earlier request was let in
    return _FAILURE_OF_STATUS.get(delivery.status, by_code)


def session_is_lost(code: int, delivery: _Delivery) -> bool:
    """Whether the next call needs a new session (and a new listing): this one, or its server, is gone."""
    if not delivery.sent or delivery.refused or delivery.broken:
        return True
    return delivery.status in _CODE_OF_ONE_CALL and code != _CODE_OF_ONE_CALL[delivery.status]


def _failure_of_surprise(delivery: _Delivery) -> ToolFailure:
    return ToolFailure.UNKNOWN_CALL if delivery.sent else ToolFailure.UNREACHABLE


def _timed_out(delivery: _Delivery, timeout: float) -> ToolOutcome:
    if delivery.sent:
        return _failed(ToolFailure.TIMEOUT, f"no answer within {timeout:g} s")
    return _failed(ToolFailure.UNREACHABLE, f"the server could not be reached within {timeout:g} s")


def _failed(failure: ToolFailure, message: str) -> ToolOutcome:
    return ToolOutcome(failure=failure, message=message[:MESSAGE_MAX_CHARS])


def _arguments(arguments_json: str) -> dict[str, Any] | None:
    try:
        value = parse_json(arguments_json or "{}")
    except JsonRefused:
        return None
    return value if isinstance(value, dict) else None


def _offered(tool: ToolContract, remote: Tool) -> OfferedTool:
    return OfferedTool(
        name=tool.wire_name,
        description=remote.description or remote.title or tool.name,
        input_schema=remote.input_schema,
    )


# --- how far a request came -----------------------------------------------------------------------


@dataclass(slots=True)
class _Delivery:
    """What is known about one call's requests on their way; errs on the side of "sent"."""

    sent: bool = False  # handed to the transport
    exchanges: int = 0  # HTTP: requests that reached the server; a redirect does not count
    refused: bool = False  # HTTP: no connection came about for any of them, so no byte was sent
    broken: bool = False  # HTTP: an exchange broke after the connection stood
    too_large: bool = False  # HTTP: the answer exceeds what the transport takes
    status: int = 0  # HTTP: status of the last answer


_DELIVERY: contextvars.ContextVar[_Delivery | None] = contextvars.ContextVar("mcp_delivery", default=None)


class _WatchedWriteStream:
    """The SDK's write stream, which also notes what was handed over and that the session has ended.

    The SDK closes it when the read side ends: the one sign of a dead server that needs no call.
    """

    def __init__(self, inner: Any, ended: asyncio.Event) -> None:
        self._inner = inner
        self._ended = ended

    async def send(self, item: Any, /) -> None:
        delivery = _DELIVERY.get() or _Delivery()
        earlier, delivery.sent = delivery.sent, True
        try:
            await self._inner.send(item)
        except (anyio.BrokenResourceError, anyio.ClosedResourceError):
            delivery.sent = earlier  # the stream has no buffer: nobody took the request
            raise

    async def aclose(self) -> None:
        self._ended.set()
        await self._inner.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.aclose()


_NEVER_CONNECTED: Final = (
    httpx2.ConnectError,
    httpx2.ConnectTimeout,
    httpx2.PoolTimeout,
    httpx2.UnsupportedProtocol,
)


class _NotingBody(httpx2.AsyncByteStream):
    """An answer's body that ends where it breaks or grows too large, and notes which."""

    def __init__(self, inner: httpx2.AsyncByteStream, delivery: _Delivery, max_bytes: int) -> None:
        self._inner = inner
        self._delivery = delivery
        self._left = max_bytes

    async def __aiter__(self) -> AsyncIterator[bytes]:
        try:
            async for chunk in self._inner:
                self._left -= len(chunk)
                if self._left < 0:
                    self._delivery.too_large = True
                    return
                yield chunk
        except httpx2.TransportError:
            self._delivery.broken = True

    async def aclose(self) -> None:
        await self._inner.aclose()


class _NotingTransport(httpx2.AsyncBaseTransport):
    """Notes the fate of each request, and answers a failed one with 502 in place of an exception.

    An exception would end the SDK's whole connection, with every other call that is in flight on it. Only a
    POST carries a call; a GET that looks for the rest of a broken answer says nothing about what was sent.
    """

    def __init__(self, max_answer_bytes: int) -> None:
        self._inner = httpx2.AsyncHTTPTransport()
        self._max_answer_bytes = max_answer_bytes

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        noted = _DELIVERY.get() if request.method == "POST" else None
        delivery = noted or _Delivery()
        try:
            response = await self._inner.handle_async_request(request)
        except httpx2.TransportError as error:
            never_connected = isinstance(error, _NEVER_CONNECTED)
            delivery.refused = never_connected and not delivery.exchanges
            delivery.broken = not delivery.refused
            delivery.exchanges += not never_connected
            return httpx2.Response(502, request=request)
        delivery.status = response.status_code
        delivery.exchanges += not response.has_redirect_location
        if request.method == "POST" and isinstance(response.stream, httpx2.AsyncByteStream):
            response.stream = _NotingBody(response.stream, delivery, self._max_answer_bytes)
        return response

    async def aclose(self) -> None:
        await self._inner.aclose()


# --- where a server is ----------------------------------------------------------------------------


@dataclass(frozen=True)
class _Stdio:
    parameters: StdioServerParameters

    @asynccontextmanager
    async def open(self, stderr: _StderrTail) -> AsyncIterator[tuple[Any, Any]]:
        async with stderr.pipe() as errlog, stdio_client(self.parameters, errlog=errlog) as streams:
            yield streams


@dataclass(frozen=True)
class _Http:
    url: str
    headers: Mapping[str, str] = field(repr=False)
    max_answer_bytes: int

    @asynccontextmanager
    async def open(self, stderr: _StderrTail) -> AsyncIterator[tuple[Any, Any]]:
        timeout = httpx2.Timeout(30.0, read=None)  # how long an answer may take is the caller's to say
        async with (
            httpx2.AsyncClient(
                # Not compressed: what is counted on the wire is then what will be held in memory.
                headers={**self.headers, "Accept-Encoding": "identity"},
                timeout=timeout,
                transport=_NotingTransport(self.max_answer_bytes),
            ) as http_client,
            streamable_http_client(
                self.url, http_client=http_client, max_sse_event_size=self.max_answer_bytes
            ) as streams,
        ):
            yield streams


def _endpoint(server: McpServer, env: Mapping[str, str], max_result_bytes: int) -> _Stdio | _Http:
    if server.url:
        # A result may come twice (as text and as structure), each with its quotes escaped.
        limit = 4 * max_result_bytes + 64 * 1024
        return _Http(server.url, _resolved_headers(server, env), limit)
    program, *arguments = server.command
    if program == "python":
        program = sys.executable
    inherited = {
        name: value
        for name, value in env.items()
        if name in INHERITED_VARIABLES or name.startswith(INHERITED_PREFIX)
    }
    return _Stdio(StdioServerParameters(command=program, args=arguments, env=inherited))


def _resolved_headers(server: McpServer, env: Mapping[str, str]) -> dict[str, str]:
    return {name: _resolved(server, name, value, env) for name, value in server.headers.items()}


def _resolved(server: McpServer, header: str, value: str, env: Mapping[str, str]) -> str:
    if not value.startswith("env:"):
        return value
    variable = value.removeprefix("env:")
    if variable not in env:
        raise ValueError(f"MCP server {server.key}: header {header} needs {variable}, which is not set")
    return env[variable]


class _StderrTail(asyncio.Protocol):
    """The end of what a server process writes to stderr, to tell why it did not start."""

    def __init__(self) -> None:
        self._kept = b""

    def data_received(self, data: bytes) -> None:
        self._kept = (self._kept + data)[-_STDERR_KEPT_BYTES:]

    def text(self) -> str:
        return self._kept.decode(errors="replace")

    @asynccontextmanager
    async def pipe(self) -> AsyncIterator[TextIO]:
        """A file to give to the process as its stderr."""
        read_end, write_end = os.pipe()
        with os.fdopen(write_end, "w") as sink:
            source = os.fdopen(read_end, "rb", buffering=0)
            transport, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: self, source)
            try:
                yield sink
            finally:
                transport.close()


# --- one connection -------------------------------------------------------------------------------


class _StartFailed(Exception):
    """The server could not be started or did not answer as an MCP server; nothing was called."""

    def __init__(self, message: str, failure: ToolFailure = ToolFailure.UNREACHABLE) -> None:
        super().__init__(message)
        self.failure = failure


@dataclass(frozen=True)
class _Session:
    """A connection that stands, and what the server listed when it was made."""

    client: Client
    tools: Mapping[str, Tool]


@dataclass(eq=False)
class _Attempt:
    """One life of a connection, from its start to its end."""

    ready: asyncio.Future[_Session]
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    stderr: _StderrTail = field(default_factory=_StderrTail)
    delivery: _Delivery = field(default_factory=_Delivery)
    borrowers: int = 0  # calls that are using it
    retired: bool = False  # takes no new ones, and ends with the last

    @property
    def session(self) -> _Session:
        return self.ready.result()


class _Connection:
    """Starts a server when it is first needed and again after its death, with pauses between failures."""

    def __init__(self, key: str, endpoint: _Stdio | _Http, connect_timeout: float) -> None:
        self._key = key
        self._endpoint = endpoint
        self._connect_timeout = connect_timeout
        self._current: _Attempt | None = None
        self._owners: dict[asyncio.Task[None], _Attempt] = {}
        self._failures = 0
        self._not_before = 0.0
        self._closed = False

    def begin(self) -> _Attempt:
        """The connection now or soon; raises ``_StartFailed`` while the server is left alone."""
        if self._current is None:
            if self._closed:
                raise _StartFailed(f"{self._key} is closed")
            if time.monotonic() < self._not_before:
                raise _StartFailed(f"{self._key} did not start, it is tried again later")
            self._current = attempt = _Attempt(asyncio.get_running_loop().create_future())
            # A context of its own: the connection outlives the call that happened to need it first.
            owner = asyncio.create_task(
                self._own(attempt), name=f"mcp:{self._key}", context=contextvars.Context()
            )
            self._owners[owner] = attempt
            owner.add_done_callback(self._owners.pop)
        return self._current

    @asynccontextmanager
    async def borrowed(self) -> AsyncIterator[_Attempt]:
        """A connection that is ready, started when there is none. Raises ``_StartFailed``."""
        attempt = self.begin()
        attempt.borrowers += 1
        try:
            await asyncio.shield(attempt.ready)
            yield attempt
        finally:
            attempt.borrowers -= 1
            self._end_unused(attempt)

    def retire(self, attempt: _Attempt) -> None:
        """New calls get a new connection; those that are in flight on this one keep it to their end."""
        attempt.retired = True
        self._forget(attempt)
        self._end_unused(attempt)

    @staticmethod
    def _end_unused(attempt: _Attempt) -> None:
        if attempt.retired and not attempt.borrowers:
            attempt.ended.set()

    async def close(self) -> None:
        """End the connection and its process, within seconds."""
        self._closed = True
        for owner, attempt in self._owners.items():
            if attempt.ready.done():
                attempt.ended.set()
            else:
                owner.cancel()
        await self._gone()
        for owner in self._owners:
            log.warning("mcp_server_slow_to_close", server=self._key)
            owner.cancel()
        await self._gone()

    async def _gone(self) -> None:
        if self._owners:
            await asyncio.wait(list(self._owners), timeout=_CLOSE_SECONDS)

    async def _own(self, attempt: _Attempt) -> None:
        try:
            async with AsyncExitStack() as stack:
                async with asyncio.timeout(self._connect_timeout):
                    session = await self._open(stack, attempt)
                self._failures = 0
                attempt.ready.set_result(session)
                log.info("mcp_server_ready", server=self._key, tools=len(session.tools))
                await attempt.ended.wait()
                self._forget(attempt)
        except Exception as error:  # noqa: BLE001 - a driver may raise anything; it ends this connection only
            self._lost(attempt, error)
        finally:
            self._forget(attempt)
            if not attempt.ready.done():
                attempt.ready.set_exception(_StartFailed(f"{self._key} is closed"))
                attempt.ready.exception()  # seen: there may be no waiter

    async def _open(self, stack: AsyncExitStack, attempt: _Attempt) -> _Session:
        _DELIVERY.set(attempt.delivery)
        transport = _watched(self._endpoint.open(attempt.stderr), attempt.ended)
        client = await stack.enter_async_context(Client(transport, cache=None))
        return _Session(client, await _list_tools(client))

    def _lost(self, attempt: _Attempt, error: Exception) -> None:
        if attempt.ready.done():
            log.warning("mcp_connection_lost", server=self._key, exc_info=error)
            return
        pause = RESTART_PAUSES[min(self._failures, len(RESTART_PAUSES) - 1)]
        self._failures += 1
        self._not_before = time.monotonic() + pause
        # Nobody has called it yet, so its last words are its own and no user's.
        log.warning(
            "mcp_server_not_started", server=self._key, stderr_tail=attempt.stderr.text(), exc_info=error
        )
        failure = _FAILURE_OF_STATUS.get(attempt.delivery.status, ToolFailure.UNREACHABLE)
        attempt.ready.set_exception(_StartFailed(f"{self._key} could not be started", failure))
        attempt.ready.exception()  # seen: there may be no waiter

    def _forget(self, attempt: _Attempt) -> None:
        if self._current is attempt:
            self._current = None


@asynccontextmanager
async def _watched(
    opened: AbstractAsyncContextManager[tuple[Any, Any]], ended: asyncio.Event
) -> AsyncIterator[tuple[Any, Any]]:
    async with opened as (read_stream, write_stream):
        yield read_stream, _WatchedWriteStream(write_stream, ended)


async def _list_tools(client: Client) -> dict[str, Tool]:
    tools: dict[str, Tool] = {}
    cursor: str | None = None
    while True:
        page = await client.list_tools(cursor=cursor)
        tools.update((tool.name, tool) for tool in page.tools)
        cursor = page.next_cursor
        if cursor is None:
            return tools
