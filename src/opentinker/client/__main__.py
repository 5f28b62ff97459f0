"""Runs a script of the published client's folder layout, as `opentinker script` does.

python -P -m opentinker.client SCRIPT [ARGUMENTS...]

Without -P Python would look for this package in the working directory first: in its checkout, the published one.
"""

from __future__ import annotations

import sys

from opentinker.client.script import USAGE, run_script


def main() -> None:
    if len(sys.argv) < 2:
        sys.exit(USAGE)
    run_script(sys.argv[1], sys.argv[2:])


if __name__ == "__main__":
    main()
