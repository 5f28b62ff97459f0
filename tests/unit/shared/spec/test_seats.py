"""[seats] of a spec: who plays which seat, be it a policy, a bot, a checkpoint or a model behind a URL."""

from __future__ import annotations

import re
from typing import Any

import pytest

from opentinker.shared.spec import JobSpec, SeatSpec, parse_spec
from opentinker.shared.spec.evaluation import OpponentSpec
from opentinker.shared.spec.matches.opposition import opposed
from opentinker.shared.spec.matches.policies import frozen_spec_of
from opentinker.shared.spec.matches.seat_lists import MAX_ENTRIES, list_of
from opentinker.shared.spec.matches.seats import (
    MAX_MISTAKES,
    MAX_POLICIES,
    SeatTable,
    bots_of,
    frozen_in,
    mistakes_in_seats,
    player_at,
    rotated,
    urls_in,
)
from opentinker.shared.types.errors import SpecError
from tests.unit.shared.spec.signalling_job import BASE, refused


def seats(**players: str) -> dict[str, SeatSpec]:
    return {seat: SeatSpec(policy=player) for seat, player in players.items()}


def test_a_seat_s_own_name_counts_before_patterns() -> None:
    entries = {"player_*": SeatSpec(policy="a"), "player_1": SeatSpec(policy="b"), "*": SeatSpec(bot="random")}
    found = [player_at(entries, seat) for seat in ("player_0", "player_1", "judge")]
    assert [(p.policy or p.bot) if p else None for p in found] == ["a", "b", "random"]
    assert player_at(seats(x="a"), "y") is None
    assert bots_of(entries) == {"player_*": "", "player_1": "", "*": "random"} and bots_of(seats(x="a")) == {}


def test_a_seat_is_in_the_list_with_its_own_name_or_else_in_the_first_pattern() -> None:
    lists = {"red": ["r*"], "captains": ["r1", "b1"], "rest": ["*"]}
    assert [list_of(lists, seat) for seat in ("r1", "r2", "b1", "b2")] == ["captains", "red", "captains", "rest"]
    assert list_of({"red": ["r*"]}, "b1") is None and list_of({}, "") is None


def test_rotation_gives_every_policy_every_seat_equally_often() -> None:
    entries = seats(black="a", white="b")
    turns = [rotated(list(entries), list(entries.values()), by) for by in range(4)]
    assert [turn["black"].policy for turn in turns] == ["a", "b", "a", "b"]
    assert [turn["white"].policy for turn in turns] == ["b", "a", "b", "a"]


def test_an_opponent_takes_the_seats_that_the_policy_does_not_play() -> None:
    bot, other = OpponentSpec(bot="random"), OpponentSpec(policy="b")
    assert opposed(seats(x="a", y="b"), "a", other) == {"x": SeatSpec(policy="a"), "y": other}
    alone = [opposed(seats(x="a", y="a"), "a", bot, place) for place in (0, 1, 2)]
    assert [[seat for seat, player in found.items() if player.policy] for found in alone] == [["x"], ["y"], ["x"]]
    nameless = {"y": SeatSpec(bot="dealer")}
    assert opposed(nameless, "", bot) == {"y": bot}, "the job's policy plays what is not named"
    fixed = {**seats(x="a"), "y": SeatSpec(bot="dealer"), "z": SeatSpec(frozen="j-0123456789@1")}
    assert opposed(fixed, "a", bot) == {"x": SeatSpec(policy="a"), "y": bot, "z": bot}


@pytest.mark.parametrize("other", [SeatSpec(policy="b"), SeatSpec(pool="past")])
def test_fixed_players_keep_their_seats_where_the_opponent_has_others(other: SeatSpec) -> None:
    bot = OpponentSpec(bot="random")
    for judge in (SeatSpec(bot="dealer"), SeatSpec(frozen="j-0123456789@1")):
        players = {**seats(x="a"), "y": other, "judge": judge}
        assert opposed(players, "a", bot) == {"x": SeatSpec(policy="a"), "y": bot, "judge": judge}


def test_a_teammate_keeps_its_seat_in_evaluations() -> None:
    bot, enemy = OpponentSpec(bot="random"), SeatSpec(bot="dealer")
    players, us = {**seats(x="a", y="b"), "z": enemy}, {"us": ["x", "y"]}
    assert opposed(players, "a", bot, teams=us) == {**players, "z": bot}
    assert opposed({**players, "z": SeatSpec(policy="c")}, "a", bot, teams=us) == {**players, "z": bot}
    alone = {"x": SeatSpec(policy="a"), "y": bot}
    assert opposed(seats(x="a", y="b"), "a", bot, teams=us) == alone, "nobody else can be replaced"


def test_no_policy_is_evaluated_against_itself() -> None:
    against = [{"bot": "random"}, {"policy": "listener"}]
    spec = parse_spec(
        {**BASE, "validation": {"every": 5, "episodes": 10, "samples": 2, "temperature": 1.0, "against": against}}
    )
    assert spec.validation is not None
    names = {name: [one.metric_name for one in spec.validation.opponents_of(name)] for name in spec.policies}
    assert names == {"speaker": ["random", "listener"], "listener": ["random"]}
    assert [spec.validation.total_of(name) for name in spec.policies] == [40, 20]


def with_seats(entries: dict[str, Any]) -> JobSpec:
    return parse_spec({**BASE, "seats": entries})


@pytest.mark.parametrize(
    ("entries", "there", "fields"),
    [
        ({"speaker": "speaker", "listener": "listener"}, ("speaker", "listener"), set()),
        ({"s*": "speaker", "*": "listener"}, ("speaker", "listener", "other"), set()),
        ({"speaker": "speaker", "hearer": "listener"}, ("speaker", "listener"), {"seats.hearer", "seats"}),
        ({"speaker": "speaker", "lisener": "listener"}, ("speaker", "listener"), {"seats.lisener"}),
        ({"speaker": "speaker", "lisener": "listener"}, ("speaker", "listener", "judge"), {"seats.lisener", "seats"}),
        ({"*": "speaker", "odd": "listener"}, ("speaker", "listener"), {"seats.odd"}),
        ({"speaker": "speaker", "listener": "listener"}, ("speaker", "listener", "judge"), {"seats"}),
        ({"*": "speaker", "l*": "listener"}, ("speaker", "listener"), {"policies.listener"}),
    ],
)
def test_seats_are_compared_with_the_environment_s(
    entries: dict[str, Any], there: tuple[str, ...], fields: set[str]
) -> None:
    assert {mistake["field"] for mistake in mistakes_in_seats(SeatTable.of(with_seats(entries)), there)} == fields


EVALUATION = {**{name: BASE[name] for name in ("name", "model", "environment", "rollout")}, "kind": "eval"}


@pytest.mark.parametrize("data", [EVALUATION, {**BASE, "policies": {}}], ids=["evaluation", "one policy"])
def test_a_job_with_one_policy_or_none_may_give_seats_to_bots(data: dict[str, Any]) -> None:
    spec = parse_spec({**data, "seats": {"listener": {"bot": "echo"}}})
    assert bots_of(spec.seats) == {"listener": "echo"} and not spec.policies


def test_an_evaluation_has_no_policies_that_could_play() -> None:
    with pytest.raises(SpecError, match="has no"):
        parse_spec({**EVALUATION, "seats": {"listener": "speaker"}})


OLD = "j-0123456789~listener@5"


def test_an_evaluation_names_entries_as_opponents_and_real_teams() -> None:
    players = {"seats": {"listener": {"frozen": OLD}}}
    parse_spec({**EVALUATION, **players, "evaluation": {"opponents": ["listener"]}})
    with pytest.raises(SpecError) as wrong:
        parse_spec({**EVALUATION, **players, "evaluation": {"opponents": ["referee"], "team": {"us": ["listener"]}}})
    assert {one["field"]: one["problem"] for one in wrong.value.mistakes} == {
        "evaluation.opponents": "is no entry of [seats], which has: listener",
        "evaluation.team.us": "names one seat alone: two or more, or a pattern, e.g. 'player_*'",
    }


def test_a_checkpoint_may_play_seats() -> None:
    for listener in (OLD, "j-0123456789@latest", "best-listener"):
        spec = parse_spec({**BASE, "policies": {}, "seats": {"listener": {"frozen": listener}}})
        assert frozen_in(spec.seats) == [listener] and bots_of(spec.seats) == {}
    entries = {"a": {"frozen": OLD}, "b": {"frozen": OLD}, "c": {"frozen": "j-0123456789@7"}, "speaker": "speaker"}
    spec = parse_spec({**BASE, "policies": {"speaker": {}}, "seats": entries})
    assert frozen_in(spec.seats) == [OLD, "j-0123456789@7"]
    assert frozen_in(parse_spec({**EVALUATION, "seats": {"listener": {"frozen": OLD}}}).seats) == [OLD]
    with pytest.raises(SpecError, match="does not apply"):
        parse_spec({"name": "x", "kind": "inference", "model": {"base": "m"}, "seats": {"listener": {"frozen": OLD}}})


def test_a_frozen_checkpoint_plays_with_its_own_model_and_is_not_judged() -> None:
    judge = {"name": "judge", "base": "judges", "weight": 1.0}
    entries = {"listener": {"frozen": OLD, "model": {"base": "n", "chat_template": "plain"}}}
    spec = parse_spec({**BASE, "policies": {}, "seats": entries, "reward_models": [judge]})
    own = frozen_spec_of(spec, OLD)
    assert (own.model.base, own.reward_models, spec.model.base) == ("n", [], "m")
    assert own.rollout == spec.rollout and parse_spec(spec.model_dump(mode="json")) == spec


URL = {"url": "https://models.example/v1", "model": "big"}


def test_a_model_behind_a_url_plays_a_seat_of_any_job_with_an_environment() -> None:
    alone = {**BASE, "policies": {}}
    for data in (alone, EVALUATION):
        spec = parse_spec({**data, "seats": {"listener": URL}})
        seat = spec.seats["listener"]
        assert (seat.player, seat.timeout_s, seat.answer_tokens) == ("big@https://models.example/v1", 60.0, 1024)
        assert urls_in(spec.seats) == [seat] and bots_of(spec.seats) == {}
        assert parse_spec(spec.model_dump(mode="json")) == spec
    both = parse_spec({**alone, "seats": {"a": URL, "b": {**URL, "url": "https://models.example/v1/"}, "c": "speaker"},
                       "policies": {"speaker": {}}})  # fmt: skip
    assert len(urls_in(both.seats)) == 1, "the slash at the end makes no difference"
    entries = {"speaker": "speaker", "listener": URL}
    spec = parse_spec({**BASE, "policies": {"speaker": {}}, "seats": entries, "match": {"rotate": True}})
    assert rotated(list(entries), list(spec.seats.values()), 1)["speaker"].player == seat.player


@pytest.mark.parametrize(
    ("seat", "changes", "field", "problem"),
    [
        ({"url": "https://me:pw@models.example/v1"}, {}, "seats.listener.url", "secrets have no place"),
        ({"url": "wss://models.example/v1"}, {}, "seats.listener.url", "must be http.s.://HOST"),
        ({"url": "https://models.example/v1?k=1"}, {}, "seats.listener.url", "without a query"),
        ({"url": "https://models.example:22/v1"}, {}, "seats.listener.url", "port 22 may not"),
        ({"url": "https://models.example/#a"}, {}, "seats.listener.url", "a fragment"),
        ({"model": None}, {}, "seats.listener.model", "is needed with a url"),
        ({"model": {"base": "m"}}, {}, "seats.listener.model", "is needed with a url"),
        ({"model": "x" * 201}, {}, "seats.listener.model", "200 characters"),
        ({"key": "sk-0123456789ABCDEF"}, {}, "seats.listener.key", "never the key itself"),
        ({"api_key": "sk-0123456789"}, {}, "seats.listener.api_key", "unknown setting"),
        ({"timeout_s": 0.5}, {}, "seats.listener.timeout_s", "greater than or equal to 1"),
        ({"answer_tokens": 10**9}, {}, "seats.listener.answer_tokens", "less than or equal to 131072"),
        ({"concurrency": 0}, {}, "seats.listener.concurrency", "greater than 0"),
        ({"bot": "echo"}, {}, "seats.listener.url", "one player"),
        ({"url": None, "model": None, "bot": "echo", "key": "lab"}, {}, "seats.listener.key", "belongs to a url"),
        ({"url": None, "frozen": OLD}, {}, "seats.listener.model", "leave it out"),
        (
            {},
            {"environment": {"name": "signalling", "tools": [{"type": "python"}]}},
            "environment.tools",
            "cannot call",
        ),
        ({}, {"seats": {"a": URL, "b": {**URL, "temperature": 1.0}}}, "seats.b.model", "the same settings"),
        (
            {},
            {
                "train": {"steps": 1, "deterministic": True},
                "algorithm": {"max_staleness": 0},
                "rollout": {"engine": "toy", "seed": 1},
            },
            "seats.listener.url",
            "nothing fixes what it answers",
        ),
    ],
)
def test_what_a_model_behind_a_url_cannot_be_is_refused(
    seat: dict[str, Any], changes: dict[str, Any], field: str, problem: str
) -> None:
    found = refused(**{"policies": {}, "seats": {"listener": {**URL, **seat}}, **changes})
    assert found.keys() == {field} and re.search(problem, found[field]), found


def test_a_group_of_any_size_may_rotate_if_no_policy_compares_its_episodes() -> None:
    for size in (1, 2, 3):
        spiral = {"name": "spiral", "group_size": size}
        assert parse_spec({**BASE, "algorithm": spiral, "match": {"rotate": True}}).match
    policies: dict[str, Any] = {"speaker": {}, "listener": {"algorithm": {"name": "rloo"}}}
    found = refused(algorithm={"name": "spiral", "group_size": 2}, policies=policies, match={"rotate": True})
    assert "multiple of the 2 seats" in found["algorithm.group_size"], "one of them does"


def test_frozen_checkpoints_rotate_with_the_policies() -> None:
    entries = {"speaker": "speaker", "listener": {"frozen": OLD}}
    spec = parse_spec({**BASE, "policies": {"speaker": {}}, "seats": entries, "match": {"rotate": True}})
    turned = rotated(list(spec.seats), list(spec.seats.values()), 1)
    assert (turned["speaker"].frozen, turned["listener"].policy) == (OLD, "speaker")
    found = refused(policies={}, seats={seat: {"frozen": OLD} for seat in ("a", "b")}, match={"rotate": True})
    assert found.keys() == {"match.rotate"}, "the job's own policy has no seat that could be moved"


def test_the_number_of_policies_and_checkpoints_is_bounded() -> None:
    entries = {f"s{i}": {"frozen": f"j-0123456789@{i}"} for i in range(MAX_POLICIES - 1)}
    seats = {**entries, "speaker": "speaker", "listener": "listener"}
    assert str(MAX_POLICIES) in refused(seats=seats)["seats"]
    assert parse_spec({**BASE, "policies": {"speaker": {}}, "seats": {**entries, "speaker": "speaker"}})
    more = {**entries, "more": {"frozen": f"j-0123456789@{MAX_POLICIES}"}}
    assert str(MAX_POLICIES) in refused(policies={}, seats=more)["seats"], "the job's policy counts too"


def test_the_job_s_policy_must_have_a_seat() -> None:
    spec = parse_spec({**BASE, "policies": {}, "seats": {"s*": {"frozen": OLD}, "listener": {"frozen": OLD}}})
    (mistake,) = mistakes_in_seats(SeatTable.of(spec), ("speaker", "listener"))
    assert "no seat to the job's policy" in mistake["problem"]
    assert mistakes_in_seats(SeatTable.of(spec), ("speaker", "listener", "other")) == []


def test_mistakes_about_seats_are_bounded() -> None:
    lists = {f"t{i}": [f"odd{i}-{j}" for j in range(64)] for i in range(8)}
    spec = parse_spec({**BASE, "algorithm": {**BASE["algorithm"], "team": lists}})
    there = ["speaker", "listener", *(f"s{i}" for i in range(200))]
    found = mistakes_in_seats(SeatTable.of(spec), there)
    assert len(found) == MAX_MISTAKES and len(found[0]["problem"]) < 500 and "and 182 more" in found[0]["problem"]
    more = {f"t{i}": [f"s{i}-{j}" for j in range(64)] for i in range(MAX_ENTRIES // 64 + 1)}
    problem = refused(algorithm={**BASE["algorithm"], "team": more})["algorithm.team"]
    assert f"at most {MAX_ENTRIES:,}" in problem


@pytest.mark.parametrize("name", ["x" * 101, "a*" * 10_000, ""], ids=["long", "pattern", "empty"])
def test_entries_with_impossible_names_are_not_compared_with_seats(name: str) -> None:
    """A name becomes a pattern: one of a megabyte takes seconds."""
    assert SeatTable.as_written({"seats": {"white": "a", "bl*": "b"}}) is not None
    assert SeatTable.as_written({"seats": {"white": "a", name: "b"}}) is None
