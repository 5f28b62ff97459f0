"""Metrics of a batch that need no forward pass: rewards, endings, lengths, staleness. Pure numpy."""

from __future__ import annotations

from collections import Counter
from itertools import groupby

import numpy as np
import numpy.typing as npt

from opentinker.services.trainer.algorithm.seats import SeatPlay, seat_plays
from opentinker.shared.types.core import Ending, StopReason, WeightVersion
from opentinker.shared.types.trajectories import Group

LEARNERS = frozenset({"tokens", "entropy", "lr", "ess", "grad_norm", "clip_share", "step_seconds"})
"""Names without a prefix that the learner reports in addition."""
FAMILIES = frozenset(
    {"reward", "reward_model", "response_length", "staleness", "turns", "spans", "stop", "ending", "env"}
    | {"loss", "teacher", "critic", "masked", "ratio", "mismatch", "drift", "tokens"}
    | {"trainer", "queue", "dropped", "failed", "swap", "collapse", "alarm", "val"}
)
"""Prefixes of built-in metrics: an environment's metric must not begin with them."""


def batch_metrics(groups: list[Group], version: WeightVersion) -> dict[str, float]:
    """Return metrics of the batch trained at `version`.

    Per seat and sample: reward/{mean,std,min,max}, reward/env/NAME, reward/seat/NAME (where
    there are several seats), reward_model/NAME/{mean,std} and reward/own (with reward models), response_length/
    {mean,max} (sampled tokens), turns/mean. Of groups: zero_variance (share of those in which no seat did better in one
    sample than in another). Of turns: stop/REASON, turns/untrainable. Of samples: ending/REASON, and the mean of every
    metric that environments reported, by its own name (`env/NAME` where the name is built in). Of trajectories:
    staleness/{min,mean,max} (versions that the oldest token lags), spans/mean (weight versions within it). In a tree,
    plays and samples are those of the episode; turns and trajectories include the candidates that were not chosen.
    """
    trajectories = [t for group in groups for t in group.trajectories]
    plays = [play for play in seat_plays(groups) if play.is_played]
    samples = [
        next(found)
        for group in groups
        for index, found in groupby(group.trajectories, lambda t: t.index)
        if group.is_played(index)
    ]
    rewards = np.array([play.reward for play in plays])
    lengths = np.array([play.tokens for play in plays])
    lags = np.array([version.step - t.oldest.step for t in trajectories])
    metrics = {
        **_summary("reward", rewards, "mean", "std", "min", "max"),
        **_summary("response_length", lengths, "mean", "max"),
        **_summary("staleness", lags, "min", "mean", "max"),
        "turns/mean": float(np.mean([sum(len(t.turns) for t in play.streams) for play in plays])),
        "spans/mean": float(np.mean([len({span.version for span in t.spans}) for t in trajectories])),
        "zero_variance": float(np.mean([group.equal for group in groups])),
        "groups": float(len(groups)),
        "trajectories": float(len(trajectories)),
        **_rewards_by(plays),
        **_scores(plays, rewards),
    }
    stops = Counter(turn.stop for t in trajectories for turn in t.turns)
    metrics |= {f"stop/{reason}": stops[reason] / max(1, stops.total()) for reason in StopReason}
    if left_out := sum(bool(turn.untrainable) for t in trajectories for turn in t.turns):
        metrics["turns/untrainable"] = left_out / stops.total()
    endings = Counter(t.ending for t in samples)
    metrics |= {f"ending/{end}": endings[end] / len(samples) for end in Ending if not end.failed}
    for key in sorted({key for t in samples for key in t.metrics}):
        value = float(np.mean([t.metrics[key] for t in samples if key in t.metrics]))
        first, more, _ = key.partition("/")
        ours = key in metrics or key in LEARNERS or (more and first in FAMILIES)
        metrics[f"env/{key}" if ours else key] = value
    return metrics


def _rewards_by(plays: list[SeatPlay]) -> dict[str, float]:
    """reward/env/NAME, and reward/seat/NAME where there are several seats."""
    by: dict[str, list[float]] = {}
    for play in plays:
        by.setdefault(f"reward/env/{play.environment}", []).append(play.reward)
    if len({play.seat for play in plays}) > 1:
        for play in plays:
            by.setdefault(f"reward/seat/{play.seat}", []).append(play.reward)
    return {name: float(np.mean(own)) for name, own in sorted(by.items())}


def _scores(plays: list[SeatPlay], rewards: npt.NDArray[np.generic]) -> dict[str, float]:
    """reward_model/NAME/{mean,std}, and reward/own: the mean reward without what reward models added."""
    metrics: dict[str, float] = {}
    trajectories = [t for play in plays for t in play.streams]
    for name in sorted({name for t in trajectories for name in t.scores}):
        scores = np.array([t.scores[name] for t in trajectories if name in t.scores])
        metrics |= _summary(f"reward_model/{name}", scores, "mean", "std")
    if metrics:
        parts = [turn.components.items() for t in trajectories for turn in t.turns]
        added = sum(value for items in parts for key, value in items if key.startswith("reward_model/"))
        metrics["reward/own"] = float((rewards.sum() - added) / len(plays))
    return metrics


def _summary(name: str, values: npt.NDArray[np.generic], *parts: str) -> dict[str, float]:
    return {f"{name}/{part}": float(getattr(values, part)()) for part in parts}
