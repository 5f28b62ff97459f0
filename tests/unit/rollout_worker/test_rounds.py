"""Episodes in which several seats act at the same time: all are asked side by side, the environment gets all actions
together, and the order in which the engine answers changes nothing."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from opentinker.services.rollout_worker.engines.base import Completion, EngineError
from opentinker.services.rollout_worker.episode import turn_seed
from opentinker.services.rollout_worker.episode_protocol import EpisodeFailed
from opentinker.shared.types.core import Ending, Message
from opentinker.shared.types.env_protocol import SeatPrompt, SessionReply
from opentinker.shared.types.trajectories import Trajectory
from tests.conftest import until
from tests.unit.rollout_worker.scripted_episode import Chars, Env, Script, episode, failure_of, reply, say

SEATS = ("a", "b", "c", "d")


def ask(*seats: str, text: str = "go", **changes: Any) -> SessionReply:
    """A round: every seat is told `text` and its name."""
    messages = {seat: [Message(role="user", content=f"{text} {seat}")] for seat in seats}
    prompts = [SeatPrompt(seat=seat, messages=said) for seat, said in messages.items()]
    return SessionReply(worker="env-0", round=prompts, **changes)


def over(**rewards: float) -> SessionReply:
    return reply(done=True, rewards={seat: {"outcome": reward} for seat, reward in rewards.items()})


class Slow(Script):
    """An engine whose answers wait for `say_to`; a prompt is recognised by its end."""

    def __init__(self) -> None:
        super().__init__([])
        self.open: dict[str, asyncio.Future[Completion]] = {}
        self.seeds: dict[str, int | None] = {}
        self.requests: list[str] = []

    async def generate(self, request: str, prompt_ids: list[int], sampling: Any, *_: Any, **__: Any) -> Completion:
        seat = Chars().decode(prompt_ids).removesuffix("\n<a>")[-1]
        self.seeds[seat] = sampling.seed
        self.requests.append(request)
        self.open[seat] = asyncio.get_running_loop().create_future()
        try:
            return await self.open[seat]
        finally:
            del self.open[seat]

    def say_to(self, seat: str, text: str) -> None:
        self.open[seat].set_result(say(text))


async def play(engine: Slow, env: Env, order: tuple[str, ...], **spec: Any) -> list[Trajectory]:
    """One round; the engine answers the seats in this order."""
    playing = asyncio.create_task(episode(engine, env, **spec).run())
    await until(lambda: len(engine.open) == len(SEATS))
    for seat in order:
        engine.say_to(seat, f"{seat}!$")
    return await playing


async def test_all_seats_of_a_round_are_asked_before_any_has_answered() -> None:
    engine, env = Slow(), Env([ask(*SEATS), over(a=1.0, b=-1.0)])
    trajectories = await play(engine, env, SEATS)
    assert [(t.seat, t.reward, t.turns[0].number) for t in trajectories] == [
        ("a", 1.0, 0), ("b", -1.0, 0), ("c", 0.0, 0), ("d", 0.0, 0),
    ]  # fmt: skip
    assert trajectories[0].ids.tolist() == Chars().encode("<u>go a$\n<a>a!$")
    assert len(set(engine.requests)) == len(SEATS)
    for trajectory in trajectories:
        trajectory.check()


async def test_the_environment_gets_one_request_with_all_actions_in_its_own_order() -> None:
    env = Env([ask("b", "a", "d", "c"), over()])
    await play(Slow(), env, ("c", "a", "d", "b"))
    (request,) = env.requests
    assert [(action.seat, action.text) for action in request.round] == [
        ("b", "b!"),
        ("a", "a!"),
        ("d", "d!"),
        ("c", "c!"),
    ]
    assert (request.turn, request.text, request.seat) == (0, "", "")


async def test_what_a_round_comes_to_does_not_depend_on_the_order_of_arrival() -> None:
    stories = []
    for order in (SEATS, SEATS[::-1], ("c", "a", "d", "b")):
        engine, env = Slow(), Env([ask(*SEATS), over(c=1.0)])
        trajectories = await play(engine, env, order, rollout__seed=7)
        played = [(t.seat, t.ids.tolist(), t.reward, t.turns[0].number) for t in trajectories]
        stories.append((played, env.requests[0].round, engine.seeds))
    assert stories[0] == stories[1] == stories[2]
    assert len(set(stories[0][2].values())) == len(SEATS)  # each seat draws for itself


def test_the_seed_of_a_seat_that_acts_alone_is_that_of_the_first_place() -> None:
    assert turn_seed(5, 2, 3) == turn_seed(5, 2, 3, 0) != turn_seed(5, 2, 3, 1)


async def test_a_seat_sees_what_is_said_to_it_and_nothing_else() -> None:
    env = Env([ask("a", "b"), ask("a", "b", text="more"), over(a=0.5)])
    a, b = await episode(Script([say("x$"), say("y$"), say("z$"), say("w$")]), env).run()
    assert a.ids.tolist() == Chars().encode("<u>go a$\n<a>x$\n<u>more a$\n<a>z$")
    assert b.ids.tolist() == Chars().encode("<u>go b$\n<a>y$\n<u>more b$\n<a>w$")
    assert [turn.number for turn in a.turns] == [turn.number for turn in b.turns] == [0, 1]
    assert ([turn.reward for turn in a.turns], b.reward) == ([0.0, 0.5], 0.0)


async def test_rounds_and_single_turns_may_follow_each_other() -> None:
    single = reply("alone", seat="b", rewards={"a": {"bonus": 0.25}})
    env = Env([ask("a", "b"), single, ask("a", reward=1.0), over(b=-1.0)])
    a, b = await episode(Script([say("1$"), say("2$"), say("3$"), say("4$")]), env).run()
    assert [[turn.number for turn in one.turns] for one in (a, b)] == [[0, 2], [0, 1]]
    assert (a.reward, b.reward) == (0.25, 0.0)
    assert [len(request.round) for request in env.requests] == [2, 0, 1]


async def test_one_seat_whose_engine_fails_voids_the_match_and_ends_the_others() -> None:
    class Fails(Slow):
        async def generate(self, request: str, prompt_ids: list[int], sampling: Any, *_: Any, **__: Any) -> Completion:
            if len(self.open) == 2:
                raise EngineError("out of memory")
            return await super().generate(request, prompt_ids, sampling)

    engine, env = Fails(), Env([ask("a", "b", "c")])
    assert (await failure_of(episode(engine, env))).ending == Ending.ENGINE_ERROR
    assert (engine.open, env.requests, env.closed) == ({}, [], 1)


async def test_a_seat_that_is_out_of_turns_or_context_ends_the_episode() -> None:
    answers = [say(f"{n}$") for n in range(8)]
    a, b = await episode(Script(list(answers)), Env([ask("a", "b")] * 3), rollout__max_turns=2).run()
    assert (a.ending, len(a.turns), len(b.turns)) == (Ending.MAX_TURNS, 2, 2)
    long = SessionReply(
        worker="env-0",
        round=[SeatPrompt(seat=seat, messages=[Message(role="user", content=text)]) for seat, text in
               (("a", "short"), ("b", "long" * 30))],
    )  # fmt: skip
    small = Script(list(answers), context_length=60)
    a, b = await episode(small, Env([ask("a", "b"), long])).run()
    assert (a.ending, a.truncated) == (Ending.CONTEXT, True)
    assert a.ids.tolist() == Chars().encode("<u>go a$\n<a>0$")  # nobody sees a round that is not played


async def test_rewards_of_a_round_name_their_seats() -> None:
    with pytest.raises(EpisodeFailed, match="must name their seats"):
        await episode(Script([say("x$"), say("y$")]), Env([ask("a", "b"), reply(done=True, reward=1.0)])).run()


async def test_a_truncated_round_shows_every_seat_the_state_whose_value_counts() -> None:
    env = Env([ask("a", "b"), ask("a", "b", text="left", done=True, truncated=True)])
    a, b = await episode(Script([say("x$"), say("y$")]), env, algorithm__name="ppo").run()
    assert a.truncated and a.ids.tolist() == Chars().encode("<u>go a$\n<a>x$\n<u>left a$\n<a>")
    assert b.ids.tolist() == Chars().encode("<u>go b$\n<a>y$\n<u>left b$\n<a>")
    grpo = Env([ask("a", "b"), ask("a", "b", text="left", done=True, truncated=True)])
    a, b = await episode(Script([say("x$"), say("y$")]), grpo).run()
    assert a.ids.tolist() == Chars().encode("<u>go a$\n<a>x$")
