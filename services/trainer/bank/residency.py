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
OUTDATED = ".outdated"
"""Added to the name of a file while its adapter is in memory and has changed: a crash then loses the adapter's later
state, and the file must not pass for it."""


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
        self._unchanged: set[str] = set()
        """In memory, as in their file."""
        self._cut_off = set(self._files)
        """With a file whose `partial`, if it has one, is of a command that will not go on."""
        found = {name: adapter_files.owner_of(self._path(name)) for name in self._files}
        self.owners = {name: about[0] for name, about in found.items() if about is not None}
        """Tenants of the adapters; those with a damaged file are absent."""
        self.deterministic = {name for name, about in found.items() if about is not None and about[1]}
        """Adapters that are computed by themselves."""

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
        self._outdated_path(adapter.name).unlink(missing_ok=True)
        self._resident[adapter.name] = adapter
        self.owners[adapter.name] = adapter.owner
        if adapter.deterministic:
            self.deterministic.add(adapter.name)

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
        self._path(name).unlink(missing_ok=True)
        self._outdated_path(name).unlink(missing_ok=True)
        for held in (self._resident, self._host, self.owners):
            held.pop(name, None)
        for names in (self._files, self._unchanged, self._cut_off, self.deterministic):
            names.discard(name)

    def begin_change(self, name: str) -> None:
        """Call before the state of an adapter in a slot changes: its file, if it has one, counts no more."""
        if name in self._unchanged:
            self._path(name).replace(self._outdated_path(name))
            self._unchanged.discard(name)

    def drop_partial(self, name: str) -> None:
        """Forget the gradient of half a command, wherever the adapter is."""
        for held in (self._resident, self._host):
            if name in held:
                held[name].partial = None
        if name in self._files:
            self._cut_off.add(name)

    def store_all(self) -> None:
        """Write every adapter that has no file, so that another process finds it; gradients of half a command are
        dropped. Raises OSError after the last one if some could not be written; those stay in memory."""
        failed: dict[str, OSError] = {}
        for held in (self._resident, self._host):
            for name, adapter in list(held.items()):
                adapter.partial = None
                try:
                    self._to_file(adapter)
                except OSError as error:
                    failed[name] = error
                else:
                    del held[name]
        self._cut_off |= self._files
        if failed:
            first = next(iter(failed.values()))
            raise OSError(first.errno, f"{first.strerror}; adapters not stored: {', '.join(failed)}", str(self.store))

    def _fetch(self, name: str) -> Adapter:
        """Return a copy on the device; the adapter is no longer where it was."""
        if name in self._host:
            adapter = self._host[name].copy_to(self.device)
            del self._host[name]
            return adapter
        stored = adapter_files.restore(name, self._path(name))
        if name in self._cut_off:
            stored.partial = None
        adapter = stored.copy_to(self.device)
        self._files.discard(name)
        self._cut_off.discard(name)
        self._unchanged.add(name)
        return adapter

    def _make_room(self, slots: int, keep: set[str]) -> None:
        excess = len(self._resident) + slots - self.slots
        for name in [name for name in self._resident if name not in keep][: max(0, excess)]:
            self._host[name] = self._resident[name].copy_to("cpu", pinned=self.device == "cuda")
            del self._resident[name]
        held = sum(adapter.bytes for adapter in self._host.values())
        for name in list(self._host):
            if held <= self.host_bytes:
                break
            held -= self._host[name].bytes
            self._to_file(self._host[name])
            del self._host[name]

    def _to_file(self, adapter: Adapter) -> None:
        adapter_files.store(adapter, self._path(adapter.name))
        self._outdated_path(adapter.name).unlink(missing_ok=True)
        self._files.add(adapter.name)
        self._unchanged.discard(adapter.name)

    def _outdated_path(self, name: str) -> Path:
        return self.store / f"{name}{ENDING}{OUTDATED}"

    def _path(self, name: str) -> Path:
        return self.store / f"{name}{ENDING}"
