"""A model plays games and data through the published `run_inference`, in this process and on a game server."""

from __future__ import annotations

import asyncio
import threading
from functools import partial
from pathlib import Path
from typing import Any

import orjson
import pytest
from aiohttp.test_utils import TestServer

from opentinker.environment import InferencePipeline, RemoteEnvironmentClient, generate_samples, load_samples
from opentinker.environment.base_game import StepResult
from opentinker.environment.base_game_server import create_game_app
from opentinker.environment.chat_client import ChatError
from opentinker.environment.inference_pipeline import run_inference
from tests.conftest import WAIT_S
from tests.samples.published_games import HigherLower
from tests.support.inference import Site


class Sums(HigherLower):
    """Says nothing itself: rows bring the prompt, and what is right."""

    def reset(self, ground_truth: str = "", **kwargs: Any) -> str:  # type: ignore[override]
        self.truth = ground_truth
        return "unused"

    def step(self, action: str) -> StepResult:
        return StepResult("", float(action == self.truth), True, {"said": action})


class Broken(HigherLower):
    def step(self, action: str) -> StepResult:
        raise OSError("the board is gone")


async def pipeline(site: Site, **options: Any) -> InferencePipeline:
    job = await site.job()
    return InferencePipeline(vllm_server_url=f"{site.client.url}/v1/jobs/{job}", **options)


def rows(path: Path, count: int = 6) -> str:
    lines = [{"prompt": f"{i}+1=", "ground_truth": str(i + 1)} for i in range(count)]
    path.write_bytes(b"\n".join(map(orjson.dumps, lines)))
    return str(path)


def added(prompt: str) -> str:
    """Right but for 3 + 1."""
    number = int(prompt.split("+1=", maxsplit=1)[0].rpartition("\n")[2])
    return "5" if number == 3 else str(number + 1)


async def test_rows_are_asked_and_graded(site: Site, tmp_path: Path) -> None:
    site.words = added
    samples = load_samples(rows(tmp_path / "rows.jsonl"))
    results = await (await pipeline(site, game_class=Sums)).play(samples)
    assert [result.reward for result in results] == [1.0, 1.0, 1.0, 0.0, 1.0, 1.0]
    third = results[3].to_dict()
    assert third == {
        "sample_id": 3,
        "messages": [
            {"role": "system", "content": "You guess numbers."},
            {"role": "user", "content": "3+1="},
            {"role": "assistant", "content": "5"},
        ],
        "prompt_text": "You guess numbers.\n\n3+1=",
        "response_text": "5",
        "reward": 0.0,
        "done": True,
        "num_turns": 1,
        "ground_truth": "4",
        "info": {"said": "5", "env_info": [{"said": "5"}]},
    }
    assert len(load_samples(str(tmp_path / "rows.jsonl"), max_samples=2)) == 2
    assert {s.temperature for _, s in site.speakers["rollout-0"].asked} == {0.0}


def lower(prompt: str) -> str:
    """Guesses from 9 down."""
    return str(9 - prompt.count("<|im_start|>assistant") + 1)


async def test_a_game_is_played_over_turns_from_states_that_its_seed_draws(site: Site) -> None:
    site.words = lower
    samples = generate_samples(HigherLower, 5, seed=1, largest=9, tries=9)
    played = await pipeline(site, game_class=HigherLower, largest=9, tries=9, max_assistant_turns=9)
    results = await played.play(samples)
    for sample, result in zip(samples, results, strict=True):
        secret = sample["env_kwargs"]["secret"]
        assert (result.done, result.num_turns, result.messages[-1]["content"]) == (True, 10 - secret, str(secret))
        assert result.messages[0] == {"role": "system", "content": "You guess numbers."}
        assert result.reward == pytest.approx(1.0 - 0.1 * (9 - secret)) and result.info["result"] == "win"
    again = await played.play(samples)
    assert [r.messages for r in again] == [r.messages for r in results]  # the dice of each game too
    short = await (await pipeline_of(site, played, max_user_turns=1, max_assistant_turns=0)).play([samples[0]])
    assert short[0].num_turns == min(2, results[0].num_turns)


async def pipeline_of(site: Site, like: InferencePipeline, **options: Any) -> InferencePipeline:
    return InferencePipeline(
        vllm_server_url=like.server_url, game_class=like.game_class, **{**like.game_kwargs, **options}
    )


async def test_a_game_server_plays_too(site: Site) -> None:
    site.words = lower
    async with TestServer(create_game_app(HigherLower, tries=9)) as server:
        url = str(server.make_url("")).rstrip("/")
        played = await pipeline(site, env_endpoint=url, max_assistant_turns=9)
        (result,) = await played.play([{"env_kwargs": {"secret": 7}}])
        assert (result.done, result.num_turns) == (True, 3) and result.reward == pytest.approx(0.8)
        assert "Guess my number" in result.prompt_text and "You guess numbers." in result.prompt_text
        remote = RemoteEnvironmentClient(url)
        assert await remote.health_check()
        assert "Guess" in (await remote.reset("mine", secret=3))["observation"]
        assert (await remote.step("mine", "3"))["reward"] == 1.0


async def test_one_sample_is_played_by_whoever_the_pipeline_is_told(site: Site) -> None:
    site.words = lower
    chat = [{"role": "system", "content": "Guess."}, {"role": "user", "content": "1 to 9?"}]
    async with TestServer(create_game_app(HigherLower, tries=9)) as server:
        played = await pipeline(site, env_endpoint="http://127.0.0.1:9", max_user_turns=9, max_assistant_turns=9)
        played.env_client = RemoteEnvironmentClient(str(server.make_url("")).rstrip("/"), job_id="eval")
        result = await played.run_single_inference(
            messages=chat, env_kwargs={"secret": 7}, max_tokens=64, max_tokens_per_turn=8
        )
    assert result.messages[:2] == chat and result.prompt_text == "Guess.\n\n1 to 9?"
    assert (result.done, result.response_text) == (True, "9\n\n8\n\n7") and result.reward == pytest.approx(0.8)
    assert [step["result"] for step in result.info["env_info"]] == ["loss", "loss", "win"]


async def test_what_fails_is_said(site: Site) -> None:
    with pytest.raises(RuntimeError, match="OSError: the board is gone"):
        await (await pipeline(site, game_class=Broken)).play([{}, {}])
    long = {"prompt": [{"role": "user", "content": "x" * 20_000}]}
    (job,) = [j for j in await site.client.jobs() if j["state"] == "running"]
    both = InferencePipeline(vllm_server_url=f"{site.client.url}/v1/jobs/{job['id']}/v1", game_class=HigherLower)
    first, second = await both.play([long, {}])
    assert "maximum context length" in first.info["error"] and second.num_turns == 1
    await site.client.cancel(job["id"])
    with pytest.raises(ChatError, match="has cancelled") as refused:
        await both.play([{}])
    assert refused.value.status == 409


async def test_results_that_are_there_are_written_when_the_server_goes(site: Site, tmp_path: Path) -> None:
    site.words = added
    job = await site.job()
    speaker, out = site.speakers["rollout-0"], tmp_path / "out" / "results.jsonl"
    asked = partial(
        run_inference,
        data_path=rows(tmp_path / "rows.jsonl"),
        game_class=Sums,
        vllm_server_url=f"{site.client.url}/v1/jobs/{job}",
        output_path=str(out),
        concurrency=1,
    )

    def words(prompt: str) -> str:
        if "2+1=" in prompt:
            raise LookupError("the third breaks")
        return added(prompt)

    site.words = speaker.words = words
    with pytest.raises(ChatError):
        await asyncio.to_thread(asked)
    assert [orjson.loads(line)["sample_id"] for line in out.read_bytes().splitlines()] == [0, 1]


async def test_games_that_share_nothing_are_played_at_once(site: Site) -> None:
    together = threading.Barrier(2, timeout=WAIT_S)

    class Both(Sums):
        concurrent = True

        def step(self, action: str) -> StepResult:
            together.wait()
            return super().step(action)

    results = await (await pipeline(site, game_class=Both)).play([{}, {}])
    assert [result.done for result in results] == [True, True]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "give model_path"),
        (
            {"vllm_server_url": "http://x", "game_class": HigherLower, "model_path": "a", "tokenizer_path": "b"},
            "the tokenizer is that of the model",
        ),
        ({"vllm_server_url": "http://x"}, "nothing to play"),
        ({"vllm_server_url": "http://x", "game_class": HigherLower, "width": 3}, "takes no width"),
        ({"vllm_server_url": "http://x", "game_class": HigherLower, "max_tokens": 0}, "1 or more"),
        ({"vllm_server_url": "http://x", "tensor_parallel_size": 2}, "is the server's"),
    ],
)
def test_arguments_that_mean_nothing_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        run_inference(**options)
