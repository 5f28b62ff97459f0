"""Transcripts of a job's episodes: messages, tokens and rewards."""

from typing import Any, NotRequired, TypedDict


class Said(TypedDict):
    """A message of an episode, as text."""

    role: str
    content: str
    tool: NotRequired[str]
    """Name of the tool whose result the message is."""
    call_ms: NotRequired[float]
    """Milliseconds that the call of the tool took."""
    images: NotRequired[list[str]]
    """Keys of its images among those of the episode, which has the first ones only."""


class Shown(Said):
    """A message of a training episode."""

    turn: NotRequired[int]
    """Turn of the episode, counted over all seats, in which a policy sampled the message. Seats that act at the same
    time have the same turn."""
    tokens: NotRequired[list[int]]
    """[first, after last]: places of the sampled tokens in this view."""
    versions: NotRequired[list[str]]
    """Weights that sampled the tokens, EPOCH.STEP."""
    reward: NotRequired[float]
    """Reward of the turn."""
    untrainable: NotRequired[str]
    """Why the turn is not trained; absent if it is."""


class Tokens(TypedDict):
    """The first tokens of an episode, column by column."""

    text: list[str]
    ids: list[int]
    mask: list[int]
    """1: sampled by the policy."""
    logprobs: list[float]
    """Log-probabilities under the sampling distribution."""
    advantages: list[float] | None
    versions: list[list[Any]]
    """[first token, the one after the last, weights]."""
    left_out: int


class SeenTokens(TypedDict):
    """One seat's view of an evaluation episode in one of its contexts."""

    seat: str
    stream: str
    tokens: Tokens
    policy: NotRequired[str]
    """Player of the seat, as in View."""


class Heard(Said):
    """A message of an evaluation episode, in the order of play; of several seats or contexts, with whose it is."""

    seat: NotRequired[str]
    """Seat that said it or was shown it."""
    stream: NotRequired[str]
    """Context of the seat, by name."""
    policy: NotRequired[str]
    """Player of the seat, as in View."""
    turn: NotRequired[int]
    """Turn of the episode, counted over all seats, in which the seat said it. Absent: it was shown the message."""
    tokens: NotRequired[list[int]]
    """[first, after last]: places of its tokens in the seat's view."""
    versions: NotRequired[list[str]]
    """Weights that sampled the tokens, EPOCH.STEP."""


class Estimate(TypedDict):
    """A mean over start states."""

    value: float
    low: float | None
    """Its 95% interval, Wilson's for shares; null where one start state says nothing of the spread."""
    high: float | None


class Category(TypedDict):
    """The episodes of an evaluation that have the metric `task/NAME`."""

    name: str
    episodes: int
    reward: Estimate
    solved: Estimate
    """Share of the episodes with a reward of at least `solved_at`."""


class Transcript(TypedDict):
    """An episode of an evaluation."""

    index: int
    state: NotRequired[int]
    """Number of its start state, where each is played several times or against opponents from `against`."""
    sample: NotRequired[int]
    """Number of this play of the start state."""
    row: NotRequired[int]
    """Number of its row in the data set, as `GET /v1/jobs/{id}/rows` has it."""
    opponent: NotRequired[str]
    """Name of the opponent from `against` of [validation], otherwise the players of the other seats from [seats]; where
    other players have seats."""
    outcome: NotRequired[float]
    """1 for a win, 0.5 for a draw, 0 for a loss; where other players have seats."""
    reward: float
    solved: bool
    """Whether the reward is at least `solved_at`."""
    seats: NotRequired[dict[str, float]]
    """Rewards, where several play."""
    metrics: dict[str, float]
    ending: str
    messages: list[Heard]
    views: NotRequired[list[SeenTokens]]
    """The same token by token. Absent in episodes that earlier versions kept."""
    images: NotRequired[dict[str, str]]
    """The first images, PNG or JPEG in Base64, by digest."""


class Transcripts(TypedDict):
    """Transcripts of one step; `steps`: those with transcripts."""

    steps: list[int]
    step: int | None
    outcomes: dict[str, int]
    """Transcripts of the step without the filter: solved and unsolved; won, drawn and lost where other players have
    seats."""
    opponents: dict[str, dict[str, int]]
    """Transcripts won, drawn and lost, by opponent."""
    transcripts: list[Transcript]


class View(TypedDict):
    """One seat's view of an episode."""

    seat: str
    stream: str
    """Context of the seat, by name."""
    policy: NotRequired[str]
    """Player of the seat: one of several policies, a checkpoint (`JOB@STEP`) or a model behind a URL (`MODEL@URL`);
    empty: the policy of a job that has one."""
    reward: float
    messages: list[Shown]
    tokens: Tokens | None
    """Without advantages where another policy played the seat: only its own trainer knows them."""


class Rollout(TypedDict):
    """A training episode."""

    step: int
    group: int
    sample: int
    row: NotRequired[int]
    """Number of its row in the data set, as `GET /v1/jobs/{id}/rows` has it."""
    environment: str
    worker: str
    versions: list[str]
    """Weights that sampled it, EPOCH.STEP."""
    reward: float
    rewards: dict[str, float]
    """By seat."""
    group_rewards: dict[str, list[float]]
    """By seat, of each sample."""
    components: dict[str, float]
    scores: dict[str, float]
    metrics: dict[str, float]
    ending: str
    stops: list[str]
    tokens: int
    turns: int
    seconds: float
    views: list[View]
    """Views of all seats; first those of the policy that trained on the episode."""
    order: NotRequired[list[list[int]]]
    """Messages of all views in the order of play: [place of the view, place of the message]. Absent in episodes that
    earlier versions kept."""
    images: NotRequired[dict[str, str]]
    """The first images, PNG or JPEG in Base64, by digest."""


class Rollouts(TypedDict):
    """Episodes of one step; `steps`: those with episodes."""

    steps: list[int]
    step: int | None
    rollouts: list[Rollout]
