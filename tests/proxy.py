"""A TCP proxy that fails on purpose: it cuts, holds or swallows what passes, where given bytes are seen."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from enum import Enum, auto

KEPT = 256  # bytes of what has passed, so that a pattern may lie across two reads


class Then(Enum):
    """What happens to the bytes that match, and to their connection."""

    CUT = auto()  # they never arrive, and the connection ends
    CUT_ANSWER = auto()  # they arrive; in place of the answer the connection ends
    LOSE_ANSWER = auto()  # they arrive; no answer ever comes, and nothing ends
    HOLD = auto()  # they arrive after ``Rule.release``


@dataclass
class Rule:
    pattern: bytes
    then: Then
    times: int
    armed_by: bytes
    in_answers: bool
    met: asyncio.Event = field(default_factory=asyncio.Event)
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    links: list[_Link] = field(default_factory=list)

    def release(self) -> None:
        """What is held goes on."""
        self.gate.set()

    async def land(self) -> None:
        """What is held goes on, of a client that is gone: until its connection has ended."""
        self.release()
        await asyncio.gather(*(link.ended.wait() for link in self.links))


class Proxy:
    """Use ``running``. Clients connect to ``port``."""

    def __init__(self, host: str, port: int) -> None:
        self.upstream = (host, port)
        self.port = 0
        self.connections = 0  # that were ever made
        self.rules: list[Rule] = []
        self._links: set[_Link] = set()
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Listen; on the same port as before, if there was one."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Refuse connections, and end those that there are."""
        if self._server is None:
            return
        self._server.close()
        await self.cut_all()
        await self._server.wait_closed()
        self._server = None

    async def cut_all(self) -> None:
        links = tuple(self._links)
        for link in links:
            link.end()
        await asyncio.gather(*(link.ended.wait() for link in links))

    def when(
        self,
        pattern: bytes,
        then: Then,
        *,
        times: int = 1,
        armed_by: bytes = b"",
        in_answers: bool = False,
    ) -> Rule:
        """Do it where the bytes are seen in a request (or in an answer), on a connection that has asked for
        ``armed_by`` before."""
        rule = Rule(pattern, then, times, armed_by, in_answers)
        self.rules.append(rule)
        return rule

    def forget(self) -> None:
        """No more rules; what is held goes on."""
        for rule in self.rules:
            rule.release()
        self.rules.clear()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        link = _Link(self, reader, writer)
        self._links.add(link)
        try:
            await link.run()
        finally:
            self._links.discard(link)
            link.ended.set()


class _Link:
    """One client's connection, and its twin to the server."""

    def __init__(self, proxy: Proxy, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._proxy = proxy
        self._client = (reader, writer)
        self._asked: set[bytes] = set()  # what arms rules, and was seen
        self._answers: Then | None = None  # what happens to the next answer; None: it passes
        self._ending = asyncio.Event()
        self.ended = asyncio.Event()

    def end(self) -> None:
        self._ending.set()

    async def run(self) -> None:
        writers = [self._client[1]]
        try:
            reader, writer = await asyncio.open_connection(*self._proxy.upstream)
            writers.append(writer)
            pumps = [
                asyncio.create_task(self._pump(self._client[0], writer, in_answers=False)),
                asyncio.create_task(self._pump(reader, self._client[1], in_answers=True)),
            ]
            await self._ending.wait()
            for pump in pumps:
                pump.cancel()
            await asyncio.wait(pumps)
        except OSError:
            pass  # the server refuses: so do we
        finally:
            for writer in writers:
                writer.close()
            for writer in writers:
                with contextlib.suppress(OSError):
                    await writer.wait_closed()

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, in_answers: bool
    ) -> None:
        tail = b""
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                rule = self._met(tail, data, in_answers=in_answers)
                tail = (tail + data)[-KEPT:]
                if not await self._passes(rule, in_answers=in_answers):
                    if self._ending.is_set():
                        break
                    continue
                writer.write(data)
                await writer.drain()
        self.end()

    def _met(self, tail: bytes, data: bytes, *, in_answers: bool) -> Rule | None:
        """The first rule whose pattern ends in ``data``."""
        rules = self._proxy.rules
        if not in_answers:
            self._asked |= {rule.armed_by for rule in rules if _ends_in(data, rule.armed_by, tail)}
        for rule in rules:
            armed = not rule.armed_by or rule.armed_by in self._asked
            if rule.in_answers is not in_answers or not rule.times or not armed:
                continue
            if _ends_in(data, rule.pattern, tail):
                rule.times -= 1
                rule.met.set()
                return rule
        return None

    async def _passes(self, rule: Rule | None, *, in_answers: bool) -> bool:
        """Whether the bytes go on; ends the connection where that is what should happen."""
        if in_answers and self._answers is not None:
            if self._answers is Then.CUT_ANSWER:
                self.end()
            return False
        if rule is None:
            return True
        match rule.then:
            case Then.CUT:
                self.end()
                return False
            case Then.HOLD:
                rule.links.append(self)
                await rule.gate.wait()
            case Then.CUT_ANSWER | Then.LOSE_ANSWER:
                self._answers = rule.then
        return True


def _ends_in(data: bytes, pattern: bytes, tail: bytes) -> bool:
    return pattern in tail[max(0, len(tail) - len(pattern) + 1) :] + data


@contextlib.asynccontextmanager
async def running(host: str, port: int) -> AsyncIterator[Proxy]:
    """A proxy to a server; whoever uses it closes its clients first."""
    proxy = Proxy(host, port)
    await proxy.start()
    try:
        yield proxy
    finally:
        proxy.forget()
        await proxy.stop()
