"""Describes what holds a job up or spoils its learning; `advice.py` says which settings to change."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from opentinker.services.scheduler.diagnosis.advice import (
    ALARMS,
    EARLIER,
    EASIER,
    LAST_EPISODES,
    LESS_STALENESS,
    PAUSES,
    SAME_PRECISION,
    SLOW,
    STALLS,
    choices_for,
)
from opentinker.services.scheduler.diagnosis.holders import Holder
from opentinker.services.scheduler.diagnosis.time_by_cause import IDLE_CAUSES
from opentinker.services.scheduler.diagnosis.waits import NOTHING_TO_PLAY, Wait
from opentinker.shared.data.step_log import metric_prefix
from opentinker.shared.spec import JobSpec
from opentinker.shared.spec.matches.policies import spec_of
from opentinker.shared.types.core import Pool

LARGE = 0.4
"""Share of the time from which on a cause is worth a word."""
IDLE = 0.15
SOLVED = 0.9
EQUAL_SHARE = 0.9
LOOK = (
    "`opentinker logs JOB --level warning`; a process that hangs, rather than lacks work, can be killed: others take "
    "its work over"
)
SILENT_S = 10.0
"""A worker that has done nothing for the job, or waited, for this time is named."""
NOBODY_WORKS = (
    "tickets come from the scheduler that leads: `opentinker status` says whether one does, `opentinker logs JOB "
    "--level warning` what failed"
)


class Finding(msgspec.Struct, frozen=True):
    what: str
    advice: str


def findings_on_time(
    seconds: Mapping[str, float],
    holders: Sequence[Holder],
    state: str,
    spec: JobSpec | None,
    waits: Sequence[Wait] = (),
) -> Iterator[Finding]:
    """Yield what the time went to, who does nothing, and who waits for what. `holders`: the workers that hold the job.
    `spec`: None if it cannot be read. `waits`: what workers wait for now."""
    whole = sum(seconds.values()) or 1.0
    specs = [] if spec is None else [spec_of(spec, policy) for policy in spec.policies or [""]]
    for cause, spent in sorted(seconds.items(), key=lambda item: -item[1]):
        if cause in SLOW and spent / whole >= LARGE:
            lead, choices = SLOW[cause]
            now = _times({one.worker: one.loading_s for one in holders if one.loading_s}) if cause == "loading" else ""
            what = f"{100 * spent / whole:.0f} % of the time: {cause}{f', now: {now}' if now else ''}"
            yield Finding(what, f"{lead}: {choices_for(specs, choices)}")
    long = [one for one in waits if one.seconds >= SILENT_S]
    yield from _findings_on_stalls(long, specs)
    yield from _findings_on_last_episodes(waits, holders, specs)
    idle_s = sum(seconds.get(cause, 0.0) for cause in IDLE_CAUSES)
    if idle_s / whole < IDLE:
        yield from _findings_on_hung(holders, whole)
        return
    idle = f"{100 * idle_s / whole:.0f} % of the time no worker was busy with the job"
    silent = {one.worker: one.silent_s for one in holders if one.silent_s >= SILENT_S}
    if silent:
        yield Finding(f"{idle}; silent: {_times(silent)}", LOOK)
    elif not holders:
        yield Finding(f"{idle}: no worker holds it ({state})", "opentinker job JOB says what it waits for")
    elif long and {one.worker for one in holders} <= {one.worker for one in long}:
        yield Finding(f"{idle}; now all of them wait: {_words(long)}", NOBODY_WORKS)
    else:
        yield Finding(idle, f"short pauses: {choices_for(specs, PAUSES)}")


def _findings_on_stalls(waits: Sequence[Wait], specs: Sequence[JobSpec]) -> Iterator[Finding]:
    """Yield the waits that a healthy job does not have, or has for seconds only."""
    for what, choices in STALLS.items():
        if found := [one for one in waits if one.what == what]:
            yield Finding(f"waiting: {_words(found)}", choices_for(specs, choices))


def _findings_on_last_episodes(
    waits: Sequence[Wait], holders: Sequence[Holder], specs: Sequence[JobSpec]
) -> Iterator[Finding]:
    """Yield the rollout workers that have nothing to play while others play the last episodes of a batch or an
    evaluation."""
    waiting = {one.worker for one in waits}
    idle = [one for one in waits if one.what in NOTHING_TO_PLAY and one.seconds >= SILENT_S]
    at_work = [
        one.worker for one in holders if one.worker not in waiting and not one.loading_s and one.silent_s < SILENT_S
    ]
    rollout = {one.worker for one in holders if one.pool == Pool.ROLLOUT}
    if idle and at_work and rollout.issuperset(at_work):
        who = ", ".join(sorted(at_work))
        what = f"the last episodes are played by {who}; waiting: {_words(waits)}"
        yield Finding(what, choices_for(specs, LAST_EPISODES))


def _findings_on_hung(holders: Sequence[Holder], whole_s: float) -> Iterator[Finding]:
    """Yield the workers that were silent for the whole time while others worked. A healthy trainer reports its waits
    and evaluations, and a rollout worker its wait for tickets. Rollout workers of an earlier release report none and
    are all silent during a long step: a rollout worker is therefore named only while another one works."""
    bound_s = max(SILENT_S, whole_s)
    busy = {one.pool for one in holders if one.silent_s < bound_s}
    hung = {one.worker: one.silent_s for one in holders if one.silent_s >= bound_s}
    named = {one.worker for one in holders if one.pool == Pool.TRAINER or one.pool in busy}
    if found := {worker: spent for worker, spent in hung.items() if worker in named}:
        yield Finding(f"silent while others work: {_times(found)}", LOOK)


def _words(waits: Sequence[Wait]) -> str:
    return "; ".join(f"{one.worker} for {one.what}, for {one.seconds:.0f} s" for one in waits)


def _times(seconds: Mapping[str, float]) -> str:
    return ", ".join(f"{worker} for {spent:.0f} s" for worker, spent in sorted(seconds.items()))


def findings_on_learning(point: Mapping[str, float], spec: JobSpec, policy: str = "") -> Iterator[Finding]:
    """Yield what the newest metrics of the trainer say, of one policy in a job with several. `spec`: the job's. See
    docs/troubleshooting.md."""
    prefix = metric_prefix(policy)
    values = {name.removeprefix(prefix): value for name, value in point.items()}
    for found in _findings_on_learning(values, spec_of(spec, policy)):
        yield Finding(f"{policy}: {found.what}" if policy else found.what, found.advice)


def _findings_on_learning(values: Mapping[str, float], spec: JobSpec) -> Iterator[Finding]:
    get = values.get
    yield from _findings_on_alarms(values, spec)
    if get("mismatch/alarm") or get("mismatch/mean", 0.0) > 1e-2:
        what = f"trainer and engine compute different logprobs (mismatch/mean {get('mismatch/mean', 0.0):.2g})"
        yield Finding(what, choices_for([spec], [SAME_PRECISION, "the same chat template"]))
    yield from _findings_on_rewards(values, spec)
    if get("stop/length", 0.0) > 0.8:
        yield Finding("most answers are cut off (stop/length)", "a larger rollout.max_tokens")
    if (get("clip_share", 0.0) > 0.3 or get("ess", 1.0) < 0.5) and not get("alarm/ratio_tails"):
        what = f"the data is too stale (clip_share {get('clip_share', 0.0):.2g}, ess {get('ess', 1.0):.2g})"
        yield Finding(what, choices_for([spec], [LESS_STALENESS, "a lower train.lr"]))
    failed = {name.removeprefix("failed/"): count for name, count in values.items() if name.startswith("failed/")}
    if failed:
        most = max(failed, key=lambda name: failed[name])
        what = f"{sum(failed.values()):.0f} groups have failed, most by {most}"
        yield Finding(what, "`opentinker failures JOB` shows their errors")


def _findings_on_rewards(values: Mapping[str, float], spec: JobSpec) -> Iterator[Finding]:
    """Yield whether there is anything left to learn. Rewards have no scale, so only `exact` and train.target show that
    a task is solved; without them the advice leaves that to the reader."""
    get, target = values.get, spec.train.target
    reached = target and all(get(name, -math.inf) >= wanted for name, wanted in target.items())
    is_solved = bool(reached) or get("exact", 0.0) >= SOLVED
    unless = "" if target or "exact" in values else "unless the task is learned: "
    if _teaches_nothing(values, spec) and not get("alarm/zero_variance"):
        if is_solved:
            yield Finding("nearly all groups are solved", "the task is learned: end the job, or set train.target")
        else:
            share = "in nine of ten groups " if spec.algorithm.learns_from == "groups" else ""
            what = f"{share}all rewards are equal: nothing is learned from them"
            yield Finding(f"{what} (reward/mean {get('reward/mean', 0.0):.3g})", unless + choices_for([spec], EASIER))
    elif get("entropy", 1.0) < 0.01 and not is_solved and not get("alarm/entropy"):
        what = f"the policy gives the same answer each time (entropy {values['entropy']:.2g})"
        yield Finding(what, f"{unless}algorithm.entropy_coef, a lower train.lr, or a higher algorithm.clip_high")


def _teaches_nothing(values: Mapping[str, float], spec: JobSpec) -> bool:
    """Return whether rewards are equal wherever the job's algorithm compares them."""
    learns_from = spec.algorithm.learns_from
    if learns_from == "batches":
        return "reward/min" in values and values["reward/min"] == values.get("reward/max")
    return learns_from == "groups" and values.get("zero_variance", 0.0) >= EQUAL_SHARE


def _findings_on_alarms(values: Mapping[str, float], spec: JobSpec) -> Iterator[Finding]:
    """Yield the active alarms of collapse, see docs/metrics.md."""
    rang = [name for name in ALARMS if values.get(f"alarm/{name}")]
    for name in rang:
        words = ALARMS[name]
        shown = f", {words.metric} {values[words.metric]:.2g}" if words.metric in values else ""
        advice = f"{words.lead}{choices_for([spec], words.choices)}; bound: {words.bound}"
        yield Finding(f"{words.what} (alarm/{name}{shown})", advice)
    if values.get("collapse/alarm") and not rang:
        yield Finding(
            "the policy has collapsed (collapse/alarm)", f"{EARLIER} algorithm.entropy_coef or a lower train.lr"
        )


def findings_on_waiting(reason: str) -> Iterator[Finding]:
    """Yield what the job waits for. `reason`: as its record has it."""
    if reason:
        yield Finding(f"it waits for {reason}", "`opentinker status` shows the workers, `opentinker jobs` the queue")
