"""`python -m opentinker.services.env_worker`"""

import os
import sys

from opentinker.services.env_worker.service import serve
from opentinker.shared.service import main

if os.getcwd() not in sys.path:
    sys.path.append(
        os.getcwd()
    )  # for environments given as module:Class; last, so that no folder there hides a package
main("env-worker", serve)
