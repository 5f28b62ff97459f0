"""How it is trained: a preset, and what is changed of it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from opentinker.shared.spec import algorithms
from opentinker.shared.spec.base import Coefficient, Count, Factor, Fraction, SpecPart, Tokens
from opentinker.shared.types.mistakes import fill

MOST_EPISODES = 1_048_576
"""Episodes per batch."""
MOST_GROUPS = 1_048_576
"""Begun and not yet trained."""


class AlgorithmSpec(SpecPart):
    """A preset and what is changed of it. Once validated, every field that applies has its value; the others are none.

    The parts, their options and the presets are the tables of `algorithms.py` (`opentinker algorithms` prints them).
    """

    name: Literal["grpo", "dr_grpo", "dapo", "rloo", "reinforce_pp", "ppo", "gspo", "cispo", "distill"] = "grpo"
    """The preset: it gives every field below that is not set. See `opentinker algorithms`."""
    group_size: Annotated[int, Field(gt=0, le=1024)] = 8
    """Episodes per group (same start state); times groups_per_batch at most 1,048,576."""
    groups_per_batch: Annotated[int, Field(gt=0, le=65_536)] = 16
    """Groups per optimizer batch; times max_staleness + 1 at most 1,048,576."""
    max_staleness: Annotated[int, Field(ge=0, le=10_000)] = 2
    """Versions that a trajectory's oldest token may lag behind the trainer when its batch is assembled."""
    updates_per_batch: Annotated[int, Field(gt=0, le=65_536)] = 1
    """Optimizer steps per batch, each on an equal share of its groups."""
    advantage: (
        Literal["grpo", "dr_grpo", "rloo", "maxrl", "reinforce_pp", "reinforce_pp_baseline", "per_turn", "gae", "none"]
        | None
    ) = None
    """How rewards become advantages."""
    loss: Literal["decoupled_ppo", "ppo", "importance_sampling", "cispo", "gspo", "dppo", "sapo"] | None = None
    """The policy loss. mu is the policy that sampled, pi the one that is trained."""
    correction: Literal["none", "tis", "icepop", "geometric"] | None = None
    """Correction for mu differing from pi_prox, beyond what the loss does."""
    aggregation: Literal["token_mean", "sequence_mean", "constant"] | None = None
    """How the losses of tokens become one number."""
    normalize_std: bool | None = None
    """grpo, per_turn: divide by the group's standard deviation."""
    gamma: Fraction | None = None
    """gae, per_turn: discount per token (gae) or per turn (per_turn)."""
    lam: Fraction | None = None
    """gae: 1 trusts the returns, 0 the critic."""
    critic_lr: Coefficient | None = None
    """gae without a [value_model]: learning rate of the critic, which starts from model.base."""
    value_clip: Factor | None = None
    """gae without a [value_model]: how far a value may move from the one at the batch's start before its gradient
    stops."""
    clip_low: Fraction | None = None
    """See clip_high."""
    clip_high: Coefficient | None = None
    """The importance ratio pi/pi_prox is clipped to [1 - clip_low, 1 + clip_high]."""
    dual_clip: Annotated[float, Field(gt=1.0, le=1e6)] | None = None
    """ppo: largest ratio that a negative advantage is multiplied with; none: no such bound."""
    behaviour_cap: Factor | None = None
    """decoupled_ppo: upper bound of the weight pi_prox/mu; with proximal = `loglinear` that is 1 up to one version of
    lag."""
    proximal: Literal["behaviour", "loglinear", "recomputed"] | None = None
    """Where pi_prox, the centre of the clip range, lies. `behaviour`: it is mu. `loglinear`: between mu and pi, one
    version behind pi on the straight line of log-probabilities, so that every version of lag has a clip range of its
    own; up to one version of lag it is mu. `recomputed`: the weights before the batch; with one update per batch
    nothing is ever clipped."""
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
    """`loss`: a term of the loss. `reward`: taken off the reward, token by token, with mu in place of pi."""
    kl_estimator: Literal["k1", "k2", "k3"] | None = None
    """With d = log pi - log reference: k1 = d, k2 = d^2/2, k3 = exp(-d) - 1 + d. In the loss take k2
    or k3: the gradient of k1 has mean 0 over the policy's own samples, and pulls nowhere."""
    distill_coef: Coefficient | None = None
    """Weight of log teacher - log mu of each sampled token, which is added to its advantage: the reverse KL to the
    [teacher] on the policy's own samples. 0: off."""
    entropy_coef: Coefficient = 0.0
    """Weight of the mean entropy, which is added to what is maximised. 0: off."""
    drop_zero_variance: bool | None = None
    """Groups whose rewards are all equal are discarded when a batch is assembled, and replaced by new ones."""
    max_zero_variance_batches: Count | None = None
    """drop_zero_variance: the job fails when this many batches' worth of groups was discarded for it since the last
    step, or the last restart."""
    overlong_shaping: bool | None = None
    """Take up to 1 off the reward of a seat that says nearly overlong_length tokens in an episode."""
    overlong_length: Tokens | None = None
    """overlong_shaping: sampled tokens at which the penalty is 1; default rollout.max_tokens."""
    overlong_buffer: Tokens | None = None
    """overlong_shaping: the penalty rises from 0 over this many tokens below overlong_length; default a fifth of it."""

    def resolve(self) -> list[dict[str, Any]]:
        """The preset gives every field that applies its value."""
        values, mistakes = algorithms.resolve(self.name, dict(self))
        mistakes += self._products()
        if self.groups_per_batch % self.updates_per_batch:
            problem = f"must divide groups_per_batch={self.groups_per_batch}"
            mistakes.append({"field": "updates_per_batch", "value": self.updates_per_batch, "problem": problem})
        if not mistakes:
            fill(self, values)
        return mistakes

    def _products(self) -> list[dict[str, Any]]:
        """Numbers that are right in themselves and too large together."""
        found = []
        if self.group_size * self.groups_per_batch > MOST_EPISODES:
            problem = f"times group_size = {self.group_size} is more than {MOST_EPISODES:,} episodes per batch"
            found.append({"field": "groups_per_batch", "value": self.groups_per_batch, "problem": problem})
        if (self.max_staleness + 1) * self.groups_per_batch > MOST_GROUPS:
            problem = (
                f"plus 1, times groups_per_batch = {self.groups_per_batch}, is more than {MOST_GROUPS:,} groups that "
                "could be under way"
            )
            found.append({"field": "max_staleness", "value": self.max_staleness, "problem": problem})
        return found

    def options(self, part: Literal["advantage", "loss", "correction"]) -> dict[str, Any]:
        """The options of the chosen part, by name."""
        choice = getattr(self, part)
        return {name: getattr(self, name) for name in algorithms.PARTS[part][choice].options}
