"""`opentinker validate`: everything that can be seen of a job before it runs, by a server or without one."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import orjson
import pytest

from opentinker import AsyncClient, inspecting
from opentinker.services.scheduler import validating
from opentinker.shared.bus import Bus
from opentinker.shared.sessions import EnvCheckReply, SessionReply
from opentinker.shared.spec import JobSpec
from opentinker.shared.store import Store
from opentinker.shared.subjects import ENV_CHECK, ENV_CLOSE, ENV_OPEN, ENV_STEP
from opentinker.shared.types import Ending, Message
from tests.conftest import Server
from tests.factories import make_spec
from tests.scheduling import Workers
from tests.test_cli import opentinker


def results(checks: list[dict[str, Any]]) -> dict[str, str]:
    return {check["what"]: check["result"] for check in checks}


def spec_of(model: Path, **changes: Any) -> JobSpec:
    return make_spec(model__base=str(model), **changes)


# --- here -----------------------------------------------------------------------------------------------------------


async def test_model_prompt_and_an_episode_are_looked_at_here(tiny: Path) -> None:
    checks = await inspecting.inspect(spec_of(tiny))
    assert results(checks) == {"model": "ok", "episode": "ok", "prompt": "ok"}
    assert "Qwen3ForCausalLM" in checks[0]["found"]


async def test_a_prompt_that_does_not_fit_is_said_before_any_job(tiny: Path) -> None:
    checks = await inspecting.inspect(spec_of(tiny, rollout__context_length=3))
    (prompt,) = (check for check in checks if check["what"] == "prompt")
    assert prompt["result"] == "bad" and "rollout.context_length, which is 3" in prompt["hint"]


async def test_models_that_cannot_be_loaded_are_said(tiny: Path, tmp_path: Path) -> None:
    assert results(inspecting.model(str(tmp_path / "nothing"))) == {"model": "bad"}
    assert results(inspecting.model("some/model")) == {"model": "note"}
    (tmp_path / "config.json").write_text("{}")
    (without,) = inspecting.model(str(tmp_path))
    assert without["result"] == "bad" and "safetensors" in without["found"]
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((tiny / name).read_bytes())
    config = orjson.loads((tmp_path / "tokenizer_config.json").read_bytes())
    config.pop("chat_template", None)
    (tmp_path / "tokenizer_config.json").write_bytes(orjson.dumps(config))
    assert results(inspecting.tokenizer(spec_of(tmp_path), [])) == {"chat template": "bad"}
    assert results(inspecting.tokenizer(spec_of(tmp_path, model__chat_template="plain"), [])) == {"prompt": "ok"}
    (tmp_path / "chat_template.jinja").write_text("{{ raise_exception('no system role here') }}")
    (refused,) = inspecting.tokenizer(spec_of(tmp_path), [Message(role="system", content="x")])
    assert refused["result"] == "bad" and "no system role here" in refused["found"]


async def test_rows_without_the_columns_are_said_with_their_line(tmp_path: Path, tiny: Path) -> None:
    path = tmp_path / "rows.jsonl"
    good = {"prompt": "a", "completion": "b"}
    data = {
        "kind": "sft",
        "model": {"base": str(tiny)},
        "name": "x",
        "train": {"steps": 2},
        "data": {"path": str(path)},
    }
    path.write_bytes(orjson.dumps(good) + b"\n" + orjson.dumps(good) + b"\n")
    assert results(await inspecting.inspect(JobSpec.model_validate(data)))["rows"] == "ok"
    path.write_bytes(orjson.dumps(good) + b"\n" + orjson.dumps({"question": "a"}) + b"\n")
    (rows,) = (check for check in await inspecting.inspect(JobSpec.model_validate(data)) if check["what"] == "rows")
    assert rows["result"] == "bad" and "line 2" in rows["found"]


def test_the_command_looks_here_where_no_server_runs(tiny: Path, tmp_path: Path) -> None:
    path = tmp_path / "job.json"
    path.write_bytes(orjson.dumps(spec_of(tiny).model_dump(mode="json", exclude_defaults=True)))
    done = opentinker("validate", path, "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = orjson.loads(done.stdout)
    assert found["valid"] and found["server"] is None and results(found["checks"])["episode"] == "ok"
    path.write_bytes(orjson.dumps(spec_of(tmp_path / "no").model_dump(mode="json", exclude_defaults=True)))
    wrong = opentinker("validate", path, "--here", cwd=tmp_path)
    assert wrong.returncode == 2 and "config.json and safetensors" in wrong.stdout and "ok: " not in wrong.stdout


# --- by a server ----------------------------------------------------------------------------------------------------


class Environment:
    """An env worker of one session, by hand."""

    def __init__(self, bus: Bus, fails_at: int = 9) -> None:
        self.bus, self.fails_at, self.said = bus, fails_at, list[str]()
        self.closed = asyncio.Event()

    async def start(self) -> Environment:
        await self.bus.serve(ENV_CHECK, self._check)
        await self.bus.serve(ENV_OPEN, self._open, environment="copy_digits")
        await self.bus.serve(ENV_STEP, self._step, worker="env-hand")
        await self.bus.serve(ENV_CLOSE, self._close, worker="env-hand")
        return self

    async def _check(self, _: Any) -> EnvCheckReply:
        return EnvCheckReply(errors=[])

    async def _open(self, _: Any) -> SessionReply:
        return SessionReply(worker="env-hand", messages=[Message(role="user", content="7=")])

    async def _step(self, asked: Any) -> SessionReply:
        self.said.append(asked.text)
        if asked.turn >= self.fails_at:
            return SessionReply(worker="env-hand", failure=Ending.ENV_ERROR, error="ValueError: no such digit")
        return SessionReply(worker="env-hand", reward=0.5, messages=[Message(role="user", content="again")])

    async def _close(self, _: Any) -> SessionReply:
        self.closed.set()
        return SessionReply(worker="env-hand", done=True)


@pytest.fixture
async def bus(nats_server: Server) -> Any:
    async with Bus.connect(nats_server.url, "env-hand") as bus:
        yield bus


async def test_a_server_plays_an_episode_and_counts_its_workers(client: AsyncClient, bus: Bus, store: Store) -> None:
    hand, workers = await Environment(bus).start(), Workers(store)
    await workers.start("trainer-0", "env-0")
    spec = make_spec(model__base="some/model").model_dump(mode="json")
    found = await client.validate(spec)
    assert found["valid"] and found["mistakes"] == [] and found["messages"] == [{"role": "user", "content": "7="}]
    assert results(found["checks"]) == {
        "spec": "ok", "episode": "ok", "trainer workers": "ok", "rollout workers": "note", "env workers": "ok",
    }  # fmt: skip
    assert hand.said == [validating.SAID] * validating.TURNS and hand.closed.is_set()
    assert await client.jobs() == []
    await workers.stop()


async def test_an_episode_that_fails_makes_the_job_a_bad_one(client: AsyncClient, bus: Bus) -> None:
    await Environment(bus, fails_at=1).start()
    found = await client.validate(make_spec(model__base="some/model").model_dump(mode="json"))
    (episode,) = (check for check in found["checks"] if check["what"] == "episode")
    assert not found["valid"] and episode["result"] == "bad" and "no such digit" in episode["found"]


async def test_mistakes_are_those_of_a_submission(client: AsyncClient) -> None:
    found = await client.validate(
        {"name": "X Y", "model": {"base": "/no/such"}, "environment": {"name": "copy_digits"}}
    )
    assert not found["valid"] and {m["field"] for m in found["mistakes"]} >= {"name", "model.base", "train"}
