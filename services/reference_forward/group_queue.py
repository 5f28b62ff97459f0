"""Queue of the groups in flight, by the models that they need. No torch, no messaging.

read --add--> waiting, queued for every model that it needs --take--> in a forward pass --complete--> waiting | ready
ready --release--> gone
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from opentinker.services.reference_forward.required_models import ModelKey
from opentinker.shared.messaging.bus import Delivery
from opentinker.shared.types.trajectories import Group

BATCHES_IN_FLIGHT = 2
"""Maximum number of forward passes' worth of groups in flight: enough that no pass waits for messages. The rest stays
in the stream for other instances."""
PREFETCH = 2
"""Groups of a job that may be fetched in addition to those in flight."""


@dataclass(eq=False)
class QueuedGroup:
    """One group in flight, with what is known and still missing of it."""

    delivery: Delivery[Group]
    group: Group
    """The group to score: the trajectories of the job's policy, or of those of its policies that have a model here."""
    temperature: float
    needs: dict[ModelKey, Mapping[str, Container[str]]]
    """The remaining work: by model its roles, each with the policies that it has the role for."""
    weights: dict[str, float] = field(default_factory=dict)
    """Weights of the job's reward models, by name."""
    results: dict[str, list[Any]] = field(default_factory=dict)
    """Results so far: by role, one per trajectory."""
    whole: Group | None = None
    """With the trajectories that are not scored, where there are any."""
    players: Container[str] = ("",)
    """Policies whose trajectories are scored; the empty name is that of a job's one policy."""
    queued: float = field(default_factory=time.time)
    """Unix time at which it came."""
    places: dict[ModelKey, list[int]] = field(default_factory=dict)
    """Trajectories that a model scores, by their places in the group; all where it has no entry."""

    @property
    def tokens(self) -> int:
        """Number of the tokens that are scored, prompts included."""
        return sum(len(t.mask_T) for t in self.group.trajectories)

    def select_own(self) -> None:
        """Leave the trajectories of other players unscored, such as frozen checkpoints."""
        own = [t for t in self.group.trajectories if t.policy in self.players]
        if len(own) < len(self.group.trajectories):
            self.whole, self.group = self.group, msgspec.structs.replace(self.group, trajectories=own)

    def select(self, models: Mapping[ModelKey, Mapping[str, Sequence[str]]]) -> None:
        """Score the trajectories of each policy with its models. `models`: by model its roles, each with policies."""
        readers = {key: {policy for policies in roles.values() for policy in policies} for key, roles in models.items()}
        self.players = set[str]().union(*readers.values())
        self.select_own()
        rows = list(enumerate(self.group.trajectories))
        places = {key: [place for place, t in rows if t.policy in policies] for key, policies in readers.items()}
        self.places = {key: found for key, found in places.items() if found}
        self.needs = {key: models[key] for key in self.places}

    def part(self, key: ModelKey) -> Group:
        """Return the group with the trajectories that a model scores."""
        if key not in self.places:
            return self.group
        rows = [self.group.trajectories[place] for place in self.places[key]]
        return msgspec.structs.replace(self.group, trajectories=rows)

    def add(self, key: ModelKey, results: list[Any]) -> None:
        """Keep a model's results, one per trajectory of its part, in each role for the policies that it has it for."""
        for role, policies in self.needs.pop(key).items():
            found = self.results.setdefault(role, [None] * len(self.group.trajectories))
            for place, result in zip(self.places.get(key, range(len(results))), results, strict=True):
                if self.group.trajectories[place].policy in policies:
                    found[place] = result

    def put_back(self, scored: Group) -> Group:
        """Return the whole group with scored trajectories in their places."""
        if self.whole is None:
            return scored
        own = iter(scored.trajectories)
        trajectories = [next(own) if t.policy in self.players else t for t in self.whole.trajectories]
        return msgspec.structs.replace(scored, trajectories=trajectories)


class GroupQueue:
    def __init__(self, tokens_per_batch: int) -> None:
        self.tokens_per_batch = tokens_per_batch
        self.in_flight: set[QueuedGroup] = set()
        """Groups that this instance holds until it acknowledges or returns them."""
        self.queues: dict[ModelKey, deque[QueuedGroup]] = {}
        """Never holds an empty queue; each is ordered oldest first."""

    def add(self, work: QueuedGroup) -> None:
        self.in_flight.add(work)
        for key in work.needs:
            self.queues.setdefault(key, deque()).append(work)

    def capacity(self, job: str, loaded: Container[ModelKey]) -> int:
        """Return how many more groups of the job may be fetched. Every job may have one in flight; more only while its
        models are loaded and all such groups fill fewer than BATCHES_IN_FLIGHT passes. 0 while that many tokens of the
        job are scored but cannot be published."""
        limit = BATCHES_IN_FLIGHT * self.tokens_per_batch
        waiting = [work for work in self.in_flight if work.needs]
        if sum(work.tokens for work in self.in_flight if work.group.job == job and not work.needs) >= limit:
            return 0
        able = [work for work in waiting if all(key in loaded for key in work.needs)]
        if not any(work.group.job == job for work in waiting):
            return 1
        if not any(work.group.job == job for work in able):
            return 0
        return PREFETCH if sum(work.tokens for work in able) < limit else 0

    def next_to_load(self, loaded: Container[ModelKey]) -> ModelKey | None:
        """Return the model to load next: the one that groups have waited for longest."""
        return next((key for key in self.queues if key not in loaded), None)

    def take(self, loaded: Iterable[ModelKey]) -> tuple[ModelKey, list[QueuedGroup]] | None:
        """Return the next forward pass: up to `tokens_per_batch` tokens of the oldest groups, at least one group, for
        the first model of `loaded` (ordered by turn) that has work."""
        key = next((key for key in loaded if key in self.queues), None)
        if key is None:
            return None
        queue, tokens = self.queues[key], 0
        works: list[QueuedGroup] = []
        while queue and (not works or tokens + queue[0].tokens <= self.tokens_per_batch):
            works.append(queue.popleft())
            tokens += works[-1].tokens
        self._drop_if_empty(key)
        return key, works

    def complete(self, key: ModelKey, work: QueuedGroup, results: list[Any]) -> bool:
        """Record a model's results. Returns True if the group needs nothing more."""
        work.add(key, results)
        return not work.needs

    def drop(self, jobs: Container[str]) -> list[QueuedGroup]:
        """Remove the waiting groups of these jobs from all queues and return them; groups in a forward pass stay."""
        found = [work for work in self.in_flight if work.group.job in jobs and self._is_waiting(work)]
        self._remove(found)
        return found

    def drop_all(self) -> list[QueuedGroup]:
        return self.drop({work.group.job for work in self.in_flight})

    def jobs_waiting_for(self, key: ModelKey) -> set[str]:
        return {work.group.job for work in self.queues.get(key, ())}

    def waits(self, loaded: Container[ModelKey]) -> dict[str, tuple[float, bool]]:
        """Return by job since when (Unix time) groups have waited for a pass, and whether the models that they wait for
        are loaded."""
        found: dict[str, tuple[float, bool]] = {}
        for key, queue in self.queues.items():
            for work in queue:
                since, is_loaded = found.get(work.group.job, (work.queued, True))
                found[work.group.job] = min(since, work.queued), is_loaded and key in loaded
        return found

    def release(self, work: QueuedGroup) -> None:
        """Forget a group that was acknowledged or returned."""
        self.in_flight.discard(work)
        self._remove([work])

    def _is_waiting(self, work: QueuedGroup) -> bool:
        """Return whether every model it needs has it queued; otherwise it is in a forward pass or ready."""
        return bool(work.needs) and all(work in self.queues.get(key, ()) for key in work.needs)

    def _remove(self, works: list[QueuedGroup]) -> None:
        for key, queue in list(self.queues.items()):
            self.queues[key] = deque(work for work in queue if work not in works)
            self._drop_if_empty(key)

    def _drop_if_empty(self, key: ModelKey) -> None:
        if not self.queues[key]:
            del self.queues[key]
