"""`python -m opentinker.services.trainer`"""

from opentinker.services.trainer.service import serve
from opentinker.shared.runtime.service import main

main("trainer", serve)
