"""Models are created, also from checkpoints, and load them."""

from __future__ import annotations

from typing import Any
from unittest.mock import AsyncMock

import msgspec
import pytest

from opentinker.shared.messaging.bus import Bus, StreamFull
from opentinker.shared.runtime.service import Context
from opentinker.shared.types.tinker import Create, Load, Skip
from tests.integration.tinker.site import BASE, Client, FakeWorkers, checkpoint_of


async def test_a_model_is_created_from_a_checkpoint_and_loads_one(
    user: Client, workers: FakeWorkers, ctx: Context
) -> None:
    model = await user.model()
    saved = checkpoint_of(ctx, model)
    await workers.store.add_checkpoint(saved)
    session = await user.session()
    body = {"session_id": session, "model_seq_id": 2, "path": saved.path, "optimizer": True}
    made = await user.result(await user.ok("load_weights", **body))
    assert made == {"model_id": f"{session}:train:2", "path": saved.path}
    create = workers.commands[-1].body
    assert isinstance(create, Create) and create.optimizer and create.start.endswith("/weights/first")
    older = {"model_id": made["model_id"], "seq_id": 1, "path": saved.path, "optimizer": False}
    await user.result(await user.ok("load_weights", **older))
    load = workers.commands[-1].body
    assert isinstance(load, Load) and (load.path, load.directory) == (saved.path, create.start)
    absent = {"model_id": made["model_id"], "seq_id": 2, "path": saved.path + "x", "optimizer": False}
    assert "does not exist" in (await user.result(await user.ok("load_weights", **absent)))["error"]
    assert (await user.post("load_weights", **(body | {"path": saved.path + "x"})))[0] == 404
    status, info = await user.post("get_info", model_id=made["model_id"])
    assert status == 200 and info["model_data"]["model_name"] == BASE and info["lora_rank"] == 8


async def test_a_repeated_creation_is_the_same_request_whatever_became_of_its_checkpoint(
    user: Client, workers: FakeWorkers, ctx: Context
) -> None:
    saved = checkpoint_of(ctx, await user.model())
    await workers.store.add_checkpoint(saved)
    body = {"session_id": await user.session(), "model_seq_id": 2, "path": saved.path, "optimizer": True}
    promise = await user.ok("load_weights", **body)
    again = msgspec.structs.replace(saved, seq=4, place_name="first@4")
    await workers.store.add_checkpoint(again)
    assert await user.ok("load_weights", **body) == promise
    await workers.store.remove_checkpoint(again)
    assert await user.ok("load_weights", **body) == promise
    assert "model_id" in await user.result(promise)
    (create,) = [one.body for one in workers.commands if one.request == promise["request_id"]]
    assert isinstance(create, Create) and create.start.endswith("/weights/first")
    assert (await user.post("load_weights", **(body | {"optimizer": False})))[0] == 409
    for changed in ({"model_seq_id": 3}, {"path": f"{saved.path}x"}):
        status, answer = await user.post("load_weights", **(body | changed))
        assert status == 404 and "does not exist" in answer["detail"]


async def test_a_repeated_load_is_the_same_request_whatever_became_of_its_checkpoint(
    user: Client, workers: FakeWorkers, ctx: Context
) -> None:
    saved = checkpoint_of(ctx, model := await user.model())
    body = {"model_id": model, "path": saved.path, "optimizer": True}
    absent = await user.ok("load_weights", **body, seq_id=1)
    await workers.store.add_checkpoint(saved)
    loaded = await user.ok("load_weights", **body, seq_id=2)
    assert await user.ok("load_weights", **body, seq_id=1) == absent
    await workers.store.remove_checkpoint(saved)
    assert await user.ok("load_weights", **body, seq_id=2) == loaded
    assert f"{saved.path} does not exist" in (await user.result(absent))["error"]
    assert "error" not in await user.result(loaded)
    assert [type(one.body) for one in workers.commands] == [Create, Skip, Load]


async def test_a_creation_that_was_never_sent_fails_once_its_checkpoint_has_gone(
    user: Client, workers: FakeWorkers, ctx: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = checkpoint_of(ctx, await user.model())
    await workers.store.add_checkpoint(saved)
    body = {"session_id": await user.session(), "model_seq_id": 2, "path": saved.path, "optimizer": True}
    with monkeypatch.context() as full:
        full.setattr(Bus, "publish", AsyncMock(side_effect=StreamFull("the stream has no room")))
        assert (await user.post("load_weights", **body))[0] == 503
    await workers.store.remove_checkpoint(saved)
    failed = await user.result(await user.ok("load_weights", **body))
    assert failed["category"] == "user" and f"{saved.path} does not exist" in failed["error"]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"lora_config": {"rank": 33}}, "1 to 32"),
        ({"lora_config": {"rank": -1}}, "1 to 32"),
        ({"lora_config": {"rank": 0}}, "trains adapters: pass a lora_config"),
        ({"lora_config": None}, "tinker.full_weights = true"),
        ({"lora_config": {"rank": 4, "train_mlp": False, "train_attn": False}}, "trains no layer"),
        ({"base_model": "another"}, f"served are {BASE}"),
        ({"optimizer_config": {"type": "dimuon"}}, "the optimizer is adamw"),
        ({"session_id": "s-0"}, "does not exist"),
        ({"model_seq_id": -1}, "0 or more"),
        ({"user_metadata": {"x": "y" * 5000}}, "4096"),
    ],
)
async def test_a_model_that_cannot_be_made_is_refused(user: Client, body: dict[str, Any], said: str) -> None:
    whole = {"session_id": await user.session(), "model_seq_id": 0, "base_model": BASE, "lora_config": {"rank": 4}}
    status, answer = await user.post("create_model", **(whole | body))
    assert status in (404, 422) and said in answer["detail"]
