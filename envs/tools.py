"""Tools of an environment: methods that the policy may call between its turns.

    class Shop(Environment):
        @tool
        def price(self, item: str, count: int = 1) -> float:
            '''Return the price of an order.

            Args:
                item: as it stands in the catalogue
            '''
            return self.prices[item] * count

Name, description and JSON schema of the arguments come from the method. Calls are validated against the schema, so a
method receives the types of its type hints. It may be `async` and follows the rules of `step` (no blocking in the event
loop). It reports a failure by raising ToolError; every exception becomes an observation and never ends the episode.
Results are messages of role `tool`, with reward 0. The environment's own `step` is called for turns without tool calls.

`ToolTurns` applies these rules to the environment's tools and to those of a job (`environment.tools`).
"""

from __future__ import annotations

import asyncio
import inspect
import re
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Generic, TypeVar, get_type_hints, overload

import msgspec
from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from pydantic_core import to_json

from opentinker.envs.base import Action, Environment
from opentinker.shared.types.core import Message, Tool, ToolCall
from opentinker.shared.types.env_protocol import SeatAction
from opentinker.shared.types.errors import OpenTinkerError

RESULT_BYTES = 20_000
"""Limit on the result of one call; the middle of a longer one is left out."""
END_BYTES = 2000
"""Bytes kept from the end, where errors are printed; part of RESULT_BYTES."""
NOTE_BYTES = 100
"""Bytes reserved for the note between the two parts, so that a truncated result is not truncated again."""
TOOL_TURNS = 16
"""Tool turns of one seat in an episode, unless the job sets another number."""
TIMEOUT_S = 30.0
LAST_TURN_NOTE = "\n(No more tools can be called in this episode: answer now.)"

Run = Callable[[dict[str, Any]], Awaitable[str]]
F = TypeVar("F", bound=Callable[..., Any])
A = TypeVar("A", Action, SeatAction)


class ToolError(Exception):
    """A message to the policy in place of a result."""


class ToolFailed(ToolError):
    """A failed call whose text is the whole result, e.g. a program's output with its traceback."""


class NoTools(OpenTinkerError):
    """The tools of a job are unavailable here; the text says what to do. The episode fails, because without them it
    would be a different one."""


class OfferedTool(msgspec.Struct, frozen=True, kw_only=True):
    """A tool and the function that runs it."""

    tool: Tool
    run: Run
    """Receives the arguments of a call; may raise ToolError or any other exception."""
    timeout_s: float | None = TIMEOUT_S
    """None: `run` limits its own time."""


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    text: str
    failed: bool
    seconds: float


@overload
def tool(method: F, /) -> F: ...
@overload
def tool(*, timeout_s: float | None) -> Callable[[F], F]: ...
def tool(method: F | None = None, /, *, timeout_s: float | None = TIMEOUT_S) -> F | Callable[[F], F]:
    """Mark a method of an environment as a tool of its policy. `timeout_s`: of a call; None: the method limits its own
    time."""

    def mark(marked: F) -> F:
        marked.__is_tool__ = True  # type: ignore[attr-defined]
        marked.__tool_timeout_s__ = timeout_s  # type: ignore[attr-defined]
        return marked

    return mark if method is None else mark(method)


def tools_of(environment: Environment) -> list[OfferedTool]:
    """Return the environment's tools. Raise TypeError if a method cannot be a tool."""
    methods = [getattr(environment, name) for name in _tools_of(type(environment))]
    return [tool_of(method, method.__tool_timeout_s__) for method in methods]


@lru_cache(256)
def _tools_of(kind: type[Environment]) -> list[str]:
    return [name for name, value in inspect.getmembers(kind) if getattr(value, "__is_tool__", False)]


# --- a function as a tool -----------------------------------------------------------------------------------------


def tool_of(function: Callable[..., Any], timeout_s: float | None = TIMEOUT_S) -> OfferedTool:
    """Make a tool of a plain or async function. Raise TypeError unless its parameters have names and type hints."""

    async def run(**arguments: Any) -> str:
        result = function(**arguments)
        return as_text(await result if inspect.isawaitable(result) else result)

    return offer(function, run, timeout_s)


def offer(
    function: Callable[..., Any], run: Callable[..., Awaitable[str]], timeout_s: float | None = TIMEOUT_S
) -> OfferedTool:
    """Offer `run` with the description and the parameters of `function`. Raise TypeError as `tool_of`."""
    described, model = describe(function)

    async def validated(arguments: dict[str, Any]) -> str:
        return await run(**validate_arguments(model, arguments))

    return OfferedTool(tool=described, run=validated, timeout_s=timeout_s)


def describe(function: Callable[..., Any]) -> tuple[Tool, type[BaseModel]]:
    """Return the description of a function as a tool, and the model of its arguments. Raise TypeError."""
    return _describe(getattr(function, "__func__", function), inspect.ismethod(function))


@lru_cache(1024)
def _describe(function: Callable[..., Any], bound: bool) -> tuple[Tool, type[BaseModel]]:
    # Cached, because every episode asks for it.
    name = function.__name__
    about, meanings = _parse_docstring(function)
    hints = get_type_hints(function, include_extras=True)
    fields: dict[str, Any] = {}
    for parameter in list(inspect.signature(function).parameters.values())[bound:]:
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise TypeError(f"tool {name}: {parameter} has no name that a call could use")
        if parameter.name not in hints:
            raise TypeError(f"tool {name}: parameter {parameter.name} needs a type hint")
        default = ... if parameter.default is parameter.empty else parameter.default
        meaning = meanings.get(parameter.name)
        fields[parameter.name] = (hints[parameter.name], Field(default, description=meaning))
    model = create_model(name, __config__=ConfigDict(extra="forbid"), **fields)
    schema = _without_titles(model.model_json_schema())
    schema.pop("additionalProperties", None)
    return Tool(name=name, description=about, parameters=schema), model


def validate_arguments(model: type[BaseModel], arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments, converted to the types of the model. Raise ToolError with every mistake."""
    try:
        found = model.model_validate(arguments)
    except ValidationError as error:
        mistakes = [f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors(include_url=False)]
        raise ToolError("wrong arguments: " + "; ".join(mistakes)) from None
    return {name: getattr(found, name) for name in type(found).model_fields}


def as_text(result: Any) -> str:
    """Return text as it is, anything else as JSON."""
    return result if isinstance(result, str) else to_json(result, fallback=str).decode()


def _parse_docstring(function: Callable[..., Any]) -> tuple[str, dict[str, str]]:
    """Return the description of a function and of its parameters: lines `name: meaning` under `Args:`, Google style."""
    about, _, rest = (inspect.getdoc(function) or "").partition("\nArgs:\n")
    meanings: dict[str, str] = {}
    name = ""
    for line in rest.splitlines():
        if line and not line[0].isspace():
            break  # Returns:, Raises:
        if found := re.match(r"\s+(\w+)\s*(?:\([^)]*\))?:\s*(.*)", line):
            name, meanings[found[1]] = found[1], found[2]
        elif name and line.strip():
            meanings[name] += " " + line.strip()
    return about.strip(), meanings


def _without_titles(schema: Any) -> Any:
    """Remove pydantic's titles, which repeat the names and would be part of every prompt."""
    if isinstance(schema, list):
        return [_without_titles(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    titled = isinstance(schema.get("title"), str)
    return {key: _without_titles(value) for key, value in schema.items() if not (titled and key == "title")}


# --- tool turns ----------------------------------------------------------------------------------------------------


class ToolTurns(Generic[A]):
    """The tool calls of one episode: decides which turns the tools answer, runs them and counts them."""

    def __init__(self, offered: Sequence[OfferedTool], most: int = TOOL_TURNS) -> None:
        """`most`: tool turns of a seat; further turns go to the environment, with or without calls.

        Raise ValueError if two tools have the same name.
        """
        self.offered: Mapping[str, OfferedTool] = {one.tool.name: one for one in offered}
        if len(self.offered) < len(offered):
            names = sorted(one.tool.name for one in offered)
            raise ValueError(f"every tool needs a different name; there are: {', '.join(names)}")
        self.most = most
        self.calls = self.errors = 0
        self._turns: dict[str, int] = {}
        """Tool turns so far, by seat."""
        self._owed: dict[tuple[str, str], list[Message]] = {}
        self._held: dict[str, tuple[A, list[Message]]] = {}
        """By seat: its action in this turn of the environment, and results of tools that it called along with it."""

    def copy(self, offered: Sequence[OfferedTool]) -> ToolTurns[A]:
        """Return the same state with other functions behind the tools, those of a copied environment."""
        other = ToolTurns[A](offered, self.most)
        other.calls, other.errors = self.calls, self.errors
        other._turns, other._owed, other._held = dict(self._turns), dict(self._owed), dict(self._held)
        return other

    @property
    def tools(self) -> list[Tool]:
        return [one.tool for one in self.offered.values()]

    @property
    def metrics(self) -> dict[str, float]:
        return {"tool_calls": float(self.calls), "tool_errors": float(self.errors)}

    async def take(
        self, actions: Sequence[A], others: bool, note: Callable[[str, Outcome], None] | None = None
    ) -> dict[str, list[Message]]:
        """Run the tools that these actions call, one after the other. Return the next messages of each seat that the
        tools alone answer; hold the actions of the others until `release`.

        `others`: somebody else offers tools too. `note` is called with the tool's name and outcome of every call.
        """
        again: dict[str, list[Message]] = {}
        for action in actions:
            mine, theirs = self._split(action.tool_calls, others)
            results: list[Message] = []
            if (mine or action.problem) and self._takes(action.seat):
                results = await self._answer(action.seat, mine, action.problem, note)
                if not theirs:
                    again[action.seat] = results
                    continue
            self._held[action.seat] = (msgspec.structs.replace(action, tool_calls=theirs, problem=""), results)
        return again

    def release(self, seats: Sequence[str]) -> list[tuple[A, list[Message]]]:
        """Remove and return the held actions, in this order, each with the results of the tools called along with
        it."""
        return [self._held.pop(seat) for seat in seats]

    def _takes(self, seat: str) -> bool:
        """Count a tool turn of the seat and return whether its limit allows it."""
        self._turns[seat] = self._turns.get(seat, 0) + 1
        return self._turns[seat] <= self.most

    def _split(self, calls: Sequence[ToolCall], others: bool) -> tuple[list[ToolCall], list[ToolCall]]:
        """Split calls into those of these tools and those of `others`. Without others, unknown names are answered
        here."""
        theirs = [call for call in calls if call.name not in self.offered] if others else []
        return [call for call in calls if call not in theirs], theirs

    def owe(self, seat: str, stream: str, messages: list[Message]) -> None:
        """Keep the results of a turn that the environment also answers, until the calling stream acts again."""
        if messages:
            self._owed[seat, stream] = [*self._owed.get((seat, stream), []), *messages]

    def due(self, seat: str, stream: str) -> list[Message]:
        """Remove and return the results kept for a stream, which precede its other messages."""
        return self._owed.pop((seat, stream), [])

    async def _answer(
        self, seat: str, calls: Sequence[ToolCall], problem: str, note: Callable[[str, Outcome], None] | None
    ) -> list[Message]:
        """Run the calls of a turn within the seat's limit and return its next messages."""
        messages = [await self._result(call, note) for call in calls]
        if problem:
            self.calls += 1
            self.errors += 1
            messages.append(Message(role="user", content=problem))
        if self._turns[seat] == self.most:
            last = messages.pop()
            messages.append(msgspec.structs.replace(last, content=last.text + LAST_TURN_NOTE))
        return messages

    async def _result(self, call: ToolCall, note: Callable[[str, Outcome], None] | None) -> Message:
        outcome = await run_tool(self.offered, call)
        self.calls += 1
        self.errors += outcome.failed
        if note is not None:
            note(call.name if call.name in self.offered else "unknown", outcome)
        seconds = round(outcome.seconds, 6)
        return Message(role="tool", content=outcome.text, tool_call_id=call.id, name=call.name, call_s=seconds)


async def run_tool(offered: Mapping[str, OfferedTool], call: ToolCall) -> Outcome:
    """Run one call and return its outcome; no exception of the tool escapes."""
    began = time.perf_counter()
    text, failed = "", True
    one = offered.get(call.name)
    try:
        if one is None:
            raise ToolError(f"there is no tool {call.name!r:.100}; there are: {', '.join(offered) or 'none'}")
        async with asyncio.timeout(one.timeout_s):
            text, failed = await one.run(call.arguments), False
    except TimeoutError as error:
        limit = f": it had {one.timeout_s:g} s" if one is not None and one.timeout_s is not None else ""
        text = f"error: {str(error) or f'the tool took too long{limit}'}"
    except ToolFailed as error:
        text = str(error)
    except ToolError as error:
        text = f"error: {error}"
    except asyncio.CancelledError:
        if (playing := asyncio.current_task()) is None or playing.cancelling():
            raise
        text = "error: the tool raised CancelledError"
    except BaseException as error:  # noqa: BLE001 - any exception of the tool, even sys.exit(), is an observation
        text = f"error: {type(error).__name__}: {_words(error)}"
    return Outcome(text=truncate(text), failed=failed, seconds=time.perf_counter() - began)


def _words(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # noqa: BLE001 - an error that cannot even be written
        return "(no error text)"


def truncate(text: str) -> str:
    """Return the text as valid UTF-8 of at most RESULT_BYTES, without its middle if it is longer."""
    if len(text) > 4 * RESULT_BYTES:  # do not encode a huge text as a whole
        left = len(text) - RESULT_BYTES + NOTE_BYTES
        return _without_middle(text[:RESULT_BYTES], text[-END_BYTES:], f"{left:,} characters")
    data = text.encode(errors="replace")
    if len(data) <= RESULT_BYTES:
        return data.decode()
    whole = data.decode()
    return _without_middle(whole, whole[-END_BYTES:], f"{len(data) - RESULT_BYTES + NOTE_BYTES:,} bytes")


def _without_middle(first: str, last: str, left: str) -> str:
    head = first.encode(errors="replace")[: RESULT_BYTES - END_BYTES - NOTE_BYTES].decode(errors="ignore")
    tail = last.encode(errors="replace")[-END_BYTES:].decode(errors="ignore")
    return f"{head}\n... ({left} are left out) ...\n{tail}"
