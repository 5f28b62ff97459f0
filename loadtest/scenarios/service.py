"""Measures the promised service levels in one run: submissions, cancels in every state, restarts, freed capacity.
Measurements with a script in this package (keys.py, queue.py) run that script, so that each number is measured in one
way.

What has a script of its own (keys.py, queue.py) is run by it, so that each number has one way in which it is measured.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import orjson

from loadtest.scenarios.jobs import LOOK_S, SLEEPER, job_of, steps_of, until, until_step
from loadtest.support.open_loop import Latencies, arrivals, open_loop
from loadtest.support.report import Report
from loadtest.support.target import ROOT, Target, target
from opentinker.client import AsyncClient
from opentinker.shared.api_types import Worker
from tests.support.toys import toy_model

SUBMIT_P99_S, READ_P99_S, WORSE = 0.150, 0.050, 2.0
RESTART_S, CANCEL_S, USED_S, DECISIONS = 3.0, 5.0, 1.0, 50.0
SUBMITS_PER_S = 20.0
ROUNDS = 3
STATE_S = 120.0
"""A job gets into the state that is looked at within this time: torch is imported meanwhile."""
SESSIONS = "opentinker_env_sessions"
STRETCHED = 2.0
"""A step around a restart may take so many times the median: its seconds are simulated, so more is a disturbance."""
LONG = {"name": SLEEPER, "config": {"sleep_s": 4 * CANCEL_S, "turns": 2}}
LOST = ("trainer_lost", "rollout_worker_lost", "requeued", "preempted")


async def seen(condition: Callable[[], Awaitable[bool]], what: str) -> float:
    """Return the `perf_counter` time at which the condition was seen to hold. Raises TimeoutError."""
    await until(condition, bool, what, STATE_S)
    return time.perf_counter()


def training(model: Path, **parts: Any) -> dict[str, Any]:
    """A simulated job that trains for as long as it is left alone: half a second a step."""
    many = {"max_concurrent_groups": 16}
    return job_of(model, gen_s=0.1, train_s=0.5, staleness=6, **{"rollout": many, **parts})


@dataclass(frozen=True, slots=True)
class Site:
    """A server of our own, and who asks it."""

    at: Target
    report: Report
    directory: Path

    @property
    def client(self) -> AsyncClient:
        return self.at.client

    async def submit(self, spec: dict[str, Any]) -> str:
        return str((await self.client.submit(spec))["id"])

    async def state(self, job: str) -> str:
        return str((await self.client.job(job))["state"])

    async def reaches(self, job: str, state: str) -> float:
        async def there() -> bool:
            now = await self.state(job)
            assert now == state or now in ("queued", "starting", "running", "paused"), f"{job} is {now}, not {state}"
            return now == state

        return await seen(there, f"{job} is {state}")

    async def free(self, job: str) -> float:
        """No worker has a lease of the job, none works for it, and env workers have no session. Where another job has
        workers, sessions are its own: env workers do not tell them apart."""

        async def all_free() -> bool:
            workers = await self.workers()
            held = {worker["job"] for worker in workers if worker["job"]}
            held |= {worker["lease"]["job"] for worker in workers if worker["lease"]}
            if held:
                return job not in held
            return await self.sessions() == 0

        return await seen(all_free, "no worker has it, and no session is open")

    async def sessions(self) -> int:
        """Open on all env workers, as they tell it themselves: a heartbeat would be up to a second old."""
        found = 0
        async with aiohttp.ClientSession() as session:
            for name, url in self.at.urls.items():
                if name.startswith("env-"):
                    async with session.get(f"{url}/metrics") as answer:
                        lines = (await answer.text()).splitlines()
                    found += int(float(next(line.split()[1] for line in lines if line.startswith(f"{SESSIONS} "))))
        return found

    async def idle(self) -> float:
        """Every worker beats and waits for a job."""

        async def all_idle() -> bool:
            found = await self.workers()
            wanted = {name for name in self.at.pids if name.startswith(("trainer-", "rollout-"))}
            idle = {worker["id"] for worker in found if worker["status"] == "idle" and not worker["lease"]}
            return wanted <= idle

        return await seen(all_idle, "every worker is idle")

    async def workers(self) -> list[Worker]:
        return [worker for worker in await self.client.workers() if worker["pool"] in ("trainer", "rollout")]


# --- submissions ------------------------------------------------------------------------------------------------------


async def submissions(site: Site, seconds: float, seed: int) -> None:
    """While one job runs, so that all others stay in the queue, which grows."""
    first = await site.submit(training(site.at.model))
    await site.reaches(first, "running")
    jobs: list[str] = []

    async def submit(_: int) -> None:
        jobs.append(await site.submit(training(site.at.model)))

    taken = site.report.latency("submissions")
    await open_loop(arrivals(SUBMITS_PER_S, seconds, seed), submit, taken)
    site.report.check("no submission fails", not taken.errors, dict(taken.errors))
    site.report.aim("submission, p99", taken.summary().get("p99", float("inf")), SUBMIT_P99_S, "s")
    for job in [first, *jobs]:
        await site.client.cancel(job)
    await site.idle()


# --- a scheduler that is killed ---------------------------------------------------------------------------------------


async def restarts(site: Site, rounds: int = ROUNDS) -> None:
    """`kill -9`; the supervisor starts it again, and its pause is in the number."""
    job = await site.submit(training(site.at.model))
    await until_step(site.client, job, 5)
    before = {worker["id"]: worker["incarnation"] for worker in await site.workers()}
    killed, longest = [], 0.0
    for _ in range(rounds):
        killed.append(time.time())
        longest = max(longest, await _seconds_without(site, job))
        step = (await site.client.job(job))["step"]
        await until_step(site.client, job, step + 8)
    after = {worker["id"]: worker["incarnation"] for worker in await site.workers()}
    points = await steps_of(site.client, job)
    events = [line["event"] for line in await site.client.event_log(job)]
    await site.client.cancel(job)
    times = [float(point["time"]) for point in points]
    gaps = [(a, b - a) for a, b in itertools.pairwise(times)]
    usual = statistics.median(gap for _, gap in gaps)
    around = max(gap for at, gap in gaps if any(at > when - 2 * usual for when in killed))
    steps = [point["step"] for point in points]
    report = site.report
    report.aim("scheduler killed and started again, until its first correct answer", longest, RESTART_S, "s")
    report.figure("longest step around a restart over the median", around / usual, "x", "less")
    report.check("no worker was lost or started again", before == after and not {*LOST} & {*events}, after)
    report.check("every step of the running job is there once", steps == list(range(1, len(steps) + 1)), len(steps))
    report.check(f"no step took {STRETCHED:g} times as long", around <= STRETCHED * usual, f"{around / usual:.2f}x")
    await site.idle()


async def _seconds_without(site: Site, job: str) -> float:
    """From SIGKILL to the first answer that is right; asked again and again, on a new connection each time."""
    headers = {"Authorization": f"Bearer {site.at.key}"}
    began = time.perf_counter()
    os.kill(site.at.pids["scheduler"], signal.SIGKILL)
    async with asyncio.timeout(STATE_S):
        while True:
            with contextlib.suppress(aiohttp.ClientError, OSError):
                async with (
                    aiohttp.ClientSession(headers=headers) as session,
                    session.get(f"{site.at.url}/v1/jobs/{job}") as answer,
                ):
                    found = await answer.json()
                    assert answer.status == 200 and found["id"] == job and found["state"] == "running", found
                    return time.perf_counter() - began
            await asyncio.sleep(LOOK_S)


async def _plays(site: Site) -> bool:
    return await site.sessions() > 0


# --- cancels ----------------------------------------------------------------------------------------------------------


async def one_behind_the_other(site: Site) -> tuple[str, str]:
    """Two jobs, of which the first has all workers."""
    first = await site.submit(training(site.at.model))
    await site.reaches(first, "running")
    return first, await site.submit(training(site.at.model))


@asynccontextmanager
async def queued(site: Site) -> AsyncIterator[str]:
    first, job = await one_behind_the_other(site)
    yield job
    assert await site.state(first) == "running", "whoever runs is left alone"
    await site.client.cancel(first)


@asynccontextmanager
async def loading(site: Site) -> AsyncIterator[str]:
    """A real trainer reads a model, which has no end: a load that nothing interrupts."""
    model = toy_model(Path(tempfile.mkdtemp(dir=site.directory)) / "model")
    weight = b'{"x":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'  # without any the job would be refused
    (model / "model.safetensors").write_bytes(len(weight).to_bytes(8, "little") + weight + bytes(4))
    endless = model / "config.json"
    job = await site.submit(training(model, train={"steps": 10}))
    endless.unlink()  # the trainer imports torch before it looks
    os.mkfifo(endless)

    async def is_read() -> bool:
        return await asyncio.to_thread(_reads, site.at.pids["trainer-0"], endless)

    writer = await asyncio.to_thread(os.open, endless, os.O_RDWR)  # who opens it waits for what does not come
    try:
        await seen(is_read, "the trainer reads the model")
        yield job
    finally:
        os.close(writer)


def _reads(pid: int, file: Path) -> bool:
    for one in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            if one.samefile(file):
                return True
    return False


@asynccontextmanager
async def running(site: Site) -> AsyncIterator[str]:
    """Its episodes are longer than a cancel may take: none is over by itself meanwhile."""
    job = await site.submit(training(site.at.model, environment=LONG))
    await site.reaches(job, "running")
    await seen(lambda: _plays(site), "episodes that are being played")
    yield job


@asynccontextmanager
async def paused(site: Site) -> AsyncIterator[str]:
    async with running(site) as job:
        await site.client.pause(job)
        await site.free(job)
        yield job


@asynccontextmanager
async def evaluating(site: Site) -> AsyncIterator[str]:
    spec = training(site.at.model, kind="eval", evaluation={"episodes": 5000}, environment=LONG)
    job = await site.submit({name: part for name, part in spec.items() if name not in ("algorithm", "train")})
    await seen(lambda: _plays(site), "episodes that are being played")
    yield job


@asynccontextmanager
async def serving(site: Site) -> AsyncIterator[str]:
    """With a request that is being answered."""
    spec = {name: training(site.at.model)[name] for name in ("name", "model")}
    toy = {"engine": "toy", "toy": {"seconds_per_token": 0.05, "skill": 0.0}}
    job = await site.submit({**spec, "kind": "inference", "rollout": toy})
    await site.reaches(job, "running")
    heard = asyncio.Event()

    async def listen() -> None:
        with contextlib.suppress(Exception):  # it is cut off in the end
            async for _ in site.client.chat(job, [{"role": "user", "content": "1+1?"}], max_tokens=2000):
                heard.set()

    listening = asyncio.create_task(listen())
    try:
        async with asyncio.timeout(STATE_S):
            await heard.wait()
        yield job
    finally:
        listening.cancel()
        await asyncio.gather(listening, return_exceptions=True)


Enter = Callable[[Site], AbstractAsyncContextManager[str]]
STATES: dict[str, tuple[Enter, int]] = {
    "queued": (queued, ROUNDS),
    "loading": (loading, 1),
    "running": (running, ROUNDS),
    "paused": (paused, ROUNDS),
    "eval": (evaluating, ROUNDS),
    "inference": (serving, ROUNDS),
}
"""How a job gets there, and how often."""


async def cancels(site: Site, states: Mapping[str, tuple[Enter, int]]) -> None:
    worst = 0.0
    for state, (enter, rounds) in states.items():
        taken = site.report.stages.setdefault(f"cancel, {state}: until nothing is held", Latencies())
        again = site.report.stages.setdefault(f"cancel, {state}: until all workers take jobs", Latencies())
        opened = 0
        for _ in range(rounds):
            async with enter(site) as job:
                opened = max(opened, await site.sessions())
                began = time.perf_counter()
                await site.client.cancel(job)
                taken.seconds.append(await site.free(job) - began)
            again.seconds.append(await site.idle() - began)
            assert await site.state(job) == "cancelled"
        worst = max(worst, *taken.seconds)
        site.report.figure(f"cancel, {state}", max(taken.seconds), "s", "less")
        site.report.figure(f"sessions open at the cancel, {state}, at most", opened, "")
    site.report.aim("cancel in any state, until nothing is held", worst, CANCEL_S, "s")


async def handovers(site: Site, rounds: int = ROUNDS) -> None:
    """From the cancel of the job that has all workers to the start of the one that waits: letting go is in it."""
    worst = 0.0
    for _ in range(rounds):
        first, waiting = await one_behind_the_other(site)
        began = time.time()
        await site.client.cancel(first)
        await site.reaches(waiting, "running")
        started = next(line for line in await site.client.event_log(waiting) if line.get("state") == "starting")
        worst = max(worst, float(started["time"]) - began)
        await site.client.cancel(waiting)
        await site.idle()
    site.report.aim("freed workers are another job's", worst, USED_S, "s")


# --- what has a script of its own -------------------------------------------------------------------------------------


async def _script(name: str, *options: str) -> dict[str, float]:
    """Its figures; none if it did not come to them."""
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "figures.json"
        environ = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
        command = [sys.executable, "-m", f"loadtest.{name}", *options, "--json", str(file)]
        process = await asyncio.create_subprocess_exec(*command, cwd=ROOT, env=environ)
        await process.wait()
        return dict(orjson.loads(file.read_bytes())) if file.exists() else {}


async def requests_and_decisions(report: Report, seconds: float) -> None:
    keys = await _script("keys", "--seconds", str(seconds))
    report.check("loadtest.keys came to its end", bool(keys), sorted(keys))
    if keys:
        report.aim("200 authenticated reads a second, p99", keys["p99_s"], READ_P99_S, "s")
        worse = keys["attacked_p99_s"] / keys["p99_s"]
        report.aim("the same with 1,000 wrong keys a second beside them, times that", worse, WORSE, "x")
        report.check("there were 1,000 wrong keys a second", keys["attack_was_whole"] == 1.0, keys["attack_was_whole"])
    queue = await _script("queue")
    report.check("loadtest.queue came to its end", bool(queue), sorted(queue))
    if queue:
        rate = queue["decisions_per_s"]
        report.aim("decisions a second, 1,000 queued jobs of 50 tenants", rate, DECISIONS, "1/s", "more")


async def measure(report: Report, seconds: float, seed: int) -> None:
    with tempfile.TemporaryDirectory() as directory:
        async with target(None) as at:
            site = Site(at, report, Path(directory))
            await submissions(site, seconds, seed)
            await cancels(site, STATES)
            await handovers(site)
            await restarts(site)
    await requests_and_decisions(report, seconds)
