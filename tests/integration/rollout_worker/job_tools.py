"""A tool of a job, and one call of it."""

from __future__ import annotations

from typing import Any

import msgspec

from opentinker.envs.runtime.tools.tool_factory import Tools
from opentinker.envs.tools import OfferedTool, Outcome, run_tool
from opentinker.shared.types.core import ToolCall
from opentinker.shared.types.env_protocol import OpenSession
from tests.unit.envs.env_worker.requests import opening

MONTY = {"type": "python", "timeout_s": 1.0, "memory_mb": 32}


async def use(tools: Tools, name: str, **arguments: Any) -> Outcome:
    offered: dict[str, OfferedTool] = {one.tool.name: one for one in tools.offered}
    return await run_tool(offered, ToolCall(id="c", name=name, arguments=arguments))


def with_tools(*tools: dict[str, Any], session: str = "s", environment: str = "", **config: Any) -> OpenSession:
    request = opening(session, environment or "tests.samples.env_samples:Counting", **config)
    return msgspec.structs.replace(request, tools=list(tools), tool_turns=3)
