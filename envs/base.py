"""`Environment`, the one class that users write. An env worker creates an instance per episode and calls `open`, then
`step` until the episode is done, then `close`.

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

An env worker guarantees four things. One instance plays one episode. Calls never overlap. `row` and `seed` alone decide
the start state; all episodes of a group open with the same pair. `close` is called exactly once, even after a failure.

An environment guarantees three things in return. It draws from its own random generator, never from the global one. Its
rewards are finite. It does not block the event loop: set `blocking = True` if a call computes or waits for more than a
millisecond. The environment then runs in a child process, which is killed at the episode's deadline. An environment
that blocks the loop without saying so stalls every session of its env worker. After twice `worker_ttl_s` the worker
names the environment in its log and exits, and its sessions are played elsewhere.

An environment with several seats lists them in `seats` and acts as the referee: `open` and every `step` name the seat
that acts next (`Opening.seat`, `Step.seat`), and their messages go to that seat alone. Each seat has a separate token
stream and sees only the messages addressed to it. `Step.reward` belongs to the seat that has just acted; `Step.rewards`
holds the rewards of the other seats.
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
"""Environment variable that a child process sets during the calls of an episode. A process that inherits it ends with
the episode. To share a process between episodes, start it without the variable: it then ends with the child process."""
ELSEWHERE = "elsewhere"
"""Key of pydantic's validation context, true where another process plays the episodes. Validators then skip checks of
what is installed on this machine."""


class Action(msgspec.Struct, frozen=True, kw_only=True):
    """One turn of the policy."""

    text: str
    """The sampled tokens as text, without the end-of-turn token."""
    stop: StopReason
    """Why sampling ended; `length` and `context` mean that the text was cut."""
    turn: int
    """Number of the turn, counted from 0 over all seats."""
    seat: str = ""
    """The seat that acts; empty in an environment with one seat."""
    tool_calls: list[ToolCall] = []
    """The tool calls in the text, in an environment that offers tools."""
    problem: str = ""
    """Why text that looks like a tool call is not a valid one; show it to the policy."""
    words: str = ""
    """The text before the tool calls."""
    ids: list[int] = []
    """The sampled tokens, if the environment `wants_tokens`."""
    logprobs: list[float] = []
    """Log probability of each of `ids`, under the distribution that they were drawn from."""
    prompt_tokens: int = 0
    """Length of the policy's context, in tokens, when it sampled `ids`."""


class Opening(msgspec.Struct, kw_only=True):
    """Return value of `open` where a list of messages is not enough."""

    messages: list[Message]
    seat: str = ""
    """The seat that acts first."""
    stream: str = ""
    """As in Step."""
    tools: list[Tool] = []
    """Tools that the first seat may call; those of other seats come with their first Step."""
    prompt_ids: list[int] | None = None
    """The prompt as token ids, in place of messages."""
    prompt_text: str | None = None
    """The prompt as plain text, in place of messages; no chat template is applied."""
    max_tokens: int | None = None
    """As in Step."""
    stop: list[str] = []
    """As in Step."""


class Step(msgspec.Struct, kw_only=True):
    """The environment's answer to one action."""

    messages: list[Message] = []
    """Messages that the policy sees next. Ignored when the episode is done, unless it is truncated: then those that the
    policy would have seen."""
    reward: float = 0.0
    """Reward of this turn. The episode's reward is the sum over its turns."""
    done: bool = False
    truncated: bool = False
    """With `done`: a limit on steps or time ended the episode, not the task itself. advantage = "gae" then adds the
    value of the last state; after a plain `done` there is no future reward to estimate."""
    components: dict[str, float] = {}
    """Named parts of `reward`, plotted as separate curves."""
    seat: str = ""
    """The seat that acts next, in an environment with several seats."""
    stream: str = ""
    """The context of the seat that the next turn belongs to. A new name begins a new context, whose whole prompt is
    `messages`."""
    tools: list[Tool] = []
    """With the first messages of a stream: the tools that may be called in it."""
    rewards: dict[str, dict[str, float]] = {}
    """Rewards of other seats for this turn, by seat: named parts, which are summed."""
    prompt_ids: list[int] | None = None
    """In place of messages: the whole prompt of the next turn as token ids, beginning with the stream's tokens so
    far."""
    prompt_text: str | None = None
    """In place of messages: plain text that continues the stream; no chat template is applied."""
    max_tokens: int | None = None
    """Token limit of the next turn, if lower than the job's."""
    stop: list[str] = []
    """Strings that end the next turn, in addition to the job's."""
    metrics: dict[str, float] = {}
    """Metrics of the episode so far, e.g. `exact`; those of the last step are recorded. A metric named `task/NAME` with
    value 1 names the task of this episode: validation reports by task."""


def is_truncation(info: Mapping[str, Any]) -> bool:
    """Return whether the last step's info says, by Gymnasium's keys, that a limit ended the episode."""
    return any(bool(info.get(name, False)) for name in ("truncated", "TimeLimit.truncated"))


class EnvironmentConfig(BaseModel):
    """Base class of an environment's settings. Refuses unknown names, NaN and infinity."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)


class BadReply(Exception):
    """An environment, or a server that it plays on, returned something other than an observation and finite numbers."""


class Unreachable(Exception):
    """A server that the environment plays on is unavailable: the session is lost, and its episode may be played
    again."""


class Environment(ABC):
    Config: ClassVar[type[BaseModel]] = EnvironmentConfig
    """The settings that a job may give under `environment.config`."""
    blocking: ClassVar[bool] = False
    """Run in a child process, because `open` or `step` computes or waits without yielding to the event loop."""
    cost: ClassVar[float] = 1.0
    """Share of the env worker's `env_sessions` that one session takes, whether it runs in the loop or in a child."""
    recycle_after: ClassVar[int | None] = None
    """With `blocking`: replace a child process after it has opened this many episodes, once they have finished; for
    libraries that leak."""
    memory_mb: ClassVar[int | None] = None
    """With `blocking`: likewise replace a child process that holds more memory than this."""
    seats: tuple[str, ...] = ("",)
    """Names of the players; set it in __init__ if it depends on the config."""
    wants_tokens: bool = False
    """Actions carry the sampled token ids and their logprobs."""
    policy: Policy = Policy()
    """The model that acts, set before `open` is called."""

    def __init__(self, config: BaseModel) -> None:
        self.config = config

    @classmethod
    def rehearse(cls, config: BaseModel) -> None:
        """Build what an episode would play and discard it; raise if something is missing, such as a library.

        An env worker calls this when a job is submitted, in a separate process if the class blocks. By default it
        creates an instance.
        """
        cls(config)

    @abstractmethod
    async def open(self, row: int, seed: int) -> list[Message] | Opening:
        """Start the episode and return its prompt. `row` may exceed the number of rows: take it modulo."""

    @abstractmethod
    async def step(self, action: Action) -> Step:
        """Play one turn. Treat a truncated action (`stop` is `length`) like any other."""

    async def close(self) -> None:  # noqa: B027  nothing to free is the common case
        """Release the episode's resources."""

    def gold(self) -> str | Message | None:
        """Return an expert's next turn as text, or as a message with tool calls; None if there is no expert.

        Self-tests play it and expect the full reward.
        """
        return None


def call(name: str, /, **arguments: Any) -> Message:
    """Return an expert's turn that calls one tool, for `gold`."""
    return Message(role="assistant", tool_calls=[ToolCall(id="t00000n00", name=name, arguments=arguments)])


def user(text: str) -> Message:
    return Message(role="user", content=text)


class Played(msgspec.Struct, kw_only=True):
    """A finished episode of `play_gold`."""

    messages: list[Message]
    reward: float
    """Reward of the first seat."""
    turns: int
    metrics: dict[str, float]
    rewards: dict[str, float] = {}
    """Reward of every seat."""


async def play_gold(environment: Environment, row: int, seed: int, max_turns: int = 1000) -> Played:
    """Play one episode with the environment's expert. Raise ValueError if it has none or the episode never ends.

    The expert can call the environment's own tools (tools.py), not those of a job.
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
                raise ValueError(f"{type(environment).__name__} has no expert: gold() returned None in turn {turn}")
            reply = gold if isinstance(gold, Message) else Message(role="assistant", content=gold)
            action = Action(text=reply.text, stop=StopReason.EOS, turn=turn, seat=seat, tool_calls=reply.tool_calls)
            step = await environment.step(action)
            messages += [reply, *step.messages]
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
