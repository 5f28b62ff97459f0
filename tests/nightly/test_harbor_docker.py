"""Harbor tasks in containers of this machine's Docker engine; skipped without one."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import msgspec
import pytest

from opentinker.envs.base import Action
from opentinker.envs.harbor.agent import HarborAgent
from opentinker.envs.harbor.boxes import Boxes, boxes, close_boxes
from opentinker.envs.harbor.docker import DockerRuntime, docker
from opentinker.envs.harbor.library import load_set, load_task
from opentinker.envs.harbor.verifier import verify
from opentinker.envs.harbor.workspace import Workspace
from opentinker.local.harbor_check import add_tasks, check_tasks
from opentinker.shared.settings_sources import load_settings
from opentinker.shared.types.core import StopReason
from opentinker.shared.types.env_protocol import Policy
from opentinker.shared.types.errors import SpecError
from tests.conftest import until
from tests.support.deploy import docker_base
from tests.support.harbor_tasks import AGENT, write_task

pytestmark = [pytest.mark.nightly, pytest.mark.skipif(not docker_base.has_engine(), reason="no Docker engine here")]
DOCKERFILE = """ARG base
FROM {base} AS first
RUN echo built > /srv/built
FROM {base}
ENV TASK=mine PYTHONPATH=/srv/modules
RUN mkdir /srv/modules && echo "raise SystemExit" > /srv/modules/glob.py
HEALTHCHECK --interval=1s CMD touch /srv/checked
WORKDIR /app
COPY --from=first /srv/built ./
COPY data ./
COPY agent.sh /
ENTRYPOINT ["nothing"]
"""
RIGHT = "awk '{s += $2} END {print s}' data.txt > answer.txt"


@pytest.fixture(scope="module", autouse=True)
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    place = tmp_path_factory.mktemp("harbor")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OPENTINKER_DATA_DIR", str(place / "data"))
        patch.setenv("OPENTINKER_HARBOR_SANDBOX", "docker")
        folder = write_task(place / "own" / "task-0", 0)
        (folder / "environment/Dockerfile").write_text(DOCKERFILE.format(base=docker_base.make()))
        (folder / "environment/agent.sh").write_text(AGENT)
        added = add_tasks(place / "own", None, lambda _: None)
        assert added.built == 1 and add_tasks(place / "own", None, lambda _: None).built == 0
        yield place
        image = f"opentinker-harbor:{added.set.tasks[0].image}"
        subprocess.run(["docker", "rmi", "--force", image], capture_output=True, check=False)


@pytest.fixture
async def plane() -> AsyncIterator[Boxes]:
    yield await boxes()
    await close_boxes()
    assert listed("ps", "--all", "--filter", "name=harbor-") == "" and "opentinker-harbor-fork" not in listed("images")


def listed(*words: str) -> str:
    return subprocess.run(["docker", *words, "--quiet"] if words[0] == "ps" else ["docker", *words],
                          capture_output=True, text=True, check=True).stdout  # fmt: skip


async def taken(plane: Boxes) -> Workspace:
    task, image = load_task(plane.home, load_settings(), load_set(plane.home, "own").tasks[0])
    return await plane.take(image, task.config.environment)


def test_a_task_is_checked_as_elsewhere() -> None:
    (report,) = check_tasks("own").tasks
    assert report.errors == [] and (report.solution, report.nothing, report.equal_resets) == (1.0, 0.0, 5)
    assert report.verifier_rewards == [1.0] * 3 and report.warm_start_ms is not None


async def test_a_container_has_limits_no_network_and_its_files_after_a_kill(plane: Boxes) -> None:
    workspace = await taken(plane)
    assert (await workspace.run("ls /srv; echo $PYTHONPATH", 60.0)).output == "modules\n/srv/modules\n"
    told = (await workspace.run("cat built; echo $TASK; id -u; cd /srv; export A=kept; sleep 1000 &", 60.0)).output
    assert told == "built\nmine\n0\n"
    assert (await workspace.run('pwd; echo "$A"', 60.0)).output == "/srv\nkept\n"
    assert (await workspace.run("echo > /dev/tcp/1.1.1.1/80", 60.0)).status != 0
    assert (await workspace.ask("processes")).count == 1
    huge = await workspace.run("x=$(head -c 2000000000 /dev/zero | tr '\\0' a); echo ${#x}", 120.0)
    assert huge.status == 137 or "2000000000" not in huge.output, huge
    await workspace.run("echo kept > /app/kept", 60.0)
    await workspace.stop()
    assert not workspace.is_running and (await workspace.run("cat /app/kept", 60.0)).output == "kept\n"
    await workspace.close()


async def test_variables_of_a_task_belong_to_its_image_and_a_client_that_dies_ends_its_container(plane: Boxes) -> None:
    task, image = load_task(plane.home, load_settings(), load_set(plane.home, "own").tasks[0])
    environment = task.config.environment.model_copy(update={"env": {"A": "b"}})
    other = msgspec.structs.replace(task, config=task.config.model_copy(update={"environment": environment}))
    assert isinstance(plane.runtime, DockerRuntime)
    found, was_built = await plane.runtime.build(other)
    assert was_built and found.shell.variables["A"] == "b" and "A" not in image.shell.variables
    await asyncio.to_thread(docker, "rmi", "--force", found.docker)
    assert await plane.runtime.build(other) == (found, False), "and has its name again"
    workspace = await plane.start(found, environment)
    os.kill((await workspace.started()).process.pid, signal.SIGKILL)
    await workspace.stop()
    assert listed("ps", "--filter", f"ancestor={found.docker}") == ""
    await workspace.close()
    await asyncio.to_thread(docker, "rmi", "--force", found.docker)


async def test_forks_share_their_past_and_their_images_go_with_them(plane: Boxes) -> None:
    first = await taken(plane)
    await first.run("echo both > past; cd /srv", 60.0)
    second = await asyncio.to_thread(first.fork)
    third = await asyncio.to_thread(second.fork)
    assert (await third.run("cat /app/past; pwd; echo mine > /app/own", 60.0)).output == "both\n/srv\n"
    assert "own" not in (await second.run("ls /app", 60.0)).output
    await asyncio.gather(first.close(), second.close())
    await third.close()


async def test_the_tests_run_after_the_agents_processes_and_are_not_seen_before(plane: Boxes) -> None:
    workspace = await taken(plane)
    task, _ = load_task(plane.home, load_settings(), load_set(plane.home, "own").tasks[0])
    hidden = await workspace.run("ls /tests /run/opentinker/shared; " + RIGHT, 60.0)
    assert "expected" not in hidden.output
    assert (await verify(workspace, task))[0] == 1.0
    await workspace.close()


async def test_an_agent_of_the_image_asks_the_model(plane: Boxes) -> None:
    agent = HarborAgent(HarborAgent.Config(tasks="own", command="bash /agent.sh"))
    agent.policy = Policy(model="policy", context_length=4096)
    opening = await agent.open(0, 0)
    assert "the sum of the second column" in opening.messages[-1].text
    step = await agent.step(Action(text=RIGHT, stop=StopReason.EOS, turn=0))
    assert (step.reward, step.done) == (1.0, True)
    await agent.close()
    await until(lambda: len(list(plane.episodes.iterdir())) <= 2)


def test_a_build_that_fails_is_told_and_a_set_belongs_to_its_kind_of_sandbox(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_task(tmp_path / "broken")
    (folder / "environment/Dockerfile").write_text(f"FROM {docker_base.make()}\nRUN echo why; false\n")
    with pytest.raises(SpecError, match="why"):
        add_tasks(folder, None, lambda _: None)
    (folder / "environment/Dockerfile").write_text(f"FROM {docker_base.make()}\nVOLUME /srv\n")
    with pytest.raises(SpecError, match="declares volumes"):
        add_tasks(folder, None, lambda _: None)
    monkeypatch.setenv("OPENTINKER_HARBOR_SANDBOX", "bubblewrap")
    with pytest.raises(ValueError, match="added with another harbor_sandbox"):
        HarborAgent.rehearse(HarborAgent.Config(tasks="own", command="x"))
