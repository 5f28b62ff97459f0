"""Trainer process whose jobs share a base model: several workers, each with a lease, and one adapter bank.

The base is that of the first job, and stays loaded until a job with another one comes and none trains. Placement gives
such a process jobs of one base only; a job of another one waits here until the rest have left.
"""

from __future__ import annotations

import asyncio
import shutil
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from typing import TYPE_CHECKING, Self

import structlog

from opentinker.services.trainer.cpu_shares import CpuShares
from opentinker.services.trainer.job_training import release_memory
from opentinker.services.trainer.learners.base import device_of
from opentinker.shared.asyncio_tools import cancel_and_wait, finish_uncancelled
from opentinker.shared.config import Settings
from opentinker.shared.data.readable_paths import opening
from opentinker.shared.durable_files import local_path
from opentinker.shared.runtime.job_logs import outside_job_log
from opentinker.shared.runtime.memory import memory_bytes
from opentinker.shared.runtime.service import Context
from opentinker.shared.spec import JobSpec
from opentinker.shared.spec.engines import MAX_SHARED_RANK, bank_of
from opentinker.shared.spec.matches.policies import spec_of
from opentinker.shared.types.core import Lease
from opentinker.shared.types.errors import JobFailed, OpenTinkerError

if TYPE_CHECKING:
    from opentinker.services.trainer.bank.bank_loop import BankLoop

log = structlog.get_logger()

THREADS_PER_JOB = 8
"""Learners wait for the bank in threads, and must not keep others from theirs."""

HOST_BYTES = 2**30
"""Host memory for adapters that are in no slot."""
FULL_HOST_SHARE = 3
"""Models of all weights that wait for their turn may have this fraction of the memory."""

Files = tuple[tuple[str, int, int], ...]
"""Name, size and time of the files of a model."""


class SharedBase:
    """The bank of this process. Use it as an async context manager; `failure` raises when the bank has crashed."""

    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx
        self._changed = asyncio.Condition()
        self._held = AsyncExitStack()
        self._base = ""
        """Base of the jobs here, or of the last one; empty if it could not be loaded."""
        self._files: Files = ()
        self._opening: asyncio.Task[BankLoop] | None = None
        """Loads the base, or has loaded it."""
        self._jobs = 0
        self._ended_leads: defaultdict[tuple[str, int], asyncio.Event] = defaultdict(asyncio.Event)
        """By job and epoch, for the other places of its group."""
        self._leads: set[tuple[str, int]] = set()
        """Those under way."""
        self.cpu = CpuShares()
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def __aenter__(self) -> Self:
        threads = THREADS_PER_JOB * self._ctx.settings.bank_jobs
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(threads))
        return self

    async def __aexit__(self, *_: object) -> None:
        await cancel_and_wait(self._opening)
        await finish_uncancelled(self._held.aclose())

    async def failure(self) -> None:
        """Wait for ever; raises what the bank's loop has raised."""
        await self._failed

    @contextmanager
    def leading(self, lease: Lease) -> Iterator[None]:
        """Train the job of a lease, in all places of its group."""
        key = lease.job, lease.epoch
        ended = self._ended_leads[key]
        self._leads.add(key)
        try:
            yield
        finally:
            ended.set()
            self._leads.remove(key)
            del self._ended_leads[key]

    async def until_ended(self, lease: Lease) -> None:
        """Wait for the end of `leading` for the lease's job."""
        key = lease.job, lease.epoch
        try:
            await self._ended_leads[key].wait()
        finally:
            if key not in self._leads:  # it ended before this place had its lease, or it does not begin
                self._ended_leads.pop(key, None)

    @asynccontextmanager
    async def bank_for(self, job: str, spec: JobSpec) -> AsyncIterator[BankLoop]:
        """Yield the bank of the job's base once it is loaded: of its policies' base, which is one. Raises JobFailed."""
        spec = spec_of(spec, next(iter(spec.policies), ""))
        loop: BankLoop | None = None
        while loop is None:
            loop = await self._join(job, spec)
        try:
            yield loop
        finally:
            await finish_uncancelled(self._left())

    async def _join(self, job: str, spec: JobSpec) -> BankLoop | None:
        """Count the job in and return its bank, or None if the load for another job has failed. A load continues when
        its job is cancelled."""
        base = bank_of(spec.model_dump())
        files = await asyncio.to_thread(_fingerprint, spec.model.base)
        async with self._changed:
            await self._changed.wait_for(lambda: base == self._base or not self._jobs)
            if self._jobs and files != self._files:
                raise JobFailed(
                    f"the files of model {spec.model.base} have changed since the trainer loaded it for other jobs; "
                    "submit the job again when those have ended, or take resources.trainer = 'own'"
                )
            if starts := (base, files) != (self._base, self._files) or self._opening is None:
                self._base, self._files = base, files
                self._opening = asyncio.create_task(self._open(self._opening, job, spec))
            opening_base = self._opening
            assert opening_base is not None
            self._jobs += 1
        try:
            await asyncio.wait([opening_base])
            if starts or opening_base.exception() is None:
                return opening_base.result()
        except BaseException:
            await finish_uncancelled(self._left())
            raise
        await finish_uncancelled(self._left())
        return None

    async def _left(self) -> None:
        async with self._changed:
            self._jobs -= 1
            self._changed.notify_all()

    async def _open(self, before: asyncio.Task[BankLoop] | None, job: str, spec: JobSpec) -> BankLoop:
        if before is not None:
            await asyncio.wait([before])
            del before  # with its bank: both bases need not fit at once
        try:
            await self._held.aclose()
            await asyncio.to_thread(release_memory)
            async with opening(self._ctx.store, self._ctx.settings, job):
                loop = await asyncio.to_thread(self._load, spec)
            with outside_job_log():  # it serves later jobs, too, which may be other tenants'
                await self._held.enter_async_context(loop)
        except BaseException as error:
            if self._opening is asyncio.current_task():
                self._base = ""
            log.warning("base_not_loaded", base=spec.model.base, error=str(error))
            raise
        loop.task.add_done_callback(self._ended)
        measured = {} if loop.bank.capacity is None else {"measured": str(loop.bank.capacity)}
        log.info("base_loaded", base=bank_of(spec.model_dump()), slots=loop.bank.slots, **measured)
        return loop

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and not self._failed.done():
            self._failed.set_exception(task.exception() or OpenTinkerError("the adapter bank ended by itself"))

    def _load(self, spec: JobSpec) -> BankLoop:
        """Load the base. Blocking; torch is imported here. Raises JobFailed."""
        from opentinker.services.trainer.bank.adapter_bank import AdapterBank
        from opentinker.services.trainer.bank.bank_loop import BankLoop
        from opentinker.services.trainer.bank.base_model import BaseModel
        from opentinker.services.trainer.bank.limits import BankLimits
        from opentinker.services.trainer.learners.policy_model import require_device

        tokens = self._ctx.settings.bank_tokens
        limits = BankLimits(
            step_tokens=tokens, datum_tokens=tokens, command_tokens=8 * tokens, waiting_tokens=16 * tokens,
            rank=MAX_SHARED_RANK,
        )  # fmt: skip
        store = self._ctx.settings.data_dir / "run" / "banks" / self._ctx.worker
        shutil.rmtree(store, ignore_errors=True)  # jobs resume from their checkpoints, not from what a bank has evicted
        require_device(device := device_of(spec))
        model = BaseModel(spec.model.base, spec.model.dtype, device)
        slots, host_bytes = slots_of(self._ctx.settings, spec), HOST_BYTES
        if spec.tinker.full_weights:  # a model that waits for its turn should not have to be written to disk
            host_bytes = max(HOST_BYTES, memory_bytes() // FULL_HOST_SHARE)
        return BankLoop(AdapterBank(model, store, limits, slots=slots, host_bytes=host_bytes))


def slots_of(settings: Settings, spec: JobSpec) -> int | None:
    """Return the slots of a bank; None: it measures them, as it always does on a GPU, where passes are short."""
    if spec.tinker.full_weights:
        return 1
    if settings.bank_measures or device_of(spec) == "cuda":
        return None
    return max(settings.bank_jobs, spec.tinker.max_adapters if spec.kind == "tinker" else 0)


def _fingerprint(base: str) -> Files:
    """Return what tells whether a local model is still the one that was loaded; nothing of one on a hub."""
    if (path := local_path(base)) is None:
        return ()
    found = []
    for file in sorted([*path.glob("*.json"), *path.glob("*.safetensors")]):
        with suppress(OSError):  # the load says more about it
            stat = file.stat()
            found.append((file.name, stat.st_size, stat.st_mtime_ns))
    return tuple(found)
