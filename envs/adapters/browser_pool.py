"""Browsers of a process that plays MiniWoB++: starts them and keeps idle ones for the next episode."""

from __future__ import annotations

import os
import shlex
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from opentinker.envs.base import EPISODE_VARIABLE
from opentinker.shared.runtime.parent_death import contain_command

if TYPE_CHECKING:
    from miniwob.environment import MiniWoBEnvironment

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
DRIVER = "chromedriver"


class BrowserPool:
    """At most `most` idle browsers, each with the page of its task; closed after `idle_s`."""

    def __init__(self, most: int, idle_s: float) -> None:
        self._most = most
        self._idle_s = idle_s
        self._lock = threading.Lock()
        self._waiting: list[tuple[str, MiniWoBEnvironment, float]] = []
        """Idle browsers, longest idle first."""

    def take(self, task: str) -> MiniWoBEnvironment | None:
        with self._lock:
            found = next((entry for entry in self._waiting if entry[0] == task), None)
            if found is None:
                return None
            self._waiting.remove(found)
        driver = found[1].instance.driver
        return found[1] if driver.service.process.poll() is None else None

    def put(self, task: str, browser: MiniWoBEnvironment) -> None:
        with self._lock:
            self._waiting.append((task, browser, time.monotonic() + self._idle_s))
            spare = self._waiting[: -self._most]
            del self._waiting[: -self._most]
        for _, old, _ in spare:
            old.close()
        sweeping = threading.Timer(self._idle_s, self._sweep)
        sweeping.daemon = True
        sweeping.start()

    def _sweep(self) -> None:
        """Close idle browsers. Runs in a timer thread, because the process may be idle for hours."""
        now = time.monotonic()
        with self._lock:
            old = [entry for entry in self._waiting if entry[2] <= now]
            self._waiting = [entry for entry in self._waiting if entry[2] > now]
        for _, browser, _ in old:
            browser.close()


def start(make: Callable[[], MiniWoBEnvironment]) -> MiniWoBEnvironment:
    """Start a browser that ends with this process. The driver's command is a script, because MiniWoB++ accepts only a
    program without arguments."""
    browser, driver = programs()
    with tempfile.TemporaryDirectory(prefix="opentinker-") as place:
        script = Path(place, DRIVER)
        command = shlex.join(["env", "-u", EPISODE_VARIABLE, *contain_command([driver])])
        script.write_text(f'#!/bin/sh\nexec {command} "$@"\n')
        script.chmod(0o700)
        os.environ |= {"MINIWOB_CHROME_BINARY": browser, "MINIWOB_CHROMEDRIVER": str(script)}
        return make()


def programs() -> tuple[str, str]:
    """Return browser and driver of this machine. Raise ValueError."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    driver = shutil.which(DRIVER)
    if browser is None or driver is None:
        raise ValueError(
            "miniwob needs Chromium and its driver where env workers run, in their PATH: "
            "apt-get install --no-install-recommends chromium chromium-driver"
        )
    return browser, driver
