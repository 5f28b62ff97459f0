"""The table [algorithm]: a preset, and the fields that override it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from opentinker.shared.spec import algorithm_parts
from opentinker.shared.spec.base import Coefficient, Count, Factor, Fraction, SpecPart, Tokens
from opentinker.shared.spec.matches.seat_lists import SeatLists, settle_lists
from opentinker.shared.types.mistakes import fill, mistake

MAX_EPISODES = 1_048_576
"""Episodes per batch."""
MAX_GROUPS = 1_048_576
"""Begun and not yet trained."""
PresetName = Literal[
    "grpo", "dr_grpo", "dr_mas", "at_grpo", "spiral", "dapo", "rloo", "reinforce_pp", "ppo", "gspo", "cispo", "distill"
]
AdvantageName = Literal[
    "grpo",
    "dr_grpo",
    "rloo",
    "maxrl",
    "reinforce_pp",
    "reinforce_pp_baseline",
    "rae",
    "per_turn",
    "agent_turn",
    "gae",
    "none",
]


class AlgorithmSpec(SpecPart):
    """A preset and what is changed of it. Once validated, every field that applies has its value; the others are none.

    The parts, their options and the presets are tables of `algorithm_parts.py` (`opentinker algorithms` prints them).
    """

    name: PresetName = "grpo"
    """The preset, which provides every field below that is not set. See `opentinker algorithms`."""
    group_size: Annotated[int, Field(gt=0, le=1024)] = 8
    """Episodes per group (same start state); times groups_per_batch at most 1,048,576. agent_turn: candidates per turn,
    at most 128; a group is then one episode."""
    groups_per_batch: Annotated[int, Field(gt=0, le=65_536)] = 16
    """Groups per optimizer batch; times max_staleness + 1 at most 1,048,576."""
    max_staleness: Annotated[int, Field(ge=0, le=10_000)] = 2
    """Largest number of versions between a trajectory's oldest token and the trainer when its batch is assembled."""
    updates_per_batch: Annotated[int, Field(gt=0, le=65_536)] = 1
    """Optimizer steps per batch, each on an equal share of its groups."""
    advantage: AdvantageName | None = None
    """How rewards become advantages. `agent_turn` samples trees: every turn has group_size candidates, each of which is
    played on a copy of the episode (the environment must be able to fork) and trained; play continues from the best."""
    loss: Literal["decoupled_ppo", "ppo", "importance_sampling", "cispo", "gspo", "dppo", "sapo"] | None = None
    """The policy loss. mu is the policy that sampled, pi the one that is trained."""
    correction: Literal["none", "tis", "icepop", "geometric"] | None = None
    """Correction for mu differing from pi_prox, beyond what the loss does."""
    aggregation: Literal["token_mean", "sequence_mean", "constant"] | None = None
    """How the losses of tokens become one number."""
    normalize_std: bool | None = None
    """grpo, per_turn, agent_turn: divide by the group's standard deviation."""
    baseline_over: Literal["episodes", "turns"] | None = None
    """grpo, dr_grpo: what the group's mean and standard deviation count. `episodes`: the total reward of each episode,
    once. `turns`: each turn of the seat, with the total reward of its episode, so that long episodes weigh more."""
    episode_peers: SeatLists | None = None
    """grpo, dr_grpo, rloo, maxrl, per_turn: lists of seats or patterns by name, e.g. `solvers = ["solver_*"]`, whose
    seats are compared with each other within each episode: solvers of one proposed problem. Other seats, such as its
    proposer, are compared with themselves in the group's other episodes."""
    baseline_decay: Fraction | None = None
    """rae: share of the running mean that stays after each reward; the mean begins with 0 and is in the checkpoints."""
    gamma: Fraction | None = None
    """gae, per_turn: discount per token (gae) or per turn (per_turn)."""
    lam: Fraction | None = None
    """gae: 1 trusts the returns, 0 the critic."""
    critic_lr: Coefficient | None = None
    """gae without a [value_model]: learning rate of the critic, which starts from model.base."""
    value_clip: Factor | None = None
    """gae without a [value_model]: change of a value since the batch's start beyond which its gradient stops."""
    clip_low: Fraction | None = None
    """See clip_high."""
    clip_high: Coefficient | None = None
    """The importance ratio pi/pi_prox is clipped to [1 - clip_low, 1 + clip_high]."""
    dual_clip: Annotated[float, Field(gt=1.0, le=1e6)] | None = None
    """ppo: largest ratio that multiplies a negative advantage; none: unlimited."""
    behaviour_cap: Factor | None = None
    """decoupled_ppo: upper bound of the weight pi_prox/mu; with proximal = `loglinear` that is 1 up to one version of
    lag."""
    proximal: Literal["behaviour", "loglinear", "recomputed"] | None = None
    """Position of pi_prox, the centre of the clip range. `behaviour`: equal to mu. `loglinear`: between mu and pi, one
    version behind pi by linear interpolation of log-probabilities, so that every version of lag has its own clip range;
    equal to mu up to one version of lag. `recomputed`: the weights before the batch; with one update per batch nothing
    is ever clipped."""
    tv_limit: Fraction | None = None
    """dppo: a token is dropped once pi - mu exceeds this in the direction of its advantage."""
    log_ratio_penalty: Coefficient | None = None
    """dppo: weight of (log pi/mu)^2."""
    tau_positive: Factor | None = None
    """sapo: steepness of the gate where the advantage is positive."""
    tau_negative: Factor | None = None
    """sapo: steepness of the gate where the advantage is negative."""
    tis_cap: Factor | None = None
    """tis: upper bound of the weight pi_prox/mu."""
    icepop_low: Coefficient | None = None
    """icepop: tokens whose pi_prox/mu is lower are dropped."""
    icepop_high: Factor | None = None
    """icepop: tokens whose pi_prox/mu is higher are dropped."""
    geometric_low: Coefficient | None = None
    """geometric: sequences whose geometric mean of pi/mu is lower are dropped."""
    geometric_high: Factor | None = None
    """geometric: sequences whose geometric mean of pi/mu is higher are dropped."""
    kl_coef: Coefficient = 0.0
    """Weight of KL(pi || reference), the model at the job's start; above 0 reference-forward is in the path. 0: off."""
    kl_in: Literal["loss", "reward"] | None = None
    """`loss`: a term of the loss. `reward`: subtracted from the reward token by token, with mu in place of pi."""
    kl_estimator: Literal["k1", "k2", "k3"] | None = None
    """With d = log pi - log reference: k1 = d, k2 = d^2/2, k3 = exp(-d) - 1 + d. Use k2 or k3 in the loss: the gradient
    of k1 has mean 0 over the policy's own samples and no effect."""
    distill_coef: Coefficient | None = None
    """Weight of log teacher - log mu of each sampled token, added to its advantage: the reverse KL to the [teacher] on
    the policy's own samples. 0: off."""
    entropy_coef: Coefficient = 0.0
    """Weight of the mean entropy as a bonus. 0: off."""
    drop_zero_variance: bool | None = None
    """Groups whose rewards are all equal are discarded when a batch is assembled, and replaced by new ones."""
    max_zero_variance_batches: Count | None = None
    """drop_zero_variance: the job fails once this many batches' worth of groups have been discarded since the last step
    or restart."""
    overlong_shaping: bool | None = None
    """Subtract up to 1 from the reward of a seat whose tokens in an episode approach overlong_length."""
    overlong_length: Tokens | None = None
    """overlong_shaping: sampled tokens at which the penalty is 1; default rollout.max_tokens."""
    overlong_buffer: Tokens | None = None
    """overlong_shaping: the penalty rises from 0 over this many tokens below overlong_length; default a fifth of it."""

    team: SeatLists | None = None
    """Teams by name, each a list of seats or of patterns (`red_*`): their seats are paid for what the team achieved. A
    seat in no team keeps its own reward."""
    team_weight: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    """team: share of the team's mean reward in the reward of each of its seats; the rest is the seat's own."""

    def resolve(self) -> list[dict[str, Any]]:
        """The preset gives every field that applies its value."""
        values, mistakes = algorithm_parts.resolve(self.name, dict(self))
        mistakes += self._products() + settle_lists("team", self.team or {})
        mistakes += settle_lists("episode_peers", self.episode_peers or {})
        if self.groups_per_batch % self.updates_per_batch:
            problem = f"must divide groups_per_batch={self.groups_per_batch}"
            mistakes.append(mistake("updates_per_batch", self.updates_per_batch, problem))
        if not mistakes:
            fill(self, values)
        return mistakes

    def _products(self) -> list[dict[str, Any]]:
        """Numbers that are right in themselves and too large together."""
        found = []
        if self.group_size * self.groups_per_batch > MAX_EPISODES:
            problem = f"times group_size = {self.group_size} is more than {MAX_EPISODES:,} episodes per batch"
            found.append(mistake("groups_per_batch", self.groups_per_batch, problem))
        if (self.max_staleness + 1) * self.groups_per_batch > MAX_GROUPS:
            problem = (
                f"plus 1, times groups_per_batch = {self.groups_per_batch}, is more than {MAX_GROUPS:,} groups that "
                "could be under way"
            )
            found.append(mistake("max_staleness", self.max_staleness, problem))
        return found

    @property
    def learns_from(self) -> Literal["groups", "batches", "more"]:
        """What must have different rewards for anything to be learned: a group; groups or batches; or nothing, because
        it learns from `more` than rewards, or from those of seats or turns within an episode."""
        taught = self.advantage == "none" or self.distill_coef or self.kl_in == "reward"
        if taught or self.team or self.episode_peers or self.advantage == "per_turn":
            return "more"
        return "batches" if self.advantage in algorithm_parts.BATCH_BASELINES else "groups"

    @property
    def seats_named(self) -> list[tuple[str, str]]:
        """The setting and the entry, for each seat or pattern of seats that the settings name."""
        tables = {"team": self.team or {}, "episode_peers": self.episode_peers or {}}
        return [
            (f"{table}.{name}", entry)
            for table, lists in tables.items()
            for name, entries in lists.items()
            for entry in entries
        ]

    def options(self, part: Literal["advantage", "loss", "correction"]) -> dict[str, Any]:
        """The options of the chosen part, by name."""
        choice = getattr(self, part)
        return {name: getattr(self, name) for name in algorithm_parts.PARTS[part][choice].options}
