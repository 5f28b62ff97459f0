"""Losses of the Tinker API against formulas in float64, and data that are refused by number and mistake."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from opentinker.services.trainer.bank.adapter_bank import AdapterBank
from opentinker.services.trainer.bank.bank_loop import BankLoop
from opentinker.services.trainer.bank.base_model import BaseModel
from opentinker.services.trainer.bank.limits import BankLimits, Refused
from opentinker.services.trainer.bank.pass_part import PassOptions, Scores
from opentinker.services.trainer.tinker.losses import (
    OPTIONS,
    Columns,
    find_loss,
    metrics_of,
    read_data,
    split,
    units_of,
)
from opentinker.shared.nn.forward import token_scores
from opentinker.shared.nn.layout import join
from opentinker.shared.spec import LoraSpec
from opentinker.shared.types.tinker import LARGEST_OPTION, Datum
from tests.conftest import WAIT_S
from tests.unit.trainer.tinker.conftest import VOCABULARY, f32, i32, some_datum

LIMITS = BankLimits(step_tokens=256, datum_tokens=64, command_tokens=512, waiting_tokens=1024, rank=16)
PROMPT = list(range(5, 25))


def without_mask(datum: Datum) -> Datum:
    return msgspec.structs.replace(datum, mask=b"")


def some_data(name: str) -> list[Datum]:
    """One target or three a token, with and without factors, neighbours that begin alike among them."""
    shapes: list[dict[str, Any]] = [{}, {"prompt": PROMPT}, {"prompt": PROMPT, "width": 3}, {"tokens": 1}, {"width": 2}]
    data = [some_datum(seed, **shape) for seed, shape in enumerate(shapes)]
    if name == "cross_entropy":
        data = [msgspec.structs.replace(datum, weights=datum.advantages, mask=b"") for datum in data]
        return [msgspec.structs.replace(data[0], weights=b""), *data[1:]]
    return [without_mask(data[0]), *data[1:]]


def read(data: Sequence[Datum], name: str, **options: float) -> list[Columns]:
    return read_data(data, find_loss(name, options), VOCABULARY, LIMITS)


def formula(name: str, lp: float, q: float, a: float, options: dict[str, float]) -> float:
    """The loss of one place, from the table of the API."""
    r = math.exp(lp - q)
    low, high = options.get("clip_low_threshold", 0.0), options.get("clip_high_threshold", 0.0)
    bounded = min(max(r, low), high)
    return {
        "cross_entropy": -lp,
        "importance_sampling": -r * a,
        "ppo": -min(r * a, bounded * a),
        "cispo": -bounded * lp * a,
        "dro": -(lp * a - options.get("beta", 0.0) / 2 * (lp - q) ** 2),
    }[name]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *((name, {}) for name in OPTIONS),
        ("ppo", {"clip_low_threshold": 0.5}),
        ("cispo", {"clip_high_threshold": 1.1}),
        ("dro", {"beta": 0.5}),
    ],
)
def test_losses_are_sums_of_the_documented_formulas(name: str, options: dict[str, float]) -> None:
    loss, data = find_loss(name, options), read(some_data(name), name, **options)
    for seed in range(3):
        rng = np.random.default_rng(seed)
        expected, total = 0.0, 0.0
        scores = [rng.uniform(-5.5, -3.0, len(datum.targets_M)) for datum in data]
        for datum, logprobs in zip(data, scores, strict=True):
            q = datum.behaviour_M if loss.is_policy_loss else 0 * datum.targets_M
            a = datum.advantages_M if loss.is_policy_loss else q
            for place, lp in enumerate(logprobs):
                term = formula(name, lp, float(q[place]), float(a[place]), {**OPTIONS[name], **options})
                expected += float(datum.factor_M[place]) * term
        units, start = units_of(data, loss, LIMITS.datum_tokens), 0
        flat = torch.from_numpy(np.concatenate(scores))
        for unit in units:
            own = flat[start : (start := start + len(unit.plan.selected_M))]
            assert unit.loss is not None
            total += float(unit.loss(Scores(own, torch.empty(0), torch.empty(0))))
        assert start == len(flat)
        assert total == pytest.approx(expected, rel=1e-10)


async def run(base: BaseModel, store: Path, name: str, data: list[Columns]) -> tuple[float, list[Any]]:
    bank, loss = AdapterBank(base, store, LIMITS, slots=2), find_loss(name, {})
    async with BankLoop(bank) as loop:
        await loop.create("t", "a", LoraSpec(rank=4), seed=0)
        units = units_of(data, loss, LIMITS.datum_tokens)
        result = await loop.send_units("t", "a", units, PassOptions(), backward=False)
    return result.loss, split(result.logprobs, data)


@pytest.fixture(scope="module")
def base(small: Path) -> BaseModel:
    return BaseModel(str(small))


async def test_each_position_is_scored_on_its_targets_which_may_be_any_tokens(
    base: BaseModel, small: Path, tmp_path: Path
) -> None:
    data = read(some_data("cross_entropy"), "cross_entropy")
    total, found = await run(base, tmp_path, "cross_entropy", data)
    plain = AutoModelForCausalLM.from_pretrained(small).double().eval()
    expected_sum = 0.0
    for datum, logprobs in zip(data, found, strict=True):
        with torch.no_grad():
            scores_NV = plain(torch.tensor(datum.ids_N[None].astype(np.int64))).logits[0].log_softmax(-1)
        targets_NK = torch.from_numpy(datum.targets_M.astype(np.int64)).view(-1, datum.width)
        expected = scores_NV.gather(-1, targets_NK).flatten().numpy()
        np.testing.assert_allclose(logprobs, expected, rtol=2e-5)
        expected_sum -= float((expected * datum.factor_M).sum())
    assert total == pytest.approx(expected_sum, rel=1e-5)


@pytest.mark.parametrize("at_once", [1 << 24, 3 * VOCABULARY])
def test_the_targets_of_a_token_share_a_prediction(base: BaseModel, at_once: int) -> None:
    """The output layer runs once for a token: values and gradients are those of a run for each target. The second
    bound cuts the predictions into chunks, some of them within a datum."""
    data = read([*some_data("cross_entropy"), some_datum(9, width=5, prompt=PROMPT)], "cross_entropy")
    units = units_of(data, find_loss("cross_entropy", {}), LIMITS.datum_tokens)
    plan = join([unit.plan for unit in units])
    assert plan.rows_U is not None and len(plan.predictors_P) < len(plan.targets_U)
    heat = torch.linspace(0.7, 1.3, len(plan.predictors_P))
    apart = replace(plan, predictors_P=plan.of_targets(plan.predictors_P), rows_U=None)
    weight_VH, rows = base.causal.get_output_embeddings().weight, list[int]()
    hook = base.causal.get_output_embeddings().register_forward_hook(lambda _, inputs, __: rows.append(len(inputs[0])))
    found = []
    weight_VH.requires_grad_(True)
    try:
        for one, temperature in ((plan, heat), (apart, plan.of_targets(heat))):
            weight_VH.grad = None
            scores = token_scores(
                base.causal, one, temperature=temperature, logits_at_once=at_once, entropy_gradient=True, hits=True
            )
            (scores[0] * torch.linspace(-1, 1, len(scores[0])) + scores[1]).sum().backward()
            found.append((*scores, weight_VH.grad, sum(rows)))
            rows.clear()
    finally:
        hook.remove()
        weight_VH.requires_grad_(False)
        weight_VH.grad = None
    (*together, ran), (*expected, ran_apart) = found
    for one, other in zip(together, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    runs = 1 if at_once > 1000 else 2  # chunks are computed again for their gradients
    assert (ran, ran_apart) == (runs * len(plan.predictors_P), runs * len(plan.targets_U))


def test_neighbours_that_begin_alike_are_computed_together() -> None:
    data = read([some_datum(seed, prompt=PROMPT) for seed in range(4)], "dro")
    units = units_of([], find_loss("dro", {}), 64) + units_of(data, find_loss("dro", {}), 64)
    assert [unit.tokens for unit in units] == [58, 58]
    assert len(units[0].plan.ids_N) == 58 - len(PROMPT)


def test_metrics_have_one_colon_and_count_what_has_a_factor() -> None:
    loss, data = find_loss("ppo", {}), read(some_data("ppo"), "ppo")
    logprobs = [datum.behaviour_M + np.float32(0.5) for datum in data]
    found = metrics_of(data, loss, logprobs, 1.5)
    assert all(name.count(":") == 1 for name in found)
    assert found["loss:sum"] == 1.5 and found["clipped:mean"] == 1.0
    assert found["tokens:sum"] == sum(int((datum.factor_M != 0).sum()) for datum in data)
    assert found["ratio:mean"] == pytest.approx(math.exp(0.5), rel=1e-6)
    assert found["kl_sampler:mean"] == pytest.approx(-0.5, rel=1e-6)
    assert metrics_of(data, find_loss("cross_entropy", {}), logprobs, 2.0).keys() == {"loss:sum", "tokens:sum"}
    silent = [msgspec.structs.replace(some_datum(1), mask=f32([0.0] * 9))]
    assert metrics_of(read(silent, "ppo"), loss, logprobs[:1], 0.0).keys() == {"loss:sum", "tokens:sum"}


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"targets": i32([5] * 8)}, "datum 1 has 8 targets; it needs 1 at each of 9 tokens"),
        ({"tokens": b"", "targets": b""}, "datum 1 has no tokens"),
        ({"tokens": b"12345"}, "datum 1 has tokens of 5 bytes, which are no int32"),
        ({"tokens": i32([5] * 8 + [64])}, "datum 1 has tokens outside of the vocabulary of 64, such as 64"),
        ({"targets": i32([5] * 8 + [-100])}, "datum 1 has targets outside of the vocabulary of 64, such as -100"),
        ({"width": 0}, "datum 1 has 0 targets for each token"),
        ({"width": 65}, "datum 1 has 65 targets for each token; choose 1 to 64"),
        ({"logprobs": b""}, "datum 1 has no logprobs, which loss_fn ppo needs"),
        ({"advantages": b""}, "datum 1 has no advantages, which loss_fn ppo needs"),
        ({"advantages": f32([1.0] * 8)}, "datum 1 has 8 advantages and 9 targets"),
        ({"logprobs": f32([math.nan] * 9)}, "datum 1 has numbers that are not finite in its logprobs"),
        ({"mask": f32([math.inf] * 9)}, "datum 1 has numbers that are not finite in its mask"),
        ({"weights": f32([1.0] * 9)}, "datum 1 has weights, which loss_fn ppo does not use"),
        ({"tokens": i32([5] * 65), "targets": i32([5] * 65)}, "datum 1 has 65 tokens, and at most 64 are allowed"),
    ],
)
def test_bad_data_are_refused_by_number_and_mistake(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(Refused, match=problem):
        read([some_datum(0), msgspec.structs.replace(some_datum(1), **changes)], "ppo")


def test_unknown_losses_and_options_are_refused() -> None:
    for name, options, problem in (
        ("gspo", {}, "loss_fn 'gspo' is unknown; choose one of cross_entropy, importance_sampling, ppo, cispo, dro"),
        ("ppo", {"clip": 0.2}, "no option 'clip'; it has clip_low_threshold, clip_high_threshold"),
        ("cross_entropy", {"beta": 0.2}, "no option 'beta'; it has none"),
        ("dro", {"beta": math.nan}, "must be 0 to 1e\\+30"),
        ("cispo", {"clip_high_threshold": 1e300}, "must be 0 to 1e\\+30"),
        ("ppo", {"clip_low_threshold": 1.3}, "must be at most clip_high_threshold, 1.2"),
    ):
        with pytest.raises(Refused, match=problem):
            find_loss(name, options)
    with pytest.raises(Refused, match="the request has no data"):
        read([], "ppo")


@pytest.mark.parametrize("name", ["ppo", "cispo", "dro"])
def test_the_largest_options_do_not_fail_a_pass(name: str) -> None:
    loss = find_loss(name, dict.fromkeys(OPTIONS[name], LARGEST_OPTION))
    logprobs_M = torch.tensor([-1.0, -80.0], requires_grad=True)
    loss.of_places(logprobs_M, torch.tensor([-90.0, -1.0]), torch.tensor([1e30, -1e30])).sum().backward()
    assert logprobs_M.grad is not None


async def test_a_tenant_waits_for_room_instead_of_being_refused(base: BaseModel, tmp_path: Path) -> None:
    limits = BankLimits(step_tokens=64, datum_tokens=64, command_tokens=64, waiting_tokens=64, waiting_commands=3)
    bank, loss = AdapterBank(base, tmp_path, limits, slots=2), find_loss("cross_entropy", {})
    data = read([without_mask(some_datum(seed, tokens=20)) for seed in range(4)], "cross_entropy")
    async with BankLoop(bank) as loop:
        await loop.create("t", "a", LoraSpec(rank=4), seed=0)
        sent = []
        for _ in range(6):
            await loop.wait_for_room("t", 80)
            assert loop._queue.tokens("t") == 0
            sent.append(loop.send_units("t", "a", units_of(data, loss, 32), PassOptions()))
        reads = []
        for _ in range(9):
            await loop.wait_for_room("t")
            assert loop._queue.commands("t") < 3
            reads.append(loop.send_read("t", "a"))
        results = await asyncio.gather(*sent)
        await asyncio.gather(*reads)
    assert len({result.loss for result in results}) == 1


async def test_a_large_command_waits_for_room_before_later_small_ones(base: BaseModel, tmp_path: Path) -> None:
    limits = BankLimits(step_tokens=64, datum_tokens=64, command_tokens=64, waiting_tokens=128)
    bank, loss = AdapterBank(base, tmp_path, limits, slots=2), find_loss("cross_entropy", {})
    data = read([without_mask(some_datum(seed, tokens=20)) for seed in range(5)], "cross_entropy")
    units = units_of(data, loss, 20)
    async with BankLoop(bank) as loop:
        await loop.create("t", "a", LoraSpec(rank=4), seed=0)
        async with loop._slots:  # no pass is carried out
            sent = [loop.send_units("t", "a", units[:4], PassOptions())]
            large = asyncio.create_task(loop.wait_for_room("t", 1000))
            small = asyncio.create_task(loop.wait_for_room("t", 20))
            await asyncio.wait([large, small], timeout=0.1)
            assert not large.done() and not small.done()
        await asyncio.wait_for(asyncio.gather(large, small, *sent), WAIT_S)
        async with loop._slots:
            sent = [loop.send_units("t", "a", units[:3], PassOptions())]
            assert loop._queue.tokens("t") == 60
            await asyncio.wait_for(loop.wait_for_room("t", 1000), WAIT_S)
        await asyncio.gather(*sent)
