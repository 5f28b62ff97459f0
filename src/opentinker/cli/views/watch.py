"""`opentinker watch`: a job's progress, curves and events, live in the terminal or as plain lines in a pipe.

Follower   consumes the API's job record, metric points and events; produces updates; woken by a short poll
LiveView   draws each update (rich);  PlainView  writes a line every few steps
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TextIO

from opentinker.cli.common import line_of
from opentinker.cli.views.charts import Curves, chart, short
from opentinker.sdk.job_text import on_one_line
from opentinker.shared.types.core import JobState

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from opentinker.client import Client

POLL_S = 0.5
NO_EPOCH = -1
TIMES = ("since", "created", "updated", "deleted", "expires")
"""Fields of events that are Unix seconds."""
EVENTS_SHOWN = 6
PLAIN_LINES = 40
"""Lines that a whole job prints in a pipe, about."""
Panels = tuple[tuple[str, str, float | None], ...]
_ROWS: Panels = (("loss", "loss", None), ("validation loss", "val/loss", None))
CURVES: dict[str, Panels] = {
    "rl": (
        ("reward", "reward/mean", None),
        ("exact", "exact", 0.0),
        ("tokens/s generated", "", 0.0),
        ("staleness (versions)", "staleness/mean", 0.0),
    ),
    "sft": (*_ROWS, ("accuracy of tokens", "accuracy", 0.0), ("tokens/s trained", "trainer/tokens_per_s", 0.0)),
    "dpo": (*_ROWS, ("accuracy of rewards", "rewards/accuracy", 0.0), ("margin of rewards", "rewards/margin", 0.0)),
    "inference": (("tokens/s generated", "", 0.0),),
    "eval": (("tokens/s generated", "", 0.0),),
    "tinker": (("tokens/s generated", "", 0.0), ("tokens/s trained", "trainer/tokens_per_s", 0.0)),
}
"""By kind of job: title, metric, lower end of the axis."""
TAUGHT = ("KL to the teacher", "teacher/kl", 0.0)
"""Stands in the place of `exact` where there is a teacher."""
LINE = (
    ("reward", "reward/mean", ".2f"),
    ("exact", "exact", ".2f"),
    ("teacher kl", "teacher/kl", ".3f"),
    ("staleness", "staleness/mean", ".1f"),
    ("loss", "loss", ".3f"),
    ("val", "val/loss", ".3f"),
    ("accuracy", "accuracy", ".2f"),
    ("accuracy", "rewards/accuracy", ".2f"),
    ("margin", "rewards/margin", ".2f"),
)
"""Label, metric and form in a plain line."""


@dataclass
class Update:
    """Data for one update of a view."""

    job: Mapping[str, Any]
    curves: Curves
    changed: list[int]
    """Steps that came since the last update."""
    events: Sequence[Mapping[str, Any]]
    """Events that came since the last update."""
    seen: deque[Mapping[str, Any]] = field(default_factory=lambda: deque(maxlen=EVENTS_SHOWN))
    """The last events."""

    @property
    def final(self) -> bool:
        return JobState(self.job["state"]).final


class WatchView(Protocol):
    def show(self, update: Update) -> None: ...
    def close(self) -> None: ...


def follow(client: Client, job_id: str) -> Iterator[Update]:
    """Updates until the job has ended; the last one carries the final state and everything before it."""
    curves = Curves()
    seen: deque[Mapping[str, Any]] = deque(maxlen=EVENTS_SHOWN)
    after_point, after_event = 0, "0"
    while True:
        job = client.job(job_id)  # first: what is read after a final state is complete
        points = client.metrics(job_id, after=after_point)
        after_point = points[-1]["cursor"] if points else after_point
        events = client.event_log(job_id, after=after_event)
        after_event = events[-1]["id"] if events else after_event
        seen.extend(events)
        update = Update(job=job, curves=curves, changed=curves.add(points), events=events, seen=seen)
        yield update
        if update.final:
            return
        time.sleep(POLL_S)


def watch(client: Client, job_id: str, *, as_json: bool = False) -> Update:
    """Show a job until it ends, as suits stdout; returns the last update."""
    view = _view_of(as_json)
    try:
        for update in follow(client, job_id):
            view.show(update)
    finally:
        view.close()
    return update


def _view_of(as_json: bool) -> WatchView:
    from rich.console import Console

    if as_json:
        return JsonView(sys.stdout)
    console = Console()
    return LiveView(console) if console.is_terminal and not console.is_dumb_terminal else PlainView(sys.stdout)


class LineView:
    """Writes lines without buffering."""

    def __init__(self, out: TextIO) -> None:
        self._out = out

    def close(self) -> None:
        self._out.flush()

    def write(self, line: str) -> None:
        self._out.write(line + "\n")
        self._out.flush()

    def write_json(self, value: Mapping[str, Any]) -> None:
        self.write(line_of(value))


class PlainView(LineView):
    """`step 40/400 reward 0.31 exact 0.12 staleness 1.0 tok/s 1530 wait 12%`, and a line per event."""

    def __init__(self, out: TextIO) -> None:
        super().__init__(out)
        self._since = 0
        """Steps up to this one have been written."""

    def show(self, update: Update) -> None:
        for event in update.events:
            self.write(event_line(event))
        steps = int(update.job["steps"])
        every = max(1, steps // PLAIN_LINES)
        last = update.curves.last_step
        due = [s for s in update.changed if s > self._since and (s % every == 0 or s in (1, steps))]
        if update.final and last > self._since:
            due = sorted({*due, last})
        for step in due:
            self.write(step_line(update, range(self._since + 1, step + 1), step))
            self._since = step


class JsonView(LineView):
    """A line of JSON for each event, each step with its metrics, and at last for the job."""

    def show(self, update: Update) -> None:
        for event in update.events:
            self.write_json(event)
        for step in sorted(set(update.changed) & update.curves.steps.keys()):
            self.write_json({"step": step, "values": update.curves.steps[step]})
        if update.final:
            self.write_json({"job": update.job})


class LiveView:
    """Progress bar with ETA, four curves, the last events."""

    def __init__(self, console: Console) -> None:
        from rich.live import Live

        self._console = console
        self._live = Live(console=console, auto_refresh=False, transient=False)
        self._live.start()

    def show(self, update: Update) -> None:
        self._live.update(self._draw(update), refresh=True)

    def close(self) -> None:
        self._live.stop()

    def _draw(self, update: Update) -> RenderableType:
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        job, curves = update.job, update.curves
        plays = job.get("kind") == "eval"
        steps, step = int(job["steps"]), max(int(job["step"]), 0 if plays else curves.last_step)
        head = Text.assemble((str(job["name"]), "bold"), f"  {job['id']}  ", (str(job["state"]), "cyan"))
        bar = Table.grid(padding=(0, 2))
        unit = "episode" if plays else "step"
        bar.add_row(
            f"{unit} {step}/{steps or '?'}", ProgressBar(total=steps or None, completed=step, width=40), clock(update)
        )
        width = max(20, self._console.width // 2 - 3)
        height = 6 if self._console.height >= 32 else 4
        grid = Table.grid(padding=(0, 2))
        panels = []
        for panel in panels_of(curves, str(job.get("kind", "rl"))):
            shown = f"{panel.title}  {short(panel.latest)}" if panel.latest is not None else panel.title
            drawn = chart(panel.values, width, height, low=panel.low)
            panels.append(Text("\n".join([shown, *drawn]), no_wrap=True))
        for first in range(0, len(panels), 2):
            grid.add_row(*panels[first : first + 2])
        notes = Text("\n".join(event_line(event) for event in update.seen), style="dim")
        return Group(head, bar, Text(""), grid, Text(""), Text(facts(update)), notes)


class Panel(NamedTuple):
    """A chart."""

    title: str
    values: Sequence[float]
    latest: float | None
    low: float | None
    """Lower end of the axis."""


def panels_of(curves: Curves, kind: str) -> Iterator[Panel]:
    """Yield each chart; of several policies, reward and exact. Where nothing is exact stand the distance to a teacher,
    or the games that were won against the first opponent of the evaluations."""
    for title, name, low in CURVES[kind]:
        if len(curves.policies) > 1 and name not in ("reward/mean", "exact"):
            continue
        for policy, own in curves.policies.items():
            shown, metric, end = TAUGHT if name == "exact" and own.series("teacher/kl") else (title, name, low)
            values = own.series(metric) if metric else curves.generated
            latest = own.recent(metric) if metric else None
            if metric == "exact" and not values and (games := own.games_won()) is not None:
                shown, values = games
            newest = latest if latest is not None or not values else values[-1]
            yield Panel(f"{policy} {shown}".lstrip(), values, newest, end)


def step_line(update: Update, window: range, step: int) -> str:
    """Means over the steps since the line before."""
    curves, steps = update.curves, list(window)
    parts = [f"step {step}/{update.job['steps'] or '?'}"]
    for policy, own in curves.policies.items():
        parts += [policy] if policy else []
        for label, name, form in LINE:
            value = own.mean(name, steps)
            if value is not None:
                parts.append(f"{label} {value:{form}}")
    if (rate := curves.generated_at(step)) is not None:
        parts.append(f"tok/s {rate:.0f}")
    for policy, own in curves.policies.items():
        wait = own.mean("trainer/wait_share", steps)
        if wait is not None:
            parts.append(f"{policy} wait {wait:.0%}".lstrip())
    return " ".join(parts)


def event_line(event: Mapping[str, Any]) -> str:
    """Return a line such as `12:03:44 checkpoint step=50 seconds=0.2`; times as times of day, and no empty epoch."""
    stamp = time.strftime("%H:%M:%S", time.localtime(float(event.get("time", 0.0))))
    known = ("id", "event", "time", "state", "finished")
    told = {k: v for k, v in event.items() if k not in known and v not in ("", None) and (k, v) != ("epoch", NO_EPOCH)}
    rest = " ".join(f"{k}={_time_of_day(v) if k in TIMES else v}" for k, v in told.items())
    return f"{stamp} {event.get('event', '?')} {on_one_line(rest)}".rstrip()


def _time_of_day(unix_s: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(float(unix_s)))


def clock(update: Update) -> str:
    """Elapsed time and, while it runs, the time left at the pace of the last steps."""
    job, curves = update.job, update.curves
    end = float(job.get("finished") or 0) or time.time()
    text = duration(end - float(job["created"]))
    pace = curves.seconds_per_step()
    if update.final or pace is None or not job["steps"]:
        return text
    left = pace * (int(job["steps"]) - curves.last_step)
    early = " at most" if (job.get("spec") or {}).get("train", {}).get("target") else ""
    return f"{text}  ETA {duration(left)}{early}  ({1 / pace:.1f} steps/s)" if pace > 0 else text


def facts(update: Update) -> str:
    """One line of what an operator looks at first."""
    curves = update.curves
    wanted = (
        ("mismatch", "mismatch/mean"),
        ("trained tok/s", "trainer/tokens_per_s"),
        ("entropy", "entropy"),
        ("grad norm", "grad_norm"),
        ("zero variance", "zero_variance"),
        ("trainer waits", "trainer/wait_share"),
    )
    shown = [
        (f"{policy} {label}".lstrip(), own.recent(name))
        for policy, own in curves.policies.items()
        for label, name in wanted
    ]
    parts = [f"{label} {short(value)}" for label, value in shown if value is not None]
    if curves.validations:
        step = max(curves.validations)
        parts.append(f"validation at step {step}: {validated(curves.validations[step])}")
    return "  ".join(parts)


def validated(values: dict[str, float]) -> str:
    """`reward 0.43 (0.35 to 0.51) exact 0.40 (0.29 to 0.52)`, with 95% intervals."""
    parts = []
    for label, mean, base in (("reward", "val/reward/mean", "val/reward"), ("exact", "val/exact", "val/exact")):
        if mean in values:
            bounds = [values[name] for name in (f"{base}/low", f"{base}/high") if name in values]
            spread = " ({:.2f} to {:.2f})".format(*bounds) if len(bounds) == 2 else ""
            parts.append(f"{label} {values[mean]:.2f}{spread}")
    return " ".join(parts) or "no episode came to its end"


def duration(seconds: float) -> str:
    """47 s, 3:12 min, 2:05 h."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    return f"{whole // 60}:{whole % 60:02d} min" if whole < 3600 else f"{whole // 3600}:{whole % 3600 // 60:02d} h"
