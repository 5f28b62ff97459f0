"""Algorithms as data: the parts there are, the options each part takes, and presets that name a choice of parts.

A job spec names a preset and overrides what it likes; `resolve` turns that into one value per field, or says which of
the given options do not apply and why. The resolved values are what the job's record holds. The formulas are the
functions of the same names in the trainer (`advantages.py`, `losses.py`, `corrections.py`).
"""

from __future__ import annotations

from typing import Any

import msgspec

from opentinker.shared.types.mistakes import mistake

Values = dict[str, Any]
Mistake = dict[str, Any]
"""{field, value, problem}"""


class Component(msgspec.Struct, frozen=True):
    """One choice for a part. `options`: what only this choice (and others that list it) takes, with its default."""

    meaning: str
    options: Values = {}


PEERS: Values = {"episode_peers": None}
"""Option of the estimators that compare rewards with each other and normalise nothing over the batch."""
ADVANTAGES = {
    "grpo": Component(
        "(reward - group mean) / group standard deviation",
        {"normalize_std": True, "baseline_over": "episodes", **PEERS},
    ),
    "dr_grpo": Component("reward - group mean", {"baseline_over": "episodes", **PEERS}),
    "rloo": Component("reward - mean of the group's others", PEERS),
    "maxrl": Component("(reward - group mean) / group mean", PEERS),
    "reinforce_pp": Component("reward, normalised over the batch's tokens"),
    "reinforce_pp_baseline": Component("reward - group mean, normalised over the batch's tokens"),
    "rae": Component("reward - running mean of the seat's rewards in this environment", {"baseline_decay": 0.95}),
    "per_turn": Component(
        "returns-to-go of each turn, against the same turn of the group's others",
        {"gamma": 1.0, "normalize_std": True, **PEERS},
    ),
    "agent_turn": Component(
        "(reward of the turn - mean) / standard deviation over the candidates of the same turn of the seat",
        {"normalize_std": True},
    ),
    "gae": Component(
        "generalised advantage estimation with a critic",
        {"gamma": 1.0, "lam": 0.95, "critic_lr": 1e-5, "value_clip": 0.2},
    ),
    "none": Component("0: rewards are only reported, and the teacher's word is all (distill_coef)"),
}
GROUP_BASELINES = ("grpo", "dr_grpo", "rloo", "maxrl", "reinforce_pp_baseline", "per_turn", "agent_turn")
"""Estimators that compare a trajectory with the others of its group."""
BATCH_BASELINES = ("gae", "reinforce_pp", "rae")
"""Estimators for which rewards that differ between groups are enough."""
TREE_SAMPLED = "agent_turn"
"""The estimator whose groups are the candidates of each turn (`tree_sampling.py`)."""
TOKEN_LEVEL = ("gae", "per_turn", TREE_SAMPLED)
"""Estimators whose advantage differs between the tokens of a trajectory."""

LOSSES = {
    "decoupled_ppo": Component(
        "clipped around pi_prox, weighted by pi_prox/mu",
        {"clip_low": 0.2, "clip_high": 0.2, "behaviour_cap": 5.0, "proximal": "loglinear"},
    ),
    "ppo": Component(
        "clipped ratio pi/pi_prox", {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": None, "proximal": "behaviour"}
    ),
    "importance_sampling": Component("ratio pi/mu, unbounded"),
    "cispo": Component(
        "REINFORCE weighted by the clipped ratio", {"clip_low": 1.0, "clip_high": 4.0, "proximal": "behaviour"}
    ),
    "gspo": Component("clipped ratio of whole sequences", {"clip_low": 0.2, "clip_high": 0.2, "proximal": "behaviour"}),
    "dppo": Component(
        "ratio pi/mu, dropped where the probability moved too far", {"tv_limit": 0.2, "log_ratio_penalty": 1e-3}
    ),
    "sapo": Component("soft gate of the ratio", {"tau_positive": 1.0, "tau_negative": 1.05, "proximal": "behaviour"}),
}

CORRECTIONS = {
    "none": Component("no further correction"),
    "tis": Component("weight min(pi_prox/mu, tis_cap)", {"tis_cap": 2.0}),
    "icepop": Component(
        "weight pi_prox/mu inside [icepop_low, icepop_high], else 0", {"icepop_low": 0.5, "icepop_high": 5.0}
    ),
    "geometric": Component(
        "drop sequences whose mean ratio leaves [geometric_low, geometric_high]",
        {"geometric_low": 0.99, "geometric_high": 1.01},
    ),
}

AGGREGATIONS = {
    "token_mean": Component("sum / tokens of the batch"),
    "sequence_mean": Component("mean over samples (seat by seat) of their token means"),
    "constant": Component("sum / (samples * rollout.max_tokens), seat by seat"),
}

PARTS = {"advantage": ADVANTAGES, "loss": LOSSES, "correction": CORRECTIONS, "aggregation": AGGREGATIONS}

SWITCHES: dict[str, Component] = {
    "kl_coef": Component("KL to the reference", {"kl_in": "loss", "kl_estimator": "k3"}),
    "drop_zero_variance": Component("dynamic sampling", {"max_zero_variance_batches": 20}),
    "overlong_shaping": Component("soft length penalty", {"overlong_length": None, "overlong_buffer": None}),
    "entropy_coef": Component("entropy bonus"),
    "distill_coef": Component("on-policy distillation"),
    "team": Component("rewards of teams", {"team_weight": 1.0}),
}
"""Fields that are off unless set (0, false or none); their options apply when they are on."""
OFF: Values = {
    "kl_coef": 0.0,
    "drop_zero_variance": False,
    "overlong_shaping": False,
    "entropy_coef": 0.0,
    "distill_coef": 0.0,
    "team": None,
}


class Preset(msgspec.Struct, frozen=True):
    meaning: str
    source: str
    values: Values


PRESETS = {
    "grpo": Preset(
        "Group-relative advantages, decoupled clipping, all tokens of a batch alike, no KL unless set.",
        "DeepSeekMath, arXiv 2402.03300 (eq. 3 there: a mean by sequence, and KL); decoupled clipping: AReaL, arXiv "
        "2505.24298; token mean: DAPO, arXiv 2503.14476",
        {"advantage": "grpo", "loss": "decoupled_ppo", "aggregation": "token_mean"},
    ),
    "dr_grpo": Preset(
        "GRPO without its two biases: no division by the standard deviation, none by the own length.",
        "arXiv 2503.20783",
        {"advantage": "dr_grpo", "loss": "decoupled_ppo", "aggregation": "constant"},
    ),
    "dr_mas": Preset(
        "GRPO for several seats: mean and standard deviation are those of all turns of a seat in the group.",
        "Dr. MAS, arXiv 2602.08847",
        {"advantage": "grpo", "baseline_over": "turns", "loss": "decoupled_ppo", "aggregation": "token_mean"},
    ),
    "at_grpo": Preset(
        "Tree sampling: group_size candidates of every turn are compared; play continues from the best one.",
        "AT-GRPO, arXiv 2510.11062",
        {"advantage": "agent_turn", "loss": "decoupled_ppo", "aggregation": "token_mean", "team_weight": 0.5},
    ),
    "spiral": Preset(
        "Self-play of unequal seats: each reward against a running mean of its seat, and any group size.",
        "SPIRAL, arXiv 2506.24119",
        {"advantage": "rae", "loss": "decoupled_ppo", "aggregation": "constant"},
    ),
    "dapo": Preset(
        "GRPO with a higher upper clip, dynamic sampling, token mean and a soft length penalty.",
        "arXiv 2503.14476",
        {
            "advantage": "grpo",
            "loss": "decoupled_ppo",
            "aggregation": "token_mean",
            "clip_high": 0.28,
            "drop_zero_variance": True,
            "overlong_shaping": True,
        },
    ),
    "rloo": Preset(
        "REINFORCE with the mean of the group's others as baseline; its ratio is clipped token by token.",
        "arXiv 2402.14740 (on policy, where nothing is clipped)",
        {"advantage": "rloo", "loss": "decoupled_ppo", "aggregation": "token_mean"},
    ),
    "reinforce_pp": Preset(
        "No critic and no group: advantages normalised over the batch; with kl_coef, KL is part of the reward.",
        "REINFORCE++, arXiv 2501.03262",
        {
            "advantage": "reinforce_pp",
            "loss": "decoupled_ppo",
            "aggregation": "token_mean",
            "kl_in": "reward",
            "kl_estimator": "k1",
        },
    ),
    "ppo": Preset(
        "Clipped ratio to the sampling policy, advantages from a critic.",
        "arXiv 1707.06347, 1506.02438",
        {"advantage": "gae", "loss": "ppo", "aggregation": "token_mean", "kl_in": "reward", "kl_estimator": "k1"},
    ),
    "gspo": Preset(
        "Clips the ratio of whole sequences; the paper's range, 3e-4 and 4e-4, is for samples of the very weights that "
        "are trained, and lets nothing learn from those a version behind.",
        "arXiv 2507.18071",
        {"advantage": "grpo", "loss": "gspo", "aggregation": "sequence_mean"},
    ),
    "cispo": Preset(
        "Clips the weight and never the gradient: every token learns.",
        "MiniMax-M1, arXiv 2506.13585; ScaleRL, arXiv 2510.13786",
        {"advantage": "grpo", "loss": "cispo", "aggregation": "token_mean"},
    ),
    "distill": Preset(
        "On-policy distillation: every sampled token is judged by a teacher; the ratio's weight is bounded.",
        "Thinking Machines Lab, On-Policy Distillation (2025); GKD, arXiv 2306.13649; MiniLLM, arXiv 2306.08543",
        {"advantage": "none", "loss": "cispo", "aggregation": "token_mean", "distill_coef": 1.0},
    ),
}

OPTIONS = sorted({option for part in (*PARTS.values(), SWITCHES) for c in part.values() for option in c.options})


def resolve(name: str, given: Values) -> tuple[Values, list[Mistake]]:
    """One value per field of the algorithm that applies, and what is wrong with the given ones.

    `given` holds the user's fields, None where unset. A preset's value for an option counts as long as the part that
    takes the option is the preset's own; a replaced part comes with its own defaults.
    """
    preset = PRESETS[name].values
    chosen = {part: given.get(part) or preset.get(part, "none") for part in PARTS}
    values: Values = dict(chosen)
    for part, choice in chosen.items():
        own = preset if choice == preset.get(part, "none") else {}
        values |= _options(PARTS[part][choice], own, given)
    for switch, component in SWITCHES.items():
        values[switch] = _first(given.get(switch), preset.get(switch), OFF[switch])
        if values[switch]:
            values |= _options(component, preset, given)
    mistakes = [
        mistake(option, given[option], _misplaced(option, chosen))
        for option in OPTIONS
        if given.get(option) is not None and option not in values
    ]
    return values, mistakes + _conflicts(values, given)


def _options(component: Component, preset: Values, given: Values) -> Values:
    return {name: _first(given.get(name), preset.get(name), default) for name, default in component.options.items()}


def _first(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)


def _misplaced(option: str, chosen: Values) -> str:
    for switch, component in SWITCHES.items():
        if option in component.options:
            return f"does not apply: {switch} is {OFF[switch]!r}".replace("False", "false").replace("None", "not set")
    for part, components in PARTS.items():
        owners = [name for name, component in components.items() if option in component.options]
        if owners:
            return f"does not apply to {part} = {chosen[part]!r}; it belongs to {part} = {_any_of(owners)}"
    raise KeyError(option)


def _any_of(names: list[str]) -> str:
    return " | ".join(repr(name) for name in names)


def _conflicts(values: Values, given: Values) -> list[Mistake]:
    """Return contradicting choices, each reported for the field that a user would change."""
    advantage, loss, correction = values["advantage"], values["loss"], values["correction"]
    proximal = values.get("proximal")
    found: list[tuple[str, str]] = []
    if given.get("group_size") == 1 and advantage in GROUP_BASELINES:
        why = f"advantage = {advantage!r} compares a trajectory with others of its group: it needs 2 or more"
        found.append(("group_size", why))
    if proximal == "behaviour" and loss == "decoupled_ppo":
        found.append(("proximal", "decoupled_ppo with pi_prox = mu is plain PPO: take loss = 'ppo'"))
    if correction in ("tis", "icepop"):
        why = ""
        if proximal is None or loss == "decoupled_ppo":
            why = f"loss = {loss!r} is already weighted against mu; {correction} would do it twice"
        elif proximal == "behaviour":
            why = f"with proximal = 'behaviour' the weight of {correction} is always 1; take another proximal"
        elif proximal == "loglinear" and given.get("max_staleness", 2) <= 1:
            why = (
                f"with proximal = 'loglinear' the weight of {correction} is 1 up to one version of lag: take "
                "proximal = 'recomputed', or max_staleness = 2 or more"
            )
        found += [("correction", why)] if why else []
    if loss == "gspo" and advantage in TOKEN_LEVEL:
        found.append(("loss", f"gspo has one advantage per trajectory, advantage = {advantage!r} has one per token"))
    if loss == "gspo" and advantage == "reinforce_pp" and values.get("kl_in") == "reward":
        why = "gspo has one advantage per trajectory; with KL in the reward reinforce_pp has one per token"
        found.append(("kl_in", why))
    found += _reward_conflicts(values, given) + _distillation_conflicts(values)
    for low, high in (("icepop_low", "icepop_high"), ("geometric_low", "geometric_high")):
        if low in values and values[low] > values[high]:
            found.append((low, f"is larger than {high} = {values[high]}"))
    return [mistake(field, given.get(field, values.get(field)), why) for field, why in found]


def _reward_conflicts(values: Values, given: Values) -> list[tuple[str, str]]:
    """Return contradictions between the advantages' use of rewards and other users of rewards."""
    found: list[tuple[str, str]] = []
    advantage, in_reward = values["advantage"], values.get("kl_in") == "reward"
    if values["drop_zero_variance"]:
        if advantage not in GROUP_BASELINES:
            why = f"advantage = {advantage!r} has no group baseline: groups of equal rewards teach too"
            found.append(("drop_zero_variance", why))
        if advantage in ("per_turn", TREE_SAMPLED):
            why = f"{advantage}: groups of equal total rewards may differ turn by turn"
            found.append(("drop_zero_variance", why))
        if in_reward:
            found.append(("drop_zero_variance", "with KL in the reward, groups whose own rewards are equal teach too"))
        if values.get("episode_peers"):
            why = "with episode_peers, rewards that are equal from episode to episode may differ within one"
            found.append(("drop_zero_variance", why))
        if values["team"]:
            found.append(("drop_zero_variance", "with teams, groups whose own rewards are equal may teach too"))
    if advantage == "maxrl" and in_reward:
        found.append(("kl_in", "maxrl needs rewards of 0 or more, and the KL is taken off them: take kl_in = 'loss'"))
    if advantage == "maxrl" and values["overlong_shaping"]:
        found.append(("overlong_shaping", "maxrl needs rewards of 0 or more, and the penalty is taken off them"))
    if advantage == TREE_SAMPLED and in_reward:
        why = "agent_turn chooses the best candidate before the KL is known: take kl_in = 'loss'"
        found.append(("kl_in", why))
    if advantage == TREE_SAMPLED and values["overlong_shaping"]:
        why = "agent_turn compares the candidates of a turn, and the penalty is for the tokens of an episode"
        found.append(("overlong_shaping", why))
    if advantage == "reinforce_pp" and given.get("group_size") == given.get("groups_per_batch") == 1:
        found.append(("groups_per_batch", "reinforce_pp compares what a batch holds: one trajectory teaches nothing"))
    return found


def _distillation_conflicts(values: Values) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    alone, distills = values["advantage"] == "none", values["distill_coef"] > 0
    if alone and not distills:
        found.append(("distill_coef", "advantage = 'none' learns from nothing but the teacher: it must be above 0"))
    if alone and values["team"]:
        found.append(("team", "advantage = 'none' ignores the reward, and that of the team with it"))
    if alone and values["overlong_shaping"]:
        found.append(("overlong_shaping", "advantage = 'none' ignores the reward, and the penalty with it"))
    if alone and values.get("kl_in") == "reward":
        found.append(("kl_in", "advantage = 'none' ignores the reward, and what is taken off it: take kl_in = 'loss'"))
    if distills and values["loss"] == "gspo":
        found.append(("distill_coef", "gspo has one advantage per trajectory, the teacher gives one per token"))
    if distills and values["drop_zero_variance"]:
        found.append(("drop_zero_variance", "groups of equal rewards teach too: the teacher judges their tokens"))
    return found


def describe(name: str) -> Values:
    """A preset as a user sees it: what it is, its parts, and every option with the value it has."""
    preset = PRESETS[name]
    values, _ = resolve(name, {})
    return {"name": name, "meaning": preset.meaning, "source": preset.source, "values": values}
