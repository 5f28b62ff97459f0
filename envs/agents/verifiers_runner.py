"""Plays the episodes of one verifiers environment in the interpreter that has verifiers installed.

    python verifiers_runner.py FD      (started by verifiers.py, never by hand; imports nothing of ours)

Consumes lines of JSON from the socket FD, produces one line per episode on it; waits for the next line; ends when the
env worker closes its side. The first line names the environment and is answered with `ready` or `error`; `run` and
`cancel` follow.
"""

import asyncio
import contextlib
import functools
import importlib.metadata
import json
import math
import os
import signal
import socket
import sys
import traceback
from typing import Any

ERROR_CHARACTERS = 1500
KEY_VARIABLE = "OPENTINKER_AGENT_KEY"
LINE_BYTES = 16 * 1024 * 1024
FIRST_V1 = (0, 2)
"""verifiers is called through `verifiers.v1` from this version on."""

Json = dict[str, Any]


class RunFailed(Exception):
    """An episode that failed, with the message of verifiers."""


class LegacyEnv:
    """0.1: `load_environment`, and rollouts of rows."""

    def __init__(self, setup: Json) -> None:
        import verifiers

        if setup["client"] != "chat":
            raise ValueError('verifiers 0.1 renders nothing itself: set client = "chat"')
        self.env = verifiers.load_environment(setup["id"], **setup["args"])
        self.rows = self.env.get_dataset() if setup["split"] == "train" else self.env.get_eval_dataset()
        if self.env.requires_group_rollouts:
            raise ValueError("its rubric judges rollouts by comparison with each other, and an episode is alone here")

    async def run(self, asked: Json) -> Json:
        from verifiers.clients import resolve_client
        from verifiers.types import ClientConfig

        client = resolve_client(
            ClientConfig(api_base_url=asked["base_url"], api_key_var=KEY_VARIABLE, timeout=7 * 86400.0, max_retries=0)
        )
        try:
            row = dict(self.rows[asked["row"] % len(self.rows)])
            output = await self.env.run_rollout(row, client, asked["model"], dict(self.env.sampling_args or {}))
        finally:
            await client.close()
        if output.get("error") is not None:
            raise RunFailed(str(output["error"]))
        return {"reward": output["reward"], "metrics": output.get("metrics") or {}}

    @contextlib.asynccontextmanager
    async def serving(self) -> Any:
        try:
            yield
        finally:
            await self.env._teardown()


class V1Env:
    """0.2 and later: an Env over a Taskset, and episodes of traces."""

    def __init__(self, setup: Json) -> None:
        from verifiers.v1.configs.agent import agent_config_fields
        from verifiers.v1.utils.loaders import env_config_type, load_environment

        fields = dict(setup["args"])
        if setup["split"] != "train":
            raise ValueError("tasksets have no splits: name what you want in args, e.g. args.taskset.split")
        taskset = {"id": setup["id"], **fields.pop("taskset", {})}
        kind = env_config_type(taskset["id"], fields.get("id", ""))
        for role in agent_config_fields(kind()):
            agent = fields[role] = dict(fields.get(role, {}))
            agent.setdefault("runtime", {"type": "subprocess"})  # the default tunnels through a paid service
        self.env = load_environment(kind.model_validate({"taskset": taskset, **fields}))
        tasks = self.env.taskset
        if not tasks.bounded:
            tasks = tasks.take(setup["rows"])
        self.rows = list(tasks)
        self.client = setup["client"]
        self.tokenizer = setup["tokenizer"]

    def serving(self) -> Any:
        return self.env.serving()

    async def run(self, asked: Json) -> Json:
        from verifiers.v1.clients import EvalClientConfig, ModelContext, TrainClientConfig
        from verifiers.v1.types import SamplingConfig

        common = {"base_url": asked["base_url"], "api_key_var": KEY_VARIABLE}
        client = (
            EvalClientConfig(**common)
            if self.client == "chat"
            else TrainClientConfig(**common, renderer_model_name=self.tokenizer or asked["model"])
        )
        context = ModelContext(client=client, model=asked["model"], sampling=SamplingConfig())
        episode = await self.env.run_episode(self.rows[asked["row"] % len(self.rows)], context)
        if not episode.ok:
            errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
            raise RunFailed("; ".join(f"{error.type}: {error.message}" for error in errors) or "the episode is not ok")
        traces = [trace for trace in episode.traces if trace.agent.trainable]
        if not traces:
            raise RunFailed("none of its agents is trainable")
        metrics: dict[str, list[float]] = {}
        for trace in traces:
            for name, value in [*trace.metrics.items(), *((n, r and r.value) for n, r in trace.rewards.items())]:
                if value is not None:
                    metrics.setdefault(name, []).append(float(value))
        return {
            "reward": sum(trace.reward for trace in traces) / len(traces),
            "metrics": {name: sum(values) / len(values) for name, values in metrics.items()},
        }


def load(setup: Json) -> Any:
    here = os.path.dirname(os.path.realpath(__file__))  # contains another module named verifiers
    sys.path[:] = [*setup["paths"], *(path for path in sys.path if os.path.realpath(path) != here)]
    version = importlib.metadata.version("verifiers")
    new = tuple(int(part) for part in version.split(".")[:2]) >= FIRST_V1
    env = (V1Env if new else LegacyEnv)(setup)
    if not len(env.rows):
        raise ValueError("it has no task")
    return env


async def play(env: Any, asked: Json) -> Json:
    """Play one episode and return its reply, also if it raises."""
    try:
        return {"run": asked["run"], **(await env.run(asked))}
    except asyncio.CancelledError:
        raise
    except RunFailed as error:
        return {"run": asked["run"], "error": str(error)[-ERROR_CHARACTERS:]}
    except Exception as error:  # noqa: BLE001 - user code
        return {"run": asked["run"], "error": "".join(traceback.format_exception(error, limit=-4))[-ERROR_CHARACTERS:]}


async def main(descriptor: int) -> None:
    reader, writer = await asyncio.open_connection(sock=socket.socket(fileno=descriptor), limit=LINE_BYTES)

    def say(noun: Json) -> None:
        writer.write(json.dumps(sound(noun)).encode() + b"\n")

    setup = json.loads(await reader.readline())
    os.environ[KEY_VARIABLE] = setup["key"]
    try:
        env = load(setup)
    except Exception as error:  # noqa: BLE001 - user code
        say({"error": "".join(traceback.format_exception(error, limit=-3))[-ERROR_CHARACTERS:]})
        await writer.drain()
        return
    running: dict[int, asyncio.Task[Json]] = {}

    def ended(number: int, task: asyncio.Task[Json]) -> None:
        running.pop(number, None)
        say({"run": number, "error": "cancelled"} if task.cancelled() else task.result())

    async with env.serving():
        say({"ready": len(env.rows)})
        while line := await reader.readline():
            asked = json.loads(line)
            if "cancel" in asked:
                if asked["cancel"] in running:
                    running[asked["cancel"]].cancel()
                continue
            number = asked["run"]
            task = running[number] = asyncio.create_task(play(env, asked))
            task.add_done_callback(functools.partial(ended, number))


def sound(noun: Json) -> Json:
    """Return the reply without NaN and infinity, which JSON does not have."""
    if "metrics" in noun:
        numbers = {str(name): value for name, value in noun["metrics"].items() if isinstance(value, int | float)}
        noun = {**noun, "metrics": {name: float(value) for name, value in numbers.items() if math.isfinite(value)}}
    return noun


if __name__ == "__main__":
    try:
        asyncio.run(main(int(sys.argv[1])))
    finally:
        os.killpg(os.getpgrp(), signal.SIGKILL)  # kills processes that its harnesses left behind
