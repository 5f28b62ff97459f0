"""Common part of the job and sweep objects of `Client`: their state, and waiting for the end."""

from __future__ import annotations

import contextlib
import time
from abc import abstractmethod
from typing import TYPE_CHECKING, Self

from opentinker.sdk.displays import Silent, display_of
from opentinker.sdk.http import ApiError
from opentinker.sdk.record_view import FINAL, Record, RecordView

if TYPE_CHECKING:
    from opentinker.client.sync import Client


class Handle(RecordView[Record]):
    """Methods raise ApiError as the client's calls do."""

    def __init__(self, client: Client, id: str) -> None:
        self.client, self.id = client, id
        self._last: Record | None = None

    @abstractmethod
    def refresh(self) -> Record:
        """Ask the server for the record."""

    @abstractmethod
    def cancel(self) -> Self:
        """Cancel it."""

    @property
    def info(self) -> Record:
        """The server's latest record; requested if there has been none yet."""
        return self._last or self.refresh()

    @property
    def name(self) -> str:
        """The display name."""
        return self.info["name"]

    @property
    def state(self) -> str:
        """`running`, `succeeded`, `failed`, `cancelled`, and of a job more, such as `queued`; asked for now."""
        return self.refresh()["state"]

    @property
    def is_over(self) -> bool:
        """Whether it has succeeded, failed or been cancelled; asked for now."""
        return self.state in FINAL

    def wait(
        self,
        *,
        progress: bool = True,
        timeout_s: float | None = None,
        cancel_on_interrupt: bool = False,
        poll_s: float = 1.0,
    ) -> Self:
        """Wait for the end. `progress`: show how far it is, as a card in a notebook and as a bar on a terminal. Raises
        TimeoutError; the job or sweep continues then, as after Ctrl-C unless `cancel_on_interrupt`."""
        shown = display_of(self) if progress else Silent()
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        try:
            with shown:
                while True:
                    found = self.refresh()
                    shown.update(self._progress_of(found))
                    if found["state"] in FINAL:
                        return self
                    if deadline is not None and time.monotonic() >= deadline:
                        raise TimeoutError(f"{self.NOUN} {self.id} is still {found['state']} after {timeout_s:g} s")
                    time.sleep(poll_s)
        except KeyboardInterrupt:
            if cancel_on_interrupt:
                self.cancel()
            raise

    def _repr_html_(self) -> str:
        """Return it as HTML for a notebook."""
        with contextlib.suppress(ApiError):  # as it was known last
            self.refresh()
        return self._card()
