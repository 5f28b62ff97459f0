"""Where the published client starts what runs programs; here the python tool of a game or a job does."""

from opentinker.refusal import refused

INSTEAD = "programs are run by the tool `python`: environment.tools of a job, or CodeInterpreterMathGame"

start_sandbox_server = refused("start_sandbox_server", INSTEAD)
create_tool_config = refused("create_tool_config", INSTEAD)

__all__ = ["create_tool_config", "start_sandbox_server"]
