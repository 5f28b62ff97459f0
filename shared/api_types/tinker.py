"""Models of the clients of a Tinker server."""

from typing import TypedDict


class ModelCheckpoint(TypedDict):
    """A named save of a model."""

    path: str
    """tinker://MODEL/KIND/NAME, as clients load it."""
    kind: str
    """`weights` has the optimizer's state too, `sampler_weights` is for sampling, `external_weights` for downloads."""
    name: str
    step: int
    """Optimizer steps of the model when it was saved."""
    created: float
    bytes: int
    expires: float | None
    """Unix seconds at which it is deleted; null: it is kept."""
    public: bool
    """Whether all tenants may load it."""


class ServedModel(TypedDict):
    """A model of a client: an adapter of the server's base."""

    id: str
    session: str
    base: str
    rank: int
    start: str
    """Path of the checkpoint that it began with; empty: fresh weights."""
    created: float
    used: float
    """Unix seconds of its last command."""
    alive: bool
    """Whether the client of its session sends heartbeats."""
    metadata: dict[str, str]
    """Metadata that its client gave."""
    passes: int
    """Commands `forward` and `forward_backward` that were carried out."""
    steps: int
    """Optimizer steps."""
    tokens: int
    """Tokens of all passes."""
    loss: float | None
    """Mean of a token in the newest passes; null: there were none."""
    curve: list[float]
    """Losses so far, oldest first, as some dozens of values."""
    queue_s: float
    """Mean seconds that the newest passes waited for those of others."""
    waiting: int
    """Commands without an answer."""
    waiting_for: str
    """Reason why the first of them waits; empty: none waits."""
    checkpoints: list[ModelCheckpoint]
    """Newest first."""


class OtherModels(TypedDict):
    """Models of other tenants on a server, as its own tenant sees them."""

    models: int
    alive: int
    """Number of those that belong to a client that sends heartbeats."""
    waiting: int
    """Commands without an answer."""


class ServedModels(TypedDict):
    """A page of a Tinker server's models: those of one's own tenant, the last used first."""

    base: str
    queue: str
    """How full the trainer's slots are, and how many commands wait for their tokens' turn; empty: it is not running."""
    models: list[ServedModel]
    total: int
    """Models of one's own tenant."""
    others: OtherModels | None
    """Null for tenants to which the server is open: it is not theirs."""
