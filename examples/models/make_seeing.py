"""Make a tiny random model that sees (Idefics3), with a character tokenizer: to try environments with images.

    python -m examples.models.make_seeing DIR [--parts] [--seed 0]

0.4M parameters in float32, plain Hugging Face layout with an image processor. It sees 32 x 32 points of an image as
four tokens; `--parts`: and parts of what is larger as four more each.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from transformers import (
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    Idefics3ImageProcessorPil,
    Idefics3Processor,
    PreTrainedTokenizerFast,
)

from examples.models.make_tiny import EOS, PAD, VOCABULARY, tiny_tokenizer

IMAGE = "<image>"
AROUND = ["<fake_token_around_image>", "<end_of_utterance>", "<global-img>"]
PARTS = [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
TEMPLATE = (
    "{% for message in messages %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endfor %}"
)
"""As those of models that see: contents are lists of parts."""
SIDE, PATCH = 32, 8


def make_seeing(
    directory: Path | str,
    *,
    parts: bool = False,
    hidden_size: int = 128,
    layers: int = 2,
    seed: int = 0,
    context_length: int = 512,
) -> Path:
    """Write the model to `directory` and return it."""
    directory = Path(directory)
    tokenizer = tiny_tokenizer(context_length)
    tokenizer.add_special_tokens({"additional_special_tokens": [IMAGE, *AROUND, *PARTS]})
    tokenizer.chat_template = TEMPLATE
    text = {
        "model_type": "llama",
        "vocab_size": len(tokenizer),
        "hidden_size": hidden_size,
        "intermediate_size": 2 * hidden_size,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": hidden_size // 4,
        "max_position_embeddings": context_length,
        "bos_token_id": None,
        "eos_token_id": VOCABULARY.index(EOS),
        "pad_token_id": VOCABULARY.index(PAD),
        "tie_word_embeddings": False,
    }
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = _model(text, tokenizer)
        for name, parameter in model.named_parameters():
            if "vision" in name and parameter.ndim > 1:  # at the usual small scale all images look alike
                parameter.mul_(5.0)
    model.save_pretrained(directory)
    _processor(tokenizer, parts).save_pretrained(directory)
    return directory


def _model(text: dict[str, Any], tokenizer: PreTrainedTokenizerFast) -> Idefics3ForConditionalGeneration:
    eyes = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": SIDE,
        "patch_size": PATCH,
    }
    return Idefics3ForConditionalGeneration(
        Idefics3Config(
            text_config=text,
            vision_config=eyes,
            scale_factor=2,
            image_token_id=tokenizer.convert_tokens_to_ids(IMAGE),
            pad_token_id=text["pad_token_id"],
            tie_word_embeddings=False,
            dtype="float32",
        )
    )


def _processor(tokenizer: PreTrainedTokenizerFast, parts: bool) -> Idefics3Processor:
    images = Idefics3ImageProcessorPil(
        do_image_splitting=parts,
        size={"longest_edge": 2 * SIDE if parts else SIDE},
        max_image_size={"longest_edge": SIDE},
    )
    return Idefics3Processor(images, tokenizer, image_seq_len=(SIDE // PATCH // 2) ** 2, chat_template=TEMPLATE)


def main() -> None:
    parser = argparse.ArgumentParser(description="Make a tiny random model that sees, with a character tokenizer.")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--parts", action="store_true", help="large images are seen in parts too")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    made = make_seeing(options.directory, parts=options.parts, seed=options.seed)
    print(f"tiny model that sees in {made}")


if __name__ == "__main__":
    main()
