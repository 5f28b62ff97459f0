"""OpenAI-compatible servers as the published inference meets them, and the job that it makes for itself."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from opentinker.client.utils import inference_client
from opentinker.client.utils.inference_client import InferenceSchedulerClient
from opentinker.environment import InferencePipeline, chat_client
from opentinker.environment.chat_client import ChatError, ChatServer
from opentinker.environment.inference_pipeline import run_inference
from opentinker.sdk.http import ApiError
from opentinker.shared.spec import parse_spec
from tests.samples.published_games import HigherLower

Card = dict[str, str]


class Served:
    """`refusals`: what chats are answered first, before they get a 1; those that say `long` are never taken."""

    def __init__(self, *cards: Card) -> None:
        self.cards = list(cards)
        self.refusals: list[int] = []
        self.asked: list[str] = []
        self.pause: Any = lambda: None

    async def models(self, _: web.Request) -> web.Response:
        return web.json_response({"data": self.cards})

    async def chat(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.asked.append(body["model"])
        self.pause()
        if self.refusals:
            return web.json_response({}, status=self.refusals.pop(0))
        if "long" in body["messages"][-1]["content"]:
            return web.json_response({"error": {"message": "32 tokens are too many", "code": 400}}, status=400)
        message = {"role": "assistant", "content": "1"}
        usage = {"completion_tokens": 1, "total_tokens": 2}
        return web.json_response({"choices": [{"message": message}], "usage": usage})


@asynccontextmanager
async def serving(*cards: Card) -> AsyncIterator[tuple[Served, str]]:
    served = Served(*cards)
    app = web.Application()
    app.add_routes([web.get("/v1/models", served.models), web.post("/v1/chat/completions", served.chat)])
    async with TestServer(app) as server:
        yield served, str(server.make_url("")).rstrip("/")


OURS = ({"id": "/models/mine"}, {"id": "chat", "root": "/models/mine"}, {"id": "j-0", "root": "/models/mine"})
VLLM = ({"id": "base", "root": "/models/base"}, {"id": "lora", "root": "/adapters/lora"})


@pytest.mark.parametrize(
    ("cards", "model", "chosen"),
    [(OURS, None, "/models/mine"), (OURS, "chat", "chat"), (VLLM, "lora", "lora"), (VLLM, "/models/base", "base")],
)
async def test_the_model_that_is_named_is_asked(cards: tuple[Card, ...], model: str | None, chosen: str) -> None:
    async with serving(*cards) as (_, url), ChatServer(url, model) as server:
        assert server.model == chosen


@pytest.mark.parametrize(
    ("cards", "model", "said"),
    [
        (OURS, "models/other", "does not serve 'models/other'; it serves: /models/mine, chat, j-0"),
        (VLLM, None, "serves several models, say which one: base, lora"),
        ((), None, "serves no model"),
    ],
)
async def test_another_model_is_never_asked_instead(cards: tuple[Card, ...], model: str | None, said: str) -> None:
    async with serving(*cards) as (_, url):
        with pytest.raises(ChatError, match=said):
            await ChatServer(url, model).__aenter__()


async def test_a_directory_that_is_named_from_here_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine").mkdir()
    monkeypatch.chdir(tmp_path)
    async with serving({"id": str(tmp_path / "mine")}) as (_, url), ChatServer(url, "mine/") as server:
        assert server.model == str(tmp_path / "mine")


async def test_patience_begins_with_the_first_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [1000.0]
    monkeypatch.setattr(chat_client, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    async with serving({"id": "m"}) as (served, url), ChatServer(url) as server:

        def pause() -> None:
            clock[0] += chat_client.PATIENCE_S + 1

        served.pause, served.refusals = pause, [503]
        await server.chat([{"role": "user", "content": "hi"}])
        assert len(served.asked) == 2
        served.refusals = [503, 503]
        with pytest.raises(ChatError, match="answered 503"):
            await server.chat([{"role": "user", "content": "hi"}])
        assert len(served.asked) == 4


class Sticks(HigherLower):
    def reset(self, secret: int = 1, **kwargs: Any) -> str:
        return super().reset(secret, **kwargs) + (" long" if secret == 3 else "")

    def close(self) -> None:
        if self.secret == 2:
            raise OSError("the board sticks")


async def test_a_sample_that_is_refused_or_cannot_be_closed_is_alone_with_that() -> None:
    async with serving({"id": "m"}) as (served, url):
        pipeline = InferencePipeline(vllm_server_url=url, game_class=Sticks)
        results = await pipeline.play([{"env_kwargs": {"secret": secret}} for secret in (1, 2, 3)])
        assert [result.num_turns for result in results] == [1, 1, 0]
        assert "error" not in results[0].info and results[0].reward == 1.0
        assert results[1].info["error"] == "close: OSError: the board sticks" and results[1].reward == -0.1
        assert results[2].info["error"] == "32 tokens are too many"
        served.refusals = [401]
        with pytest.raises(ChatError):
            await pipeline.play([{}])


class Api:
    """In place of the client of the API: `fails` when it is asked for the job the first time."""

    url = "http://127.0.0.1:1"
    fails: ClassVar[BaseException]
    state: ClassVar[str]
    submitted: ClassVar[list[dict[str, Any]]]
    cancelled: ClassVar[list[str]]

    def __init__(self, *_: Any, **__: Any) -> None:
        self.asked = 0

    def submit(self, spec: dict[str, Any]) -> dict[str, Any]:
        self.submitted.append(spec)
        return {"id": "j-0"}

    def job(self, id: str) -> dict[str, Any]:
        self.asked += 1
        if self.asked == 1:
            raise self.fails
        return {"state": self.state, "reason": "", "waiting_for": ""}

    def cancel(self, id: str) -> None:
        self.cancelled.append(id)


def answering(monkeypatch: pytest.MonkeyPatch, fails: BaseException | None, state: str) -> None:
    parts: dict[str, Any] = {"fails": fails, "state": state, "submitted": [], "cancelled": []}
    for name, value in parts.items():
        monkeypatch.setattr(Api, name, value, raising=False)
    monkeypatch.setattr(inference_client, "Client", Api)


@pytest.mark.parametrize(
    ("fails", "state", "cancelled"),
    [
        (KeyboardInterrupt(), "queued", ["j-0"]),
        (ApiError("refused", 401), "starting", ["j-0"]),
        (ApiError("nobody is there"), "queued", []),
        (KeyboardInterrupt(), "failed", []),
    ],
)
def test_a_job_that_is_not_waited_for_is_cancelled(
    fails: BaseException, state: str, cancelled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    answering(monkeypatch, fails, state)
    with pytest.raises(type(fails)):
        run_inference(model_path="some/model", game_class=HigherLower)
    assert Api.cancelled == cancelled
    (spec,) = Api.submitted
    assert parse_spec(spec).serving.idle_s == 1800.0  # a program that is killed ends it too


def test_a_job_that_does_not_start_in_time_is_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    answering(monkeypatch, None, "queued")
    scheduler = InferenceSchedulerClient(timeout=0.0)
    scheduler._client.asked = 1  # type: ignore[attr-defined]
    with pytest.raises(TimeoutError, match="was queued after 0 s: cancelled"):
        scheduler.submit_inference_job("some/model")
    assert Api.cancelled == ["j-0"]
