"""A headless Chromium with one page, driven through the DevTools protocol over a pipe. Calls block.

Chromium.call --JSON, 0 byte--> stdin (its fd 3)        stdout (its fd 4) --JSON, 0 byte--> the answer with the same id
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import orjson

from opentinker.envs.base import EPISODE_VARIABLE
from opentinker.shared.runtime.parent_death import contain_command
from opentinker.shared.types.errors import OpenTinkerError

T = TypeVar("T")

PROGRAMS = ("chromium", "chromium-browser", "google-chrome", "chrome")
START_S, ANSWER_S = 60.0, 60.0
CHUNK_BYTES = 1 << 20
OPTIONS = (
    *("--headless", "--no-sandbox", "--remote-debugging-pipe", "--no-first-run", "--no-default-browser-check"),
    *("--disable-gpu", "--disable-dev-shm-usage", "--disable-extensions", "--disable-background-networking"),
    *(
        "--disable-component-update",
        "--disable-sync",
        "--mute-audio",
        "--hide-scrollbars",
        "--renderer-process-limit=1",
    ),
    *("--disable-frame-rate-limit", "--disable-gpu-vsync"),  # a screenshot waits for frames
    *("--host-resolver-rules=MAP * ~NOTFOUND", "--font-render-hinting=none", "--force-color-profile=srgb"),
)
"""The page is a file of this package and the browser reaches no host, so it runs without its own sandbox, which needs
user namespaces."""


class BrowserGone(OpenTinkerError):
    """The browser has ended or does not answer."""


def program() -> str:
    """Return the browser of this machine. Raise ValueError."""
    found = next(filter(None, map(shutil.which, PROGRAMS)), None)
    if found is None:
        raise ValueError(
            "phone_page needs Chromium where env workers run, in their PATH: "
            "apt-get install --no-install-recommends chromium"
        )
    return found


class Chromium:
    """A browser that shows the file `page`, until `close` or the end of this process."""

    def __init__(self, page: Path) -> None:
        # the pipe arrives as stdin and stdout, because what contains the browser passes on no others
        pipe = ["sh", "-c", 'exec "$@" 3<&0 4>&1 </dev/null >/dev/null', "sh"]
        command = [*pipe, program(), *OPTIONS, "about:blank"]
        self._process = subprocess.Popen(
            ["env", "-u", EPISODE_VARIABLE, *contain_command(command)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
        )
        self._serial = 0
        self._unread = b""
        self._session = ""
        self.metrics: tuple[int, int, float] | None = None
        try:
            targets = self.call("Target.getTargets", within_s=START_S)["targetInfos"]
            blank = next(one["targetId"] for one in targets if one["type"] == "page")
            self._session = self.call("Target.attachToTarget", targetId=blank, flatten=True)["sessionId"]
            self.call("Page.navigate", url=page.as_uri())
            self._wait_for_page()
        except BaseException:
            self.close()
            raise

    def _wait_for_page(self) -> None:
        due = time.monotonic() + START_S
        while self.evaluate("document.readyState === 'complete' && typeof phone === 'object'") is not True:
            if time.monotonic() > due:
                raise BrowserGone("the browser does not load the page")
            time.sleep(0.01)

    @property
    def runs(self) -> bool:
        return self._process.poll() is None

    def call(self, method: str, *, within_s: float = ANSWER_S, **parameters: Any) -> dict[str, Any]:
        """Send a command and return its result. Raise BrowserGone."""
        self._serial += 1
        message = {"id": self._serial, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(orjson.dumps(message) + b"\0")
            while (answer := self._receive(time.monotonic() + within_s)).get("id") != self._serial:
                pass  # events, which have no reader
        except OSError as error:
            raise BrowserGone(f"the browser has ended: {error}") from None
        if "error" in answer:
            raise BrowserGone(f"the browser refused {method}: {answer['error'].get('message')}")
        result: dict[str, Any] = answer["result"]
        return result

    def _receive(self, due: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        pipe = self._process.stdout.fileno()
        parts = [self._unread]
        while b"\0" not in parts[-1]:
            ready, _, _ = select.select([pipe], [], [], max(0.0, due - time.monotonic()))
            chunk = os.read(pipe, CHUNK_BYTES) if ready else b""
            if not chunk:
                raise BrowserGone("the browser has ended" if ready else "the browser does not answer")
            parts.append(chunk)
        first, _, self._unread = b"".join(parts).partition(b"\0")
        message: dict[str, Any] = orjson.loads(first)
        return message

    def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression. Raise BrowserGone."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        if "exceptionDetails" in answer:
            raise BrowserGone(
                f"the page failed: {answer['exceptionDetails']['exception'].get('description', '')[:300]}"
            )
        return answer["result"].get("value")

    def close(self) -> None:
        self._process.terminate()
        with contextlib.suppress(OSError):
            for pipe in (self._process.stdin, self._process.stdout):
                if pipe is not None:
                    pipe.close()
        self._process.wait()


class SharedBrowser:
    """The one browser of a process, started when it is first used and closed after `idle_s` without use."""

    def __init__(self, page: Path, idle_s: float) -> None:
        self._page = page
        self._idle_s = idle_s
        self._lock = threading.Lock()
        self._browser: Chromium | None = None
        self._used = 0.0
        self._sweeping = False

    def use(self, play: Callable[[Chromium], T]) -> T:
        """Return `play(browser)`. It is called again, with a new browser, if the browser ends during the call: it must
        not depend on anything that an earlier call left there. Raise BrowserGone if that one ends too."""
        with self._lock:
            try:
                return play(self._started())
            except BrowserGone:
                self._end()
                return play(self._started())
            finally:
                self._used = time.monotonic()
                self._sweep_later()

    def _started(self) -> Chromium:
        if self._browser is not None and not self._browser.runs:
            self._end()
        if self._browser is None:
            self._browser = Chromium(self._page)
        return self._browser

    def _end(self) -> None:
        browser, self._browser = self._browser, None
        if browser is not None:
            browser.close()

    def _sweep_later(self) -> None:
        if not self._sweeping:
            self._sweeping = True
            timer = threading.Timer(self._idle_s, self._sweep)
            timer.daemon = True
            timer.start()

    def _sweep(self) -> None:
        """Close the browser if it is idle. Runs in a timer thread, because the process may be idle for hours."""
        with self._lock:
            self._sweeping = False
            if time.monotonic() - self._used >= self._idle_s:
                self._end()
            else:
                self._sweep_later()
