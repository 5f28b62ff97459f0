"""`validation.against` of a spec: opponents of evaluations other than policies and bots."""

from __future__ import annotations

from typing import Any

import pytest

from opentinker.shared.spec import JobSpec, parse_spec
from opentinker.shared.spec.engines import engine_policies
from opentinker.shared.spec.evaluation import ambiguous_opponents
from opentinker.shared.spec.matches.policies import frozen_spec_of
from opentinker.shared.spec.matches.seats import MAX_POLICIES, all_players, urls_in
from tests.unit.shared.spec.signalling_job import BASE, refused

OLD = "j-0123456789@7"
FROZEN: dict[str, Any] = {"frozen": OLD}
URL: dict[str, Any] = {"url": "https://models.example/v1", "model": "lab/big"}


def validation(*against: dict[str, Any]) -> dict[str, Any]:
    return {"validation": {"every": 5, "episodes": 4, "against": list(against)}}


def job(*against: dict[str, Any], **changes: Any) -> JobSpec:
    return parse_spec({**BASE, **validation(*against), **changes})


def test_checkpoints_and_models_behind_urls_are_opponents_by_name() -> None:
    spec = job(URL, FROZEN, {"bot": "random"}, {"policy": "listener"}, {"frozen": "j-0123456789~a@9"})
    assert spec.validation is not None
    names = [one.metric_name for one in spec.validation.opponents_of("speaker")]
    assert names == ["lab/big", OLD, "random", "listener", "j-0123456789~a@9"]
    assert spec.validation.total_of("listener") == 16, "all but the policy itself"


def test_bots_rate_a_policy_before_checkpoints_and_these_before_models_behind_urls() -> None:
    def anchors(*against: dict[str, Any]) -> list[str]:
        spec = job(*against)
        assert spec.validation is not None
        return spec.validation.anchors_of("speaker")

    assert anchors(URL, FROZEN, {"policy": "listener"}, {"bot": "random"}) == ["random", OLD, "lab/big"]
    assert anchors(URL, FROZEN) == [OLD, "lab/big"] and anchors(URL) == ["lab/big"]
    assert anchors({"policy": "listener"}) == [], "it changes from evaluation to evaluation"


def test_every_rollout_worker_loads_the_opponents() -> None:
    model = {"base": "other", "dtype": "bfloat16"}
    spec = job({**FROZEN, "model": model}, URL)
    assert [(one.name, one.is_frozen) for one in engine_policies(spec)] == [
        ("speaker", False),
        ("listener", False),
        (OLD, True),
    ]
    assert frozen_spec_of(spec, OLD).model.base == "other"
    (server,) = urls_in(all_players(spec))
    assert (server.model, server.answer_tokens, server.timeout_s) == ("lab/big", 1024, 60.0), "defaults as of a seat"
    assert parse_spec(spec.model_dump(mode="json")) == spec


def test_a_checkpoint_that_plays_a_seat_too_is_loaded_once() -> None:
    seat = {**FROZEN, "model": {"base": "other"}}
    spec = job(FROZEN, seats={**BASE["seats"], "third": seat})
    assert [one.name for one in engine_policies(spec)] == ["speaker", "listener", OLD]


@pytest.mark.parametrize(
    ("against", "field", "problem"),
    [
        ({"pool": "past"}, "validation.against.0.pool", "members change"),
        ({**FROZEN, "bot": "random"}, "validation.against.0.frozen", "one player (policy, bot, frozen, url)"),
        ({"frozen": "yesterday's"}, "validation.against.0.frozen", "JOB@STEP"),
        ({**FROZEN, "model": "big"}, "validation.against.0.model", "the server fills in"),
        ({"url": "https://models.example/v1"}, "validation.against.0.model", "is needed with a url"),
        ({"url": "ftp://models.example", "model": "m"}, "validation.against.0.url", "http"),
        ({"bot": "random", "key": "lab"}, "validation.against.0.key", "belongs to a url"),
        ({**URL, "model": "big/low"}, "validation.against", "bounds of val/winrate"),
        ({**FROZEN, "name": "old"}, "validation.against.0.name", "belongs to a url"),
        ({**URL, "name": "a\nb"}, "validation.against.0.name", "must be printable"),
    ],
)
def test_what_cannot_be_an_opponent_is_refused(against: dict[str, Any], field: str, problem: str) -> None:
    found = refused(**validation(against))
    assert found.keys() == {field} and problem in found[field], found


def test_the_only_policy_of_a_job_is_no_opponent() -> None:
    seats = {"speaker": "speaker", "listener": {"bot": "random"}}
    found = refused(policies={"speaker": {}}, seats=seats, **validation({"policy": "speaker"}))
    assert "none is evaluated against itself" in found["validation.against.0.policy"]


def test_opponents_of_one_name_are_refused() -> None:
    other = {**URL, "url": "https://others.example/v1"}
    found = refused(**validation(URL, {"bot": "random"}, other))["validation.against"]
    assert (
        "twice: win rates are by name. Entries 0 and 2 are named 'lab/big'" in found and "give a url a `name`" in found
    )
    spec = job(URL, {**other, "name": "others/big"}, seats={**BASE["seats"], "third": other})
    assert spec.validation is not None
    assert spec.validation.anchors_of("speaker") == ["lab/big", "others/big"]
    assert len(urls_in(all_players(spec))) == 2


def test_opponents_contradict_seats_and_settings() -> None:
    seats = {**BASE["seats"], "third": {**URL, "temperature": 1.0}}
    assert "the same settings" in refused(seats=seats, **validation(URL))["validation.against.0.model"]
    tools = {"environment": {"name": "signalling", "tools": [{"type": "python"}]}}
    assert "cannot call them" in refused(**validation(URL), **tools)["environment.tools"]
    many = {f"seat{number}": {"frozen": f"j-0123456789@{number}"} for number in range(MAX_POLICIES - 2)}
    assert "seats" not in refused(seats={**BASE["seats"], **many}, train={}, **validation({"bot": "random"}))
    found = refused(seats={**BASE["seats"], **many}, **validation({"frozen": "j-0123456789@99"}))
    assert found.keys() == {"validation.against"}, "which goes over the limit"
    assert f"{MAX_POLICIES} may play in a job: leave out 1 of j-0123456789@99" in found["validation.against"]
    many["one more"] = {"frozen": "j-0123456789@98"}
    found = refused(seats={**BASE["seats"], **many}, **validation({"frozen": "j-0123456789@99"}))
    assert found.keys() == {"seats"} and f"{MAX_POLICIES} may play" in found["seats"]
    exact = {"train": {"steps": 1, "deterministic": True}, "algorithm": {"max_staleness": 0}}
    assert "nothing fixes what it answers" in refused(**validation(URL), **exact)["validation.against.0.url"]


@pytest.mark.parametrize(
    ("seats", "team", "refused"),
    [
        ({"first": "speaker", "second": "speaker", "judge": FROZEN}, {}, True),
        ({"first": "speaker", "second": "speaker", "judge": FROZEN}, {"debaters": ["first", "second"]}, False),
        ({"first": "speaker", "second": "speaker", "judge": FROZEN}, {"some": ["first", "judge"]}, True),
        ({"first": "speaker", "second": "speaker", "judge": {"bot": "random"}}, {}, True),
        ({"*": "speaker", "judge": URL}, {}, True),
        ({"*": "speaker"}, {}, False),
        ({"first": "speaker", "second": {"pool": "past"}, "judge": FROZEN}, {}, False),
        ({"first": "speaker", "second": FROZEN, "judge": {"bot": "random"}}, {}, False),
    ],
)
def test_a_policy_that_plays_itself_before_a_judge_has_no_seat_for_an_opponent(
    seats: dict[str, Any], team: dict[str, list[str]], refused: bool
) -> None:
    pools = {"pools": {"past": {"policy": "speaker", "every": 5}}} if {"pool": "past"} in seats.values() else {}
    against = validation({"bot": "random"}, {"bot": "perfect"})
    own = {"speaker": {"algorithm": {"team": team}} if team else {}}
    spec = parse_spec({**BASE, **pools, **({} if "*" in seats and len(seats) == 1 else against), "policies": own,
                       "seats": seats, "environment": {"name": "debate"}})  # fmt: skip
    found = ambiguous_opponents(spec, ["first", "second", "judge"])
    assert [one["field"] for one in found] == ["validation.against"] * refused
    if refused:
        assert (
            "would take 'judge', while policy 'speaker' plays 'first', 'second' against itself" in found[0]["problem"]
        )


def test_the_job_s_one_policy_plays_the_seats_that_are_not_named() -> None:
    alone = {name: value for name, value in BASE.items() if name != "policies"}
    spec = parse_spec({**alone, **validation({"bot": "random"}), "seats": {"judge": FROZEN}})
    assert len(ambiguous_opponents(spec, ["first", "second", "judge"])) == 1
    assert ambiguous_opponents(spec, ["first", "judge"]) == ambiguous_opponents(spec, []) == []
