"""The job spec: what a user writes (TOML, JSON or Python), validated once; all mistakes are reported together.

Every field is used or refused. The text under a field is its documentation (`opentinker spec` prints it).
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, SerializerFunctionWrapHandler, ValidationError, model_serializer, model_validator

from opentinker.shared.spec import algorithm_parts
from opentinker.shared.spec.algorithm import AlgorithmSpec
from opentinker.shared.spec.artifacts import ArtifactSpec, settle_best, settle_kept
from opentinker.shared.spec.base import STORED, SpecPart
from opentinker.shared.spec.data import DataSpec, DpoSpec, settle_supervised
from opentinker.shared.spec.deterministic import broken_promises, cannot_rewind, idle_rewinds
from opentinker.shared.spec.engines import settle_lora, settle_shared
from opentinker.shared.spec.evaluation import (
    EvalJobSpec,
    EvaluationSpec,
    ValidationSpec,
    contradictions,
    settle_evaluation,
)
from opentinker.shared.spec.frozen_models import (
    RewardModelSpec,
    TeacherSpec,
    ValueModelSpec,
    misplaced_critic,
    settle_frozen,
)
from opentinker.shared.spec.labels import DisplayName, Notes, Project, Tags
from opentinker.shared.spec.matches.policies import (
    MatchSpec,
    PolicySpec,
    right_policies,
    settle_policies,
    spec_of,
    too_many_policies,
    with_job_settings,
)
from opentinker.shared.spec.matches.policy_metrics import metric_mistakes
from opentinker.shared.spec.matches.pools import MAX_POOLS, PoolName, PoolSpec, unknown_pools
from opentinker.shared.spec.matches.seats import (
    MAX_POLICIES,
    MAX_SEATS,
    PolicyName,
    SeatName,
    SeatSpec,
    unknown_policies,
)
from opentinker.shared.spec.model import LoraSpec, ModelSpec
from opentinker.shared.spec.near import with_example, with_suggestions
from opentinker.shared.spec.notify import MAX_NOTIFY, NotifySpec
from opentinker.shared.spec.rollout import MAX_OPEN_GROUPS, NO_ENVIRONMENT, EnvironmentSpec, RolloutSpec, ToySpec
from opentinker.shared.spec.serving import AdapterSpec, ServingSpec, settle_serving
from opentinker.shared.spec.start import StartSpec
from opentinker.shared.spec.tinker import TinkerSpec, settle_tinker
from opentinker.shared.spec.tools import ToolSpec
from opentinker.shared.spec.train import SIMULATED, ResourceSpec, TrainSpec, rank_mistakes, settle_gpus, settle_parallel
from opentinker.shared.spec.tree_sampling import settle_tree
from opentinker.shared.types.errors import SpecError
from opentinker.shared.types.mistakes import IS_NEEDED, WHOLE, fill, mistake, mistakes_of, unused

__all__ = [
    "AdapterSpec",
    "AlgorithmSpec",
    "ArtifactSpec",
    "DataSpec",
    "DpoSpec",
    "EnvironmentSpec",
    "EvaluationSpec",
    "JobSpec",
    "LoraSpec",
    "MatchSpec",
    "ModelSpec",
    "PolicySpec",
    "PoolSpec",
    "ResourceSpec",
    "RewardModelSpec",
    "RolloutSpec",
    "SeatSpec",
    "ServingSpec",
    "StartSpec",
    "TeacherSpec",
    "TinkerSpec",
    "ToolSpec",
    "ToySpec",
    "TrainSpec",
    "ValidationSpec",
    "ValueModelSpec",
    "parse_spec",
    "read_stored",
]

SIMULATED_IGNORES = {
    "model": {"lora", "train_vision"},
    "algorithm": set(AlgorithmSpec.model_fields)
    - {"group_size", "groups_per_batch", "max_staleness", "drop_zero_variance", "max_zero_variance_batches"}
    - {"name", "kl_coef", "kl_in", "kl_estimator"},
    "train": {"lr", "warmup_steps", "schedule", "lr_end", "beta1", "beta2", "weight_decay", "grad_clip"}
    | {"tokens_per_micro_batch", "gradient_checkpointing", "parallel", "seed"},
    "resources": {"trainer_gpus", "trainer_ranks", "min_trainer_ranks"},
}
"""By part of the spec. Groups are still dropped for equal rewards, and scored by reference-forward."""
RL_PARTS = {"environment", "algorithm", "rollout", "teacher", "validation", "reward_models", "value_model", "train"}
RL_PARTS |= {"policies", "seats", "match", "pools"}
OF_POLICIES = ("model.", "algorithm.", "train.", "trainer_ranks", "start.")
"""Settings in which a policy may differ from the job."""
PARTS_OF = {
    "rl": RL_PARTS,
    "sft": {"data", "train"},
    "dpo": {"data", "dpo", "train"},
    "inference": {"rollout", "serving"},
    "eval": {"environment", "rollout", "evaluation", "seats"},
    "tinker": {"rollout", "tinker"},
}
"""By kind: the parts that not every kind has. The others are refused where they are written, and are not stored."""
KIND_PARTS: set[str] = set().union(*PARTS_OF.values())
NEEDED: dict[str, tuple[str, ...]] = {
    "rl": ("environment", "train"),
    "sft": ("data", "train"),
    "dpo": ("data", "train"),
    "inference": (),
    "eval": ("environment",),
    "tinker": (),
}


class JobSpec(SpecPart):
    name: DisplayName
    """Free text, 200 characters at most, e.g. "Qwen3 run 2"; the server assigns the job's id."""
    project: Project = ""
    """Project that the job belongs to; any text."""
    tags: Tags = []
    """Words to find the job by, e.g. ["baseline", "lr-sweep"], without commas."""
    notes: Notes = ""
    """Notes for people, 10,000 characters at most. `name`, `project`, `tags` and `notes` can be changed later
    (`opentinker label`)."""
    kind: Literal["rl", "sft", "dpo", "inference", "eval", "tinker"] = "rl"
    """`rl`: reinforcement learning in an environment. `sft`: supervised learning from rows of data. `dpo`: learning
    from preferences between two completions. sft and dpo use [data], and neither [environment], [algorithm], [rollout]
    nor their dependent tables. `inference`: serves an OpenAI-compatible endpoint without training; uses [serving], and
    engine, toy, context_length and lora of [rollout]. `eval`: plays an environment with fixed weights as [evaluation]
    says. `tinker`: serves the Tinker API, whose clients train adapters of model.base, or all its weights, themselves;
    see docs/tinker.md."""
    model: ModelSpec
    """The model that is trained, served or evaluated."""
    environment: EnvironmentSpec = NO_ENVIRONMENT
    """rl, eval: what is played."""
    algorithm: AlgorithmSpec = AlgorithmSpec()
    """rl: how rewards become updates; a preset, and what differs from it."""
    rollout: RolloutSpec = RolloutSpec()
    """The engine, and how it samples."""
    policies: Annotated[dict[PolicyName, PolicySpec], Field(max_length=MAX_POLICIES)] = {}
    """Policies that learn in one game, by name. Each has separate weights, optimizer, metrics and checkpoints. Without
    this table the job has one policy, which plays every seat that [seats] leaves to it. See docs/policies.md."""
    seats: Annotated[dict[SeatName, SeatSpec], Field(max_length=MAX_SEATS)] = {}
    """Players of the seats of the environment, by name or pattern (`player_*`): `white = "NAME"` for one of [policies],
    `white = { bot = "NAME" }` for a scripted player of the environment, `white = { frozen = "JOB@STEP" }` for a
    checkpoint, `white = { url = "https://...", model = "NAME" }` for a model behind a URL, `white = { pool = "NAME" }`
    for one of [pools]. A seat's own name counts before patterns."""
    pools: Annotated[dict[PoolName, PoolSpec], Field(max_length=MAX_POOLS)] = {}
    """Opponent pools: past versions of a policy, which play seats and do not learn."""
    match: MatchSpec | None = None
    """How the matches of [policies] are played."""
    teacher: TeacherSpec | None = None
    """Teacher of on-policy distillation."""
    validation: ValidationSpec | None = None
    """Scheduled evaluations; none without this table. sft and dpo configure theirs in [data]."""
    reward_models: Annotated[list[RewardModelSpec], Field(max_length=16)] = []
    """Models whose scores are added to the environment's rewards, except in episodes of [validation]."""
    value_model: ValueModelSpec | None = None
    """Frozen model for the values of algorithm.advantage = "gae", instead of a trained critic."""
    data: DataSpec | None = None
    """sft, dpo: the rows."""
    dpo: DpoSpec | None = None
    """dpo: the loss."""
    serving: ServingSpec = ServingSpec()
    """inference: of the endpoint."""
    tinker: TinkerSpec = TinkerSpec()
    """tinker: of the models that clients train."""
    evaluation: EvalJobSpec = EvalJobSpec()
    """eval: which episodes, and how they are sampled."""
    train: TrainSpec = TrainSpec()
    """Needed, but for inference, eval and tinker."""
    start: StartSpec | None = None
    """Start from the checkpoint of another job instead of the weights in model.base; inference: serve it; eval: play
    with it."""
    notify: Annotated[list[NotifySpec], Field(max_length=MAX_NOTIFY)] = []
    """Recipients of a message when the job ends, raises an alarm or reaches a target; see docs/notifications.md."""
    resources: ResourceSpec = ResourceSpec()
    """Workers and GPUs, and the place in the queue."""
    artifacts: ArtifactSpec = ArtifactSpec()
    """Artifacts that are kept, and for how long."""

    STAND_INS: ClassVar[dict[str, Any]] = {
        "name": "x",
        "model": {"base": "x"},
        "environment": {"name": "x"},
        "train": {"steps": 1},
    }

    @model_validator(mode="before")
    @classmethod
    def _inherit(cls, data: Any) -> Any:
        """Policies have the job's settings where they say nothing."""
        return with_job_settings(data) if isinstance(data, dict) else data

    @classmethod
    def written(cls, data: dict[str, Any]) -> list[dict[str, Any]]:
        """Return mistakes in parts and lengths that the kind needs or does not have."""
        kind = data.get("kind", "rl")
        if not isinstance(kind, str) or kind not in PARTS_OF:
            return []
        there = {name for name, value in data.items() if value is not None}
        others = sorted((KIND_PARTS - PARTS_OF[kind]) & there)
        found = [mistake(part, data[part], f"does not apply to kind = {kind!r}") for part in others]
        found += [mistake(part, None, f"{IS_NEEDED} for kind = {kind!r}") for part in NEEDED[kind] if part not in there]
        found += misplaced_critic(data) + unknown_policies(data) + unknown_pools(data) + too_many_policies(data)
        return found + _length(kind, data.get("train"), data.get("data"))

    @classmethod
    def stand_ins(cls, data: dict[str, Any], wrong: set[Any]) -> dict[str, Any]:
        found = super().stand_ins(data, wrong)
        return {**found, "policies": right_policies(data)} if "policies" in wrong else found

    @model_serializer(mode="wrap")
    def _own_parts(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Without the parts of other kinds."""
        others = KIND_PARTS - PARTS_OF[self.kind]
        return {name: value for name, value in handler(self).items() if name not in others}

    def resolve(self) -> list[dict[str, Any]]:
        if self.kind == "inference":
            found = settle_serving(self) + settle_lora(self) + settle_kept(self.kind, self.artifacts)
            return found + settle_gpus(self) + settle_shared(self)
        if self.kind == "tinker":
            found = settle_tinker(self) + settle_kept(self.kind, self.artifacts)
            return found + settle_gpus(self) + settle_shared(self)
        if self.start is not None and self.start.live:
            why = "only an inference job follows a live policy; take @latest"
            return [mistake("start.from", self.start.checkpoint, f"does not apply to kind = {self.kind!r}: {why}")]
        if self.kind == "eval":
            found = self._untaught_tools() + settle_evaluation(self) + settle_policies(self) + settle_lora(self)
            return found + settle_kept(self.kind, self.artifacts) + settle_gpus(self) + settle_shared(self)
        if self.kind != "rl":
            evaluated = self.data is not None and self.data.validation is not None
            found = settle_supervised(self) + cannot_rewind(self) + settle_best(self.artifacts, evaluated=evaluated)
            return found + settle_shared(self) + settle_parallel(self)
        found = self._settle_learning() + ([] if self.policies else settle_parallel(self))
        for name in self.policies:
            found += self._settle_policy(name)
        found += self._untaught_tools() + self._at_once() + settle_frozen(self) + settle_policies(self)
        found += settle_tree(self) + settle_lora(self) + settle_gpus(self) + rank_mistakes(self)
        found += settle_best(self.artifacts, evaluated=self.validation is not None)
        found += settle_shared(self)
        return found + broken_promises(self) + cannot_rewind(self) + contradictions(self)

    def mistakes_at_submission(self) -> list[dict[str, Any]]:
        return metric_mistakes(self) + idle_rewinds(self)

    def _settle_learning(self) -> list[dict[str, Any]]:
        """Return mistakes between [model], [algorithm] and [train], of the job or of a policy."""
        found = []
        if self.train.learner == "simulated":
            usual: dict[str, SpecPart] = {
                "model": ModelSpec(base="x"),
                "algorithm": AlgorithmSpec(name=self.algorithm.name),
                "train": TrainSpec(steps=1),
                "resources": ResourceSpec(),
            }
            for part, default in usual.items():
                ignored = unused(getattr(self, part), default, SIMULATED_IGNORES[part], f"train.{SIMULATED}")
                derived = self._overlong()  # of a spec that was settled before
                ignored = [one for one in ignored if one["value"] != derived.get(one["field"])]
                if any(one["field"] in algorithm_parts.PARTS for one in ignored):  # its options come with it
                    ignored = [one for one in ignored if one["field"] not in algorithm_parts.OPTIONS]
                found += [{**one, "field": f"{part}.{one['field']}"} for one in ignored]
            if self.start is not None and self.start.optimizer:
                found.append(mistake("start.optimizer", True, f"does not apply to train.{SIMULATED}"))
        return found + self._settle_overlong()

    def _settle_policy(self, name: str) -> list[dict[str, Any]]:
        own = spec_of(self, name)
        found = own._settle_learning() + settle_parallel(own) + contradictions(own)
        if own._untaught_tools():
            found.append(mistake("model.chat_template", "plain", "cannot tell the model of environment.tools"))
        settled = {"algorithm": own.algorithm, "trainer_ranks": own.resources.ranks}
        fill(self, {"policies": {**self.policies, name: self.policies[name].model_copy(update=settled)}})
        if own.resources.ranks != self.resources.ranks:
            found = [{**m, "field": m["field"].removeprefix("resources.")} for m in found]
        return [{**m, "field": f"policies.{name}.{m['field']}"} for m in found if m["field"].startswith(OF_POLICIES)]

    def _at_once(self) -> list[dict[str, Any]]:
        rollout = self.rollout
        groups, episodes = rollout.max_concurrent_groups, self.algorithm.group_size + rollout.oversample
        if groups * episodes <= MAX_OPEN_GROUPS:
            return []
        most = f"the {MAX_OPEN_GROUPS:,} that one rollout worker plays"
        problem = f"times {episodes} episodes per group is more than {most}"
        return [mistake("rollout.max_concurrent_groups", groups, problem)]

    def _untaught_tools(self) -> list[dict[str, Any]]:
        if not self.environment.tools or self.model.chat_template != "plain":
            return []
        problem = "need a chat template that tells the model of them: model.chat_template is 'plain'"
        return [mistake("environment.tools", len(self.environment.tools), problem)]

    def _settle_overlong(self) -> list[dict[str, Any]]:
        """Overlong shaping takes its lengths from `rollout.max_tokens`."""
        if not self.algorithm.overlong_shaping:
            return []
        update = self._overlong()
        length, buffer = update.values()
        longest = self.rollout.max_tokens
        found = [
            mistake(f"algorithm.{field}", value, f"is larger than {name}={bound}")
            for field, value, name, bound in (
                ("overlong_length", length, "rollout.max_tokens", longest),
                ("overlong_buffer", buffer, "overlong_length", length),
            )
            if value > bound
        ]
        if not found:
            fill(self, {"algorithm": self.algorithm.model_copy(update=update)})
        return found

    def _overlong(self) -> dict[str, int]:
        length = self.algorithm.overlong_length or self.rollout.max_tokens
        return {"overlong_length": length, "overlong_buffer": self.algorithm.overlong_buffer or -(-length // 5)}


def _length(kind: str, train: Any, data: Any) -> list[dict[str, Any]]:
    """Return mistakes in the job's length. `train`, `data`: those parts as written."""
    if not isinstance(train, dict) or (kind != "rl" and not isinstance(data, dict)):
        return []
    steps, epochs = train.get("steps", 0), None if kind == "rl" else data.get("epochs")
    if steps == 0 and epochs is None:
        either = " (or data.epochs)" if kind != "rl" else ""
        return [mistake("train.steps", train.get("steps"), f"{IS_NEEDED}{either}, 1 or more")]
    if steps != 0 and epochs is not None:
        return [mistake("data.epochs", epochs, "and train.steps both say how long: give one")]
    return []


SWEPT = "this is a sweep, not a job: `opentinker up`, then `opentinker submit FILE` (docs/sweeps.md)"
MAX_MISTAKES = 100
"""Mistakes of a spec that are reported: each unknown setting is compared with all settings."""


def read_stored(data: Any) -> JobSpec:
    """Return the spec of a job that was accepted once, maybe by an earlier release: what only a submission is refused
    for is no mistake in it. Raises SpecError."""
    return parse_spec(data, stored=True)


def parse_spec(data: Any, *, stored: bool = False) -> JobSpec:
    """Validate plain data. Raises SpecError with one entry per mistake: field, value, problem, maybe a suggestion; of
    more than MAX_MISTAKES the first ones. `stored`: see `read_stored`."""
    if isinstance(data, dict) and data.get("sweep", data) is None:
        data = {name: value for name, value in data.items() if name != "sweep"}
    try:
        return JobSpec.model_validate(data, context=STORED if stored else None)
    except ValidationError as error:
        found = _once([one for item in error.errors(include_url=False) for one in mistakes_of(item)])
    if len(found) > MAX_MISTAKES:
        problem = f"has {len(found) - MAX_MISTAKES} more mistakes, which are not shown"
        found = [*found[:MAX_MISTAKES], mistake(WHOLE, None, problem)]
    if data == {}:
        problem = "is empty: a job says at least what stands below; `opentinker spec` prints every setting"
        found.insert(0, mistake(WHOLE, None, problem))
    for one in found:
        if one["field"] == "sweep" or (one["field"], one["value"]) == ("kind", "sweep"):
            raise SpecError([mistake("sweep", None, SWEPT)])  # its parameters may set what else is missing
    kind = data.get("kind", "rl") if isinstance(data, dict) else "rl"
    absent = KIND_PARTS - PARTS_OF[kind] if isinstance(kind, str) and kind in PARTS_OF else set()
    raise SpecError(with_suggestions(map(with_example, found), JobSpec, absent))


def _once(mistakes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Drop mistakes that policies inherit from the job: policies.NAME.train.lr repeats train.lr."""
    own = {(one["field"], one["problem"]) for one in mistakes}

    def inherited(one: dict[str, Any]) -> bool:
        table, _, rest = one["field"].partition(".")
        return table == "policies" and (rest.partition(".")[2], one["problem"]) in own

    return [one for one in mistakes if not inherited(one)]
