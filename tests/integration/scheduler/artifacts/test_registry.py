"""The checkpoints of all jobs of a tenant: lineage, names and evaluations, filtered, sorted and in pages."""

from __future__ import annotations

import asyncio
import shutil
from typing import Any

import orjson
import pytest

from opentinker import ApiError, AsyncClient
from opentinker.services.scheduler.artifacts.registry import Registry
from opentinker.shared import api_types
from opentinker.shared.runtime.service import Context
from opentinker.shared.security.authorization import Role
from opentinker.shared.state.artifacts import ArtifactEntry, ArtifactIndex, checkpoint_path
from opentinker.shared.state.store import Store
from opentinker.shared.types.core import JobState
from tests.conftest import until
from tests.integration.client.test_cli import typed
from tests.support.api import OPERATOR, bearing, fits, new_key_of, write_checkpoint
from tests.support.registry import BASE, LORA, evaluated, kept, trained
from tests.support.scheduling import new_job


@pytest.fixture
async def family(store: Store) -> list[str]:
    """A checkpoint of a base model, of a job that continued it, and of one that continued that: JOB@STEP, oldest first.
    The last one is an adapter in a project."""
    first = await kept(store, await trained(store, id="j-aaaaaaaaaa"), 10, 1000.0)
    second = await kept(store, await trained(store, id="j-bbbbbbbbbb", start=first, tags=["good"]), 20, 2000.0)
    labels = {"project": "maths", "tags": ["good", "last"], "model": {"base": BASE, "lora": LORA}}
    third = await kept(store, await trained(store, id="j-cccccccccc", start=second, **labels), 5, 3000.0, lora=True)
    return [first, second, third]


async def test_lineage_goes_from_the_base_model_through_every_continuation(
    client: AsyncClient, store: Store, family: list[str]
) -> None:
    first, second, third = family
    found = await client.all_checkpoints()
    fits(found, list[api_types.RegisteredCheckpoint])
    assert [(one["checkpoint"], one["lineage"]) for one in found] == [
        (third, [BASE, first, second]),
        (second, [BASE, first]),
        (first, [BASE]),
    ]
    newest, _, oldest = found
    assert (newest["weights"], newest["lora_rank"], newest["bytes"], newest["model_bytes"]) == ("lora", 8, 112, 105)
    assert (oldest["weights"], oldest["lora_rank"], oldest["created"]) == ("whole", None, 1000.0)
    assert (newest["job"], newest["policy"], newest["project"], newest["tags"]) == (
        "j-cccccccccc", "", "maths", ["good", "last"],
    )  # fmt: skip


async def test_evaluations_stand_with_their_checkpoint_the_newest_first(
    client: AsyncClient, store: Store, family: list[str]
) -> None:
    older, newer = await evaluated(store, family[1], 0.5), await evaluated(store, family[1], 0.25)
    await evaluated(store, "j-bbbbbbbbbb@21", 0.75)
    by_name = {one["checkpoint"]: one["evaluations"] for one in await client.all_checkpoints()}
    assert [one["job"] for one in by_name[family[1]]] == [newer, older]
    assert by_name[family[1]][1]["values"] == {"val/exact": 0.5, "val/exact/low": 0.4, "val/exact/high": 0.6}
    assert by_name[family[0]] == by_name[family[2]] == []


async def test_evaluations_during_training_stand_with_those_of_eval_jobs(client: AsyncClient, store: Store) -> None:
    job = await trained(store, id="j-aaaaaaaaaa")
    best = await kept(store, job, 20, 2000.0, exact=0.75)
    other = await kept(store, job, 10, 1000.0, exact=0.5)
    later = await evaluated(store, other, 0.625)
    found = await client.all_checkpoints(sort="exact")
    fits(found, list[api_types.RegisteredCheckpoint])
    assert [one["checkpoint"] for one in found] == [best, other]
    (own,), (newest, oldest) = (one["evaluations"] for one in found)
    assert (own["during_training"], own["job"], own["step"], own["values"]) == (True, job, 20, {"val/exact": 0.75})
    assert (own["state"], own["finished"], own["policy"]) == ("succeeded", 2001.0, "")
    assert own["environment"] == (await store.job(job)).spec["environment"]["name"]
    assert [(one["during_training"], one["job"]) for one in (newest, oldest)] == [(False, later), (True, job)]
    assert [one["checkpoint"] for one in await client.all_checkpoints(sort="-exact")] == [other, best]


async def test_the_newest_evaluation_with_values_counts_in_each_setting(
    client: AsyncClient, store: Store, family: list[str]
) -> None:
    await evaluated(store, family[1], 0.5)
    on_test = await evaluated(store, family[1], 0.125, "test")
    newest = await evaluated(store, family[1], 0.25)
    running = await evaluated(store, family[1], 0.75, "train")
    await store.update(running, result="")
    (found,) = [one for one in await client.all_checkpoints() if one["checkpoint"] == family[1]]
    counting = {setting: found["evaluations"][place]["job"] for setting, place in found["compared"].items()}
    assert counting == {
        "bandit; greedy; 256 tokens; 2 episodes": newest,
        "bandit split=test; greedy; 256 tokens; 2 episodes": on_test,
    }


async def test_a_metric_sorts_by_its_values_in_one_setting(
    client: AsyncClient, http: Any, store: Store, family: list[str]
) -> None:
    first, second, third = family
    greedy = "greedy; 256 tokens; 2 episodes"
    on_test, on_train = f"bandit split=test; {greedy}", f"bandit split=train; {greedy}"
    for checkpoint, exact, split in ((first, 0.5, "test"), (second, 0.75, "test"), (third, 0.9, "train")):
        await evaluated(store, checkpoint, exact, split)
    await evaluated(store, first, 0.8, "train")
    await evaluated(store, third, 0.25, "test")

    async def ranked(**query: Any) -> list[tuple[str, Any]]:
        return [(one["checkpoint"], one["ranked"]) for one in await client.all_checkpoints(**query)]

    def value(setting: str, value: float) -> dict[str, Any]:
        return {"metric": "val/exact", "setting": setting, "value": value}

    tested = [(second, value(on_test, 0.75)), (first, value(on_test, 0.5)), (third, value(on_test, 0.25))]
    assert await ranked(sort="exact") == tested, "the setting of most checkpoints"
    trained_on = [(third, value(on_train, 0.9)), (first, value(on_train, 0.8))]
    assert await ranked(sort="exact", setting=on_train) == trained_on
    assert await ranked(setting=on_train) == [(third, None), (first, None)]
    _, answer = await http("GET", "/v1/checkpoints?sort=exact&limit=1")
    fits(answer, api_types.CheckpointRegistry)
    assert (answer["metrics"], answer["settings"]) == (["exact"], [on_test, on_train])


async def test_many_categories_hide_no_other_metric(http: Any, store: Store, family: list[str]) -> None:
    categories = {f"val/task/{n:03}/reward": 0.5 for n in range(120)}
    await evaluated(store, family[0], 0.5, **categories, **{"val/winrate": 0.75, "val/winrate/low": 0.5})
    _, answer = await http("GET", "/v1/checkpoints")
    assert answer["metrics"] == ["exact", "winrate", *(f"task/{n:03}/reward" for n in range(98))]


async def test_an_evaluation_of_training_counts_as_one_of_an_eval_job(client: AsyncClient, store: Store) -> None:
    validation = {"every": 1, "episodes": 2, "max_tokens": 256}
    job = await trained(store, id="j-aaaaaaaaaa", environment={"name": "bandit"}, validation=validation)
    later = (await store.job(job)).created + 1000.0
    before = await kept(store, job, 10, 1000.0, exact=0.5)
    after = await kept(store, job, 20, later, exact=0.75)
    evaluations = [await evaluated(store, *one) for one in ((before, 0.25), (after, 0.375))]
    newest, oldest = await client.all_checkpoints()
    assert newest["compared"].keys() == oldest["compared"].keys() == {"bandit; greedy; 256 tokens; 2 episodes"}
    (place,) = newest["compared"].values()
    assert newest["evaluations"][place]["during_training"], "it is the newer one"
    (place,) = oldest["compared"].values()
    assert oldest["evaluations"][place]["job"] == evaluations[0]


async def test_policies_of_a_job_are_evaluated_in_settings_of_their_own(client: AsyncClient, store: Store) -> None:
    own = {name: {"model": {"base": BASE}} for name in ("speaker", "listener")}
    seats = {"one": "speaker", "two": "listener"}
    job = await trained(store, id="j-aaaaaaaaaa", policies=own, seats=seats, validation={"every": 1})
    for name in own:
        await kept(store, f"{job}~{name}", 10, 1000.0, exact=0.5)
    found = {one["policy"]: one["compared"] for one in await client.all_checkpoints()}
    assert found.keys() == own.keys() and all(len(compared) == 1 for compared in found.values())
    assert not found["speaker"].keys() & found["listener"].keys()


@pytest.mark.parametrize(
    ("query", "steps"),
    [
        ({}, [5, 20, 10]),
        ({"sort": "-created"}, [10, 20, 5]),
        ({"sort": "step"}, [20, 10, 5]),
        ({"sort": "exact"}, [10, 20, 5]),
        ({"sort": "val/exact"}, [10, 20, 5]),
        ({"sort": "-exact"}, [20, 10, 5]),
        ({"job": "j-bbbbbbbbbb"}, [20]),
        ({"search": "MATH"}, [5]),
        ({"search": "bbb@2 GOO"}, [20]),
        ({"search": "best"}, [20]),
        ({"search": "nothing"}, []),
        ({"project": "maths"}, [5]),
        ({"tags": ["good"]}, [5, 20]),
        ({"tags": ["good", "last"]}, [5]),
        ({"model": BASE}, [5, 20, 10]),
        ({"model": "another"}, []),
        ({"weights": "lora"}, [5]),
        ({"weights": "whole", "sort": "exact"}, [10, 20]),
        ({"published": True}, [20]),
        ({"published": False}, [5, 10]),
        ({"limit": 2}, [5, 20]),
    ],
)
async def test_checkpoints_are_filtered_and_sorted_page_by_page(
    client: AsyncClient, store: Store, family: list[str], query: dict[str, Any], steps: list[int]
) -> None:
    client._http.page = 1
    await evaluated(store, family[0], 0.75)
    await evaluated(store, family[1], 0.5)
    index = ArtifactIndex(store.redis)
    entry = (await index.of("j-bbbbbbbbbb"))[checkpoint_path(20)]
    await index.publish("default", "best", "j-bbbbbbbbbb", entry, "key")
    found = await client.all_checkpoints(**query)
    assert [one["step"] for one in found] == steps
    assert {name for one in found for name in one["published"]} == ({"best"} if 20 in steps else set())


@pytest.mark.parametrize(
    ("query", "field", "problem"),
    [
        ({"sort": "colour"}, "sort", "must be one of created, step, bytes, or a metric: val/exact, "),
        ({"sort": "x" * 201}, "sort", "200 characters"),
        ({"tags": ["x" * 201]}, "tag", "200 characters"),
        ({"search": "x" * 201}, "search", "200 characters"),
        ({"setting": "x" * 2001}, "setting", "2000 characters"),
        ({"weights": "heavy"}, "weights", "must be one of any, whole, lora, none"),
        ({"limit": -1}, "", ""),
    ],
)
async def test_what_a_list_cannot_be_chosen_by_is_refused(
    client: AsyncClient, store: Store, family: list[str], query: dict[str, Any], field: str, problem: str
) -> None:
    await evaluated(store, family[0], 0.75)
    if not field:
        assert await client.all_checkpoints(**query) == []
        return
    with pytest.raises(ApiError) as refused:
        await client.all_checkpoints(**query)
    assert refused.value.status == 422 and problem in str(refused.value)
    assert [mistake["field"] for mistake in refused.value.mistakes] == [field]


async def test_a_cursor_of_another_list_is_refused(http: Any, family: list[str]) -> None:
    status, refused = await http("GET", "/v1/checkpoints?weights=lora&before=j-aaaaaaaaaa@10")
    assert status == 422 and "start without one" in str(refused)


async def test_foreign_tenants_see_nothing(http: Any, store: Store, family: list[str]) -> None:
    """Neither checkpoints, nor through the lineage of a job of their own."""
    stranger = bearing(await new_key_of(store, "blue", Role.ADMIN))
    assert (await http("GET", "/v1/checkpoints", headers=stranger))[1] == {
        "checkpoints": [], "cursor": "", "more": False, "metrics": [], "settings": [], "complete": True,
    }  # fmt: skip
    job = await trained(store, id="j-dddddddddd", tenant="blue", start=family[1], model={"base": "theirs"})
    await kept(store, job, 1, 4000.0, tenant="blue")

    async def listed() -> Any:
        return (await http("GET", "/v1/checkpoints", headers=stranger))[1]["checkpoints"]

    (found,) = await until(listed)
    assert found["lineage"] == ["theirs", family[1]], "it says what the spec says, and nothing of the other tenant's"
    assert "j-dddddddddd" not in str((await http("GET", "/v1/checkpoints"))[1])


async def test_a_policy_has_its_own_checkpoints_base_and_rank(client: AsyncClient, store: Store) -> None:
    game: dict[str, Any] = {
        "environment": {"name": "signalling"},
        "seats": {"speaker": "speaker", "listener": "listener"},
        "policies": {"speaker": {}, "listener": {"model": {"base": "other", "lora": LORA}}},
        "train": {"steps": 3},
    }
    job = await new_job(store, **game)
    await kept(store, f"{job}~listener", 2, 1000.0, lora=True)
    (found,) = await client.all_checkpoints(model="other")
    assert (found["checkpoint"], found["job"], found["policy"]) == (f"{job}~listener@2", job, "listener")
    assert (found["lineage"], found["lora_rank"]) == (["other"], 8)


async def test_the_newest_are_listed_and_published_ones_always(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs that have not changed since the oldest listed checkpoint are not read."""
    index, jobs = ArtifactIndex(store.redis), [await trained(store) for _ in range(4)]
    for number, job in enumerate(jobs):
        for step in (1, 2):
            await kept(store, job, step, 1000.0 * number + step)
        await store.redis.hset(f"job:{job}", "updated", 1000.0 * number + 2)
    entry = (await index.of(jobs[0]))[checkpoint_path(1)]
    await index.publish("default", "first", jobs[0], entry, "key")
    read: list[str] = []
    of_index = index.checkpoints_of

    async def counted(parts: list[str], limit: int) -> list[list[ArtifactEntry]]:
        read.extend(parts)
        return await of_index(parts, limit)

    monkeypatch.setattr(index, "checkpoints_of", counted)
    found = await Registry(store, index, most=3, jobs_at_once=1).of("default")
    newest = [f"{jobs[3]}@2", f"{jobs[3]}@1", f"{jobs[2]}@2"]
    assert [one["checkpoint"] for one in found] == [*newest, f"{jobs[0]}@1"]
    assert found[-1]["published"] == ["first"]
    assert read == [jobs[3], jobs[2], jobs[0]], "the last for its name"


async def test_a_list_says_that_older_checkpoints_are_left_out(
    http: Any, client: AsyncClient, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENTINKER_API_KEY", OPERATOR)
    job = await trained(store, id="j-aaaaaaaaaa")
    for start in range(0, 999, 111):
        await asyncio.gather(*(kept(store, job, step, 1000.0 + step) for step in range(start, start + 111)))
    _, answer = await http("GET", "/v1/checkpoints?limit=1&search=nothing")
    assert answer["complete"] and await client.has_all_checkpoints()
    await kept(store, job, 1000, 3000.0)

    async def listed() -> Any:
        return (await http("GET", "/v1/checkpoints?limit=1&search=nothing"))[1]

    found = await until(listed, lambda answer: not answer["complete"])
    assert found["checkpoints"] == []
    assert not await client.has_all_checkpoints()
    command = "checkpoints", "-n", 2, "--json", "--url", http.url
    done = await asyncio.to_thread(typed, *command)
    assert [one["checkpoint"] for one in orjson.loads(done.stdout)] == [f"{job}@1000", f"{job}@998"]
    assert done.stderr.splitlines() == [
        "the first 2 checkpoints; -n for more",
        "of those without a name only the newest 1,000 are listed; `checkpoints JOB` has all of a job",
    ]
    assert (await asyncio.to_thread(typed, *command, "--search", "nothing")).stderr.startswith("of those without")


async def test_what_a_trainer_commits_is_listed_until_it_is_deleted(ctx: Context, client: AsyncClient) -> None:
    job = await new_job(ctx.store, state=JobState.STARTING, model={"base": BASE}, artifacts={"keep_all": True})
    directory = write_checkpoint(ctx, job, 10, {"model.safetensors": b"weights"})
    await until(client.all_checkpoints, lambda found: [one["checkpoint"] for one in found] == [f"{job}@10"])
    evaluated_at = {"epoch": 1, "step": 10, "time": 5.0, "val/exact": 0.5}
    (ctx.settings.data_dir / "jobs" / job / "validation.jsonl").write_bytes(orjson.dumps(evaluated_at) + b"\n")
    await until(client.all_checkpoints, lambda found: bool(found[0]["evaluations"]))
    await client.publish(f"{job}@10", "best")
    assert (await client.all_checkpoints(published=True))[0]["published"] == ["best"]
    await client.unpublish("best")
    assert await client.all_checkpoints(published=True) == []
    shutil.rmtree(directory)
    await ArtifactIndex(ctx.store.redis).remove("default", job, [checkpoint_path(10)])
    await until(client.all_checkpoints, lambda found: not found)
