"""Handlers of downloads: signed URLs of a checkpoint's files, which need no key for an hour, and the files themselves.
A URL ends with the key, or the session of the page, by which it was asked for.

urls      consumes the path of a checkpoint; produces a signed URL for each of its files
archive   the same for a tar of all of them, for clients up to 0.34
file      consumes a signed URL; produces the bytes
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import os
import tarfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from urllib.parse import quote

from aiohttp import web

from opentinker.services.scheduler.http.auth import TOUCHED, UNAUTHENTICATED, principal_of
from opentinker.services.scheduler.http.errors import json_response
from opentinker.services.scheduler.http.route_decorator import Parameter, Route
from opentinker.services.scheduler.login.identity import Sessions
from opentinker.services.scheduler.tinker.access import Access
from opentinker.services.scheduler.tinker.runs_api import CHECKPOINT
from opentinker.services.scheduler.tinker.sessions_api import when
from opentinker.shared.security.authorization import Action
from opentinker.shared.state.keys import KeyStore
from opentinker.shared.types.errors import NotFound
from opentinker.shared.types.tinker import TinkerCheckpoint

VALID_S = 3600
CHUNK = 1 << 20
TAR = "archive.tar"
"""Stands for all files of a checkpoint."""
SESSION = "session."
"""Before the id of a session in a URL."""
FILES = "/api/v1/files/{model}/{kind}/{name}/{file}"
EXPIRES = Parameter("expires", "Unix time until which the URL is valid.")
BY = Parameter("by", "Id of the key, or of the session, by which the URL was asked for.")
SIGNATURE = Parameter("signature", "Proof that the server made the URL.")


class DownloadsApi:
    def __init__(self, access: Access) -> None:
        self._access = access
        self._keys, self._sessions = KeyStore(access.ctx.store.redis), Sessions(access.ctx)

    @Route("GET", f"{CHECKPOINT}/external_weights_urls", Action.CHECKPOINTS_READ)
    async def urls(self, request: web.Request) -> web.Response:
        """Get signed URLs of a checkpoint's files (Tinker)."""
        found = await self._found(request)
        files = await asyncio.to_thread(_files, self._access.directory(found), found.lora.is_full)
        expires = int(time.time()) + VALID_S
        urls = {file.name: await self._url(request, found, file.name, expires) for file in files}
        return json_response({"urls": urls, "expires": when(expires)})

    @Route("GET", f"{CHECKPOINT}/archive", Action.CHECKPOINTS_READ, status=302)
    async def archive(self, request: web.Request) -> web.Response:
        """Redirect to a signed URL of a tar of a checkpoint's files (Tinker, older clients)."""
        found = await self._found(request)
        expires = int(time.time()) + VALID_S
        url = await self._url(request, found, TAR, expires)
        stamp = time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime(expires))
        return web.Response(status=302, headers={"Location": url, "Expires": stamp})

    async def _found(self, request: web.Request) -> TinkerCheckpoint:
        """Return the checkpoint, one's own or a public one. Raises NotFound."""
        names = request.match_info
        found = await self._access.checkpoint(request, f"tinker://{names['model']}/{names['kind']}/{names['name']}")
        request[TOUCHED] = found.model
        return found

    async def _url(self, request: web.Request, found: TinkerCheckpoint, file: str, expires: int) -> str:
        path = FILES.format(model=found.model, kind=found.kind, name=found.name, file=file)
        who = principal_of(request)
        by = f"{SESSION}{who.session}" if who.session else who.key
        signature = await self._signature(path, expires, by)
        public = self._access.ctx.settings.public_url.rstrip("/") or f"{request.scheme}://{request.host}"
        return f"{public}{quote(path, safe='/:')}?expires={expires}&by={by}&signature={signature}"

    async def _signature(self, path: str, expires: int, by: str) -> str:
        secret = await self._access.store.secret()
        return hmac.new(secret.encode(), f"{path}\n{expires}\n{by}".encode(), hashlib.sha256).hexdigest()

    async def _tenant(self, by: str) -> str | None:
        """Return the tenant of the key or session by which a URL was asked for; None if it may download no more."""
        now = time.time()
        if by.startswith(SESSION):
            id = by.removeprefix(SESSION)
            identity = (await self._sessions.several([id])).get(id)
            who = identity.principal if identity is not None and identity.state(now) == "live" else None
        elif by:
            key = await self._keys.find(by)
            who = key.principal if key is not None and key.state(now) == "live" else None
        else:
            who = None if self._access.ctx.settings.auth else UNAUTHENTICATED
        return who.tenant if who is not None and Action.CHECKPOINTS_READ in who.may else None

    @Route(
        "GET", FILES, Action.FREE, parameters=(EXPIRES, BY, SIGNATURE), content="application/octet-stream",
        audited=True,
    )  # fmt: skip
    async def file(self, request: web.Request) -> web.StreamResponse:
        """Download a file of a checkpoint by a signed URL (Tinker)."""
        names, expires = request.match_info, request.query.get("expires", "")
        wanted = FILES.format(**names)
        if not (expires.isdecimal() and len(expires) < 12 and int(expires) > time.time()):
            raise NotFound("the URL has expired; ask for new ones")
        by = request.query.get("by", "")
        signature = await self._signature(wanted, int(expires), by)
        shown = request.query.get("signature", "")
        if not hmac.compare_digest(signature.encode(), shown.encode("utf-8", "surrogateescape")):
            raise NotFound("the URL was not made by this server")
        if (tenant := await self._tenant(by)) is None:
            raise NotFound("the key that requested the URL is no longer valid; request the URLs again with another key")
        for one in await self._access.store.checkpoints(names["model"]):
            is_wanted = (one.kind, one.name) == (names["kind"], names["name"])
            if is_wanted and not 0 < one.expires <= time.time() and (one.public or one.tenant == tenant):
                files = await asyncio.to_thread(_files, self._access.directory(one), one.lora.is_full)
                return await _send(request, files, names["file"])
        raise NotFound("the checkpoint was deleted")


async def _send(request: web.Request, files: list[Path], file: str) -> web.StreamResponse:
    chosen = files if file == TAR else [one for one in files if one.name == file]
    if not chosen:
        raise NotFound(f"the checkpoint has no file {file[:100]}")
    name = TAR if file == TAR else chosen[0].name
    answer = web.StreamResponse(headers={"Content-Disposition": f'attachment; filename="{name}"'})
    answer.content_type = "application/x-tar" if file == TAR else "application/octet-stream"
    sizes = [one.stat().st_size for one in chosen]
    answer.content_length = _tar_bytes(sizes) if file == TAR else sizes[0]
    await answer.prepare(request)
    if request.method != "HEAD":
        async for chunk in _aside(_tar(chosen) if file == TAR else _bytes(chosen[0])):
            await answer.write(chunk)
    return answer


def _files(directory: Path, is_full: bool) -> list[Path]:
    """Return the files of a checkpoint that are an adapter's, or with `is_full` a model's, without the optimizer's
    state. Raises NotFound."""
    try:
        found = sorted(entry.path for entry in os.scandir(directory) if entry.is_file(follow_symlinks=False))
    except OSError:
        found = []
    files = [file for file in map(Path, found) if is_full or file.name.startswith("adapter_")]
    if not files:
        raise NotFound("the checkpoint's files are gone")
    return files


def _bytes(file: Path) -> Iterator[bytes]:
    with file.open("rb") as opened:
        while chunk := opened.read(CHUNK):
            yield chunk


def _tar(files: list[Path]) -> Iterator[bytes]:
    for file in files:
        entry = tarfile.TarInfo(file.name)
        entry.size, entry.mtime = file.stat().st_size, int(file.stat().st_mtime)
        yield entry.tobuf(tarfile.USTAR_FORMAT)
        yield from _bytes(file)
        yield b"\0" * (-entry.size % tarfile.BLOCKSIZE)
    yield b"\0" * (2 * tarfile.BLOCKSIZE)


def _tar_bytes(sizes: list[int]) -> int:
    block = tarfile.BLOCKSIZE
    return sum(block + size + -size % block for size in sizes) + 2 * block


async def _aside(chunks: Iterator[bytes]) -> AsyncIterator[bytes]:
    """Give the pieces, each of which is read in a thread."""
    while (chunk := await asyncio.to_thread(next, chunks, None)) is not None:
        yield chunk
