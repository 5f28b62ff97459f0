"""Recipes of tinker-cookbook, unmodified, with arguments alone: their environment, and a working directory with what
they load from hubs elsewhere, as local files under the same names."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NAME = "Qwen/Qwen3-8B-Base"
"""Recipes choose the form of a chat by it (`role_colon`), so the server has this name, whatever its base is."""
CONFIGS = """---
configs:
- config_name: main
  data_files:
  - split: train
    path: train.jsonl
  - split: test
    path: test.jsonl
---
"""


def working_directory(place: Path, base: Path) -> Path:
    """Make a directory in which recipes find the tokenizer of the base, and sums of two digits as all of their data."""
    (place / NAME).parent.mkdir(parents=True)
    (place / NAME).symlink_to(base, target_is_directory=True)
    rows = {
        "HuggingFaceH4/no_robots": _chat,
        "openai/gsm8k": _problem,
        "Anthropic/hh-rlhf": _pair,
        "zwhe99/DeepMath-103K": _question,
    }
    draw = random.Random(0)
    for name, row in rows.items():
        (place / name).mkdir(parents=True)
        for split in ("train", "test"):
            lines = [json.dumps(row(draw.randrange(10), draw.randrange(10))) for _ in range(32)]
            (place / name / f"{split}.jsonl").write_text("\n".join(lines) + "\n")
    (place / "openai/gsm8k/README.md").write_text(CONFIGS)
    return place


def records(file: Path) -> Iterator[dict[str, Any]]:
    """Give the records of a file of JSON lines."""
    for line in file.read_text().splitlines():
        yield json.loads(line)


def _chat(a: int, b: int) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": f"{a}+{b}"}, {"role": "assistant", "content": str(a + b)}]}


def _problem(a: int, b: int) -> dict[str, Any]:
    return {"question": f"{a}+{b}", "answer": f"#### {a + b}"}


def _pair(a: int, b: int) -> dict[str, Any]:
    asked = f"\n\nHuman: {a}+{b}\n\nAssistant: "
    return {"chosen": f"{asked}{a + b}", "rejected": f"{asked}{a * b + 1}"}


def _question(a: int, b: int) -> dict[str, Any]:
    return {"question": f"{a}+{b}", "final_answer": str(a + b)}
