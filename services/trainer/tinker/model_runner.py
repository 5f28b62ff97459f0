"""One model of the Tinker API in the trainer: its commands in order, its answers, and its state on disk.

    offer --> by number --> sent to the bank in order --> results --> answers
                                      '--> state, which covers commands up to one; the stream loses those

A model comes with its first command, from its stored state, and leaves when it has been idle for long. After a crash
its commands since the stored state are carried out again; answers that exist stay as they are.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from functools import partial

import structlog

from opentinker.services.trainer.bank.limits import Refused
from opentinker.services.trainer.tinker import model_files
from opentinker.services.trainer.tinker.command_answers import (
    UNANSWERED,
    failure,
    late_answer,
    needs_no_repetition,
    of_bank,
    problem_of,
    ready,
    result_of,
)
from opentinker.services.trainer.tinker.command_intake import Arrived, CommandIntake
from opentinker.services.trainer.tinker.model_commands import ModelCommands
from opentinker.services.trainer.tinker.model_files import ModelEnd
from opentinker.services.trainer.tinker.tinker_lease import TinkerLease
from opentinker.shared.asyncio_tools import cancel_and_wait, check_cancelled, forward_exception, wait_event
from opentinker.shared.types.error_text import first_line
from opentinker.shared.types.errors import Conflict, NotFound
from opentinker.shared.types.tinker import Command, Create, Failed, Load, Loaded, Result, Save, Skip, Unload

log = structlog.get_logger()

IN_FLIGHT = 8
"""Commands of a model that the bank has at a time: enough for it never to wait for the next."""
CHORES_S = 5.0
"""An idle model looks so often whether it should be stored or leave."""
STORE_S = 30.0
"""Shortest time between two stored states; longer where storing takes more than a tenth of it."""
STORE_BYTES = 256 * 2**20
"""Bytes of commands since the stored state after which the next one is due."""
RESIDENT_S = 3600.0
"""Time without commands after which a model leaves the memory."""
RETRY_S = 2.0
"""First pause before a model whose disk or memory has failed tries again."""
GAP_S = 600.0
"""Time after which commands are given up whose predecessor has not come: its client has gone."""
GAPS_KEPT = 64
"""Newest gaps whose commands are told from those that were carried out, should they come after all."""


class ModelRunner:
    def __init__(
        self, shared: TinkerLease, intake: CommandIntake, model: str, *,
        forget: Callable[[], None], broken: asyncio.Future[None],
    ) -> None:  # fmt: skip
        """`forget`: called when the model leaves. `broken`: gets what must end the lease."""
        self._shared, self._intake, self.model = shared, intake, model
        self._forget, self._broken = forget, broken
        self._commands = ModelCommands(shared, model)
        self._root = shared.place(model) / "state"
        self._pending: dict[int, Arrived] = {}
        self.uncovered: dict[int, int] = {}
        """Place in the stream of the commands that the stored state does not contain, by number."""
        self._bytes = 0
        """Bytes of those commands."""
        self._news = asyncio.Event()
        self._tasks: dict[int, asyncio.Task[None]] = {}
        """Wait for the results of commands."""
        self._owed = set[int]()
        """Commands that were sent and have no answer yet."""
        self._unanswered = set[int]()
        """Commands without an answer that the stored state contains: the stream keeps them for the next trainer."""
        self._ended: Failed | None = None
        self._sent = self._stored = -1
        """Last command that was sent to the bank, and that the stored state contains."""
        self._storing: asyncio.Task[None] | None = None
        self._state = asyncio.Lock()
        """Held while the state is stored."""
        self._stored_at = self._used_at = time.monotonic()
        self._store_took_s = 0.0

    def offer(self, arrived: Arrived) -> None:
        """Take a command that has arrived, in any order, and once or more often."""
        if arrived.seq not in self.uncovered and arrived.seq > self._stored:
            self._bytes += arrived.size
        self.uncovered.setdefault(arrived.seq, arrived.stream)
        if arrived.seq in self._pending:
            self._intake.drop(arrived)
        else:
            self._pending[arrived.seq] = arrived
            self._news.set()

    async def run(self) -> None:
        """Consumes the model's commands in their order; waits for commands, woken by `offer`. Ends when the model has
        left the memory. Raises Fenced, JobFailed, RedisError, BankEnded."""
        await of_bank(self._run())

    async def _run(self) -> None:
        await self._restore()
        while True:
            check_cancelled()
            self._news.clear()
            if self._ended is None and (arrived := self._pending.pop(self._sent + 1, None)) is not None:
                await self._take(arrived)
                continue
            await self._give_up()
            await self._answer_others()
            if not await wait_event(self._news, CHORES_S) and await self._leaves():
                return

    async def _restore(self) -> None:
        """Bring the model back as it was stored. A damaged state ends it. An error of the disk does not: the commands
        stay where they are until it has come back."""
        pause_s = RETRY_S
        while (problem := await self._try_restore()) is not None:
            pause_s = await self._shared.pause(self.model, problem, pause_s)
        self._shared.stuck.discard(self.model)

    async def _try_restore(self) -> OSError | None:
        try:
            async with self._shared.one_copy():
                found = await asyncio.to_thread(
                    model_files.read_state, self._root, self._shared.lease.epoch, self._commands.adapter
                )
                if isinstance(found, ModelEnd):
                    self._ended = Failed(error=found.reason)
                elif found is not None:
                    adapter, notes = found
                    await self._commands.restore(adapter, notes)
                    self._sent = self._stored = notes.seq
                    log.info("model_restored", model=self.model, seq=notes.seq, step=adapter.steps)
        except OSError as error:
            return error
        except (Refused, Conflict) as error:
            log.error("model_not_restored", model=self.model, error=str(error))
            self._ended = Failed(error=f"model {self.model} cannot be read: {first_line(error)}", category="server")
        return None

    # --- commands in order --------------------------------------------------------------------------------------

    async def _take(self, arrived: Arrived) -> None:
        """Carry out the next command, or begin it. It counts as sent in the moment in which the bank has it."""
        while len(self._tasks) >= IN_FLIGHT:
            await asyncio.wait(self._tasks.values(), return_when=asyncio.FIRST_COMPLETED)
        command = await self._intake.command(arrived)
        request = f"{self.model}#{arrived.seq}" if command is None else command.request
        known = await self._shared.records.answered(request) if arrived.stream <= self._intake.replay_until else None
        alone = command is not None and isinstance(command.body, Create | Load | Unload)
        if alone or arrived.seq == 0:
            await self._settle()
        if command is not None and known is not None and needs_no_repetition(command, known):
            work: Awaitable[Result] = ready(known.result)
        elif known is not None:
            work = ready(await self._repeat(command, arrived, known.result))
        else:
            work = await self._begin(command, arrived, repeated=False)
        self._sent, self._used_at = arrived.seq, time.monotonic()
        if alone and self._ended is None:  # what it came from may be gone later
            self._unanswered.add(arrived.seq)
            await self._store()
        self._owed.add(arrived.seq)
        task = asyncio.create_task(self._finish(arrived.seq, request, work, is_known=known is not None))
        self._tasks[arrived.seq] = task

        def finished(done: asyncio.Task[None]) -> None:
            forward_exception(done, self._broken)
            if asyncio.iscoroutine(work):
                work.close()  # if it was cancelled before it began
            elif isinstance(work, asyncio.Future):
                work.cancel()

        task.add_done_callback(finished)
        self._store_if_due()

    async def _repeat(self, command: Command | None, arrived: Arrived, known: Result) -> Result:
        """Carry out a command that an earlier trainer has answered. A client that was told of success finds the model
        as if nothing had happened: an error of the machine is waited out, and a refusal ends the model."""
        pause_s, passes = RETRY_S, self._commands.passes
        while True:
            result = await result_of(await self._begin(command, arrived, repeated=True), self.model, arrived.seq)
            if not isinstance(result, Failed) or isinstance(known, Failed):
                break
            problem: object = result.error
            if result.category == "user":
                try:
                    await self._end(
                        f"model {self.model} has ended: its request {arrived.seq}, which had been carried out, had to "
                        f"be repeated, and cannot be any more: {result.error} (a checkpoint begins another model)"
                    )
                    break
                except OSError as error:
                    problem = error
            self._commands.passes = passes
            pause_s = await self._shared.pause(self.model, problem, pause_s)
        self._shared.stuck.discard(self.model)
        return result

    async def _begin(self, command: Command | None, arrived: Arrived, *, repeated: bool) -> Awaitable[Result]:
        try:
            if command is None:
                return ready(await self._refuse_unreadable(repeated=repeated))
            if arrived.seq == 0 or isinstance(command.body, Create | Load | Unload):
                return ready(await self._carry_out(command, repeated=repeated))
            begin = partial(self._commands.begin, command, arrived_at=arrived.at, repeated=repeated)
            if not (isinstance(command.body, Save) and self._shared.spec.tinker.full_weights):
                return await begin()
            async with self._shared.one_copy():  # to its end: each that waits for the files would hold a copy
                return ready(await of_bank(await begin()))
        except UNANSWERED:
            raise
        except Exception as error:  # noqa: BLE001 - the command is answered with it; the others are not affected
            return ready(failure(error, self.model, arrived.seq))

    async def _refuse_unreadable(self, *, repeated: bool) -> Failed:
        if self._sent < 0 and not repeated:
            await self._end(f"model {self.model} was not created: its first request cannot be read")
        return Failed(error="the request cannot be read; send it with another client", category="server")

    async def _carry_out(self, command: Command, *, repeated: bool) -> Result:
        """Carry out a command that the model does alone. Raises Refused and so on."""
        body = command.body
        if self._sent >= 0 and command.tenant != self._commands.tenant:
            raise NotFound(f"model {self.model} does not exist")
        if isinstance(body, Load):
            return await self._commands.load(body)
        if isinstance(body, Unload):
            await self._commands.leave()
            await self._end(f"model {self.model} was unloaded; create another one")
            return Loaded()
        try:
            if isinstance(body, Skip):
                raise Refused(body.error)
            if not isinstance(body, Create) or self._sent >= 0:
                raise Refused("the first request of a model, and no other, creates it")
            await self._commands.create(command, body)
        except UNANSWERED:
            raise
        except Exception as error:
            if self._sent < 0 and not repeated:
                await self._shared.records.not_live(command.tenant, [self.model])
                await self._end(f"model {self.model} was not created: {problem_of(error)}")
            raise
        return Loaded()

    async def _end(self, reason: str) -> None:
        end = ModelEnd(reason=reason)
        await asyncio.to_thread(model_files.write_end, self._root, self._shared.lease.epoch, end)
        self._ended = Failed(error=reason)
        under_way = self._sent + 1
        kept = self._unanswered
        self.uncovered = {seq: place for seq, place in self.uncovered.items() if seq >= under_way or seq in kept}

    async def _settle(self) -> None:
        """Wait until all commands so far have their answers. Raises what has prevented one."""
        if self._tasks:
            await asyncio.wait(self._tasks.values())
        if self._owed:
            await asyncio.shield(self._broken)

    async def _finish(self, seq: int, request: str, work: Awaitable[Result], *, is_known: bool) -> None:
        """Answer a command once it has its result."""
        try:
            result = await result_of(work, self.model, seq)
            if not is_known:
                await self._shared.answer(request, result, self._commands.tenant)
            self._owed.discard(seq)
            self._unanswered.discard(seq)
            if self._ended is not None or seq <= self._stored:
                self.uncovered.pop(seq, None)
        finally:
            del self._tasks[seq]

    async def _give_up(self) -> None:
        """Give up all commands that wait, once the number before them has been the next one for GAP_S; the model
        continues after the last of them. The state is stored before they are answered, so that no later trainer carries
        them out."""
        now, waiting = time.monotonic(), [seq for seq in self._pending if seq > self._sent]
        if self._ended is not None or all(now - max(self._pending[seq].at, self._used_at) < GAP_S for seq in waiting):
            return
        if self._sent < 0:
            await self._end(f"model {self.model} was not created: its first request has not come within {GAP_S:.0f} s")
            return
        gap = self._sent + 1, max(waiting)
        self._commands.left_out = [*self._commands.left_out, gap][-GAPS_KEPT:]
        self._sent = gap[1]
        self._unanswered.update(waiting)
        await self._store()
        await self._shared.records.leave_out(self.model, gap[1])
        log.info("commands_given_up", model=self.model, first=gap[0], last=gap[1])

    async def _answer_others(self) -> None:
        """Answer commands that will not be carried out: of a model that has ended, those that were before and have lost
        their answer, and those that were given up. An Unload ends the model even so."""
        for seq, arrived in list(self._pending.items()):
            if self._ended is None and seq > self._sent:
                continue
            del self._pending[seq]
            command = await self._intake.command(arrived)
            request = f"{self.model}#{seq}" if command is None else command.request
            if command is not None and isinstance(command.body, Unload) and self._ended is None:
                await self._settle()
                await self._begin(command, arrived, repeated=False)
            if seq not in self._tasks:
                await self._shared.answer(request, self._late_answer(seq, command), self.tenant)
                self._unanswered.discard(seq)
            if self._ended is not None or seq <= self._stored:
                self.uncovered.pop(seq, None)

    def _late_answer(self, seq: int, command: Command | None) -> Result:
        """Return what is answered if there is no answer yet."""
        if self._ended is not None:
            return Loaded() if command is not None and isinstance(command.body, Unload) else self._ended
        return late_answer(command, seq, self.model, self._commands.left_out)

    # --- state --------------------------------------------------------------------------------------------------

    def _store_if_due(self) -> None:
        """Begin to store the state if it is worth it."""
        due_s = max(STORE_S, 10 * self._store_took_s)
        is_due = time.monotonic() - self._stored_at >= due_s or self._bytes >= STORE_BYTES
        if is_due and self._sent > self._stored and self._ended is None and self._storing is None:
            self._storing = task = asyncio.create_task(self._store())

            def stored(_: asyncio.Task[None]) -> None:
                self._storing = None
                forward_exception(task, self._broken)

            task.add_done_callback(stored)

    async def _store(self) -> None:
        """Store the state after the commands so far, once they have their answers. A disk error is logged, and it is
        tried again later. Raises Fenced, RedisError."""
        async with self._state, self._shared.copy(self.tenant, self._commands.copy_bytes):
            await self._shared.bank.wait_for_room(self._commands.tenant)
            began, seq, counted = time.monotonic(), self._sent, self._bytes
            try:
                reading, notes = self._commands.read(seq)
                adapter = await of_bank(reading)
            except NotFound:  # it was not created, or has left
                return
            earlier = [task for number, task in self._tasks.items() if number <= seq]
            if earlier:
                await asyncio.wait(earlier)
            if any(number <= seq for number in self._owed):  # the lease ends
                return
            try:
                await self._shared.write(model_files.write_state, self._root, self._shared.lease.epoch, adapter, notes)
            except OSError as error:
                log.error("model_not_stored", model=self.model, error=str(error))
                self._stored_at = time.monotonic()
                return
            self._stored, self._bytes = seq, self._bytes - counted
            self._stored_at = time.monotonic()
            self._store_took_s = self._stored_at - began
            kept = self._unanswered
            self.uncovered = {one: place for one, place in self.uncovered.items() if one > seq or one in kept}
        log.debug("model_stored", model=self.model, seq=seq, seconds=round(self._store_took_s, 3))

    async def _leaves(self) -> bool:
        """Store what is due; leave the memory after a long time without commands. Returns whether it has left."""
        self._store_if_due()
        is_idle = not (self._pending or self._tasks or self._storing)
        has_adapter = self._sent >= 0 and self._ended is None
        if not is_idle or time.monotonic() - self._used_at < (RESIDENT_S if has_adapter else CHORES_S):
            return False
        if has_adapter and (self._sent > self._stored):
            return False
        await self._commands.leave()
        if self._pending:
            await self._restore()
            return False
        log.info("model_left", model=self.model)
        self._forget()
        return True

    async def close(self, *, save_s: float) -> None:
        """Store the state if the commands under way end within the time, and remove the model from the bank; with 0
        only that. `run` has ended before."""
        under_way = [*self._tasks.values(), *([self._storing] if self._storing else [])]
        try:
            if save_s and under_way:
                await asyncio.wait(under_way, timeout=save_s)
            is_quiet = not (self._tasks or self._storing or self._broken.done())
            if save_s and is_quiet and self._sent > self._stored and self._ended is None:
                await self._store()
        finally:
            await cancel_and_wait(self._storing, *self._tasks.values())
            await self._commands.leave()

    @property
    def tenant(self) -> str:
        """Empty before the model is created."""
        return self._commands.tenant

    @property
    def unanswered(self) -> list[str]:
        """Requests that have no answer, after `close`."""
        return [f"{self.model}#{seq}" for seq in sorted({*self._pending, *self._owed})]
