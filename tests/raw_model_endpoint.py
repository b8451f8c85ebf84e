"""A model endpoint that answers every request with the bytes a test gives it, on a free port of loopback: for
answers that ``ModelServer`` is too well-behaved to give."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class RawEndpoint:
    """Keeps what it was sent, and tells when a caller hung up. Without an answer it never gives one."""

    def __init__(self, answer: bytes | None) -> None:
        self._answer = answer
        self.base_url = ""
        self.received = b""
        self.asked = asyncio.Event()
        self.hung_up = asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
        self.received = head + await reader.readexactly(length)
        self.asked.set()
        if self._answer is None:
            await reader.read()
            self.hung_up.set()
        else:
            writer.write(self._answer)
            await writer.drain()
        writer.close()


@asynccontextmanager
async def raw_endpoint(answer: bytes | None) -> AsyncIterator[RawEndpoint]:
    endpoint = RawEndpoint(answer)
    server = await asyncio.start_server(endpoint.serve, "127.0.0.1", 0)
    endpoint.base_url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
    try:
        yield endpoint
    finally:
        server.close()


def http(
    body: bytes, *, status: int = 200, kind: str = "application/json", length: int | None = None
) -> bytes:
    """An answer; ``length``: what it says its length is."""
    head = f"HTTP/1.1 {status} X\r\nContent-Type: {kind}\r\nContent-Length: {length or len(body)}\r\n"
    return head.encode() + b"Connection: close\r\n\r\n" + body
