"""Four tasks, checked by the phone's state."""

import random
from typing import Any

NAMES = ("Ada", "Ben", "Cleo", "Dora", "Emil", "Fay")


class Task:
    template = ""

    def __init__(self, params: dict[str, Any]) -> None:
        self.params, self.initialized = params, False

    @property
    def name(self) -> str:
        return type(self).__name__

    @property
    def goal(self) -> str:
        return self.template.format(**self.params)

    @classmethod
    def generate_random_params(cls) -> dict[str, Any]:
        return {"name": random.choice(NAMES), "number": f"555-{random.randrange(10000):04}"}

    def initialize_task(self, env: Any) -> None:
        if self.initialized:
            raise RuntimeError(f"{self.name}.initialize_task() is already called.")
        self.initialized = True
        env.begin(self.name)
        self.prepare(env.state)

    def prepare(self, state: dict[str, Any]) -> None:
        pass

    def is_successful(self, env: Any) -> float:
        return float(self.holds(env.state, env.interaction_cache))

    def holds(self, state: dict[str, Any], answer: str) -> bool:
        raise NotImplementedError

    def tear_down(self, env: Any) -> None:
        self.initialized = False
        env.end(self.name)


class SystemWifiTurnOff(Task):
    template = "Turn wifi off."

    def prepare(self, state: dict[str, Any]) -> None:
        state["Wi-Fi"] = True

    def holds(self, state: dict[str, Any], answer: str) -> bool:
        return state["Wi-Fi"] is False


class SystemBluetoothTurnOn(Task):
    template = "Turn bluetooth on."

    def holds(self, state: dict[str, Any], answer: str) -> bool:
        return state["Bluetooth"] is True


class ContactsAddContact(Task):
    template = "Create a new contact for {name}. Their number is {number}."

    def holds(self, state: dict[str, Any], answer: str) -> bool:
        return [self.params["name"], self.params["number"]] in state["contacts"]


class ContactsFindNumber(Task):
    template = "Which number has {name}?"

    def prepare(self, state: dict[str, Any]) -> None:
        state["contacts"] = [[self.params["name"], self.params["number"]]]

    def holds(self, state: dict[str, Any], answer: str) -> bool:
        return bool(answer == self.params["number"])


ALL = (SystemWifiTurnOff, SystemBluetoothTurnOn, ContactsAddContact, ContactsFindNumber)
