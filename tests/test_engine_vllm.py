"""The vLLM engine on this machine's CPU against transformers: what was sampled, by which weights, how likely."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import socket
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch

from opentinker.services.rollout_worker.engine import Completion, Engine, EngineError, EngineLost, Sampling, SwapError
from opentinker.shared.errors import JobFailed
from opentinker.shared.nn.transport import Snapshot, WeightGroup, host_store, snapshot
from opentinker.shared.spec import LoraSpec, ToySpec
from opentinker.shared.types import Span, StopReason, SwapCommand, WeightVersion
from tests.conftest import soon

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.filterwarnings("ignore"),
]

EOS = 1
LETTERS = "~$abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
PROMPT = [5, 9, 20, 33]
BUCKET = 16 << 10
TOLERANCE = 1e-4
GROUP_S = 60.0
"""Nobody waits so long for the others where the test passes."""


def build(directory: Path, *, tied: bool, head_dim: int = 32) -> Path:
    """A random 2-layer Qwen3 with peaked outputs that hardly ever ends by itself, and a character tokenizer."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=len(LETTERS), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=head_dim, max_position_embeddings=1024, tie_word_embeddings=tied,
        initializer_range=0.25, bos_token_id=None, eos_token_id=0, pad_token_id=0,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config).float()
    with torch.no_grad():
        model.lm_head.weight[EOS] = 0.0
    model.generation_config = GenerationConfig(eos_token_id=[EOS], pad_token_id=0)
    model.save_pretrained(directory)
    letters = Tokenizer(models.WordLevel({letter: n for n, letter in enumerate(LETTERS)}, unk_token="~"))
    letters.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    letters.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=letters, eos_token="$", pad_token="~").save_pretrained(directory)
    return directory


def other_weights(base: Path, seed: int) -> Any:
    """The same architecture with new random weights."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_pretrained(base)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" not in name:
                weight.normal_(0, 0.25)
        model.lm_head.weight[EOS] = 0.0
    return model.eval()


class Trainer:
    """Rank 0 of the weight group that it forms with some engines."""

    def __init__(self, *engines: Engine, generation: int = 1) -> None:
        self.engines, self.generation = engines, generation
        self.snap: Snapshot | None = None

    async def form(self) -> Trainer:
        world = len(self.engines) + 1
        store, port = host_store("127.0.0.1", world, GROUP_S)
        hosting = asyncio.create_task(
            asyncio.to_thread(
                WeightGroup.join, address="127.0.0.1", port=port, rank=0, world=world, device="cpu", timeout_s=GROUP_S,
                store=store,
            )
        )  # fmt: skip
        await asyncio.gather(
            *[
                engine.join(
                    SwapCommand(
                        job="job", epoch=0, action="join", generation=self.generation, address="127.0.0.1", port=port,
                        rank=rank, world=world,
                    )
                )
                for rank, engine in enumerate(self.engines, 1)
            ]
        )  # fmt: skip
        self.group = await hosting
        return self

    def command(self, version: WeightVersion, named: Any) -> SwapCommand:
        self.snap = snapshot(version, named, BUCKET)
        return SwapCommand(
            job="job", epoch=0, action="receive", generation=self.generation, version=version,
            manifest=self.snap.manifest, fingerprints=self.snap.fingerprints, bucket_bytes=BUCKET,
        )  # fmt: skip

    async def publish(self, version: WeightVersion, named: Any) -> dict[str, float]:
        command = self.command(version, named)
        assert self.snap is not None
        sending = asyncio.create_task(asyncio.to_thread(self.group.send, self.snap.buckets))
        seconds = await asyncio.gather(*[engine.receive(command) for engine in self.engines])
        await sending
        return seconds[0]


def distribution(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Log-probabilities after temperature, then top_k, then top_p, as vLLM defines them."""
    logits = logits.double() / sampling.temperature
    if sampling.top_k:
        kth = logits.topk(sampling.top_k, dim=-1).values[..., -1:]
        logits = logits.masked_fill(logits < kth, -torch.inf)
    if sampling.top_p < 1:
        ordered, order = logits.sort(dim=-1)
        drop = ordered.softmax(-1).cumsum(-1) <= 1 - sampling.top_p
        drop[..., -1] = False
        logits = logits.masked_fill(torch.zeros_like(drop).scatter(-1, order, drop), -torch.inf)
    return logits.log_softmax(-1)


def expected(model: Any, prompt: list[int], done: Completion, sampling: Sampling) -> torch.Tensor:
    """Logprobs of the completion's tokens by one full forward pass of transformers."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt + done.ids])).logits[0, len(prompt) - 1 : -1]
    return distribution(logits, sampling).gather(-1, torch.tensor(done.ids)[:, None])[:, 0]


def worst(done: Completion, logprobs: torch.Tensor, start: int = 0, end: int | None = None) -> float:
    return float((torch.tensor(done.logprobs).double() - logprobs)[start:end].abs().max())


@pytest.fixture(scope="module", autouse=True)
def quiet_end() -> Iterator[None]:
    """vLLM leaves the contexts of its sockets to the collector, which would complain outside of any test."""
    yield
    import zmq

    gc.unfreeze()
    gc.collect()
    for thing in gc.get_objects():
        if type(thing) is zmq.Context and not thing.closed:
            thing.destroy(linger=0)


@pytest.fixture(scope="module", params=["untied", "tied"])
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    return build(tmp_path_factory.mktemp(request.param), tied=request.param == "tied")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(base: Path) -> AsyncIterator[Any]:
    from opentinker.services.rollout_worker.vllm_engine import VllmEngine

    vllm = VllmEngine(
        str(base), eos_ids=[EOS], context_length=512, max_concurrent=32, stop_strings=True, group_timeout_s=GROUP_S
    )
    await vllm.start()
    yield vllm
    await vllm.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def trainer(engine: Any, base: Path) -> Trainer:
    trainer = await Trainer(engine).form()
    await trainer.publish(WeightVersion(0, 0), other_weights(base, 100).named_parameters())
    return trainer


@pytest_asyncio.fixture(loop_scope="module")
async def current(engine: Any, trainer: Trainer, base: Path) -> Any:
    """The transformers model with the weights that the engine has now, in a healthy group."""
    model = other_weights(base, 1)
    if engine._generation != trainer.generation:
        trainer.generation += 1
        await trainer.form()
    await trainer.publish(WeightVersion(1, 0), model.named_parameters())
    return model


async def test_a_completion_across_a_swap_has_two_spans_each_true_to_its_weights(
    engine: Any, trainer: Trainer, base: Path, current: Any
) -> None:
    newer, sampling = other_weights(base, 2), Sampling(max_tokens=400, seed=7)
    for attempt in range(20):
        running = [asyncio.create_task(engine.generate(f"r{attempt}-{n}", PROMPT, sampling)) for n in range(4)]
        await asyncio.sleep(0.01 * (attempt + 1))
        await trainer.publish(WeightVersion(1, 1), newer.named_parameters())
        crossing = [done for done in await asyncio.gather(*running) if len(done.spans) == 2]
        if crossing:
            break
        await trainer.publish(WeightVersion(1, 0), current.named_parameters())
    done = crossing[0]
    old, new = done.spans
    assert (old.start, old.version, new.end, new.version) == (
        0,
        WeightVersion(1, 0),
        len(done.ids),
        WeightVersion(1, 1),
    )
    assert 0 < old.end == new.start < len(done.ids)
    assert worst(done, expected(current, PROMPT, done, sampling), 0, old.end) <= TOLERANCE
    assert worst(done, expected(newer, PROMPT, done, sampling), new.start) <= TOLERANCE
    assert worst(done, expected(current, PROMPT, done, sampling), new.start) > 0.1, "the weights should differ"


async def test_after_many_swaps_all_tokens_are_the_newest_weights(engine: Any, trainer: Trainer, base: Path) -> None:
    """Also the regression test of stale packed copies of a tied lm_head."""
    for step in range(3):
        model, sampling = other_weights(base, 10 + step), Sampling(max_tokens=40)
        seconds = await trainer.publish(WeightVersion(2, step), model.named_parameters())
        assert set(seconds) == {"pause", "transfer", "load", "resume"}
        done = await engine.generate(f"many-{step}", PROMPT, sampling)
        assert done.spans == [Span(0, len(done.ids), WeightVersion(2, step))]
        assert worst(done, expected(model, PROMPT, done, sampling)) <= TOLERANCE


@pytest.mark.parametrize(
    "setting",
    [
        {},
        {"temperature": 0.6},
        {"temperature": 1.7},
        {"top_k": 5},
        {"top_p": 0.8},
        {"temperature": 0.8, "top_p": 0.9, "top_k": 9},
    ],
    ids=str,
)
async def test_logprobs_are_of_the_distribution_really_sampled_from(
    engine: Any, current: Any, setting: dict[str, Any]
) -> None:
    sampling = Sampling(max_tokens=48, seed=3, **setting)
    done = await engine.generate(f"d-{setting}", PROMPT, sampling)
    assert worst(done, expected(current, PROMPT, done, sampling)) <= TOLERANCE


async def test_a_seed_fixes_the_tokens(engine: Any, current: Any) -> None:
    async def ids(seed: int | None, name: str) -> list[int]:
        return list((await engine.generate(name, PROMPT, Sampling(max_tokens=30, temperature=2.0, seed=seed))).ids)

    one, same, other, free, free_too = await asyncio.gather(
        ids(5, "s1"), ids(5, "s2"), ids(6, "s3"), ids(None, "s4"), ids(None, "s5")
    )
    assert one == same != other and free != free_too


async def test_endings_have_their_reason(engine: Any, trainer: Trainer, current: Any, base: Path) -> None:
    cut = await engine.generate("cut", PROMPT, Sampling(max_tokens=7, seed=1))
    assert (len(cut.ids), cut.stop) == (7, StopReason.LENGTH)
    full = await engine.generate("full", [7] * 500, Sampling(max_tokens=50, seed=1))
    assert (len(full.ids), full.stop) == (12, StopReason.CONTEXT)
    text = "".join(LETTERS[token] for token in cut.ids)
    stopped = await engine.generate("stop", PROMPT, Sampling(max_tokens=7, seed=1, stop=[text[2:4]]))
    assert stopped.stop == StopReason.STOP
    assert stopped.ids == cut.ids[: text.index(text[2:4]) + 2] and len(stopped.logprobs) == len(stopped.ids)
    with pytest.raises(EngineError, match="context holds 512"):
        await engine.generate("long", [7] * 512, Sampling(max_tokens=1))


async def test_the_end_of_turn_token_of_generation_config_ends_a_turn(
    engine: Any, trainer: Trainer, current: Any
) -> None:
    with torch.no_grad():
        likely = int(current(torch.tensor([PROMPT])).logits[0, -1].argmax())
        rows = current.lm_head.weight
        rows[EOS] = 3 * rows[likely]  # as far above `likely` as that is above zero, whatever the model says next
    await trainer.publish(WeightVersion(3, 0), current.named_parameters())
    done = await engine.generate("eos", PROMPT, Sampling(max_tokens=9, top_k=1))
    assert (done.ids, done.stop) == ([EOS], StopReason.EOS)


async def test_a_corrupted_bucket_changes_nothing(engine: Any, trainer: Trainer, base: Path, current: Any) -> None:
    running = asyncio.create_task(engine.generate("through", PROMPT, Sampling(max_tokens=200, seed=2)))
    command = trainer.command(WeightVersion(1, 9), other_weights(base, 9).named_parameters())
    assert trainer.snap is not None
    trainer.snap.buckets[-1][3] ^= 1
    sending = asyncio.create_task(asyncio.to_thread(trainer.group.send, trainer.snap.buckets))
    with pytest.raises(SwapError, match="fingerprint"):
        await engine.receive(command)
    await sending
    assert engine.version == WeightVersion(1, 0)
    for done, sampling in (
        (await running, Sampling(max_tokens=200, seed=2)),
        (await engine.generate("after", PROMPT, Sampling(max_tokens=30)), Sampling(max_tokens=30)),
    ):
        assert done.spans == [Span(0, len(done.ids), WeightVersion(1, 0))]
        assert worst(done, expected(current, PROMPT, done, sampling)) <= TOLERANCE


async def test_a_silent_trainer_fails_the_swap_in_time_and_generation_goes_on(
    engine: Any, trainer: Trainer, base: Path, current: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = trainer.command(WeightVersion(1, 9), other_weights(base, 9).named_parameters())
    receiving = asyncio.create_task(engine.receive(command))
    during = await engine.generate("during", PROMPT, Sampling(max_tokens=100, seed=4))
    assert not receiving.done(), "generation must not wait for the transfer"
    trainer.group.close()
    with pytest.raises(SwapError, match="lost the weight group"):
        await receiving
    assert worst(during, expected(current, PROMPT, during, Sampling(max_tokens=100))) <= TOLERANCE
    with pytest.raises(SwapError, match="closed"):
        await engine.receive(command)
    trainer.generation += 1
    monkeypatch.setattr(engine, "_group_timeout_s", 3.0)
    await trainer.form()
    with pytest.raises(SwapError, match="lost the weight group"):
        await engine.receive(trainer.command(WeightVersion(1, 9), current.named_parameters()))
    monkeypatch.undo()
    trainer.generation += 1
    await trainer.form()
    await trainer.publish(WeightVersion(1, 1), current.named_parameters())
    assert engine.version == WeightVersion(1, 1)


async def test_a_late_engine_joins_the_next_group_and_gets_the_current_version(engine: Any, base: Path) -> None:
    from opentinker.services.rollout_worker.toy_engine import ToyEngine

    early = ToyEngine(ToySpec(), eos_id=EOS, vocab_size=64, context_length=64)
    model = other_weights(base, 4)
    alone = await Trainer(early, generation=40).form()
    await alone.publish(WeightVersion(4, 7), model.named_parameters())
    alone.group.close()
    together = await Trainer(early, engine, generation=41).form()
    await together.publish(WeightVersion(4, 7), model.named_parameters())
    assert early.version == engine.version == WeightVersion(4, 7)
    done = await engine.generate("late", PROMPT, Sampling(max_tokens=20))
    assert worst(done, expected(model, PROMPT, done, Sampling(max_tokens=20))) <= TOLERANCE
    with pytest.raises(SwapError, match="group 41, not 40"):
        await engine.receive(alone.command(WeightVersion(4, 8), model.named_parameters()))


async def test_abort_and_cancel_end_one_request_only(engine: Any, current: Any) -> None:
    sampling = Sampling(max_tokens=400, seed=1)
    names = ("aborted", "cancelled", "kept")
    aborted, cancelled, kept = [asyncio.create_task(engine.generate(name, PROMPT, sampling)) for name in names]
    await asyncio.sleep(0.05)
    await engine.abort("aborted")
    cancelled.cancel()
    with pytest.raises(EngineError, match="abort"):
        await aborted
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    assert (await kept).ids


@pytest.fixture(scope="module")
def untied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    return build(tmp_path_factory.mktemp("lora"), tied=False)


async def test_lora_adapters_change_the_output_and_versions_stay_apart(untied: Path) -> None:
    from peft import LoraConfig, get_peft_model, get_peft_model_state_dict

    from opentinker.services.rollout_worker.vllm_engine import VllmEngine

    lora = LoraSpec(rank=4, alpha=8.0)
    vllm = VllmEngine(str(untied), eos_ids=[EOS], context_length=512, max_concurrent=8, lora=lora, max_staleness=2)
    await vllm.start()
    try:
        trainer = await Trainer(vllm).form()
        config = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
        model = get_peft_model(other_weights_of_disk(untied), config).eval()

        async def publish(step: int) -> list[Any]:
            torch.manual_seed(step)
            with torch.no_grad():
                for name, weight in model.named_parameters():
                    if "lora_B" in name:
                        weight.normal_(0, 0.05 * step)
            state = get_peft_model_state_dict(model)
            await trainer.publish(WeightVersion(0, step), state.items())
            return [step]

        sampling = Sampling(max_tokens=60, seed=1, temperature=0.9)
        outputs, named = [], set()
        assert vllm._engine().vllm_config.lora_config.max_loras >= 2 + 2, "staleness + 2"
        for step in range(6):  # more versions than adapters fit at once
            await publish(step)
            newest = vllm._adapters[max(vllm._adapters)].request
            named.add((newest.lora_name, newest.lora_int_id, newest.lora_path))
            done = await vllm.generate(f"v{step}", PROMPT, sampling)
            assert done.spans == [Span(0, len(done.ids), WeightVersion(0, step))]
            assert worst(done, expected(model, PROMPT, done, sampling)) <= TOLERANCE
            outputs.append(done.logprobs)
        assert len({tuple(logprobs) for logprobs in outputs}) == 6
        assert [len(set(column)) for column in zip(*named, strict=True)] == [6, 6, 6], "nothing is called as before"
        before = {k: v.clone() for k, v in model.state_dict().items()}
        long = Sampling(max_tokens=400, seed=2)
        running = asyncio.create_task(vllm.generate("running", PROMPT, long))
        await asyncio.sleep(0.05)
        await publish(6)
        new = await vllm.generate("new", PROMPT, sampling)
        assert new.spans[0].version == WeightVersion(0, 6)
        old = await running
        assert old.spans == [Span(0, len(old.ids), WeightVersion(0, 5))]
        model.load_state_dict(before)
        assert worst(old, expected(model, PROMPT, old, long)) <= TOLERANCE
    finally:
        await vllm.close()


def other_weights_of_disk(base: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(base)


async def test_a_float32_head_samples_from_logits_that_were_never_rounded(untied: Path) -> None:
    """The rest is bfloat16. transformers agrees with `float32_head`, and is far away with its own rounded logits."""
    from opentinker.services.rollout_worker.vllm_engine import VllmEngine
    from opentinker.shared.nn.layers import float32_head

    vllm = VllmEngine(
        str(untied), eos_ids=[EOS], dtype="bfloat16", fp32_head=True, context_length=256, max_concurrent=4
    )
    await vllm.start()
    try:
        trainer = await Trainer(vllm).form()
        model = other_weights(untied, 3).bfloat16()
        with torch.no_grad():  # layers that add nothing: only the head's rounding is left
            for name, weight in model.named_parameters():
                if "o_proj" in name or "down_proj" in name:
                    weight.zero_()
        await trainer.publish(WeightVersion(0, 0), model.named_parameters())
        sampling = Sampling(max_tokens=200, seed=1)
        done = await vllm.generate("r", PROMPT, sampling)
        rounded = expected(model, PROMPT, done, sampling)
        float32_head(model)
        exact = expected(model, PROMPT, done, sampling)
    finally:
        await vllm.close()
    said = torch.tensor(done.logprobs).double()
    assert (said - exact).abs().mean() < 0.2 * (said - rounded).abs().mean()


async def test_the_engine_process_holds_no_connection_of_ours_and_its_death_is_an_error(untied: Path) -> None:
    from opentinker.services.rollout_worker.vllm_engine import VllmEngine

    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    before = set(children())
    vllm = VllmEngine(str(untied), eos_ids=[EOS], context_length=64, max_concurrent=4)
    await vllm.start()
    try:
        (pid,) = set(children()) - before
        listener.close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), 1)
        with pytest.raises(EngineError, match="no weights yet"):
            await vllm.generate("early", PROMPT, Sampling(max_tokens=1))
        trainer = await Trainer(vllm).form()
        await trainer.publish(WeightVersion(0, 0), other_weights(untied, 1).named_parameters())
        watching = asyncio.create_task(vllm.watch())
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(EngineLost, match="dead"):  # nobody asks it for anything
            await soon(watching)
        with pytest.raises(EngineLost, match="dead"):
            await vllm.generate("lost", PROMPT, Sampling(max_tokens=50))
        with pytest.raises(EngineLost, match="dead"):
            await trainer.form()
        with pytest.raises(EngineLost, match="dead"):
            await vllm.receive(trainer.command(WeightVersion(0, 1), other_weights(untied, 2).named_parameters()))
    finally:
        await vllm.close()


async def test_half_loaded_weights_lose_the_engine_and_sample_nothing_more(untied: Path) -> None:
    from opentinker.services.rollout_worker.vllm_engine import VllmEngine

    vllm = VllmEngine(str(untied), eos_ids=[EOS], context_length=512, max_concurrent=4)
    await vllm.start()
    try:
        trainer = await Trainer(vllm).form()
        await trainer.publish(WeightVersion(0, 0), other_weights(untied, 1).named_parameters())
        running = asyncio.create_task(vllm.generate("running", PROMPT, Sampling(max_tokens=500, seed=1)))
        lacking = list(other_weights(untied, 2).named_parameters())[:-1]
        with pytest.raises(EngineLost, match="half way"):
            await trainer.publish(WeightVersion(0, 1), lacking)
        assert vllm.version == WeightVersion(0, 0)
        with pytest.raises(EngineLost, match="half way"):
            await vllm.watch()
        with pytest.raises(EngineLost, match="half way"):
            await vllm.generate("after", PROMPT, Sampling(max_tokens=1))
        done, _ = await asyncio.wait([running], timeout=0.5)
        assert not done, "it would be a mixture of two versions"
        running.cancel()
        await asyncio.wait([running])
    finally:
        await vllm.close()


def children() -> list[int]:
    return [int(pid) for task in Path("/proc/self/task").iterdir() for pid in (task / "children").read_text().split()]


async def test_a_model_that_does_not_exist_is_named(tmp_path: Path) -> None:
    from opentinker.services.rollout_worker.vllm_engine import VllmEngine

    with pytest.raises(EngineError, match="nowhere"):
        await VllmEngine(str(tmp_path / "nowhere"), eos_ids=[EOS]).start()


async def test_a_model_with_a_window_that_the_job_may_outgrow_fails_at_start(tmp_path: Path) -> None:
    from transformers import Qwen2Config

    from opentinker.services.rollout_worker.vllm_engine import VllmEngine

    Qwen2Config(use_sliding_window=True, sliding_window=64, max_window_layers=0).save_pretrained(tmp_path)
    with pytest.raises(JobFailed, match=r"looks back 64 tokens.*context_length to at most 64"):
        await VllmEngine(str(tmp_path), eos_ids=[EOS]).start()


async def test_a_model_that_vllm_cannot_run_fails_at_start(tmp_path: Path) -> None:
    from opentinker.services.rollout_worker.vllm_engine import VllmEngine

    vllm = VllmEngine(
        str(build(tmp_path / "odd", tied=False, head_dim=16)), eos_ids=[EOS], context_length=64, max_concurrent=4
    )
    with pytest.raises(EngineError, match=r"cannot serve .*odd: a first token"):
        await vllm.start()
    await vllm.close()
