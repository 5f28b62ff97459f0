"""`opentinker env push, list, show, delete`: environments that run in sandboxes on the server; with `env_trials.py`,
`harbor_tasks.py` and `serve.py` all of `opentinker env`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from opentinker.cli import env_trials, harbor_tasks
from opentinker.cli.common import AsJson, Url, ago, as_typed, client, print_found, print_json, print_table, say
from opentinker.cli.serve import serve
from opentinker.cli.shell import complete
from opentinker.cli.specs import kind_of, toml_of
from opentinker.shared.types.errors import plural

PUSH_S = 60.0
env = typer.Typer(name="env", help="Environments: what there is, and those of your own.", no_args_is_help=True)

Name = Annotated[
    str,
    typer.Argument(metavar="NAME", help="See `opentinker env list`.", autocompletion=complete.pushed_environments),
]


@env.command()
def push(
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="With environment.toml (or pyproject.toml), the code and a lock file.")
    ],
    name: Annotated[str | None, typer.Option(help="Name; default: the one in the package.")] = None,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Push a directory with an environment. Pushed unchanged, it makes no new version."""
    with client(url, patience_s=PUSH_S) as api:
        pushed = api.push_environment(directory, name)
    if as_json:
        print_json(pushed)
        return
    what = "pushed" if pushed["new"] else "unchanged"
    say(f"{what}: {pushed['name']} version {pushed['version']}, {plural(pushed['files'], 'file')}")
    if not pushed["checked"]:
        say("no env worker has tried it yet: none runs, or its virtual environment is still being made")
    say(f'to play it: [environment] name = "upload:{pushed["name"]}"')


@env.command("list")
def list_all(url: Url = None, as_json: AsJson = False) -> None:
    """List environments by name: those that are built in, and yours with their newest versions."""
    with client(url) as api:
        found = api.all_environments()
    if as_json:
        print_json(found)
        return
    summaries = found.get("summaries", {})  # an older server has none
    built_in = [[name, summaries.get(name, "")] for name in found["built_in"]]
    unknown = "built in: unknown while no env worker runs; docs/environments lists them"
    print_table(("built in", "what it is"), built_in, empty=unknown)
    say("\nyours:")
    rows = [
        [f"upload:{one['name']}", one["version"], one["class"], f"{one['bytes'] / 1024:.0f} KB", ago(one["pushed"])]
        for one in found["environments"]
    ]
    columns = ("name in a spec", "version", "class", "size", "pushed")
    print_table(columns, rows, empty=f"none yet: {as_typed('env', 'push', 'DIR')} adds one")
    say(f"\n{as_typed('env', 'about', 'NAME')} shows documentation and settings of one")


@env.command()
def show(name: Name, url: Url = None, as_json: AsJson = False) -> None:
    """The versions of an environment, oldest first."""
    with client(url) as api:
        found = api.environment(name)
    rows = [[v["version"], v["class"], v["lock"], v["files"], v["digest"], ago(v["pushed"])] for v in found["versions"]]
    columns = ("version", "class", "lock", "files", "digest", "pushed")
    print_found(found, as_json, columns, rows, empty="no versions")


@env.command()
def about(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME", help="As in a spec: `copy_digits`, `upload:NAME`.", autocompletion=complete.environments
        ),
    ],
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Show an environment's documentation, settings, scripted players and an example episode."""
    with client(url) as api:
        found = api.describe_environment(name)
    if as_json:
        print_json(found)
        return
    say(found["doc"] or "Its class has no docstring.")
    say("")
    if "seats" in found:  # an older server does not say it
        say(f"seats: {', '.join(filter(None, found['seats'])) or 'one'}")
    say(f"scripted players: {', '.join(found['bots']) or 'none'}; {'can' if found['can_fork'] else 'cannot'} fork\n")
    schema = found["settings"]
    required = schema.get("required", [])
    rows = [
        [setting, kind_of(one, schema), "required" if setting in required else toml_of(one.get("default")),
         one.get("description", "")]
        for setting, one in schema.get("properties", {}).items()
    ]  # fmt: skip
    print_table(["environment.config", "type", "default", "meaning"], rows, empty="it has no settings")
    check = as_typed("env", "check", name, "--save")
    say(f"\nexample episode\n{found.get('example') or f'none yet: {check} plays one and keeps it'}")


@env.command()
def delete(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME[@VERSION]",
            help="Without a version: all of them.",
            autocompletion=complete.pushed_environments,
        ),
    ],
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Delete an environment that no running job plays."""
    name, _, version = name.partition("@")
    if version and not version.isdigit():
        raise typer.BadParameter(f"{version!r} is not the number of a version")
    with client(url) as api:
        gone = api.delete_environment(name, int(version) if version else None)
    if as_json:
        print_json({"name": name, "versions": gone})
        return
    say(f"deleted: {name} version{'s' if len(gone) > 1 else ''} {', '.join(map(str, gone))}")


for command in (harbor_tasks.add, env_trials.check, env_trials.play, serve):
    env.command()(command)
