"""The oracle over a job's metrics.jsonl: what the surviving line of trainers trained, whether that was right, and
whether docs/metrics.md has the names."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

Line = dict[str, Any]


def lineage(lines: Iterable[Line], resumed: dict[int, int]) -> list[Line]:
    """The lines that count, by step. `resumed`: epoch -> step it began at, of the last checkpoint's manifest.

    A line of an epoch outside `resumed` was rolled back (no checkpoint of that epoch was ever continued), and so was a
    line beyond the step at which a later epoch began.
    """
    counting = [
        line
        for line in lines
        if line["epoch"] in resumed
        and all(line["step"] <= began for epoch, began in resumed.items() if epoch > line["epoch"])
    ]
    return sorted(counting, key=lambda line: (line["step"], line["epoch"]))


def faults(
    lines: Iterable[Line], resumed: dict[int, int], *, steps: int, groups_per_batch: int, max_staleness: int
) -> list[str]:
    """Empty if every step 1..steps was made exactly once, from whole batches, and no group was trained twice."""
    found = []
    kept = lineage(lines, resumed)
    times = Counter(line["step"] for line in kept)
    found += [f"step {step} was made {times[step]} times" for step in range(1, steps + 1) if times[step] != 1]
    found += [f"step {step} is beyond the end" for step in times if not 1 <= step <= steps]
    trained = Counter(seq for line in kept for seq in line["seqs"])
    found += [f"group {seq} was trained {count} times" for seq, count in sorted(trained.items()) if count > 1]
    for line in kept:
        if len(line["seqs"]) != groups_per_batch:
            found.append(f"step {line['step']} has {len(line['seqs'])} groups")
        if line["staleness/max"] > max_staleness:
            found.append(f"step {line['step']} has staleness {line['staleness/max']}")
    return found


BESIDE_METRICS = {"epoch", "step", "time", "seqs", "trace", "point"}
"""What else stands in a line of metrics.jsonl."""


def undocumented(names: Iterable[str]) -> list[str]:
    """Metrics that docs/metrics.md has no word for; a rate (`..._per_s`) is documented by its total."""
    page = (Path(__file__).resolve().parents[2] / "docs" / "metrics.md").read_text()
    rows = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    patterns = [re.sub("[A-Z]+", ".+", name) for row in rows for name in re.findall("`(.+?)`", row) if name != "METRIC"]
    known = re.compile("|".join(f"({pattern})(_per_s)?" for pattern in patterns))
    return sorted(name for name in names if not known.fullmatch(name))
