"""[policies], [seats] and [match] of a spec: what is inherited, what is refused, who plays which seat."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from opentinker.shared.spec import JobSpec, SeatSpec, parse_spec
from opentinker.shared.spec.algorithm_parts import GROUP_BASELINES
from opentinker.shared.spec.policies import OWN_METRICS, frozen_spec_of, spec_of, with_job_settings
from opentinker.shared.spec.schedules import Rule, kept_groups, max_opponent_lag, rule_of
from opentinker.shared.spec.seat_lists import MAX_ENTRIES, list_of
from opentinker.shared.spec.seats import (
    MAX_MISTAKES,
    MAX_POLICIES,
    OpponentSpec,
    bots_of,
    frozen_in,
    mistakes_in_seats,
    opposed,
    player_at,
    rotated,
    urls_in,
)
from opentinker.shared.types.errors import SpecError
from tests.support.factories import refusals

METRICS_PAGE = Path(__file__).parents[4] / "docs" / "metrics.md"
BASE: dict[str, Any] = {
    "name": "game",
    "model": {"base": "m"},
    "environment": {"name": "signalling"},
    "algorithm": {"group_size": 4, "groups_per_batch": 4},
    "rollout": {"engine": "toy"},
    "train": {"steps": 10, "lr": 1e-3},
    "policies": {"speaker": {}, "listener": {}},
    "seats": {"speaker": "speaker", "listener": "listener"},
}


def refused(**changes: Any) -> dict[str, str]:
    """By field, the problems of the base spec with these changes."""
    return refusals(parse_spec, {**BASE, **changes})


def test_policies_have_the_job_s_settings_where_they_say_nothing() -> None:
    job = {**BASE["algorithm"], "name": "dapo", "clip_high": 0.3}
    policies = {"speaker": {"train": {"lr": 1e-4}}, "listener": {"algorithm": {"name": "rloo"}, "model": {"base": "n"}}}
    spec = parse_spec({**BASE, "algorithm": job, "policies": policies})
    speaker, listener = spec_of(spec, "speaker"), spec_of(spec, "listener")
    assert (speaker.train.lr, speaker.train.steps, listener.train.lr) == (1e-4, 10, 1e-3)
    assert (speaker.model.base, listener.model.base) == ("m", "n")
    assert (speaker.algorithm.name, speaker.algorithm.clip_high) == ("dapo", 0.3)
    own = listener.algorithm
    assert (own.name, own.clip_high, own.group_size) == ("rloo", 0.2, 4), "options of another preset are not inherited"
    assert spec_of(spec, "") is spec
    assert parse_spec(spec.model_dump(mode="json")) == spec


def test_a_policy_is_not_named_as_metrics_of_a_job_begin() -> None:
    rows = [line.split("|")[1] for line in METRICS_PAGE.read_text().splitlines() if line.startswith("| `")]
    begins = {name.partition("/")[0] for row in rows for name in re.findall(r"`([^`]+)`", row) if "/" in name}
    assert {"val", "reward", "trainer"} < begins <= OWN_METRICS
    found = refused(policies={"val": {}, "reward": {}}, seats={"speaker": "val", "listener": "reward"})
    assert found.keys() == {"policies.val", "policies.reward"} and "another name" in found["policies.val"]


def test_adapters_are_inherited_setting_by_setting() -> None:
    model = {"base": "m", "lora": {"rank": 8, "alpha": 16.0}}
    spec = parse_spec(
        {**BASE, "model": model, "policies": {"speaker": {"model": {"lora": {"rank": 4}}}, "listener": {}}}
    )
    assert [(p.model.lora.rank, p.model.lora.alpha) for p in spec.policies.values() if p.model.lora] == [
        (4, 16.0),
        (8, 16.0),
    ]


def test_every_mistake_is_reported_at_once() -> None:
    found = refused(
        policies={"speaker": {"train": {"steps": 4}}, "listener": {"algorithm": {"group_size": 8}}, "third": {}},
        seats={"speaker": "speaker", "listener": "lisener"},
        start={"from": "j-0123456789@5"},
    )
    assert found.keys() == {
        "policies.speaker.train.steps",
        "policies.listener.algorithm.group_size",
        "seats.listener",
        "seats",
        "start",
    }
    assert "its policies are: speaker, listener, third" in found["seats.listener"]


@pytest.mark.parametrize(
    ("changes", "field", "problem"),
    [
        ({"policies": {"Speaker": {}}}, "policies.Speaker.[key]", "must match pattern"),
        ({"policies": {"speaker": 3, "listener": {}}}, "policies.speaker", "must be a table"),
        ({"seats": {"speaker": {"policy": "speaker", "bot": "x"}}}, "seats.speaker.bot", "exactly one|one player"),
        ({"seats": {"speaker": {}}}, "seats.speaker.policy", "one player"),
        (
            {"policies": {"speaker": {"train": {"deterministic": True}}, "listener": {}}},
            "policies.speaker.train.deterministic",
            "must be the job's, false",
        ),
        ({"algorithm": {"group_size": 4, "kl_coef": 0.1}}, "algorithm.kl_coef", "several policies"),
        (
            {"match": {"rotate": True}, "algorithm": {"group_size": 3}},
            "algorithm.group_size",
            "multiple of the 2 seats",
        ),
        ({"match": {"rotate": True}, "rollout": {"engine": "toy", "oversample": 2}}, "rollout.oversample", "must be 0"),
        ({"match": {"rotate": True}, "seats": {"*": "speaker"}}, "match.rotate", "each by its own name"),
        (
            {"match": {"max_opponent_lag": 3}, "policies": {}, "seats": {"speaker": {"bot": "x"}}},
            "match.max_opponent_lag",
            "needs two",
        ),
        (
            {
                "match": {"max_opponent_lag": 2},
                "policies": {"speaker": {}, "listener": {"algorithm": {"groups_per_batch": 1}, "train": {"steps": 40}}},
            },
            "match.max_opponent_lag",
            "must be 3 or more: policy 'listener' makes 4 steps",
        ),
        ({"policies": {}, "kind": "rl"}, "seats.speaker", "has no"),
        ({"start": {"from": "j-0123456789@5"}}, "start", "does not apply"),
        ({"seats": {"speaker": "speaker", "listener": {"frozen": "yesterday's"}}}, "seats.listener.frozen", "JOB@STEP"),
        (
            {"seats": {"speaker": "speaker", "listener": {"frozen": "j-0123456789@live"}}},
            "seats.listener.frozen",
            "JOB",
        ),
        ({"seats": {"speaker": {"policy": "speaker", "model": {"base": "m"}}}}, "seats.speaker.model", "a checkpoint"),
        (
            {"match": {"rotate": True}, "seats": {"speaker": "speaker", "listener": {"bot": "echo"}}},
            "match.rotate",
            "policies., frozen checkpoints, urls or .pools",
        ),
        (
            {"validation": {"every": 5, "against": [{"policy": "x"}]}},
            "validation.against.0.policy",
            "no policy of this",
        ),
        ({"validation": {"every": 5, "against": [{}]}}, "validation.against.0.policy", "one player"),
        ({"validation": {"every": 5, "against": [{"bot": "r"}] * 2}}, "validation.against", "twice"),
        ({"validation": {"every": 5, "against": [{"bot": "low"}]}}, "validation.against", "bounds of val/winrate"),
        (
            {"validation": {"every": 5, "episodes": 150_000, "against": [{"bot": "r"}, {"bot": "s"}]}},
            "validation.episodes",
            "2 opponents",
        ),
        (
            {
                "validation": {"every": 5, "against": [{"bot": "r"}]},
                "policies": {"speaker": {}},
                "seats": {"*": "speaker"},
            },
            "validation.against",
            "without patterns",
        ),
        (
            {"validation": {"every": 5, "against": [{"bot": "r"}]}, "policies": {}, "seats": {}},
            "validation.against",
            "needs .seats.",
        ),
    ],
)
def test_what_cannot_be_is_refused(changes: dict[str, Any], field: str, problem: str) -> None:
    found = refused(**changes)
    assert field in found and re.search(problem, found[field]), found


SYNCHRONOUS = {"group_size": 4, "groups_per_batch": 4, "max_staleness": 0}


@pytest.mark.parametrize(
    ("match", "changes", "problems"),
    [
        ({"schedule": "alternate"}, {}, {"match.alternate_steps": "is needed"}),
        ({"alternate_steps": 3}, {}, {"match.alternate_steps": "needs schedule = 'alternate'"}),
        ({"schedule": "drop", "max_growth": 3}, {}, {"match.max_growth": "needs schedule = 'grow'"}),
        (
            {"schedule": "drop"},
            {"policies": {}, "seats": {"speaker": {"bot": "x"}}},
            {"match.schedule": "two"},
        ),
        (
            {"schedule": "lockstep", "max_opponent_lag": 1},
            {"policies": {"speaker": {}, "listener": {"algorithm": {"groups_per_batch": 2}, "train": {"steps": 20}}}},
            {
                "algorithm.max_staleness": "must be 0",
                "match.max_opponent_lag": "must be 0",
                "policies.listener.algorithm.groups_per_batch": "must be the job's, 4",
            },
        ),
        (
            {"schedule": "lockstep"},
            {"algorithm": SYNCHRONOUS, "policies": {"speaker": {}, "listener": {"train": {"steps": 20}}}},
            {"policies.listener.train.steps": "not with match.schedule = 'drop'"},
        ),
        (
            {"schedule": "lockstep"},
            {"algorithm": SYNCHRONOUS, "validation": {"every": 5}},
            {"validation": "holds back the new version of one policy"},
        ),
        (
            {"schedule": "grow", "max_growth": 64},
            {"algorithm": {"group_size": 64, "groups_per_batch": 512}},
            {"match.max_growth": "more than 1,048,576 episodes"},
        ),
    ],
)
def test_a_schedule_that_cannot_be_kept_is_refused(
    match: dict[str, Any], changes: dict[str, Any], problems: dict[str, str]
) -> None:
    found = refused(match=match, **changes)
    assert found.keys() == problems.keys()
    assert all(problem in found[field] for field, problem in problems.items()), found


def test_schedules_are_settings_of_one_rule() -> None:
    uneven = {"speaker": {}, "listener": {"train": {"steps": 7}}}
    waits = parse_spec(BASE)
    drops = parse_spec({**BASE, "policies": uneven, "match": {"schedule": "drop", "max_opponent_lag": 4}})
    grows = parse_spec({**BASE, "policies": uneven, "match": {"schedule": "grow"}})
    turns = parse_spec({**BASE, "policies": uneven, "match": {"schedule": "alternate", "alternate_steps": 5}})
    steps = parse_spec({**BASE, "algorithm": SYNCHRONOUS, "match": {"schedule": "lockstep"}})
    assert rule_of(waits) == Rule()
    assert rule_of(drops) == Rule(gate="fastest")
    assert rule_of(grows) == Rule(gate="fastest", growth=8)
    assert rule_of(turns) == Rule(gate="turn", turn=5)
    assert rule_of(steps) == Rule(gate="neediest", together=True)
    assert [kept_groups(spec) for spec in (waits, drops, grows, turns, steps)] == [None, 12, 32, None, None]
    patient = {"max_staleness": 9, "group_size": 4, "groups_per_batch": 4}
    grows_less = parse_spec({**BASE, "algorithm": patient, "match": {"schedule": "grow", "max_growth": 2}})
    assert kept_groups(grows_less) == 40, "never less than admission lets the fastest one have"
    assert [max_opponent_lag(spec) for spec in (waits, drops, grows, turns, steps)] == [None, 4, None, None, 0]
    assert parse_spec(grows.model_dump(mode="json")) == grows


def test_policies_are_judged_as_the_job_is() -> None:
    """What contradicts itself between tables is refused in a policy too, and defaults follow from its own settings."""
    train = {"learner": "simulated", "steps": 10}
    found = refused(train=train, policies={"speaker": {"train": {"lr": 0.5}}, "listener": {}})
    assert found == {"policies.speaker.train.lr": "does not apply to train.learner = 'simulated'"}
    target = {"target": {"val/exact": 0.9}, "parallel": "zero3"}
    found = refused(policies={"speaker": {"train": target}, "listener": {}})
    assert found.keys() == {"policies.speaker.train.target.val/exact", "policies.speaker.train.parallel"}
    algorithm = {"overlong_shaping": True, "group_size": 4}
    spec = parse_spec({**BASE, "rollout": {"engine": "toy", "max_tokens": 40}, "algorithm": algorithm})
    shaped = [policy.algorithm for policy in spec.policies.values()]
    assert [(own.overlong_length, own.overlong_buffer) for own in shaped] == [(40, 8), (40, 8)]
    assert parse_spec(spec.model_dump(mode="json")) == spec


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
    players = {**seats(x="a", y="b"), "z": SeatSpec(bot="dealer")}
    assert opposed(players, "a", bot) == {
        "x": SeatSpec(policy="a"),
        "y": SeatSpec(bot="random"),
        "z": SeatSpec(bot="random"),
    }
    assert opposed(seats(x="a", y="b"), "a", other) == seats(x="a", y="b")
    alone = [opposed(seats(x="a", y="a"), "a", bot, place) for place in (0, 1, 2)]
    assert [[seat for seat, player in found.items() if player.policy] for found in alone] == [["x"], ["y"], ["x"]]
    nameless = {"y": SeatSpec(bot="dealer")}
    assert opposed(nameless, "", bot) == {"y": SeatSpec(bot="random")}, "the job's policy plays what is not named"


def test_no_policy_is_evaluated_against_itself() -> None:
    against = [{"bot": "random"}, {"policy": "listener"}]
    spec = parse_spec(
        {**BASE, "validation": {"every": 5, "episodes": 10, "samples": 2, "temperature": 1.0, "against": against}}
    )
    assert spec.validation is not None
    names = {name: [one.name for one in spec.validation.opponents_of(name)] for name in spec.policies}
    assert names == {"speaker": ["random", "listener"], "listener": ["random"]}
    assert [spec.validation.total_of(name) for name in spec.policies] == [40, 20]


def with_seats(entries: dict[str, Any]) -> JobSpec:
    return parse_spec({**BASE, "seats": entries})


@pytest.mark.parametrize(
    ("entries", "there", "fields"),
    [
        ({"speaker": "speaker", "listener": "listener"}, ("speaker", "listener"), set()),
        ({"s*": "speaker", "*": "listener"}, ("speaker", "listener", "other"), set()),
        ({"speaker": "speaker", "hearer": "listener"}, ("speaker", "listener"), {"seats.hearer"}),
        ({"speaker": "speaker", "listener": "listener"}, ("speaker", "listener", "judge"), {"seats"}),
        ({"*": "speaker", "l*": "listener"}, ("speaker", "listener"), {"policies.listener"}),
    ],
)
def test_seats_are_compared_with_the_environment_s(
    entries: dict[str, Any], there: tuple[str, ...], fields: set[str]
) -> None:
    assert {mistake["field"] for mistake in mistakes_in_seats(with_seats(entries), there)} == fields


EVALUATION = {**{name: BASE[name] for name in ("name", "model", "environment", "rollout")}, "kind": "eval"}


@pytest.mark.parametrize("data", [EVALUATION, {**BASE, "policies": {}}], ids=["evaluation", "one policy"])
def test_a_job_with_one_policy_or_none_may_give_seats_to_bots(data: dict[str, Any]) -> None:
    spec = parse_spec({**data, "seats": {"listener": {"bot": "echo"}}})
    assert bots_of(spec.seats) == {"listener": "echo"} and not spec.policies


def test_an_evaluation_has_no_policies_that_could_play() -> None:
    with pytest.raises(SpecError, match="has no"):
        parse_spec({**EVALUATION, "seats": {"listener": "speaker"}})


OLD = "j-0123456789~listener@5"


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


@pytest.mark.parametrize("advantage", GROUP_BASELINES)
def test_a_group_of_one_has_no_baseline_for_any_policy(advantage: str) -> None:
    alone = {"name": "spiral", "group_size": 1}
    policies: dict[str, Any] = {"speaker": {}, "listener": {"algorithm": {"name": "ppo"}}}
    spec = parse_spec({**BASE, "algorithm": alone, "policies": policies})
    assert [policy.algorithm.advantage for policy in spec.policies.values()] == ["rae", "gae"]
    compares = {"algorithm": {"name": "rloo", "advantage": advantage}}
    found = refused(algorithm=alone, policies={**policies, "listener": compares})
    assert found.keys() == {"policies.listener.algorithm.group_size"}
    assert "it needs 2 or more" in found["policies.listener.algorithm.group_size"]
    found = refused(algorithm=alone, policies=dict.fromkeys(policies, compares))
    assert found.keys() == {f"policies.{name}.algorithm.group_size" for name in policies}, "each, at once"
    found = refused(policies={**policies, "speaker": {"algorithm": {"advantage": advantage, "group_size": 1}}})
    assert "policies.speaker.algorithm.group_size" in found
    own = {"group_size": 1, "advantage": advantage}
    found = refused(algorithm=own, policies={}, seats={})
    assert found.keys() == {"algorithm.group_size"} and "2 or more" in found["algorithm.group_size"]


def ranks(**changes: Any) -> dict[str, int]:
    spec = parse_spec({**BASE, **changes})
    return {name: spec_of(spec, name).resources.ranks for name in spec.policies}


def test_each_policy_has_ranks_of_its_own_or_those_of_the_job() -> None:
    assert ranks() == {"speaker": 1, "listener": 1}
    assert ranks(resources={"trainer_ranks": 2}) == {"speaker": 2, "listener": 2}
    own = {"speaker": {"trainer_ranks": 3}, "listener": {"train": {"parallel": "zero1"}}}
    assert ranks(resources={"trainer_ranks": 2}, policies=own) == {"speaker": 3, "listener": 2}
    for resources in ({"trainer_ranks": 2}, {"trainer_gpus": 2}):
        alone = {"policies": {"speaker": {}}, "seats": {"*": "speaker"}, "resources": resources}
        assert ranks(**alone) == {"speaker": 2}
    spec = parse_spec({**BASE, "resources": {"trainer_ranks": 2}, "policies": own})
    for name in own:  # as the ranks read it
        assert parse_spec(spec_of(spec, name).model_dump(mode="json")) == spec_of(spec, name)


@pytest.mark.parametrize(
    ("changes", "field", "problem"),
    [
        ({"resources": {"trainer_gpus": 2}}, "resources.trainer_gpus", "each has one rank"),
        (
            {"resources": {"trainer_gpus": 1}, "policies": {"speaker": {"trainer_ranks": 2}, "listener": {}}},
            "policies.speaker.trainer_ranks",
            "must be left out",
        ),
        (
            {"policies": {"speaker": {"train": {"parallel": "zero2"}}, "listener": {"trainer_ranks": 2}}},
            "policies.speaker.train.parallel",
            "needs trainer_ranks > 1",
        ),
        (
            {"resources": {"trainer_ranks": 2}, "train": {"steps": 30, "parallel": "zero1"}},
            "policies.listener.train.parallel",
            "one group of ranks per process",
        ),
        ({"resources": {"trainer_ranks": 33}}, "resources.trainer_ranks", "66 ranks to 2 policies"),
        (
            {
                "train": {"steps": 30, "learner": "simulated"},
                "policies": {"speaker": {"trainer_ranks": 2}, "listener": {}},
            },
            "policies.speaker.trainer_ranks",
            "simulated",
        ),
    ],
)
def test_ranks_that_policies_cannot_have_are_refused(changes: dict[str, Any], field: str, problem: str) -> None:
    found = refused(**changes)
    assert found.keys() == {field} and problem in found[field]


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
    (mistake,) = mistakes_in_seats(spec, ("speaker", "listener"))
    assert "no seat to the job's policy" in mistake["problem"]
    assert mistakes_in_seats(spec, ("speaker", "listener", "other")) == []


def test_policies_do_not_inherit_what_is_wrong_in_the_job() -> None:
    odd = {f"odd{i}": 1 for i in range(50)}
    model = {"base": "m", "lora": {"rank": 8, **odd}}
    data = {**BASE, "model": model, "train": {"steps": 10, "lr": -1.0, **odd}, "algorithm": {"group_size": 4, **odd}}
    inherited = with_job_settings(data)["policies"]["speaker"]
    assert inherited == {"model": {"base": "m"}, "train": {"steps": 10}, "algorithm": {"group_size": 4}}, (
        "a body of a megabyte would become as many megabytes as there are policies"
    )
    found = refused(train={"steps": 10, "lr": -1.0})
    assert found.keys() == {"train.lr"}


def test_too_many_policies_are_refused_before_they_are_completed() -> None:
    data = {**BASE, "policies": {f"p{i}": {} for i in range(MAX_POLICIES + 1)}, "train": {"steps": 0}}
    assert "policies" not in with_job_settings(data)
    found = refused(policies=data["policies"], train=data["train"])
    assert found.keys() == {"policies", "train.steps"} and f"{MAX_POLICIES} policies at most" in found["policies"]


def test_mistakes_about_seats_are_bounded() -> None:
    lists = {f"t{i}": [f"odd{i}-{j}" for j in range(64)] for i in range(8)}
    spec = parse_spec({**BASE, "algorithm": {**BASE["algorithm"], "team": lists}})
    there = ["speaker", "listener", *(f"s{i}" for i in range(200))]
    found = mistakes_in_seats(spec, there)
    assert len(found) == MAX_MISTAKES and len(found[0]["problem"]) < 500 and "and 182 more" in found[0]["problem"]
    more = {f"t{i}": [f"s{i}-{j}" for j in range(64)] for i in range(MAX_ENTRIES // 64 + 1)}
    problem = refused(algorithm={**BASE["algorithm"], "team": more})["algorithm.team"]
    assert f"at most {MAX_ENTRIES:,}" in problem
