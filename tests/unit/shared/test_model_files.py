"""Model directories that bring code, or weights in formats that may, are refused before a loader sees them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import orjson
import pytest

from opentinker.services.rollout_worker.renderer import Renderer
from opentinker.shared.data.model_files import CODE_KEYS, CONFIGS, code_in, pickled_in, unsafe_weights_in
from opentinker.shared.types.errors import JobFailed
from tests.support.api import Http
from tests.support.factories import make_spec


@pytest.fixture
def model(tmp_path: Path, small: Path) -> Path:
    return Path(shutil.copytree(small, tmp_path / "model"))


def change(path: Path, **entries: Any) -> None:
    held = orjson.loads(path.read_bytes()) if path.exists() else {}
    path.write_bytes(orjson.dumps(held | entries))


def test_a_plain_model_is_fine(model: Path) -> None:
    assert code_in(model) is None and unsafe_weights_in(model) is None and pickled_in(model) is None


@pytest.mark.parametrize("key", CODE_KEYS)
@pytest.mark.parametrize("name", CONFIGS)
def test_entries_that_name_code_are_found_in_every_file_at_any_depth(model: Path, name: str, key: str) -> None:
    for entries in ({key: {"AutoModel": "own.Own"}}, {"text_config": {"deep": [{key: "own.Own"}]}}):
        (model / name).unlink(missing_ok=True)
        change(model / name, **entries)
        why = code_in(model)
        assert why is not None and f"{key} in {name}" in why
    change(model / name, **{"text_config": None, key: None})
    assert code_in(model) is None, "an empty one names nothing"


def test_weights_in_other_formats_are_not_enough(model: Path) -> None:
    (model / "model.safetensors").rename(model / "pytorch_model.bin")
    why = unsafe_weights_in(model)
    assert why is not None and "only pytorch_model.bin" in why and "save it as safetensors" in why
    assert pickled_in(model) == why
    (model / "pytorch_model.bin").unlink()
    assert unsafe_weights_in(model) == "has no *.safetensors file" and pickled_in(model) is None


@pytest.mark.parametrize("file", ["../../secret.safetensors", "/etc/passwd", "sub/x.safetensors", "model.bin", 3])
def test_an_index_names_files_beside_it(model: Path, file: object) -> None:
    (model / "model.safetensors.index.json").write_bytes(orjson.dumps({"weight_map": {"w": "model.safetensors"}}))
    assert unsafe_weights_in(model) is None
    (model / "model.safetensors.index.json").write_bytes(orjson.dumps({"weight_map": {"w": file}}))
    assert "is not a safetensors file next to it" in str(unsafe_weights_in(model))


@pytest.mark.parametrize("text", [b"{", b"\xff", b'{"a": NaN}'])
def test_what_cannot_be_read_is_refused(model: Path, text: bytes) -> None:
    (model / "tokenizer_config.json").write_bytes(text)
    assert "cannot be read" in str(code_in(model))


def test_no_loader_runs_code_of_a_model(model: Path, tmp_path: Path) -> None:
    """Tokenizer, language model, config: each refuses, and the file beside them is never imported."""
    from opentinker.shared.nn.models import config_of, load_tokenizer

    place = tmp_path / "ran"
    (model / "own.py").write_text(f"import pathlib; pathlib.Path({str(place)!r}).touch()\nclass Own: pass\n")
    change(model / "tokenizer_config.json", auto_map={"AutoTokenizer": ["own.Own", "own.Own"]})
    for load in (load_tokenizer, config_of, lambda base: Renderer.load(base, "plain")):
        with pytest.raises(JobFailed, match="own code"):
            load(str(model))
    assert not place.exists()


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda model: change(model / "tokenizer_config.json", auto_map={"AutoTokenizer": "own.Own"}), "own code"),
        (lambda model: (model / "model.safetensors").rename(model / "pytorch_model.bin"), "only pytorch_model.bin"),
    ],
)
async def test_such_a_model_is_refused_when_the_job_is_submitted(http: Http, model: Path, spoil: Any, why: str) -> None:
    spoil(model)
    status, body = await http.submit(make_spec(model__base=str(model)).model_dump(mode="json"))
    assert status == 422
    assert [e["field"] for e in body["errors"] if why in e["problem"]] == ["model.base"], body
