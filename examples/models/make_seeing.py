"""Make a tiny random vision model with a character tokenizer: to try environments with images.

    python -m examples.models.make_seeing DIR [--family idefics3] [--parts] [--seed 0]

About half a million parameters in float32, plain Hugging Face layout with an image processor. It sees 32 x 32 pixels
of an image as four tokens (llava: as sixteen). `--parts`: idefics3 also sees parts of larger images as four more each.
Qwen-VL sees images of other sizes as a grid of up to sixteen tokens.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    CLIPImageProcessorPil,
    Idefics3ImageProcessorPil,
    Idefics3Processor,
    LlavaProcessor,
    PreTrainedTokenizerFast,
    Qwen2VLImageProcessorPil,
)

from examples.models.make_tiny import EOS, PAD, VOCABULARY, tiny_tokenizer

SIDE, PATCH = 32, 8
IMAGE, PAD_OF_IMAGE = "<image>", "<|image_pad|>"
QWEN_TOKENS = ["<|vision_start|>", "<|vision_end|>", PAD_OF_IMAGE, "<|video_pad|>"]
PARTS = [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
TOKENS = {
    "idefics3": [IMAGE, "<fake_token_around_image>", "<end_of_utterance>", "<global-img>", *PARTS],
    "llava": [IMAGE],
    "qwen2_vl": QWEN_TOKENS,
    "qwen2_5_vl": QWEN_TOKENS,
    "qwen3_vl": QWEN_TOKENS,
}
"""Additional tokens of each family."""
TOWER = {"hidden_size": 64, "intermediate_size": 128}
LAYERS = {"num_hidden_layers": 2, "num_attention_heads": 2}
QWEN_TOWER = {"depth": 2, "num_heads": 2, "patch_size": PATCH, "spatial_merge_size": 2, "temporal_patch_size": 2}
TOWERS: dict[str, dict[str, Any]] = {
    "idefics3": {**TOWER, **LAYERS, "image_size": SIDE, "patch_size": PATCH},
    "llava": {**TOWER, **LAYERS, "image_size": SIDE, "patch_size": PATCH, "model_type": "clip_vision_model"},
    "qwen2_vl": {**QWEN_TOWER, "embed_dim": 64, "mlp_ratio": 2},
    "qwen2_5_vl": {**QWEN_TOWER, **TOWER, "window_size": SIDE, "fullatt_block_indexes": [1]},
    "qwen3_vl": {**QWEN_TOWER, **TOWER, "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]},
}
ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [6, 5, 5]}


def make_seeing(
    directory: Path | str,
    *,
    family: str = "idefics3",
    parts: bool = False,
    hidden_size: int = 128,
    layers: int = 2,
    seed: int = 0,
    context_length: int = 512,
) -> Path:
    """Write the model to `directory` and return it. `family`: a key of TOKENS."""
    directory = Path(directory)
    tokenizer = tiny_tokenizer(context_length)
    tokenizer.add_special_tokens({"additional_special_tokens": TOKENS[family]})
    tokenizer.chat_template = _template(family)
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": hidden_size,
        "intermediate_size": 2 * hidden_size,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": context_length,
        "bos_token_id": None,
        "eos_token_id": VOCABULARY.index(EOS),
        "pad_token_id": VOCABULARY.index(PAD),
        "tie_word_embeddings": False,
    }
    config = _config(family, text, tokenizer)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = AutoModelForImageTextToText.from_config(config)
        for name, parameter in model.named_parameters():
            if ("vision" in name or "visual" in name) and parameter.ndim > 1:  # else all images look alike
                parameter.mul_(5.0)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    _processor(family, tokenizer, parts).save_pretrained(directory)
    return directory


def _template(family: str) -> str:
    """Return a chat template like those of vision models: contents are lists of parts."""
    image = "<|vision_start|><|image_pad|><|vision_end|>" if family.startswith("qwen") else IMAGE
    return (
        "{% for message in messages %}{% for part in message['content'] %}"
        f"{{% if part['type'] == 'image' %}}{image}{{% else %}}{{{{ part['text'] }}}}{{% endif %}}"
        "{% endfor %}{% endfor %}"
    )


def _config(family: str, text: dict[str, Any], tokenizer: PreTrainedTokenizerFast) -> Any:
    ids = tokenizer.convert_tokens_to_ids
    shared = {"tie_word_embeddings": False, "dtype": "float32", "pad_token_id": text["pad_token_id"]}
    tower = dict(TOWERS[family])
    if not family.startswith("qwen"):
        text |= {"model_type": "llama", "head_dim": text["hidden_size"] // 4}
        own = {"scale_factor": 2, "image_token_id": ids(IMAGE)} if family == "idefics3" else {}
        if family == "llava":
            own = {"image_token_index": ids(IMAGE), "image_seq_length": (SIDE // PATCH) ** 2}
    else:
        text |= {"rope_parameters": ROPE}
        if family == "qwen3_vl":
            text |= {"rope_parameters": ROPE | {"mrope_interleaved": True}, "head_dim": text["hidden_size"] // 4}
        tower["hidden_size" if family == "qwen2_vl" else "out_hidden_size"] = text["hidden_size"]
        names = ("vision_start", "vision_end", "image", "video")
        own = {f"{name}_token_id": ids(token) for name, token in zip(names, QWEN_TOKENS, strict=True)}
    return AutoConfig.for_model(family, text_config=text, vision_config=tower, **shared, **own)


def _processor(family: str, tokenizer: PreTrainedTokenizerFast, parts: bool) -> Any:
    if family == "idefics3":
        images = Idefics3ImageProcessorPil(
            do_image_splitting=parts,
            size={"longest_edge": 2 * SIDE if parts else SIDE},
            max_image_size={"longest_edge": SIDE},
        )
        tokens = (SIDE // PATCH // 2) ** 2
        return Idefics3Processor(images, tokenizer, image_seq_len=tokens, chat_template=tokenizer.chat_template)
    if family == "llava":
        square = {"height": SIDE, "width": SIDE}
        return LlavaProcessor(
            CLIPImageProcessorPil(size={"shortest_edge": SIDE}, crop_size=square),
            tokenizer,
            patch_size=PATCH,
            vision_feature_select_strategy="default",
            num_additional_image_tokens=1,
            chat_template=tokenizer.chat_template,
        )
    sizes = {"shortest_edge": (2 * PATCH) ** 2, "longest_edge": (8 * PATCH) ** 2}
    return Qwen2VLImageProcessorPil(patch_size=PATCH, merge_size=2, temporal_patch_size=2, size=sizes)


def main() -> None:
    parser = argparse.ArgumentParser(description="Make a tiny random vision model with a character tokenizer.")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--family", choices=sorted(TOKENS), default="idefics3", help="its architecture")
    parser.add_argument("--parts", action="store_true", help="idefics3: large images are seen in parts too")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.parts and options.family != "idefics3":
        parser.error("--parts goes with --family idefics3")
    made = make_seeing(options.directory, family=options.family, parts=options.parts, seed=options.seed)
    print(f"tiny {options.family} in {made}")


if __name__ == "__main__":
    main()
