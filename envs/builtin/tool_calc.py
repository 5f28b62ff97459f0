"""Long arithmetic with a calculator tool. No data; the policy learns to call the tool."""

from __future__ import annotations

import ast
import operator
import random
import re
from collections.abc import Callable
from typing import Annotated

from pydantic import Field, model_validator

from opentinker.envs.base import Action, Environment, EnvironmentConfig, Step, call, user
from opentinker.envs.tools import ToolError, tool
from opentinker.shared.types.core import Message

_NUMBER = re.compile(r"-?\d+")
_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
}
LONGEST = 200
"""Maximum characters of an expression, which limits the digits of its value."""


class ToolCalc(Environment):
    """Asks `What is 4711 * 815 - 42? ...`; the answer is right if its last number is the value.

    A turn that calls the calculator has neither cost nor reward. With `call_reward` the first correct use of it is
    rewarded, for a policy that hardly ever calls.
    """

    class Config(EnvironmentConfig):
        digits: Annotated[int, Field(ge=1, le=12)] = 4
        """Digits of each number."""
        terms: Annotated[int, Field(ge=2, le=6)] = 3
        """Numbers in the question."""
        examples: Annotated[int, Field(ge=0, le=8)] = 0
        """Worked examples before the question, with calls and results, which small models copy."""
        call_reward: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0
        """Part of the reward for a calculator call that returned the right number, for any final answer."""

        @model_validator(mode="after")
        def _fits(self) -> ToolCalc.Config:
            if (self.digits + 4) * self.terms > LONGEST:
                raise ValueError(f"digits={self.digits} and terms={self.terms} make expressions that are too long")
            return self

    config: Config

    async def open(self, row: int, seed: int) -> list[Message]:
        draw = random.Random(f"tool_calc/{seed}/{row}")
        self.expression = self._drawn(draw)
        self.value = value_of(self.expression)
        self.computed = ""
        """Last result of the calculator."""
        self.helped = False
        shown = [self._drawn(draw) for _ in range(self.config.examples)]
        return [*(message for expression in shown for message in worked(expression)), ask(self.expression)]

    def _drawn(self, draw: random.Random) -> str:
        low, high = 10 ** (self.config.digits - 1), 10**self.config.digits - 1
        words = [str(draw.randint(low, high))]
        for _ in range(self.config.terms - 1):
            words += [draw.choice("+-*"), str(draw.randint(low, high))]
        return " ".join(words)

    @tool
    def calculate(self, expression: str) -> str:
        """The value of an arithmetic expression of whole numbers.

        Args:
            expression: numbers, +, -, * and brackets, for example (12 + 30) * 4
        """
        self.computed = str(value_of(expression))
        self.helped = self.helped or self.computed == str(self.value)
        return self.computed

    async def step(self, action: Action) -> Step:
        numbers = _NUMBER.findall(action.text.replace(",", ""))
        right = bool(numbers) and numbers[-1] == str(self.value)
        components = {"right": float(right) * (1.0 - self.config.call_reward)}
        if self.config.call_reward:
            components["called"] = self.config.call_reward * self.helped
        metrics = {"exact": float(right), "helped": float(self.helped)}
        return Step(reward=sum(components.values()), done=True, components=components, metrics=metrics)

    def gold(self) -> str | Message:
        return self.computed or call("calculate", expression=self.expression)


def ask(expression: str) -> Message:
    return user(f"What is {expression}? Use the calculator, then answer with the number alone.")


def worked(expression: str) -> list[Message]:
    """Return a worked example: question, call, result, answer."""
    calling, value = call("calculate", expression=expression), str(value_of(expression))
    result = Message(role="tool", content=value, tool_call_id=calling.tool_calls[0].id, name="calculate")
    return [ask(expression), calling, result, Message(role="assistant", content=value)]


def value_of(expression: str) -> int:
    """Evaluate an expression. Raise ToolError with what is wrong."""
    if len(expression) > LONGEST:
        raise ToolError(f"the expression has {len(expression)} characters; at most {LONGEST} are allowed")
    try:
        return _value(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        raise ToolError(f"{expression!r} is no expression of whole numbers, +, -, * and brackets") from None


def _value(node: ast.expr) -> int:
    match node:
        case ast.Constant(value=int() as value) if type(value) is int:
            return value
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _value(operand)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_value(left), _value(right))
    raise ValueError(type(node).__name__)
