"""Goes back to the last good checkpoint when an alarm of `train.rewind_on` rings.

    checkpoints   .. 30  40 | 50  60      the alarm's window began at step 41, the alarm rang at step 61
    .rewind       the manifest of step 40 with the accounting of step 61: the trained groups of the discarded steps are
                  `discarded/rewound`, and all groups consumed so far are consumed

The trainer that hears the alarm writes that file, in one rename, and starts again. The scheduler gives the job to a
trainer of a new epoch, which restores from the file as from any checkpoint. So versions grow (a version is epoch and
step), episodes of the discarded weights are recognised as rolled back, and groups have new numbers. The file holds
until a checkpoint of a later epoch is intact: a trainer that is killed before is followed by one that restores from it.
A trainer that is killed before the file exists is followed by one whose alarm is active when it begins.
"""

from __future__ import annotations

import asyncio

import msgspec
import structlog

from opentinker.services.trainer import checkpoint
from opentinker.services.trainer.intake import Intake
from opentinker.services.trainer.job_reporter import JobReporter
from opentinker.services.trainer.learners.base import NonFinite
from opentinker.shared.durable_files import replace_durably
from opentinker.shared.types.core import Discard
from opentinker.shared.types.errors import JobFailed, RestartNeeded
from opentinker.shared.types.manifest import Manifest, Rewind

log = structlog.get_logger()

NON_FINITE = "non_finite"
TOLD = ".rewind-told"
"""File with the number of the last rewind whose event was recorded."""


class Rewinder:
    def __init__(self, reporter: JobReporter, intake: Intake) -> None:
        self._reporter, self._intake = reporter, intake
        self._train = reporter.spec.train
        self._answered: set[str] = set()
        """Active alarms that have been answered."""
        self.count = 0
        """Times that the job went back, in this lineage."""

    async def restored(self, manifest: Manifest | None) -> None:
        """Take over from a checkpoint; after a rewind, remove the checkpoints that are not good and say so."""
        self.count = 0 if manifest is None else manifest.rewinds
        if manifest is None or manifest.rewound is None:
            return
        removed = await asyncio.to_thread(
            checkpoint.remove_after, self._reporter.root, manifest, self._reporter.lease.epoch
        )
        rewound = manifest.rewound
        told = self._reporter.root / TOLD
        if told.exists() and told.read_text() == str(manifest.rewinds):
            return  # by a trainer that was killed since
        detail = {"from": rewound.step, "to": manifest.step, "alarm": rewound.alarm, "rewind": manifest.rewinds}
        log.warning("rewound", **detail, removed=removed)
        await self._reporter.event("rewound", {**detail, "removed": removed})
        await asyncio.to_thread(replace_durably, told, str(manifest.rewinds).encode())

    async def check(self, step: int) -> None:
        """Go back if an alarm is active that asks for it and has no answer yet. Raises RestartNeeded, JobFailed."""
        active = self._reporter.alarms.active
        self._answered &= active.keys()
        for alarm, ring in active.items():
            if alarm in self._train.rewind_on and alarm not in self._answered:
                self._answered.add(alarm)
                await self._go_back(step, alarm, ring.since, f"the alarm {alarm} rang at step {step}")

    async def refused(self, step: int, error: NonFinite) -> None:
        """Go back after a refused step, or raise its error."""
        if NON_FINITE in self._train.rewind_on:
            await self._go_back(step, NON_FINITE, step + 1, str(error))
        raise error

    async def _go_back(self, step: int, alarm: str, since: int, why: str) -> None:
        """Write the file and raise RestartNeeded. Returns if no checkpoint is older than step `since`."""
        reporter = self._reporter
        if self.count >= self._train.rewinds:
            raise JobFailed(
                f"{why}, after the job had gone back {self.count} times (train.rewinds = {self._train.rewinds}); "
                "change what the alarm's hint names and continue from an earlier checkpoint"
            )
        await reporter.guard()
        good = await asyncio.to_thread(self._find_good, since)
        if good is None:
            problem = f"there is no checkpoint from before step {since}; checkpoint more often (train.checkpoint_every)"
            log.warning("not_rewound", alarm=alarm, problem=problem)
            await reporter.event("not_rewound", {"step": step, "alarm": alarm, "problem": problem})
            return
        async with self._intake.closed_books() as (floor, consumed, discarded):
            lost = self._intake.assembler.trained - good.ledger["trained"]
            discarded[Discard.REWOUND] = discarded.get(Discard.REWOUND, 0) + lost
            record = msgspec.structs.replace(
                good,
                epoch=reporter.lease.epoch,
                stream_floor=floor,
                consumed=consumed,
                ledger={
                    "trained": good.ledger["trained"],
                    **{f"discarded/{reason}": count for reason, count in discarded.items()},
                },
                next_seq=(await self._intake.admission.ledger()).issued,
                rewinds=self.count + 1,
                rewound=Rewind(step=step, alarm=alarm),
            )
            await asyncio.to_thread(checkpoint.write_rewind, reporter.root, record)
            raise RestartNeeded(f"{why}: it goes back to step {good.step}")

    def _find_good(self, since: int) -> Manifest | None:
        """Return the newest intact checkpoint of this lineage from before step `since`. Blocking."""
        resumed, root = self._intake.assembler.resumed, self._reporter.root
        for directory, manifest in reversed(checkpoint.list_checkpoints(root)):
            later = [began for epoch, began in resumed.items() if epoch > manifest.epoch]
            if manifest.epoch in resumed and manifest.step < since and manifest.step <= min([since, *later]):
                try:
                    return checkpoint.read_intact(directory)
                except JobFailed as error:
                    log.warning("checkpoint_damaged", checkpoint=str(directory), problem=str(error))
        return None
