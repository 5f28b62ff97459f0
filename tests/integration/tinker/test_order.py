"""Numbers of commands: each is answered once, and none that was used is missing, whatever came with it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from opentinker.shared.state.tinker.model_catalog import ModelCatalog
from opentinker.shared.types.tinker import Failed, OptimStep, Save, Skip, Stepped
from tests.integration.tinker.site import Client, FakeWorkers, passes


async def test_an_answer_before_that_of_an_earlier_command_leaves_the_earlier_one_waiting(
    user: Client, workers: FakeWorkers
) -> None:
    model = await user.model()
    workers.answers = False
    promises = [await user.ok("optim_step", model_id=model, seq_id=seq) for seq in (1, 2)]
    await workers.say(f"{model}#2", Failed(error="refused"))
    await workers.say(f"{model}#2", Failed(error="refused again"))
    assert [await workers.store.was_answered(f"{model}#{seq}") for seq in (0, 1, 2)] == [True, False, True]
    status, answer = await user.post("retrieve_future", request_id=promises[0]["request_id"])
    assert status == 408, answer
    await workers.say(f"{model}#1", Stepped(metrics={}))
    await workers.store._redis.delete(f"tinker:answer:{model}#1")
    status, answer = await user.post("retrieve_future", request_id=promises[0]["request_id"])
    assert status == 410 and "kept no more" in answer["detail"]


async def test_the_number_that_all_others_wait_for_is_admitted(
    user: Client, workers: FakeWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("opentinker.shared.state.tinker.requests.MAX_WAITING", 3)
    model = await user.model()
    workers.answers = False
    statuses = {seq: (await user.post("optim_step", model_id=model, seq_id=seq))[0] for seq in (3, 4, 5, 6, 2, 1, 2)}
    assert statuses == {3: 200, 4: 200, 5: 200, 6: 429, 2: 429, 1: 200}
    await workers.say(f"{model}#1", Stepped(metrics={}))
    assert (await user.post("optim_step", model_id=model, seq_id=2))[0] == 200


async def test_a_model_waits_for_no_number_that_its_trainer_has_given_up(user: Client, workers: FakeWorkers) -> None:
    model, store = await user.model(), workers.store
    catalog = ModelCatalog(store._redis)
    for seq in (2, 3, 5):
        await user.ok("optim_step", model_id=model, seq_id=seq)
    assert [one.next for one in await catalog.of(workers.job)] == [1]
    await workers.say(f"{model}#4", Failed(error="request 1 has not come", lost=True))
    status, answer = await user.post("retrieve_future", request_id=f"{model}#4")
    assert (status, answer["detail"]) == (410, "request 1 has not come"), "the same number is never carried out"
    for last, next in ((3, 4), (2, 4), (4, 6)):
        await store.leave_out(model, last)
        assert [one.next for one in await catalog.of(workers.job)] == [next]
    await user.ok("optim_step", model_id=model, seq_id=1)
    await store.leave_out("removed:train:0", 3)
    assert not await store._redis.exists("tinker:model:removed:train:0")


async def test_digests_of_commands_long_ago_are_forgotten_and_their_numbers_stay_used(
    user: Client, workers: FakeWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = 10
    monkeypatch.setattr("opentinker.shared.state.tinker.requests.KEPT_DIGESTS", kept)
    model, store = await user.model(), workers.store

    async def digests() -> set[int]:
        return {int(number) for number in await store._redis.hkeys(f"tinker:asked:{model}")}

    for seq in range(1, kept + 2):
        await user.result(await user.ok("optim_step", model_id=model, seq_id=seq))
    assert await digests() == set(range(2, kept + 2))
    sent = len(workers.commands)
    again = await user.ok("optim_step", model_id=model, seq_id=1, adam_params={"learning_rate": 0.5})
    await user.result(again)
    assert len(workers.commands) == sent, "it is no new command"
    await store._redis.delete(f"tinker:answer:{model}#1")
    assert (await user.post("retrieve_future", request_id=f"{model}#1"))[0] == 410
    assert (await user.post("retrieve_future", request_id=f"{model}#99"))[0] == 404
    workers.answers = False
    for seq in (13, 14, 40):
        await user.ok("optim_step", model_id=model, seq_id=seq)
    await store.leave_out(model, 40)
    assert await digests() == {40}
    await user.ok("optim_step", model_id=model, seq_id=12)
    assert await digests() == {40}, "it was given up"
    await user.ok("optim_step", model_id=model, seq_id=41)
    assert await digests() == {40, 41}


async def test_a_repeated_save_for_a_sampler_may_have_another_number_for_it(user: Client, workers: FakeWorkers) -> None:
    model = await user.model()
    body = {"model_id": model, "seq_id": 1}
    first, again = [
        await user.post("save_weights_for_sampler", **body, sampling_session_seq_id=number) for number in (4, 5)
    ]
    assert first == again and first[0] == 200
    assert (await user.result(again[1]))["sampling_session_id"] == f"{model.partition(':')[0]}:sampler:4"
    status, _ = await user.post("save_weights_for_sampler", **body, sampling_session_seq_id=4, kind="inflight")
    assert status == 409
    assert [type(command.body) for command in workers.commands[1:]] == [Save]


@pytest.mark.parametrize(
    ("route", "body", "said"),
    [
        ("optim_step", {"adam_params": {"learning_rate": "much"}}, "learning_rate"),
        ("optim_step", {"adam_params": {"more": "x" * 70_000}}, "may have 65536"),
        ("save_weights", {"path": 7}, "path"),
        ("load_weights", {"path": None}, "path"),
        ("forward", {"forward_input": {"data": 1, "loss_fn": "ppo"}}, "forward_input.data"),
        (
            "forward_backward",
            {"forward_backward_input": {"data": [], "loss_fn": "x" * (17 << 20)}},
            "may have 16777216",
        ),
    ],
)
async def test_a_body_that_is_wrong_is_the_answer_of_its_number(
    user: Client, workers: FakeWorkers, route: str, body: dict[str, Any], said: str
) -> None:
    model = await user.model()
    promise = await user.ok(route, **body, model_id=model, seq_id=1)
    assert said in (await user.result(promise))["error"]
    await user.result(await user.ok("optim_step", model_id=model, seq_id=2))
    assert [type(command.body) for command in workers.commands[1:]] == [Skip, OptimStep]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (b"\x1a\x00" * 110_000, "fields"),
        (b"\x1a\x05ab", "ForwardBackwardRequest"),
        (bytes(9 << 20), "may have 8388608"),
    ],
    ids=["fields", "cut", "large"],
)
async def test_training_data_that_cannot_be_read_are_the_answer_of_their_number(
    user: Client, workers: FakeWorkers, more: bytes, said: str
) -> None:
    model = await user.model()
    status, promise = await user.raw("forward_backward", passes(model, 1) + more)
    assert status == 200, promise
    assert said in (await user.result(promise))["error"]
    both = await asyncio.gather(*(user.ok("optim_step", model_id=model, seq_id=seq) for seq in (2, 3)))
    assert ["error" in await user.result(one) for one in both] == [False, False]
