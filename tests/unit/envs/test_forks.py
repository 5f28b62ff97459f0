"""Episodes that are copied: each candidate of a turn is played on its own, and the chosen one goes on."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncIterator, Sequence
from typing import Any

import msgspec
import pytest

from opentinker.envs.base import Action, Environment, call, user
from opentinker.envs.registry import BUILT_IN, find, make
from opentinker.envs.runtime.child_pool import ChildPool
from opentinker.envs.runtime.env_runner import LocalEnvRunner
from opentinker.envs.runtime.resolver import Resolver
from opentinker.envs.runtime.sessions import Sessions
from opentinker.envs.tools import tool
from opentinker.envs.with_tools import WithTools, with_tools
from opentinker.services.env_worker.service import check_environment
from opentinker.shared.asyncio_tools import cancel_and_wait
from opentinker.shared.messaging.reply_validation import sound
from opentinker.shared.types.core import Ending, Message, StopReason
from opentinker.shared.types.env_protocol import (
    CloseSession,
    EnvCheck,
    SeatAction,
    SessionReply,
    StepSession,
)
from tests.conftest import until
from tests.samples.tree_samples import Climb
from tests.support.playing import local_episode, opening

SAMPLES = "tests.samples.tree_samples"
CLIMB = f"{SAMPLES}:Climb"
FORK = {
    *("bandit", "copy_digits", "debate", "gomoku", "guess_number", "kuhn_poker", "matching_pennies", "signalling"),
    *("proposed_sums", "tictactoe"),
}


def tree(turn: int, *texts: str, chosen: int = 0, seat: str = "") -> StepSession:
    candidates = [[SeatAction(seat=seat, text=text, stop=StopReason.EOS)] for text in texts]
    return StepSession(session="s", turn=turn, text="", stop=StopReason.EOS, candidates=candidates, chosen=chosen)


def shown(reply: SessionReply) -> list[str]:
    assert reply.failure is None, reply.error
    return [f"{outcome.metrics['height']:g}" for outcome in reply.outcomes]


@pytest.fixture
async def host() -> AsyncIterator[ChildPool]:
    host = ChildPool(children=1, per_child=4, modules=True)
    yield host
    await host.close()


@pytest.fixture
async def sessions(host: ChildPool) -> AsyncIterator[Sessions]:
    Climb.closed.clear()
    sessions = Sessions("w", limit=8, resolver=Resolver(modules=True), host=host)
    yield sessions
    await sessions.drain(0.01)


async def test_a_slow_copy_holds_nobody_up(sessions: Sessions) -> None:
    await sessions.open(opening(f"{SAMPLES}:SlowClimb"))
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            await asyncio.sleep(0.01)
            ticks += 1

    ticking = asyncio.create_task(tick())
    assert shown(await sessions.step(tree(0, "1", "5", "3", seat="left"))) == ["1", "5", "3"]
    await cancel_and_wait(ticking)
    assert ticks >= 20, "two copies take 0.2 s each"


@pytest.mark.parametrize("name", ["Climb", "BlockingClimb"])
async def test_every_candidate_begins_in_the_state_of_the_chosen_one(sessions: Sessions, name: str) -> None:
    opened = await sessions.open(opening(f"{SAMPLES}:{name}"))
    assert (opened.failure, opened.seat) == (None, "left")
    first = await sessions.step(tree(0, "1", "5", "3", seat="left"))
    assert [outcome.reward for outcome in first.outcomes] == [0.1, 0.5, 0.3]
    assert shown(first) == ["1", "5", "3"]
    assert {outcome.seat for outcome in first.outcomes} == {"right"} and not first.done
    assert len({outcome.messages[0].text.split(" ")[1] for outcome in first.outcomes}) == 1, "the same random numbers"
    second = await sessions.step(tree(1, "2", "4", chosen=1, seat="right"))
    assert shown(second) == ["7", "9"]
    third = await sessions.step(tree(2, "1", "fall", "2", chosen=0, seat="left"))
    assert shown(third) == ["8", "7", "9"]
    assert [outcome.done for outcome in third.outcomes] == [False, True, False] and not third.done
    last = await sessions.step(tree(3, "0", "1", chosen=2, seat="right"))
    assert last.done and shown(last) == ["9", "10"]
    assert sessions.active == 0


async def test_a_repeated_turn_is_answered_from_memory(sessions: Sessions) -> None:
    await sessions.open(opening(CLIMB))
    request = tree(0, "1", "5", seat="left")
    first, second = await asyncio.gather(sessions.step(request), sessions.step(request))
    assert first is second
    assert await sessions.step(request) is first
    assert shown(await sessions.step(tree(1, "1", chosen=1, seat="right"))) == ["6"]


async def test_every_copy_is_closed_once(sessions: Sessions) -> None:
    await sessions.open(opening(CLIMB))
    await sessions.step(tree(0, "1", "5", "3", seat="left"))
    await sessions.step(tree(1, "1", "2", chosen=1, seat="right"))
    assert sorted(Climb.closed) == [1, 3], "those that were not chosen"
    await sessions.close(CloseSession(session="s"))
    await until(lambda: sorted(Climb.closed) == [1, 3, 6, 7])


@pytest.mark.parametrize(
    ("name", "texts", "said"),
    [("Climb", ["1", "raise"], "the rope broke"), ("Brittle", ["1", "2", "3"], "no second copy")],
)
async def test_a_candidate_or_a_copy_that_fails_ends_the_episode_and_closes_all_copies(
    sessions: Sessions, name: str, texts: list[str], said: str
) -> None:
    await sessions.open(opening(f"{SAMPLES}:{name}"))
    reply = await sessions.step(tree(0, *texts, seat="left"))
    assert reply.failure == Ending.ENV_ERROR and said in reply.error
    await until(lambda: len(Climb.closed) == 2)


async def test_what_cannot_be_is_refused() -> None:
    async def step(request: StepSession, environment: str = CLIMB) -> SessionReply:
        player, opened = await local_episode(opening(environment))
        assert opened.failure is None, opened.error
        reply = await player.step(request)
        await player.close()
        return reply

    async def error(request: StepSession, environment: str = CLIMB) -> str:
        reply = await step(request, environment)
        assert reply.failure is not None
        return reply.error

    assert "SimpleArms cannot fork" in await error(tree(0, "a"), f"{__name__}:SimpleArms")
    assert "turn 0 continues with candidate 1" in await error(tree(0, "1", chosen=1, seat="left"))
    assert "for seat 'left', not 'right'" in await error(tree(0, "1", seat="right"))
    assert "129 candidates; a turn has at most 128" in await error(tree(0, *["1"] * 129, seat="left"))
    wordy = f"{SAMPLES}:Wordy"
    assert "for all candidates; at most 786,432 are allowed" in await error(tree(0, *"1234", seat="left"), wordy)
    assert len((await step(tree(0, *"123", seat="left"), wordy)).outcomes) == 3
    assert "cannot pickle 'generator' object" in await error(tree(0, "1", "2", seat="left"), f"{SAMPLES}:Glued")


async def test_after_candidates_one_must_be_chosen() -> None:
    player, _ = await local_episode(opening(CLIMB))
    await player.step(tree(0, "1", "2", seat="left"))
    plain = StepSession(session="s", turn=1, seat="right", text="1", stop=StopReason.EOS)
    assert "chooses none of them" in (await player.step(plain)).error
    await player.close()


class SimpleArms(type(make("bandit", {}))):  # type: ignore[misc]
    can_fork = False


async def test_bots_answer_on_the_copy() -> None:
    player, opened = await local_episode(opening("tictactoe", bots={"second": "random"}))
    assert opened.seat == "first"
    first = await player.step(tree(0, "1", "1", "5", seat="first"))
    boards = [outcome.messages[0].text for outcome in first.outcomes]
    assert boards[0] == boards[1], "the bot draws the same in the same state"
    assert all(board.count("o") - boards[0].count("o") == 0 for board in boards) and boards[2] != boards[0]
    again = await player.step(tree(1, "0", seat="first", chosen=2))
    assert again.done and again.outcomes[0].reward == -1.0
    await player.close()


@pytest.mark.parametrize("name", sorted(FORK))
async def test_a_copy_of_a_built_in_environment_shares_nothing_with_it(name: str) -> None:
    """Playing a copy to its end changes neither the original nor what a second copy would do."""
    config: dict[str, Any] = {"opponent": "self"} if name == "gomoku" else {}

    async def play(player: LocalEnvRunner, asked: SessionReply) -> list[SessionReply]:
        replies = []
        for turn in range(100):
            environment: Any = player.environment
            actions = [
                SeatAction(seat=prompt.seat, text=str(environment.gold() or "h"), stop=StopReason.EOS)
                for prompt in asked.prompts
            ]
            asked = await player.step(asked.step("s", turn, actions))
            assert asked.failure is None, asked.error
            replies.append(asked)
            if asked.done:
                return replies
        raise AssertionError("it never ends")

    player = LocalEnvRunner("w", modules=False)
    opened = await player.open(opening(name, **config))
    twin = copy.deepcopy(player)
    first = await play(player, opened)
    assert await play(twin, opened) == first


def test_only_environments_of_plain_state_can_fork() -> None:
    found = {name for name in BUILT_IN if name in FORK or find(name, modules=True).can_fork}
    others = {"harbor", "miniwob", "phone_page"}
    assert found == FORK | others, "harbor copies its files itself, and the other two play in a browser"


class Tally(Environment):
    """Counts the calls of its tool."""

    can_fork = True
    count = 0

    @tool
    def add(self) -> int:
        """Count one."""
        self.count += 1
        return self.count

    async def open(self, row: int, seed: int) -> list[Message]:
        return [user("count")]


async def test_a_copy_of_an_environment_with_tools_calls_its_own() -> None:
    tally = Tally(Tally.Config())
    first = with_tools(tally, most=3)
    await first.open(0, 0)
    adds = Action(text="", stop=StopReason.EOS, turn=0, tool_calls=call("add").tool_calls)
    await first.step(adds)
    second = copy.deepcopy(first)
    assert isinstance(second, WithTools)
    told = [(await one.step(adds)).messages[0].text for one in (second, second, first)]
    assert [text.split("\n")[0] for text in told] == ["2", "3", "2"]
    assert (tally.count, "answer now" in told[1], "answer now" in told[2]) == (2, True, False), (
        "the limit is copied too"
    )


async def test_an_env_worker_says_at_submission_that_an_environment_cannot_fork(host: ChildPool) -> None:
    async def problems(name: str, *, forks: bool = True) -> list[str]:
        asked = EnvCheck(name=name, config={}, forks=forks)
        reply = await check_environment(asked, Resolver(modules=True), host)
        return [f"{mistake['field']}: {mistake['problem']}" for mistake in reply.errors]

    assert await problems("gomoku") == await problems(f"{SAMPLES}:BlockingClimb") == []
    (refused,) = await problems("tool_calc")
    assert refused.startswith("environment.name: cannot fork: ToolCalc does not set can_fork = True")
    assert await problems("tool_calc", forks=False) == []


def test_outcomes_from_a_sandbox_are_checked() -> None:
    fine = SessionReply(worker="", outcomes=[SessionReply(worker="", reward=1.0, done=True)])
    assert sound(fine, "w").failure is None
    for odd, said in (
        (SessionReply(worker="", reward=float("nan")), "finite"),
        (SessionReply(worker="", failure=Ending.ENV_ERROR), "an observation and rewards"),
        (fine, "an observation and rewards"),
    ):
        reply = sound(msgspec.structs.replace(fine, outcomes=[odd]), "w")
        assert reply.failure == Ending.ENV_BAD_REPLY and said in reply.error
    assert "cannot come together" in sound(msgspec.structs.replace(fine, reward=1.0), "w").error
    many: Sequence[SessionReply] = [SessionReply(worker="")] * 129
    assert "at most 128 candidates" in sound(SessionReply(worker="", outcomes=list(many)), "w").error
