"""Answers to requests that fail."""

from typing import Literal, NotRequired, TypedDict

from opentinker.shared.api_types.jobs import Mistake


class Problem(TypedDict):
    """An error (RFC 9457)."""

    type: str
    title: str
    status: int
    detail: str
    hint: str
    """The next step for the user."""
    errors: NotRequired[list[Mistake]]
    """Every mistake, of a request that was invalid."""


class OpenAIErrorBody(TypedDict):
    """An error in the words of OpenAI's API."""

    message: str
    type: str
    param: str | None
    code: str | None


class OpenAIError(TypedDict):
    """An error of the OpenAI routes."""

    error: OpenAIErrorBody


class AnthropicErrorBody(TypedDict):
    """An error in the words of Anthropic's API."""

    type: str
    message: str


class AnthropicError(TypedDict):
    """An error of the messages route."""

    type: Literal["error"]
    error: AnthropicErrorBody
