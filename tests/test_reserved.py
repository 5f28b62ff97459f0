"""Places on the server's machine that no job may name, whatever field it names them in."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from opentinker.services.scheduler.reserved import mistakes_in
from opentinker.services.scheduler.submission import submit
from opentinker.shared.errors import SpecError
from opentinker.shared.service import Context
from opentinker.shared.store import Store
from tests.api import SPEC

FIELDS = ["model.base", "environment.config.path", "environment.name", "teacher.base", "data.path", "no.such.field"]


def named(field: str, text: str) -> dict[str, Any]:
    """A spec with a text in a field."""
    spec = copy.deepcopy(SPEC)
    *parts, last = field.split(".")
    inner: dict[str, Any] = spec
    for part in parts:
        if not isinstance(inner.get(part), dict):
            inner[part] = {}
        inner = inner[part]
    inner[last] = text
    return spec


@pytest.fixture
async def jobs(store: Store, ctx: Context) -> list[str]:
    """One of red's and one of blue's, with directories."""
    for id, tenant in (("j-aaaaaaaaaa", "red"), ("j-bbbbbbbbbb", "blue")):
        await store.create_job(id=id, spec=SPEC, tenant=tenant)
        (ctx.settings.data_dir / "jobs" / id / "checkpoints").mkdir(parents=True)
    return ["j-aaaaaaaaaa", "j-bbbbbbbbbb"]


@pytest.mark.parametrize("field", FIELDS)
async def test_another_tenant_s_directory_looks_like_none(ctx: Context, jobs: list[str], field: str) -> None:
    home = ctx.settings.data_dir / "jobs"
    said = []
    for job in (jobs[1], "j-0000000000"):
        place = str(home / job / "checkpoints" / "step-000001")
        (mistake,) = await mistakes_in(ctx, named(field, place), "red")
        assert (mistake["field"], mistake["value"]) == (field, place)
        said.append(mistake["problem"])
    assert len(set(said)) == 1
    assert await mistakes_in(ctx, named(field, str(home / jobs[0] / "checkpoints")), "red") == []


async def test_every_way_to_write_a_reserved_place_is_seen(
    ctx: Context, jobs: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = ctx.settings.data_dir
    other = home / "jobs" / jobs[1]
    (tmp_path / "link").symlink_to(other)
    (tmp_path / "models").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(home))
    ways = [
        *(str(other), f"file://{other}", f"{home}/jobs/{jobs[0]}/../{jobs[1]}", f"data/jobs/{jobs[1]}", "link"),
        *("./link/x", f"~/jobs/{jobs[1]}", f"{home}//jobs/./{jobs[1]}", f"models/../data/jobs/{jobs[1]}"),
        *(f"{home}/run/operator-key", f"{home}/environments/x", f"{home}/logs/scheduler.log", f"{home}/valkey"),
        *(f"{home}/jobs", str(ctx.settings.admin_key_file)),
    ]  # fmt: skip
    for text in ways:
        assert len(await mistakes_in(ctx, named("model.base", text), "red")) == 1, text
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
    for text in [*fine, f"data/jobs/{jobs[0]}/start", "~nobody-here/x"]:
        assert await mistakes_in(ctx, named("model.base", text), "red") == [], text


async def test_a_job_that_names_one_is_refused_before_anybody_looks(ctx: Context, jobs: list[str]) -> None:
    place = ctx.settings.data_dir / "run"
    place.mkdir()
    (place / "rows.jsonl").write_text('{"secret": "canary"}\n')
    spec = {**SPEC, "kind": "sft", "data": {"path": str(place / "rows.jsonl")}, "train": {"steps": 0}}
    del spec["environment"]
    with pytest.raises(SpecError) as refused:
        await submit(ctx, spec, "red")
    assert {"data.path", "train.steps"} <= {mistake["field"] for mistake in refused.value.mistakes}
    assert "canary" not in str(refused.value)
