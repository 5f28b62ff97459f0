"""Tells what an interpreter has of the verifiers library and of one environment, without importing either.

    python verifiers_probe.py NAME [DIRECTORY...]     (called by verifiers.py; imports nothing of ours)

Prints a JSON object: `verifiers`, whether it is installed; `found`, whether there is such a module; `version` of the
package of that name, null if it is no installed package.
"""

import importlib.metadata
import importlib.util
import json
import sys
from pathlib import Path


def main() -> None:
    name, *paths = sys.argv[1:]
    sys.path[:1] = paths  # in place of this directory, which has a verifiers.py
    module = name.replace("-", "_")
    library = importlib.util.find_spec("verifiers")
    own = [Path(place) / "v1" / "tasksets" for place in (library and library.submodule_search_locations) or []]
    found = any((place / module.lower()).is_dir() or (place / f"{module.lower()}.py").is_file() for place in own)
    try:
        outer = module.partition(".")[0]  # what is in a package is found by importing it
        found = found or any(importlib.util.find_spec(each) is not None for each in {outer, outer.lower()})
    except (ImportError, ValueError):
        found = False
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        version = None
    json.dump({"verifiers": library is not None, "found": found, "version": version}, sys.stdout)


if __name__ == "__main__":
    main()
