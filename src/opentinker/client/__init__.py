"""The HTTP API from Python (`Client`, `AsyncClient`), and, in `client.utils`, the published training client. What
calls return is typed: `client.answers`.

A script of the published client's folder layout, with `from utils.http_training_client import ...`, runs by
`opentinker script SCRIPT [ARGUMENTS...]`.
"""

from opentinker.client.sync import Client
from opentinker.sdk.client import ApiConflict, ApiError, ApiNotFound, AsyncClient
from opentinker.shared import api_types as answers

__all__ = ["ApiConflict", "ApiError", "ApiNotFound", "AsyncClient", "Client", "answers"]
