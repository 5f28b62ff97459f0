"""Checkpoints of several jobs on the command line: evaluated at once, and compared with their intervals."""

from __future__ import annotations

import re
from typing import Any

import orjson
import pytest
import typer
from aiohttp import web

from opentinker import AsyncClient
from opentinker.cli.results.comparison import refuse_unknown
from opentinker.cli.results.values import estimate_of, names_of
from opentinker.shared.runtime.service import Context
from opentinker.shared.spec import parse_spec
from opentinker.shared.state.store import Store
from opentinker.shared.types.core import JobState
from tests.integration.client.test_job_commands import on, run
from tests.support.api import write_checkpoint
from tests.support.factories import make_spec
from tests.support.http_server import http_server
from tests.support.registry import evaluated, kept, trained

__all__ = ["on"]


def test_bounds_are_part_of_their_value_and_main_values_come_first() -> None:
    values = {
        "val/reward/mean": 0.5, "val/reward/low": 0.25, "val/reward/high": 0.75, "val/exact": 1.0,
        "val/tokens": 12345.0, "val/task/a/reward": 0.1, "val/low": 3.0,
    }  # fmt: skip
    assert names_of(values) == ["val/exact", "val/reward/mean", "val/low", "val/tokens", "val/task/a/reward"]
    assert estimate_of(values, "val/reward/mean") == "0.5 (0.25 to 0.75)" and estimate_of(values, "val/low") == "3"
    assert estimate_of(values, "val/tokens") == "12,345"


@pytest.mark.parametrize("metric", ["val/winrate/a/random", "a/val/winrate/random", "winrate/rndom"])
def test_a_metric_of_a_policy_s_checkpoint_does_not_name_the_policy(metric: str) -> None:
    newest: Any = {"j-0123456789~a@5": {"kuhn_poker": {"values": {"val/winrate/random": 0.5, "val/rating": 9.0}}}}
    with pytest.raises(typer.BadParameter, match=r"did you mean winrate/random\? \(they have: .*rating"):
        refuse_unknown([metric], newest)
    refuse_unknown(["winrate/random", "val/rating"], newest)
    refuse_unknown([metric], {"j-0123456789~a@5": {}})


async def test_a_result_has_a_row_per_metric(client: AsyncClient, store: Store, on: list[str]) -> None:
    first = await kept(store, await trained(store, id="j-aaaaaaaaaa"), 10, 1000.0)
    result = await evaluated(store, first, 0.5)
    values = {"val/exact": 0.5, "val/exact/low": 0.4, "val/exact/high": 0.6}
    await store.update(result, result=orjson.dumps({"version": "1.10", "step": 10, "values": values}).decode())
    lines = (await run("job", result, *on)).stdout.splitlines()
    assert [line.split(maxsplit=1) for line in lines if "val/" in line] == [["val/exact", "0.5 (0.4 to 0.6)"]]


async def test_checkpoints_are_compared_by_their_newest_evaluations(
    client: AsyncClient, store: Store, on: list[str]
) -> None:
    first = await kept(store, await trained(store, id="j-aaaaaaaaaa"), 10, 1000.0, exact=0.125)
    second = await kept(store, await trained(store, id="j-bbbbbbbbbb"), 20, 2000.0)
    await kept(store, "j-bbbbbbbbbb", 30, 2500.0)
    await evaluated(store, first, 0.25)
    await evaluated(store, first, 0.5)
    await evaluated(store, second, 0.75, **{"val/turns": 2.0})
    await evaluated(store, second, 0.875, "test")
    await client.publish(second, "best")
    shown = (await run("compare", first, "best", "j-bbbbbbbbbb", *on)).stdout.splitlines()
    starts = [place for place, line in enumerate(shown) if line.startswith("on ")]
    assert [shown[place] for place in starts] == [
        "on bandit; greedy; 256 tokens; 2 episodes", "on bandit split=test; greedy; 256 tokens; 2 episodes",
        "on copy_digits",
    ]  # fmt: skip
    for place in starts:
        assert shown[place + 1].split() == ["metric", first, second], "a job stands for its newest evaluated checkpoint"
    assert [re.split(r"\s\s+", line) for line in shown if line.split()[0] == "exact"] == [
        ["exact", "0.5 (0.4 to 0.6)", "0.75 (0.65 to 0.85)"],
        ["exact", "-", "0.875 (0.775 to 0.975)"],
        ["exact", "0.125", "-"],
    ], "the last one is of training"
    assert any(line.split() == ["turns", "-", "2"] for line in shown)
    only = (await run("compare", first, second, "--metric", "exact", *on)).stdout
    assert "turns" not in only and "exact" in only
    wrong = await run("compare", first, second, "--metric", "exakt", *on)
    said = " ".join(wrong.stderr.split())
    assert wrong.returncode == 2 and "has exakt; did you mean exact? (they have: exact, " in said
    whole = orjson.loads((await run("compare", first, second, "--json", *on)).stdout)
    assert [one["checkpoint"] for one in whole] == [first, second]
    for missing, what in (("j-aaaaaaaaaa@11", "no checkpoint j-aaaaaaaaaa@11"), ("worst", "no published checkpoint")):
        done = await run("compare", first, missing, *on)
        assert done.returncode == 1 and what in done.stderr


async def test_checkpoints_sorted_by_a_metric_say_its_value_and_setting(
    client: AsyncClient, store: Store, on: list[str]
) -> None:
    first = await kept(store, await trained(store, id="j-aaaaaaaaaa"), 10, 1000.0)
    second = await kept(store, await trained(store, id="j-bbbbbbbbbb"), 20, 2000.0)
    for checkpoint, exact in ((first, 0.25), (second, 0.75)):
        await evaluated(store, checkpoint, exact)
    await evaluated(store, first, 0.875, "test")

    async def listed(*options: str) -> tuple[str, list[list[str]]]:
        said, *table = (await run("checkpoints", "--sort", "exact", *options, *on)).stdout.splitlines()
        return said, [line.split()[:2] for line in table if line.startswith(("j-", "checkpoint"))]

    assert (await run("checkpoints", *on)).stderr == ""
    assert (await run("checkpoints", "-n", 1, *on)).stderr == "the first 1 checkpoint; -n for more\n"
    assert second in (await run("checkpoints", "--search", "BBBB", *on)).stdout
    assert (await run("checkpoints", "--search", "cccc", *on)).stdout == "no such checkpoint\n"
    said, rows = await listed()
    assert said.startswith("by exact on bandit; greedy; 256 tokens; 2 episodes; --setting")
    assert rows == [["checkpoint", "exact"], [second, "0.75"], [first, "0.25"]]
    _, rows = await listed("--setting", "bandit split=test; greedy; 256 tokens; 2 episodes")
    assert rows == [["checkpoint", "exact"], [first, "0.875"]]


async def test_a_server_that_says_no_settings_is_too_old_to_compare(
    client: AsyncClient, store: Store, on: list[str]
) -> None:
    """Its answers have neither `setting` and `during_training` nor `compared`."""
    job = await trained(store, id="j-aaaaaaaaaa")
    first = await kept(store, job, 10, 1000.0)
    await kept(store, job, 20, 2000.0)
    await evaluated(store, first, 0.5)
    listed = await client.all_checkpoints()
    for one in listed:
        del one["compared"]  # type: ignore[misc]
        for evaluation in one["evaluations"]:
            del evaluation["setting"], evaluation["during_training"]

    async def answer(_: web.Request) -> web.Response:
        return web.json_response({"checkpoints": listed, "cursor": "", "more": False})

    async with http_server(web.get("/v1/checkpoints", answer)) as url:
        shown = await run("checkpoints", "--url", url)
        assert shown.returncode == 0 and "exact 0.5 (0.4 to 0.6) on bandit, j-ev" in " ".join(shown.stdout.split())
        refused = await run("compare", job, "--url", url)
        said = " ".join(refused.stderr.split())
        assert refused.returncode == 1 and "this server is older than this command" in said and "KeyError" not in said
        whole = await run("compare", job, "--json", "--url", url)
        assert [one["checkpoint"] for one in orjson.loads(whole.stdout)] == [first], "the newest that was evaluated"


async def test_checkpoints_of_several_jobs_are_evaluated_at_once(
    client: AsyncClient, ctx: Context, store: Store, on: list[str]
) -> None:
    ids = [(await client.submit(make_spec(name=name)))["id"] for name in ("one", "two")]
    for id in ids:
        write_checkpoint(ctx, id, 10, {"trainer/state.json": b"{}"})
        await store.transition(id, JobState.CANCELLED)
    await client.publish(f"{ids[1]}@10", "best")
    for chosen in ((ids[0], ids[1]), (f"{ids[0]}@10", "best")):
        made = await run("eval", *chosen, "--set", "evaluation.episodes=5", "--json", *on)
        assert made.returncode == 0, made.stderr
        sweep = await client.sweep_state(orjson.loads(made.stdout)["id"])
        ((path, values),) = sweep["spec"]["sweep"]["parameters"].items()
        assert path == "start.from" and sweep["kind"] == "eval" and sweep["spec"]["evaluation"]["episodes"] == 5
        assert [one.partition("@")[0] for one in values["values"]] == ids
    one = orjson.loads((await run("eval", "best", "--json", *on)).stdout)
    assert (await client.job(one["id"]))["spec"]["start"]["from"] == f"{ids[1]}@10", "a single one is no sweep"
    assert (await run("eval", *ids, "--swap", *on)).returncode == 2
    assert "no job 'nope'" in (await run("eval", ids[0], "nope", *on)).stderr


async def test_a_fine_tuned_model_is_evaluated_in_a_named_environment_or_like_another_job(
    client: AsyncClient, ctx: Context, store: Store, on: list[str]
) -> None:
    tuned, spec = "j-cccccccccc", make_spec()
    data = {"kind": "sft", "name": "tuned", "model": {"base": spec.model.base, "chat_template": "plain"}}
    data |= {"data": {"path": "rows.jsonl"}, "train": {"steps": 3}}
    await store.create_job(id=tuned, spec=parse_spec(data).model_dump(mode="json"), tenant="default")
    write_checkpoint(ctx, tuned, 10, {"trainer/state.json": b"{}"})
    await store.transition(tuned, JobState.CANCELLED)
    refused = await run("eval", tuned, *on)
    assert refused.returncode == 1 and "--environment NAME, or with --like JOB" in " ".join(refused.stderr.split())
    other = (await client.submit(spec))["id"]
    for options in (("--like", other), ("--environment", spec.environment.name, "--set", "rollout.engine='toy'")):
        made = await run("eval", tuned, *options, "--json", *on)
        assert made.returncode == 0, made.stderr
        found = (await client.job(orjson.loads(made.stdout)["id"]))["spec"]
        assert (found["kind"], found["environment"]["name"]) == ("eval", spec.environment.name)
        assert found["start"]["from"] in (f"{tuned}@10", f"{tuned}@latest")
    for wrong in (("--like", other, "--environment", "gsm8k"), ("--like", other, "--swap")):
        assert (await run("eval", tuned, *wrong, *on)).returncode == 2
