"""A job over HTTP without our client: the curl commands of the pages as they stand there, and bodies of every kind."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import tomllib
from pathlib import Path

import orjson
import pytest

from opentinker.shared.state.store import Store
from tests.nightly.test_docs_site import blocks
from tests.support.api import Http
from tests.support.cluster import ROOT

PAGES = (ROOT / "README.md", ROOT / "docs" / "submitting.md")
COMMANDS = [
    pytest.param(command, id=f"{page.name}-{number}")
    for page in PAGES
    for number, command in enumerate(
        command for block in blocks(page, "sh") for command in re.findall(r"^curl .*(?:\n  .*)*", block, re.MULTILINE)
    )
]


def test_the_pages_show_toml_and_json() -> None:
    texts = [str(command.values[0]) for command in COMMANDS]
    assert len(texts) == 4 and {"toml" in text for text in texts} == {True, False}


@pytest.mark.parametrize("command", COMMANDS)
async def test_a_curl_command_of_the_pages_submits_a_job(
    command: str, http: Http, store: Store, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    for folder in ("runs/models", "data/run"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "runs" / "models" / "tiny").symlink_to(tiny)
    (tmp_path / "data" / "run" / "operator-key").write_text(os.environ["OPENTINKER_API_KEY"])
    monkeypatch.chdir(tmp_path)
    typed = command.replace("http://127.0.0.1:8080", http.url).replace("curl ", "curl --silent --fail-with-body ", 1)
    done = await asyncio.to_thread(subprocess.run, ["bash", "-c", typed], capture_output=True, check=False)
    assert done.returncode == 0, done.stdout
    job = await store.job(orjson.loads(done.stdout)["id"])
    assert job.spec["environment"]["name"] == "copy_digits" and job.spec["model"]["base"] == str(tiny)


async def sent(http: Http, body: bytes, kind: str, path: str = "/v1/validate") -> tuple[int, str]:
    status, answer = await http("POST", path, data=body, headers={"Content-Type": kind})
    return status, str(answer)


@pytest.mark.parametrize(
    ("body", "kind", "status", "said"),
    [
        (b'name = "x"', "application/toml", 200, "is needed"),
        (b"x = = 1", "application/toml", 422, "invalid TOML: Invalid value (at line 1"),
        (b"\xff", "application/toml; charset=utf-8", 422, "invalid TOML"),
        (b"a" + b".a" * 20_000 + b" = 1", "application/toml", 422, "more than 16 parts"),
        (b"a = " + b"[" * 20_000, "application/toml", 422, "nested too deeply"),
        (b"a = " + b"[" * 40 + b"]" * 40, "application/toml", 422, "nested deeper"),
        (b"a = " + b"[" * 200 + b"inf" + b"]" * 200, "application/toml", 422, "must be a finite number"),
        (
            b"[" + b"a" * 30_000 + b"]\nx = [" + b"inf," * 8000 + b"]",
            "application/toml",
            422,
            "must be a finite number",
        ),
        (b"n = 0x" + b"f" * 4000, "application/toml", 422, "invalid TOML: Exceeds the limit"),
        (b"[train]\nlr = nan", "application/toml", 422, "train.lr = 'nan': must be a finite number"),
        (b"x = 1\n" + b"#" * 70_000, "application/toml", 422, "at most 65536 are taken"),
        (b'name = "x"', "application/json", 422, "TOML needs `Content-Type: application/toml`"),
        (b"name: x", "application/yaml", 415, "application/json or application/toml, not as application/yaml"),
    ],
)
async def test_a_body_is_what_its_media_type_says(http: Http, body: bytes, kind: str, status: int, said: str) -> None:
    found, answer = await sent(http, body, kind)
    assert found == status and said in answer


async def test_the_same_spec_in_toml_and_in_json_is_one_job(http: Http) -> None:
    toml = 'name = "x"\nmodel = { base = "some/model" }\nenvironment = { name = "bandit" }\ntrain = { steps = 1 }'
    key = {"Idempotency-Key": "one"}
    first = await http("POST", "/v1/jobs", data=toml.encode(), headers={**key, "Content-Type": "application/toml"})
    second = await http("POST", "/v1/jobs", data=orjson.dumps(tomllib.loads(toml)), headers=key)
    assert first[0] == second[0] == 201 and first[1]["id"] == second[1]["id"]
