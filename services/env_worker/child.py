"""A child process of an env worker: plays the sessions of environments that block, one call after the other.

    python -m opentinker.services.env_worker.child FD MODULES      (started by host.py, never by hand)

Consumes calls from the socket FD, produces answers on it; waits for the next call; ends when the worker is gone.
"""

from __future__ import annotations

import asyncio
import ctypes
import signal
import socket
import sys

from opentinker.services.env_worker.player import LocalPlayer, failure
from opentinker.services.env_worker.wire import HEAD, Answer, Call, frame
from opentinker.shared import codec
from opentinker.shared.sessions import CloseSession, OpenSession, SessionReply, StepSession
from opentinker.shared.types import Ending

PR_SET_PDEATHSIG = 1


def main() -> None:
    end_with_parent()
    descriptor, modules = int(sys.argv[1]), sys.argv[2] == "1"
    players: dict[str, LocalPlayer] = {}
    with socket.socket(fileno=descriptor) as worker, asyncio.Runner() as runner, worker.makefile("rb") as calls:
        while len(head := calls.read(HEAD.size)) == HEAD.size:
            call = codec.decode(Call, calls.read(HEAD.unpack(head)[0]))
            try:
                reply = runner.run(play(players, call, modules))
            except asyncio.CancelledError:
                reply = failure("", Ending.ENV_ERROR, "the environment raised CancelledError")
            worker.sendall(frame(Answer(call.serial, reply)))


async def play(players: dict[str, LocalPlayer], call: Call, modules: bool) -> SessionReply:
    if call.verb == "open":
        opening = codec.decode(OpenSession, bytes(call.body))
        player = players[opening.session] = LocalPlayer("", modules=modules)
        return await player.open(opening)
    if call.verb == "step":
        step = codec.decode(StepSession, bytes(call.body))
        return await players[step.session].step(step)
    closing = players.pop(codec.decode(CloseSession, bytes(call.body)).session, None)
    if closing is not None:
        await closing.close()
    return SessionReply(worker="")


def end_with_parent() -> None:
    """A hung child does not see its socket close, so the kernel ends it when the worker dies (Linux only)."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    main()
