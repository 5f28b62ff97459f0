"""Sharing of engines between policies and frozen checkpoints of a job."""

from __future__ import annotations

from typing import Any

import pytest

from opentinker.shared.spec import JobSpec, parse_spec
from opentinker.shared.spec.engines import (
    MAX_ADAPTERS_AT_ONCE,
    adapters_at_once,
    engines,
    versions_at_once,
    why_separate,
)
from opentinker.shared.types.errors import SpecError

LORA = {"rank": 8}
OLD = {"frozen": "j-0123456789@7"}


def game(policies: dict[str, Any], seats: dict[str, Any] | None = None, **changes: Any) -> JobSpec:
    return parse_spec(
        {
            "name": "game",
            "model": {"base": "m"},
            "environment": {"name": "signalling"},
            "train": {"steps": 10},
            "algorithm": {"group_size": 4, "groups_per_batch": 4, "max_staleness": 1},
            "policies": policies,
            "seats": {name: name for name in policies} | (seats or {}),
            **changes,
        }
    )


def parse_spec_of(**parts: Any) -> JobSpec:
    return parse_spec({"name": "x", "environment": {"name": "gsm8k"}, **parts})


def adapter(**model: Any) -> dict[str, Any]:
    return {"model": {"lora": LORA, **model}}


def names(spec: JobSpec) -> list[list[str]]:
    return [[player.name for player in players] for players in engines(spec)]


def test_adapters_of_one_base_share_an_engine() -> None:
    spec = game({"a": adapter(), "b": {}, "c": adapter(lora={"rank": 64}, chat_template="plain"), "d": {}})
    assert names(spec) == [["a", "c"], ["b"], ["d"]], "full weights have an engine each"
    assert adapters_at_once(engines(spec)[0]) == 2 * versions_at_once(spec) == 2 * (1 + 2)


def test_what_an_engine_is_started_with_keeps_adapters_apart() -> None:
    others = {
        "b": adapter(base="other"),
        "c": adapter(dtype="bfloat16"),
        "d": adapter(dtype="bfloat16", fp32_head=True),
    }
    assert names(game({"a": adapter(), **others})) == [["a"], ["b"], ["c"], ["d"]]


def test_a_frozen_adapter_shares_the_engine_of_its_base() -> None:
    model = {"base": "m", "lora": LORA}
    seats = {
        "third": {**OLD, "model": model},
        "fourth": {"frozen": "j-0123456789@8", "model": {**model, "lora": None}},
        "fifth": {"frozen": "j-0123456789@9"},  # not looked up yet
    }
    spec = game({"a": {}, "b": adapter()}, seats)
    assert names(spec) == [["a"], ["b", "j-0123456789@7"], ["j-0123456789@8"], ["j-0123456789@9"]]
    assert [player.is_frozen for player in engines(spec)[1]] == [False, True]
    assert adapters_at_once(engines(spec)[1]) == 3 + 1, "a checkpoint has one version"


def test_a_pool_of_adapters_shares_the_engine_of_its_policy() -> None:
    seats = {"third": {"pool": "past"}, "fourth": {"pool": "old"}}
    pools = {"past": {"policy": "a", "every": 5}, "old": {"policy": "b", "every": 5}}
    spec = game({"a": adapter(), "b": {}}, seats, pools=pools)
    assert names(spec) == [["a", "past@"], ["b"], ["old@"]]
    assert [player.pool for player in engines(spec)[0]] == ["", "past"]
    assert adapters_at_once(engines(spec)[0]) == 3 + 1, "one member plays at a time"


def test_the_adapters_of_an_engine_are_bounded() -> None:
    policies = {f"p{i}": {**adapter(), "algorithm": {"max_staleness": 18}} for i in range(4)}
    assert names(game(policies)) == [["p0", "p1", "p2"], ["p3"]]
    assert 3 * 20 <= MAX_ADAPTERS_AT_ONCE < 4 * 20
    alone = game({"a": {**adapter(), "algorithm": {"max_staleness": 500}}, "b": adapter(), "c": adapter()})
    assert names(alone) == [["a"], ["b", "c"]]


def test_a_job_with_one_policy_has_one_engine() -> None:
    rest = {"name": "x", "model": {"base": "m", "lora": LORA}, "environment": {"name": "signalling"}}
    assert names(parse_spec({**rest, "train": {"steps": 10}})) == [[""]]
    start = {"from": "j-0123456789@3"}
    seats = {"listener": {**OLD, "model": {"base": "m", "lora": LORA}}}
    assert names(parse_spec({**rest, "kind": "eval", "start": start, "seats": seats})) == [["", "j-0123456789@7"]]


def test_an_adapter_with_an_engine_for_itself_may_be_merged() -> None:
    alone = parse_spec_of(model={"base": "m", "lora": LORA}, train={"steps": 1}, rollout={"lora": "merged"})
    assert why_separate(engines(alone)[0]) == ""
    assert why_separate(engines(game({"a": adapter(), "b": {}}))[0]) == ""
    assert why_separate(engines(game({"a": adapter(), "b": adapter()}))[0]) == "2 adapters of one base share the engine"


@pytest.mark.parametrize(
    ("model", "lora", "problem"),
    [
        ({}, "merged", "does not apply without an adapter"),
        ({}, "adapter", "does not apply without an adapter"),
        ({"lora": {**LORA, "target_modules": ["q_proj", "lm_head"]}}, "merged", "lm_head has an adapter"),
        ({"lora": {**LORA, "target_modules": ["model.embed_tokens"]}}, "merged", "embed_tokens has an adapter"),
    ],
)
def test_a_way_of_serving_an_adapter_that_cannot_be_is_refused(model: dict[str, Any], lora: str, problem: str) -> None:
    with pytest.raises(SpecError, match=problem):
        parse_spec_of(model={"base": "m", **model}, train={"steps": 1}, rollout={"lora": lora})


def test_policies_that_share_an_engine_cannot_be_merged() -> None:
    with pytest.raises(SpecError, match=r"rollout\.lora = 'merged': .*2 adapters of one base share the engine"):
        game({"a": adapter(), "b": adapter()}, rollout={"lora": "merged"})
