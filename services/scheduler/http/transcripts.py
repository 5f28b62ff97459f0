"""Kept episodes, and how steps were spread, as the API shows them. Read only; the trainer writes them.

    transcripts/step-NNNNNN.jsonl   of evaluations
    rollouts/step-NNNNNN.jsonl      of training
    distributions.jsonl             a line per step

All functions block: call them in a thread.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import orjson

from opentinker.shared.evaluation.outcomes import GAMES, OUTCOME_NAMES, outcomes_of
from opentinker.shared.spec.matches.seats import PLAYERS
from opentinker.shared.types.errors import NotFound
from opentinker.shared.types.manifest import name_of, short_list

_FILE = re.compile(r"^step-(\d{1,12})\.jsonl$")


def read(home: Path, step: int | None, kind: str = "transcripts") -> dict[str, Any]:
    """The steps that have some of this kind, and those of one (None: the newest). Raises NotFound."""
    folder = home / kind
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    steps = sorted(int(match[1]) for name in names if (match := _FILE.match(name)))
    if step is None and not steps:
        return {"steps": [], "step": None, kind: []}
    shown = steps[-1] if step is None else step
    try:
        lines = (folder / f"{name_of(shown)}.jsonl").read_bytes().splitlines()
    except FileNotFoundError:
        have = short_list(steps) or "none yet"
        raise NotFound(f"no {kind} of step {shown}; there are: {have}") from None
    return {"steps": steps, "step": shown, kind: list(_whole(lines))}


def _whole(lines: list[bytes]) -> Iterator[Any]:
    """Without those that a kill or a power cut has torn."""
    for line in lines:
        with contextlib.suppress(orjson.JSONDecodeError):
            yield orjson.loads(line)


def by_outcome(
    found: dict[str, Any], spec: Mapping[str, Any], policy: str, outcome: str, opponent: str
) -> dict[str, Any]:
    """Return the transcripts that `read` has found, each with its outcome and opponent: those with this `outcome` (or
    `all`) and this opponent (empty: any); and the number of each outcome, without the filter. `policy`: the evaluated
    one, of a job with several."""
    exam = spec.get("evaluation") or spec.get("validation") or {}
    solved_at = exam.get("solved_at", 1.0)
    _add_states(found["transcripts"], exam.get("episodes", 0), exam.get("samples", 1))
    others = _other_players(spec.get("seats") or {}, policy)
    counts = dict.fromkeys(OUTCOME_NAMES[:2], 0)
    opponents: dict[str, dict[str, int]] = {}
    kept = []
    for one in found["transcripts"]:
        ended = outcomes_of(one["reward"], one.get("outcome"), solved_at)
        one["solved"] = ended[0] == OUTCOME_NAMES[0]
        if "outcome" in one:
            if others:
                one.setdefault("opponent", others)
            games = opponents.setdefault(one.get("opponent", ""), dict.fromkeys(GAMES.values(), 0))
            games[ended[1]] += 1
            counts = {**counts, **{name: counts.get(name, 0) for name in GAMES.values()}}
        for name in ended:
            counts[name] += 1
        if outcome in ("all", *ended) and opponent in ("", one.get("opponent")):
            kept.append(one)
    return {**found, "outcomes": counts, "opponents": opponents, "transcripts": kept}


def _add_states(transcripts: list[dict[str, Any]], episodes: int, samples: int) -> None:
    """Add the start state and the sample to episodes of earlier releases, which have them in the order of all episodes
    alone: opponent by opponent. `episodes`, `samples`: of an evaluation against one."""
    for one in transcripts:
        if "opponent" in one and "state" not in one and episodes:
            one["state"], one["sample"] = divmod(one["index"] % (episodes * samples), samples)


def _other_players(seats: Mapping[str, Mapping[str, Any]], policy: str) -> str:
    """Return who plays the seats that the evaluated policy does not: policies, bots, checkpoints, models, pools."""
    names = {
        str(player["model"] if player.get("url") else next(filter(None, map(player.get, PLAYERS)), ""))
        for player in seats.values()
    }
    return ", ".join(sorted(names - {"", policy}))


def distributions(home: Path, step: int | None, after: int, limit: int) -> list[dict[str, Any]]:
    """Lines of one step (None: of the steps above `after`, the newest `limit`), oldest first. Of a step that was
    trained more than once the last one counts."""
    try:
        lines = (home / "distributions.jsonl").read_bytes().splitlines()
    except FileNotFoundError:
        return []
    found: dict[int, dict[str, Any]] = {}
    for line in _whole(lines[::-1]):
        if line["step"] > after and step in (None, line["step"]):
            found.setdefault(line["step"], line)
        if len(found) == (limit if step is None else 1):
            break
    return [found[number] for number in sorted(found)]
