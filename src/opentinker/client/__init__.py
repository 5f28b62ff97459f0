"""The HTTP API from Python (`Client`, `AsyncClient`), and, in `client.utils`, the published training client. What
calls return is typed: `client.answers`.

A program written for the folder layout of the published client, with `from utils.http_training_client import ...`, runs
by `python -m opentinker.client SCRIPT [ARGUMENTS...]`.
"""

from opentinker.api_client import ApiConflict, ApiError, ApiNotFound, AsyncClient, Client
from opentinker.shared import answers

__all__ = ["ApiConflict", "ApiError", "ApiNotFound", "AsyncClient", "Client", "answers"]
