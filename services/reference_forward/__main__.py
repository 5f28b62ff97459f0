"""`python -m opentinker.services.reference_forward`"""

from opentinker.services.reference_forward.service import serve
from opentinker.shared.service import main

main("reference-forward", serve)
