"""An episode of a Harbor task, for policies and agents alike: it takes a sandbox at the beginning and runs the tests at
the end."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Annotated, Self

from pydantic import Field, ValidationInfo, model_validator

from opentinker.envs.base import ELSEWHERE, DataRows, EnvironmentConfig, Unreachable, user
from opentinker.envs.harbor.boxes import boxes
from opentinker.envs.harbor.image import TaskImage
from opentinker.envs.harbor.library import MAX_TASKS, load_set, load_task
from opentinker.envs.harbor.task import Task
from opentinker.envs.harbor.verifier import verify
from opentinker.envs.harbor.workspace import HOME, Workspace
from opentinker.shared.sandbox.sandbox import Unavailable
from opentinker.shared.settings_sources import load_settings
from opentinker.shared.types.core import Message


class TasksConfig(EnvironmentConfig):
    tasks: Annotated[str, Field(min_length=1, max_length=63)]
    """Name of the set."""

    @model_validator(mode="after")
    def _is_there(self, info: ValidationInfo) -> Self:
        if not (info.context or {}).get(ELSEWHERE):
            load_set(load_settings().data_dir.resolve() / HOME, self.tasks)
        return self


class TaskRows(DataRows):
    """The tasks of a set. `system`: message before each instruction; empty: none."""

    def __init__(self, tasks: str, system: str) -> None:
        self._home, self._settings, self._system = load_settings().data_dir.resolve() / HOME, load_settings(), system
        self._tasks = load_set(self._home, tasks).tasks

    def __len__(self) -> int:
        return len(self._tasks)

    def number(self, row: int) -> int:
        return row % len(self._tasks)

    def prompt(self, number: int) -> list[Message]:
        task, _ = load_task(self._home, self._settings, self._tasks[number])
        told = [Message(role="system", content=self._system)] if self._system else []
        return [*told, user(task.instruction)]

    def place(self, number: int) -> str:
        return self._tasks[number].name


@dataclass
class HarborEpisode:
    task: Task
    workspace: Workspace
    start_s: float

    @classmethod
    async def start(cls, tasks: str, row: int) -> HarborEpisode:
        """Start the task of this row in a sandbox. Raises Unreachable."""
        began = time.perf_counter()
        try:
            plane = await boxes()
            found = await asyncio.to_thread(load_set, plane.home, tasks)
            entry = found.tasks[row % len(found.tasks)]
            key = (entry.digest, entry.image)
            if key not in plane.loaded:
                if len(plane.loaded) >= MAX_TASKS:
                    plane.loaded.clear()
                plane.loaded[key] = await asyncio.to_thread(load_task, plane.home, load_settings(), entry)
            task, image = plane.loaded[key]
            workspace = await plane.take(image, task.config.environment)
        except (Unavailable, OSError) as error:
            raise Unreachable(f"no sandbox for a Harbor task: {error}") from None
        return cls(task, workspace, time.perf_counter() - began)

    async def grade(self) -> tuple[float, dict[str, float]]:
        """End all processes and run the tests. Return reward and metrics. Raises Unreachable, VerifierFailed."""
        began = time.perf_counter()
        try:
            reward, numbers = await verify(self.workspace, self.task)
        except (Unavailable, OSError) as error:
            raise Unreachable(f"{self.task.name} could not be graded: {error}") from None
        phases = {"time/start_s": self.start_s, "time/verify_s": time.perf_counter() - began}
        return reward, {**numbers, "exact": float(reward >= 1.0), **phases}


def check_set(tasks: str) -> None:
    """Read the first task, and see that every image is there. Blocking. Raises ValueError, SpecError, OSError."""
    settings = load_settings()
    home = settings.data_dir.resolve() / HOME
    entries = load_set(home, tasks).tasks
    for entry in entries:
        image = TaskImage.load(home, entry.image)
        if bool(image.docker) != (settings.harbor_sandbox == "docker"):
            raise ValueError(f"{tasks} was added with another harbor_sandbox: opentinker env add harbor:PATH")
    load_task(home, settings, entries[0])
