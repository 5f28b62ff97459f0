"""Episodes with tree sampling: what is asked, which candidate goes on, and the trajectories of all of them."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from opentinker.services.rollout_worker.episode import turn_seed
from opentinker.services.rollout_worker.episode_protocol import EpisodeFailed
from opentinker.services.rollout_worker.seat_map import LoadedPolicy, SeatMap
from opentinker.services.rollout_worker.tree_episode import TreeEpisode
from opentinker.services.rollout_worker.url_player import UrlPlayer, UrlTurn
from opentinker.services.trainer.algorithm.credit_assignment import assign
from opentinker.shared.types.core import Ending, WeightVersion
from opentinker.shared.types.env_protocol import SessionReply
from opentinker.shared.types.guide import Guide
from opentinker.shared.types.trajectories import Group, Span, Trajectory
from tests.support.factories import make_spec, make_ticket
from tests.unit.rollout_worker.scripted_episode import Chars, Env, Script, failure_of, renderer, reply, say
from tests.unit.rollout_worker.test_rounds import ask, over

V2 = WeightVersion(1, 2)


def outcomes(*replies: SessionReply) -> SessionReply:
    return SessionReply(worker="env-0", outcomes=list(replies), done=all(one.done for one in replies))


def tree_episode(engine: Script, env: Env, size: int = 3, **spec: Any) -> TreeEpisode:
    algorithm = {"name": "at_grpo", "group_size": size, "groups_per_batch": 2, **spec.pop("algorithm", {})}
    job = make_spec(algorithm=algorithm, **({"rollout__max_turns": 3, "rollout__max_tokens": 50} | spec))
    ticket = make_ticket(group_size=size, seed=5)
    return TreeEpisode(job, ticket, 0, SeatMap.single(job, engine, renderer()), env)  # type: ignore[arg-type]


def words(trajectory: Trajectory) -> tuple[str, str]:
    """The context, and what was sampled."""
    text = Chars().decode(trajectory.ids.tolist())
    sampled = trajectory.ids[trajectory.mask.astype(bool)].tolist()
    return text, Chars().decode(sampled)


def group(trajectories: list[Trajectory]) -> Group:
    found = Group(job="j", seq=0, environment="e", worker="w", trajectories=trajectories, is_tree=True)
    found.check()
    return found


async def test_the_best_candidate_goes_on_and_the_others_are_trajectories_of_their_own() -> None:
    engine = Script([say("a$"), say("b$", spans=[Span(0, 1, V2), Span(1, 2, V2)]), say("c$"),
                     say("x$"), say("y$"), say("z$")])  # fmt: skip
    env = Env([
        reply("go"),
        outcomes(reply("A", reward=0.1), reply("B", reward=0.3), reply("C", reward=0.2)),
        outcomes(reply(reward=0.5, done=True), reply("Y"), reply("Z")),
    ])  # fmt: skip
    played, *others = found = await tree_episode(engine, env).run()
    assert words(played) == ("<u>go\n<a>b\n<u>B\n<a>x", "bx")
    assert [(turn.reward, turn.paid, turn.number) for turn in played.turns] == [
        (0.3, {"": 0.3}, 0),
        (0.5, {"": 0.5}, 1),
    ]
    assert [(t.index, t.turns[0].number, *words(t)) for t in others] == [
        (1, 0, "<u>go\n<a>a", "a"),
        (1, 1, "<u>go\n<a>b\n<u>B\n<a>y", "y"),
        (2, 0, "<u>go\n<a>c", "c"),
        (2, 1, "<u>go\n<a>b\n<u>B\n<a>z", "z"),
    ]
    assert [span.version for span in played.spans] == [V2, found[1].spans[0].version]
    assert {len(t.turns) for t in others} == {1} and {t.logprobs[t.mask == 1].tolist()[0] for t in found} == {-0.5}
    assert {t.ending for t in found} == {Ending.ENV_DONE} and env.closed == 1, "two candidates had not ended it"
    group(found)


async def test_candidates_see_the_same_and_draw_for_themselves() -> None:
    engine = Script([say(f"{n}$") for n in range(6)])
    env = Env([
        reply("go"),
        outcomes(reply("A"), reply("B", reward=1.0), reply("C")),
        outcomes(*[reply(done=True)] * 3),
    ])  # fmt: skip
    await tree_episode(engine, env, rollout__seed=7).run()
    first, second = engine.asked[:3], engine.asked[3:]
    for asked in (first, second):
        assert len({tuple(prompt) for prompt, _ in asked}) == 1
    seeds = [sampling.seed for _, sampling in engine.asked]
    assert seeds == [turn_seed(5, candidate, turn) for turn in (0, 1) for candidate in range(3)]
    assert [(request.turn, request.chosen) for request in env.requests] == [(0, 0), (1, 1)]
    assert [[action.text for (action,) in request.candidates] for request in env.requests] == [
        ["0", "1", "2"],
        ["3", "4", "5"],
    ]
    assert env.closed == 0, "the env worker has closed it"


async def test_of_equal_candidates_the_first_goes_on() -> None:
    env = Env([reply("go"), outcomes(*[reply(done=True, reward=0.5)] * 2)])
    played, _ = await tree_episode(Script([say("a$"), say("b$")]), env, size=2).run()
    assert words(played)[1] == "a"


async def test_the_team_decides_what_is_best() -> None:
    """`a` would gain 0.6 alone; its team of two gains more by the other candidate."""
    alone, joint = {"a": {"own": 0.6}}, {"a": {"own": 0.5}, "b": {"own": 0.4}}
    team = {"team": {"both": ["a", "b"]}}
    for algorithm, best in (({}, "x"), (team, "y"), (team | {"team_weight": 0.01}, "x")):
        opened = reply("go", seat="a")
        env = Env([opened, outcomes(reply(done=True, rewards=alone), reply(done=True, rewards=joint))])
        engine = Script([say("x$"), say("y$")])
        torch = {"learner": "torch", "steps": 1}  # the simulated one has no teams
        played, _ = await tree_episode(engine, env, size=2, algorithm=algorithm, train=torch).run()
        assert words(played)[1] == best


async def test_what_is_paid_later_is_in_the_reward_and_not_in_what_the_turn_paid() -> None:
    env = Env([
        reply("go", seat="a"),
        outcomes(reply("move", seat="b", reward=0.25), reply("move", seat="b")),
        outcomes(reply(done=True, reward=1.0, rewards={"a": {"lost": -1.0}}), reply(done=True)),
    ])  # fmt: skip
    engine = Script([say(f"{n}$") for n in range(4)])
    found = await tree_episode(engine, env, size=2).run()
    a, b = found[:2]
    assert (a.seat, a.reward, a.turns[0].paid) == ("a", -0.75, {"a": 0.25})
    assert (b.seat, b.reward, b.turns[0].paid) == ("b", 1.0, {"a": -1.0, "b": 1.0})
    assert [(t.seat, t.index, t.reward) for t in found[2:]] == [("a", 1, 0.0), ("b", 1, 0.0)]
    group(found)


async def test_candidates_of_a_round_are_joint() -> None:
    engine = Script([say(f"{n}$") for n in range(4)])
    env = Env([ask("a", "b"), outcomes(over(a=1.0), over(a=0.5, b=1.0))])
    found = await tree_episode(engine, env, size=2).run()
    (request,) = env.requests
    assert [[(one.seat, one.text) for one in actions] for actions in request.candidates] == [
        [("a", "0"), ("b", "2")],
        [("a", "1"), ("b", "3")],
    ]
    assert [(t.seat, t.index, words(t)[1], t.reward) for t in found] == [
        ("a", 0, "1", 0.5), ("b", 0, "3", 1.0), ("a", 1, "0", 1.0), ("b", 1, "2", 0.0),
    ]  # fmt: skip
    group(found)


class Away(UrlPlayer):
    """It needs no server to answer."""

    async def ask(self, *_: Any) -> UrlTurn:
        return UrlTurn("z", say("z$"))


@pytest.mark.parametrize(
    "other",
    [{"frozen": "j-0123456789@5", "model": {"base": "m"}}, {"url": "https://models.example/v1", "model": "big"}],
    ids=["frozen", "url"],
)
async def test_a_seat_that_does_not_learn_has_one_candidate(other: dict[str, Any]) -> None:
    job = make_spec(
        algorithm={"name": "at_grpo", "group_size": 3, "groups_per_batch": 2},
        rollout={"engine": "toy", "max_tokens": 50, "max_turns": 3},
        seats={"b": other},
    )
    own, frozen = Script([say("a$"), say("b$"), say("c$")]), Script([say("z$")])
    policies = [LoadedPolicy("", job, own, renderer())]  # type: ignore[arg-type]
    if "frozen" in other:
        seats = SeatMap(job, [*policies, LoadedPolicy("j-0123456789@5", job, frozen, renderer(), is_frozen=True)])  # type: ignore[arg-type]
    else:
        seats = SeatMap(job, policies, [Away(job.seats["b"], "", None, renderer(), 4096)])  # type: ignore[arg-type]
    env = Env([
        reply("go", seat="b"),
        outcomes(reply("move", seat="a")),
        outcomes(*[reply(done=True, reward=reward) for reward in (0.0, 1.0, 0.5)]),
    ])  # fmt: skip
    found = await TreeEpisode(job, make_ticket(group_size=3), 0, seats, env).run()
    assert [(t.seat, t.index, words(t)[1]) for t in found] == [
        ("b", 0, "z"),
        ("a", 0, "b"),
        ("a", 1, "a"),
        ("a", 2, "c"),
    ]
    assert [len(request.candidates) for request in env.requests] == [1, 3]
    group(found)


async def test_a_wrong_number_of_outcomes_is_a_bad_reply() -> None:
    env = Env([reply("go"), outcomes(reply("A"))])
    failed = await failure_of(tree_episode(Script([say(f"{n}$") for n in range(3)]), env))
    assert (failed.ending, failed.error) == (Ending.ENV_BAD_REPLY, "1 outcomes of 3 candidates") and env.closed == 1


async def test_limits_count_the_candidates_that_were_chosen() -> None:
    engine = Script([say("aaaa$"), say("bb$"), say("a$"), say("b$")])
    env = Env([
        reply("go"),
        outcomes(reply("A"), reply("B", reward=1.0)),
        outcomes(reply("A"), reply("B", reward=1.0)),
    ])  # fmt: skip
    playing = tree_episode(engine, env, size=2, rollout__max_tokens=5)
    played, *others = await playing.run()
    assert (played.ending, played.truncated, env.closed) == (Ending.MAX_TOKENS, True, 1)
    assert [sampling.max_tokens for _, sampling in engine.asked] == [5, 5, 2, 2]
    assert playing.sampled == sum(int(t.mask.sum()) for t in (played, *others)) == 12


JSON = Guide(schema={"type": "object"})


async def test_candidates_under_a_schema_are_not_trained_and_leave_other_turns_alone() -> None:
    engine = Script([say(f"{text}$") for text in ("a", "bb", "1", "2", "c", "dd")])
    env = Env([
        reply("go"),
        outcomes(reply("A", guide=JSON), reply("B", reward=1.0, guide=JSON)),
        outcomes(reply("X"), reply("Y", reward=1.0)),
        outcomes(reply(done=True, reward=1.0), reply(done=True)),
    ])  # fmt: skip
    playing = tree_episode(engine, env, size=2)
    played, *others = found = await playing.run()
    assert [bool(sampling.structure) for _, sampling in engine.asked] == [False] * 2 + [True] * 2 + [False] * 2
    assert words(played) == ("<u>go\n<a>bb\n<u>B\n<a>2\n<u>Y\n<a>c", "bbc")
    assert [(bool(turn.untrainable), turn.end - turn.start) for turn in played.turns] == [
        (False, 3), (True, 0), (False, 2),
    ]  # fmt: skip
    assert [(t.index, t.turns[0].number, words(t)[1]) for t in others] == [(1, 0, "a"), (1, 2, "dd")]
    assert playing.sampled == 3 + 2 + 2 + 2 + 2 + 3, "tokens that are not trained were sampled as well"
    high, low = 0.5 / (math.sqrt(0.5) + 1e-4), -0.5 / (math.sqrt(0.5) + 1e-4)
    credit = assign([group(found)], playing.spec.algorithm)
    assert [values.tolist() for values in credit.advantages_S] == [
        pytest.approx([high] * 5), pytest.approx([low] * 2), pytest.approx([low] * 3),
    ]  # fmt: skip
    assert credit.metrics["reward/equal_turns"] == 0.0, "the turn under a schema has nothing to compare"


@pytest.mark.parametrize("best", ["whole", "broken"])
async def test_a_candidate_without_a_finite_logprob_is_left_out_alone(best: str) -> None:
    broken = msgspec.structs.replace(say("b$"), logprobs=[-0.5, -math.inf])
    engine = Script([say("x$"), say("y$"), say("z$"), say("a$"), broken, say("c$")])
    rewards = {"whole": (0.5, 0.0, 0.0), "broken": (0.0, 0.5, 0.0)}[best]
    env = Env([
        reply("go"),
        outcomes(reply("X"), reply("Y"), reply("Z")),
        outcomes(*[reply(done=True, reward=reward) for reward in rewards]),
    ])  # fmt: skip
    played, *others = found = await tree_episode(engine, env).run()
    group(found)
    chosen, left = {"whole": ("xa", "c"), "broken": ("x", "ac")}[best]
    assert words(played)[1] == chosen and [bool(turn.untrainable) for turn in played.turns] == [False, best == "broken"]
    last = [t for t in others if t.turns[0].number == 1]
    assert [t.index for t in last] == list(range(1, 1 + len(left))) and "".join(words(t)[1] for t in last) == left


@pytest.mark.parametrize("rewards", [(1.0, 0.0, 0.5), (0.5, 0.5, 0.5)], ids=["best", "first of equal ones"])
async def test_a_seat_without_a_trained_turn_goes_on_with_a_candidate_that_can_be_trained(
    rewards: tuple[float, ...],
) -> None:
    broken = msgspec.structs.replace(say("a$"), logprobs=[-0.5, -math.inf])
    env = Env([reply("go"), outcomes(*[reply(done=True, reward=reward) for reward in rewards])])
    found = await tree_episode(Script([broken, say("b$"), say("c$")]), env).run()
    group(found)
    best, other = ("c", "b") if rewards[2] > rewards[1] else ("b", "c")
    assert [(t.index, words(t)[1]) for t in found] == [(0, best), (1, other)]


async def test_in_a_round_as_many_seats_as_possible_are_trained() -> None:
    broken = msgspec.structs.replace(say("0$"), logprobs=[-0.5, math.nan])
    engine = Script([broken, say("1$"), say("2$"), say("3$"), broken, say("5$")])
    env = Env([ask("a", "b"), outcomes(over(a=1.0, b=1.0), over(a=1.0), over())])
    found = await tree_episode(engine, env).run()
    assert [(t.seat, t.index, words(t)[1]) for t in found if not t.index] == [("a", 0, "2"), ("b", 0, "5")]
    group(found)


async def test_an_episode_of_untrainable_candidates_alone_fails_with_the_reason() -> None:
    env = Env([reply("go", guide=JSON), outcomes(*[reply(done=True)] * 3)])
    failed = await failure_of(tree_episode(Script([say("1$")] * 3), env))
    assert failed.ending == Ending.UNTRAINABLE and "under a JSON schema" in failed.error


async def test_a_failure_is_one_of_the_episode() -> None:
    failed = SessionReply(worker="env-0", failure=Ending.ENV_ERROR, error="the board is on fire")
    with pytest.raises(EpisodeFailed, match="on fire"):
        await tree_episode(Script([say("a$")] * 3), Env([reply("go"), failed])).run()
