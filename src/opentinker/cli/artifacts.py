"""Commands about what jobs leave: checkpoints, download, artifacts, delete, publish, unpublish, published."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from opentinker.cli.common import (
    PATIENCE_S,
    AsJson,
    JobId,
    Policy,
    Url,
    UsageError,
    ago,
    client,
    complain,
    print_found,
    print_json,
    say,
)
from opentinker.cli.results.values import MAIN, estimate_of
from opentinker.cli.shell import complete
from opentinker.cli.views.lists import say_if_cut
from opentinker.cli.views.refresh import refresh
from opentinker.shared.types.core import part_id
from opentinker.shared.types.errors import plural
from opentinker.shared.types.metric_names import opponent_of

if TYPE_CHECKING:
    from opentinker.client import Client
    from opentinker.shared.api_types import Artifact, Evaluation, RegisteredCheckpoint


LISTED = 1000
"""Checkpoints of a job whose evaluations are looked for."""

Name = Annotated[str, typer.Argument(metavar="NAME", help="Lower-case letters, digits, `.`, `_`, `-`.")]


def checkpoints(
    job_id: Annotated[
        str | None,
        typer.Argument(
            metavar="JOB", help="Job id; without one, checkpoints of all jobs.", autocompletion=complete.jobs
        ),
    ] = None,
    policy: Policy = "",
    sort: Annotated[
        str | None,
        typer.Option("--sort", metavar="METRIC", help="exact, reward/mean ..., created, step, bytes; -loss reverses."),
    ] = None,
    model: Annotated[str | None, typer.Option("--model", help="Only checkpoints of this base model.")] = None,
    project: Annotated[str | None, typer.Option("--project", help="Only checkpoints of jobs in this project.")] = None,
    tags: Annotated[list[str] | None, typer.Option("--tag", help="Only of jobs with this tag. Repeatable.")] = None,
    published: Annotated[
        bool | None, typer.Option("--published/--unpublished", help="Only checkpoints with, or without, a name.")
    ] = None,
    lora: Annotated[bool | None, typer.Option("--lora/--whole", help="Only adapters, or only whole models.")] = None,
    setting: Annotated[
        str | None, typer.Option("--setting", help="Only those evaluated in this setting, by which a METRIC sorts.")
    ] = None,
    search: Annotated[
        str | None, typer.Option("--search", help="Only those with these words in their id, job, model, tags or names.")
    ] = None,
    limit: Annotated[int | None, typer.Option("--limit", "-n", min=1, help="List this many; default 100.")] = None,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Refresh the list until Ctrl-C.")] = False,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """List the checkpoints of a job or of all jobs, with their evaluations and, of all jobs, their lineage."""
    options: dict[str, object] = {
        "--sort": sort,
        "--model": model,
        "--project": project,
        "--tag": tags,
        "--published": published,
    }
    options |= {"--lora": lora, "--setting": setting, "--search": search, "--limit": limit}
    if job_id is not None and (given := [name for name, value in options.items() if value not in (None, [])]):
        raise UsageError(f"{given[0]} is for the list of all jobs' checkpoints: leave JOB out")
    if policy and job_id is None:
        raise UsageError("--policy needs a JOB")
    weights: Literal["lora", "whole"] | None = None if lora is None else "lora" if lora else "whole"
    api = client(url, patience_s=PATIENCE_S if watch else 2.0)

    most = limit or 100

    def find(count: int = most) -> list[RegisteredCheckpoint]:
        return api.all_checkpoints(
            count,
            model=model,
            project=project,
            tags=tags,
            published=published,
            weights=weights,
            sort=sort,
            setting=setting,
            search=search,
        )

    def show(found: list[RegisteredCheckpoint]) -> None:
        empty = "no such checkpoint" if any(options.values()) else "no checkpoint yet"
        _print_all_checkpoints(found, sort or "", as_json, empty)

    if job_id is not None:
        show_own = partial(_print_checkpoints_of, api, job_id, policy, as_json)
        refresh(show_own) if watch else show_own()
        return
    found = find(most + 1)
    say_if_cut(found, most, "checkpoint")
    if not api.has_all_checkpoints():
        complain(f"of those without a name only the newest {LISTED:,} are listed; `checkpoints JOB` has all of a job")
    refresh(lambda: show(find())) if watch else show(found[:most])


def _print_all_checkpoints(found: Sequence[RegisteredCheckpoint], sort: str, as_json: bool, empty: str) -> None:
    rows = [
        [
            one["checkpoint"],
            one["job_name"],
            ago(one["created"]),
            size_of(one["bytes"]),
            one["weights"] if one["lora_rank"] is None else f"lora, rank {one['lora_rank']}",
            ", ".join(one["published"]) or "-",
            "\n".join(_evaluated(evaluation, sort) for evaluation in one["evaluations"]) or "-",
            " > ".join(one["lineage"]),
        ]
        for one in found
    ]
    columns = ["checkpoint", "job", "created", "size", "weights", "names", "evaluations", "lineage"]
    ranks = [one.get("ranked") for one in found]  # an older server does not say it
    if first := next(filter(None, ranks), None):
        columns.insert(1, first["metric"].removeprefix("val/"))
        for row, rank in zip(rows, ranks, strict=True):
            row.insert(1, f"{rank['value']:.4g}" if rank else "-")
        if not as_json:
            say(f"by {columns[1]} on {first['setting']}; --setting chooses another")
    print_found(found, as_json, columns, rows, empty=empty)


def _print_checkpoints_of(api: Client, job_id: str, policy: str, as_json: bool) -> None:
    found = api.checkpoints(part_id(job_id, policy))
    evaluations = [one for one in api.evaluations(job_id) if one["policy"] == policy]
    listed = api.all_checkpoints(LISTED, job=job_id) if found else []
    own = [one for held in listed if held["policy"] == policy for one in held["evaluations"]]
    evaluations += [one for one in own if one.get("during_training")]
    whole: list[dict[str, Any]] = [
        {**c, "evaluations": [one for one in evaluations if one["step"] == c["step"]]} for c in found
    ]
    rows = [
        [c["step"], size_of(c["bytes"]), ago(c["created"]), "\n".join(_evaluated(one) for one in c["evaluations"])]
        for c in whole
    ]
    columns = ["step", "size", "created", "evaluations"]
    print_found(whole, as_json, columns, rows, empty="no checkpoint yet")


def games_won(values: Mapping[str, float]) -> str:
    """Return `won 75% against random, 50% against b`; empty without games."""
    rates = {who: rate for name, rate in values.items() if (who := opponent_of(name)) is not None}
    found = [f"{rate:.0%} against {who}" if who else f"{rate:.0%}" for who, rate in rates.items()]
    return f"won {', '.join(found)}" if found else ""


def _evaluated(one: Evaluation, metric: str = "") -> str:
    """`exact 0.91 (0.88 to 0.94) on gsm8k; greedy; 512 tokens, j-...`, or its state; `during training` in the place of
    the job that made it itself. `metric`: shown in the place of the main one."""
    by = "during training" if one.get("during_training") else one["job"]  # an older server does not say it
    values = one["values"]
    on = f" on {one.get('setting') or one['environment']}"  # nor the setting
    if not metric and (won := games_won(values)):
        return f"{won}{on}, {by}"
    wanted = f"val/{metric.removeprefix('-').removeprefix('val/')}"
    name = next((name for name in (wanted, *MAIN) if name in values), None)
    if name is None:
        return f"{one['state']}, {by}"
    return f"{name.removeprefix('val/')} {estimate_of(values, name)}{on}, {by}"


def download(
    job_id: Annotated[
        str,
        typer.Argument(
            metavar="JOB", help="Job id, or the name of a published checkpoint.", autocompletion=complete.jobs
        ),
    ],
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Created if missing; must be empty.")],
    step: Annotated[int | None, typer.Option(help="Checkpoint of this step; default: the newest.", min=0)] = None,
    policy: Policy = "",
    merge: Annotated[
        bool, typer.Option("--merge", help="Merge an adapter into its base model, on this machine, with peft.")
    ] = False,
    base: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="With --merge: where the base model is, if not where the job had it."),
    ] = None,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Fetch a checkpoint as a Hugging Face directory; an interrupted download resumes."""
    if base is not None and not merge:
        raise typer.BadParameter("--base needs --merge")
    path = client(url).download(part_id(job_id, policy), directory, step=step, merge=merge, base=base)
    if as_json:
        print_json({"directory": str(path)})
    else:
        say(f"{path}\nload it with: {_loader(path)}.from_pretrained({str(path)!r})")


def _loader(model: Path) -> str:
    """Return the class that loads a downloaded checkpoint: of an adapter, with the base model that it names."""
    is_adapter = (model / "adapter_config.json").exists()
    return "peft.AutoPeftModelForCausalLM" if is_adapter else "transformers.AutoModelForCausalLM"


def artifacts(
    job_id: JobId,
    into: Annotated[
        Path | None,
        typer.Option("--into", metavar="DIR", help="Download them here: all but checkpoints, or those of --only."),
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option("--only", metavar="PATH", help="With --into: only this file. Repeatable.")
    ] = None,
    policy: Policy = "",
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """List or download the files of a job: checkpoints, adapters, metrics, transcripts, logs."""
    if only and into is None:
        raise typer.BadParameter("--only needs --into")
    api = client(url)
    if into is not None:
        paths = api.download_artifacts(part_id(job_id, policy), into, only)
        print_json({"files": [str(path) for path in paths]}) if as_json else say("\n".join(map(str, paths)))
        return
    found = api.artifacts(part_id(job_id, policy))
    rows = [[entry["path"], entry["kind"], size_of(entry["bytes"]), ago(entry["created"])] for entry in found]
    print_found(found, as_json, ["path", "kind", "size", "created"], rows, empty="no files yet")
    if found and not as_json:
        say(f"{plural(len(found), 'file')}, {size_of(sum(entry['bytes'] for entry in found))}: {_kinds(found)}")


def delete(
    job_id: JobId,
    step: Annotated[int | None, typer.Option(help="Only the checkpoint of this step.", min=0)] = None,
    policy: Policy = "",
    everything: Annotated[
        bool, typer.Option("--all", help="Everything the job left; the job must have ended.")
    ] = False,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Delete one checkpoint of a job, or everything it left. What is published or in use stays."""
    if (step is None) is not everything:
        raise UsageError("say what to delete: --step STEP for one checkpoint, or --all")
    if policy and everything:
        raise UsageError("--all deletes what all policies left: leave --policy out")
    gone = client(url).delete_artifacts(part_id(job_id, policy), step)
    print_json(gone) if as_json else say(f"{size_of(gone['bytes'])} of job {job_id} deleted")


def publish(
    checkpoint: Annotated[str, typer.Argument(metavar="JOB@STEP", help="Or JOB@latest.", autocompletion=complete.jobs)],
    name: Name,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Give a checkpoint a name in your tenant, for [start], inference jobs and downloads."""
    made = client(url).publish(checkpoint, name)
    print_json(made) if as_json else say(f"{made['name']} is {made['checkpoint']}")


def unpublish(name: Name, url: Url = None, as_json: AsJson = False) -> None:
    """Remove the name of a checkpoint; its job's retention rules apply to it again."""
    gone = client(url).unpublish(name)
    print_json(gone) if as_json else say(f"{gone['name']} was {gone['checkpoint']}")


def published(url: Url = None, as_json: AsJson = False) -> None:
    """List the published checkpoints of your tenant."""
    found = client(url).published()
    rows = [[one["name"], one["checkpoint"], size_of(one["bytes"]), ago(one["created"])] for one in found]
    columns = ["name", "checkpoint", "size", "published"]
    print_found(found, as_json, columns, rows, empty="no published checkpoints")


def _kinds(found: Sequence[Artifact]) -> str:
    """`2 checkpoint (8.1 MB), 1 metrics (4.0 kB)`"""
    sizes: dict[str, list[int]] = {}
    for entry in found:
        sizes.setdefault(entry["kind"], []).append(entry["bytes"])
    return ", ".join(f"{len(of)} {kind} ({size_of(sum(of))})" for kind, of in sorted(sizes.items()))


def size_of(count: int) -> str:
    for unit, name in ((1e9, "GB"), (1e6, "MB")):
        if count >= unit:
            return f"{count / unit:.1f} {name}"
    return f"{count / 1e3:.1f} kB"
