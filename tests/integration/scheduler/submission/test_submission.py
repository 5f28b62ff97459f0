"""Submission over HTTP: what is checked of a job, what is refused and with which status, and idempotency keys."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import orjson
import pytest

from opentinker.services.scheduler.http.jobs import JOB_ID
from opentinker.services.scheduler.jobs.submit import new_id
from opentinker.shared.messaging.bus import Bus
from opentinker.shared.messaging.subjects import ENV_CHECK
from opentinker.shared.runtime.service import Context
from opentinker.shared.state.store import Store
from opentinker.shared.types.env_protocol import EnvCheck, EnvCheckReply
from tests.support.api import SPEC, Http, mistakes
from tests.support.factories import safetensors


async def checked_by(bus: Bus, check: Callable[[EnvCheck], Awaitable[EnvCheckReply]]) -> None:
    await bus.serve(ENV_CHECK, check, "env")
    await bus.nc.flush()


async def test_submitted_job_is_queued_with_the_whole_spec(http: Http) -> None:
    status, job = await http.submit()
    assert status == 201
    assert JOB_ID.match(job["id"]) and job["state"] == "queued"
    placed = {**SPEC, "resources": {**SPEC["resources"], "trainer": "own"}}
    assert (await http("GET", f"/v1/jobs/{job['id']}"))[1]["spec"] == placed
    status, listed = await http("GET", "/v1/jobs")
    assert [j["id"] for j in listed["jobs"]] == [job["id"]]


def test_job_ids_do_not_repeat() -> None:
    assert len({new_id("j") for _ in range(1000)}) == 1000


async def test_every_mistake_is_told_at_once(http: Http, bus: Bus) -> None:
    async def check(request: EnvCheck) -> EnvCheckReply:
        return EnvCheckReply(errors=[{"field": "environment.config.digits", "value": 99, "problem": "too many"}])

    await checked_by(bus, check)
    wrong = {
        "name": "",
        "model": {"base": "/nowhere/at/all"},
        "environment": {"name": "copy_digits", "config": {"digits": 99}},
        "algorithm": {"group_size": 1},
        "train": {"steps": 0, "learning_rate": 1.0},
    }
    status, body = await http.submit(wrong)
    assert status == 422
    assert set(mistakes(body)) == {
        "name",
        "model.base",
        "environment.config.digits",
        "algorithm.group_size",
        "train.steps",
        "train.learning_rate",
    }
    assert body["detail"].startswith("6 mistakes")
    assert (await http("GET", "/v1/jobs"))[1]["jobs"] == []


async def test_seats_that_the_algorithm_names_must_exist_in_the_environment(http: Http, bus: Bus) -> None:
    async def check(request: EnvCheck) -> EnvCheckReply:
        return EnvCheckReply(seats=["first", "second"])

    await checked_by(bus, check)
    spec = {**SPEC, "environment": {"name": "tictactoe"}, "train": {"steps": 1}}
    for mate, expected in (("second", 201), ("third", 422)):
        status, body = await http.submit({**spec, "algorithm": {"team": {"all": ["first", mate]}}})
        assert status == expected, body
    assert set(mistakes(body)) == {"algorithm.team.all"}


async def test_checking_what_a_spec_refers_to_has_a_time_limit(http: Http, bus: Bus, ctx: Context) -> None:
    async def never(_: EnvCheck) -> EnvCheckReply:
        await asyncio.Event().wait()
        raise AssertionError

    await checked_by(bus, never)
    ctx.settings = ctx.settings.model_copy(update={"submission_check_timeout_s": 1.0})
    status, body = await http.submit({**SPEC, "environment": {"name": "copy_digits"}})
    assert status == 503 and "environment 'copy_digits', files and checkpoints" in body["detail"], body
    assert (await http("GET", "/v1/jobs"))[1]["jobs"] == []


async def test_settings_that_evaluations_lay_over_the_environment_s_are_checked_too(http: Http, bus: Bus) -> None:
    async def check(request: EnvCheck) -> EnvCheckReply:
        problem = {"field": "environment.config.digits", "value": 99, "problem": "too many"}
        return EnvCheckReply(errors=[problem] if (request.config or {}).get("digits") == 99 else [])

    await checked_by(bus, check)
    environment = {"name": "copy_digits", "config": {"digits": 3}}
    status, body = await http.submit({**SPEC, "environment": environment, "validation": {"every": 5}})
    assert status == 201
    wrong = {"every": 5, "config": {"digits": 99}}
    status, body = await http.submit({**SPEC, "environment": environment, "validation": wrong})
    assert status == 422 and set(mistakes(body)) == {"validation.config.digits"}


async def test_job_is_accepted_and_says_so_when_no_env_worker_can_check_it(http: Http) -> None:
    job = await http.job()
    events = (await http("GET", f"/v1/jobs/{job}/events?format=json"))[1]["events"]
    assert [e["event"] for e in events[:2]] == ["queued", "environment_unchecked"]


PPO = {"name": "ppo", "group_size": 2, "groups_per_batch": 2}


def of_policy(policy: dict[str, Any]) -> dict[str, Any]:
    algorithm = {"group_size": 2, "groups_per_batch": 2}
    return {"train": {"steps": 1}, "algorithm": algorithm, "policies": {"a": policy}, "seats": {"*": "a"}}


NAMED: dict[str, Callable[[str], dict[str, Any]]] = {
    "model.base": lambda base: {"model": {"base": base}},
    "reward_models.0.base": lambda base: {"train": {"steps": 1}, "reward_models": [{"base": base}]},
    "value_model.base": lambda base: {"train": {"steps": 1}, "algorithm": PPO, "value_model": {"base": base}},
    "policies.a.teacher.base": lambda base: of_policy({"algorithm": {"name": "distill"}, "teacher": {"base": base}}),
    "policies.a.value_model.base": lambda base: of_policy({"algorithm": PPO, "value_model": {"base": base}}),
}
"""What names a model in a spec."""


def config(kind: object) -> dict[str, str]:
    return {"config.json": orjson.dumps({"model_type": "x", "architectures": kind}).decode()}


JUDGE = config(["XForSequenceClassification"])
TEMPLATE = {"chat_template.jinja": "x"}


@pytest.mark.parametrize(
    ("named", "files", "problem"),
    [
        ("model.base", None, "does not exist"),
        ("model.base", {}, "no config.json"),
        ("model.base", {"config.json": "{}", "tokenizer_config.json": "{}"}, "no chat template"),
        ("model.base", {"config.json": "{}", "tokenizer_config.json": '{"chat_template": "x"}'}, ""),
        ("model.base", {"config.json": "{}", "tokenizer_config.json": "{}", **TEMPLATE}, ""),
        ("reward_models.0.base", None, "does not exist"),
        ("reward_models.0.base", config(["LlamaForCausalLM"]), "no sequence classifier: its config.json says Ll"),
        ("reward_models.0.base", config(7), ""),
        ("reward_models.0.base", {"config.json": '{"architectures": 7}'}, "names no model_type"),
        ("reward_models.0.base", {**JUDGE, "tokenizer_config.json": "{}"}, "no chat template"),
        ("reward_models.0.base", {**JUDGE, **TEMPLATE}, ""),
        ("value_model.base", {}, "no config.json"),
        ("value_model.base", JUDGE, "no token classifier: its config.json says XFor"),
        ("value_model.base", config(["Qwen3ForTokenClassification"]), ""),
        ("policies.a.teacher.base", None, "does not exist"),
        ("policies.a.teacher.base", {"config.json": '{"model_type": "qwen3"}'}, ""),
        ("policies.a.value_model.base", JUDGE, "no token classifier: its config.json says XFor"),
        ("policies.a.value_model.base", config(["Qwen3ForTokenClassification"]), ""),
    ],
)
async def test_local_models_are_looked_at(
    http: Http, store: Store, tmp_path: Path, named: str, files: dict[str, str] | None, problem: str
) -> None:
    place = tmp_path / "model"
    if files is not None:
        place.mkdir()
        (place / "model.safetensors").write_bytes(safetensors())
        for name, text in files.items():
            (place / name).write_text(text)
    status, body = await http.submit({**SPEC, **NAMED[named](str(place))})
    if problem:
        field = "model.chat_template" if (named, problem) == ("model.base", "no chat template") else named
        assert status == 422 and problem in mistakes(body)[field]
    else:
        assert status == 201
        stored: Any = (await store.job(body["id"])).spec
        for part in named.split("."):
            stored = stored[int(part) if part.isdigit() else part]
        assert stored == str(place)


async def test_local_teacher_checks(http: Http, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    taught = {**SPEC, "algorithm": {"name": "distill"}, "train": {"steps": 1}, "teacher": {"base": "./models/teacher"}}
    for changes in ({}, {"train": {"steps": 0}}):  # also beside other mistakes
        status, body = await http.submit({**taught, **changes})
        assert status == 422 and "does not exist" in mistakes(body)["teacher.base"]
    (tmp_path / "models" / "teacher").mkdir(parents=True)
    (tmp_path / "models" / "teacher" / "config.json").write_text('{"model_type": "qwen3"}')
    (tmp_path / "models" / "teacher" / "model.safetensors").write_bytes(safetensors())
    status, body = await http.submit(taught)
    assert status == 201
    assert (await store.job(body["id"])).spec["teacher"]["base"] == str(tmp_path / "models" / "teacher")


@pytest.mark.parametrize("base", ["~nobody-here/x", "/tmp/a\0b", "/" + "x" * 5000, "../..", "."])
async def test_odd_model_paths_are_refused_not_crashed_on(http: Http, base: str) -> None:
    status, body = await http.submit({**SPEC, "model": {"base": base}})
    assert status == 422 and "model.base" in mistakes(body)


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        (b"", "JSON"),
        (b"{", "JSON"),
        (b"\xff\xfe", "JSON"),
        (b'{"name": "a", "name": "b"}', "twice"),
        (b"{" + b",".join(b'"%d":1' % n for n in range(100_000)) + b',"99999":1}', "twice"),
        (b'{"train": {"lr": NaN}}', "JSON"),
        (b'{"train": {"lr": 1e999}}', "JSON"),
        (b'{"name": "\\ud800"}', "JSON"),
        (b"[" * 40 + b"]" * 40, "deep"),
        (b"[" * 100_000 + b"]" * 100_000, "JSON"),
        (b"[" + b"0," * 200_000 + b"0]", "values"),
        (b"1" * 10_000, "JSON"),
        (b"[]", "must be a table"),
        (b'"text"', "must be a table"),
        (b"null", "must be a table"),
    ],
)
async def test_bodies_that_are_no_spec_are_422(http: Http, body: bytes, problem: str) -> None:
    status, answer = await http("POST", "/v1/jobs", data=body)
    assert status == 422 and problem in str(answer)


async def test_numbers_that_cannot_be_stored_are_refused(http: Http) -> None:
    huge = orjson.dumps({**SPEC, "train": {**SPEC["train"], "seed": 1.5e300}})
    assert (await http("POST", "/v1/jobs", data=huge))[0] == 422


async def test_body_over_the_limit_is_413(http: Http) -> None:
    status, body = await http("POST", "/v1/jobs", data=io.BytesIO(b" " * (1 << 20) + b"{}"))
    assert status == 413 and body["status"] == 413


async def test_same_key_and_spec_make_one_job_and_another_spec_is_a_conflict(http: Http) -> None:
    first, second = await http.submit(key="mine-1"), await http.submit(key="mine-1")
    assert first[0] == second[0] == 201 and first[1]["id"] == second[1]["id"]
    status, body = await http.submit({**SPEC, "name": "other"}, key="mine-1")
    assert status == 409 and first[1]["id"] in body["detail"]
    together = await asyncio.gather(*(http.submit(key="mine-2") for _ in range(8)))
    assert len({job["id"] for _, job in together}) == 1
    assert (await http.submit(key=""))[0] == 422
    assert (await http.submit(key="x" * 300))[0] == 422
