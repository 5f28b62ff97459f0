"""Loaded inside vLLM's worker process: our weight transfer engine and the calls that drive it.

Joining a group and receiving bytes run on a separate thread, so generation continues and a dead peer costs no tokens;
the loading itself is one call between two engine steps, made while the scheduler is paused. Where the model is divided
among several processes, each gets every call (`shards.py`).
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from vllm.config import set_current_vllm_config
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.distributed.weight_transfer import WeightTransferEngine, WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.lora.request import LoRARequest
from vllm.model_executor.model_loader import get_model_loader
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from opentinker.services.rollout_worker.engines import prompt_logits, seeded_prefill
from opentinker.services.rollout_worker.engines.merged_adapter import MergeableBase, Pair, pairs_of
from opentinker.services.rollout_worker.engines.packed_layers import pack
from opentinker.services.rollout_worker.engines.shards import SharedBuckets, held_sums, sent_sum
from opentinker.shared.data.model_files import weight_files
from opentinker.shared.nn.buckets import bucket_sizes, fingerprint, unpack
from opentinker.shared.nn.transport import WeightGroup
from opentinker.shared.types.errors import TransportError
from opentinker.shared.types.swap import TensorInfo

BACKEND = "opentinker"
ON_CPU = not torch.cuda.is_available()
ORPHAN_CHECK_S = 1.0
SHORT_WAIT_S = 0.015
"""A small model has arrived after this long; standing still for it is cheaper than being asked again a step later."""
NOTHING_TO_DO: dict[str, Any] = {"seconds": 0.0}


@dataclass
class GroupInfo(WeightTransferInitInfo):  # type: ignore[misc]
    address: str
    port: int
    secret: str
    rank: int
    world: int
    device: str
    transports: list[Any]
    """Transports of ranks 1, 2, ..."""
    timeout_s: float


@dataclass
class VersionInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    manifest: list[Any]
    """[name, dtype, shape] of each tensor, in order."""
    fingerprints: list[int]
    bucket_bytes: int
    scale: float | None = None
    """Scale of an adapter that is merged into the base; None for other weights."""


class BucketEngine(WeightTransferEngine[GroupInfo, VersionInfo]):  # type: ignore[misc]
    """join -> (stage -> load) ... Registered with vLLM under BACKEND, for all transports alike."""

    init_info_cls = GroupInfo
    update_info_cls = VersionInfo

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        self.group: WeightGroup | None = None
        self.manifest: list[TensorInfo] = []
        self.buckets: list[torch.Tensor] | None = None
        self.task: Background | None = None
        self.scale: float | None = None
        """Scale of the staged adapter, if it will be merged."""
        self.base = MergeableBase(self._read_base, vllm_config.model_config.dtype, whole=not ON_CPU)
        self._of_policy: dict[int, BucketEngine] = {}
        self.ranks: int = vllm_config.parallel_config.tensor_parallel_size
        self.rank: int = get_tensor_model_parallel_rank()
        self._shared, self._sizes, self._sent = SharedBuckets(), [0], [0, 0]
        self.pack()
        if ON_CPU:
            prompt_logits.repair()
            seeded_prefill.repair()
        self._arguments = config, vllm_config, device, model
        _exit_with_parent(also_grandparent=self.ranks > 1)

    def of(self, policy: int) -> BucketEngine:
        """Return the end of one policy's weight group: itself for the first."""
        if policy == 0:
            return self
        if policy not in self._of_policy:
            self._of_policy[policy] = BucketEngine(*self._arguments)
        return self._of_policy[policy]

    def in_background(self, call: Callable[[Any], object], argument: Any) -> dict[str, Any] | None:
        self.task = Background(call, argument)
        return self.task.answer(SHORT_WAIT_S)

    def take_no_part(self) -> dict[str, Any]:
        """Leave what is under way to rank 0."""
        self.task = None
        return NOTHING_TO_DO

    def init_transfer_engine(self, init_info: GroupInfo) -> None:
        self.leave()
        self.group = WeightGroup.join(
            address=init_info.address,
            port=init_info.port,
            secret=init_info.secret,
            rank=init_info.rank,
            world=init_info.world,
            device="cpu" if init_info.device == "cpu" else str(self.device),
            timeout_s=init_info.timeout_s,
            transports=init_info.transports,
        )

    def start_weight_update(self) -> None:
        if not ON_CPU:
            initialize_layerwise_reload(self.model)

    def expect(self, update_info: VersionInfo) -> None:
        """Note which version comes next, to this rank or to rank 0."""
        self.manifest, self.scale = [TensorInfo(*entry) for entry in update_info.manifest], update_info.scale
        self._sizes = bucket_sizes(self.manifest, update_info.bucket_bytes)

    def receive_weights(self, update_info: VersionInfo) -> dict[str, Any]:
        """Stage a version and check it; the model is not touched. Returns where other ranks find it. Raises
        TransportError."""
        if self.group is None:
            raise TransportError("not in a weight group")
        self.expect(update_info)
        if self.ranks == 1:
            self.buckets = self.group.receive(self._sizes, self.buckets)
            seen = [fingerprint(bucket) for bucket in self.buckets]
        else:
            self.buckets, seen = self._shared.hold(self._sizes), []
            for bucket, place in zip(self.group.receive_each(self._sizes), self.buckets, strict=True):
                place.copy_(bucket)
                seen.append(fingerprint(bucket))
        for number, (found, expected) in enumerate(zip(seen, update_info.fingerprints, strict=True)):
            if found != expected:
                raise TransportError(
                    f"bucket {number + 1} of {len(seen)} arrived with fingerprint {found}, not {expected}"
                )
        self._staged()
        return {"place": self._shared.place} if self.ranks > 1 else {}

    def find(self, place: str) -> None:
        """Take what rank 0 has staged at `place`."""
        if self.rank and place:
            self.buckets = self._shared.map(place, self._sizes)

    def read_weights(self, directory: Path, scale: float | None) -> None:
        """Stage the weights of a checkpoint directory, or its adapter; the model is not touched."""
        self.manifest, self.buckets, self.scale = [], [], scale
        for path in weight_files(directory):
            for name, tensor in load_file(path).items():
                dtype = str(tensor.dtype).removeprefix("torch.")
                self.manifest.append(TensorInfo(name, dtype, list(tensor.shape)))
                self.buckets.append(tensor.contiguous().flatten().view(torch.uint8))
        if not self.manifest:
            raise TransportError(f"there are no weights in {directory}")
        self._staged()

    def finish_weight_update(self) -> None:
        """Load what is staged, in place."""
        assert self.buckets is not None
        self.start_weight_update()
        if self.scale is None:
            weights = unpack(self.manifest, self.buckets)
        else:
            weights = self.base.merge(self._pairs(), self.scale, self.device)
        loaded = self.model.load_weights(weights)
        if not ON_CPU:
            finalize_layerwise_reload(self.model, self.model_config)
        self.pack()
        if self.scale is not None:  # the rest is the base's, and was never changed
            return
        eyes = _eyes(self.model)
        missing = {name for name, _ in self.model.named_parameters() if not name.startswith(eyes)} - loaded
        if missing:
            raise TransportError(f"no weights came for {', '.join(sorted(missing)[:5])}")

    def write_adapter(self, directory: Path) -> None:
        assert self.buckets is not None
        tensors = {key: tensor.clone() for key, tensor in unpack(self.manifest, self.buckets)}
        save_file(tensors, directory / "adapter_model.safetensors")

    def pack(self) -> None:
        if ON_CPU:
            pack(self.model, self.ranks)

    def sums(self) -> dict[str, Any]:
        """Return what this rank, and on rank 0 the version, adds up to."""
        if self.ranks == 1 or self.scale is not None:
            return {}
        shapes = {info.name: info.shape for info in self.manifest}
        sums: dict[str, Any] = held_sums(self.model, shapes, self.model_config.dtype, self.rank)
        return sums if self.rank else {**sums, "sent": self._sent}

    def _staged(self) -> None:
        assert self.buckets is not None
        if self.scale is not None:
            self.base.keep(self._pairs())
        elif self.ranks > 1 and not self.rank:
            self._sent = sent_sum(unpack(self.manifest, self.buckets), self.model_config.dtype)

    def _pairs(self) -> dict[str, Pair]:
        assert self.buckets is not None
        return pairs_of(unpack(self.manifest, self.buckets))

    def _read_base(self) -> Iterable[tuple[str, torch.Tensor]]:
        load_config = replace(self.vllm_config.load_config, use_tqdm_on_load=False)
        weights: Iterable[tuple[str, torch.Tensor]] = get_model_loader(load_config).get_all_weights(
            self.model_config, self.model
        )
        return weights

    def leave(self) -> None:
        if self.group is not None:
            self.group.close()
            self.group = None

    def forget(self) -> None:
        """Leave, and let go of the version that was received last."""
        self.leave()
        self._shared.close()
        self.manifest, self.buckets, self.scale, self.task = [], None, None, None

    def release(self) -> None:
        """Let go of versions that have been loaded, of all policies, and give their memory back to the GPU."""
        for engine in (self, *self._of_policy.values()):
            engine.buckets = None
        if not ON_CPU:
            torch.cuda.empty_cache()

    def shutdown(self) -> None:
        for engine in (self, *self._of_policy.values()):
            engine.leave()
            engine._shared.close()


def _eyes(model: Any) -> tuple[str, ...]:
    """Names of what sees begin so: it is frozen, and never sent."""
    parts = model.get_mm_mapping() if hasattr(model, "get_mm_mapping") else None
    return () if parts is None else tuple(f"{part.rstrip('.')}." for part in [*parts.tower_model, *parts.connector])


class WeightsExtension:
    """Mixed into vLLM's worker class; `collective_rpc` calls these by name. Answers are plain, errors included.

    `policy`: number of one of the policies in this process. Each receives through its own weight group."""

    weight_transfer_engine: BucketEngine
    vllm_config: Any
    add_lora: Callable[[LoRARequest], bool]
    remove_lora: Callable[[int], bool]

    def weights_join(self, policy: int, info: dict[str, Any]) -> dict[str, Any] | None:
        engine = self.weight_transfer_engine.of(policy)
        if engine.rank:
            return engine.take_no_part()
        return engine.in_background(engine.init_transfer_engine, engine.parse_init_info(info))

    def weights_stage(self, policy: int, info: dict[str, Any]) -> dict[str, Any] | None:
        engine = self.weight_transfer_engine.of(policy)
        if engine.rank:
            engine.expect(engine.parse_update_info(info))
            return engine.take_no_part()
        return engine.in_background(engine.receive_weights, engine.parse_update_info(info))

    def weights_read(self, policy: int, info: dict[str, Any]) -> dict[str, Any] | None:
        engine = self.weight_transfer_engine.of(policy)
        return engine.in_background(partial(engine.read_weights, scale=info["scale"]), Path(info["directory"]))

    def weights_poll(self, policy: int) -> dict[str, Any] | None:
        """Return the result of the policy's last join or stage; None while it is under way."""
        task = self.weight_transfer_engine.of(policy).task
        return NOTHING_TO_DO if task is None else task.answer()

    def weights_load(self, policy: int, place: str) -> dict[str, Any]:
        """`place`: where rank 0 has staged the version; empty if this rank has read it itself."""
        return _answer(self._load, policy, place)

    def weights_leave(self, policy: int) -> None:
        self.weight_transfer_engine.of(policy).leave()

    def weights_forget(self, policy: int) -> None:
        self.weight_transfer_engine.of(policy).forget()

    def weights_release(self) -> None:
        self.weight_transfer_engine.release()

    def weights_write(self, policy: int, directory: str) -> dict[str, Any] | None:
        """Write the staged tensors of an adapter next to the `adapter_config.json` in `directory`."""
        engine = self.weight_transfer_engine.of(policy)
        return engine.take_no_part() if engine.rank else engine.in_background(engine.write_adapter, Path(directory))

    def weights_add_adapter(self, name: str, number: int, directory: str) -> dict[str, Any]:
        return _answer(self.add_lora, LoRARequest(lora_name=name, lora_int_id=number, lora_path=directory))

    def weights_drop_adapter(self, number: int) -> None:
        self.remove_lora(number)

    def _load(self, policy: int, place: str) -> dict[str, Any]:
        engine = self.weight_transfer_engine.of(policy)
        with set_current_vllm_config(self.vllm_config), torch.no_grad():
            engine.find(place)
            engine.finish_weight_update()
            return engine.sums()


class Background:
    """One call on a separate thread; `answer` is None until it has ended."""

    def __init__(self, call: Callable[[Any], object], argument: Any) -> None:
        self._result: dict[str, Any] = {"error": f"{call} ended without a result"}
        self._thread = threading.Thread(target=self._run, args=(call, argument), name="weights", daemon=True)
        self._thread.start()

    def answer(self, wait_s: float = 0.0) -> dict[str, Any] | None:
        self._thread.join(wait_s)
        return None if self._thread.is_alive() else self._result

    def _run(self, call: Callable[[Any], object], argument: Any) -> None:
        self._result = _answer(call, argument)


def _answer(call: Callable[..., object], *arguments: Any) -> dict[str, Any]:
    started = time.perf_counter()
    try:
        found = call(*arguments)
    except Exception as error:  # noqa: BLE001 - any exception of a model's loader is the caller's answer
        return {"error": f"{type(error).__name__}: {error}"}
    return {"seconds": time.perf_counter() - started, **(found if isinstance(found, dict) else {})}


@cache
def _exit_with_parent(*, also_grandparent: bool) -> None:
    """A rollout worker that was killed must not leave an engine behind: it is the parent of this process, or of the
    engine's process whose ranks these are. Once per process."""
    parent = os.getppid()
    grandparent = _parent_of(parent) if also_grandparent else 0

    def watch() -> None:
        while os.getppid() == parent and (not also_grandparent or _parent_of(parent) == grandparent):
            time.sleep(ORPHAN_CHECK_S)
        os._exit(1)

    threading.Thread(target=watch, name="orphan-check", daemon=True).start()


def _parent_of(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


WeightTransferEngineFactory.register_engine(BACKEND, BucketEngine)
