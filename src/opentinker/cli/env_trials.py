"""`opentinker env check, play`: tries an environment on this machine, without any service."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from opentinker.cli import harbor_tasks
from opentinker.cli.common import AsJson, assigned, complain, print_json, say
from opentinker.cli.specs import import_from_here
from opentinker.shared.types.errors import plural

if TYPE_CHECKING:
    from opentinker.local.env_trial import Report

Name = Annotated[
    str, typer.Argument(metavar="ENVIRONMENT", help="module:Class, importable from this directory, or a built-in name.")
]
Checked = Annotated[
    str,
    typer.Argument(
        metavar="ENVIRONMENT",
        help="module:Class, importable from this directory, a built-in name, or harbor:SET or harbor:SET/TASK.",
    ),
]
Setting = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="NAME=VALUE", help="Set a config value, as JSON or text. Repeatable."),
]
Seed = Annotated[int, typer.Option(help="Seed of the first episode; each later episode adds one.")]
Turns = Annotated[int, typer.Option(min=1, help="Stop an episode after this many turns.")]


def register(env: typer.Typer) -> None:
    env.command()(check)
    env.command()(play)


def check(
    name: Checked,
    settings: Setting = None,
    episodes: Annotated[
        int, typer.Option(min=1, help="Number of episodes for the expert, and for random guessing.")
    ] = 8,
    seed: Seed = 0,
    turns: Turns = 200,
    as_json: AsJson = False,
) -> None:
    """Play a few episodes and check seeds, types, rewards and speed. Exit status 1 if something is wrong."""
    from opentinker.local.env_trial import Asked, look

    if name.startswith(harbor_tasks.PREFIX):
        harbor_tasks.check(name, as_json)
        return
    import_from_here()
    report = look(Asked(name, config_of(settings), episodes, seed, turns))
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
    if report.errors:
        raise typer.Exit(1)


def verdict(report: Report) -> str:
    if report.errors:
        return "it cannot be trained yet"
    if not report.learnable:
        return "it can be played; that it can be learned is not shown: no two episodes were rewarded differently"
    return "it can be trained"


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
    from opentinker.local.env_trial import Asked, play_by_hand, show_messages, show_outcome

    import_from_here()
    tried = play_by_hand(Asked(name, config_of(settings), 1, seed, turns, row, bots=bots_of(bots)))
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
