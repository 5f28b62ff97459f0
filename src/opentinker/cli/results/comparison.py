"""`opentinker compare`: checkpoints side by side, by what evaluations of them have measured."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from opentinker.cli.common import AsJson, Url, client, complain, print_json, print_table, say
from opentinker.cli.results.values import estimate_of, names_of
from opentinker.cli.shell import complete
from opentinker.shared.types.core import split_part
from opentinker.shared.types.errors import Conflict, NotFound
from opentinker.shared.types.metric_names import meant_metric, split_policy

if TYPE_CHECKING:
    from opentinker.client import Client
    from opentinker.shared.api_types import Evaluation, RegisteredCheckpoint

SHOWN = 20
"""Metrics that a mistake names."""
LISTED = 1000
"""Checkpoints of a job among which one is looked for."""
TOO_OLD = (
    "this server is older than this command: it does not say in which settings checkpoints were evaluated, so values "
    "of different splits or temperatures could share a row. Upgrade the server, or list the evaluations with --json"
)

Chosen = Annotated[
    list[str],
    typer.Argument(
        metavar="CHECKPOINT",
        help="JOB@STEP, the name of a published one, or JOB for the newest of a job that was evaluated.",
        autocompletion=complete.jobs,
    ),
]


def compare(
    checkpoints: Chosen,
    metric: Annotated[
        list[str] | None, typer.Option("--metric", metavar="NAME", help="Only this one, as exact. Repeatable.")
    ] = None,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Compare checkpoints by their evaluations: a row per metric, a column per checkpoint.

    There is a table for each setting (environment and config, players, sampling). The newest evaluation in a setting
    counts, also one of training.
    """
    api = client(url)
    found = {one["checkpoint"]: one for one in (_found(api, word) for word in checkpoints)}
    if as_json:
        print_json(list(found.values()))
        return
    counting = {name: evaluations_by_setting(one) for name, one in found.items()}
    if metric:
        refuse_unknown(metric, counting)
    tables = {setting: _rows(setting, counting, metric) for setting in settings_of(counting)}
    tables = {setting: rows for setting, rows in tables.items() if rows}
    for setting, rows in tables.items():
        say(f"on {setting}")
        print_table(["metric", *found], rows, empty="")
    if not tables:
        say("none of them was evaluated: `opentinker eval CHECKPOINT ...` makes evaluations")
    elif without := [name for name, own in counting.items() if not own]:
        complain(f"not evaluated: {', '.join(without)}")


def settings_of(counting: Mapping[str, Mapping[str, Evaluation]]) -> list[str]:
    """Return the settings of these checkpoints' evaluations, those of most checkpoints first."""
    counts = Counter(setting for own in counting.values() for setting in own)
    return sorted(counts, key=lambda setting: (-counts[setting], setting))


def _rows(
    setting: str, counting: Mapping[str, Mapping[str, Evaluation]], metrics: Sequence[str] | None
) -> list[list[str]]:
    values = [own[setting]["values"] if setting in own else {} for own in counting.values()]
    known = names_of({name: 0.0 for each in values for name in each})
    shown = [one for one in known if not metrics or one in metrics or one.removeprefix("val/") in metrics]
    return [
        [one.removeprefix("val/"), *(estimate_of(own, one) if one in own else "-" for own in values)] for one in shown
    ]


def refuse_unknown(metrics: Sequence[str], counting: Mapping[str, Mapping[str, Evaluation]]) -> None:
    """Raise BadParameter for a metric that no evaluation of these checkpoints has, by its own name: that of a policy's
    checkpoint does not name the policy."""
    values = {name: 0.0 for own in counting.values() for one in own.values() for name in one["values"]}
    known = [name.removeprefix("val/") for name in names_of(values)]
    policies = {split_part(checkpoint.partition("@")[0])[1] for checkpoint in counting} - {""}
    for one in metrics if known else ():
        if one.removeprefix("val/") in known:
            continue
        split = split_policy(one, policies)
        meant = meant_metric((split[1] if split else one).removeprefix("val/"), known)
        hint = f"; did you mean {meant}?" if meant else ""
        there = f" (they have: {', '.join(known[:SHOWN])})"
        raise typer.BadParameter(f"no evaluation of these checkpoints has {one}{hint}{there}")


def _found(api: Client, word: str) -> RegisteredCheckpoint:
    """Return the checkpoint that a word names. Raises NotFound."""
    if "@" not in word and not word.startswith("j-"):
        named = {one["name"]: one["checkpoint"] for one in api.published()}
        if word not in named:
            raise NotFound(f"no published checkpoint {word!r}; `opentinker published` lists them")
        word = named[word]
    part, _, step = word.partition("@")
    listed = api.all_checkpoints(LISTED, job=part.partition("~")[0])
    own = [one for one in listed if one["checkpoint"].rpartition("@")[0] == part]
    own.sort(key=lambda one: one["step"], reverse=True)
    if not step:
        own = [one for one in own if any(evaluation["values"] for evaluation in one["evaluations"])] or own
    if step not in ("", "latest"):
        own = [one for one in own if str(one["step"]) == step]
    if not own:
        raise NotFound(f"no checkpoint {word}; `opentinker checkpoints {part}` lists those of its job")
    return own[0]


def evaluations_by_setting(one: RegisteredCheckpoint) -> dict[str, Evaluation]:
    """Return the evaluation that counts in each setting; the server chooses it. Raises Conflict if it is too old to."""
    if "compared" not in one:
        raise Conflict(TOO_OLD)
    return {setting: one["evaluations"][place] for setting, place in one["compared"].items()}
