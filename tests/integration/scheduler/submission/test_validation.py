"""`opentinker validate`: models, prompts, templates, rows and episodes are looked at before any job."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import orjson
import pytest
from transformers import AutoTokenizer

from opentinker import ApiError, AsyncClient
from opentinker.local import validate_local
from opentinker.shared.api_types import Check, Validation
from opentinker.shared.data import dry_run
from opentinker.shared.data.light_tokenizer import LightTokenizer
from opentinker.shared.data.model_files import parameters_in
from opentinker.shared.spec import JobSpec, parse_spec
from opentinker.shared.types.core import Message
from tests.integration.client.test_cli import opentinker
from tests.integration.scheduler.submission.validation_checks import results, spec_of
from tests.support.api import fits
from tests.support.factories import make_spec, safetensors

LOADED = {"model__chat_template": "plain", "rollout__engine": "vllm", "train__learner": "torch"}
"""A job whose workers load weights."""


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


async def test_seats_that_the_environment_does_not_have_are_found_without_a_server(tiny: Path) -> None:
    checks = await validate_local.inspect(game_of(tiny, seats={"speker": "speaker", "listener": "listener"}))
    (seats,) = (check for check in checks if check["what"] == "seats")
    assert seats["result"] == "bad" and "seats.speker" in seats["found"]
    assert "did you mean 'speaker'?" in seats["found"]


async def test_pools_and_opponents_that_could_not_work_are_found_without_a_server(tiny: Path) -> None:
    pool = {"pool": {"policy": "speaker", "every": 23, "add_if": 0.9999}}
    checks = await validate_local.inspect(
        game_of(tiny, seats={"speaker": "speaker", "*": {"pool": "pool"}}, policies={"speaker": {}}, pools=pool)
    )
    (pools,) = (check for check in checks if check["what"] == "pools")
    assert pools["result"] == "bad" and "pools.pool.add_if" in pools["found"] and "at most 4416 games" in pools["found"]
    debate: dict[str, Any] = {
        "environment": {"name": "debate"},
        "policies": {"p": {}},
        "seats": {"first": "p", "second": "p", "judge": {"bot": "perfect"}},
        "validation": {"every": 5, "against": [{"bot": "random"}]},
    }
    (seats,) = (one for one in await validate_local.inspect(game_of(tiny, **debate)) if one["what"] == "seats")
    assert seats["result"] == "bad" and "would take 'judge'" in seats["found"]


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
