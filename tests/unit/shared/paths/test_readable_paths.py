"""Places on a machine that no job may name, however it spells them, and the second check when a file is opened."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import orjson
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from opentinker.services.scheduler.jobs.submit import submit
from opentinker.shared.config import Settings
from opentinker.shared.data.dataset import open_rows
from opentinker.shared.data.jsonl import RowError
from opentinker.shared.data.readable_paths import Readable, readable_by, resolved
from opentinker.shared.runtime.service import Context
from opentinker.shared.state.store import Store
from opentinker.shared.types.errors import SpecError
from tests.unit.shared.paths.named_paths import OTHER, OWN, named, sft

FIELDS = ["model.base", "environment.config.path", "environment.name", "teacher.base", "data.path", "no.such.field"]


async def mistakes_in(ctx: Context, data: Any, tenant: str) -> list[dict[str, Any]]:
    return (await readable_by(ctx.store, ctx.settings, tenant, data)).mistakes_in(data, files=True)


# --- what a spec says -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("field", FIELDS)
async def test_another_tenant_s_directory_looks_like_none(ctx: Context, jobs: list[str], field: str) -> None:
    home = ctx.settings.data_dir / "jobs"
    said = []
    for job in (OTHER, "j-0000000000"):
        place = str(home / job / "checkpoints" / "step-000001")
        (mistake,) = await mistakes_in(ctx, named(field, place), "red")
        assert (mistake["field"], mistake["value"]) == (field, place[:200])
        said.append(mistake["problem"])
    assert len(set(said)) == 1
    assert await mistakes_in(ctx, named(field, str(home / OWN / "checkpoints")), "red") == []


class Machine:
    """A data directory with jobs of two tenants, and links and directories beside it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.home = directory / "data"
        for job in (OWN, OTHER):
            (self.home / "jobs" / job / "checkpoints").mkdir(parents=True)
            (self.home / "jobs" / job / "metrics.jsonl").write_text("{}")
        for name in ("run", "environments", "models"):
            (self.home / name).mkdir()
        (directory / "key").write_text("k")
        (directory / "link").symlink_to(self.home / "jobs")
        (directory / "rings").symlink_to(directory / "rings")
        (directory / "around").symlink_to("data/models/../../link")
        (directory / "\u00fc \u202e").mkdir()
        self.readable = Readable(Settings(data_dir=self.home, admin_key_file=directory / "key"), [OWN])


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    directory, before = tmp_path_factory.mktemp("machine"), Path.cwd()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(directory / "data"))
        os.chdir(directory)
        yield Machine(directory)
        os.chdir(before)


FILLERS = [
    "./",
    "/",
    "models/../",
    "missing/../",
    "../data/",
    "\u00fc/../",
    "x" * 300 + "/../",
    "./" * 2100,
    "/" * 5000,
]
STARTS: list[Callable[[Machine], str]] = [
    lambda machine: f"{machine.home}/",
    lambda machine: "data/",
    lambda machine: "~/",
    lambda machine: f"file://{machine.home}/",
    lambda machine: f"FILE:{machine.home}/",
    lambda machine: f"file://localhost{quote(str(machine.home))}/",
    lambda machine: f"/proc/self/root{machine.home}/",
    lambda machine: "/proc/self/cwd/data/",
    lambda machine: f"//{machine.home}/",
    lambda machine: "../" * 60 + f"{machine.home}/",
    lambda machine: f"{machine.directory}/\u00fc \u202e/../data/",
    lambda machine: f" {machine.home}/",
    lambda machine: f"{machine.home}/models/../",
]
RESERVED = (
    "jobs", f"jobs/{OTHER}", f"jobs/{OTHER}/metrics.jsonl", f"jobs/{OTHER}/no/such", f"jobs/{OWN}/../{OTHER}", "../key",
    "run/operator-key", "environments/x", "valkey", "jobs/j-", f"jobs/{OWN}.", "../link/x", "../around/y",
)  # fmt: skip
PARTS = ["/", "..", ".", "data", "jobs", OWN, OTHER, "link", "around", "rings", "models", "\u00fc", "a" * 300]
PARTS += ["~", "file:", "proc", "self", "root", "cwd", " ", "\0", "\ud800"]
ENDS = ["", "/", "/.", "//", " ", "\0", "\0/x.jsonl", "/x/..", "/./" * 1500]


@given(
    start=st.sampled_from(STARTS), fillers=st.lists(st.sampled_from(FILLERS), max_size=4),
    place=st.sampled_from(RESERVED), end=st.sampled_from(ENDS),
)  # fmt: skip
@settings(max_examples=300, deadline=None)
def test_no_spelling_of_a_reserved_place_is_taken(
    machine: Machine, start: Callable[[Machine], str], fillers: list[str], place: str, end: str
) -> None:
    text = start(machine) + "".join(fillers) + place + end
    assert len(machine.readable.mistakes_in({"model": {"base": text}})) == 1, text[:500]


@given(
    st.lists(st.sampled_from(PARTS) | st.text(max_size=3),
        max_size=14,
    ).map("/".join)
    | st.text()
)  # fmt: skip
@example("/a/" + "./" * 300_000 + "b")
@example("a/" * 300_000)
@example("a/../" * 100_000)
@example("\ud800/x")
@settings(max_examples=500, deadline=None)
def test_whatever_leads_to_a_reserved_place_is_seen_and_nothing_raises(machine: Machine, text: str) -> None:
    found = machine.readable.mistakes_in([text])
    if len(text) > 3000:  # realpath would take forever
        return
    try:
        real = Path(os.path.realpath(os.path.expanduser(text)))
    except ValueError:  # no file can have the name
        return
    if "rings" not in text:  # what realpath says of these depends on slashes behind them
        assert resolved(Path(os.path.expanduser(text))) == real
    other = [machine.home / "jobs" / OTHER, machine.home / "run", machine.directory / "key"]
    assert found or not any(real.is_relative_to(place) for place in other)
    if real.is_relative_to(machine.home / "jobs" / OWN) and not text.startswith(" "):
        assert not found


def test_ordinary_texts_are_no_paths(machine: Machine) -> None:
    home = machine.home
    fine = [
        "models",
        "some/model",
        f"{home}/models/mine",
        "jobs",
        "run",
        "a text\nof two/lines",
        "/",
        "x" * 9000,
        "\0/",
    ]
    fine += ["~nobody-here/x", f"{home}/jobs/{OWN}/start", f"data/jobs/{OWN}", "/dev/shm/model", "y" * 256, "rings/x"]
    assert machine.readable.mistakes_in(fine) == []


def test_another_mount_of_a_reserved_place_is_that_place(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root may mount directories twice; here two names of one directory are told by a stat that says so."""
    twin = machine.directory / "twin"
    twin.mkdir(exist_ok=True)
    real, about = Path.stat, (machine.home / "jobs").stat()
    monkeypatch.setattr(Path, "stat", lambda path, **more: about if path == twin else real(path, **more))
    readable = Readable(Settings(data_dir=machine.home), [OWN])
    assert readable.refusal(twin / OTHER / "checkpoints") and not readable.refusal(twin / OWN / "checkpoints")


def test_a_long_text_takes_no_time(machine: Machine) -> None:
    began = time.process_time()
    machine.readable.mistakes_in(["/a" * 500_000, "../" * 300_000, "./" * 500_000, *["q/r"] * 20_000])
    assert time.process_time() - began < 10


# --- what is there --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "field",
    [
        *("model.base", "policies.a.model.base", "teacher.base", "value_model.base"),
        *("policies.a.teacher.base", "policies.a.value_model.base"),
        *("seats.a.model.base", "validation.against.0.model.base"),
    ],
)
def test_a_model_that_links_to_another_job_s_weights_is_refused_wherever_it_is_named(
    machine: Machine, tmp_path: Path, field: str
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    spec = named(field, str(model))
    assert machine.readable.mistakes_in(spec, files=True) == []
    (model / "model.safetensors").symlink_to(machine.home / "jobs" / OTHER / "metrics.jsonl")
    (mistake,) = machine.readable.mistakes_in(spec, files=True)
    assert mistake["field"] == field and "kept by the server" in mistake["problem"]


def test_what_is_no_file_and_what_leads_out_of_a_directory_is_refused(machine: Machine, tmp_path: Path) -> None:
    def why(path: Path) -> str:
        return machine.readable.why_closed(path)

    model = tmp_path / "model"
    (model / "deeper").mkdir(parents=True)
    (model / "config.json").write_text("{}")
    (tmp_path / "blob").write_text("weights")
    (model / "model.safetensors").symlink_to("../blob")
    assert why(model) == "" and why(model / "config.json") == ""
    os.mkfifo(tmp_path / "fifo.jsonl")
    assert "neither a file nor a directory" in why(tmp_path / "fifo.jsonl")
    stolen = model / "deeper" / "stolen.safetensors"
    stolen.symlink_to(machine.home / "jobs" / OTHER / "metrics.jsonl")
    assert "stolen.safetensors" in why(model) and "kept by the server" in why(model)
    stolen.unlink()
    (model / "tokenizer.model").symlink_to(tmp_path / "fifo.jsonl")
    assert "neither a file nor a directory" in why(model)
    (model / "tokenizer.model").unlink()
    entries = {"tokenizer_file": "/home/somebody/tokenizer.json"}
    (model / "tokenizer_config.json").write_bytes(orjson.dumps(entries))
    assert why(model) == ""
    entries["vocab_file"] = str(machine.home / "jobs" / OTHER / "metrics.jsonl")
    (model / "tokenizer_config.json").write_bytes(orjson.dumps(entries))
    assert "vocab_file is kept by the server" in why(model)
    (model / "tokenizer_config.json").rename(tmp_path / "renamed.json")
    (model / "tokenizer_config.json").symlink_to(tmp_path / "renamed.json")
    assert "vocab_file is kept by the server" in why(model), "loaders go by the link's name"
    (model / "tokenizer_config.json").unlink()
    weights = os.path.relpath(machine.home / "jobs" / OTHER / "checkpoints" / "model.safetensors", resolved(model))
    shards = {"weight_map": {"a": "model.safetensors", "b": weights}}
    (model / "model.safetensors.index.json").write_bytes(orjson.dumps(shards))
    assert "has a model.safetensors.index.json that names" in why(model) and "kept by the server" in why(model)
    shards["weight_map"]["b"] = "model.safetensors"
    (model / "model.safetensors.index.json").write_bytes(orjson.dumps(shards))
    assert why(model) == ""


def test_hub_models_are_checked(machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    place = tmp_path / "hub" / "models--some--model"
    (place / "blobs").mkdir(parents=True)
    (place / "snapshots" / "0123").mkdir(parents=True)
    blob = place / "blobs" / "4567"
    (place / "snapshots" / "0123" / "tokenizer_config.json").symlink_to(blob)
    for stolen, wrong in ((tmp_path / "vocab.txt", 0), (machine.home / "run" / "operator-key", 1)):
        blob.write_bytes(orjson.dumps({"vocab_file": str(stolen)}))
        assert len(machine.readable.mistakes_in(sft("rows.jsonl", "some/model"), files=True)) == wrong


def test_a_format_is_no_data_set_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`datasets` takes `text` for all files below the working directory."""
    (tmp_path / "data" / "run").mkdir(parents=True)
    (tmp_path / "data" / "run" / "operator-key").write_text("canary\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RowError, match="'text' is not a data set of the hub alone"):
        open_rows("text", None, "train")


@pytest.mark.parametrize("place", ["fifo.jsonl", "/dev/zero", "/dev/stdin", "/proc/self/environ", "socket"])
async def test_what_is_no_file_is_refused_at_once(ctx: Context, store: Store, tmp_path: Path, place: str) -> None:
    os.mkfifo(tmp_path / "fifo.jsonl")
    os.mknod(tmp_path / "socket", 0o140600)
    for spec in (sft(str(tmp_path / place)), sft("some/rows", base=str(tmp_path / place))):
        with pytest.raises(SpecError) as refused:
            await submit(ctx, spec, "red")
        assert len(refused.value.mistakes) == 1, refused.value.mistakes


async def test_a_submission_looks_at_the_places_that_it_names_in_threads_for_file_systems_alone(
    ctx: Context, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that hangs must not hold up the threads that all else is done in."""
    named, looked, read_link = str(tmp_path / "hangs"), set(), os.readlink

    def readlink(path: str) -> str:
        if str(path).startswith(named):
            looked.add(threading.current_thread().name.partition("_")[0])
        return read_link(path)

    monkeypatch.setattr(os, "readlink", readlink)
    with pytest.raises(SpecError):
        await submit(ctx, sft(f"{named}/rows.jsonl"), "red")
    assert looked == {"disk"}
