"""Advises which settings to change for a cause of lost time or an alarm, except those that a job has or cannot use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from opentinker.services.scheduler.diagnosis.waits import WAITS
from opentinker.shared.spec import JobSpec

Choice = str | tuple[str, Callable[[JobSpec], object]]
"""Advice, and a test for the jobs or policies that it suits; text alone: suits all."""


def choices_for(specs: Sequence[JobSpec], choices: Sequence[Choice]) -> str:
    """Return the choices that suit any of `specs`: the job's own, or those of its policies; without specs, all."""
    fitting = [
        choice if isinstance(choice, str) else choice[0]
        for choice in choices
        if isinstance(choice, str) or not specs or any(choice[1](spec) for spec in specs)
    ]
    *most, last = fitting or [""]
    return f"{', '.join(most)}{',' * (len(most) > 1)} or {last}" if most else last


LORA = ("LoRA ([model.lora])", lambda spec: spec.model.lora is None)
ROLLOUT_WORKERS = ("more rollout workers (resources.rollout_workers)", lambda spec: not spec.train.deterministic)
MORE_STALENESS = (
    "a higher algorithm.max_staleness",
    lambda spec: spec.kind == "rl" and not spec.train.deterministic,
)
LESS_STALENESS = ("a lower algorithm.max_staleness", lambda spec: spec.algorithm.max_staleness > 0)
FEWER_UPDATES = ("a lower algorithm.updates_per_batch", lambda spec: spec.algorithm.updates_per_batch > 1)
CORRECTION = ("algorithm.correction", lambda spec: spec.algorithm.correction == "none")
SAME_PRECISION = ("the same precision for both (rollout.vllm)", lambda spec: spec.rollout.engine == "vllm")
EASIER: tuple[Choice, ...] = (
    "an easier start",
    "shaped rewards",
    ("a larger algorithm.group_size", lambda spec: spec.algorithm.learns_from == "groups"),
    ("an SFT start ([start])", lambda spec: spec.start is None),
)
EARLIER = "continue from an earlier checkpoint (`--from-checkpoint`) with"

SLOW: dict[str, tuple[str, tuple[Choice, ...]]] = {
    "training": (
        "the trainer is the limit",
        (
            "fewer tokens",
            LORA,
            "a larger train.tokens_per_micro_batch",
            ("train.gradient_checkpointing = false", lambda spec: spec.train.gradient_checkpointing),
            ("more ranks (resources.trainer_ranks)", lambda spec: spec.resources.trainer != "shared"),
        ),
    ),
    "checkpoint": ("checkpoints take much of the time", ("a larger train.checkpoint_every", LORA)),
    "validation": (
        "the trainer evaluates validation rows instead of training",
        ("a larger data.validate_every", "fewer of them (data.validation)"),
    ),
    "swap": (
        "weight transfer is slow",
        (
            ("LoRA ([model.lora]), which sends adapters alone", LORA[1]),
            "a faster path between trainer and rollout workers",
            "fewer, larger steps (algorithm.groups_per_batch)",
        ),
    ),
    "generation": (
        "generation is the limit",
        (
            ROLLOUT_WORKERS,
            "a larger rollout.max_concurrent_groups",
            MORE_STALENESS,
            "a lower rollout.max_tokens",
        ),
    ),
    "evaluation": (
        "evaluations hold the episodes of training up",
        ("a larger validation.every", "fewer episodes (validation.episodes)"),
    ),
    "reference": (
        "frozen models are the limit",
        (
            "another reference-forward",
            ("algorithm.kl_coef = 0", lambda spec: spec.algorithm.kl_coef > 0),
            ("a smaller [teacher]", lambda spec: spec.teacher),
            ("smaller or fewer [[reward_models]]", lambda spec: spec.reward_models),
            ("a trained critic instead of the [value_model]", lambda spec: spec.value_model),
        ),
    ),
    "waiting for other jobs' training": (
        "passes of other jobs of its shared trainer come first",
        ('resources.trainer = "own"', "another trainer with bank_jobs"),
    ),
    "waiting for frozen models": (
        "its groups wait until frozen models have loaded, or have scored groups of other jobs",
        ("another reference-forward", ("algorithm.kl_coef = 0", lambda spec: spec.algorithm.kl_coef > 0)),
    ),
    "engines fall asleep or wake": (
        "an engine sleeps during each step, because trainer and engine do not fit on the GPU together",
        (
            ('rollout.sleep = "auto"', lambda spec: spec.rollout.sleep == "always"),
            LORA,
            "another GPU for one of them",
            "fewer, larger steps (algorithm.groups_per_batch)",
        ),
    ),
    "copying the version": (
        "each version is copied before it is sent, and gathered from all ranks under zero3",
        (
            ('train.parallel = "zero2"', lambda spec: spec.train.parallel == "zero3"),
            LORA,
            "fewer, larger steps (algorithm.groups_per_batch)",
        ),
    ),
    "forming the weight group": (
        "trainer and rollout workers connect anew with each that comes or goes",
        ("`opentinker logs JOB --level warning` names those that fail or do not answer",),
    ),
    "looking for rollout workers": (
        "the first step waits until each rollout worker has said whether its engine must sleep",
        ("`opentinker logs JOB --level warning` names those that do not answer",),
    ),
    "loading": (
        "workers load their models when they begin with a job",
        (
            "`opentinker logs JOB -f` follows it",
            "a model on a local disk",
            "warm engines (warm_engine_s) for the next job",
        ),
    ),
    "environment starts": (
        "starts of environments are the limit",
        ("more env workers", "for sandboxes, warm ones (harbor_warm)"),
    ),
    "environment turns": (
        "the environment's own calls are the limit",
        ("more env workers", "`blocking = True` if it computes"),
    ),
    "waiting for env workers": (
        "episodes wait for a place at an env worker",
        ("more env workers (`opentinker plan job.toml --like JOB` computes how many)",),
    ),
}
"""By cause: the meaning of much time in it, and choices that shorten it."""
PAUSES: tuple[Choice, ...] = (
    ("larger batches", lambda spec: spec.kind != "eval"),
    MORE_STALENESS,
    ("a larger rollout.max_concurrent_groups", lambda spec: spec.kind == "eval"),
)
"""Choices that shorten pauses in which no worker is busy, though none is silent for long."""
LAST_EPISODES: tuple[Choice, ...] = (
    ("rollout.oversample, which cuts the slowest episodes off", lambda spec: spec.kind == "rl"),
    MORE_STALENESS,
    "a lower rollout.episode_timeout_s",
    "a lower rollout.max_tokens",
)
"""Choices that shorten the wait for a few long episodes."""
WARNINGS = "`opentinker logs JOB --level warning` names those that do not answer"
STALLS: dict[str, tuple[Choice, ...]] = {
    WAITS["generation", "weights"]: ("wait for the trainer, which loads or connects first (`opentinker logs JOB -f`)",),
    WAITS["generation", "store"]: (
        "wait for the trainer, which has more groups than it can take",
        "fewer rollout workers (resources.rollout_workers)",
        "ask the operator for a larger message store",
    ),
    WAITS["reference", "loading"]: (
        "wait for the model to load",
        "a larger reference_memory_gb (a setting of the operator) if models of other jobs displace it",
        "another reference-forward",
    ),
    WAITS["swap", "find"]: (WARNINGS,),
    WAITS["swap", "join"]: (WARNINGS,),
    WAITS["swap", "sleep"]: (WARNINGS,),
    WAITS["swap", "wake"]: (WARNINGS,),
}
"""By wait: choices for one that lasts, which in a healthy job takes seconds at most."""


class AlarmWords(NamedTuple):
    metric: str
    what: str
    choices: tuple[Choice, ...]
    bound: str
    lead: str = ""


ALARMS = {
    "entropy": AlarmWords(
        "entropy",
        "the policy has collapsed: it gives the same answer each time",
        ("a higher algorithm.entropy_coef", "a lower train.lr"),
        "train.entropy_alarm",
        f"{EARLIER} ",
    ),
    "reward_cliff": AlarmWords(
        "reward/mean",
        "the reward has fallen off a cliff",
        ("a lower train.lr", "a tighter clip"),
        "train.collapse_alarm",
        f"{EARLIER} ",
    ),
    "zero_variance": AlarmWords(
        "zero_variance",
        "nearly all rewards that are compared are equal: nothing is learned from them",
        EASIER,
        "train.alarms.zero_variance",
    ),
    "length_drift": AlarmWords(
        "response_length/mean",
        "answers change their length without a better reward",
        ("a lower train.lr", "another algorithm.aggregation", "a rollout.max_tokens that bounds them"),
        "train.alarms.length_drift",
    ),
    "kl": AlarmWords(
        "ratio/k3",
        "the trainer is far from the policy that samples",
        (LESS_STALENESS, "a lower train.lr", SAME_PRECISION),
        "train.alarms.kl",
    ),
    "ratio_tails": AlarmWords(
        "ess",
        "few tokens carry the whole loss: the importance ratios have long tails",
        (LESS_STALENESS, FEWER_UPDATES, "a lower train.lr", CORRECTION),
        "train.alarms.ratio_tails",
    ),
}
"""By alarm: its metric, what it means, which settings answer it, and the one that holds its bound."""
