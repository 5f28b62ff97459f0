"""The trainer's side of an opponent pool: members, results, and which weights lie on disk for how long."""

from __future__ import annotations

import errno
import uuid
from pathlib import Path
from typing import Any

import msgspec
import pytest

from opentinker.services.trainer import checkpoint
from opentinker.services.trainer.learners.base import SimulatedLearner
from opentinker.services.trainer.opponent_pools import OpponentPools
from opentinker.shared.evaluation.job_ratings import JobRatings
from opentinker.shared.spec import PoolSpec
from opentinker.shared.state.admission import Admission
from opentinker.shared.state.store import Store
from opentinker.shared.types.core import WeightVersion
from opentinker.shared.types.errors import Fenced
from opentinker.shared.types.manifest import Manifest
from tests.support.factories import make_spec

WON, LOST = (4, 0, 0), (0, 0, 4)


class Weighing(SimulatedLearner):
    """Its weights are its number of steps."""

    full = False

    def save_weights(self, directory: Path) -> None:
        if self.full:
            raise OSError(errno.ENOSPC, "No space left on device")
        (directory / "model.safetensors").write_text(str(self.steps))


class Life:
    """The pools of one trainer of a job, which makes steps of no matches."""

    def __init__(self, store: Store, root: Path, job: str, epoch: int = 1, **pool: Any) -> None:
        self.root, self.step, self.epoch, self.job, self.store = root, 0, epoch, job, store
        self.learner = Weighing(make_spec())
        self.admission = Admission(store.redis, job, epoch)
        self.events: list[tuple[str, dict[str, object]]] = []
        self.identity = Manifest(job=job, epoch=epoch, step=0, version=WeightVersion(0, 0))
        spec = PoolSpec(**({"every": 2, "keep": 3} | pool))
        self.ratings = JobRatings(pools={"past": ""})
        self.pools = OpponentPools(
            {"past": spec}, self.identity, root, self.learner, self.admission, self._event, self.ratings, "bot:random"
        )
        self.pool = pool

    async def _event(self, event: str, detail: dict[str, object]) -> None:
        self.events.append((event, detail))

    @property
    def version(self) -> WeightVersion:
        return WeightVersion(self.epoch, self.step)

    async def begin(self, manifest: Manifest | None = None) -> None:
        self.step = self.learner.steps = 0 if manifest is None else manifest.step
        await self.pools.restore(manifest, self.version)
        await self.admission.restore(step=self.step, max_staleness=0, groups_per_batch=2, total=200, discarded={})

    async def make(self, steps: int, **games: tuple[int, int, int]) -> None:
        """`games`: of each step, by member; `newest` is the last."""
        for _ in range(steps):
            self.step += 1
            self.learner.steps = self.step
            named = {"newest": self.members[-1], "first": self.members[0]}
            self.pools.count({f"past@{named.get(member, member)}": one for member, one in games.items()})
            await self.pools.grow(self.version)

    def save(self) -> Manifest:
        """Commit a checkpoint and keep no other."""
        root = self.root / "checkpoints"
        made = msgspec.structs.replace(
            self.identity, step=self.step, version=self.version, pools=dict(self.pools.members)
        )
        checkpoint.commit(root, made, self.learner.save)
        checkpoint.sweep(root, 1, self.epoch)
        return made

    def next(self) -> Life:
        return Life(self.store, self.root, self.job, self.epoch + 1, **self.pool)

    @property
    def members(self) -> list[str]:
        return [str(member.version) for member in self.pools.members["past"]]

    @property
    def on_disk(self) -> dict[str, str]:
        """Weights by version."""
        places = self.root / "members"
        return {path.parent.name: path.read_text() for path in sorted(places.glob("[0-9]*/model.safetensors"))}


@pytest.fixture
async def life(store: Store, tmp_path: Path) -> Life:
    made = Life(store, tmp_path, f"j-{uuid.uuid4().hex[:8]}")
    await made.begin()
    return made


async def test_a_pool_begins_with_the_initial_weights_and_keeps_the_newest(life: Life) -> None:
    assert life.members == ["0.0"] and life.on_disk == {"0.0": "0"}
    await life.make(5)
    assert life.members == ["0.0", "1.2", "1.4"] and life.on_disk == {"0.0": "0", "1.2": "2", "1.4": "4"}
    told = await life.admission.pools()
    assert told["past"].members == life.members and set(told["past"].win_rates.values()) == {0.5}
    await life.make(3)
    assert life.members == ["1.4", "1.6", "1.8"] and set(life.on_disk) == set(life.members)
    kinds = [(event, detail["member"], detail["removed"]) for event, detail in life.events]
    assert kinds[2:] == [("pool_grown", "1.6", ["0.0"]), ("pool_grown", "1.8", ["1.2"])]
    assert all(checkpoint.read_intact(life.root / "members" / name) for name in life.members)


async def test_a_trainer_that_is_superseded_removes_no_member_of_the_next_one(life: Life) -> None:
    await life.make(8)
    successor = life.next()
    await successor.begin(life.save())
    await successor.make(2)
    assert "2.10" in life.on_disk
    with pytest.raises(Fenced):
        await life.pools._sweep()
    assert life.on_disk.keys() >= set(successor.members)


async def test_half_a_game_is_not_lost(life: Life) -> None:
    await life.make(1, newest=(1, 0, 0))
    await life.make(3)
    assert life.pools.members["past"][0].recent == (0.25, 0.0, 0.0), "halved twice"


async def test_results_count_for_the_members_of_that_time(life: Life) -> None:
    await life.make(3, newest=WON, elsewhere=LOST)
    assert [(m.outcomes, m.recent) for m in life.pools.members["past"]] == [((8, 0, 0), (4, 0, 0)), (WON, WON)]
    metrics = life.pools.metrics()
    assert metrics["pool/past/size"] == 2 and metrics["pool/past/games"] == 4
    assert metrics["pool/past/winrate"] == 8.5 / 9 and metrics["pool/past/winrate/lowest"] == 4.5 / 5
    told = (await life.admission.pools())["past"]
    assert told.win_rates == {"0.0": 4.5 / 5, "1.2": 4.5 / 5}, "PFSP knows them"
    assert told.outcomes == {"0.0": (8, 0, 0), "1.2": WON} and told.recent == {"0.0": WON, "1.2": WON}


async def test_members_have_ratings_on_the_scale_of_the_job(life: Life) -> None:
    life.ratings.add_evaluation("@0.0", {"bot:random": (50, 0, 50)})
    life.ratings.add_evaluation("@1.2", {"@0.0": (90, 0, 10)})
    await life.make(4)
    rated = (await life.admission.pools())["past"].ratings
    assert life.members == ["0.0", "1.2", "1.4"] and rated.keys() == {"0.0", "1.2"}, "1.4 has not played"
    assert rated["0.0"][0] == pytest.approx(0, abs=20) and rated["1.2"][0] == pytest.approx(380, abs=60)
    assert rated["1.2"][1] > rated["0.0"][1] > 0, "errors"


async def test_a_restarted_trainer_rates_its_members_once_all_policies_have_resumed(life: Life) -> None:
    """Which versions of another policy are the same weights, that policy says when it resumes."""
    await life.make(4)
    second = life.next()
    second.ratings.restore([(1.0, "", {("@1.2", "b@1.2"): (50, 0, 50), ("b@2.2", "bot:random"): (50, 0, 50)})])
    await second.begin(life.save())
    told = (await second.admission.pools())["past"]
    assert told.members == ["0.0", "1.2", "1.4"] and told.ratings == {}
    second.ratings.resume("b", {1: 0, 2: 2})
    await second.pools.publish()
    assert (await second.admission.pools())["past"].ratings.keys() == {"1.2"}


async def test_a_candidate_must_win_often_enough(store: Store, tmp_path: Path) -> None:
    life = Life(store, tmp_path, "j-good", add_if=0.6)
    await life.begin()
    await life.make(2)
    assert life.members == ["0.0"], "without games it is not added"
    await life.make(2, first=LOST)
    assert life.members == ["0.0"]
    await life.make(2, first=WON)
    assert life.members == ["0.0", "1.6"], "8 of 12 lately: older results count half"


async def test_a_member_lies_on_disk_while_a_ticket_or_a_checkpoint_names_it(life: Life) -> None:
    await life.admission.set_version(0)
    life.save()
    _, (first, second) = await life.admission.issue(10)
    await life.make(8)
    assert life.members == ["1.4", "1.6", "1.8"]
    assert set(life.on_disk) == {"0.0", *life.members, "1.2"}, "both tickets may name what had been issued by then"
    await life.admission.accept(first)
    await life.admission.fail(second, "timeout")
    await life.make(1)
    assert set(life.on_disk) == {"0.0", *life.members}, "the checkpoint still names the first"
    life.save()
    await life.make(1)
    assert life.members == ["1.6", "1.8", "1.10"] and set(life.on_disk) == {"1.4", *life.members}, "the next names 1.4"


async def test_the_pool_is_rolled_back_and_resumed_with_the_weights(life: Life) -> None:
    await life.make(5, newest=WON)
    saved = life.save()
    await life.make(5, first=LOST)
    assert life.members == ["1.6", "1.8", "1.10"]
    manifest = checkpoint.find_newest(life.root / "checkpoints")
    assert manifest is not None
    second = life.next()
    await second.begin(manifest[1])
    assert second.pools.members == saved.pools and second.members == ["0.0", "1.2", "1.4"]
    assert set(second.on_disk) == set(second.members), "what was rolled back is gone"
    await second.make(5, newest=WON)
    assert second.members == ["2.6", "2.8", "2.10"]
    with pytest.raises(Fenced):
        await life.make(2)


async def test_a_damaged_member_leaves_and_an_empty_pool_begins_again(life: Life) -> None:
    await life.make(3)
    saved = life.save()
    places = life.root / "members"
    (places / "0.0" / "model.safetensors").write_text("?")
    second = life.next()
    await second.begin(saved)
    assert second.members == ["1.2"] and [event for event, _ in second.events] == ["pool_member_lost"]
    (places / "1.2" / "model.safetensors").unlink()
    third = second.next()
    await third.begin(saved)
    assert third.members == ["3.3"] and third.on_disk["3.3"] == "3"


async def test_a_full_disk_leaves_the_pool_as_it_is(life: Life) -> None:
    life.learner.full = True
    await life.make(2)
    assert life.members == ["0.0"] and [event for event, _ in life.events] == ["pool_not_grown"]
    life.learner.full = False
    await life.make(2)
    assert life.members == ["0.0", "1.4"]
