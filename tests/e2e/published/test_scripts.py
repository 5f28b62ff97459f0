"""Programs in the shape of the published examples, run from a checkout's root as they are typed, against real services:
what they train, and that nothing is left behind when they end."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import orjson
import pytest
import pytest_asyncio

from opentinker.environment.game_server import shard_of
from opentinker.environment.game_stats_client import GameStatsClient
from opentinker.local.processes import free_port
from opentinker.shared.api_types import Job
from opentinker.shared.types.core import JobState
from tests.conftest import until
from tests.samples.published_checkout import CLIENT, PHONES, SCRIPTS, lay_out
from tests.support.cluster import PYTHONPATH, Cluster, toy_cluster
from tests.support.simulated_phone import LIBRARY

TOY = (
    "opentinker.model.chat_template=plain",
    "opentinker.rollout.engine=toy",
    "opentinker.train.learner=simulated",
    "opentinker.train.simulated_step_s=0.02",
)
"""What makes small jobs of them: no weights are there to be trained."""
UNUSED = {
    *("", "tool", "enable_tracing", "processor_path", "lora.exclude_modules", "lora.lora_adapter_path"),
    *("multi_turn.weave_project", "multi_turn.experiment_name", "multi_turn.max_user_turns"),
}
"""Settings of the config files that the scripts are told to mean nothing here, at most."""
HERE = "interaction.config.env_endpoint=null"
"""The game is played in the script's own process."""
pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]


class Typed:
    def __init__(self, cluster: Cluster, model: Path, folder: Path) -> None:
        self.cluster, self.model, self.folder = cluster, model, folder
        self.checkout = lay_out(folder / "checkout")
        self.python_path = PYTHONPATH

    def rows(self, name: str, **more: Any) -> str:
        path = self.folder / f"{name}.jsonl"
        rows = [
            {
                "prompt": [{"role": "user", "content": f"what is {n} + 1?"}],
                "data_source": "math",
                "reward_model": {"ground_truth": str(n + 1)},
                **more,
            }
            for n in range(6)
        ]
        path.write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in rows))
        return str(path)

    async def begin(self, name: str, *options: str) -> asyncio.subprocess.Process:
        """`opentinker script`, as it is typed in the checkout's root."""
        given = [f"scheduler_url={self.cluster.client.url}", "scheduler_api_key=null", *options]
        return await self.start("-m", "opentinker.cli", "script", str(CLIENT / f"{name}.py"), *given)

    async def script(self, name: str, *options: str) -> tuple[int, str]:
        process = await self.begin(name, f"tokenizer_path={self.model}", "num_gpus=null", *options, *TOY)
        return await ended(process)

    async def start(self, *argv: str) -> asyncio.subprocess.Process:
        env = {**os.environ, "PYTHONPATH": self.python_path, "PYTHONUNBUFFERED": "1"}
        out = asyncio.subprocess.PIPE
        safe = (
            ["-P"] if argv[0] == "-m" else []
        )  # as an installed command, nothing is imported from the checkout's root
        return await asyncio.create_subprocess_exec(
            sys.executable, *safe, *argv, env=env, stdout=out, stderr=asyncio.subprocess.STDOUT, cwd=self.checkout
        )

    async def trained(self, name: str, steps: int, *options: str) -> Job:
        """The job that came of it."""
        code, said = await self.script(name, *options)
        assert code == 0 and f"final {steps}.0" in said, said
        job = await self.newest()
        assert (job["state"], job["step"]) == ("succeeded", steps), said
        assert "wandb_key: not used" in said
        (unused,) = [line for line in said.splitlines() if "mean nothing here" in line] or [""]
        assert set(unused.partition(": ")[2].split(", ")) <= UNUSED, said
        return job

    async def newest(self) -> Job:
        return await self.cluster.client.job((await self.cluster.client.jobs())[0]["id"])

    async def nothing_is_left(self) -> Job:
        """Every job is over, and no worker is held. Gives the newest job."""

        async def over() -> bool:
            jobs, workers = await self.cluster.client.jobs(), await self.cluster.client.workers()
            return all(JobState(job["state"]).final for job in jobs) and not any(worker["job"] for worker in workers)

        await until(over)
        return await self.newest()

    @asynccontextmanager
    async def server(self, module: str, *options: str) -> AsyncIterator[str]:
        url = f"http://127.0.0.1:{(port := two_free_ports())}"
        process = await self.start("-m", module, "--host", "127.0.0.1", "--port", str(port), *options)
        try:
            client = GameStatsClient(url)

            async def there() -> bool:
                assert process.returncode is None
                return await asyncio.to_thread(client.health_check)

            await until(there)
            yield url
        finally:
            process.kill()
            await process.communicate()
            await until(lambda: can_listen(port) and can_listen(port + 1))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def typed(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Typed]:
    folder = tmp_path_factory.mktemp("scripts")
    async with toy_cluster(folder / "cluster") as (cluster, model):
        yield Typed(cluster, model, folder)


async def ended(process: asyncio.subprocess.Process) -> tuple[int, str]:
    said, _ = await process.communicate()
    assert process.returncode is not None
    return process.returncode, said.decode()


async def said_by(process: asyncio.subprocess.Process, sign: str) -> str:
    """Return the output up to the line with this sign."""
    assert process.stdout is not None
    lines: list[str] = []
    while not lines or sign not in lines[-1]:
        line = await process.stdout.readline()
        assert line, "".join(lines)
        lines.append(line.decode())
    return "".join(lines)


async def test_mathematics(typed: Typed) -> None:
    options = HERE, f"data_path={typed.rows('train')}", f"val_data_path={typed.rows('val')}"
    code, said = await typed.script("math_rl", *options)
    assert code == 0 and "final 3.0" in said and "helped" in said, said
    assert "logger_backends wandb: not used" in said
    assert "multi_turn.max_tokens_per_turn = 4096 is more than max_new_tokens: a turn has 2048 at most" in said
    job = await typed.nothing_is_left()
    assert (job["name"], job["state"], job["spec"]["validation"]["episodes"]) == ("math_training", "succeeded", 2)


async def test_mathematics_with_programs(typed: Typed) -> None:
    turns = "multi_turn.max_user_turns=2", "multi_turn.max_assistant_turns=2", "multi_turn.max_tokens_per_turn=4"
    job = await typed.trained("math_tool_rl", 2, HERE, "num_steps=2", f"data_path={typed.rows('train')}", *turns)
    assert (job["spec"]["rollout"]["max_turns"], job["spec"]["validation"]) == (2, None)


@pytest.mark.nightly
async def test_gomoku_on_its_server(typed: Typed) -> None:
    options = "--board_size", "5", "--max_total_steps", "3", "--shards", "2"
    async with typed.server("opentinker.environment.gomoku.gomoku_server", *options) as url:
        endpoint = f"interaction.config.env_endpoint={url}", "interaction.config.env_shards=2"
        await until(partial(asyncio.to_thread, GameStatsClient(shard_of(url, 1)).health_check))
        job = await typed.trained(
            "gomoku_rl", 2, *endpoint, "adv_estimator=grpo"
        )  # nothing is trained here, no turn is
    assert job["spec"]["rollout"]["max_turns"] == 3


@pytest.mark.nightly
async def test_geometry_in_words(typed: Typed) -> None:
    data = typed.rows("geo", images=[])
    job = await typed.trained("geo3k_rl", 2, HERE, f"data_path={data}", f"val_data_path={data}", "tool=true")
    assert job["spec"]["train"]["checkpoint_every"] > 2, "save_freq -1: none but the service's own"


@pytest.mark.nightly
async def test_figures_are_for_models_that_see(typed: Typed) -> None:
    data = typed.rows("figures", images=["data:image/png;base64,iVBORw0KGgouLi4u"])
    code, said = await typed.script("geo3k_rl", HERE, f"data_path={data}", f"val_data_path={data}")
    assert code != 0 and "the messages show images, and" in said


async def test_phones_of_the_checkout_have_one_episode_each(typed: Typed) -> None:
    first = two_free_ports()
    program = str(PHONES / "android_world_server.py")
    servers = [
        await typed.start(program, "--host", "127.0.0.1", "--port", str(first + shard), "--max_steps", "2")
        for shard in range(2)
    ]
    try:
        for shard in range(2):
            await until(partial(asyncio.to_thread, GameStatsClient(f"http://127.0.0.1:{first + shard}").health_check))
        job = await typed.trained(
            "android_world_rl", 2, f"interaction.config.env_port={first}", "interaction.config.env_host=127.0.0.1"
        )
        assert not any(job["ledger"]["failed"].values()), "no phone had two episodes at a time"
    finally:
        for server in servers:
            server.send_signal(signal.SIGTERM)
            await server.communicate()


@pytest.mark.nightly
async def test_phones_without_a_game_of_the_checkout_are_played_by_ours_on_the_library(
    typed: Typed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(typed, "python_path", f"{PYTHONPATH}{os.pathsep}{LIBRARY}")
    shutil.rmtree(typed.checkout / PHONES)
    try:
        options = "--shards", "2", "--max_steps", "2"
        async with typed.server("opentinker.environment.android_world.phone_server", *options) as url:
            endpoint = f"interaction.config.env_endpoint={url}"
            await until(partial(asyncio.to_thread, GameStatsClient(shard_of(url, 1)).health_check))
            job = await typed.trained("android_world_rl", 2, endpoint)
            assert not any(job["ledger"]["failed"].values()), "no phone had two episodes at a time"
    finally:
        shutil.copytree(SCRIPTS / "android_world", typed.checkout / PHONES)


def two_free_ports() -> int:
    """The first of them."""
    return next(port for port in iter(free_port, 0) if can_listen(port + 1))


def can_listen(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


# --- what they leave behind -----------------------------------------------------------------------------------------


async def test_a_script_says_for_what_its_job_waits_and_sigterm_ends_both(typed: Typed, tiny: Path) -> None:
    host = typed.cluster.client.url.replace("127.0.0.1", "localhost")  # names are looked up at exit too
    options = f"tokenizer_path={tiny}", f"data_path={typed.rows('train')}", HERE, f"scheduler_url={host}"
    process = await typed.begin("math_rl", *options)  # num_gpus is the config's 4
    said = await said_by(process, "waits for ")
    assert "GPU" in said and "num_gpus=null trains without" in said
    process.send_signal(signal.SIGTERM)
    code, rest = await ended(process)
    assert code == 128 + signal.SIGTERM and "was cancelled, because its program ended" in rest, rest
    assert (await typed.nothing_is_left())["state"] == "cancelled"


async def test_ctrl_c_ends_the_job_that_trains(typed: Typed) -> None:
    options = f"tokenizer_path={typed.model}", f"data_path={typed.rows('train')}", HERE, "num_gpus=null"
    process = await typed.begin("math_rl", *options, "num_steps=100000", *TOY)
    await said_by(process, "step 2: ")
    process.send_signal(signal.SIGINT)
    code, rest = await ended(process)
    assert code != 0 and "was cancelled, because its program ended" in rest, rest
    assert (await typed.nothing_is_left())["state"] == "cancelled"


@pytest.mark.parametrize("fails", [False, True])
async def test_an_inference_job_ends_with_its_script(typed: Typed, fails: bool) -> None:
    data = "nowhere.jsonl" if fails else typed.rows("asked")
    options = f"model_path={typed.model}", f"data_path={data}", "env_endpoint=null"
    toy = "opentinker.model.chat_template=plain", "opentinker.rollout.engine=toy"
    code, said = await ended(await typed.begin("math_inference", *options, *toy))
    assert (code == 0, "results 4" in said) == (not fails, not fails), said
    assert (await typed.nothing_is_left())["kind"] == "inference"
