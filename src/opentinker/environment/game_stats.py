"""What a game server counts, per job: games since the last reset of the step, and since the beginning."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

OUTCOMES = ("win", "loss", "draw", "timeout")
"""Of `info["result"]`; others are not counted."""


@dataclass
class _Game:
    rewards: list[float] = field(default_factory=list)


class BaseGameStats:
    """Override `record_game_result` to count what is in a game's `info`."""

    def __init__(self) -> None:
        self.step = 0
        self._running: dict[str, _Game] = {}
        self._started = 0
        self._done: list[list[float]] = []
        self._total: list[list[float]] = []
        self.total_interactions = 0

    # --- hooks ----------------------------------------------------------------------------------------------------

    def register_game_start(self, instance_id: str, job_id: str = "default") -> None:
        self._running[instance_id] = _Game()
        self._started += 1

    def record_step(self, instance_id: str, reward: float) -> None:
        self.total_interactions += 1
        if instance_id in self._running:
            self._running[instance_id].rewards.append(float(reward))

    def record_game_result(
        self, info: dict[str, Any], reward: float, done: bool, instance_id: str, job_id: str = "default"
    ) -> None:
        """After every step; a game that is `done` counts."""
        if not done or instance_id not in self._running:
            return
        rewards = self._running.pop(instance_id).rewards
        self._done.append(rewards)
        self._total.append(rewards)

    # --- numbers --------------------------------------------------------------------------------------------------

    def get_step_stats(self) -> dict[str, float]:
        """Of the games that ended since the last `reset_step_stats`."""
        games = self._done
        return {
            "step": float(self.step),
            "total_samples": float(self._started),
            "games_in_step": float(len(games)),
            "incomplete_samples": float(len(self._running)),
            "completion_rate": len(games) / max(1, self._started),
            "mean_final_reward": _mean(rewards[-1] if rewards else 0.0 for rewards in games),
            "mean_sum_reward": _mean(map(sum, games)),
            "mean_sum_reward_all": _mean(map(sum, [*games, *(game.rewards for game in self._running.values())])),
            "mean_avg_reward": _mean(map(_mean, games)),
            "mean_reward": _mean(reward for rewards in games for reward in rewards),
            "mean_game_steps": _mean(map(len, games)),
            "total_interactions": float(self.total_interactions),
        }

    def get_cumulative_stats(self) -> dict[str, float]:
        games = self._total
        return {
            "total_games": float(len(games)),
            "cumulative_mean_reward": _mean(map(sum, games)),
            "cumulative_mean_steps": _mean(map(len, games)),
        }

    def reset_step_stats(self) -> dict[str, float]:
        """Begins the next step; gives the numbers of the one that has ended."""
        ended = self.get_step_stats()
        self.step += 1
        self._started, self._done, self.total_interactions = len(self._running), [], 0
        return ended

    def reset_all(self) -> None:
        self.__init__()  # type: ignore[misc]  # whatever a subclass counts begins anew too


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
        games = max(1, len(self._done))
        return super().get_step_stats() | {f"{name}_rate": n / games for name, n in self.outcomes.items()}

    def get_cumulative_stats(self) -> dict[str, float]:
        games = max(1, len(self._total))
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
    """One of `kind` per job."""

    def __init__(self, kind: Callable[[], BaseGameStats]) -> None:
        self._kind = kind
        self.jobs: dict[str, BaseGameStats] = {}

    def of(self, job: str) -> BaseGameStats:
        return self.jobs.setdefault(job, self._kind())


def _mean(values: Any) -> float:
    numbers = [float(value) for value in values]
    return sum(numbers) / len(numbers) if numbers else 0.0
