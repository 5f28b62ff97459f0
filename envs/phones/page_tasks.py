"""Tasks of `phone_page`. Each has the data that the phone must hold at the end, so any other change by a policy counts
against it; and an expert's actions, for self-tests."""

from __future__ import annotations

import copy
from collections.abc import Callable
from random import Random
from typing import Any

import msgspec

from opentinker.envs.phones.page_data import LABELS, LEVELS, LINES, SWITCHES, TEXTS, TITLES, names, number, time_of_day

Data = dict[str, Any]
Way = list[tuple[str, ...]]
"""An expert's actions: (tap, text of the element), (type, text of the field, what), (answer, what)."""


class PhoneTask(msgspec.Struct, frozen=True, kw_only=True):
    goal: str
    way: Way
    data: Data
    """The phone's data when the task is done."""
    shown: list[str] | None = None
    """The screen that must be open at the end."""
    answer: str | None = None
    """The answer that the policy must give; None: no answer."""

    def is_done(self, state: dict[str, Any], said: str | None) -> bool:
        """Return whether the task is done, given the phone's state and the policy's answer."""
        if self.shown is not None and state["view"]["stack"][-1]["at"] != self.shown:
            return False
        if self.answer is not None and (said is None or _plain(said) != _plain(self.answer)):
            return False
        return bool(state["data"] == self.data)


def _plain(text: str) -> str:
    return "".join(filter(str.isalnum, text)).casefold()


def _named(data: Data, kind: str, name: str) -> dict[str, Any]:
    found: dict[str, Any] = next(one for one in data[kind] if one["name"] == name)
    return found


def open_app(random: Random, data: Data) -> PhoneTask:
    app = random.choice(data["apps"])
    return PhoneTask(goal=f"Open {app}.", way=[("tap", app)], data=data, shown=[app])


def switch_setting(random: Random, data: Data) -> PhoneTask:
    key = random.choice(list(SWITCHES))
    on = data["settings"][key] = not data["settings"][key]
    goal = f"Turn {SWITCHES[key]} {'on' if on else 'off'}."
    return PhoneTask(goal=goal, way=[("tap", "Settings"), ("tap", LABELS[key])], data=data)


def set_level(random: Random, data: Data) -> PhoneTask:
    key = random.choice(list(LEVELS))
    old = data["settings"][key]
    new = random.choice([level for level in range(max(0, old - 3), min(10, old + 3) + 1) if level != old])
    data["settings"][key] = new
    taps = [("tap", f"{LEVELS[key]} {'up' if new > old else 'down'}")] * abs(new - old)
    return PhoneTask(goal=f"Set the {key} to {new}.", way=[("tap", "Settings"), *taps], data=data)


def add_contact(random: Random, data: Data) -> PhoneTask:
    known = {one["name"] for one in data["contacts"]}
    name = next(name for name in iter(lambda: names(random, 1)[0], "") if name not in known)
    new = number(random)
    data["contacts"].append({"name": name, "number": new, "favourite": False})
    data["contacts"].sort(key=lambda one: one["name"])
    way: Way = [("tap", "Contacts"), ("tap", "New contact"), ("type", "Name", name), ("type", "Number", new)]
    return PhoneTask(goal=f"Add {name} to the contacts, with the number {new}.", way=[*way, ("tap", "Save")], data=data)


def delete_contact(random: Random, data: Data) -> PhoneTask:
    name = random.choice(data["contacts"])["name"]
    data["contacts"] = [one for one in data["contacts"] if one["name"] != name]
    way: Way = [("tap", "Contacts"), ("tap", name), ("tap", "Delete")]
    return PhoneTask(goal=f"Delete the contact {name}.", way=way, data=data)


def change_number(random: Random, data: Data) -> PhoneTask:
    one, new = random.choice(data["contacts"]), number(random)
    one["number"] = new
    name = one["name"]
    way: Way = [("tap", "Contacts"), ("tap", name), ("tap", "Edit"), ("type", "Number", new), ("tap", "Save")]
    return PhoneTask(goal=f"{name} has a new number, {new}. Change it in the contacts.", way=way, data=data)


def mark_favourite(random: Random, data: Data) -> PhoneTask:
    one = random.choice([one for one in data["contacts"] if not one["favourite"]])
    one["favourite"] = True
    way: Way = [("tap", "Contacts"), ("tap", one["name"]), ("tap", "Favourite")]
    return PhoneTask(goal=f"Mark {one['name']} as a favourite contact.", way=way, data=data)


def send_message(random: Random, data: Data) -> PhoneTask:
    name, text = random.choice(data["contacts"])["name"], random.choice(LINES)
    _append(data, name, text)
    return PhoneTask(goal=f'Send {name} the message "{text}"', way=_write(name, text), data=data)


def send_number(random: Random, data: Data) -> PhoneTask:
    of, to = random.sample(data["contacts"], 2)
    _append(data, to["name"], of["number"])
    goal = f"Send {to['name']} the number of {of['name']}, and nothing else, as a message."
    way: Way = [("tap", "Contacts"), ("tap", of["name"]), ("tap", "Home"), *_write(to["name"], of["number"])]
    return PhoneTask(goal=goal, way=way, data=data)


def _append(data: Data, name: str, text: str) -> None:
    if not any(one["name"] == name for one in data["threads"]):
        data["threads"].append({"name": name, "lines": []})
    _named(data, "threads", name)["lines"].append({"me": True, "text": text})


def _write(name: str, text: str) -> Way:
    new: Way = [("tap", "Messages"), ("tap", "New message"), ("type", "To", name), ("tap", "Next")]
    return [*new, ("type", "Message", text), ("tap", "Send")]


def add_alarm(random: Random, data: Data) -> PhoneTask:
    known = {one["time"] for one in data["alarms"]}
    time = next(time for time in iter(lambda: time_of_day(random), "") if time not in known)
    data["alarms"] = sorted([*data["alarms"], {"time": time, "on": True}], key=lambda one: one["time"])
    way: Way = [("tap", "Clock"), ("tap", "New alarm"), ("type", "Time, as 07:30", time), ("tap", "Save")]
    return PhoneTask(goal=f"Set an alarm for {time}.", way=way, data=data)


def switch_alarm(random: Random, data: Data) -> PhoneTask:
    one = random.choice(data["alarms"])
    one["on"] = not one["on"]
    goal = f"Turn the alarm at {one['time']} {'on' if one['on'] else 'off'}."
    return PhoneTask(goal=goal, way=[("tap", "Clock"), ("tap", one["time"])], data=data)


def write_note(random: Random, data: Data) -> PhoneTask:
    known = {one["title"] for one in data["notes"]}
    title, text = random.choice([title for title in TITLES if title not in known]), random.choice(TEXTS)
    data["notes"].append({"title": title, "text": text})
    way: Way = [("tap", "Notes"), ("tap", "New note"), ("type", "Title", title), ("type", "Text", text)]
    goal = f'Write a note with the title "{title}" and the text "{text}".'
    return PhoneTask(goal=goal, way=[*way, ("tap", "Save")], data=data)


def delete_note(random: Random, data: Data) -> PhoneTask:
    title = random.choice(data["notes"])["title"]
    data["notes"] = [one for one in data["notes"] if one["title"] != title]
    way: Way = [("tap", "Notes"), ("tap", title), ("tap", "Delete")]
    return PhoneTask(goal=f'Delete the note "{title}".', way=way, data=data)


def find_number(random: Random, data: Data) -> PhoneTask:
    one = random.choice(data["contacts"])
    way: Way = [("tap", "Contacts"), ("tap", one["name"]), ("answer", one["number"])]
    return PhoneTask(goal=f"Which number has {one['name']}?", way=way, data=data, answer=one["number"])


def read_message(random: Random, data: Data) -> PhoneTask:
    one = random.choice(data["threads"])
    said = [line["text"] for line in one["lines"] if not line["me"]][-1]
    way: Way = [("tap", "Messages"), ("tap", one["name"]), ("answer", said)]
    return PhoneTask(goal=f"What is the last thing that {one['name']} wrote?", way=way, data=data, answer=said)


TASKS: dict[str, Callable[[Random, Data], PhoneTask]] = {
    make.__name__: make
    for make in (
        *(open_app, switch_setting, set_level, add_contact, delete_contact, change_number, mark_favourite),
        *(send_message, send_number, add_alarm, switch_alarm, write_note, delete_note, find_number, read_message),
    )
}
TAPS = frozenset({"open_app", "switch_setting", "set_level", "delete_contact", "mark_favourite", "switch_alarm",
                  "delete_note"})  # fmt: skip
"""Tasks that taps alone can do."""


def make_task(name: str, random: Random, data: Data) -> PhoneTask:
    """Return a task on a phone with this data, which stays as it is."""
    return TASKS[name](random, copy.deepcopy(data))
