"""The job spec: every mistake at once, every field documented, nothing unknown, the edges of each range."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from opentinker.shared.spec import JobSpec, parse_spec
from opentinker.shared.spec.algorithm_parts import PRESETS
from opentinker.shared.spec.engines import may_merge
from opentinker.shared.spec.sweeps.children import spec_schema
from opentinker.shared.types.errors import SpecError
from opentinker.shared.types.spec_text import load_spec
from tests.support.factories import SMALLEST, make_spec, refusals


def parts(kind: type[BaseModel]) -> Iterator[type[BaseModel]]:
    """The model and every model in its fields."""
    yield kind
    for info in kind.model_fields.values():
        for inner in (info.annotation, *get_args(info.annotation)):
            if isinstance(inner, type) and issubclass(inner, BaseModel):
                yield from parts(inner)


def changed(path: str, value: Any) -> dict[str, Any]:
    data: dict[str, Any] = {k: dict(v) if isinstance(v, dict) else v for k, v in SMALLEST.items()}
    *inner, last = path.split(".")
    at = data
    for name in inner:
        at = at.setdefault(name, {})
    at[last] = value
    return data


def mistakes(data: Any) -> dict[str, str]:
    return refusals(parse_spec, data)


def test_smallest_spec_is_enough() -> None:
    assert parse_spec(SMALLEST).algorithm.name == "grpo"


def test_every_mistake_is_reported_at_once() -> None:
    found = mistakes(
        {
            "name": "\x1b[31mred",
            "model": {"base": "", "dtype": "int4", "speed": 9},
            "algorithm": {"group_size": 1, "updates_per_batch": 0},
            "rollout": {"temperature": 0, "top_p": 1.5, "stop": [""]},
            "train": {"lr": -1, "keep_checkpoints": 1},
            "unknown": 1,
        }
    )
    assert set(found) == {
        "name", "model.base", "model.dtype", "model.speed", "environment", "algorithm.group_size",
        "algorithm.updates_per_batch", "rollout.temperature", "rollout.top_p", "rollout.stop.0", "train.steps",
        "train.lr", "train.keep_checkpoints", "unknown",
    }  # fmt: skip
    assert "float32" in found["model.dtype"] and "bfloat16" in found["model.dtype"]


@pytest.mark.parametrize("kind", list(dict.fromkeys(parts(JobSpec))), ids=lambda kind: kind.__name__)
def test_every_field_is_documented_and_unknown_ones_are_refused(kind: type[BaseModel]) -> None:
    missing = [name for name, info in kind.model_fields.items() if not info.description]
    assert not missing, f"{kind.__name__}: {missing}"
    assert kind.model_config["extra"] == "forbid" and kind.model_config["frozen"]


def test_every_setting_of_the_schema_has_a_description() -> None:
    """Also of tables by name and of lists, which the schema has as definitions."""
    schema = spec_schema()
    tables = {"": schema, **schema["$defs"]}
    found_in = {
        (table, name): one for table, part in tables.items() for name, one in part.get("properties", {}).items()
    }
    assert {
        ("DpoSpec", "beta"),
        ("MatchSpec", "rotate"),
        ("SeatSpec", "timeout_s"),
        ("ToySpec", "skill"),
    } <= found_in.keys()
    assert [place for place, one in found_in.items() if not one.get("description")] == []


EDGES: list[tuple[str, Any, Any]] = [
    ("name", "Größe " + "a" * 194, "a" * 201),
    ("algorithm.group_size", 2, 1),
    ("algorithm.max_staleness", 0, -1),
    ("algorithm.clip_low", 1.0, 1.0001),
    ("algorithm.kl_coef", 0.0, -1e-9),
    ("rollout.temperature", 2.0, 2.1),
    ("rollout.temperature", 1e-6, 0.0),
    ("rollout.top_p", 1.0, 1.0001),
    ("rollout.top_p", 1e-6, 0.0),
    ("rollout.top_k", 0, -1),
    ("rollout.retries", 10, 11),
    ("rollout.max_failed_share", 1.0, 1.01),
    ("train.steps", 1, 0),
    ("train.lr", 0.0, -1e-9),
    ("train.beta1", 0.999, 1.0),
    ("train.grad_clip", 1e-6, 0.0),
    ("train.keep_checkpoints", 2, 1),
    ("resources.trainer_gpus", 0, -1),
    ("resources.rollout_gpus", 16, 17),
    ("rollout.tensor_parallel", 1, 0),
    ("rollout.tensor_parallel", 16, 17),
    ("resources.rollout_workers", 1, 0),
    ("resources.trainer_ranks", 8, 0),
]


@pytest.mark.parametrize(("path", "allowed", "refused"), EDGES)
def test_edges(path: str, allowed: Any, refused: Any) -> None:
    parse_spec(changed(path, allowed))
    assert path in mistakes(changed(path, refused))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, "x", None, [], {}])
@pytest.mark.parametrize("path", ["train.lr", "rollout.temperature", "algorithm.kl_coef"])
def test_numbers_are_finite_numbers(path: str, value: Any) -> None:
    assert path in mistakes(changed(path, value))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"algorithm": {"groups_per_batch": 4, "updates_per_batch": 3}}, "updates_per_batch"),
        ({"rollout": {"max_tokens": 4, "max_tokens_per_turn": 5}}, "max_tokens_per_turn"),
        ({"train": {"steps": 2, "warmup_steps": 3}}, "warmup_steps"),
        ({"train": {"steps": 2, "lr_end": 0.1}}, "lr_end"),
    ],
)
def test_fields_that_contradict_each_other_are_refused(changes: dict[str, Any], named: str) -> None:
    (section,) = changes
    assert list(mistakes({**SMALLEST, **changes})) == [f"{section}.{named}"]


def test_contradictions_are_reported_beside_other_mistakes() -> None:
    found = mistakes(
        {
            "algorithm": {"groups_per_batch": 4, "updates_per_batch": 3, "overlong_shaping": True, "loss": "none"},
            "rollout": {"max_tokens": 4, "max_tokens_per_turn": 5, "temperature": 0},
            "train": {"steps": 2, "warmup_steps": 3, "lr": -1},
        }
    )
    assert set(found) == {
        "name", "model", "environment", "algorithm.loss", "algorithm.updates_per_batch", "rollout.temperature",
        "rollout.max_tokens_per_turn", "train.lr", "train.warmup_steps",
    }  # fmt: skip
    found = mistakes({"train": {}, "algorithm": {"overlong_shaping": True, "overlong_length": 999}})
    assert set(found) == {"name", "model", "environment", "train.steps", "algorithm.overlong_length"}


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=150, deadline=None)
@given(whole=JSON, part=st.sampled_from([*JobSpec.model_fields, "x"]), value=JSON)
def test_any_data_is_a_spec_or_a_list_of_mistakes(whole: Any, part: str, value: Any) -> None:
    for data in (whole, {**SMALLEST, part: value}):
        try:
            parse_spec(data)
        except SpecError as error:
            assert error.mistakes and all(m["field"] and m["problem"] for m in error.mistakes)


def test_spec_survives_storage() -> None:
    for spec in (
        make_spec(train__target={"exact": 0.9}, rollout__toy={"skill": 1.0}),
        make_spec(),
        parse_spec({**SMALLEST, "model": {"base": "m", "lora": {}}, "rollout": {"stop": ["\n"]}}),
    ):
        assert parse_spec(spec.model_dump(mode="json")) == spec


@pytest.mark.parametrize(
    ("changes", "unused"),
    [
        ({"rollout": {"toy": {}}}, {"rollout.toy"}),
        ({"rollout": {"engine": "vllm", "toy": {"skill": 0.5}}}, {"rollout.toy"}),
        (
            {"rollout": {"engine": "toy", "temperature": 0.5, "top_p": 0.9, "top_k": 5, "stop": ["x"]}},
            {"rollout.temperature", "rollout.top_p", "rollout.top_k", "rollout.stop"},
        ),
        ({"train": {"steps": 1, "simulated_step_s": 0.0}}, {"train.simulated_step_s"}),
        (
            {
                "model": {"base": "m", "lora": {}},
                "algorithm": {"loss": "ppo", "updates_per_batch": 2},
                "train": {"steps": 1, "learner": "simulated", "lr": 0.1, "seed": 1},
                "resources": {"trainer_gpus": 1},
            },
            {"model.lora", "algorithm.loss", "algorithm.updates_per_batch", "train.lr", "train.seed",
             "resources.trainer_gpus"},
        ),
    ],
)  # fmt: skip
def test_settings_that_would_be_ignored_are_refused(changes: dict[str, Any], unused: set[str]) -> None:
    assert set(mistakes({**SMALLEST, **changes})) == unused


def test_a_rank_per_gpu_or_as_many_as_are_asked_for() -> None:
    assert make_spec(train={"steps": 1}, resources={"trainer_gpus": 4}).resources.ranks == 4
    assert make_spec(train={"steps": 1}, resources={"trainer_ranks": 3}).resources.ranks == 3
    assert make_spec().resources.ranks == 1
    found = mistakes({**SMALLEST, "resources": {"trainer_gpus": 2, "trainer_ranks": 3}})
    assert "one rank per GPU" in found["resources.trainer_ranks"]
    simulated = {"steps": 1, "learner": "simulated"}
    found = mistakes({**SMALLEST, "train": simulated, "resources": {"trainer_ranks": 2}})
    assert set(found) == {"resources.trainer_ranks"}


def test_an_engine_has_a_rank_for_each_gpu() -> None:
    vllm = {**SMALLEST, "rollout": {"engine": "vllm"}}
    assert parse_spec(vllm).rollout.tensor_parallel == 1
    assert parse_spec({**vllm, "resources": {"rollout_gpus": 4}}).rollout.tensor_parallel == 4
    divided = {**vllm, "rollout": {"engine": "vllm", "tensor_parallel": 2}}
    again = parse_spec(parse_spec(divided).model_dump(mode="json"))
    assert (again.rollout.tensor_parallel, again.resources.rollout_gpus) == (2, 0)
    found = mistakes({**divided, "resources": {"rollout_gpus": 4}})
    assert "one rank per GPU" in found["rollout.tensor_parallel"]
    toy = {**SMALLEST, "rollout": {"engine": "toy", "tensor_parallel": 2}, "resources": {"rollout_gpus": 2}}
    assert set(mistakes(toy)) == {"rollout.tensor_parallel", "resources.rollout_gpus"}


def test_several_ranks_do_not_go_with_everything() -> None:
    lora = {"base": "m", "lora": {}}
    for rollout in ({"tensor_parallel": 2}, {}):
        resources = {} if rollout else {"rollout_gpus": 2}
        spec = {**SMALLEST, "model": lora, "rollout": {**rollout, "lora": "merged"}, "resources": resources}
        assert "with 2 ranks" in mistakes(spec)["rollout.lora"]
        assert not may_merge(parse_spec({**spec, "rollout": rollout}))
    exact = {"train": {"steps": 1, "deterministic": True}, "algorithm": {"max_staleness": 0}}
    spec = {**SMALLEST, **exact, "rollout": {"seed": 1, "tensor_parallel": 2}}
    assert set(mistakes(spec)) == {"rollout.tensor_parallel"}


def test_ranks_share_what_they_can() -> None:
    several = {"trainer_ranks": 2}
    zero = {"steps": 1, "parallel": "zero3"}
    assert parse_spec({**SMALLEST, "train": zero, "resources": several}).train.parallel == "zero3"
    assert "trainer_ranks > 1" in mistakes({**SMALLEST, "train": zero})["train.parallel"]
    found = mistakes({**SMALLEST, "train": zero, "resources": several, "algorithm": {"name": "ppo"}})
    assert "critic" in found["train.parallel"]
    simulated = {"steps": 1, "learner": "simulated", "parallel": "data"}
    assert parse_spec({**SMALLEST, "train": simulated}).train.parallel == "data"


def test_simulation_gives_what_it_uses_its_values() -> None:
    spec = make_spec(algorithm={"drop_zero_variance": True, "kl_coef": 0.1})
    assert spec.rollout.toy is not None and spec.rollout.toy.skill == 0.5
    assert spec.train.simulated_step_s == 0.0
    plain = parse_spec(SMALLEST)
    assert plain.rollout.toy is None and plain.train.simulated_step_s is None


def test_files(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text('name = "x"')
    (tmp_path / "a.json").write_text('{"name": "x"}')
    assert load_spec(tmp_path / "a.toml") == load_spec(tmp_path / "a.json") == {"name": "x"}
    for name, content in (("b.toml", b"x = "), ("b.json", b"{"), ("c.toml", b"\xff")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(SpecError, match=name):
            load_spec(tmp_path / name)
    with pytest.raises(SpecError, match=r"none\.toml"):
        load_spec(tmp_path / "none.toml")


@pytest.mark.parametrize("learner", ["torch", "simulated"])
@pytest.mark.parametrize("preset", PRESETS)
def test_what_is_stored_is_valid_again_and_means_the_same(preset: str, learner: str) -> None:
    if preset == "distill" and learner == "simulated":
        pytest.skip("refused")
    teacher = {"base": "t"} if preset == "distill" else None
    train = {"steps": 1, "learner": learner}
    spec = parse_spec({**SMALLEST, "algorithm": {"name": preset}, "teacher": teacher, "train": train})
    assert parse_spec(spec.model_dump(mode="json")) == spec


INFERENCE: dict[str, Any] = {"name": "x", "kind": "inference", "model": {"base": "m"}}


def test_an_inference_job_is_a_model_and_what_serves_it() -> None:
    spec = parse_spec(INFERENCE | {"rollout": {"context_length": 99}, "serving": {"idle_s": 60}})
    stored = spec.model_dump(mode="json")
    assert parse_spec(stored) == spec
    labels = {"name", "project", "tags", "notes"}
    assert stored.keys() == labels | {
        "kind",
        "model",
        "rollout",
        "serving",
        "start",
        "notify",
        "resources",
        "artifacts",
    }


@pytest.mark.parametrize(
    ("parts", "field", "said"),
    [
        ({"train": {"steps": 1}}, "train", "does not apply to kind = 'inference'"),
        ({"environment": {"name": "bandit"}}, "environment", "does not apply"),
        ({"rollout": {"temperature": 0.5}}, "rollout.temperature", "does not apply to kind = 'inference'"),
        ({"rollout": {"max_tokens": 5}}, "rollout.max_tokens", "does not apply"),
        ({"model": {"base": "m", "lora": {}}}, "model.lora", "needs start.from"),
        ({"start": {"from": "j-0123456789@1", "optimizer": True}}, "start.optimizer", "nothing is trained"),
        ({"resources": {"trainer_gpus": 2}}, "resources.trainer_gpus", "nothing is trained"),
        ({"resources": {"trainer_ranks": 2}}, "resources.trainer_ranks", "nothing is trained"),
        ({"kind": "sft", "data": {"path": "p"}, "train": {"steps": 1}, "serving": {}}, "serving", "kind = 'sft'"),
        ({"kind": "sft", "data": {"path": "p"}}, "train", "is needed for kind = 'sft'"),
    ],
)
def test_what_a_kind_has_no_use_for_is_refused(parts: dict[str, Any], field: str, said: str) -> None:
    ((found, problem),) = mistakes(INFERENCE | parts).items()
    assert found == field and said in problem


def unbounded(schema: Any, definitions: dict[str, Any], path: str = "") -> Iterator[str]:
    """Numbers without a smallest or a largest value, lists without a greatest length."""
    if "$ref" in schema:
        schema = definitions[schema["$ref"].rpartition("/")[2]]
    ends = (("maximum", "exclusiveMaximum"), ("minimum", "exclusiveMinimum"))
    is_number = schema.get("type") in ("integer", "number") and not schema.keys() & {"enum", "const"}
    if is_number and not all(schema.keys() & set(end) for end in ends):
        yield path
    if schema.get("type") == "array" and "maxItems" not in schema:
        yield f"{path}[]"
    for name, inner in schema.get("properties", {}).items():
        yield from unbounded(inner, definitions, f"{path}.{name}" if path else name)
    inside = [
        schema.get("items"),
        schema.get("additionalProperties"),
        *schema.get("anyOf", []),
        *schema.get("allOf", []),
    ]
    for inner in inside:
        if isinstance(inner, dict):
            yield from unbounded(inner, definitions, path)


def test_every_number_and_every_list_has_bounds_which_the_documentation_states() -> None:
    schema = JobSpec.model_json_schema()
    assert list(unbounded(schema, schema["$defs"])) == []
    page = (Path(__file__).resolve().parents[4] / "docs" / "job-spec.md").read_text()
    for part in set(parts(JobSpec)):
        for name, described in part.model_json_schema(by_alias=True).get("properties", {}).items():
            numbers = [
                one for one in (described, *described.get("anyOf", [])) if one.get("type") in ("integer", "number")
            ]
            for number in numbers:
                most = number.get("maximum", number.get("exclusiveMaximum"))
                rows = [line for line in page.splitlines() if line.startswith(f"| `{name}` |")]
                assert any(f"<= {most}" in row or f"< {most}" in row for row in rows), (name, most)


TOO_MUCH: list[tuple[dict[str, Any], str]] = [
    ({"algorithm": {"group_size": 1024, "groups_per_batch": 1025}}, "algorithm.groups_per_batch"),
    ({"algorithm": {"group_size": 2, "groups_per_batch": 65_536, "max_staleness": 16}}, "algorithm.max_staleness"),
    ({"algorithm": {"group_size": 1024}, "rollout": {"max_concurrent_groups": 17}}, "rollout.max_concurrent_groups"),
    ({"algorithm": {"group_size": 2}, "rollout": {"max_concurrent_groups": 32, "oversample": 511}},
     "rollout.max_concurrent_groups"),
    ({"validation": {"every": 1, "episodes": 200_000, "samples": 2, "temperature": 1.0}}, "validation.episodes"),
    ({"algorithm": {"group_size": 2**31}}, "algorithm.group_size"),
    ({"algorithm": {"groups_per_batch": 2_147_483_648}}, "algorithm.groups_per_batch"),
    ({"validation": {"every": 1, "episodes": 10**12}}, "validation.episodes"),
    ({"rollout": {"max_tokens": 10**30}}, "rollout.max_tokens"),
    ({"train": {"steps": 10**18}}, "train.steps"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "field"), TOO_MUCH)
def test_numbers_that_are_too_large_alone_or_together_are_refused(changes: dict[str, Any], field: str) -> None:
    assert list(mistakes({**SMALLEST, **changes})) == [field]


def test_the_largest_that_is_allowed_is_allowed() -> None:
    parse_spec({**SMALLEST, "algorithm": {"group_size": 1024, "groups_per_batch": 1024, "max_staleness": 1023},
                "rollout": {"max_concurrent_groups": 8, "oversample": 1024},
                "validation": {"every": 1, "episodes": 200_000}})  # fmt: skip
