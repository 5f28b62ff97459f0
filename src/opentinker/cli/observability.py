"""Commands about what jobs did and cost: rollouts, distributions, usage."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Annotated, Any

import typer

from opentinker.cli.common import (
    AsJson,
    JobId,
    Policy,
    Url,
    client,
    complain,
    print_found,
    print_json,
    print_table,
    say,
)
from opentinker.cli.shell import complete
from opentinker.shared.api_types import Heard, Rollout, Said, Shown, View
from opentinker.shared.types.core import part_id
from opentinker.shared.types.errors import plural
from opentinker.shared.types.manifest import short_list

BAR = 40
CAUSES = {
    "nothing": "nothing (no activity reported)",
    "swap": "swap (loading new weights)",
    "loading": "loading (workers load their models)",
}
"""Causes that need a word of explanation."""
WHOLE = {"turns": 1, "length": 0, "staleness": 0}
"""Distributions of whole numbers, and the smallest."""


Step = Annotated[int | None, typer.Option(help="The optimizer step that trained on it; default: the newest.", min=0)]


def rollouts(job_id: JobId, step: Step = None, policy: Policy = "", url: Url = None, as_json: AsJson = False) -> None:
    """Show kept training episodes in full, with their rewards."""
    found = client(url).rollouts(part_id(job_id, policy), step)
    if as_json:
        print_json(found)
        return
    if not found["rollouts"]:
        say("no episodes yet: they come with the first step of an rl job whose rollout.transcripts is not 0")
        return
    say(f"step {found['step']}; kept steps: {short_list(found['steps'])}")
    for one in found["rollouts"]:
        say(f"\n--- group {one['group']}, sample {one['sample']}: {_facts(one)}")
        for line in words_of(one):
            say(line)


def words_of(one: Rollout) -> Iterator[str]:
    """Yield the messages of an episode; with several seats in the order of play, each with its speaker or viewer."""
    views = one["views"]
    if len(views) == 1:
        yield from (
            f"[{role_of(message)}{_left_out(message)}] {message['content']}" for message in views[0]["messages"]
        )
        return
    for view in views:
        yield f"({_who(view)}, reward {view['reward']:g})"
        if "order" not in one:  # it was kept before there was any
            yield from (f"[{role_of(message)}] {message['content']}" for message in view["messages"])
    for place, number in one.get("order", ()):
        view, message = views[place], views[place]["messages"][number]
        if "turn" in message:
            versions = ", ".join(message["versions"])
            yield f"[{_who(view)} {versions}{_left_out(message)}] {message['content']}"
        else:
            yield f"[to {_named(view)}, {role_of(message)}] {message['content']}"


def line_of(message: Heard) -> str:
    """Return a message of an evaluation episode, of several seats with its speaker or viewer."""
    if "seat" not in message:
        return f"[{role_of(message)}] {message['content']}"
    if "turn" not in message:
        return f"[to {_named(message)}, {role_of(message)}] {message['content']}"
    return f"[{' '.join([_who(message), ', '.join(message['versions'])]).strip()}] {message['content']}"


def role_of(message: Said) -> str:
    """`user`, or `tool search, 12.3 ms`."""
    name = f" {message['tool']}" if "tool" in message else ""
    return f"{message['role']}{name}" + (f", {message['call_ms']:g} ms" if "call_ms" in message else "")


def _left_out(message: Shown) -> str:
    return f", not trained: {message['untrainable']}" if "untrainable" in message else ""


def _named(view: View | Heard) -> str:
    return " ".join(part for part in (view["seat"], view["stream"]) if part) or "one seat"


def _who(view: View | Heard) -> str:
    """`white`, or `white by alice` where several policies play."""
    policy = view.get("policy")
    return f"{_named(view)} by {policy}" if policy else _named(view)


def _facts(one: Rollout) -> str:
    """`reward 1 (format 0.2, answer 0.8) exact 1; env_done after 1 turn, stopped by eos; 12 tokens from weights 1.3`"""
    parts = ", ".join(f"{name} {value:g}" for name, value in {**one["components"], **one["scores"]}.items())
    measured = "".join(f" {name} {value:g}" for name, value in one["metrics"].items())
    tokens = f"{plural(one['tokens'], 'token')} from weights {', '.join(one['versions'])}"
    return (
        f"reward {one['reward']:g}{f' ({parts})' if parts else ''}{measured}; {one['ending']} "
        f"after {plural(one['turns'], 'turn')}, stopped by {', '.join(sorted(set(one['stops'])))}; {tokens}"
    )


def distributions(
    job_id: JobId, step: Step = None, policy: Policy = "", url: Url = None, as_json: AsJson = False
) -> None:
    """Show histograms of a step: rewards, lengths, turns, staleness, importance ratios."""
    found = client(url).distributions(part_id(job_id, policy), step)
    if as_json:
        print_json(found)
        return
    if not found:
        say(
            "no distributions"
            + (" yet: they come with the first step of an rl job" if step is None else f" of step {step}")
        )
        return
    (line,) = found
    say(f"step {line['step']}")
    for name, spread in line.items():
        if isinstance(spread, dict):
            say(f"\n{name}")
            for row in bars(spread["edges"], spread["counts"], WHOLE.get(name)):
                say(f"  {row}")


def why(
    job_id: JobId,
    last: Annotated[int, typer.Option(help="Look at this many seconds, the newest.", min=5, max=3600)] = 120,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Say where a job's time goes, why it waits or does not learn, and what to change."""
    found = client(url).why(job_id, last_s=last)
    if as_json:
        print_json(found)
        return
    whole = found["until"] - found["since"]
    say(f"{found['job']}  {found['state']}; where its last {whole:.0f} s went:")
    rows = [
        [CAUSES.get(one["cause"], one["cause"]), f"{one['seconds']:.1f} s", f"{100 * one['seconds'] / whole:.0f} %"]
        for one in found["causes"]
    ]
    print_table(["cause", "time", "share"], rows if whole else [], empty="nothing was reported")
    if not found["is_whole"]:
        say("there was more activity than can be read at once: choose a smaller --last")
    for wait in found.get("waits", []):  # servers of earlier releases do not say
        say(f"{wait['worker']} waits for {wait['what']}, for {wait['seconds']:.0f} s now")
    say("" if found["findings"] else "nothing stands out")
    for finding in found["findings"]:
        say(f"{finding['what']}\n  -> {finding['advice']}")


def bars(edges: list[float], counts: list[int], least: int | None = None) -> list[str]:
    """A line per bin, from the first that holds something to the last. `least`: of whole numbers, the smallest."""
    full = [place for place, count in enumerate(counts) if count]
    if not full:
        return ["nothing"]
    below, between = f"below {edges[0]:g}", [f"{a:g} to {b:g}" for a, b in pairwise(edges)]
    if least is not None:
        below = _whole(least, edges[0])
        between = [_whole(a, b) for a, b in pairwise(edges)]
    names = [below, *between, f"{edges[-1]:g} or more"]
    shown = range(full[0], full[-1] + 1)
    width, most = max(len(names[place]) for place in shown), max(counts)
    return [
        f"{names[place]:>{width}}  {'#' * -(-BAR * counts[place] // most)} {counts[place]}".rstrip() for place in shown
    ]


def _whole(first: float, end: float) -> str:
    """`1`, or `2 to 3`: the whole numbers below `end`."""
    return f"{first:g}" if end - first == 1 else f"{first:g} to {end - 1:g}"


def usage(
    by: Annotated[str, typer.Option(help="One row per job, day or key.")] = "job",
    job: Annotated[str | None, typer.Option(metavar="JOB", help="Only this job.", autocompletion=complete.jobs)] = None,
    first: Annotated[
        str | None, typer.Option("--from", metavar="DAY", help="With --by day: the first day, as 2026-11-22.")
    ] = None,
    last: Annotated[str | None, typer.Option("--to", metavar="DAY", help="With --by day: the last day.")] = None,
    limit: Annotated[
        int, typer.Option("--limit", "-n", min=1, max=1000, help="Count this many jobs, the newest.")
    ] = 100,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Show what jobs cost: worker-, GPU- and CPU-seconds, tokens, bytes stored, and money by the operator's prices."""
    if by not in ("job", "day", "key"):
        raise typer.BadParameter(f"--by {by!r} is unknown; choose job, day or key")
    if by != "day" and (first or last):
        raise typer.BadParameter("--from and --to go with --by day")
    if by == "day" and job:
        raise typer.BadParameter("--job does not go with --by day: days are those of all jobs")
    found = client(url).usage(by, job=job, first=first, last=last, limit=limit)
    named = {"job": ["job", "name", "state"], "day": ["day"], "key": ["key", "jobs"]}[by]
    kinds = [kind for kind in COLUMNS if kind in found["total"]]
    priced = bool(found.get("currency"))  # an older server names none
    spent: list[dict[str, Any]] = [{**row} for row in found["usage"]]
    total: dict[str, Any] = {**found["total"]}
    lines = [([row[name] for name in named], row) for row in spent]
    lines += [(["total", *[""] * (len(named) - 1)], total)] if lines else []
    rows = [
        [*names, *(_amount(row[kind]) for kind in kinds), *([f"{row['cost']:,.2f}"] if priced else [])]
        for names, row in lines
    ]
    columns = [*named, *(COLUMNS[kind] for kind in kinds), *([f"cost ({found['currency']})"] if priced else [])]
    if found.get("more"):  # an older server does not say it
        complain(f"only the newest {limit:,} jobs are counted; -n for more")
    print_found(found, as_json, columns, rows, empty="no usage yet")


COLUMNS = {
    "worker_s": "worker s", "gpu_s": "gpu s", "cpu_s": "cpu s", "tokens_generated": "generated",
    "tokens_trained": "trained on", "bytes_stored": "bytes",
}  # fmt: skip


def _amount(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 or number == int(number) else f"{number:.1f}"
