"""AndroidWorld with the published rewards, on an emulator that the library `android_world` of this process reaches."""

from __future__ import annotations

import os
import random
from typing import Any, ClassVar

import msgspec

from opentinker.envs.adapters.library import Illegal, is_installed, refusal
from opentinker.envs.game import AbstractGame, StepResult
from opentinker.envs.phones import leases
from opentinker.envs.phones.actions import TYPES, introduction, read_json
from opentinker.envs.phones.android_screen import PhoneState, seen_of
from opentinker.envs.phones.android_server import PhoneDevice, connect
from opentinker.envs.phones.screen import tell

CONSOLE_PORT, GRPC_PORT = 5556, 8554
MAX_SIDE = 4096
"""Screens are told in the phone's own pixels."""


class PhoneTaken(RuntimeError):
    """Another episode plays on the phone."""


class AndroidWorldGame(AbstractGame):
    """A JSON action a turn, on the elements of the screen as text. Of `task_types` the start state chooses one, and its
    `seed` the parameters. A phone has one episode at a time."""

    REWARD_SUCCESS = 10.0
    REWARD_FAILURE = -1.0
    REWARD_STEP = -0.01
    REWARD_INVALID_ACTION = -0.1
    DEFAULT_MAX_STEPS = 20
    ALL_TASK_TYPES: ClassVar[list[str]] = ["ContactsAddContact"]
    _devices: ClassVar[dict[tuple[int, int], PhoneDevice]] = {}
    """The phones that this process is connected to, by console and gRPC port."""

    def __init__(
        self,
        config_path: str | None = None,
        max_steps: int = DEFAULT_MAX_STEPS,
        task_types: list[str] | None = None,
        split: str = "train",
        num_games: int = -1,
        use_shared_env: bool = False,
        emulator_console_port: int | None = None,
        emulator_grpc_port: int | None = None,
    ) -> None:
        """Ports: by default those of ANDROID_CONSOLE_PORT and ANDROID_GRPC_PORT. `config_path`, `split` and
        `num_games` choose nothing, as in the original."""
        if use_shared_env:
            raise ValueError("use_shared_env: episodes that share a phone disturb each other; leave it out")
        if max_steps < 1:
            raise ValueError("max_steps must be at least 1")
        self.max_steps, self.task_types = max_steps, list(task_types or self.ALL_TASK_TYPES)
        console = emulator_console_port or int(os.environ.get("ANDROID_CONSOLE_PORT", CONSOLE_PORT))
        self._ports = console, emulator_grpc_port or int(os.environ.get("ANDROID_GRPC_PORT", GRPC_PORT))
        self._lease: leases.PhoneLease | None = None
        self._task = self._goal = ""
        self._steps = 0

    def generate_initial_state(self) -> dict[str, Any]:
        """Needs no phone: a game server may have it."""
        return {"task_type": random.choice(self.task_types), "seed": random.randrange(2**31)}

    def reset(self, task_type: str | None = None, seed: int | None = None, **kwargs: Any) -> str:
        """Raise PhoneTaken, or ImportError where the library is missing."""
        self.close()
        device = self._connect()
        self._steps = 0
        device.reinitialize(1, random.randrange(2**31) if seed is None else seed)
        name = task_type or self.task_types[0]
        self._goal = device.goal(name, 0)["goal"]
        device.initialize(name, 0)
        self._task = name
        device.reset(True)
        self._look(device)
        return self._shown("")

    def step(self, action: str) -> StepResult:
        device = self._device
        self._steps += 1
        reward, done, said = self.REWARD_STEP, False, ""
        try:
            deed = read_json(action, self._seen.screen, TYPES)
            if deed.action_type == "status":
                done = True
                solved = deed.goal_status == "complete" and device.score(self._task, 0)["score"] > 0.0
                reward = self.REWARD_SUCCESS if solved else self.REWARD_FAILURE
            else:
                device.execute_action(self._seen.fields(deed))
                self._look(device)
        except Illegal as error:
            reward, said = self.REWARD_INVALID_ACTION, refusal(error, "")
        if self._steps >= self.max_steps and not done:
            done, reward = True, self.REWARD_FAILURE
        info = {"raw_reward": reward, "success": float(reward == self.REWARD_SUCCESS)}
        return StepResult(self._shown(said), reward, done, info)

    def close(self) -> None:
        """Undo the task on the phone, and let others have it."""
        if self._lease is not None:
            try:
                if self._task:
                    self._device.tear_down(self._task, 0)
            finally:
                self._task = ""
                self._lease.release()
                self._lease = None

    def get_system_prompt(self) -> str:
        return f"You use an Android phone. Each turn, say one action as JSON:\n{introduction(TYPES, 'index')}"

    def get_initial_user_message(self) -> str:
        return ""

    def get_interaction_name(self) -> str:
        return "android_world"

    # --- the phone --------------------------------------------------------------------------------------------------

    @property
    def _device(self) -> PhoneDevice:
        return self._devices[self._ports]

    def _connect(self) -> PhoneDevice:
        if not is_installed("android_world"):
            raise ImportError(
                "android_world is not installed here: see docs/environments/phones.md, or run the script in a checkout "
                "of the published package, whose own game needs none"
            )
        console, grpc = self._ports
        self._lease = leases.take(f"emulator:{console}", leases.home())
        if self._lease is None:
            raise PhoneTaken(
                f"the phone at console port {console} is taken: give each game server a separate phone, and set "
                "bind_worker_to_endpoint"
            )
        if self._ports not in self._devices:
            self._devices[self._ports] = PhoneDevice(connect(console, grpc, os.environ.get("ADB_PATH", "adb")))
        return self._device

    def _look(self, device: PhoneDevice) -> None:
        self._seen = seen_of(msgspec.convert(device.state(True), PhoneState), MAX_SIDE)

    def _shown(self, said: str) -> str:
        screen = tell(self._seen.screen.elements or [], False)
        return "\n".join(filter(None, [f"Task: {self._goal}", said, screen]))
