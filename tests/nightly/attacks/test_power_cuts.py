"""`opentinker up` on a file system that loses its power again and again: it starts every time, and all that it has
acknowledged is there.

OPENTINKER_POWER_CUTS says how many cuts (3); the seed of a run is printed, OPENTINKER_POWER_SEED repeats it.
"""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest

from opentinker.client import ApiError, Client
from opentinker.local.discovery import read_state
from opentinker.services.trainer import checkpoint
from opentinker.shared.data import uploads
from opentinker.shared.messaging.permissions import OPERATOR
from opentinker.shared.messaging.subjects import SERVICES
from opentinker.shared.security import audit_log
from tests.conftest import WAIT_S, Figure, free_port
from tests.e2e.test_kills import GROUPS_PER_BATCH, toy_spec
from tests.samples.upload_samples import package
from tests.support.deploy.cut_disk import OPTIONS, CutDisk, unavailable
from tests.support.lineage import faults
from tests.support.toys import toy_model

pytestmark = [pytest.mark.nightly, pytest.mark.skipif(bool(unavailable()), reason=unavailable() or "-")]

CUTS = int(os.environ.get("OPENTINKER_POWER_CUTS", "3"))
STEPS, EVERY = 120, 9
LONGEST_LIFE_S = 8.0
"""From `ready` to the cut."""
PATIENCE_S = 1.0
"""Of the client, with a server that does not answer."""
IN_THE_START = 0.2
"""Share of the cuts that come before `ready`."""
NEW_DISK = 0.1
"""Share of the cuts after which it begins with an empty disk: the first start is cut, too."""


@pytest.mark.timeout(120 * CUTS + 600)
def test_nothing_acknowledged_is_lost_in_power_cuts_and_it_starts_every_time(tmp_path: Path, figure: Figure) -> None:
    seed = int(os.environ.get("OPENTINKER_POWER_SEED", random.SystemRandom().randrange(10**6)))
    print(f"OPENTINKER_POWER_SEED={seed}")
    random_, model = random.Random(seed), toy_model(tmp_path / "model")
    counts: Counter[str] = Counter()
    machine = Machine(tmp_path, model, random_)
    try:
        for number in range(CUTS):
            machine.start()
            if random_.random() < IN_THE_START:
                time.sleep(random_.uniform(0.2, LONGEST_LIFE_S))
                machine.cut()
                machine.end()
            else:
                with machine.ready() as client:
                    machine.check(client)
                    machine.live(client, random_.uniform(0.1, LONGEST_LIFE_S))
            print(f"{time.strftime('%X')} cut {number + 1}: {machine.acknowledged()}", flush=True)
            if random_.random() < NEW_DISK or number == CUTS - 1:
                machine.start()
                with machine.ready() as client:
                    machine.finish(client)
                machine.end()
                counts.update(machine.acknowledged())
                machine = Machine(tmp_path, model, random_)
    except BaseException:
        with contextlib.suppress(OSError):  # where the power is off
            machine.show()
        raise
    finally:
        machine.end()
    acknowledged = ", ".join(f"{count} {what}" for what, count in counts.items())
    figure(f"{CUTS} power cuts: it started every time, none lost of {acknowledged}")


def wait(condition: Callable[[], Any], what: str, timeout_s: float = WAIT_S) -> Any:
    deadline = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what}"
        time.sleep(0.05)
    return found


class Machine:
    """`up` on a disk, through all its lives, and what it has acknowledged."""

    def __init__(self, directory: Path, model: Path, random_: random.Random) -> None:
        self._directory, self._model, self._random = directory, model, random_
        self._disk = CutDisk(directory / "image", directory / "disk")
        self._log = directory / "up.log"
        self._port = free_port()
        self.data = self._disk.at / "data"
        self._up: subprocess.Popen[bytes] | None = None
        self.secrets: dict[str, str] = {}
        """By path: what `up` was ready with."""
        self.keys: list[str] = []
        self.pushed: dict[str, list[tuple[int, str]]] = {}
        self.jobs: dict[str, set[str]] = {}
        """Final states that were seen, by job."""
        self.steps: dict[str, dict[str, set[int]]] = {}
        """Steps of events that were seen, by job and event."""

    # --- lives --------------------------------------------------------------------------------------------------

    def start(self) -> None:
        self._disk.mount(self._random.choice(OPTIONS))
        environ = {name: value for name, value in os.environ.items() if not name.startswith("OPENTINKER_")}
        options = ["--data-dir", str(self.data), "--port", str(self._port), "--reference", "0"]
        command = [sys.executable, "-m", "opentinker.cli", "up", *options]
        with self._log.open("ab") as log:
            self._up = subprocess.Popen(
                command, env=environ | {"OPENTINKER_PRELOAD": "false"}, stdout=log, stderr=log, cwd=self._directory
            )

    def ready(self) -> Client:
        def is_ready() -> bool:
            assert self._up is not None and self._up.poll() is None, f"up has ended: {self.said()}"
            state = read_state(self.data)
            return bool(state.get("ready")) and state.get("pid") == self._up.pid

        wait(is_ready, "up is ready")
        key = (self.data / "run" / "operator-key").read_text().strip()
        return Client(read_state(self.data)["url"], api_key=key, wait_s=PATIENCE_S)

    def said(self) -> str:
        return self._log.read_text(errors="replace")[-3000:]

    def show(self) -> None:
        for log in (self._log, *sorted(self.data.glob("logs/*.log"))):
            print(f"\n===== {log.name}\n{log.read_text(errors='replace')[-3000:]}")

    def live(self, client: Client, seconds: float) -> None:
        """What is asked in this time, and what is under way when the power goes."""
        gone = threading.Event()

        def cut() -> None:
            time.sleep(seconds)
            gone.set()
            self.cut()

        cutting = threading.Thread(target=cut)
        cutting.start()
        try:
            while not gone.is_set():
                self.act(client)
        except (ApiError, OSError):
            if not gone.is_set():
                raise
        finally:
            cutting.join()
        self._disk.unmount()

    def cut(self) -> None:
        self._disk.cut()
        assert self._up is not None
        self._up.kill()
        self._up.wait()

    def end(self) -> None:
        """Also of what a failed test leaves."""
        if self._up is not None and self._up.poll() is None:
            self.cut()
        self._disk.unmount()

    # --- what it acknowledges -------------------------------------------------------------------------------------

    def note_secrets(self) -> None:
        names = [f"access/{server}-{user}" for server in ("nats", "valkey") for user in (*SERVICES, OPERATOR)]
        for name in (*names, "access/nats-issuer", "operator-key"):
            text = (self.data / "run" / name).read_text()
            assert text.strip(), f"{name} is empty"
            assert self.secrets.setdefault(name, text) == text, f"{name} is another one"

    def act(self, client: Client) -> None:
        """One thing, noted once it is answered."""
        match self._random.choice(("submit", "push", "key", "look", "look")):
            case "submit" if sum(not states for states in self.jobs.values()) < 2:
                spec = toy_spec(self._model, steps=STEPS, validation={"every": EVERY, "episodes": 4})
                self.jobs[client.submit(spec)["id"]] = set()
            case "push":
                name = self._random.choice(("first", "second", "third"))
                source = package(self._directory / "source", levels__txt=str(self._random.random()))
                made = client.push_environment(source, name)
                self.pushed.setdefault(name, []).append((made["version"], made["digest"]))
            case "key":
                self.keys.append(client.create_key("member", name="power")["key"])
            case _:
                self.look(client)

    def look(self, client: Client) -> None:
        for job, states in self.jobs.items():
            state = client.job(job)["state"]
            assert not states or state in states, f"{job} was {states} and is {state}"
            if state in ("succeeded", "failed", "cancelled"):
                states.add(state)
        for job in self.jobs:
            seen = self.steps.setdefault(job, {"checkpoint": set(), "validation": set()})
            for event in client.event_log(job):
                if event["event"] in seen:
                    seen[event["event"]].add(event["step"])

    def acknowledged(self) -> dict[str, int]:
        seen = self.steps.values()
        return {
            "keys": len(self.keys),
            "uploads": sum(len(versions) for versions in self.pushed.values()),
            "jobs": len(self.jobs),
            "checkpoints": sum(len(steps["checkpoint"]) for steps in seen),
            "evaluations": sum(len(steps["validation"]) for steps in seen),
        }

    def check(self, client: Client) -> None:
        """All that was acknowledged is there."""
        self.note_secrets()
        self.look(client)
        known = {key["id"] for key in client.keys()}  # noqa: SIM118 - no dict
        for key in self.keys:
            assert key.split("_")[2] in known, "a key is gone"
        if self.keys:
            with Client(client.url, api_key=self.keys[-1]) as other:
                assert other.whoami()["role"] == "member"
        for name, versions in self.pushed.items():
            there = {(v["version"], v["digest"]) for v in client.environment(name)["versions"]}
            assert set(versions) <= there, f"{name}: {versions} of {there}"
            for _, digest in versions:
                assert uploads.intact(self.data, digest)
        assert set(self.pushed) <= {environment["name"] for environment in client.environments()}
        for job, seen in self.steps.items():
            home = self.data / "jobs" / job
            found = checkpoint.find_newest(home / "checkpoints")
            newest = 0 if found is None else found[1].step
            assert newest >= max(seen["checkpoint"], default=0), f"{job} has step {newest}, and {seen}"
            evaluated = {line["step"] for line in lines(home / "validation.jsonl")}
            assert seen["validation"] <= evaluated, f"{job}: {seen['validation'] - evaluated} are gone"
        for present in audit_log.writers(audit_log.folder(self.data)):
            audit_log.verify(present)

    def finish(self, client: Client) -> None:
        """Every job ends well, each step of it made once."""
        for job in self.jobs:
            record = client.wait(job, timeout_s=600)
            assert record["state"] == "succeeded", record["reason"]
            found = checkpoint.find_newest(self.data / "jobs" / job / "checkpoints")
            assert found is not None
            wrong = faults(
                lines(self.data / "jobs" / job / "metrics.jsonl"),
                found[1].resumed,
                steps=STEPS,
                groups_per_batch=GROUPS_PER_BATCH,
                max_staleness=2,
            )
            assert not wrong, wrong
        self.check(client)


def lines(path: Path) -> list[dict[str, Any]]:
    """Of a log; what a cut has torn must not be there once somebody has written behind it."""
    raw = path.read_bytes().splitlines() if path.exists() else []
    whole = [orjson.loads(line) for line in raw[:-1]]
    try:
        return [*whole, *(orjson.loads(line) for line in raw[-1:])]
    except orjson.JSONDecodeError:
        return whole
