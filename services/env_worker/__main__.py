"""Runs an env worker: `python -m opentinker.services.env_worker`."""

import os
import sys

from opentinker.services.env_worker.service import serve
from opentinker.shared.runtime.service import main

if os.getcwd() not in sys.path:  # for environments given as module:Class; last, so that nothing there hides a package
    sys.path.append(os.getcwd())
main("env-worker", serve)
