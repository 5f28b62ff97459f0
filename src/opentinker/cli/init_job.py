"""`opentinker init`: asks four questions and writes a job file."""

from __future__ import annotations

import os
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit, urlunsplit

import orjson
import typer

from opentinker.cli.common import AsJson, Url, as_typed, print_json, say, server_url
from opentinker.cli.shell import complete

MODEL = "Qwen/Qwen3-0.6B"
ENVIRONMENT = "gsm8k"
HELD_BACK = {"gsm8k": 'config = { split = "test" }'}
"""Environment -> the settings of its validation."""
PAIRS = {"sft": '{ prompt = "prompt", completion = "completion" }',
         "dpo": '{ prompt = "prompt", chosen = "chosen", rejected = "rejected" }'}  # fmt: skip
"""Columns of the rows that a job learns from."""


class Kind(StrEnum):
    rl = "rl"
    sft = "sft"
    dpo = "dpo"


def init(
    path: Annotated[Path, typer.Argument(metavar="JOB.toml", help="The file to write.")] = Path("job.toml"),
    kind: Annotated[Kind | None, typer.Option(help="Kind of job.")] = None,
    environment: Annotated[
        str | None,
        typer.Option(help="rl: built-in name, URL or module:Class.", autocompletion=complete.local_environments),
    ] = None,
    rows: Annotated[str | None, typer.Option(help="sft, dpo: file with the rows.")] = None,
    model: Annotated[str | None, typer.Option(help="Directory or Hugging Face id.")] = None,
    adapter: Annotated[bool | None, typer.Option("--adapter/--whole", help="Train an adapter, or all weights.")] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Ask nothing: take the default of every other question.")] = False,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Ask four questions and write a job file that editors can check."""
    if os.path.exists(path):
        raise typer.BadParameter(f"{path} already exists; name another file")
    if path.suffix != ".toml":
        raise typer.BadParameter(f"{path} must end in .toml")
    if not path.parent.is_dir():
        raise typer.BadParameter(f"there is no directory {path.parent}")

    def answer(given: Any, question: str, default: Any, ask: Callable[..., Any] = typer.prompt) -> Any:
        return given if given is not None else default if yes else ask(question, default=default, err=True)

    if kind is None:
        question = "Kind of job: rl (an environment rewards), sft (examples), dpo (preferences)"
        kind = Kind(answer(None, question, Kind.rl.value, _ask_kind))
    if (rows if kind == Kind.rl else environment) is not None:
        raise typer.BadParameter("--environment is for rl, --rows for sft and dpo")
    if kind == Kind.rl:
        source = answer(
            environment, "Environment: a built-in name (`opentinker env list`), URL or module:Class", ENVIRONMENT
        )
    else:
        source = answer(rows, "File with the rows, JSON lines or Parquet", "rows.jsonl")
    model = answer(model, "Model: a directory or a Hugging Face id", MODEL)
    adapter = answer(adapter, "Train an adapter (LoRA) instead of all weights?", True, typer.confirm)
    text = job_text(path.stem, kind, str(source), str(model), adapter=bool(adapter), server=_shared(server_url(url)))
    job = _checked(text)
    try:
        with path.open("x") as file:
            file.write(text)
    except OSError as error:
        raise typer.BadParameter(f"{path} cannot be written: {error.strerror}") from None
    if as_json:
        print_json({"path": str(path), "job": job})
        return
    say(f"{path} is written. Next:")
    say(f"  {as_typed('validate', path)}")
    say(f"  {as_typed('submit', path, '--watch')}")


def job_text(name: str, kind: Kind, source: str, model: str, *, adapter: bool, server: str) -> str:
    """Return a job file. `source`: the environment, or the file with the rows."""
    lines = [f"#:schema {server}/v1/schema/job.json", f"name = {_text(name)}"]
    lines += [f'kind = "{kind}"'] if kind != Kind.rl else []
    lines += ["", "[model]", f"base = {_text(model)}"]
    lines += ["lora = { rank = 16, alpha = 32.0 }"] if adapter else []
    if kind == Kind.rl:
        lines += ["", "[environment]", f"name = {_text(source)}"]
        lines += ["# config = { }               # its settings: `opentinker env about NAME`"]
        lines += ["", "[algorithm]"]
        lines += ['name = "grpo"                # `opentinker algorithms` lists the others']
        lines += ["group_size = 8               # attempts at each task, which are compared with each other"]
        lines += ["groups_per_batch = 8         # tasks in a step"]
        lines += ["max_staleness = 2            # versions that a sample may be behind"]
        lines += ["", "[rollout]", "max_tokens = 512             # of all turns of an episode together"]
        lines += ["", "[validation]", "every = 20", "episodes = 64"]
        held_back = HELD_BACK.get(
            source, "# config = { }               # where the environment has tasks that are held back"
        )
        lines += [held_back]
    else:
        lines += ["", "[data]", f"path = {_text(source)}", f"columns = {PAIRS[kind]}", "batch_size = 16"]
        lines += ["max_length = 1024            # tokens", "validation = 0.05            # share that is held back"]
    lines += ["", "[train]", "steps = 100", f"lr = {'1e-4' if adapter else '1e-6' if kind == Kind.rl else '1e-5'}"]
    lines += ["warmup_steps = 10", "checkpoint_every = 50"]
    return "\n".join(lines) + "\n"


def _checked(text: str) -> dict[str, Any]:
    """Return the job as plain data. Raise SpecError if the answers make no job, before anything is written. Settings
    that an environment demands are left to `validate`."""
    from opentinker.cli.specs import check_environment
    from opentinker.shared.spec import parse_spec
    from opentinker.shared.types.spec_text import parse_text

    job: dict[str, Any] = parse_text(text, ".toml")
    check_environment(parse_spec(job), settings=False)
    return job


def _shared(url: str) -> str:
    """Return a URL without what only its owner should know."""
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2])).rstrip("/")


def _ask_kind(question: str, *, default: str, err: bool) -> str:
    while (said := typer.prompt(question, default=default, err=err)) not in list(Kind):
        typer.echo(f"{said!r} is not one of {', '.join(Kind)}", err=err)
    return str(said)


def _text(value: str) -> str:
    """Return a TOML string: one of JSON, but for a character that only TOML forbids."""
    return orjson.dumps(value).decode().replace("\x7f", "\\u007f")
