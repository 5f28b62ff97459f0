"""Make a tiny random Qwen3 with a character tokenizer: the model of the quick start and of the tests.

    python examples/models/make_tiny.py DIR [--norm-scale 3] [--seed 0]

2.4M parameters in float32, plain Hugging Face layout, a second of work. Calling it again with the same options does
nothing. `--norm-scale 3` is for LoRA: with the tied head frozen at its small random scale, an adapter can never
push the probability of a token above about 0.7; three times the final norm's weight lifts that limit.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any, Protocol

import torch
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"
CHARACTERS = "0123456789abcdefghijklmnopqrstuvwxyz =?\n.,:!'\"-+*/<>()[]_#%$&"
SPECIAL = [PAD, EOS, UNKNOWN]
VOCABULARY = [*SPECIAL, *CHARACTERS]
PLAIN_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
STAMP = "make_tiny.json"


class Lesson(Protocol):
    """Supervised learning that a model gets before it is moved to its place."""

    def options(self) -> dict[str, Any]:
        """Return what the model depends on, for its stamp."""

    def teach(self, directory: Path) -> None:
        """Train the model there and save it in its place."""


def make_tiny(
    directory: Path | str,
    *,
    hidden_size: int = 256,
    layers: int = 4,
    norm_scale: float = 1.0,
    seed: int = 0,
    context_length: int = 4096,
    characters: str = CHARACTERS,
    lesson: Lesson | None = None,
) -> Path:
    """Write the model to `directory` (made if missing) and return it.

    `characters`: those that the tokenizer knows; if upper-case letters are among them, it tells the cases apart.
    Raises FileExistsError if the directory holds something that this function did not make.
    """
    directory = Path(directory)
    vocabulary = [*SPECIAL, *characters]
    options = {
        "hidden_size": hidden_size,
        "layers": layers,
        "norm_scale": norm_scale,
        "seed": seed,
        "context_length": context_length,
        "vocabulary": vocabulary,
    } | (lesson.options() if lesson else {})
    stamp = directory / STAMP
    if stamp.exists() and json.loads(stamp.read_text()) == options:
        return directory
    if directory.exists() and any(directory.iterdir()) and not stamp.exists():
        raise FileExistsError(f"{directory} holds other files; choose an empty directory")
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory.parent, prefix=".make_tiny-") as temporary:
        made = Path(temporary) / "model"
        tiny_tokenizer(context_length, characters).save_pretrained(made)
        size = len(vocabulary)
        tiny_model(hidden_size, layers, norm_scale, seed, context_length, vocab_size=size).save_pretrained(made)
        if lesson:
            lesson.teach(made)
        (made / STAMP).write_text(json.dumps(options))
        if directory.exists():
            shutil.rmtree(directory)
        made.rename(directory)
    return directory


def tiny_tokenizer(context_length: int = 4096, characters: str = CHARACTERS) -> PreTrainedTokenizerFast:
    """One id per character; anything unknown becomes `<unk>`. Upper case is read as lower case if no upper-case letter
    is among the characters."""
    tokens = [*SPECIAL, *characters]
    core = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token=UNKNOWN))
    if characters == characters.lower():
        core.normalizer = normalizers.Lowercase()
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token=EOS,
        pad_token=PAD,
        unk_token=UNKNOWN,
        chat_template=PLAIN_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=context_length,
    )


def tiny_model(
    hidden_size: int,
    layers: int,
    norm_scale: float,
    seed: int,
    context_length: int,
    *,
    vocab_size: int = len(VOCABULARY),
) -> Qwen3ForCausalLM:
    config = Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=hidden_size // 4,
        max_position_embeddings=context_length,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=VOCABULARY.index(EOS),
        pad_token_id=VOCABULARY.index(PAD),
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config)
        model.model.norm.weight.mul_(norm_scale)
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description="Make a tiny random Qwen3 with a character tokenizer.")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--norm-scale", type=float, default=1.0, help="weight of the final norm; 3 for LoRA")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    made = make_tiny(options.directory, norm_scale=options.norm_scale, seed=options.seed)
    print(f"tiny model in {made}")


if __name__ == "__main__":
    main()
