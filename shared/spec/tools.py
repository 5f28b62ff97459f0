"""Tools that the policy may call in any environment: env workers execute them and answer in its place."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from opentinker.shared.spec.base import Count, SpecPart

OF_TYPE = {
    "python": {"backend", "memory_mb"},
    "mcp": {"command", "url", "shared"},
    "functions": {"module"},
}
"""Fields that not every type has."""
MEMORY_MB = {"monty": 64, "sandbox": 512}


class ToolSpec(SpecPart):
    type: Literal["python", "mcp", "functions"]
    """`python`: runs programs that the policy writes. `mcp`: all tools of a Model Context Protocol server. `functions`:
    Python functions of the operator's own."""
    timeout_s: Annotated[float, Field(gt=0.0, le=600.0)] = 10.0
    """Limit of one call, also of connecting to a server. A call that takes longer is ended, and the policy gets an
    error."""
    backend: Literal["monty", "sandbox"] = "monty"
    """python: `monty` interprets a part of Python, within a millisecond, and keeps its variables during an episode;
    `sandbox` is CPython with numpy and sympy in bubblewrap, every call by itself. Neither falls back to the other."""
    memory_mb: Count | None = None
    """python: what a program may take; default: 64 (monty) or 512 (sandbox)."""
    command: Annotated[list[Annotated[str, Field(min_length=1)]], Field(max_length=1000)] = []
    """mcp: a program that speaks over stdin and stdout, with its arguments; env workers start it themselves, where the
    operator allows it (setting env_tool_commands)."""
    url: Annotated[str, Field(pattern=r"^https?://")] | None = None
    """mcp: a server that speaks streamable HTTP. Addresses of private networks are refused, unless the operator allows
    them (env_egress_allow)."""
    shared: bool = False
    """mcp: one connection, and with `command` one process, for all episodes of an env worker in this job: for servers
    that remember nothing. Else every episode has its own."""
    module: Annotated[str, Field(pattern=r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*$")] | None = None
    """functions: `package.module:name` of a function, or of a list of functions, importable by env workers that run
    with OPENTINKER_ENV_MODULES=1."""

    STAND_INS: ClassVar[dict[str, Any]] = {"url": "http://x", "module": "x:y", "command": ["x"]}

    def resolve(self) -> list[dict[str, Any]]:
        plain = self.model_dump()
        others = {name for names in OF_TYPE.values() for name in names} - OF_TYPE[self.type]
        found = [
            {"field": name, "value": plain[name], "problem": f"does not apply to type = {self.type!r}"}
            for name in sorted(others & self.model_fields_set)
            if plain[name] != type(self).model_fields[name].default
        ]
        if self.type == "mcp" and bool(self.command) == bool(self.url):
            found.append({"field": "command", "value": self.command, "problem": "an mcp tool has a command or a url"})
        if self.type == "functions" and self.module is None:
            found.append({"field": "module", "value": None, "problem": "is needed for type = 'functions'"})
        return found

    @property
    def memory(self) -> int:
        """MB, of a python tool."""
        return self.memory_mb or MEMORY_MB[self.backend]
