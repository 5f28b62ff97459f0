"""`opentinker validate` where no server is asked: what can be seen of a spec's model, rows, environment from here."""

from __future__ import annotations

from opentinker.shared.api_types import Check
from opentinker.shared.data.dry_run import check, model, prompt, rows
from opentinker.shared.data.dry_run_policies import of_policies, policies
from opentinker.shared.messaging.reply_validation import known_seats
from opentinker.shared.spec import JobSpec
from opentinker.shared.spec.evaluation import ambiguous_opponents
from opentinker.shared.spec.matches.pools import mistakes_in_pools
from opentinker.shared.spec.matches.seats import SeatTable, mistakes_in_seats
from opentinker.shared.types.core import Message
from opentinker.shared.types.errors import described, plural

TURNS = 4
ELSEWHERE = ("served:", "upload:", "http://", "https://", "ws://", "wss://")
PROGRAMS = ("agent_program", "verifiers", "openenv", "ors", "miniwob", "phone_page", "android_world")
"""Environments that start programs, or ask other servers."""


async def inspect(spec: JobSpec) -> list[Check]:
    """Return each check: name, finding, result (ok | note | bad), hint."""
    checks = [*of_policies(spec, model), *policies(spec)]
    checks += [check("pools", described(mistake), "bad") for mistake in mistakes_in_pools(spec)]
    messages: list[Message] = []
    if spec.environment.name:
        found, messages = await episode(spec)
        checks += found
    if spec.data is not None:
        checks += rows(spec, here=True)
    return [*checks, *of_policies(spec, lambda own: prompt(own, messages))]


def playable(spec: JobSpec) -> bool:
    """Return whether this process may play the spec's environment: one that starts no program and asks no server."""
    name = spec.environment.name
    return not name.startswith(ELSEWHERE) and name not in PROGRAMS and spec.environment.isolation != "sandbox"


async def episode(spec: JobSpec) -> tuple[list[Check], list[Message]]:
    """The first start state, a few guesses, and what is wrong between [seats] and the environment's."""
    from opentinker.local.trial_episode import Guessing, play

    name = spec.environment.name
    if not playable(spec):
        return [check("episode", f"{name} is not played here", "note", "validate on a server plays it: --url")], []
    tried = await play(name, spec.environment.config, Guessing(0), row=0, seed=0, turns=TURNS)
    if tried.failure:
        return [check("episode", tried.failure, "bad", f"opentinker env check {name} plays it alone")], []
    rewards = ", ".join(f"{reward:g}" for reward in tried.rewards.values())
    first = tried.replies[0].prompts[0].messages
    there = known_seats(tried.seats)
    wrong = (mistakes_in_seats(SeatTable.of(spec), there) or ambiguous_opponents(spec, there)) if spec.seats else []
    seats = [check("seats", described(mistake), "bad") for mistake in wrong]
    played = f"{plural(len(first), 'message')}, {plural(len(tried.turns), 'turn')} of guessing, reward {rewards or 0}"
    return [*seats, check("episode", played)], first
