"""Opponent pools whose members are versions of one policy: [pools] of a job, on the trainer's side.

    step --count--> outcomes --grow--> members --publish--> Redis, for the tickets to come (`scheduler/jobs/tickets.py`)

Members and outcomes are in the policy's manifests, so they are rolled back and resumed with its weights. The weights of
a member are written before a manifest or a ticket can name it, and removed when neither does.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import TypeVar

import msgspec
import structlog

from opentinker.services.trainer import checkpoint
from opentinker.services.trainer.learners.base import Learner
from opentinker.shared.asyncio_tools import finish_uncancelled
from opentinker.shared.evaluation.job_ratings import JobRatings
from opentinker.shared.evaluation.pool_draws import GrowthRule, grow_pool, win_rate
from opentinker.shared.spec import PoolSpec
from opentinker.shared.spec.matches.pools import pool_player
from opentinker.shared.state.admission import Admission
from opentinker.shared.types.core import WeightVersion
from opentinker.shared.types.errors import JobFailed
from opentinker.shared.types.manifest import Manifest
from opentinker.shared.types.pools import NO_GAMES, Members, Outcomes, PoolMember, PoolRecord, WeightedOutcomes

log = structlog.get_logger()

N = TypeVar("N", int, float)


class OpponentPools:
    def __init__(
        self,
        pools: Mapping[str, PoolSpec],
        identity: Manifest,
        root: Path,
        learner: Learner,
        admission: Admission,
        event: Callable[[str, dict[str, object]], Awaitable[None]],
        ratings: JobRatings,
        anchor: str,
    ) -> None:
        """`pools`: those of the policy; `identity`: job, policy and epoch of its trainer, for the manifests of members;
        `root`: the directory of the policy, with `checkpoints` and `members`; `event`: adds one to the job's; `ratings`
        and `anchor`: see `JobRatings.rate_members`."""
        self._pools, self._identity, self._learner, self._admission = dict(pools), identity, learner, admission
        self._checkpoints, self._root, self._event = root / "checkpoints", root / "members", event
        self._all_ratings, self._anchor = ratings, anchor
        self.members: Members = {}
        self._games: dict[str, int] = {}
        """Games of the newest step, by pool."""
        self._leaving: dict[str, int] = {}
        """Versions on disk that are no members any longer -> the first group whose ticket cannot name them."""

    async def restore(self, manifest: Manifest | None, version: WeightVersion) -> None:
        """Take the members of the checkpoint from which the policy resumes; a pool without any begins with the weights
        that the learner has, which are `version`. They have no ratings until `publish`, because the other policies may
        not have resumed. Raises JobFailed, Fenced."""
        if not self._pools:
            return
        await asyncio.to_thread(checkpoint.fence, self._root, self._identity.epoch)
        known = {} if manifest is None else manifest.pools
        first = WeightVersion(0, 0) if version.step == 0 else version
        for name in self._pools:
            members = [member for member in known.get(name, []) if await self._is_intact(name, member.version)]
            if not members:
                await self._write(first)
                members = [PoolMember(version=first)]
            self.members[name] = members
        await self._publish({})
        await self._sweep()

    async def _is_intact(self, pool: str, version: WeightVersion) -> bool:
        try:
            await asyncio.to_thread(checkpoint.read_intact, self._root / str(version))
        except JobFailed as error:
            log.error("pool_member_damaged", pool=pool, member=str(version), error=str(error))
            await self._event("pool_member_lost", {"pool": pool, "member": str(version), "problem": str(error)})
            return False
        return True

    def count(self, total: Mapping[str, Outcomes]) -> None:
        """Add the outcomes of one step, by player. Those against versions that are no members any longer do not
        count."""
        for name, members in self.members.items():
            found = [total.get(pool_player(name, str(member.version)), NO_GAMES) for member in members]
            self._games[name] = sum(map(sum, found))
            self.members[name] = [
                msgspec.structs.replace(member, outcomes=_add(member.outcomes, new), recent=_add(member.recent, new))
                for member, new in zip(members, found, strict=True)
            ]

    async def grow(self, version: WeightVersion) -> None:
        """Decide, after a step, whether the weights that it made become a member. Not cancellable."""
        for name, pool in self._pools.items():
            if version.step % pool.every == 0:
                await finish_uncancelled(self._consider(name, pool, version))
        await self.publish()
        if self._pools:
            await self._sweep()

    async def _consider(self, name: str, pool: PoolSpec, version: WeightVersion) -> None:
        members = {str(member.version): member for member in self.members[name]}
        rule = GrowthRule(every=pool.every, keep=pool.keep, add_if=pool.add_if)
        rate = self._win_rate(name)
        grown = grow_pool(list(members), rule, candidate=str(version), step=version.step, rate=rate)
        detail: dict[str, object] = {"pool": name, "member": str(version), "win_rate": rate}
        if str(version) in grown.members:
            try:
                await self._write(version)
            except JobFailed as error:
                log.error("pool_not_grown", error=str(error))
                await self._event("pool_not_grown", {**detail, "error": str(error)})
                return
            members[str(version)] = PoolMember(version=version)
            await self._event("pool_grown", {**detail, "size": len(grown.members), "removed": list(grown.removed)})
        self.members[name] = [_halve(members[one]) for one in grown.members]

    def _win_rate(self, name: str) -> float | None:
        """Return the win rate of the policy against the members of a pool lately; None without games."""
        recent: WeightedOutcomes = NO_GAMES
        for member in self.members[name]:
            recent = _add(recent, member.recent)
        return win_rate(*recent) if any(recent) else None

    async def publish(self) -> None:
        """Tell the scheduler: tickets that are issued from now on are for these members."""
        if self._pools:
            await self._publish(await asyncio.to_thread(self._rate, self._all_ratings.copy()))

    async def _publish(self, ratings: Mapping[str, dict[str, tuple[float, float]]]) -> None:
        await self._admission.set_pools(
            {
                name: PoolRecord(
                    members=[str(member.version) for member in members],
                    win_rates={str(member.version): win_rate(*member.recent) for member in members},
                    outcomes={str(member.version): member.outcomes for member in members},
                    recent={str(member.version): member.recent for member in members},
                    ratings=ratings.get(name, {}),
                )
                for name, members in self.members.items()
            }
        )

    def _rate(self, ratings: JobRatings) -> dict[str, dict[str, tuple[float, float]]]:
        """Return rating and error of the members, by pool. Blocking."""
        rated = {
            name: ratings.rate_members(name, [member.version for member in members], self._anchor)
            for name, members in self.members.items()
        }
        return {name: {who: (one.elo, one.error) for who, one in found.items()} for name, found in rated.items()}

    def metrics(self) -> dict[str, float]:
        found: dict[str, float] = {}
        for name, members in self.members.items():
            rates = [win_rate(*member.recent) for member in members if any(member.recent)]
            found |= {f"pool/{name}/size": float(len(members)), f"pool/{name}/games": float(self._games.get(name, 0))}
            if (rate := self._win_rate(name)) is not None:
                found |= {f"pool/{name}/winrate": rate, f"pool/{name}/winrate/lowest": min(rates)}
            if any(members[-1].recent):
                found[f"pool/{name}/winrate/newest"] = win_rate(*members[-1].recent)
        return found

    # --- weights on disk ------------------------------------------------------------------------------------------

    async def _write(self, version: WeightVersion) -> None:
        """Write the learner's weights as a member, unless they lie there. Raises JobFailed, Fenced."""
        await finish_uncancelled(asyncio.to_thread(self._commit, version))

    def _commit(self, version: WeightVersion) -> None:
        """Blocking."""
        directory = self._root / str(version)
        if directory.exists():
            try:
                checkpoint.read_intact(directory)
            except JobFailed:
                shutil.rmtree(directory)
            else:
                return
        manifest = msgspec.structs.replace(self._identity, step=version.step, version=version)
        checkpoint.commit(self._root, manifest, self._learner.save_weights, name=str(version))

    async def _sweep(self) -> None:
        """Remove versions that no pool, no checkpoint and no ticket names. Raises Fenced."""
        lying = await asyncio.to_thread(self._find_unnamed)
        if not lying:
            self._leaving.clear()
            return
        issued, running = (await self._admission.ledger()).issued, await self._admission.running()
        self._leaving = {name: self._leaving.get(name, issued) for name in lying}
        oldest = min(running, default=issued)
        for name in [name for name, first in self._leaving.items() if first <= oldest]:
            await asyncio.to_thread(checkpoint.remove, self._root / name, self._identity.epoch)
            del self._leaving[name]

    def _find_unnamed(self) -> list[str]:
        """Return what lies on disk and is named by no pool and no checkpoint. Blocking."""
        pools = [self.members, *(manifest.pools for _, manifest in checkpoint.list_checkpoints(self._checkpoints))]
        named = {str(member.version) for one in pools for members in one.values() for member in members}
        there = [path.name for path in self._root.iterdir() if path.is_dir()]
        return [name for name in there if name not in named]


def _add(one: tuple[N, N, N], other: tuple[N, N, N]) -> tuple[N, N, N]:
    return one[0] + other[0], one[1] + other[1], one[2] + other[2]


def _halve(member: PoolMember) -> PoolMember:
    won, drawn, lost = member.recent
    return msgspec.structs.replace(member, recent=(won / 2, drawn / 2, lost / 2))
