"""Where the adapters of a bank are: in a slot, in host memory, or in a file of the store.

slot  --least recently used-->  host memory  --least recently used-->  file
  ^------------------------------------+----------------------------------+   when a command needs it
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from opentinker.services.trainer.bank import adapter_files
from opentinker.services.trainer.bank.adapter import Adapter
from opentinker.services.trainer.bank.limits import check_name
from opentinker.shared.types.errors import Conflict, NotFound

ENDING = ".safetensors"


class Residency:
    """Adapters by name. Every adapter is in one place at a time."""

    def __init__(self, device: str, slots: int, host_bytes: int, store: Path) -> None:
        self.device, self.slots, self.host_bytes, self.store = device, slots, host_bytes, store
        store.mkdir(parents=True, exist_ok=True)
        self._resident: dict[str, Adapter] = {}
        """On the device, least recently used first."""
        self._host: dict[str, Adapter] = {}
        """In host memory, likewise."""
        self._files = {path.name.removesuffix(ENDING) for path in store.glob(f"*{ENDING}")}

    def __contains__(self, name: str) -> bool:
        return name in self._resident or name in self._host or name in self._files

    @property
    def places(self) -> dict[str, list[str]]:
        """Names by place: slot, host, file."""
        return {"slot": list(self._resident), "host": list(self._host), "file": sorted(self._files)}

    def add(self, adapter: Adapter) -> None:
        """Raises Conflict if there is an adapter of this name."""
        check_name(adapter.name)
        if adapter.name in self:
            raise Conflict(f"there is an adapter {adapter.name!r} already; choose another name")
        self._make_room(1, keep=set())
        self._resident[adapter.name] = adapter

    def bring(self, names: Iterable[str]) -> list[Adapter]:
        """Return adapters, all in slots, wherever they were. Raises NotFound, Refused for a damaged file, and
        ValueError for more adapters than slots."""
        wanted = list(dict.fromkeys(names))
        if len(wanted) > self.slots:
            raise ValueError(f"{len(wanted)} adapters at once, and {self.slots} slots")
        for name in wanted:
            if name not in self:
                raise NotFound(f"there is no adapter {name!r}")
        absent = [name for name in wanted if name not in self._resident]
        self._make_room(len(absent), keep=set(wanted))
        for name in absent:
            self._resident[name] = self._fetch(name)
        for name in wanted:
            self._resident[name] = self._resident.pop(name)
        return [self._resident[name] for name in wanted]

    def remove(self, name: str) -> None:
        """Forget an adapter and its file. Raises NotFound."""
        if name not in self:
            raise NotFound(f"there is no adapter {name!r}")
        self._resident.pop(name, None)
        self._host.pop(name, None)
        self._files.discard(name)
        self._path(name).unlink(missing_ok=True)

    def store_all(self) -> None:
        """Write every adapter that has no file, so that another process finds it."""
        for adapter in [*self._resident.values(), *self._host.values()]:
            self._to_file(adapter)
        self._resident.clear()
        self._host.clear()

    def _fetch(self, name: str) -> Adapter:
        if name in self._host:
            return self._host.pop(name).copy_to(self.device)
        adapter = adapter_files.restore(name, self._path(name)).copy_to(self.device)
        self._files.discard(name)
        return adapter

    def _make_room(self, slots: int, keep: set[str]) -> None:
        excess = len(self._resident) + slots - self.slots
        for name in [name for name in self._resident if name not in keep][: max(0, excess)]:
            self._host[name] = self._resident.pop(name).copy_to("cpu", pinned=self.device == "cuda")
        held = sum(adapter.bytes for adapter in self._host.values())
        for name in list(self._host):
            if held <= self.host_bytes:
                break
            held -= self._host[name].bytes
            self._to_file(self._host.pop(name))

    def _to_file(self, adapter: Adapter) -> None:
        adapter_files.store(adapter, self._path(adapter.name))
        self._files.add(adapter.name)

    def _path(self, name: str) -> Path:
        return self.store / f"{name}{ENDING}"
