"""Plays any PettingZoo environment by its id, turn-based (AEC) or parallel: agents are seats."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, Field

from opentinker.envs.adapters import card_games, env_notes
from opentinker.envs.adapters.library import ActionConfig, Illegal, Randomness, episode_seed
from opentinker.envs.base import Action, Environment, Opening, Step, user
from opentinker.shared.types.core import Message

if TYPE_CHECKING:
    from pettingzoo import AECEnv, ParallelEnv


class PettingZoo(Environment):
    """One seat per agent. Each sees its own observations; its reward is what it receives between two of its turns.

    In a parallel environment all agents act at the same time, in rounds. An invalid or masked action costs the seat
    `penalty` and is requested again, in a round while the actions of the others are held; after `max_illegal` of them
    the seat forfeits and the game ends. An agent that was removed from the game gets no more turns.
    """

    class Config(ActionConfig):
        library: ClassVar[str] = "pettingzoo"

        id: Annotated[str, Field(min_length=1)]
        """As in PettingZoo's registry, e.g. classic/tictactoe_v3."""
        api: Literal["aec", "parallel"] = "aec"
        """Form of the environment: its agents act in turn (`aec`) or at the same time (`parallel`)."""
        view: Literal["auto", "ansi", "observation"] = "auto"
        """Form of the observation. `ansi`: the game drawn in letters; `observation`: what the agent observes, by its
        space. `auto`: the first of these that the environment has, and poker's observations as text."""
        kwargs: dict[str, Any] = {}
        """Passed to the environment."""
        forfeit: Annotated[float, Field(ge=0.0)] = 1.0
        """Deducted from the reward of a seat that ends the game by illegal actions (component `forfeit`)."""

        def check(self) -> None:
            import pettingzoo
            from pettingzoo.env_registry.exceptions import PettingZooRegistryError

            try:
                pettingzoo.spec(self.api, self.id)
            except PettingZooRegistryError as error:
                raise ValueError(f"id = {self.id!r} with api = {self.api!r}: {error}") from None

    config: Config
    blocking = True

    def __init__(self, config: BaseModel) -> None:
        super().__init__(config)
        import pettingzoo

        from opentinker.envs.adapters import spaces

        self._spaces = spaces
        made = pettingzoo.make(self.config.api, self.config.id, **self.config.kwargs)
        self._drawn = self.config.view != "observation" and "ansi" in made.metadata.get("render_modes", [])
        if self._drawn:
            made = pettingzoo.make(self.config.api, self.config.id, **{"render_mode": "ansi"} | self.config.kwargs)
        elif self.config.view == "ansi":
            raise ValueError(f"view = 'ansi': {self.config.id} cannot be drawn in letters")
        self._environment: AECEnv[Any, Any, Any] | ParallelEnv[Any, Any, Any] = made
        self._in_words = card_games.reader(self.config.id) if self.config.view == "auto" and not self._drawn else None
        self._agents = {str(agent): agent for agent in self._environment.possible_agents}
        self.seats = tuple(self._agents)
        self._illegal = dict.fromkeys(self.seats, 0)
        self._returns = dict.fromkeys(self.seats, 0.0)
        self._introduced: set[str] = set()
        self._observations: dict[str, Any] = {}
        self._masks: dict[str, Any] = {}
        """Allowed actions, of the seats that act next."""
        self._chosen: dict[str, Any] = {}
        """Actions of a round that are held while another seat is asked again."""

    async def open(self, row: int, seed: int) -> Opening:
        start = episode_seed(row, seed)
        self._randomness = Randomness(start)
        with self._randomness:
            if self.config.api == "parallel":
                observations, infos = self._environment.reset(seed=start)
                self._see(observations, infos)
                return Opening(acting=self._acting())
            self._environment.reset(seed=start)
            seat, _ = self._advance()
            if seat is None:
                raise ValueError(f"{self.config.id} is over before anybody has acted")
            return Opening(messages=[self._message(seat)], seat=seat)

    def _choose(self, action: Action) -> Any:
        """Return the action that a text names. Raise Illegal."""
        space = self._environment.action_space(self._agents[action.seat])
        return self._spaces.read(space, action.text, self._names(space), self._masks[action.seat])

    async def step_all(self, actions: list[Action]) -> Step:
        refused: dict[str, Illegal] = {}
        for action in actions:
            try:
                self._chosen[action.seat] = self._choose(action)
            except Illegal as error:
                refused[action.seat] = error
        if refused:
            return self._refuse_in_round(refused)
        chosen = {self._agents[seat]: self._chosen[seat] for seat in self.seats if seat in self._chosen}
        self._chosen = {}
        with self._randomness:
            observations, rewards, terminations, truncations, infos = self._environment.step(chosen)
            self._see(observations, infos)
            acting = self._acting()
        gains = {str(agent): float(reward) for agent, reward in rewards.items()}
        for seat, gain in gains.items():
            self._returns[seat] += gain
        endings = [truncations[agent] and not terminations[agent] for agent in truncations]
        return Step(
            acting=acting or None,
            rewards={seat: {"reward": gain} for seat, gain in gains.items()},
            done=not acting,
            truncated=not acting and bool(endings) and all(endings),
            metrics=self._metrics(),
        )

    def _see(self, observations: Mapping[Any, Any], infos: Mapping[Any, Any]) -> None:
        for agent in self._environment.agents:
            self._look(str(agent), observations[agent], infos.get(agent, {}))

    def _acting(self) -> dict[str, list[Message]]:
        """Return the agents that are still in a parallel environment, all of which act, and what each sees."""
        seats = [str(agent) for agent in self._environment.agents]
        return {seat: [self._message(seat)] for seat in seats}

    def _refuse_in_round(self, refused: Mapping[str, Illegal]) -> Step:
        steps = {seat: self._refuse(seat, why) for seat, why in refused.items()}
        over = any(step.done for step in steps.values())
        return Step(
            acting=None if over else {seat: step.messages for seat, step in steps.items()},
            rewards={seat: step.components for seat, step in steps.items()},
            done=over,
            metrics=self._metrics(),
        )

    async def step(self, action: Action) -> Step:
        try:
            chosen = self._choose(action)
        except Illegal as error:
            return self._refuse(action.seat, error)
        with self._randomness:
            self._environment.step(chosen)
            seat, credit = self._advance()
            messages = [] if seat is None else [self._message(seat)]
        reward = credit.pop(action.seat, 0.0)
        return Step(
            messages=messages,
            reward=reward,
            components={"reward": reward},
            rewards={other: {"reward": value} for other, value in credit.items() if value},
            done=seat is None,
            truncated=seat is None and self._truncated,
            seat=seat or "",
            metrics=self._metrics(),
        )

    async def close(self) -> None:
        self._environment.close()

    def _advance(self) -> tuple[str | None, dict[str, float]]:
        """Advance to the next seat that can act. Return that seat, or None, and the reward of each agent whose turn
        came up; set `_truncated` if all remaining agents were truncated."""
        environment = self._environment
        credit: dict[str, float] = {}
        endings: list[bool] = []
        while environment.agents:
            seat = str(environment.agent_selection)
            observation, reward, terminated, truncated, info = environment.last()
            credit[seat] = credit.get(seat, 0.0) + float(reward)
            self._returns[seat] += float(reward)
            if not (terminated or truncated):
                self._look(seat, observation, info)
                return seat, credit
            endings.append(bool(truncated and not terminated))
            environment.step(None)
        self._truncated = bool(endings) and all(endings)
        return None, credit

    def _look(self, seat: str, observation: Any, info: Mapping[str, Any]) -> None:
        """Keep what a seat observes and may do."""
        self._observations[seat], self._masks[seat] = observation, self._spaces.mask_of(observation, info)

    def _refuse(self, seat: str, why: Exception) -> Step:
        self._illegal[seat] += 1
        step = self.config.refuse(why, self._allowed_actions(seat), self._illegal[seat], self._metrics())
        step.seat = seat
        if step.done:
            step.components["forfeit"] = -self.config.forfeit
            step.reward -= self.config.forfeit
        return step

    def _metrics(self) -> dict[str, float]:
        returns = {f"return/{seat}": value for seat, value in self._returns.items()}
        return {"illegal": float(sum(self._illegal.values())), **returns}

    def _message(self, seat: str) -> Message:
        parts = [] if seat in self._introduced else [self._introduction(seat)]
        self._introduced.add(seat)
        if self._drawn:
            parts.append(env_notes.plain_colours(str(self._environment.render())).strip("\n"))
        elif self._in_words:
            parts.append(self._in_words(self._environment, self._agents[seat], self._observations[seat]["observation"]))
        else:
            space = self._environment.observation_space(self._agents[seat])
            parts.append(self._spaces.show(space, self._observations[seat]))
        if self.config.hint and (left := self._allowed_actions(seat)):
            parts.append(f"Possible: {left}.")
        return user("\n".join(filter(None, parts)))

    def _introduction(self, seat: str) -> str:
        game = env_notes.GAMES.get(env_notes.base_name(self.config.id), "")
        space = self._environment.action_space(self._agents[seat])
        about = f"You are {seat} in {self.config.id}. {game}".strip()
        return self.config.introduction(about, self._spaces.hint(space, self._names(space)))

    def _allowed_actions(self, seat: str) -> str:
        space = self._environment.action_space(self._agents[seat])
        return self._spaces.allowed(space, self._masks[seat], self._names(space))

    def _names(self, space: Any) -> list[str]:
        known = env_notes.NAMES.get(env_notes.base_name(self.config.id))
        names = self.config.actions or known or card_games.actions_of(self.config.id, self._environment)
        if self.config.actions and getattr(space, "n", None) != len(names):
            raise ValueError(f"{len(names)} names of actions were given for {space}")
        return [name.lower() for name in names]
