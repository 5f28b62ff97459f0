"""Programs in the shape of the published examples, as they are typed, against real services."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import orjson
import pytest
import pytest_asyncio

from opentinker.environment.game_stats_client import GameStatsClient
from opentinker.processes import free_port
from opentinker.shared.answers import Job
from tests.cluster import PYTHONPATH, ROOT, Cluster, toy_cluster
from tests.conftest import until

TOY = (
    "opentinker.model.chat_template=plain",
    "opentinker.rollout.engine=toy",
    "opentinker.train.learner=simulated",
    "opentinker.train.simulated_step_s=0.02",
)
"""What makes small jobs of them: no weights are there to be trained."""
pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]


class Typed:
    def __init__(self, cluster: Cluster, model: Path, folder: Path) -> None:
        self.cluster, self.model, self.folder = cluster, model, folder

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

    async def script(self, name: str, *options: str) -> tuple[int, str]:
        given = [f"scheduler_url={self.cluster.client.url}", f"tokenizer_path={self.model}", *options]
        script = str(ROOT / "tests" / "published_scripts" / f"{name}.py")
        process = await self.start("opentinker.client", script, *given, *TOY)
        said, _ = await process.communicate()
        assert process.returncode is not None
        return process.returncode, said.decode()

    async def start(self, *argv: str) -> asyncio.subprocess.Process:
        env = {**os.environ, "PYTHONPATH": PYTHONPATH, "PYTHONUNBUFFERED": "1"}
        out = asyncio.subprocess.PIPE
        return await asyncio.create_subprocess_exec(
            sys.executable, "-m", *argv, env=env, stdout=out, stderr=asyncio.subprocess.STDOUT
        )

    async def trained(self, name: str, steps: int, *options: str) -> Job:
        """The job that came of it."""
        code, said = await self.script(name, *options)
        assert code == 0 and f"final {steps}.0" in said, said
        job = await self.cluster.client.job((await self.cluster.client.jobs())[0]["id"])
        assert (job["state"], job["step"]) == ("succeeded", steps), said
        assert "mean nothing here" not in said.replace("settings that mean nothing here: tool\n", ""), said
        return job

    @asynccontextmanager
    async def server(self, module: str, *options: str) -> AsyncIterator[str]:
        url = f"http://127.0.0.1:{(port := free_port())}"
        process = await self.start(module, "--host", "127.0.0.1", "--port", str(port), *options)
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


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def typed(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Typed]:
    folder = tmp_path_factory.mktemp("scripts")
    async with toy_cluster(folder / "cluster") as (cluster, model):
        yield Typed(cluster, model, folder)


async def test_mathematics(typed: Typed) -> None:
    options = f"data_path={typed.rows('train')}", f"val_data_path={typed.rows('val')}"
    job = await typed.trained("math_rl", 3, *options, "temperature=1.0")  # the toy knows no other
    assert job["name"] == "math_training"
    assert job["spec"]["validation"]["episodes"] == 2


async def test_mathematics_with_programs(typed: Typed) -> None:
    job = await typed.trained("math_tool_rl", 2, f"data_path={typed.rows('train')}")
    assert (job["spec"]["rollout"]["max_turns"], job["spec"]["validation"]) == (2, None)


async def test_gomoku_on_its_server(typed: Typed) -> None:
    options = "--board-size", "5", "--max-total-steps", "3"
    async with typed.server("opentinker.environment.gomoku.gomoku_server", *options) as url:
        endpoint = f"interaction.config.env_endpoint={url}"
        job = await typed.trained("gomoku_rl", 2, endpoint, "adv_estimator=grpo")  # nothing is trained here, no turn is
    assert job["spec"]["rollout"]["max_turns"] == 3


async def test_geometry_in_words(typed: Typed) -> None:
    data = typed.rows("geo", images=[])
    await typed.trained("geo3k_rl", 2, f"data_path={data}", f"val_data_path={data}", "tool=true")


async def test_figures_are_for_models_that_see(typed: Typed) -> None:
    data = typed.rows("figures", images=["data:image/png;base64,iVBORw0KGgouLi4u"])
    code, said = await typed.script("geo3k_rl", f"data_path={data}", f"val_data_path={data}")
    assert code != 0 and "the messages show images, and" in said
