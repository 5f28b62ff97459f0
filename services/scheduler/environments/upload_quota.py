"""Limits the disk space of a tenant's uploaded environments: removes old versions first, then refuses uploads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set

import msgspec

MIB = 1 << 20


class Quota(msgspec.Struct, frozen=True, kw_only=True):
    """Quota of one tenant: settings upload_tenant_mb and upload_tenant_versions."""

    mb: int
    versions: int


class StoredVersion(msgspec.Struct, frozen=True, kw_only=True):
    """A version that a tenant has, or is about to have."""

    name: str
    version: int
    """0: it is about to be one."""
    pushed: float
    digest: str
    bytes: int
    lock: str
    """Digest of its lock."""
    newest: bool
    """The newest version of its name, which stays."""


class OverQuota(Exception):
    """Nothing is left that could go; the text says how much there is."""


def room(kept: Sequence[StoredVersion], venvs: Mapping[str, int], quota: Quota, used: Set[str]) -> list[StoredVersion]:
    """The versions that have to go, the oldest first, so that the others are within the quota.

    `venvs`: bytes by digest of the lock; what several versions share counts once. `used`: digests of packages that jobs
    play; they stay. Raises OverQuota.
    """
    spare = [one for one in kept if not one.newest and one.digest not in used]
    spare.sort(key=lambda one: (one.pushed, one.version), reverse=True)
    going: list[StoredVersion] = []
    left = list(kept)
    while (size := bytes_of(left, venvs)) > quota.mb * MIB or len(left) > quota.versions:
        if not spare:
            raise OverQuota(
                f"your environments would take {-(-size // MIB)} MB with their virtual environments, in {len(left)}"
                f" versions; you may have {quota.mb} MB (upload_tenant_mb) and {quota.versions} versions"
                " (upload_tenant_versions). Old versions that no job plays have gone, or would not be enough: delete"
                " some with `opentinker env delete NAME[@VERSION]`"
            )
        going.append(spare.pop())
        left.remove(going[-1])
    return going


def bytes_of(kept: Sequence[StoredVersion], venvs: Mapping[str, int]) -> int:
    packages = {one.digest: one.bytes for one in kept}
    return sum(packages.values()) + sum(venvs.get(lock, 0) for lock in {one.lock for one in kept})
