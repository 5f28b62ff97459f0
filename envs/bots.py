"""Scripted players: seats that a job gives to a bot are played by the environment and never ask a model.

An environment lists its bots in `Environment.bots`. The request that opens an episode says which seats they play
(`OpenSession.bots`, from `[seats]` of the job); `with_bots` then takes their turns inside `open` and `step`, so that
callers see the seats of models only.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase

import msgspec

from opentinker.envs.base import Action, BadReply, Environment, Opening, Step, fields_of
from opentinker.envs.rounds import as_opening, check_round_reward, prompts_of
from opentinker.envs.wrapper import Wrapper
from opentinker.shared.types.core import Message, StopReason
from opentinker.shared.types.errors import SpecError
from opentinker.shared.types.mistakes import mistake

SEATS = 64
"""Most entries of one job's bots."""
NAME_CHARACTERS = 100
BOT_TURNS = 1000
"""Most turns of bots between two turns of models."""
MODEL = ""
"""In place of a bot's name: a model plays the seat, even if a pattern that gives it to a bot follows."""


def check_bots(environment: type[Environment], bots: Mapping[str, str]) -> None:
    """Raise SpecError with every entry of seat (or pattern) and bot that the class cannot play.

    Which seats there are depends on the config: `resolve_bots` checks them.
    """
    if len(bots) > SEATS:
        raise SpecError.of("seats", len(bots), f"at most {SEATS} seats or patterns may name a bot")
    offered = environment.bots
    known = sorted(offered or ())
    has = f"its bots are: {', '.join(known)}" if known else "it has no bots"
    mistakes = []
    for seat, bot in bots.items():
        if len(seat) > NAME_CHARACTERS or len(bot) > NAME_CHARACTERS:
            mistakes.append(mistake("seats", "", f"names of seats and bots have at most {NAME_CHARACTERS} characters"))
        elif bot != MODEL and offered is not None and bot not in offered:
            mistakes.append(mistake(f"seats.{seat}.bot", bot, f"{environment.__name__} has no bot {bot!r}; {has}"))
    if mistakes:
        raise SpecError(mistakes)


def resolve_bots(environment: Environment, bots: Mapping[str, str]) -> dict[str, str]:
    """Return the bot of every seat that a bot plays, in the order of the seats.

    The entry with the seat's own name counts, else the first pattern (`player_*`) that matches. Raise SpecError for a
    bot that the environment does not have, an entry that matches no seat, and if no seat is left to a model.
    """
    check_bots(type(environment), bots)
    names = ", ".join(map(repr, environment.seats))
    unmatched = [entry for entry in bots if not any(fnmatchcase(seat, entry) for seat in environment.seats)]
    if unmatched:
        problem = f"{type(environment).__name__} has no such seat with this config; its seats are: {names}"
        raise SpecError([mistake(f"seats.{entry}", bots[entry], problem) for entry in unmatched])
    found = {seat: _bot_of(seat, bots) for seat in environment.seats}
    if bots and all(found.values()):
        raise SpecError.of("seats", "", f"bots play every seat ({names}): leave one to a model or a person")
    return {seat: bot for seat, bot in found.items() if bot}


def _bot_of(seat: str, bots: Mapping[str, str]) -> str:
    if seat in bots:
        return bots[seat]
    return next((bot for pattern, bot in bots.items() if fnmatchcase(seat, pattern)), MODEL)


def with_bots(environment: Environment, inner: Environment) -> Environment:
    """Wrap `environment` if bots play seats of it, else return it unchanged. Raise SpecError as `resolve_bots`.

    `inner`: the environment without its tools, whose bots and state these are. One that is played elsewhere
    (`bots = None`) sends its bots there.
    """
    if not inner.bot_seats or inner.bots is None:
        return environment
    bots = resolve_bots(inner, inner.bot_seats)
    return WithBots(environment, inner, bots) if bots else environment


class WithBots(Wrapper):
    """An environment whose bots take their turns inside `open`, `step` and `step_all`.

    Rewards of bots are in `rewards`, by seat. A reward that a model's seat earns in a bot's turn belongs to the seat's
    last turn, or to its first one if it has not acted yet. In a round of bots and models, the bots act after the models
    have answered, from a state that does not include these answers.
    """

    def __init__(self, environment: Environment, inner: Environment, bots: Mapping[str, str]) -> None:
        """`bots`: the bot of each seat that one plays."""
        super().__init__(environment)
        self.seats = tuple(seat for seat in environment.seats if seat not in bots)
        self.rewarded = environment.seats
        self._inner = inner
        self._bots = bots
        self._played = 0
        """Turns so far, of bots and models."""
        self._beside: list[str] = []
        """Bots that act in the same round as the models that are asked."""
        self._owed: dict[str, dict[str, float]] = {}
        """Rewards by seat from turns of bots before the first turn of a model."""

    async def open(self, row: int, seed: int) -> Opening:
        opened = as_opening(self.environment, await self.environment.open(row, seed))
        self.wants_tokens = self.environment.wants_tokens
        step = await self._play_bots(Step(**fields_of(Opening, opened)), None, "open")
        if not isinstance(step, Step):
            raise BadReply(f"step() must return a Step, not {type(step).__name__}")
        if step.done:
            raise BadReply("the episode was over before the seat of a model acted")
        self._owed = step.rewards
        return Opening(**fields_of(Opening, step))

    async def step(self, action: Action) -> Step:
        return await self._finish(await self._step(action), action.seat, "step")

    async def step_all(self, actions: list[Action]) -> Step:
        bots, self._beside = [self._turn_of(seat) for seat in self._beside], []
        return await self._finish(await self._step_all([*actions, *bots]), None, "step_all")

    async def _finish(self, step: Step, actor: str | None, method: str) -> Step:
        """Add the rewards that models are owed and take the turns of the bots that follow."""
        if not isinstance(step, Step):
            return step  # the caller reports the wrong type
        owed, self._owed = self._owed, {}
        return await self._play_bots(_add_rewards(step, owed, actor), actor, method)

    async def _step(self, action: Action) -> Step:
        own = msgspec.structs.replace(action, turn=self._played)
        self._played += 1
        return await self.environment.step(own)

    async def _step_all(self, actions: list[Action]) -> Step:
        actions.sort(key=lambda action: self.environment.seats.index(action.seat))
        own = [msgspec.structs.replace(action, turn=self._played) for action in actions]
        self._played += 1
        return await self.environment.step_all(own)

    async def _play_bots(self, step: Step, actor: str | None, method: str) -> Step:
        """Take turns of bots until a model acts or the episode is over. `actor`: the seat of the model that acted last;
        None after a round, and before the first turn. `method`: which one of the environment's returned `step`.

        Raise BadReply if no model gets a turn.
        """
        for _ in range(BOT_TURNS):
            if step.done:
                break
            prompts = prompts_of(self.environment, step, method)
            models = {seat: prompt for seat, prompt in prompts.items() if seat not in self._bots}
            if models:
                self._beside = [seat for seat in prompts if seat not in models]
                return step if step.acting is None else msgspec.structs.replace(step, acting=models)
            turns, bot = [self._turn_of(seat) for seat in prompts], step.seat
            alone = step.acting is None
            method = "step" if alone else "step_all"
            following = await (self._step(turns[0]) if alone else self._step_all(turns))
            if not isinstance(following, Step):
                return following
            if not alone:
                check_round_reward(self.environment, following.reward, following.components)
            joint = msgspec.structs.replace(
                following, reward=step.reward, components=step.components, rewards=step.rewards
            )
            earned = {bot: _earned(following)} if alone and _earned(following) else {}
            step = _add_rewards(_add_rewards(joint, following.rewards, actor), earned, actor)
        else:
            raise BadReply(f"bots played {BOT_TURNS:,} turns and no model's seat was named")
        return self._without_bots(step)

    def _without_bots(self, step: Step) -> Step:
        """Return the last step of an episode without the prompts of bots."""
        acting = step.acting
        if isinstance(acting, Mapping):
            left = {seat: seen for seat, seen in acting.items() if seat not in self._bots}
            return msgspec.structs.replace(step, acting=left or None)
        return msgspec.structs.replace(step, messages=[]) if step.seat in self._bots else step

    def _turn_of(self, seat: str) -> Action:
        """Return the next turn of a bot. Raise BadReply."""
        name = self._bots[seat]
        self._inner.bot_seat = seat
        turn = (self._inner.bots or {})[name](self._inner)
        if not isinstance(turn, str | Message):
            raise BadReply(f"the bot {name!r} must return str or Message, not {type(turn).__name__}")
        said = turn if isinstance(turn, Message) else Message(role="assistant", content=turn)
        return Action(text=said.text, stop=StopReason.EOS, turn=0, seat=seat, tool_calls=said.tool_calls)


def _earned(step: Step) -> dict[str, float]:
    """Return the reward of the seat that acted, by its parts."""
    return dict(step.components) or ({"reward": step.reward} if step.reward else {})


def _add_rewards(step: Step, more: Mapping[str, Mapping[str, float]], actor: str | None) -> Step:
    """Return the step with the rewards `more`, by seat; those of `actor` are added to its own reward."""
    own = _earned(step)
    rewards = {seat: dict(parts) for seat, parts in step.rewards.items()}
    total = step.reward
    for seat, parts in more.items():
        if seat == actor:
            own = _add(own, parts)
            total += sum(parts.values())
        else:
            rewards[seat] = _add(rewards.get(seat, {}), parts)
    components = own if any(seat == actor for seat in more) else step.components
    return msgspec.structs.replace(step, reward=total, components=components, rewards=rewards)


def _add(one: Mapping[str, float], other: Mapping[str, float]) -> dict[str, float]:
    return dict(one) | {name: one.get(name, 0.0) + value for name, value in other.items()}
