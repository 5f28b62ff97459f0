"""`opentinker sink JOB --to KIND:WHERE`: a job's metrics, as they come, into TensorBoard, MLflow, W&B or Trackio."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from opentinker.cli.common import PATIENCE_S, JobId, Url, client, complain, print_line, say
from opentinker.shared.types.core import split_part

if TYPE_CHECKING:
    from opentinker.client import Client
    from opentinker.sinks import Sink


def sink(
    job_id: JobId,
    to: Annotated[
        str, typer.Option(metavar="KIND:WHERE", help="tensorboard:DIR, mlflow:URI, wandb:PROJECT or trackio:PROJECT.")
    ],
    after: Annotated[int, typer.Option(help="Only points after this cursor, which the last run printed.", min=0)] = 0,
    url: Url = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print points and cursor as JSON at the end.")] = False,
) -> None:
    """Send a job's metrics to another tool as they come, until the job ends. Ctrl-C stops this, not the job."""
    from opentinker.sinks import open_sink

    api = client(url, patience_s=PATIENCE_S)
    opened = open_sink(to, api.job(job_id))
    sent = send(api, job_id, opened, after)
    if as_json:
        print_line(sent)
    else:
        say(f"{sent['points']} points of {job_id} are in {to}; the job is {sent['state']}")


def send(api: Client, job_id: str, opened: Sink, after: int = 0) -> dict[str, Any]:
    """Return what was sent: `points`, and the `cursor` to continue after."""
    sent: dict[str, Any] = {"job": job_id, "points": 0, "cursor": after, "state": "running"}
    try:
        for point in api.watch_metrics(job_id, after):
            opened.log(int(point["step"]), tagged(point), float(point["time"]))
            sent["points"], sent["cursor"] = sent["points"] + 1, point["cursor"]
        sent["state"] = api.job(job_id)["state"]
    except KeyboardInterrupt:
        complain(f"the job continues; resume with --after {sent['cursor']}")
    finally:
        opened.close(sent["state"])
    return sent


def tagged(point: Mapping[str, Any]) -> dict[str, float]:
    """Names are those of docs/metrics.md; of a worker, of which there may be several, under its own."""
    if split_part(point["source"])[0] in ("trainer", "validation"):
        return dict(point["values"])
    return {f"{point['source']}/{name}": value for name, value in point["values"].items()}
