"""Evaluation of a policy, while its job trains or by a job of kind `eval`: separate start states, one version of the
weights, greedy by default."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from opentinker.shared.spec.base import SpecPart, Steps, Tokens
from opentinker.shared.spec.matches.pools import PoolName
from opentinker.shared.spec.matches.seat_lists import SeatEntry, SeatLists, is_pattern, play_themselves, settle_lists
from opentinker.shared.spec.matches.seats import (
    MAX_SEATS,
    MODEL_NAME_CHARACTERS,
    PLAYERS,
    PolicyName,
    SeatSpec,
    player_at,
)
from opentinker.shared.spec.serving import nothing_trained
from opentinker.shared.types.match_results import BOT
from opentinker.shared.types.mistakes import Mistake, mistake, unused

if TYPE_CHECKING:
    from opentinker.shared.spec import JobSpec

PREFIX = "val/"
"""Prefix of every metric of an evaluation."""
REWARD = re.compile(r"val/(task/.+/)?reward(/|$)")
"""Metrics of an evaluation that are made of rewards."""
TOY_IGNORES = ("temperature", "top_p", "top_k")
KIND = "eval"
UNUSED = {"temperature", "top_p", "top_k", "oversample", "opening_mismatch", "transcripts", "seed"}
"""Fields of [rollout] that [evaluation] replaces in a job of that kind."""
MAX_EPISODES = 200_000
"""Episodes per evaluation."""
MAX_OPPONENTS = 8
TWICE = "names an opponent twice: win rates are by name"


class EvaluationSpec(SpecPart):
    """The episodes of an evaluation. Its metrics are named val/... in both kinds of evaluation."""

    episodes: Annotated[int, Field(gt=0, le=MAX_EPISODES)] = 64
    """Start states per evaluation, played `samples` times each; always the same ones. Both together at most 200,000
    episodes."""
    samples: Annotated[int, Field(ge=1, le=1024)] = 1
    """Episodes per start state, which give val/pass/K, the probability that at least one of K solves it, for K up to
    `samples`. More than 1 needs temperature > 0."""
    solved_at: Annotated[float, Field(ge=-1e12, le=1e12)] = 1.0
    """Smallest reward with which an episode counts as solved."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """Seed of start states and sampling. Rows are 0, 1, 2...; seeds are never those of training."""
    temperature: Annotated[float, Field(ge=0.0, le=2.0)] = 0.0
    """0: greedy."""
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """As in [rollout]; not with temperature = 0."""
    top_k: Annotated[int, Field(ge=0, le=1_000_000)] = 0
    """As in [rollout]; not with temperature = 0."""
    max_tokens: Tokens | None = None
    """Sampled tokens per episode; default: rollout.max_tokens."""
    transcripts: Annotated[int, Field(ge=0, le=1000)] = 8
    """Number of episodes, from the first, whose transcripts are kept for every evaluation, up to 100,000 characters
    each (`opentinker transcripts`); above 0, also two of each outcome (solved, unsolved, won, drawn, lost) against each
    opponent."""

    def resolve(self) -> list[dict[str, Any]]:
        found = []
        if self.temperature == 0:
            found = [
                mistake(name, getattr(self, name), "does not apply to temperature = 0")
                for name in ("top_p", "top_k")
                if getattr(self, name) != type(self).model_fields[name].default
            ]
            if self.samples > 1:
                problem = "would all be alike at temperature = 0: raise the temperature, or leave samples at 1"
                found.append(mistake("samples", self.samples, problem))
        if self.total > MAX_EPISODES:
            problem = f"times samples = {self.samples} is more than {MAX_EPISODES} episodes"
            found.append(mistake("episodes", self.episodes, problem))
        return found

    @property
    def total(self) -> int:
        """Episodes of one evaluation."""
        return self.episodes * self.samples


class EvalJobSpec(EvaluationSpec):
    """Settings of a job of kind eval that tell teammates and opponents apart, so that games count as in training."""

    team: SeatLists | None = None
    """Teams, as in [algorithm]: a player in a team with the evaluated model is not its opponent."""
    opponents: Annotated[list[SeatEntry], Field(max_length=MAX_SEATS)] = []
    """Entries of [seats] whose players are opponents, unless they are teammates; all players that are not named here
    are neutral, such as a judge. `opentinker eval` names the seats of policies. By default all players outside the team
    are opponents; a model that plays several seats without a team has none."""


class OpponentSpec(SeatSpec):
    """The player, in an evaluation, of the seats that the evaluated policy does not play: exactly one of policy, bot,
    frozen and url."""

    policy: PolicyName | None = None
    """One of [policies], with the weights that it has at that time. A policy is not evaluated against itself."""
    pool: PoolName | None = None
    """Not possible: the members of a pool change. Name a checkpoint or a bot."""
    name: Annotated[str, Field(min_length=1, max_length=MODEL_NAME_CHARACTERS)] | None = None
    """url: part of metric names; default: `model`. Two opponents of one name need it."""

    MAY_PLAY = tuple(player for player in PLAYERS if player != "pool")

    @property
    def metric_name(self) -> str:
        """Part of metric names: of a policy, a bot, a checkpoint (`JOB@STEP`), or a model behind a URL."""
        if self.url is not None:
            return self.name or str(self.model)
        return self.policy or self.bot or self.frozen or ""

    def resolve(self) -> list[Mistake]:
        if self.pool is None:
            return super().resolve() or self._wrong_name()
        problem = (
            "plays in no evaluation: its members change, so win rates of different steps would not be comparable; "
            "name a checkpoint, e.g. frozen = 'JOB@STEP', or a bot"
        )
        return [mistake("pool", self.pool, problem)]

    def _wrong_name(self) -> list[Mistake]:
        if self.name is None or (self.url is not None and self.name.isprintable()):
            return []
        named = "must be printable" if self.url is not None else "belongs to a url; others have that of their player"
        return [mistake("name", self.name, named)]


class ValidationSpec(EvaluationSpec):
    """An evaluation plays its episodes with one version of the weights. No later version is published until it ends;
    training continues as far as max_staleness allows. The last weights are always evaluated. Reward models do not score
    evaluations: rewards are the environment's alone."""

    every: Steps
    """Optimizer steps between evaluations; training waits for an evaluation that takes longer."""
    at_start: bool = True
    """Also evaluate the initial weights."""
    config: dict[str, Any] = {}
    """Overrides of environment.config, e.g. {"split" = "test"}."""
    against: Annotated[list[OpponentSpec], Field(max_length=MAX_OPPONENTS)] = []
    """Opponents, each of which plays all `episodes` from the same start states. It takes the seats of other policies
    and pools, else all that the policy does not play; a policy that plays every seat takes one at a time, in turn.
    Gives val/winrate/OPPONENT and, from all opponents but policies, val/rating. By default an evaluation is played by
    those that [seats] names."""
    timeout_s: Annotated[float, Field(gt=0.0, le=604_800.0)] = 600.0
    """Time limit, after which an evaluation ends with its finished episodes and reports the missing ones."""

    def resolve(self) -> list[dict[str, Any]]:
        found = super().resolve()
        names = [opponent.metric_name for opponent in self.against]
        if (twice := next((name for name in names if names.count(name) > 1), None)) is not None:
            places = " and ".join(str(place) for place, name in enumerate(names) if name == twice)
            problem = f"{TWICE}. Entries {places} are named {twice!r}: leave out all but one, or give a url a `name`"
            found.append(mistake("against", names, problem))
        if taken := sorted({"low", "high"} & {name.rpartition("/")[2] for name in names}):
            problem = f"must not be named {' or '.join(taken)}: these are the bounds of val/winrate"
            found.append(mistake("against", names, problem))
        if self.total * len(self.against) > MAX_EPISODES >= self.total:
            problem = f"times samples = {self.samples} and {len(names)} opponents is more than {MAX_EPISODES} episodes"
            found.append(mistake("episodes", self.episodes, problem))
        return found

    def opponents_of(self, policy: str) -> list[OpponentSpec]:
        """Return those that a policy is evaluated against, in order; empty: by the players that [seats] names."""
        return [opponent for opponent in self.against if opponent.policy is None or opponent.policy != policy]

    def anchors_of(self, policy: str) -> list[str]:
        """Return the opponents of a policy that always play alike, by which its weights are rated: bots, then
        checkpoints, then models behind URLs. The first one has the rating 0."""
        return [one.metric_name for one in self._anchoring(policy)]

    def anchor_of(self, policy: str) -> str:
        """Return the first of them as results of matches name it; empty without any."""
        return next((one.player or f"{BOT}{one.bot}" for one in self._anchoring(policy)), "")

    def _anchoring(self, policy: str) -> list[OpponentSpec]:
        opponents = self.opponents_of(policy)
        return [one for kind in ("bot", "frozen", "url") for one in opponents if getattr(one, kind) is not None]

    def total_of(self, policy: str) -> int:
        """Return the episodes of one evaluation of a policy."""
        return self.total * max(1, len(self.opponents_of(policy)))


def settle_evaluation(spec: JobSpec) -> list[dict[str, Any]]:
    """Return mistakes between the parts of a job of kind `eval`."""
    usual = type(spec.rollout)()
    ignored = unused(spec.rollout, usual, UNUSED, f"kind = {KIND!r}, which samples as [evaluation] says")
    found = [{**mistake, "field": f"rollout.{mistake['field']}"} for mistake in ignored]
    found += settle_lists("evaluation.team", spec.evaluation.team or {})
    unknown = [entry for entry in spec.evaluation.opponents if entry not in spec.seats]
    problem = f"is no entry of [seats], which has: {', '.join(spec.seats) or 'none'}"
    found += [mistake("evaluation.opponents", entry, problem) for entry in unknown]
    return found + nothing_trained(spec) + _drawn_by_toy(spec, "evaluation", spec.evaluation)


def contradictions(spec: JobSpec) -> list[dict[str, Any]]:
    """Return mistakes between [validation] and the other parts."""
    validation = spec.validation
    if validation is None:
        named = sorted(name for name in spec.train.target if name.startswith(PREFIX))
        return [mistake(f"train.target.{name}", spec.train.target[name], "needs [validation]") for name in named]
    judged = sorted(name for name in spec.train.target if REWARD.match(name)) if spec.reward_models else []
    judges = ", ".join(judge.name for judge in spec.reward_models)
    problem = (
        f"is the environment's reward alone: no evaluation is judged by [[reward_models]] ({judges}). Name a metric "
        "that the environment reports, or reward/mean"
    )
    found = [mistake(f"train.target.{name}", spec.train.target[name], problem) for name in judged]
    return found + _drawn_by_toy(spec, "validation", validation) + _opponent_mistakes(spec, validation)


def _opponent_mistakes(spec: JobSpec, validation: ValidationSpec) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for place, opponent in enumerate(validation.against):
        if opponent.policy is not None and opponent.policy not in spec.policies:
            known = f"its policies are: {', '.join(spec.policies)}" if spec.policies else "it has no [policies]"
            problem = f"is not a policy of this job; {known}"
            found.append(mistake(f"validation.against.{place}.policy", opponent.policy, problem))
        elif opponent.policy is not None and len(spec.policies) == 1:
            problem = "is the job's only policy, and none is evaluated against itself: name a bot or a checkpoint"
            found.append(mistake(f"validation.against.{place}.policy", opponent.policy, problem))
    patterns = [seat for seat in spec.seats if is_pattern(seat)]
    problem = ""
    if not spec.seats:
        problem = "needs [seats]: they say which seats the policy plays, and which its opponent"
    elif len(spec.policies) == 1 and patterns and all(player.policy for player in spec.seats.values()):
        problem = f"needs [seats] without patterns ({', '.join(patterns)}): the policy plays them all, and keeps one"
    if validation.against and problem:
        found.append(mistake("validation.against", len(validation.against), problem))
    return found


def ambiguous_opponents(spec: JobSpec, there: Sequence[str]) -> list[Mistake]:
    """Return a mistake if a policy plays several seats, not as a team, and fixed players all others: an opponent would
    take those, such as a judge's, and the policy play against itself. Not a part of `parse_spec`: such jobs were
    accepted once. `there`: the environment's seats; empty: not known. Blocking, as `mistakes_in_seats`."""
    validation = spec.validation
    if validation is None or not validation.against:
        return []
    players = {seat: player_at(spec.seats, seat) for seat in there or spec.seats}
    tables = {name: own.algorithm for name, own in spec.policies.items()} or {"": spec.algorithm}
    for name, algorithm in tables.items():
        mine = [seat for seat, player in players.items() if (player.policy if player else "") == name]
        others = {seat: player for seat, player in players.items() if seat not in mine}
        are_fixed = all(player is not None and player.is_fixed for player in others.values())
        if others and are_fixed and play_themselves(algorithm.team or {}, mine) and validation.opponents_of(name):
            who = f"policy {name!r}" if name else "the policy"
            problem = (
                f"would take {', '.join(map(repr, others))}, while {who} plays {', '.join(map(repr, mine))} against "
                "itself. Give the opponent's seat to a policy of its own or a pool, or, if these are a team, say so "
                "with algorithm.team"
            )
            return [mistake("validation.against", len(validation.against), problem)]
    return []


def _drawn_by_toy(spec: JobSpec, part: str, exam: EvaluationSpec) -> list[dict[str, Any]]:
    if spec.rollout.engine != "toy":
        return []
    usual = {"temperature": (0.0, 1.0), "top_p": (1.0,), "top_k": (0,)}
    return [
        mistake(f"{part}.{name}", value, "does not apply to engine = 'toy'")
        for name in TOY_IGNORES
        if (value := getattr(exam, name)) not in usual[name]
    ]


def exam_of(spec: JobSpec) -> EvaluationSpec | None:
    """Return the table by which the job is evaluated; None if it never is."""
    return spec.evaluation if spec.kind == KIND else spec.validation


def validation_episodes(spec: JobSpec) -> JobSpec:
    """The spec by which the episodes of its evaluations are played; there must be some."""
    exam = exam_of(spec)
    assert exam is not None
    update: dict[str, Any] = {
        "temperature": exam.temperature,
        "top_p": exam.top_p,
        "top_k": exam.top_k,
        "max_tokens": exam.max_tokens or spec.rollout.max_tokens,
        "seed": exam.seed,
    }
    over = exam.config if isinstance(exam, ValidationSpec) else {}
    environment = {"config": {**spec.environment.config, **over}}
    return spec.model_copy(
        update={
            "rollout": spec.rollout.model_copy(update=update),
            "environment": spec.environment.model_copy(update=environment),
        }
    )
