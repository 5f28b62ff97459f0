"""Samples of a group must begin alike: every seat that acts first, alone or in a round."""

from __future__ import annotations

from opentinker.services.rollout_worker.opening_check import opening_mismatch
from opentinker.shared.types.core import Message
from opentinker.shared.types.env_protocol import SeatPrompt, SessionReply
from opentinker.shared.types.trajectories import Trajectory
from tests.unit.rollout_worker.scripted_episode import Chars, Env, Script, episode, reply, say


async def sample(*prompts: tuple[str, str]) -> list[Trajectory]:
    """One round, or the turn of a single seat."""
    asked = [SeatPrompt(seat=seat, messages=[Message(role="user", content=text)]) for seat, text in prompts]
    opened = SessionReply(worker="w").with_prompts(asked, together=len(asked) > 1)
    return await episode(Script([say("x$") for _ in asked]), Env([opened, reply(done=True)])).run()


async def test_all_seats_of_the_first_round_are_compared() -> None:
    one = await sample(("a", "go"), ("b", "card 1"))
    same = await sample(("a", "go"), ("b", "card 1"))
    other = await sample(("a", "go"), ("b", "card 2"))
    fewer = await sample(("a", "go"))

    def text(_: str, ids: list[int]) -> str:
        return Chars().decode(ids)

    assert opening_mismatch([one, same], text) == ""
    assert opening_mismatch([one, same, other], text).startswith(
        "samples 0 and 2 began differently: for seat 'b' from token 8 on it is '1"
    )
    assert opening_mismatch([fewer, one], text) == (
        "samples 0 and 1 began differently: seat 'a' acts first in one, seats 'a', 'b' act first in the other"
    )
    assert opening_mismatch([fewer, await sample(("a", "no"))], text).startswith(
        "samples 0 and 1 began differently: from token 3 on it is 'go"
    )
