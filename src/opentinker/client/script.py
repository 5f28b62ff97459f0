"""Runs a script of the published client's folder layout: `from utils.http_training_client import ...` finds the client
of this package, regardless of the script's folder."""

from __future__ import annotations

import pkgutil
import runpy
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType

from opentinker.client import utils

USAGE = "usage: opentinker script SCRIPT [ARGUMENTS...]"


def run_script(script: str, arguments: Sequence[str]) -> None:
    """As `python SCRIPT ARGUMENTS...` would, in this process. Ends it with a message where there is no such file."""
    if not Path(script).is_file():
        sys.exit(f"{script}: there is no such file. {USAGE}")
    folder = Path(script).resolve().parent
    provide_utils(folder)
    sys.path.insert(0, str(folder))
    sys.argv = [script, *arguments]
    runpy.run_path(script, run_name="__main__")


def provide_utils(folder: Path) -> None:
    """Make `utils` the package `opentinker.client.utils`, module by module the same objects. Other modules of that name
    come from the script's folder `utils`."""
    package = ModuleType("utils", utils.__doc__)
    package.__path__ = [*utils.__path__, str(folder / "utils")]
    sys.modules["utils"] = package
    for module in pkgutil.iter_modules(utils.__path__):
        loaded = import_module(f"{utils.__name__}.{module.name}")
        sys.modules[f"utils.{module.name}"] = loaded
        setattr(package, module.name, loaded)
