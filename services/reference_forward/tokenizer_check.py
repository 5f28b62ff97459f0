"""Whether two models mean the same tokens by the same ids. Blocking: tokenizers are read."""

from __future__ import annotations

from opentinker.shared.nn.models import load_tokenizer
from opentinker.shared.types.errors import JobFailed


def check_same_tokens(policy: str, other: str, role: str) -> None:
    """Raises JobFailed, with the first difference, unless every token of the policy has the same id in the other model.

    That one is given the very ids that the policy sampled. It may know more tokens. `role`: what it is called.
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
