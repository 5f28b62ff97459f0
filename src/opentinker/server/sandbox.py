"""A server of the published sandbox, over the python tool of this package.

python -m opentinker.server.sandbox [--host 127.0.0.1] [--port 8000] [--backend monty|sandbox] [--timeout 30]

POST /run_code {code} -> status, run_result {status, stdout, stderr, return_code}
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence
from typing import Any, get_args

import orjson
from aiohttp import web

from opentinker.environment.game_tools import Backend, Python
from opentinker.unsupported import refused

INSTEAD = (
    "programs are run by the tool `python`: environment.tools of a job, or CodeInterpreterMathGame; "
    "python -m opentinker.server.sandbox is a server of it"
)

start_sandbox_server = refused("start_sandbox_server", INSTEAD)
create_tool_config = refused("create_tool_config", INSTEAD)

__all__ = ["create_sandbox_app", "create_tool_config", "start_sandbox_server"]


def create_sandbox_app(backend: Backend = "monty", timeout: float = 30.0) -> web.Application:
    """Runs every program in a fresh process, for at most `timeout` seconds. Raises ValueError for an unknown
    backend."""
    Python(backend, timeout)

    def run(code: str) -> dict[str, Any]:
        tool = Python(backend, timeout)
        try:
            outcome = tool.run(code)
        finally:
            tool.close()
        printed, failed = ("", outcome.text) if outcome.failed else (outcome.text, "")
        result = {"status": "Finished", "stdout": printed, "stderr": failed, "return_code": int(outcome.failed)}
        return {"status": "Failed" if outcome.failed else "Success", "run_result": result}

    async def run_code(request: web.Request) -> web.Response:
        try:
            body = orjson.loads(await request.read())
        except orjson.JSONDecodeError as error:
            raise web.HTTPBadRequest(text=f"the body is not JSON: {error}") from None
        if not isinstance(body, dict) or not isinstance(body.get("code"), str):
            raise web.HTTPUnprocessableEntity(text="the body must be an object whose `code` is a text")
        answer = await asyncio.to_thread(run, body["code"])
        return web.Response(body=orjson.dumps(answer), content_type="application/json")

    app = web.Application()
    app.router.add_post("/run_code", run_code)
    return app


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Runs Python programs for whoever asks: it checks no key.")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--backend", choices=get_args(Backend), default="monty")
    parser.add_argument("--timeout", type=float, default=30.0, help="Seconds that a program may take.")
    given = parser.parse_args(argv)
    web.run_app(create_sandbox_app(given.backend, given.timeout), host=given.host, port=given.port, print=None)


if __name__ == "__main__":
    main()
