"""Maps environment names to classes. Used by the env worker at every open, and to validate job specs."""

from __future__ import annotations

import difflib
import re
import traceback
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from pydantic import BaseModel, ValidationError

from opentinker.envs.base import ELSEWHERE, FORKS, MODULES, Environment
from opentinker.envs.bots import resolve_bots
from opentinker.envs.game import AbstractGame, environment_of
from opentinker.shared.types.env_protocol import is_url
from opentinker.shared.types.error_text import error_sentence
from opentinker.shared.types.errors import SpecError
from opentinker.shared.types.mistakes import UNKNOWN, WHOLE, mistakes_of, nearest

ADAPTERS = {
    "gem": "opentinker.envs.adapters.gem:Gem",
    "gymnasium": "opentinker.envs.adapters.gymnasium:Gymnasium",
    "miniwob": "opentinker.envs.adapters.miniwob:MiniWob",
    "pettingzoo": "opentinker.envs.adapters.pettingzoo:PettingZoo",
    "reasoning_gym": "opentinker.envs.adapters.reasoning_gym:ReasoningGym",
    "skyrl_gym": "opentinker.envs.adapters.skyrl_gym:SkyRLGym",
    "textarena": "opentinker.envs.adapters.textarena:TextArena",
}
"""Environments of libraries; the config selects which one is played."""
BUILT_IN = {
    **ADAPTERS,
    "agent_program": "opentinker.envs.agents.program:AgentProgram",
    "alfworld": "opentinker.envs.builtin.alfworld:AlfWorld",
    "android_world": "opentinker.envs.phones.android:AndroidWorld",
    "bandit": "opentinker.envs.builtin.bandit:Bandit",
    "colours": "opentinker.envs.builtin.color_naming:Colours",
    "copy_digits": "opentinker.envs.builtin.copy_digits:CopyDigits",
    "debate": "opentinker.envs.builtin.debate:Debate",
    "gomoku": "opentinker.envs.builtin.gomoku:Gomoku",
    "gsm8k": "opentinker.envs.builtin.gsm8k:Gsm8k",
    "guess_number": "opentinker.envs.builtin.guess_number:GuessNumber",
    "harbor": "opentinker.envs.harbor.environment:Harbor",
    "harbor_agent": "opentinker.envs.harbor.agent:HarborAgent",
    "kuhn_poker": "opentinker.envs.builtin.kuhn_poker:KuhnPoker",
    "matching_pennies": "opentinker.envs.builtin.matching_pennies:MatchingPennies",
    "math": "opentinker.envs.builtin.math:Math",
    "openenv": "opentinker.envs.adapters.openenv:OpenEnv",
    "ors": "opentinker.envs.adapters.ors:Ors",
    "phone_page": "opentinker.envs.phones.page:PhonePage",
    "proposed_sums": "opentinker.envs.builtin.proposed_sums:ProposedSums",
    "signalling": "opentinker.envs.builtin.signalling:Signalling",
    "tictactoe": "opentinker.envs.builtin.tictactoe:TicTacToe",
    "tool_calc": "opentinker.envs.builtin.tool_calc:ToolCalc",
    "verifiers": "opentinker.envs.agents.verifiers:Verifiers",
}
OPERATORS = {"agent_program", "verifiers"}
"""Environments whose configs name programs to run: like `module:Class`, the operator must allow them."""
_MODULE_CLASS = re.compile(r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*$")
MODULES_OFF = (
    "module:Class environments are switched off here (operator setting env_modules). On your own machine start the "
    "server with `OPENTINKER_ENV_MODULES=1 opentinker up`; on a shared server use `opentinker env push` or "
    "`opentinker env serve` (docs/first-environment.md)"
)
_found: dict[str, type[Environment]] = {}


def find(name: str, *, modules: bool = False) -> type[Environment]:
    """Return the class of a built-in name, a URL, or a `module:Class` if the operator allows it (`modules`).

    Raise SpecError for the field `environment.name`. Importing `module:Class` runs that module's code.
    """
    if name in _found and (modules or is_url(name) or name in BUILT_IN.keys() - OPERATORS):
        return _found[name]
    if is_url(name):
        from opentinker.envs import remote  # late: the command line imports this module and needs no HTTP client

        found: type[Environment] = remote.environment_at(name)
    elif ":" not in name:
        if name not in BUILT_IN:
            raise wrong_name(name, f"no such environment{_near(name)}; there are: {', '.join(sorted(BUILT_IN))}")
        if name in OPERATORS and not modules:
            raise wrong_name(
                name, "runs programs that its config names, which is off here (operator setting env_modules)"
            )
        found = _load(name, BUILT_IN[name])
    elif not _MODULE_CLASS.match(name):
        raise wrong_name(name, "not of the form module:Class, e.g. my_package.games:Chess")
    elif not modules:
        raise wrong_name(name, MODULES_OFF)
    else:
        found = _load(name, name)
    _found[name] = found
    return found


def lend(name: str, found: type[Environment]) -> None:
    """Register a class under a unique name, for environments that this process serves (`served:NAME`)."""
    _found[name] = found


def check(
    name: str, config: dict[str, object], *, modules: bool = False, elsewhere: bool = False, forks: bool = False
) -> tuple[type[Environment], BaseModel]:
    """Return the class and its validated settings. Raise SpecError with every mistake (`environment.config.<field>`).

    `elsewhere`: another process will play it, so checks that need an installed library are skipped; `forks`: its
    episodes will be copied.
    """
    found = find(name, modules=modules)
    try:
        context = {ELSEWHERE: elsewhere, MODULES: modules, FORKS: forks}
        return found, found.Config.model_validate(config, context=context)
    except ValidationError as error:
        mistakes = [mistake for item in error.errors(include_url=False) for mistake in mistakes_of(item, config)]
        raise SpecError([_of_config(found, mistake) for mistake in mistakes]) from None


def _of_config(found: type[Environment], mistake: dict[str, Any]) -> dict[str, Any]:
    """Return a mistake with its full field name; for an unknown setting, with the known ones."""
    name = mistake["field"]
    mistake = {**mistake, "field": "environment.config" if name == WHOLE else f"environment.config.{name}"}
    if mistake["problem"] != UNKNOWN:
        return mistake
    near = nearest(name, list(found.Config.model_fields))
    meant = {"suggestion": f"environment.config.{near}"} if near else {}
    asked = f"; did you mean {near}?" if near else ""
    names = ", ".join(sorted(found.Config.model_fields)) or "no settings at all"
    return {**mistake, **meant, "problem": f"{UNKNOWN}{asked}; {found.__name__} knows: {names}".replace("?;", "?")}


def check_fork(name: str, found: type[Environment]) -> None:
    """Raise SpecError if episodes of the class cannot be copied."""
    if not found.can_fork:
        why = (
            f"cannot fork: {found.__name__} does not set can_fork = True, and algorithm.advantage = 'agent_turn' plays "
        )
        raise wrong_name(name, f"{why}every candidate of a turn on a copy of the episode")


def rehearse(
    name: str, found: type[Environment], settings: BaseModel, bots: Mapping[str, str] | None = None
) -> tuple[str, ...]:
    """Build what an episode would play, with the seats that bots play. Return its seats; none if only its server knows
    them. Raise SpecError with the reason if it cannot be built here."""
    try:
        found.rehearse(settings)
        made = found(settings) if found.bots is not None else None
    except Exception as error:  # noqa: BLE001 - a library's or user's code: its exception is the answer
        why = error_sentence("".join(traceback.format_exception_only(error)))
        raise wrong_name(name, f"cannot be played by the env workers here: {why}") from None
    if made is None:
        return ()
    resolve_bots(made, bots or {})
    return made.seats


def check_reachable(name: str) -> None:
    """Resolve a URL's host (blocking). Raise SpecError if jobs may not connect to it."""
    if is_url(name):
        from opentinker.envs import remote

        remote.check_reachable(name)


def make(name: str, config: dict[str, object], *, modules: bool = False) -> Environment:
    """Create an instance for one episode. Raise SpecError."""
    found, settings = check(name, config, modules=modules)
    return found(settings)


def _load(name: str, path: str) -> type[Environment]:
    module_name, _, class_name = path.partition(":")
    try:
        found = getattr(import_module(module_name), class_name)
    except ImportError as error:
        raise wrong_name(name, f"cannot be imported: {error}") from None
    except AttributeError:
        raise wrong_name(name, f"module {module_name} has no {class_name}") from None
    if isinstance(found, type) and issubclass(found, AbstractGame):
        return environment_of(found)
    if not (isinstance(found, type) and issubclass(found, Environment)):
        raise wrong_name(name, f"{class_name} is not a subclass of opentinker.Environment, nor of AbstractGame")
    for field in ("cost", "recycle_after", "memory_mb"):
        value = getattr(found, field)
        if not (isinstance(value, int | float) and value > 0) and (field == "cost" or value is not None):
            raise wrong_name(name, f"{class_name}.{field} must be above 0, not {value!r:.60}")
    if not found.blocking and (found.recycle_after or found.memory_mb):
        raise wrong_name(name, f"{class_name}: recycle_after and memory_mb are for processes: set blocking = True")
    return found


def _near(name: str) -> str:
    near = difflib.get_close_matches(name.lower().replace("-", "_"), BUILT_IN, n=3, cutoff=0.5)
    return f" (did you mean {' or '.join(near)}?)" if near else ""


def wrong_name(name: str, problem: str) -> SpecError:
    return SpecError.of("environment.name", name, problem)
