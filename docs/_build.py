"""Hook of mkdocs: reference pages that are made of the code each time, and lie nowhere."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any
from unittest.mock import MagicMock

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from opentinker.services.scheduler.api import Api
from opentinker.services.scheduler.openapi import document
from opentinker.shared.config import Settings


def on_files(files: Files, config: MkDocsConfig) -> Files:
    files.append(File.generated(config, "api/cli.md", content=_command_line()))
    files.append(File.generated(config, "api/http.md", content="\n".join(_http())))
    return files


def _command_line() -> str:
    command = [sys.executable, "-m", "typer", "opentinker.cli", "utils", "docs", "--name", "opentinker"]
    made = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return made.replace("# `opentinker`", "# Command line", 1)


def _http() -> Iterator[str]:
    """Of the route table, which needs nothing that runs."""
    everything: dict[str, Any] = document(Api(MagicMock(settings=Settings()), *(MagicMock() for _ in range(3))).routes)
    yield "# HTTP API\n"
    yield "Made of the route table that is served; `/openapi.json` of any server is the same for programs.\n"
    for path, methods in everything["paths"].items():
        for method, operation in methods.items():
            yield f"## `{method.upper()} {path}`\n"
            yield f"{operation['summary']}.\n"
            parameters = [one for one in operation.get("parameters", []) if one["in"] != "path"]
            if parameters:
                yield "| parameter | in | |\n| --- | --- | --- |"
                for one in parameters:
                    yield f"| `{one['name']}` | {one['in']} | {one.get('description', '')} |"
                yield ""
            answers = ", ".join(f"{status}" for status in operation["responses"])
            yield f"Answers: {answers}.\n"
