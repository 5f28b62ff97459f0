"""Workers that hold on to what they have no lease for are counted on for some time, and no longer."""

from __future__ import annotations

import msgspec

from opentinker.services.scheduler.placement.cluster_view import Cluster, Overdue
from opentinker.services.scheduler.placement.types import ClusterView, Rules
from opentinker.shared.runtime.leased_worker import RELEASE_TIMEOUT_S
from opentinker.shared.types.core import Lease, Pool
from opentinker.shared.types.workers import WorkerInfo

DRAIN_S = 20.0


def worker(id: str, status: str = "ready", job: str | None = "j") -> WorkerInfo:
    return WorkerInfo(
        id=id, incarnation="1", pool=Pool(id.partition("-")[0]), host="h", pid=1, job=job, epoch=1, status=status
    )


def lease(id: str) -> Lease:
    return Lease(job="j", worker=id, incarnation="1", epoch=1, pool=Pool(id.partition("-")[0]))


class Watched:
    def __init__(self) -> None:
        self.now = 1000.0
        self.overdue = Overdue(DRAIN_S, lambda: self.now)

    def after(self, seconds: float, workers: list[WorkerInfo], leases: list[Lease]) -> ClusterView:
        self.now += seconds
        cluster = Cluster(workers, leases, self.overdue.find(workers, leases))
        return cluster.view([], now=0.0, limits={}, used={}, rules=Rules())


def test_a_worker_that_does_not_let_go_is_not_counted_on_for_ever() -> None:
    watched, hangs = Watched(), worker("rollout-0")
    works, idle = worker("rollout-1"), worker("rollout-2", status="idle", job=None)
    leases = [lease("rollout-1")]
    for seconds in (0.0, RELEASE_TIMEOUT_S):
        view = watched.after(seconds, [hangs, works, idle], leases)
        assert view.coming[Pool.ROLLOUT] == ["rollout-0"] and len(view.alive[Pool.ROLLOUT]) == 3
    view = watched.after(1.0, [hangs, works, idle], leases)
    assert view.coming[Pool.ROLLOUT] == [] and view.alive[Pool.ROLLOUT] == ["rollout-1", "rollout-2"]
    view = watched.after(1.0, [worker("rollout-0", status="idle", job=None), works, idle], leases)
    assert view.free[Pool.ROLLOUT] == ["rollout-0", "rollout-2"] and len(view.alive[Pool.ROLLOUT]) == 3, "it let go"


def test_another_job_and_another_process_begin_a_time_of_their_own() -> None:
    watched = Watched()
    watched.after(0.0, [worker("trainer-0")], [])
    for other in (worker("trainer-0", job="k"), msgspec.structs.replace(worker("trainer-0"), incarnation="2")):
        assert watched.after(RELEASE_TIMEOUT_S + 1.0, [other], []).coming[Pool.TRAINER] == ["trainer-0"]


def test_a_trainer_that_is_told_to_stop_holds_its_job_while_it_may_save() -> None:
    watched = Watched()
    draining = [worker("trainer-0", status="draining"), worker("rollout-0", status="draining")]
    leases = [lease("trainer-0"), lease("rollout-0")]
    for seconds in (0.0, DRAIN_S + RELEASE_TIMEOUT_S):
        assert [held.worker for held in watched.after(seconds, draining, leases).leases] == ["trainer-0"]
    assert watched.after(1.0, draining, leases).leases == []


def test_a_trainer_that_stops_without_having_taken_its_lease_saves_nothing() -> None:
    leaving = [worker("trainer-0", status="draining", job=None)]
    assert Watched().after(0.0, leaving, [lease("trainer-0")]).leases == []
