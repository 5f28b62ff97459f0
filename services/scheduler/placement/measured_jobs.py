"""How long steps of earlier jobs took, and what the number of workers and an adapter change of it, by jobs that differ
in nothing else."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import permutations
from statistics import median
from typing import Any, NamedTuple

from opentinker.shared.types.core import JobRecord
from opentinker.shared.types.errors import plural

MOST = 9
"""Similar jobs that an estimate rests on: the newest."""
FEWEST_STEPS = 3
"""Steps that a job must have done: starting up is more than the first ones."""
Subject = tuple[Any, ...]
"""Settings in which jobs must agree to be compared."""
WORDS = {"rollout_workers": "rollout worker", "ranks": "trainer rank"}


class Setup(NamedTuple):
    """What of a job changes how long a step takes, and whose effect other jobs tell."""

    rollout_workers: int
    """0 for a job without."""
    ranks: int
    """0 for a job without a trainer."""
    lora: bool
    gpus: int
    """That all its workers ask for. Without asking for any, they may have some."""

    @property
    def workers(self) -> int:
        return self.rollout_workers + self.ranks

    def more_gpus(self, other: Setup) -> float:
        """Return the GPUs of this setup over those of the other."""
        return self.gpus / other.gpus if other.gpus else self.workers / other.workers


class Measured(NamedTuple):
    """An earlier job; all times are for a unit of the size of its steps."""

    job: JobRecord
    subject: Subject
    setup: Setup
    seconds: float
    worker_s: float
    gpu_s: float


def subject_of(spec: Mapping[str, Any]) -> Subject:
    environment = (spec.get("environment") or {}).get("name", "")
    return (spec["model"]["base"], environment.partition("@")[0], *machinery_of(spec))


def machinery_of(spec: Mapping[str, Any]) -> Subject:
    """Return what round figures of a spec go by, beside the sizes of its model and its steps."""
    trainer = (spec.get("train") or {}).get("learner")
    engine = (spec.get("rollout") or {}).get("engine")
    uses_gpus = bool(spec["resources"].get("trainer_gpus")), spec["resources"].get("rollout_gpus") or 0
    return (spec["kind"], trainer, engine, *uses_gpus, bool(spec.get("policies")))


def setup_of(spec: Mapping[str, Any]) -> Setup:
    resources = spec["resources"]
    samplers = resources.get("rollout_workers") or 1 if spec["kind"] in ("rl", "eval") else 0
    ranks = 0 if spec["kind"] == "eval" else resources.get("trainer_ranks") or 1
    gpus = samplers * (resources.get("rollout_gpus") or 0) + (resources.get("trainer_gpus") or 0) * bool(ranks)
    return Setup(samplers, ranks, bool(spec["model"].get("lora")), gpus)


def step_size(spec: Mapping[str, Any]) -> float:
    """Return the most tokens, or the rows, of a step, or the most tokens of an episode of an eval job."""
    if spec["kind"] == "eval":
        return float(spec["rollout"]["max_tokens"])
    if spec["kind"] != "rl":
        return float(spec["data"]["batch_size"])
    algorithm = spec["algorithm"]
    return float(algorithm["group_size"] * algorithm["groups_per_batch"] * spec["rollout"]["max_tokens"])


def of_setup(measured: Sequence[Measured], subject: Subject, wanted: Setup) -> tuple[list[Measured], float, str] | None:
    """Return jobs of the subject whose setup is nearest to the wanted one, by how much longer their steps would take
    with it, and a text that says so; None without any. A difference that was not measured changes nothing, and is
    named."""
    setups = dict.fromkeys(one.setup for one in measured if one.subject == subject)
    if not setups:
        return None
    known = {setup: _effects(measured, setup, wanted) for setup in setups}
    nearest = min(setups, key=lambda setup: (sum(one is None for one in known[setup].values()), len(known[setup])))
    effects = known[nearest]
    factor = math.prod(effect for effect in effects.values() if effect is not None)
    said = "".join(f", {_said(name, nearest, wanted, effect)}" for name, effect in effects.items())
    like = [one for one in measured if one.subject == subject and one.setup == nearest]
    return like[:MOST], factor, said


def _effects(measured: Sequence[Measured], have: Setup, wanted: Setup) -> dict[str, float | None]:
    """Return by property that differs: the factor by which a step takes longer; None if no jobs tell."""
    names = [name for name in ("rollout_workers", "ranks", "lora") if getattr(have, name) != getattr(wanted, name)]
    return {name: _effect(measured, name, getattr(have, name), getattr(wanted, name)) for name in names}


def _effect(measured: Sequence[Measured], name: str, have: int, wanted: int) -> float | None:
    """Return the median over pairs of setups of one subject that differ in this property alone. Between numbers of
    workers a step's time follows a power of the number: between no effect and twice as many in half of the time."""
    groups: dict[tuple[Any, ...], dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for one in measured:
        others = (value for other, value in one.setup._asdict().items() if other not in (name, "gpus"))
        groups[one.subject, *others][getattr(one.setup, name)].append(one.seconds)
    found = []
    for group in groups.values():
        times = {value: median(seconds) for value, seconds in group.items()}
        for (first, before), (second, after) in permutations(times.items(), 2):
            ratio = after / before
            if name == "lora" and (first, second) == (have, wanted):
                found.append(ratio)
            elif name != "lora" and first < second:
                power = math.log(ratio) / math.log(second / first)
                found.append((wanted / have) ** min(0.0, max(-1.0, power)))
    return median(found) if found else None


def _said(name: str, have: Setup, wanted: Setup, effect: float | None) -> str:
    if name == "lora":
        differs = "LoRA" if wanted.lora else "all weights"
        other = "all weights" if wanted.lora else "LoRA"
    else:
        differs, other = plural(getattr(wanted, name), WORDS[name]), str(getattr(have, name))
    if effect is None:
        return f"not scaled for {differs} instead of {other}: no job has measured that"
    return f"times {effect:.3g} for {differs} instead of {other}"
