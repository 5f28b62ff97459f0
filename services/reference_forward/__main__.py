"""`python -m opentinker.services.reference_forward`"""

from opentinker.services.reference_forward.service import serve
from opentinker.shared.runtime.service import main

main("reference-forward", serve)
