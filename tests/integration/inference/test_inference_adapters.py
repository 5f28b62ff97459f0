"""Inference jobs that serve several adapters beside their base: what is refused, which is asked, and what stays.

The engine is the simulated one, which has no weights: of whom it was asked, the fingerprint of its answers tells."""

from __future__ import annotations

import asyncio
import hashlib
import re
import shutil
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import openai
import orjson
import pytest

from opentinker.client import AsyncClient
from opentinker.services.rollout_worker.run_lease import run_lease
from opentinker.services.rollout_worker.service import make_engine
from opentinker.services.scheduler.artifacts.retention import used_by
from opentinker.services.scheduler.inference.router import InferenceRouter
from opentinker.shared.openai.inference import GenerateRequest
from opentinker.shared.runtime.leased_worker import LeasedWorker
from opentinker.shared.runtime.service import Context
from opentinker.shared.spec import JobSpec, parse_spec
from opentinker.shared.state.store import Store
from opentinker.shared.types.core import JobState, Lease, Message, Pool
from opentinker.shared.types.manifest import start_of
from opentinker.shared.types.workers import WorkerInfo
from tests.conftest import WAIT_S, Server, until
from tests.integration.inference.test_sleeping import asleep, ran
from tests.support.api import refused, write_checkpoint
from tests.support.cluster import toy_model
from tests.support.factories import refusals
from tests.support.inference import HELLO, Site, collected, opentinker
from tests.support.scheduling import context, new_job

MATHS, CODE = "j-maths00000", "j-code000000"
SPEC: dict[str, Any] = {"name": "talk", "kind": "inference", "rollout": {"engine": "toy"}}


class ToySite(Site):
    """Its workers load what the job names, as the service does."""

    async def worker(self, id: str) -> None:
        ctx = await self._stack.enter_async_context(context(self._nats, self._valkey, id, self._data))

        async def work(worker: LeasedWorker, lease: Lease, spec: JobSpec) -> None:
            sessions: Any = None  # nothing is played
            await run_lease(worker, lease, spec, partial(make_engine, settings=ctx.settings), sessions)

        self._lives[id] = asyncio.create_task(LeasedWorker(ctx, Pool.ROLLOUT, work).serve())


@pytest.fixture
async def site(client: AsyncClient, ctx: Context, nats_server: Server, valkey_server: Server) -> AsyncIterator[ToySite]:
    site = ToySite(client, nats_server, valkey_server, ctx.settings.data_dir)
    try:
        await site.worker("rollout-0")
        yield site
    finally:
        await site.close()


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return toy_model(tmp_path / "base")


def adapter(rank: int = 4, tokenizer: bytes = b"") -> dict[str, bytes]:
    config = orjson.dumps({"r": rank, "lora_alpha": 8.0, "target_modules": ["q_proj"]})
    files = {"adapter_config.json": config, "adapter_model.safetensors": b"weights"}
    return files | ({"tokenizer.json": tokenizer} if tokenizer else {})


async def trained(ctx: Context, job: str, step: int, base: object, files: dict[str, bytes], **model: Any) -> str:
    """A job with a checkpoint."""
    await new_job(ctx.store, job, JobState.SUCCEEDED, model={"base": str(base), **model}, train={"steps": 50})
    write_checkpoint(ctx, job, step, files)
    return job


def of(base: object, *adapters: tuple[str, str], **parts: Any) -> dict[str, Any]:
    serving = {**parts.pop("serving", {}), "adapters": [{"name": name, "from": origin} for name, origin in adapters]}
    return {**SPEC, "model": {"base": str(base)}, "serving": serving, **parts}


async def two(site: ToySite, ctx: Context, base: Path, **parts: Any) -> str:
    """A running job with two adapters, one of them by its published name."""
    await trained(ctx, MATHS, 40, base, adapter())
    await trained(ctx, CODE, 7, base, adapter(rank=16))
    await site.client.publish(f"{CODE}@7", "best-code")
    job = str(
        (await site.client.submit(of(base, ("maths", f"{MATHS}@latest"), ("code.v2", "best-code"), **parts)))["id"]
    )
    await ran(ctx.store, job, 1)
    return job


# --- who is asked ---------------------------------------------------------------------------------------------------


async def test_a_request_is_answered_by_the_model_it_names(site: ToySite, ctx: Context, base: Path) -> None:
    job = await two(site, ctx, base)
    said = {str(base): "weights-0.0", "talk": "weights-0.0", job: "weights-0.0"}
    said |= {"maths": "weights-1.40", "code.v2": "weights-1.7"}
    async with site.openai(job) as model:
        cards = {card.id: card for card in (await model.models.list()).data}
        assert list(cards) == list(said)
        assert {name: getattr(card, "root", None) for name, card in cards.items()} == {
            str(base): None, "talk": str(base), job: str(base), "maths": f"{MATHS}@40", "code.v2": f"{CODE}@7",
        }  # fmt: skip
        assert {getattr(cards[name], "parent", None) for name in ("maths", "code.v2")} == {str(base)}
        asked = [name for name in said for _ in range(4)]
        answers: list[Any] = await asyncio.gather(
            *(model.chat.completions.create(model=name, messages=HELLO, max_tokens=3, seed=1) for name in asked)
        )
        assert [(one.model, one.system_fingerprint) for one in answers] == [(name, said[name]) for name in asked]
        assert all(one.usage is not None and one.usage.completion_tokens <= 3 for one in answers)
        with pytest.raises(openai.BadRequestError, match="top_logprobs can only be 0: the simulated engine draws"):
            await model.chat.completions.create(model=job, messages=HELLO, logprobs=True, top_logprobs=2)
        with pytest.raises(openai.BadRequestError, match="logprobs can only be 0: the simulated engine draws"):
            await model.completions.create(model=job, prompt="12=", logprobs=1)
        plain = await model.completions.create(model="code.v2", prompt="12=", max_tokens=2)
        assert (plain.model, plain.system_fingerprint) == ("code.v2", "weights-1.7")
        stream = await model.chat.completions.create(model="maths", messages=HELLO, max_tokens=3, stream=True)
        assert {chunk.model for chunk in (await collected(stream))[1]} == {"maths"}
        with pytest.raises(openai.NotFoundError, match=r"this job has: .*base, talk, j-.*, maths, code\.v2") as refused:
            await model.chat.completions.create(model=f"{MATHS}@40", messages=HELLO)
        assert (refused.value.code, refused.value.param) == ("model_not_found", "model")
    generated = sum(one.usage.completion_tokens for one in [*answers, plain] if one.usage is not None)
    await until(
        lambda: site.client.metrics(job),
        lambda points: max((p["values"].get("serving/answers", 0) for p in points), default=0) == len(asked) + 2,
    )
    tokens = max(p["values"].get("serving/tokens", 0) for p in await site.client.metrics(job))
    assert generated < tokens <= generated + 3, "the streamed answer too"
    url = ["--url", site.client.url, "-m", "12", "--max-tokens", "2", "--json"]
    status, out, _ = await opentinker("chat", job, *url, "--model", "maths")
    assert status == 0 and {orjson.loads(line)["model"] for line in out.splitlines()} == {"maths"}


async def test_adapters_survive_sleep_and_new_workers(site: ToySite, ctx: Context, store: Store, base: Path) -> None:
    serving = {"sleep_s": 0.3, "wake_s": WAIT_S}
    await site.worker("rollout-1")
    job = await two(site, ctx, base, serving=serving, resources={"rollout_workers": 2})
    await asleep(site, job)
    assert used_by([await store.job(job)]) == {MATHS: {40}, CODE: {7}}, "these are not deleted"
    shutil.rmtree(ctx.settings.data_dir / "jobs" / MATHS / "checkpoints")  # its own directory is not what is served
    async with site.openai(job) as model:

        async def asked(name: str, seed: int) -> Any:
            return await model.chat.completions.create(
                model=name, messages=[{"role": "user", "content": f"{seed}?"}], max_tokens=200, seed=seed
            )

        answers = await asyncio.gather(
            *(asked(name, seed) for seed in range(8) for name in ("maths", "code.v2", "talk"))
        )
    expected = {"maths": "weights-1.40", "code.v2": "weights-1.7", "talk": "weights-0.0"}
    assert all(one.system_fingerprint == expected[one.model] for one in answers)
    assert (await site.client.cancel(job))["state"] == "cancelled"
    await until(lambda: not start_of(ctx.settings.data_dir, job).exists())


def test_workers_are_chosen_by_model_and_beginning() -> None:
    """The same for the same; with another model the cached tokens of this one are of no use."""
    nothing: Any = SimpleNamespace(worker="scheduler-0", store=None)
    replicas = InferenceRouter(nothing)
    workers = [WorkerInfo(id=i, incarnation="", pool=Pool.ROLLOUT, host="", pid=1, address=f"a-{i}") for i in "xyz"]

    def chosen(model: str) -> str:
        ask = GenerateRequest(
            id="q", asker="s", job="j", model=model, messages=[Message(role="user", content="Hello?")]
        )
        return replicas._best(workers, ask).id

    assert all(len({chosen(name) for _ in range(5)}) == 1 for name in ("maths", "code"))
    assert {chosen(f"adapter-{number}") for number in range(40)} == {"x", "y", "z"}


# --- what is refused ------------------------------------------------------------------------------------------------


async def test_adapters_of_another_base_are_refused_together(client: AsyncClient, ctx: Context, base: Path) -> None:
    other = orjson.loads((base / "tokenizer.json").read_bytes())
    swapped = {"0": other["model"]["vocab"]["1"], "1": other["model"]["vocab"]["0"]}
    other["model"]["vocab"] |= swapped
    listed = {
        "fits": (adapter(tokenizer=(base / "tokenizer.json").read_bytes()), str(base), {}, None),
        "full": ({"model.safetensors": b"x"}, str(base), {}, r"no adapter: it holds full weights, .*start\.from"),
        "nothing": ({"state.json": b"x"}, str(base), {}, "no adapter: it holds no weights"),
        "elsewhere": (adapter(), "another/model", {}, "adapter of another/model, and model.base is /.*/base"),
        "large": (adapter(rank=513), str(base), {}, "its rank is 513, and vLLM serves 512 at most"),
        "words": (
            adapter(tokenizer=orjson.dumps(other)), str(base), {},
            "another tokenizer than that of .*: token '0' has id 2 here and 3 there",
        ),
        "plain": (adapter(), str(base), {"chat_template": "plain"}, "chat_template = 'plain', .* with 'model'"),
        "torn": (adapter() | {"adapter_config.json": b"{"}, str(base), {}, "it cannot be read"),
    }  # fmt: skip
    made = []
    for name, (files, of_base, model, _) in listed.items():
        job = "j-" + hashlib.sha256(name.encode()).hexdigest()[:10]
        made.append((name, f"{await trained(ctx, job, 3, of_base, files, **model)}@3"))
    foreign = await new_job(ctx.store, "j-foreign000", model__base=str(base), tenant="others")
    write_checkpoint(ctx, foreign, 3, adapter())
    unknown = [
        ("theirs", f"{foreign}@3"),
        ("nobodys", "j-nobodys000@3"),
        ("step", made[0][1][:-1] + "9"),
        ("name", "best"),
    ]
    found = await refused(client, of(base, *made, *unknown))
    said = [problem for *_, problem in listed.values()]
    said += ["no job j-foreign000", "no job j-nobodys000", "there are: 3", "best"]
    wanted = {f"serving.adapters.{place}.from": text for place, text in enumerate(said) if text is not None}
    assert found.keys() == wanted.keys()
    for field, text in wanted.items():
        assert re.search(text, found[field]), (field, found[field])
    theirs, nobodys = (found[f"serving.adapters.{place}.from"] for place in (len(listed), len(listed) + 1))
    assert theirs.replace(foreign, "JOB") == nobodys.replace("j-nobodys000", "JOB"), "they look alike"
    broken = of(base, ("Loud", "best"), ("code", "j-nobodys000@1"), model={"base": str(base), "dtype": "int3"})
    assert set(await refused(client, broken)) == {
        "serving.adapters.0.name", "serving.adapters.1.from", "model.dtype",
    }  # fmt: skip
    assert not list((ctx.settings.data_dir / "jobs").glob("*/start"))


@pytest.mark.parametrize(
    ("parts", "field", "said"),
    [
        (
            {"adapters": [("a", "j-0123456789@1"), ("a", "j-0123456789@2")]},
            "serving.adapters.1.name",
            "another one too",
        ),
        ({"adapters": [("gpt2", "j-0123456789@1")]}, "serving.adapters.0.name", "what the base is called"),
        ({"adapters": [("talk", "j-0123456789@1")]}, "serving.adapters.0.name", "what the base is called"),
        ({"adapters": [("j-0123456789", "best")]}, "serving.adapters.0.name", "no job's id"),
        ({"adapters": [("../up", "best")]}, "serving.adapters.0.name", "letters, digits"),
        ({"adapters": [("", "best")]}, "serving.adapters.0.name", "letters, digits"),
        ({"adapters": [("a", "j-0123456789@live")]}, "serving.adapters.0.from", "JOB@STEP or JOB@latest"),
        ({"adapters": [(f"a{n}", "best") for n in range(33)]}, "serving.adapters", "at most 32"),
        ({"adapters": [("a", "best")], "start": {"from": "j-0123456789@1"}}, "start.from", "as one of them"),
        ({"adapters": [("a", "best")], "start": {"from": "j-0123456789@live"}}, "start.from", "a separate job"),
        ({"adapters": [], "model": {"base": "gpt2", "lora": {}}}, "model.lora", "or serving.adapters"),
    ],
)
def test_what_contradicts_itself_is_refused(parts: dict[str, Any], field: str, said: str) -> None:
    ((found, problem),) = refusals(parse_spec, of("gpt2", *parts.pop("adapters"), **parts)).items()
    assert found == field and said in problem


def test_what_is_stored_is_valid_again() -> None:
    spec = parse_spec(of("m", ("a", "j-0123456789@1"), ("b.2", "best")))
    stored = spec.model_dump(mode="json")
    assert stored["serving"]["adapters"][1] == {"name": "b.2", "from": "best"}
    assert parse_spec(stored) == spec
