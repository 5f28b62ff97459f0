"""Jobs of kind tinker: what they take, what they refuse."""

from __future__ import annotations

from typing import Any

import pytest

from opentinker.shared.spec import parse_spec
from opentinker.shared.spec.engines import bank_of
from opentinker.shared.types.errors import SpecError


def spec(**parts: Any) -> dict[str, Any]:
    return {"name": "tinker", "kind": "tinker", "model": {"base": "somewhere"}, **parts}


def test_its_trainer_is_a_shared_one_and_its_stored_spec_is_read_again_as_it_was() -> None:
    parsed = parse_spec(spec())
    assert parsed.resources.trainer == "shared"
    assert bank_of(parsed.model_dump(mode="json")) == "somewhere in float32"
    assert parse_spec(parsed.model_dump(mode="json")) == parsed


def test_a_server_for_all_weights_shares_its_trainer_with_no_adapters() -> None:
    parsed = parse_spec(spec(tinker={"full_weights": True}))
    assert bank_of(parsed.model_dump(mode="json")) == "somewhere in float32, all weights"
    assert parse_spec(parsed.model_dump(mode="json")) == parsed


@pytest.mark.parametrize(
    ("parts", "problem"),
    [
        ({"train": {"steps": 1}}, "train"),
        ({"environment": {"name": "gsm8k"}}, "environment"),
        ({"model": {"base": "x", "lora": {"rank": 4}}}, "tinker.max_rank bounds them"),
        ({"start": {"from": "j-0123456789@latest"}}, "from checkpoints themselves"),
        ({"rollout": {"max_turns": 3}}, "rollout.max_turns"),
        ({"artifacts": {"keep_last": 3}}, "whose clients save"),
        ({"tinker": {"full_weights": True, "max_rank": 8}}, "there are no adapters"),
        ({"tinker": {"max_rank": 65}}, "tinker.max_rank"),
        ({"tinker": {"tokens_per_minute": 1}}, "tinker.tokens_per_minute"),
        ({"resources": {"trainer_gpus": 2}}, "must be 0 or 1"),
    ],
)
def test_a_setting_without_effect_is_refused(parts: dict[str, Any], problem: str) -> None:
    with pytest.raises(SpecError, match=problem):
        parse_spec(spec(**parts))


def test_it_is_open_to_its_own_tenant_and_to_those_named() -> None:
    own = parse_spec(spec()).tinker
    assert own.allows("a", "a") and not own.allows("a", "b")
    named = parse_spec(spec(tinker={"open_to": ["b"]})).tinker
    assert named.allows("a", "b") and not named.allows("a", "c")
    assert parse_spec(spec(tinker={"open_to": ["*"]})).tinker.allows("a", "c")
