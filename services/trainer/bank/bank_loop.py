"""Serves a bank to several tenants: commands come in from coroutines, passes run in one thread.

run_units, optim_step, export --> FairQueue --> passes and steps --> results
"""

from __future__ import annotations

import asyncio
import functools
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, Self
from weakref import WeakValueDictionary

import structlog
from torch import Tensor

from opentinker.services.trainer.bank.adamw import AdamSettings, check_settings
from opentinker.services.trainer.bank.adapter import Adapter, AdapterShape, FullShape
from opentinker.services.trainer.bank.adapter_bank import AdapterBank, Rows, StepResult
from opentinker.services.trainer.bank.bank_commands import (
    BankCommand,
    CallCommand,
    ForwardCommand,
    ForwardResult,
    StepCommand,
)
from opentinker.services.trainer.bank.copies import Copies
from opentinker.services.trainer.bank.fair_queue import FairQueue, Waiting
from opentinker.services.trainer.bank.job_waits import JobWaits
from opentinker.services.trainer.bank.limits import BankEnded
from opentinker.services.trainer.bank.mixed_batch import PieceResult
from opentinker.services.trainer.bank.pass_budget import PassBudget
from opentinker.services.trainer.bank.pass_part import PassOptions, Unit
from opentinker.services.trainer.bank.slots_lock import SlotsLock
from opentinker.services.trainer.bank.tenant_totals import TenantTotals
from opentinker.shared.asyncio_tools import Notifier
from opentinker.shared.spec import LoraSpec
from opentinker.shared.types.errors import NotFound, OpenTinkerError

log = structlog.get_logger()

TURNS = 64
"""Turns of tenants in the largest pass; each takes at least a row."""


class BankLoop:
    """Commands of an adapter are carried out in order; each tenant has its fair share of the tokens.

    Use it as an async context manager; at the end all adapters are stored.
    """

    def __init__(self, bank: AdapterBank, *, coalesce_s: float = 0.005) -> None:
        """`coalesce_s`: how long a pass with room waits for tenants of the last one."""
        self.bank, self.coalesce_s = bank, coalesce_s
        limits = bank.limits
        self._queue = FairQueue[BankCommand](limits.datum_tokens, max(1, limits.step_tokens // TURNS))
        self._budget = PassBudget(limits.step_tokens)
        self._thread = ThreadPoolExecutor(1, "bank")
        self._slots = SlotsLock()
        """Held from the load of adapters to the end of their pass, and while an adapter is added: adding evicts."""
        self._wake, self._finished = asyncio.Event(), Notifier()
        self._rooms: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """Held by the tenant's first one that waits for room."""
        self.copies = Copies()
        self.copying = asyncio.Lock()
        """Held by those who hold a copy of a model that trains all weights, whatever lease they are of."""
        self.passed = TenantTotals()
        """Tokens that went through passes."""
        self.waited_s = TenantTotals()
        """Seconds that commands waited for others'."""
        self.other_jobs = JobWaits()
        self._recent: set[str] = set()
        """Adapters of the last pass that could have had more."""

    async def __aenter__(self) -> Self:
        self.events = asyncio.get_running_loop()
        self.task = asyncio.create_task(self._run())
        self.task.add_done_callback(lambda _: self._cancel_all())
        return self

    async def __aexit__(self, *_: object) -> None:
        self.task.cancel()
        await asyncio.wait([self.task])
        try:
            await self._in_thread(self.bank.close)
        finally:
            self._thread.shutdown()
            if not self.task.cancelled():
                self.task.result()

    def _cancel_all(self) -> None:
        """Cancel all commands: the loop has ended, or crashed."""
        for waiting in self._queue:
            waiting.command.answer.cancel()
        self._finished.ring()

    @property
    def queue_reason(self) -> str:
        """Say what commands wait for, such as `slots 3/8, 2 waiting for tokens`."""
        used = len(self.bank.residency.places["slot"])
        waiting = sum(not one.units or one.tokens_left > 0 for one in self._queue)
        return f"slots {used}/{self.bank.slots}" + (f", {waiting} waiting for tokens" if waiting else "")

    async def create(
        self, tenant: str, adapter: str, lora: LoraSpec | None, seed: int, *, deterministic: bool = False
    ) -> None:  # fmt: skip
        """Add an adapter that belongs to the tenant: others do not find it; without `lora`, all weights of the base, in
        a bank of one slot. `deterministic`: each of its units has a pass to itself, and results are bit for bit those
        of a trainer that one job has to itself. Raises Refused, Conflict or OSError."""
        create = functools.partial(self.bank.create, adapter, lora, seed, owner=tenant, deterministic=deterministic)
        await self._add(tenant, adapter, create)

    async def import_peft(self, tenant: str, adapter: str, directory: Path) -> None:
        """Likewise."""
        await self._add(tenant, adapter, lambda: self.bank.import_peft(adapter, directory, owner=tenant))

    async def add(self, tenant: str, adapter: Adapter) -> None:
        """Add this one; likewise."""
        await self._add(tenant, adapter.name, lambda: self.bank.add(adapter, owner=tenant))

    async def _add(self, tenant: str, adapter: str, function: Callable[[], None]) -> None:
        """Add an adapter; if it is cancelled before the end, remove it."""
        added = False

        def add() -> None:
            nonlocal added
            function()
            added = True

        def undo() -> None:
            if added:
                self.bank.remove(adapter)

        async with self._slots.adding(tenant):
            self._require_running()
            try:
                await self._in_thread(add, {tenant: 1.0})
            except asyncio.CancelledError:
                with suppress(RuntimeError):  # the thread has ended, and with it the unstored adapter
                    self._thread.submit(undo)  # the only thread: after `add`, if that has begun
                raise

    async def run_units(
        self, tenant: str, adapter: str, units: Sequence[Unit], options: PassOptions, *, backward: bool = True
    ) -> ForwardResult:
        """Add the gradient of the units' losses to the adapter's sum; without `backward`, compute the losses alone.
        Raises Refused or NotFound, and then has changed nothing."""
        limits, tokens = self.bank.limits, [unit.tokens for unit in units]
        limits.check_lengths(tokens)
        limits.check_waiting(self._queue.tokens(tenant), sum(tokens))
        return await self.send_units(tenant, adapter, units, options, backward=backward)

    def send_units(
        self, tenant: str, adapter: str, units: Sequence[Unit], options: PassOptions, *, backward: bool = True
    ) -> asyncio.Future[ForwardResult]:
        """The same, in the queue when it returns, for a tenant that bounds its commands by `wait_for_room`."""

        def rows(start: int, end: int, last: bool) -> Rows:
            return Rows(adapter, units[start:end], options, backward, last)

        answer: asyncio.Future[ForwardResult] = asyncio.get_running_loop().create_future()
        command = ForwardCommand(answer=answer, units=len(units), make_rows=rows, backward=backward)
        self._push(tenant, adapter, command, [unit.tokens for unit in units])
        return answer

    async def wait_for_room(self, tenant: str, tokens: int = 0) -> None:
        """Wait until a command with this number of tokens keeps to the tenant's bounds of the queue, after those that
        wait for it already. A larger one than `command_tokens` needs as much room as one of these: it takes its passes
        unit by unit, too."""
        limits = self.bank.limits
        tokens = min(tokens, limits.command_tokens)
        room = self._rooms.setdefault(tenant, asyncio.Lock())
        async with room:
            while True:
                self._require_running()
                waiting, commands = self._queue.tokens(tenant), self._queue.commands(tenant)
                if commands < limits.waiting_commands and (not waiting or waiting + tokens <= limits.waiting_tokens):
                    return
                await self._finished.listen().wait()

    async def optim_step(self, tenant: str, adapter: str, settings: AdamSettings) -> StepResult:
        """Step the adapter and reset its gradient sum. Raises Refused or NotFound."""
        return await self.send_step(tenant, adapter, settings)

    def send_step(self, tenant: str, adapter: str, settings: AdamSettings) -> asyncio.Future[StepResult]:
        """The same, in the queue when it returns."""
        check_settings(settings)
        answer: asyncio.Future[StepResult] = asyncio.get_running_loop().create_future()
        self._push(tenant, adapter, StepCommand(answer=answer, settings=settings), [])
        return answer

    async def export_peft(self, tenant: str, adapter: str, directory: Path) -> None:
        """Write the adapter as it is after its commands so far. Raises NotFound."""
        await self._send(tenant, adapter, lambda: self.bank.export_peft(adapter, directory))

    async def remove(self, tenant: str, adapter: str) -> None:
        """Remove the adapter after its commands so far; later ones do not find it. Raises NotFound."""
        await self._send(tenant, adapter, lambda: self.bank.remove(adapter), removes=True)

    async def read(self, tenant: str, adapter: str) -> Adapter:
        """Return a copy of the adapter as it is after its commands so far. Raises NotFound."""
        return await self.send_read(tenant, adapter)

    def shape(self, tenant: str, adapter: str) -> asyncio.Future[AdapterShape | FullShape]:
        """Likewise, its shape alone, without a copy."""
        return self._send(tenant, adapter, lambda: self.bank.shape(adapter))

    def send_read(self, tenant: str, adapter: str) -> asyncio.Future[Adapter]:
        """The same, in the queue when it returns."""
        return self._send(tenant, adapter, lambda: self.bank.read(adapter))

    async def write(self, tenant: str, adapter: str, vectors: Mapping[str, Tensor], steps: int | None) -> None:
        """Replace vectors of the adapter after its commands so far; see `AdapterBank.write`. Raises NotFound."""
        await self._send(tenant, adapter, lambda: self.bank.write(adapter, vectors, steps))

    def _send(
        self, tenant: str, adapter: str, function: Callable[[], Any], *, removes: bool = False
    ) -> asyncio.Future[Any]:
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._push(tenant, adapter, CallCommand(answer=answer, function=function, removes=removes), [])
        return answer

    def _require_running(self) -> None:
        if self.task.done():  # a command would wait for ever
            raise BankEnded("the adapter bank of this trainer has ended")

    def _push(self, tenant: str, adapter: str, command: BankCommand, units: list[int]) -> None:
        self._require_running()
        if self.bank.residency.owners.get(adapter) != tenant or self._is_being_removed(tenant, adapter):
            raise NotFound(f"there is no adapter {adapter!r}")
        self.bank.limits.check_commands(self._queue.commands(tenant))
        self._queue.push(Waiting(tenant, adapter, command, units, adapter in self.bank.residency.deterministic))
        if units:
            self._budget.sent(tenant)
        self._wake.set()

    def _is_being_removed(self, tenant: str, adapter: str) -> bool:
        last = self._queue.last(tenant, adapter)
        command = last.command if last else None
        return (
            isinstance(command, CallCommand) and command.removes and (command.running or not command.answer.cancelled())
        )

    async def _in_thread(self, function: Callable[[], Any], work: Mapping[str, float] | None = None) -> Any:
        """`work`: what the others wait for meanwhile, by tenant, in tokens or commands."""
        began = time.monotonic()
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, function)
        finally:
            if work:
                self.other_jobs.count(self._queue.heads(), began, work)

    async def _run(self) -> None:
        """Consumes commands and produces their answers; waits for commands, and is woken by `_push`."""
        while True:
            self._wake.clear()
            if not len(self._queue):
                await self._wake.wait()
            await self._drop_cancelled()
            await self._carry_out_steps()
            if self._queue.tokens():  # steps are one round at most, so that they do not hold up passes
                await self._coalesce()
                await self._run_pass()

    async def _coalesce(self) -> None:
        """Wait a little for adapters of the last pass that have sent nothing yet."""
        end = time.monotonic() + self.coalesce_s
        while self._has_room and self._recent - {waiting.adapter for waiting in self._queue.heads()}:
            self._wake.clear()
            try:
                await asyncio.wait_for(self._wake.wait(), end - time.monotonic())
            except TimeoutError:
                return

    @property
    def _pass_tokens(self) -> int:
        if self.bank.trains_full:  # a command has the same passes whatever others send: its sums are the same bits
            return self.bank.limits.step_tokens
        return self._budget.tokens(self._queue.tenants())

    @property
    def _has_room(self) -> bool:
        """Return whether the next pass could take more than what waits."""
        is_mixed = any(one.units and not one.alone for one in self._queue.heads())
        return is_mixed and self._queue.tokens() < self._pass_tokens

    async def _drop_cancelled(self) -> None:
        """Drop cancelled commands that stand first, and those that come to stand first thereby."""
        while cancelled := [one for one in self._queue.heads() if one.command.answer.cancelled()]:
            for waiting in cancelled:
                if waiting.taken:
                    await self._in_thread(functools.partial(self.bank.drop_partial, waiting.adapter))
                self._queue.finish(waiting)
            self._finished.ring()

    async def _carry_out_steps(self) -> None:
        """Carry out a round of what is no pass and stands first: optimizer steps in one call."""
        chosen = self._queue.steps(self.bank.slots)
        if steps := [one for one in chosen if isinstance(one.command, StepCommand)]:
            async with self._slots:
                await self._carry_out_optimizer_steps(steps)
        for waiting in chosen:
            if isinstance(waiting.command, CallCommand) and not waiting.command.answer.cancelled():
                await self._carry_out_call(waiting, waiting.command)

    async def _carry_out_optimizer_steps(self, chosen: Sequence[Waiting[BankCommand]]) -> None:
        steps = [(w, w.command.settings) for w in await self._load(chosen) if isinstance(w.command, StepCommand)]
        if steps:
            settings = [(waiting.adapter, settings) for waiting, settings in steps]
            results: Sequence[StepResult | Exception]
            try:
                work = Counter(waiting.tenant for waiting, _ in steps)
                results = await self._in_thread(lambda: self.bank.optim_step(settings), work)
            except Exception as error:
                log.error("optimizer_step_failed", exc_info=error)
                alone = error if len(steps) == 1 else OpenTinkerError(f"a step of several adapters: {error}")
                results = [alone] * len(steps)
            for (waiting, _), result in zip(steps, results, strict=True):
                self._answer(waiting, result)

    async def _load(self, chosen: Sequence[Waiting[BankCommand]]) -> list[Waiting[BankCommand]]:
        """Bring the adapters of commands into slots. Leaves out cancelled commands and, with their error as the answer,
        those whose adapter cannot be used."""
        names = [waiting.adapter for waiting in chosen]
        changing = {w.adapter for w in chosen if not isinstance(w.command, ForwardCommand) or w.command.backward}
        unusable = await self._in_thread(lambda: self.bank.load(names, changing))
        for waiting in chosen:
            if waiting.adapter in unusable:
                self._answer(waiting, unusable[waiting.adapter])
        return [w for w in chosen if w.adapter not in unusable and not w.command.answer.cancelled()]

    async def _carry_out_call(self, waiting: Waiting[BankCommand], command: CallCommand) -> None:
        command.running = True
        try:
            self._answer(waiting, await self._in_thread(command.function, {waiting.tenant: 1.0}))
        except Exception as error:  # noqa: BLE001 - the caller gets it; the others are not affected
            self._answer(waiting, error)

    async def _run_pass(self) -> None:
        async with self._slots:  # what comes while an adapter is added is in the pass after it
            await self._run_rows(self._queue.take(self._pass_tokens, self.bank.slots))

    async def _run_rows(self, taken: Sequence[tuple[Waiting[BankCommand], int]]) -> None:
        counts = {id(waiting): count for waiting, count in taken}
        loaded = await self._load([waiting for waiting, _ in taken])
        if not loaded:
            return
        rows, tokens = [], 0
        for waiting in loaded:
            command, count = waiting.command, counts[id(waiting)]
            assert isinstance(command, ForwardCommand)
            own = sum(waiting.units[waiting.taken - count : waiting.taken])
            self.passed.add(waiting.tenant, own)
            tokens += own
            start, command.done = command.done, command.done + count
            rows.append(command.make_rows(start, command.done, command.done == command.units))
        if not loaded[0].alone:
            self._recent = {part.adapter for part in rows}
        began = time.monotonic()
        results = await self._results(rows)
        self._budget.passed(tokens, took_s := time.monotonic() - began)
        for waiting, result in zip(loaded, results, strict=True):
            waiting.command.passes_s += took_s
            if isinstance(result, Exception):
                await self._in_thread(functools.partial(self.bank.drop_partial, waiting.adapter))
                self._answer(waiting, result)
            elif isinstance(waiting.command, ForwardCommand) and (answer := waiting.command.take(result)) is not None:
                self._answer(waiting, answer)

    async def _results(self, rows: Sequence[Rows]) -> list[PieceResult | Exception]:
        """Run a pass. If it raises, run its commands one at a time: the exception is the result of the one at fault."""
        work = Counter[str]()
        for part in rows:
            work[self.bank.residency.owners[part.adapter]] += sum(unit.tokens for unit in part.units)
        try:
            return list(await self._in_thread(lambda: self.bank.run_pass(rows), work))
        except Exception as error:  # noqa: BLE001 - the command gets it; the others are not affected
            traceback.clear_frames(error.__traceback__)  # they hold the activations
            failure = error
        log.warning("pass_failed", adapters=[part.adapter for part in rows], exc_info=failure)
        if len(rows) == 1:
            return [failure]
        return [result for part in rows for result in await self._results([part])]

    def _answer(self, waiting: Waiting[BankCommand], result: object) -> None:
        self._queue.finish(waiting)
        self._finished.ring()
        command, answer = waiting.command, waiting.command.answer
        self.waited_s.add(waiting.tenant, command.waited_s)
        if answer.done():
            return  # cancelled during the command
        if isinstance(result, Exception):
            answer.set_exception(result)
        else:
            answer.set_result(result)
