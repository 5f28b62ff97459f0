"""A run of a client with the SDK of Tinker that the interpreter has: python client_run.py BASE [RANK]. Prints results
as JSON. With rank 0 it trains all weights.

    TINKER_BASE_URL, TINKER_API_KEY   of the server

It imports nothing of ours: the interpreter is one of an environment with the SDK alone.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
import warnings
from typing import Any

import tinker
from tinker import types

warnings.simplefilter("ignore")


def datum(tokens: list[int], **inputs: Any) -> types.Datum:
    targets = types.TensorData(data=tokens[1:], dtype="int64", shape=[len(tokens) - 1])
    floats = {name: types.TensorData(data=v, dtype="float32", shape=[len(v)]) for name, v in inputs.items()}
    chunks = types.ModelInput.from_ints(tokens[:-1])
    return types.Datum(model_input=chunks, loss_fn_inputs={"target_tokens": targets, **floats})


def train(client: Any, found: dict[str, Any]) -> None:
    tokens = [5, 6, 7, 8, 9, 10]
    data = [datum(tokens, weights=[1.0] * 5), datum(tokens[:4], weights=[0.0, 1.0, 1.0])]
    losses = []
    for _ in range(6):
        both = client.forward_backward(data, "cross_entropy"), client.optim_step(types.AdamParams(learning_rate=5e-4))
        output, _ = [one.result() for one in both]
        losses.append(output.metrics["loss:sum"])
    found["losses"], found["lengths"] = losses, [len(one["logprobs"].data) for one in output.loss_fn_outputs]
    found["forward"] = client.forward(data, "cross_entropy").result().metrics["loss:sum"]
    sampled = [datum(tokens, logprobs=[-1.0] * 5, advantages=[0.5] * 5)]
    found["importance"] = client.forward_backward(sampled, "importance_sampling").result().metrics["loss:sum"]
    client.optim_step(types.AdamParams(learning_rate=1e-3)).result()
    try:
        client.forward_backward([datum(tokens, weights=[1.0])], "cross_entropy").result()
    except Exception as error:  # noqa: BLE001 - each version raises its own
        found["refused"] = str(error)


def sample(client: Any, found: dict[str, Any]) -> None:
    prompt = types.ModelInput.from_ints([5, 6, 7])
    params = types.SamplingParams(max_tokens=4, temperature=1.0, seed=3)
    answer = client.sample(prompt=prompt, num_samples=2, sampling_params=params).result()
    found["samples"] = [len(one.tokens) for one in answer.sequences]
    found["sampled_logprobs"] = [len(one.logprobs or []) for one in answer.sequences]
    found["prompt_logprobs"] = client.compute_logprobs(prompt).result()


def samples_of(client: Any) -> list[int]:
    """Return the lengths of samples: what a process of a recipe's pool does with a copy of a client."""
    found: dict[str, Any] = {}
    sample(client, found)
    return list(found["samples"])


def main(base: str, rank: int = 4) -> None:
    found: dict[str, Any] = {"version": tinker.__version__}
    service = tinker.ServiceClient()
    found["bases"] = [one.model_name for one in service.get_server_capabilities().supported_models]
    client = service.create_lora_training_client(base_model=base, rank=rank, seed=1, train_unembed=False)
    found["info"] = client.get_info().model_data.model_name
    train(client, found)
    saved = client.save_state("first").result().path
    found["saved"], found["second"] = saved, client.save_state("second").result().path
    named = client.save_weights_for_sampler("named").result().path
    found["named"] = named
    sample(service.create_sampling_client(model_path=named), found)
    sampler = client.save_weights_and_get_sampling_client()
    sample(sampler, found)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        found["elsewhere"] = pool.apply(samples_of, (sampler,))
    if hasattr(sampler, "get_sampler_handle"):  # since 0.38
        sample(tinker.SamplingClient.from_sampler_handle(sampler.get_sampler_handle()), found)
    again = service.create_training_client_from_state(saved)
    found["again"] = (
        again.forward([datum([5, 6, 7, 8], weights=[1.0] * 3)], "cross_entropy").result().metrics["loss:sum"]
    )
    rest = service.create_rest_client()
    listed = rest.list_checkpoints(client.model_id if hasattr(client, "model_id") else saved.split("/")[2]).result()
    found["checkpoints"] = sorted(one.checkpoint_id for one in listed.checkpoints)
    found["runs"] = rest.list_training_runs().result().cursor.total_count
    rest.delete_checkpoint_from_tinker_path(saved).result()
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
