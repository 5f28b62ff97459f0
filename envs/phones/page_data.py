"""Draws the initial data of the phone of `phone_page` from an episode's row and seed."""

from __future__ import annotations

from random import Random
from typing import Any

APPS = ("Contacts", "Messages", "Settings", "Clock", "Notes")
FIRST = ("Ada", "Ben", "Cleo", "Dora", "Emil", "Fay", "Gus", "Hana", "Ivan", "June", "Kurt", "Lena", "Milo", "Nora")
LAST = ("Abel", "Berg", "Cruz", "Diaz", "Eder", "Frey", "Gray", "Hall", "Ito", "Jung", "Klein", "Lund", "Marsh", "Noor")
LINES = ("See you at noon.", "The train is late.", "Can you call me?", "Happy birthday!", "I have the keys.",
         "Dinner is at eight.", "Where did you park?", "Thanks for the book.", "It rains here.", "The code is 4711.",
         "Bring some bread.", "I am at the gate.")  # fmt: skip
TITLES = ("Groceries", "Ideas", "Packing list", "Films", "Recipes", "Repairs", "Gifts", "Books")
TEXTS = ("milk and eggs", "a blue coat", "two new tyres", "soup with leeks", "a map of Rome", "call the bank",
         "water the plants", "paint for the door")  # fmt: skip
SWITCHES = {"wifi": "Wi-Fi", "bluetooth": "Bluetooth", "airplane": "airplane mode", "location": "location",
            "saver": "battery saver", "rotate": "auto-rotate", "notifications": "notifications",
            "mobile": "mobile data", "hotspot": "hotspot", "dark": "dark theme", "vibration": "vibration",
            "lock": "screen lock"}  # fmt: skip
"""Keys of settings and their names in a sentence."""
LABELS = {key: name[0].upper() + name[1:] for key, name in SWITCHES.items()}
"""Their names on the screen."""
LEVELS = {"volume": "Volume", "brightness": "Brightness"}
CONTACTS, THREADS, ALARMS, NOTES = 12, 3, 3, 3


def names(random: Random, count: int) -> list[str]:
    """Return different names, sorted as the phone sorts them."""
    both = zip(random.sample(FIRST, count), random.sample(LAST, count), strict=True)
    return sorted(f"{first} {last}" for first, last in both)


def number(random: Random) -> str:
    return f"555-{random.randrange(10_000):04}"


def time_of_day(random: Random) -> str:
    return f"{random.randrange(24):02}:{5 * random.randrange(12):02}"


def phone_data(random: Random, shuffle: bool) -> dict[str, Any]:
    """Return contacts, conversations, settings, alarms and notes. `shuffle`: the order of the apps, too."""
    apps = list(APPS)
    if shuffle:
        random.shuffle(apps)
    people = names(random, CONTACTS)
    stars = set(random.sample(people, 3))
    contacts = [{"name": name, "number": number(random), "favourite": name in stars} for name in people]
    threads = [
        {"name": name, "lines": [{"me": at % 2 == 1, "text": text} for at, text in enumerate(random.sample(LINES, 3))]}
        for name in random.sample(people, THREADS)
    ]
    settings: dict[str, bool | int] = {key: random.random() < 0.5 for key in SWITCHES}
    settings |= {key: random.randrange(11) for key in LEVELS}
    times = sorted({time_of_day(random) for _ in range(ALARMS)})
    alarms = [{"time": time, "on": random.random() < 0.5} for time in times]
    written = zip(random.sample(TITLES, NOTES), random.sample(TEXTS, NOTES), strict=True)
    notes = [{"title": title, "text": text} for title, text in written]
    return {"apps": apps, "contacts": contacts, "threads": threads, "settings": settings, "alarms": alarms,
            "notes": notes}  # fmt: skip


def phone_state(data: dict[str, Any]) -> dict[str, Any]:
    """Return the state of the page: this data, and the home screen."""
    home = {"at": ["home"], "scroll": 0, "fields": {}}
    return {"data": data, "view": {"stack": [home], "focus": "", "notice": ""}}
