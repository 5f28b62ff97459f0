"""The packed forward pass equals the plain one: values and gradients, with and without shared prefixes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.attention.varlen import varlen_attn
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from opentinker.shared.nn import attention
from opentinker.shared.nn.forward import token_scores
from opentinker.shared.nn.layout import Rows, layout
from opentinker.shared.nn.models import check_window, load_model
from opentinker.shared.types.errors import JobFailed
from tests.support.learning import plain_logprobs, random_groups


def ragged(seed: int, **options: Any) -> tuple[list[list[int]], list[list[int]]]:
    trajectories = [t for group in random_groups(seed, **options) for t in group.trajectories]
    return [t.ids.tolist() for t in trajectories], [t.mask.tolist() for t in trajectories]


def padded_logprobs(model: Any, ids: list[list[int]], masks: list[list[int]], temperature: float) -> torch.Tensor:
    """The textbook way: pad to the longest, mask the padding, take all logits."""
    length = max(map(len, ids))
    tokens = torch.tensor([row + [0] * (length - len(row)) for row in ids])
    attention = torch.tensor([[1] * len(row) + [0] * (length - len(row)) for row in ids])
    wanted = torch.tensor([row + [0] * (length - len(row)) for row in masks])[:, 1:].bool()
    logits = model(input_ids=tokens, attention_mask=attention, use_cache=False).logits[:, :-1].float() / temperature
    return logits.log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0][wanted]


@pytest.fixture(scope="module")
def models(tiny: Path) -> tuple[Any, Any]:
    return AutoModelForCausalLM.from_pretrained(tiny), load_model(str(tiny), torch.float32)


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("chunked", ["", "by itself", "more than there is work"])
@pytest.mark.parametrize("unpadded", [False, True])
def test_packed_equals_padded_in_values_and_gradients(
    models: tuple[Any, Any], share: bool, temperature: float, chunked: str, unpadded: bool
) -> None:
    plain, packed = models
    ids, masks = ragged(3)
    weights = torch.linspace(-1, 1, sum(map(sum, masks)))
    expected = padded_logprobs(plain, ids, masks, temperature)
    (expected * weights).sum().backward()
    plan = layout(ids, masks, share_prefixes=share)
    plan = plan.unpadded() if unpadded else plan
    at_once = 64 * 7 if chunked else 1 << 24
    agree = (lambda _: 1000) if chunked == "more than there is work" else None
    got, entropy, _ = token_scores(packed, plan, temperature=temperature, logits_at_once=at_once, agree=agree)
    (got * weights).sum().backward()
    torch.testing.assert_close(got, expected, atol=2e-6, rtol=0)
    assert entropy.min() > 0 and entropy.max() <= np.log(64) + 1e-5
    for (name, theirs), ours in zip(plain.named_parameters(), packed.parameters(), strict=True):
        scale = float(theirs.grad.abs().max())
        torch.testing.assert_close(ours.grad, theirs.grad, atol=2e-5 * scale, rtol=0, msg=lambda m, n=name: f"{n}: {m}")
    plain.zero_grad()
    packed.zero_grad()


@pytest.mark.parametrize("seed", range(20))
def test_every_row_is_found_in_the_stream(seed: int) -> None:
    """Rows, places, predictors and targets of random layouts, against a walk over the sequences themselves."""
    rng = np.random.default_rng(seed)
    ids, masks = ragged(seed, groups=int(rng.integers(1, 6)), size=int(rng.integers(2, 9)), vocabulary=6)
    if seed % 2:
        ids, masks = [*ids, [*ids[0][:2], 4], ids[1]], [*masks, [0, 0, 1], masks[1]]
    plan = layout(ids, masks)
    joined = torch.cat([bucket.ravel() for bucket in plan.buckets])
    assert torch.equal(joined[plan.places_N], torch.arange(len(plan.ids_N)))
    rows = plan.unpadded().rows
    assert rows is not None and torch.equal(rows.tokens_R[rows.places_N], torch.arange(len(plan.ids_N)))
    assert len(rows.tokens_R) == rows.ends[-1] == sum(plan.lengths) and rows.longest == max(plan.lengths)
    padded = [row for bucket in plan.buckets for row in bucket.tolist()]
    unpadded = [row.tolist() for row in rows.tokens_R.split(rows.ends.diff().tolist())]
    assert unpadded == [row[:length] for row, length in zip(padded, plan.lengths, strict=True)]
    context = {}
    for bucket in plan.buckets:
        for row in bucket.tolist():
            for end in range(1, len(row) + 1):
                if row[end - 1] in context or plan.positions_N[row[end - 1]] != end - 1:
                    continue
                context[row[end - 1]] = plan.ids_N[row[:end]].tolist()
    wanted = [(row[:t], row[t]) for row, mask in zip(ids, masks, strict=True) for t in range(len(row)) if mask[t]]
    predictors, targets = plan.predictors_P[plan.selected_M].tolist(), plan.targets_U[plan.selected_M].tolist()
    assert [(context[p], t) for p, t in zip(predictors, targets, strict=True)] == wanted
    prefixes = {tuple(row[: t + 1]) for row, mask in zip(ids, masks, strict=True) for t in range(_last(mask))}
    assert len(plan.ids_N) == len(prefixes)


def _last(mask: list[int]) -> int:
    return max(t for t, m in enumerate(mask) if m)


def test_long_and_short_sequences_share_little_padding() -> None:
    rng = np.random.default_rng(0)
    lengths = [int(n) for n in np.exp(rng.normal(5.0, 0.8, 64)).clip(8, 1500)]
    ids = [rng.integers(3, 60, n).tolist() for n in lengths]
    plan = layout(ids, [[0] + [1] * (n - 1) for n in lengths])
    places = sum(bucket.numel() for bucket in plan.buckets)
    assert places <= 1.25 * len(plan.ids_N)
    assert len(plan.buckets) < 32


def test_kernel_attends_causally_within_each_row(models: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The one call that only a GPU can do, in its place what it documents: rows by their ends, and a causal window."""
    _, packed = models
    ids, masks = ragged(4)
    expected, *_ = token_scores(packed, layout(ids, masks), temperature=1.0)
    calls: list[tuple[int, int]] = []

    def kernel(q: Any, k: Any, v: Any, ends_q: Any, ends_k: Any, most_q: int, most_k: int, **options: Any) -> Any:
        calls.append(options["window_size"])
        assert ends_q is ends_k and ends_q.dtype == torch.int32 and most_q == most_k == int(ends_q.diff().max())
        assert options["enable_gqa"] is (q.shape[1] != k.shape[1])
        rows = Rows(torch.empty(0), torch.empty(0), ends_q, most_q)
        return attention._row_by_row(q, k, v, rows, options["scale"]).view(q.shape)

    monkeypatch.setattr(attention, "varlen_attn", kernel)
    monkeypatch.setattr(attention, "_has_kernel", lambda _: True)
    monkeypatch.setattr(attention, "_on_gpu", lambda _: True)
    got, *_ = token_scores(packed, layout(ids, masks).unpadded(), temperature=1.0)
    torch.testing.assert_close(got, expected, atol=2e-6, rtol=0)
    assert calls and set(calls) == {(-1, 0)}


def test_attention_has_the_precision_of_the_job(models: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    _, packed = models
    ids, masks = ragged(4)
    seen, by_rows = set(), attention._row_by_row

    def watched(q: Any, k: Any, v: Any, *rest: Any) -> Any:
        seen.add((q.dtype, k.dtype, v.dtype))
        return by_rows(q, k, v, *rest)

    monkeypatch.setattr(attention, "_row_by_row", watched)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got, *_ = token_scores(packed, layout(ids, masks).unpadded(), temperature=1.0)
        expected, *_ = token_scores(packed, layout(ids, masks), temperature=1.0)
    assert seen == {(torch.bfloat16,) * 3}
    torch.testing.assert_close(got, expected, atol=0.02, rtol=0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the kernel runs on a GPU")
@pytest.mark.parametrize("masters", [torch.bfloat16, torch.float32])
def test_kernel_of_a_gpu_agrees_with_buckets(tiny: Path, monkeypatch: pytest.MonkeyPatch, masters: torch.dtype) -> None:
    packed = load_model(str(tiny), masters).cuda()
    ids, masks = ragged(3)
    weights = torch.linspace(-1, 1, sum(map(sum, masks)), device="cuda")
    plan = layout(ids, masks).to("cuda")
    calls: list[int] = []
    found: list[list[torch.Tensor]] = []

    def watched(*parts: Any, **options: Any) -> Any:
        calls.append(1)
        return varlen_attn(*parts, **options)

    monkeypatch.setattr(attention, "varlen_attn", watched)
    for each in (plan, replace(plan, rows=None)):
        packed.zero_grad()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            logprobs, *_ = token_scores(packed, each, temperature=1.0)
        (logprobs * weights).sum().backward()
        found.append([logprobs.detach(), *(p.grad.clone() for p in packed.parameters() if p.grad is not None)])
    assert calls
    for got, expected in zip(*found, strict=True):
        torch.testing.assert_close(got, expected, atol=0.05 * float(expected.abs().max()), rtol=0)


def test_one_sequence_alone_and_the_first_token(models: tuple[Any, Any]) -> None:
    plain, packed = models
    ids = [5, 9, 11, 1]
    got, *_ = token_scores(packed, layout([ids], [[0, 0, 1, 1]]), temperature=1.0)
    torch.testing.assert_close(got.detach(), plain_logprobs(plain, ids)[1:], atol=2e-6, rtol=0)
    with pytest.raises(ValueError, match="first token"):
        layout([ids], [[1, 1, 1, 1]])


def refused(model: Path, reason: str) -> None:
    with pytest.raises(JobFailed, match=reason):
        load_model(str(model), torch.float32)


def test_unusable_models_are_refused_with_advice(tmp_path: Path, tiny: Path) -> None:
    refused(tmp_path / "nowhere", "not found")
    refused(tmp_path, r"no config\.json")
    (tmp_path / "config.json").write_text("{")
    refused(tmp_path, "cannot be read")
    (tmp_path / "config.json").write_bytes((tiny / "config.json").read_bytes())
    refused(tmp_path, "safetensors")
    (tmp_path / "model.safetensors").write_bytes(b"\x10" * 64)
    refused(tmp_path, "could not be loaded")
    text = (tiny / "config.json").read_text().replace("{", '{"auto_map": {"AutoModel": "own.Model"},', 1)
    (tmp_path / "config.json").write_text(text)
    refused(tmp_path, "own code")


def test_weights_that_do_not_fit_the_config_are_refused(tmp_path: Path, tiny: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes((tiny / "model.safetensors").read_bytes())
    text = (tiny / "config.json").read_text().replace('"num_hidden_layers": 4', '"num_hidden_layers": 5')
    layers = '"full_attention",\n    "full_attention"'
    (tmp_path / "config.json").write_text(text.replace(layers, f'"full_attention",\n    {layers}', 1))
    refused(tmp_path, "lacks")


@pytest.mark.parametrize(
    ("config", "longest"),
    [
        (Qwen2Config(sliding_window=128), None),  # configured, and switched off
        (Qwen2Config(sliding_window=128, use_sliding_window=True, max_window_layers=2), 128),
        (MistralConfig(sliding_window=4096), 4096),
        (MistralConfig(sliding_window=None), None),
        (Gemma3TextConfig(sliding_window=512), 512),
        (LlamaConfig(), None),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_window_that_trajectories_may_outgrow_is_refused_before_training(config: Any, longest: int | None) -> None:
    check_window("m", config, longest or 100_000)
    if longest is not None:
        with pytest.raises(JobFailed, match=f"looks back {longest} tokens"):
            check_window("m", config, longest + 1)


def test_a_sequence_beyond_the_sliding_window_is_refused(tmp_path: Path) -> None:
    config = Qwen2Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        use_sliding_window=True,
        sliding_window=8,
        max_window_layers=0,
    )
    Qwen2ForCausalLM(config).save_pretrained(tmp_path)
    model = load_model(str(tmp_path), torch.float32)
    with pytest.raises(NotImplementedError, match="sliding window"):
        token_scores(model, layout([[3] * 12], [[0] + [1] * 11]), temperature=1.0)
