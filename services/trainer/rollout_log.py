"""Logs training episodes as text, and the distributions of each step's values.

{data_dir}/jobs/{job}/rollouts/step-000050.jsonl   the kept episodes of the groups that step 50 trained on, one a line
{data_dir}/jobs/{job}/distributions.jsonl          one line per step, also of steps rolled back later
{data_dir}/jobs/{job}/rows.jsonl                   the rows of the data set that were played, see shared/data/row_log.py

The newest steps are kept and, further back, one in 2^k. A disk error is reported once, and the job continues.
"""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Awaitable, Callable, Sequence
from itertools import repeat
from pathlib import Path
from typing import Any

import msgspec
import orjson
import structlog

from opentinker.services.trainer.algorithm.advantages import F64
from opentinker.services.trainer.batch.distributions import Histogram
from opentinker.shared.data.row_log import RowLog, RowPlays, RowStep, by_row
from opentinker.shared.data.step_log import StepLog
from opentinker.shared.types.core import WeightVersion
from opentinker.shared.types.manifest import name_of
from opentinker.shared.types.telemetry import KeptEpisode
from opentinker.shared.types.token_records import (
    as_base64,
    as_said,
    images_within,
    order_of_play,
    sampled_by,
    tokens_of,
)
from opentinker.shared.types.trajectories import Group, Trajectory, Turn, totals

log = structlog.get_logger()

NEWEST = 50
"""Number of newest steps whose episodes are all kept."""
OLDER = 50
"""Approximate number of kept steps before those."""
_FILE = re.compile(r"step-(\d+)\.jsonl")
View = tuple[Trajectory, F64 | None]
EmitEvent = Callable[[str, dict[str, object]], Awaitable[None]]


class RolloutLog:
    """`home` is the job's directory, `kept` the number of episodes kept per step, `event` writes a job event."""

    def __init__(self, home: Path, kept: int, event: EmitEvent) -> None:
        self._home, self._kept, self._event = home, kept, event
        self._log, self._rows = StepLog(home / "distributions.jsonl"), RowLog(home)
        self._refused = False

    async def step(
        self,
        version: WeightVersion,
        at: float,
        batch: Sequence[Group],
        spread: dict[str, Histogram],
        credited: Sequence[F64] | None = None,
        plays: Sequence[RowPlays] = (),
    ) -> list[KeptEpisode]:
        """Log an optimizer step that produced `version`. `credited`: per trajectory of the batch, the advantage of each
        sampled token. `plays`: of its groups and of those discarded before it, by row. Returns the kept episodes."""
        line = {"epoch": version.epoch, "step": version.step, "time": at, **spread}
        advantages = iter(credited) if credited is not None else repeat(None)
        of_groups = [(group, [next(advantages) for _ in group.trajectories]) for group in batch]
        found = [episode for group, own in of_groups for episode in episodes_of(group, own, self._kept)]
        episodes = found[: self._kept]
        shown = {one.get("row") for one in episodes}
        rows = [msgspec.structs.replace(play, kept=row in shown) for row, play in by_row(plays).items()]
        try:
            await asyncio.to_thread(self._write, version, line, episodes, rows)
            self._refused = False
        except OSError as error:
            if not self._refused:
                log.error("rollouts_log_failed", error=str(error))
                await self._event("rollouts_log_failed", {"step": version.step, "error": str(error)})
            self._refused = True
            return []
        return [KeptEpisode(**{name: one[name] for name in KeptEpisode.__struct_fields__}) for one in episodes]

    def _write(
        self, version: WeightVersion, line: dict[str, Any], episodes: list[dict[str, Any]], rows: list[RowPlays]
    ) -> None:
        step = version.step
        self._log.add(line)
        self._rows.add(RowStep(epoch=version.epoch, step=step, rows=rows))
        if not episodes:
            return
        path = self._home / "rollouts" / f"{name_of(step)}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(".tmp")
        temporary.write_bytes(b"".join(orjson.dumps({"step": step, **one}) + b"\n" for one in episodes))
        temporary.rename(path)
        found = {int(match[1]): file for file in path.parent.iterdir() if (match := _FILE.fullmatch(file.name))}
        for gone in expired_steps(sorted(found)):
            found[gone].unlink(missing_ok=True)


def expired_steps(steps: Sequence[int]) -> list[int]:
    """Return which of these ordered steps have expired. Of all but the newest, every 2^k-th step stays, where k grows
    with the job; a step that has expired is never needed again."""
    older = steps[:-NEWEST]
    if not older:
        return []
    every = 2 ** max(0, math.ceil(math.log2(max(1, older[-1] / OLDER))))
    return [step for step in older if step % every]


def episodes_of(group: Group, credited: Sequence[F64 | None], kept: int) -> list[dict[str, Any]]:
    """Return the samples whose transcript came with the group, each with the seats of all policies. `credited`: per
    trajectory, see `RolloutLog.step`; `kept`: episodes of a step."""
    samples: dict[int, list[View]] = {}
    for trajectory, advantages in zip(group.trajectories, credited, strict=True):
        if trajectory.transcript is not None:
            samples.setdefault(trajectory.index, []).append((trajectory, advantages))
    others: dict[int, list[View]] = {}
    for trajectory in group.others:
        others.setdefault(trajectory.index, []).append((trajectory, None))
    return [_episode(group, index, views, others.get(index, []), kept) for index, views in samples.items()]


def _episode(group: Group, index: int, own: list[View], others: list[View], kept: int) -> dict[str, Any]:
    """Return an episode with the numbers of the policy that trained on it and the messages of all seats."""
    views = [view for view, _ in own]
    rewards, components = totals(views)
    pairs = [*own, *others]
    messages = [message for view, _ in pairs for message in view.transcript or []]
    return {
        "group": group.seq,
        "sample": index,
        "environment": group.environment,
        **({} if (row := views[0].row) is None else {"row": row}),
        "worker": group.worker,
        "versions": [str(v) for v in sorted({span.version for view in views for span in view.spans})],
        "reward": sum(rewards.values()) / len(rewards),
        "rewards": rewards,
        "group_rewards": group.rewards,
        "components": components,
        "scores": views[0].scores,
        "metrics": views[0].metrics,
        "ending": views[0].ending,
        "stops": [turn.stop for view in views for turn in view.turns],
        "tokens": sum(int(view.mask.sum()) for view in views),
        "turns": sum(len(view.turns) for view in views),
        "seconds": views[0].seconds,
        "order": order_of_play([(view.turns, len(view.transcript or [])) for view, _ in pairs]),
        "views": [_view(view, advantages) for view, advantages in pairs],
        **as_base64(images_within(messages, group.images, kept)),
    }


def _view(view: Trajectory, advantages: F64 | None) -> dict[str, Any]:
    messages = [as_said(said) for said in view.transcript or []]
    for turn in view.turns:
        if turn.message is not None and turn.message < len(messages):
            messages[turn.message] |= _words_of(view, turn)
    return {
        "seat": view.seat,
        "stream": view.stream,
        "policy": view.policy,
        "reward": view.reward,
        "messages": messages,
        "tokens": None if view.pieces is None else msgspec.to_builtins(tokens_of(view, view.pieces, advantages)),
    }


def _words_of(view: Trajectory, turn: Turn) -> dict[str, Any]:
    """Return what is known of the words of a turn: which one of the episode it is, its tokens, who sampled them."""
    return {
        "turn": turn.number,
        "tokens": [turn.start, turn.end],
        "versions": [str(version) for version in sampled_by(turn, view.spans)],
        "reward": turn.reward,
        **({"untrainable": turn.untrainable} if turn.untrainable else {}),
    }
