"""The HTTP API from Python (`Client`, `AsyncClient`), and, in `client.utils`, the published training client.

A program written for the folder layout of the published client, with `from utils.http_training_client import ...`, runs
by `python -m opentinker.client SCRIPT [ARGUMENTS...]`.
"""

from opentinker.api_client import ApiConflict, ApiError, ApiNotFound, AsyncClient, Client

__all__ = ["ApiConflict", "ApiError", "ApiNotFound", "AsyncClient", "Client"]
