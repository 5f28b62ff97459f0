"""Problems with a mathematical answer, from any file or data set with a column for each; compared by math-verify."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Self

from pydantic import BaseModel, Field, model_validator

from opentinker.envs.base import Action, Environment
from opentinker.envs.base import Step as Answer
from opentinker.envs.data import (
    DataConfig,
    Row,
    TableRows,
    category_of,
    check_categories,
    content_of,
    in_event_loop,
    read,
    table,
    text_of,
)
from opentinker.envs.grading import graders, is_installed
from opentinker.shared.types.core import Message

INSTRUCTION = "Think step by step, and put your final answer into \\boxed{}."


class Math(Environment):
    """One problem, and one answer or several tries, compared by value: 1/2, 0.5 and \\frac{1}{2} are the same, and so
    are sets, intervals, and equal expressions. The answer is the last box, otherwise the last text that reads like
    one."""

    class Config(DataConfig):
        problem: str = "problem"
        """Column with the problem."""
        answer: str = "answer"
        """Column with the answer alone, as LaTeX or plain."""
        images: str | None = None
        """Column with a PNG or JPEG image, or a list of them."""
        category: str | None = None
        """Column with the problem's category, e.g. its subject or level, 50 different ones at most: evaluations report
        by it."""
        instruction: str = INSTRUCTION
        """Added below every problem; may be empty."""
        system: str = ""
        """System message; empty: none."""
        format_reward: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0
        """Reward of a wrong boxed answer, of the last one if there are several tries."""
        tries: Annotated[int, Field(ge=1, le=64)] = 1
        """Answers that an episode allows. The policy learns that an answer was wrong, never what the right one is."""
        retry_penalty: Annotated[float, Field(ge=0.0, le=1.0)] = 0.05
        """Subtracted from the reward of every wrong answer after the first."""

        @model_validator(mode="after")
        def _can_be_played(self) -> Self:
            """Read the data when a job is submitted, to report mistakes then, and outside the event loop."""
            if not is_installed():
                raise ValueError("math-verify is not installed here: pip install 'opentinker[math]'")
            if in_event_loop():
                return self
            rows = read(self)
            for column in (self.problem, self.answer):
                text_of(rows.rows[0], column)
            content_of("", rows.rows[0], self.images)
            check_categories(rows.rows, self.category)
            return self

    config: Config

    @classmethod
    def data_rows(cls, config: BaseModel) -> TableRows:
        assert isinstance(config, cls.Config)
        return TableRows(read(config), config, partial(prompt_of, config))

    async def open(self, row: int, seed: int) -> list[Message]:
        self.tries = 0
        self.row = (await table(self.config)).at(row, shuffle=self.config.shuffle)
        return prompt_of(self.config, self.row)

    async def step(self, action: Action) -> Answer:
        config = self.config
        grade = await graders().grade(text_of(self.row, config.answer), action.text)
        boxed = "\\boxed" in action.text
        self.tries += 1
        left = config.tries - self.tries
        done = grade.right or not left
        wrong = config.format_reward * (boxed and done) - config.retry_penalty * (self.tries > 1)
        return Answer(
            reward=1.0 if grade.right else wrong,
            done=done,
            messages=[] if done else [self._wrong(left)],
            metrics={
                "exact": float(grade.right),
                "answered": float(grade.answered),
                "format": float(boxed),
                "ungraded": float(grade.late),
                **({"tries": float(self.tries)} if config.tries > 1 else {}),
                **category_of(self.row, config.category),
            },
        )

    def _wrong(self, left: int) -> Message:
        tries = "One try is" if left == 1 else f"{left} tries are"
        return Message(role="user", content=f"This is not right. {tries} left. {self.config.instruction}".strip())

    def gold(self) -> str:
        answer = text_of(self.row, self.config.answer)
        return f"It is \\boxed{{{answer}}}."


def prompt_of(config: Math.Config, row: Row) -> list[Message]:
    """Raise RowError."""
    asked = "\n\n".join(part for part in (text_of(row, config.problem), config.instruction) if part)
    told = Message(role="user", content=content_of(asked, row, config.images))
    return [*([Message(role="system", content=config.system)] if config.system else []), told]
