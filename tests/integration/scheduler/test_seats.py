"""Seats that a frozen checkpoint or a model behind a URL plays: what is refused when the job is submitted, and what is
kept for it."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import orjson
import pytest

from opentinker import AsyncClient
from opentinker.envs.runtime.preflight import check_request
from opentinker.envs.runtime.resolver import Resolver
from opentinker.services.scheduler.artifacts.retention import used_by
from opentinker.shared.messaging.bus import Bus
from opentinker.shared.messaging.subjects import ENV_CHECK
from opentinker.shared.runtime.service import Context
from opentinker.shared.spec.matches.seats import MAX_SEATS
from opentinker.shared.spec.serving import MAX_ADAPTERS
from opentinker.shared.spec.sweeps.uses import uses_of
from opentinker.shared.state.store import Store
from opentinker.shared.state.sweeps import SweepStore
from opentinker.shared.types.core import part_id
from opentinker.shared.types.manifest import frozen_of, read_manifest, start_of
from opentinker.shared.types.sweeps import SweepRecord
from tests.conftest import until
from tests.support.api import refused, write_checkpoint
from tests.support.factories import make_spec

WEIGHTS = {"model.safetensors": b"weights", "config.json": b"{}", "trainer/state.json": b"{}"}
ADAPTER = {
    "adapter_model.safetensors": b"adapter",
    "adapter_config.json": orjson.dumps({"r": 4, "lora_alpha": 8.0, "target_modules": ["q_proj"]}),
}


def spec_of(**changes: Any) -> dict[str, Any]:
    fields: dict[str, Any] = {"environment": {"name": "signalling"}, "model": {"base": "some/model"}}
    return make_spec(**{**fields, **changes}).model_dump(mode="json")


# --- the environment's seats ----------------------------------------------------------------------------------------


@pytest.fixture
async def _env_worker(bus: Bus) -> None:
    """What an env worker says of an environment, without the process."""
    resolver = Resolver(modules=False)
    await bus.serve(ENV_CHECK, partial(check_request, resolver.check, resolver.find), "env")


@pytest.mark.usefixtures("_env_worker")
async def test_mistakes_of_seats_policies_groups_and_pools_are_reported_at_once(client: AsyncClient) -> None:
    spec = spec_of() | {
        "environment": {"name": "debate"},
        "algorithm": {"group_size": 1},
        "train": {"steps": 10, "lr": 1e-3},
        "policies": {"alice": {}, "bob": {}},
        "seats": {"first": "alice", "judge": {"bot": "wise"}, "audience": {"pool": "past"}},
        "pools": {"past": {"policy": "alice", "every": 10}},
    }
    found = await refused(client, spec)
    assert found.keys() == {"seats", "seats.judge.bot", "seats.audience", "algorithm.group_size", "pools.past.every"}
    assert "gives policy 'bob' no seat" in found["seats"] and "assign no player to 'second'" in found["seats"]
    assert "no bot 'wise'" in found["seats.judge.bot"] and "no such seat" in found["seats.audience"]
    assert "needs 2 or more" in found["algorithm.group_size"] and "never get a member" in found["pools.past.every"]
    assert await client.jobs() == []


@pytest.mark.usefixtures("_env_worker")
async def test_mistakes_of_evaluations_are_reported_with_those_of_seats_and_of_the_environment(
    client: AsyncClient,
) -> None:
    validation = {"every": 5, "config": {"rounds": 99}, "against": [{"bot": "wise"}, {"bot": "random"}]}
    spec = spec_of() | {
        "environment": {"name": "debate", "config": {"digits": 99}},
        "policies": {"alice": {}, "bob": {}},
        "seats": {"first": "alice", "secnd": "bob", "judge": {"bot": "perfect"}},
        "validation": validation,
    }
    at = "validation.against.0.bot"
    found = await refused(client, spec)
    assert found.keys() == {"environment.config.digits", "validation.config.rounds", at}
    assert found[at].startswith("Debate has no bot 'wise'")
    spec["environment"]["config"] = {}
    assert (await refused(client, spec)).keys() == {"seats.secnd", "validation.config.rounds", at}
    spec["seats"] = {"first": "alice", "second": "bob", "judge": {"bot": "wise"}}
    found = await refused(client, spec)
    assert found.keys() == {"seats.judge.bot", "validation.config.rounds", at}
    validation["config"] = {"digits": 99}
    spec["environment"]["config"] = {"digits": 99}
    found = await refused(client, spec)
    assert {"validation.config.digits", at} <= found.keys(), "evaluations are wrong there by themselves"
    wrong = spec | {"environment": {"name": "debate"}, "train": {"steps": 0}}
    assert (await refused(client, wrong)).keys() == {"train.steps", "seats.judge.bot", "validation.config.digits", at}


@pytest.mark.usefixtures("_env_worker")
async def test_evaluations_and_pools_that_could_not_work_are_refused_at_submission(client: AsyncClient) -> None:
    spec = spec_of() | {
        "environment": {"name": "debate"},
        "algorithm": {"group_size": 2, "groups_per_batch": 1},
        "policies": {"alice": {}},
        "seats": {"first": "alice", "second": "alice", "judge": {"bot": "perfect"}},
        "validation": {"every": 5, "against": [{"bot": "random"}]},
    }
    found = await refused(client, spec)
    assert "would take 'judge'" in found["validation.against"] and len(found) == 1
    spec["seats"] = spec["seats"] | {"second": {"pool": "past"}}
    spec["pools"] = {"past": {"policy": "alice", "every": 1, "add_if": 0.999}}
    found = await refused(client, spec)
    assert "the win rate is at most 0.9931" in found["pools.past.add_if"] and len(found) == 1
    spec["pools"]["past"]["add_if"] = 0.8
    assert (await client.submit(spec))["id"]
    two = {
        "policies": {"alice": {}, "bob": {}},
        "seats": {"first": "alice", "second": "bob", "judge": {"pool": "past"}},
    }
    found = await refused(client, {**spec, **two, "validation": {"every": 5, "against": [{"policy": "bob"}]}})
    assert "no opponent for policy 'bob' but itself" in found["validation.against"] and len(found) == 1


@pytest.mark.usefixtures("_env_worker")
async def test_a_seat_that_is_wrong_in_itself_is_not_also_called_absent(client: AsyncClient) -> None:
    spec = spec_of() | {
        "policies": {"speaker": {}, "listener": {}},
        "seats": {"speaker": "speaker", "listener": {"policy": "listener", "bot": "echo"}},
    }
    assert (await refused(client, spec)).keys() == {"seats.listener.bot"}


# --- frozen checkpoints ---------------------------------------------------------------------------------------------


def against(*checkpoints: str, **changes: Any) -> dict[str, Any]:
    """A job whose listeners are these checkpoints."""
    seats = {f"listener{number or ''}": {"frozen": name} for number, name in enumerate(checkpoints)}
    return spec_of(seats=seats, **changes)


@pytest.fixture
async def source(client: AsyncClient, ctx: Context) -> str:
    """A job of two policies; the listener has a model of its own."""
    policies = {"speaker": {}, "listener": {"model": {"base": "other/model", "dtype": "bfloat16"}}}
    spec = spec_of(policies=policies, seats={"speaker": "speaker", "listener": "listener"})
    job = str((await client.submit(spec))["id"])
    for step in (10, 20):
        write_checkpoint(ctx, part_id(job, "listener"), step, WEIGHTS)
    return job


async def test_every_checkpoint_that_is_not_there_is_named(
    client: AsyncClient, ctx: Context, store: Store, source: str
) -> None:
    theirs = spec_of()
    await store.create_job(id="j-theirs0000", spec=theirs, tenant="someone-else")
    write_checkpoint(ctx, "j-theirs0000", 10, WEIGHTS)
    names = ("j-theirs0000@10", "j-0000000000@1", f"{source}~listener@15", f"{source}~speaker@latest", "unpublished")
    found = await refused(client, against(*names) | {"name": ""})
    assert found.keys() == {"name", "seats.listener.frozen", *(f"seats.listener{i}.frozen" for i in range(1, 5))}
    assert "no job j-theirs0000" in found["seats.listener.frozen"], "a stranger's looks like one that does not exist"
    assert "there are: 10, 20" in found["seats.listener2.frozen"] and "none yet" in found["seats.listener3.frozen"]


async def test_a_checkpoint_is_settled_with_its_model_and_kept_to_the_end(
    client: AsyncClient, ctx: Context, source: str
) -> None:
    listener = part_id(source, "listener")
    job = await client.submit(against(f"{listener}@latest", f"{listener}@20", f"{listener}@10"))
    seats = (await client.job(job["id"]))["spec"]["seats"]
    assert [player["frozen"] for player in seats.values()] == [f"{listener}@20", f"{listener}@20", f"{listener}@10"]
    assert {(player["model"]["base"], player["model"]["dtype"]) for player in seats.values()} == {
        ("other/model", "bfloat16")
    }
    assert used_by([await ctx.store.job(job["id"])]) == {listener: {10, 20}}, "these are not deleted"
    shutil.rmtree(ctx.settings.data_dir / "jobs" / listener)
    kept = [frozen_of(ctx.settings.data_dir, job["id"], f"{listener}@{step}") for step in (10, 20)]
    assert [read_manifest(place).step for place in kept] == [10, 20]
    assert all((place / "model.safetensors").read_bytes() == b"weights" for place in kept)
    await client.cancel(job["id"])
    await until(lambda: not start_of(ctx.settings.data_dir, job["id"]).exists())


async def test_the_stored_spec_may_be_submitted_again(client: AsyncClient, source: str) -> None:
    job = await client.submit(against(f"{source}~listener@latest"))
    spec = (await client.job(job["id"]))["spec"]
    again = await client.submit(spec)
    assert (await client.job(again["id"]))["spec"]["seats"] == spec["seats"]
    spec["seats"]["listener"]["model"]["base"] = "mine"
    found = await refused(client, spec)
    assert found.keys() == {"seats.listener.model"} and "leave it out" in found["seats.listener.model"]


async def test_an_adapter_plays_as_it_was_trained(client: AsyncClient, ctx: Context) -> None:
    lora = {"rank": 4, "alpha": 8.0, "target_modules": ["q_proj"]}
    learner = {"train": {"steps": 3}, "rollout": {}}
    model = {"base": "some/model", "lora": lora}
    first = str((await client.submit(spec_of(**learner, model=model)))["id"])
    write_checkpoint(ctx, first, 10, ADAPTER)
    job = await client.submit(against(f"{first}@10", **learner))
    spec = (await client.job(job["id"]))["spec"]
    assert spec["seats"]["listener"]["model"]["lora"].items() >= lora.items() and spec["model"]["lora"] is None
    write_checkpoint(ctx, first, 20, ADAPTER | {"adapter_config.json": b"{"})
    assert "cannot be read" in (await refused(client, against(f"{first}@20", **learner)))["seats.listener.frozen"]


async def test_what_an_engine_could_not_play_is_refused(client: AsyncClient, ctx: Context, tmp_path: Path) -> None:
    base = tmp_path / "base"
    base.mkdir()
    (base / "config.json").write_bytes(b'{"model_type": "qwen3"}')
    first = str((await client.submit(spec_of(model={"base": str(base), "chat_template": "plain"})))["id"])
    write_checkpoint(ctx, first, 10, {"trainer/state.json": b"{}"})
    played = against(f"{first}@10", train={"steps": 3}, rollout={})
    assert "holds no weights" in (await refused(client, played))["seats.listener.frozen"]
    armed = against(f"{first}@10", environment={"name": "signalling", "tools": [{"type": "python"}]})
    assert "cannot tell it of environment.tools" in (await refused(client, armed))["seats.listener.frozen"]
    shutil.rmtree(base)
    found = await refused(client, against(f"{first}@10"))
    assert "its model.base" in found["seats.listener.frozen"] and "does not exist" in found["seats.listener.frozen"]


async def test_of_endless_lists_of_checkpoints_no_more_are_looked_for_than_a_job_may_name(client: AsyncClient) -> None:
    spec = spec_of()
    spec["seats"] = {f"seat{i}": {"frozen": f"j-{i:010d}@latest"} for i in range(2000)}
    found = await refused(client, spec)
    assert "at most 64" in found["seats"] and len(found) == 1 + MAX_SEATS
    spec = spec_of()
    spec["serving"] = {"adapters": [{"name": f"a{i}", "from": f"j-{i:010d}@latest"} for i in range(2000)]}
    found = await refused(client, spec)
    assert len([field for field in found if field.endswith(".from")]) == MAX_ADAPTERS


# --- opponents of evaluations ---------------------------------------------------------------------------------------


def evaluated_against(*opponents: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return spec_of(seats={"listener": {"bot": "echo"}}, **changes) | {
        "validation": {"every": 2, "episodes": 4, "against": list(opponents)}
    }


async def test_a_checkpoint_is_kept_for_evaluations_with_its_model(
    client: AsyncClient, ctx: Context, source: str
) -> None:
    listener = part_id(source, "listener")
    job = await client.submit(evaluated_against({"bot": "echo"}, {"frozen": f"{listener}@latest"}))
    spec = (await client.job(job["id"]))["spec"]
    bot, player = spec["validation"]["against"]
    assert bot["frozen"] is None and player["frozen"] == f"{listener}@20"
    assert (player["model"]["base"], player["model"]["dtype"]) == ("other/model", "bfloat16")
    assert used_by([await ctx.store.job(job["id"])]) == {listener: {20}}, "it is not deleted"
    assert read_manifest(frozen_of(ctx.settings.data_dir, job["id"], f"{listener}@20")).step == 20
    again = await client.submit(spec)
    assert (await client.job(again["id"]))["spec"]["validation"] == spec["validation"]
    player["model"]["base"] = "mine"
    assert (await refused(client, spec)).keys() == {"validation.against.1.model"}


async def test_all_jobs_of_a_sweep_play_against_the_checkpoints_that_it_found(
    client: AsyncClient, ctx: Context, source: str
) -> None:
    listener = part_id(source, "listener")
    latest = {"frozen": f"{listener}@latest"}
    spec = evaluated_against({"bot": "echo"}, latest)
    spec["seats"] = {"listener": dict(latest)}
    table: dict[str, Any] = {"parameters": {"train.lr": [1e-5]}, "metric": f"val/winrate/{listener}@latest"}

    async def made(**changes: Any) -> SweepRecord:
        sweep = await client.sweep(spec | {"sweep": {**table, **changes}})
        record = await SweepStore(ctx.store.redis).sweep(sweep["id"])
        assert uses_of(record.table, record.base) == record.uses
        return record

    pinned = await made()
    assert pinned.base["validation"]["against"][1]["frozen"] == f"{listener}@20"
    assert pinned.base["seats"]["listener"]["frozen"] == f"{listener}@20"
    assert pinned.uses == [f"{listener}@20"]
    assert pinned.metric == pinned.table["metric"] == f"val/winrate/{listener}@20", "the name by which jobs report it"
    varied = await made(parameters={"validation.against.1.frozen": [f"{listener}@10", latest["frozen"]]})
    assert varied.base["validation"]["against"][1]["frozen"] == latest["frozen"] and varied.metric == table["metric"]
    assert varied.base["seats"]["listener"]["frozen"] == f"{listener}@20"
    whole = await made(parameters={"validation.against": [[{"bot": "echo"}, latest], [{"frozen": f"{listener}@10"}]]})
    assert varied.uses == whole.uses == [f"{listener}@10", f"{listener}@20"]


async def test_opponents_that_cannot_play_are_all_named(client: AsyncClient, source: str) -> None:
    listener = part_id(source, "listener")
    opponents: list[dict[str, Any]] = [
        {"frozen": f"{listener}@20"},
        {"frozen": f"{listener}@latest"},
        {"frozen": f"{listener}@15"},
        {"url": "http://127.0.0.1:8000/v1", "model": "big", "key": "lab"},
    ]
    found = await refused(client, evaluated_against(*opponents) | {"name": ""})
    at = "validation.against"
    assert found.keys() == {"name", f"{at}.1.frozen", f"{at}.2.frozen", f"{at}.3.url", f"{at}.3.key"}
    assert f"is {listener}@20; validation.against names an opponent twice" in found[f"{at}.1.frozen"]
    assert "there are: 10, 20" in found[f"{at}.2.frozen"] and "a loopback address" in found[f"{at}.3.url"]


# --- models behind URLs ---------------------------------------------------------------------------------------------


PUBLIC = "http://93.184.215.14/v1"
KEYS = f"""
[ours]
key = "sk-canary-0123456789"
url = "{PUBLIC}"
tenants = ["default"]
[theirs]
key = "sk-canary-0123456789"
url = "{PUBLIC}"
tenants = ["red"]
"""


@pytest.fixture
def _keys(ctx: Context, tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(KEYS)
    object.__setattr__(ctx.settings, "model_keys_file", file)


def with_url(url: str, **settings: Any) -> dict[str, Any]:
    return spec_of(seats={"listener": {"url": url, "model": "big", **settings}})


@pytest.mark.parametrize(
    ("address", "kind"),
    [
        ("http://127.0.0.1:8000/v1", "a loopback address"),
        ("http://10.1.2.3/v1", "not a public address"),
        ("http://169.254.169.254/v1", "link-local"),
        ("http://[::ffff:127.0.0.1]/v1", "a loopback address"),
        ("http://2130706433/v1", "a loopback address"),
        ("http://nowhere.invalid/v1", "cannot be resolved"),
    ],
)
async def test_a_url_that_may_not_be_reached_is_refused_together_with_other_mistakes(
    client: AsyncClient, address: str, kind: str
) -> None:
    found = await refused(client, with_url(address) | {"name": ""})
    assert found.keys() == {"name", "seats.listener.url"} and kind in found["seats.listener.url"]


@pytest.mark.usefixtures("_keys")
async def test_keys_are_for_the_tenants_and_urls_that_the_operator_says(client: AsyncClient) -> None:
    job = await client.submit(with_url(PUBLIC, key="ours"))
    record = await client.job(job["id"])
    assert record["spec"]["seats"]["listener"]["key"] == "ours" and "canary" not in str(record)
    for name in ("theirs", "missing"):
        found = await refused(client, with_url(PUBLIC, key=name))
        assert found == {"seats.listener.key": "is no key that your jobs may use here: the operator names them in "
                         "model_keys_file"}  # fmt: skip
    found = await refused(client, with_url("http://93.184.215.15/v1", key="ours"))
    assert found == {"seats.listener.key": f"belongs to {PUBLIC}, and is sent nowhere else"}


async def test_networks_that_the_operator_allows_are_not_refused(client: AsyncClient, ctx: Context) -> None:
    object.__setattr__(ctx.settings, "env_egress_allow", ["127.0.0.0/8"])
    await client.submit(with_url("http://127.0.0.1:8000/v1"))
    assert "no key that your jobs" in str(await refused(client, with_url("http://127.0.0.1:8000/v1", key="lab")))
