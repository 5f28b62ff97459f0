"""Samples for the tests of sft and dpo: a tiny model that chats, specs, and rows."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from examples.models.make_tiny import make_tiny, tiny_tokenizer
from opentinker.services.trainer.data.chat import Tokens
from opentinker.services.trainer.data.examples import Example
from opentinker.shared.spec import JobSpec, parse_spec

START, END = "<|im_start|>", "<|im_end|>"
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TAGGED = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{% else %}"
    "{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
FORGETFUL = (
    "{% for message in messages %}{% set text = message['content'] %}"
    "{% if message['role'] == 'assistant' and not loop.last %}{% set text = text.split('#')[-1] %}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + text + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""Leaves out the thoughts (before #) of all turns but the last, as templates of reasoning models do."""


def chat_tokenizer(template: str | None = CHATML) -> PreTrainedTokenizerFast:
    """One token per character, and one each for the two marks."""
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"eos_token": END, "additional_special_tokens": [START]})
    tokenizer.chat_template = template
    return tokenizer


def chat_model(directory: Path, *, hidden_size: int = 64, layers: int = 1, **options: Any) -> Path:
    """A random Qwen3 of some 60,000 parameters that goes with `chat_tokenizer`."""
    make_tiny(directory, hidden_size=hidden_size, layers=layers, **options)
    shutil.copytree(directory, made := directory.with_name(f"{directory.name}-chat"))
    model = AutoModelForCausalLM.from_pretrained(directory)
    tokenizer = chat_tokenizer()
    model.resize_token_embeddings(len(tokenizer))
    model.save_pretrained(made)
    tokenizer.save_pretrained(made)
    return made


def turns(*contents: str, first: str = "user") -> list[dict[str, str]]:
    """A chat of user and assistant in turn."""
    roles = ["user", "assistant"] if first == "user" else ["assistant", "user"]
    return [{"role": roles[n % 2], "content": content} for n, content in enumerate(contents)]


def write_rows(path: Path, rows: list[Any]) -> Path:
    path.write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in rows))
    return path


def copies(count: int) -> list[dict[str, str]]:
    """`37=` is answered by `37`: learned in a moment."""
    return [{"prompt": f"{n % 100:02d}=", "completion": f"{n % 100:02d}"} for n in range(count)]


def preferences(count: int) -> list[dict[str, str]]:
    """The copy is preferred to its mirror image."""
    return [
        {"prompt": f"{n % 100:02d}=", "chosen": f"{n % 100:02d}", "rejected": f"{n % 100:02d}"[::-1] + "?"}
        for n in range(count)
    ]


def row_spec(base: object, path: object, kind: Any = "sft", **parts: dict[str, Any]) -> JobSpec:
    """Of a small job, with fields of its parts added or replaced; `data` without epochs goes with train.steps."""
    usual: dict[str, dict[str, Any]] = {
        "model": {"base": str(base)},
        "data": {"path": str(path), "batch_size": 4},
        "train": {"steps": 6, "lr": 3e-3, "checkpoint_every": 2},
    }
    merged = {part: {**usual.get(part, {}), **parts.get(part, {})} for part in usual | parts}
    if "epochs" in merged["data"]:
        merged["train"].pop("steps")
    return parse_spec({"name": "rows", "kind": kind, **merged})


def random_rows(seed: int, count: int = 6) -> list[Example]:
    """Of mixed length, some beginning alike, with learned stretches in several places."""
    rng = np.random.default_rng(seed)
    start, made = rng.integers(3, 60, 5), []
    for n in range(count):
        own = rng.integers(3, 60, rng.integers(2, 30))
        ids = (np.concatenate([start, own]) if n % 2 else own).astype(np.int32)
        learned = rng.random(len(ids)) < 0.6
        learned[0], learned[-1] = False, True
        made.append(Example((Tokens(ids, learned),)))
    return made


def random_pairs(seed: int, count: int = 5) -> list[Example]:
    rng = np.random.default_rng(seed)
    made = []
    for _ in range(count):
        prompt = rng.integers(3, 60, rng.integers(1, 9))
        parts = []
        for _ in range(2):
            ids = np.concatenate([prompt, rng.integers(3, 60, rng.integers(1, 12))]).astype(np.int32)
            parts.append(Tokens(ids, np.arange(len(ids)) >= len(prompt)))
        made.append(Example(tuple(parts)))
    return made
