"""Commands about job specs: spec (every field), algorithms; and how specs are read and mistakes are printed."""

from __future__ import annotations

import copy
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import orjson
import typer

from opentinker.cli.common import AsJson, as_typed, assigned, client, print_json, say
from opentinker.cli.shell import complete
from opentinker.shared.types.errors import OpenTinkerError, SpecError, described

if TYPE_CHECKING:
    from opentinker.shared.spec import JobSpec

SpecFile = Annotated[Path, typer.Argument(metavar="JOB.toml", help="The job spec, TOML or JSON.")]
FromCheckpoint = Annotated[
    str | None,
    typer.Option(
        metavar="JOB@STEP",
        help="Begin with the weights of this checkpoint (or JOB@latest, or a published name).",
        autocompletion=complete.jobs,
    ),
]
Changes = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="SETTING=VALUE", help="Change a setting of the file: train.lr=1e-4. Repeatable."),
]
WithOptimizer = Annotated[bool, typer.Option("--with-optimizer", help="Also take the state of its optimizer.")]


Steps = Annotated[int | None, typer.Option("--steps", help="Train this many steps instead of train.steps.", min=1)]


def read_spec(
    path: Path,
    from_checkpoint: str | None = None,
    with_optimizer: bool = False,
    changes: list[str] | None = None,
    steps: int | None = None,
    server: str | None = None,
) -> dict[str, Any]:
    """A valid spec as plain data, with `changes` (SETTING=VALUE), another [start] and another number of steps if they
    are given. Raises SpecError with every mistake, also with those that only the server at this URL can find."""
    from opentinker.sdk.inputs import started
    from opentinker.sdk.spec_location import located
    from opentinker.shared.spec import parse_spec
    from opentinker.shared.types.spec_text import load_spec
    from opentinker.shared.types.sweeps import is_sweep

    if with_optimizer and from_checkpoint is None:
        raise typer.BadParameter("--with-optimizer needs --from-checkpoint JOB@STEP")
    with located(path):
        data = load_spec(path)
        if not isinstance(data, dict):
            parse_spec(data)
        data = changed(data, changes or [])
        if is_sweep(data):
            options = [part for change in changes or [] for part in ("--set", change)]
            start, then = as_typed("up"), as_typed("submit", path, *options)
            raise OpenTinkerError(f"{path} is a sweep of many jobs: run `{start}`, and in another terminal `{then}`")
        data = started(data, from_checkpoint, with_optimizer)
        if steps is not None:
            data = of_length(data, steps)
        try:
            check_environment(parse_spec(data))
        except SpecError as error:
            more = [] if server is None else mistakes_at(server, data, path.parent)
            known = {(one["field"], one["problem"]) for one in error.mistakes}
            unknown = [one for one in more if (one["field"], one["problem"]) not in known]
            raise SpecError([*error.mistakes, *unknown]) from None
    return dict(data)


def mistakes_at(server: str, data: dict[str, Any], beside: Path) -> list[Any]:
    """Return the mistakes that a server finds in a spec: also in seats, and in checkpoints that it names. An
    empty list if it cannot be asked (no answer, or it refuses the key): local mistakes are reported all the same."""
    try:
        with client(server) as api:
            return [*api.validate(data, beside=beside, scope="queue")["mistakes"]]
    except OpenTinkerError:
        return []


def read_sweep(
    path: Path,
    from_checkpoint: str | None = None,
    with_optimizer: bool = False,
    changes: list[str] | None = None,
    steps: int | None = None,
) -> dict[str, Any] | None:
    """The same of a sweep, as it is submitted; None if the file, with its changes, is none."""
    from opentinker.sdk.inputs import started
    from opentinker.sdk.spec_location import located
    from opentinker.shared.spec.sweeps.children import parse_sweep
    from opentinker.shared.types.spec_text import load_spec
    from opentinker.shared.types.sweeps import is_sweep

    with located(path):
        data = load_spec(path)
        if not isinstance(data, dict) or not is_sweep(data := changed(data, changes or [])):
            return None
        data = data if steps is None else changed(data, [f"train.steps={steps}"])
        data = started(data, from_checkpoint, with_optimizer)
        parse_sweep(data)
    return dict(data)


def of_length(spec: dict[str, Any], steps: int) -> dict[str, Any]:
    """The spec with another number of steps; a warm-up that would be longer ends with them. Raises SpecError."""
    from opentinker.shared.spec import parse_spec

    if (kind := spec.get("kind", "rl")) in ("eval", "inference", "tinker"):
        instead = ": set evaluation.episodes" if kind == "eval" else ""
        raise typer.BadParameter(f"--steps does not apply to kind = {kind!r}{instead}")
    longer = changed(spec, [f"train.steps={steps}"])
    if isinstance(warmup := longer["train"].get("warmup_steps"), int):
        longer["train"]["warmup_steps"] = min(warmup, steps)
    if isinstance(data := longer.get("data"), dict):
        data.pop("epochs", None)
    parse_spec(longer)
    return longer


def changed(spec: Mapping[str, Any], changes: list[str]) -> dict[str, Any]:
    """The spec with other values of some settings, each named by its path: `train.lr=1e-4`."""
    new = copy.deepcopy(dict(spec))
    for change in changes:
        path, value = assigned(change)
        *tables, name = path.split(".")
        table = new
        for part in tables:
            table = table.setdefault(part, {})
            if not isinstance(table, dict):
                raise typer.BadParameter(f"--set {change}: {part} is not a table of the spec")
        table[name] = value
    return new


def import_from_here() -> None:
    """Environments of one's own are modules of the directory in which the command is typed."""
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)


def demands(environment: str) -> tuple[float, bool, str]:
    """Return the cost of a session for an env worker, and whether it blocks; and the reason if its class cannot be
    inspected here: then it is assumed to cost 1 and not to block."""
    from opentinker.envs.registry import find

    if environment.startswith(("served:", "upload:")):
        return 1.0, False, "it is not on this machine"
    import_from_here()
    try:
        found = find(environment, modules=True)
    except SpecError as error:
        return 1.0, False, "; ".join(str(mistake["problem"]) for mistake in error.mistakes)
    except Exception as error:  # noqa: BLE001 - a module is its author's code: any exception is the answer
        return 1.0, False, f"its module raised {type(error).__name__}: {error}"
    return found.cost, found.blocking, ""


def check_environment(spec: JobSpec, *, settings: bool = True) -> None:
    """Built-in environments can be checked here, by name alone or with their settings; `module:Class` ones, and
    programs, are known to the server alone. Raises SpecError."""
    from opentinker.envs.registry import OPERATORS, check, find

    name = spec.environment.name
    if name and ":" not in name and name not in OPERATORS:
        if settings:
            check(name, spec.environment.config, elsewhere=True)
        else:
            find(name)


def print_mistakes(error: SpecError) -> None:
    count = len(error.mistakes)
    sys.stderr.write(f"error: {count} mistake{'s' if count != 1 else ''}\n")
    for mistake in error.mistakes:
        sys.stderr.write(f"  {described(mistake)}\n")


def show_spec(
    as_json: Annotated[bool, typer.Option("--json", help="As a JSON schema.")] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="As the page in docs/.")] = False,
) -> None:
    """Print every field of a job spec: type, default, meaning."""
    from opentinker.shared.spec.sweeps.children import spec_schema

    schema = spec_schema()
    if as_json:
        print_json(schema)
        return
    if markdown:
        say(page(schema))
        return
    say("A field without a default must be given.\n")
    for section, fields in sections(schema):
        say(f"[{section}]" if section else "# at the top of the file")
        for name, kind, default, meaning in fields:
            value = f" = {default}" if default is not None else ""
            say(f"  {name}{value}")
            say(f"      {kind}" + (f". {meaning}" if meaning else ""))
        say("")


def page(schema: dict[str, Any]) -> str:
    """docs/job-spec.md."""
    lines = [
        "# The job spec",
        "",
        "Made by `make docs` from `shared/spec/`. A field without a default must be given.",
    ]
    for section, fields in sections(schema):
        lines += ["", f"## [{section}]" if section else "## At the top of the file", ""]
        lines += ["| field | type | default | meaning |", "| --- | --- | --- | --- |"]
        for name, kind, default, meaning in fields:
            cells = [f"`{name}`", kind, f"`{default}`" if default is not None else "", meaning]
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines)


def sections(schema: dict[str, Any]) -> list[tuple[str, list[tuple[str, str, str | None, str]]]]:
    """Tables of the spec in order, each with its fields: name, type, default (None: required), meaning."""
    found: list[tuple[str, list[tuple[str, str, str | None, str]]]] = []

    def walk(section: str, table: dict[str, Any], *, alone: bool = False) -> None:
        """`alone`: its own tables are described elsewhere."""
        fields: list[tuple[str, str, str | None, str]] = []
        found.append((section, fields))
        for name, field in table["properties"].items():
            inner = _table(field, schema)
            path = f"{section}.{name}" if section else name
            if inner is not None and not alone and field.get("default", {}) is not None:
                walk(path, inner)
                continue
            default = (
                toml_of({} if alone and inner and field["default"] else field["default"])
                if "default" in field
                else None
            )
            meaning = " ".join(str(field.get("description", "")).split())
            fields.append((name, kind_of(field, schema), default, meaning))
            if alone:
                continue
            if inner is not None:
                walk(path, inner)
            elif (named := _table_by_name(field, schema)) is not None:
                walk(f"{path}.NAME", named, alone=True)
            elif (each := _table(field.get("items", {}), schema)) is not None:
                walk(f"[{path}]", each)

    walk("", schema)
    return found


def _table_by_name(field: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any] | None:
    """The table that a field holds under each of its names, if it does."""
    inside = [field.get("additionalProperties"), *field.get("patternProperties", {}).values()]
    return next((table for one in inside if isinstance(one, dict) and (table := _table(one, schema))), None)


def _table(field: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any] | None:
    """The table that a field holds, if it holds one."""
    for option in [field, *field.get("anyOf", [])]:
        if "$ref" in option:
            table: dict[str, Any] = schema["$defs"][option["$ref"].rpartition("/")[2]]
            if "properties" in table:
                return table
    return None


def kind_of(field: dict[str, Any], schema: dict[str, Any]) -> str:
    if "anyOf" in field:
        return " or ".join(kind_of(option, schema) for option in field["anyOf"] if option.get("type") != "null")
    if "$ref" in field:
        return "table"
    if "enum" in field or "const" in field:
        return " | ".join(toml_of(value) for value in field.get("enum", [field.get("const")]))
    kind = {"array": "list", "object": "table"}.get(field.get("type", ""), str(field.get("type", "any")))
    if "items" in field and "$ref" in field["items"]:
        kind += " of tables"
    elif "items" in field and "type" in field["items"]:
        kind += f" of {field['items']['type']}s"
    signs = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
    limits = [f"{sign} {field[key]}" for key, sign in signs.items() if key in field]
    limits += [f"matching `{field['pattern']}`"] if "pattern" in field else []
    return " ".join([kind, ", ".join(limits)]).strip()


def toml_of(value: Any) -> str:
    import orjson

    return "none" if value is None else orjson.dumps(value).decode()


def show_algorithms(
    name: Annotated[str | None, typer.Argument(metavar="PRESET", help="Show this preset with all its values.")] = None,
    as_json: AsJson = False,
) -> None:
    """Print the presets of `[algorithm] name`: what each one is made of, to be overridden field by field."""
    from opentinker.shared.spec import algorithm_parts

    if name is not None and name not in algorithm_parts.PRESETS:
        raise typer.BadParameter(f"there is no preset {name!r}; there are: {', '.join(algorithm_parts.PRESETS)}")
    described = [algorithm_parts.describe(preset) for preset in ([name] if name else algorithm_parts.PRESETS)]
    if as_json:
        print_json(described[0] if name else described)
        return
    for preset in described:
        say(f"{preset['name']}: {preset['meaning']} ({preset['source']})")
        values = preset["values"] if name else {part: preset["values"][part] for part in algorithm_parts.PARTS}
        for field, value in values.items():
            if value is not None:
                choices = algorithm_parts.PARTS.get(field, {})
                meaning = f"    # {choices[value].meaning}" if choices else ""
                say(f"  {field} = {orjson.dumps(value).decode()}{meaning}")
