"""Calls user code and turns its errors into data: the caller always gets a reply.

Used by the worker for environments that run in its event loop, and by child processes for those that block.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import traceback
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from opentinker.envs.base import Action, BadReply, Environment, Unreachable, fields_of
from opentinker.envs.bots import with_bots
from opentinker.envs.import_clock import ImportClock
from opentinker.envs.registry import make
from opentinker.envs.rounds import title_of
from opentinker.envs.runtime.env_replies import kind_of, opening_reply, step_reply
from opentinker.envs.with_tools import with_tools
from opentinker.shared.messaging.reply_validation import (
    ERROR_CHARACTERS,
    failure,
    outcomes_problem,
)
from opentinker.shared.types.core import Ending
from opentinker.shared.types.env_protocol import (
    MAX_CANDIDATES,
    MAX_ROWS,
    OpenSession,
    SeatAction,
    SessionReply,
    StepSession,
)
from opentinker.shared.types.error_text import error_tail
from opentinker.shared.types.errors import OpenTinkerError

DEFAULT_ROWS = Environment.__dict__["data_rows"].__func__
"""The default of environments that list no rows; it needs no thread."""


class EnvRunner(Protocol):
    """Plays one episode. Calls never overlap and never raise; cancelling a running call abandons the episode."""

    async def open(self, request: OpenSession) -> SessionReply: ...
    async def step(self, request: StepSession) -> SessionReply: ...
    async def close(self) -> None: ...


class OutOfTurn(Exception):
    """Request for the wrong seat: the caller's mistake, not the environment's."""


@dataclass
class Branch:
    """An instance of the environment, and who acts next in it."""

    environment: Environment
    asked: SessionReply


class LocalEnvRunner:
    """Plays an environment instance, or copies of it, in this process and event loop."""

    def __init__(self, worker: str, *, modules: bool) -> None:
        self._worker = worker
        self._modules = modules
        self._branches: list[Branch] = []
        """While the episode is open: the environment, or after a turn with candidates a copy for each of them."""
        self._can_fork = self._slow_fork = False
        self.importing: Callable[[], AbstractContextManager[object]] = nullcontext
        """Stops the episode's clock while a server imports the environment."""

    async def open(self, request: OpenSession) -> SessionReply:
        return await guard_user_code(self._worker, self._open(request))

    async def step(self, request: StepSession) -> SessionReply:
        return await guard_user_code(self._worker, self._step(request))

    @property
    def environment(self) -> Environment | None:
        """The instance while the episode is open, the first one of several."""
        return self._branches[0].environment if self._branches else None

    async def close(self) -> None:
        branches, self._branches = self._branches, []
        await self._close_all(branches)

    async def _close_all(self, branches: Sequence[Branch]) -> None:
        for branch in branches:
            await guard_user_code(self._worker, self._close(branch.environment))

    async def _open(self, request: OpenSession) -> SessionReply:
        made = make(request.environment, request.config, modules=self._modules)
        made.policy, made.bot_seats = request.policy, request.bots
        if isinstance(made, ImportClock):
            made.importing = self.importing
        self._can_fork, self._slow_fork = made.can_fork, made.slow_fork
        environment = with_bots(with_tools(made, request.tool_turns), made)
        branch = Branch(environment, SessionReply(worker=self._worker))
        self._branches = [branch]
        opened = await _await_result(environment, "open", environment.open(request.row, request.seed))
        branch.asked = opening_reply(self._worker, environment, opened)
        branch.asked = msgspec.structs.replace(branch.asked, row=await _number_of(made, request.row))
        return branch.asked

    async def _step(self, request: StepSession) -> SessionReply:
        if request.candidates:
            return await self._step_candidates(request)
        if len(self._branches) != 1:
            raise OutOfTurn(f"turn {request.turn} follows one with candidates, and chooses none of them")
        (branch,) = self._branches
        actions = actions_in_turn(branch.asked, request.turn, request.actions, together=bool(request.round))
        return await self._play(branch, request.turn, actions)

    async def _step_candidates(self, request: StepSession) -> SessionReply:
        """Continue with the chosen branch: play every candidate on a copy of it."""
        if not 0 <= request.chosen < len(self._branches):
            raise OutOfTurn(f"turn {request.turn} continues with candidate {request.chosen}, which does not exist")
        if len(request.candidates) > MAX_CANDIDATES:
            raise OutOfTurn(f"{len(request.candidates)} candidates; a turn has at most {MAX_CANDIDATES}")
        base = self._branches[request.chosen]
        if not self._can_fork:
            raise OutOfTurn(f"{title_of(base.environment)} cannot fork: it does not set can_fork = True")
        together = bool(base.asked.round)
        actions_K = [
            actions_in_turn(base.asked, request.turn, actions, together=together) for actions in request.candidates
        ]
        others, self._branches = [branch for branch in self._branches if branch is not base], [base]
        await self._close_all(others)
        for _ in actions_K[1:]:  # one by one: if a copy fails, those before it are closed with the episode
            self._branches.insert(0, Branch(await self._copied(base.environment), base.asked))
        outcomes = []
        for branch, actions in zip(self._branches, actions_K, strict=True):
            outcomes.append(await self._play(branch, request.turn, actions))
            await asyncio.sleep(0)  # other sessions take their turns in between
        if problem := outcomes_problem(outcomes):
            raise BadReply(f"{title_of(base.environment)}: {problem}")
        return SessionReply(worker=self._worker, outcomes=outcomes, done=all(one.done for one in outcomes))

    async def _copied(self, environment: Environment) -> Environment:
        if not self._slow_fork:
            return copy.deepcopy(environment)
        copying = asyncio.ensure_future(asyncio.to_thread(copy.deepcopy, environment))
        try:
            return await asyncio.shield(copying)
        except asyncio.CancelledError:  # its thread keeps running
            with suppress(Exception):
                await (await copying).close()
            raise

    async def _play(self, branch: Branch, turn: int, actions: Sequence[SeatAction]) -> SessionReply:
        """Play the turn of the seats that the branch asks."""
        environment, given = branch.environment, [Action(turn=turn, **fields_of(SeatAction, one)) for one in actions]
        together = bool(branch.asked.round)
        method = "step_all" if together else "step"
        playing = environment.step_all(given) if together else environment.step(given[0])
        branch.asked = step_reply(self._worker, environment, await _await_result(environment, method, playing), method)
        return branch.asked

    async def _close(self, environment: Environment) -> SessionReply:
        await _await_result(environment, "close", environment.close())
        return SessionReply(worker=self._worker)


async def _number_of(made: Environment, row: int) -> int | None:
    """Return which row of its data set the environment plays; None if it has none. Raise any exception of user code."""
    if getattr(type(made).data_rows, "__func__", None) is DEFAULT_ROWS:
        return None
    rows = await asyncio.to_thread(made.data_rows, made.config)
    number = None if rows is None else rows.number(row)
    if number is not None and not (type(number) is int and 0 <= number < MAX_ROWS):
        raise BadReply(f"number() must return an int from 0 to {MAX_ROWS:,}, not {kind_of(number)}")
    return number


async def _await_result(environment: Environment, method: str, answer: Awaitable[Any]) -> Any:
    """Await a method's result. Raise BadReply if it is not awaitable."""
    if not inspect.isawaitable(answer):
        name = type(environment).__name__
        raise BadReply(f"{name}.{method} must be declared `async def`: it returned {kind_of(answer)}")
    return await answer


async def guard_user_code(worker: str, call: Awaitable[SessionReply]) -> SessionReply:
    """Turn any exception of user code, SystemExit included, into a failure of the episode that raised it."""
    try:
        return await call
    except asyncio.CancelledError:
        raise
    except BadReply as error:
        return failure(worker, Ending.ENV_BAD_REPLY, str(error))
    except Unreachable as error:
        return failure(worker, Ending.ENV_LOST, str(error))
    except (OpenTinkerError, OutOfTurn) as error:
        return failure(worker, Ending.ENV_ERROR, str(error))
    except BaseException as error:  # noqa: BLE001 - user code: sys.exit() in it ends its episode, not the worker
        return failure(worker, Ending.ENV_ERROR, format_error(error))


def format_error(error: BaseException) -> str:
    """Return the innermost frames and the error, enough to find the line."""
    return error_tail("".join(traceback.format_exception(error, limit=-4)).rstrip(), ERROR_CHARACTERS)


def actions_in_turn(asked: SessionReply, turn: int, given: Sequence[SeatAction], *, together: bool) -> list[SeatAction]:
    """Return the actions of the seats that `asked` names, in that order. Raise OutOfTurn unless exactly one action of
    each of these seats is given. `together`: whether the given ones are a round."""
    seats = [prompt.seat for prompt in asked.prompts]
    actions = {action.seat: action for action in given}
    if len(actions) < len(given) or sorted(actions) != sorted(seats) or bool(asked.round) != together:
        due, others = (", ".join(map(repr, names)) for names in (seats, [action.seat for action in given]))
        whose = f"a round of the seats {due}" if asked.round else f"for seat {due}"
        raise OutOfTurn(f"turn {turn} is {whose}, not {others:.200}")
    return [actions[seat] for seat in seats]
