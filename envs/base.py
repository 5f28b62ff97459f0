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
holds the rewards of the other seats. A job may give a seat to one of the environment's `bots`: scripted players that
act without a model.

Seats may act at the same time: `Opening.acting` and `Step.acting` then name them and what each sees, in place of `seat`
and `messages`, and `step_all` gets all their actions together, in the order of `seats`. Such a round takes as long as
its slowest seat. Rounds and single turns may follow each other in an episode.

An environment that can fork sets `can_fork = True`: jobs with tree sampling (algorithm `at_grpo`) play every candidate
of a turn on a copy of the episode. `copy.deepcopy` of the instance must give a second episode in the same state, which
shares nothing with the first that either of them changes. That holds for plain Python objects, random generators
included; an environment with more (a simulator, a process, a connection) defines `__deepcopy__`, or cannot fork. Every
copy is closed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import msgspec
from pydantic import BaseModel, ConfigDict

from opentinker.shared.types.core import Message, StopReason, Tool, ToolCall
from opentinker.shared.types.env_protocol import Policy
from opentinker.shared.types.guide import Guide

EPISODE_VARIABLE = "ENV_EPISODE"
"""Environment variable that a child process sets during the calls of an episode. A process that inherits it ends with
the episode. To share a process between episodes, start it without the variable: it then ends with the child process."""
ELSEWHERE = "elsewhere"
"""Key of pydantic's validation context, true where another process plays the episodes. Validators then skip checks of
what is installed on this machine."""
MODULES = "modules"
"""Key of pydantic's validation context, true where the operator lets jobs run programs and read files of the env
workers' machine (setting env_modules)."""
FORKS = "forks"
"""Key of pydantic's validation context, true where episodes will be copied (tree sampling)."""


Bot = Callable[[Any], str | Message]
"""A scripted player: returns the next turn of the seat that acts, from the environment's state. It draws from the
environment's random generator."""


class Action(msgspec.Struct, frozen=True, kw_only=True):
    """One turn of the policy."""

    text: str
    """The sampled tokens as text, without the end-of-turn token."""
    stop: StopReason
    """Why sampling ended; `length` and `context` mean that the text was cut."""
    turn: int
    """Number of the turn, counted from 0 over all seats; the actions of a round have the same."""
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


class Prompt(msgspec.Struct, kw_only=True):
    """The messages and tools that a seat sees before it acts."""

    messages: list[Message] = []
    """Messages that the policy sees next."""
    stream: str = ""
    """The context of the seat that the next turn belongs to. A new name begins a new context, whose whole prompt is
    `messages`."""
    tools: list[Tool] = []
    """With the first messages of a stream: the tools that may be called in it."""
    prompt_ids: list[int] | None = None
    """In place of messages: the whole prompt of the next turn as token ids, beginning with the stream's tokens so
    far."""
    prompt_text: str | None = None
    """In place of messages: plain text that continues the stream; no chat template is applied."""
    guide: Guide | None = None
    """Constraint on the next turn: a tool call, whose beginning is given to the policy, or text in a JSON schema, which
    is not trained."""
    max_tokens: int | None = None
    """Token limit of the next turn, if lower than the job's."""
    stop: list[str] = []
    """Strings that end the next turn, in addition to the job's."""


Acting = Mapping[str, Prompt | list[Message]]
"""Seats that act at the same time, and what each sees: at least one, ROUND_SEATS at most."""


class Opening(Prompt, kw_only=True):
    """Return value of `open` where a list of messages is not enough."""

    seat: str = ""
    """The seat that acts first."""
    acting: Acting | None = None
    """See Step."""


class Step(Prompt, kw_only=True):
    """The environment's answer to one action, or to those of a round. `messages` are ignored when the episode is done,
    unless it is truncated: then they are those that the policy would have seen."""

    reward: float = 0.0
    """Reward of this turn. The episode's reward is the sum over its turns. After a round: 0, see `rewards`."""
    done: bool = False
    truncated: bool = False
    """With `done`: a limit on steps or time ended the episode, not the task itself. advantage = "gae" then adds the
    value of the last state; after a plain `done` there is no future reward to estimate."""
    components: dict[str, float] = {}
    """Named parts of `reward`, plotted as separate curves."""
    seat: str = ""
    """The seat that acts next, in an environment with several seats."""
    acting: Acting | None = None
    """In place of `seat` and of what it sees: the seats of a round. All of them are asked side by side, and `step_all`
    gets their actions."""
    rewards: dict[str, dict[str, float]] = {}
    """Rewards of other seats for this turn, after a round those of all seats: by seat, named parts, which are
    summed."""
    metrics: dict[str, float] = {}
    """Metrics of the episode so far, e.g. `exact`; those of the last step are recorded. A metric named `task/NAME` with
    value 1 names the category of this episode: evaluations report by it. Of the phases that take long, `time/start_s`
    (until the first observation) and `time/verify_s` (grading) appear in the job's time by phase."""


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


class DataRows(ABC):
    """The rows of a data set that the episodes of an environment begin with. Blocking; used by several threads."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def number(self, row: int) -> int:
        """Return the number of the row that `Environment.open(row)` plays, from 0 to the number of rows."""

    @abstractmethod
    def prompt(self, number: int) -> list[Message]:
        """Return the first messages of the episodes of a row."""

    def place(self, number: int) -> str:
        """Return where the row stands, e.g. its file and line; empty: nowhere else."""
        return ""


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
    can_fork: ClassVar[bool] = False
    """Whether `copy.deepcopy` of an open episode is another one in the same state."""
    slow_fork: ClassVar[bool] = False
    """With `can_fork`: copy in a thread, because a copy takes longer than a few milliseconds (files, a snapshot). Other
    sessions continue during the copy."""
    bots: ClassVar[Mapping[str, Bot] | None] = {}
    """Scripted players by name, which a job may give seats to (envs/bots.py). None: those of the server that plays the
    environment."""
    seats: tuple[str, ...] = ("",)
    """Names of the players; set it in __init__ if it depends on the config."""
    wants_tokens: bool = False
    """Actions carry the sampled token ids and their logprobs."""
    policy: Policy = Policy()
    """The model that acts, set before `open` is called."""
    bot_seat: str = ""
    """The seat whose turn a bot is asked for, set before it is called."""
    bot_seats: Mapping[str, str] = {}
    """Seats, or patterns of them, and the names of the bots that play them; set before `open` is called, which takes
    their turns for the environment."""

    def __init__(self, config: BaseModel) -> None:
        self.config = config

    @classmethod
    def rehearse(cls, config: BaseModel) -> None:
        """Build what an episode would play and discard it; raise if something is missing, such as a library.

        An env worker calls this when a job is submitted, in a separate process if the class blocks. By default it
        creates an instance.
        """
        cls(config)

    @classmethod
    def data_rows(cls, config: BaseModel) -> DataRows | None:
        """Return the rows that episodes with this config begin with; None if there are none, as in a game.

        `opentinker rows` and the dashboard list them, with how often each was solved. Called in a thread.
        """
        return None

    @abstractmethod
    async def open(self, row: int, seed: int) -> list[Message] | Opening:
        """Start the episode and return its prompt. `row` may exceed the number of rows: take it modulo."""

    async def step(self, action: Action) -> Step:
        """Play the turn of one seat. Treat a truncated action (`stop` is `length`) like any other."""
        raise NotImplementedError(f"{type(self).__name__} does not define step, the answer to the turn of one seat")

    async def step_all(self, actions: list[Action]) -> Step:
        """Play a round: an action of every seat that `acting` named, in the order of `seats`. Rewards go to
        `Step.rewards`."""
        raise NotImplementedError(f"{type(self).__name__} names seats in `acting` and does not define step_all")

    async def close(self) -> None:  # noqa: B027  nothing to free is the common case
        """Release the episode's resources."""

    def gold(self) -> str | Message | None:
        """Return an expert's next turn as text, or as a message with tool calls; None if there is no expert.

        Self-tests play it and expect the full reward.
        """
        return None

    def gold_of(self, seat: str) -> str | Message | None:
        """Return the expert's next turn of one seat of a round."""
        return self.gold()


def call(name: str, /, **arguments: Any) -> Message:
    """Return an expert's turn that calls one tool, for `gold`."""
    return Message(role="assistant", tool_calls=[ToolCall(id="t00000n00", name=name, arguments=arguments)])


def fields_of(kind: type[msgspec.Struct], one: object) -> dict[str, Any]:
    """Return what `one` holds in the fields of `kind`, to make another struct of it."""
    return {name: getattr(one, name) for name in kind.__struct_fields__}


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


async def play_gold(
    environment: Environment, row: int, seed: int, max_turns: int = 1000, bots: Mapping[str, str] | None = None
) -> Played:
    """Play one episode with the environment's expert. Raise ValueError if it has none or the episode never ends.

    The expert can call the environment's own tools (tools.py), not those of a job. `bots`: as in OpenSession; raise
    SpecError if the environment cannot play them.
    """
    from opentinker.envs.bots import with_bots
    from opentinker.envs.rounds import as_opening, play_actions, prompts_of
    from opentinker.envs.with_tools import with_tools

    environment.bot_seats = bots or {}
    environment = with_bots(with_tools(environment), environment)
    asked: Opening | Step = as_opening(environment, await environment.open(row, seed))
    messages: list[Message] = []
    rewards = dict.fromkeys(environment.seats, 0.0)
    try:
        for turn in range(max_turns):
            prompts = prompts_of(environment, asked, "step" if turn else "open")
            messages += [message for prompt in prompts.values() for message in prompt.messages]
            actions = []
            for seat in prompts:
                gold = environment.gold() if asked.acting is None else environment.gold_of(seat)
                if gold is None:
                    raise ValueError(f"{type(environment).__name__} has no expert: gold() returned None in turn {turn}")
                said = gold if isinstance(gold, Message) else Message(role="assistant", content=gold)
                messages.append(said)
                actions.append(
                    Action(text=said.text, stop=StopReason.EOS, turn=turn, seat=seat, tool_calls=said.tool_calls)
                )
            step = await play_actions(environment, asked, actions)
            rewards[actions[0].seat] += step.reward
            for other, parts in step.rewards.items():
                rewards[other] = rewards.get(other, 0.0) + sum(parts.values())
            if step.done:
                messages += step.messages
                first = rewards[environment.seats[0]]
                return Played(messages=messages, reward=first, turns=turn + 1, metrics=step.metrics, rewards=rewards)
            asked = step
    finally:
        await environment.close()
    raise ValueError(f"{type(environment).__name__} was not done after {max_turns} turns of its expert")
