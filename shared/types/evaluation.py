"""Types of an evaluation, between its requester (a trainer, or the scheduler for a job of kind `eval`) and the rollout
workers that play its episodes."""

from __future__ import annotations

import hashlib

import msgspec

from opentinker.shared.types.core import Ending, Message, StopReason, WeightVersion
from opentinker.shared.types.token_records import KeptTokens


class EvalEpisode(msgspec.Struct, frozen=True, kw_only=True):
    """Permission to play one episode with one version only. Sent by the requester of the evaluation, consumed by a
    rollout worker."""

    job: str
    version: WeightVersion
    index: int
    """Number of the episode in the evaluation: opponent by opponent, `samples` neighbours have the same start state."""
    seed: int
    """Seed of the start state, see `exam_seed`."""


class ExamView(msgspec.Struct, frozen=True, kw_only=True):
    """One seat's view of an episode in one of its contexts, token by token."""

    seat: str
    stream: str
    tokens: KeptTokens
    policy: str = ""
    """Player of the seat, see `Trajectory.policy`."""


class MessageOrigin(msgspec.Struct, frozen=True, kw_only=True):
    """The seat that wrote a message of an episode, or was shown it."""

    seat: str
    stream: str
    policy: str = ""
    """Player of the seat, see `Trajectory.policy`."""
    turn: int | None = None
    """Number of the turn in which it wrote the message, counted over all seats; None: it was shown it."""
    tokens: tuple[int, int] | None = None
    """[first, after last] token of the message in the seat's context, if the seat wrote it."""
    versions: list[WeightVersion] = []
    """Weights that sampled these tokens."""


class EvalResult(msgspec.Struct, frozen=True, kw_only=True):
    """Rollout worker -> who asked for it: how an episode went, or why it could not be played."""

    job: str
    version: WeightVersion
    """That the exam asked for."""
    index: int
    worker: str
    sampled_by: list[WeightVersion] = []
    """The versions that its tokens come from: no other than `version` counts. Empty: the policy had no turn."""
    opponent: WeightVersion | None = None
    """The oldest weights of an opponent that is a policy, and may have trained during the episode."""
    ending: Ending
    error: str = ""
    reward: float = 0.0
    """Mean over the seats of the evaluated policy that acted."""
    seats: dict[str, float] = {}
    """Reward by seat, of every seat that acted or was rewarded, bots included."""
    outcome: float | None = None
    """1 for a win, 0.5 for a draw, 0 for a loss: whether the policy's seats earned more on average than those of its
    opponent or, if none was named, of all its opponents (`spec.matches.opposition`). None without an opponent."""
    components: dict[str, float] = {}
    """Parts of the reward, summed over turns; mean over the policy's seats."""
    metrics: dict[str, float] = {}
    """Metrics reported by the environment."""
    row: int | None = None
    """Row of the data set that the environment played, if it lists them."""
    tokens: int = 0
    """Sampled."""
    stops: list[StopReason] = []
    """One per turn."""
    seconds: float = 0.0
    messages: list[Message] = []
    """The conversation in the order of play, for episodes that are kept."""
    origins: list[MessageOrigin] = []
    """Origin of each of these messages, where an episode has several seats or contexts."""
    images: dict[str, bytes] = {}
    """The first of its images, by digest."""
    views: list[ExamView] = []
    """The same token by token, of the first of those."""


class EvalAck(msgspec.Struct, frozen=True, kw_only=True):
    """Requester -> rollout worker: the result has arrived, whether or not it was still wanted."""

    wanted: bool


def exam_seed(seed: int, index: int) -> int:
    """Start-state seed: the first 53 bits of SHA-256 of "validation/<validation.seed>/<index>".

    Training's are hashes of "<rollout.seed>/<position>" (`ticket_seed`), so the two share none but by a hash collision.
    """
    return int.from_bytes(hashlib.sha256(f"validation/{seed}/{index}".encode()).digest()[:8], "big") >> 11
