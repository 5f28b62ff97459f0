"""Artifacts in an S3-compatible object store, by obstore. Imported only where the settings name one."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opentinker.services.scheduler.artifacts.store import CHUNK, Opened, StoreUnavailable
from opentinker.shared.config import Settings
from opentinker.shared.security.secrets import read_access
from opentinker.shared.types.errors import NotFound, SpecError

if TYPE_CHECKING:
    from collections.abc import Iterator


class ObjectStore:
    """A bucket, or what lies below a prefix in it."""

    apart = True

    def __init__(self, settings: Settings) -> None:
        """Raises SpecError."""
        try:
            import obstore
            from obstore import exceptions
            from obstore.store import S3Store
        except ImportError:
            problem = "needs a library that is not installed: pip install 'opentinker[s3]'"
            raise SpecError.of("artifacts_url", settings.artifacts_url, problem) from None
        bucket, _, prefix = settings.artifacts_url.removeprefix("s3://").partition("/")
        access, secret = read_access(settings.artifacts_s3_credentials_file)
        endpoint = settings.artifacts_s3_endpoint
        self._api, self._errors = obstore, exceptions
        self.name = settings.artifacts_url
        self._store: Any = S3Store(
            bucket,
            prefix=prefix.strip("/") or None,
            endpoint=endpoint or None,
            region=settings.artifacts_s3_region,
            access_key_id=access,
            secret_access_key=secret,
            virtual_hosted_style_request=False,
            client_options={"allow_http": endpoint.startswith("http://")},
        )

    @contextmanager
    def _asked(self, key: str) -> Iterator[None]:
        """Raises NotFound, StoreUnavailable."""
        try:
            yield
        except FileNotFoundError:  # obstore's NotFoundError is one
            raise NotFound(f"nothing is under {key} in {self.name}") from None
        except (self._errors.BaseError, OSError) as error:
            lines = str(error).strip().splitlines() or [type(error).__name__]
            raise StoreUnavailable(f"{self.name} does not answer as it should: {lines[0][:300]}") from error

    async def put(self, key: str, file: Path) -> None:
        try:
            with self._asked(key):
                await self._api.put_async(self._store, key, file)
        except NotFound:
            raise StoreUnavailable(f"{self.name}: there is no such bucket, or {file} has gone") from None

    async def open(self, key: str) -> Opened:
        with self._asked(key):
            found = await self._api.head_async(self._store, key)
            return _Object(self, key, int(found["size"]))

    async def stat(self, key: str) -> int | None:
        try:
            with self._asked(key):
                return int((await self._api.head_async(self._store, key))["size"])
        except NotFound:
            return None

    async def list(self, prefix: str) -> dict[str, int]:
        found: dict[str, int] = {}
        with self._asked(prefix):
            async for page in self._api.list(self._store, prefix=prefix):
                found |= {str(entry["path"]): int(entry["size"]) for entry in page}
        return found

    async def delete(self, prefix: str) -> None:
        keys = [prefix, *await self.list(prefix)]
        with self._asked(prefix):
            await self._api.delete_async(self._store, keys)

    async def read(self, key: str, first: int, length: int) -> AsyncIterator[bytes]:
        if not length:
            return
        with self._asked(key):
            got = await self._api.get_async(self._store, key, options={"range": (first, first + length)})
            async for chunk in got.stream(min_chunk_size=CHUNK):
                yield bytes(chunk)


class _Object:
    def __init__(self, store: ObjectStore, key: str, size: int) -> None:
        self.size = size
        self.chunks = partial(store.read, key)

    def close(self) -> None:
        """Do nothing: there is nothing to release."""
