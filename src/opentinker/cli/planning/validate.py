"""`opentinker validate`: checks a spec before it is submitted."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from opentinker.cli.common import AsJson, Url, client, print_json, print_table, running_server, say
from opentinker.cli.specs import Changes, SpecFile, import_from_here, print_mistakes, read_spec, read_sweep
from opentinker.shared.types.core import ENDLESS
from opentinker.shared.types.errors import SpecError

if TYPE_CHECKING:
    from opentinker.shared.api_types import Check, JobEstimate
    from opentinker.shared.spec import JobSpec

NO_ESTIMATE = (
    "no estimate: no job like it has run here, and nothing else tells how long it takes; `opentinker plan` takes "
    "durations from you"
)


def validate(
    path: SpecFile,
    quick: Annotated[bool, typer.Option("--quick", help="Check the file alone: ask no server, play nothing.")] = False,
    here: Annotated[bool, typer.Option("--here", help="Check on this machine, even if a server runs.")] = False,
    changes: Changes = None,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Check a job spec without submitting it. Exit status 2 if something is wrong.

    Check the spec, model, chat template, rows, an episode of its environment, and whether the needed workers exist; on
    the server, if one runs, else on this machine.
    """
    from opentinker.sdk.spec_location import with_places
    from opentinker.shared.spec import parse_spec
    from opentinker.shared.spec.sweeps.children import parse_sweep

    server = None if quick or here else url or running_server()
    try:
        swept = read_sweep(path, changes=changes)
        sweep = None if swept is None else parse_sweep(swept)
        data = read_spec(path, changes=changes, server=server) if sweep is None else sweep.first_job
        spec = parse_spec(data)
    except SpecError as error:
        if not as_json:
            raise
        print_json({"valid": False, "mistakes": error.mistakes})
        raise typer.Exit(2) from None
    found: dict[str, Any] = {"valid": True, "mistakes": [], "checks": []}
    if not quick:
        found = looked_at(data, server, path.parent, data if swept is None else swept)
        found["mistakes"] = with_places(found["mistakes"], path)
        found["checks"] = [_with_command(check, path.read_text()) for check in found["checks"]]
    if as_json:
        print_json({**found, "spec": spec.model_dump(mode="json")})
    elif found["mistakes"]:
        print_mistakes(SpecError(found["mistakes"]))
    else:
        rows = [[check["result"], check["what"], check["found"], check["hint"]] for check in found["checks"]]
        if rows:
            print_table(["", "what", "found", "what to do"], rows, empty="")
        if found["valid"]:
            say(f"ok: {spec.name}, {spec.kind} of {spec.model.base} on {_subject(spec)}")
            if sweep is not None:
                say(f"a sweep of {sweep.size} by {sweep.table.method}; the first one was checked")
            if found.get("estimate"):
                say(in_words(found["estimate"]))
            elif found.get("server") is not None and spec.kind not in ENDLESS:
                say(NO_ESTIMATE)
    if not found["valid"]:
        raise typer.Exit(2)


def in_words(estimate: JobEstimate) -> str:
    from opentinker.cli.views.watch import duration

    each = " each" if estimate["jobs"] > 1 else ""
    cost = "" if estimate["cost"] is None else f", {estimate['cost']:,.2f} {estimate['currency']}"
    gpus = f", {estimate['gpu_s'] / 3600:,.3g} GPU hours" if estimate["gpu_s"] else ""
    hours = f"{estimate['worker_s'] / 3600:,.3g} worker hours{gpus}{cost}"
    return f"estimate: {duration(estimate['seconds'])} of running{each}, {hours}: {estimate['basis']}"


def looked_at(data: dict[str, Any], server: str | None, beside: Path, whole: dict[str, Any]) -> dict[str, Any]:
    """By the server at this URL, else here. A prompt that the server cannot render is rendered here, if that can be.
    `data`: a job, of a sweep its first one; `whole`: what would be submitted."""
    import asyncio

    from opentinker.local import validate_local
    from opentinker.sdk.inputs import with_whole_paths
    from opentinker.shared.data.dry_run import NOT_LOOKED_AT, prompt
    from opentinker.shared.data.dry_run_policies import of_policies
    from opentinker.shared.spec import parse_spec
    from opentinker.shared.types.core import Message

    import_from_here()
    spec = parse_spec(with_whole_paths(data, beside))
    if server is None:
        checks = asyncio.run(validate_local.inspect(spec))
        return {"valid": not _any_bad(checks), "mistakes": [], "checks": checks, "estimate": None, "server": None}
    with client(server) as api:
        found = api.validate(whole, beside=beside)
    messages = [Message(role=said["role"], content=said["content"]) for said in found["messages"]]
    checks = []
    for check in found["checks"]:
        rendered = check["what"] != "prompt" or not check["found"].startswith(NOT_LOOKED_AT)
        checks += [check] if rendered else of_policies(spec, lambda own: prompt(own, messages))
    valid = found["valid"] and not _any_bad(checks)
    known = {"mistakes": found["mistakes"], "estimate": found["estimate"], "server": server}
    return {"valid": valid, "checks": checks, **known}


def _with_command(check: Check, text: str) -> Check:
    """Return the check with the command at the head of the spec that makes what does not exist, if there is one."""
    from opentinker.sdk.spec_location import command_for

    made = command_for(check["found"], text)
    return check if made is None else {**check, "hint": f"make it with: {made}"}


def _any_bad(checks: list[Check]) -> bool:
    return any(check["result"] == "bad" for check in checks)


def _subject(spec: JobSpec) -> str:
    if spec.kind in ("inference", "tinker"):
        workers = spec.resources.rollout_workers
        trainer = "a place in a shared trainer, " if spec.kind == "tinker" else ""
        return f"{trainer}{workers} rollout worker{'s' if workers > 1 else ''}, on demand"
    if spec.kind == "eval":
        return f"{spec.environment.name}, {spec.evaluation.total} episodes"
    if spec.data is None:
        batch = spec.algorithm.group_size * spec.algorithm.groups_per_batch
        return f"{spec.environment.name}, {spec.train.steps} steps of {batch} trajectories"
    length = f"{spec.data.epochs} epochs" if spec.data.epochs else f"{spec.train.steps} steps"
    return f"{spec.data.path}, {length} in batches of {spec.data.batch_size} rows"
