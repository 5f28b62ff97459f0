"""Jobs and sweeps as objects of either client: the latest record, and how it is printed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator
from typing import ClassVar, Generic, TypeVar

from opentinker.sdk.cards import job_card, job_progress, sweep_card, sweep_progress, sweep_told
from opentinker.sdk.displays import Progress
from opentinker.sdk.job_text import state_of
from opentinker.shared.api_types import Job, Sweep
from opentinker.shared.types.core import JobState

Record = TypeVar("Record", Job, Sweep)
FINAL = {state.value for state in JobState if state.final}
"""States of jobs, and of sweeps, in which nothing follows."""


class RecordView(ABC, Generic[Record]):
    NOUN: ClassVar[str]
    FIELDS: ClassVar[Collection[str]]
    """Fields of the record that rich shows."""

    id: str
    _last: Record | None

    def __repr__(self) -> str:
        known = f" {self._last['name']!r} {self._told(self._last)}" if self._last is not None else ""
        return f"<{self.NOUN} {self.id}{known}>"

    def __rich_repr__(self) -> Iterator[tuple[str, object]]:
        yield "id", self.id
        if self._last is not None:
            yield from ((field, value) for field, value in self._last.items() if field in self.FIELDS)

    @abstractmethod
    def _progress_of(self, record: Record) -> Progress:
        """Return how far it is."""

    @abstractmethod
    def _told(self, record: Record) -> str:
        """Return its state in a few words."""

    @abstractmethod
    def _card(self) -> str:
        """Return it as HTML, as it was known last. Every text is escaped; there are no scripts or styles in it."""


class JobView(RecordView[Job]):
    NOUN = "job"
    FIELDS = ("name", "state", "step", "steps")

    def _progress_of(self, record: Job) -> Progress:
        return job_progress(record)

    def _told(self, record: Job) -> str:
        return state_of(record)

    def _card(self) -> str:
        return job_card(self.id, self._last)


class SweepView(RecordView[Sweep]):
    NOUN = "sweep"
    FIELDS = ("name", "state", "trials", "planned", "best")

    def _progress_of(self, record: Sweep) -> Progress:
        return sweep_progress(record)

    def _told(self, record: Sweep) -> str:
        return sweep_told(record)

    def _card(self) -> str:
        return sweep_card(self.id, self._last)
