"""Teach a model to copy digits from right answers, through the Tinker API.

pip install tinker
export TINKER_BASE_URL=http://127.0.0.1:8080 TINKER_API_KEY=tml-local
python examples/tinker/supervised.py [--steps 60]
"""

from __future__ import annotations

import argparse
import random
from typing import Any

import tinker
from tinker import types


def row(tokenizer: Any, draw: random.Random) -> types.Datum:
    digits = "".join(draw.choices("0123456789", k=3))
    prompt = tokenizer.encode(f"{digits}=")
    tokens = [*prompt, *tokenizer.encode(digits), tokenizer.eos_token_id]
    weights = [0.0] * (len(prompt) - 1) + [1.0] * (len(tokens) - len(prompt))
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], "weights": weights},
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    steps = parser.parse_args().steps
    base = tinker.RestClient().get_server_capabilities().result().supported_models[0].model_name
    service = tinker.ServiceClient()
    model = service.create_lora_training_client(base_model=base, rank=16, train_unembed=False).result()
    tokenizer = model.get_tokenizer()
    draw = random.Random(0)
    for step in range(steps):
        batch = [row(tokenizer, draw) for _ in range(32)]
        loss = model.forward_backward(batch, "cross_entropy")
        model.optim_step(types.AdamParams(learning_rate=3e-3)).result()
        if step % 10 == 0 or step == steps - 1:
            print(f"step {step:3}  loss per token {loss.result().metrics['loss:sum'] / (32 * 4):.3f}")
    sampler = model.save_weights_and_get_sampling_client().result()
    prompt = types.ModelInput.from_ints(tokenizer.encode("472="))
    answer = sampler.sample(prompt, num_samples=1, sampling_params=types.SamplingParams(max_tokens=8, temperature=0.0))
    print("472=", tokenizer.decode(answer.result().sequences[0].tokens, skip_special_tokens=True), sep="")


if __name__ == "__main__":
    main()
