"""`opentinker env add harbor:PATH` and `opentinker env check harbor:NAME`: Harbor tasks on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from opentinker.cli.common import AsJson, complain, print_json, print_table, say
from opentinker.shared.types.errors import plural

if TYPE_CHECKING:
    from opentinker.local.harbor_check import SetReport, TaskReport
    from opentinker.shared.api_types import EnvironmentReport

PREFIX = "harbor:"


def add(
    source: Annotated[
        str,
        typer.Argument(
            metavar="harbor:PATH", help="A Harbor task, a folder of tasks, or an archive (.tar, .tar.gz) of either."
        ),
    ],
    name: Annotated[str | None, typer.Option(help="Name of the set; default: that of the folder or archive.")] = None,
    as_json: AsJson = False,
) -> None:
    """Add Harbor tasks for the env workers of this machine: read them strictly and build their images."""
    from opentinker.local.harbor_check import add_tasks

    if not source.startswith(PREFIX):
        raise typer.BadParameter(f"{source!r:.100} is not of the form harbor:PATH", param_hint="harbor:PATH")
    path = Path(source.removeprefix(PREFIX))
    if not path.exists():
        raise typer.BadParameter(f"there is no {path}", param_hint="harbor:PATH")
    added = add_tasks(path, name, (lambda _: None) if as_json else (lambda task: say(f"  {task}")))
    if as_json:
        print_json({**msgspec.to_builtins(added.set), "built": added.built})
        return
    say(f"added: {plural(len(added.set.tasks), 'task')} as {added.set.name}, {plural(added.built, 'image')} built")
    say(f'to play them: [environment] name = "harbor", config = {{ tasks = "{added.set.name}" }}')
    say(f"to check them: opentinker env check harbor:{added.set.name}")


def check(given: str, as_json: bool) -> EnvironmentReport:
    """Check a set, or one task of it: `harbor:NAME` or `harbor:NAME/TASK`. Return what the page shows of it."""
    from opentinker.local.harbor_check import check_tasks

    name, _, only = given.removeprefix(PREFIX).partition("/")
    report = check_tasks(name, only, (lambda _: None) if as_json else (lambda one: say(_line(one))))
    if as_json:
        print_json({"errors": report.errors, "medians": _medians(report), **msgspec.to_builtins(report)})
    else:
        _show(report)
    return {
        "environment": given, "verdict": _verdict(report), "errors": report.errors, "advice": _advice(report),
        "facts": {title: f"{_number(report.median(field))} ms (median)" for field, title in MEASURED.items()},
        "transcript": "", "columns": list(COLUMNS), "rows": _rows(report),
    }  # fmt: skip


MEASURED = {
    "start_ms": "start", "warm_start_ms": "warm start", "command_ms": "command", "verify_ms": "verifier",
}  # fmt: skip


def _medians(report: SetReport) -> dict[str, float | None]:
    return {field: report.median(field) for field in (*MEASURED, "written_kb")}


def _line(one: TaskReport) -> str:
    return f"  {one.task}: {'; '.join(one.errors) or 'ok'}"


COLUMNS = (
    "task", "solution", "nothing", "equal starts", "verifier", "start ms", "warm ms", "command ms", "verify ms",
    "left running",
)  # fmt: skip


def _rows(report: SetReport) -> list[list[str]]:
    return [
        [
            one.task, _number(one.solution), _number(one.nothing), _number(one.equal_resets),
            " ".join(map(_number, one.verifier_rewards)), _number(one.start_ms), _number(one.warm_start_ms),
            _number(one.command_ms), _number(one.verify_ms), _number(one.left_running),
        ]
        for one in report.tasks
    ]  # fmt: skip


def _advice(report: SetReport) -> list[str]:
    return [f"{one.task}: {line}" for one in report.tasks for line in one.advice]


def _verdict(report: SetReport) -> str:
    failed = sum(bool(one.errors) for one in report.tasks)
    return f"{failed} of {plural(len(report.tasks), 'task')} cannot be trained yet" if failed else "ready for training"


def _show(report: SetReport) -> None:
    print_table(COLUMNS, _rows(report), empty="no tasks")
    for line in _advice(report):
        say(f"advice: {line}")
    for line in report.errors:
        complain(f"error: {line}")
    figures = ", ".join(f"{title} {_number(report.median(field))} ms" for field, title in MEASURED.items())
    say(f"median {figures}")
    say(_verdict(report))


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:g}"
