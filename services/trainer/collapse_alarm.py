"""Alarms for training that collapses, each from the metrics of the last WINDOW steps.

    entropy        the median entropy is below `train.entropy_alarm`, nine of ten groups have equal rewards (groups of
                   one episode: the whole batch has), the goal is not reached: train.target, or without one, 0.9 of the
                   way from the worst reward seen to the best; if all were equal, an `exact` of 0.9
    reward_cliff   `exact`, or `reward/mean` where the environment does not report it: its mean has lost the share
                   `train.collapse_alarm` of its gain over the first window, or of its distance from the worst reward
    zero_variance  most groups have equal rewards, not because of `entropy`, and the goal is not reached; groups that
                   were discarded for it count. Of an algorithm that learns from rewards that differ between groups:
                   most batches have, and the same as the batch before. Never where equal rewards teach too
    length_drift   answers are many times longer or shorter than WINDOW steps before, and the reward has not risen
    kl             the median KL divergence (nats a token) of the policy that sampled from the one that is trained
    ratio_tails    few tokens carry the loss: the median effective sample size of the importance ratios is low

`train.alarms` has the bounds of the last four. An alarm that has rung stays active until its condition has been absent
for CALM steps: one collapse is one event.

A policy that has solved its task has no entropy and equal rewards too, but has reached the goal. With random rewards,
groups differ even under a deterministic policy.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from opentinker.shared.spec import AlgorithmSpec, TrainSpec
from opentinker.shared.spec.evaluation import PREFIX
from opentinker.shared.spec.train import ALARM_WINDOW
from opentinker.shared.types.match_results import alike

WINDOW = ALARM_WINDOW
CALM = WINDOW
"""Steps without its condition after which an alarm is over."""
EQUAL_SHARE = 0.9
"""Share of groups with equal rewards above which there is nothing to learn."""
GOAL_SHARE = 0.9
"""Share of the way from the worst reward to the best that counts as the goal without a train.target."""
NOISE = 2.0
"""Smallest gain that counts, in standard deviations of the steps in a window: chance alone gives windows of WINDOW
steps less than one."""
CLIFF_NOISE = 3.0
"""Smallest loss that counts where nothing was gained, in standard deviations of the steps of the best window."""
RISE = 0.5
"""Smallest rise of the reward that explains other lengths, in standard deviations of its steps."""
HINTS = {
    "entropy": "every sample of a group is the same, so nothing can be learned from them: continue from an earlier "
    "checkpoint with algorithm.entropy_coef or a lower train.lr",
    "reward_cliff": "continue from an earlier checkpoint, with a lower train.lr or a tighter clip",
    "zero_variance": "the task is too easy or too hard for this model: an easier start, shaped rewards, a larger "
    "algorithm.group_size, or an SFT start ([start])",
    "length_drift": "answers change their length without a better reward: a lower train.lr, another "
    "algorithm.aggregation, or a rollout.max_tokens that bounds them",
    "kl": "the trainer has moved far from the policy that samples: a lower algorithm.max_staleness or train.lr, and "
    "the same precision for both (rollout.vllm)",
    "ratio_tails": "few tokens carry the whole loss: a lower algorithm.max_staleness, algorithm.updates_per_batch or "
    "train.lr, or a correction that truncates ratios (algorithm.correction)",
}
SETTINGS = {"entropy": "train.entropy_alarm", "reward_cliff": "train.collapse_alarm"}
"""Where the bound of an alarm is set, if not in `train.alarms`."""


@dataclass(frozen=True)
class Ring:
    """An alarm that has begun."""

    alarm: str
    metric: str
    value: float
    bound: float
    since: int
    """First step of the window in which it was seen."""

    @property
    def detail(self) -> dict[str, object]:
        """Return it as an event."""
        return {
            "alarm": self.alarm,
            "metric": self.metric,
            "value": self.value,
            "bound": self.bound,
            "since": self.since,
            "setting": SETTINGS.get(self.alarm, f"train.alarms.{self.alarm}"),
            "hint": HINTS[self.alarm],
        }


class CollapseAlarm:
    def __init__(self, train: TrainSpec, algorithm: AlgorithmSpec) -> None:
        self._train, self._algorithm = train, algorithm
        self._history: deque[dict[str, float]] = deque(maxlen=2 * WINDOW)
        self._steps: list[dict[str, float]] = []
        """The last window of the history."""
        self._worst, self._best = math.inf, -math.inf
        """Worst and best reward of a single episode."""
        self._quality = ""
        self._first: float | None = None
        self._top, self._top_spread = -math.inf, 0.0
        """Mean quality over a window: the first, and the best, with the spread of its steps."""
        self._lowest = math.inf
        """Lowest quality that counts as lost altogether."""
        self._dropped: float | None = None
        """Groups of equal rewards discarded up to the last step."""
        self._calm: dict[str, int] = {}
        """Steps since the condition of an active alarm was last seen."""
        self.active: dict[str, Ring] = {}
        """Active alarms by name."""

    def update(self, values: Mapping[str, float], step: int = 0) -> list[Ring]:
        """Add one step's metrics; return the alarms that start with it. A step without rewards is ignored."""
        if "reward/mean" not in values:
            return []
        of_batch = self._equal_batch(values)
        useless = {"groups": self._equal_groups(values), "batches": of_batch, "more": 0.0}
        uniform = of_batch if self._algorithm.group_size == 1 else useless["groups"]
        shares = {"useless": useless[self._algorithm.learns_from], "uniform": uniform}
        self._history.append({**values, **shares})
        self._steps = list(self._history)[-WINDOW:]
        self._worst = min(self._worst, values.get("reward/min", math.inf))
        self._best = max(self._best, values.get("reward/max", -math.inf))
        self._quality = self._quality or ("exact" if "exact" in values else "reward/mean")
        self._lowest = 0.0 if self._quality == "exact" else self._worst
        now: dict[str, Ring] = {}
        if len(self._steps) == WINDOW:
            now = {
                alarm: Ring(alarm, metric, value, bound, max(1, step - WINDOW + 1))
                for alarm, metric, value, bound in self._conditions()
            }
        began = [ring for alarm, ring in now.items() if alarm not in self.active]
        self._calm = {alarm: 0 if alarm in now else self._calm.get(alarm, 0) + 1 for alarm in {*now, *self.active}}
        known = {ring.alarm: ring for ring in began} | self.active
        self.active = {alarm: ring for alarm, ring in known.items() if self._calm[alarm] < CALM}
        return began

    def _equal_groups(self, values: Mapping[str, float]) -> float:
        """Return the share of equal groups, among those discarded for it and those trained."""
        dropped, before = values.get("dropped/zero_variance", 0.0), self._dropped
        self._dropped = dropped
        more = max(0.0, dropped - (dropped if before is None else before))
        groups = values.get("groups", 1.0)
        return (more + groups * values.get("zero_variance", 0.0)) / ((more + groups) or 1.0)

    def _equal_batch(self, values: Mapping[str, float]) -> float:
        """Return 1 if all rewards are equal, to those of the batch before too."""
        before = self._history[-1]["reward/mean"] if self._history else values["reward/mean"]
        rewards = [values.get("reward/min", -math.inf), values.get("reward/max", math.inf)]
        return float(alike(rewards) and alike([before, values["reward/mean"]]))

    def _conditions(self) -> Iterator[tuple[str, str, float, float]]:
        """Yield alarm, metric, value and bound of each condition that holds now."""
        bounds = self._train.alarms
        if collapsed := self._has_collapsed():
            yield "entropy", "entropy", self._median("entropy"), self._train.entropy_alarm
        if (kept := self._regressed_below()) is not None:
            yield "reward_cliff", self._quality, self._mean(self._quality), kept
        equal = self._median("useless")
        if 0.0 < bounds.zero_variance <= equal and not collapsed and not self._reached():
            yield "zero_variance", "zero_variance", equal, bounds.zero_variance
        if (length := self._drifted()) is not None:
            yield "length_drift", "response_length/mean", *length
        kl = self._median("ratio/k3")
        if 0.0 < bounds.kl < kl:
            yield "kl", "ratio/k3", kl, bounds.kl
        ess = self._median("ess")
        if ess < bounds.ratio_tails:
            yield "ratio_tails", "ess", ess, bounds.ratio_tails

    def _has_collapsed(self) -> bool:
        return (
            self._median("entropy") < self._train.entropy_alarm
            and self._median("uniform") >= EQUAL_SHARE
            and (bool(self._train.target) or self._best > self._worst)
            and not self._reached()
        )

    def _reached(self) -> bool:
        target = self._train.target
        if target:  # targets of evaluation metrics are only checked at the end of the job
            return all(not name.startswith(PREFIX) and self._mean(name) >= wanted for name, wanted in target.items())
        if self._best <= self._worst:  # no reward was ever better than another
            return self._quality == "exact" and self._mean("exact") >= GOAL_SHARE
        return self._mean("reward/mean") >= self._worst + GOAL_SHARE * (self._best - self._worst)

    def _regressed_below(self) -> float | None:
        """Return the mean quality that was to be kept, if it was not."""
        mean, lost = self._mean(self._quality), self._train.collapse_alarm
        spread = float(np.std([step.get(self._quality, 0.0) for step in self._steps]))
        self._first = mean if self._first is None else self._first
        if mean > self._top:
            self._top, self._top_spread = mean, spread
        gained, height, fall = self._top - self._first, self._top - self._lowest, self._top - mean
        if lost and gained > NOISE * spread and gained > 0 and fall >= lost * gained:
            return self._top - lost * gained
        if lost and math.isfinite(height) and fall > CLIFF_NOISE * self._top_spread and 0 < lost * height <= fall:
            return self._top - lost * height
        return None

    def _drifted(self) -> tuple[float, float] | None:
        """Return mean length and the bound that it has crossed, if the reward has not risen with it."""
        factor, before = self._train.alarms.length_drift, list(self._history)[:-WINDOW]
        if not factor or len(before) < WINDOW or any("response_length/mean" not in step for step in self._history):
            return None
        old = float(np.median([step["response_length/mean"] for step in before]))
        new = self._median("response_length/mean")
        earlier = [step["reward/mean"] for step in before]
        if old <= 0 or self._mean("reward/mean") > np.mean(earlier) + RISE * np.std(earlier):
            return None
        if new > factor * old:
            return new, factor * old
        return (new, old / factor) if new < old / factor else None

    def _median(self, name: str) -> float:
        """Return NaN, which is neither above nor below any bound, unless every step has the metric."""
        return float(np.median([step.get(name, math.nan) for step in self._steps]))

    def _mean(self, name: str) -> float:
        return float(np.mean([step.get(name, -math.inf) for step in self._steps]))
