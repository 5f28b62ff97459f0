"""`opentinker validate`: everything that can be seen of a job before it runs, by a server or without one."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson
import pytest
from transformers import AutoTokenizer

from opentinker import ApiError, AsyncClient
from opentinker.cli.planning.validate import looked_at
from opentinker.local import validate_local
from opentinker.services.scheduler.http import validate
from opentinker.services.scheduler.jobs.submit import submit
from opentinker.shared.api_types import Check, Validation
from opentinker.shared.data import dry_run, light_tokenizer
from opentinker.shared.data.light_tokenizer import LightTokenizer
from opentinker.shared.data.model_files import parameters_in
from opentinker.shared.messaging.bus import Bus
from opentinker.shared.messaging.subjects import ENV_CHECK, ENV_CLOSE, ENV_OPEN, ENV_STEP
from opentinker.shared.runtime.service import Context
from opentinker.shared.spec import JobSpec, parse_spec
from opentinker.shared.state.store import Store
from opentinker.shared.tenant_limits import TenantLimits
from opentinker.shared.types.core import Ending, Message
from opentinker.shared.types.env_protocol import REMOTE, EnvCheck, EnvCheckReply, OpenSession, SessionReply
from tests.conftest import Server
from tests.integration.client.test_cli import opentinker
from tests.support.api import fits
from tests.support.factories import make_spec, safetensors
from tests.support.scheduling import Workers


def results(checks: Sequence[Check]) -> dict[str, str]:
    return {check["what"]: check["result"] for check in checks}


LOADED = {"model__chat_template": "plain", "rollout__engine": "vllm", "train__learner": "torch"}
"""A job whose workers load weights."""


def spec_of(model: Path, **changes: Any) -> JobSpec:
    return make_spec(model__base=str(model), **changes)


# --- here -----------------------------------------------------------------------------------------------------------


async def test_model_prompt_and_an_episode_are_looked_at_here(tiny: Path) -> None:
    checks = await validate_local.inspect(spec_of(tiny))
    assert results(checks) == {"model": "ok", "episode": "ok", "prompt": "ok"}
    assert "Qwen3ForCausalLM" in checks[0]["found"]


def game_of(model: Path, **changes: Any) -> JobSpec:
    spec: dict[str, Any] = {
        "name": "game",
        "model": {"base": str(model), "chat_template": "plain"},
        "environment": {"name": "signalling"},
        "algorithm": {"group_size": 2, "groups_per_batch": 4},
        "train": {"steps": 24},
        "policies": {
            "speaker": {"model": {"lora": {"rank": 8}}},
            "listener": {"algorithm": {"groups_per_batch": 2}, "train": {"steps": 48}},
        },
        "seats": {"speaker": "speaker", "listener": "listener"},
    }
    return parse_spec({**spec, **changes})


async def test_of_several_policies_each_has_its_model_its_training_and_its_memory_looked_at(
    tiny: Path, tmp_path: Path
) -> None:
    found = {check["what"]: check for check in await validate_local.inspect(game_of(tiny))}
    assert set(found) == {
        *("model of speaker, listener", "policy speaker", "policy listener", "memory", "episode"),
        "prompt of speaker, listener",
    }
    assert found["policy speaker"]["found"] == "grpo on an adapter of rank 8, 24 steps of 4 groups of 2; plays speaker"
    assert found["policy listener"]["found"] == "grpo on all weights, 48 steps of 2 groups of 2; plays listener"
    mib = 4 * parameters_in(tiny) / 2**20
    assert f"{2 * mib:.3g} MiB of weights in 2 engines" in found["memory"]["found"]
    assert f"about {5 * mib:.3g} MiB" in found["memory"]["found"], "of the adapter's base the weights alone"

    listener = {"model": {"lora": {"rank": 4}}, "algorithm": {"groups_per_batch": 2}, "train": {"steps": 48}}
    adapters = {"speaker": {"model": {"lora": {"rank": 8}}}, "listener": listener}
    found = {check["what"]: check for check in await validate_local.inspect(game_of(tiny, policies=adapters))}
    assert f"{mib:.3g} MiB of weights in 1 engine," in found["memory"]["found"]
    assert f"about {2 * mib:.3g} MiB" in found["memory"]["found"], "the trainer has a base for each"

    own = {"speaker": {"model": {"base": str(tmp_path / "nothing")}}, "listener": {}}
    checks = {check["what"]: check for check in await validate_local.inspect(game_of(tiny, policies=own))}
    assert checks["model of speaker"]["result"] == "bad" and checks["model of listener"]["result"] == "ok"
    assert checks["memory"]["result"] == "note" and "nothing is not known here" in checks["memory"]["found"]


async def test_a_server_looks_at_each_policy_too(client: AsyncClient, tiny: Path) -> None:
    report = await client.validate(game_of(tiny).model_dump(mode="json"))
    fits(report, Validation)
    found = {check["what"]: check["result"] for check in report["checks"]}
    assert found["model of speaker, listener"] == found["policy listener"] == found["memory"] == "ok"


async def test_a_prompt_that_does_not_fit_is_said_before_any_job(tiny: Path) -> None:
    checks = await validate_local.inspect(spec_of(tiny, rollout__context_length=3))
    (prompt,) = (check for check in checks if check["what"] == "prompt")
    assert prompt["result"] == "bad" and "rollout.context_length, which is 3" in prompt["hint"]


async def test_models_that_cannot_be_loaded_are_said(tiny: Path, tmp_path: Path) -> None:
    assert dry_run.model(spec_of(tmp_path / "nothing"))["result"] == "bad"
    elsewhere = dry_run.model(make_spec(model__base="some/model"))
    assert elsewhere["result"] == "note" and elsewhere["found"] == "not looked at: some/model is of a hub"
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((tiny / name).read_bytes())
    config = orjson.loads((tmp_path / "tokenizer_config.json").read_bytes())
    config.pop("chat_template", None)
    (tmp_path / "tokenizer_config.json").write_bytes(orjson.dumps(config))
    assert results([dry_run.prompt(spec_of(tmp_path), [])]) == {"chat template": "bad"}
    assert results([dry_run.prompt(spec_of(tmp_path, model__chat_template="plain"), [])]) == {"prompt": "ok"}
    (tmp_path / "chat_template.jinja").write_text("{{ raise_exception('no system role here') }}")
    refused = dry_run.prompt(spec_of(tmp_path), [Message(role="system", content="x")])
    assert refused["result"] == "bad" and "no system role here" in refused["found"]


CONFIG = b'{"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}'
BROKEN: dict[str, tuple[dict[str, bytes], str]] = {
    "no architecture": ({"config.json": b"{}", "model.safetensors": safetensors()}, "names no model_type"),
    "a list": ({"config.json": b"[]", "model.safetensors": safetensors()}, "names no model_type"),
    "half a config": ({"config.json": b"{", "model.safetensors": safetensors()}, "cannot be read"),
    "no weights": ({"config.json": CONFIG}, "no *.safetensors"),
    "a pointer": (
        {"config.json": CONFIG, "model.safetensors": b"version https://git-lfs.github.com/spec/v1\nsize 9"},
        "git lfs pull",
    ),
    "half a file": ({"config.json": CONFIG, "model.safetensors": safetensors(said=4000)}, "copy it once more"),
    "no header": ({"config.json": CONFIG, "model.safetensors": b"\x02" + b"\0" * 7 + b"[]"}, "is no safetensors file"),
    "a part is lacking": (
        {
            "config.json": CONFIG,
            "a.safetensors": safetensors(),
            "model.safetensors.index.json": b'{"weight_map": {"a": "a.safetensors", "b": "b.safetensors"}}',
        },
        "lacks b.safetensors",
    ),
}  # fmt: skip


@pytest.mark.parametrize("how", BROKEN)
async def test_an_unloadable_directory_is_no_model(how: str, client: AsyncClient, tmp_path: Path) -> None:
    files, why = BROKEN[how]
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    spec = spec_of(tmp_path, **LOADED)
    here = dry_run.model(spec)
    assert here["result"] == "bad" and why in here["found"]
    found = await client.validate(spec)
    assert not found["valid"] and [m["field"] for m in found["mistakes"]] == ["model.base"]
    with pytest.raises(ApiError, match=re.escape(why)):
        await client.submit(spec)
    teacher = {"algorithm": {"name": "distill"}, "teacher": {"base": str(tmp_path)}}
    with pytest.raises(ApiError, match=re.escape(f"teacher.base = '{tmp_path}': ") + ".*" + re.escape(why)):
        await client.submit(spec.model_dump(mode="json", exclude_defaults=True) | teacher)


async def test_whole_weights_are_taken_and_simulated_jobs_need_none(client: AsyncClient, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(CONFIG)
    simulated = spec_of(tmp_path, model__chat_template="plain")
    assert "no weights are needed" in dry_run.model(simulated)["found"]
    assert (await client.submit(simulated))["state"] == "queued"
    (tmp_path / "model.safetensors").write_bytes(safetensors())
    trained = spec_of(tmp_path, **LOADED)
    assert dry_run.model(trained)["result"] == "ok"
    assert (await client.submit(trained))["state"] == "queued"


async def test_rows_without_the_columns_are_said_with_their_line(tmp_path: Path, tiny: Path) -> None:
    path = tmp_path / "rows.jsonl"
    good = {"prompt": "a", "completion": "b"}
    data: dict[str, Any] = {
        "kind": "sft",
        "model": {"base": str(tiny)},
        "name": "x",
        "train": {"steps": 2},
        "data": {"path": str(path)},
    }
    path.write_bytes(orjson.dumps(good) + b"\n" + orjson.dumps(good) + b"\n")
    assert results(await validate_local.inspect(JobSpec.model_validate(data)))["rows"] == "ok"
    path.write_bytes(orjson.dumps(good) + b"\n" + orjson.dumps({"question": "a"}) + b"\n")
    (rows,) = (check for check in await validate_local.inspect(JobSpec.model_validate(data)) if check["what"] == "rows")
    assert rows["result"] == "bad" and "line 2" in rows["found"]
    assert dry_run.rows(JobSpec.model_validate(data), here=False) == [rows], "a server says the same"
    path.write_bytes(b"")
    assert dry_run.rows(JobSpec.model_validate(data), here=False)[0]["result"] == "bad"
    data["data"]["path"] = "some/rows"
    (elsewhere,) = dry_run.rows(JobSpec.model_validate(data), here=False)
    assert elsewhere["result"] == "note" and elsewhere["found"] == "not looked at: some/rows is of a hub"


def test_rows_are_looked_at_where_the_trainer_reads_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Split and subset are those of the rows that are trained on, not of those that are not."""
    held = tmp_path / "held.jsonl"
    held.write_bytes(orjson.dumps({"prompt": "a", "completion": "b"}) + b"\n")

    def looked_at(here: bool, **data: Any) -> tuple[list[Check], list[tuple[Any, ...]]]:
        opened: list[tuple[Any, ...]] = []

        def rows(*asked: Any) -> list[tuple[str, dict[str, str]]]:
            opened.append(asked)
            return [("row 1", {"prompt": "a", "completion": "b"})]

        monkeypatch.setattr(dry_run, "open_rows", rows)
        of = {"kind": "sft", "name": "x", "model": {"base": "some/model"}, "train": {"steps": 2}}
        spec = JobSpec.model_validate({**of, "data": {"path": "some/rows", "split": "main", "subset": "s", **data}})
        return dry_run.rows(spec, here=here), opened

    found, opened = looked_at(False, validation=str(held))
    assert [check["result"] for check in found] == ["note", "ok"] and not opened
    main = ("some/rows", "main", "train", "s")
    _, opened = looked_at(True, validation="some/rows")
    assert opened == [main, ("some/rows", None, "validation", "s")]
    _, opened = looked_at(True, validation="other/rows", validation_split="test")
    assert opened == [main, ("other/rows", "test", "validation", None)]
    _, opened = looked_at(True, validation=0.5)
    assert opened == [main]


ROLES = "{% for m in messages %}<{{ m.role }}>{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
TEMPLATES: dict[str, Any] = {
    "the date": "{{ strftime_now('%d %b %Y') }}" + ROLES,
    "named ones": [{"name": "rag", "template": "{{ nothing() }}"}, {"name": "default", "template": ROLES}],
}


@pytest.mark.parametrize("how", [*TEMPLATES, "a file and more of them"])
def test_templates_that_vllm_renders_are_rendered_here(how: str, tiny: Path, tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((tiny / name).read_bytes())
    config = orjson.loads((tmp_path / "tokenizer_config.json").read_bytes())
    config["chat_template"] = TEMPLATES.get(how)
    (tmp_path / "tokenizer_config.json").write_bytes(orjson.dumps(config))
    if how not in TEMPLATES:
        (tmp_path / "chat_template.jinja").write_text(ROLES)
        (tmp_path / "additional_chat_templates").mkdir()
        (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools|length }} tools" + ROLES)
    light, theirs = LightTokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    chat = [{"role": "user", "content": "7="}]
    for tools in (None, [{"type": "function", "function": {"name": "add"}}]):
        asked: dict[str, Any] = {"tokenize": False, "add_generation_prompt": True, "tools": tools}
        assert light.apply_chat_template(chat, **asked) == theirs.apply_chat_template(chat, **asked)
    assert light.chat_template == theirs.chat_template
    assert dry_run.prompt(spec_of(tmp_path, **LOADED | {"model__chat_template": "model"}), [])["result"] == "ok"


def test_a_template_that_only_a_worker_understands_is_no_mistake(tiny: Path, tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json"):  # nor does it need a tokenizer_config.json
        (tmp_path / name).write_bytes((tiny / name).read_bytes())
    (tmp_path / "special_tokens_map.json").write_bytes(b'{"eos_token": "%s"}' % eos_of(tiny).encode())
    (tmp_path / "chat_template.jinja").write_text(ROLES)
    vllm = {"rollout__engine": "vllm", "train__learner": "torch"}
    assert dry_run.prompt(spec_of(tmp_path, **vllm), [])["result"] == "ok"
    assert LightTokenizer(tmp_path).eos_token_id == LightTokenizer(tiny).eos_token_id is not None
    (tmp_path / "chat_template.jinja").write_text("{% unheard_of %}" + ROLES)
    found = dry_run.prompt(spec_of(tmp_path, **vllm), [])
    assert found["result"] == "note" and found["found"].startswith("not looked at: ") and "unheard_of" in found["found"]
    assert dry_run.prompt(spec_of(tmp_path), [])["result"] == "bad", "the simulated engine has no other tokenizer"
    (tmp_path / "special_tokens_map.json").write_bytes(b"[]")
    assert "is not an object" in dry_run.prompt(spec_of(tmp_path, **vllm), [])["found"]


def eos_of(model: Path) -> str:
    return str(orjson.loads((model / "tokenizer_config.json").read_bytes())["eos_token"])


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
    assert "trainer with 2 GPUs" in submitted["waiting_for"]
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
