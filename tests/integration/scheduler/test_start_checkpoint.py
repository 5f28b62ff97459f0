"""Jobs that start from another job's checkpoint: what is refused when they are submitted, and what is kept for them."""

from __future__ import annotations

import asyncio
import errno
import os
import re
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest
import torch
from safetensors.torch import save_file

from opentinker import ApiError, AsyncClient
from opentinker.services.scheduler.jobs import kept_checkpoints
from opentinker.services.scheduler.jobs.cleanup import JobCleaner
from opentinker.services.scheduler.jobs.disk_threads import ReferencesAway
from opentinker.services.scheduler.jobs.submit import submit
from opentinker.services.trainer import checkpoint
from opentinker.shared.data.safetensors_header import difference, shapes_in
from opentinker.shared.runtime.service import TENANT_COPIES, Context
from opentinker.shared.runtime.tenant_threads import TenantThreads
from opentinker.shared.state.redis_script import UNFENCED
from opentinker.shared.state.store import Store
from opentinker.shared.types.core import JobRecord
from opentinker.shared.types.errors import Conflict
from opentinker.shared.types.manifest import read_manifest, start_of
from tests.conftest import soon, until
from tests.support.api import refused, write_checkpoint
from tests.support.factories import make_spec
from tests.support.scheduling import new_job

LINK = os.link
LORA = {"rank": 2, "alpha": 4.0, "target_modules": ["q_proj", "v_proj"]}
STATE = {"trainer/optimizer.safetensors": b"moments", "trainer/state.json": b"{}"}


def tensors(directory: Path, **shapes: tuple[int, ...]) -> bytes:
    """A safetensors file; double underscores in a name are dots."""
    path = directory / "made.safetensors"
    save_file({name.replace("__", "."): torch.zeros(shape) for name, shape in shapes.items()}, path)
    return path.read_bytes()


def adapter_files(directory: Path, rank: int = 2, alpha: float = 4.0) -> dict[str, bytes]:
    layer = "base_model__model__model__layers__0__self_attn__"
    return {
        "adapter_model.safetensors": tensors(
            directory,
            **{f"{layer}{module}__lora_A__weight": (rank, 8) for module in ("q_proj", "v_proj")},
            **{f"{layer}{module}__lora_B__weight": (8, rank) for module in ("q_proj", "v_proj")},
        ),
        "adapter_config.json": orjson.dumps({"r": rank, "lora_alpha": alpha}),
        **STATE,
    }


def full_files(directory: Path, **changed: tuple[int, ...]) -> dict[str, bytes]:
    shapes = {"model__embed__weight": (40, 8), "model__layers__0__mlp__weight": (8, 8), **changed}
    return {"config.json": b"{}", "model.safetensors": tensors(directory, **shapes), **STATE}


def spec_of(base: object, **changes: Any) -> dict[str, Any]:
    """A job that really trains, as plain data."""
    fields: dict[str, Any] = {"model": {"base": str(base), "chat_template": "plain"}, "rollout": {}}
    fields |= {"train": {"steps": 3, "checkpoint_every": 2}}
    return make_spec(**{**fields, **changes}).model_dump(mode="json")


def model_of(base: object, **lora: Any) -> dict[str, Any]:
    return {"base": str(base), "chat_template": "plain", "lora": {**LORA, **lora}}


@pytest.fixture
def base(tmp_path: Path) -> Path:
    directory = tmp_path / "base"
    directory.mkdir()
    files = full_files(directory)
    (directory / "config.json").write_bytes(b'{"model_type": "qwen3"}')
    (directory / "model.safetensors").write_bytes(files["model.safetensors"])
    (directory / "made.safetensors").unlink()
    return directory


@pytest.fixture
async def first(client: AsyncClient, ctx: Context, base: Path, tmp_path: Path) -> str:
    """A job with a checkpoint of step 10."""
    job = str((await client.submit(spec_of(base)))["id"])
    write_checkpoint(ctx, job, 10, full_files(tmp_path))
    return job


@pytest.fixture
def again(base: Path, first: str) -> dict[str, Any]:
    """The spec of a job that starts from it."""
    return spec_of(base) | {"start": {"from": f"{first}@10"}}


@pytest.fixture
def homes(ctx: Context) -> Path:
    return ctx.settings.data_dir / "jobs"


# --- what is refused ------------------------------------------------------------------------------------------------


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


# --- what is kept ---------------------------------------------------------------------------------------------------


async def test_checkpoint_is_kept_to_the_end(client: AsyncClient, ctx: Context, base: Path, tmp_path: Path) -> None:
    first = (await client.submit(spec_of(base)))["id"]
    for step in (10, 20):
        source = write_checkpoint(ctx, first, step, full_files(tmp_path))
    second = await client.submit(spec_of(base), from_checkpoint=f"{first}@latest", with_optimizer=True)
    record = await client.job(second["id"])
    assert record["spec"]["start"] == {"from": f"{first}@20", "optimizer": True}
    kept = start_of(ctx.settings.data_dir, second["id"])
    assert (kept / "model.safetensors").samefile(source / "model.safetensors"), "it takes no space of its own"
    checkpoint.sweep(source.parent, keep=0, epoch=1)
    assert not source.exists()
    assert checkpoint.read_intact(kept) == read_manifest(kept) and read_manifest(kept).step == 20
    await client.cancel(second["id"])
    await until(lambda: not kept.exists())
    await client.cancel(first)


async def test_repetition_makes_one_job(
    client: AsyncClient, ctx: Context, base: Path, first: str, tmp_path: Path
) -> None:
    """Also if `latest` is another one by then."""
    spec = spec_of(base) | {"start": {"from": f"{first}@latest"}}
    second = (await client.submit(spec, idempotency_key="once"))["id"]
    write_checkpoint(ctx, first, 20, full_files(tmp_path))
    assert (await client.submit(spec, idempotency_key="once"))["id"] == second
    assert [path.parent.name for path in ctx.settings.data_dir.glob("jobs/*/start")] == [second]
    assert (await client.job(second))["spec"]["start"]["from"] == f"{first}@10"


async def test_repetition_outlives_its_source(
    client: AsyncClient, ctx: Context, base: Path, first: str, again: Any
) -> None:
    second = (await client.submit(again, idempotency_key="once"))["id"]
    shutil.rmtree(ctx.settings.data_dir / "jobs" / first / "checkpoints")
    shutil.rmtree(base)
    assert (await client.submit(again, idempotency_key="once"))["id"] == second
    with pytest.raises(ApiError) as other:
        await client.submit(again | {"name": "other"}, idempotency_key="once")
    assert other.value.status == 409
    assert "none yet" in (await refused(client, again, idempotency_key="twice"))["start.from"]


async def test_copy_is_made_where_files_cannot_have_two_names(
    client: AsyncClient, ctx: Context, first: str, again: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "link", no_links)
    second = (await client.submit(again))["id"]
    shutil.rmtree(ctx.settings.data_dir / "jobs" / first)
    checkpoint.read_intact(start_of(ctx.settings.data_dir, second))


def no_links(*_: object) -> None:
    raise OSError(errno.EXDEV, "Invalid cross-device link")


@pytest.fixture
def slow_copies(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Files cannot be linked, and copies take until the event is set."""
    finish = threading.Event()
    copy = kept_checkpoints.copy

    def slow(given_up: threading.Event, source: Path, target: Path) -> None:
        finish.wait(60)
        copy(given_up, source, target)

    monkeypatch.setattr(os, "link", no_links)
    monkeypatch.setattr(kept_checkpoints, "copy", slow)
    yield finish
    finish.set()


async def test_copy_may_take_longer_than_a_check(
    ctx: Context, client: AsyncClient, homes: Path, again: Any, slow_copies: threading.Event
) -> None:
    ctx.disk_s = 2.0
    submission = asyncio.create_task(client.submit(again))
    await until(lambda: any(homes.glob("*/start")))
    await asyncio.sleep(2 * ctx.disk_s)
    slow_copies.set()
    checkpoint.read_intact(homes / (await soon(submission))["id"] / "start")


@pytest.mark.parametrize("ending", ["limit", "cancellation"])
async def test_copy_that_is_given_up_leaves_nothing(
    ctx: Context, first: str, again: Any, homes: Path, slow_copies: threading.Event, ending: str
) -> None:
    if ending == "limit":
        ctx.copy_s = 0.01
    submission = asyncio.create_task(submit(ctx, again, "default"))
    await until(lambda: any(homes.glob("*/start")))
    if ending == "cancellation":
        submission.cancel()
    with pytest.raises(asyncio.CancelledError if ending == "cancellation" else ReferencesAway):
        await soon(submission)
    slow_copies.set()
    await until(lambda: [home.name for home in homes.iterdir()] == [first])


async def test_stuck_copies_hold_up_only_copies_of_their_tenant(
    ctx: Context, first: str, again: Any, homes: Path, slow_copies: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    stuck = [asyncio.create_task(submit(ctx, again, "default")) for _ in range(TENANT_COPIES)]
    await until(lambda: len(list(homes.glob("*/start"))) == TENANT_COPIES)
    await until(lambda: ctx.copies._unfinished["default"] == TENANT_COPIES)
    with pytest.raises(ReferencesAway, match="2 submissions of yours are being copied"):
        await soon(submit(ctx, again, "default"))
    other = ctx.copies.submit("other", threading.get_ident)
    assert await soon(asyncio.wrap_future(other)), "another tenant's copy is made"
    with monkeypatch.context() as patch:
        patch.setattr(os, "link", LINK)
        linked, _ = await soon(submit(ctx, again, "default"))
    checkpoint.read_intact(start_of(ctx.settings.data_dir, linked))
    slow_copies.set()
    made = {id for id, _ in await soon(asyncio.gather(*stuck))}
    await until(lambda: {home.name for home in homes.iterdir()} == {first, linked, *made})


@pytest.fixture
def busy(ctx: Context, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Context, threading.Event]]:
    """Files cannot be linked, and the one thread that copies them is another tenant's until the event is set."""
    monkeypatch.setattr(os, "link", no_links)
    finish, busy = threading.Event(), Context(**{**vars(ctx), "copies": TenantThreads(1, 2, "copies")})
    busy.copies.submit("other", finish.wait)
    yield busy, finish
    finish.set()


async def test_time_of_a_copy_begins_with_it(busy: tuple[Context, threading.Event], again: Any, homes: Path) -> None:
    ctx, finish = busy
    ctx.copy_s = 2.0
    submission = asyncio.create_task(submit(ctx, again, "default"))
    await asyncio.sleep(2 * ctx.copy_s)
    finish.set()
    second, _ = await soon(submission)
    checkpoint.read_intact(homes / second / "start")


async def test_submission_does_not_wait_for_ever_for_a_thread(
    busy: tuple[Context, threading.Event], first: str, again: Any, homes: Path
) -> None:
    busy[0].copy_wait_s = 0.01
    with pytest.raises(ReferencesAway, match="copying other checkpoints"):
        await soon(submit(busy[0], again, "default"))
    await until(lambda: [home.name for home in homes.iterdir()] == [first])


def test_copy_that_nobody_awaits_ends_before_its_next_chunk(tmp_path: Path) -> None:
    source, given_up = tmp_path / "source", threading.Event()
    source.write_bytes(b"weights")
    kept_checkpoints.copy(given_up, source, tmp_path / "whole")
    assert (tmp_path / "whole").read_bytes() == b"weights"
    given_up.set()
    with pytest.raises(kept_checkpoints.GivenUp):
        kept_checkpoints.copy(given_up, source, tmp_path / "partial")
    assert (tmp_path / "partial").stat().st_size == 0


async def test_checkpoint_kept_for_a_refused_submission_is_removed(
    ctx: Context, first: str, again: Any, homes: Path
) -> None:
    """Its key was used for another job while its files were linked."""
    found = await asyncio.gather(
        submit(ctx, again, "default", "once"),
        submit(ctx, again | {"name": "other"}, "default", "once"),
        submit(ctx, again, "default", "once"),
        return_exceptions=True,
    )
    (made,) = {answer[0] for answer in found if isinstance(answer, tuple)}
    assert any(isinstance(answer, Conflict) for answer in found)
    await until(lambda: {home.name for home in homes.iterdir()} == {first, made})


async def test_checkpoint_that_is_written_anew_meanwhile_is_not_mixed_with_the_old_one(
    client: AsyncClient, ctx: Context, first: str, again: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = os.link

    def slow(source: Path, target: Path) -> None:
        link(source, target)
        if target.name == "config.json":
            shutil.rmtree(source.parent)
            write_checkpoint(ctx, first, 10, full_files(tmp_path), epoch=2)

    with monkeypatch.context() as patch:
        patch.setattr(os, "link", slow)
        problems = await refused(client, again)
    assert "it was written again just now; submit it again" in problems["start.from"]
    await client.submit(again)


async def test_what_a_broken_submission_kept_is_swept_when_it_is_old(ctx: Context, tmp_path: Path) -> None:
    places = {job: start_of(ctx.settings.data_dir, job) for job in ("j-active", "j-old", "j-new")}
    for place in places.values():
        place.mkdir(parents=True)
    for job in ("j-active", "j-old"):
        os.utime(places[job], (1e9, 1e9))
    assert kept_checkpoints.kept_long(ctx.settings.data_dir) == {"j-active", "j-old"}
    assert kept_checkpoints.kept_long(tmp_path / "empty") == set()
    await new_job(ctx.store, "j-active")
    await JobCleaner(ctx, UNFENCED).sweep()
    assert [job for job, place in places.items() if place.exists()] == ["j-active", "j-new"]


async def test_a_former_leader_sweeps_no_newer_jobs(ctx: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was stopped when it had read which jobs there are, for longer than a submission takes."""
    place = start_of(ctx.settings.data_dir, "j-meanwhile")
    jobs_now = ctx.store.active_jobs

    async def stopped() -> list[JobRecord]:
        before = await jobs_now()
        place.mkdir(parents=True)
        os.utime(place, (1e9, 1e9))
        await new_job(ctx.store, "j-meanwhile")
        return before

    monkeypatch.setattr(ctx.store, "active_jobs", stopped)
    await JobCleaner(ctx, UNFENCED).sweep()
    assert place.exists()


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
