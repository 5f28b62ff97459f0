"""`opentinker plan`: estimates how many rollout workers and env workers a job needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from opentinker.cli.common import AsJson, Url, client, complain, print_json, print_table, say
from opentinker.cli.shell import complete
from opentinker.cli.specs import Changes, SpecFile, demands, read_spec
from opentinker.shared.types.core import split_part
from opentinker.shared.types.errors import OpenTinkerError

if TYPE_CHECKING:
    from opentinker.cli.planning.schedules import Pace
    from opentinker.shared.data.pipeline_simulation import Pools, Prediction, Work
    from opentinker.shared.spec import JobSpec

FEWEST = 3
"""Steps that a job must have done before its figures are used."""
RECENT = 20
ENOUGH = 1.1
"""Workers that shorten a step by less than this factor are not worth having."""
IN_TURN = "generation and training, which take turns (rollout.sleep)"
Like = Annotated[
    str | None,
    typer.Option(
        metavar="JOB", autocompletion=complete.jobs, help="Use durations and lengths measured in this earlier job."
    ),
]


def plan(
    path: SpecFile,
    like: Like = None,
    rollout_workers: Annotated[
        str, typer.Option(metavar="N,N...", help="Numbers of rollout workers to compare.")
    ] = "1,2,4,8",
    turns: Annotated[float | None, typer.Option(help="Turns per episode; default: the job's maximum.", min=1)] = None,
    tokens: Annotated[
        float | None, typer.Option(help="Tokens sampled per turn; default: the job's maximum.", min=1)
    ] = None,
    spread: Annotated[float, typer.Option(help="Standard deviation of --tokens divided by their mean.", min=0)] = 0.5,
    token_ms: Annotated[float | None, typer.Option(help="Milliseconds per token of a single sequence.", min=0)] = None,
    tokens_per_s: Annotated[
        float | None, typer.Option(help="Throughput of one rollout worker under full load; default: unlimited.", min=1)
    ] = None,
    env_ms: Annotated[float | None, typer.Option(help="Milliseconds per environment call.", min=0)] = None,
    train_s: Annotated[float | None, typer.Option(help="Seconds per optimizer step.", min=0)] = None,
    swap_s: Annotated[float | None, typer.Option(help="Seconds an engine pauses to load new weights.", min=0)] = None,
    sessions: Annotated[
        int | None,
        typer.Option(
            help="Episodes one env worker plays at a time; default: from settings and the environment's cost.", min=1
        ),
    ] = None,
    blocking: Annotated[
        bool,
        typer.Option(
            "--blocking",
            help="The environment blocks, so at most env_children calls run at a time; default: from its class.",
        ),
    ] = False,
    changes: Changes = None,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Simulate a job to estimate how many workers it needs and what limits its speed. Nothing is started.

    Missing figures are estimated from the model's size or measured by briefly playing the environment. The output lists
    each estimate.
    """
    spec = _read_rl_spec(path, changes)
    said = {
        "turns": turns, "tokens": tokens, "token_s": None if token_ms is None else token_ms / 1e3,
        "tokens_per_s": tokens_per_s, "env_s": None if env_ms is None else env_ms / 1e3, "train_s": train_s,
        "swap_s": swap_s,
    }  # fmt: skip
    points = [] if like is None else client(url).metrics(like)
    measured = {} if like is None else measured_of(points, like)
    known = {**measured, **{name: value for name, value in said.items() if value is not None}}
    cost, blocks = _demands(spec.environment.name)
    work, reasons, paces = work_of(spec, known, spread, {} if train_s is not None else trained_of(points))
    if work.sleeps and like is not None and token_ms is None:
        reasons.append(f"if engines of {like} slept during steps, its time per token has that in it: give --token-ms")
    rows = [_row(work, pools, spec, paces) for pools in _pools(rollout_workers, sessions, blocking or blocks, cost)]
    told = advice(work, rows, spec)
    if as_json:
        print_json({"work": asdict(work), "estimates": reasons, "plans": rows, "advice": told})
    else:
        _print(path, work, rows, told, reasons)


def _read_rl_spec(path: Path, changes: list[str] | None) -> JobSpec:
    from opentinker.sdk.inputs import with_whole_paths
    from opentinker.shared.spec import parse_spec

    spec = parse_spec(with_whole_paths(read_spec(path, changes=changes), path.parent))
    if spec.kind != "rl":
        raise OpenTinkerError(f"{path}: kind = {spec.kind!r} has no environment; only rl jobs are planned")
    return spec


def _demands(environment: str) -> tuple[float, bool]:
    """Return the environment's cost and whether it blocks. Says so if that is assumed."""
    cost, blocks, unknown = demands(environment)
    if unknown:
        complain(
            f"note: {environment} is not inspected ({unknown}); assuming cost 1 and no blocking. Pass"
            " --sessions and --blocking if that is wrong"
        )
    return cost, blocks


def work_of(
    spec: JobSpec, known: dict[str, float], spread: float, trained: Mapping[str, float] | None = None
) -> tuple[Work, list[str], Mapping[str, Pace]]:
    """Values that are not `known` come from the job, if it exists, and are estimated otherwise; the sentences explain
    each. With the pace of each policy in training. `trained`: measured seconds per step of policies, by name."""
    from opentinker.cli.planning.estimates import estimated, seconds_alone, sleep_reasons
    from opentinker.cli.planning.schedules import paces_of, pipeline_of
    from opentinker.shared.data.dry_run_policies import memory
    from opentinker.shared.data.pipeline_simulation import Work

    rollout = spec.rollout
    turns = known.get("turns", float(rollout.max_turns))
    values = {"turns": turns, "tokens": rollout.max_tokens / turns, "swap_s": 0.0}
    if rollout.toy is not None:
        values |= {"token_s": rollout.toy.seconds_per_token, "swap_s": rollout.toy.swap_seconds}
    values |= known
    trained, alone = trained or {}, seconds_alone(spec, turns, max(1.0, values["tokens"]))
    if (paces := paces_of(spec, known.get("train_s"), trained, alone)) is not None:
        batch, values["train_s"] = pipeline_of(spec, paces)
    is_split = len(alone) > 1 and not alone.keys() <= trained.keys() and (paces is None or "train_s" in known)
    missing = {"token_s", "env_s", "train_s"} - values.keys()
    if "token_s" in missing and "tokens_per_s" not in values:
        missing.add("tokens_per_s")
    found = estimated(spec, turns, values["tokens"], missing)
    reasons = list(found.reasons)
    if paces is None:
        paces = paces_of(spec, found.values["train_s"], {}, alone)
        assert paces is not None
        batch, found.values["train_s"] = pipeline_of(spec, paces)
    if is_split:
        shown = ", ".join(f"{name} {pace.train_s:.3g} s" for name, pace in paces.items())
        reasons.append(f"assumed, by the size of what each policy trains: a step of its own takes {shown}")
    if (held := memory(spec))["result"] == "ok":
        reasons.append(f"memory: {held['found']}; {held['hint']}")
    reasons += sleep_reasons(spec)
    if "tokens" not in known:
        reasons.append(f"assumed: --turns {turns:g} --tokens {values['tokens']:g}, as many as the job allows")
    return (
        Work(
            group_size=batch.group_size,
            groups_per_batch=batch.groups,
            max_staleness=batch.max_staleness,
            concurrent_groups=rollout.max_concurrent_groups,
            spread=spread,
            sleeps=rollout.sleep == "always",
            **values,
            **found.values,
        ),
        reasons,
        paces,
    )


def advice(work: Work, rows: Sequence[Mapping[str, Any]], spec: JobSpec) -> list[str]:
    """Return commands to type, and ways to shorten a step further."""
    best = min(row["step_s"] for row in rows)
    few = next(row for row in rows if row["step_s"] <= best * ENOUGH)
    count, env_workers = few["rollout_workers"], few["env_workers"]
    start = f"opentinker up --rollout-workers {count} --env-workers {env_workers}"
    told = [f"start with: {start}"]
    if count != spec.resources.rollout_workers:
        told.append(f"and in the job: resources.rollout_workers = {count} (it has {spec.resources.rollout_workers})")
    if few["limited_by"] == "training":
        return [*told, f"a step is {few['step_s']:.3g} s, of which training takes {work.train_s:.3g} s: more workers do"
                " not shorten it; a GPU (resources.trainer_gpus) or a smaller batch does"]  # fmt: skip
    if few["limited_by"] == IN_TURN:
        return [*told, f"a step is {few['step_s']:.3g} s: during the {work.train_s:.3g} s of training nothing is"
                " generated; another GPU, so that engines need not sleep, or a smaller batch shortens it"]  # fmt: skip
    by_turn = max(work.token_s, 1.0 / work.tokens_per_s) * work.tokens
    if work.env_s > by_turn:
        return [*told, f"a step is {few['step_s']:.3g} s: an episode waits {work.turns * work.env_s:.3g} s for its"
                " environment; a faster one, fewer turns or a larger algorithm.max_staleness shortens it"]  # fmt: skip
    return [*told, f"a step is {few['step_s']:.3g} s: generating takes longest, {work.turns * by_turn:.3g} s or more an"
            " episode; a GPU (resources.rollout_gpus), a smaller rollout.max_tokens or a larger algorithm.max_staleness"
            " shortens it" + ("" if few is rows[-1] else ", more rollout workers do not")]  # fmt: skip


def measured_of(points: Sequence[Mapping[str, Any]], job: str) -> dict[str, float]:
    """Durations and lengths from a job's metrics. Tokens take as long as they took with the sequences that there were:
    with fewer of them in an engine they would be faster. Several policies train side by side, so a step takes as long
    as that of the slowest; a match has the turns of all."""
    steps = list(_steps_of(points).values())
    last: dict[str, dict[str, float]] = {}
    for point in points:
        if "rollout/turns" in point["values"]:
            last.setdefault(point["source"], {}).update(point["values"])
    turns = sum(values["rollout/turns"] for values in last.values())
    fewest = min(map(len, steps), default=0)
    recent = [own[-RECENT:] for own in steps]
    if fewest < FEWEST:
        raise OpenTinkerError(f"job {job} has too few steps to plan by: it needs {FEWEST}")
    if not turns:
        problem = "has no metrics of its rollout workers to plan by (rollout/turns): plan by another job"
        raise OpenTinkerError(f"job {job} {problem}, or without --like")

    def mean(own: list[dict[str, float]], *names: str) -> float:
        return float(sum(step.get(name, 0.0) for step in own for name in names) / len(own))

    def total(name: str) -> float:
        return sum(values.get(name, 0.0) for values in last.values())

    return {
        "turns": max(1.0, sum(mean(own, "turns/mean") for own in recent)),
        "tokens": total("rollout/tokens") / turns,
        "token_s": total("rollout/generate_s") / max(1.0, total("rollout/tokens")),
        "env_s": total("rollout/env_s") / turns,
        "train_s": max(
            mean(own, "train_seconds") * len(whole) / fewest for own, whole in zip(recent, steps, strict=True)
        ),
        "swap_s": max(mean(own, "swap/pause_s", "swap/load_s", "swap/resume_s") for own in recent),
    }


def trained_of(points: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the seconds per step of each policy of a job, from its metrics; of a job's one policy by the empty
    name."""
    recent = {name: [step["train_seconds"] for step in own[-RECENT:]] for name, own in _steps_of(points).items()}
    return {name: sum(seconds) / len(seconds) for name, seconds in recent.items()}


def _steps_of(points: Sequence[Mapping[str, Any]]) -> dict[str, list[dict[str, float]]]:
    """Return the metrics of the steps by policy."""
    from opentinker.shared.data.step_log import metric_prefix

    found: dict[str, list[dict[str, float]]] = {}
    for point in points:
        policy = split_part(str(point["source"]))[1]
        prefix = metric_prefix(policy)
        if f"{prefix}train_seconds" in point["values"]:
            values = {name.removeprefix(prefix): value for name, value in point["values"].items()}
            found.setdefault(policy, []).append(values)
    return found


def _pools(rollout_workers: str, sessions: int | None, blocking: bool, cost: float) -> list[Pools]:
    from opentinker.shared.data.pipeline_simulation import Pools
    from opentinker.shared.settings_sources import load_settings

    settings = load_settings()
    counts = [int(part) if part.strip().isdigit() else 0 for part in rollout_workers.split(",")]
    if not all(counts):
        raise typer.BadParameter("--rollout-workers: whole numbers above 0, with commas between them")
    if blocking and settings.env_children == 0:
        raise OpenTinkerError("--blocking: env_children = 0, so such environments are not played at all")
    held = max(1, int(settings.env_sessions / cost))
    if blocking:
        held = min(held, settings.env_children * settings.env_sessions_per_child)
    calls = settings.env_children if blocking else None
    return [Pools(rollout_workers=n, env_workers=1, sessions=sessions or held, calls=calls) for n in counts]


def _row(work: Work, pools: Pools, spec: JobSpec, paces: Mapping[str, Pace]) -> dict[str, Any]:
    from opentinker.cli.planning.schedules import policy_steps
    from opentinker.shared.data.pipeline_simulation import enough_env_workers

    env_workers, found = enough_env_workers(work, pools)
    enough = replace(pools, env_workers=env_workers)
    row = {**asdict(enough), **asdict(found), "limited_by": limit(work, found)}
    if len(paces) > 1:
        row["policies"] = policy_steps(spec, paces, work, enough)
    return row


def limit(work: Work, found: Prediction) -> str:
    """Describe what would have to be faster for a step to be shorter, given enough env workers."""
    if found.trainer_waits < 0.1:
        return "training"
    if found.engines_busy > 0.9:
        return "generation"
    if work.sleeps and found.engines_busy + 1 - found.trainer_waits > 0.9:
        return IN_TURN
    by_turn = {"generation": work.tokens * work.token_s, "the environment": work.env_s}
    return f"{max(by_turn, key=lambda part: by_turn[part])} (max_concurrent_groups, max_staleness)"


def _print(path: Path, work: Work, rows: list[dict[str, Any]], told: list[str], reasons: list[str]) -> None:
    say(
        f"{path}: {work.groups_per_batch} groups of {work.group_size}, {work.turns:g} turns of {work.tokens:g} tokens; "
        f"token {work.token_s * 1e3:g} ms, environment {work.env_s * 1e3:g} ms, step {work.train_s:g} s, "
        f"swap {work.swap_s:g} s"
    )
    columns = ("rollout workers", "env workers", "step s", "trajectories/s", "trainer waits", "engines busy",
               "sessions used", "staleness", "limited by")  # fmt: skip
    cells = [
        (
            row["rollout_workers"], row["env_workers"], f"{row['step_s']:.3g}", f"{row['trajectories_per_s']:.3g}",
            *(f"{row[share]:.0%}" for share in ("trainer_waits", "engines_busy", "sessions_used")),
            f"{row['staleness']:.1f}", row["limited_by"],
        )
        for row in rows
    ]  # fmt: skip
    print_table(columns, cells, empty="")
    if "policies" in rows[0]:
        names = list(rows[0]["policies"])
        steps = [(row["rollout_workers"], *(f"{row['policies'][name]:.3g}" for name in names)) for row in rows]
        print_table(("rollout workers", *(f"{name}: s per step" for name in names)), steps, empty="")
    say("env workers: the smallest number with which a step takes no longer than with more of them")
    for line in [*told, *reasons]:
        say(line)
    if reasons:
        say("pass --like JOB to use figures measured in an earlier job")
