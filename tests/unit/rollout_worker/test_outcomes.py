"""Winners of evaluation episodes, and ratings of the weights of a policy by such episodes."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from opentinker.services.rollout_worker.eval_runner import EvalRunner, outcome_of
from opentinker.services.rollout_worker.seat_map import LoadedPolicy, SeatMap
from opentinker.shared.evaluation.records import Evaluations, transcript_of
from opentinker.shared.spec import EvaluationSpec, JobSpec, parse_spec
from opentinker.shared.spec.matches.policies import spec_of
from opentinker.shared.types.core import Ending, WeightVersion
from opentinker.shared.types.evaluation import EvalEpisode, EvalResult
from opentinker.shared.types.trajectories import Span
from tests.support.factories import V0, trajectory_of

GAME: dict[str, Any] = {
    "name": "game",
    "model": {"base": "m"},
    "environment": {"name": "kuhn_poker"},
    "rollout": {"engine": "toy"},
    "train": {"steps": 10},
    "policies": {"a": {}, "b": {}},
    "seats": {"first": "a", "second": "b"},
    "validation": {"every": 5, "episodes": 4, "against": [{"policy": "a"}]},
}


def loaded(spec: JobSpec) -> list[LoadedPolicy]:
    return [LoadedPolicy(name, spec_of(spec, name), None, None) for name in spec.policies or ("",)]  # type: ignore[arg-type]


def runner_of(spec: JobSpec, policy: str) -> EvalRunner:
    nothing: Any = None
    return EvalRunner(nothing, "w", "j", spec, loaded(spec), nothing, Counter(), nothing, Counter(), policy=policy)


@pytest.mark.parametrize(
    ("rewards", "outcome"),
    [
        ({"first": 1.0, "second": -1.0}, 1.0),
        ({"first": -1.0, "second": 1.0}, 0.0),
        ({"first": 0.1 + 0.2, "second": 0.3}, 0.5),
        ({"second": 1.0}, 0.0),  # a seat that is not named earned nothing
        ({"first": 1.0}, 1.0),
    ],
)
def test_the_policy_wins_that_earned_more(rewards: dict[str, float], outcome: float) -> None:
    spec = parse_spec(GAME)
    episode: Any = SimpleNamespace(rewards=rewards, seats=SeatMap(spec, loaded(spec)))
    assert outcome_of(episode, "a") == outcome


def test_a_policy_that_plays_alone_has_no_outcome() -> None:
    spec = parse_spec({**GAME, "policies": {"a": {}}, "seats": {"first": "a", "second": "a"}, "validation": None})
    episode: Any = SimpleNamespace(rewards={"first": 1.0}, seats=SeatMap(spec, loaded(spec)))
    assert outcome_of(episode, "a") is None


def test_a_judge_that_keeps_its_seat_is_nobody_s_opponent() -> None:
    against = [{"bot": "random"}]
    seats = {"first": "a", "second": "b", "judge": {"bot": "perfect"}}
    spec = parse_spec({**GAME, "environment": {"name": "debate"}, "seats": seats,
                       "validation": {"every": 5, "against": against}})  # fmt: skip
    assert spec.validation is not None
    (random,) = spec.validation.opponents_of("a")
    played = SeatMap(spec, loaded(spec)).opposed("a", random, 0)
    assert played.bots == {"first": "", "second": "random", "judge": "perfect"}
    for rewards, outcome in (((0.0, 0.0, 1.0), 0.5), ((-1.0, 1.0, -9.0), 0.0), ((1.0, -1.0, 9.0), 1.0)):
        episode: Any = SimpleNamespace(rewards=dict(zip(seats, rewards, strict=True)), seats=played)
        assert outcome_of(episode, "a") == outcome


@pytest.mark.parametrize("judge", [{"bot": "perfect"}, {"frozen": "j-0123456789@7"}])
def test_a_judge_is_nobody_s_opponent_where_the_players_of_the_seats_play(judge: dict[str, Any]) -> None:
    seats = {"first": "a", "second": "b", "judge": judge}
    spec = parse_spec({**GAME, "environment": {"name": "debate"}, "seats": seats, "validation": {"every": 5}})
    players = [*loaded(spec), LoadedPolicy("j-0123456789@7", spec, None, None, True)]  # type: ignore[arg-type]
    seated = SeatMap(spec, players)
    for rewards, outcome in (((0.0, 0.0, 1.0), 0.5), ((-1.0, 1.0, -9.0), 0.0), ((1.0, -1.0, 9.0), 1.0)):
        episode: Any = SimpleNamespace(rewards=dict(zip(seats, rewards, strict=True)), seats=seated)
        assert outcome_of(episode, "a") == outcome
    won: Any = SimpleNamespace(rewards={"first": 1.0, "judge": 2.0}, seats=seated)
    assert outcome_of(won, "a") == 1.0, "the opponent earned nothing"


@pytest.mark.parametrize("against", [[], [{"bot": "random"}]])
def test_a_teammate_is_no_opponent(against: list[Any]) -> None:
    us = {"algorithm": {"team": {"us": ["one", "two"]}}}
    spec = parse_spec({**GAME, "environment": {"name": "debate"}, "policies": {"a": us, "b": us},
                       "seats": {"one": "a", "two": "b", "enemy": {"bot": "perfect"}},
                       "validation": {"every": 5, "against": against}})  # fmt: skip
    assert spec.validation is not None
    seated = SeatMap(spec, loaded(spec))
    for opponent in spec.validation.opponents_of("a"):
        seated = seated.opposed("a", opponent, 0)
    for enemy, outcome in ((-2.0, 1.0), (1.0, 0.5), (3.0, 0.0)):
        episode: Any = SimpleNamespace(rewards={"one": 1.0, "two": 1.0, "enemy": enemy}, seats=seated)
        assert outcome_of(episode, "a") == outcome


@pytest.mark.parametrize(("team", "outcome"), [(None, None), (["first", "second"], 0.0), (["first", "judge"], None)])
def test_a_policy_that_plays_itself_does_not_play_the_judge(team: list[str] | None, outcome: float | None) -> None:
    own = {"algorithm": {"team": {"us": team}}} if team else {}
    seats = {"first": "a", "second": "a", "judge": {"frozen": "j-0123456789@7"}}
    spec = parse_spec({**GAME, "environment": {"name": "debate"}, "policies": {"a": own}, "seats": seats,
                       "validation": {"every": 5}})  # fmt: skip
    players = [*loaded(spec), LoadedPolicy("j-0123456789@7", spec, None, None, True)]  # type: ignore[arg-type]
    for rewards in ({"first": 1.0, "second": -1.0, "judge": 1.0}, {"first": 1.0, "judge": 2.0}):
        episode: Any = SimpleNamespace(rewards=rewards, seats=SeatMap(spec, players))
        assert outcome_of(episode, "a") == outcome


@pytest.mark.parametrize(
    ("evaluation", "outcome"),
    [
        ({}, 0.0),  # 0.6 against the mean of 0.4 and 1
        ({"opponents": ["second"]}, 1.0),
        ({"opponents": ["second"], "team": {"us": ["first", "second"]}}, 0.0),  # the referee alone
        ({"team": {"us": ["first", "*"]}}, None),
    ],
)
def test_an_eval_job_says_which_checkpoints_are_opponents(evaluation: dict[str, Any], outcome: float | None) -> None:
    game = {name: GAME[name] for name in ("name", "model", "environment", "rollout")}
    seats = {"second": {"frozen": "j-0123456789@7"}, "referee": {"bot": "random"}}
    spec = parse_spec({**game, "kind": "eval", "start": {"from": "j-0123456789@7"}, "seats": seats,
                       "evaluation": evaluation})  # fmt: skip
    other = LoadedPolicy("j-0123456789@7", spec, None, None, True)  # type: ignore[arg-type]
    rewards = {"first": 0.6, "second": 0.4, "referee": 1.0}
    episode: Any = SimpleNamespace(rewards=rewards, seats=SeatMap(spec, [*loaded(spec), other]))
    assert outcome_of(episode, "") == outcome


@pytest.mark.parametrize("enemies", ["enemy", "enemy_*"])
def test_seats_of_an_opponent_that_earned_nothing_may_have_a_pattern(enemies: str) -> None:
    spec = parse_spec({**GAME, "policies": {}, "seats": {enemies: {"bot": "random"}}, "validation": None})
    episode: Any = SimpleNamespace(rewards={"first": 1.0}, seats=SeatMap(spec, loaded(spec)))
    assert outcome_of(episode, "") == 1.0


def test_kept_episodes_are_shared_among_opponents() -> None:
    against = [{"bot": "random"}, {"bot": "equilibrium"}]
    spec = parse_spec({**GAME, "validation": {"every": 5, "episodes": 100, "transcripts": 8, "against": against}})
    runner = runner_of(spec, "a")
    exams = [EvalEpisode(job="j", version=V0, index=index, seed=0) for index in range(200)]
    assert [exam.index for exam in exams if runner._is_among(exam, 8)] == [*range(4), *range(100, 104)]
    assert [exam.index for exam in exams if runner._is_among(exam, 3)] == [0, 1, 100], "no more than were asked for"
    assert runner.places == spec.rollout.max_concurrent_groups * spec.algorithm.group_size // 2, "b has the other half"


@pytest.mark.parametrize(("samples", "beginning"), [(1, (2, 0)), (2, (1, 0))])
def test_a_kept_game_says_its_opponent_and_its_start_state(samples: int, beginning: tuple[int, int]) -> None:
    plan = EvaluationSpec(episodes=100, samples=samples, temperature=1.0)
    result = EvalResult(job="j", version=V0, index=plan.total + 2, worker="w", ending=Ending.ENV_DONE)
    kept = transcript_of(result, plan, ["random", "equilibrium"])
    assert (kept["opponent"], kept.get("state"), kept.get("sample")) == ("equilibrium", *beginning)


def test_a_bot_that_earned_nothing_has_0() -> None:
    spec = parse_spec({**GAME, "policies": {}, "seats": {"second": {"bot": "random"}}, "validation": None})
    seats = SeatMap(spec, loaded(spec))
    lost, won = (SimpleNamespace(rewards={"first": reward}, seats=seats) for reward in (-1.0, 1.0))
    assert [outcome_of(one, "") for one in (lost, won)] == [0.0, 1.0]  # type: ignore[arg-type]


async def test_a_match_that_ends_before_the_policy_acts_counts() -> None:
    """The opponent's first move was illegal."""
    spec = parse_spec(GAME)
    runner = runner_of(spec, "b")

    async def run() -> list[Any]:
        return [trajectory_of([1, 2], [0, 1], policy="a", seat="first", reward=-2.0)]

    episode: Any = SimpleNamespace(
        rewards={"first": -2.0, "second": 2.0}, seats=SeatMap(spec, loaded(spec)), streams={}, run=run
    )
    found = await runner._result(EvalEpisode(job="j", version=V0, index=1, seed=0), episode)
    assert (found.reward, found.outcome, found.tokens, found.sampled_by) == (2.0, 1.0, 0, [])
    assert found.ending == Ending.ENV_DONE and found.seats == {"first": -2.0, "second": 2.0}


@pytest.mark.parametrize("acted", [True, False])
async def test_a_result_has_the_weights_of_the_policy_that_was_the_opponent(acted: bool) -> None:
    """Their oldest, if they changed during the episode; those of the engine, if it ended before their turn."""
    spec = parse_spec(
        {**GAME, "validation": {"every": 5, "episodes": 2, "against": [{"bot": "random"}, {"policy": "b"}]}}
    )
    runner = runner_of(spec, "a")
    runner.engines = {name: SimpleNamespace(version=WeightVersion(1, 8)) for name in "ab"}
    played = [trajectory_of([1, 2], [0, 1], policy="a", seat="first")]
    if acted:
        spans = [Span(1, 2, WeightVersion(1, 6)), Span(3, 4, WeightVersion(1, 7))]
        played.append(trajectory_of([1, 2, 3, 4], [0, 1, 0, 1], policy="b", seat="second", spans=spans))

    async def run() -> list[Any]:
        return played

    episode: Any = SimpleNamespace(rewards={"first": 1.0}, seats=SeatMap(spec, loaded(spec)), streams={}, run=run)
    exams = [EvalEpisode(job="j", version=V0, index=index, seed=0) for index in (0, 2)]
    found = [(await runner._result(exam, episode)).opponent for exam in exams]
    assert found == [None, WeightVersion(1, 6 if acted else 8)]


def test_opponents_do_not_bound_the_context_of_matches_that_they_do_not_play() -> None:
    spec = parse_spec({**GAME, "validation": {"every": 5, "against": [{"frozen": "j-0123456789@7"}]}})
    assert spec.validation is not None
    short, long = (SimpleNamespace(context_length=length, close=None, version=V0) for length in (64, 512))
    players = [LoadedPolicy(name, spec, engine, None) for name, engine in (("a", long), ("b", long))]  # type: ignore[arg-type]
    seats = SeatMap(spec, [*players, LoadedPolicy("j-0123456789@7", spec, short, None, True)])  # type: ignore[arg-type]
    assert seats.context == 512
    assert seats.opposed("a", spec.validation.against[0], 0).context == 64


async def test_ratings_are_relative_to_the_first_anchor_and_use_all_evaluations(tmp_path: Path) -> None:
    async def event(*_: Any) -> None: ...

    bus: Any = SimpleNamespace(on_reconnect=set())
    kept = Evaluations(bus, "j", tmp_path, event, event, "a")

    def games(weak: tuple[int, int, int], strong: tuple[int, int, int]) -> dict[str, float]:
        counts = {"weak": weak, "strong": strong}
        return {
            f"val/{won}/{name}": float(n)
            for name, found in counts.items()
            for won, n in zip(("wins", "draws", "losses"), found, strict=True)
        }

    players = {"weak": "bot:weak", "strong": "bot:strong"}

    async def rate(step: int, values: dict[str, float]) -> dict[str, float]:
        return await kept.rate(WeightVersion(1, step), values, players, list(players))

    assert await rate(0, {"val/episodes": 4.0}) == {}, "no game was decided"
    before = await rate(0, games((50, 0, 50), (10, 0, 90)))
    assert await rate(0, games((0, 0, 0), (10, 0, 90))) == {}, "nothing connects it with the first one"
    assert before["val/rating"] == pytest.approx(0.0, abs=5.0) and before["val/rating/error"] > 0
    kept._ratings.add_evaluation("a@0.0", {"bot:weak": (50, 0, 50), "bot:strong": (10, 0, 90)})
    after = await rate(20, games((90, 0, 10), (50, 0, 50)))
    assert 1 / (1 + 10 ** (-after["val/rating"] / 400)) == pytest.approx(0.9, abs=0.02)
    alone = await rate(20, games((0, 0, 0), (50, 0, 50)))
    assert alone["val/rating"] == pytest.approx(after["val/rating"], abs=40.0), "strong is known from step 0"
