"""`opentinker env check, play`: tries an environment on this machine, without any service."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from opentinker.cli import harbor_tasks
from opentinker.cli.common import AsJson, Url, assigned, client, complain, print_json, say
from opentinker.cli.shell import complete
from opentinker.cli.specs import import_from_here, read_spec
from opentinker.shared.types.errors import plural

if TYPE_CHECKING:
    from opentinker.local.env_trial import Report
    from opentinker.shared.api_types import EnvironmentReport

GROUPS = 16
LINE, LINES, CELL, TRANSCRIPT = 3000, 1000, 200, 50_000
"""Characters and lines of a report that the server takes."""
REPORT_BYTES = 250_000
"""Limit of a report as JSON; the server takes 256 KiB."""
FEW = 0.1
"""Share of groups that carry signal below which training is slow to begin."""
Name = Annotated[
    str,
    typer.Argument(
        metavar="ENVIRONMENT",
        help="module:Class, importable from this directory, or a built-in name.",
        autocompletion=complete.local_environments,
    ),
]
Checked = Annotated[
    str,
    typer.Argument(
        metavar="ENVIRONMENT",
        help="module:Class, importable from this directory, a built-in name, or harbor:SET or harbor:SET/TASK.",
        autocompletion=complete.local_environments,
    ),
]
Setting = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="NAME=VALUE", help="Set a config value, as JSON or text. Repeatable."),
]
Seed = Annotated[int, typer.Option(help="Seed of the first episode; each later episode adds one.")]
Turns = Annotated[int, typer.Option(min=1, help="Stop an episode after this many turns.")]


def check(
    name: Checked,
    settings: Setting = None,
    episodes: Annotated[
        int, typer.Option(min=1, help="Number of episodes for the expert, and for random guessing.")
    ] = 8,
    seed: Seed = 0,
    turns: Turns = 200,
    job: Annotated[
        Path | None,
        typer.Option(
            metavar="JOB.toml", help="Let the base model of this job play some of its groups too, on a running server."
        ),
    ] = None,
    groups: Annotated[int | None, typer.Option(min=1, max=1000, help="With --job: number of groups (16).")] = None,
    save: Annotated[bool, typer.Option("--save", help="Save the report on the server; its page shows it.")] = False,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Play a few episodes and check seeds, types, rewards and speed. Exit status 1 if something is wrong.

    With --job, see also how often the base model solves the tasks, and in what share of the groups the rewards differ:
    only those teach anything.
    """
    if job is None and (groups is not None or (url is not None and not save)):
        raise typer.BadParameter("--groups needs --job JOB.toml; --url needs --job or --save")
    if name.startswith(harbor_tasks.PREFIX):
        if job is not None:
            raise typer.BadParameter(
                f"--job needs an environment, not a set of tasks: name it `harbor` instead of `{name}`"
            )
        found = harbor_tasks.check(name, as_json)
    else:
        found = _check(name, settings, (episodes, seed, turns), job, groups, url, as_json)
    if save:
        with client(url) as api:
            saved = api.save_check(_bounded(found))
        complain(f"saved: #/environments/{saved['id']} on the server's page")
    if found["errors"]:
        raise typer.Exit(1)


def _bounded(found: EnvironmentReport) -> EnvironmentReport:
    """Cut what is longer than the server takes, and say so in the report."""
    for lines in (LINES, 200, 50, 20):
        made = _cut(found, lines)
        if len(json.dumps(made)) <= REPORT_BYTES:
            break
    if made == found:
        return found
    note = "this report is cut: `opentinker env check` without --save prints all of it"
    return {**made, "advice": [note, *made["advice"][: LINES - 1]]}


def _cut(found: EnvironmentReport, most: int) -> EnvironmentReport:
    """Return it with at most `most` lines of each kind."""

    def cut(lines: list[str]) -> list[str]:
        return [line[:LINE] for line in lines[:most]]

    return {
        **found, "errors": cut(found["errors"]), "advice": cut(found["advice"]),
        "facts": {name: text[:LINE] for name, text in found["facts"].items()},
        "transcript": found["transcript"][:TRANSCRIPT],
        "rows": [[cell[:CELL] for cell in row] for row in found["rows"][:most]],
    }  # fmt: skip


def _check(
    name: str, settings: list[str] | None, played: tuple[int, int, int], job: Path | None, groups: int | None,
    url: str | None, as_json: bool,
) -> EnvironmentReport:  # fmt: skip
    """`played`: episodes, seed and turns."""
    from opentinker.local.env_trial import Asked, look

    episodes, seed, turns = played
    import_from_here()
    trial = None if job is None else _trial(name, job, groups or GROUPS)
    report = look(Asked(name, config_of(settings), episodes, seed, turns))
    if job is not None and trial is not None and not report.errors:
        _play_groups(trial, job, url, report)
    if as_json:
        print_json({"errors": report.errors, "advice": report.advice, **report.facts, "transcript": report.transcript})
    else:
        say(f"{report.transcript}\n")
        for title, value in report.facts.items():
            say(f"{title:<9} {value}")
        for line in report.advice:
            say(f"advice: {line}")
        for line in report.errors:
            complain(f"error: {line}")
        say(verdict(report))
    return {
        "environment": name, "verdict": verdict(report), "errors": report.errors, "advice": report.advice,
        "facts": report.facts, "transcript": report.transcript, "columns": [], "rows": [],
    }  # fmt: skip


def _trial(name: str, path: Path, groups: int) -> dict[str, Any]:
    """Return the eval job in which the base model of a job file plays groups."""
    from opentinker.sdk.evaluation_spec import trial_of

    spec = read_spec(path)
    own = spec["environment"]["name"]
    if own != name:
        raise typer.BadParameter(f"{path} plays {own!r}, not {name!r}", param_hint="--job")
    return trial_of(spec, groups)


def _play_groups(trial: dict[str, Any], path: Path, url: str | None, report: Report) -> None:
    """Let the base model play, and add what it earned to the report."""
    size = trial["evaluation"]["samples"]
    groups = trial["evaluation"]["episodes"] // size
    with client(url) as api:
        id = api.submit(trial, beside=path)["id"]
        complain(f"job {id} plays {plural(groups, 'group')} of {size}")
        ended = api.wait(id, cancel_on_interrupt=True)
    if ended["state"] != "succeeded":
        report.errors.append(f"the base model could not play: job {id} {ended['state']}: {ended['reason']}")
        return
    values = ended["result"]["values"]
    solved = values["val/pass/1"]
    report.facts["base"] = f"reward {values['val/reward/mean']:.3f}, solved {solved:.0%} of its episodes (job {id})"
    if "val/signal" in values:
        report.facts["signal"] = f"rewards differ in {values['val/signal']:.0%} of its groups of {size}"
        if values["val/signal"] < FEW:
            hint = "easier tasks, parts of the reward, or supervised learning first" if solved < 0.5 else "harder tasks"
            report.advice.append(f"nearly all groups of the base model have equal rewards and teach nothing: {hint}")


def verdict(report: Report) -> str:
    if report.errors:
        return "not ready for training yet"
    if not report.learnable:
        return "playable, but no two episodes were rewarded differently: whether it can be learned is not known"
    return "ready for training"


def play(
    name: Name,
    settings: Setting = None,
    row: Annotated[int, typer.Option(help="Row of the data set to play.")] = 0,
    bots: Annotated[
        list[str] | None,
        typer.Option("--bot", metavar="SEAT=BOT", help="Let a bot of the environment play a seat. Repeatable."),
    ] = None,
    seed: Seed = 0,
    turns: Turns = 200,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the conversation and the rewards as JSON at the end.")
    ] = False,
) -> None:
    """Play an episode yourself: read the model's prompts and type its answers. Ctrl-D ends it."""
    from opentinker.local.env_trial import Asked, play_row, show_messages, show_outcome

    import_from_here()
    tried = play_row(Asked(name, config_of(settings), 1, seed, turns, row, bots=bots_of(bots)))
    if tried.failure:
        complain(f"error: {tried.failure}")
        raise typer.Exit(1)
    last = tried.replies[-1]
    show_outcome(last, rewarded=len(tried.replies) > 1)
    for prompt in last.prompts:
        show_messages(prompt)
    if as_json:
        said = [{"seat": seat, "content": message.text} for seat, message in tried.said]
        print_json({"ended": tried.ended, "rewards": tried.rewards, "said": said})
        return
    totals = ", ".join(f"{f'{seat}: ' if seat else ''}{reward:g}" for seat, reward in tried.rewards.items())
    say(f"{'done' if tried.ended else 'given up'} after {plural(len(tried.turns), 'turn')}; reward {totals or 0}")


def config_of(settings: list[str] | None) -> dict[str, Any]:
    return dict(assigned(setting) for setting in settings or [])


def bots_of(given: list[str] | None) -> dict[str, str]:
    """Return the bot of each seat, from `SEAT=BOT`. Exit with the mistake."""
    found = {}
    for one in given or []:
        seat, equals, bot = one.partition("=")
        if not (equals and bot):
            raise typer.BadParameter(f"{one!r} is not of the form SEAT=BOT, e.g. second=random", param_hint="--bot")
        found[seat] = bot
    return found
