"""Checks that two models share token ids. Blocking: it reads tokenizers."""

from __future__ import annotations

from opentinker.shared.nn.models import load_tokenizer
from opentinker.shared.types.errors import JobFailed


def check_same_tokens(policy: str, other: str, role: str) -> None:
    """Raise JobFailed, with the first difference, unless every token of the policy has the same id in the other model.

    The other model receives the ids that the policy sampled. It may have additional tokens. `role`: its name in errors.
    """
    ours, theirs = (_tokens(base) for base in (policy, other))
    for number in sorted(ours):
        if ours[number] != theirs.get(number):
            said = f"{theirs[number]!r}" if number in theirs else "no token"
            raise JobFailed(
                f"{role} {other!r} does not share the tokenizer of model {policy!r}: id {number} is "
                f"{ours[number]!r} for the model and {said} for the {role}. Take a {role} of the same family"
            )


def _tokens(base: str) -> dict[int, str]:
    return {number: token for token, number in load_tokenizer(base).get_vocab().items()}
