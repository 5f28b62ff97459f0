"""The groups in hand, by the model that they wait for. No torch here, no messages.

read --add--> waiting, in the queue of every model that it needs --take--> in a forward pass --done--> waiting | ready
ready --put_away--> gone
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Iterable
from dataclasses import dataclass, field
from typing import Any

from opentinker.services.reference_forward.required_models import ModelKey
from opentinker.shared.messaging.bus import Delivery
from opentinker.shared.types.trajectories import Group

BATCHES_IN_HAND = 2
"""Forward passes' worth of groups that are taken at most: enough that none waits for messages. What is not taken is
there for other instances."""
AHEAD = 2
"""Groups of a job that may be on their way to us beside those in hand."""


@dataclass(eq=False)
class Work:
    """One group on its way."""

    delivery: Delivery[Group]
    group: Group
    temperature: float
    needs: dict[ModelKey, list[str]]
    """What is still to be done: roles by model."""
    weights: dict[str, float] = field(default_factory=dict)
    """Of the job's reward models, by name."""
    found: dict[str, list[Any]] = field(default_factory=dict)
    """By role, one result per trajectory."""

    def __post_init__(self) -> None:
        self.tokens = sum(len(t.mask_T) for t in self.group.trajectories)


class GroupQueue:
    def __init__(self, tokens_per_batch: int) -> None:
        self.tokens_per_batch = tokens_per_batch
        self.hand: set[Work] = set()
        """All that is ours until it is acknowledged or given back."""
        self.queues: dict[ModelKey, deque[Work]] = {}
        """None of them empty; in each the oldest first."""

    def add(self, work: Work) -> None:
        self.hand.add(work)
        for key in work.needs:
            self.queues.setdefault(key, deque()).append(work)

    def room(self, job: str, loaded: Container[ModelKey]) -> int:
        """How many more groups of the job may be on their way to us. Every job may have one in hand; more only while
        the models for it are loaded, and all such groups make less than BATCHES_IN_HAND passes. None while so much of
        the job's is scored and cannot be passed on."""
        limit = BATCHES_IN_HAND * self.tokens_per_batch
        waiting = [work for work in self.hand if work.needs]
        if sum(work.tokens for work in self.hand if work.group.job == job and not work.needs) >= limit:
            return 0
        able = [work for work in waiting if all(key in loaded for key in work.needs)]
        if not any(work.group.job == job for work in waiting):
            return 1
        if not any(work.group.job == job for work in able):
            return 0
        return AHEAD if sum(work.tokens for work in able) < limit else 0

    def wanted(self, loaded: Container[ModelKey]) -> ModelKey | None:
        """The model to load next: the one that has been waited for longest."""
        return next((key for key in self.queues if key not in loaded), None)

    def take(self, loaded: Iterable[ModelKey]) -> tuple[ModelKey, list[Work]] | None:
        """The next forward pass: up to `tokens_per_batch` tokens of the oldest groups, at least one group, of the first
        model of `loaded` (in the order in which models have their turn) for which there is work."""
        key = next((key for key in loaded if key in self.queues), None)
        if key is None:
            return None
        queue, tokens = self.queues[key], 0
        works: list[Work] = []
        while queue and (not works or tokens + queue[0].tokens <= self.tokens_per_batch):
            works.append(queue.popleft())
            tokens += works[-1].tokens
        self._tidy(key)
        return key, works

    def done(self, key: ModelKey, work: Work, results: list[Any]) -> bool:
        """True when this was the last that the group needed."""
        for role in work.needs.pop(key):
            work.found[role] = results
        return not work.needs

    def drop(self, jobs: Container[str]) -> list[Work]:
        """Take the groups of these jobs off all queues; what a forward pass is busy with is not among them."""
        found = [work for work in self.hand if work.group.job in jobs and self._waits(work)]
        self._leave(found)
        return found

    def drop_all(self) -> list[Work]:
        return self.drop({work.group.job for work in self.hand})

    def waiting_for(self, key: ModelKey) -> set[str]:
        """Jobs."""
        return {work.group.job for work in self.queues.get(key, ())}

    def put_away(self, work: Work) -> None:
        """It is acknowledged or given back: nobody here does anything for it any more."""
        self.hand.discard(work)
        self._leave([work])

    def _waits(self, work: Work) -> bool:
        """In the queue of everything that it needs: in none it is with a forward pass, or ready."""
        return bool(work.needs) and all(work in self.queues.get(key, ()) for key in work.needs)

    def _leave(self, works: list[Work]) -> None:
        for key, queue in list(self.queues.items()):
            self.queues[key] = deque(work for work in queue if work not in works)
            self._tidy(key)

    def _tidy(self, key: ModelKey) -> None:
        if not self.queues[key]:
            del self.queues[key]
