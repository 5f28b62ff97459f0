"""Describes what holds a job up or spoils its learning, and which setting to change."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import msgspec

from opentinker.shared.data.step_log import metric_prefix

LARGE = 0.4
"""Share of the time from which on a cause is worth a word."""
IDLE = 0.15
SILENT_S = 10.0
"""A worker that has done nothing for the job for this time is named."""
SLOW = {
    "training": "the trainer is the limit: fewer tokens, LoRA, larger train.tokens_per_micro_batch, or more ranks "
    "(resources.trainer_ranks)",
    "checkpoint": "checkpoints take much of the time: a larger train.checkpoint_every, or LoRA",
    "swap": "weight transfer is slow: LoRA, which sends adapters alone",
    "generation": "generation is the limit: more rollout workers, a larger rollout.max_concurrent_groups, a higher "
    "algorithm.max_staleness, or a lower rollout.max_tokens",
    "evaluation": "evaluations hold the episodes of training up: a larger validation.every, or fewer episodes",
    "reference": "frozen models are the limit: another reference-forward, or algorithm.kl_coef = 0",
    "environment starts": "starts of environments are the limit: more env workers; for sandboxes, warm ones "
    "(harbor_warm)",
    "environment turns": "the environment's own calls are the limit: more env workers, and `blocking = True` if it "
    "computes",
    "waiting for env workers": "episodes wait for a place at an env worker: more env workers "
    "(`opentinker plan job.toml --like JOB` computes how many)",
}
"""Advice by the cause that takes most of the time."""

EARLIER = "continue from an earlier checkpoint (`--from-checkpoint`) with"
ALARMS = {
    "entropy": (
        "entropy",
        "the policy has collapsed: it says the same each time",
        f"{EARLIER} algorithm.entropy_coef or a lower train.lr; bound: train.entropy_alarm",
    ),
    "reward_cliff": (
        "reward/mean",
        "the reward has fallen off a cliff",
        f"{EARLIER} a lower train.lr or a tighter clip; bound: train.collapse_alarm",
    ),
    "zero_variance": (
        "zero_variance",
        "in nearly all groups all rewards are equal: nothing is learned from them",
        "an easier start, shaped rewards, a larger algorithm.group_size, or an SFT start ([start]); bound: "
        "train.alarms.zero_variance",
    ),
    "length_drift": (
        "response_length/mean",
        "answers change their length without a better reward",
        "a lower train.lr, another algorithm.aggregation, or a rollout.max_tokens that bounds them; bound: "
        "train.alarms.length_drift",
    ),
    "kl": (
        "ratio/k3",
        "the trainer is far from the policy that samples",
        "a lower algorithm.max_staleness or train.lr, the same precision for both (rollout.vllm); bound: "
        "train.alarms.kl",
    ),
    "ratio_tails": (
        "ess",
        "few tokens carry the whole loss: the importance ratios have long tails",
        "a lower algorithm.max_staleness, algorithm.updates_per_batch or train.lr, or algorithm.correction; bound: "
        "train.alarms.ratio_tails",
    ),
}
"""By alarm: its metric, what it means, and which setting answers it."""


class Finding(msgspec.Struct, frozen=True):
    what: str
    advice: str


def findings_on_time(seconds: Mapping[str, float], silent_s: Mapping[str, float], state: str) -> Iterator[Finding]:
    """Yield what the time went to. `silent_s`: by worker, since when it has done nothing for the job."""
    whole = sum(seconds.values()) or 1.0
    for cause, spent in sorted(seconds.items(), key=lambda item: -item[1]):
        if cause in SLOW and spent / whole >= LARGE:
            yield Finding(f"{100 * spent / whole:.0f} % of the time: {cause}", SLOW[cause])
    if seconds.get("nothing", 0.0) / whole < IDLE:
        return
    idle = f"{100 * seconds['nothing'] / whole:.0f} % of the time no worker was busy with the job"
    silent = [f"{worker} for {since:.0f} s" for worker, since in sorted(silent_s.items()) if since >= SILENT_S]
    if silent:
        yield Finding(f"{idle}; silent: {', '.join(silent)}", "opentinker logs JOB --level warning")
    elif not silent_s:
        yield Finding(f"{idle}: no worker holds it ({state})", "opentinker job JOB says what it waits for")
    else:
        yield Finding(idle, "short pauses between steps: larger batches, or a higher algorithm.max_staleness")


def findings_on_learning(point: Mapping[str, float], policy: str = "") -> Iterator[Finding]:
    """Yield what the newest metrics of the trainer say, of one policy in a job with several. See
    docs/troubleshooting.md."""
    prefix = metric_prefix(policy)
    for found in _findings_on_learning({name.removeprefix(prefix): value for name, value in point.items()}):
        yield Finding(f"{policy}: {found.what}" if policy else found.what, found.advice)


def _findings_on_learning(values: Mapping[str, float]) -> Iterator[Finding]:
    get = values.get
    yield from _findings_on_alarms(values)
    if get("mismatch/alarm") or get("mismatch/mean", 0.0) > 1e-2:
        what = f"trainer and engine compute different logprobs (mismatch/mean {get('mismatch/mean', 0.0):.2g})"
        yield Finding(what, "the same precision for both (rollout.vllm), then the chat template")
    is_solved = get("exact", get("reward/mean", 0.0)) >= 0.9
    if get("zero_variance", 0.0) >= 0.9 and not get("alarm/zero_variance"):
        if is_solved:
            yield Finding("nearly all groups are solved", "the task is learned: end the job, or set train.target")
        else:
            what = "in nine of ten groups all rewards are equal: nothing is learned from them"
            yield Finding(
                what, "an easier start, shaped rewards, a larger algorithm.group_size, or an SFT start ([start])"
            )
    elif get("entropy", 1.0) < 0.01 and not is_solved and not get("alarm/entropy"):
        what = f"the policy says the same each time (entropy {values['entropy']:.2g})"
        yield Finding(what, "algorithm.entropy_coef, a lower train.lr, or a higher algorithm.clip_high")
    if get("stop/length", 0.0) > 0.8:
        yield Finding("most answers are cut off (stop/length)", "a larger rollout.max_tokens")
    if (get("clip_share", 0.0) > 0.3 or get("ess", 1.0) < 0.5) and not get("alarm/ratio_tails"):
        what = f"the data is too stale (clip_share {get('clip_share', 0.0):.2g}, ess {get('ess', 1.0):.2g})"
        yield Finding(what, "a lower algorithm.max_staleness or train.lr")
    failed = {name.removeprefix("failed/"): count for name, count in values.items() if name.startswith("failed/")}
    if failed:
        most = max(failed, key=lambda name: failed[name])
        what = f"{sum(failed.values()):.0f} groups have failed, most by {most}"
        yield Finding(what, "`opentinker failures JOB` shows their errors")


def _findings_on_alarms(values: Mapping[str, float]) -> Iterator[Finding]:
    """Yield the active alarms of collapse, see docs/metrics.md."""
    rang = [name for name in ALARMS if values.get(f"alarm/{name}")]
    for name in rang:
        metric, what, advice = ALARMS[name]
        shown = f", {metric} {values[metric]:.2g}" if metric in values else ""
        yield Finding(f"{what} (alarm/{name}{shown})", advice)
    if values.get("collapse/alarm") and not rang:
        advice = "continue from an earlier checkpoint with algorithm.entropy_coef or a lower train.lr"
        yield Finding("the policy has collapsed (collapse/alarm)", advice)


def findings_on_waiting(reason: str) -> Iterator[Finding]:
    """Yield what the job waits for. `reason`: as its record has it."""
    if reason:
        yield Finding(f"it waits for {reason}", "`opentinker status` shows the workers, `opentinker jobs` the queue")
