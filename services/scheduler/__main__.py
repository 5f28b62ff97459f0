"""`python -m opentinker.services.scheduler`."""

from opentinker.services.scheduler.service import serve
from opentinker.shared.runtime.service import main

if __name__ == "__main__":
    main("scheduler", serve)
