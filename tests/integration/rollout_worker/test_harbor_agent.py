"""The user's own agent in the sandbox of a Harbor task: it reaches the model alone, and its work is graded."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from opentinker.envs.agent import AgentError
from opentinker.envs.base import MODULES, Action, Step, Unreachable
from opentinker.envs.harbor.agent import HarborAgent
from opentinker.envs.harbor.box import Answer, BoxLost
from opentinker.envs.harbor.boxes import boxes, close_boxes
from opentinker.envs.harbor.task import MAX_FILES
from opentinker.envs.harbor.workspace import Workspace
from opentinker.envs.registry import check
from opentinker.local.harbor_check import add_tasks
from opentinker.shared.types.core import StopReason
from opentinker.shared.types.env_protocol import Policy
from opentinker.shared.types.errors import SpecError
from tests.conftest import until
from tests.support.harbor_tasks import AGENT, write_task

RIGHT = "awk '{s += $2} END {print s}' data.txt > answer.txt"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The set `good`, one task, and the agent."""
    place = tmp_path_factory.mktemp("harbor")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OPENTINKER_DATA_DIR", str(place / ("long-" * 20) / "data"))
        write_task(place / "good" / "task-0", 0)
        add_tasks(place / "good", None, lambda _: None)
        (place / "agent").mkdir()
        (place / "agent" / "main.sh").write_text(AGENT)
        yield place


@pytest.fixture
async def sandboxes(place: Path) -> AsyncIterator[None]:
    yield
    await close_boxes()


def made(place: Path, command: str = "bash /agent/main.sh", **config: Any) -> HarborAgent:
    settings = {"tasks": "good", "command": command, "files": str(place / "agent"), **config}
    agent = HarborAgent(HarborAgent.Config.model_validate(settings, context={MODULES: True}))
    agent.policy = Policy(model="policy", context_length=4096)
    return agent


async def played(agent: HarborAgent, text: str) -> tuple[str, Step]:
    """What the agent asks first, and the step after this answer."""
    try:
        opening = await agent.open(0, 7)
        return opening.messages[-1].text, await agent.step(Action(text=text, stop=StopReason.EOS, turn=0))
    finally:
        await agent.close()


@pytest.mark.usefixtures("sandboxes")
async def test_an_agent_in_the_sandbox_asks_the_model_and_its_files_are_graded(place: Path) -> None:
    asked, step = await played(made(place), RIGHT)
    assert "Write the sum of the second column to /app/answer.txt" in asked
    assert (step.reward, step.done, step.metrics["exact"], step.metrics["agent_failed"]) == (1.0, True, 1.0, 0.0)
    assert all(step.metrics[f"time/{phase}_s"] > 0 for phase in ("start", "agent", "verify"))
    _, step = await played(made(place), "echo $OPENTINKER_SEED $EXTRA > answer.txt; exit 3")
    assert (step.reward, step.metrics["agent_failed"]) == (0.0, 1.0), "wrong files are worth 0, and no error"


@pytest.mark.usefixtures("sandboxes")
async def test_a_sandbox_that_is_lost_is_no_fault_of_the_agent(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    agent = made(place)
    asked = Workspace.ask

    async def ask(self: Workspace, op: str, **arguments: Any) -> Answer:
        if op == "write":
            raise BoxLost("it ended")
        return await asked(self, op, **arguments)

    monkeypatch.setattr(Workspace, "ask", ask)
    with pytest.raises(Unreachable, match="was lost: it ended"):
        await played(agent, RIGHT)


@pytest.mark.usefixtures("sandboxes")
async def test_an_agent_whose_sandbox_this_machine_kills_has_no_reward(place: Path) -> None:
    agent = made(place)

    answer = Action(text="touch begun; sleep 1000", stop=StopReason.EOS, turn=0)
    try:
        await agent.open(0, 7)
        assert agent.episode is not None
        box, episodes = await agent.episode.workspace.started(), (await boxes()).episodes
        stepping = asyncio.ensure_future(agent.step(answer))
        await until(lambda: any(episodes.glob("*/*/upper/**/begun")))
        os.kill(box.process.pid, signal.SIGKILL)
        with pytest.raises(Unreachable, match="was lost"):
            await stepping
    finally:
        await agent.close()


@pytest.mark.usefixtures("sandboxes")
async def test_the_agent_sees_no_tests_and_no_network_and_may_kill_itself(place: Path) -> None:
    spying = "ls /tests /run/opentinker/shared/tests && cp /tests/expected answer.txt"
    assert (await played(made(place), spying))[1].reward == 0.0
    _, step = await played(made(place), f"{RIGHT}; kill -9 -1")
    assert (step.reward, step.metrics["agent_failed"]) == (1.0, 1.0), "its files are graded whoever ended it"
    _, step = await played(made(place), f"(exec 3<>/dev/tcp/1.1.1.1/80) 2>/dev/null || {RIGHT}")
    assert step.reward == 1.0


@pytest.mark.usefixtures("sandboxes")
async def test_an_agent_that_never_asks_fails_its_episode_with_its_own_words(place: Path) -> None:
    with pytest.raises(AgentError, match=r"exit status 127 before it asked the model: .*nonesuch"):
        await played(made(place, "nonesuch"), "")
    with pytest.raises(AgentError, match="without having asked"):
        await played(made(place, "true"), "")
    left = (await boxes()).episodes
    assert len(list(left.iterdir())) <= 4, "only warm sandboxes are left"


@pytest.mark.usefixtures("place")
def test_what_cannot_be_played_is_refused_at_submission(tmp_path: Path) -> None:
    for config, words in (
        ({"tasks": "none"}, "no set of Harbor tasks is named"),
        ({"tasks": "good", "files": str(tmp_path / "none")}, "no directory"),
        ({"tasks": "good", "command": ""}, "command"),
    ):
        with pytest.raises(SpecError, match=words):
            check("harbor_agent", {"command": "x", **config}, modules=True)
    check("harbor_agent", {"tasks": "good", "command": "x"})
    (tmp_path / "many").mkdir()
    for number in range(MAX_FILES + 1):
        (tmp_path / "many" / str(number)).touch()
    with pytest.raises(SpecError, match="more than 2000 files"):
        check("harbor_agent", {"tasks": "good", "command": "x", "files": str(tmp_path / "many")}, modules=True)
    for files in (tmp_path, tmp_path / "none"):  # whether it exists is nobody's business either
        with pytest.raises(SpecError, match="is off here"):
            check("harbor_agent", {"tasks": "good", "command": "x", "files": str(files)})
