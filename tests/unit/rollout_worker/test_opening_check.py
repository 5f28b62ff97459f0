"""Samples of a group must begin alike: every seat that acts first, alone or in a round."""

from __future__ import annotations

import pytest

from opentinker.services.rollout_worker.opening_check import Opening, opening_mismatch
from opentinker.shared.types.core import Message
from opentinker.shared.types.env_protocol import SeatPrompt, SessionReply
from opentinker.shared.types.guide import Guide
from tests.unit.rollout_worker.scripted_episode import Chars, Env, Script, episode, reply, say


def text(_: str, ids: list[int]) -> str:
    return Chars().decode(ids)


async def sample(*prompts: tuple[str, str]) -> list[Opening]:
    """The openings of one round, or of the turn of a single seat."""
    asked = [SeatPrompt(seat=seat, messages=[Message(role="user", content=text)]) for seat, text in prompts]
    opened = SessionReply(worker="w").with_prompts(asked, together=len(asked) > 1)
    played = episode(Script([say("x$") for _ in asked]), Env([opened, reply(done=True)]))
    await played.run()
    return played.openings


async def test_all_seats_of_the_first_round_are_compared() -> None:
    one = await sample(("a", "go"), ("b", "card 1"))
    same = await sample(("a", "go"), ("b", "card 1"))
    other = await sample(("a", "go"), ("b", "card 2"))
    fewer = await sample(("a", "go"))

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


@pytest.mark.parametrize("stream", ["", "second"])
async def test_what_a_first_turn_that_is_not_trained_has_said_is_no_part_of_the_opening(stream: str) -> None:
    """Whether the second turn, which is, goes on in its context or begins another."""

    async def guided(question: str, answer: str) -> list[Opening]:
        replies = [
            reply(question, guide=Guide(schema={"type": "object"})),
            reply(f"you said {answer}", stream=stream),
            reply(done=True),
        ]
        played = episode(Script([say(f"{answer}$"), say("x$")]), Env(replies))
        (trajectory,) = await played.run()
        assert (trajectory.stream, len(trajectory.turns)) == (stream, 1 if stream else 2)
        return played.openings

    one, same, other = [await guided(*said) for said in (("go", "{}"), ("go", "[]"), ("no", "{}"))]
    assert opening_mismatch([one, same], text) == ""
    assert "began differently: from token 3 on it is 'go" in opening_mismatch([one, other], text)
