"""What is no gRPC call, or hardly one: it is refused or dropped, and the service goes on."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator

import grpc
import psutil
import pytest

from tests.contract.turns import CALL_SECONDS, Talk
from tests.state.rig import Rig
from turnfence.axes import Durability
from turnfence.codec import to_message
from turnfence.state.v1 import state_pb2

RESETS = 1_000
GROWTH = 32 * 1024 * 1024  # bytes that the process may keep of all this
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS = b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"
GARBAGE = {
    "HTTP/1.1": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + secrets.token_bytes(508),
    "noise": secrets.token_bytes(4096),
    "a preface alone": PREFACE,
    "frames of no stream": PREFACE + SETTINGS + b"\x00\x10\x00\x00\x00\x00\x00\x00\x09" + b"x" * 4096,
    "a frame that is too long": PREFACE + SETTINGS + b"\xff\xff\xff\x00\x00\x00\x00\x00\x01" + b"x" * 65536,
    "headers that are none": PREFACE + SETTINGS + b"\x00\x00\x08\x01\x05\x00\x00\x00\x01" + b"\xff" * 8,
}


@pytest.fixture
async def talk(embedded_rig: Rig) -> AsyncIterator[Talk]:
    await embedded_rig.reconnect()
    yield Talk(embedded_rig.client)
    await embedded_rig.client.close()


async def connect(rig: Rig) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_unix_connection(rig.service.address.removeprefix("unix:"))


async def send(rig: Rig, data: bytes) -> None:
    """And hang up, without a word for what comes back."""
    reader, writer = await connect(rig)
    writer.write(data)
    try:
        await writer.drain()
        if data:
            async with asyncio.timeout(CALL_SECONDS):
                await reader.read(1)  # it has been looked at: something came, or the end
    except (ConnectionError, BrokenPipeError):
        pass  # the service was quicker to hang up
    finally:
        writer.transport.abort()


async def works(talk: Talk) -> None:
    turn = await talk.begin()
    assert (await turn.persist(turn.reply())).durability is Durability.PERSISTED


@pytest.mark.parametrize("what", GARBAGE)
async def test_C131_garbage_on_the_port_hurts_nobody(embedded_rig: Rig, talk: Talk, what: str) -> None:
    for _ in range(20):
        await send(embedded_rig, GARBAGE[what])
    await works(talk)


async def test_C131_connections_that_are_reset_leave_nothing_behind(embedded_rig: Rig, talk: Talk) -> None:
    await works(talk)
    process = psutil.Process(embedded_rig.service.pid)
    memory, files = process.memory_info().rss, process.num_fds()
    for _ in range(RESETS // 50):
        await asyncio.gather(*(send(embedded_rig, b"") for _ in range(50)))
    await works(talk)
    assert process.memory_info().rss - memory < GROWTH
    assert process.num_fds() - files < 50


@pytest.mark.parametrize("kilobytes", [4, 20, 100])
async def test_C128_metadata_is_taken_or_refused_by_its_size(talk: Talk, kilobytes: int) -> None:
    message = to_message(talk.request(), state_pb2.BeginTurnRequest)
    metadata = (("x-note", "n" * (kilobytes * 1024)), ("x-note-bin", b"\x00\xff" * 16), ("x-note", "again"))
    call = talk.client.state.BeginTurn(message, metadata=metadata, timeout=CALL_SECONDS)
    if kilobytes == 4:
        assert (await call).turn.version == 1
        return
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    await works(talk)
