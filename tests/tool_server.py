"""A tool server that does what a test tells it: the witness of how often the world changed.

    python tests/tool_server.py FOLDER [--http PORT]

``FOLDER/log.jsonl`` gets one JSON line for each thing that happens: ``{"event": "called" | "applied",
"tool", "key", "request_id", "title", "at", "pid"}``. ``FOLDER/<tool>.json`` says how the tool behaves, read
anew at each call (no file: it answers normally):

    {"mode": "ok", "result": {…}}        answer with this result
    {"mode": "business_failure"}         answer {"status": "refused"}
    {"mode": "error"}                    a tool error
    {"mode": "rpc_error", "code": -32602}
    {"mode": "apply_then_hang"}          take effect, then wait for FOLDER/<tool>.gate to appear
    {"mode": "hang"}                     wait for the gate, then take effect
    {"mode": "apply_then_die"} / {"mode": "die"}   end the process after / before taking effect
    {"mode": "large", "bytes": N}        answer with N bytes
    {"mode": "slow", "seconds": S}       answer after S seconds
    {"mode": "raw", "result": {…}}       ``read_odd`` only: answer with this CallToolResult

``surroundings`` tells what the server was given: its environment, its pid, the caller's HTTP headers.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import anyio
from mcp import MCPError
from mcp.server import MCPServer
from mcp.server.mcpserver import Context
from mcp.server.mcpserver.exceptions import ToolError
from mcp_types import CallToolResult, TextContent

server = MCPServer("tool-sim", log_level="ERROR")
folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path()


def note(event: str, tool: str, **details: Any) -> None:
    with (folder / "log.jsonl").open("a", encoding="utf-8") as log:
        line = {"event": event, "tool": tool, "at": time.time(), "pid": os.getpid(), **details}
        log.write(json.dumps(line) + "\n")


def behaviour(tool: str) -> dict[str, Any]:
    path = folder / f"{tool}.json"
    told: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return told


async def gate(tool: str) -> None:
    while not (folder / f"{tool}.gate").exists():  # noqa: ASYNC110  another process makes the file
        await anyio.sleep(0.02)


async def behave(tool: str, context: Context, effect: dict[str, Any] | None) -> dict[str, Any] | None:
    """Do what the control file says; the result to answer with, None: the tool's own."""
    key = str(dict(context.request_context.meta or {}).get("turnfence/idempotency-key", ""))
    told = behaviour(tool)
    note("called", tool, key=key, **(effect or {}))

    def apply() -> None:
        if effect is not None:
            note("applied", tool, key=key, **effect)

    match told.get("mode", "ok"):
        case "business_failure":
            return {"status": "refused"}
        case "error":
            raise ToolError("the tool says no")
        case "rpc_error":
            raise MCPError(told["code"], "told to fail")
        case "apply_then_hang":
            apply()
            await gate(tool)
        case "hang":
            await gate(tool)
            apply()
        case "apply_then_die":
            apply()
            os._exit(1)
        case "die":
            os._exit(1)
        case "large":
            return {"text": "x" * told["bytes"]}
        case "slow":
            await anyio.sleep(told["seconds"])
            apply()
        case _:
            apply()
    result: dict[str, Any] | None = told.get("result")
    return result


@server.tool()
async def read_fact(context: Context, name: str) -> dict[str, Any]:
    """Read a named fact."""
    return await behave("read_fact", context, None) or {"name": name, "value": 42, "unit": "percent"}


@server.tool()
async def write_thing(context: Context, title: str, request_id: str = "") -> dict[str, Any]:
    """Write a thing; it can be found again."""
    effect = {"title": title, "request_id": request_id}
    return await behave("write_thing", context, effect) or {"status": "created", "title": title}


@server.tool()
async def write_plain(context: Context, title: str, request_id: str = "") -> dict[str, Any]:
    """Write a thing that cannot be looked for."""
    effect = {"title": title, "request_id": request_id}
    return await behave("write_plain", context, effect) or {"status": "created", "title": title}


@server.tool()
async def find_thing(context: Context, title: str) -> dict[str, Any]:
    """Find the things with this title that were written."""
    told = await behave("find_thing", context, None)
    if told is not None:
        return told
    log = folder / "log.jsonl"
    events = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    return {"items": [e["title"] for e in events if e["event"] == "applied" and e.get("title") == title]}


@server.tool()
async def read_odd(context: Context) -> CallToolResult:
    """Answer in whatever form the control file asks for; plain text without it."""
    told = await behave("read_odd", context, None)
    return CallToolResult.model_validate(told or {"content": [TextContent(type="text", text="plain words")]})


@server.tool()
async def surroundings(context: Context) -> dict[str, Any]:
    """Tell what this server was given."""
    return {
        "pid": os.getpid(),
        "environment": dict(os.environ),
        "headers": dict(context.headers or {}),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--http", type=int)
    given = parser.parse_args()
    if given.http is None:
        server.run()
    else:
        server.run("streamable-http", host="127.0.0.1", port=given.http)


if __name__ == "__main__":
    main()
