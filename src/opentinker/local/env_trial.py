"""An environment tried on this machine, without any service: `opentinker env check` and `opentinker env play`.

Calls the environment exactly as an env worker does, so anything that would end an episode there is found here and
reported with advice.
"""

from __future__ import annotations

import asyncio
import os
import random
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from opentinker.envs.base import Environment
from opentinker.local.trial_episode import Guessing, Repeating, Tried, earned, expert, play, silent
from opentinker.shared.runtime.reexec import below
from opentinker.shared.types.core import Message
from opentinker.shared.types.env_protocol import SeatPrompt, SessionReply
from opentinker.shared.types.errors import OpenTinkerError, SpecError

BLOCKING_S = 0.05
"""A call that holds the event loop longer than an environment owes it to others."""

RESETS = 5
"""Starts of one row and seed that are compared."""
OTHER_START = (
    "open(row={row}, seed={seed}) gave other messages the second time: draw the start state from row and seed alone, or"
    " the episodes of a group are not comparable"
)

# --- what is looked at ------------------------------------------------------------------------------------------------


@dataclass
class Report:
    """`errors` would fail episodes or spoil training; `advice` is worth a look; `facts` are figures."""

    errors: list[str] = field(default_factory=list)
    advice: list[str] = field(default_factory=list)
    facts: dict[str, str] = field(default_factory=dict)
    transcript: str = ""
    learnable: bool = True
    """Rewards differed, or an expert got more than guessing."""


def built_in_names() -> list[str]:
    """Return the names of the built-in environments, sorted."""
    from opentinker.envs.registry import BUILT_IN

    return sorted(BUILT_IN)


async def look_at(name: str, config: dict[str, Any], *, episodes: int, seed: int, turns: int) -> Report:
    """Plays the expert, if there is one, and guesses; then the same again. Raises SpecError for name and config."""
    from opentinker.envs.registry import check, find

    find(name, modules=True)
    found, _ = await asyncio.to_thread(check, name, config, modules=True)  # in the event loop it would not look outside
    report = Report()
    outside = random.getstate()
    rows = range(episodes)
    experts = [await play(name, config, expert, row=row, seed=seed + row, turns=turns) for row in rows]
    has_expert = any(tried.said for tried in experts)
    silences = [await play(name, config, silent, row=row, seed=seed + row, turns=turns) for row in rows]
    running = []
    guesses = []
    for row in rows:
        guesses.append(await play(name, config, Guessing(row), row=row, seed=seed + row, turns=turns))
        running.append(len(below(os.getpid())))
    if random.getstate() != outside and not found.blocking:
        report.advice.append(
            "it draws from the global random numbers, which other episodes of the process share: use a separate "
            "random.Random, made from row and seed"
        )
    played = (experts if has_expert else []) + guesses
    report.transcript = played[0].transcript()
    failed = [tried.failure for tried in played if tried.failure]
    report.errors += list(dict.fromkeys(failed))[:3]
    if failed:
        return report
    _judge_processes(running, report)
    await _repeat(name, config, played[0], guesses[0], report)
    _judge(found, experts if has_expert else [], guesses, report)
    _judge_silence(experts if has_expert else [], silences, report)
    return report


async def _repeat(name: str, config: dict[str, Any], *originals: Any) -> None:
    """The same row, seed and words must lead to the same story: the episodes of a group are compared."""
    *tried, report = originals
    for _ in range(RESETS - len(tried) - 1):
        again = await play(name, config, lambda *_: None, row=tried[0].row, seed=tried[0].seed)
        if _first_messages(again) != _first_messages(tried[0]):
            report.errors.append(OTHER_START.format(row=tried[0].row, seed=tried[0].seed))
            return
    for original in tried:
        again = await play(name, config, Repeating(original.said), row=original.row, seed=original.seed)
        if _first_messages(again) != _first_messages(original):
            report.errors.append(OTHER_START.format(row=original.row, seed=original.seed))
            return
        rewards = [[(reply.reward, reply.rewards) for reply in each.replies] for each in (original, again)]
        if rewards[0] != rewards[1]:
            report.advice.append(
                "the same words in the same start state were rewarded otherwise the second time: if that is not meant "
                "as part of the game, draw its random numbers from row and seed"
            )
            return


def _first_messages(tried: Tried) -> list[list[Message]]:
    """Return what every seat sees that acts first."""
    return [prompt.messages for prompt in tried.replies[0].prompts]


def _judge(found: type[Environment], experts: list[Tried], guesses: list[Tried], report: Report) -> None:
    played = experts + guesses
    stories = {str([_first_messages(tried), tried.said]) for tried in experts}
    prompts = {str(_first_messages(tried)) for tried in guesses}
    if len(guesses) > 1 and len(prompts) == 1 and len(stories) < 2:
        report.advice.append("every row and seed begins with the same words: is there one task only?")
    unended = sum(not tried.ended for tried in guesses)
    if unended:
        report.advice.append(
            f"{unended} of {len(guesses)} guessing episodes had no end: rollout.max_turns will end them"
        )
    rewards = [sum(tried.rewards.values()) for tried in guesses]
    if experts:
        best = [tried.rewards.get(tried.said[0][0], 0.0) for tried in experts if tried.said]
        report.facts["expert"] = f"reward {statistics.fmean(best):.3f} (lowest {min(best):.3f})"
        seats = {seat for tried in played for seat, _ in tried.said}
        if statistics.fmean(best) <= statistics.fmean(rewards) and len(seats) == 1:
            report.errors.append("the expert gets no more reward than guessing: gold() or the reward is wrong")
    elif len({tuple(sorted(tried.rewards.items())) for tried in guesses}) == 1:
        report.learnable = False
        report.advice.append(
            f"guessing always got {rewards[0]:g}, and no expert (gold) shows that more can be had: a group of equal "
            "rewards teaches nothing, so a model must sometimes do better than guessing"
        )
    for tried in played:
        for reply in tried.replies:
            if reply.components and abs(sum(reply.components.values()) - reply.reward) > 1e-6:
                report.advice.append(f"components {reply.components} do not add up to the reward {reply.reward:g}")
                break
    steps = [seconds for tried in played for seconds in tried.step_s]
    opens = [tried.open_s for tried in played[1:]] or [played[0].open_s]
    slowest = max([*steps, *opens])
    if slowest > BLOCKING_S and not found.blocking:
        report.advice.append(
            f"a call took {1000 * slowest:.0f} ms: set `blocking = True` if it computes or waits without `await`, so "
            "that it runs in a separate process"
        )
    report.facts["guessing"] = f"reward {statistics.fmean(rewards):.3f} +- {statistics.pstdev(rewards):.3f}"
    report.facts["turns"] = f"{statistics.fmean(len(tried.turns) for tried in played):.1f} per episode"
    report.facts["open"] = f"{1000 * statistics.median(opens):.2f} ms"
    for phase in ("start", "verify"):
        told = [tried.replies[-1].metrics.get(f"time/{phase}_s") for tried in played]
        if known := [seconds for seconds in told if seconds is not None]:
            report.facts[phase] = f"{1000 * statistics.median(known):.2f} ms"
    if steps:
        report.facts["step"] = f"{1000 * statistics.median(steps):.3f} ms, {len(steps) / sum(steps):,.0f} per s"


def _judge_processes(running: list[int], report: Report) -> None:
    """`running`: processes below this one after each episode. Those that are kept for later episodes are started with
    the first ones; a leak has no end."""
    later = running[len(running) // 2 :]
    if len(later) < 3:
        report.facts["processes"] = "not judged: fewer than 5 episodes"
    elif later[-1] - later[0] >= len(later) // 2:
        report.errors.append(
            f"{running[-1]} processes still ran after {len(running)} episodes, {later[-1] - later[0]} more than "
            f"{len(later) - 1} episodes before: end in close() what open() starts"
        )


def _judge_silence(experts: list[Tried], silences: list[Tried], report: Report) -> None:
    """An agent that says nothing must not earn what the expert earns. What fails on empty words is not judged."""
    rewards = [sum(tried.rewards.values()) for tried in silences if not tried.failure]
    if not rewards:
        report.advice.append("an empty answer ends every episode with an error: models give such answers")
        return
    report.facts["no answer"] = f"reward {statistics.fmean(rewards):.3f} (an agent that says nothing)"
    best = [tried.rewards.get(tried.said[0][0], 0.0) for tried in experts if tried.said]
    seats = {seat for tried in experts for seat, _ in tried.said}
    if best and len(seats) == 1 and statistics.fmean(rewards) >= statistics.fmean(best):
        report.errors.append("an agent that says nothing gets as much reward as the expert")


# --- by a person ------------------------------------------------------------------------------------------------------


class Person:
    """Reads what the model would be shown, and types what it would say. Ctrl-D gives the episode up."""

    def __init__(self) -> None:
        self._is_first = True

    def __call__(self, _: Environment, reply: SessionReply, prompt: SeatPrompt) -> Message | None:
        if prompt is reply.prompts[0]:
            show_outcome(reply, rewarded=not self._is_first)
            if reply.round:
                sys.stdout.write(f"({', '.join(one.seat for one in reply.round)} act at the same time)\n")
        self._is_first = False
        show_messages(prompt)
        sys.stdout.write(f"{prompt.seat or 'you'}> ")
        sys.stdout.flush()
        line = sys.stdin.readline()
        return Message(role="assistant", content=line.rstrip("\n")) if line else None


def show_outcome(reply: SessionReply, *, rewarded: bool) -> None:
    """Print the outcome of an action. `rewarded`: it answers a turn."""
    parts = earned(reply, own=bool(reply.components))
    if rewarded and parts:
        sys.stdout.write(f"  -> {', '.join(parts)}\n")


def show_messages(prompt: SeatPrompt) -> None:
    """Print messages."""
    for message in prompt.messages:
        sys.stdout.write(f"{message.role}: {message.text}\n")
    sys.stdout.flush()


# --- by another interpreter ------------------------------------------------------------------------------------------


class Asked(msgspec.Struct):
    """Request to the interpreter that plays the environment."""

    name: str
    config: dict[str, Any]
    episodes: int
    seed: int
    turns: int
    row: int | None = None
    """Row of the one episode that a person or a script plays; None: `look_at` plays `episodes`."""
    bots: dict[str, str] = {}
    """With `row`: bots of the environment by seat."""
    answers: list[Message] = []
    """With `row`: messages of a script that plays instead of a person."""
    answer: str = ""
    """The file that Answered goes to: stdout is for the person, and for what libraries print."""


class Answered(msgspec.Struct):
    report: Report | None = None
    tried: Tried | None = None
    mistakes: list[dict[str, Any]] = []


def look(asked: Asked) -> Report:
    """`look_at`. Raises SpecError."""
    report = _answered(asked).report
    assert report is not None
    return report


def play_row(asked: Asked) -> Tried:
    """The episode of `asked.row`, by `asked.answers` or at the terminal. Raises SpecError."""
    tried = _answered(asked).tried
    assert tried is not None
    return tried


def _answered(asked: Asked) -> Answered:
    """Run in the interpreter that OPENTINKER_ENV_INTERPRETERS, or the settings file, names for the environment,
    otherwise in this one. Raises SpecError."""
    from opentinker.envs.runtime.interpreters import Interpreters  # which the named one needs nothing of
    from opentinker.shared.settings_sources import load_settings

    interpreters = Interpreters(load_settings().env_interpreters)
    try:
        interpreter = interpreters.of(asked.name)
        if not interpreter:
            return asyncio.run(_played(asked))
        with tempfile.TemporaryDirectory(prefix="opentinker-") as place:
            asked.answer = str(Path(place, "answer"))
            return _answered_by(interpreter, interpreters.python_path, asked)
    finally:
        interpreters.close()


async def _played(asked: Asked) -> Answered:
    if asked.row is None:
        episodes = asked.episodes
        return Answered(await look_at(asked.name, asked.config, episodes=episodes, seed=asked.seed, turns=asked.turns))
    policy = Repeating([("", message) for message in asked.answers]) if asked.answers else Person()
    row = asked.row
    tried = await play(asked.name, asked.config, policy, row=row, seed=asked.seed, turns=asked.turns, bots=asked.bots)
    return Answered(tried=tried)


def _answered_by(interpreter: str, python_path: str, asked: Asked) -> Answered:
    command = [interpreter, "-m", "opentinker.local.env_trial", msgspec.json.encode(asked).decode()]
    ran = subprocess.run(command, env={**os.environ, "PYTHONPATH": python_path}, check=False)
    if ran.returncode:
        raise OpenTinkerError(f"{interpreter} could not play {asked.name}: see what it said above")
    answered = msgspec.json.decode(Path(asked.answer).read_bytes(), type=Answered)
    if answered.mistakes:
        raise SpecError(answered.mistakes)
    return answered


def main() -> None:
    asked = msgspec.json.decode(sys.argv[1], type=Asked)
    try:
        answered = asyncio.run(_played(asked))
    except SpecError as error:
        answered = Answered(mistakes=[{**mistake, "value": str(mistake["value"])} for mistake in error.mistakes])
    Path(asked.answer).write_bytes(msgspec.json.encode(answered))


if __name__ == "__main__":
    main()
