"""Writes the findings of a scenario: as JSON, as a page with plots, and next to the findings of another run."""

from __future__ import annotations

import math
import os
import platform
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import orjson

from loadtest.support.machine import QUIET_CORES
from loadtest.support.open_loop import Latencies

Better = Literal["less", "more", ""]
"""Which way is good; empty: neither."""
BASELINES = Path(__file__).resolve().parents[1] / "baselines"


@dataclass(slots=True)
class Figure:
    value: float
    unit: str
    better: Better


@dataclass(slots=True)
class Aim:
    """A number that has been promised."""

    what: str
    limit: float
    unit: str
    seen: float
    better: Literal["less", "more"]

    @property
    def good(self) -> bool:
        return self.seen <= self.limit if self.better == "less" else self.seen >= self.limit

    def data(self) -> dict[str, Any]:
        sign = "<=" if self.better == "less" else ">="
        return {"what": self.what, "aim": f"{sign} {self.limit:g} {self.unit}", "seen": self.seen, "good": self.good}


@dataclass(slots=True)
class Report:
    scenario: str
    options: dict[str, Any]
    figures: dict[str, Figure] = field(default_factory=dict)
    latencies: dict[str, Latencies] = field(default_factory=dict)
    """From the moment at which something should have begun until its end."""
    stages: dict[str, Latencies] = field(default_factory=dict)
    """Parts that follow each other."""
    checks: list[tuple[str, bool, str]] = field(default_factory=list)
    """What must hold, whether it does, what was seen."""
    aims: list[Aim] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """What was not measured, and why."""
    foreign: float = 0.0
    """Cores that others used meanwhile."""
    seconds: float = 0.0

    def figure(self, name: str, value: float, unit: str, better: Better = "") -> None:
        self.figures[name] = Figure(value, unit, better)

    def check(self, what: str, good: bool, seen: object) -> None:
        self.checks.append((what, good, str(seen)))

    def aim(self, what: str, seen: float, limit: float, unit: str, better: Literal["less", "more"] = "less") -> None:
        """Also a figure, to be compared."""
        self.aims.append(Aim(what, limit, unit, seen, better))
        self.figure(what, seen, unit, better)

    def note(self, what: str) -> None:
        self.notes.append(what)

    def latency(self, name: str) -> Latencies:
        return self.latencies.setdefault(name, Latencies())

    def stage(self, name: str, seconds: float) -> None:
        self.stages.setdefault(name, Latencies()).seconds.append(seconds)

    @property
    def good(self) -> bool:
        return all(good for _, good, _ in self.checks) and all(aim.good for aim in self.aims)

    def data(self) -> dict[str, Any]:
        return {
            "scenario": self.scenario,
            "when": time.strftime("%Y-%m-%d", time.gmtime()),
            "options": self.options,
            "machine": {
                "cores": os.cpu_count(), "python": platform.python_version(), "foreign_cores": round(self.foreign, 3)
            },
            "seconds": round(self.seconds, 3),
            "figures": {name: asdict(one) for name, one in self.figures.items()},
            "latencies": {name: one.summary() for name, one in self.latencies.items()},
            "stages": {name: one.summary() for name, one in self.stages.items()},
            "errors": {name: dict(one.errors) for name, one in self.latencies.items() if one.errors},
            "aims": [aim.data() for aim in self.aims],
            "not_measured": self.notes,
            "checks": [{"what": what, "good": good, "seen": seen} for what, good, seen in self.checks],
        }  # fmt: skip


def comparable(data: dict[str, Any]) -> dict[str, tuple[float, Better]]:
    """The numbers of a report that one compares, by name: figures with a good direction, p50 and p99 of latencies."""
    found: dict[str, tuple[float, Better]] = {
        name: (one["value"], one["better"]) for name, one in data["figures"].items() if one["better"]
    }
    for name, one in data["latencies"].items():
        found |= {f"{name} {quantile}": (one[quantile], "less") for quantile in ("p50", "p99") if quantile in one}
    return found


def ratios(now: dict[str, Any], before: dict[str, Any]) -> dict[str, float]:
    """Return how many times worse each number is than in the other report: 2 is twice as bad, 0.5 twice as good.

    Raises SystemExit where they are not of the same scenario with the same options.
    """
    for field_ in ("scenario", "options"):
        if now[field_] != before[field_]:
            raise SystemExit(f"the baseline is of another {field_}: {before[field_]}, not {now[field_]}")
    old = comparable(before)
    worse: dict[str, float] = {}
    for name, (value, better) in comparable(now).items():
        if name in old and old[name][0] > 0:
            ratio = value / old[name][0]
            worse[name] = ratio if better == "less" else 1 / ratio if ratio else math.inf
    return worse


def write(report: Report, directory: Path, worse: dict[str, float]) -> Path:
    """DIRECTORY/SCENARIO.json, .md, and plots beside it; gives the page."""
    directory.mkdir(parents=True, exist_ok=True)
    data = report.data()
    (directory / f"{report.scenario}.json").write_bytes(
        orjson.dumps({**data, "worse": worse}, option=orjson.OPT_INDENT_2)
    )
    plots = [
        _plot(report.latencies, directory / f"{report.scenario}-latency.svg", "latency from when it was due"),
        _plot(report.stages, directory / f"{report.scenario}-stages.svg", "duration of stages"),
    ]
    page = directory / f"{report.scenario}.md"
    page.write_text("\n".join([*lines(data, worse), "", *(f"![]({plot.name})" for plot in plots if plot), ""]))
    return page


def lines(data: dict[str, Any], worse: dict[str, float]) -> list[str]:
    """The page, as Markdown."""
    machine = data["machine"]
    disturbed = machine["foreign_cores"] > QUIET_CORES
    out = [
        f"# {data['scenario']}", "",
        f"{data['seconds']:.1f} s on {machine['cores']} cores, {data['when']}; others used "
        f"{machine['foreign_cores']:.2f} cores{': disturbed, measure again' if disturbed else ''}.",
        "", "| figure | value | worse than the baseline |", "| --- | --- | --- |",
    ]  # fmt: skip
    for name, one in data["figures"].items():
        out.append(f"| {name} | {one['value']:.4g} {one['unit']} | {_times(worse, name)} |")
    quantiles = ("p50", "p90", "p99", "p99.9", "max")
    for title, kind in (("latency", "latencies"), ("stage", "stages")):
        if data[kind]:
            out += ["", f"| {title}, ms | count | errors | {' | '.join(quantiles)} | p99 worse |", "| --- " * 9 + "|"]
        for name, one in data[kind].items():
            cells = " | ".join(f"{one[q] * 1e3:.1f}" if q in one else "" for q in quantiles)
            out.append(f"| {name} | {one['count']} | {one['errors']:.0f} | {cells} | {_times(worse, f'{name} p99')} |")
    if data["aims"]:
        out += ["", "| promised | aim | seen | |", "| --- | --- | --- | --- |"]
        for aim in data["aims"]:
            out.append(f"| {aim['what']} | {aim['aim']} | {aim['seen']:.4g} | {'met' if aim['good'] else 'MISSED'} |")
    for name, errors in data["errors"].items():
        out += ["", *(f"- {name}: {count} x {error}" for error, count in errors.items())]
    out += ["", *(f"- {'met' if c['good'] else 'MISSED'}: {c['what']} (seen: {c['seen']})" for c in data["checks"])]
    out += [f"- not measured: {note}" for note in data["not_measured"]]
    return out


def _times(worse: dict[str, float], name: str) -> str:
    return f"{worse[name]:.2f}x" if name in worse else ""


def _plot(series: dict[str, Latencies], path: Path, title: str) -> Path | None:
    """Percentiles on a scale that gives each further nine the same room; None if there is nothing to draw."""
    drawn = {name: sorted(one.seconds) for name, one in series.items() if one.seconds}
    if not drawn:
        return None
    import matplotlib as mpl

    mpl.use("svg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5))
    for name, seconds in drawn.items():
        beyond = [len(seconds) / (len(seconds) - index) for index in range(len(seconds))]
        axes.step(beyond, [second * 1e3 for second in seconds], label=name, where="post")
    ticks = [1, 2, 10, 100, 1000]
    axes.set_xscale("log")
    axes.set_xticks(ticks, ["0", "p50", "p90", "p99", "p99.9"])
    axes.set_yscale("log")
    axes.set_ylabel("ms")
    axes.set_title(title)
    axes.legend()
    figure.savefig(path)
    pyplot.close(figure)
    return path
