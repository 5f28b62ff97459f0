"""Harbor tasks in real sandboxes: what the policy can do, what it cannot see, and what becomes of the reward."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
import os
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from opentinker.cli import app
from opentinker.envs.base import Action, play_gold
from opentinker.envs.harbor.box import BoxLost
from opentinker.envs.harbor.boxes import Boxes, boxes, close_boxes
from opentinker.envs.harbor.environment import Harbor
from opentinker.envs.harbor.library import load_set, load_task
from opentinker.envs.harbor.verifier import VerifierFailed, verify
from opentinker.envs.harbor.workspace import Workspace
from opentinker.envs.runtime.env_runner import LocalEnvRunner
from opentinker.envs.tools import ToolError, ToolFailed
from opentinker.local.harbor_check import add_tasks
from opentinker.shared.settings_sources import load_settings
from opentinker.shared.types.core import Ending, StopReason
from tests.conftest import until
from tests.support.harbor_tasks import TASK_TOML, write_task
from tests.support.playing import opening, step

SILENT = Action(text="Done.", stop=StopReason.EOS, turn=0)
NO_REWARD = "#!/bin/bash\necho nothing to say\n"
GENEROUS = "#!/bin/bash\ncat /app/flag; echo 1 > /logs/verifier/reward.txt\n"


@pytest.fixture(scope="module", autouse=True)
def added(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The sets `good` (tasks 0 and 7) and `bad`, on a server of their own."""
    place = tmp_path_factory.mktemp("harbor")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OPENTINKER_DATA_DIR", str(place / "data"))
        for number in (0, 7):
            write_task(place / "good" / f"task-{number}", number)
        for name, script in (("no-reward", NO_REWARD), ("generous", GENEROUS)):
            folder = write_task(place / "bad" / name)
            (folder / "tests/test.sh").write_text(script)
            (folder / "environment/Dockerfile").write_text("FROM python:3.12\n")
            (folder / "task.toml").write_text(TASK_TOML.replace("storage_mb = 256", "storage_mb = 8"))
        assert add_tasks(place / "good", None, lambda _: None).built == 2
        assert add_tasks(place / "bad", None, lambda _: None).built == 1, "both have the same image"
        yield place


@pytest.fixture
async def plane() -> AsyncIterator[Boxes]:
    yield await boxes()
    await close_boxes()


async def workspace_of(plane: Boxes, name: str, at: int = 0) -> Workspace:
    entry = load_set(plane.home, name).tasks[at]
    task, image = load_task(plane.home, load_settings(), entry)
    return await plane.take(image, task.config.environment)


async def opened(tasks: str = "good") -> Harbor:
    environment = Harbor(Harbor.Config(tasks=tasks))
    await environment.open(0, 0)
    return environment


async def test_the_solution_gets_1_and_doing_nothing_0(plane: Boxes) -> None:
    for row in (0, 1):
        played = await play_gold(Harbor(Harbor.Config(tasks="good")), row, 0)
        assert played.reward == 1.0 and played.metrics["exact"] == 1.0, played.messages
        assert all(played.metrics[f"time/{phase}_s"] > 0 for phase in ("start", "tool", "verify"))
    silent = await opened()
    step = await silent.step(SILENT)
    assert (step.reward, step.done) == (0.0, True)
    await silent.close()
    await until(lambda: len(list(plane.episodes.iterdir())) <= 2)  # those that are warm


async def test_the_terminal_keeps_its_state_and_its_limits(plane: Boxes) -> None:
    environment = await opened()
    assert "data.txt" in await environment.bash("ls; mkdir sub; cd sub; export A=kept")
    assert await environment.bash('pwd; echo "$A $TASK"') == "/app/sub\nkept task-0\n"
    with pytest.raises(ToolFailed, match=r"oops\n\n.exit status 3"):
        await environment.bash("echo oops >&2; exit 3")
    with pytest.raises(ToolFailed, match=r"began\n\n.ended: it took longer than 0.5 s"):
        await environment.bash("echo began; sleep 1000", timeout_s=0.5)
    long = await environment.bash("echo first; seq 1000000; echo last")
    assert long.startswith("first") and long.endswith("last\n") and len(long) < 21_000 and "left out" in long
    assert await environment.write_file("notes/a.txt", "one\ntwo\nthree\n") == "written"
    assert await environment.edit_file("/app/sub/notes/a.txt", "two", "2") == "replaced"
    assert await environment.read_file("notes/a.txt", 2, 1) == "2\n"
    await environment.bash("seq 20000 > long")
    assert len(await environment.read_file("long", 1, 20000)) == 18_000
    assert await environment.edit_file("long", "\n20000\n", "\nlast\n") == "replaced"
    with pytest.raises(ToolError, match=r"occurs 0 times"):
        await environment.edit_file("notes/a.txt", "two", "3")
    with pytest.raises(ToolError, match=r"No such file"):
        await environment.read_file("nothing")
    await environment.close()


async def test_the_policy_sees_no_tests_and_reaches_nothing_of_the_machine(plane: Boxes, added: Path) -> None:
    environment = await opened()
    script = f"""
    ls /tests /solution /logs/verifier {added} /root/.ssh 2>&1 | grep -vc 'No such file'
    echo > /usr/bin/new || echo read-only
    (exec 3<>/dev/tcp/1.1.1.1/80) 2>/dev/null || echo no network
    grep CapEff /proc/self/status; id -u; cat /etc/shadow 2>/dev/null || echo no shadow
    find /app /etc /home /logs /mnt /opt /root /run/opentinker/tests /srv /tmp /var -name test.sh 2>/dev/null | wc -l
    """
    told = (await environment.bash(script)).split("\n")
    assert told[0] == "0" and "read-only" in told and "no network" in told and "no shadow" in told, told
    assert "CapEff:\t0000000000000000" in told and told[-2] == "0", told
    await environment.close()


async def test_a_sandbox_that_the_policy_kills_starts_again_with_its_files(plane: Boxes) -> None:
    environment = await opened()
    with pytest.raises(ToolError, match=r"the sandbox was ended.*its files are still there"):
        await environment.bash("echo kept > kept; kill -9 -1; sleep 100")
    assert await environment.bash("cat kept; pwd") == "kept\n/app\n"
    assert (await environment.step(SILENT)).reward == 0.0
    await environment.close()


async def test_more_disk_than_the_task_has_ends_the_sandbox_not_the_episode(plane: Boxes) -> None:
    workspace = await workspace_of(plane, "bad")
    with pytest.raises(BoxLost, match=r"at most 8 .storage_mb"):
        await workspace.run("for i in 1 2 3 4; do head -c 4000000 /dev/urandom > $i; done; sleep 1000", 60.0)
    assert (await workspace.run("rm 1 2 3 4; ls", 60.0)).status == 0
    await workspace.close()


async def test_commands_too_short_for_a_look_are_looked_at_too_and_what_is_too_much_does_not_grow(plane: Boxes) -> None:
    workspace = await workspace_of(plane, "bad")
    write = "head -c 4000000 /dev/urandom > {}; "
    await workspace.run("".join(write.format(name) for name in "abc"), 60.0)
    await until(lambda: not workspace.is_running)
    for command in ("true", write.format("d") + "sleep 1000", write.format("d") + "sleep 1000"):
        with pytest.raises(BoxLost, match=r"it had written 1\d MB; at most 8"):  # 12 MB may stay, no more
            await workspace.run(command, 60.0)
    await workspace.run("rm b c d; sleep 1.5", 60.0)
    with pytest.raises(BoxLost, match="at most 8"):
        await workspace.run(write.format("b") + write.format("c") + "sleep 1000", 60.0)
    await workspace.close()


async def test_what_a_program_in_the_background_writes_between_commands_is_looked_at_too(plane: Boxes) -> None:
    environment = await opened("bad")
    await environment.bash("(for i in $(seq 60); do head -c 1000000 /dev/urandom > log$i; sleep 0.05; done) &")
    assert environment.episode is not None
    workspace = environment.episode.workspace
    await until(lambda: not workspace.is_running)
    held = workspace.written() >> 20
    with pytest.raises(ToolError, match=r"ended: it had written \d+ MB; at most 8 .*its processes not"):
        await environment.bash("ls")
    assert "log" in await environment.bash("ls"), "it is told once"
    assert 8 <= held < 200
    await environment.close()


async def test_a_sandbox_that_this_machine_kills_is_told_from_one_that_ends_itself(plane: Boxes) -> None:
    workspace = await workspace_of(plane, "good")
    box = await workspace.started()
    running = asyncio.ensure_future(workspace.run("touch begun; sleep 1000", 60.0))
    await until(lambda: any(plane.episodes.glob("*/*/upper/**/begun")))
    os.kill(box.process.pid, signal.SIGKILL)
    with pytest.raises(BoxLost) as lost:
        await running
    assert lost.value.by_host
    with pytest.raises(BoxLost) as lost:
        await workspace.run("kill -9 -1; sleep 1000", 60.0)
    assert not lost.value.by_host
    await workspace.close()


async def test_a_start_that_is_given_up_leaves_nothing(plane: Boxes) -> None:
    entry = load_set(plane.home, "good").tasks[0]
    task, image = load_task(plane.home, load_settings(), entry)
    before = set(plane.episodes.iterdir())
    for wait_s in (0.0, 0.001, 0.01, 0.05):
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await (await plane.start(image, task.config.environment)).close()
    assert set(plane.episodes.iterdir()) <= before


async def test_forks_share_their_past_and_nothing_else(plane: Boxes) -> None:
    first = await opened()
    await first.bash("echo both > past; rm data.txt; export A=1; cd /srv")
    second = copy.deepcopy(first)
    assert await second.bash('cat /app/past; echo "$A"; pwd; ls /app') == "both\n1\n/srv\npast\nsorted.txt\n"
    await second.bash("echo mine > /app/own")
    await first.bash("awk '{s += $2} END {print s}' /app/sorted.txt > /app/answer.txt")
    assert "own" not in await first.bash("ls /app")
    assert [(await one.step(SILENT)).reward for one in (first, second)] == [1.0, 0.0]
    await asyncio.gather(first.close(), second.close())


async def test_rewards_come_from_the_tests_alone_and_a_failed_verifier_voids_the_episode(plane: Boxes) -> None:
    settings = load_settings()
    (silent, _), (generous, _) = (
        load_task(plane.home, settings, one) for one in load_set(plane.home, "bad").tasks[::-1]
    )
    assert [silent.name, generous.name] == ["no-reward", "generous"]
    workspace = await workspace_of(plane, "bad")
    forged = "mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt; mkdir /tests; echo exit > /tests/test.sh"
    await workspace.run(f"{forged}; export PATH=/nowhere", 60.0)
    with pytest.raises(VerifierFailed, match=r"the tests wrote neither .*nothing to say"):
        await verify(workspace, silent)
    assert (await verify(workspace, generous))[0] == 1.0
    await workspace.close()
    player = LocalEnvRunner("here", modules=False)
    await player.open(opening("harbor", row=1, deadline_s=600.0, tasks="bad"))
    reply = await player.step(step(0, "Done."))
    await player.close()
    assert (reply.failure, reply.reward) == (Ending.ENV_ERROR, 0.0) and "wrote neither" in reply.error, reply


async def test_a_second_episode_finds_its_sandbox_started(plane: Boxes) -> None:
    entry = load_set(plane.home, "good").tasks[0]
    task, image = load_task(plane.home, load_settings(), entry)
    machine = task.config.environment
    first = await plane.take(image, machine)
    await until(lambda: plane.has_warm(image, machine))
    await first.run("touch /app/mine", 60.0)
    second = await plane.take(image, machine)
    assert "mine" not in (await second.run("ls /app", 60.0)).output
    await asyncio.gather(first.close(), second.close())


def test_a_check_finds_tasks_that_cannot_be_trained() -> None:
    ran = CliRunner().invoke(app, ["env", "check", "harbor:bad", "--json"])
    report = json.loads(ran.stdout)
    generous, silent = report["tasks"]
    assert ran.exit_code == 1
    assert generous["errors"] == ["doing nothing gets 1, not 0"], generous
    assert (generous["solution"], generous["equal_resets"], generous["leaked"]) == (1.0, None, 0), "WORKDIR is /"
    assert generous["verifier_rewards"] == [1.0] * 3
    assert any("environment error, never reward 0" in error for error in silent["errors"]) and silent["nothing"] is None


def test_what_cannot_be_added_is_refused_in_words(tmp_path: Path) -> None:
    folder = write_task(tmp_path / "task")
    (folder / "environment/Dockerfile").write_text("FROM node:22\n")
    for path, words in ((folder, "no root file system is known"), (tmp_path / "none", "there is no")):
        ran = CliRunner().invoke(app, ["env", "add", f"harbor:{path}"])
        assert ran.exit_code != 0 and words in " ".join(ran.output.replace("│", " ").split()) + str(ran.exception)
    (folder / "environment/Dockerfile").write_text("FROM debian\nRUN echo why; false\n")
    ran = CliRunner().invoke(app, ["env", "add", f"harbor:{folder}"])
    assert "RUN ended with status 1 (there is no network): why" in str(ran.exception), ran.output
