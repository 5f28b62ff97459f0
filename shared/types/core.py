"""The nouns, in the order in which data flows: Ticket -> Observation/Action -> (`trajectories.py`: Turn ->
Trajectory -> Group) -> versions.

Messages are these structs, or those of `env_protocol.py` between rollout and env workers, in msgpack (`codec.py`);
arrays are raw little-endian bytes. Shape suffixes used everywhere: T tokens of one trajectory, G trajectories of a
group, B groups of a batch, S trajectories of a batch, K turns, N packed tokens of a micro-batch, M its mask-1 tokens, U
the distinct ones of them, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from opentinker.shared.types.trainer_group import RankShare

I32 = npt.NDArray[np.int32]
F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]


class WeightVersion(msgspec.Struct, frozen=True, array_like=True, order=True):
    """A version of the weights, compared as a pair: `epoch` counts the trainers a job has had, `step` its optimizer
    steps."""

    epoch: int
    step: int

    def __str__(self) -> str:
        return f"{self.epoch}.{self.step}"

    @classmethod
    def parse(cls, text: str) -> WeightVersion:
        epoch, step = text.split(".")
        return cls(int(epoch), int(step))


class JobState(StrEnum):
    """queued -> starting -> running -> succeeded | failed | cancelled. Back to queued for a job of higher priority or
    what it lost; paused, from any of the first three, until somebody resumes it."""

    QUEUED = "queued"
    STARTING = "starting"
    RUNNING = "running"
    PAUSED = "paused"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def final(self) -> bool:
        return self in (JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED)

    @property
    def held(self) -> bool:
        """Return whether the job has workers, or is to have them back."""
        return self in HELD


HELD = (JobState.STARTING, JobState.RUNNING)

ENDLESS = ("inference", "tinker")
"""Kinds of jobs that serve requests until they are completed or cancelled."""
POLICY_MARK = "~"


def part_id(job: str, policy: str) -> str:
    """Return the name of one policy of a job, JOB~POLICY: where its checkpoints, artifacts and admission state lie. A
    job with one policy, which has no name, is its own only part."""
    return f"{job}{POLICY_MARK}{policy}" if policy else job


def split_part(part: str) -> tuple[str, str]:
    """Return the job and policy of a `part_id`."""
    job, _, policy = part.partition(POLICY_MARK)
    return job, policy


def parts_of(job: str, policies: Sequence[str]) -> list[str]:
    """Return the parts of a job with these policies, or none."""
    return [part_id(job, policy) for policy in policies or ("",)]


POLICY_TABLES = ("model", "algorithm", "train")
"""Tables of a spec that each policy of a job has too."""
OWN_TABLES = ("start", "teacher", "value_model")
"""Tables that a policy may have."""


class Pool(StrEnum):
    """The kinds of worker process."""

    ROLLOUT = "rollout"
    TRAINER = "trainer"
    REFERENCE = "reference"
    ENV = "env"


class StopReason(StrEnum):
    """The reason why the engine stopped sampling one turn."""

    EOS = "eos"
    """The model sampled an end-of-turn token."""
    STOP = "stop"
    """A stop string of the spec appeared."""
    LENGTH = "length"
    """The turn's token budget was used up."""
    CONTEXT = "context"
    """The model's context window was used up."""


class Ending(StrEnum):
    """The reason why an episode ended. The first four are ordinary data; after the others the sample is tried again,
    and in the end its group is failed."""

    ENV_DONE = "env_done"
    MAX_TURNS = "max_turns"
    MAX_TOKENS = "max_tokens"
    CONTEXT = "context"
    ENV_ERROR = "env_error"
    """The environment raised."""
    ENV_TIMEOUT = "env_timeout"
    """The environment did not answer within the episode's deadline."""
    ENV_BAD_REPLY = "env_bad_reply"
    """The environment answered with something that is not an observation and a finite reward."""
    ENV_LOST = "env_lost"
    """The env worker that held the session is gone, or what the environment plays on cannot be reached."""
    TIMEOUT = "timeout"
    """The episode's deadline passed while the policy was generating."""
    PROMPT = "prompt"
    """The first observation is empty or does not fit into the context."""
    ENGINE_ERROR = "engine_error"
    """The generation engine failed the request."""
    UNTRAINABLE = "untrainable"
    """No turn of a seat can be trained."""
    URL_FAILED = "url_failed"
    """The model behind a URL that plays a seat gave no answer that could be used, or may not be reached."""
    CANCELLED = "cancelled"

    @property
    def failed(self) -> bool:
        return self not in (Ending.ENV_DONE, Ending.MAX_TURNS, Ending.MAX_TOKENS, Ending.CONTEXT)

    @property
    def repeats(self) -> bool:
        """Return whether the failure recurs with the same start state, seeds and weights; other failures depend on time
        and machine."""
        return not self.failed or self in (
            Ending.ENV_ERROR,
            Ending.ENV_BAD_REPLY,
            Ending.PROMPT,
            Ending.UNTRAINABLE,
        )


class Discard(StrEnum):
    """The reason why an accepted group was not trained."""

    STALE = "stale"
    """Its oldest token is older than `max_staleness` versions."""
    ZERO_VARIANCE = "zero_variance"
    """All its rewards are equal, and the job asked for such groups to be replaced."""
    FROM_FUTURE = "from_future"
    """It holds tokens of weights that were rolled back."""
    INVALID = "invalid"
    """It could not be decoded or its arrays do not agree."""
    ABSENT = "absent"
    """The policy had no turn in it."""
    OPPONENT_MOVED = "opponent_moved"
    """Another policy of the match has moved more than `max_opponent_lag` versions since."""
    SURPLUS = "surplus"
    """It was played for other policies: after this one's last step, or faster than this one takes matches."""
    RESTING = "resting"
    """It was played while another policy had its turn."""
    REWOUND = "rewound"
    """It was trained in steps that the job has gone back from (`train.rewind_on`)."""


class Ticket(msgspec.Struct, frozen=True, kw_only=True):
    """Permission to roll out one group. Made by the scheduler's admission loop, eaten by a rollout worker."""

    job: str
    seq: int
    """Number in submission order; with `job` it names the group."""
    row: int
    """Task index for environments with data; the environment takes it modulo its number of rows."""
    seed: int
    """Seed of the group's start state: all its episodes open with it."""
    group_size: int
    opponents: dict[str, str] = {}
    """By pool, the version that plays: everywhere the same, however often the group is played."""
    trace: str = ""
    """`traceparent` of the request that the job came with, see tracing.py."""


class Text(msgspec.Struct, frozen=True, tag_field="type", tag="text"):
    text: str


class Image(msgspec.Struct, frozen=True, tag_field="type", tag="image"):
    data: bytes
    """PNG or JPEG; of a transcript: none."""
    media_type: str = "image/png"
    digest: str = ""
    """In a transcript, the image's key among those of its group or evaluation, as of `Picture`."""


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """A tool call of an assistant."""

    id: str
    name: str
    arguments: dict[str, Any]


class Tool(msgspec.Struct, frozen=True, kw_only=True):
    """A function that a policy may call, as chat templates describe it."""

    name: str
    description: str
    parameters: dict[str, Any]
    """JSON schema of the arguments: an object."""


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """One chat message: text, or parts; an assistant's tool calls; or the result of one tool call."""

    role: str
    """system | user | assistant | tool"""
    content: str | list[Text | Image] = ""
    tool_calls: list[ToolCall] = []
    """Role assistant: its tool calls."""
    tool_call_id: str = ""
    """Role tool: id of the call that it answers."""
    name: str = ""
    """Role tool: its name."""
    call_s: float | None = None
    """Role tool: seconds that the call took, for people. No prompt contains it."""

    @property
    def text(self) -> str:
        """The text alone, parts joined."""
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content if isinstance(part, Text))

    @property
    def images(self) -> list[Image]:
        return [] if isinstance(self.content, str) else [part for part in self.content if isinstance(part, Image)]


class Lease(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's right to act for a job. Written by the scheduler, obeyed by the worker; Redis refuses an old epoch."""

    job: str
    worker: str
    incarnation: str
    epoch: int
    pool: Pool
    """The worker's pool; known even when it is dead and reports nothing."""
    leaves_by: float = 0.0
    """Unix time until which it may end what it has begun, and begins nothing more; 0: it stays."""
    group: tuple[RankShare, ...] = ()
    """Trainers that share the job's ranks; empty: this one has all that its spec asks for."""

    @property
    def leads(self) -> bool:
        """Whether this worker does the job's work, alone or for its group: the others neither load nor report."""
        return not self.group or self.group[0].worker == self.worker


LABELS = ("name", "project", "tags", "notes")
"""Settings of a spec that can be changed: the job's record has them, and its stored spec does not."""
MAX_TAGS = 20


class JobRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A job as Redis holds it."""

    id: str
    name: str
    kind: str
    tenant: str
    state: JobState
    version: int
    epoch: int
    created: float
    updated: float
    step: int
    steps: int
    """Eval jobs: number of episodes."""
    reason: str
    spec: dict[str, Any]
    restarts: int = 0
    finished: float = 0.0
    restart_step: int = -1
    """Step at which a trainer was last lost."""
    resumed_step: int = -1
    """Step at which its trainer began; -1 after a loss, until the next one has loaded the model."""
    since: float = 0.0
    """Unix time at which it came to the queue or, of a job that has begun, at which it started."""
    retry_at: float = 0.0
    """Unix time before which it is not tried again."""
    lost_at: float = 0.0
    """Unix time at which it last lost a worker."""
    rollout_losses: int = 0
    """Rollout workers lost since one was last seen ready while the job was running."""
    progress: str = ""
    """The trainer's last report, as JSON."""
    curve: str = ""
    """Its main metric over the steps, as a JSON list of some dozens of values."""
    key: str = ""
    """Id of the API key, or name of the user, that submitted it; empty where the server asks for neither."""
    trace: str = ""
    """`traceparent` of the request that submitted it, see tracing.py."""
    result: str = ""
    """Result of a succeeded eval job, as JSON: version, step and metrics."""
    deleted: float = 0.0
    """Unix time at which all that it left was deleted."""
    asleep: bool = False
    """A queued inference job without requests: it gets workers with the next request."""
    quiet_since: float = 0.0
    """Unix time of the last request, or of the start, of a job that is asleep."""
    waiting_for: str = ""
    """Resources that the job waits for; empty if none."""
    project: str = ""
    tags: list[str] = []
    notes: str = ""

    @property
    def policies(self) -> list[str]:
        """Names of the policies that it trains; empty if it has one, without a name."""
        return list(self.spec.get("policies") or ())

    @property
    def parts(self) -> list[str]:
        return parts_of(self.id, self.policies)

    @property
    def artifact_ids(self) -> list[str]:
        """Return the ids under which its artifacts lie: its own, and those of its policies."""
        return [self.id, *(part_id(self.id, policy) for policy in self.policies)]

    def part(self, policy: str) -> JobRecord:
        """Return the record of one of its policies, with its id and settings; itself for the empty name."""
        if not policy:
            return self
        own = self.spec["policies"][policy]
        spec = {**self.spec, **{table: own[table] for table in POLICY_TABLES}}
        spec |= {table: own.get(table) for table in OWN_TABLES}
        return msgspec.structs.replace(self, id=part_id(self.id, policy), spec=spec)
