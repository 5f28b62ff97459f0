"""`opentinker validate` by a server: an episode is played, its workers are counted, its quotas are known."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest

from opentinker import ApiError, AsyncClient
from opentinker.cli.planning.validate import looked_at
from opentinker.services.scheduler.http import validate
from opentinker.services.scheduler.jobs.submit import submit
from opentinker.shared.api_types import Validation
from opentinker.shared.data import dry_run, light_tokenizer
from opentinker.shared.messaging.bus import Bus
from opentinker.shared.messaging.subjects import ENV_CHECK, ENV_CLOSE, ENV_OPEN, ENV_STEP
from opentinker.shared.runtime.service import Context
from opentinker.shared.state.store import Store
from opentinker.shared.tenant_limits import TenantLimits
from opentinker.shared.types.core import Ending, Message
from opentinker.shared.types.env_protocol import REMOTE, EnvCheck, EnvCheckReply, OpenSession, SessionReply
from tests.conftest import Server
from tests.integration.scheduler.submission.validation_checks import results, spec_of
from tests.support.api import fits
from tests.support.factories import make_spec
from tests.support.scheduling import Workers


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
    fits(found, Validation)
    assert found["valid"] and found["mistakes"] == [] and found["messages"] == [{"role": "user", "content": "7="}]
    assert results(found["checks"]) == {
        "spec": "ok", "episode": "ok", "model": "note", "prompt": "note", "trainer workers": "ok",
        "rollout workers": "note", "env workers": "ok", "queue": "note",
    }  # fmt: skip
    (queue,) = (check for check in found["checks"] if check["what"] == "queue")
    assert queue["found"] == "it would wait for rollout worker (none is running)"
    assert hand.said == [validate.SAID] * validate.TURNS and hand.closed.is_set()
    assert await client.jobs() == []
    spec["train"]["learner"], spec["resources"] = "torch", {"trainer_gpus": 2}
    for name in ("step_s", "simulated_step_s"):
        spec["train"].pop(name, None)
    found = await client.validate(spec)
    (check,) = [check for check in found["checks"] if check["what"] == "trainer workers with 2 GPUs"]
    assert found["valid"] and check["found"] == "1 wanted, 0 running, 0 free" and check["result"] == "note"
    assert "waits until one runs" in check["hint"]
    submitted = await client.submit(spec)
    assert "trainer with 2 GPUs" in str(submitted.get("waiting_for"))
    await workers.stop()


async def test_an_episode_that_fails_makes_the_job_a_bad_one(client: AsyncClient, bus: Bus) -> None:
    await Environment(bus, fails_at=1).start()
    found = await client.validate(make_spec(model__base="some/model").model_dump(mode="json"))
    (episode,) = (check for check in found["checks"] if check["what"] == "episode")
    assert not found["valid"] and episode["result"] == "bad" and "no such digit" in episode["found"]


async def test_a_server_of_a_user_that_is_silent_holds_no_validation_up_for_long(client: AsyncClient, bus: Bus) -> None:
    """The env worker opens the URL for as long as it may, and asks again."""
    asked: list[float] = []

    async def silent(request: OpenSession) -> SessionReply:
        asked.append(request.deadline_s)
        return SessionReply(worker="env-hand", busy=True)

    async def fine(_: EnvCheck) -> EnvCheckReply:
        return EnvCheckReply()

    await bus.serve(ENV_OPEN, silent, environment=REMOTE)
    await bus.serve(ENV_CHECK, fine)
    spec = make_spec(model__base="some/model", environment={"name": "http://[::1]:6379/"}).model_dump(mode="json")
    found = await client.validate(spec)
    (episode,) = (check for check in found["checks"] if check["what"] == "episode")
    assert episode["result"] == "bad" and max(asked) <= validate.ELSEWHERE_S < validate.EPISODE_S


async def test_mistakes_are_those_of_a_submission(client: AsyncClient) -> None:
    found = await client.validate({"name": "", "model": {"base": "/no/such"}, "environment": {"name": "copy_digits"}})
    assert not found["valid"] and {m["field"] for m in found["mistakes"]} >= {"name", "model.base", "train"}


SWEPT = {"parameters": {"rollout.episode_timeout_s": [60, 90], "rollout.max_tokens": [4, 8]}, "seeds": [1, 2]}


async def test_a_sweep_is_looked_at_with_all_its_values(client: AsyncClient, bus: Bus) -> None:
    await Environment(bus).start()
    swept = {**make_spec(model__base="some/model").model_dump(mode="json", exclude_defaults=True), "sweep": SWEPT}
    found = await client.validate(swept)
    fits(found, Validation)
    assert found["valid"] and [one["found"] for one in found["checks"] if one["what"] == "sweep"] == [
        "up to 8 jobs; the checks below are for the first one"
    ]
    wrong = {**swept, "sweep": {"parameters": {"rollout.max_tokens": [4, -1], "train.nothing": [1]}}}
    for scope in ("all", "spec"):
        found = await client.validate(wrong, scope=scope)
        assert not found["valid"] and found["checks"] == []
        assert {one["field"].removeprefix("sweep.parameters.") for one in found["mistakes"]} >= {"train.nothing"}
    missing = {**swept, "sweep": {"parameters": {"model.base": ["some/model", "/no/such"]}}}
    (mistake,) = (await client.validate(missing))["mistakes"]
    assert (mistake["field"], mistake["value"]) == ("sweep.parameters.model.base", "/no/such")


async def test_of_the_text_alone_no_reference_is_looked_at(client: AsyncClient) -> None:
    spec = make_spec(model__base="/no/such", environment={"name": "no_such"}).model_dump(mode="json")
    found = await client.validate(spec, scope="spec")
    fits(found, Validation)
    assert found["valid"] and [one["what"] for one in found["checks"]] == ["spec"] and found["estimate"] is None
    (mistake,) = (await client.validate(spec, scope="queue"))["mistakes"]
    assert mistake["field"] == "model.base", "no env worker is there to ask for the environment"
    queued = await client.validate(make_spec(model__base="some/model"), scope="queue")
    assert queued["messages"] == [] and {one["what"] for one in queued["checks"]} == {
        "spec", "trainer workers", "rollout workers", "env workers", "queue",
    }  # fmt: skip
    found = await client.validate({**spec, "nme": "x", "train": {"steps": -1}}, scope="spec")
    assert {one["field"] for one in found["mistakes"]} >= {"nme", "train.steps"}
    with pytest.raises(ApiError, match="must be one of all, queue, spec"):
        await client.validate(spec, scope="text")  # type: ignore[arg-type]


async def test_prompts_are_rendered(client: AsyncClient, bus: Bus, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server is in this process, and would be held up while it reads a tokenizer."""
    await Environment(bus).start()
    spec = spec_of(tiny, rollout__context_length=2)
    with monkeypatch.context() as patched:
        patched.setattr(light_tokenizer, "LightTokenizer", pytest.fail)
        found = await client.validate(spec)
    assert found["valid"] and results(found["checks"])["model"] == "ok"
    (prompt,) = (check for check in found["checks"] if check["what"] == "prompt")
    assert prompt["result"] == "note" and prompt["found"].startswith("not looked at: the server renders no prompts")
    monkeypatch.setattr(sys, "path", [*sys.path])
    data = spec.model_dump(mode="json")
    seen = await asyncio.to_thread(looked_at, data, client.url, Path(), data)
    (prompt,) = (check for check in seen["checks"] if check["what"] == "prompt")
    assert prompt == dry_run.prompt(spec, [Message(role="user", content="7=")])
    assert prompt["result"] == "bad" and not seen["valid"] and seen["server"] == client.url


async def test_what_a_machine_lacks_to_look_is_named(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentinker.shared.data.light_tokenizer", None)
    prompt = dry_run.prompt(spec_of(tiny), [])
    assert prompt["result"] == "note" and prompt["found"].startswith("not looked at: ")


async def test_who_is_needed_is_told_from_who_is_wanted(client: AsyncClient, store: Store) -> None:
    workers = Workers(store)
    await workers.start("trainer-0", "rollout-0")
    asked = make_spec(model__base="some/model", resources__rollout_workers=3)
    found = await client.validate(asked)
    (rollout,) = (check for check in found["checks"] if check["what"] == "rollout workers")
    assert rollout["result"] == "ok" and rollout["found"] == "1 needed, 3 wanted, 1 running, 1 free"
    assert "begins with 1" in rollout["hint"] and results(found["checks"])["queue"] == "note", "no env worker runs"
    two = make_spec(model__base="some/model", resources__rollout_workers=3, resources__min_rollout_workers=2)
    found = await client.validate(two)
    (rollout,) = (check for check in found["checks"] if check["what"] == "rollout workers")
    assert rollout["result"] == "note" and rollout["hint"] == "the job waits until 2 run"
    await workers.start("env-0")
    found = await client.validate(asked)
    assert results(found["checks"])["queue"] == "ok"
    await workers.stop()


async def test_quotas_of_the_tenant_are_looked_at(ctx: Context, store: Store) -> None:
    workers = Workers(store)
    await workers.start("trainer-0", "rollout-0", "env-0")
    for limits, result, words in (
        (TenantLimits(workers=1), "bad", "beyond its tenant's quota of 1 workers"),
        (TenantLimits(running_jobs=0), "bad", "beyond its tenant's quota of 0 running jobs"),
        (TenantLimits(running_jobs=1, workers=2), "ok", "at once"),
    ):
        settings = ctx.settings.model_copy(update={"tenants": {"*": limits}})
        found = await validate.report_on(
            Context(**{**vars(ctx), "settings": settings}), make_spec(model__base="some/model").model_dump(), "default"
        )
        (queue,) = (check for check in found["checks"] if check["what"] == "queue")
        assert queue["result"] == result and words in queue["found"] and found["valid"] == (result != "bad")
    await workers.stop()


async def test_the_operator_says_how_long_inference_jobs_are_kept_that_do_not(ctx: Context, store: Store) -> None:
    plain = {"name": "x", "kind": "inference", "model": {"base": "some/model"}}

    async def kept(idle_s: float | None, serving: dict[str, Any]) -> tuple[float | None, str]:
        settings = ctx.settings.model_copy(update={"inference_idle_s": idle_s})
        limited = Context(**{**vars(ctx), "settings": settings})
        spec = plain | {"serving": serving}
        found = await validate.report_on(limited, spec, "default")
        (said,) = (check["found"] for check in found["checks"] if check["what"] == "kept")
        id, _ = await submit(limited, spec, "default")
        return (await store.job(id)).spec["serving"]["idle_s"], said

    idle_s, said = await kept(None, {})
    assert idle_s is None and "until it is completed or cancelled" in said
    idle_s, said = await kept(600.0, {})
    assert idle_s == 600.0 and "600 s (this server's inference_idle_s" in said
    idle_s, said = await kept(600.0, {"idle_s": 7})
    assert idle_s == 7.0 and "7 s (serving.idle_s)" in said
    assert (await kept(600.0, {"sleep_s": 900}))[0] == 1500.0
