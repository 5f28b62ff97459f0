"""Generates the AsyncAPI document of all NATS messages from `subjects.py` and the structs that it names.

    python -m opentinker.shared.messaging.asyncapi > asyncapi.json

Descriptions are the docstrings below subjects and fields. `make docs` adds the document to the pages.
"""

from __future__ import annotations

import ast
import importlib.metadata
import inspect
import re
import sys
import textwrap
from itertools import pairwise
from typing import Any

import msgspec
import orjson

from opentinker.shared.messaging import subjects
from opentinker.shared.messaging.subjects import Call, Pattern, Subject

VERSION = "3.0.0"
SCHEMAS = "#/components/schemas/"
DASHBOARD = "dashboard"
PARAMETERS = {
    "job": "Id of a job.",
    "source": "Who says it: `trainer`, or the name of another process.",
    "level": "debug, info, warning, error or critical.",
    "worker": "Name of a process, or the address that it has for a while.",
    "who": "Whose loop.",
    "tenant": "Whose.",
    "environment": "Its name, or a hash of it.",
    "asker": "The scheduler that has asked.",
}
INTRODUCTION = """\
NATS messages between OpenTinker's processes, and from them to dashboards. Clients may subscribe to channels tagged
`dashboard` if they may read the job: `POST /v1/jobs/JOB/stream-credentials` returns a token (docs/observability.md).
Those channels carry JSON; services exchange msgpack, in which fields shown here as base64 are raw bytes."""


def document() -> dict[str, Any]:
    named = {name: one for name, one in vars(subjects).items() if isinstance(one, Pattern)}
    meanings = documented(inspect.getsource(subjects))
    kinds = [kind for one in named.values() for kind in _kinds(one)]
    schemas, components = msgspec.json.schema_components(kinds, ref_template=SCHEMAS + "{name}")
    schema_of = dict(zip(map(id, kinds), schemas, strict=True))
    _describe(components, kinds)
    components = _plain(components)
    channels: dict[str, Any] = {}
    operations: dict[str, Any] = {}
    messages: dict[str, Any] = {}
    for name, one in named.items():
        channels |= _channels(name, one, meanings.get(name, ""))
        operations |= _operations(name, one)
        for kind, suffix in zip(_kinds(one), ("", "_REPLY"), strict=False):
            json = isinstance(one, Subject) and one.json
            content = "application/json" if json else "application/msgpack"
            messages[name + suffix] = {"name": name + suffix, "contentType": content, "payload": schema_of[id(kind)]}
    return {
        "asyncapi": VERSION,
        "info": {
            "title": "OpenTinker",
            "version": importlib.metadata.version("opentinker"),
            "description": INTRODUCTION.replace("\n", " "),
        },
        "servers": {
            "browsers": {
                "host": "127.0.0.1:4223",
                "protocol": "ws",
                "description": "nats-server's WebSocket listener; the port is that of `opentinker up`.",
                "security": [{"$ref": "#/components/securitySchemes/credential"}],
            },
            "services": {"host": "127.0.0.1:4222", "protocol": "nats", "description": "A user per service."},
        },
        "channels": channels,
        "operations": operations,
        "components": {
            "messages": messages,
            "schemas": components,
            "securitySchemes": {
                "credential": {
                    "type": "apiKey",
                    "in": "password",
                    "description": "The token of POST /v1/jobs/JOB/stream-credentials, as `auth_token` of CONNECT.",
                }
            },
        },
    }


def _kinds(one: Pattern[Any]) -> list[type[Any]]:
    return [one.kind, one.reply] if isinstance(one, Call) else [one.kind]


def _channels(name: str, one: Pattern[Any], meaning: str) -> dict[str, Any]:
    """And of answers, whose address is in the request."""
    shown = isinstance(one, Subject) and bool(one.shown)
    whole = {
        "address": one.pattern,
        "description": meaning,
        "servers": [{"$ref": f"#/servers/{server}"} for server in (["browsers"] if shown else []) + ["services"]],
        "messages": {name: {"$ref": f"#/components/messages/{name}"}},
        "parameters": {part: {"description": PARAMETERS[part]} for part in re.findall(r"{(\w+)}", one.pattern)},
        "tags": [{"name": DASHBOARD}] if shown else [],
    }
    found: dict[str, Any] = {name: {field: value for field, value in whole.items() if value}}
    if isinstance(one, Call):
        reply = f"{name}_REPLY"
        found[reply] = {"address": None, "messages": {reply: {"$ref": f"#/components/messages/{reply}"}}}
    return found


def _operations(name: str, one: Pattern[Any]) -> dict[str, Any]:
    listeners = [*one.to, *([DASHBOARD] if isinstance(one, Subject) and one.shown else [])]
    found: dict[str, Any] = {}
    for who, action in [*((service, "send") for service in one.by), *((other, "receive") for other in listeners)]:
        operation: dict[str, Any] = {
            "action": action,
            "channel": {"$ref": f"#/channels/{name}"},
            "messages": [{"$ref": f"#/channels/{name}/messages/{name}"}],
            "tags": [{"name": who}],
        }
        if isinstance(one, Call):
            reply = f"{name}_REPLY"
            operation["reply"] = {
                "channel": {"$ref": f"#/channels/{reply}"},
                "messages": [{"$ref": f"#/channels/{reply}/messages/{reply}"}],
            }
        found[f"{who}_{action}s_{name}"] = operation
    return found


def _describe(components: dict[str, Any], kinds: list[type[Any]]) -> None:
    """Below each field of a struct, or of one that it inherits from, stands what it means."""
    structs = {one.__name__: one for one in _structs(kinds)}
    for name, schema in components.items():
        lineage = structs[name].__mro__ if name in structs else ()
        bases = [one for one in reversed(lineage) if issubclass(one, msgspec.Struct) and one is not msgspec.Struct]
        for field, meaning in [item for one in bases for item in _documented_fields(one).items()]:
            if isinstance(found := schema.get("properties", {}).get(field), dict):
                schema["properties"][field] = {**found, "description": meaning}


def _plain(schema: Any) -> Any:
    """Without `discriminator`, of which AsyncAPI has another notion: a tag is a constant of each of its schemas."""
    if isinstance(schema, dict):
        tagged = "anyOf" in schema
        return {name: _plain(value) for name, value in schema.items() if not (tagged and name == "discriminator")}
    return [_plain(value) for value in schema] if isinstance(schema, list) else schema


def _structs(kinds: list[type[Any]]) -> set[type[Any]]:
    """Return all types that these are made of."""
    found: set[type[Any]] = set()

    def look(kind: Any) -> None:
        if isinstance(kind, msgspec.inspect.StructType) and kind.cls not in found:
            found.add(kind.cls)
            for field in kind.fields:
                look(field.type)
        for name in ("item_type", "key_type", "value_type"):
            if hasattr(kind, name):
                look(getattr(kind, name))
        for part in getattr(kind, "types", ()):
            look(part)

    for kind in msgspec.inspect.multi_type_info(kinds):
        look(kind)
    return found


def _documented_fields(kind: type[Any]) -> dict[str, str]:
    return documented(textwrap.dedent(inspect.getsource(kind)))


def documented(source: str) -> dict[str, str]:
    """Return the docstrings below the assignments of a module or a class, by name."""
    body = ast.parse(source).body
    if len(body) == 1 and isinstance(body[0], ast.ClassDef):
        body = body[0].body
    found: dict[str, str] = {}
    for before, after in pairwise(body):
        target = before.targets[0] if isinstance(before, ast.Assign) else getattr(before, "target", None)
        said = after.value.value if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) else None
        if isinstance(target, ast.Name) and isinstance(said, str):
            found[target.id] = " ".join(said.split())
    return found


def written() -> str:
    return orjson.dumps(document(), option=orjson.OPT_INDENT_2 | orjson.OPT_SORT_KEYS).decode() + "\n"


if __name__ == "__main__":
    sys.stdout.write(written())
