"""The nouns, in the order in which data flows: Ticket -> Observation/Action -> Turn -> Trajectory -> Group -> versions.

What travels is one of these structs, or of `sessions.py` between rollout and env workers, in msgpack (`codec.py`);
arrays are raw little-endian bytes. Shape suffixes used everywhere: T tokens of one trajectory, G trajectories of a
group, B groups of a batch, S trajectories of a batch, K turns, N packed tokens of a micro-batch, M its mask-1 tokens,
U the distinct ones of them, V vocabulary.
"""

from __future__ import annotations

import math
from enum import StrEnum
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

I32 = npt.NDArray[np.int32]
F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]


class WeightVersion(msgspec.Struct, frozen=True, array_like=True, order=True):
    """Which weights: compared as a pair. `epoch` counts the trainers a job has had, `step` its optimizer steps."""

    epoch: int
    step: int

    def __str__(self) -> str:
        return f"{self.epoch}.{self.step}"

    @classmethod
    def parse(cls, text: str) -> WeightVersion:
        epoch, step = text.split(".")
        return cls(int(epoch), int(step))


class JobState(StrEnum):
    """queued -> starting -> running -> succeeded | failed | cancelled."""

    QUEUED = "queued"
    STARTING = "starting"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def final(self) -> bool:
        return self in (JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED)


class Pool(StrEnum):
    """The kinds of worker process."""

    ROLLOUT = "rollout"
    TRAINER = "trainer"
    REFERENCE = "reference"
    ENV = "env"


class StopReason(StrEnum):
    """Why the engine stopped sampling one turn."""

    EOS = "eos"
    """The model sampled an end-of-turn token."""
    STOP = "stop"
    """A stop string of the spec appeared."""
    LENGTH = "length"
    """The turn's token budget was used up."""
    CONTEXT = "context"
    """The model's context window was used up."""


class Ending(StrEnum):
    """Why an episode ended. The first four are ordinary data; after the others the sample is tried again, and in
    the end its group is failed."""

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
    """The env worker that held the session is gone."""
    TIMEOUT = "timeout"
    """The episode's deadline passed while the policy was generating."""
    PROMPT = "prompt"
    """The first observation is empty or does not fit into the context."""
    ENGINE_ERROR = "engine_error"
    """The generation engine failed the request."""
    CANCELLED = "cancelled"

    @property
    def failed(self) -> bool:
        return self not in (Ending.ENV_DONE, Ending.MAX_TURNS, Ending.MAX_TOKENS, Ending.CONTEXT)

    @property
    def repeats(self) -> bool:
        """Whether it comes again with the same start state, seeds and weights; other failures depend on time and on
        machines."""
        return not self.failed or self in (Ending.ENV_ERROR, Ending.ENV_BAD_REPLY, Ending.PROMPT)


class Discard(StrEnum):
    """Why an accepted group was not trained."""

    STALE = "stale"
    """Its oldest token is older than `max_staleness` versions."""
    ZERO_VARIANCE = "zero_variance"
    """All its rewards are equal, and the job asked for such groups to be replaced."""
    FROM_FUTURE = "from_future"
    """It holds tokens of weights that were rolled back."""
    INVALID = "invalid"
    """It could not be decoded or its arrays do not agree."""


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


class Text(msgspec.Struct, frozen=True, tag_field="type", tag="text"):
    text: str


class Image(msgspec.Struct, frozen=True, tag_field="type", tag="image"):
    data: bytes
    """PNG or JPEG."""
    media_type: str = "image/png"


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """What an assistant asks a tool for."""

    id: str
    name: str
    arguments: dict[str, Any]


class Tool(msgspec.Struct, frozen=True, kw_only=True):
    """What a policy may call, as chat templates describe it."""

    name: str
    description: str
    parameters: dict[str, Any]
    """JSON schema of the arguments: an object."""


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """One chat message: text, or parts; what an assistant asked tools for; or what the tool of one such call said."""

    role: str
    """system | user | assistant | tool"""
    content: str | list[Text | Image] = ""
    tool_calls: list[ToolCall] = []
    """Of an assistant."""
    tool_call_id: str = ""
    """Of a tool: the call that it answers."""
    name: str = ""
    """Of a tool: its own."""

    @property
    def text(self) -> str:
        """The text alone, parts joined."""
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content if isinstance(part, Text))

    @property
    def images(self) -> list[Image]:
        return [] if isinstance(self.content, str) else [part for part in self.content if isinstance(part, Image)]


class Span(msgspec.Struct, frozen=True, array_like=True):
    """Tokens [start, end) of a trajectory were sampled by `version`."""

    start: int
    end: int
    version: WeightVersion


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """One model output and the environment's answer. `start`/`end` are token positions of the output."""

    start: int
    end: int
    stop: StopReason
    reward: float
    number: int = 0
    """0, 1, 2... over all seats and streams of the episode: the order of play."""
    components: dict[str, float] = {}
    generate_s: float = 0.0
    env_s: float = 0.0


class Trajectory(msgspec.Struct, frozen=True, kw_only=True):
    """What one policy saw and did in one episode, in one stream of tokens. Arrays are little-endian bytes of length T.

    An episode has a trajectory per seat, and per stream of a seat whose context was begun anew. The reward of a seat is
    the sum over its streams; samples of a group are compared seat by seat.

    Example: prompt "7=" answered "7<eos>": ids [7, 13, 7, 1], mask [0, 0, 1, 1], logprobs [0, 0, -2.1, -0.3].
    """

    index: int
    """Place of its sample in the group, 0..G-1."""
    attempt: str
    """Differs per try of the same sample."""
    seat: str = ""
    """Whose view it is, in an environment with several."""
    stream: str = ""
    """Which of the seat's contexts."""
    ids_T: bytes
    """int32 token ids: prompt, outputs and observations in order, exactly as the engine saw and sampled them."""
    mask_T: bytes
    """uint8: 1 where the policy sampled the token, 0 elsewhere."""
    logprobs_T: bytes
    """float32 behaviour logprobs of the distribution really sampled from; 0 where mask is 0."""
    spans: list[Span]
    """Weight version of every mask-1 token, in order."""
    turns: list[Turn]
    ending: Ending
    reward: float
    """Sum of the turn rewards."""
    metrics: dict[str, float] = {}
    """What the environment reported at the end, e.g. `exact`."""
    seconds: float = 0.0
    ref_logprobs_T: bytes | None = None
    """float32 logprobs of the frozen reference, added by reference-forward; 0 where mask is 0."""
    teacher_logprobs_T: bytes | None = None
    """float32 logprobs of the teacher, added by reference-forward; 0 where mask is 0."""
    values_T: bytes | None = None
    """float32 values of the frozen value model, added by reference-forward: the return it expects where the token is
    about to be chosen; 0 where mask is 0."""
    messages: list[Message] | None = None
    """The conversation as text, of jobs with reward models: on the way to reference-forward alone."""
    scores: dict[str, float] = {}
    """What reward models said, by name, added by reference-forward; weight times score is part of the last reward."""

    @property
    def ids(self) -> I32:
        return np.frombuffer(self.ids_T, dtype="<i4")

    @property
    def mask(self) -> U8:
        return np.frombuffer(self.mask_T, dtype="u1")

    @property
    def logprobs(self) -> F32:
        return np.frombuffer(self.logprobs_T, dtype="<f4")

    @property
    def ref_logprobs(self) -> F32 | None:
        return None if self.ref_logprobs_T is None else np.frombuffer(self.ref_logprobs_T, dtype="<f4")

    @property
    def teacher_logprobs(self) -> F32 | None:
        return None if self.teacher_logprobs_T is None else np.frombuffer(self.teacher_logprobs_T, dtype="<f4")

    @property
    def values(self) -> F32 | None:
        return None if self.values_T is None else np.frombuffer(self.values_T, dtype="<f4")

    @property
    def oldest(self) -> WeightVersion:
        return min(span.version for span in self.spans)

    def check(self) -> None:
        """Raise ValueError if the parts do not agree with each other."""
        T = len(self.ids_T) // 4
        if len(self.ids_T) != 4 * T or len(self.mask_T) != T or len(self.logprobs_T) != 4 * T:
            raise ValueError("ids, mask and logprobs differ in length")
        added = {
            "reference logprobs": self.ref_logprobs_T,
            "teacher logprobs": self.teacher_logprobs_T,
            "values": self.values_T,
        }
        for name, added_T in added.items():
            if added_T is not None and len(added_T) != 4 * T:
                raise ValueError(f"{name} differ in length from ids")
        mask = self.mask
        covered = np.zeros(T, dtype=np.uint8)
        at = 0
        for span in self.spans:
            if not at <= span.start < span.end <= T:
                raise ValueError(f"span [{span.start}, {span.end}) is empty, out of order or outside 0..{T}")
            covered[span.start : span.end] = 1
            at = span.end
        if not self.spans or not np.array_equal(covered, mask):
            raise ValueError("the spans must cover the sampled tokens, at least one, and nothing else")
        for numbers in (self.logprobs, self.ref_logprobs, self.teacher_logprobs, self.values):
            if numbers is not None and (not np.isfinite(numbers).all() or numbers[mask == 0].any()):
                raise ValueError("logprobs and values must be finite, and 0 where the policy did not sample")
        if (self.ids < 0).any():
            raise ValueError("token ids must not be negative")
        self._check_rewards(mask)

    def _check_rewards(self, mask: U8) -> None:
        at = 0
        for turn in self.turns:
            if not at <= turn.start <= turn.end <= len(mask) or not mask[turn.start : turn.end].all():
                raise ValueError(f"turn [{turn.start}, {turn.end}) is out of order or not the policy's own")
            at = turn.end
        if any(later.number < turn.number for turn, later in pairwise(self.turns)):
            raise ValueError("the turns of a trajectory must be numbered in order of play")
        rewards = [turn.reward for turn in self.turns]
        numbers = (self.reward, self.seconds, *rewards, *self.metrics.values(), *self.scores.values())
        if not all(map(math.isfinite, numbers)):
            raise ValueError("rewards and metrics must be finite")
        if rewards and not math.isclose(self.reward, math.fsum(rewards), rel_tol=1e-6, abs_tol=1e-6):
            raise ValueError("the reward must be the sum of the turn rewards")


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """What came of one ticket: from a rollout worker, to reference-forward and the trainer.

    The trajectories of its G samples, ordered by sample; one each, or one per seat and stream that had a turn.
    """

    job: str
    seq: int
    environment: str
    worker: str
    trajectories: list[Trajectory]

    @property
    def oldest(self) -> WeightVersion:
        return min(t.oldest for t in self.trajectories)

    @property
    def key(self) -> str:
        return f"{self.job}/{self.seq}"

    @property
    def samples(self) -> int:
        """G."""
        return len({t.index for t in self.trajectories})

    @property
    def seats(self) -> dict[str, list[list[int]]]:
        """By seat, for each sample in which it acted, the places of its streams in `trajectories`.

        What is under one seat is compared with each other, and with nothing else.
        """
        places: dict[str, dict[int, list[int]]] = {}
        for place, trajectory in enumerate(self.trajectories):
            places.setdefault(trajectory.seat, {}).setdefault(trajectory.index, []).append(place)
        return {seat: list(samples.values()) for seat, samples in places.items()}

    @property
    def rewards(self) -> dict[str, list[float]]:
        """By seat, of each sample in which it acted: the sum over its streams."""
        return {
            seat: [math.fsum(self.trajectories[place].reward for place in streams) for streams in samples]
            for seat, samples in self.seats.items()
        }

    @property
    def equal(self) -> bool:
        """No seat did better in one sample than in another: there is nothing to compare."""
        return all(len(set(rewards)) == 1 for rewards in self.rewards.values())

    def check(self) -> None:
        """Raise ValueError if a trajectory is inconsistent, or if the samples are not numbered 0..G-1."""
        indices = [t.index for t in self.trajectories]
        if not indices or indices != sorted(indices) or set(indices) != set(range(indices[-1] + 1)):
            raise ValueError("the samples of a group must be numbered 0, 1, 2...")
        if len({(t.index, t.seat, t.stream) for t in self.trajectories}) != len(indices):
            raise ValueError("a sample has one trajectory per seat and stream")
        for trajectory in self.trajectories:
            trajectory.check()
        for streams in (streams for samples in self.seats.values() for streams in samples if len(streams) > 1):
            numbers = [turn.number for place in streams for turn in self.trajectories[place].turns]
            if len(set(numbers)) < len(numbers):
                raise ValueError("the turns of a seat that has several streams must be numbered in order of play")


class WorkerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker says of itself with every heartbeat; gone from Redis when it stops beating."""

    id: str
    """Stable name of the slot, e.g. `rollout-0`; the same after a restart."""
    incarnation: str
    """New at every process start: a lease names it, so a restarted process does not inherit one."""
    pool: Pool
    host: str
    pid: int
    job: str | None = None
    epoch: int = 0
    status: str = "idle"
    """idle | loading | ready | draining"""
    address: str = ""
    """Of a rollout worker on SWAP, once it is ready; another one with every lease, for its engine is another."""
    detail: dict[str, Any] = {}
    """Of an env worker: its sessions and environments."""


class Lease(msgspec.Struct, frozen=True, kw_only=True):
    """Who may act for a job. Written by the scheduler, obeyed by the worker; an old epoch is refused by Redis."""

    job: str
    worker: str
    incarnation: str
    epoch: int
    pool: Pool
    """What the worker is; known even when it is dead and says nothing of itself."""


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
    reason: str
    spec: dict[str, Any]
    restarts: int = 0
    finished: float = 0.0
    restart_step: int = -1
    """Highest step reached when a trainer was lost: restarts without a step beyond it are counted."""
    rollout_losses: int = 0
    """Rollout workers lost since one was last seen ready while the job was running."""
    progress: str = ""
    """What the trainer last reported, as JSON."""
    waiting_for: str = ""
    """What the scheduler lacks to start or complete the job; empty when it lacks nothing."""


class MetricPoint(msgspec.Struct, frozen=True, kw_only=True):
    """One line of metrics. `seq` counts per source and incarnation, so that a subscriber sees its gaps."""

    job: str
    source: str
    incarnation: str
    seq: int
    time: float
    """Unix seconds."""
    step: int
    values: dict[str, float]


class TensorInfo(msgspec.Struct, frozen=True, array_like=True):
    """Name, dtype and shape of a tensor, in the order in which it travels."""

    name: str
    dtype: str
    shape: list[int]


SIMULATED = "none"
"""`SwapCommand.device` of a learner without tensors: there is no weight group, only versions."""


class SwapCommand(msgspec.Struct, frozen=True, kw_only=True):
    """Trainer -> one rollout worker: join the job's weight group, or receive one version through it, or say hello."""

    job: str
    epoch: int
    action: str
    """join | receive | ping"""
    generation: int
    """Number of the group; a receive for another generation is refused."""
    address: str = ""
    port: int = 0
    rank: int = 0
    world: int = 0
    device: str = "cpu"
    version: WeightVersion | None = None
    manifest: list[TensorInfo] = []
    fingerprints: list[int] = []
    """One per bucket, in order."""
    bucket_bytes: int = 0


class SwapReply(msgspec.Struct, frozen=True, kw_only=True):
    worker: str
    incarnation: str
    ok: bool
    error: str = ""
    version: WeightVersion | None = None
    seconds: dict[str, float] = {}
    """pause, transfer, load, resume."""
