"""Tools that the policy may call in any environment: env workers execute them and answer in its place."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from opentinker.shared.spec.base import Count, SpecPart
from opentinker.shared.types.mistakes import mistake

OF_TYPE = {"python": {"backend", "memory_mb"}, "mcp": {"command", "url", "shared"}, "functions": {"module"}}
"""Fields that not every type has."""
MEMORY_MB = {"monty": 64, "sandbox": 512}


class ToolSpec(SpecPart):
    type: Literal["python", "mcp", "functions"]
    """`python`: runs programs written by the policy. `mcp`: all tools of a Model Context Protocol server. `functions`:
    the operator's Python functions."""
    timeout_s: Annotated[float, Field(gt=0.0, le=600.0)] = 10.0
    """Time limit of a call, and of connecting to a server. A call that exceeds it is ended, and the policy gets an
    error."""
    backend: Literal["monty", "sandbox"] = "monty"
    """python: `monty` interprets a subset of Python within a millisecond and keeps variables during an episode;
    `sandbox` is CPython with numpy and sympy in bubblewrap, without state between calls. Neither falls back to the
    other."""
    memory_mb: Count | None = None
    """python: memory limit of a program; default: 64 (monty) or 512 (sandbox)."""
    command: Annotated[list[Annotated[str, Field(min_length=1)]], Field(max_length=1000)] = []
    """mcp: a program, with its arguments, that speaks over stdin and stdout; env workers start it if the operator
    allows it (setting env_tool_commands)."""
    url: Annotated[str, Field(pattern=r"^https?://")] | None = None
    """mcp: a server that speaks streamable HTTP. Addresses of private networks are refused unless the operator allows
    them (env_egress_allow)."""
    shared: bool = False
    """mcp: one connection, and with `command` one process, per env worker for all episodes of the job, for stateless
    servers. Otherwise every episode has its own."""
    module: Annotated[str, Field(pattern=r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*$")] | None = None
    """functions: `package.module:name` of a function or a list of functions, importable by env workers that run with
    OPENTINKER_ENV_MODULES=1."""

    STAND_INS: ClassVar[dict[str, Any]] = {"url": "http://x", "module": "x:y", "command": ["x"]}

    def resolve(self) -> list[dict[str, Any]]:
        plain = self.model_dump()
        others = {name for names in OF_TYPE.values() for name in names} - OF_TYPE[self.type]
        found = [
            mistake(name, plain[name], f"does not apply to type = {self.type!r}")
            for name in sorted(others & self.model_fields_set)
            if plain[name] != type(self).model_fields[name].default
        ]
        if self.type == "mcp" and bool(self.command) == bool(self.url):
            found.append(mistake("command", self.command, "an mcp tool has a command or a url"))
        if self.type == "functions" and self.module is None:
            found.append(mistake("module", None, "is needed for type = 'functions'"))
        return found

    @property
    def memory(self) -> int:
        """MB, of a python tool."""
        return self.memory_mb or MEMORY_MB[self.backend]
