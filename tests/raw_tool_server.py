"""An MCP server over stdio that answers a tool call with exactly the bytes a test wants.

    python tests/raw_tool_server.py FILE

It has one tool, ``odd``, whose result must have an integer ``n``. ``FILE`` is what it prints for each call,
read anew every time; ``$ID`` in it becomes the request's id. Written by hand, since the SDK would refuse to
send what these tests need.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

TOOL = {
    "name": "odd",
    "inputSchema": {"type": "object"},
    "outputSchema": {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]},
}


def answer(request: dict[str, Any], told: Path) -> str:
    match request["method"]:
        case "initialize":
            result: dict[str, Any] = {
                "protocolVersion": request["params"]["protocolVersion"],
                "capabilities": {"tools": {}},
                "serverInfo": {"name": "raw", "version": "1"},
            }
        case "tools/list":
            result = {"tools": [TOOL]}
        case "tools/call":
            return told.read_text(encoding="utf-8").replace("$ID", json.dumps(request["id"]))
        case _:
            error = {"code": -32601, "message": "no such method"}
            return json.dumps({"jsonrpc": "2.0", "id": request["id"], "error": error})
    return json.dumps({"jsonrpc": "2.0", "id": request["id"], "result": result})


def main() -> None:
    for line in sys.stdin:
        request = json.loads(line)
        if "id" in request:
            print(answer(request, Path(sys.argv[1])), flush=True)


if __name__ == "__main__":
    main()
