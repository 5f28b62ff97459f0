"""The published training client. A job begins with `fit`: until then `submit_job` has only put its settings down.

    scheduler = SchedulerClient(url="http://127.0.0.1:8080")
    job = scheduler.submit_job(config=config, enable_agent_loop=True)
    env = GameEnvironment(game_class=MyGame, config=config, job_id=job["job_id"])
    client = ServiceClient(server_url=job["server_url"])
    client.set_config(config, env)
    client.fit(env, num_steps=100)

`fit` serves the environment from this process, submits the job, shows its progress and returns its last metrics. The
job lives in the service: a client that dies can be restarted with OPENTINKER_ATTACH=JOB, and continues where it was.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

from opentinker.client.settings import Settings, spec_of
from opentinker.client.sync import Client
from opentinker.client.utils.inference_client import STATES, InferenceSchedulerClient, Scheduler
from opentinker.client.utils.utils import say
from opentinker.sdk.http import ApiError
from opentinker.sdk.job_text import on_one_line
from opentinker.serve.ws_client import serve_environment
from opentinker.shared.api_types import Job, MetricPoint
from opentinker.shared.types.core import JobState
from opentinker.unsupported import refused

__all__ = ["InferenceSchedulerClient", "SchedulerClient", "ServiceClient"]

ATTACH = "OPENTINKER_ATTACH"
POLL_S = 0.5
WAIT_SAID_S = 3.0
SHOWN = {"reward/mean": "reward", "loss/policy": "loss", "mismatch/mean": "mismatch", "step_seconds": "s/step"}


class Submission:
    """Data stored by `submit_job`, and the job once `fit` has started it."""

    def __init__(self, url: str, config: Any) -> None:
        self.id = f"draft-{uuid.uuid4().hex[:12]}"
        self.url, self.config = url, config
        self.job: str | None = None
        self.over = ""


_submissions: dict[str, Submission] = {}
"""Submissions of this process, by id."""


class SchedulerClient(Scheduler):
    """Submits jobs, once `fit` says what they are."""

    def submit_job(
        self,
        config: Mapping[str, Any] | Any,
        enable_agent_loop: bool = True,
        wandb_key: str | None = None,
        num_gpus: int | None = None,
    ) -> dict[str, Any]:
        """job_id, status, message and server_url. Raises ApiError if the server is not reached within `timeout`.

        Every job here is played by agents' environments, so `enable_agent_loop` says nothing new; `num_gpus` are the
        trainer's. `wandb_key` is not sent anywhere, and a line says so.
        """
        if wandb_key:
            say("wandb_key: not used, the service sends no metrics to third parties; opentinker sink does")
        self._client.queues()  # there, and speaking to us
        submission = Submission(self.scheduler_url, config if num_gpus is None else _with_gpus(config, num_gpus))
        _submissions[submission.id] = submission
        return {
            "job_id": submission.id,
            "status": "QUEUED",
            "message": "it starts with fit()",
            "server_url": f"{self.scheduler_url}#{submission.id}",
        }

    def get_job_status(self, job_id: str) -> dict[str, Any]:
        """job_id, status, server_url, and what the service knows of the job once fit() has begun."""
        submission = _submissions.get(job_id)
        if submission is not None and submission.job is None:
            return {"job_id": job_id, "status": submission.over or "QUEUED", "server_url": f"{submission.url}#{job_id}"}
        job = self._client.job(submission.job if submission is not None and submission.job else job_id)
        return {**job, "job_id": job_id, "status": STATES[job["state"]], "error_message": job["reason"] or None}

    job_status = get_job_status

    def cancel_job(self, job_id: str) -> dict[str, Any]:
        """Cancels what is not over yet."""
        submission = _submissions.get(job_id)
        if submission is not None and submission.job is None:
            submission.over = "CANCELLED"
        else:
            real = submission.job if submission is not None and submission.job else job_id
            if not JobState(self._client.job(real)["state"]).final:
                self._client.cancel(real)
        return self.get_job_status(job_id)

    def complete_job(self, job_id: str) -> dict[str, Any]:
        """A job ends by itself here; one that was never begun is dropped, one that runs is cancelled."""
        return self.cancel_job(job_id)


class ServiceClient:
    """`server_url`: what submit_job gave, or the service's own URL. `logger_backends`: `console` or none."""

    def __init__(
        self,
        server_url: str,
        project_name: str | None = None,
        experiment_name: str | None = None,
        logger_backends: Any = None,
        **client_kwargs: Any,
    ) -> None:
        url, _, draft = server_url.partition("#")
        if draft and draft not in _submissions:
            raise ValueError(f"server_url {server_url!r} was given by submit_job in another process: submit again here")
        if odd := sorted(set(logger_backends or ()) - {"console"}):
            say(f"logger_backends {', '.join(odd)}: not used; metrics are with the job: opentinker watch JOB")
        self.url, self.project_name, self.experiment_name = url, project_name, experiment_name
        self._submission = _submissions[draft] if draft else Submission(url, None)
        self._extra = client_kwargs.get("config")
        self._args: Any = None

    def set_config(self, args: Any, env: Any) -> None:
        """`args` overlays what was submitted; what `env.get_config()` says comes on top."""
        self._args = args
        env.setup(self)

    def upload_reward_function(self, *_: Any, **__: Any) -> None:
        """Refused: rewards come from the game's step()."""
        raise NotImplementedError("upload_reward_function: rewards come from the game's step() here; put it there")

    def settings(self, env: Any) -> Settings:
        own = {} if self.experiment_name is None else {"experiment_name": self.experiment_name}
        return Settings(self._submission.config, self._extra, own, self._args, dict(env.get_config() or {}))

    def fit(
        self,
        env: Any,
        num_epochs: int | None = None,
        num_steps: int | None = None,
        save_freq: int = 100,
        test_freq: int = 50,
        validate_before_training: bool = True,
        verbose: bool = True,
        game_stats_client: Any = None,
        game_stats_log_freq: int = 1,
    ) -> dict[str, float]:
        """Train and return the last metrics. `num_steps` wins over `num_epochs` (default: one pass over the data).

        Raises RuntimeError when the job fails or is cancelled, ApiError when the
        service refuses it, with every mistake. Ctrl-C leaves the job running; it waits while its environment is not
        served.
        """
        if env.reward_function is not None:
            raise ValueError("reward_function: rewards come from the game's step() here; put it there")
        if self._submission.over:
            raise RuntimeError(f"{self._submission.id} was cancelled")
        settings = self.settings(env)
        train, validation = env.get_dataloader()
        steps = num_steps or (num_epochs or 1) * len(train)
        with ExitStack() as held:
            client = held.enter_context(Client(self.url, on_wait=say))
            attached = os.environ.get(ATTACH)
            served = held.enter_context(
                serve_environment(
                    env.environment_class(),
                    name=_served_name(client, attached),
                    concurrency=env.concurrency,
                    url=self.url,
                )
            )
            if attached is None:
                spec = spec_of(
                    settings,
                    {"name": served.environment},
                    steps=steps,
                    save_freq=save_freq,
                    test_freq=test_freq,
                    val_rows=None if validation is None else rows_of(validation),
                    first_too=validate_before_training,
                    turns=env.max_steps,
                )
                for note in settings.notes:
                    say(note)
                if unused := settings.unused():
                    say(f"settings without effect here: {', '.join(unused)}")
                attached = str(client.submit(spec)["id"])
            self._submission.job = attached
            if verbose:
                say(
                    f"job {attached} on {self.url}; if this process dies, continue with {ATTACH}={attached}, or end "
                    f"it: opentinker cancel {attached}"
                )
            return _follow(client, attached, verbose, game_stats_client, max(1, game_stats_log_freq))


def rows_of(loader: Any) -> int:
    return len(loader.dataset) if hasattr(loader, "dataset") else len(loader)


def _served_name(client: Client, job: str | None) -> str:
    """A new name, or that which the job to be attached to asks for."""
    if job is None:
        return f"fit-{uuid.uuid4().hex[:12]}"
    name = str(client.job(job)["spec"]["environment"]["name"])
    kind, _, rest = name.partition(":")
    if kind != "served":
        raise ApiError(f"job {job} plays {name!r}, which no client serves")
    return rest


def _follow(client: Client, job: str, verbose: bool, stats: Any, every: int) -> dict[str, float]:
    """Shows the job's progress, and for what it waits if that takes WAIT_SAID_S. Returns its last metrics."""
    last: dict[str, float] = {}
    after, said, since = 0, "", time.monotonic()
    while True:
        record = client.job(job)
        waits = record["waiting_for"]
        since = since if waits else time.monotonic()
        if verbose and waits not in ("", said) and time.monotonic() - since >= WAIT_SAID_S:
            said = waits
            say(f"job {job} waits for {waits}{_way_out(record, waits)}")
        for point in client.metrics(job, after):
            after = point["cursor"]
            if point["source"] == "trainer":
                last = {**last, **point["values"], "training/global_step": float(point["step"])}
                _show(point, verbose)
                if stats is not None and point["step"] % every == 0:
                    last |= {f"game/{name}": value for name, value in _numbers(stats.get_all_stats()).items()}
        if JobState(record["state"]).final:
            break
        time.sleep(POLL_S)
    if JobState(record["state"]) != JobState.SUCCEEDED:
        raise RuntimeError(f"job {job} {record['state']}: {on_one_line(record['reason']) or 'no reason was given'}")
    return last


def _show(point: MetricPoint, verbose: bool) -> None:
    values = point["values"]
    if verbose and "reward/mean" in values:
        told = [f"{title} {values[name]:.4g}" for name, title in SHOWN.items() if name in values]
        say(f"step {point['step']}: {', '.join(told)}")


def _way_out(record: Job, waits: str) -> str:
    gpus = record["spec"]["resources"]["trainer_gpus"]
    return f"; it asks for {gpus} of them by num_gpus: num_gpus=null trains without" if gpus and "GPU" in waits else ""


def _numbers(values: Any) -> dict[str, float]:
    return {name: float(value) for name, value in (values or {}).items() if isinstance(value, int | float)}


def _with_gpus(config: Any, gpus: int) -> dict[str, Any]:
    named = {name: config[name] for name in config} if hasattr(config, "keys") else dict(vars(config))
    own = dict(named.get("opentinker") or {})
    return {**named, "opentinker": {**own, "resources": {**dict(own.get("resources") or {}), "trainer_gpus": gpus}}}


HTTPTrainingClient = refused(
    "HTTPTrainingClient", "a job trains in the service, not step by step from here: ServiceClient(server_url).fit(env)"
)
