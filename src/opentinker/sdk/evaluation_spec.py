"""Specs of eval jobs made from jobs: checkpoints of those of kind rl play the same game, as trained or exchanged, and
those of other kinds an environment that is named, or that of another job.

client.submit(evaluation_of(client.job(id), swap=True))
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from opentinker.sdk.http import ApiError
from opentinker.shared.spec.algorithm import AlgorithmSpec
from opentinker.shared.types.core import part_id
from opentinker.shared.types.errors import described
from opentinker.shared.types.mistakes import is_unknown

SAMPLED = ("temperature", "top_p", "top_k", "oversample", "opening_mismatch", "transcripts", "seed")
"""Settings of [rollout] that [evaluation] replaces."""
EPISODES = ("episodes", "samples", "solved_at", "seed", "temperature", "top_p", "top_k", "max_tokens", "transcripts")
"""Settings that [validation] and [evaluation] have in common."""
SIDES = ("team", "opponents")
"""Settings of [evaluation] that say who plays against whom."""
RESOURCES = ("priority", "rollout_workers", "min_rollout_workers", "rollout_gpus")
NAME_CHARACTERS = 180


def evaluation_of(job: Mapping[str, Any], *, swap: bool = False, steps: Sequence[str | int] = ()) -> dict[str, Any]:
    """Return the spec of an eval job for a job of the API, with the episodes of its [validation] if it has some.

    `steps`: the checkpoints to evaluate, of which several make a sweep; default: the newest. With `swap`, each policy
    plays the seats of the one before it, and the first those of the last. Raises ApiError.
    """
    spec, id = job["spec"], str(job["id"])
    if job["kind"] != "rl":
        raise ApiError(
            f"job {id} is of kind {job['kind']}: an evaluation plays the environment of a job of kind rl; name "
            "another with --environment NAME, or with --like JOB a job of kind rl or eval whose episodes are played"
        )
    policies = list(spec.get("policies") or ())
    _check_pools(id, spec.get("seats") or {})
    if swap:
        _check_swap(id, spec, policies)
    own, seats = _players(id, spec.get("seats") or {}, policies, int(swap))
    model = spec["policies"][own]["model"] if own else spec["model"]
    evaluated = [f"{part_id(id, own)}@{step}" for step in steps] or [f"{part_id(id, own)}@latest"]
    what = "policies exchanged" if swap else "evaluation"
    made = {**_played(spec["name"], model, evaluated, what), **_episodes_of(job), "seats": seats}
    return {**made, "evaluation": {**made["evaluation"], **_sides_of(spec, seats)}}


def evaluation_of_several(
    jobs: Sequence[Mapping[str, Any]],
    checkpoints: Sequence[str],
    *,
    like: Mapping[str, Any] | None = None,
    environment: str = "",
) -> dict[str, Any]:
    """Return the spec of a sweep in which checkpoints of several jobs of the API play the environment of the first one,
    with the episodes of its [validation]; of a single checkpoint, the spec of an eval job.

    `checkpoints`: JOB@STEP, of these jobs. `like`: a job of kind rl or eval whose environment and episodes are played
    instead; `environment`: the name of one that is. Raises ApiError.
    """
    first, *others = jobs
    for job in jobs:
        if job["spec"].get("policies"):
            raise ApiError(f"job {job['id']} has several policies: evaluate it alone, by its id")
    bases = {str(job["id"]): job["spec"]["model"]["base"] for job in jobs}
    for job in others:
        if bases[job["id"]] != bases[first["id"]]:
            raise ApiError(
                f"job {job['id']} trains {bases[job['id']]} and job {first['id']} {bases[first['id']]}: checkpoints of "
                "different models are evaluated one by one, and compared with `opentinker compare`"
            )
    played = _played(first["spec"]["name"], first["spec"]["model"], list(dict.fromkeys(checkpoints)), "evaluation")
    if environment:
        own = _episodes_of(first) if first["kind"] == "rl" else {}
        return {**own, **played, "environment": {"name": environment}}
    if like is not None:
        _check_like(like)
    if like is None or like["kind"] == "rl":
        return {**evaluation_of(like or first), **played}
    return {**played, **_episodes_of(like), "seats": dict(like["spec"].get("seats") or {})}


def _played(name: str, model: Mapping[str, Any], checkpoints: Sequence[str], what: str) -> dict[str, Any]:
    """Return who plays: one checkpoint, or several in a sweep."""
    swept = {"sweep": {"parameters": {"start.from": list(checkpoints)}}} if len(checkpoints) > 1 else {}
    return {
        **swept,
        "name": f"{name[:NAME_CHARACTERS]}: {what}",
        "kind": "eval",
        "model": {**model, "lora": None},
        "start": {"from": checkpoints[0]},
    }


def _episodes_of(job: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is played in evaluations of a job of kind rl or eval."""
    spec = job["spec"]
    own = spec.get("evaluation" if job["kind"] == "eval" else "validation") or {}
    environment, resources = spec["environment"], spec.get("resources") or {}
    return {
        "environment": {**environment, "config": {**environment.get("config", {}), **own.get("config", {})}},
        "rollout": {name: value for name, value in spec["rollout"].items() if name not in SAMPLED},
        "evaluation": {name: own[name] for name in EPISODES if own.get(name) is not None}
        | {name: own[name] for name in SIDES if own.get(name)},
        "resources": {name: resources[name] for name in RESOURCES if name in resources},
    }


def trial_of(spec: Mapping[str, Any], groups: int) -> dict[str, Any]:
    """Return the spec of an eval job in which the base model of a spec of kind rl plays `groups` groups as in training,
    without its adapter and its policies. Raises ApiError."""
    if spec.get("kind", "rl") != "rl":
        raise ApiError(f"the job is of kind {spec['kind']}: groups are played in jobs of kind rl")
    if spec.get("policies") or spec.get("seats"):
        raise ApiError("the job has several seats: a base model alone cannot play it; submit an eval job")
    rollout = spec.get("rollout") or {}
    resources = spec.get("resources") or {}
    size = (spec.get("algorithm") or {}).get("group_size", AlgorithmSpec().group_size)
    sampled = {name: rollout[name] for name in ("temperature", "top_p", "top_k", "seed") if name in rollout}
    return {
        "name": f"{spec['name'][:NAME_CHARACTERS]}: groups of the base model",
        "kind": "eval",
        "model": {**spec["model"], "lora": None},
        "environment": spec["environment"],
        "rollout": {name: value for name, value in rollout.items() if name not in SAMPLED},
        "evaluation": {"temperature": 1.0, **sampled, "episodes": groups * size, "samples": size},
        "resources": {name: resources[name] for name in RESOURCES if name in resources},
    }


def older_server(error: ApiError) -> ApiError:
    """Return the server's refusal of such a spec, in words if it does not know SIDES. The settings are not left out
    instead: without them the server would count other players as opponents than in training."""
    unknown = [one for one in error.mistakes if is_unknown(one, [f"evaluation.{name}" for name in SIDES])]
    if not unknown:
        return error
    names = " and ".join(sorted(str(one["field"]) for one in unknown))
    others = [f"  {described(one)}" for one in error.mistakes if one not in unknown]
    what = (
        f"the server is of an earlier release, which does not know {names}: it would take teammates, or judges, for "
        "opponents. Upgrade the server; or evaluate with the `opentinker` of its release, which does just that"
    )
    return ApiError("\n".join([what, *others]), error.status)


def _check_like(job: Mapping[str, Any]) -> None:
    id, spec = str(job["id"]), job["spec"]
    if job["kind"] not in ("rl", "eval"):
        raise ApiError(f"job {id} is of kind {job['kind']} and plays no environment: --like takes kinds rl and eval")
    if spec.get("policies"):
        raise ApiError(f"job {id} has several policies: a single model cannot play its seats; submit an eval job")
    _check_pools(id, spec.get("seats") or {})


def _check_pools(id: str, seats: Mapping[str, Mapping[str, Any]]) -> None:
    if pooled := [seat for seat, player in seats.items() if player.get("pool")]:
        raise ApiError(
            f"past versions play {', '.join(pooled)} in job {id}, and end with it; submit an eval job in which a "
            f"checkpoint plays, e.g. seats.{pooled[0]} = {{ frozen = '{id}@STEP' }} (docs/policies.md)"
        )


def _check_swap(id: str, spec: Mapping[str, Any], policies: Sequence[str]) -> None:
    if len(policies) < 2:
        raise ApiError(f"job {id} has one policy: there is no other to exchange it with")
    if (spec.get("match") or {}).get("rotate"):
        raise ApiError(f"the policies of job {id} play every seat already (match.rotate): leave out the exchange")


def _players(
    id: str, seats: Mapping[str, Mapping[str, Any]], policies: Sequence[str], by: int
) -> tuple[str, dict[str, Any]]:
    """Return the policy that is evaluated, which plays the seats without an entry, and the entries of the others: the
    first policy for which leaving out its entries gives no seat to a pattern of another. Raises ApiError."""
    if not policies:
        return "", {seat: dict(player) for seat, player in seats.items()}
    player_of = {name: policies[(place + by) % len(policies)] for place, name in enumerate(policies)}
    for own in policies:
        left = [seat for seat, player in seats.items() if player_of.get(player.get("policy") or "") == own]
        others = [seat for seat in seats if seat not in left]
        if left and not any(_would_take(other, seat, list(seats)) for seat in left for other in others):
            return own, {
                seat: {"frozen": f"{part_id(id, player_of[seats[seat]['policy']])}@latest"}
                if seats[seat].get("policy")
                else dict(seats[seat])
                for seat in others
            }
    raise ApiError(
        f"the patterns in [seats] of job {id} ({', '.join(seats)}) overlap, so no policy's entries can be left out; "
        "submit an eval job that names each seat (docs/policies.md)"
    )


def _sides_of(spec: Mapping[str, Any], entries: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings by which the evaluated policy has the opponents that it has in training. `entries`: of the
    others; [seats] of the job has that policy's seats too, or those of whom it is exchanged with."""
    seats = spec.get("seats") or {}
    left = [seat for seat in seats if seat not in entries]
    trained = spec["policies"][seats[left[0]]["policy"]] if left else spec
    team = (trained.get("algorithm") or {}).get("team")
    learners = [seat for seat in entries if seats[seat].get("policy")]
    is_plain = len(learners) == len(entries) and len(left) == 1 and not _is_pattern(left[0])
    return ({"team": team} if team else {}) | ({"opponents": learners} if learners and not is_plain else {})


def _would_take(other: str, seat: str, order: Sequence[str]) -> bool:
    """Return whether the entry `other` would give seats of the entry `seat` to its player if that one were left out."""
    if not _is_pattern(other):
        return False
    if not _is_pattern(seat):
        return fnmatchcase(seat, other)
    begins, ends = _literal(seat), _literal(other)
    may_overlap = begins.startswith(ends) or ends.startswith(begins)
    return may_overlap and order.index(other) > order.index(seat)


def _is_pattern(seat: str) -> bool:
    return any(sign in seat for sign in "*?[")


def _literal(pattern: str) -> str:
    """Return how every seat that matches begins."""
    return pattern[: min(pattern.find(sign) for sign in "*?[" if sign in pattern)]
