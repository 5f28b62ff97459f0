"""Formats the command line's output: help under headings, names for values, errors as text or JSON."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from itertools import pairwise
from typing import Annotated, Any, Literal, NoReturn

import orjson
import typer
from typer.core import TyperCommand, TyperGroup

from opentinker import __version__
from opentinker.cli.common import OUTPUT, as_typed
from opentinker.cli.shell.synonyms import BELOW, as_ours
from opentinker.shared.types.errors import NotFound, OpenTinkerError, SpecError

Output = Annotated[
    Literal["table", "json", "yaml"] | None,
    typer.Option("--output", "-o", metavar="table|json|yaml", help="Format of what is printed; json is --json."),
]
OutputWithCsv = Annotated[
    Literal["table", "csv", "json", "yaml"] | None,
    typer.Option("--output", "-o", metavar="table|csv|json|yaml", help="Format of what is printed; json is --json."),
]
USAGE_ERROR: Any = typer.BadParameter.__mro__[2]
"""ClickException, of the click that typer brings."""
VALIDATOR = "Value error, "
"""Prefix of the messages of typer's validation."""
WHOLE = 10_000
"""Help in lists of commands is not cut."""
HEADINGS = {
    "Server": "up down run status doctor free access",
    "Jobs": "submit eval jobs job label watch cancel pause resume events logs failures why",
    "Sweeps": "sweep sweeps",
    "Job specs": "init spec validate plan algorithms",
    "Results": "checkpoints download artifacts delete publish unpublish published rollouts transcripts distributions "
    "rows models metrics compare usage sink",
    "Use": "chat env script",
    "Keys": "whoami keys share webhook-secret audit",
    "Help": "help completion",
}
"""Heading -> its commands, in the order in which they are listed."""
WORDS = {
    "url": "URL", "nats_url": "URL", "redis_url": "URL", "host": "ADDRESS", "websocket_host": "ADDRESS",
    "data_dir": "DIR", "folder": "DIR", "port": "PORT", "websocket_port": "PORT", "name": "NAME", "model": "NAME",
    "project": "NAME", "environment": "NAME", "owner": "ID", "tags": "TAG", "add": "TAG", "remove": "TAG",
    "sort": "PROPERTY",
    "tenant": "NAME", "env": "NAME", "role": "ROLE", "scopes": "SCOPE,...", "expires": "DURATION", "grace": "DURATION",
    "secrets": "PREFIX", "states": "STATE", "kinds": "KIND", "source": "NAME", "level": "LEVEL",
    "by": "job|day|key", "after": "ID",
}  # fmt: skip
"""Parameter -> what stands for its value in help; others are N if they are numbers, else TEXT."""
LISTS = {"no job": ("jobs",), "no key": ("keys", "list"), "no environment": ("env", "list"), "no sweep": ("sweeps",)}
"""Missing object -> the command that lists existing ones."""


class CommandGroup(TyperGroup):
    """Commands under headings, whole."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if ctx.parent is None:
            if args == ["version"] and not ctx.resilient_parsing:
                _print_version(True)
            return super().resolve_command(ctx, as_ours(args))
        word = BELOW.get(args[0], "") if args else ""
        return super().resolve_command(ctx, [word, *args[1:]] if word in self.commands else args)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        left = {name: self.commands[name] for name in self.list_commands(ctx)}
        headings = {title: names.split() for title, names in HEADINGS.items()} if ctx.parent is None else {}
        for title, names in {**headings, "Commands": list(left)}.items():
            rows = [(name, left.pop(name).get_short_help_str(WHOLE)) for name in names if name in left]
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except USAGE_ERROR as error:
            error.message = error.message.replace(VALIDATOR, "")
            if not asks_for_json():
                raise
            print_error(error.format_message(), error.exit_code)
            raise typer.Exit(error.exit_code) from None


class Command(TyperCommand):
    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return [piece.replace("{", "").replace("}", "") for piece in super().collect_usage_pieces(ctx)]


def _with_output(command: Callable[..., Any]) -> Callable[..., Any]:
    """Return a command that has `--json` with `-o` too."""
    signature = inspect.signature(command, eval_str=True)
    if "as_json" not in signature.parameters:
        return command

    @functools.wraps(command)
    def formatted(*, output: str | None, **options: Any) -> Any:
        OUTPUT.set(output or "table")
        if output is not None:
            options["as_json"] = output in ("json", "yaml")
        if has_csv:
            options["as_csv"] = output == "csv"
        return command(**options)

    has_csv = "as_csv" in signature.parameters
    kind = OutputWithCsv if has_csv else Output
    own = inspect.Parameter("output", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind)
    parameters = {**signature.parameters, "output": own}
    parameters.pop("as_csv", None)
    formatted.__signature__ = signature.replace(parameters=list(parameters.values()))  # type: ignore[attr-defined]
    formatted.__annotations__ = {name: one.annotation for name, one in parameters.items()}
    return formatted


def present(app: typer.Typer) -> None:
    """Give all commands of an application, and of those below it, this look."""
    app.info.cls = CommandGroup
    for command in app.registered_commands:
        command.cls = Command
        if command.callback is not None:
            command.callback = _with_output(command.callback)
    for group in app.registered_groups:
        group.cls = CommandGroup
        if group.typer_instance is not None:
            group.typer_instance.rich_markup_mode = None
            present(group.typer_instance)


def name_values(command: Any) -> None:
    """`--port PORT`, `--limit N`, `JOB` in the place of types."""
    for parameter in command.params:
        if parameter.param_type_name == "argument":
            parameter.display_type_rich = lambda ctx: None
        elif parameter.metavar is None and not parameter.is_flag:
            number = parameter.type_descriptor.annotation in (int, float)
            parameter.metavar = WORDS.get(parameter.name) or ("N" if number else "TEXT")
    for below in getattr(command, "commands", {}).values():
        name_values(below)


def _print_version(shown: bool) -> None:
    if shown:
        sys.stdout.write(f"opentinker {__version__}\n")
        raise typer.Exit


def root(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version.")
    ] = False,
) -> None:
    """Reinforcement learning as a service for LLM agents."""


def help_(
    ctx: typer.Context,
    command: Annotated[list[str] | None, typer.Argument(metavar="COMMAND", help="As it is typed.")] = None,
) -> None:
    """Show the help of a command; without one, all commands."""
    top = ctx.find_root()
    top.command.main([*(command or []), "--help"], prog_name=top.info_name)


def asks_for_json() -> bool:
    words = sys.argv[1:]
    formats = [value for option, value in pairwise(words) if option in ("-o", "--output")]
    joined = [
        word.removeprefix("--output=").removeprefix("-o") for word in words if word.startswith(("--output=", "-o"))
    ]
    return "--json" in words or bool({"json", "yaml"} & {*formats, *joined})


def print_error(message: str, code: int, **more: Any) -> None:
    """A line of JSON on stdout, as the last thing there."""
    said = {"error": message, "exit_status": code, **{name: value for name, value in more.items() if value}}
    sys.stdout.write(orjson.dumps(said, default=str).decode() + "\n")


def fail(error: OpenTinkerError) -> NoReturn:
    """Print what is wrong, as text on stderr or with --json as an object on stdout, and exit: 2 for a spec, else 1."""
    code, message = (2 if isinstance(error, SpecError) else 1), str(error)
    if isinstance(error, NotFound):
        lists = [command for what, command in LISTS.items() if what in message]
        message += f"; {as_typed(*lists[0])} lists yours" if lists and "lists" not in message else ""
    mistakes = getattr(error, "mistakes", [])
    if asks_for_json():
        print_error(message, code, status=getattr(error, "status", None), mistakes=mistakes)
    elif isinstance(error, SpecError):
        from opentinker.cli.specs import print_mistakes

        print_mistakes(error)
    else:
        sys.stderr.write(f"error: {message}\n")
    sys.exit(code)
