"""What a batch says about itself before anything is computed: rewards, endings, lengths, staleness. Pure numpy."""

from __future__ import annotations

from collections import Counter

import numpy as np
import numpy.typing as npt

from opentinker.shared.types import Ending, Group, StopReason, Trajectory, WeightVersion

LEARNERS = frozenset({"tokens", "entropy", "lr", "ess", "grad_norm", "clip_share", "step_seconds"})
"""Bare names that the learner reports beside these."""
FAMILIES = frozenset(
    {"reward", "reward_model", "response_length", "staleness", "turns", "spans", "stop", "ending", "env"}
    | {"loss", "teacher", "critic", "masked", "ratio", "mismatch", "drift", "tokens"}
    | {"trainer", "queue", "dropped", "failed", "swap", "val"}
)
"""First parts of names of ours that have several: an environment's metric must not begin with them."""


def batch_metrics(groups: list[Group], version: WeightVersion) -> dict[str, float]:
    """Metrics of the batch trained on at `version`.

    reward/{mean,std,min,max}, reward/env/NAME, reward_model/NAME/{mean,std} and reward/own (with reward models),
    zero_variance (share of groups whose rewards are all equal), response_length/{mean,max} (sampled tokens),
    turns/mean, stop/REASON (share of turns), ending/REASON (share of episodes), staleness/{min,mean,max} (versions that
    a trajectory's oldest token lags), spans/mean (weight versions within a trajectory), and the mean of every metric
    that environments reported, by its own name (`env/NAME` where the name is one of ours).
    """
    trajectories = [t for group in groups for t in group.trajectories]
    rewards = np.array([t.reward for t in trajectories])
    lengths = np.array([np.count_nonzero(t.mask) for t in trajectories])
    lags = np.array([version.step - t.oldest.step for t in trajectories])
    metrics = {
        **_summary("reward", rewards, "mean", "std", "min", "max"),
        **_summary("response_length", lengths, "mean", "max"),
        **_summary("staleness", lags, "min", "mean", "max"),
        "turns/mean": float(np.mean([len(t.turns) for t in trajectories])),
        "spans/mean": float(np.mean([_versions(t) for t in trajectories])),
        "zero_variance": float(np.mean([len({t.reward for t in group.trajectories}) == 1 for group in groups])),
        "groups": float(len(groups)),
        "trajectories": float(len(trajectories)),
    }
    for name in sorted({group.environment for group in groups}):
        own = [t.reward for group in groups if group.environment == name for t in group.trajectories]
        metrics[f"reward/env/{name}"] = float(np.mean(own))
    metrics |= _scores(trajectories, rewards)
    stops = Counter(turn.stop for t in trajectories for turn in t.turns)
    metrics |= {f"stop/{reason}": stops[reason] / max(1, stops.total()) for reason in StopReason}
    endings = Counter(t.ending for t in trajectories)
    metrics |= {f"ending/{end}": endings[end] / len(trajectories) for end in Ending if not end.failed}
    for key in sorted({key for t in trajectories for key in t.metrics}):
        value = float(np.mean([t.metrics[key] for t in trajectories if key in t.metrics]))
        first, more, _ = key.partition("/")
        ours = key in metrics or key in LEARNERS or (more and first in FAMILIES)
        metrics[f"env/{key}" if ours else key] = value
    return metrics


def _scores(trajectories: list[Trajectory], rewards: npt.NDArray[np.generic]) -> dict[str, float]:
    """reward_model/NAME/{mean,std}, and reward/own: the mean reward without what reward models added."""
    metrics: dict[str, float] = {}
    for name in sorted({name for t in trajectories for name in t.scores}):
        scores = np.array([t.scores[name] for t in trajectories if name in t.scores])
        metrics |= _summary(f"reward_model/{name}", scores, "mean", "std")
    if metrics:
        parts = [turn.components.items() for t in trajectories for turn in t.turns]
        added = sum(value for items in parts for key, value in items if key.startswith("reward_model/"))
        metrics["reward/own"] = float((rewards.sum() - added) / len(trajectories))
    return metrics


def _versions(trajectory: Trajectory) -> int:
    return len({span.version for span in trajectory.spans})


def _summary(name: str, values: npt.NDArray[np.generic], *parts: str) -> dict[str, float]:
    return {f"{name}/{part}": float(getattr(values, part)()) for part in parts}
