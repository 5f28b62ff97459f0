"""A server of the Model Context Protocol that says too much, in one way or another; every way has an end.

python mcp_hostile.py HOW     over stdin and stdout, with the standard library alone
"""

from __future__ import annotations

import json
import sys
from typing import Any

TOOL: dict[str, Any] = {"name": "ask", "description": "Ask.", "inputSchema": {"type": "object"}}


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"x": schema}}
    return schema


def listed(how: str) -> dict[str, Any]:
    """Return the answer to tools/list."""
    lists: dict[str, dict[str, Any]] = {
        "many tools": {"tools": [{**TOOL, "name": f"ask{number}"} for number in range(65)]},
        "endless pages": {"tools": [], "nextCursor": "more"},
        "long description": {"tools": [{**TOOL, "description": "a" * 10_000}]},
        "large schema": {"tools": [{**TOOL, "inputSchema": {"type": "object", "description": "a" * 40_000}}]},
        "deep schema": {"tools": [{**TOOL, "inputSchema": nested(40)}]},
        "same name": {"tools": [TOOL, TOOL]},
        "no tools": {"tools": []},
    }
    return lists.get(how, {"tools": [TOOL]})


def result(how: str, method: str, params: dict[str, Any]) -> dict[str, Any] | None:
    """None: it does not know such a thing."""
    match method:
        case "initialize":
            version = params["protocolVersion"]
            return {
                "protocolVersion": version,
                "capabilities": {"tools": {}},
                "serverInfo": {"name": "h", "version": "1"},
            }
        case "tools/list":
            return listed(how)
        case "tools/call":
            parts = 1000 if how == "many parts" else 1
            text = "a" * (8 << 20) if how == "long line" else "a"
            return {"content": [{"type": "text", "text": text}] * parts}
    return None


def answer(how: str, request: dict[str, Any]) -> dict[str, Any]:
    found = result(how, request["method"], request.get("params", {}))
    told: dict[str, Any] = {"error": {"code": -32601, "message": "no"}} if found is None else {"result": found}
    return {"jsonrpc": "2.0", "id": request["id"], **told}


LIES: dict[str, str] = {
    "no JSON": "{]",
    "not a message": '"yes"',
    "of another call": '{"jsonrpc": "2.0", "id": 999, "result": {"content": [{"type": "text", "text": "theirs"}]}}',
    "wrong type": '{"jsonrpc": "2.0", "id": ID, "result": {"content": "a"}}',
    "no content": '{"jsonrpc": "2.0", "id": ID, "result": null}',
    "unknown part": '{"jsonrpc": "2.0", "id": ID, "result": {"content": [{"type": "gift", "text": "a"}]}}',
    "wrong encoding": '{"jsonrpc": "2.0", "id": ID, "result": {"content": [{"type": "text", "text": "\\ud800"}]}}',
}
"""What it answers to its first call; those after it are answered as they should be."""


def main(how: str) -> None:
    lied = False
    for line in sys.stdin:
        request = json.loads(line)
        if "id" not in request:
            continue
        if request["method"] == "tools/call" and not lied and (how in LIES or how == "silence"):
            lied = True
            if how in LIES:
                sys.stdout.write(LIES[how].replace("ID", str(request["id"])) + "\n")
                sys.stdout.flush()
            continue
        if request["method"] == "tools/call" and how == "line without end":
            for _ in range(64):
                sys.stdout.write("a" * (1 << 20))
        if request["method"] == "tools/call" and how == "notifications":
            note = {"jsonrpc": "2.0", "method": "notifications/message", "params": {"level": "info", "data": "x"}}
            for _ in range(20_000):
                sys.stdout.write(json.dumps(note) + "\n")
        if request["method"] == "tools/call" and how == "pings":
            for number in range(40):
                ping = {
                    "jsonrpc": "2.0",
                    "id": f"p{number}",
                    "method": "ping",
                    "params": {"_meta": {"x": "a" * 500_000}},
                }
                sys.stdout.write(json.dumps(ping) + "\n")
                sys.stdout.flush()
                sys.stdin.readline()  # each is answered
        sys.stdout.write(json.dumps(answer(how, request)) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1])
