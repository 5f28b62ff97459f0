"""Commands about jobs: submit, eval, watch, pause, resume, failures, events, transcripts."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal

import typer

from opentinker.cli.common import (
    PATIENCE_S,
    AsJson,
    JobId,
    Policy,
    Url,
    UsageError,
    ago,
    as_typed,
    client,
    complain,
    print_json,
    print_line,
    print_table,
    running_server,
    same_server,
    say,
)
from opentinker.cli.job_record import print_result
from opentinker.cli.observability import line_of
from opentinker.cli.shell import complete
from opentinker.cli.specs import Changes, FromCheckpoint, SpecFile, Steps, WithOptimizer, changed, read_spec, read_sweep
from opentinker.cli.sweeps import show_begun, submit_file
from opentinker.cli.views.lists import say_if_cut
from opentinker.sdk.job_text import on_one_line, state_of
from opentinker.shared.types.core import part_id
from opentinker.shared.types.manifest import short_list

EvaluationChanges = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="SETTING=VALUE", help="Change its spec: evaluation.episodes=200. Repeatable."),
]
Outcome = Literal["solved", "unsolved", "won", "drawn", "lost"]
JOB = re.compile(r"j-[a-z0-9]{10}")
MOST_FAILURES = 1000
"""Of one answer of the API."""
STATE_EXIT = {"succeeded": 0, "failed": 1, "cancelled": 4}
"""Exit status of `watch` and `run` by the state in which the job ended."""


def submit(
    path: SpecFile,
    url: Url = None,
    follow: Annotated[bool, typer.Option("--watch", "-w", help="Watch it after submitting.")] = False,
    from_checkpoint: FromCheckpoint = None,
    with_optimizer: WithOptimizer = False,
    changes: Changes = None,
    steps: Steps = None,
    as_json: AsJson = False,
) -> None:
    """Submit a job, or a sweep: a file with kind = "sweep" or a table [sweep]."""
    from opentinker.sdk.spec_location import located

    if (swept := read_sweep(path, from_checkpoint, with_optimizer, changes, steps)) is not None:
        return submit_file(path, swept, url, follow, as_json)
    api = client(url, patience_s=PATIENCE_S if follow else 2.0)
    spec = read_spec(path, from_checkpoint, with_optimizer, changes, steps, url or running_server())
    with located(path):
        record = api.submit(spec, beside=path.parent)
    _begin(api, record, url, follow, as_json)


def _begin(api: Any, record: Any, url: str | None, follow: bool, as_json: bool) -> None:
    """Show a job that was just submitted."""
    if as_json:
        print_line(record)
    else:
        waits = f", waits for {record['waiting_for']}" if record["waiting_for"] else ""
        say(f"{record['id']}  {record['state']}{waits}")
        if not follow:
            say(f"watch it with: {as_typed('watch', record['id'], *same_server(url))}")
    if follow:
        raise typer.Exit(show(api, record["id"], as_json=as_json))


def evaluate(
    chosen: Annotated[
        list[str],
        typer.Argument(
            metavar="CHECKPOINT",
            help="A job, JOB@STEP, or the name of a published checkpoint. Several make a sweep: all of them play the "
            "environment of the first one's job.",
            autocompletion=complete.jobs,
        ),
    ],
    swap: Annotated[
        bool, typer.Option("--swap", help="Exchange the policies: each plays the seats of the one before it.")
    ] = False,
    steps: Annotated[
        list[str] | None,
        typer.Option("--at", metavar="STEP", help="Of a job: this checkpoint, or `latest`. Repeatable: makes a sweep."),
    ] = None,
    environment: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="Play this environment; its config with --set environment.config.KEY=VALUE.",
            autocompletion=complete.environments,
        ),
    ] = "",
    like: Annotated[
        str,
        typer.Option(
            metavar="JOB",
            help="Play the environment of this job of kind rl or eval, with its episodes.",
            autocompletion=complete.jobs,
        ),
    ] = "",
    follow: Annotated[bool, typer.Option("--watch", "-w", help="Watch it after submitting.")] = False,
    changes: EvaluationChanges = None,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Evaluate checkpoints of jobs on an environment, those of several policies against each other."""
    from opentinker.shared.types.sweeps import is_sweep

    api = client(url, patience_s=PATIENCE_S if follow else 2.0)
    if environment or like:
        spec = _elsewhere(api, chosen, swap, steps or [], environment, like)
    else:
        spec = _evaluation(api, chosen, swap, steps or [])
    spec = changed(spec, changes or [])
    if is_sweep(spec):
        show_begun(api, _accepted(api.sweep, spec), url, follow, as_json)
    else:
        _begin(api, _accepted(api.submit, spec), url, follow, as_json)


def _accepted(submit: Callable[[dict[str, Any]], Any], spec: dict[str, Any]) -> Any:
    """Submit the spec of an evaluation; says so if the server is of an earlier release that cannot play it."""
    from opentinker.sdk.evaluation_spec import older_server
    from opentinker.sdk.http import ApiError

    try:
        return submit(spec)
    except ApiError as error:
        raise older_server(error) from None


def _evaluation(api: Any, chosen: Sequence[str], swap: bool, steps: list[str]) -> dict[str, Any]:
    """Return the spec of an eval job, or of a sweep of them."""
    from opentinker.sdk.evaluation_spec import evaluation_of, evaluation_of_several

    if len(chosen) == 1 and JOB.fullmatch(chosen[0]):
        return evaluation_of(api.job(chosen[0]), swap=swap, steps=steps)
    if swap:
        raise UsageError("--swap exchanges the policies of one job: name that job alone")
    return evaluation_of_several(*_players(api, chosen, steps))


def _elsewhere(
    api: Any, chosen: Sequence[str], swap: bool, steps: list[str], environment: str, like: str
) -> dict[str, Any]:
    """Return the same, of checkpoints that play an environment other than that of their job."""
    from opentinker.sdk.evaluation_spec import evaluation_of_several

    if environment and like:
        raise UsageError("--environment and --like both say what is played: give one of them")
    if swap:
        raise UsageError("--swap exchanges the policies of one job in its own environment: give it alone")
    other = api.job(like) if like else None
    return evaluation_of_several(*_players(api, chosen, steps), like=other, environment=environment)


def _players(api: Any, chosen: Sequence[str], steps: list[str]) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the jobs and the checkpoints that words name."""
    checkpoints = [one for word in chosen for one in _checkpoints_of(api, word, steps)]
    jobs = {id: api.job(id) for id in dict.fromkeys(re.split("[~@]", one)[0] for one in checkpoints)}
    return list(jobs.values()), checkpoints


def _checkpoints_of(api: Any, word: str, steps: list[str]) -> list[str]:
    """Return the checkpoints, as JOB@STEP, that a word names. Raises NotFound."""
    if "@" in word:
        return [word]
    published = {} if JOB.fullmatch(word) else {one["name"]: one["checkpoint"] for one in api.published()}
    if word in published:
        return [published[word]]
    return [f"{api.job(word)['id']}@{step}" for step in steps or ["latest"]]


def watch(
    job_id: JobId,
    cancel_on_interrupt: Annotated[
        bool, typer.Option("--cancel", help="Ctrl-C cancels the job; otherwise the job continues.")
    ] = False,
    url: Url = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON lines: events, steps, and at the end the job.")
    ] = False,
) -> None:
    """Show progress, ETA and curves until the job ends. Exit status 0 succeeded, 1 failed, 4 cancelled."""
    api = client(url, patience_s=PATIENCE_S)
    try:
        code = show(api, job_id, as_json=as_json)
    except KeyboardInterrupt:
        if not cancel_on_interrupt:
            complain(f"the job continues; watch it again with: {as_typed('watch', job_id, *same_server(url))}")
            raise typer.Exit(130) from None
        api.cancel(job_id)
        complain("cancelled")
        code = STATE_EXIT["cancelled"]
    raise typer.Exit(code)


def show(api: Any, job_id: str, *, as_json: bool = False) -> int:
    """Watch to the end; returns the exit status."""
    from opentinker.cli.views.watch import watch as watch_job

    last = watch_job(api, job_id, as_json=as_json)
    if not as_json:
        say(state_of(last.job))
        if last.job["kind"] == "eval" and (result := api.job(job_id).get("result")):
            print_result(result)
    return STATE_EXIT[last.job["state"]]


def pause(job_id: JobId, url: Url = None, as_json: AsJson = False) -> None:
    """Save what a job has trained and free its workers; `resume` continues it."""
    record = client(url).pause(job_id)
    print_json(record) if as_json else say(f"{record['id']}  {record['state']}")


def resume(job_id: JobId, url: Url = None, as_json: AsJson = False) -> None:
    """Queue a paused job again; it continues from its newest checkpoint."""
    record = client(url).resume(job_id)
    print_json(record) if as_json else say(f"{record['id']}  {record['state']}")


def failures(
    job_id: JobId,
    url: Url = None,
    limit: Annotated[
        int, typer.Option("--limit", "-n", min=1, max=MOST_FAILURES, help="Show this many, the newest.")
    ] = 20,
    as_json: AsJson = False,
) -> None:
    """Show the groups of a job that failed for good, and why."""
    found = client(url).failures(job_id, min(limit + 1, MOST_FAILURES))
    if len(found["failures"]) == limit == MOST_FAILURES:
        complain(f"the newest {limit:,} failures; older ones, if any, are not listed")
    say_if_cut(found["failures"], limit, "failure", which="newest")
    found["failures"] = found["failures"][:limit]
    if as_json:
        print_json(found)
        return
    rows = [
        [
            f.get("group", f.get("episode")),
            f["reason"],
            ago(f["time"]),
            on_one_line((f["error"].strip().splitlines() or [""])[-1]),
        ]
        for f in found["failures"]
    ]
    print_table(["group", "reason", "when", "error"], rows, empty="no group has failed for good")
    if found["counts"]:
        say("total: " + ", ".join(f"{reason} {count}" for reason, count in sorted(found["counts"].items())))


def events(
    job_id: JobId,
    url: Url = None,
    after: Annotated[str, typer.Option(help="Only events after this event id.")] = "0",
    follow: Annotated[
        bool, typer.Option("--follow", "-f", "--watch", "-w", help="Keep printing until the job ends.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Print what happened to a job."""
    from opentinker.cli.views.watch import event_line

    api = client(url, patience_s=PATIENCE_S if follow else 2.0)
    if follow:
        for event in api.events(job_id, after=after):
            print_line(event) if as_json else say(event_line(event))
            sys.stdout.flush()
        return
    found = api.event_log(job_id, after=after)
    if as_json:
        print_json(found)
    else:
        for event in found:
            say(event_line(event))


def transcripts(
    job_id: JobId,
    step: Annotated[
        int | None, typer.Option(help="The evaluation after this step; default: the newest.", min=0)
    ] = None,
    outcome: Annotated[
        Outcome | None, typer.Option(help="Only those; won, drawn and lost where others play too.")
    ] = None,
    opponent: Annotated[str, typer.Option("--against", metavar="OPPONENT", help="Only those against it.")] = "",
    policy: Policy = "",
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Show the validation episodes that were kept, in full."""
    found = client(url).transcripts(part_id(job_id, policy), step, outcome=outcome or "", opponent=opponent)
    if as_json:
        print_json(found)
        return
    if found["step"] is None:
        say("no transcripts yet: they come with the first evaluation of a job that has [validation]")
        return
    say(f"step {found['step']}; kept steps: {short_list(found['steps'])}")
    say(f"kept episodes: {_counts(found['outcomes'])}")
    for name, games in found["opponents"].items():
        say(f"  against {name or 'others'}: {_counts(games)}")
    if not found["transcripts"]:
        where = f" against {opponent}" if opponent else ""
        say(f"no kept episode was {outcome or 'played'}{where or ('' if outcome else ' at this step')}")
    for one in found["transcripts"]:
        measured = " ".join(f"{name} {value:g}" for name, value in one["metrics"].items())
        result = {1.0: ", won", 0.5: ", drawn", 0.0: ", lost"}.get(one.get("outcome", -1.0), "")
        against = f" against {one['opponent']}" if "opponent" in one else ""
        say(f"\n--- episode {one['index']}{result}{against}: reward {one['reward']:g} {measured} ({one['ending']})")
        for message in one["messages"]:
            say(line_of(message))


def _counts(outcomes: Mapping[str, int]) -> str:
    """`3 solved, 5 unsolved`"""
    return ", ".join(f"{count} {name}" for name, count in outcomes.items())
