"""Records of a job's evaluations: val/* metrics, an event, a line of validation.jsonl, transcripts.

{data_dir}/jobs/{job}/validation.jsonl                    one line per evaluation, also of steps rolled back later
{data_dir}/jobs/{job}/transcripts/step-000050.jsonl       the kept episodes of the evaluation of step 50, one a line
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import msgspec
import orjson
import structlog

from opentinker.shared.data.step_log import StepLog, lineage, metric_prefix, read_lineage
from opentinker.shared.durable_files import make_directories, replace_durably
from opentinker.shared.evaluation.job_ratings import Counts, JobRatings, Line, version_name
from opentinker.shared.evaluation.validation_metrics import OUTCOMES, validation_metrics
from opentinker.shared.messaging.bus import Bus
from opentinker.shared.runtime.telemetry import MetricSource
from opentinker.shared.spec import EvaluationSpec
from opentinker.shared.types.core import WeightVersion, part_id
from opentinker.shared.types.evaluation import EvalEpisode, EvalResult, MessageOrigin, exam_seed
from opentinker.shared.types.manifest import name_of
from opentinker.shared.types.match_results import FILE as MATCHES
from opentinker.shared.types.match_results import MatchResult
from opentinker.shared.types.metric_names import opponent_of
from opentinker.shared.types.token_records import as_base64, as_said

log = structlog.get_logger()

SAID = ("val/episodes", "val/reward/mean", "val/exact", "val/loss", "val/failed", "val/missing", "val/seconds")
"""Metrics that the event contains, if present and not 0; win rates and the rating are there in any case."""
Tell = Callable[[str, dict[str, object]], Awaitable[None]]


def exam_at(index: int, job: str, version: WeightVersion, plan: EvaluationSpec) -> EvalEpisode:
    """Return the episode with this number."""
    state = index % plan.total // plan.samples
    return EvalEpisode(job=job, version=version, index=index, seed=exam_seed(plan.seed, state))


def metrics_of(results: Sequence[EvalResult], plan: EvaluationSpec, opponents: Sequence[str] = ()) -> dict[str, float]:
    """As `validation_metrics` says."""
    return validation_metrics(results, plan.total, samples=plan.samples, solved_at=plan.solved_at, opponents=opponents)


def transcript_of(result: EvalResult, plan: EvaluationSpec, opponents: Sequence[str] = ()) -> dict[str, Any]:
    """An episode as a line of transcripts."""
    opponent, place = divmod(result.index, plan.total)
    state, sample = divmod(place, plan.samples)
    return {
        "index": result.index,
        **({"opponent": opponents[opponent]} if opponents else {}),
        **({"state": state, "sample": sample} if plan.samples > 1 or opponents else {}),
        **({} if result.row is None else {"row": result.row}),
        "reward": result.reward,
        **({"seats": result.seats} if len(result.seats) > 1 else {}),
        **({"outcome": result.outcome} if result.outcome is not None else {}),
        "metrics": result.metrics,
        "ending": result.ending,
        "messages": _messages_of(result),
        "views": msgspec.to_builtins(result.views),
        **as_base64(result.images),
    }


def _messages_of(result: EvalResult) -> list[dict[str, Any]]:
    """Return the messages as text, with the seat of each where several play."""
    said = [as_said(message) for message in result.messages]
    return [one | _of_seat(origin) for one, origin in zip_longest(said, result.origins)]


def _of_seat(origin: MessageOrigin | None) -> dict[str, Any]:
    if origin is None:
        return {}
    seat = {"seat": origin.seat, "stream": origin.stream, "policy": origin.policy}
    if origin.turn is None:
        return seat
    return seat | {"turn": origin.turn, "tokens": origin.tokens, "versions": list(map(str, origin.versions))}


Players = Mapping[str, str | Mapping[str, Counts]]
"""Opponents of an evaluation as players of `JobRatings`, by name in metrics. Of a policy, the games won, drawn and lost
against each of its versions."""


def _games_of(values: Mapping[str, Any], players: Players) -> dict[str, Counts]:
    """Return the games won, drawn and lost in an evaluation, by player."""
    found: dict[str, Counts] = {}
    for name, player in players.items():
        if not isinstance(player, str):
            found |= {version: (won, drawn, lost) for version, (won, drawn, lost) in player.items()}
            continue
        won, drawn, lost = (round(values.get(f"val/{kind}/{name}", 0.0)) for kind in OUTCOMES)
        found[player] = (won, drawn, lost)
    return {player: counts for player, counts in found.items() if any(counts)}


class Evaluations:
    """`home` is the directory of the job, or of its policy; `event` appends to its event log; `guard` raises Fenced if
    another epoch owns the job: then nothing is written."""

    def __init__(
        self,
        bus: Bus,
        job: str,
        home: Path,
        event: Tell,
        guard: Callable[[], Awaitable[None]],
        policy: str = "",
        ratings: JobRatings | None = None,
    ) -> None:
        """`ratings`: of all policies of the job."""
        self._ratings = ratings or JobRatings()
        self._home, self._event, self._guard, self._policy = home, event, guard, policy
        self._source = MetricSource(bus, job, part_id("validation", policy), prefix=metric_prefix(policy))
        self._log = StepLog(home / "validation.jsonl")
        self.steps: set[int] = set()
        """Evaluated steps of this lineage."""
        self.last: dict[str, float] = {}
        """Metrics of the newest complete evaluation."""

    def restore(self, resumed: Mapping[int, int], step: int) -> None:
        """Blocking. What was evaluated on the way to the checkpoint of `step`: these very weights."""
        lines = lineage(self._home / "validation.jsonl", resumed, step)
        self.steps = {line["step"] for line in lines}
        complete = [line for line in lines if not line.get("val/missing")]
        self._ratings.restore(self._matches_until(resumed, step))
        self._ratings.restore([self._results_in(line) for line in complete])
        self.last = {name: value for name, value in complete[-1].items() if name.startswith("val/")} if complete else {}

    def _matches_until(self, resumed: Mapping[int, int], step: int) -> Iterator[Line]:
        """Yield the results of the matches of each step. Blocking."""
        for line in read_lineage(self._home / MATCHES, resumed, step):
            matches = msgspec.convert(line["matches"], list[MatchResult])
            yield line["time"], "", self._ratings.count_matches(self._policy, matches)

    def _results_in(self, line: Mapping[str, Any]) -> Line:
        """Return the results of an evaluation."""
        player = version_name(self._policy, WeightVersion.parse(line["version"]))
        games = _games_of(line, line.get("players", {}))
        return line["time"], player, {(player, other): counts for other, counts in games.items()}

    async def rate(
        self, version: WeightVersion, values: dict[str, float], players: Players, anchors: Sequence[str]
    ) -> dict[str, float]:
        """Return val/rating of a version and its standard error, from all results of the job up to this evaluation;
        nothing without games that connect it with the first of `anchors`, whose rating is 0. `players`: those that it
        has played against."""
        games = _games_of(values, players)
        anchor = players[anchors[0]] if anchors else None
        if not isinstance(anchor, str) or not games:
            return {}
        player, ratings = version_name(self._policy, version), self._ratings.copy()
        found = await asyncio.to_thread(ratings.rate, player, games, anchor)
        return {} if found is None else {"val/rating": found.elo, "val/rating/error": found.error}

    async def add(
        self,
        version: WeightVersion,
        values: dict[str, float],
        target: Mapping[str, float],
        players: Players | None = None,
    ) -> None:
        """Record a finished evaluation. An incomplete one is marked so and is ignored by targets. Raises Fenced.
        `players`: see `rate`."""
        await self._guard()
        self.steps.add(version.step)
        complete = not values.get("val/missing")
        if complete:
            self.last = values
            if games := _games_of(values, players or {}):
                self._ratings.add_evaluation(version_name(self._policy, version), games)
        point = await self._source.emit(version.step, values)
        line = {"epoch": version.epoch, "step": version.step, "version": str(version), "time": point.time}
        line |= {"players": dict(players)} if players else {}
        own = {name.removeprefix(metric_prefix(self._policy)): value for name, value in point.values.items()}
        try:
            await asyncio.to_thread(self._append, {**line, **own})
        except OSError as error:
            await self._refused(version.step, error)
        of_games = [name for name in values if name == "val/rating" or opponent_of(name) is not None]
        told = [*(name for name in SAID if values.get(name)), *of_games]
        said = {name.removeprefix("val/"): round(values[name], 4) for name in told}
        await self._event("validation" if complete else "validation_incomplete", {"step": version.step, **said})
        absent = sorted(name for name in target if name.startswith("val/") and name not in values)
        if complete and absent:
            await self._event("target_metric_absent", {"metrics": absent, "there_are": sorted(values)})

    async def keep(self, step: int, transcripts: list[dict[str, Any]]) -> None:
        """The newest evaluation of a step replaces an older one's. Raises Fenced."""
        await self._guard()
        try:
            await asyncio.to_thread(self._write, step, transcripts)
        except OSError as error:
            await self._refused(step, error)

    def _append(self, line: dict[str, Any]) -> None:
        """Durably: these weights may be gone after a power cut, so the evaluation could not be repeated."""
        self._log.add(line)
        self._log.sync()

    def _write(self, step: int, transcripts: list[dict[str, Any]]) -> None:
        path = self._home / "transcripts" / f"{name_of(step)}.jsonl"
        make_directories(path.parent)
        replace_durably(path, b"".join(orjson.dumps(one) + b"\n" for one in transcripts))

    async def _refused(self, step: int, error: OSError) -> None:
        """Log that a line could not be written: the job continues, and the line is written with the next one."""
        log.error("validation_log_failed", error=str(error))
        await self._event("validation_log_failed", {"step": step, "error": str(error)})

    def close(self) -> None:
        self._source.close()
