"""A run of MLflow, found again by its id: sending a job a second time continues the same run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

AT_ONCE = 1000
"""Metrics that a server takes in one request."""
PARAMS_AT_ONCE = 100
TAG = "opentinker.job"
ENDED = {"succeeded": "FINISHED", "failed": "FAILED", "cancelled": "KILLED"}


class MLflow:
    def __init__(self, client: Any, run: str) -> None:
        self._client, self._run = client, run

    def log(self, step: int, values: Mapping[str, float], time: float) -> None:
        from mlflow.entities import Metric

        found = [Metric(name, value, int(time * 1000), step) for name, value in values.items()]
        for start in range(0, len(found), AT_ONCE):
            self._client.log_batch(self._run, metrics=found[start : start + AT_ONCE])

    def close(self, state: str) -> None:
        if state in ENDED:
            self._client.set_terminated(self._run, status=ENDED[state])


def open_sink(where: str, job: Mapping[str, Any]) -> MLflow:
    """Raises ValueError."""
    from mlflow.exceptions import MlflowException

    try:
        return _opened(where, job)
    except MlflowException as error:
        raise ValueError(str(error)) from None


def _opened(where: str, job: Mapping[str, Any]) -> MLflow:
    from mlflow.entities import Param
    from mlflow.tracking import MlflowClient

    uri, _, experiment = where.partition("#")
    client = MlflowClient(uri)
    name = experiment or "opentinker"
    known = client.get_experiment_by_name(name)
    home = client.create_experiment(name) if known is None else known.experiment_id
    runs = client.search_runs([home], filter_string=f"tags.`{TAG}` = '{job['id']}'", max_results=1)
    if runs:
        return MLflow(client, runs[0].info.run_id)
    run = client.create_run(home, tags={TAG: job["id"]}, run_name=f"{job['name']} {job['id']}").info.run_id
    settings = [Param(key, str(value)[:500]) for key, value in flat(job.get("spec") or {}).items()]
    for start in range(0, len(settings), PARAMS_AT_ONCE):
        client.log_batch(run, params=settings[start : start + PARAMS_AT_ONCE])
    return MLflow(client, run)


def flat(spec: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """`train.lr` and the like."""
    found: dict[str, Any] = {}
    for name, value in spec.items():
        found |= flat(value, f"{above}{name}.") if isinstance(value, Mapping) else {f"{above}{name}": value}
    return found
