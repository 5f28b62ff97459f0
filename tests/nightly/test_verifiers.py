"""Environments of the verifiers library, in an interpreter of their own; the library itself in the slow tests."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from uv import find_uv_bin

from opentinker.envs.agent import AgentError
from opentinker.envs.agents.verifiers import Verifiers, VerifiersProcess, _probe
from opentinker.envs.base import Opening, Step, user
from opentinker.services.rollout_worker.episode import Episode
from opentinker.services.rollout_worker.renderer import Renderer
from opentinker.services.rollout_worker.seat_map import SeatMap
from opentinker.shared.types.core import ToolCall
from opentinker.shared.types.env_protocol import Policy
from tests.conftest import until
from tests.samples.verifiers_samples import write_package, write_samples, write_stand_in
from tests.support.agents.agent_talk import Direct, action, texts
from tests.support.cluster import toy_cluster
from tests.support.factories import make_spec, make_ticket
from tests.unit.rollout_worker.scripted_episode import Chars, Script, renderer, say


def environment(model: str = "m", **config: Any) -> Verifiers:
    made = Verifiers(Verifiers.Config(**config))
    made.policy = Policy(model=model, context_length=1000)
    return made


@pytest.fixture
async def stand_in(tmp_path: Path) -> AsyncIterator[dict[str, Any]]:
    """The config of an environment of the stand-in; its processes are ended."""
    yield {"id": "any", "paths": [str(write_stand_in(tmp_path / "lib"))]}
    await end_runners()


async def end_runners() -> None:
    for runner in VerifiersProcess._running.values():
        if runner._loop is asyncio.get_running_loop():
            runner.kill("the test is over")
            await runner._life


async def test_one_process_plays_the_episodes_of_an_environment(stand_in: dict[str, Any]) -> None:
    played = [environment(**stand_in) for _ in range(3)]
    opened = [await one.open(row, 0) for row, one in enumerate(played)]
    assert [texts(opening) for opening in opened] == [[("user", f"{n}=")] for n in range(3)]
    steps = [await one.step(action("yes")) for one in played]
    assert [step.reward for step in steps] == [1.0] * 3
    assert len({step.metrics["pid"] for step in steps}) == 1 and "odd" not in steps[0].metrics
    for one in played:
        await one.close()


@pytest.mark.parametrize(
    ("how", "said"),
    [("load", "the data is not there"), ("crash", "exit status 7"), ("error", "ModelError: it said no")],
)
async def test_what_fails_in_the_library_is_the_episode_s_reason(stand_in: dict[str, Any], how: str, said: str) -> None:
    one = environment(**stand_in, args={"how": how})
    with pytest.raises(AgentError, match=said):
        await one.open(0, 0)
        await one.step(action("yes"))
    await one.close()
    again = environment(**stand_in)  # another process, and nothing the matter
    await again.open(0, 0)
    assert (await again.step(action("yes"))).done
    await again.close()


async def test_an_episode_that_is_given_up_is_cancelled_and_the_others_go_on(stand_in: dict[str, Any]) -> None:
    one, other = environment(**stand_in, args={"how": "hang"}), environment(**stand_in, args={"how": "hang"})
    await one.open(0, 0)
    await other.open(0, 0)
    runner = VerifiersProcess.of(one.config)
    await one.close()
    await until(lambda: len(runner._waiting) == 1)
    assert not runner.gone
    await other.close()


async def test_an_uncancellable_process_is_killed(stand_in: dict[str, Any]) -> None:
    one = environment(**stand_in, args={"how": "block"})
    await one.open(0, 0)
    runner = VerifiersProcess.of(one.config)
    runner.cancel_s = 0.2
    stepping = asyncio.create_task(one.step(action("yes")))
    await until((Path(stand_in["paths"][0]) / "verifiers" / "blocked").exists)
    stepping.cancel()
    await one.close()
    await until(lambda: runner._life.done())
    assert "could not be cancelled" in runner.gone


async def test_a_process_that_nobody_needs_ends(stand_in: dict[str, Any]) -> None:
    one = environment(**stand_in)
    await one.open(0, 0)
    runner = VerifiersProcess.of(one.config)
    runner.idle_s = 0.1
    assert (await one.step(action("yes"))).done
    await one.close()
    await until(lambda: runner._life.done())


def test_an_interpreter_that_is_not_there_is_said_early() -> None:
    with pytest.raises(ValueError, match="no interpreter"):
        Verifiers.Config(id="x", python="/not/there")


def test_what_the_interpreter_lacks_is_said_early(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"verifiers is not installed for .*: `uv pip install"):
        Verifiers.Config(id="owner/copy-hub")
    library = write_stand_in(tmp_path / "lib")
    with pytest.raises(
        ValueError, match=r"'owner/copy-hub@1\.2' is not installed .* `prime env install owner/copy-hub@1\.2`"
    ):
        Verifiers.Config(id="owner/copy-hub@1.2", paths=[str(library)])
    with pytest.raises(ValueError, match="should match pattern"):
        Verifiers.Config(id="owner/../x")
    (library / "copy_hub.py").touch()
    for name in ("owner/copy-hub", "owner/copy-hub@latest"):
        Verifiers.Config(id=name, paths=[str(library)])
    with pytest.raises(ValueError, match=r"`uv pip install --python .* other-hub`"):
        Verifiers.Config(id="other-hub", paths=[str(library)])
    with pytest.raises(ValueError, match=r"copy-hub is no installed package"):
        Verifiers.Config(id="copy-hub@1.2", paths=[str(library)])


def test_the_check_of_an_interpreter_has_no_credentials_and_an_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENTINKER_NATS_TOKEN", "s3cret")
    own = tmp_path / "python"
    for script, said in (
        (f"env > {tmp_path}/seen; echo '[]'", r"cannot tell what it has installed: \[\]"),
        ("echo broken >&2; exit 1", "cannot tell what it has installed: broken"),
        ("exec yes", r"cannot tell what it has installed: [\ny]+$"),
        ("sleep 600 & wait", "nothing within 1 s"),
    ):
        own.write_text(f"#!/bin/sh\n{script}\n")
        own.chmod(0o755)
        with pytest.raises(ValueError, match=said):
            _probe(str(own), Verifiers.Config.model_construct(id="mine"), within_s=1.0)
    assert "s3cret" not in (tmp_path / "seen").read_text()


# --- the library itself ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_samples(tmp_path_factory.mktemp("verifiers") / "samples")


def installed(tmp_path_factory: pytest.TempPathFactory, version: str) -> str:
    """The interpreter of a virtual environment with that version; its pins clash with ours."""
    place = tmp_path_factory.mktemp(f"verifiers-{version}") / "venv"
    uv = str(find_uv_bin())
    subprocess.run([uv, "venv", "--quiet", "--python", sys.executable, str(place)], check=True)
    python = str(place / "bin" / "python")
    subprocess.run([uv, "pip", "install", "--quiet", "--python", python, f"verifiers=={version}"], check=True)
    return python


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory, samples: Path) -> dict[str, Any]:
    return {"id": "copy_old", "python": installed(tmp_path_factory, "0.1.14"), "paths": [str(samples)]}


@pytest.fixture(scope="module")
def new(tmp_path_factory: pytest.TempPathFactory, samples: Path) -> dict[str, Any]:
    agent = {"harness": {"id": "null"}}
    python = installed(tmp_path_factory, "0.4.0")
    return {"id": "copy_new", "python": python, "paths": [str(samples)], "args": {"agent": agent}}


@pytest.fixture(params=["old", "new"])
def hub(request: pytest.FixtureRequest, samples: Path, tmp_path: Path) -> dict[str, Any]:
    """A package of the Environments Hub, installed beside that version of the library."""
    config = request.getfixturevalue(request.param)
    source = (samples / f"{config['id']}.py").read_text()
    package = write_package(tmp_path / "copy-hub", source)
    command = [str(find_uv_bin()), "pip", "install", "--quiet", "--python", config["python"], str(package)]
    subprocess.run(command, check=True)
    return {"python": config["python"], "args": config.get("args", {})}


def test_packages_of_the_hub_are_found_by_name(hub: dict[str, Any]) -> None:
    for name in ("copy-hub", "copy_hub", "owner/copy-hub", "owner/copy-hub@1.2"):
        Verifiers.Config(id=name, **hub)
    with pytest.raises(
        ValueError, match=r"copy-hub is 1\.2 for .*: install it with `prime env install owner/copy-hub@1\.3`"
    ):
        Verifiers.Config(id="owner/copy-hub@1.3", **hub)


async def test_packages_of_the_hub_are_played(hub: dict[str, Any]) -> None:
    try:
        (single,) = await played(environment(id="owner/copy-hub@1.2", **hub), "1$")
        assert single.reward == 1.0
    finally:
        await end_runners()


async def played(one: Verifiers, *answers: str, row: int = 1) -> list[Any]:
    """Its trajectories, in the rollout worker's hands, with these answers of the policy."""
    engine = Script([say(answer) for answer in answers])
    job = make_spec(rollout__max_turns=9, rollout__max_tokens=50, rollout__episode_timeout_s=500.0)
    episode = Episode(job, make_ticket(row=row), 0, SeatMap.single(job, engine, renderer()), Direct(one))  # type: ignore[arg-type]
    found = await episode.run()
    for trajectory in found:
        trajectory.check()
    return found


async def trains(tmp_path: Path, config: dict[str, Any], **rollout: Any) -> None:
    """A job through the real services, of the toy engine, ends with all its groups trained."""
    async with toy_cluster(tmp_path) as (cluster, model):
        spec = make_spec(
            model={"base": str(model)},
            environment={"name": "verifiers", "config": config},
            rollout={
                "engine": "toy", "toy": {"skill": 0.5}, "max_tokens": 32, "max_tokens_per_turn": 8,
                "episode_timeout_s": 500.0, **rollout,
            },
            train={"learner": "simulated", "steps": 2, "simulated_step_s": 0.0},
        )  # fmt: skip
        job = await cluster.run(spec, 500.0)
        ledger = await cluster.ledger(job)
        assert ledger.trained == 4 and ledger.failed == {}
        points = await cluster.client.metrics(job, source="trainer")
        assert [point["step"] for point in points] == [1, 2]
        assert sum(point["values"]["stop/eos"] for point in points) > 0


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_environments_of_verifiers_0_1_train(old: dict[str, Any], tmp_path: Path) -> None:
    try:
        (single,) = await played(environment(**old), "1$")
        text = "<s>copy $\n<u>1=$\n<a>1$"
        assert single.ids.tolist() == Chars().encode(text)
        assert "".join(c for c, m in zip(text, single.mask, strict=True) if m) == "1$"
        assert (single.reward, single.metrics["right"]) == (1.0, 1.0)
        (multi,) = await played(environment(**old, args={"kind": "multi"}), "9$", "1$")
        text = "<u>1=$\n<a>9$\n<u>again=$\n<a>1$"
        assert multi.ids.tolist() == Chars().encode(text)
        assert "".join(c for c, m in zip(text, multi.mask, strict=True) if m) == "9$1$"
        assert multi.logprobs[multi.mask == 1].tolist() == [-0.5] * 4
        await uses_tools(environment(**old, args={"kind": "tool"}))
    finally:
        await end_runners()
    await trains(tmp_path, {**old, "args": {"kind": "multi"}}, max_turns=3)


async def uses_tools(one: Verifiers) -> None:
    opened: Opening | Step = await one.open(3, 0)
    assert [tool.name for tool in opened.tools] == ["add"]
    call = ToolCall(id="t0", name="add", arguments={"a": 1, "b": 2})
    answered = await one.step(action("...", tool_calls=[call]))
    assert (answered.stream, texts(answered)) == (opened.stream, [("tool", "3")])
    last = await one.step(action("3", 1))
    assert (last.done, last.reward, last.metrics["add_calls"]) == (True, 1.0, 1.0)
    await one.close()


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_environments_of_verifiers_0_4_train(new: dict[str, Any], tiny: Path, tmp_path: Path) -> None:
    try:
        (chat,) = await played(environment(**new), "1$")
        assert chat.ids.tolist() == Chars().encode("<u>1=$\n<a>1$")
        assert chat.mask.tolist() == [0] * (len(chat.ids) - 2) + [1, 1]
        assert (chat.reward, chat.metrics["right"]) == (1.0, 1.0)
        prompt = Renderer.load(str(tiny), "model").prompt([user("1=")])
        (tokens,) = await played(environment(str(tiny), **new, client="tokens"), "1$")
        assert tokens.ids.tolist() == [*prompt, *Chars().encode("1$")]
        assert tokens.mask.tolist() == [0] * len(prompt) + [1, 1]
        assert tokens.logprobs.tolist() == [0.0] * len(prompt) + [-0.5] * 2
    finally:
        await end_runners()
    await trains(tmp_path, new)
