"""Downloads: in ranges, and gone on with where they broke off."""

from __future__ import annotations

import asyncio
import os
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from opentinker import ApiError, AsyncClient
from opentinker.shared.runtime.service import Context
from opentinker.shared.state.store import Store
from tests.support.api import OPERATOR, SPEC, Http, write_checkpoint
from tests.support.http_server import http_server
from tests.support.scheduling import scheduler

WEIGHTS = os.urandom(2_500_000)
FILES = {"config.json": b"{}", "model.safetensors": WEIGHTS, "trainer/optimizer.safetensors": b"moments"}


async def ranged(http: Http, path: str, **headers: str) -> tuple[int, bytes, Any]:
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    async with http.session.get(http.url + path, headers=names) as response:
        return response.status, await response.read(), response.headers


async def test_ranges(http: Http, ctx: Context) -> None:
    job = await http.job()
    write_checkpoint(ctx, job, 10, FILES)
    for path in (
        f"/v1/jobs/{job}/checkpoints/10/download",
        f"/v1/jobs/{job}/artifacts/download?path=checkpoints/step-000010/model.safetensors",
    ):
        status, whole, headers = await ranged(http, path)
        etag, size = headers["ETag"], len(whole)
        assert status == 200 and headers["Accept-Ranges"] == "bytes" and int(headers["Content-Length"]) == size
        for text, first, last in (
            ("bytes=0-0", 0, 0),
            ("bytes=1000001-2000000", 1000001, 2000000),
            (f"bytes={size - 5}-", size - 5, size - 1),
            ("bytes=-7", size - 7, size - 1),
            (f"bytes=5-{size + 9}", 5, size - 1),
        ):
            status, part, headers = await ranged(http, path, Range=text, If_Range=etag)
            assert (status, part) == (206, whole[first : last + 1])
            assert headers["Content-Range"] == f"bytes {first}-{last}/{size}" and headers["ETag"] == etag
        for given in (
            {"Range": "bytes=5-", "If_Range": '"another"'},
            {"Range": "bytes=5-2"},
            {"Range": "lines=5-"},
            {"Range": "bytes=0-1,4-5"},
            {"Range": "bytes=-"},
        ):
            assert (await ranged(http, path, **given))[:2] == (200, whole)
        for text in (f"bytes={size}-", "bytes=-0"):
            status, _, headers = await ranged(http, path, Range=text)
            assert (status, headers["Content-Range"]) == (416, f"bytes */{size}")


async def test_paths_lead_to_artifacts_alone(http: Http, ctx: Context, tmp_path: Path) -> None:
    job = await http.job()
    write_checkpoint(ctx, job, 10, FILES)
    home = ctx.settings.data_dir / "jobs" / job
    (home / "metrics.jsonl").symlink_to("/etc/passwd")
    (home / "secret").write_text("secret")
    for path in (
        "../x",
        "secret",
        "metrics.jsonl",
        "checkpoints/step-000010/../../secret",
        "/etc/passwd",
        "checkpoints",
    ):
        assert (await http("GET", f"/v1/jobs/{job}/artifacts/download", params={"path": path}))[0] == 404, path
    for path in ("", "a" * 500, "a\0b"):
        assert (await http("GET", f"/v1/jobs/{job}/artifacts/download", params={"path": path}))[0] == 422


def names_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


class Breaking:
    """Between a client and the server: what it sends of a download breaks off after so many bytes, every time."""

    def __init__(self, behind: str, after: int) -> None:
        self.behind, self.after, self.ranges = behind, after, list[str]()
        self.refuses = 0
        """With this status, what goes on with a download."""

    async def answer(self, request: web.Request) -> web.StreamResponse:
        headers = {n: request.headers[n] for n in ("Range", "If-Range", "Authorization") if n in request.headers}
        async with (
            aiohttp.ClientSession() as session,
            session.request(request.method, self.behind + request.path_qs, headers=headers) as answer,
        ):
            body = await answer.read()
            if "download" not in request.path:
                return web.Response(body=body, status=answer.status, content_type=answer.content_type)
            self.ranges.append(request.headers.get("Range", ""))
            if self.refuses and self.ranges[-1]:
                return web.json_response({"title": "no", "detail": "Not now."}, status=self.refuses)
            kept = ("ETag", "Content-Range", "X-Checkpoint-Step", "Repr-Digest")
            response = web.StreamResponse(
                status=answer.status, headers={n: answer.headers[n] for n in kept if n in answer.headers}
            )
            response.content_length = len(body)
            await response.prepare(request)
            await response.write(body[: self.after])
            if len(body) > self.after:
                assert request.transport is not None
                await asyncio.sleep(0)  # what was written goes out first
                request.transport.close()
            return response


@pytest.fixture
async def breaking(ctx: Context) -> AsyncIterator[tuple[Breaking, AsyncClient]]:
    async with scheduler(ctx) as behind:
        proxy = Breaking(behind, 1_000_000)
        async with (
            http_server(web.route("*", "/{any:.*}", proxy.answer)) as url,
            AsyncClient(url, api_key=OPERATOR, wait_s=30.0) as client,
        ):
            yield proxy, client


async def test_download_goes_on_where_it_broke_off(
    breaking: tuple[Breaking, AsyncClient], ctx: Context, store: Store, tmp_path: Path
) -> None:
    proxy, client = breaking
    job = "j-broken0000"
    await store.create_job(id=job, spec=SPEC, tenant="default")
    write_checkpoint(ctx, job, 10, FILES)
    target = await client.download(job, tmp_path / "model")
    assert (target / "model.safetensors").read_bytes() == WEIGHTS
    begins = [int(text.removeprefix("bytes=").removesuffix("-")) for text in proxy.ranges[1:]]
    assert proxy.ranges[0] == "" and begins == sorted(begins) and begins[-1] > 1_000_000, "what has come is kept"
    path = "checkpoints/step-000010/model.safetensors"
    (file,) = await client.download_artifacts(job, tmp_path, [path])
    assert file.read_bytes() == WEIGHTS and names_in(tmp_path) == ["checkpoints", "data", "model"]


async def test_what_has_come_stays_where_going_on_is_refused(
    breaking: tuple[Breaking, AsyncClient], ctx: Context, store: Store, tmp_path: Path
) -> None:
    proxy, client = breaking
    job = "j-refused000"
    await store.create_job(id=job, spec=SPEC, tenant="default")
    write_checkpoint(ctx, job, 10, FILES)
    part = tmp_path / ".model.part"
    for status in (401, 403, 429, 500):
        proxy.refuses = status
        with pytest.raises(ApiError, match="bytes were kept") as caught:
            await client.download(job, tmp_path / "model")
        assert caught.value.status == status and part.stat().st_size > 0
    proxy.refuses, proxy.ranges = 0, []
    target = await client.download(job, tmp_path / "model")
    assert (target / "model.safetensors").read_bytes() == WEIGHTS and proxy.ranges[0] != ""
    proxy.refuses = 404
    with pytest.raises(ApiError):
        await client.download(job, tmp_path / "again")
    assert names_in(tmp_path) == ["data", "model"]


async def test_part_of_another_checkpoint_is_discarded(client: AsyncClient, ctx: Context, tmp_path: Path) -> None:
    job = (await client.submit(SPEC))["id"]
    write_checkpoint(ctx, job, 10, FILES)
    for etag, part in (('"another"', b"some bytes"), ("", b"x"), ('"another"', os.urandom(3_000_000))):
        (tmp_path / ".model.part").write_bytes(part)
        (tmp_path / ".model.part.etag").write_text(etag)
        target = await client.download(job, tmp_path / "model")
        assert (target / "model.safetensors").read_bytes() == WEIGHTS and ".model.part" not in names_in(tmp_path)
        target.rename(tmp_path / uuid.uuid4().hex)


async def test_file_that_came_damaged_is_refused(client: AsyncClient, ctx: Context, tmp_path: Path) -> None:
    job = (await client.submit(SPEC))["id"]
    directory = write_checkpoint(ctx, job, 10, FILES)
    (directory / "model.safetensors").write_bytes(WEIGHTS[:-1] + bytes([WEIGHTS[-1] ^ 1]))
    with pytest.raises(ApiError, match="SHA-256"):
        await client.download_artifacts(job, tmp_path / "rest", ["checkpoints/step-000010/model.safetensors"])
    assert not any(path.is_file() for path in (tmp_path / "rest").rglob("*"))
