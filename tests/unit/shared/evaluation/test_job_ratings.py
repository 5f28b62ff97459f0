"""Ratings of a job's players on one scale, from evaluations and from matches of training."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import orjson
import pytest

from opentinker.services.trainer.joint_progress import JointProgress
from opentinker.shared.evaluation import job_ratings
from opentinker.shared.evaluation.job_ratings import Counts, JobRatings
from opentinker.shared.evaluation.records import Evaluations
from opentinker.shared.types.core import WeightVersion
from opentinker.shared.types.match_results import MatchResult, Opponent
from tests.support.factories import make_spec

BOT = "bot:random"
EVEN: Counts = (50, 0, 50)


def matches(version: str, won: int, drawn: int, lost: int, **opponents: str) -> list[MatchResult]:
    """`opponents`: version by name."""
    outcomes = [1.0] * won + [0.5] * drawn + [0.0] * lost
    return [
        MatchResult(
            group=number,
            sample=0,
            version=version,
            rewards={},
            opponents={name: Opponent(outcome=outcome, version=seen) for name, seen in opponents.items()},
        )
        for number, outcome in enumerate(outcomes)
    ]


def elo(ratings: JobRatings, player: str, results: dict[str, Counts]) -> float | None:
    found = ratings.copy().rate(player, results, BOT)
    return None if found is None else found.elo


def test_matches_of_training_carry_the_scale_to_what_no_bot_has_met() -> None:
    ratings = JobRatings(["a", "b"])
    ratings.add_evaluation("a@1.20", {BOT: (90, 0, 10)})
    assert elo(ratings, "b@1.20", {"a@1.7": EVEN}) is None, "nothing connects it with the bot"
    ratings.add_matches("a", matches("1.20", 50, 0, 50, b="1.20"))
    ratings.add_matches("b", matches("1.20", 50, 0, 50, a="1.20"))
    rated = ratings.copy().rate("b@1.20", {"j-1@5": EVEN}, BOT)
    assert rated is not None and rated.elo == pytest.approx(382, abs=60), "as strong as a, which wins 9 of 10"
    assert rated.games == 100 + 100, "a match that both report is one"


def test_a_member_of_a_pool_is_the_version_that_it_was() -> None:
    ratings = JobRatings(pools={"past": ""})
    ratings.add_evaluation("@0.0", {BOT: EVEN})
    ratings.add_matches("", matches("1.9", 90, 0, 10, **{"past@0.0": "0.0"}))
    ratings.add_matches("", matches("1.9", 10, 0, 90, **{BOT: ""}))
    ratings.add_matches("", matches("1.0", 5, 0, 5, **{"past@0.0": "0.0"}))  # against itself
    assert ratings.results() == {("@0.0", BOT): EVEN, ("@1.9", "@0.0"): (90, 0, 10), ("@1.9", BOT): (10, 0, 90)}


def test_games_of_a_version_against_itself_say_nothing() -> None:
    """The first member of a pool is the policy as it begins, and the newest may be the policy as it is."""
    ratings = JobRatings(pools={"past": ""})
    ratings.add_matches("", matches("1.0", 3, 0, 5, **{"past@0.0": "0.0", BOT: ""}))
    ratings.add_evaluation("@1.9", {"@1.9": EVEN, BOT: EVEN})
    assert ratings.results() == {("@0.0", BOT): (3, 0, 5), ("@1.9", BOT): EVEN}
    assert elo(ratings, "@0.0", {BOT: EVEN, "@0.0": EVEN}) is not None


@pytest.mark.parametrize("url_player", ["gpt@https://models.example/v1", "@x@https://models.example/v1"])
def test_a_model_behind_a_url_may_be_named_as_a_policy_or_a_pool_is(url_player: str) -> None:
    for ratings in (JobRatings(["gpt", "b"]), JobRatings(pools={"gpt": ""})):
        policy = "b" if not ratings._pools else ""
        ratings.resume(policy, {1: 0, 2: 4})
        ratings.resume("gpt", {1: 0, 2: 4})
        ratings.restore([(1.0, "", ratings.count_matches(policy, matches("1.2", 3, 0, 1, **{url_player: "0.0"})))])
        ratings.add_matches(policy, matches("2.4", 1, 0, 0, **{url_player: "0.0"}))
        ratings.add_evaluation(f"{policy}@2.4", {url_player: EVEN})
        assert ratings.results() == {
            (f"{policy}@1.2", url_player): (3, 0, 1), (f"{policy}@1.4", url_player): (51, 0, 50)
        }  # fmt: skip
        assert ratings.copy().rate(f"{policy}@2.4", {url_player: EVEN}, url_player) is not None


NEUTRAL: list[dict[str, Any]] = [
    {"seats": {"first": "p", "second": "q", "judge": {"bot": "random"}}},
    {"seats": {"first": "p", "second": "q", "enemy": "r"}, "team": ["first", "second"]},
    {"seats": {"first": "p", "second": "p", "judge": {"bot": "random"}}},
]


@pytest.mark.parametrize(("job", "met"), zip(NEUTRAL, ("q", "r", None), strict=True))
def test_results_against_neutral_players_and_teammates_that_an_earlier_release_stored_do_not_count(
    job: dict[str, Any], met: str | None, tmp_path: Path
) -> None:
    own = {"algorithm": {"team": {"us": job["team"]}}} if "team" in job else {}
    names = [player for player in job["seats"].values() if isinstance(player, str)]
    spec = make_spec(
        environment__name="game", policies=dict.fromkeys(names, own), seats=job["seats"], train={"steps": 3}
    )
    others = {name: "1.1" for name in names if name != "p"} | ({} if "team" in job else {BOT: ""})
    stored = [
        msgspec.structs.replace(one, rewards={"first": 1.0, "second": 1.0}) for one in matches("1.1", 1, 0, 0, **others)
    ]
    line = {"epoch": 1, "step": 2, "time": 0.0, "matches": msgspec.to_builtins(stored)}
    (tmp_path / "matches.jsonl").write_bytes(orjson.dumps(line) + b"\n")

    async def event(*_: Any) -> None: ...

    bus: Any = SimpleNamespace(on_reconnect=set())
    ratings = JointProgress.of(spec).ratings
    Evaluations(bus, "j", tmp_path, event, event, "p", ratings).restore({1: 0}, 2)
    counted = {("p@1.1", f"{met}@1.1"): (0.5, 0, 0)} if met else {}
    assert ratings.results() == counted
    ratings.copy().add_matches("p", stored)
    assert ratings.results() == counted


@pytest.mark.parametrize("anchor", ["", BOT])
def test_members_of_a_long_job_keep_their_ratings(anchor: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that met the initial weights, or the last version that met the bot, have not played for long. Each step
    makes the policy stronger by 2 points."""
    monkeypatch.setattr(job_ratings, "MAX_RATED", 60)
    ratings, members = JobRatings(pools={"past": ""}), [0]
    for step in range(1, 301):
        won = {member: 100 / (1 + 10 ** (2 * (member - step) / 400)) for member in members}
        played = {(f"@1.{step}", _version(member)): (rate, 0.0, 100 - rate) for member, rate in won.items()}
        ratings.restore([(float(step), "", played)])
        if step == 195:
            ratings.add_evaluation("@1.195", {BOT: EVEN})
        if step % 10 == 0:
            members = [*members, step][-5:]
        assert len(ratings.copy()._versions) <= 60 * 1.1 + 5
    rated = ratings.rate_members("past", [WeightVersion(1, member) for member in members], anchor)
    assert (rated["1.260"].elo == 0) is (not anchor)
    for member, one in zip(members, rated.values(), strict=True):
        assert one.elo == pytest.approx(2 * (member - (195 if anchor else 260)), abs=60 if anchor else 20)


def _version(step: int) -> str:
    return f"@1.{step}" if step else "@0.0"


def test_too_long_a_chain_to_a_bot_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_ratings, "MAX_RATED", 3)
    for links, connected in ((3, True), (2, False)):
        monkeypatch.setattr(job_ratings, "MAX_LINKS", links)
        ratings = JobRatings(pools={"past": ""})
        ratings.add_evaluation("@1.1", {BOT: EVEN})
        for step in range(2, 7):
            met = f"1.{step - 1}"
            ratings.add_matches("", matches(f"1.{step}", 2, 0, 1, **{f"past@{met}": met}))
        assert bool(ratings.rate_members("past", [WeightVersion(1, 6)], BOT)) is connected


def test_versions_that_have_played_last_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_ratings, "MAX_RATED", 3)
    ratings = JobRatings(pools={"past": ""})
    for step in range(1, 6):
        ratings.add_evaluation(f"@1.{step}", {BOT: EVEN})
        ratings.add_matches("", matches(f"1.{step}", 1, 0, 0, **{"past@1.1": "1.1"}))
    assert {player for pair in ratings.results() for player in pair} == {"@1.1", "@1.4", "@1.5", BOT}


async def test_a_restarted_trainer_knows_the_results_of_the_steps_that_count(tmp_path: Path) -> None:
    def line(epoch: int, step: int, **more: Any) -> bytes:
        return orjson.dumps({"epoch": epoch, "step": step, "time": 1.0, "version": f"{epoch}.{step}", **more}) + b"\n"

    met = [
        {
            "group": 0,
            "sample": 0,
            "version": "1.0",
            "rewards": {},
            "opponents": {"b": {"outcome": 1.0, "version": "1.1"}},
        }
    ]
    evaluated = {"val/wins/random": 3.0, "val/losses/random": 1.0, "players": {"random": BOT}}
    (tmp_path / "validation.jsonl").write_bytes(
        line(1, 2, **evaluated) + line(1, 4, **evaluated) + line(1, 2, **{**evaluated, "val/missing": 2.0})
    )
    (tmp_path / "matches.jsonl").write_bytes(
        line(1, 1, matches=met) + line(1, 4, matches=met) + line(2, 3, matches=met)
    )

    async def event(*_: Any) -> None: ...

    bus: Any = SimpleNamespace(on_reconnect=set())
    ratings = JobRatings(["a", "b"])
    Evaluations(bus, "j", tmp_path, event, event, "a", ratings).restore({1: 0, 2: 2}, 3)
    assert ratings.results() == {("a@0.0", "b@1.1"): (1.0, 0.0, 0.0)}, "step 4 was rolled back, step 2 is incomplete"


def test_games_of_one_evaluation_against_the_same_weights_are_added_up() -> None:
    ratings = JobRatings(["a", "b"])
    ratings.resume("b", {1: 0, 2: 5})
    ratings.add_evaluation("a@2.9", {"b@1.5": (3, 1, 2), "b@2.5": (1, 0, 0), "b@2.6": (0, 0, 1)})
    assert ratings.results() == {("a@2.9", "b@1.5"): (4, 1, 2), ("a@2.9", "b@2.6"): (0, 0, 1)}


async def test_results_of_training_are_restored_before_the_first_evaluation(tmp_path: Path) -> None:
    met = {"group": 0, "sample": 0, "version": "1.2", "rewards": {}, "opponents": {"past@0.0": {"outcome": 1.0}}}
    line = {"epoch": 1, "step": 3, "time": 1.0, "matches": [met]}
    (tmp_path / "matches.jsonl").write_bytes(orjson.dumps(line) + b"\n")

    async def event(*_: Any) -> None: ...

    bus: Any = SimpleNamespace(on_reconnect=set())
    ratings = JobRatings(pools={"past": ""})
    Evaluations(bus, "j", tmp_path, event, event, "", ratings).restore({1: 0}, 3)
    assert ratings.results() == {("@1.2", "@0.0"): (1.0, 0.0, 0.0)}


def test_without_an_anchor_members_are_rated_against_the_oldest_that_has_played() -> None:
    ratings = JobRatings(pools={"past": "a"}, policies=["a", "b"])
    ratings.add_matches("a", matches("1.9", 90, 0, 10, **{"past@0.0": "0.0"}))
    versions = [WeightVersion(1, 1), WeightVersion(0, 0), WeightVersion(1, 9), WeightVersion(1, 20)]
    rated = ratings.rate_members("past", versions, "")
    assert rated["0.0"].elo == 0.0 and rated["1.9"].elo == pytest.approx(380, abs=60) and len(rated) == 2
    assert ratings.rate_members("past", versions, BOT) == {}, "nothing connects them with the bot"


def test_weights_that_a_restarted_trainer_publishes_again_are_the_same_player() -> None:
    """Results of all policies count by time, whichever policy restores them first."""
    ratings = JobRatings(["a", "b"])
    evaluated = {("a@1.10", "b@1.10"): EVEN, ("a@1.10", BOT): EVEN}
    ratings.resume("a", {1: 0, 2: 10, 3: 10})
    ratings.restore([(3.0, "a@1.10", evaluated)])
    ratings.restore([(2.0, "", {("b@1.10", "a@1.9"): (1, 0, 0)})])
    ratings.resume("b", {1: 0, 3: 10})
    ratings.add_matches("a", matches("3.10", 2, 0, 0, b="3.10"))
    ratings.add_evaluation("b@3.10", {"a@2.10": EVEN})
    assert ratings.results() == {
        ("a@1.10", "b@1.10"): (51, 0, 50), ("a@1.10", BOT): EVEN,
        ("b@1.10", "a@1.9"): (1, 0, 0), ("b@1.10", "a@1.10"): EVEN,
    }  # fmt: skip
    assert elo(ratings, "b@3.10", {"a@3.10": EVEN}) is not None


def test_versions_that_played_last_are_kept_of_all_restored_policies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_ratings, "MAX_RATED", 2)
    ratings = JobRatings(["a", "b"])
    for policy, times in (("a", (1.0, 4.0)), ("b", (2.0, 3.0))):
        lines = [(at, f"{policy}@1.{at:.0f}", {(f"{policy}@1.{at:.0f}", BOT): EVEN}) for at in times]
        ratings.restore(lines)
    assert {player for player, _ in ratings.results()} == {"b@1.3", "a@1.4"}


async def test_a_restart_changes_no_results_of_a_long_job(tmp_path: Path) -> None:
    """The file is larger than a trainer would read at once, and has more steps than versions are rated."""

    async def event(*_: Any) -> None: ...

    before = JobRatings(pools={"past": ""})
    with (tmp_path / "matches.jsonl").open("wb") as file:
        for step in range(1, 601):
            met = f"1.{(step - 1) // 100 * 100}" if step > 100 else "0.0"
            played = matches(f"1.{step - 1}", 2, 0, 1, **{f"past@{met}": met, BOT: ""})
            before.add_matches("", played)
            line = {"epoch": 1, "step": step, "time": float(step), "matches": msgspec.to_builtins(played)}
            file.write(orjson.dumps({**line, "padding": "x" * 20_000}) + b"\n")
    assert (tmp_path / "matches.jsonl").stat().st_size > 2**23
    bus: Any = SimpleNamespace(on_reconnect=set())
    after = JobRatings(pools={"past": ""})
    Evaluations(bus, "j", tmp_path, event, event, "", after).restore({1: 0}, 600)
    assert after.results() == before.results()


@pytest.mark.parametrize("algorithm", ["at_grpo", "grpo"])
async def test_the_rating_of_a_job_with_trees_is_that_of_its_evaluations(tmp_path: Path, algorithm: str) -> None:
    """Its matches of training go on from the best of several candidates: 97 of 100 are won, and 20 by the policy
    itself."""
    spec = make_spec(
        algorithm={"name": algorithm, "group_size": 16, "groups_per_batch": 1},
        environment__name="matching_pennies",
        rollout__engine="toy",
        seats={"odd": {"bot": "random"}},
        validation={"every": 1, "episodes": 100, "against": [{"bot": "random"}]},
    )
    played = matches("1.1", 97, 0, 3, **{BOT: ""})
    line = {"epoch": 1, "step": 2, "time": 0.0, "matches": msgspec.to_builtins(played)}
    (tmp_path / "matches.jsonl").write_bytes(orjson.dumps(line) + b"\n")

    async def rated(ratings: JobRatings, *, after_matches: bool) -> dict[str, float]:
        async def event(*_: Any) -> None: ...

        bus: Any = SimpleNamespace(on_reconnect=set())
        kept = Evaluations(bus, "j", tmp_path, event, event, "", ratings)
        if after_matches:
            kept.restore({1: 0}, 2)
            ratings.add_matches("", played)
        values = {"val/wins/random": 20.0, "val/draws/random": 0.0, "val/losses/random": 80.0}
        return await kept.rate(WeightVersion(1, 1), values, {"random": BOT}, ["random"])

    alone = await rated(JobRatings(), after_matches=False)
    found = await rated(JointProgress.of(spec).ratings, after_matches=True)
    assert alone["val/rating"] < -200
    assert found == alone if algorithm == "at_grpo" else found["val/rating"] > 0
