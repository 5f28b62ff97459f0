"""Lets a model play a game, sample by sample, with rewards: the published way of evaluating a trained model.

    results = run_inference(vllm_server_url=job["vllm_server_url"], data_path="rows.jsonl", game_class=MathGame)

The model answers at `vllm_server_url`, an inference job's or any OpenAI-compatible server's; the game is played in this
process, or by the game server at `env_endpoint`. Samples are played side by side.
"""

from __future__ import annotations

import asyncio
import sys
import uuid
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import orjson

from opentinker.client.utils.inference_client import MEMORY, InferenceSchedulerClient, check_tokenizer
from opentinker.client.utils.scheduler_client_lifecycle import get_lifecycle_manager
from opentinker.environment.chat_client import ChatError, ChatServer
from opentinker.environment.game_server import RemoteEnvironmentClient
from opentinker.environment.inference_games import Chat, LocalGame, Play, RemoteGame
from opentinker.environment.rows_environment import EXTRA
from opentinker.environment.static_data_generator import StaticDatasetGenerator
from opentinker.envs.game import AbstractGame, GameDataGenerator, check_arguments

__all__ = [
    "InferencePipeline", "InferenceResult", "RemoteEnvironmentClient", "generate_samples", "load_samples",
    "run_inference",
]  # fmt: skip

AT_ONCE = 64
"""Samples that are played side by side."""
SUCCESS = 0.5
"""A reward above it counts as right."""
GENERATED = 50
"""Samples of a game without data, by default."""
OF_THE_SAMPLE = (400, 413, 422)
"""Statuses for a conversation that the server refuses, e.g. one that is too long."""
IDLE_S = 1800.0
"""Our inference job ends after this time without requests: the program that made it was killed."""
Sample = dict[str, Any]


@dataclass
class InferenceResult:
    """Result of one sample."""

    sample_id: int | str
    messages: Chat
    """Both sides' words."""
    prompt_text: str
    """The first messages, one after the other."""
    response_text: str
    """All text of the model."""
    reward: float
    """Sum over the steps."""
    done: bool
    """Whether the game came to its end."""
    num_turns: int
    """Turns of the model."""
    ground_truth: Any = None
    info: dict[str, Any] = field(default_factory=dict)
    """Info of the last step, and of all steps under `env_info`; `error` if the game failed, or the server refused the
    conversation."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def load_samples(data_path: str | Sequence[str], max_samples: int | None = None, **options: Any) -> list[Sample]:
    """Rows of .jsonl, .json and .parquet files in their order: prompt, env_kwargs, ground_truth, data_source. `options`
    are those of StaticDatasetGenerator. Raises RowError."""
    rows = StaticDatasetGenerator(data_path, **{"shuffle": False, "extra_keys": EXTRA, **options})
    return [rows.generate_sample(i) for i in range(len(rows) if max_samples is None else min(max_samples, len(rows)))]


def generate_samples(
    game_class: type[AbstractGame], num_samples: int = GENERATED, seed: int = 42, **game_kwargs: Any
) -> list[Sample]:
    """Start states of a game without data. A sample's `seed` is that of its game, which says the prompt itself."""
    generator = GameDataGenerator(game_class, game_kwargs, seed)
    return [{**generator.generate_sample(i), "seed": seed + i} for i in range(num_samples)]


@dataclass(frozen=True)
class Sampling:
    """Limits for generated tokens: each turn has up to `max_tokens_per_turn`, each sample up to `max_tokens`."""

    temperature: float = 0.0
    top_p: float = 1.0
    max_tokens: int = 4096
    max_tokens_per_turn: int | None = None


class InferencePipeline:
    """`run` plays samples, `run_single_inference` one. A sample has up to `max_assistant_turns` turns (0: any number)
    and, unless it is 0, `max_user_turns` observations after the first; a conversation of `max_context_length` tokens is
    not continued. The server renders and tokenises with the model's own tokenizer: `tokenizer_path` is refused where it
    names another one. `game_kwargs` are those of the game's constructor.

    Without `vllm_server_url` an inference job of `model_path` is submitted to the service (OPENTINKER_URL), and answers
    when the constructor returns. `close` ends it, as does the end of the program. `tensor_parallel_size`,
    `gpu_memory_utilization` and `trust_remote_code` are that job's (InferenceSchedulerClient).
    """

    def __init__(
        self,
        model_path: str | None = None,
        tokenizer_path: str | None = None,
        vllm_server_url: str | None = None,
        env_endpoint: str | None = None,
        job_id: str = "default",
        max_user_turns: int = 0,
        max_assistant_turns: int = 1,
        max_context_length: int = 30000,
        tensor_parallel_size: int = 1,
        gpu_memory_utilization: float = MEMORY,
        trust_remote_code: bool = True,
        *,
        game_class: type[AbstractGame] | None = None,
        temperature: float = 0.0,
        top_p: float = 1.0,
        max_tokens: int = 4096,
        max_tokens_per_turn: int | None = None,
        concurrency: int = AT_ONCE,
        **game_kwargs: Any,
    ) -> None:
        if vllm_server_url is None and model_path is None:
            raise ValueError("there is no model: give model_path, or the vllm_server_url of an inference job")
        if vllm_server_url is not None and tensor_parallel_size != 1:
            raise ValueError("tensor_parallel_size is the server's, which vllm_server_url names: leave it out")
        check_tokenizer(model_path, tokenizer_path)
        if game_class is None and env_endpoint is None:
            raise ValueError("there is nothing to play: give game_class, or env_endpoint of a game server")
        if min(max_tokens, concurrency, max_context_length) < 1 or min(max_user_turns, max_assistant_turns) < 0:
            raise ValueError(
                "max_tokens, max_context_length and concurrency must be 1 or more, numbers of turns 0 or more"
            )
        if game_class is not None:
            check_arguments(game_class, game_kwargs)
        self.model_path = model_path
        self.game_class, self.game_kwargs = game_class, game_kwargs
        self.env_endpoint, self.job_id = env_endpoint, job_id
        self.env_client = None if env_endpoint is None else RemoteEnvironmentClient(env_endpoint, job_id)
        """Player, where it is not a game of this process; another one may be set between samples."""
        self.sampling = Sampling(temperature, top_p, max_tokens, max_tokens_per_turn)
        self.max_user_turns, self.max_assistant_turns = max_user_turns, max_assistant_turns
        self.max_context_length, self.concurrency = max_context_length, concurrency
        self.finished: dict[int, InferenceResult] = {}
        """Results of the last run's samples, by number: also if it was interrupted."""
        self._scheduler: InferenceSchedulerClient | None = None
        self._serving = ""
        """The job that this pipeline has submitted."""
        options = {
            "tensor_parallel_size": tensor_parallel_size,
            "gpu_memory_utilization": gpu_memory_utilization,
            "trust_remote_code": trust_remote_code,
        }
        self.server_url = vllm_server_url or self._submit(str(model_path), options)

    def _submit(self, model_path: str, options: dict[str, Any]) -> str:
        self._scheduler = InferenceSchedulerClient()
        job = self._scheduler.submit_inference_job(model_path, **options, opentinker={"serving": {"idle_s": IDLE_S}})
        self._serving = str(job["job_id"])
        get_lifecycle_manager().register_job(self._scheduler, self._serving)
        return str(job["vllm_server_url"])

    def close(self) -> None:
        """Completes the inference job that this pipeline has submitted, if any."""
        if self._scheduler is not None:
            self._scheduler.complete_job(self._serving)

    def run(self, samples: Sequence[Sample]) -> list[InferenceResult]:
        """One result per sample, in their order. Raises ChatError when the server refuses or is gone, RuntimeError when
        every sample failed."""
        return asyncio.run(self.play(samples))

    async def play(self, samples: Sequence[Sample]) -> list[InferenceResult]:
        places, turn = asyncio.Semaphore(self.concurrency), asyncio.Lock()
        self.finished = {}
        async with ChatServer(self.server_url, self.model_path) as server:

            async def one(number: int, sample: Sample) -> InferenceResult:
                async with places:
                    self.finished[number] = await self._sample(number, sample, server, turn)
                return self.finished[number]

            tasks = [asyncio.create_task(one(number, sample)) for number, sample in enumerate(samples)]
            try:
                results = list(await asyncio.gather(*tasks))
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
        failed = [result for result in results if "error" in result.info and not result.done]
        if results and len(failed) == len(results):
            raise RuntimeError(f"every sample failed; the first: {failed[0].info['error']}")
        return results

    async def run_single_inference(
        self,
        messages: Chat,
        env_kwargs: dict[str, Any],
        temperature: float = 0.0,
        top_p: float = 1.0,
        max_tokens: int = 4096,
        max_tokens_per_turn: int | None = None,
    ) -> InferenceResult:
        """Plays one sample: `messages` are the prompt, `env_kwargs` the game's start state. Raises ChatError, and what
        the game raises."""
        sampling = Sampling(temperature, top_p, max_tokens, max_tokens_per_turn)
        prompt = [dict(message) for message in messages]
        result = InferenceResult(uuid.uuid4().hex, prompt, _text(prompt), "", 0.0, False, 0)
        result.ground_truth = env_kwargs.get("ground_truth")
        game = self._game({"env_kwargs": env_kwargs}, asyncio.Lock())
        try:
            await game.open()
            async with ChatServer(self.server_url, self.model_path) as server:
                await self._turns(result, game, server, sampling)
        finally:
            await _close(game, result)
        result.response_text = _said(result)
        return result

    def _game(self, sample: Sample, turn: asyncio.Lock) -> Play:
        state = dict(sample.get("env_kwargs") or {})
        if self.env_client is not None:
            return RemoteGame(self.env_client, state)
        assert self.game_class is not None
        return LocalGame(partial(self.game_class, **self.game_kwargs), state, sample.get("seed"), turn)

    async def _sample(self, number: int, sample: Sample, server: ChatServer, turn: asyncio.Lock) -> InferenceResult:
        result = InferenceResult(number, [], "", "", 0.0, False, 0, sample.get("ground_truth"))
        game = self._game(sample, turn)
        try:
            opening = await game.open()
            result.messages = _prompt(sample, opening)
            result.prompt_text = _text(result.messages)
            await self._turns(result, game, server, self.sampling)
        except ChatError as error:
            if error.status not in OF_THE_SAMPLE:
                raise
            result.info = {**result.info, "error": str(error)}
        except Exception as error:  # noqa: BLE001 - the game is the user's code: it fails its sample, and says so there
            result.info = {**result.info, "error": f"{type(error).__name__}: {error}"}
        finally:
            await _close(game, result)
        result.response_text = _said(result)
        return result

    async def _turns(self, result: InferenceResult, game: Play, server: ChatServer, sampling: Sampling) -> None:
        left, trace = sampling.max_tokens, []
        while True:
            limit = min(left, sampling.max_tokens_per_turn or left)
            answer = await server.chat(
                result.messages, max_tokens=limit, temperature=sampling.temperature, top_p=sampling.top_p
            )
            text = answer["choices"][0]["message"]["content"] or ""
            result.messages.append({"role": "assistant", "content": text})
            result.num_turns += 1
            step = await game.step(text)
            trace.append(dict(step.info))
            result.reward += float(step.reward)
            result.done, result.info = bool(step.done), {**step.info, "env_info": trace}
            usage = answer["usage"]
            left -= usage["completion_tokens"]
            turns = result.num_turns
            if (
                result.done
                or left <= 0
                or usage["total_tokens"] >= self.max_context_length
                or turns == self.max_assistant_turns
                or turns - 1 == self.max_user_turns > 0
            ):
                return
            result.messages.append({"role": "user", "content": step.observation})


def run_inference(
    model_path: str | None = None,
    data_path: str | Sequence[str] | None = None,
    game_class: type[AbstractGame] | None = None,
    env_endpoint: str | None = None,
    job_id: str = "default",
    vllm_server_url: str | None = None,
    tokenizer_path: str | None = None,
    output_path: str | None = None,
    temperature: float = 0.0,
    top_p: float = 1.0,
    max_tokens: int = 4096,
    max_tokens_per_turn: int | None = None,
    max_samples: int | None = None,
    max_user_turns: int = 0,
    max_assistant_turns: int = 1,
    max_context_length: int = 30000,
    tensor_parallel_size: int = 1,
    concurrency: int = AT_ONCE,
    **game_kwargs: Any,
) -> list[InferenceResult]:
    """Plays the rows of `data_path`, or start states that the game draws, and says how it went.

    Without `vllm_server_url` an inference job of `model_path` is submitted to the service (OPENTINKER_URL) and
    completed in the end. With `output_path` every result is a line of JSON there, also where the server refuses or is
    gone before the last one. Everything else: InferencePipeline.
    """
    pipeline = InferencePipeline(
        model_path=model_path,
        tokenizer_path=tokenizer_path,
        vllm_server_url=vllm_server_url,
        env_endpoint=env_endpoint,
        job_id=job_id,
        max_user_turns=max_user_turns,
        max_assistant_turns=max_assistant_turns,
        max_context_length=max_context_length,
        tensor_parallel_size=tensor_parallel_size,
        game_class=game_class,
        temperature=temperature,
        top_p=top_p,
        max_tokens=max_tokens,
        max_tokens_per_turn=max_tokens_per_turn,
        concurrency=concurrency,
        **game_kwargs,
    )
    try:
        samples = _samples(data_path, game_class, max_samples, game_kwargs)
        try:
            results = pipeline.run(samples)
        finally:
            if output_path is not None:
                _write(Path(output_path), pipeline.finished)
    finally:
        pipeline.close()
    _say(results, output_path)
    return results


def _write(target: Path, results: dict[int, InferenceResult]) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    lines = [orjson.dumps(results[number].to_dict(), default=str) for number in sorted(results)]
    target.write_bytes(b"".join(line + b"\n" for line in lines))


async def _close(game: Play, result: InferenceResult) -> None:
    try:
        await game.close()
    except Exception as error:  # noqa: BLE001 - the game is the user's code; what went wrong before says more
        result.info = {"error": f"close: {type(error).__name__}: {error}", **result.info}


def _samples(
    data_path: str | Sequence[str] | None,
    game_class: type[AbstractGame] | None,
    max_samples: int | None,
    game_kwargs: dict[str, Any],
) -> list[Sample]:
    if data_path is not None:
        return load_samples(data_path, max_samples)
    count = GENERATED if max_samples is None else max_samples
    return [{} for _ in range(count)] if game_class is None else generate_samples(game_class, count, **game_kwargs)


def _prompt(sample: Sample, opening: Chat) -> Chat:
    """Return the prompt as in training: without data the game's opening, with data its system message before the
    row."""
    if "seed" in sample or not sample.get("prompt"):
        return opening
    system = [message for message in opening if message["role"] == "system"]
    return [*system, *(dict(m) for m in sample["prompt"] if not (system and m["role"] == "system"))]


def _text(messages: Chat) -> str:
    return "\n\n".join(str(message.get("content") or "") for message in messages)


def _said(result: InferenceResult) -> str:
    return _text([message for message in result.messages if message["role"] == "assistant"])


def _say(results: list[InferenceResult], output_path: str | None) -> None:
    """Print for the person at the terminal: this is their program's own process."""
    count = len(results) or 1
    mean, right = sum(r.reward for r in results) / count, sum(r.reward > SUCCESS for r in results)
    failed = sum("error" in r.info for r in results)
    said = f"{len(results)} samples: mean reward {mean:.4f}, accuracy {right / count:.4f} (reward > {SUCCESS:g})"
    said += f", {failed} with an error" if failed else ""
    sys.stdout.write(f"{said}{f'; see {output_path}' if output_path else ''}\n")
    sys.stdout.flush()
