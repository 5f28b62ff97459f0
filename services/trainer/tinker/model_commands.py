"""Carries out commands of one model with its adapter in the bank."""

from __future__ import annotations

import asyncio
import functools
import re
import time
from collections.abc import Awaitable
from contextlib import suppress
from pathlib import Path

import msgspec
import structlog

from opentinker.services.trainer.bank.adamw import AdamSettings
from opentinker.services.trainer.bank.adapter import Adapter, AdapterShape, FullShape
from opentinker.services.trainer.bank.adapter_bank import StepResult
from opentinker.services.trainer.bank.bank_commands import ForwardResult
from opentinker.services.trainer.bank.limits import Refused
from opentinker.services.trainer.bank.pass_part import PassOptions, Unit
from opentinker.services.trainer.tinker import model_files
from opentinker.services.trainer.tinker.losses import (
    Columns,
    DataLoss,
    find_loss,
    metrics_of,
    read_data,
    split,
    units_of,
)
from opentinker.services.trainer.tinker.model_files import ModelNotes
from opentinker.services.trainer.tinker.model_layers import lora_of
from opentinker.services.trainer.tinker.tinker_lease import TinkerLease
from opentinker.shared.state.tinker.sessions import TooManyRecords
from opentinker.shared.types.errors import NotFound
from opentinker.shared.types.tinker import (
    Command,
    Create,
    ForwardBackward,
    Forwarded,
    Load,
    Loaded,
    LoraShape,
    OptimStep,
    Result,
    Sampler,
    Save,
    Saved,
    Skip,
    Stepped,
    TinkerCheckpoint,
)

log = structlog.get_logger()

PREPARED_AT_ONCE = 1 << 14
"""Bytes of token ids that are prepared without a change of thread, which takes longer."""
FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}")
SAMPLER_NAME = re.compile(r"\w[\w.:-]{0,127}", re.ASCII)


class ModelCommands:
    """The adapter is in the bank from `create` or `restore` to `leave`."""

    def __init__(self, shared: TinkerLease, model: str) -> None:
        self._shared, self._bank, self.model = shared, shared.bank, model
        self.adapter = f"{model}.{shared.lease.epoch}"
        """Its name in the bank: of a lease, because an earlier one may still be leaving."""
        self.tenant = ""
        self.lora = LoraShape(rank=1)
        self.passes = 0
        """Commands forward_backward that were sent to the bank."""
        self.left_out: list[tuple[int, int]] = []
        """First and last numbers of commands that were given up, newest last."""
        self._shape: AdapterShape | FullShape | None = None
        self._files = asyncio.Lock()
        """Held while a checkpoint is written: saves take their turns."""

    @property
    def copy_bytes(self) -> int:
        """Bytes of a copy of the adapter: weights, gradient sum and moments."""
        return 0 if self._shape is None else 4 * 4 * self._shape.size

    async def create(self, command: Command, body: Create) -> None:
        """Add the adapter to the bank. Raises Refused, Conflict or OSError."""
        settings = self._shared.spec.tinker
        if body.lora.is_full != settings.full_weights:
            trained = "all weights, and no adapters" if settings.full_weights else "adapters, and not all weights"
            raise Refused(f"this server trains {trained}; create the model on another one (tinker.full_weights)")
        if not body.lora.is_full and body.lora.rank > (most := settings.max_rank):
            raise Refused(
                f"rank {body.lora.rank} is above the largest rank of this server, {most}; choose a lower rank"
            )
        lora = None if body.lora.is_full else lora_of(body.lora, self._bank.bank.base.layers)
        async with self._shared.one_copy():
            await self._bank.create(command.tenant, self.adapter, lora, body.lora.seed)
        self.tenant, self.lora, self.passes = command.tenant, body.lora, 0
        await self._bank.wait_for_room(self.tenant)
        self._shape = await self._bank.shape(self.tenant, self.adapter)
        try:
            if body.start:
                await self._replace(Path(body.start), optimizer=body.optimizer)
        except BaseException:
            await self.leave()
            raise

    async def restore(self, adapter: Adapter, notes: ModelNotes) -> None:
        """Add the adapter as it was stored. Raises Refused or OSError."""
        self.tenant, self.lora, self.passes, self._shape = notes.tenant, notes.lora, notes.passes, adapter.shape
        self.left_out = notes.left_out
        await self._bank.add(self.tenant, adapter)

    async def load(self, body: Load) -> Loaded:
        """Replace the weights. Raises Refused, and then has changed nothing."""
        await self._replace(Path(body.directory), optimizer=body.optimizer)
        return Loaded(path=body.path)

    async def _replace(self, directory: Path, *, optimizer: bool) -> None:
        assert self._shape is not None
        read = functools.partial(model_files.read_vectors, directory, self._shape, optimizer=optimizer)
        async with self._shared.copy(self.tenant, self.copy_bytes):
            vectors, steps = await asyncio.to_thread(read)
            await self._bank.wait_for_room(self.tenant)
            await self._bank.write(self.tenant, self.adapter, vectors, steps)

    async def leave(self) -> None:
        """Remove the adapter from the bank, if it is there."""
        await self._bank.wait_for_room(self.tenant)
        with suppress(NotFound):
            await self._bank.remove(self.tenant, self.adapter)

    def read(self, seq: int) -> tuple[asyncio.Future[Adapter], ModelNotes]:
        """Return the adapter as it is after what was sent so far, which is up to command `seq`."""
        notes = ModelNotes(
            seq=seq, tenant=self.tenant, lora=self.lora, passes=self.passes, left_out=self.left_out
        )  # fmt: skip
        return self._bank.send_read(self.tenant, self.adapter), notes

    async def begin(self, command: Command, *, arrived_at: float, repeated: bool) -> Awaitable[Result]:
        """Send a command to the bank, after those before it, and return what waits for its result. `repeated`: it was
        answered before. Raises Refused, and then has changed nothing."""
        if command.tenant != self.tenant:
            raise NotFound(f"model {self.model} does not exist")
        body = command.body
        if isinstance(body, ForwardBackward):
            return await self._begin_pass(body, arrived_at, repeated=repeated)
        if isinstance(body, Save):
            return await self._begin_save(command, body)
        await self._bank.wait_for_room(self.tenant)
        if isinstance(body, OptimStep):
            return self._stepped(
                self._bank.send_step(self.tenant, self.adapter, _settings(body)), body, repeated=repeated
            )
        assert isinstance(body, Skip)
        raise Refused(body.error)

    # --- passes -------------------------------------------------------------------------------------------------

    async def _begin_pass(self, body: ForwardBackward, arrived_at: float, *, repeated: bool) -> Awaitable[Result]:
        loss = find_loss(body.loss, body.options)
        size = sum(len(datum.tokens) for datum in body.data)
        prepare = functools.partial(self._prepare, body, loss)
        async with self._shared.preparation(self.tenant):  # a tenant's models have one prepared pass that waits
            await self._bank.wait_for_room(self.tenant, size // 4)
            data, units = prepare() if size <= PREPARED_AT_ONCE else await asyncio.to_thread(prepare)
            tokens = sum(unit.tokens for unit in units)
            await self._bank.wait_for_room(self.tenant, tokens)  # something may have come meanwhile
            sent = self._bank.send_units(self.tenant, self.adapter, units, PassOptions(), backward=body.backward)
        self.passes += 1
        held_s = time.monotonic() - arrived_at
        return self._forwarded(sent, loss, data, tokens, step=self.passes, held_s=held_s, repeated=repeated)

    def _prepare(self, body: ForwardBackward, loss: DataLoss) -> tuple[list[Columns], list[Unit]]:
        bank = self._bank.bank
        data = read_data(body.data, loss, bank.base.vocabulary, bank.limits)
        return data, units_of(data, loss, bank.limits.datum_tokens // 2)

    async def _forwarded(
        self, sent: asyncio.Future[ForwardResult], loss: DataLoss, data: list[Columns], tokens: int, *,
        step: int, held_s: float, repeated: bool,
    ) -> Forwarded:  # fmt: skip
        result = await sent
        logprobs = split(result.logprobs, data)
        metrics = metrics_of(data, loss, logprobs, result.loss)
        queue_s = held_s + result.waited_s
        if not repeated:
            self._shared.spent["tokens_trained"] += tokens
            learned = metrics["tokens:sum"]
            self._shared.curves.add_pass(
                self.model, self.tenant, step, loss=result.loss, learned=learned, tokens=tokens, queue_s=queue_s
            )
        log.debug("passed", model=self.model, tokens=tokens, queue_s=round(queue_s, 4), loss=result.loss)
        found = [part.astype("<f4", copy=False).tobytes() for part in logprobs]
        return Forwarded(logprobs=found, widths=[datum.width for datum in data], metrics=metrics)

    async def _stepped(self, sent: asyncio.Future[StepResult], body: OptimStep, *, repeated: bool) -> Stepped:
        result = await sent
        if not repeated:
            self._shared.curves.add_step(self.model, self.tenant, result.steps)
        return Stepped(metrics={"grad_norm": result.grad_norm, "lr": body.lr, "steps": float(result.steps)})

    # --- saves --------------------------------------------------------------------------------------------------

    async def _begin_save(self, command: Command, body: Save) -> Awaitable[Saved]:
        """The copy counts until the command ends, however it does."""
        _check_names(body)
        if self._shared.spec.tinker.full_weights:  # the caller holds `one_copy`
            await self._bank.wait_for_room(self.tenant)
            return self._saved(command, body, self._bank.send_read(self.tenant, self.adapter))
        release = await self._bank.copies.take(self.tenant, self.copy_bytes)
        try:
            await self._bank.wait_for_room(self.tenant)
            reading = self._bank.send_read(self.tenant, self.adapter)
        except BaseException:
            release()
            raise
        saving = asyncio.create_task(self._saved(command, body, reading))
        saving.add_done_callback(lambda _: release())
        return saving

    async def _saved(self, command: Command, body: Save, reading: asyncio.Future[Adapter]) -> Saved:
        adapter = await reading
        async with self._files:
            if body.name:
                return await self._save_checkpoint(command, body, adapter)
            return await self._save_sampler(command, body, adapter)

    @property
    def _owner(self) -> tuple[Path, int]:
        """Root of the model's state and the lease's epoch: trainers of newer ones fence the files."""
        return self._shared.place(self.model) / "state", self._shared.lease.epoch

    async def _save_checkpoint(self, command: Command, body: Save, adapter: Adapter) -> Saved:
        shared, now, is_whole = self._shared, time.time(), body.kind == "weights"
        made = TinkerCheckpoint(
            model=self.model, tenant=self.tenant, kind=body.kind, name=body.name, base=shared.spec.model.base,
            lora=self.lora, created=now, size=0, step=adapter.steps, seq=command.seq,
            place_name=f"{body.name}@{command.seq}", metadata=body.metadata,
            expires=now + body.ttl_s if body.ttl_s else 0.0,
        )  # fmt: skip
        known = await shared.records.saved_as(self.model, body.kind, body.name)
        if known and known.seq >= command.seq:  # before the trainer was killed; a later command may have replaced it
            return Saved(path=made.path)
        if is_whole and known and not body.overwrite and not (known.expires and known.expires <= now):
            raise Refused(f"checkpoint {made.path} exists; choose another name, or save with overwrite")
        await self._require_room(body.name, made.path)
        directory = shared.place(self.model) / body.kind / made.place
        base = self._bank.bank.base
        size = await shared.write(
            model_files.write_checkpoint, directory, adapter, base, optimizer=is_whole, owner=self._owner
        )
        await shared.records.add_checkpoint(msgspec.structs.replace(made, size=size))
        log.info("checkpoint_saved", path=made.path, step=made.step, bytes=size)
        return Saved(path=made.path)

    async def _require_room(self, name: str = "", path: str = "") -> None:
        """Raise Refused: others had their turn since the save was sent."""
        try:
            await self._shared.records.require_room_for_save(self.tenant, self._shared.lease.job, name, path)
        except TooManyRecords as error:
            raise Refused(str(error)) from None

    async def _save_sampler(self, command: Command, body: Save, adapter: Adapter) -> Saved:
        await self._require_room()
        directory = self._shared.place(self.model) / "samplers" / f"{body.sampler}@{command.seq}"
        base = self._bank.bank.base
        await self._shared.write(model_files.write_sampler, directory, adapter, base, owner=self._owner)
        await self._shared.records.add_sampler(Sampler(
            id=body.sampler, tenant=self.tenant, session=self.model.partition(":")[0], job=self._shared.lease.job,
            base=self._shared.spec.model.base, model=self.model, directory=str(directory),
            version=f"{self.model}@{command.seq}", rank=self.lora.rank, follows=body.follows,
        ))  # fmt: skip
        return Saved(sampler=body.sampler)


def _check_names(body: Save) -> None:
    """Raise Refused for a name that is no name of a file."""
    if body.name and not FILE_NAME.fullmatch(body.name):
        raise Refused(
            f"checkpoint name {body.name!r}: use 1 to 128 letters, digits and _ . -, beginning with a letter or a digit"
        )
    if not body.name and (body.kind != "sampler_weights" or not SAMPLER_NAME.fullmatch(body.sampler)):
        raise Refused("a checkpoint of weights needs a name")


def _settings(body: OptimStep) -> AdamSettings:
    return AdamSettings(
        lr=body.lr, beta1=body.beta1, beta2=body.beta2, eps=body.eps, weight_decay=body.weight_decay,
        clip=body.clip or None,
    )  # fmt: skip
