"""What runs on the first of two hosts, which are network namespaces; the second is reached over a veth link.

    python -m tests.support.deploy.two_hosts job DIRECTORY SECOND LINK ADDRESS ADDRESS2
    python -m tests.support.deploy.two_hosts weights DIRECTORY SECOND LINK ADDRESS ADDRESS2
    python -m tests.support.deploy.two_hosts ranks DIRECTORY SECOND LINK ADDRESS ADDRESS2

`tests/nightly/deploy/test_two_hosts.py` makes the hosts and calls this. Exits with an error if something does not hold.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from examples.models.make_tiny import make_tiny
from tests.conftest import WAIT_S, until
from tests.e2e.test_kills import check, toy_spec
from tests.support.cluster import JOB_S, Cluster, toy_model

PARTITION_S = 10.0
STEPS = 300

MEMBER = """
import sys
from opentinker.shared.nn.buckets import fingerprint
from opentinker.shared.nn.transport import WeightGroup
address, port, size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
group = WeightGroup.join(address=address, port=port, rank=1, world=2, device="cpu", timeout_s=180)
(bucket,) = group.receive([size])
print(fingerprint(bucket), flush=True)
group.close()
"""


@dataclass(frozen=True)
class Second:
    """The other host, as it looks from here."""

    namespace: str
    link: str
    """Our end."""
    address: str
    """Ours, on the link."""
    their_address: str

    def command(self, *argv: str) -> list[str]:
        return ["ip", "netns", "exec", self.namespace, *argv]

    def cut(self) -> None:
        subprocess.run(["ip", "link", "set", self.link, "down"], check=True)

    def mend(self) -> None:
        subprocess.run(["ip", "link", "set", self.link, "up"], check=True)

    def add(self, cluster: Cluster, service: str, user: str) -> str:
        """A service there, told nothing but where the servers are."""
        name = f"{service}-there"
        cluster._start(
            name,
            self.command(sys.executable, "-m", f"opentinker.services.{service}"),
            None,
            OPENTINKER_WORKER_ID=name,
            OPENTINKER_NATS_URL=f"nats://{self.address}:{cluster.nats_port}",
            OPENTINKER_REDIS_URL=f"redis://{self.address}:{cluster.valkey_port}/0",
            OPENTINKER_ADVERTISE_HOST=self.their_address,
            **cluster.access.environment(user),
        )
        return name


async def job(directory: Path, second: Second) -> None:
    """Trainer, scheduler and servers here, rollout and env workers on both; ten seconds without the link."""
    model = toy_model(directory / "model")
    async with Cluster(
        directory / "cluster", listen=second.address, advertise_host=second.address, heartbeat_s=0.5, worker_ttl_s=2
    ) as cluster:
        there = second.add(cluster, "rollout_worker", "rollout-worker")
        second.add(cluster, "env_worker", "env-worker")
        await cluster.ready()
        spec = toy_spec(model, steps=STEPS, resources={"rollout_workers": 2})
        id = await cluster.submit(spec)

        async def works_there() -> bool:
            return any(worker.id == there and worker.ready_for(id) for worker in await cluster.store.workers())

        async def is_seen() -> bool:
            return there in [worker.id for worker in await cluster.store.workers()]

        await until(works_there)
        await cluster.reaches(id, 20)
        second.cut()
        before = await cluster.step(id)
        await asyncio.sleep(PARTITION_S)  # what is tested
        assert not await is_seen(), "the link was not cut"
        second.mend()
        print(f"step {before} when the link was cut, {await cluster.step(id)} when it was there again")
        assert not (await cluster.store.job(id)).state.final, "it was over before the link was there again"
        await until(works_there)
        print(f"step {await cluster.step(id)} when the other host worked for it again")
        record = await cluster.succeeds(id)
        await check(cluster, id, spec)
        print(f"succeeded at step {record['step']}; {await cluster.ledger(id)}")


async def ranks(directory: Path, second: Second) -> None:
    """A trainer on each host, which share a job's ranks until the link is cut; one continues, and the other one is free
    for the next job when the link is there again."""
    model = make_tiny(directory / "model")
    settings: dict[str, Any] = {"max_ranks": 1, "queue_gang_s": 5, "heartbeat_s": 0.5, "worker_ttl_s": 12}
    async with Cluster(
        directory / "cluster", listen=second.address, advertise_host=second.address, forked=False, **settings
    ) as cluster:
        there = second.add(cluster, "trainer", "trainer")
        await cluster.ready()
        train = {"steps": 40, "checkpoint_every": 3, "keep_checkpoints": 2, "parallel": "zero2"}
        spec = toy_spec(model, steps=40, train=train, resources={"trainer_ranks": 2, "min_trainer_ranks": 1})
        id = await cluster.submit(spec)
        await cluster.reaches(id, 4)
        (shares,) = {lease.group for lease in await cluster.store.leases() if lease.group}
        assert [share.worker for share in shares] == ["trainer-0", there], shares
        second.cut()
        cut_at, before = time.monotonic(), await cluster.step(id)

        async def lost() -> list[dict[str, Any]]:
            found = await cluster.store.events(id)
            return [event for event in found if event["event"] in ("trainer_lost", "rank_lost")]

        (first, *_) = await until(lost)
        print(f"{time.monotonic() - cut_at:.1f} s after the cut: {first['event']} {first['worker']}: {first['why']}")
        assert first["worker"] == there, first
        await until(lambda: any(line["epoch"] == 2 for line in cluster.lines(id)), timeout_s=JOB_S)
        print(f"{time.monotonic() - cut_at:.1f} s after the cut it trains alone; at step {before} when it was cut")
        assert "trainer/rank_imbalance" not in cluster.lines(id)[-1], "one rank"
        second.mend()

        async def is_free() -> bool:
            return any(w.id == there and w.job is None and w.status == "idle" for w in await cluster.store.workers())

        await until(is_free, timeout_s=JOB_S)
        print(f"{time.monotonic() - cut_at:.1f} s after the cut the other host is there again, and free")
        record = await cluster.succeeds(id)
        await check(cluster, id, spec)
        print(f"ranks succeeded at step {record['step']}, resumed at {cluster.manifest(id).resumed}")


def weights(second: Second) -> None:
    """The group finds its way by the address that the trainer advertises, whatever the hosts are called."""
    import torch

    from opentinker.shared.nn.buckets import snapshot
    from opentinker.shared.nn.transport import WeightGroup, host_store
    from opentinker.shared.types.core import WeightVersion

    sent = snapshot(WeightVersion(0, 1), [("layer", torch.randn(1 << 20))], 1 << 30)
    store, port = host_store(second.address, 2, WAIT_S)
    size = sent.buckets[0].numel()
    argv = second.command(sys.executable, "-c", MEMBER, second.address, str(port), str(size))
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as member:
        group = WeightGroup.join(
            address=second.address, port=port, rank=0, world=2, device="cpu", timeout_s=2 * WAIT_S, store=store
        )
        group.send(sent.buckets)
        received, _ = member.communicate(timeout=WAIT_S)
        group.close()
    assert int(received) == sent.fingerprints[0], "other bytes came"
    print(f"{size} bytes came over the link")


if __name__ == "__main__":
    what, place, *names = sys.argv[1:]
    other = Second(*names)
    if what == "weights":
        weights(other)
    else:
        asyncio.run({"job": job, "ranks": ranks}[what](Path(place), other))
