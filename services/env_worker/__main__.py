"""`python -m opentinker.services.env_worker`"""

from opentinker.services.env_worker.service import serve
from opentinker.shared.service import main

main("env-worker", serve)
