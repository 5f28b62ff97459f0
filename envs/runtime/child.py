"""Child process of an env worker: plays the sessions of blocking environments, one call after the other.

    python -m opentinker.envs.runtime.child FD MODULES CLASS      (in a sandbox; else child_keeper.py, without CLASS)

Consumes calls from the socket FD, produces answers on it; waits for the next call; ends when the worker is gone. CLASS
is the `module:Class` of an uploaded environment, whose name has no meaning in this process; empty: each session names
its environment. Processes, threads and directories left by an episode are cleaned up (episode_cleanup.py).
"""

from __future__ import annotations

import asyncio
import resource
import signal
import socket
import sys
from collections import Counter
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import msgspec

from opentinker.envs.base import Environment
from opentinker.envs.bots import check_bots
from opentinker.envs.registry import check, check_fork, find, rehearse
from opentinker.envs.runtime.child_protocol import HEAD, ChildAnswer, ChildCall, frame
from opentinker.envs.runtime.data_rows import list_rows
from opentinker.envs.runtime.env_runner import LocalEnvRunner, guard_user_code
from opentinker.envs.runtime.episode_cleanup import Leftovers
from opentinker.envs.runtime.preflight import check_request
from opentinker.shared.messaging.reply_validation import failure
from opentinker.shared.runtime.parent_death import set_death_signal
from opentinker.shared.types import codec
from opentinker.shared.types.core import Ending
from opentinker.shared.types.env_protocol import (
    CloseSession,
    EnvCheck,
    EnvRows,
    OpenSession,
    SessionReply,
    StepSession,
)

UPLOADED_AT = 3


def main() -> None:
    end_with_parent(signal.SIGKILL)
    table = ChildSessions(modules=sys.argv[2] == "1", uploaded=sys.argv[3] if len(sys.argv) > UPLOADED_AT else "")
    with socket.socket(fileno=int(sys.argv[1])) as worker, asyncio.Runner() as runner, worker.makefile("rb") as calls:
        while len(head := calls.read(HEAD.size)) == HEAD.size:
            call = codec.decode(ChildCall, calls.read(HEAD.unpack(head)[0]))
            try:
                answer = runner.run(table.play(call))
            except asyncio.CancelledError:
                answer = ChildAnswer(
                    call.serial, failure("", Ending.ENV_ERROR, "the environment raised CancelledError")
                )
            worker.sendall(frame(msgspec.structs.replace(answer, spent=table.spent())))


class ChildSessions:
    """The sessions of this child process."""

    def __init__(self, *, modules: bool, uploaded: str) -> None:
        self._modules = modules
        self._uploaded = uploaded
        self._runners: dict[str, LocalEnvRunner] = {}
        self._leftovers = Leftovers()
        self._opened: Counter[type[Environment]] = Counter()
        """Number of episodes opened, by class."""

    async def play(self, call: ChildCall) -> ChildAnswer:
        body, cost = bytes(call.body), 1.0
        match call.verb:
            case "import":
                reply = await guard_user_code("", self._import(codec.decode(OpenSession, body)))
            case "open":
                reply, cost = await self._open(codec.decode(OpenSession, body))
            case "step":
                step = codec.decode(StepSession, body)
                with self._leftovers.of(step.session):
                    reply = await self._runners[step.session].step(step)
            case "check" | "rehearse":
                play = self._check if call.verb == "check" else self._rehearse
                found = await check_request(play, self._find, codec.decode(EnvCheck, body))
                return ChildAnswer(
                    call.serial, SessionReply(worker=""), found.errors, seats=found.seats, about=found.about
                )
            case "rows":
                asked = codec.decode(EnvRows, body)
                list_them = partial(list_rows, self._uploaded or asked.name, asked, modules=self._modules)
                return ChildAnswer(call.serial, SessionReply(worker=""), rows=await asyncio.to_thread(list_them))
            case _:
                await self._close(codec.decode(CloseSession, body).session)
                reply = SessionReply(worker="")
        return ChildAnswer(call.serial, reply, cost=cost)

    async def _close(self, session: str) -> None:
        closing = self._runners.pop(session, None)
        if closing is not None:
            with self._leftovers.of(session):
                await closing.close()
            self._leftovers.end(session)

    async def _import(self, opening: OpenSession) -> SessionReply:
        """Import and check the config before any session, so that processes it starts belong to no episode."""
        check(self._uploaded or opening.environment, opening.config, modules=self._modules)
        return SessionReply(worker="")

    async def _open(self, opening: OpenSession) -> tuple[SessionReply, float]:
        """Open a session and return its cost too."""
        opening = msgspec.structs.replace(opening, environment=self._uploaded or opening.environment)
        runner = self._runners[opening.session] = LocalEnvRunner("", modules=self._modules)
        with self._leftovers.of(opening.session):
            reply = await runner.open(opening)
        if reply.failure is not None:
            return reply, 1.0
        played = find(opening.environment, modules=self._modules)
        self._opened[played] += 1
        return reply, played.cost

    def spent(self) -> bool:
        """Return whether this process should be replaced once its sessions are over."""
        limits = [played.memory_mb for played in self._opened if played.memory_mb is not None]
        enough = [n >= played.recycle_after for played, n in self._opened.items() if played.recycle_after is not None]
        return self._leftovers.threads or any(enough) or bool(limits and resident_mb() > min(limits))

    async def _find(self, name: str) -> type[Environment]:
        return find(self._uploaded or name, modules=self._modules)

    async def _check(
        self, name: str, config: dict[str, object] | None, bots: Mapping[str, str], forks: bool
    ) -> tuple[str, ...]:
        found = find(self._uploaded or name, modules=self._modules)
        check_bots(found, bots)
        if forks:
            check_fork(name, found)
        if config is not None:
            check(self._uploaded or name, config, modules=self._modules, forks=forks)
        return ()

    async def _rehearse(
        self, name: str, config: dict[str, object] | None, bots: Mapping[str, str], _: bool
    ) -> tuple[str, ...]:
        return rehearse(name, *check(self._uploaded or name, config or {}, modules=self._modules), bots)


def resident_mb() -> float:
    """Return the resident memory of this process (Linux only)."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def end_with_parent(by: signal.Signals) -> None:
    """Have the kernel signal this process when its parent dies (Linux only): a hung child does not see its socket
    close."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    set_death_signal(by)


if __name__ == "__main__":
    main()
