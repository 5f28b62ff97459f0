"""The job spec: what a user writes (TOML, JSON or Python), validated once, with every mistake reported at once.

Every field is used or refused. The text under a field is its documentation (`opentinker spec` prints it).
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

import orjson
from pydantic import BaseModel, ConfigDict, Field, ModelWrapValidatorHandler, ValidationError, model_validator

from opentinker.shared import algorithms
from opentinker.shared.errors import SpecError
from opentinker.shared.mistakes import Mistakes, fill, mistakes_of, unused

Positive = Annotated[int, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
NAME = r"^[a-z0-9][a-z0-9_-]{0,62}$"


class Part(BaseModel):
    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=True,
        protected_namespaces=(),
        allow_inf_nan=False,
        serialize_by_alias=True,
    )
    STAND_INS: ClassVar[dict[str, Any]] = {}
    """Take the place of wrong values of required fields, so that contradictions between the others can be judged."""

    def settle(self) -> list[dict[str, Any]]:
        """Fills in what follows from other fields; returns what is wrong between fields right in themselves."""
        return []

    @model_validator(mode="wrap")
    @classmethod
    def _every_mistake(cls, data: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        """Fields that are wrong in themselves do not hide the others' contradictions: those are judged without them."""
        wrong: list[dict[str, Any]] = []
        try:
            part = handler(data)
        except ValidationError as error:
            found = error.errors(include_url=False)
            if not isinstance(data, dict) or any(not item["loc"] for item in found):
                raise
            wrong = [mistake for item in found for mistake in mistakes_of(item)]
            names = {item["loc"][0] for item in found}
            try:
                part = handler(
                    {
                        **{k: v for k, v in data.items() if k not in names},
                        **{k: v for k, v in cls.STAND_INS.items() if k in names},
                    }
                )
            except ValidationError:  # a required field is wrong: the others cannot be judged
                raise Mistakes(wrong) from None
        mistakes = wrong + part.settle()
        if mistakes:
            raise Mistakes(mistakes)
        return part


class LoraSpec(Part):
    rank: Positive = 16
    """Rank of the adapter matrices."""
    alpha: Annotated[float, Field(gt=0)] = 32.0
    """The adapter is scaled by alpha / rank."""
    dropout: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    """Dropout before the adapter, while training."""
    target_modules: list[str] | Literal["all-linear"] = "all-linear"
    """Names of the layers that get an adapter; `all-linear` means all but the head."""


class ModelSpec(Part):
    base: Annotated[str, Field(min_length=1)]
    """Directory or hub id of a Hugging Face causal language model (safetensors; no remote code)."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of generation, and of the trainer's forward pass; master weights are float32."""
    lora: LoraSpec | None = None
    """Train an adapter instead of all weights."""
    chat_template: Literal["model", "plain"] = "model"
    """`plain` joins message contents without any markup; `model` refuses a tokenizer that has no chat template."""


class EnvironmentSpec(Part):
    name: Annotated[str, Field(min_length=1, max_length=200)]
    """A built-in environment, or `module:Class` of your own where env workers run with OPENTINKER_ENV_MODULES=1."""
    config: dict[str, Any] = {}
    """Passed to the environment's own config model, which refuses what it does not know."""


class AlgorithmSpec(Part):
    """A preset and what is changed of it. Once validated, every field that applies has its value; the others are none.

    The parts, their options and the presets are the tables of `algorithms.py` (`opentinker algorithms` prints them).
    """

    name: Literal["grpo", "dr_grpo", "dapo", "rloo", "reinforce_pp", "ppo", "gspo", "cispo"] = "grpo"
    """The preset: it gives every field below that is not set. See `opentinker algorithms`."""
    group_size: Positive = 8
    """Trajectories per group (same start state)."""
    groups_per_batch: Positive = 16
    """Groups per optimizer batch."""
    max_staleness: Annotated[int, Field(ge=0)] = 2
    """Versions that a trajectory's oldest token may lag behind the trainer when its batch is assembled."""
    updates_per_batch: Positive = 1
    """Optimizer steps per batch, each on an equal share of its groups."""
    advantage: (
        Literal["grpo", "dr_grpo", "rloo", "maxrl", "reinforce_pp", "reinforce_pp_baseline", "per_turn", "gae"] | None
    ) = None
    """How rewards become advantages."""
    loss: Literal["decoupled_ppo", "ppo", "importance_sampling", "cispo", "gspo", "dppo", "sapo"] | None = None
    """The policy loss. mu is the policy that sampled, pi the one that is trained."""
    correction: Literal["none", "tis", "icepop", "geometric"] | None = None
    """What is done about mu differing from pi_prox, beyond what the loss does."""
    aggregation: Literal["token_mean", "sequence_mean", "constant"] | None = None
    """How the losses of tokens become one number."""
    normalize_std: bool | None = None
    """grpo, per_turn: divide by the group's standard deviation."""
    gamma: Fraction | None = None
    """gae, per_turn: discount per token (gae) or per turn (per_turn)."""
    lam: Fraction | None = None
    """gae: 1 trusts the returns, 0 the critic."""
    critic_lr: Annotated[float, Field(ge=0.0)] | None = None
    """gae: learning rate of the critic, which starts from model.base."""
    value_clip: Annotated[float, Field(gt=0.0)] | None = None
    """gae: how far a value may move from the one at the batch's start before its gradient stops."""
    clip_low: Fraction | None = None
    """See clip_high."""
    clip_high: Annotated[float, Field(ge=0.0)] | None = None
    """The importance ratio pi/pi_prox is clipped to [1 - clip_low, 1 + clip_high]."""
    dual_clip: Annotated[float, Field(gt=1.0)] | None = None
    """ppo: largest ratio that a negative advantage is multiplied with; none: no such bound."""
    behaviour_cap: Annotated[float, Field(gt=0.0)] | None = None
    """decoupled_ppo: upper bound of the weight pi_prox/mu."""
    proximal: Literal["behaviour", "loglinear", "recomputed"] | None = None
    """Where pi_prox, the centre of the clip range, lies. `behaviour`: it is mu. `loglinear`: between mu and pi, one
    version behind pi on the straight line of log-probabilities, so that every version of lag has a clip range of its
    own; up to one version of lag it is mu. `recomputed`: the weights before the batch; with one update per batch
    nothing is ever clipped."""
    tv_limit: Fraction | None = None
    """dppo: a token is dropped once pi - mu exceeds this in the direction of its advantage."""
    log_ratio_penalty: Annotated[float, Field(ge=0.0)] | None = None
    """dppo: weight of (log pi/mu)^2."""
    tau_positive: Annotated[float, Field(gt=0.0)] | None = None
    """sapo: steepness of the gate where the advantage is positive."""
    tau_negative: Annotated[float, Field(gt=0.0)] | None = None
    """sapo: steepness of the gate where the advantage is negative."""
    tis_cap: Annotated[float, Field(gt=0.0)] | None = None
    """tis: upper bound of the weight pi_prox/mu."""
    icepop_low: Annotated[float, Field(ge=0.0)] | None = None
    """icepop: tokens whose pi_prox/mu is lower are dropped."""
    icepop_high: Annotated[float, Field(gt=0.0)] | None = None
    """icepop: tokens whose pi_prox/mu is higher are dropped."""
    geometric_low: Annotated[float, Field(ge=0.0)] | None = None
    """geometric: sequences whose geometric mean of pi/mu is lower are dropped."""
    geometric_high: Annotated[float, Field(gt=0.0)] | None = None
    """geometric: sequences whose geometric mean of pi/mu is higher are dropped."""
    kl_coef: Annotated[float, Field(ge=0.0)] = 0.0
    """Weight of KL(pi || reference); above 0 reference-forward is in the path. 0: off."""
    kl_in: Literal["loss", "reward"] | None = None
    """`loss`: a term of the loss. `reward`: taken off the reward, token by token, with mu in place of pi."""
    kl_estimator: Literal["k1", "k2", "k3"] | None = None
    """With d = log pi - log reference: k1 = d, k2 = d^2/2, k3 = exp(-d) - 1 + d."""
    entropy_coef: Annotated[float, Field(ge=0.0)] = 0.0
    """Weight of the mean entropy, which is added to what is maximised. 0: off."""
    drop_zero_variance: bool | None = None
    """Groups whose rewards are all equal are discarded when a batch is assembled, and replaced by new ones."""
    max_zero_variance_batches: Positive | None = None
    """drop_zero_variance: the job fails when so many batches' worth of groups in a row was discarded for it."""
    overlong_shaping: bool | None = None
    """Take up to 1 off the reward of trajectories that come near overlong_length."""
    overlong_length: Positive | None = None
    """overlong_shaping: sampled tokens at which the penalty is 1; default rollout.max_tokens."""
    overlong_buffer: Positive | None = None
    """overlong_shaping: the penalty rises from 0 over so many tokens below; default a fifth of overlong_length."""

    def settle(self) -> list[dict[str, Any]]:
        """The preset gives every field that applies its value."""
        values, mistakes = algorithms.resolve(self.name, dict(self))
        if self.groups_per_batch % self.updates_per_batch:
            problem = f"must divide groups_per_batch={self.groups_per_batch}"
            mistakes.append({"field": "updates_per_batch", "value": self.updates_per_batch, "problem": problem})
        if not mistakes:
            fill(self, values)
        return mistakes

    def options(self, part: Literal["advantage", "loss", "correction"]) -> dict[str, Any]:
        """The options of the chosen part, by name."""
        choice = getattr(self, part)
        return {name: getattr(self, name) for name in algorithms.PARTS[part][choice].options}


TOY_IGNORES = {"temperature", "top_p", "top_k", "stop"}
SIMULATED = "learner = 'simulated'"
SIMULATED_IGNORES = {
    "model": {"lora"},
    "algorithm": set(AlgorithmSpec.model_fields)
    - {"group_size", "groups_per_batch", "max_staleness", "drop_zero_variance", "max_zero_variance_batches"}
    - {"name", "kl_coef", "kl_in", "kl_estimator"},
    "train": {"lr", "warmup_steps", "beta1", "beta2", "weight_decay", "grad_clip", "tokens_per_micro_batch", "seed"},
    "resources": {"trainer_gpus"},
}
"""By part of the spec. Groups are still dropped for equal rewards, and scored by reference-forward."""


class ToySpec(Part):
    """The simulated engine: deterministic tokens, given durations. For tests and load tests."""

    seconds_per_token: Annotated[float, Field(ge=0.0)] = 0.0
    """Duration of one sampled token."""
    swap_seconds: Annotated[float, Field(ge=0.0)] = 0.0
    """Duration of a weight swap."""
    skill: Fraction = 0.5
    """Share of turns answered by echoing the prompt's digits."""


class RolloutSpec(Part):
    engine: Literal["vllm", "toy"] = "vllm"
    """What generates; `toy` is simulated, for tests, and refuses what it would ignore."""
    toy: ToySpec | None = None
    """Settings of the toy engine; only with it."""
    max_turns: Positive = 1
    """Model outputs per episode."""
    max_tokens: Positive = 256
    """Sampled tokens per episode."""
    max_tokens_per_turn: Positive | None = None
    """Sampled tokens per turn; default: what is left of max_tokens."""
    context_length: Positive | None = None
    """Tokens per trajectory, prompt and observations included; default: what the model allows, at most 4096."""
    temperature: Annotated[float, Field(gt=0.0, le=10.0)] = 1.0
    """Logits are divided by it before sampling; the trainer does the same."""
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Sample from the smallest set of tokens that holds this much probability; 1: all."""
    top_k: Annotated[int, Field(ge=0)] = 0
    """0: all tokens."""
    stop: list[Annotated[str, Field(min_length=1)]] = []
    """A turn ends when one of these strings appears; it stays in the text."""
    max_concurrent_groups: Positive = 32
    """Per rollout worker."""
    episode_timeout_s: Annotated[float, Field(gt=0.0)] = 120.0
    """Wall clock over open, all steps and close."""
    retries: Annotated[int, Field(ge=0, le=10)] = 3
    """Tries of an episode after its first failure, before its group is failed."""
    max_failed_share: Fraction = 0.5
    """The job fails when more than this share of its groups failed (counted from the 20th group)."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] | None = None
    """Seeds every request and every group's start state; without it start states use seed 0 and sampling is free."""

    def settle(self) -> list[dict[str, Any]]:
        found = []
        if self.max_tokens_per_turn is not None and self.max_tokens_per_turn > self.max_tokens:
            problem = f"is larger than max_tokens={self.max_tokens}"
            found.append({"field": "max_tokens_per_turn", "value": self.max_tokens_per_turn, "problem": problem})
        if self.engine == "toy":
            found += unused(self, RolloutSpec(), TOY_IGNORES, "engine = 'toy'")
            fill(self, {"toy": self.toy or ToySpec()})
        elif self.toy is not None:
            found.append({"field": "toy", "value": self.toy.model_dump(), "problem": "needs engine = 'toy'"})
        return found


class TrainSpec(Part):
    learner: Literal["torch", "simulated"] = "torch"
    """What trains; `simulated` only takes its time, for load tests, and refuses what it would ignore."""
    simulated_step_s: Annotated[float, Field(ge=0.0)] | None = None
    """Duration of a step of the simulated learner, which takes no time by default; only with it."""
    steps: Positive
    """Batches to train on; each raises the weight version by one."""
    lr: Annotated[float, Field(ge=0.0)] = 1e-5
    """Learning rate of AdamW."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Steps over which lr rises linearly from 0; constant afterwards."""
    beta1: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.9
    """AdamW: decay of the mean of gradients."""
    beta2: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.95
    """AdamW: decay of the mean of squared gradients."""
    weight_decay: Annotated[float, Field(ge=0.0)] = 0.0
    """AdamW: decoupled decay."""
    grad_clip: Annotated[float, Field(gt=0.0)] = 1.0
    """Largest global gradient norm."""
    tokens_per_micro_batch: Positive = 8192
    """Packed tokens per forward pass; a longer trajectory gets one of its own."""
    checkpoint_every: Positive = 50
    """Steps; the last step is always saved."""
    keep_checkpoints: Annotated[int, Field(ge=2)] = 3
    """The newest so many stay on disk."""
    target: dict[str, float] = {}
    """Stop early once the mean of the last 10 steps of each named metric reaches the value, e.g. {"exact" = 0.9}."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """Of the trainer's random state: adapter initialisation, dropout."""

    def settle(self) -> list[dict[str, Any]]:
        found = []
        if self.warmup_steps > self.steps:
            problem = f"is larger than steps={self.steps}"
            found.append({"field": "warmup_steps", "value": self.warmup_steps, "problem": problem})
        if self.learner == "simulated":
            fill(self, {"simulated_step_s": self.simulated_step_s or 0.0})
        elif self.simulated_step_s is not None:
            problem = f"needs {SIMULATED}"
            found.append({"field": "simulated_step_s", "value": self.simulated_step_s, "problem": problem})
        return found


class ResourceSpec(Part):
    rollout_workers: Positive = 1
    """Processes that generate for the job."""
    trainer_gpus: Annotated[int, Field(ge=0, le=1)] = 0
    """0 trains on the CPU."""


class JobSpec(Part):
    name: Annotated[str, Field(pattern=NAME)]
    """For people; ids are given by the server."""
    kind: Literal["rl"] = "rl"
    """Reinforcement learning."""
    model: ModelSpec
    environment: EnvironmentSpec
    algorithm: AlgorithmSpec = AlgorithmSpec()
    rollout: RolloutSpec = RolloutSpec()
    train: TrainSpec
    resources: ResourceSpec = ResourceSpec()

    STAND_INS: ClassVar[dict[str, Any]] = {
        "name": "x",
        "model": {"base": "x"},
        "environment": {"name": "x"},
        "train": {"steps": 1},
    }

    def settle(self) -> list[dict[str, Any]]:
        found = []
        if self.train.learner == "simulated":
            usual: dict[str, Part] = {
                "model": ModelSpec(base="x"),
                "algorithm": AlgorithmSpec(name=self.algorithm.name),
                "train": TrainSpec(steps=1),
                "resources": ResourceSpec(),
            }
            for part, default in usual.items():
                ignored = unused(getattr(self, part), default, SIMULATED_IGNORES[part], f"train.{SIMULATED}")
                derived = self._overlong()  # of a spec that was settled before
                ignored = [mistake for mistake in ignored if mistake["value"] != derived.get(mistake["field"])]
                if any(mistake["field"] in algorithms.PARTS for mistake in ignored):  # its options come with it
                    ignored = [mistake for mistake in ignored if mistake["field"] not in algorithms.OPTIONS]
                found += [{**mistake, "field": f"{part}.{mistake['field']}"} for mistake in ignored]
        return found + self._settle_overlong()

    def _settle_overlong(self) -> list[dict[str, Any]]:
        """Overlong shaping takes its lengths from `rollout.max_tokens`."""
        if not self.algorithm.overlong_shaping:
            return []
        update = self._overlong()
        length, buffer = update.values()
        longest = self.rollout.max_tokens
        found = [
            {"field": f"algorithm.{field}", "value": value, "problem": f"is larger than {name}={bound}"}
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


def parse_spec(data: Any) -> JobSpec:
    """Validate plain data. Raises SpecError with one entry per mistake: field, value, what is allowed."""
    try:
        return JobSpec.model_validate(data)
    except ValidationError as error:
        raise SpecError(
            [mistake for item in error.errors(include_url=False) for mistake in mistakes_of(item)]
        ) from None


def load_spec(path: Path) -> Any:
    """Plain data of a .toml or .json file. Raises SpecError when it cannot be read; `parse_spec` validates it."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise SpecError([{"field": "(file)", "value": str(path), "problem": error.strerror or str(error)}]) from None
    try:
        return orjson.loads(raw) if path.suffix == ".json" else tomllib.loads(raw.decode())
    except (orjson.JSONDecodeError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SpecError([{"field": "(file)", "value": str(path), "problem": str(error)}]) from None
