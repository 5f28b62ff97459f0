"""The published client of inference jobs.

scheduler = InferenceSchedulerClient(url="http://127.0.0.1:8080")
job = scheduler.submit_inference_job(model_path="models/mine")
results = run_inference(vllm_server_url=job["vllm_server_url"], data_path="rows.jsonl", game_class=MyGame)
scheduler.complete_job(job["job_id"])
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping
from typing import Any

from opentinker.client.sync import Client
from opentinker.client.utils.utils import say, tolerant_merge_dicts
from opentinker.sdk.http import ApiError
from opentinker.sdk.job_text import on_one_line
from opentinker.shared.types.core import JobState

API_KEY = "OPENTINKER_API_KEY"
STATES = {
    "queued": "QUEUED",
    "starting": "STARTING",
    "running": "RUNNING",
    "paused": "QUEUED",  # the published client knows no other state of a job that has no workers and will go on
    "succeeded": "COMPLETED",
    "failed": "FAILED",
    "cancelled": "CANCELLED",
}
"""Our states by their published names."""
MEMORY = 0.9
HURRY_S = 10.0
A_GPU_PER_RANK = (
    "an engine has one GPU for each rank of tensor_parallel_size; for more requests at once give the job more engines: "
    'opentinker={"resources": {"rollout_workers": 2}}'
)


def one_url(scheduler_url: str | None, url: str | None) -> str | None:
    """`url` and `scheduler_url` mean the same. Raises ValueError if both are given and differ."""
    if scheduler_url is not None and url is not None and scheduler_url != url:
        raise ValueError(f"url = {url!r} and scheduler_url = {scheduler_url!r} mean the same: give one of them")
    return url or scheduler_url


def check_tokenizer(model_path: str | None, tokenizer_path: str | None) -> None:
    """Raises ValueError for another tokenizer than the model's own."""
    if model_path is not None and tokenizer_path not in (None, model_path):
        raise ValueError(f"tokenizer_path = {tokenizer_path!r}: the tokenizer is that of the model, leave it out")


class Scheduler:
    """`url` and `scheduler_url` mean the same. `api_key` is sent with every request of this process."""

    def __init__(
        self,
        scheduler_url: str | None = None,
        api_key: str | None = None,
        timeout: float = 600.0,
        poll_interval: float = 2.0,
        *,
        url: str | None = None,
    ) -> None:
        if api_key:
            os.environ[API_KEY] = api_key
        self.timeout, self.poll_interval = timeout, poll_interval
        self._client = Client(one_url(scheduler_url, url), wait_s=timeout)
        self.scheduler_url = self._client.url

    def hurry(self) -> None:
        """The program is ending: from now on a server that is away is waited for HURRY_S at most."""
        self._client.http.wait_s = min(self._client.http.wait_s, HURRY_S)


class InferenceSchedulerClient(Scheduler):
    """Submits inference jobs."""

    def submit_inference_job(
        self,
        model_path: str,
        tokenizer_path: str | None = None,
        tensor_parallel_size: int = 1,
        num_gpus: int | None = None,
        gpu_memory_utilization: float = MEMORY,
        max_model_len: int | None = None,
        trust_remote_code: bool = True,
        *,
        opentinker: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """job_id, status, message and vllm_server_url (an OpenAI-compatible server: its routes begin with /v1), once
        the job answers. Raises TimeoutError after `timeout`, RuntimeError if it fails or is cancelled. A job that is no
        longer waited for, by Ctrl-C too, is cancelled.

        With `tensor_parallel_size` above 1 the job's rollout workers must have as many GPUs. An engine manages their
        memory itself: another `gpu_memory_utilization` causes a warning that it has no effect. No code of a model
        directory is run, regardless of `trust_remote_code`. `opentinker` overrides any part of the job's spec:
        {"resources": {"rollout_workers": 2}, "serving": {"idle_s": 600}}.
        """
        if num_gpus not in (None, tensor_parallel_size):
            raise ValueError(f"num_gpus = {num_gpus}: {A_GPU_PER_RANK}")
        check_tokenizer(model_path, tokenizer_path)
        if gpu_memory_utilization != MEMORY:
            say(f"gpu_memory_utilization = {gpu_memory_utilization} means nothing here: workers share out their memory")
        spec: dict[str, Any] = {
            "name": os.path.basename(model_path.rstrip("/")) or model_path,
            "kind": "inference",
            "model": {"base": model_path},
        }
        if tensor_parallel_size != 1:
            spec["resources"] = {"rollout_gpus": tensor_parallel_size}
        if max_model_len is not None:
            spec["rollout"] = {"context_length": max_model_len}
        spec = tolerant_merge_dicts(spec, opentinker or {})
        job = str(self._client.submit(spec)["id"])
        try:
            self._until_running(job)
            return {**self.get_job_status(job), "message": "it answers", "vllm_server_url": self._url(job)}
        except BaseException as error:
            if not (isinstance(error, ApiError) and error.status is None):  # otherwise there is no one to tell
                with contextlib.suppress(ApiError):  # why it is given up says more
                    self.cancel_job(job)
            raise

    def _until_running(self, job: str) -> None:
        deadline = time.monotonic() + self.timeout
        while True:
            record = self._client.job(job)
            state = JobState(record["state"])
            if state == JobState.RUNNING:
                return
            if state.final:
                raise RuntimeError(
                    f"inference job {job} {state}: {on_one_line(record['reason']) or 'no reason was given'}"
                )
            if time.monotonic() >= deadline:
                waits = f", it waits for {record['waiting_for']}" if record["waiting_for"] else ""
                raise TimeoutError(f"inference job {job} was {state} after {self.timeout:g} s{waits}: cancelled")
            time.sleep(min(self.poll_interval, max(0.0, deadline - time.monotonic())))

    def _url(self, job: str) -> str:
        return f"{self.scheduler_url}/v1/jobs/{job}"

    def get_job_status(self, job_id: str) -> dict[str, Any]:
        job = self._client.job(job_id)
        status = {"status": STATES[job["state"]], "error_message": job["reason"] or None}
        return {**job, "job_id": job_id, **status, "vllm_server_url": self._url(job_id)}

    job_status = get_job_status

    def cancel_job(self, job_id: str) -> dict[str, Any]:
        """Cancels what is not over yet."""
        if not JobState(self._client.job(job_id)["state"]).final:
            self._client.cancel(job_id)
        return self.get_job_status(job_id)

    def complete_job(self, job_id: str) -> dict[str, Any]:
        """The job has succeeded, and its workers are free."""
        if not JobState(self._client.job(job_id)["state"]).final:
            self._client.complete(job_id)
        return self.get_job_status(job_id)
