"""`python -m opentinker.services.trainer`"""

from opentinker.services.trainer.service import serve
from opentinker.shared.service import main

main("trainer", serve)
