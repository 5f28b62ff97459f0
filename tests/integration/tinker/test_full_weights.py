"""Models of which all weights are trained, over HTTP: which server gets them, and what clients read of them."""

from __future__ import annotations

import time
from typing import Any

import pytest

from opentinker.services.scheduler.tinker.access import Access
from opentinker.shared.runtime.service import Context
from opentinker.shared.types.tinker import Create, Load, LoraShape
from tests.integration.tinker.site import BASE, Client, FakeWorkers, checkpoint_of, start_server

FULL = LoraShape(rank=0)
FILES = ("config.json", "model.safetensors", "tokenizer.json")


async def full_model(user: Client, lora: Any) -> str:
    session = await user.session()
    body = {"session_id": session, "model_seq_id": 0, "base_model": BASE, "lora_config": lora}
    return str((await user.result(await user.ok("create_model", **body)))["model_id"])


@pytest.mark.parametrize("lora", [None, {"rank": 0}])
async def test_a_model_without_an_adapter_goes_to_the_server_for_it(
    user: Client, ctx: Context, workers: FakeWorkers, lora: Any
) -> None:
    async with FakeWorkers(ctx, await start_server(ctx, full_weights=True)).work() as full:
        model = await full_model(user, lora)
        (created,) = full.commands
        assert created.model == model and created.body == Create(lora=FULL)
        await user.model()
        assert [len(full.commands), len(workers.commands)] == [1, 1]
    _, info = await user.post("get_info", model_id=model)
    assert (info["is_lora"], info["lora_rank"]) == (False, None)
    _, run = await user.get(f"training_runs/{model}")
    assert (run["is_lora"], run["lora_rank"]) == (False, None)


async def test_without_a_server_for_adapters_one_is_refused(user: Client, ctx: Context) -> None:
    async with FakeWorkers(ctx, await start_server(ctx, base="whole/model", full_weights=True)).work():
        body = {"session_id": await user.session(), "base_model": "whole/model", "lora_config": {"rank": 4}}
        status, answer = await user.post("create_model", model_seq_id=0, **body)
    assert status == 422 and "create the model with rank 0" in answer["detail"]


@pytest.mark.parametrize("layers", ["train_mlp", "train_attn"])
async def test_all_weights_without_some_layers_are_refused(user: Client, ctx: Context, layers: str) -> None:
    async with FakeWorkers(ctx, await start_server(ctx, full_weights=True)).work() as full:
        body = {"session_id": await user.session(), "model_seq_id": 0, "base_model": BASE}
        status, answer = await user.post("create_model", **body, lora_config={"rank": 0, layers: False})
    assert status == 422 and f"lora_config.{layers}" in answer["detail"] and not full.commands


async def test_its_checkpoints_are_loaded_sampled_and_downloaded(user: Client, ctx: Context) -> None:
    async with FakeWorkers(ctx, await start_server(ctx, full_weights=True)).work() as full:
        model = await full_model(user, None)
        saved = checkpoint_of(ctx, model, lora=FULL, created=time.time())
        place = Access(ctx).directory(saved)
        for file in place.iterdir():
            file.unlink()
        for name in FILES:
            (place / name).write_bytes(name.encode())
        (place / "trainer").mkdir()
        (place / "trainer" / "state.safetensors").write_bytes(b"moments")
        await full.store.add_checkpoint(saved)
        _, found = await user.get(f"training_runs/{model}/checkpoints/weights/first/external_weights_urls")
        assert tuple(sorted(found["urls"])) == FILES
        _, info = await user.post("weights_info", tinker_path=saved.path)
        assert (info["is_lora"], info["lora_rank"], info["train_unembed"]) == (True, 0, True)
        await user.result(await user.ok("load_weights", model_id=model, seq_id=1, path=saved.path, optimizer=True))
        loaded = full.commands[-1]
        assert loaded.body == Load(path=saved.path, directory=str(place), optimizer=True)
        session = await user.session()
        body = {"session_id": session, "model_seq_id": 0, "path": saved.path, "optimizer": False}
        await user.result(await user.ok("load_weights", **body))
        created = full.commands[-1]
        assert created.body == Create(lora=FULL, start=str(place))
        made = {"session_id": session, "sampling_session_seq_id": 0, "model_path": saved.path}
        sampler = (await user.ok("create_sampling_session", **made))["sampling_session_id"]
        prompt = {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]}
        asked = {"sampling_session_id": sampler, "seq_id": 0, "prompt": prompt, "sampling_params": {"max_tokens": 3}}
        await user.result(await user.ok("asample", **asked))
        assert full.samples[-1].directory == str(place)
