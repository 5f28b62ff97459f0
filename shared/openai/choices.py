"""Several answers to one chat or completion, as its choices: those to the first prompt, those to the second..."""

from __future__ import annotations

from collections.abc import Sequence

from opentinker.shared.openai.fields import Json


def joined(answers: Sequence[Json], count: int) -> Json:
    """Join answers of one choice each. `count`: number of answers to each prompt."""
    choices = [{**answer["choices"][0], "index": index} for index, answer in enumerate(answers)]
    return {**answers[0], "choices": choices, "usage": total([answer["usage"] for answer in answers], count)}


def renumbered(chunks: Sequence[Json], index: int, head: Json) -> list[Json]:
    """Return the chunks of one answer's stream as those of one choice. `head`: what all chunks have in common."""
    return [
        {**chunk, **head, "choices": [{**choice, "index": index} for choice in chunk["choices"]]} for chunk in chunks
    ]


def total(usages: Sequence[Json], count: int) -> Json:
    """Add up usages; a prompt counts once."""
    prompts = sum(usage["prompt_tokens"] for usage in usages[::count])
    sampled = sum(usage["completion_tokens"] for usage in usages)
    return {"prompt_tokens": prompts, "completion_tokens": sampled, "total_tokens": prompts + sampled}
