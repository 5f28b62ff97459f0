"""`Route` and its parameters: a route is stated as a decorator on its handler."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from aiohttp import web
from pydantic import BaseModel

from opentinker.services.scheduler.http.errors import Handler
from opentinker.shared.security.authorization import Action
from opentinker.shared.types.errors import SpecError

H = TypeVar("H", bound=Callable[..., Any])


@dataclass(frozen=True)
class Parameter:
    name: str
    meaning: str
    place: str = "query"
    """query | header | path"""

    @property
    def schema(self) -> dict[str, Any]:
        return {"type": "string"}


@dataclass(frozen=True)
class Integer(Parameter):
    """A whole number of the query, from `low` to `high`."""

    default: int = 0
    """Value if the parameter is missing; it may lie outside the bounds."""
    low: int = 0
    high: int = 2**62

    @property
    def schema(self) -> dict[str, Any]:
        default = {"default": self.default} if self.default >= self.low else {}
        return {"type": "integer", "minimum": self.low, "maximum": self.high, **default}

    def read(self, request: web.Request, default: int | None = None) -> int:
        """Return the value in a request. Raises SpecError."""
        text = request.query.get(self.name)
        if text is None:
            return self.default if default is None else default
        if not re.fullmatch(r"[0-9]{1,19}", text) or not self.low <= int(text) <= self.high:
            raise SpecError.of(self.name, text[:100], f"must be a whole number, {self.low} to {self.high}")
        return int(text)


@dataclass(frozen=True)
class Choice(Parameter):
    """One word of the query among some, by default the first."""

    among: tuple[str, ...] = ()

    def read(self, request: web.Request) -> str:
        """Return the value in a request. Raises SpecError."""
        text = request.query.get(self.name, self.among[0])
        if text not in self.among:
            raise SpecError.of(self.name, text[:100], f"must be one of {', '.join(self.among)}")
        return text


@dataclass(frozen=True)
class Texts(Parameter):
    """A parameter of the query that may be there several times."""

    @property
    def schema(self) -> dict[str, Any]:
        return {"type": "array", "items": {"type": "string"}}

    def read(self, request: web.Request) -> list[str]:
        """Return the values in a request that are not empty."""
        return [text for text in request.query.getall(self.name, []) if text]


async def _unbound(_: web.Request) -> web.StreamResponse:
    raise NotImplementedError("routes_of binds the handler")


@dataclass(frozen=True)
class Route:
    """A row of the route table. Used as a decorator, it marks a method as its handler, whose docstring begins
    with the summary; `routes_of` collects the marks.

    The OpenAPI document is generated from these rows, and middlewares read them: nothing is documented that is not
    served.
    """

    method: str
    path: str
    action: Action
    """Action that the requester must be allowed; `auth.py` checks it."""
    status: int = 200
    parameters: tuple[Parameter, ...] = ()
    body: type[BaseModel] | None = None
    """Type of the JSON body."""
    content: str = "application/json"
    """Media type of the response."""
    takes: str = ""
    """Media type of a body that is not described by `body`."""
    answer: Any = None
    """Type of the response: one of `shared/api_types`, which documents its fields."""
    or_answer: Any = None
    """Another type that the response may have."""
    slashes: str = ""
    """Name of the path parameter whose value may contain slashes."""
    audited: bool = False
    """The audit log has a line for each request, for every action."""
    frequent: bool = False
    """Clients send it at every step: the audit log has no line for a request that was allowed."""
    handler: Handler = _unbound

    def __call__(self, handler: H) -> H:
        setattr(handler, "route", self)  # noqa: B010 - a function has no such attribute for mypy
        return handler

    @property
    def summary(self) -> str:
        """Return the first paragraph of the handler's docstring, without the full stop."""
        return (inspect.getdoc(self.handler) or "").partition("\n\n")[0].replace("\n", " ").removesuffix(".")

    @property
    def pattern(self) -> str:
        """The path in the syntax of aiohttp's router."""
        return self.path.replace(f"{{{self.slashes}}}", f"{{{self.slashes}:.+}}") if self.slashes else self.path


def route_of(request: web.Request) -> Route | None:
    """Return the route that a request is for; None: there is no such path, or not with this method."""
    found: Route | None = getattr(request.match_info.handler, "route", None)
    return found


def routes_of(*objects: object) -> list[Route]:
    """Return the routes of these objects' methods, in the order in which their classes define them."""
    return [
        replace(method.route, handler=getattr(owner, name))
        for owner in objects
        for kind in reversed(type(owner).__mro__)
        for name, method in vars(kind).items()
        if isinstance(getattr(method, "route", None), Route)
    ]
