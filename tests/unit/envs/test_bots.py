"""Scripted players: the environment plays their seats, and callers see the seats of models only."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Any, ClassVar

import msgspec
import pytest

from opentinker.envs.base import Action, Bot, Environment, Opening, Step, play_gold, user
from opentinker.envs.bots import BOT_TURNS, check_bots, resolve_bots, with_bots
from opentinker.envs.builtin.tictactoe import TicTacToe
from opentinker.envs.registry import make
from opentinker.envs.runtime.child_pool import ChildPool
from opentinker.envs.runtime.in_process_server import InProcessServer
from opentinker.envs.runtime.resolver import Resolver
from opentinker.envs.tools import tool
from opentinker.services.env_worker.service import check_environment
from opentinker.shared.types.core import Ending, Message, StopReason, ToolCall
from opentinker.shared.types.env_protocol import EnvCheck, EnvCheckReply, SeatAction, SessionReply
from opentinker.shared.types.errors import SpecError
from tests.support.playing import local_episode, opening, step

ROUND = "tests.unit.envs.test_bots:Round"


class Round(Environment):
    """Four seats speak in turn, twice each. A speaker gets 1, the seat before it 10, and the seat a 100 at the end."""

    seats: tuple[str, ...] = ("a", "b", "c", "d")
    bots: ClassVar[Mapping[str, Bot]] = {
        "parrot": lambda game: f"{game.said[-1]}!" if game.said else "first!",
        "caller": lambda _: Message(role="assistant", tool_calls=[ToolCall(id="1", name="note", arguments={})]),
        "wrong": lambda _: 7,  # type: ignore[dict-item, return-value]
        "broken": lambda _: str(1 // 0),
    }

    async def open(self, row: int, seed: int) -> Opening:
        self.said: list[str] = []
        self.turns: list[int] = []
        self.notes = 0
        return Opening(messages=[user("speak, a")], seat="a", stream="a0")

    @tool
    def note(self) -> str:
        self.notes += 1
        return "noted"

    async def step(self, action: Action) -> Step:
        assert action.seat == self.seats[len(self.said) % 4]
        self.said.append(action.text)
        self.turns.append(action.turn)
        number = len(self.said)
        done = number == 8
        before = self.seats[(number - 2) % 4]
        rewards = {before: {"heard": 10.0}} if number > 1 else {}
        return Step(
            messages=[] if done else [user(f"{action.seat} said {action.text}")],
            seat="" if done else self.seats[number % 4],
            stream="" if done else f"{self.seats[number % 4]}{number // 4}",
            reward=1.0,
            components={"spoke": 1.0},
            rewards=rewards | ({"a": {"last": 100.0}} if done else {}),
            done=done,
            metrics={"number": float(number)},
        )


class Endless(Environment):
    """Names the seat of the bot again and again, or ends (`done`) before a model acts."""

    seats = ("bot", "model")
    bots: ClassVar[Mapping[str, Bot]] = {"mute": lambda _: "", "last": lambda _: "end"}

    async def open(self, row: int, seed: int) -> Opening:
        return Opening(messages=[user("go")], seat="bot")

    async def step(self, action: Action) -> Step:
        return Step(messages=[user("go")], seat="bot", done=action.text == "end")


class Cut(Endless):
    """A limit ends the episode when the bot would have acted next."""

    async def open(self, row: int, seed: int) -> Opening:
        return Opening(messages=[user("go")], seat="model")

    async def step(self, action: Action) -> Step:
        return Step(messages=[user("what the bot would see")], seat="bot", done=True, truncated=True, reward=0.5)


@pytest.fixture
async def host() -> AsyncIterator[ChildPool]:
    host = ChildPool(children=1, per_child=1, modules=True)
    yield host
    await host.close()


def named(name: str) -> str:
    return f"tests.unit.envs.test_bots:{name}"


async def test_turns_of_bots_are_played_between_those_of_models() -> None:
    player, opened = await local_episode(opening(ROUND, bots={"a": "parrot", "c": "parrot"}))
    assert (opened.seat, opened.stream, opened.messages[0].text) == ("b", "b0", "a said first!")
    assert [one.name for one in opened.tools] == ["note"]
    first = await player.step(step(0, "x", seat="b"))
    assert (first.seat, first.stream, first.messages[0].text) == ("d", "d0", "c said x!")
    second = await player.step(step(1, "y", seat="d"))
    assert (second.seat, second.messages[0].text, second.metrics["number"]) == ("b", "a said y!", 5.0)
    await player.step(step(2, "z", seat="b"))
    last = await player.step(step(3, "end", seat="d"))
    assert last.done and last.metrics["number"] == 8.0
    environment: Any = player.environment
    game = environment._inner
    assert game.said == ["first!", "x", "x!", "y", "y!", "z", "z!", "end"]
    assert game.turns == list(range(8))
    await player.close()


async def test_rewards_that_bots_bring_to_a_model_belong_to_its_turn_before() -> None:
    player, _ = await local_episode(opening(ROUND, bots={"b": "parrot", "c": "parrot"}))
    bots = {"b": {"spoke": 1.0, "heard": 10.0}, "c": {"spoke": 1.0}}
    first = await player.step(step(0, "x", seat="a"))
    assert (first.seat, first.reward, first.components) == ("d", 11.0, {"spoke": 1.0, "heard": 10.0})
    assert first.rewards == bots, "what bots earn is told too"
    second = await player.step(step(1, "y", seat="d"))
    assert (second.reward, second.rewards) == (1.0, {"c": {"heard": 10.0}})
    third = await player.step(step(2, "z", seat="a"))
    assert (third.reward, third.rewards) == (11.0, {**bots, "d": {"heard": 10.0}})
    last = await player.step(step(3, "w", seat="d"))
    assert (last.done, last.reward, last.rewards) == (True, 1.0, {"a": {"last": 100.0}, "c": {"heard": 10.0}})


async def test_a_reward_from_before_a_seats_first_turn_comes_with_the_first_turn_of_a_model() -> None:
    class Gift(Round):
        async def step(self, action: Action) -> Step:
            step = await super().step(action)
            return msgspec.structs.replace(step, rewards={"b": {"gift": 3.0}, "c": {"gift": 4.0}}, components={})

    game = Gift(Gift.Config())
    game.bot_seats = {"a": "parrot"}
    wrapped = with_bots(game, game)
    await wrapped.open(0, 0)
    step = await wrapped.step(Action(text="x", stop=StopReason.EOS, turn=0, seat="b"))
    assert (step.reward, step.components) == (4.0, {"reward": 1.0, "gift": 3.0})
    assert step.rewards == {"a": {"reward": 1.0}, "b": {"gift": 3.0}, "c": {"gift": 8.0}}


async def test_bots_may_call_tools() -> None:
    player, opened = await local_episode(msgspec.structs.replace(opening(ROUND, bots={"a": "caller"}), tool_turns=3))
    environment: Any = player.environment
    assert (opened.seat, environment._inner.notes) == ("b", 3), "a bot that only calls tools has their limit"


@pytest.mark.parametrize(
    ("name", "bots", "problem"),
    [
        ("Round", {"a": "wrong"}, "the bot 'wrong' must return str or Message, not int"),
        ("Round", {"a": "broken"}, "ZeroDivisionError"),
        ("Endless", {"bot": "mute"}, f"bots played {BOT_TURNS:,} turns and no model's seat was named"),
        ("Endless", {"bot": "last"}, "the episode was over before the seat of a model acted"),
        ("Round", {"a": "parrot", "e": "parrot"}, "seats.e = 'parrot': Round has no such seat with this config"),
        ("Round", {"a": "perfect"}, "Round has no bot 'perfect'; its bots are: broken, caller, parrot, wrong"),
    ],
)
async def test_what_cannot_be_played_fails_its_own_episode(name: str, bots: dict[str, str], problem: str) -> None:
    player, reply = await local_episode(opening(named(name), bots=bots))
    assert reply.failure in (Ending.ENV_BAD_REPLY, Ending.ENV_ERROR) and problem in reply.error
    await player.close()


class Unowned(Environment):
    """A round of two seats, whose reward names none of them, before the turn of a third."""

    seats = ("a", "b", "c")
    bots: ClassVar[Mapping[str, Bot]] = {"quiet": lambda _: ""}

    async def open(self, row: int, seed: int) -> Opening:
        return Opening(acting={seat: [user("go")] for seat in ("a", "b")})

    async def step_all(self, actions: list[Action]) -> Step:
        return Step(reward=5.0, messages=[user("go")], seat="c")


@pytest.mark.parametrize("bots", [{"a": "quiet", "b": "quiet"}, {"a": "quiet"}])
async def test_a_rounds_reward_without_a_seat_is_refused_also_if_bots_played_it(bots: dict[str, str]) -> None:
    player, reply = await local_episode(opening(named("Unowned"), bots=bots))
    if reply.failure is None:
        action = SeatAction(seat="b", text="x", stop=StopReason.EOS)
        reply = await player.step(reply.step("s", 0, [action]))
    assert reply.failure is Ending.ENV_BAD_REPLY and "5.0, which no seat of the round owns" in reply.error


async def test_a_limit_may_end_the_episode_in_a_bots_turn() -> None:
    player, _ = await local_episode(opening(named("Cut"), bots={"bot": "mute"}))
    last = await player.step(step(0, "x", seat="model"))
    assert (last.done, last.truncated, last.reward, last.messages) == (True, True, 0.5, [])


def test_a_seats_own_entry_counts_before_patterns_and_these_in_their_order() -> None:
    game = Round(Round.Config())
    assert resolve_bots(game, {"*": "wrong", "b": "", "a": "parrot"}) == {"a": "parrot", "c": "wrong", "d": "wrong"}
    assert resolve_bots(game, {"[ab]": "", "*": "parrot"}) == {"c": "parrot", "d": "parrot"}
    assert resolve_bots(game, {}) == {}
    with pytest.raises(SpecError, match="bots play every seat"):
        resolve_bots(game, {"*": "parrot"})


def test_every_mistake_is_reported_and_sizes_are_bounded() -> None:
    with pytest.raises(SpecError) as caught:
        check_bots(TicTacToe, {"first": "stockfish", "second": "perfect", "third": "x"})
    assert [mistake["field"] for mistake in caught.value.mistakes] == ["seats.first.bot", "seats.third.bot"]
    with pytest.raises(SpecError, match="at most 64 seats"):
        check_bots(TicTacToe, {f"s{number}": "random" for number in range(65)})
    with pytest.raises(SpecError, match="at most 100 characters"):
        check_bots(TicTacToe, {"s" * 101: "random"})
    with pytest.raises(SpecError, match="CopyDigits has no bot 'x'; it has no bots"):
        check_bots(type(make("copy_digits", {})), {"": "x"})


async def test_an_env_worker_refuses_bots_and_says_which_seats_there_are_before_a_job_starts(host: ChildPool) -> None:
    async def check(name: str, bots: dict[str, str] | None = None, **config: Any) -> EnvCheckReply:
        asked = EnvCheck(name=name, config=config, bots=bots or {})
        return await check_environment(asked, Resolver(modules=True), host)

    blocked, crowd = named("Blocked"), [f"s{number}" for number in range(60)]
    for name, bots, config, seats in (
        ("tictactoe", {}, {}, ["first", "second"]),
        ("tictactoe", {"first": "perfect"}, {}, ["first", "second"]),
        ("gomoku", {"white": "expert"}, {"opponent": "self"}, ["black", "white"]),
        ("copy_digits", {}, {}, [""]),
        (blocked, {"*": "parrot", "a": ""}, {}, list(Blocked.seats)),
        (named("Crowd"), {}, {}, crowd),  # all of them, or those left out look absent
        (named("BlockedCrowd"), {}, {}, crowd),
        (named("Masses"), {}, {}, []),  # too many to compare with a spec
    ):
        reply = await check(name, bots, **config)
        assert (reply.seats, reply.errors) == (seats, []), name
    for name, bots, problem in (
        ("gomoku", {"white": "expert"}, "seats.white: Gomoku has no such seat with this config; its seats are: ''"),
        ("tictactoe", {"third": "random"}, "seats.third: TicTacToe has no such seat"),
        ("tictactoe", {"second": "stockfish"},
         "seats.second.bot: TicTacToe has no bot 'stockfish'; its bots are: perfect, random"),
        (blocked, {"e": "parrot"}, "seats.e: Blocked has no such seat"),
    ):  # fmt: skip
        reply = await check(name, bots)
        (mistake,) = reply.errors
        assert f"{mistake['field']}: {mistake['problem']}".startswith(problem) and reply.seats == []


class Blocked(Round):
    blocking = True


class Crowd(Round):
    seats = tuple(f"s{number}" for number in range(60))


class BlockedCrowd(Crowd):
    blocking = True


class Masses(Round):
    seats = tuple(f"s{number}" for number in range(257))


async def test_bots_play_in_child_processes(host: ChildPool) -> None:
    request = opening(named("Blocked"), bots={"a": "parrot"})
    player = host.runner("w", request)
    assert player is not None
    opened = await player.open(request)
    assert (opened.seat, opened.messages[0].text) == ("b", "a said first!")
    await player.close()


async def test_bots_play_where_the_user_serves_the_environment() -> None:
    server = InProcessServer(Round, 1)
    try:
        opened: SessionReply = await server.play("open", opening("", bots={"a": "parrot"}))
        assert (opened.seat, opened.messages[0].text) == ("b", "a said first!")
        wrong = await server.play("check", EnvCheck(name="", config={}, bots={"e": "parrot"}))
        assert wrong.errors[0]["field"] == "seats.e"
    finally:
        await asyncio.wait_for(server.close(0.1), 10.0)


async def test_gomokus_bot_is_the_same_as_a_seat_and_as_an_opponent() -> None:
    config = {"size": 5, "win": 4, "random_stones": 0}
    for seed in range(5):
        seated = await play_gold(make("gomoku", config | {"opponent": "self"}), 0, seed, bots={"white": "greedy"})
        alone = await play_gold(make("gomoku", config | {"colour": "black"}), 0, seed)
        assert seated.messages == alone.messages
        assert seated.rewards["black"] == alone.reward == -seated.rewards["white"]
