"""`python -m opentinker.services.rollout_worker`"""

from opentinker.services.rollout_worker.service import serve
from opentinker.shared.runtime.service import main

main("rollout-worker", serve)
