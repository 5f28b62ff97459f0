"""A checkout of the published package, as far as its scripts need one: the folder `opentinker` with the scripts of
tests/published_scripts, their configs, and packages that cannot be imported here."""

from __future__ import annotations

import shutil
from pathlib import Path

from tests.support.cluster import ROOT

SCRIPTS = ROOT / "tests" / "samples" / "published_scripts"
CLIENT = Path("opentinker", "client")
PHONES = Path("opentinker", "environment", "android_world")
THEIRS = "from verl import DataProto\n"
"""What the modules of the published client begin with."""


def lay_out(root: Path) -> Path:
    """Gives the root, from which the scripts are run."""
    shutil.copytree(SCRIPTS, root / CLIENT, ignore=shutil.ignore_patterns("__*", "android_world"))
    shutil.copytree(SCRIPTS / "android_world", root / PHONES, ignore=shutil.ignore_patterns("__pycache__"))
    utils = root / CLIENT / "utils"
    utils.mkdir()
    for name in ("http_training_client", "utils", "scheduler_client_lifecycle"):
        (utils / f"{name}.py").write_text(THEIRS)
    (utils / "own_helper.py").write_text("HELPS = 'helped'\n")
    for folder in (root / "opentinker", root / CLIENT, utils):
        (folder / "__init__.py").touch()
    (root / PHONES.parent / "__init__.py").write_text(THEIRS)
    return root
