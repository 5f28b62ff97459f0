"""Which requests of an agent belong together: one that begins with an earlier one and our answer to it continues that
context, and everything else begins a new one.

What continues is never written anew: the policy keeps the very tokens that it has sampled. (Plain text after an
end-of-turn token is a context of its own: written anew, it would have none in its midst.) So an agent that leaves its
history as it was trains on one stream of tokens, and one that rewrites, cuts or summarises it on a stream per rewrite.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from opentinker.envs.base import Action, Opening
from opentinker.shared.openai.answers import said
from opentinker.shared.openai.requests import ParsedRequest
from opentinker.shared.types.core import Message, StopReason, Tool


@dataclass(eq=False)
class Context:
    name: str
    session: str
    tools: list[Tool]
    messages: list[Message] | None = None
    """Both sides' words, as the agent knows them; None where it speaks in tokens or in plain text."""
    token_ids: list[int] = field(default_factory=list)
    text: str | None = None
    """All of it, where the agent speaks in plain text."""
    ended: bool = False
    """Plain text: an end-of-turn token stands behind it, which no longer text would have there."""

    def begins(self, asked: ParsedRequest) -> int:
        """How much of the request is this context; 0 if the request does not continue it."""
        if self.session != asked.session:
            return 0
        if self.text is not None:
            more = asked.text is not None and asked.text.startswith(self.text) and len(asked.text) > len(self.text)
            return len(self.text) if more and not self.ended else 0
        if self.messages is None:
            known = len(self.token_ids)
            return known if asked.token_ids is not None and asked.token_ids[:known] == self.token_ids else 0
        known = len(self.messages)
        more = (
            asked.token_ids is None and asked.text is None and len(asked.messages) > known and asked.tools == self.tools
        )
        return known if more and asked.messages[:known] == self.messages else 0


class Contexts:
    """Of one episode. `place` and `answered` alternate."""

    def __init__(self) -> None:
        self._contexts: list[Context] = []
        self._current: Context

    def place(self, asked: ParsedRequest) -> Opening:
        """What the policy is told: where to act, and what is new there."""
        found = max(self._contexts, key=lambda context: context.begins(asked), default=None)
        known = 0 if found is None else found.begins(asked)
        if found is None or not known:
            name = str(len(self._contexts)) if self._contexts else ""
            spoken = asked.token_ids is None and asked.text is None
            found = Context(name, asked.session, asked.tools, [] if spoken else None, text=asked.text)
        self._current = found
        return Opening(
            stream=found.name,
            messages=asked.messages[known:],
            tools=[] if known else asked.tools,
            prompt_ids=asked.token_ids,
            prompt_text=None if asked.text is None else asked.text[known:],
            max_tokens=asked.max_tokens,
            stop=asked.stop,
        )

    def answered(self, asked: ParsedRequest, action: Action) -> None:
        """To what was placed last."""
        context = self._current
        if asked.text is not None:
            context.text, context.ended = asked.text + action.text, action.stop == StopReason.EOS
        elif context.messages is None:
            assert asked.token_ids is not None
            context.token_ids = [*asked.token_ids, *action.ids]
        else:
            context.messages = [*asked.messages, said(asked, action)]
        if context not in self._contexts:
            self._contexts.append(context)
