"""A match in which a seat fails is void for all seats, and is played again from its beginning."""

from __future__ import annotations

from typing import Any

from opentinker.services.rollout_worker.engines.base import Completion, EngineError
from opentinker.services.rollout_worker.seat_map import LoadedPolicy
from opentinker.shared.messaging.bus import Bus
from opentinker.shared.spec import parse_spec
from opentinker.shared.spec.matches.policies import spec_of
from opentinker.shared.state.store import Store
from opentinker.shared.types.core import Message
from opentinker.shared.types.env_protocol import OpenSession, SeatPrompt, SessionReply, StepSession
from tests.integration.rollout_worker.rollout_bench import Asking, Bench, Mortal
from tests.support.factories import make_ticket
from tests.unit.rollout_worker.scripted_episode import renderer

GAME: dict[str, Any] = {
    "policies": {"a": {}, "b": {}},
    "seats": {"s0": "a", "s1": "b"},
    "algorithm": {"group_size": 4, "groups_per_batch": 2},
}
ROUNDS = 2


class Rounds(Asking):
    """Asks two seats together, ROUNDS times, and remembers the sessions, their seeds, and those that were closed."""

    def __init__(self) -> None:
        self.opened: list[tuple[str, int]] = []
        self.closed: list[str] = []
        self.asked = 0

    async def open(self, request: OpenSession, *_: Any) -> SessionReply:
        self.opened.append((request.session, request.seed))
        self.asked = 0
        return self.ask()

    def ask(self) -> SessionReply:
        self.asked += 1
        prompts = [SeatPrompt(seat=seat, messages=[Message(role="user", content="7=")]) for seat in ("s0", "s1")]
        return SessionReply(worker="env-0").with_prompts(prompts, together=True)

    async def step(self, worker: str, request: StepSession) -> SessionReply:
        return self.ask() if self.asked < ROUNDS else SessionReply(worker="env-0", done=True)

    async def close(self, **request: Any) -> None:
        self.closed.append(request["session"])


class FailsOnce(Mortal):
    """Fails in the second turn of the first match."""

    calls = 0

    async def generate(self, *args: Any, **options: Any) -> Completion:
        self.calls += 1
        if self.calls == ROUNDS:
            raise EngineError("out of luck")
        return await super().generate(*args, **options)


async def test_a_match_in_which_a_seat_fails_is_played_again_by_all_with_the_same_seed(bus: Bus, store: Store) -> None:
    bench = Bench(bus, store)
    plain = bench.spec.model_dump(mode="json")
    bench.spec = parse_spec({**plain, **GAME, "rollout": {**plain["rollout"], "max_turns": ROUNDS, "max_tokens": 64}})
    sessions, unlucky = Rounds(), FailsOnce()
    bench.sessions = sessions
    engines = {"a": Mortal(), "b": unlucky}
    policies = [LoadedPolicy(name, spec_of(bench.spec, name), engine, renderer()) for name, engine in engines.items()]
    job = bench.job_of(policies)
    _, _, played = await job._play_sample(make_ticket(job=bench.job, seq=1, seed=77), 0, job.seats)
    (void, seed), (again, same) = sessions.opened
    assert void != again and seed == same == 77 and sessions.closed == [void]
    assert [(one.seat, one.policy, len(one.turns)) for one in played] == [("s0", "a", ROUNDS), ("s1", "b", ROUNDS)]
    assert len({one.attempt for one in played}) == 1, "no seat of the void match is trained"
    assert unlucky.calls == 2 * ROUNDS and job.counts["episodes_failed/engine_error"] == 1
