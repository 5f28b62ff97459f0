"""Determines the seats that act next: one, or those of a round, which act at the same time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from opentinker.envs.base import Action, BadReply, Environment, Opening, Prompt, Step
from opentinker.shared.types.core import Message
from opentinker.shared.types.env_protocol import ROUND_SEATS

SHOWN = 200
"""Characters of names of seats in an error."""


def as_opening(environment: Environment, opened: Opening | list[Message]) -> Opening:
    """Return what `open` gave; plain messages are for the first seat."""
    return opened if isinstance(opened, Opening) else Opening(messages=opened, seat=environment.seats[0])


def prompts_of(environment: Environment, said: Opening | Step, method: str) -> dict[str, Prompt]:
    """Return the seats that act next and what each sees, in the order of the environment's seats. A single seat sees
    the opening or step itself. Raise BadReply.

    `said`: the return value of the environment's `method`.
    """
    if said.acting is None:
        if type(said.seat) is not str or said.seat not in environment.seats:
            raise BadReply(
                f"{title_of(environment)}.{method}() says that seat {said.seat!r:.60} acts next; {_seats(environment)}"
            )
        return {said.seat: said}
    source, acting = f"{title_of(environment)}.{method}()", said.acting
    if not isinstance(acting, Mapping):
        raise BadReply(f"{source}: acting must be a dict by seat, not {type(acting).__name__}")
    if not acting:
        raise BadReply(f"{source} names no seat in acting: the episode continues, so a seat must act")
    if unknown := [seat for seat in acting if type(seat) is not str or seat not in environment.seats]:
        raise BadReply(f"{source} names seat {unknown[0]!r:.60} in acting; {_seats(environment)}")
    if len(acting) > ROUND_SEATS:
        raise BadReply(f"{source} names {len(acting)} seats in acting; at most {ROUND_SEATS} may act at the same time")
    if said.seat or any(getattr(said, field) for field in Prompt.__struct_fields__):
        raise BadReply(f"{source} gives both acting and a seat or prompt: what a seat sees is its value in acting")
    return {seat: _prompt_of(source, seat, acting[seat]) for seat in environment.seats if seat in acting}


def _prompt_of(source: str, seat: str, seen: object) -> Prompt:
    if isinstance(seen, list):
        return Prompt(messages=seen)
    if not isinstance(seen, Prompt):
        raise BadReply(
            f"{source}: acting[{seat!r:.60}] must be a Prompt or a list of Message, not {type(seen).__name__}"
        )
    return msgspec.structs.replace(seen)


def _seats(environment: Environment) -> str:
    return f"the seats are: {', '.join(map(repr, environment.seats))}"


def title_of(environment: Environment) -> str:
    """Return the name of the environment's class, without the wrappers that play its tools and bots."""
    inner = getattr(environment, "environment", None)
    return title_of(inner) if isinstance(inner, Environment) else type(environment).__name__


def check_round_reward(environment: Environment, reward: object, components: object) -> None:
    """Raise BadReply if the answer to a round has a reward that belongs to no seat."""
    if reward or components:
        raise BadReply(
            f"{title_of(environment)}.step_all() gives reward {reward!r:.60}, which no seat of the round owns: "
            "name the seats in `rewards`"
        )


async def play_actions(environment: Environment, asked: Opening | Step, actions: Sequence[Action]) -> Step:
    """Play what the seats do that `asked` named, in the order of the environment's seats."""
    return await (environment.step(actions[0]) if asked.acting is None else environment.step_all(list(actions)))
