"""A fuzz of the whole API while jobs run: no answer is a 5xx, no worker is lost, another tenant's job goes on.

    FUZZ_REQUESTS=20000 SEED=20261122 pytest -m nightly tests/nightly/attacks/test_fuzz_jobs.py -s

A third of the requests is made of the OpenAPI document, a third is bytes with spoilt parts on a socket, a third is
specs that are wrong somewhere or at the edge of what is allowed: what is taken runs, and is cancelled when others wait.
"""

from __future__ import annotations

import asyncio
import copy
import json
import os
import random
import re
import time
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import requests
import schemathesis
from schemathesis import GenerationMode

from opentinker.shared.spec import JobSpec
from opentinker.shared.types.core import JobState
from tests.conftest import Figure, until
from tests.nightly.attacks.test_fuzz import SEED, bent, run_cases, say, spoilt
from tests.support.api import OPERATOR, bearing, new_key_of
from tests.support.cluster import Cluster, toy_cluster
from tests.support.factories import make_spec

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(4 * 3600)]
REQUESTS = int(os.environ.get("FUZZ_REQUESTS", "20000"))
MOST_LIVE = 4
"""Jobs of the fuzz at a time; the oldest is cancelled for the next."""
WATCHED_S = 20.0
"""The other tenant's job is watched for so long before the first request."""
STEP_S = 0.25
LEAST_SHARE = 0.5
"""Of its steps per second, on a machine that has the fuzz itself to do."""
ASKERS = 8
LONGEST_S = 60.0
"""Env workers may be asked about an environment first, and have all that runs to do."""


@dataclass
class Fuzz:
    url: str
    port: int
    spec: dict[str, Any]
    job: str
    """Of the asker's own tenant, and cancelled."""
    chance: random.Random = field(default_factory=lambda: random.Random(SEED))
    statuses: Counter[int] = field(default_factory=Counter)
    broken: list[str] = field(default_factory=list)
    live: deque[str] = field(default_factory=deque)
    made: int = 0

    def note(self, status: int, what: str) -> None:
        self.statuses[status] += 1
        if status >= 500:
            self.broken.append(f"{status}: {what[:1500]}")

    def cases(self, count: int) -> None:
        """Blocking: made of the OpenAPI document."""
        session = requests.Session()
        session.headers["Authorization"] = f"Bearer {OPERATOR}"
        document = session.get(f"{self.url}/openapi.json", timeout=LONGEST_S).json()
        every: Any = schemathesis.openapi.from_dict(document).get_all_operations()
        operations = [result.ok() for result in every]

        def ask(case: Any, at: int) -> None:
            if "id" in case.path_parameters and at % 2:
                case.path_parameters["id"] = self.job
            response = case.call(base_url=self.url, session=session, timeout=LONGEST_S, stream=False)
            self.note(response.status_code, case.as_curl_command())

        for operation in operations:
            for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
                run_cases(operation, mode, count // (2 * len(operations)) + 1, ask)

    async def sockets(self, count: int) -> None:
        for _ in range(count):
            text = spoilt(self.job, self.chance)
            try:
                answer, _ = await say(self.port, text, LONGEST_S)
            except TimeoutError:
                self.broken.append(f"hangs: {text[:1500]!r}")
                continue
            found = re.findall(rb"(?:\A|\r\n\r\n|[\]}])HTTP/1\.[01] (\d{3}) ", answer)
            for status in found or [b"0"]:
                self.note(int(status), repr(text))

    async def specs(self, count: int, session: aiohttp.ClientSession) -> None:
        for _ in range(count):
            spec = bent(self.spec, self.chance) if self.chance.random() < 0.5 else self.at_an_edge()
            path = self.chance.choice(("/v1/jobs", "/v1/jobs", "/v1/validate"))
            async with session.post(self.url + path, data=json.dumps(spec)) as response:
                self.note(response.status, json.dumps(spec))
                if response.status == 201:
                    self.made += 1
                    self.live.append((await response.json())["id"])
            while len(self.live) > MOST_LIVE:
                async with session.post(f"{self.url}/v1/jobs/{self.live.popleft()}/cancel") as response:
                    self.note(response.status, "cancel")

    def at_an_edge(self) -> dict[str, Any]:
        """One or two numbers are the smallest or the largest that the field allows."""
        spec = copy.deepcopy(self.spec)
        for _ in range(self.chance.choice((1, 1, 2))):
            *parts, last, number = self.chance.choice(EDGES)
            inner = spec
            for part in parts:
                inner = inner.setdefault(part, {})
                if not isinstance(inner, dict):
                    break
            else:
                inner[last] = number
        if "validation" in spec:
            spec["validation"].setdefault("every", 1)
        return spec


def edges(schema: Any, definitions: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Names that lead to a number of the spec, and one that it may be."""
    if "$ref" in schema:
        schema = definitions[schema["$ref"].rpartition("/")[2]]
    if schema.get("type") in ("integer", "number"):
        for name, beyond in (("maximum", 0), ("exclusiveMaximum", -1), ("minimum", 0), ("exclusiveMinimum", 1)):
            if name in schema:
                yield (*path, schema[name] + beyond)
    for name, inner in schema.get("properties", {}).items():
        yield from edges(inner, definitions, (*path, name))
    for inner in schema.get("anyOf", []):
        yield from edges(inner, definitions, path)


SCHEMA = JobSpec.model_json_schema()
EDGES = [edge for edge in edges(SCHEMA, SCHEMA["$defs"]) if edge[0] in ("algorithm", "rollout", "train", "validation")]


async def steps_per_s(cluster: Cluster, job: str, began: float, step: int) -> float:
    return (await cluster.step(job) - step) / (time.monotonic() - began)


async def test_nothing_that_is_asked_harms_the_jobs_that_run(tmp_path: Path, figure: Figure) -> None:
    settings = {"http_rate": 1_000_000, "env_sessions": 512}
    async with toy_cluster(tmp_path, trainers=2, rollout_workers=2, env_workers=2, **settings) as (cluster, model):
        steps = {"learner": "simulated", "steps": 100_000_000, "simulated_step_s": STEP_S}
        quiet = make_spec(model={"base": str(model)}, train=steps).model_dump(mode="json", exclude_none=True)
        headers = bearing(await new_key_of(cluster.store, "blue"))
        async with aiohttp.ClientSession(headers=headers) as blue, aiohttp.ClientSession(headers=bearing()) as red:
            async with blue.post(f"{cluster.client.url}/v1/jobs", json=quiet) as response:
                victim = (await response.json())["id"]
            await cluster.reaches(victim, 4)
            began, step = time.monotonic(), await cluster.step(victim)
            await until(lambda: time.monotonic() - began > WATCHED_S)
            before = await steps_per_s(cluster, victim, began, step)
            short = {**quiet, "train": {**quiet["train"], "steps": 20, "simulated_step_s": 0.01}}
            async with red.post(f"{cluster.client.url}/v1/jobs", json=short) as response:
                own = (await response.json())["id"]
            async with red.post(f"{cluster.client.url}/v1/jobs/{own}/cancel"):
                pass
            fuzz = Fuzz(cluster.client.url, cluster.http_port, short, own)
            began, step, third = time.monotonic(), await cluster.step(victim), REQUESTS // 3 + 1
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(asyncio.to_thread(fuzz.cases, third))
                for _ in range(ASKERS):
                    tasks.create_task(fuzz.sockets(third // ASKERS + 1))
                tasks.create_task(fuzz.specs(third, red))
            took, during = time.monotonic() - began, await steps_per_s(cluster, victim, began, step)
            for job in fuzz.live:
                async with red.post(f"{cluster.client.url}/v1/jobs/{job}/cancel"):
                    pass
        record = await cluster.store.job(victim)
        ledger = await cluster.ledger(victim)
        lost = {name: process.exits for name, process in cluster.processes.items() if process.exits}
        figure(
            f"{fuzz.statuses.total()} requests in {took:.0f} s (seed {SEED}), {fuzz.made} jobs made, answers "
            f"{dict(sorted(fuzz.statuses.items()))}: {len(fuzz.broken)} x 5xx, {len(lost)} processes lost; another "
            f"tenant's job {before:.2f} steps/s before, {during:.2f} during, {record.restarts} restarts, "
            f"ledger balanced {ledger.balanced}, failed {ledger.failed}"
        )
        assert fuzz.broken == []
        assert fuzz.statuses.total() >= REQUESTS and fuzz.made >= REQUESTS // 200
        assert lost == {}
        assert (record.state, record.restarts, record.rollout_losses) == (JobState.RUNNING, 0, 0)
        assert ledger.balanced and not ledger.failed
        assert during > LEAST_SHARE * before, (before, during)
        assert not re.search(r'"request_failed"|"worker_failed"', cluster.logs("scheduler"))
