"""Statistics of a game server, per job: games since the last reset of the step, and in total."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

OUTCOMES = ("win", "loss", "draw", "timeout")
"""Counted values of `info["result"]`."""


@dataclass
class _Game:
    steps: int = 0
    reward: float = 0.0
    """Sum over the steps."""
    last: float = 0.0
    """Reward of the last step."""


@dataclass
class _Games:
    """Sums over games."""

    count: int = 0
    steps: int = 0
    reward: float = 0.0
    last: float = 0.0
    mean: float = 0.0

    def add(self, game: _Game) -> None:
        self.count += 1
        self.steps += game.steps
        self.reward += game.reward
        self.last += game.last
        self.mean += game.reward / max(1, game.steps)


class BaseGameStats:
    """Override `record_game_result` to count what is in a game's `info`."""

    def __init__(self) -> None:
        self.step = 0
        self._running: dict[str, _Game] = {}
        self._started = 0
        self._done = _Games()
        self._left = _Games()
        """Games of this step that ended unfinished."""
        self._total = _Games()
        self.total_interactions = 0

    # --- hooks ----------------------------------------------------------------------------------------------------

    def register_game_start(self, instance_id: str, job_id: str = "default") -> None:
        self._running[instance_id] = _Game()
        self._started += 1

    def record_step(self, instance_id: str, reward: float) -> None:
        self.total_interactions += 1
        if (game := self._running.get(instance_id)) is not None:
            game.steps += 1
            game.reward += float(reward)
            game.last = float(reward)

    def record_game_result(
        self, info: dict[str, Any], reward: float, done: bool, instance_id: str, job_id: str = "default"
    ) -> None:
        """Record the result of a step; a game that is `done` counts."""
        if not done or instance_id not in self._running:
            return
        game = self._running.pop(instance_id)
        self._done.add(game)
        self._total.add(game)

    def register_game_end(self, instance_id: str, job_id: str = "default") -> None:
        """Count a game that the server has forgotten: it was done, was finalized, or was idle for long. One that was
        not done is incomplete."""
        if (game := self._running.pop(instance_id, None)) is not None:
            self._left.add(game)

    # --- numbers --------------------------------------------------------------------------------------------------

    def get_step_stats(self) -> dict[str, float]:
        """Return statistics of the games that ended since the last `reset_step_stats`."""
        games, incomplete = self._done, self._left.count + len(self._running)
        all_rewards = games.reward + self._left.reward + sum(game.reward for game in self._running.values())
        return {
            "step": float(self.step),
            "total_samples": float(self._started),
            "games_in_step": float(games.count),
            "incomplete_samples": float(incomplete),
            "completion_rate": games.count / max(1, self._started),
            "mean_final_reward": games.last / max(1, games.count),
            "mean_sum_reward": games.reward / max(1, games.count),
            "mean_sum_reward_all": all_rewards / max(1, games.count + incomplete),
            "mean_avg_reward": games.mean / max(1, games.count),
            "mean_reward": games.reward / max(1, games.steps),
            "mean_game_steps": games.steps / max(1, games.count),
            "total_interactions": float(self.total_interactions),
        }

    def get_cumulative_stats(self) -> dict[str, float]:
        games = self._total
        return {
            "total_games": float(games.count),
            "cumulative_mean_reward": games.reward / max(1, games.count),
            "cumulative_mean_steps": games.steps / max(1, games.count),
        }

    def reset_step_stats(self) -> dict[str, float]:
        """Begins the next step; gives the numbers of the one that has ended."""
        ended = self.get_step_stats()
        self.step += 1
        self._started, self._done, self._left, self.total_interactions = len(self._running), _Games(), _Games(), 0
        return ended

    def reset_all(self) -> None:
        self.__init__()  # type: ignore[misc]  # counters of a subclass restart too


class GameStats(BaseGameStats):
    """Games that are won or lost: reads `info["result"]`."""

    def __init__(self) -> None:
        super().__init__()
        self.outcomes = dict.fromkeys(OUTCOMES, 0)
        self.totals = dict.fromkeys(OUTCOMES, 0)

    def record_game_result(
        self, info: dict[str, Any], reward: float, done: bool, instance_id: str, job_id: str = "default"
    ) -> None:
        known = instance_id in self._running
        super().record_game_result(info, reward, done, instance_id, job_id)
        result = info.get("result")
        if done and known and result in OUTCOMES:
            self.outcomes[result] += 1
            self.totals[result] += 1

    def get_step_stats(self) -> dict[str, float]:
        games = max(1, self._done.count)
        return super().get_step_stats() | {f"{name}_rate": n / games for name, n in self.outcomes.items()}

    def get_cumulative_stats(self) -> dict[str, float]:
        games = max(1, self._total.count)
        named = {"win": "total_wins", "loss": "total_losses", "draw": "total_draws", "timeout": "total_timeouts"}
        return (
            super().get_cumulative_stats()
            | {named[name]: float(n) for name, n in self.totals.items()}
            | {f"cumulative_{name}_rate": n / games for name, n in self.totals.items()}
        )

    def reset_step_stats(self) -> dict[str, float]:
        ended = super().reset_step_stats()
        self.outcomes = dict.fromkeys(OUTCOMES, 0)
        return ended


class JobStats:
    """One of `kind` per job, of the `most` that were counted in last."""

    def __init__(self, kind: Callable[[], BaseGameStats], most: int = 1000) -> None:
        self._kind, self.most = kind, most
        self.jobs: dict[str, BaseGameStats] = {}

    def of(self, job: str) -> BaseGameStats:
        """To count in."""
        self.jobs[job] = self.jobs.pop(job) if job in self.jobs else self._kind()
        while len(self.jobs) > self.most:
            self.forget(next(iter(self.jobs)))
        return self.jobs[job]

    def told(self, job: str) -> BaseGameStats:
        """Return a job's statistics for reading; zeros, without storing them, if it has none."""
        return self.jobs[job] if job in self.jobs else self._kind()

    def forget(self, job: str) -> None:
        self.jobs.pop(job, None)
