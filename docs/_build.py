"""MkDocs hook: generates the reference pages and the AsyncAPI document from the code at every build."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, is_typeddict
from unittest.mock import MagicMock

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from opentinker.services.scheduler.environments.served_gateway import Gateway
from opentinker.services.scheduler.http.openapi import document
from opentinker.services.scheduler.http.server import Api
from opentinker.shared import api_types as types_of_answers
from opentinker.shared.config import Settings
from opentinker.shared.messaging import asyncapi


def on_files(files: Files, config: MkDocsConfig) -> Files:
    files.append(File.generated(config, "api/cli.md", content=_command_line()))
    files.append(File.generated(config, "api/http.md", content="\n".join(_http())))
    files.append(File.generated(config, "api/settings.md", content="\n".join(_settings())))
    files.append(File.generated(config, "asyncapi.json", content=asyncapi.written()))
    return files


def _command_line() -> str:
    command = [sys.executable, "-m", "typer", "opentinker.cli", "utils", "docs", "--name", "opentinker"]
    made = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return made.replace("# `opentinker`", "# Command line", 1)


def _settings() -> Iterator[str]:
    yield "# Settings of services\n"
    yield (
        "Every service reads these from environment variables (`OPENTINKER_` and the name in capitals) and from the "
        "TOML file that `OPENTINKER_CONFIG` names; the variable wins. A service refuses to start with an unknown name "
        "or a bad value.\n"
    )
    yield "| setting | type | default | |\n| --- | --- | --- | --- |"
    for name, field in Settings.model_fields.items():
        default = "" if field.default in (None, "", [], {}) else f"`{field.default}`"
        told = " ".join((field.description or "").split()).replace("|", "\\|")
        yield f"| `{name}` | {_kind(field.annotation)} | {default} | {told} |"
    yield ""


def _kind(annotation: Any) -> str:
    """Return the type as text for a table cell."""
    parts = get_args(annotation)
    if get_origin(annotation) is Annotated:
        return _kind(parts[0])
    if get_origin(annotation) is Literal:
        return ", ".join(f"`{part}`" for part in parts)
    if get_origin(annotation) in (Union, UnionType):
        return " or ".join(_kind(part) for part in parts if part is not NoneType)
    if parts:
        return f"{annotation.__origin__.__name__} of {', '.join(_kind(part) for part in parts)}"
    return str(annotation.__name__)


def _http() -> Iterator[str]:
    """The HTTP API, from the route table."""
    ctx = MagicMock(settings=Settings())
    everything: dict[str, Any] = document(Api(ctx, MagicMock(), Gateway(ctx), MagicMock()).routes)
    schemas = everything["components"]["schemas"]
    yield "# HTTP API\n"
    yield "Generated from the route table; every server has the same for programs at `/openapi.json`.\n"
    for path, methods in everything["paths"].items():
        for method, operation in methods.items():
            yield f"## `{method.upper()} {path}`\n"
            yield f"{operation['summary']}.\n"
            parameters = [one for one in operation.get("parameters", []) if one["in"] != "path"]
            if parameters:
                yield "| parameter | in | |\n| --- | --- | --- |"
                for one in parameters:
                    yield f"| `{one['name']}` | {one['in']} | {one.get('description', '')}{_bounds(one['schema'])} |"
                yield ""
            yield from _body(operation.get("requestBody"), schemas)
            answers = ", ".join(f"{status}{_media(answer)}" for status, answer in operation["responses"].items())
            yield f"Answers: {answers}.\n"
    yield "## Types of answers\n"
    yield "In Python: `opentinker.client.answers`. What may be missing, and what may be null, says so.\n"
    for name in sorted(name for name in schemas if is_typeddict(getattr(types_of_answers, name, None))):
        yield f"### {name}\n\n{schemas[name]['description']}\n\n| field | | |\n| --- | --- | --- |"
        needed = schemas[name].get("required", [])
        for field, says in schemas[name]["properties"].items():
            there = _type(says) + ("" if field in needed else ", may be missing")
            yield f"| `{field}` | {there} | {says.get('description', '')} |"
        yield ""


def _bounds(schema: dict[str, Any]) -> str:
    if "maximum" not in schema:
        return ""
    default = f", default {schema['default']}" if "default" in schema else ""
    return f" {schema['minimum']} to {schema['maximum']}{default}."


def _body(body: dict[str, Any] | None, schemas: dict[str, Any]) -> Iterator[str]:
    """What a request brings: a job, an object with these fields, or another media type."""
    for media, content in (body or {"content": {}})["content"].items():
        name = str(content.get("schema", {}).get("$ref", "")).rpartition("/")[2]
        if name == "JobSpec":
            yield f"Body, `{media}`: a job, as in [the job spec](../job-spec.md).\n"
        elif name == "SubmittedSpec":
            yield f"Body, `{media}`: a job, as in [the job spec](../job-spec.md), or [a sweep](../sweeps.md).\n"
        elif name:
            yield f"Body, `{media}`:\n\n| field | | |\n| --- | --- | --- |"
            needed = schemas[name].get("required", [])
            for field, says in schemas[name]["properties"].items():
                meaning = " ".join(says.get("description", "").split()).replace("|", "\\|")
                yield f"| `{field}` | {'needed' if field in needed else ''} | {meaning} |"
            yield ""
        else:
            yield f"Body: `{media}`.\n"


def _type(schema: dict[str, Any]) -> str:
    """In words; types of answers have a section of their own."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    if "anyOf" in schema:
        return " or ".join(_type(one) for one in schema["anyOf"])
    if schema.get("type") == "array":
        return f"list of {_type(schema['items'])}" if schema.get("items") else "list"
    if schema.get("type") == "object":
        held = schema.get("additionalProperties")
        return f"object of {_type(held)}" if isinstance(held, dict) and held else "object"
    return str(schema.get("type", "anything"))


def _media(answer: dict[str, Any]) -> str:
    """Of an answer that is not a problem: another media type than JSON, or the type of what is in it."""
    content = answer.get("content", {})
    found = [f"`{media}`" for media in content if "json" not in media]
    found += [
        _type(says["schema"]) for media, says in content.items() if media == "application/json" and "schema" in says
    ]
    found = [one for one in found if "OpenAIError" not in one]
    return f" ({', '.join(found)})" if found else ""
