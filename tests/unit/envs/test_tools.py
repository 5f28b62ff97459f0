"""Tools that an environment has itself: what is made of a method, who answers which turn, and what goes wrong."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Literal

import pytest

from opentinker.envs.base import Action, Environment, Opening, Step, call, play_gold, user
from opentinker.envs.builtin.tool_calc import ToolCalc, value_of
from opentinker.envs.registry import make
from opentinker.envs.tools import (
    LAST_TURN_NOTE,
    RESULT_BYTES,
    OfferedTool,
    ToolError,
    ToolTurns,
    describe,
    run_tool,
    tool,
    tool_of,
)
from opentinker.envs.with_tools import WithTools, with_tools
from opentinker.shared.types.core import Ending, Message, StopReason, Tool, ToolCall
from opentinker.shared.types.errors import SpecError
from tests.samples.seat_samples import Relay
from tests.support import playing
from tests.support.factories import make_spec
from tests.unit.envs.env_worker.requests import opening


class Shop(Environment):
    """Ends when something is said without a call."""

    seats = ("buyer", "seller")
    turns: list[int]

    async def open(self, row: int, seed: int) -> Opening:
        self.turns = []
        return Opening(messages=[user("go")], seat="buyer", stream="s", max_tokens=7, stop=["."])

    @tool
    async def price(self, item: str, count: int = 1) -> float:
        """What so many cost.

        Args:
            item: as it stands
                in the catalogue
            count: how many

        Returns:
            the price
        """
        if item == "nothing":
            raise ToolError("there is no such item")
        if item == "broken":
            raise RuntimeError("the scales are broken")
        return 1.5 * count

    @tool
    def names(self) -> dict[str, list[int]]:
        """All of them."""
        return {"nuts": [1, 2]}

    async def step(self, action: Action) -> Step:
        self.turns.append(action.turn)
        assert not action.tool_calls and not action.problem
        done = action.text == "done"
        return Step(messages=[user(action.text)], reward=1.0, done=done, seat="seller", metrics={"exact": 1.0})


def ask(name: str, turn: int = 0, seat: str = "buyer", problem: str = "", **arguments: Any) -> Action:
    calls = [] if problem else [ToolCall(id="c", name=name, arguments=arguments)]
    return Action(text="?", stop=StopReason.EOS, turn=turn, seat=seat, tool_calls=calls, problem=problem)


def say(text: str, turn: int = 0, seat: str = "buyer") -> Action:
    return Action(text=text, stop=StopReason.EOS, turn=turn, seat=seat)


async def shop(most: int = 16) -> Environment:
    return with_tools(Shop(Shop.Config()), most)


def seen(step: Any) -> list[str]:
    return [message.text for message in step.messages]


async def test_results_of_a_turn_that_the_environment_answers_too_reach_the_stream_that_called() -> None:
    environment = with_tools(Relay(Relay.Config()))
    await environment.open(0, 0)
    calls = [ToolCall(id="1", name="look", arguments={}), ToolCall(id="2", name="move", arguments={})]
    first = await environment.step(Action(text="?", stop=StopReason.EOS, turn=0, seat="a", tool_calls=calls))
    assert (first.seat, seen(first)) == ("b", ["after a"])
    second = await environment.step(say("x", 1, "b"))
    assert (second.seat, seen(second)) == ("a", ["nothing", "after b"])
    third = await environment.step(say("x", 2, "a"))
    assert seen(third) == ["after a"]
    anew = with_tools(Relay(Relay.Config(anew=True)))
    await anew.open(0, 0)
    begun = await anew.step(Action(text="?", stop=StopReason.EOS, turn=0, seat="a", tool_calls=calls))
    assert (begun.stream, seen(begun)) == ("1", ["anew"]), "its messages are the whole prompt"


def test_a_method_is_described_by_its_hints_and_its_docstring() -> None:
    described, _ = describe(Shop(Shop.Config()).price)
    assert described == Tool(
        name="price",
        description="What so many cost.",
        parameters={
            "type": "object",
            "properties": {
                "item": {"type": "string", "description": "as it stands in the catalogue"},
                "count": {"type": "integer", "default": 1, "description": "how many"},
            },
            "required": ["item"],
        },
    )


def test_a_parameter_named_title_is_one_like_any_other() -> None:
    def book(title: str, kind: Literal["a", "b"]) -> str:
        return title + kind

    described, _ = describe(book)
    assert described.parameters["properties"] == {
        "title": {"type": "string"},
        "kind": {"type": "string", "enum": ["a", "b"]},
    }


@pytest.mark.parametrize("function", [lambda x: x, lambda *x: x, lambda **x: x])
def test_a_function_whose_parameters_cannot_be_described_is_no_tool(function: Callable[..., Any]) -> None:
    with pytest.raises(TypeError, match=r"type hint|no name that a call could use"):
        describe(function)


async def test_calls_are_answered_by_the_tools_and_everything_else_by_the_environment() -> None:
    environment = await shop()
    opened = await environment.open(0, 0)
    assert isinstance(opened, Opening)
    assert [one.name for one in opened.tools] == ["names", "price"]
    answered = await environment.step(ask("price", item="nuts", count=2))
    (result,) = answered.messages
    assert result == Message(role="tool", content="3.0", tool_call_id="c", name="price", call_s=result.call_s)
    assert result.call_s is not None and result.call_s >= 0.0
    assert (answered.reward, answered.done, answered.seat, answered.stream) == (0.0, False, "buyer", "s")
    assert (answered.max_tokens, answered.stop) == (7, ["."])
    assert answered.metrics == {"tool_calls": 1.0, "tool_errors": 0.0}
    listed = await environment.step(ask("names", 1))
    assert listed.messages[0].content == '{"nuts":[1,2]}'
    moved = await environment.step(say("hm", 2))
    assert (moved.seat, moved.reward, [one.name for one in moved.tools]) == ("seller", 1.0, ["names", "price"])
    done = await environment.step(say("done", 3, "seller"))
    assert done.metrics == {"exact": 1.0, "tool_calls": 2.0, "tool_errors": 0.0}
    assert isinstance(environment, WithTools) and isinstance(environment.environment, Shop)
    assert environment.environment.turns == [0, 1]


@pytest.mark.parametrize(
    ("action", "text"),
    [
        (ask("price"), "error: wrong arguments: item: Field required"),
        (ask("price", item="x", count="many", colour=1), "count: Input should be a valid integer"),
        (ask("price", item="x", count="many", colour=1), "colour: Extra inputs are not permitted"),
        (ask("price", item="nothing"), "error: there is no such item"),
        (ask("price", item="broken"), "error: RuntimeError: the scales are broken"),
        (ask("prize", item="x"), "error: there is no tool 'prize'; there are: names, price"),
    ],
)
async def test_what_goes_wrong_in_a_call_is_an_observation(action: Action, text: str) -> None:
    environment = await shop()
    await environment.open(0, 0)
    answered = await environment.step(action)
    (message,) = answered.messages
    assert text in message.text
    assert (message.role, message.tool_call_id) == ("tool", "c")
    assert answered.metrics == {"tool_calls": 1.0, "tool_errors": 1.0}


async def test_something_that_looks_like_a_call_is_answered_with_what_is_wrong() -> None:
    environment = await shop()
    await environment.open(0, 0)
    answered = await environment.step(ask("", problem="it is not valid JSON"))
    assert answered.messages == [user("it is not valid JSON")]
    assert answered.metrics["tool_errors"] == 1.0


async def test_after_its_last_tool_turn_a_seat_s_words_are_for_the_environment() -> None:
    environment = await shop(most=2)
    await environment.open(0, 0)
    first = await environment.step(ask("names"))
    assert LAST_TURN_NOTE not in first.messages[0].text
    last = await environment.step(ask("names", 1))
    assert last.messages[0].text.endswith(LAST_TURN_NOTE)
    played = await environment.step(ask("names", 2))
    assert played.reward == 1.0
    again = await environment.step(ask("names", 3, "seller"))
    assert again.messages[0].role == "tool"


async def test_a_long_result_is_cut_and_a_slow_one_given_up() -> None:
    def flood() -> str:
        """Much."""
        return "é" * RESULT_BYTES

    async def hang() -> None:
        """Never."""
        await asyncio.Event().wait()

    async def complain() -> str:
        """Like a tool with a limit of its own."""
        raise TimeoutError("the shop is closed")

    offered = {one.tool.name: one for one in (tool_of(flood), tool_of(hang, 0.01), tool_of(complain))}

    async def text_of(name: str) -> str:
        return (await run_tool(offered, ToolCall(id="c", name=name, arguments={}))).text

    cut = await text_of("flood")
    assert cut.startswith("é") and "... (20,100 bytes are left out) ..." in cut
    assert len(cut.encode()) < RESULT_BYTES + 100
    assert await text_of("hang") == "error: the tool took too long: it had 0.01 s"
    assert await text_of("complain") == "error: the shop is closed"


async def test_text_that_cannot_be_sent_is_made_fit() -> None:
    def half() -> str:
        """Half a character."""
        return "\ud800"

    one = tool_of(half)
    assert (await run_tool({"half": one}, ToolCall(id="c", name="half", arguments={}))).text == "?"


def test_two_tools_of_one_name_are_refused() -> None:
    one = OfferedTool(tool=Tool(name="x", description="", parameters={}), run=None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="a different name"):
        ToolTurns([one, one])


async def test_an_env_worker_offers_the_environment_s_tools_and_answers_them() -> None:
    player, opened = await playing.local_episode(opening(environment="tests.unit.envs.test_tools:Shop"))
    assert [one.name for one in opened.tools] == ["names", "price"]
    asked = ToolCall(id="c", name="price", arguments={"item": "nuts"})
    step = playing.step(0, "?", seat="buyer", tool_calls=[asked])
    answered = await player.step(step)
    assert (answered.seat, answered.messages[0].text, answered.done) == ("buyer", "1.5", False)
    done = await player.step(playing.step(1, "done", seat="buyer"))
    assert done.done and done.metrics["tool_calls"] == 1.0


class Undescribed(Shop):
    @tool
    def worth(self, item) -> float:  # type: ignore[no-untyped-def]
        """Lacks a hint."""
        return 1.0


async def test_a_method_that_cannot_be_a_tool_is_the_environment_s_fault() -> None:
    _, opened = await playing.local_episode(opening(environment="tests.unit.envs.test_tools:Undescribed"))
    assert opened.failure == Ending.ENV_ERROR
    assert "tool worth: parameter item needs a type hint" in opened.error


# --- tool_calc ----------------------------------------------------------------------------------------------------


async def test_the_expert_of_tool_calc_calls_the_calculator_and_answers() -> None:
    played = await play_gold(make("tool_calc", {"call_reward": 0.25}), 3, 4)
    assert [message.role for message in played.messages] == ["user", "assistant", "tool", "assistant"]
    question = played.messages[0].text.removeprefix("What is ").partition("?")[0]
    assert played.messages[1] == call("calculate", expression=question)
    assert played.messages[2].text == played.messages[3].text
    assert (played.reward, played.turns) == (1.0, 2)
    assert played.metrics == {"exact": 1.0, "helped": 1.0, "tool_calls": 1.0, "tool_errors": 0.0}


async def test_tool_calc_shows_how_it_is_done() -> None:
    environment = make("tool_calc", {"examples": 2})
    opened = await environment.open(3, 4)
    assert isinstance(opened, list)
    assert [message.role for message in opened] == ["user", "assistant", "tool", "assistant"] * 2 + ["user"]
    assert opened[1].tool_calls and opened[2].content == opened[3].content
    assert opened[-1] == (await make("tool_calc", {}).open(3, 4))[0]  # type: ignore[index]


async def test_tool_calc_pays_for_help_and_for_the_answer_apart() -> None:
    environment = with_tools(make("tool_calc", {"call_reward": 0.25}))
    await environment.open(0, 0)
    assert isinstance(environment, WithTools) and isinstance(environment.environment, ToolCalc)
    await environment.step(ask("calculate", seat="", expression=environment.environment.expression))
    wrong = await environment.step(say("7", 1, ""))
    assert (wrong.reward, wrong.components) == (0.25, {"right": 0.0, "called": 0.25})


@pytest.mark.parametrize(
    ("expression", "value"),
    [("2 + 3 * -4", -10), ("(2 + 3) * 4", 20), ("10**2", None), ("1/2", None), ("", None), ("__import__('os')", None),
     ("9" * 300, None), ("1.5", None), ("True", None), ("(" * 150, None), ("1 +", None)],
)  # fmt: skip
def test_the_calculator_knows_whole_numbers_and_three_signs(expression: str, value: int | None) -> None:
    if value is None:
        with pytest.raises(ToolError, match=r"no expression|at most"):
            value_of(expression)
    else:
        assert value_of(expression) == value


# --- what a job may ask for ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environment", "field", "problem"),
    [
        ({"tools": [{"type": "python", "command": ["x"]}]}, "tools.0.command", "does not apply to type = 'python'"),
        ({"tools": [{"type": "mcp"}]}, "tools.0.command", "a command or a url"),
        ({"tools": [{"type": "mcp", "command": ["x"], "url": "http://x"}]}, "tools.0.command", "a command or a url"),
        ({"tools": [{"type": "mcp", "url": "ftp://x"}]}, "tools.0.url", "must match"),
        ({"tools": [{"type": "functions"}]}, "tools.0.module", "is needed"),
        ({"tools": [{"type": "shell"}]}, "tools.0.type", "'python', 'mcp' or 'functions'"),
        ({"tool_turns": 0}, "tool_turns", "greater than or equal to 1"),
        ({"name": "served:x", "tools": [{"type": "python"}]}, "tools", "give it tools of its own"),
    ],
)
def test_a_tool_that_cannot_be_is_a_mistake_of_its_field(environment: dict[str, Any], field: str, problem: str) -> None:
    with pytest.raises(SpecError) as error:
        make_spec(**{f"environment__{name}": value for name, value in environment.items()})
    assert [(mistake["field"], problem in mistake["problem"]) for mistake in error.value.mistakes] == [
        (f"environment.{field}", True)
    ]


def test_tools_need_a_template_that_tells_of_them() -> None:
    with pytest.raises(SpecError, match="need a chat template"):
        make_spec(model__chat_template="plain", environment__tools=[{"type": "python"}])
    with pytest.raises(SpecError, match="cannot tell a model of tools"):
        make_spec(model__chat_template="plain", model__tool_format="hermes")
