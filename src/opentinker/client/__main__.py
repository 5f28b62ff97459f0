"""Runs a script as if it lay in the published client's folder: `import utils` finds `opentinker.client.utils`.

python -m opentinker.client SCRIPT [ARGUMENTS...]
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path


def main() -> None:
    if len(sys.argv) < 2:
        sys.exit("usage: python -m opentinker.client SCRIPT [ARGUMENTS...]")
    script = Path(sys.argv[1])
    if not script.is_file():
        sys.exit(f"{script} does not exist")
    sys.argv = sys.argv[1:]
    sys.path[:0] = [str(script.resolve().parent), str(Path(__file__).parent)]
    runpy.run_path(str(script), run_name="__main__")


if __name__ == "__main__":
    main()
