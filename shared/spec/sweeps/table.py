"""The table [sweep] of a job spec: which settings are varied, how values are chosen, and when a sweep ends."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from opentinker.shared.spec.base import SpecPart, Steps
from opentinker.shared.types.metric_directions import goal_of
from opentinker.shared.types.mistakes import Mistakes, fill, mistake, short

MAX_PARAMETERS = 16
MAX_VALUES = 100
"""Values of one parameter."""
MAX_JOBS = 1000
"""Jobs of one sweep."""
MAX_SEEDS = 20
WINDOW = 10
"""Points that a trial's value is a mean of, but for evaluations."""
MAGNITUDE = 1e15
"""Largest absolute end of a range: floats count in ones up to here."""
MAX_STEPS = 1_000_000
LEAVES = {"values", "low", "high"}
ParameterPath = Annotated[str, Field(min_length=1, max_length=200, pattern=r"^[^.\s]+(\.[^.\s]+)*$")]


class SweepParameter(SpecPart):
    """Values of one setting: a list, or a range."""

    values: Annotated[list[Any], Field(min_length=1, max_length=MAX_VALUES)] | None = None
    """The values to choose from. `train.lr = [1e-5, 1e-4]` is short for `train.lr = { values = [1e-5, 1e-4] }`."""
    low: int | float | None = None
    """Lower end of a range, included."""
    high: int | float | None = None
    """Upper end of a range, included."""
    log: bool = False
    """Whether orders of magnitude are equally likely, as they should be for learning rates."""
    step: Annotated[float, Field(gt=0.0, le=MAGNITUDE)] | None = None
    """Distance between neighbouring values, counted from `low`."""
    points: Annotated[int, Field(ge=2, le=MAX_VALUES)] | None = None
    """grid: number of values, evenly spaced (with `log`: by a constant factor), both ends included."""
    integer: bool | None = None
    """Whether values are whole numbers; default: whether the setting is one."""

    STAND_INS: ClassVar[dict[str, Any]] = {"values": [0], "low": -MAGNITUDE, "high": MAGNITUDE}

    def resolve(self) -> list[dict[str, Any]]:
        if self.values is not None:
            ranged = ("low", "high", "step", "points", "integer")
            found = [mistake(name, v, "does not go with values") for name in ranged if (v := getattr(self, name))]
            found += [mistake("log", True, "does not go with values")] if self.log else []
            twice = [value for place, value in enumerate(self.values) if _in(value, self.values[:place])]
            return found + ([mistake("values", twice[0], "is there twice")] if twice else [])
        if self.low is None or self.high is None:
            absent = "low" if self.low is None else "high"
            return [mistake(absent, None, "is needed: a parameter has values, or low and high")]
        if far := [name for name, value in (("low", self.low), ("high", self.high)) if abs(value) > MAGNITUDE]:
            return [mistake(name, None, f"must lie within {MAGNITUDE:g} of 0") for name in far]
        if self.low >= self.high:
            return [mistake("high", self.high, f"must be above low={self.low:g}: the range ends before it begins")]
        found = []
        if self.log and self.low <= 0:
            found.append(mistake("low", self.low, "must be above 0 for log = true"))
        if self.log and self.step is not None:
            found.append(mistake("step", self.step, "does not go with log; a grid takes points"))
        if self.step is not None and self.step > self.high - self.low:
            found.append(mistake("step", self.step, f"is larger than the range, {self.high - self.low:g}"))
        if self.step is not None and self.steps > MAX_STEPS:
            found.append(mistake("step", self.step, f"makes more than {MAX_STEPS:,} values; leave it out"))
        if self.step is not None and self.points is not None:
            found.append(mistake("points", self.points, "does not go with step"))
        if self.integer:
            whole = (("low", self.low), ("high", self.high), ("step", self.step))
            odd = [(name, value) for name, value in whole if value is not None and value != int(value)]
            found += [mistake(name, value, "must be a whole number for integer = true") for name, value in odd]
        return found

    @property
    def whole(self) -> bool:
        """Return whether the values of a range are whole numbers."""
        if self.integer is not None:
            return self.integer
        fractions = self.step is not None and self.step != int(self.step)
        return isinstance(self.low, int) and isinstance(self.high, int) and not fractions

    @property
    def grid(self) -> list[Any] | None:
        """Return all values; None for a range of which a grid needs to be told how many. At most MAX_VALUES + 1."""
        if self.values is not None:
            return self.values
        assert self.low is not None and self.high is not None
        if self.step is not None or (self.whole and not self.log and self.points is None):
            return [self.at(place) for place in range(min(MAX_VALUES, self.steps) + 1)]
        if self.points is None:
            return None
        shares = [place / (self.points - 1) for place in range(self.points)]
        return list(dict.fromkeys(self.number(self._between(share)) for share in shares))

    @property
    def ends(self) -> list[Any]:
        """Return the values by which a parameter is checked: all of a list, both ends of a range."""
        return self.values if self.values is not None else [self.low, self.high]

    def draw(self, chance: float) -> Any:
        """Return the value at `chance`, uniform in [0, 1)."""
        if self.values is not None:
            return self.values[int(chance * len(self.values))]
        assert self.low is not None and self.high is not None
        if self.step is not None or (self.whole and not self.log):
            return self.at(int(chance * (self.steps + 1)))
        return self.number(self._between(chance))

    @property
    def steps(self) -> int:
        """Return how many steps there are from the low end of a range."""
        assert self.low is not None and self.high is not None
        return int((self.high - self.low) / (self.step or 1) + 1e-9)

    def at(self, place: int) -> int | float:
        """Return the value `place` steps above the low end."""
        assert self.low is not None
        return self.number(self.low + place * (self.step or 1))

    def _between(self, share: float) -> float:
        assert self.low is not None and self.high is not None
        if self.log:
            return math.exp(math.log(self.low) + share * (math.log(self.high) - math.log(self.low)))
        return self.low + share * (self.high - self.low)

    def number(self, value: Any) -> int | float:
        """Return a value of the range as it is written: whole where the setting is, else with 12 digits."""
        assert self.low is not None and self.high is not None
        rounded = round(value) if self.whole else float(f"{value:.12g}")
        return min(max(rounded, self.low), self.high)


class EarlyStoppingSpec(SpecPart):
    """Rules that stop a trial that does worse than the others."""

    rule: Literal["median", "halving"] = "median"
    """`median`: a trial is stopped at a multiple of min_steps (after 64 of them at every second one, after 128 at every
    fourth...) where it is worse than the median of the other trials at that step. `halving`: successive halving; at
    steps min_steps, min_steps * factor, min_steps * factor^2... only the best 1/factor of the trials that got there
    continue (asynchronous: no trial waits for the others)."""
    min_steps: Steps
    """Steps that every trial makes before it is judged."""
    min_trials: Annotated[int, Field(ge=1, le=MAX_JOBS)] = 4
    """median: other trials that must have reached the step."""
    factor: Annotated[int, Field(ge=2, le=100)] = 3
    """halving: one of `factor` trials continues."""


class SweepTable(SpecPart):
    """A sweep: many jobs from one spec, with other values of some settings."""

    kind: Literal["rl", "sft", "dpo", "eval"] | None = None
    """Kind of the jobs, if the spec has `kind = "sweep"`; default: `rl`. Otherwise `kind` says it."""
    method: Literal["grid", "random", "tpe"] = "grid"
    """`grid`: every combination. `random`: values drawn independently, repeatable by `seed`. `tpe`: adaptive, new
    values come from a model of the finished trials (Tree-structured Parzen Estimator of Optuna)."""
    parameters: Annotated[dict[ParameterPath, SweepParameter], Field(min_length=1, max_length=MAX_PARAMETERS)]
    """The varied settings by their path: `train.lr = [1e-5, 1e-4]`, or a range
    `train.lr = { low = 1e-6, high = 1e-3, log = true }`."""
    metric: Annotated[str, Field(min_length=1, max_length=200)] | None = None
    """Metric by which trials are compared: one of docs/metrics.md or of the environment. Default: `reward/mean` (rl),
    `loss` (sft), `rewards/accuracy` (dpo), `val/reward/mean` (eval). With [policies] it is `POLICY/METRIC`, and needed.
    """
    goal: Literal["maximize", "minimize"] | None = None
    """Whether larger or smaller values are better. Needed for a metric of which that is not known, as of most that
    environments report; docs/sweeps.md lists those of which it is."""
    summary: Literal["last", "best", "mean"] = "last"
    """Part of a metric's history that counts as the trial's value: its end, its best moving mean, or its mean."""
    window: Annotated[int, Field(ge=1, le=10_000)] | None = None
    """last, best: points that a moving mean is over; default: 10, and 1 for evaluations (`val/...`)."""
    trials: Annotated[int, Field(ge=1, le=MAX_JOBS)] | None = None
    """random, tpe: how many combinations are tried."""
    seeds: Annotated[list[Annotated[int, Field(ge=0, lt=2**32)]], Field(max_length=MAX_SEEDS)] = []
    """Each combination runs once with each of these seeds, and its value is the mean. They become train.seed and
    rollout.seed (eval: evaluation.seed)."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """Seed of `random` and `tpe`."""
    max_running: Annotated[int, Field(ge=1, le=64)] = 4
    """Jobs of the sweep that are queued or running at the same time. They wait in the queue like all others."""
    max_jobs: Annotated[int, Field(ge=1, le=MAX_JOBS)] | None = None
    """Budget: jobs that are submitted, of all trials and seeds together; of a grid those of its first combinations."""
    max_hours: Annotated[float, Field(gt=0.0, le=8760.0)] | None = None
    """Budget: hours from the submission after which the sweep ends and its running jobs are cancelled."""
    max_worker_s: Annotated[float, Field(gt=0.0, le=1e12)] | None = None
    """Budget: seconds of workers, of all its jobs together, after which the same happens."""
    early_stopping: EarlyStoppingSpec | None = None
    """Stop trials that do worse than the others; every trial runs to its end without this table."""
    notify_jobs: bool = False
    """Send the messages of [[notify]] about every job as well: alarms, targets, and each end. Otherwise each recipient
    gets one message at the end of the sweep, and one when its best trial reaches the target."""

    STAND_INS: ClassVar[dict[str, Any]] = {"parameters": {"x": [0]}}

    @model_validator(mode="before")
    @classmethod
    def _flat(cls, data: Any) -> Any:
        """Parameters may be written as tables in tables, and as lists."""
        if not isinstance(data, dict) or not isinstance(data.get("parameters"), dict):
            return data
        leaves = leaves_of(data["parameters"], "")
        if len(leaves) > MAX_PARAMETERS:
            problem = f"has {len(leaves):,} settings; at most {MAX_PARAMETERS} are varied"
            raise Mistakes([mistake("parameters", None, problem)])
        if twice := sorted(path for path, count in Counter(path for path, _ in leaves).items() if count > 1):
            raise Mistakes([mistake(f"parameters.{path}", None, "is written twice") for path in twice])
        if odd := [(path, value) for path, value in leaves if not isinstance(value, dict) or not value]:
            problem = "must be a list of values or a range, e.g. [1, 2] or { low = 1, high = 2 }"
            raise Mistakes([mistake(f"parameters.{path}", short(value), problem) for path, value in odd])
        return {**data, "parameters": dict(leaves)}

    def resolve(self) -> list[dict[str, Any]]:
        found = []
        paths = sorted(self.parameters)
        for path in paths:
            if below := next((other for other in paths if other.startswith(f"{path}.")), None):
                found.append(mistake(f"parameters.{below}", None, f"is a part of {path}, which is varied too"))
        if self.method == "grid":
            found += self.grid_mistakes()
        else:
            points = [path for path, one in self.parameters.items() if one.points is not None]
            found += [
                mistake(f"parameters.{path}.points", self.parameters[path].points, "is for grids") for path in points
            ]
            if {self.trials, self.max_jobs, self.max_hours, self.max_worker_s} == {None}:
                problem = f"is needed for method = {self.method!r} unless there is max_jobs, max_hours or max_worker_s"
                found.append(mistake("trials", None, problem))
        if len(set(self.seeds)) < len(self.seeds):
            found.append(mistake("seeds", self.seeds, "names a seed twice"))
        if self.trials is not None and self.trials * self.repeats > MAX_JOBS:
            problem = f"times {self.repeats} seeds is more than the {MAX_JOBS:,} jobs that a sweep may have"
            found.append(mistake("trials", self.trials, problem))
        if self.max_jobs is not None and self.max_jobs < self.repeats:
            found.append(
                mistake("max_jobs", self.max_jobs, f"is less than the {self.repeats} jobs of one trial (seeds)")
            )
        return found

    def unread_options(self) -> list[dict[str, Any]]:
        """Return mistakes in options that the method or the rule does not read. Those of stored sweeps, which may be of
        an earlier release, are not judged."""
        found = []
        if self.method == "grid" and self.seed != 0:
            found.append(mistake("seed", self.seed, "does not go with method = 'grid', which draws nothing"))
        if (rule := self.early_stopping) is not None:
            name = "min_trials" if rule.rule == "halving" else "factor"
            value = getattr(rule, name)
            if value != EarlyStoppingSpec.model_fields[name].default:
                found.append(mistake(f"early_stopping.{name}", value, f"does not go with rule = {rule.rule!r}"))
        return found

    def grid_mistakes(self) -> list[dict[str, Any]]:
        """Return what is wrong with the parameters of a grid."""
        found, size = [], self.repeats
        if self.trials is not None:
            found.append(mistake("trials", self.trials, "does not apply to a grid, which tries every combination"))
        for path, one in self.parameters.items():
            values = one.grid
            if values is None:
                found.append(mistake(f"parameters.{path}", None, "a grid needs values, or a range with points or step"))
            elif len(values) > MAX_VALUES:
                found.append(
                    mistake(f"parameters.{path}", None, f"has more than {MAX_VALUES} values; set points or step")
                )
            else:
                size *= len(values)
        if not found and size > MAX_JOBS and self.max_jobs is None:
            problem = (
                f"make {size:,} jobs; a sweep may have {MAX_JOBS:,}: use fewer values, max_jobs or method = 'random'"
            )
            found.append(mistake("parameters", None, problem))
        return found

    @property
    def repeats(self) -> int:
        """Jobs of a trial."""
        return max(1, len(self.seeds))

    @property
    def job_seeds(self) -> list[int | None]:
        """Return the seed of each job of a trial; without `seeds` there is one job, which has none."""
        return [*self.seeds] or [None]

    @property
    def most_trials(self) -> int:
        """Trials that there may be at most."""
        return self.all_trials if self.max_jobs is None else min(self.all_trials, self.max_jobs // self.repeats)

    @property
    def all_trials(self) -> int:
        """Trials that there would be without `max_jobs`."""
        if self.method != "grid":
            return self.trials or MAX_JOBS // self.repeats
        return math.prod(len(one.grid or ()) for one in self.parameters.values())

    def with_defaults(self, kind: str, policies: Collection[str] = ()) -> SweepTable:
        """Return the table with metric, goal and window for jobs of this kind, which have these policies; without goal
        where it is needed."""
        metric = self.metric or METRICS[kind]
        evaluated = "val" in metric.split("/")
        filled = self.model_copy()
        fill(
            filled,
            {
                "kind": kind,
                "metric": metric,
                "goal": self.goal or goal_of(metric, policies),
                "window": self.window or (1 if evaluated else WINDOW),
            },
        )
        return filled


def _in(value: Any, others: list[Any]) -> bool:
    """Return whether a value is among others of the same type: 1 is neither 1.0 nor true."""
    return any(type(value) is type(other) and value == other for other in others)


METRICS = {"rl": "reward/mean", "sft": "loss", "dpo": "rewards/accuracy", "eval": "val/reward/mean"}
"""By kind of job: what trials are compared by."""


def leaves_of(table: dict[str, Any], above: str) -> list[tuple[str, Any]]:
    """Return parameters by their path."""
    found: list[tuple[str, Any]] = []
    for name, value in table.items():
        path = f"{above}{name}"
        if isinstance(value, list):
            found.append((path, {"values": value}))
        elif isinstance(value, dict) and value and not LEAVES & value.keys():
            found += leaves_of(value, f"{path}.")
        else:
            found.append((path, value))
    return found
