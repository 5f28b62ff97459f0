"""Valid nouns with one field changed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import orjson
import pytest

from opentinker.shared.spec import JobSpec, parse_spec
from opentinker.shared.types.core import Ending, StopReason, Ticket, WeightVersion
from opentinker.shared.types.errors import SpecError
from opentinker.shared.types.evaluation import EvalResult
from opentinker.shared.types.telemetry import MetricPoint
from opentinker.shared.types.trajectories import Group, Span, Trajectory, Turn

V0 = WeightVersion(1, 0)

SMALLEST: dict[str, Any] = {
    "name": "j",
    "model": {"base": "m"},
    "environment": {"name": "copy_digits"},
    "train": {"steps": 1},
}
"""A spec with what it needs and nothing else."""


def trajectory_of(
    ids: Sequence[int],
    mask: Sequence[int],
    *,
    reward: float | Sequence[float] = 0.0,
    logprobs: float | Sequence[float] = -4.0,
    version: WeightVersion = V0,
    reference: float | Sequence[float] | None = None,
    teacher: float | Sequence[float] | None = None,
    numbers: Sequence[int] | None = None,
    **changes: Any,
) -> Trajectory:
    """A turn per run of ones in the mask. `reward`: of each turn, or of the last. One logprob stands for all tokens.
    `numbers`: of the turns, in the episode; else 0, 1, 2..."""

    def spread(values: float | Sequence[float]) -> bytes:
        array = np.multiply(mask, values) if isinstance(values, (int, float)) else np.asarray(values)
        return array.astype("<f4").tobytes()

    edges = np.flatnonzero(np.diff([0, *mask, 0]))
    runs = [(int(start), int(end)) for start, end in zip(edges[::2], edges[1::2], strict=True)]
    rewards = [0.0] * (len(runs) - 1) + [reward] if isinstance(reward, (int, float)) else list(reward)
    index = changes.get("index", 0)
    fields: dict[str, Any] = {
        "index": index,
        "attempt": f"a{index}",
        "ids_T": np.asarray(ids, dtype="<i4").tobytes(),
        "mask_T": np.asarray(mask, dtype="u1").tobytes(),
        "logprobs_T": spread(logprobs),
        "spans": [Span(start, end, version) for start, end in runs],
        "turns": [
            Turn(start=start, end=end, stop=StopReason.EOS, reward=float(r), number=number)
            for (start, end), r, number in zip(runs, rewards, numbers or range(len(runs)), strict=True)
        ],
        "ending": Ending.ENV_DONE,
        "reward": float(sum(rewards)),
        "ref_logprobs_T": None if reference is None else spread(reference),
        "teacher_logprobs_T": None if teacher is None else spread(teacher),
    }
    return Trajectory(**(fields | changes))


def make_trajectory(
    *,
    prompt: tuple[int, ...] = (5, 6, 7),
    output: tuple[int, ...] = (8, 9, 1),
    reward: float = 1.0,
    versions: list[WeightVersion] | None = None,
    logprob: float = -1.0,
    number: int = 0,
    **changes: Any,
) -> Trajectory:
    """One turn; the output's tokens are shared equally among the given versions."""
    versions, start = versions or [V0], len(prompt)
    cuts = [start + round(i * len(output) / len(versions)) for i in range(len(versions) + 1)]
    spans = [Span(a, b, v) for a, b, v in zip(cuts, cuts[1:], versions, strict=False)]
    mask = [0] * start + [1] * len(output)
    return trajectory_of(
        prompt + output, mask, reward=reward, logprobs=logprob, numbers=[number], **({"spans": spans} | changes)
    )


def group_of(trajectories: Sequence[Trajectory], seq: int = 0, job: str = "j-test") -> Group:
    """Samples are numbered as they come, unless they already are."""
    if len({(t.index, t.seat, t.stream) for t in trajectories}) < len(trajectories):
        trajectories = [msgspec.structs.replace(t, index=index) for index, t in enumerate(trajectories)]
    return Group(job=job, seq=seq, environment="copy_digits", worker="rollout-0", trajectories=list(trajectories))


def make_group(*, seq: int = 0, job: str = "j-test", size: int = 2, **changes: Any) -> Group:
    """`changes` go to every trajectory; rewards alternate 1, 0."""
    made = [make_trajectory(index=i, **({"reward": float(i % 2 == 0)} | changes)) for i in range(size)]
    return group_of(made, seq, job)


def version(step: int) -> WeightVersion:
    return WeightVersion(1, step)


async def not_called(*_: object) -> None:
    raise AssertionError


def make_point(job: str, step: int, values: dict[str, float], source: str = "trainer") -> MetricPoint:
    return MetricPoint(job=job, source=source, incarnation="i", seq=step, time=1.0, step=step, values=values)


def make_result(index: int = 0, version: WeightVersion = V0, **changes: Any) -> EvalResult:
    """An evaluation's episode that was played to its end."""
    fields: dict[str, Any] = {"job": "j-val", "worker": "rollout-0", "sampled_by": [version], "reward": 1.0}
    fields |= {"ending": Ending.ENV_DONE, "metrics": {"exact": 1.0}, "tokens": 3, "stops": [StopReason.EOS]}
    return EvalResult(index=index, version=version, **(fields | changes))


def make_ticket(**changes: Any) -> Ticket:
    fields: dict[str, Any] = {"job": "j-test", "seq": 0, "row": 0, "seed": 0, "group_size": 2}
    return Ticket(**(fields | changes))


def make_spec(**changes: Any) -> JobSpec:
    """A small valid job; keys of nested parts are given as `part__field`."""
    data: dict[str, Any] = {
        "name": "test",
        "model": {"base": "model"},
        "environment": {"name": "copy_digits"},
        "algorithm": {"group_size": 2, "groups_per_batch": 2},
        "rollout": {"engine": "toy", "max_tokens": 8},
        "train": {"learner": "simulated", "steps": 3},
    }
    for key, value in changes.items():
        part, _, name = key.partition("__")
        if name:
            data.setdefault(part, {})[name] = value
        else:
            data[part] = value
    return parse_spec(data)


def refusals(make: Callable[..., object], *args: Any, **fields: Any) -> dict[str, str]:
    """By field, why a spec is refused that is made of these."""
    with pytest.raises(SpecError) as refused:
        make(*args, **fields)
    return {mistake["field"]: mistake["problem"] for mistake in refused.value.mistakes}


def safetensors(tensor: bytes = b"1234", said: int | None = None) -> bytes:
    """A file of one tensor; `said`: of how many bytes, by its header."""
    header = orjson.dumps({"a": {"dtype": "U8", "shape": [4], "data_offsets": [0, said or len(tensor)]}})
    return len(header).to_bytes(8, "little") + header + tensor
