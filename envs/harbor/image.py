"""A task's image: its root file system with the layer that its Dockerfile adds, and the state its shell begins with.

data_dir/harbor/layers/KEY/NUMBER/       what the instructions wrote, for each file system of the root
data_dir/harbor/layers/KEY/image.json    the TaskImage; of one that Docker holds, this file is all
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec

from opentinker.envs.harbor.dockerfile import PATH, Dockerfile
from opentinker.envs.harbor.roots import Places
from opentinker.shared.types import codec

LAYERS = "layers"
FILE = "image.json"
FIRST = {"PATH": PATH, "HOME": "/root", "USER": "root", "LANG": "C.UTF-8"}
"""Variables that every image begins with."""
VERSION = "1"
"""Changes when the same Dockerfile would give another layer."""


class Shell(msgspec.Struct, frozen=True):
    """The state that one command leaves to the next."""

    cwd: str = "/"
    variables: dict[str, str] = msgspec.field(default_factory=lambda: dict(FIRST))


class TaskImage(msgspec.Struct, frozen=True, kw_only=True):
    key: str
    places: Places
    """Empty for an image of Docker."""
    shell: Shell
    docker: str = ""
    """Name of the image in Docker, if it is one."""

    @classmethod
    def load(cls, home: Path, key: str) -> TaskImage:
        """Blocking. Raises OSError if it has not been built."""
        return codec.from_json(cls, (home / LAYERS / key / FILE).read_bytes())


def key_of(dockerfile: Dockerfile, root: Places, context_digest: str, variables: dict[str, str]) -> str:
    """Return what decides an image's content: tasks of the same key share one layer."""
    told = msgspec.json.encode([VERSION, dockerfile, root, context_digest, sorted(variables.items())])
    return hashlib.sha256(told).hexdigest()[:20]
