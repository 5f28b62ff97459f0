"""Eval jobs made from jobs of kind rl: who plays what, as trained and exchanged."""

from __future__ import annotations

from typing import Any

import pytest

from opentinker.sdk.evaluation_spec import evaluation_of, evaluation_of_several
from opentinker.sdk.http import ApiError
from opentinker.shared.spec import parse_spec
from tests.support.factories import make_spec

ID = "j-0123456789"


def job(seats: dict[str, Any], policies: tuple[str, ...] = ("a", "b"), **changes: Any) -> dict[str, Any]:
    own: dict[str, Any] = {name: {"model": {"base": f"model of {name}", "lora": {"rank": 4}}} for name in policies}
    spec = make_spec(policies=own, seats=seats, train={"steps": 3}, **changes).model_dump(mode="json")
    return {"id": ID, "kind": "rl", "spec": spec}


def players(made: dict[str, Any]) -> dict[str, str | None]:
    """The policy of each entry, and under the empty name the one that plays the rest."""
    spec = parse_spec(made)
    assert spec.start is not None
    entries = {seat: player.frozen or player.bot for seat, player in spec.seats.items()}
    named = {seat: (name or "").removeprefix(f"{ID}~").removesuffix("@latest") for seat, name in entries.items()}
    return {"": spec.start.checkpoint.removeprefix(f"{ID}~").removesuffix("@latest"), **named}


def test_policies_play_as_trained_or_each_the_seats_of_the_one_before_it() -> None:
    two = job({"x": "a", "y": "b"})
    assert players(evaluation_of(two)) == {"": "a", "y": "b"}
    assert "sweep" not in evaluation_of(two, steps=["7"])
    several = evaluation_of(two, steps=[7, "latest"])
    (evaluated,) = several["sweep"]["parameters"].values()
    assert several["start"]["from"] == evaluated[0] and [one.rpartition("@")[2] for one in evaluated] == ["7", "latest"]
    made = evaluation_of(two, swap=True)
    assert players(made) == {"": "a", "x": "b"}, "a plays y"
    assert made["model"]["base"] == "model of a" and made["model"]["lora"] is None, "the checkpoint says it"
    three = job({"x": "a", "y": "b", "z": "c", "w": {"bot": "random"}}, ("a", "b", "c"))
    assert players(evaluation_of(three, swap=True)) == {"": "a", "x": "b", "y": "c", "w": "random"}, "a plays z"


def test_entries_are_left_out_only_where_no_pattern_would_take_their_seats() -> None:
    pattern = job({"player_0": "a", "player_*": "b"})
    assert players(evaluation_of(pattern)) == {"": "b", "player_0": "a"}
    assert players(evaluation_of(pattern, swap=True)) == {"": "a", "player_0": "b"}
    apart = job({"red_*": "a", "blue_*": "b"})
    assert players(evaluation_of(apart)) == {"": "a", "blue_*": "b"}
    several = job({"p_0": "a", "q_0": "b", "p_*": "b", "q_*": "a"})
    with pytest.raises(ApiError, match="overlap"):
        evaluation_of(several)


def sides(made: dict[str, Any]) -> tuple[dict[str, list[str]] | None, list[str]]:
    evaluation = parse_spec(made).evaluation
    return evaluation.team, evaluation.opponents


def test_opponents_are_those_of_training() -> None:
    assert sides(evaluation_of(job({"x": "a", "y": "b"}))) == (None, []), "b is one without a word"
    judged = job({"x": "a", "y": "b", "referee": {"bot": "random"}})
    for swap in (False, True):
        seat = "x" if swap else "y"
        assert sides(evaluation_of(judged, swap=swap)) == (None, [seat]), "the referee is neutral"
    assert sides(evaluation_of(job({"x": "a", "z": "a", "y": "b"}))) == (None, ["y"]), "a plays both seats"
    assert sides(evaluation_of(job({"x_*": "a", "y": "b"}))) == (None, ["y"])
    team = {"us": ["x", "y"]}
    together = job({"x": "a", "y": "b", "z": {"bot": "random"}}, algorithm={"team": team})
    made = evaluation_of(together)
    assert sides(made) == (team, ["y"])
    exam = {"id": "j-bbbbbbbbbb", "kind": "eval", "spec": parse_spec(made).model_dump(mode="json")}
    tuned = make_spec(train={"steps": 3}).model_dump(mode="json")
    single = {"id": "j-aaaaaaaaaa", "kind": "rl", "spec": tuned}
    assert sides(evaluation_of_several([single], ["j-aaaaaaaaaa@3"], like=exam)) == (team, ["y"])
    alone = make_spec(seats={"y": {"bot": "random"}}, train={"steps": 3}, algorithm={"team": team})
    like = {"id": ID, "kind": "rl", "spec": alone.model_dump(mode="json")}
    for one in (evaluation_of(like), evaluation_of_several([single], ["j-aaaaaaaaaa@3"], like=like)):
        assert sides(one) == (team, [])


def test_its_episodes_are_those_of_the_job_s_evaluations() -> None:
    validation = {"every": 5, "episodes": 7, "seed": 3, "config": {"digits": 2}}
    environment = {"name": "copy_digits", "config": {"digits": 3}}
    rollout = {"engine": "toy", "max_tokens": 8, "seed": 4, "transcripts": 2}
    spec = make_spec(validation=validation, environment=environment, rollout=rollout, seats={"o": {"bot": "random"}})
    made = parse_spec(evaluation_of({"id": ID, "kind": "rl", "spec": spec.model_dump(mode="json")}))
    assert (made.evaluation.episodes, made.evaluation.seed, made.environment.config) == (7, 3, {"digits": 2})
    assert (made.rollout.max_tokens, made.rollout.seed, made.start and made.start.checkpoint) == (
        8,
        None,
        f"{ID}@latest",
    )
    assert made.seats["o"].bot == "random"


def test_what_cannot_be_exchanged_is_said() -> None:
    with pytest.raises(ApiError, match="one policy"):
        evaluation_of({"id": ID, "kind": "rl", "spec": make_spec().model_dump(mode="json")}, swap=True)
    rotating = job({"x": "a", "y": "b"}, match={"rotate": True}, algorithm={"group_size": 4, "groups_per_batch": 2})
    with pytest.raises(ApiError, match="every seat already"):
        evaluation_of(rotating, swap=True)
    with pytest.raises(ApiError, match=r"of kind sft: .* --environment NAME, or with --like JOB"):
        evaluation_of({"id": ID, "kind": "sft", "spec": {}})


def test_checkpoints_of_several_jobs_play_the_environment_of_the_first() -> None:
    def single(id: str, **changes: Any) -> dict[str, Any]:
        return {"id": id, "kind": "rl", "spec": make_spec(train={"steps": 3}, **changes).model_dump(mode="json")}

    first, second = single("j-aaaaaaaaaa", name="one"), single("j-bbbbbbbbbb", environment={"name": "copy_digits"})
    made = evaluation_of_several([first, second], ["j-aaaaaaaaaa@1", "j-bbbbbbbbbb@2", "j-aaaaaaaaaa@1"])
    assert made["environment"]["name"] == first["spec"]["environment"]["name"]
    assert made["sweep"] == {"parameters": {"start.from": ["j-aaaaaaaaaa@1", "j-bbbbbbbbbb@2"]}}
    assert "sweep" not in evaluation_of_several([second], ["j-bbbbbbbbbb@2"])
    with pytest.raises(ApiError, match="different models"):
        evaluation_of_several([first, single("j-c", model={"base": "another"})], ["j-aaaaaaaaaa@1", "j-c@1"])
    with pytest.raises(ApiError, match="several policies"):
        evaluation_of_several([job({"x": "a", "y": "b"})], [f"{ID}@1"])


def test_models_of_jobs_without_an_environment_play_another_one() -> None:
    tuned: dict[str, Any] = {"name": "tuned", "kind": "sft", "model": {"base": "m", "lora": {"rank": 4}}}
    tuned |= {"data": {"path": "rows.jsonl"}, "train": {"steps": 3}}
    sft = {"id": ID, "kind": "sft", "spec": parse_spec(tuned).model_dump(mode="json")}
    with pytest.raises(ApiError, match="--like JOB"):
        evaluation_of_several([sft], [f"{ID}@latest"])
    spec = make_spec(validation={"every": 5, "episodes": 7, "config": {"digits": 2}}, seats={"o": {"bot": "random"}})
    rl = {"id": "j-aaaaaaaaaa", "kind": "rl", "spec": spec.model_dump(mode="json")}
    made = parse_spec(evaluation_of_several([sft], [f"{ID}@latest"], like=rl))
    assert (made.name, made.kind, made.model.base, made.model.lora) == ("tuned: evaluation", "eval", "m", None)
    assert (made.start and made.start.checkpoint, made.seats["o"].bot) == (f"{ID}@latest", "random")
    assert (made.environment.name, made.environment.config) == (spec.environment.name, {"digits": 2})
    assert (made.evaluation.episodes, made.rollout.max_tokens) == (7, spec.rollout.max_tokens)
    exam = {"id": "j-bbbbbbbbbb", "kind": "eval", "spec": made.model_dump(mode="json")}
    again = parse_spec(evaluation_of_several([sft], [f"{ID}@3"], like=exam))
    assert (again.evaluation, again.environment, again.seats) == (made.evaluation, made.environment, made.seats)
    named = parse_spec(evaluation_of_several([sft], [f"{ID}@3"], environment="gsm8k"))
    assert (named.environment.name, named.environment.config, named.seats) == ("gsm8k", {}, {})
    several = evaluation_of_several([sft], [f"{ID}@3", f"{ID}@4"], environment="gsm8k")
    assert several["sweep"] == {"parameters": {"start.from": [f"{ID}@3", f"{ID}@4"]}}
    with pytest.raises(ApiError, match="of kind sft and plays no environment"):
        evaluation_of_several([sft], [f"{ID}@3"], like=sft)
    with pytest.raises(ApiError, match="a single model cannot play its seats"):
        evaluation_of_several([sft], [f"{ID}@3"], like=job({"x": "a", "y": "b"}))
