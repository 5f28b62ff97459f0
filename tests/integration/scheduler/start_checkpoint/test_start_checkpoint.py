"""Jobs that start from another job's checkpoint: what is refused when they are submitted."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

from opentinker import ApiError, AsyncClient
from opentinker.shared.data.safetensors_header import difference, shapes_in
from opentinker.shared.runtime.service import Context
from opentinker.shared.state.store import Store
from tests.conftest import until
from tests.integration.scheduler.start_checkpoint.checkpoint_files import (
    LORA,
    STATE,
    adapter_files,
    full_files,
    model_of,
    spec_of,
)
from tests.support.api import refused, write_checkpoint
from tests.support.factories import make_spec


async def test_missing_checkpoint(client: AsyncClient, ctx: Context, store: Store, base: Path, tmp_path: Path) -> None:
    spec = spec_of(base)
    first = (await client.submit(spec))["id"]
    unknown = await refused(client, spec, from_checkpoint="j-0000000000@1")
    assert "no job j-0000000000" in unknown["start.from"]
    assert "none yet" in (await refused(client, spec, from_checkpoint=f"{first}@latest"))["start.from"]
    for step in (10, 20):
        write_checkpoint(ctx, first, step, full_files(tmp_path))
    problem = (await refused(client, spec, from_checkpoint=f"{first}@15"))["start.from"]
    assert first in problem and problem.endswith("no checkpoint of step 15; there are: 10, 20")
    await store.create_job(id="j-theirs0000", spec=spec, tenant="someone-else")
    write_checkpoint(ctx, "j-theirs0000", 10, full_files(tmp_path))
    theirs = await refused(client, spec, from_checkpoint="j-theirs0000@10")
    assert "no job j-theirs0000" in theirs["start.from"]


async def test_its_mistakes_come_with_all_the_others(client: AsyncClient, base: Path, tmp_path: Path) -> None:
    data = spec_of(base) | {"name": "", "start": {"from": "j-0000000000@1"}}
    assert set(await refused(client, data)) == {"name", "start.from"}
    data |= {"start": {"from": "yesterday's", "optimizer": 3}, "model": {"base": str(tmp_path / "gone")}}
    found = await refused(client, data)
    assert set(found) == {"name", "start.from", "start.optimizer", "model.base"}
    assert "JOB@STEP" in found["start.from"]
    simulated = make_spec(model__base=str(base)).model_dump(mode="json")
    simulated["start"] = {"from": "j-0000000000@1", "optimizer": True}
    assert "simulated" in (await refused(client, simulated))["start.optimizer"]


ADAPTER = {"model": {"lora": LORA}}
MISFITS: list[tuple[str, dict[str, Any], str]] = [
    ("full", ADAPTER, "holds full weights, and this job trains an adapter; to train an adapter on them, download"),
    ("adapter", {}, "holds an adapter, and this job trains full weights; .*download --merge"),
    ("simulated", {}, r"holds no weights \(learner = 'simulated'\)"),
    ("other base", ADAPTER, "is an adapter of another/model, and model.base is /.*/base"),
    ("adapter", {"model": {"lora": {**LORA, "rank": 4}}}, r"rank 2 and alpha 4, .* rank 4 .*lora_A\.weight \[2, 8\]"),
    ("adapter", {"model": {"lora": {**LORA, "alpha": 8.0}}}, "alpha 4, model.lora has rank 2 and alpha 8"),
    (
        "adapter",
        {"model": {"lora": {**LORA, "target_modules": ["q_proj", "o_proj"]}}},
        r"leaves out .*v_proj\.lora_A\.weight \[2, 8\].*\(2 tensors\)",
    ),
    (
        "adapter",
        {"model": {"lora": {**LORA, "target_modules": ["q_proj", "v_proj", "o_proj"]}}},
        "has nothing for o_proj",
    ),
    ("larger", {}, r"1 tensors differ, such as model\.embed\.weight \(\[41, 8\] instead of \[40, 8\]\)"),
    ("deeper", {}, r"model\.layers\.1\.mlp\.weight \(\[8, 8\] instead of absent\)"),
    ("cut short", {}, "could not be kept for the new job: model.safetensors is not the file of .* bytes"),
    ("garbled", {}, "cannot be read: model.safetensors is no safetensors file"),
]


async def test_unservable_sources(client: AsyncClient, ctx: Context, base: Path, first: str) -> None:
    job = {"name": "x", "kind": "inference", "start": {"from": f"{first}@10"}, "model": {"base": str(base)}}
    lora = await refused(client, {**job, "model": model_of(base)})
    assert "this job serves an adapter; leave model.lora out to serve them" in lora["start.from"]
    write_checkpoint(ctx, first, 20, STATE)
    job["start"] = {"from": f"{first}@20"}
    assert "serve it with rollout.engine = 'toy'" in (await refused(client, job))["start.from"]


@pytest.mark.parametrize(("held", "changes", "words"), MISFITS, ids=[f"{m[0]}: {m[2][:30]}" for m in MISFITS])
async def test_checkpoint_that_does_not_fit_is_refused_with_the_tensors(
    client: AsyncClient, ctx: Context, base: Path, tmp_path: Path, held: str, changes: dict[str, Any], words: str
) -> None:
    first = await first_job(client, ctx, base, tmp_path, held)
    model = {"base": str(base), "chat_template": "plain", **changes.get("model", {})}
    before = sorted((ctx.settings.data_dir / "jobs").iterdir())
    problems = await refused(client, spec_of(base, model=model), from_checkpoint=f"{first}@latest")
    assert set(problems) == {"start.from"}
    assert re.search(words, problems["start.from"]), problems
    await until(lambda: sorted((ctx.settings.data_dir / "jobs").iterdir()) == before)  # nothing is left of the try


@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "adapter"])
async def test_reference_is_not_taken_from_files_that_are_narrower_than_what_the_trainer_begins_with(
    client: AsyncClient, ctx: Context, base: Path, tmp_path: Path, lora: dict[str, Any] | None
) -> None:
    def spec(dtype: str, kl_coef: float) -> dict[str, Any]:
        algorithm = {"group_size": 2, "groups_per_batch": 2, "kl_coef": kl_coef}
        model = {"base": str(base), "chat_template": "plain", "lora": lora, "dtype": dtype}
        return spec_of(base, model=model, algorithm=algorithm)

    files = adapter_files(tmp_path) if lora else full_files(tmp_path)
    jobs = {}
    for dtype in ("float32", "bfloat16"):
        jobs[dtype] = (await client.submit(spec(dtype, 0.0)))["id"]
        write_checkpoint(ctx, jobs[dtype], 10, files)
    problems = await refused(client, spec("float32", 0.1), from_checkpoint=f"{jobs['bfloat16']}@10")
    advice = f"download{' --merge' if lora else ''}` makes a directory"
    assert set(problems) == {"start.from"} and "algorithm.kl_coef = 0.1" in problems["start.from"]
    assert advice in problems["start.from"]
    await client.submit(spec("float32", 0.0), from_checkpoint=f"{jobs['bfloat16']}@10")
    for held, dtype in (("bfloat16", "bfloat16"), ("float32", "float32"), ("float32", "bfloat16")):
        await client.submit(spec(dtype, 0.1), from_checkpoint=f"{jobs[held]}@10")


async def first_job(client: AsyncClient, ctx: Context, base: Path, tmp_path: Path, held: str) -> str:
    """A job whose checkpoint of step 10 holds what is named."""
    lora = held in ("adapter", "other base")
    of = "another/model" if held == "other base" else base
    job = str((await client.submit(spec_of(of, model=model_of(of)) if lora else spec_of(of)))["id"])
    files = adapter_files(tmp_path) if lora else full_files(tmp_path)
    match held:
        case "larger":
            files = full_files(tmp_path, model__embed__weight=(41, 8))
        case "deeper":
            files = full_files(tmp_path, model__layers__1__mlp__weight=(8, 8))
        case "garbled":
            files = full_files(tmp_path) | {"model.safetensors": b"garbled" * 9}
        case "simulated":
            files = {"trainer/state.json": b'{"steps": 10}'}
    directory = write_checkpoint(ctx, job, 10, files)
    if held == "cut short":
        os.truncate(directory / "model.safetensors", len(files["model.safetensors"]) - 1)
    return job


async def test_optimizer_state_must_be_there(client: AsyncClient, ctx: Context, base: Path, tmp_path: Path) -> None:
    spec = spec_of(base)
    first = (await client.submit(spec))["id"]
    critic = spec_of(base, algorithm={"name": "ppo", "group_size": 2, "groups_per_batch": 2})
    write_checkpoint(ctx, first, 1, {k: v for k, v in full_files(tmp_path).items() if not k.startswith("trainer/opt")})
    write_checkpoint(ctx, first, 2, full_files(tmp_path))
    write_checkpoint(ctx, first, 3, full_files(tmp_path) | {"trainer/critic.safetensors": b"critic"})
    none = await refused(client, spec, from_checkpoint=f"{first}@1", with_optimizer=True)
    assert none == {"start.optimizer": "the checkpoint has no optimizer state"}
    lacking = await refused(client, critic, from_checkpoint=f"{first}@2", with_optimizer=True)
    assert "trains a critic and the checkpoint has none" in lacking["start.optimizer"]
    await client.submit(critic, from_checkpoint=f"{first}@2")
    frozen = spec_of(
        base, algorithm={"name": "ppo", "group_size": 2, "groups_per_batch": 2}, value_model={"base": "some/values"}
    )
    await client.submit(frozen, from_checkpoint=f"{first}@2", with_optimizer=True)
    await client.submit(critic, from_checkpoint=f"{first}@3", with_optimizer=True)
    await client.submit(spec, from_checkpoint=f"{first}@3", with_optimizer=True)
    with pytest.raises(ApiError, match="say which one"):
        await client.submit(spec, with_optimizer=True)


def test_shapes_are_those_of_the_file_and_nonsense_is_refused(tiny: Path, tmp_path: Path) -> None:
    from safetensors import safe_open

    path = tiny / "model.safetensors"
    with safe_open(path, framework="pt") as file:
        assert shapes_in(path) == {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    for nonsense in (b"", b"\xff" * 100, (5).to_bytes(8, "little") + b"[1,2]", (20).to_bytes(8, "little") + b"{}"):
        (tmp_path / "x.safetensors").write_bytes(nonsense)
        with pytest.raises(ValueError, match="is no safetensors file"):
            shapes_in(tmp_path / "x.safetensors")


def test_difference_names_tensors_with_both_shapes() -> None:
    assert difference({"a": (1, 2)}, {"a": [1, 2]}) == ""
    said = difference({"a": (1, 2), "c": ()}, {"a": (2, 1), "b": (3,), "d": (4,)})
    assert said == "4 tensors differ, such as a ([1, 2] instead of [2, 1]), b (absent instead of [3]), " + (
        "c ([] instead of absent)"
    )
