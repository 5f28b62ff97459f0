"""The one class that users write. An env worker makes an instance per episode and calls open, step, step, ..., close.

A complete environment:

    class Parity(Environment):
        '''Say whether a number is even or odd.'''

        class Config(EnvironmentConfig):
            largest: int = 99

        config: Config

        async def open(self, row: int, seed: int) -> list[Message]:
            self.number = random.Random(f"{seed}/{row}").randint(0, self.config.largest)
            return [user(f"Is {self.number} even or odd?")]

        async def step(self, action: Action) -> Step:
            right = self.gold() in action.text.lower()
            return Step(reward=float(right), done=True, metrics={"exact": float(right)})

        def gold(self) -> str:
            return "odd" if self.number % 2 else "even"

What is promised to an environment: one instance plays one episode, calls never overlap, `row` and `seed` alone decide
the start state (the episodes of a group open with the same pair), and `close` is called once, whatever happened.
What an environment owes: its own random generator (never the global one), finite rewards, and no blocking calls in
the event loop: set `blocking = True` if it works or waits for more than a millisecond; it then runs in a child process,
which is killed at the episode's deadline. One that blocks the loop all the same holds up every session of its env
worker; after twice `worker_ttl_s` the worker names it in its log and ends, and its sessions are played elsewhere.

An environment with several seats names them in `seats` and is the referee: `open` and every `step` say who acts next
(`Opening.seat`, `Step.seat`), and the messages are for that seat alone. Every seat has tokens of its own and sees only
what was said to it. `Step.reward` is that of the seat that has just acted, `Step.rewards` names what the others get.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import msgspec
from pydantic import BaseModel, ConfigDict

from opentinker.shared.types.core import Message, StopReason, Tool, ToolCall
from opentinker.shared.types.env_protocol import Policy

EPISODE_VARIABLE = "ENV_EPISODE"
"""Environment variable of a child process during the calls of an episode. A process that bears it ends with the
episode; one that episodes are to share is started without it, and ends with the child process."""
ELSEWHERE = "elsewhere"
"""True in the context of a config's validation: episodes are not played by this process, so what is installed here says
nothing about them."""


class Action(msgspec.Struct, frozen=True, kw_only=True):
    """What the policy said in one turn."""

    text: str
    """The sampled tokens as text, without the end-of-turn token."""
    stop: StopReason
    """Why sampling ended; `length` and `context` mean that the text was cut."""
    turn: int
    """0, 1, 2... over all seats."""
    seat: str = ""
    """Who acts; empty where there is only one seat."""
    tool_calls: list[ToolCall] = []
    """What the text asks tools for, in an environment that offers any."""
    problem: str = ""
    """Why something that looks like a tool call is none; tell the policy."""
    words: str = ""
    """What the text says before its tool calls."""
    ids: list[int] = []
    """The sampled tokens, if the environment `wants_tokens`."""
    logprobs: list[float] = []
    """Of `ids`, under the distribution that they were drawn from."""
    prompt_tokens: int = 0
    """What the policy had before it when it sampled `ids`."""


class Opening(msgspec.Struct, kw_only=True):
    """What `open` gives where a list of messages is not enough."""

    messages: list[Message]
    seat: str = ""
    """Who acts first."""
    stream: str = ""
    """As in Step."""
    tools: list[Tool] = []
    """What the first seat may call; the others' come with their first Step."""
    prompt_ids: list[int] | None = None
    """In place of messages: the prompt as token ids."""
    prompt_text: str | None = None
    """In place of messages: the prompt as plain text, which no chat template writes."""
    max_tokens: int | None = None
    """As in Step."""
    stop: list[str] = []
    """As in Step."""


class Step(msgspec.Struct, kw_only=True):
    """The environment's answer to one action."""

    messages: list[Message] = []
    """What the policy sees next; ignored when done, unless truncated: then what it would have seen."""
    reward: float = 0.0
    """Of this turn. The episode's reward is the sum over its turns."""
    done: bool = False
    truncated: bool = False
    """With `done`: a limit of steps or time ended the episode, not the task itself. advantage = "gae" then counts the
    value of the state in which it was left; after a plain `done` nothing more could have come."""
    components: dict[str, float] = {}
    """Named parts of `reward`, for the curves."""
    seat: str = ""
    """Who acts next, in an environment with several seats."""
    stream: str = ""
    """In which of the seat's contexts: a new name begins a new one, of which `messages` are the whole prompt."""
    tools: list[Tool] = []
    """With the first messages of a stream: what may be called in it."""
    rewards: dict[str, dict[str, float]] = {}
    """What other seats get now: named parts, which are summed."""
    prompt_ids: list[int] | None = None
    """In place of messages: the whole prompt of the next turn as token ids, the stream's tokens so far first."""
    prompt_text: str | None = None
    """In place of messages: plain text that the stream goes on with, by no chat template."""
    max_tokens: int | None = None
    """Of the next turn, where that is less than the job allows."""
    stop: list[str] = []
    """Strings that end the next turn, beside the job's own."""
    metrics: dict[str, float] = {}
    """What is known of the episode so far, e.g. `exact`; those of the last step are kept. One named `task/NAME` that is
    1 says which task this was: validation reports by task."""


def is_truncation(info: Mapping[str, Any]) -> bool:
    """Whether the info of a last step says that a limit ended the episode, in Gymnasium's words."""
    return any(bool(info.get(name, False)) for name in ("truncated", "TimeLimit.truncated"))


class EnvironmentConfig(BaseModel):
    """Base of an environment's settings: unknown names are refused, and so is NaN."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)


class BadReply(Exception):
    """An environment, or what it has asked, answered with something that is not an observation and finite numbers."""


class Unreachable(Exception):
    """What an environment plays on is not there now: the session is lost, and its episode may be played again."""


class Environment(ABC):
    Config: ClassVar[type[BaseModel]] = EnvironmentConfig
    """The settings a job may give under `environment.config`."""
    blocking: ClassVar[bool] = False
    """True: run in a child process, because `open` or `step` compute or wait without giving the loop back."""
    cost: ClassVar[float] = 1.0
    """How much of an env worker one session takes, of the `env_sessions` that it has, wherever it is played there."""
    recycle_after: ClassVar[int | None] = None
    """blocking: a child process that has opened so many episodes is replaced once they are over; for libraries that
    leak."""
    memory_mb: ClassVar[int | None] = None
    """blocking: likewise one that holds more memory than that."""
    seats: tuple[str, ...] = ("",)
    """Who plays; set it in __init__ where that depends on the config."""
    wants_tokens: bool = False
    """True: actions carry the sampled token ids and their logprobs."""
    policy: Policy = Policy()
    """Who acts, from before `open` on."""

    def __init__(self, config: BaseModel) -> None:
        self.config = config

    @classmethod
    def rehearse(cls, config: BaseModel) -> None:
        """Build what an episode would play, and leave it; raise what is lacking, such as a library. An env worker is
        asked to when a job is submitted: in a process of its own where the class blocks. Default: an instance."""
        cls(config)

    @abstractmethod
    async def open(self, row: int, seed: int) -> list[Message] | Opening:
        """Start the episode; the messages are the prompt. `row` may exceed the number of rows: take it modulo."""

    @abstractmethod
    async def step(self, action: Action) -> Step:
        """Play one turn. A cut action (`stop` is `length`) is played like any other."""

    async def close(self) -> None:  # noqa: B027  nothing to free is the common case
        """Free what the episode holds."""

    def gold(self) -> str | Message | None:
        """What an expert says next, or a message with the tools that it calls; None where there is no expert.

        Self-tests play it and expect full marks.
        """
        return None


def call(name: str, /, **arguments: Any) -> Message:
    """What an expert says that calls a tool: for `gold`."""
    return Message(role="assistant", tool_calls=[ToolCall(id="t00000n00", name=name, arguments=arguments)])


def user(text: str) -> Message:
    return Message(role="user", content=text)


class Played(msgspec.Struct, kw_only=True):
    """A whole episode, as `play_gold` saw it."""

    messages: list[Message]
    reward: float
    """Of the first seat, where there are several."""
    turns: int
    metrics: dict[str, float]
    rewards: dict[str, float] = {}
    """By seat."""


async def play_gold(environment: Environment, row: int, seed: int, max_turns: int = 1000) -> Played:
    """Play one episode with the environment's own expert. Raises ValueError if it has none or never ends.

    Tools that the environment has itself are there (tools.py); those of a job are not.
    """
    from opentinker.envs.tools import with_tools

    environment = with_tools(environment)
    opened = await environment.open(row, seed)
    opening = opened if isinstance(opened, Opening) else Opening(messages=opened, seat=environment.seats[0])
    messages, seat = list(opening.messages), opening.seat
    rewards = dict.fromkeys(environment.seats, 0.0)
    try:
        for turn in range(max_turns):
            gold = environment.gold()
            if gold is None:
                raise ValueError(f"{type(environment).__name__} has no expert: gold() gave None in turn {turn}")
            said = gold if isinstance(gold, Message) else Message(role="assistant", content=gold)
            action = Action(text=said.text, stop=StopReason.EOS, turn=turn, seat=seat, tool_calls=said.tool_calls)
            step = await environment.step(action)
            messages += [said, *step.messages]
            rewards[seat] += step.reward
            for other, parts in step.rewards.items():
                rewards[other] += sum(parts.values())
            if step.done:
                first = rewards[environment.seats[0]]
                return Played(messages=messages, reward=first, turns=turn + 1, metrics=step.metrics, rewards=rewards)
            seat = step.seat
    finally:
        await environment.close()
    raise ValueError(f"{type(environment).__name__} was not done after {max_turns} turns of its expert")
