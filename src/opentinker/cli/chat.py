"""`opentinker chat JOB`: talk with the model of an inference job. Lines in, streamed answers out."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Annotated, Any

import typer

from opentinker.cli.common import JobId, Url, client, complain, line_of
from opentinker.shared.types.errors import OpenTinkerError

Chat = list[dict[str, Any]]


def chat(
    job_id: JobId,
    message: Annotated[
        str | None, typer.Option("--message", "-m", help="Ask this once, instead of every line.")
    ] = None,
    system: Annotated[str | None, typer.Option("--system", help="The system message.")] = None,
    model: Annotated[
        str | None, typer.Option("--model", help="One of the job's adapters; default: its own model.")
    ] = None,
    temperature: Annotated[float, typer.Option(help="0: always the most likely token.", min=0.0, max=10.0)] = 1.0,
    max_tokens: Annotated[int | None, typer.Option(help="Longest answer; default: what fits.", min=1)] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the sampling; default: a random one.", min=0)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the chunks of the answers as JSON lines.")] = False,
    url: Url = None,
) -> None:
    """Talk with the model of an inference job: each line of the input is answered. Ctrl-D ends it."""
    said: Chat = [] if system is None else [{"role": "system", "content": system}]
    options = {"model": model, "temperature": temperature, "max_tokens": max_tokens, "seed": seed}
    api = client(url)
    person = message is None and sys.stdin.isatty()
    for line in [message] if message is not None else _lines(person):
        asked: Chat = [*said, {"role": "user", "content": line}]
        try:
            chunks = api.chat(job_id, asked, **{name: value for name, value in options.items() if value is not None})
            answer = _show(chunks, as_json)
        except OpenTinkerError as error:
            if not person:
                raise
            complain(f"error: {error}")
            continue
        said = [*asked, {"role": "assistant", "content": answer}]


def _lines(person: bool) -> Iterator[str]:
    """Yield the lines of the input that are not blank."""
    while True:
        if person:
            sys.stdout.write("> ")
            sys.stdout.flush()
        line = sys.stdin.readline()
        if not line:
            return
        if line.strip():
            yield line.rstrip("\n")


def _show(chunks: Iterator[dict[str, Any]], as_json: bool) -> str:
    """The whole answer, shown as it comes."""
    from opentinker.sdk.inference import text_of

    answer = ""
    for chunk in chunks:
        text = text_of(chunk)
        answer += text
        sys.stdout.write(line_of(chunk) + "\n" if as_json else text)
        sys.stdout.flush()
    if not as_json:
        sys.stdout.write("\n")
        sys.stdout.flush()
    return answer
