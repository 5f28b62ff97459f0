"""Environments that were pushed, and those that their users serve."""

from typing import Annotated, TypedDict

import msgspec

_Class = TypedDict("_Class", {"class": Annotated[str, msgspec.Meta(description="`module:Class`.")]})
"""A field that Python's syntax has no place for."""


class EnvironmentVersion(_Class):
    """A package that was pushed."""

    version: int
    digest: str
    """Digest of the package's content."""
    pushed: float
    lock: str
    """The file that says what it needs."""
    files: int
    bytes: int


class PushedEnvironment(EnvironmentVersion):
    """Result of a push."""

    name: str
    environment: str
    """Its exact name in a spec."""
    new: bool
    """False: the newest version is the same."""
    checked: bool
    """False: no env worker has tried it yet."""


class EnvironmentSummary(EnvironmentVersion):
    """An environment, with its newest version."""

    name: str
    versions: int


class Environments(TypedDict):
    """All of the tenant."""

    environments: list[EnvironmentSummary]


class Environment(TypedDict):
    """One of them."""

    name: str
    versions: list[EnvironmentVersion]
    """Oldest first."""


class DeletedEnvironment(TypedDict):
    """Deleted versions."""

    name: str
    deleted: list[int]
    """Versions."""


class ServedEnvironment(TypedDict):
    """One that its user serves."""

    environment: str
    """Its name in a spec."""
    processes: int
    """That are connected."""
    sessions: int
    capacity: int
    """Sessions that they take together."""
    classes: list[str]


class ServedEnvironments(TypedDict):
    """Served environments of all schedulers, by name."""

    served: list[ServedEnvironment]


class EnvironmentCheckSummary(TypedDict):
    """A saved report of `opentinker env check`."""

    id: str
    environment: str
    verdict: str
    errors: int
    """Their number."""
    at: float


class EnvironmentChecks(TypedDict):
    """The newest check of each environment, newest first."""

    checks: list[EnvironmentCheckSummary]


class EnvironmentReport(TypedDict):
    """What a check found."""

    environment: str
    verdict: str
    errors: list[str]
    advice: list[str]
    facts: dict[str, str]
    transcript: str
    """An example episode."""
    columns: list[str]
    rows: list[list[str]]


class EnvironmentCheck(EnvironmentCheckSummary):
    """A saved check with its report."""

    report: EnvironmentReport
