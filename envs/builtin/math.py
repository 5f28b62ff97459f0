"""Problems with a mathematical answer, from any file or data set with a column for each; compared by math-verify."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator

from opentinker.envs.base import Action, Environment
from opentinker.envs.base import Step as Answer
from opentinker.envs.data import DataConfig, content_of, in_event_loop, read, table, text_of
from opentinker.envs.grading import graders, is_installed
from opentinker.shared.types.core import Message

INSTRUCTION = "Think step by step, and put your final answer into \\boxed{}."


class Math(Environment):
    """One problem, one answer. It counts by its value: 1/2, 0.5 and \\frac{1}{2} are the same, and so are sets,
    intervals, and expressions that are equal. The answer is what stands in the last box, else what reads like one."""

    class Config(DataConfig):
        problem: str = "problem"
        """The column that holds the problem."""
        answer: str = "answer"
        """The column that holds the answer alone, as LaTeX or plain."""
        images: str | None = None
        """The column that holds a PNG or JPEG image, or a list of them."""
        instruction: str = INSTRUCTION
        """Put under every problem; may be empty."""
        system: str = ""
        """A system message; empty: none."""
        format_reward: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0
        """Reward of a wrong answer in a box."""

        @model_validator(mode="after")
        def _can_be_played(self) -> Self:
            """The data are read when a job is submitted, so that a mistake is found then; never in an event loop."""
            if not is_installed():
                raise ValueError("math-verify is not installed here: pip install 'opentinker[math]'")
            if in_event_loop():
                return self
            rows = read(self)
            for column in (self.problem, self.answer):
                text_of(rows.rows[0], column)
            content_of("", rows.rows[0], self.images)
            return self

    config: Config

    async def open(self, row: int, seed: int) -> list[Message]:
        config = self.config
        self.row = (await table(config)).at(row, shuffle=config.shuffle)
        problem = text_of(self.row, config.problem)
        asked = "\n\n".join(part for part in (problem, config.instruction) if part)
        told = Message(role="user", content=content_of(asked, self.row, config.images))
        return [*([Message(role="system", content=config.system)] if config.system else []), told]

    async def step(self, action: Action) -> Answer:
        grade = await graders().grade(text_of(self.row, self.config.answer), action.text)
        boxed = "\\boxed" in action.text
        reward = 1.0 if grade.right else self.config.format_reward * boxed
        return Answer(
            reward=reward,
            done=True,
            metrics={
                "exact": float(grade.right),
                "answered": float(grade.answered),
                "format": float(boxed),
                "ungraded": float(grade.late),
            },
        )

    def gold(self) -> str:
        answer = text_of(self.row, self.config.answer)
        return f"It is \\boxed{{{answer}}}."
