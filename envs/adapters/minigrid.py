"""Describes the view of a MiniGrid or BabyAI agent as text: its mission, what it carries, and the objects before it."""

from __future__ import annotations

from typing import Any

UNSEEN, EMPTY, WALL, DOOR = 0, 1, 2, 4
DOORS = ("open", "closed", "locked")


def is_minigrid(environment: Any) -> bool:
    return hasattr(environment.unwrapped, "agent_pos") and hasattr(environment.unwrapped, "mission")


def view(observation: dict[str, Any]) -> str:
    """`image` is [column, row] of (object, colour, state); the agent is in the middle of the last row and faces up."""
    cells = observation["image"]
    columns, rows, _ = cells.shape
    middle = columns // 2
    lines = [f"Mission: {observation['mission']}"]
    carried = cells[middle, rows - 1]
    if carried[0] not in (UNSEEN, EMPTY):
        lines.append(f"You carry {_thing(carried)}.")
    seen = []
    for ahead in range(rows):
        for column in range(columns):
            cell = cells[column, rows - 1 - ahead]
            mine = ahead == 0 and column == middle
            if not mine and cell[0] not in (UNSEEN, EMPTY, WALL):
                seen.append(f"{_thing(cell)} {_place(ahead, column - middle)}")
    lines.append(f"You see {', '.join(seen)}." if seen else "You see nothing of interest.")
    wall = next((ahead for ahead in range(1, rows) if cells[middle, rows - 1 - ahead][0] == WALL), None)
    if wall is not None:
        lines.append(f"The wall before you is {wall} ahead.")
    return "\n".join(lines)


def _thing(cell: Any) -> str:
    from minigrid.core.constants import IDX_TO_COLOR, IDX_TO_OBJECT

    kind, colour, state = (int(number) for number in cell)
    words = [DOORS[state]] if kind == DOOR else []
    text = " ".join([*words, IDX_TO_COLOR[colour], IDX_TO_OBJECT[kind]])
    return f"{'an' if text[0] in 'aeiou' else 'a'} {text}"


def _place(ahead: int, aside: int) -> str:
    parts = [f"{ahead} ahead"] if ahead else []
    if aside:
        parts.append(f"{abs(aside)} to the {'right' if aside > 0 else 'left'}")
    return " and ".join(parts)
