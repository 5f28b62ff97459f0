"""The nouns of the env plane, between rollout workers (and the scheduler, which asks about configs) and env workers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from opentinker.shared.types.core import Ending, Message, StopReason, Tool, ToolCall
from opentinker.shared.types.guide import Guide

OPEN = -1
IMPORTED = -2
MAX_IMPORT_S = 3600.0
"""Upper bound of env_import_timeout_s, and of the import that any worker may report."""
Isolation = Literal["process", "sandbox"]
"""`process`: in the env worker, or in a child process where the environment says that it blocks: for what the operator
wrote. `sandbox`: in a child process that sees nothing of this machine (shared/sandbox/sandbox.py)."""
REMOTE = "(remote)"
"""Stands for every URL where env workers say what they play: all of them play all URLs."""
SERVED = "served:"
"""Before the name of an environment that its user serves; not part of any other."""
SERVED_WORKER = "served-"
"""Begins the address of a process that serves one."""
ROUND_SEATS = 128
"""Most seats that act at the same time."""
MAX_CANDIDATES = 128
"""Most candidates of a turn."""
MAX_ROWS = 2**40
"""Upper bound of a row's number."""
AWAY_S = 15.0
"""How long such a process may be away, with its connection broken, before its sessions count as lost."""


def is_url(environment: str) -> bool:
    return environment.startswith(("http://", "https://", "ws://", "wss://"))


class Policy(msgspec.Struct, frozen=True, kw_only=True):
    """The model that acts, as far as an environment may know it."""

    model: str = ""
    """As the job names it."""
    context_length: int = 0
    """Tokens that one stream may have."""


def owner_of(worker: str, incarnation: str) -> str:
    return f"{worker}/{incarnation}"


class OpenSession(msgspec.Struct, frozen=True, kw_only=True):
    """Rollout worker -> any env worker that serves the environment: start one episode."""

    job: str
    session: str
    """Episode id, chosen by the rollout worker; opening the same id twice answers with the same observation."""
    environment: str
    isolation: Isolation = "process"
    config: dict[str, Any]
    row: int
    seed: int
    deadline_s: float
    """Seconds the whole episode may take, from when its environment has been imported."""
    pauses_s: float = 0.0
    """Seconds more in which the engine may sleep. `EnvClient` adds them to the deadline that env workers get, which is
    then for sessions whose end they are not told: the rollout worker measures the episode's time."""
    answer_within_s: float = 0.0
    """If the environment takes longer to open, the worker answers `opening`, and is asked for the turn OPEN; for the
    turn IMPORTED before that, if it is being imported."""
    room_within_s: float = 0.0
    """How long a full env worker keeps the request in line for a place before it answers `busy`."""
    policy: Policy = Policy()
    tools: list[dict[str, Any]] = []
    """`environment.tools` of the spec: tools that the worker offers and executes around any environment."""
    tool_turns: int = 16
    """Turns of a seat that tools may answer."""
    own_jobs: list[str] = []
    """Jobs of the job's tenant: `config` may name their directories."""
    bots: dict[str, str] = {}
    """Seats, or patterns of them, that scripted players of the environment take, and the names of these; an empty name
    leaves a seat to a model. The seat's own name counts before patterns, these in their order."""
    owner: str = ""
    """Whoever plays it, as `owner_of` says: with that process the episode is gone. Empty: it lives to its deadline."""


class SeatAction(msgspec.Struct, frozen=True, kw_only=True):
    """The action of one seat."""

    seat: str = ""
    """Seat that acts: one that the last reply named."""
    text: str
    stop: StopReason
    tool_calls: list[ToolCall] = []
    """That the text holds, where the seat has tools."""
    problem: str = ""
    """Problem with a tool call that the text attempts; environments should show it to the policy."""
    words: str = ""
    """Text before the tool calls."""
    ids: list[int] = []
    """The sampled tokens, where the environment wants them."""
    logprobs: list[float] = []
    """Log-probabilities of `ids`."""
    prompt_tokens: int = 0
    """Tokens of the stream before `ids`; set where the environment wants tokens."""


class StepSession(SeatAction, frozen=True, kw_only=True):
    """Rollout worker -> the env worker that holds the session."""

    session: str
    turn: int
    """0, 1, 2... over all seats: a repeated turn is answered from memory, never played twice. OPEN: what the open came
    to, or `opening` with `importing_s` when an import begins. IMPORTED: answered when the environment has been
    imported, with `opening`, or what the open came to."""
    round: list[SeatAction] = []
    """Where the last reply asked a `round`: the actions of all its seats, in its order. The action of a single seat
    is then empty."""
    candidates: list[list[SeatAction]] = []
    """Tree sampling: in place of the action or round, MAX_CANDIDATES alternatives of it at most. Each is played on a
    copy of the environment."""
    chosen: int = 0
    """With `candidates`: the candidate of the turn before from which play continues."""

    @property
    def actions(self) -> list[SeatAction]:
        return self.round or [self]


class CloseSession(msgspec.Struct, frozen=True, kw_only=True):
    session: str


class SeatPrompt(msgspec.Struct, frozen=True, kw_only=True):
    """The prompt of one seat."""

    seat: str = ""
    """Seat that acts next."""
    stream: str = ""
    """In which of the seat's contexts; a new name begins a new one."""
    messages: list[Message] = []
    """Messages that this seat sees next in this stream."""
    prompt_ids: list[int] | None = None
    """In place of messages: the whole prompt of the next turn, which must begin with the stream's tokens so far."""
    prompt_text: str | None = None
    """Replaces `messages`: text that continues the stream, tokenized without a chat template."""
    tools: list[Tool] = []
    """In the first reply to a stream: what the seat may call in it."""
    guide: Guide | None = None
    """Constraint on the next turn: a call, whose beginning the policy gets, or text in a schema, which is not
    trained."""
    max_tokens: int | None = None
    """Limit of the next turn, where the environment allows less than the job."""
    stop: list[str] = []
    """Strings that end the next turn, in addition to the job's."""


class SessionReply(SeatPrompt, frozen=True, kw_only=True):
    """Env worker -> rollout worker, for open and step."""

    worker: str
    """Where the following steps go."""
    round: list[SeatPrompt] = []
    """Seats that act at the same time, ROUND_SEATS at most, in the order of the environment's seats. The prompt of a
    single seat is then empty. What they earn is in `rewards`."""
    wants_tokens: bool = False
    """In the reply to open: steps carry token ids and logprobs."""
    row: int | None = None
    """In the reply to open: number of the row that is played, of an environment that lists its rows."""
    reward: float = 0.0
    """Reward of the seat that has just acted."""
    components: dict[str, float] = {}
    rewards: dict[str, dict[str, float]] = {}
    """Rewards of other seats: named parts, whose sum is the seat's reward."""
    done: bool = False
    truncated: bool = False
    """With `done`: a limit ended the episode. What the policy would have seen next may be in `messages`."""
    metrics: dict[str, float] = {}
    failure: Ending | None = None
    error: str = ""
    busy: bool = False
    """The worker is full: try another."""
    opening: bool = False
    """The worker has the session, and its environment takes its time to open."""
    importing_s: float = 0.0
    """With `opening`, while the environment is being imported: seconds after which the worker gives that up."""
    outcomes: list[SessionReply] = []
    """Outcome of each of the `candidates`, in their order; `done` then says that all of them ended the episode, and the
    other fields of this reply are unused."""

    @property
    def prompts(self) -> list[SeatPrompt]:
        return self.round or [self]

    def with_prompts(self, prompts: Sequence[SeatPrompt], *, together: bool) -> SessionReply:
        """Return the reply with these prompts: a round if the seats act `together`, else the prompt of one seat."""
        if together:
            return msgspec.structs.replace(self, round=list(prompts))
        (only,) = prompts
        fields = {name: getattr(only, name) for name in SeatPrompt.__struct_fields__}
        return msgspec.structs.replace(self, **fields)

    def step(self, session: str, turn: int, actions: Sequence[SeatAction]) -> StepSession:
        """Return the request that answers this reply with an action of each seat that it asks, in its order."""
        if self.round:
            return StepSession(session=session, turn=turn, text="", stop=StopReason.EOS, round=list(actions))
        (only,) = actions
        fields = {name: getattr(only, name) for name in SeatAction.__struct_fields__}
        return StepSession(session=session, turn=turn, **fields)


class EnvCheck(msgspec.Struct, frozen=True, kw_only=True):
    """Scheduler -> any env worker: would episodes of this environment start with this config?"""

    name: str
    config: dict[str, Any] | None
    """None: check the environment itself without a config."""
    isolation: Isolation = "process"
    tools: list[dict[str, Any]] = []
    """As they stand in the spec."""
    own_jobs: list[str] = []
    """As in OpenSession."""
    bots: dict[str, str] = {}
    """As in OpenSession."""
    forks: bool = False
    """Whether turns have `candidates`, so that the environment must be able to fork."""
    describe: bool = False
    """Whether the reply has `about`."""


ABOUT_BYTES = 64 << 10


class EnvAbout(msgspec.Struct, frozen=True, kw_only=True):
    """The author's description of an environment: ABOUT_BYTES as JSON at most."""

    doc: str = ""
    """Docstring of its class."""
    settings: dict[str, Any] = {}
    """JSON schema of its config, with the docstrings of the settings."""
    bots: list[str] = []
    """Names of its scripted players."""
    seats: list[str] = []
    """Those of its class; its config may name others. Empty if they are too many."""
    can_fork: bool = False
    example: str = ""
    """The episode that a built-in environment comes with, as text."""

    def within(self, most: int) -> EnvAbout:
        """Return the part that fits `most` bytes: without the settings, or with a shorter text."""
        if len(msgspec.json.encode(self)) <= most:
            return self
        short = msgspec.structs.replace(self, settings={}, bots=[], example="")
        return short if len(msgspec.json.encode(short)) <= most else EnvAbout(doc=self.doc[: most // 8])


class EnvCheckReply(msgspec.Struct, frozen=True, kw_only=True):
    errors: list[dict[str, Any]] = []
    """One {field, value, problem} per mistake, fields as in the job spec (`environment.config.digits`)."""
    seats: list[str] = []
    """Seats of the environment with this config; empty if the worker does not know them without playing it, or if they
    are too many to compare with a spec."""
    about: EnvAbout | None = None


class EnvRows(EnvCheck, frozen=True, kw_only=True):
    """Scheduler -> any env worker: the rows that episodes of this environment begin with."""

    job: str
    text: str = ""
    """Search for the rows with this text in their prompt or place; letter case does not matter."""
    numbers: list[int] = []
    """Rows whose prompts are wanted. Others than the first may be missing in the reply: it is one message."""


class EnvRow(msgspec.Struct, frozen=True, kw_only=True):
    """A row of a data set, and how its episodes begin."""

    number: int
    place: str = ""
    """Where it stands, e.g. file and line."""
    messages: list[Message] = []
    """As the policy sees them, with a text in place of each image."""
    images: int = 0
    problem: str = ""
    """Why there are no messages."""


class EnvRowsReply(msgspec.Struct, frozen=True, kw_only=True):
    problem: str = ""
    """Why the rows cannot be listed."""
    count: int | None = None
    """Number of rows; None: the environment lists none."""
    found: list[int] = []
    """Answer to `text`, in order."""
    searched: int = 0
    """Number of rows, from the first, that were searched."""
    rows: list[EnvRow] = []
    """Answer to `numbers`; those that are not below `count` are missing."""
    tools: list[Tool] = []
    """Tools that the prompts offer."""


class ServedBack(msgspec.Struct, frozen=True):
    """A process that serves an environment has connected."""

    holder: str
    """The scheduler's own name, new at every connection."""
