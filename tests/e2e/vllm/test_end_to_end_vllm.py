"""The real thing on a CPU: vLLM generates, torch trains, weights travel while both work. One cluster for all tests."""

from __future__ import annotations

import asyncio
import base64
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import torch
from openai import AsyncOpenAI

from examples.models.make_seeing import make_seeing
from examples.models.make_tiny import make_tiny
from opentinker.envs.builtin.color_naming import COLOURS
from opentinker.envs.png import png
from opentinker.shared.spec import JobSpec, parse_spec
from opentinker.shared.types.core import WeightVersion
from tests.conftest import until
from tests.integration.trainer.test_reward_models import make_judge
from tests.integration.trainer.test_value_models import make_value_model
from tests.support.api import OPERATOR as KEY
from tests.support.cluster import Cluster, shared_fixture
from tests.support.factories import make_spec
from tests.support.lineage import BESIDE_METRICS, faults, undocumented
from tests.support.listening import listening, living

REFERENCE = ("groups", "groups_per_s", "tokens", "tokens_per_s")

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]


cluster = shared_fixture(Cluster, references=1, heavy=True)


def one_digit(tiny: Path, **changes: Any) -> JobSpec:
    """The task of the quick start that an untrained model learns in about a hundred steps."""
    fields: dict[str, Any] = {
        "model": {"base": str(tiny)},
        "environment": {"name": "copy_digits", "config": {"digits": 1}},
        "algorithm": {"group_size": 16, "groups_per_batch": 8, "max_staleness": 1},
        "rollout": {"max_tokens": 3},
        "train": {"steps": 250, "lr": 3e-4, "warmup_steps": 10, "checkpoint_every": 10, "target": {"exact": 0.6}},
    }
    return make_spec(**{**fields, **changes})


def descendants(pid: int) -> list[int]:
    children = [child for child, parent in living() if parent == pid]
    return [found for child in children for found in (child, *descendants(child))]


def assert_exact_numerics(lines: list[dict[str, Any]]) -> None:
    """Trainer and vLLM agree on the logprobs of tokens sampled by the very weights that are trained."""
    fresh = [line for line in lines if line["mismatch/tokens"] > 0]
    assert fresh
    assert max(line["mismatch/mean"] for line in fresh) <= 1e-4
    assert max(line["mismatch/max"] for line in fresh) <= 1e-3


def lineage_faults(cluster: Cluster, job: str, steps: int) -> list[str]:
    resumed = cluster.manifest(job).resumed
    return faults(cluster.lines(job), resumed, steps=steps, groups_per_batch=8, max_staleness=1)


async def test_one_digit_is_learnt_and_the_model_can_be_used(system: Cluster, tiny: Path, tmp_path: Path) -> None:
    job = await system.submit(one_digit(tiny))
    await system.reaches(job, 3)
    for name, process in system.processes.items():
        hosts = {host for host, _ in listening(process.pid)}
        assert hosts == {"127.0.0.1"}, f"{name} listens on {hosts}"
    record = await system.wait(job)
    assert (record["state"], record["reason"]) == ("succeeded", "target reached")
    lines = system.lines(job)
    exact = [line["exact"] for line in lines]
    crossed = [line["step"] for line in lines if line["spans/mean"] > 1.0]
    print(f"{len(lines)} steps, {lines[-1]['time'] - lines[0]['time']:.1f} s, first {exact[0]:.2f}")
    print(f"{len(crossed)} steps have completions that crossed a swap")
    assert sum(exact[:5]) / 5 < 0.3 and sum(exact[-10:]) / 10 >= 0.6
    assert_exact_numerics(lines)
    assert undocumented({*lines[0], *lines[-1]} - BESIDE_METRICS) == []
    assert lineage_faults(system, job, len(lines)) == []
    assert crossed, "no completion crossed a swap: they all waited for it, or there was none"

    from transformers import AutoModelForCausalLM, AutoTokenizer

    target = await system.client.download(job, tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(target)
    tokenizer = AutoTokenizer.from_pretrained(target)
    prompts = [tokenizer.encode(f"{digit}=", return_tensors="pt") for digit in range(10)]
    made = [model.generate(prompt, max_new_tokens=1, do_sample=False)[0, -1:] for prompt in prompts]
    answers = [tokenizer.decode(one, skip_special_tokens=True) for one in made]  # "" for an end at once
    assert sum(answer == str(digit) for digit, answer in enumerate(answers)) >= 5, answers
    await plays_as_it_has_learnt(system, job, tiny, dict(enumerate(answers)))


async def plays_as_it_has_learnt(system: Cluster, trained: str, tiny: Path, answers: dict[int, str]) -> None:
    """An evaluation of the checkpoint. `answers`: the greedy first character of its weights, by digit; "" for none."""
    spec = parse_spec(
        {
            "name": "look",
            "kind": "eval",
            "model": {"base": str(tiny)},
            "start": {"from": f"{trained}@latest"},
            "environment": {"name": "copy_digits", "config": {"digits": 1}},
            "rollout": {"max_tokens": 3},
            "evaluation": {"episodes": 32, "transcripts": 32},
        }
    )
    job = await system.submit(spec)
    record = await system.succeeds(job)
    found = await system.client.transcripts(job)
    played = [[message["content"] for message in one["messages"]] for one in found["transcripts"]]
    assert len(played) == 32 and all(answer[:1] == answers[int(prompt[0])] for prompt, answer in played)
    right = sum(answer == prompt[0] for prompt, answer in played) / 32
    assert record["result"]["values"]["val/exact"] == pytest.approx(right) and right > 0.3
    assert record["result"]["step"] == system.manifest(trained).step


@pytest.mark.nightly  # test_engine_vllm_divided.py: its ranks compute and swap what one does, with every merge
async def test_a_model_divided_among_two_ranks_is_trained(system: Cluster, tiny: Path) -> None:
    spec = one_digit(tiny, rollout={"max_tokens": 3, "tensor_parallel": 2}, train={"steps": 5, "lr": 3e-4})
    job = await system.run(spec)
    lines = system.lines(job)
    assert_exact_numerics(lines)
    assert lineage_faults(system, job, 5) == []


@pytest.mark.nightly
async def test_a_killed_worker_of_a_divided_model_leaves_no_rank_and_its_successor_serves_the_job(
    system: Cluster, tiny: Path
) -> None:
    spec = one_digit(tiny, rollout={"max_tokens": 3, "tensor_parallel": 2}, train={"steps": 12, "lr": 3e-4})
    job = await system.submit(spec)
    await system.reaches(job, 2)
    worker = next(w for w in await system.store.workers() if w.ready_for(job))
    below = [pid for child in system.children(worker.id) for pid in (child, *descendants(child))]
    assert len(below) >= 2, "a process for each rank"
    system.kill(worker.id)
    await until(lambda: not {*below} & {pid for pid, _ in living()})
    assert (await system.succeeds(job))["step"] == 12
    assert_exact_numerics(system.lines(job))
    assert lineage_faults(system, job, 12) == []


@pytest.mark.nightly
async def test_reference_teacher_and_reward_model_score_groups(system: Cluster, tiny: Path, tmp_path: Path) -> None:
    """Episodes of several turns; three frozen models look at each group."""
    teacher = make_tiny(tmp_path / "teacher", hidden_size=64, layers=2, norm_scale=12.0, seed=7)
    judge = make_judge(tiny, tmp_path / "judge")
    spec = one_digit(
        tiny,
        environment={"name": "guess_number"},
        algorithm={"group_size": 4, "groups_per_batch": 4, "max_staleness": 1, "kl_coef": 0.05, "distill_coef": 0.5},
        rollout={"max_turns": 3, "max_tokens": 12, "max_tokens_per_turn": 4},
        teacher={"base": str(teacher)},
        reward_models=[{"base": str(judge), "weight": 0.25}],
        train={"steps": 4, "lr": 3e-4},
    )
    job = await system.run(spec)
    lines = system.lines(job)
    assert_exact_numerics(lines)
    assert all(line["turns/mean"] > 1 and line["teacher/kl"] > 0.5 for line in lines)
    for line in lines:
        assert line["reward/mean"] == pytest.approx(
            line["reward/own"] + 0.25 * line["reward_model/judge/mean"], abs=1e-5
        )
        assert line["reward_model/judge/std"] > 0
    assert lines[0]["loss/kl"] == pytest.approx(0, abs=1e-5)  # the first weights are the reference
    assert lines[-1]["loss/kl"] > 0
    assert undocumented({*lines[0], *lines[-1]} - BESIDE_METRICS - {"guesses"}) == []

    async def all_scored() -> bool:
        """A worker says so with its next heartbeat."""
        return sum(int(w.detail["groups"]) for w in await system.store.workers() if w.pool == "reference") >= 4 * 4

    await until(all_scored)
    (reference,) = {w.id for w in await system.store.workers() if w.pool == "reference"}
    await until(
        lambda: system.client.metrics(job, source=reference),
        lambda points: bool(points) and points[-1]["values"]["reference/groups"] >= 4 * 4,
    )
    points = await system.client.metrics(job, source=reference)
    assert set(points[-1]["values"]) == {f"reference/{name}" for name in REFERENCE}


@pytest.mark.nightly
async def test_a_frozen_value_model_takes_the_place_of_the_critic(system: Cluster, tiny: Path, tmp_path: Path) -> None:
    model = make_value_model(tiny, tmp_path / "values")
    algorithm = {"name": "ppo", "group_size": 8, "groups_per_batch": 4, "max_staleness": 1}
    spec = one_digit(
        tiny, algorithm=algorithm, value_model={"base": str(model)}, train={"steps": 4, "lr": 3e-4, "warmup_steps": 2}
    )
    job = await system.run(spec)
    lines = system.lines(job)
    assert_exact_numerics(lines)
    assert all("loss/value" not in line and line["value/mean"] != 0 for line in lines)
    assert all(line["value/explained_variance"] < 1 for line in lines if "value/explained_variance" in line)
    assert undocumented({*lines[0], *lines[-1]} - BESIDE_METRICS) == []
    assert not any(name.endswith("critic.safetensors") for name in system.manifest(job).files)


async def test_adapter_is_trained_swapped_and_loads_with_peft(system: Cluster, tiny: Path, tmp_path: Path) -> None:
    """LoRA through the same path: vLLM serves the adapter that the trainer sends, merged into the base, and the
    download is a PEFT one.

    Without staleness every token is one of the adapter that is being trained, so every step compares logprobs.
    """
    model = {"base": str(tiny), "lora": {"rank": 4, "alpha": 8.0, "target_modules": "all-linear"}}
    algorithm = {"group_size": 16, "groups_per_batch": 8, "max_staleness": 0}
    train = {"steps": 6, "lr": 1e-3, "checkpoint_every": 5}
    job = await system.run(one_digit(tiny, model=model, algorithm=algorithm, train=train))
    lines = system.lines(job)
    assert lineage_faults(system, job, 6) == []
    assert_exact_numerics(lines)
    assert all(line["mismatch/tokens"] == line["tokens"] for line in lines)
    said = [event for event in await system.store.all_events(job) if event["event"] == "lora_served"]
    assert {(event["merged"], event["why"]) for event in said} == {(True, "")}

    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    target = await system.client.download(job, tmp_path / "adapter")
    base = AutoModelForCausalLM.from_pretrained(tiny)
    prompt = torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        before = base(prompt).logits
        adapted = PeftModel.from_pretrained(base, target)(prompt).logits
        direct = AutoModelForCausalLM.from_pretrained(target)(prompt).logits
    assert (adapted - before).abs().max() > 1e-4, "the adapter has learnt something"
    torch.testing.assert_close(direct, adapted)


@pytest.mark.nightly
async def test_the_live_policy_is_asked_while_it_learns(system: Cluster, tiny: Path) -> None:
    """Its answers are of versions that follow the trainer's, and of other probabilities each time."""
    system.add("rollout_worker")
    await system.ready()
    train = {"steps": 10_000, "lr": 1e-3, "checkpoint_every": 5000}
    source = await system.submit(one_digit(tiny, train=train))
    await system.reaches(source, 1)
    serving = {"name": "live", "kind": "inference", "start": {"from": f"{source}@live"}, "model": {"base": str(tiny)}}
    live = str((await system.client.submit(serving))["id"])
    said: dict[WeightVersion, float] = {}
    async with AsyncOpenAI(base_url=f"{system.client.url}/v1/jobs/{live}/v1", api_key=KEY, max_retries=8) as client:
        await system.runs(live)

        async def answered() -> bool:
            answer: Any = await client.completions.create(
                model="live", prompt="7=", max_tokens=1, temperature=0, logprobs=0
            )
            version = WeightVersion.parse(answer.system_fingerprint.removeprefix("weights-"))
            assert not said or version >= max(said)
            said[version] = answer.choices[0].logprobs.token_logprobs[0]
            return len(said) >= 4

        await until(answered)
    assert {version.epoch for version in said} == {1}
    await system.reaches(source, max(said).step)
    assert len(set(said.values())) > 1, "the weights are others, and not their names alone"
    assert_exact_numerics(system.lines(source))
    await system.client.cancel(source)
    record = await system.wait(live)
    assert record["state"] == "succeeded" and f"{source}@latest" in record["reason"]


@pytest.mark.parametrize(
    "lora",
    [pytest.param(None, marks=pytest.mark.nightly, id="full"), pytest.param({"rank": 4, "alpha": 8.0}, id="lora")],
)
async def test_job_continues_with_a_checkpoint(system: Cluster, tiny: Path, lora: dict[str, Any] | None) -> None:
    """With a learning rate of 0: the weights stay those of the checkpoint, vLLM has the same, and KL is zero."""
    model = {"base": str(tiny), "lora": lora}
    algorithm = {"group_size": 16, "groups_per_batch": 8, "max_staleness": 0, "kl_coef": 0.05}
    toy = {"engine": "toy", "max_tokens": 3}  # as good as vLLM where only the weights have to become others
    train = {"steps": 4, "lr": 1e-3, "checkpoint_every": 10}
    first = await system.run(one_digit(tiny, model=model, rollout=toy, train=train))
    spec = one_digit(tiny, model=model, algorithm=algorithm, train={"steps": 3, "lr": 0.0})
    second = (await system.client.submit(spec, from_checkpoint=f"{first}@4"))["id"]
    await system.succeeds(second)
    lines = system.lines(second)
    assert_exact_numerics(lines)
    assert max(line["loss/kl"] for line in lines) <= 1e-6, "the reference is the model that it started with"
    name = "model.safetensors" if lora is None else "adapter_model.safetensors"
    saved = [system.data / "jobs" / j / "checkpoints" / f"step-00000{s}" / name for j, s in ((first, 4), (second, 3))]
    assert saved[0].read_bytes() == saved[1].read_bytes()


async def test_evaluation_is_of_the_very_weights_of_its_step(system: Cluster, tiny: Path, tmp_path: Path) -> None:
    """Every kept answer is the greedy one of the checkpoint of that step, though training went on meanwhile."""
    train = {"steps": 8, "lr": 1e-3, "checkpoint_every": 3, "keep_checkpoints": 9}
    validation = {"every": 3, "episodes": 24, "transcripts": 24, "max_tokens": 2}
    job = await system.run(one_digit(tiny, train=train, validation=validation))
    assert lineage_faults(system, job, 8) == []
    assert_exact_numerics(system.lines(job))

    from transformers import AutoModelForCausalLM, AutoTokenizer

    answers = []
    for step in (0, 3, 6, 8):
        found = await system.client.transcripts(job, step)
        assert found["steps"] == [0, 3, 6, 8] and len(found["transcripts"]) == 24
        source = tiny if step == 0 else await system.client.download(job, tmp_path / str(step), step=step)
        model, tokenizer = AutoModelForCausalLM.from_pretrained(source), AutoTokenizer.from_pretrained(tiny)
        for one in found["transcripts"]:
            prompt, answer = (message["content"] for message in one["messages"])
            ids = tokenizer.encode(prompt, return_tensors="pt")
            made = model.generate(ids, max_new_tokens=2, do_sample=False)[0, ids.shape[1] :]
            assert answer == tokenizer.decode(made, skip_special_tokens=True), (step, prompt)
        answers.append([one["messages"][1]["content"] for one in found["transcripts"]])
    assert len({tuple(one) for one in answers}) > 1, "the weights differ, and so do their answers"


@pytest.mark.nightly
@pytest.mark.parametrize("family", ["idefics3", "llava", "qwen2_5_vl", "qwen3_vl"])
async def test_a_vision_model_learns_colours_and_answers_with_them(
    family: str, system: Cluster, tmp_path: Path
) -> None:
    base = await asyncio.to_thread(make_seeing, tmp_path / "seeing", family=family)
    job = await system.submit(
        make_spec(
            model={"base": str(base)},
            environment={"name": "colours", "config": {"colours": 3}},
            algorithm={"group_size": 16, "groups_per_batch": 8, "max_staleness": 1, "kl_coef": 0.001},
            rollout={"max_tokens": 1},
            train={"steps": 150, "lr": 1e-3, "warmup_steps": 10, "checkpoint_every": 150, "target": {"exact": 0.93}},
        )
    )
    record = await system.wait(job)
    assert (record["state"], record["reason"]) == ("succeeded", "target reached")
    lines = system.lines(job)
    assert lines[0]["exact"] < 0.1 and np.mean([line["exact"] for line in lines[-10:]]) > 0.9
    print(f"{family}: {len(lines)} steps, exact {lines[0]['exact']:.2f} to {lines[-1]['exact']:.2f}")
    assert_exact_numerics(lines)
    assert all(episode["images"] for episode in (await system.client.rollouts(job))["rollouts"]), "people see them too"
    assert abs(lines[0]["loss/kl"]) < 1e-6 < lines[-1]["loss/kl"], "the reference sees what the policy saw"

    serving = {"name": "eyes", "kind": "inference", "start": {"from": f"{job}@latest"}, "model": {"base": str(base)}}
    eyes = str((await system.client.submit(serving))["id"])
    try:
        await system.runs(eyes)
        async with AsyncOpenAI(base_url=f"{system.client.url}/v1/jobs/{eyes}/v1", api_key=KEY) as client:
            right = 0
            for letter in "rgb":
                solid = np.full((32, 32, 3), COLOURS[letter][1], np.uint8)
                answer = await client.chat.completions.create(**_about(png(solid)))
                right += answer.choices[0].message.content == letter
            assert right >= 2
            with pytest.raises(openai.BadRequestError, match="an image is neither PNG nor JPEG"):
                await client.chat.completions.create(**_about(b"no image"))
    finally:
        await system.client.cancel(eyes)


def _about(image: bytes) -> dict[str, Any]:
    url = f"data:image/png;base64,{base64.b64encode(image).decode()}"
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "colour? "}]
    return {"model": "eyes", "messages": [{"role": "user", "content": parts}], "max_tokens": 1, "temperature": 0}


async def test_processes_end_well_and_the_trainer_saves_what_it_has(system: Cluster, tiny: Path) -> None:
    """SIGTERM in the middle of a job, the trainer first: its checkpoint is of the very step that it had reached."""
    algorithm = {"group_size": 16, "groups_per_batch": 8, "max_staleness": 1, "kl_coef": 0.05}
    train = {"steps": 10_000, "lr": 3e-4, "checkpoint_every": 5000}
    job = await system.submit(one_digit(tiny, algorithm=algorithm, train=train))
    await system.reaches(job, 3)
    assert await system.stop("trainer-0") == 0
    assert system.manifest(job).step == system.lines(job)[-1]["step"] >= 3
    assert await system.stop("rollout_worker-0") == 0
    assert await system.stop("reference_forward-0") == 0
    await system.client.cancel(job)
