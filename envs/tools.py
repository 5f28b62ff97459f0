"""Tools that an environment has itself: methods that the policy may call between its turns.

    class Shop(Environment):
        @tool
        def price(self, item: str, count: int = 1) -> float:
            '''What so many of an item cost.

            Args:
                item: as it stands in the catalogue
            '''
            return self.prices[item] * count

Name, description and JSON schema of the arguments come from the method. What the policy asks for is checked against
them, so a method gets what its type hints say. It may be `async`, obeys the same rules as `step` (no blocking in the
event loop), and says what went wrong by raising ToolError: whatever it raises becomes an observation, never the end of
the episode. The answers are messages of role `tool`, with reward 0; the environment's own `step` is called when the
policy calls nothing.

`ToolTurns` is that wrapper's rules, for these tools and for those of a job (`environment.tools`) alike.
"""

from __future__ import annotations

import asyncio
import inspect
import re
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, TypeVar, get_type_hints

import msgspec
from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from pydantic_core import to_json

from opentinker.envs.base import Action, Environment, Opening, Step
from opentinker.shared.types.core import Message, Tool, ToolCall

RESULT_BYTES = 20_000
"""Of what one call gives; the middle of more is left out."""
END_BYTES = 2000
"""Of these, from its end: there stands what went wrong."""
NOTE_BYTES = 100
"""For the words that stand between: what was cut once is not cut again."""
TOOL_TURNS = 16
"""Of one seat in an episode, unless the job says another number."""
TIMEOUT_S = 30.0
LAST = "\n(No more tools can be called in this episode: answer now.)"

Run = Callable[[dict[str, Any]], Awaitable[str]]
F = TypeVar("F", bound=Callable[..., Any])


class ToolError(Exception):
    """What the policy is told in place of a result."""


class Failed(ToolError):
    """The text is the whole result: a program's output with its traceback, say."""


class Offered(msgspec.Struct, frozen=True, kw_only=True):
    """A tool and who does it."""

    tool: Tool
    run: Run
    """Gets the arguments of a call; raises ToolError, or whatever it likes."""
    timeout_s: float | None = TIMEOUT_S
    """None: `run` sees to it."""


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    text: str
    failed: bool
    seconds: float


def tool(method: F) -> F:
    """Mark a method of an environment as a tool of its policy."""
    method.__is_tool__ = True  # type: ignore[attr-defined]
    return method


def offered_by(environment: Environment) -> list[Offered]:
    """The environment's own tools. Raises TypeError if a method cannot be one."""
    return [offer(getattr(environment, name)) for name in _tools_of(type(environment))]


@lru_cache(256)
def _tools_of(kind: type[Environment]) -> list[str]:
    return [name for name, value in inspect.getmembers(kind) if getattr(value, "__is_tool__", False)]


# --- a function as a tool -----------------------------------------------------------------------------------------


def offer(function: Callable[..., Any], timeout_s: float = TIMEOUT_S) -> Offered:
    """A tool of a plain or an async function. Raises TypeError unless its parameters have names and type hints."""
    described, model = describe(function)

    async def run(arguments: dict[str, Any]) -> str:
        given = checked(model, arguments)
        result = function(**given)
        return as_text(await result if inspect.isawaitable(result) else result)

    return Offered(tool=described, run=run, timeout_s=timeout_s)


def describe(function: Callable[..., Any]) -> tuple[Tool, type[BaseModel]]:
    """The tool that a function is, and the model of its arguments. Raises TypeError."""
    return _described(getattr(function, "__func__", function), inspect.ismethod(function))


@lru_cache(1024)
def _described(function: Callable[..., Any], bound: bool) -> tuple[Tool, type[BaseModel]]:
    """Once, for every episode opens with it."""
    name = function.__name__
    about, meanings = _docstring(function)
    hints = get_type_hints(function, include_extras=True)
    fields: dict[str, Any] = {}
    for parameter in list(inspect.signature(function).parameters.values())[bound:]:
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise TypeError(f"tool {name}: {parameter} has no name of its own that a call could give")
        if parameter.name not in hints:
            raise TypeError(f"tool {name}: parameter {parameter.name} needs a type hint")
        default = ... if parameter.default is parameter.empty else parameter.default
        meaning = meanings.get(parameter.name)
        fields[parameter.name] = (hints[parameter.name], Field(default, description=meaning))
    model = create_model(name, __config__=ConfigDict(extra="forbid"), **fields)
    schema = _without_titles(model.model_json_schema())
    schema.pop("additionalProperties", None)
    return Tool(name=name, description=about, parameters=schema), model


def checked(model: type[BaseModel], arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments with the types that the model says. Raises ToolError with every mistake."""
    try:
        found = model.model_validate(arguments)
    except ValidationError as error:
        mistakes = [f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors(include_url=False)]
        raise ToolError("wrong arguments: " + "; ".join(mistakes)) from None
    return {name: getattr(found, name) for name in type(found).model_fields}


def as_text(result: Any) -> str:
    """Text as it is, anything else as JSON."""
    return result if isinstance(result, str) else to_json(result, fallback=str).decode()


def _docstring(function: Callable[..., Any]) -> tuple[str, dict[str, str]]:
    """What it does, and what its parameters mean: lines `name: meaning` under `Args:`, in Google's style."""
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
    """Pydantic's titles repeat the names, and would be read by the policy in every prompt."""
    if isinstance(schema, list):
        return [_without_titles(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    titled = isinstance(schema.get("title"), str)
    return {key: _without_titles(value) for key, value in schema.items() if not (titled and key == "title")}


# --- who answers a turn -------------------------------------------------------------------------------------------


class ToolTurns:
    """The tool calls of one episode: which turns the tools answer, what they say, and how many there were."""

    def __init__(self, offered: Sequence[Offered], most: int = TOOL_TURNS) -> None:
        """`most`: turns of a seat that tools answer; then the environment gets what the policy says, calls or not.

        Raises ValueError if two tools have the same name.
        """
        self.offered: Mapping[str, Offered] = {one.tool.name: one for one in offered}
        if len(self.offered) < len(offered):
            names = sorted(one.tool.name for one in offered)
            raise ValueError(f"every tool needs a name of its own; there are: {', '.join(names)}")
        self.most = most
        self.calls = self.errors = 0
        self._turns: dict[str, int] = {}
        """By seat."""
        self._owed: dict[tuple[str, str], list[Message]] = {}

    @property
    def tools(self) -> list[Tool]:
        return [one.tool for one in self.offered.values()]

    @property
    def metrics(self) -> dict[str, float]:
        return {"tool_calls": float(self.calls), "tool_errors": float(self.errors)}

    def takes(self, seat: str) -> bool:
        """Whether tools may answer the seat once more; if so, this is counted as one of its turns."""
        self._turns[seat] = self._turns.get(seat, 0) + 1
        return self._turns[seat] <= self.most

    def split(self, calls: Sequence[ToolCall], others: bool) -> tuple[list[ToolCall], list[ToolCall]]:
        """Those for these tools, and those for `others`: if there are none, unknown names are for us to answer."""
        theirs = [call for call in calls if call.name not in self.offered] if others else []
        return [call for call in calls if call not in theirs], theirs

    def owe(self, seat: str, stream: str, messages: list[Message]) -> None:
        """Results for a turn that the environment answered too: the stream that called sees them when it acts again."""
        if messages:
            self._owed[seat, stream] = [*self._owed.get((seat, stream), []), *messages]

    def due(self, seat: str, stream: str) -> list[Message]:
        """What the stream is owed, before anything else that it sees."""
        return self._owed.pop((seat, stream), [])

    async def answer(
        self, seat: str, calls: Sequence[ToolCall], problem: str, note: Callable[[str, Outcome], None] | None = None
    ) -> list[Message]:
        """What the seat sees next, after a turn that was taken. `note` hears of every call, by its tool's name."""
        messages = [await self._result(call, note) for call in calls]
        if problem:
            self.calls += 1
            self.errors += 1
            messages.append(Message(role="user", content=problem))
        if self._turns[seat] == self.most:
            last = messages.pop()
            messages.append(msgspec.structs.replace(last, content=last.text + LAST))
        return messages

    async def _result(self, call: ToolCall, note: Callable[[str, Outcome], None] | None) -> Message:
        outcome = await perform(self.offered, call)
        self.calls += 1
        self.errors += outcome.failed
        if note is not None:
            note(call.name if call.name in self.offered else "unknown", outcome)
        return Message(role="tool", content=outcome.text, tool_call_id=call.id, name=call.name)


async def perform(offered: Mapping[str, Offered], call: ToolCall) -> Outcome:
    """Whatever the tool does, there is an answer."""
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
    except Failed as error:
        text = str(error)
    except ToolError as error:
        text = f"error: {error}"
    except asyncio.CancelledError:
        if (playing := asyncio.current_task()) is None or playing.cancelling():
            raise
        text = "error: the tool raised CancelledError"
    except BaseException as error:  # noqa: BLE001 - the tool's own mistake, sys.exit() in it too, is an observation
        text = f"error: {type(error).__name__}: {_words(error)}"
    return Outcome(text=shortened(text), failed=failed, seconds=time.perf_counter() - began)


def _words(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # noqa: BLE001 - an error that cannot even be written
        return "(without words)"


def shortened(text: str) -> str:
    """At most RESULT_BYTES of it, and fit to be sent."""
    if len(text) > 4 * RESULT_BYTES:  # never encode all of what has no end
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


class WithTools(Environment):
    """An environment and its own tools, as one environment. All its seats may call them."""

    def __init__(self, environment: Environment, offered: Sequence[Offered], most: int = TOOL_TURNS) -> None:
        super().__init__(environment.config)
        self.environment = environment
        self.seats = environment.seats
        self.wants_tokens = environment.wants_tokens
        self._turns = ToolTurns(offered, most)
        self._seen: set[tuple[str, str]] = set()
        self._asked: Opening | Step = Opening(messages=[])
        self._metrics: dict[str, float] = {}
        self._answers_itself = False
        """It offers tools that it does itself, in its step."""
        self._played = 0
        """Turns of the environment's own."""

    async def open(self, row: int, seed: int) -> Opening:
        opened = await self.environment.open(row, seed)
        if not isinstance(opened, Opening):
            opened = Opening(messages=opened, seat=self.environment.seats[0])
        self._offer(opened)
        return opened

    async def step(self, action: Action) -> Step:
        mine, theirs = self._turns.split(action.tool_calls, self._answers_itself)
        said: list[Message] = []
        if (mine or action.problem) and self._turns.takes(action.seat):
            said = await self._turns.answer(action.seat, mine, action.problem)
            if not theirs:
                return self._again(said)
        own = msgspec.structs.replace(action, turn=self._played, tool_calls=theirs, problem="")
        self._played += 1
        step = await self.environment.step(own)
        if isinstance(step, Step):  # else it is nothing, and whoever called us says so
            self._metrics = dict(step.metrics)
            step.metrics = self._metrics | self._turns.metrics
            self._turns.owe(self._asked.seat, self._asked.stream, said)
            if not step.done:
                step.messages = [*self._turns.due(step.seat, step.stream), *step.messages]
                self._offer(step)
        return step

    def _again(self, said: list[Message]) -> Step:
        """The same turn of the environment goes on."""
        asked = self._asked
        metrics = self._metrics | self._turns.metrics
        return Step(
            messages=said,
            seat=asked.seat,
            stream=asked.stream,
            max_tokens=asked.max_tokens,
            stop=asked.stop,
            metrics=metrics,
        )

    def _offer(self, said: Opening | Step) -> None:
        """With the first messages of each stream."""
        self._asked = said
        if (said.seat, said.stream) not in self._seen:
            self._seen.add((said.seat, said.stream))
            self._answers_itself = self._answers_itself or bool(said.tools)
            said.tools = [*said.tools, *self._turns.tools]

    async def close(self) -> None:
        await self.environment.close()

    def gold(self) -> str | Message | None:
        return self.environment.gold()


def with_tools(environment: Environment, most: int = TOOL_TURNS) -> Environment:
    """The environment as it is if it has no tools of its own. Raises TypeError if one of its methods cannot be one."""
    offered = offered_by(environment)
    return WithTools(environment, offered, most) if offered else environment
