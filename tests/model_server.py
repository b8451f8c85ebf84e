"""An OpenAI-compatible chat endpoint that says what a test tells it, on a free port of loopback.

``replies`` maps a call's name (the json_schema's name; ``step`` for tool-calling steps, ``text`` for calls
with neither) to a list of replies, used in order; the last one is repeated. A reply is

* a dict: sent as JSON text (a structured call),
* a str: sent as the message's text,
* a list of ``(tool name, arguments)``: tool calls,
* a callable: gets the request's body and returns one of these,
* ``Fault(...)``: what goes wrong instead.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Fault:
    """``status``: an HTTP error; ``html``: a page with 200; ``hang``: no answer; ``drop``: a cut line."""

    status: int = 0
    html: bool = False
    hang: bool = False
    drop: bool = False
    no_usage: bool = False
    text: str = ""


Reply = dict[str, Any] | str | list[tuple[str, Any]] | Fault | Callable[[dict[str, Any]], Any]


class ModelServer:
    """``async with ModelServer(replies) as model: model.base_url``; ``model.requests`` are the bodies."""

    def __init__(self, replies: Mapping[str, Sequence[Reply]]) -> None:
        self.replies = {name: list(given) for name, given in replies.items()}
        self.requests: list[dict[str, Any]] = []
        self.base_url = ""
        self._server: asyncio.Server | None = None
        self._calls = 0

    async def __aenter__(self) -> ModelServer:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        port = self._server.sockets[0].getsockname()[1]
        self.base_url = f"http://127.0.0.1:{port}/v1"
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await self._one(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            return  # the caller went away: its affair
        finally:
            writer.close()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower().split("\r\n")
        length = int(next(line for line in head if line.startswith("content-length")).split(":")[1])
        body = json.loads(await reader.readexactly(length))
        self.requests.append(body)
        reply = self._next(name_of(body))
        if callable(reply):
            reply = reply(body)
        if isinstance(reply, Fault) and (reply.hang or reply.drop):
            if reply.hang:
                await reader.read()  # until the caller gives up
            return
        status, kind, content = self._answer(reply)
        writer.write(
            f"HTTP/1.1 {status} X\r\nContent-Type: {kind}\r\nContent-Length: {len(content)}\r\n"
            "Connection: close\r\n\r\n".encode()
            + content
        )
        await writer.drain()

    def _next(self, name: str) -> Reply:
        given = self.replies.get(name)
        if not given:
            return Fault(status=500)
        return given.pop(0) if len(given) > 1 else given[0]

    def _answer(self, reply: Any) -> tuple[int, str, bytes]:
        if isinstance(reply, Fault) and reply.status:
            return reply.status, "application/json", b'{"error": {"message": "told to fail"}}'
        if isinstance(reply, Fault) and reply.html:
            return 200, "text/html", b"<html>hello</html>"
        self._calls += 1
        message: dict[str, Any] = {"role": "assistant", "content": None}
        finish = "stop"
        if isinstance(reply, list):
            finish = "tool_calls"
            message["tool_calls"] = [
                {
                    "id": f"call-{self._calls}-{place}",
                    "type": "function",
                    "function": {
                        "name": tool,
                        "arguments": arguments if isinstance(arguments, str) else json.dumps(arguments),
                    },
                }
                for place, (tool, arguments) in enumerate(reply)
            ]
        elif isinstance(reply, Fault):
            message["content"] = reply.text
        else:
            message["content"] = reply if isinstance(reply, str) else json.dumps(reply)
        body: dict[str, Any] = {
            "id": "x",
            "object": "chat.completion",
            "created": 0,
            "model": "stub",
            "choices": [{"index": 0, "message": message, "finish_reason": finish}],
        }
        if not (isinstance(reply, Fault) and reply.no_usage):
            body["usage"] = {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15}
        return 200, "application/json", json.dumps(body).encode()


def name_of(body: dict[str, Any]) -> str:
    """Which of catalogue.md's calls a request is."""
    form = body.get("response_format")
    if form:
        return str(form["json_schema"]["name"])
    return "step" if body.get("tools") else "text"


def evidence_ids(body: dict[str, Any]) -> list[str]:
    """The evidence ids that the request's tool messages carry, in order."""
    found = []
    for message in body["messages"]:
        if message["role"] == "tool":
            content = json.loads(message["content"])
            if "evidence_id" in content:
                found.append(content["evidence_id"])
    return found
