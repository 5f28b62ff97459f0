"""Generates the OpenAPI 3.1 document from the route table."""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from functools import cache
from typing import Any, is_typeddict

import msgspec

import opentinker
from opentinker.services.scheduler.http.errors import ANTHROPIC, OPENAI
from opentinker.services.scheduler.http.route_decorator import Parameter, Route
from opentinker.services.scheduler.http.spec_body import TOML
from opentinker.shared import api_types
from opentinker.shared.messaging.asyncapi import documented
from opentinker.shared.security.authorization import Action
from opentinker.shared.spec import JobSpec
from opentinker.shared.spec.sweeps.children import spec_schema

_SCHEMAS = "#/components/schemas/"


@cache
def job_schema() -> dict[str, Any]:
    """Return the JSON schema of a job spec, with the short forms that `JobSpec` completes before it validates: a seat
    that only names its policy, and policies that inherit the job's model."""
    schema = spec_schema()
    for short in ("patternProperties", "propertyNames", "maxProperties"):  # tables in tables, and lists, are parameters
        schema["$defs"]["SweepTable"]["properties"]["parameters"].pop(short)
    seats = schema["properties"]["seats"]
    seats["additionalProperties"] = {"anyOf": [{"type": "string"}, seats["additionalProperties"]]}
    schema["$defs"]["PolicySpec"].pop("required")
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def document(routes: Sequence[Route]) -> dict[str, Any]:
    schemas: dict[str, Any] = {}
    for body in (route.body for route in routes if route.body is not None):
        schema = body.model_json_schema(ref_template=_SCHEMAS + "{model}")
        schemas |= {**schema.pop("$defs", {}), body.__name__: schema}
    answers = [one for route in routes for one in (route.answer, route.or_answer) if one is not None]
    told = _answers([*answers, api_types.Problem, api_types.OpenAIError, api_types.AnthropicError])
    assert not schemas.keys() & told.keys(), "a body and an answer of the same name"
    schemas |= told
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route)
    return {
        "openapi": "3.1.0",
        "info": {"title": "OpenTinker", "version": opentinker.__version__},
        "paths": paths,
        "security": [{"bearer": []}],
        "components": {
            "schemas": schemas,
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer", "description": _BEARER}},
        },
    }


def _answers(kinds: Sequence[Any]) -> dict[str, Any]:
    """Schemas of these and of what is in them, with what stands below each field."""
    _, schemas = msgspec.json.schema_components(kinds, ref_template=_SCHEMAS + "{name}")
    told = [(one, documented(inspect.getsource(one))) for one in vars(api_types).values() if is_typeddict(one)]
    for name, schema in schemas.items():
        own = vars(api_types)[name].__annotations__
        for other, meanings in told:
            if other.__annotations__.items() <= own.items():  # it, or what it is made of
                for field, meaning in meanings.items():
                    found = schema["properties"][field]
                    schema["properties"][field] = {**found, "description": meaning}
    return schemas


_BEARER = "An API key, ot_ENV_ID_SECRET. Its role and scopes determine what it allows."


def _operation(route: Route) -> dict[str, Any]:
    in_path = [Parameter(name, "", "path") for name in re.findall(r"{(\w+)}", route.path)]
    errors = (
        {"422": "Invalid request; `errors` lists every mistake"}
        if route.body or route.takes or route.parameters
        else {}
    )
    errors |= {"404": "Not found"} if in_path else {}
    ranged = any(p.name == "Range" for p in route.parameters)
    errors |= {"416": "Range not satisfiable"} if ranged else {}
    if route.action is not Action.FREE:
        errors |= {"401": "API key missing or invalid", "429": "Too many requests; see Retry-After"}
        errors |= {} if route.action is Action.ABOUT else {"403": f"The key lacks the scope {route.action}"}
    errors |= (
        {
            "408": "The request body was not received in time",
            "413": "The request body is too large",
            "415": "Compressed body, or unsupported media type",
        }
        if route.body or route.takes
        else {}
    )
    errors |= {"503": "Redis or NATS is unavailable"} if route.path.startswith("/v1") else {}
    problem = {"application/problem+json": {"schema": {"$ref": _SCHEMAS + "Problem"}}}
    if OPENAI.match(route.path):
        errors = {status: text for status, text in errors.items() if status != "422"} | _OPENAI_ERRORS
        errors |= _OPENAI_ANSWERS if route.takes else {}
        shape = "AnthropicError" if ANTHROPIC.match(route.path) else "OpenAIError"
        problem = {"application/json": {"schema": {"$ref": _SCHEMAS + shape}}}
    told = [{"$ref": _SCHEMAS + one.__name__} for one in (route.answer, route.or_answer) if one is not None]
    answer = {"schema": told[0] if len(told) == 1 else {"anyOf": told}} if told else {}
    operation: dict[str, Any] = {
        "summary": route.summary,
        "x-action": route.action.value,
        "parameters": [
            {
                "name": p.name,
                "in": p.place,
                "required": p.place == "path",
                "schema": p.schema,
                **({"description": p.meaning} if p.meaning else {}),
            }
            for p in [*in_path, *route.parameters]
        ],
        "responses": {
            str(route.status): {"description": route.summary, "content": {route.content: answer}},
            **({"206": {"description": "Partial content", "content": {route.content: {}}}} if ranged else {}),
            **{status: {"description": text, "content": problem} for status, text in errors.items()},
        },
    }
    if route.action is Action.FREE:
        operation["security"] = []
    if route.body:
        media = ("application/json", TOML) if issubclass(route.body, JobSpec) else ("application/json",)
        content = {kind: {"schema": {"$ref": _SCHEMAS + route.body.__name__}} for kind in media}
        operation["requestBody"] = {"required": True, "content": content}
    if route.takes:
        operation["requestBody"] = {"required": True, "content": {route.takes: {}}}
    return operation


_OPENAI_ERRORS = {
    "400": "Invalid request",
    "409": "The job has ended and answers no more requests",
    "503": "No rollout worker is available, or Redis or NATS is unavailable",
}
_OPENAI_ANSWERS = {
    "429": "The job's rollout workers or the server are overloaded; see Retry-After",
    "500": "The engine failed, or the response is too large",
    "504": "No response within serving.request_timeout_s",
}
"""Statuses of routes that generate."""
