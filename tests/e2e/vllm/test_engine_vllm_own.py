"""vLLM engines of one test each: adapters, a float32 head, one request at a time, a violent end, and refusals."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import socket
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from opentinker.services.rollout_worker.engines.base import Completion, EngineError, EngineLost, Sampling, SwapError
from opentinker.shared.data.model_families import CPU_HEAD_SIZES
from opentinker.shared.spec import LoraSpec
from opentinker.shared.types.core import WeightVersion
from opentinker.shared.types.errors import JobFailed
from opentinker.shared.types.swap import SIMULATED, SwapCommand
from opentinker.shared.types.trajectories import Span
from tests.conftest import WAIT_S, soon
from tests.support.learning import plain_logprobs
from tests.support.vllm_engines import (
    MARKS,
    PROMPT,
    TOLERANCE,
    Trainer,
    build,
    expected,
    other_weights,
    started,
    vllm_engine,
    worst,
)

pytestmark = MARKS


@pytest.fixture(scope="module")
def untied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    return build(tmp_path_factory.mktemp("lora"), tied=False)


async def test_lora_adapters_change_the_output_and_versions_stay_apart(untied: Path) -> None:
    from peft import LoraConfig, get_peft_model, get_peft_model_state_dict

    lora = LoraSpec(rank=4, alpha=8.0)
    async with started(untied, context_length=512, max_concurrent=8, lora=lora, max_adapters=4) as vllm:
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
        assert vllm._process.llm().vllm_config.lora_config.max_loras >= 2 + 2, "staleness + 2"
        for step in range(6):  # more versions than adapters fit at once
            await publish(step)
            newest = vllm._adapters[max(vllm._adapters)].request
            named.add((newest.lora_name, newest.lora_int_id, newest.lora_path))
            done = await vllm.generate(f"v{step}", PROMPT, sampling)
            assert done.spans == [Span(0, len(done.ids), WeightVersion(0, step))]
            assert worst(done, expected(model, PROMPT, done, sampling)) <= TOLERANCE
            outputs.append(done.logprobs)
            scores = await vllm.score(PROMPT * 5)
            assert scores.version == WeightVersion(0, step)
            assert (torch.tensor(scores.logprobs) - plain_logprobs(model, PROMPT * 5)).abs().max() <= TOLERANCE
        assert len({tuple(logprobs) for logprobs in outputs}) == 6
        assert [len(set(column)) for column in zip(*named, strict=True)] == [6, 6, 6], "nothing is called as before"


async def test_an_engine_takes_the_weights_of_one_checkpoint_after_the_other(untied: Path, tmp_path: Path) -> None:
    async with started(untied, context_length=512, max_concurrent=8) as vllm:
        models = {step: other_weights(untied, step) for step in (3, 4)}
        for step, model in models.items():
            model.save_pretrained(tmp_path / str(step), max_shard_size="100KB")
        for step in (3, 4, 3):
            await vllm.load(WeightVersion(1, step), tmp_path / str(step))
            sampling = Sampling(max_tokens=40, seed=1)
            done = await vllm.generate(f"of-{step}", PROMPT, sampling)
            assert done.spans == [Span(0, len(done.ids), WeightVersion(1, step))]
            assert worst(done, expected(models[step], PROMPT, done, sampling)) <= TOLERANCE
        with pytest.raises(SwapError, match="no weights in"):
            await vllm.load(WeightVersion(1, 5), tmp_path / "5")
        assert vllm.version == WeightVersion(1, 3)
        assert worst(done, expected(models[3], PROMPT, done, sampling)) <= TOLERANCE


async def test_an_engine_takes_one_adapter_after_the_other_and_drops_the_old_ones(untied: Path, tmp_path: Path) -> None:
    models = {name: adapted(untied, tmp_path, name, seed) for name, seed in ADAPTERS}
    async with started(untied, context_length=512, lora=LoraSpec(rank=6, alpha=8.0), max_adapters=2) as vllm:
        for step, name in enumerate(["maths", "code"] * 4):  # more often than adapters fit
            await vllm.load(WeightVersion(1, step), tmp_path / name)
            scores = await vllm.score(PROMPT * 5)
            assert scores.version == WeightVersion(1, step) and len(vllm._adapters) == 1
            assert (torch.tensor(scores.logprobs) - plain_logprobs(models[name], PROMPT * 5)).abs().max() <= TOLERANCE


@pytest.mark.nightly
async def test_adapters_answer_together_and_share_no_cached_prompt(untied: Path, tmp_path: Path) -> None:
    """Requests without an adapter among them: vLLM's CPU kernels give those what is in the last slot."""
    from opentinker.services.rollout_worker.engines.vllm_images import engine_input

    models = {
        "": other_weights_of_disk(untied),
        **{name: adapted(untied, tmp_path, name, seed) for name, seed in ADAPTERS},
    }
    async with started(untied, context_length=512, max_concurrent=8, max_adapters=2, beside_rank=6) as vllm:
        await vllm.serve(WeightVersion(0, 0))
        with pytest.raises(EngineError, match="cannot be loaded"):
            await vllm.add("gone", WeightVersion(1, 1), tmp_path / "gone")
        for step, (name, _) in enumerate(ADAPTERS, 1):
            await vllm.add(name, WeightVersion(1, step), tmp_path / name)
        with pytest.raises(EngineError, match="no adapter 'gone'"):
            await vllm.generate("none", PROMPT, Sampling(max_tokens=1, adapter="gone"))
        long = PROMPT * 70  # two blocks of the cache, and some

        async def ask(name: str, seed: int, prompt: list[int]) -> tuple[str, list[int], Sampling, Completion]:
            sampling = Sampling(max_tokens=40, seed=seed, adapter=name)
            return name, prompt, sampling, await vllm.generate(f"{name}-{seed}-{len(prompt)}", prompt, sampling)

        done = await asyncio.gather(*(ask(n, seed, p) for seed in range(4) for n in models for p in (PROMPT, long)))
        apart: dict[tuple[str, str], float] = {}
        for name, prompt, sampling, said in done:
            step = [one for one, _ in [("", 0), *ADAPTERS]].index(name)
            assert said.spans == [Span(0, len(said.ids), WeightVersion(1 if name else 0, step))]
            for other, model in models.items():
                far = worst(said, expected(model, prompt, said, sampling))
                apart[name, other] = max(far, apart.get((name, other), 0.0))
        assert {pair for pair, far in apart.items() if far <= TOLERANCE} == {(name, name) for name in models}
        assert all(far > 0.1 for (name, other), far in apart.items() if name != other)

        async def cached(name: str, prompt: list[int]) -> int:
            request = vllm._beside[name].request if name else None
            params = vllm._params(Sampling(max_tokens=1), 1, whole=True)
            outputs = vllm._process.llm().generate(
                engine_input(prompt, ()), params, f"c-{name}-{len(prompt)}", lora_request=request
            )
            (last,) = [output async for output in outputs]
            return last.num_cached_tokens or 0

        fresh = [7, *long]
        assert [await cached(name, fresh) for name in models] == [0, 0, 0], "nothing of another one is used"
        assert min([await cached(name, [*fresh, 3]) for name in models]) >= 256, "but one's own is"


ADAPTERS = [("maths", 1), ("code", 2)]


def adapted(base: Path, directory: Path, name: str, seed: int) -> Any:
    """The model with a random adapter, which is saved too; they differ in rank, scale and layers."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(seed)
    layers = ["q_proj", "down_proj"] if seed == 1 else "all-linear"
    config = LoraConfig(r=2 * seed + 2, lora_alpha=16 * seed, target_modules=layers, init_lora_weights=False)
    model = get_peft_model(other_weights_of_disk(base), config).eval()
    model.save_pretrained(directory / name)
    return model


def other_weights_of_disk(base: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(base)


@pytest.mark.nightly
async def test_a_float32_head_samples_from_logits_that_were_never_rounded(untied: Path) -> None:
    """The rest is bfloat16. transformers agrees with `float32_head`, and is far away with its own rounded logits."""
    from opentinker.shared.nn.layers import float32_head

    async with started(untied, dtype="bfloat16", fp32_head=True, context_length=256, max_concurrent=4) as vllm:
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
    said = torch.tensor(done.logprobs).double()
    assert (said - exact).abs().mean() < 0.2 * (said - rounded).abs().mean()


async def test_the_engine_process_holds_no_connection_of_ours_and_its_death_is_an_error(untied: Path) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    before = set(children())
    async with started(untied, context_length=64, max_concurrent=4) as vllm:
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
            await trainer.form(patience_s=1.0)
        with pytest.raises(EngineLost, match="dead"):
            await vllm.receive(trainer.command(WeightVersion(0, 1), other_weights(untied, 2).named_parameters()))


async def test_half_loaded_weights_lose_the_engine_and_sample_nothing_more(untied: Path) -> None:
    async with started(untied, context_length=512, max_concurrent=4) as vllm:
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


def children() -> list[int]:
    return [int(pid) for task in Path("/proc/self/task").iterdir() for pid in (task / "children").read_text().split()]


async def test_requests_survive_a_sleep_and_continue_under_the_same_weights(untied: Path) -> None:
    """All but the memory: vLLM's CPU worker gives none back."""
    sampling, sampled, begun = Sampling(max_tokens=200, seed=1), 0, asyncio.Event()

    def note(ids: list[int], *_: object) -> None:
        nonlocal sampled
        sampled += len(ids)
        begun.set()

    async with started(untied, sleeps=True, context_length=512) as engine:
        trainer, weights = await Trainer(engine).form(), other_weights(untied, 1)
        await trainer.publish(WeightVersion(1, 1), weights.named_parameters())
        asked = asyncio.create_task(engine.generate("a", PROMPT, sampling, note))
        await soon(begun.wait())
        for _ in range(2):
            await engine.sleep()
        later = asyncio.create_task(engine.generate("b", PROMPT, Sampling(max_tokens=4, seed=2)))
        before = sampled
        await asyncio.sleep(0.5)  # many times as long as a token takes
        assert sampled <= before + 1 and not asked.done() and not later.done()
        for _ in range(2):
            await engine.wake()
        done = await soon(asked)
        assert (await soon(later)).ids
        await trainer.publish(WeightVersion(1, 2), weights.named_parameters())
    assert worst(done, expected(weights, PROMPT, done, sampling)) < TOLERANCE


async def test_a_model_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="nowhere"):
        await vllm_engine(str(tmp_path / "nowhere")).start()


async def test_a_model_with_a_window_that_the_job_may_outgrow_fails_at_start(tmp_path: Path) -> None:
    from transformers import Qwen2Config

    Qwen2Config(use_sliding_window=True, sliding_window=64, max_window_layers=0).save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"never read")
    with pytest.raises(JobFailed, match=r"looks back 64 tokens.*context_length to at most 64"):
        await vllm_engine(str(tmp_path)).start()


async def test_an_engine_whose_job_is_cancelled_while_it_loads_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its processes and its memory would be nobody's."""
    from opentinker.services.rollout_worker.engines.vllm_process import VllmProcess

    class Loaded:
        output_handler = None
        ended = False

        def shutdown(self) -> None:
            self.ended = True

    llm, building, built = Loaded(), threading.Event(), threading.Event()

    def build(_: VllmProcess) -> Loaded:
        building.set()
        assert built.wait(WAIT_S)
        return llm

    monkeypatch.setattr(VllmProcess, "_build", build)
    vllm = vllm_engine("slow")
    starting = asyncio.create_task(vllm.start())
    await asyncio.to_thread(building.wait, WAIT_S)
    starting.cancel()
    built.set()
    await asyncio.wait([starting])
    assert starting.cancelled()
    await vllm.close()
    assert llm.ended


@pytest.mark.nightly
async def test_one_by_one_logprobs_do_not_depend_on_what_else_is_asked_for(tiny: Path) -> None:
    async with started(tiny, context_length=256, max_concurrent=32, one_by_one=True) as engine:
        fields = {"job": "j", "epoch": 1, "generation": 0, "device": SIMULATED}
        await engine.join(SwapCommand(action="join", **fields))  # type: ignore[arg-type]
        await engine.receive(SwapCommand(action="receive", version=WeightVersion(1, 0), **fields))  # type: ignore[arg-type]

        async def ask(name: str, seed: int) -> Completion:
            return await engine.generate(f"{name}{seed}", [5, 6 + seed % 3, 9], Sampling(max_tokens=12, seed=seed))

        alone = [await ask("alone", seed) for seed in range(12)]
        together = await asyncio.gather(*(ask("together", seed) for seed in range(12)))
        assert alone == list(together)
        assert len({tuple(c.ids) for c in alone}) > 6, "different seeds sample different tokens"


async def test_a_model_class_without_a_module_fails_its_job_alone(untied: Path, tmp_path: Path) -> None:
    from vllm.model_executor.models.registry import ModelRegistry

    ModelRegistry.register_model("LacksAModule", "no_such_torchvision:Sees")
    model = Path(shutil.copytree(untied, tmp_path / "model"))
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "architectures": ["LacksAModule"]}))
    vllm = vllm_engine(str(model))
    with pytest.raises(EngineError, match="needs the Python module 'no_such_torchvision'"):
        await vllm.start()
    await vllm.close()


async def test_attention_heads_without_a_cpu_kernel_are_named_at_once(tmp_path: Path) -> None:
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    assert list(CPU_HEAD_SIZES) == CPUAttentionBackend.get_supported_head_sizes()
    vllm = vllm_engine(str(build(tmp_path, tied=True, head_dim=16)))
    with pytest.raises(JobFailed, match="has attention heads of 16 dimensions"):
        await vllm.start()
    await vllm.close()
