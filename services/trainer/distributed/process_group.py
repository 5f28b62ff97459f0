"""Collectives over the ranks of one learner.

Every method but `leave` is collective: the caller waits for the other ranks. gloo on the CPU, NCCL on GPUs. Only
tensors are sent; nothing is pickled.
"""

from __future__ import annotations

import contextlib
import datetime
import ipaddress
import os
from collections.abc import Callable, Iterable, Iterator, Mapping

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor, nn

from opentinker.shared.nn.collective_link import gloo_options, name_interface
from opentinker.shared.nn.transport import find_store
from opentinker.shared.runtime.listening import interface_of, own_address

HOST = "127.0.0.1"
"""Where the ranks of one machine meet."""
GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
"""Environment variable that names the network interface of torch's default group."""
REACH_S = 60.0
"""Time for a connection to rank 0's store."""
COLLECTIVE_TIMEOUT_S = 1800.0
"""Timeout of a collective. A dead rank is detected long before, see `rank_processes.py`."""
BUCKET_ELEMENTS = 1 << 24
"""Approximate size of the flat buckets in which gradients are summed."""


class ProcessGroup:
    def __init__(
        self, rank: int = 0, world: int = 1, device: str = "cpu", group: dist.ProcessGroup | None = None
    ) -> None:
        """`group`: None for torch's default group."""
        self.rank, self.world, self.device, self._group = rank, world, device, group
        self._own_address = ""
        """Address of this machine that the other ranks reach."""
        self.destroy: Callable[[], None] = dist.destroy_process_group
        """DeepSpeed, which keeps a reference to the group, sets its own function."""

    @classmethod
    def join(
        cls,
        address: str,
        port: int,
        rank: int,
        world: int,
        device: str,
        *,
        separate: bool = False,
        store: dist.Store | None = None,
        secret: str = "",
    ) -> ProcessGroup:
        """Join the group; blocks until all `world` ranks have joined.

        `address`, `port`: of rank 0's store. `separate`: join a gloo group that is not torch's default group, of which
        a process has only one. `store`: on rank 0 its store, which already listens there. `secret`: of the store, see
        `shared/nn/transport.py`.
        """
        patience = datetime.timedelta(seconds=COLLECTIVE_TIMEOUT_S)
        own = own_address(address, port, REACH_S)
        if store is None:
            store = find_store(address, port, world, COLLECTIVE_TIMEOUT_S, secret)
        prefixed = dist.PrefixStore("process_group", store)
        if separate:
            options = gloo_options(own, COLLECTIVE_TIMEOUT_S)
            return cls(rank, world, device, dist.ProcessGroupGloo(prefixed, rank, world, options))
        backend = "nccl" if device == "cuda" else "gloo"
        found = cls(rank, world, device)
        found._own_address = own
        if backend == "nccl" and not ipaddress.ip_address(own.partition("%")[0]).is_loopback:
            name_interface(own)  # else NCCL's choice: this process may be in weight groups with other machines
        with found.on_interface():
            dist.init_process_group(backend, store=prefixed, rank=rank, world_size=world, timeout=patience)
        return found

    @contextlib.contextmanager
    def on_interface(self) -> Iterator[None]:
        """Have gloo groups of torch that are made in the block, the default one and those that DeepSpeed derives from
        it, talk on the interface by which the other ranks are reached, unless the operator has named one."""
        name = interface_of(self._own_address) if self._own_address else ""
        names = bool(name) and GLOO_INTERFACE not in os.environ
        if names:
            os.environ[GLOO_INTERFACE] = name
        try:
            yield
        finally:
            if names:
                del os.environ[GLOO_INTERFACE]

    def leave(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            with contextlib.suppress(RuntimeError):  # a group that has lost a rank; its sockets close with the object
                group.shutdown()
        elif self.world > 1 and dist.is_initialized():
            self.destroy()

    def seed_dropout_by_rank(self, seed: int, step: int) -> None:
        """Seed dropout differently on each rank. Rank 0 continues with the random state that checkpoints hold; that of
        the others is derived from the step."""
        if self.rank:
            torch.manual_seed(((seed << 20) + step) * self.world + self.rank)

    def sum(self, tensor: Tensor) -> Tensor:
        """Sum the tensor over the ranks, in place."""
        if self.world > 1:
            self._reduce(tensor, dist.ReduceOp.SUM)
        return tensor

    def _reduce(self, tensor: Tensor, operation: dist.ReduceOp.RedOpType) -> None:
        if self._group is None:
            dist.all_reduce(tensor, operation)
            return
        options = dist.AllreduceOptions()
        options.reduceOp = operation
        self._group.allreduce([tensor], options).wait()

    def max_across_ranks(self, number: int) -> int:
        if self.world == 1:
            return number
        found = torch.tensor(number, device=self.device)
        self._reduce(found, dist.ReduceOp.MAX)
        return int(found)

    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Replace each rank's gradients by the sum over all ranks; parameters without any gradient keep none."""
        if self.world == 1:
            return
        trained = list(parameters)
        there = torch.tensor([p.grad is not None for p in trained], dtype=torch.float32, device=self.device)
        bucket: list[nn.Parameter] = []
        waiting = 0
        for parameter, holders in zip(trained, self.sum(there).tolist(), strict=True):
            if not holders:
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            bucket.append(parameter)
            waiting += parameter.numel()
            if waiting >= BUCKET_ELEMENTS:
                self._sum_bucket(bucket)
                bucket, waiting = [], 0
        if bucket:
            self._sum_bucket(bucket)

    def _sum_bucket(self, parameters: list[nn.Parameter]) -> None:
        gradients = [p.grad for p in parameters if p.grad is not None]
        flat = self.sum(torch.cat([gradient.reshape(-1) for gradient in gradients]))
        for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(part.view_as(gradient))

    def gather(self, columns: Mapping[str, Tensor]) -> dict[str, npt.NDArray[np.float64]]:
        """Concatenate the ranks' columns in the order of ranks; flat, of any length.

        All ranks must pass the same names.
        """
        if self.world == 1:
            return {name: _numbers(column) for name, column in columns.items()}
        own = torch.cat([column.detach().to(self.device, torch.float64).reshape(-1) for column in columns.values()])
        lengths = torch.zeros(self.world, len(columns), dtype=torch.int64, device=self.device)
        lengths[self.rank] = torch.tensor([column.numel() for column in columns.values()])
        counts = self.sum(lengths).tolist()
        # A sum with zeros from the other ranks: one collective, and lengths may differ.
        everyone = torch.zeros(sum(map(sum, counts)), dtype=torch.float64, device=self.device)
        before = sum(map(sum, counts[: self.rank]))
        everyone[before : before + len(own)] = own
        parts = np.split(_numbers(self.sum(everyone)), np.cumsum(np.concatenate(counts))[:-1])  # rank by rank
        return {name: np.concatenate(parts[place :: len(columns)]) for place, name in enumerate(columns)}


def _numbers(column: Tensor) -> npt.NDArray[np.float64]:
    return column.detach().double().cpu().numpy()  # type: ignore[no-any-return]
