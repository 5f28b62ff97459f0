"""Teach a model to copy digits by reward alone, through the Tinker API: groups of samples, importance sampling.

pip install tinker
export TINKER_BASE_URL=http://127.0.0.1:8080 TINKER_API_KEY=tml-local
python examples/tinker/reinforcement.py [--steps 60]
"""

from __future__ import annotations

import argparse
import random

import tinker
from tinker import types

PROMPTS, SAMPLES = 8, 16


def reward(tokens: list[int], right: list[int]) -> float:
    return sum(a == b for a, b in zip(tokens, right, strict=False)) / max(len(tokens), len(right))


def datum(prompt: list[int], sample: types.SampledSequence, advantage: float) -> types.Datum:
    tokens, before = [*prompt, *sample.tokens], [0.0] * (len(prompt) - 1)
    inputs = {
        "target_tokens": tokens[1:],
        "logprobs": [*before, *sample.logprobs],
        "advantages": [*before, *[advantage] * len(sample.tokens)],
    }
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    steps = parser.parse_args().steps
    base = tinker.RestClient().get_server_capabilities().result().supported_models[0].model_name
    service = tinker.ServiceClient()
    model = service.create_lora_training_client(base_model=base, rank=16, train_unembed=False).result()
    tokenizer, draw, params = model.get_tokenizer(), random.Random(0), types.SamplingParams(max_tokens=5)
    for step in range(steps):
        sampler = model.save_weights_and_get_sampling_client().result()
        asked = ["".join(draw.choices("0123456789", k=3)) for _ in range(PROMPTS)]
        prompts = [tokenizer.encode(f"{digits}=") for digits in asked]
        drawn = [sampler.sample(types.ModelInput.from_ints(one), SAMPLES, params) for one in prompts]
        batch, rewards = [], []
        for digits, prompt, future in zip(asked, prompts, drawn, strict=True):
            right, group = [*tokenizer.encode(digits), tokenizer.eos_token_id], future.result().sequences
            found = [reward(list(one.tokens), right) for one in group]
            batch += [datum(prompt, one, r - sum(found) / SAMPLES) for one, r in zip(group, found, strict=True)]
            rewards += found
        model.forward_backward(batch, "importance_sampling")
        model.optim_step(types.AdamParams(learning_rate=2e-3)).result()
        print(f"step {step:3}  reward {sum(rewards) / len(rewards):.3f}")
    print(model.save_state("copies-digits").result().path)


if __name__ == "__main__":
    main()
