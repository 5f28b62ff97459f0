# ruff: noqa: F403 - one name space for all of them
"""Types of the HTTP API's answers: returned by the client, and described in `/openapi.json`.

They are dictionaries, as JSON has them; a test holds them against the answers of a scheduler. A field that is not
always there is NotRequired; one that may be null says so.
"""

from opentinker.shared.api_types.artifacts import *
from opentinker.shared.api_types.data_rows import *
from opentinker.shared.api_types.environments import *
from opentinker.shared.api_types.episodes import *
from opentinker.shared.api_types.errors import *
from opentinker.shared.api_types.jobs import *
from opentinker.shared.api_types.keys import *
from opentinker.shared.api_types.observability import *
from opentinker.shared.api_types.server import *
from opentinker.shared.api_types.sweeps import *
from opentinker.shared.api_types.tinker import *
