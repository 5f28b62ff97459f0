"""OpenTinker: asynchronous reinforcement learning as a service for LLM agents.

The public interface. Importing it loads neither torch, vllm nor transformers (a test checks this).
Names are loaded on first use, so that `import opentinker` stays far below half a second.
"""

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"

_HOME = {
    "Action": "opentinker.envs.base",
    "AsyncClient": "opentinker.client",
    "AsyncServing": "opentinker.serve.ws_client",
    "Client": "opentinker.client",
    "ApiError": "opentinker.client",
    "Environment": "opentinker.envs.base",
    "Step": "opentinker.envs.base",
    "JobSpec": "opentinker.shared.spec",
    "serve_environment": "opentinker.serve.ws_client",
}

__all__ = [
    "Action",
    "ApiError",
    "AsyncClient",
    "AsyncServing",
    "Client",
    "Environment",
    "JobSpec",
    "Step",
    "__version__",
    "serve_environment",
]

if TYPE_CHECKING:
    from opentinker.client import ApiError, AsyncClient, Client
    from opentinker.envs.base import Action, Environment, Step
    from opentinker.serve.ws_client import AsyncServing, serve_environment
    from opentinker.shared.spec import JobSpec


def __getattr__(name: str) -> object:
    try:
        module = import_module(_HOME[name])
    except KeyError:
        raise AttributeError(f"module 'opentinker' has no attribute {name!r}") from None
    value: object = getattr(module, name)
    return value
