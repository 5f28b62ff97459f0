"""The environment of a job, and how episodes are sampled."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from opentinker.shared.spec.base import MAX_ENGINE_RANKS, Fraction, SpecPart, Tokens
from opentinker.shared.spec.tools import ToolSpec
from opentinker.shared.types.mistakes import fill, mistake, unused

AdapterServing = Literal["auto", "merged", "adapter"]
MAX_OPEN_GROUPS = 16_384
"""Episodes that one rollout worker plays."""
TOY_IGNORES = {"temperature", "top_p", "top_k", "stop", "lora", "gpu_memory_utilization"}
ELSEWHERE = ("served:", "http://", "https://", "ws://", "wss://")
"""How names begin of environments that run where their users run them."""


class EnvironmentSpec(SpecPart):
    name: Annotated[str, Field(min_length=1, max_length=200)]
    """A built-in environment; `upload:NAME` or `upload:NAME@VERSION`, pushed by `opentinker env push`; `served:NAME`,
    served by `opentinker env serve`; the URL of an environment server (http(s):// or ws(s)://); or `module:Class` if
    env workers run with OPENTINKER_ENV_MODULES=1."""
    isolation: Literal["process", "sandbox"] | None = None
    """Isolation level. `process`: in an env worker or a child process of it, for the operator's own code. `sandbox`: in
    a child process without network, files or privileges; required for uploads, and their default."""
    config: dict[str, Any] = {}
    """Settings of the environment, which refuses unknown ones."""
    tools: Annotated[list[ToolSpec], Field(max_length=64)] = []
    """Tools that the policy may call in every episode, in addition to those of the environment."""
    tool_turns: Annotated[int, Field(ge=1, le=1000)] = 16
    """Turns per episode (per seat, if there are several) that tools may answer; all later turns go to the environment.
    They count towards rollout.max_turns."""

    def resolve(self) -> list[dict[str, Any]]:
        if self.tools and self.name.startswith("served:"):
            problem = "do not apply: no env worker stands before this environment; give it tools of its own"
            return [mistake("tools", len(self.tools), problem)]
        uploaded, elsewhere = self.name.startswith("upload:"), self.name.startswith(ELSEWHERE)
        if elsewhere and self.isolation is not None:
            problem = "does not apply: this environment does not run in the env workers"
            return [mistake("isolation", self.isolation, problem)]
        if uploaded and self.isolation == "process":
            return [mistake("isolation", "process", "does not apply to uploads: they run in a sandbox")]
        if not elsewhere:
            fill(self, {"isolation": self.isolation or ("sandbox" if uploaded else "process")})
        return []


NO_ENVIRONMENT = EnvironmentSpec.model_construct(name="", isolation="process", config={}, tools=[], tool_turns=16)
"""Placeholder of a job without an environment."""


class ToySpec(SpecPart):
    """The simulated engine: deterministic tokens, given durations. For tests and load tests."""

    seconds_per_token: Annotated[float, Field(ge=0.0, le=3600.0)] = 0.0
    """Duration of one sampled token."""
    swap_seconds: Annotated[float, Field(ge=0.0, le=3600.0)] = 0.0
    """Duration of a weight swap."""
    skill: Fraction = 0.5
    """Share of turns answered by echoing the prompt's digits."""


class RolloutSpec(SpecPart):
    engine: Literal["vllm", "toy"] = "vllm"
    """Generation engine; `toy` is simulated, for tests, and refuses options that it would ignore."""
    toy: ToySpec | None = None
    """Settings of the toy engine; only with it."""
    lora: AdapterServing = "auto"
    """How vLLM serves the adapter of model.lora. `merged`: each version is merged into the base's weights, from the
    unchanged base, and generation costs what it costs without an adapter; the rollout worker keeps a second copy of the
    weights that have an adapter, and a swap interrupts generation for the time of the merge. `adapter`: through vLLM's
    LoRA layers. `auto`: merged where that is exact and faster: in float32 on CPUs, if the engine serves one adapter and
    the model allows it; event `lora_served`. With bfloat16, merged weights are rounded, and logprobs lie further from
    the trainer's."""
    tensor_parallel: Annotated[int, Field(ge=1, le=MAX_ENGINE_RANKS)] | None = None
    """Ranks among which vLLM divides every layer of the model, so that a model may be larger than a GPU: processes of
    one rollout worker, with a GPU each. It must divide the model's attention heads. Default: resources.rollout_gpus, or
    1. Without GPUs the ranks share the processors and the memory of the machine."""
    gpu_memory_utilization: Annotated[float, Field(gt=0.0, le=0.98)] | None = None
    """Share of its GPU's memory that the engines of a rollout worker take together. Default: what the job's trainer and
    frozen models on the same GPU leave of it, by plan and measurement; 0.9 where there are none. Event
    `engine_memory`."""
    sleep: Literal["auto", "always", "never"] = "auto"
    """Whether vLLM gives its memory to the trainer during each optimizer step (sleep mode: weights wait in the
    machine's memory, and generation stands still). `auto`: if the job has one policy, the trainer is on the same GPU,
    and both do not fit otherwise."""
    max_turns: Annotated[int, Field(gt=0, le=100_000)] = 1
    """Model outputs per episode."""
    max_tokens: Tokens = 256
    """Sampled tokens per episode."""
    max_tokens_per_turn: Tokens | None = None
    """Sampled tokens per turn; default: the rest of max_tokens."""
    context_length: Tokens | None = None
    """Tokens per trajectory, including prompt and observations; default: the model's maximum, at most 4096."""
    temperature: Annotated[float, Field(gt=0.0, le=2.0)] = 1.0
    """Logits are divided by it before sampling; the trainer does the same."""
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Sample from the smallest set of tokens with this total probability; 1: all. Below 1 ratios are biased, because
    the trainer's probabilities are those of all tokens."""
    top_k: Annotated[int, Field(ge=0, le=1_000_000)] = 0
    """Sample from this many most likely tokens; 0: all. Above 0 ratios are biased, as with top_p."""
    stop: Annotated[list[Annotated[str, Field(min_length=1)]], Field(max_length=64)] = []
    """A turn ends when one of these strings appears; it stays in the text, with the rest of the token in which it
    ends."""
    max_concurrent_groups: Annotated[int, Field(gt=0, le=4096)] = 32
    """Groups per rollout worker (eval: episodes). Multiplied by algorithm.group_size + oversample at most 16,384
    episodes."""
    oversample: Annotated[int, Field(ge=0, le=1024)] = 0
    """Extra episodes that a group starts: it closes when algorithm.group_size have ended and cuts off the rest. This
    avoids waiting for slow episodes, but biases the sample towards short ones."""
    episode_timeout_s: Annotated[float, Field(gt=0.0, le=604_800.0)] = 120.0
    """Wall-clock limit of an episode: open, all steps and close. The time in which its engine sleeps for steps of the
    trainer does not count. The environment's import before its first open has a separate limit, the operator's
    env_import_timeout_s."""
    retries: Annotated[int, Field(ge=0, le=10)] = 3
    """Retries of a failed episode before its group fails."""
    max_failed_share: Fraction = 0.5
    """The job fails when more than this share of its groups failed (counted from the 20th group)."""
    max_env_down_s: Annotated[float, Field(ge=0.0, le=604_800.0)] = 1800.0
    """The job fails when its environment has been down for longer: after groups that failed in a row because it could
    not be reached or did not answer, only single groups are played for trial until one succeeds."""
    opening_mismatch: Literal["warn", "fail"] = "warn"
    """Reaction to samples of a group that begin with different observations despite the same row and seed: the group's
    baseline then compares answers to different prompts. `warn`: an event and a metric, and the group is trained,
    because some environments vary their prompts on purpose. `fail`: the group fails and is replaced."""
    transcripts: Annotated[int, Field(ge=0, le=64)] = 4
    """Training episodes of each step that are kept in full, up to 20,000 characters each (`opentinker rollouts`); fewer
    of older steps. 0: none."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] | None = None
    """Seeds every request and every group's start state; without it start states use seed 0 and sampling is free."""

    def resolve(self) -> list[dict[str, Any]]:
        found = []
        if self.max_tokens_per_turn is not None and self.max_tokens_per_turn > self.max_tokens:
            problem = f"is larger than max_tokens={self.max_tokens}"
            found.append(mistake("max_tokens_per_turn", self.max_tokens_per_turn, problem))
        if self.engine == "toy":
            found += unused(self, RolloutSpec(), TOY_IGNORES, "engine = 'toy'")
            fill(self, {"toy": self.toy or ToySpec()})
        elif self.toy is not None:
            found.append(mistake("toy", self.toy.model_dump(), "needs engine = 'toy'"))
        return found
