"""Artifacts of jobs from Python: lists, and resumable downloads.

A partial download is in a file next to its target (`.NAME.part`) until it is complete, so a call that failed, or was
killed, can be repeated. Bytes are compared with the server's SHA-256.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import re
import tempfile
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Literal

import aiohttp

from opentinker.sdk.archive import unpack
from opentinker.sdk.http import ApiError, Http, resource
from opentinker.sdk.inputs import empty_place
from opentinker.shared.api_types import (
    Artifact,
    Artifacts,
    Checkpoint,
    CheckpointRegistry,
    Checkpoints,
    DeletedArtifacts,
    Evaluation,
    Evaluations,
    Publication,
    Publications,
    RegisteredCheckpoint,
)
from opentinker.shared.types.core import split_part
from opentinker.shared.types.manifest import ADAPTER, instead

CHUNK = 1 << 20
_JOB = re.compile(r"j-[a-z0-9]{10}")


class ArtifactCalls:
    """Calls of AsyncClient for artifacts. Of a job with several policies, `JOB~POLICY` is the id of one of them."""

    _http: Http

    async def publish(self, checkpoint: str, name: str) -> Publication:
        """Give JOB@STEP or JOB@latest a name for [start], inference jobs and downloads. Raises ApiConflict if another
        checkpoint of the tenant has it. `latest` is asked once: it may be another step the second time."""
        named = {"name": name, "checkpoint": checkpoint}
        again = not checkpoint.endswith("@latest")
        return await self._http.json(Publication, "POST", "/v1/published", noun=named, again=again)

    async def unpublish(self, name: str) -> Publication:
        """Take the name from a checkpoint; its job's retention rules apply to it again."""
        return await self._http.json(Publication, "DELETE", resource("published", name), again=False)

    async def published(self) -> list[Publication]:
        """`name`, `checkpoint`, `bytes`, `created`, `key`; by name."""
        return (await self._http.json(Publications, "GET", "/v1/published"))["published"]

    async def delete_artifacts(self, id: str, step: int | None = None) -> DeletedArtifacts:
        """One checkpoint, or all that a job left which is over. Raises ApiConflict for what is published or in use."""
        path = "/artifacts" if step is None else f"/checkpoints/{step}"
        return await self._http.json(DeletedArtifacts, "DELETE", path_of(id, path), query_of(id), again=False)

    async def _named(self, id: str, step: int | None) -> tuple[str, int | None]:
        """A published name in the place of a job's id."""
        if _JOB.fullmatch(split_part(id)[0]) or step is not None:
            return id, step
        found = await self._http.json(Publication, "GET", resource("published", id))
        return found["job"], found["step"]

    async def evaluations(self, id: str) -> list[Evaluation]:
        """The eval jobs that played checkpoints of a job, by policy and step, each with its `values`."""
        return (await self._http.json(Evaluations, "GET", path_of(id, "/evaluations")))["evaluations"]

    async def checkpoints(self, id: str) -> list[Checkpoint]:
        """The checkpoints of a job, oldest first."""
        return (await self._http.json(Checkpoints, "GET", path_of(id, "/checkpoints"), query_of(id)))["checkpoints"]

    async def all_checkpoints(
        self,
        limit: int = 100,
        *,
        job: str | None = None,
        model: str | None = None,
        project: str | None = None,
        tags: Collection[str] | None = None,
        published: bool | None = None,
        weights: Literal["whole", "lora", "none"] | None = None,
        sort: str | None = None,
        setting: str | None = None,
        search: str | None = None,
    ) -> list[RegisteredCheckpoint]:
        """The first `limit` checkpoints of all jobs of the tenant, newest first or by `sort` (`bytes`, `-step`, or a
        metric of evaluations such as `exact`, the largest first), each with its lineage, its published names and its
        evaluations: those of a job, of this base model, in `project`, with all `tags`, published or not, and with these
        `weights`, evaluated in this `setting`, with all words of `search` in what names them, in any case. A metric
        sorts by its values in one setting, which `ranked` names: `setting`, else that of most checkpoints. The newest
        1,000 and all published ones are listed."""
        names = {None: None, True: "yes", False: "no"}
        texts = {
            "job": job,
            "model": model,
            "project": project,
            "weights": weights,
            "sort": sort,
            "setting": setting,
            "search": search,
        }
        texts |= {"tag": ",".join(tags or ()), "published": names[published]}
        query = {key: text for key, text in texts.items() if text}
        return await self._http.newest("/v1/checkpoints", "checkpoints", limit, query)

    async def has_all_checkpoints(self) -> bool:
        """Whether `all_checkpoints` looks at all of them: not where there are 1,000 or more."""
        found = await self._http.json(CheckpointRegistry, "GET", "/v1/checkpoints", {"limit": "1"})
        return found.get("complete", True)  # an older server does not say it

    async def artifacts(self, id: str) -> list[Artifact]:
        """Return every file that a job has left so far: `path`, `kind`, `bytes`, `created`, and `sha256` where it is
        known."""
        return (await self._http.json(Artifacts, "GET", path_of(id, "/artifacts"), query_of(id)))["artifacts"]

    async def download_artifacts(
        self, id: str, directory: str | Path, paths: Sequence[str] | None = None
    ) -> list[Path]:
        """Files of a job, under their paths in the list (default: all but checkpoints), into a directory. What is there
        and right already is not fetched again. Raises ApiError."""
        listed = {entry["path"]: entry for entry in await self.artifacts(id)}
        if paths is None:
            paths = [path for path in listed if not path.startswith("checkpoints/")]
        if unknown := [path for path in paths if path not in listed]:
            raise ApiError(f"job {id} has no {unknown[0]!r}; `opentinker artifacts {id}` lists what there is")
        targets = [await asyncio.to_thread(_place, directory, path) for path in paths]
        return [
            await self._download_file(id, path, target, listed[path]["sha256"])
            for path, target in zip(paths, targets, strict=True)
        ]

    async def _download_file(self, id: str, path: str, target: Path, sha256: str) -> Path:
        if bool(sha256) and await asyncio.to_thread(_has, target, sha256):
            return target
        part = _Part(target)
        headers = await _fetch(self._http, path_of(id, "/artifacts/download"), query_of(id, path=path), part)
        said = base64.b64encode(bytes.fromhex(await asyncio.to_thread(part.sha256))).decode()
        if headers.get("Repr-Digest") != f"sha-256=:{said}:":
            part.drop()
            raise ApiError(f"{path} of job {id} came damaged from {self._http.url}: its SHA-256 is another")
        part.path.replace(target)
        part.drop()
        return target

    async def download(
        self,
        id: str,
        directory: str | Path,
        step: int | None = None,
        *,
        everything: bool = False,
        merge: bool = False,
        base: str | None = None,
    ) -> Path:
        """A checkpoint (default: the newest) as a directory that must not exist or be empty; checksums are compared.
        `id`: a job's, or the name that a checkpoint is published under.

        `everything` also fetches optimizer and random state. `merge` puts an adapter into the model it was trained on,
        which must be within reach of this machine (`base`: elsewhere than where the job had it), and gives a plain
        Hugging Face directory; it needs torch, transformers and peft here. Raises ApiError, which for a damaged
        checkpoint names the others.
        """
        target = await asyncio.to_thread(empty_place, directory)
        if merge:
            return await self._download_merged(id, target, step, base)
        if base is not None:
            raise ApiError("a base is needed only where an adapter is merged into it")
        id, step = await self._named(id, step)
        path = path_of(id, f"/checkpoints/{'latest' if step is None else step}/download")
        part = _Part(target)
        headers = await _fetch(self._http, path, query_of(id, **({"all": "1"} if everything else {})), part)
        try:
            await asyncio.to_thread(_unpack, part.path, target)
        except ValueError as error:
            sent = headers["X-Checkpoint-Step"]
            others = [c["step"] for c in reversed(await self.checkpoints(id)) if str(c["step"]) != sent]
            raise ApiError(
                f"the checkpoint of step {sent} from {self._http.url} is damaged: {error}; {instead(id, others)}"
            ) from None
        finally:
            part.drop()
        return target

    async def _download_merged(self, id: str, target: Path, step: int | None, base: str | None) -> Path:
        try:
            from opentinker.sdk.merge_adapter import merge
        except ImportError as error:
            raise ApiError(
                f"merging needs torch, transformers and peft here, and {error.name} is not installed: "
                "pip install 'opentinker[trainer]'"
            ) from None
        id, step = await self._named(id, step)
        held = [c for c in await self.checkpoints(id) if step in (None, c["step"])]
        if held and ADAPTER not in held[-1]["files"]:
            raise ApiError(f"the checkpoint of step {held[-1]['step']} is no adapter: download it without merging")
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as work:
            adapter = await self.download(id, Path(work) / "adapter", held[-1]["step"] if held else step)
            try:
                await asyncio.to_thread(merge, adapter, Path(work) / "merged", base)
            except ValueError as error:
                raise ApiError(str(error)) from None
            (Path(work) / "merged").replace(target)
        return target


class _Part:
    """A partial download next to its target, and the ETag of its content."""

    def __init__(self, target: Path) -> None:
        self.path = target.with_name(f".{target.name}.part")
        self._tag = self.path.with_name(f"{self.path.name}.etag")

    @property
    def etag(self) -> str:
        """Empty: nothing has come."""
        return self._tag.read_text() if self._tag.exists() and self.size else ""

    @property
    def size(self) -> int:
        return self.path.stat().st_size if self.path.exists() else 0

    def begin(self, etag: str) -> None:
        self.drop()
        self._tag.write_text(etag)

    def drop(self) -> None:
        self.path.unlink(missing_ok=True)
        self._tag.unlink(missing_ok=True)

    def sha256(self) -> str:
        return _digest(self.path)


async def _fetch(http: Http, path: str, query: dict[str, str], part: _Part) -> Mapping[str, str]:
    """The whole answer in `part`, beginning with what is there of the same; its headers. Connections may break as often
    as something came over them. Raises ApiError."""

    waiting = http.waiting()

    async def once() -> Mapping[str, str] | None:
        """None: it broke off, having come forward."""
        etag, came = part.etag, False
        headers = {"Range": f"bytes={part.size}-", "If-Range": etag} if etag else {}
        try:
            async with http.open(path, query, http.timeout_s, headers=headers, waiting=waiting) as response:
                if response.status != 206:
                    part.begin(response.headers.get("ETag", ""))
                with part.path.open("ab") as file:
                    async for chunk in response.content.iter_chunked(CHUNK):
                        await asyncio.to_thread(file.write, chunk)
                        came = True
                        waiting.answered()
                return response.headers
        except (aiohttp.ClientError, TimeoutError):
            if came:
                return None
            raise
        except ApiError as error:
            if error.status != 416 or not etag:
                raise
            part.drop()  # it was all there, and not used: from its beginning, then
            return None

    try:
        while (headers := await http.patiently(once, waiting)) is None:
            pass
    except ApiError as error:
        if error.status != 404 and part.size:
            here = f"{part.size} bytes were kept: run the same again to continue"
            raise type(error)(f"{error}; {here}", error.status, error.problem) from None
        part.drop()
        raise
    return headers


def _unpack(part: Path, target: Path) -> None:
    with part.open("rb") as file:
        unpack(file, target)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _has(target: Path, sha256: str) -> bool:
    return target.is_file() and _digest(target) == sha256


def _place(directory: str | Path, path: str) -> Path:
    """Raises ApiError: a server must not write elsewhere than it was told."""
    found = PurePosixPath(path)
    if found.is_absolute() or ".." in found.parts or not found.parts or "\\" in path:
        raise ApiError(f"the server names a file {path!r}, which would not be inside the directory")
    target = Path(directory).expanduser().absolute() / found
    target.parent.mkdir(parents=True, exist_ok=True)
    return target


def path_of(id: str, rest: str = "") -> str:
    """Return the path of a job's resource; JOB~POLICY has that of its job."""
    return resource("jobs", split_part(id)[0], rest)


def query_of(id: str, **query: str) -> dict[str, str]:
    """Return a query that names the policy of JOB~POLICY."""
    policy = split_part(id)[1]
    return {**query, "policy": policy} if policy else query
