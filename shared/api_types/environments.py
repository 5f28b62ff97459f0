"""Environments that were pushed, and those that their users serve."""

from typing import Annotated, Any, TypedDict

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
    built_in: list[str]
    """Names that the env workers offer to everyone."""
    summaries: dict[str, str]
    """A sentence about each of `built_in`; about one that a newer release of the env worker has, none."""


class EnvironmentDescription(TypedDict):
    """The author's description of an environment."""

    name: str
    doc: str
    """Docstring of its class."""
    settings: dict[str, Any]
    """JSON schema of `environment.config`."""
    bots: list[str]
    """Names of its scripted players."""
    seats: list[str]
    """Names of its seats, `""` for a single one without a name. A config may change them: `POST /v1/plays/seats` names
    those of a config."""
    can_fork: bool
    example: str
    """An episode as text, and who played it: of your newest saved check, else of a built-in environment, or what an
    episode of it needs. Empty without either."""


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
    """Findings of a check."""

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


class PlayableSeats(TypedDict):
    """Who may play an environment with one config."""

    environment: str
    """Its exact name."""
    seats: list[str]
    """In their order; empty if only the server that plays the environment knows them."""
    bots: list[str]
    """Scripted players that may take any seat."""
    players: dict[str, str]
    """Bot of each seat, by the `bots` that were asked for; empty for yours."""


class PlayedMessage(TypedDict):
    """A message of a prompt."""

    role: str
    content: str
    images: list[str]
    """PNG or JPEG in base64."""


class PlayedTool(TypedDict):
    """A function that a seat may call."""

    name: str
    description: str
    parameters: dict[str, Any]


class PlayedPrompt(TypedDict):
    """The messages that one seat sees next."""

    seat: str
    stream: str
    messages: list[PlayedMessage]
    tools: list[PlayedTool]


class PlayedEpisode(TypedDict):
    """An episode that a person plays, after its opening or a turn."""

    id: str
    environment: str
    turn: int
    """Number of the next turn."""
    prompts: list[PlayedPrompt]
    """Prompts of the seats that act next: one, or several that act at the same time."""
    reward: float
    """Reward of the seat that has just acted."""
    components: dict[str, float]
    rewards: dict[str, dict[str, float]]
    """Parts of the rewards of other seats."""
    metrics: dict[str, float]
    done: bool
    truncated: bool
    error: str
    """Reason of an episode that failed."""


class EndedPlay(TypedDict):
    """An episode that a person has ended."""

    id: str
    ended: bool
