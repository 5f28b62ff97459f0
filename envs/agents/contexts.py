"""Assigns an agent's requests to contexts: a request that begins with an earlier request and our answer continues that
context; any other request begins a new one.

A continued context is not tokenized again: the policy keeps the exact tokens that it sampled. Plain text that continues
past an end-of-turn token begins a new context, because retokenized text would lack that token. So an agent that leaves
its history unchanged trains on one token stream; one that rewrites, cuts or summarises it trains on one per rewrite.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from opentinker.envs.base import Action, Opening
from opentinker.shared.openai.answers import said
from opentinker.shared.openai.requests import ParsedRequest
from opentinker.shared.types.core import Message, StopReason, Tool


@dataclass(eq=False)
class AgentContext:
    name: str
    session: str
    tools: list[Tool]
    messages: list[Message] | None = None
    """Messages of both sides, as the agent knows them; None if it sends tokens or plain text."""
    token_ids: list[int] = field(default_factory=list)
    text: str | None = None
    """The whole text, if the agent sends plain text."""
    ended: bool = False
    """Plain text: an end-of-turn token follows it, which a longer text would not contain at that place."""

    def matched(self, asked: ParsedRequest) -> int:
        """Return how much of the request this context covers (messages, tokens or characters); 0 if the request does
        not continue it."""
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
    """The contexts of one episode. Calls of `place` and `add_answer` alternate."""

    def __init__(self) -> None:
        self._contexts: list[AgentContext] = []
        self._current: AgentContext

    def place(self, asked: ParsedRequest) -> Opening:
        """Return the stream that a request belongs to and the part of it that is new there."""
        found = max(self._contexts, key=lambda context: context.matched(asked), default=None)
        known = 0 if found is None else found.matched(asked)
        if found is None or not known:
            name = str(len(self._contexts)) if self._contexts else ""
            spoken = asked.token_ids is None and asked.text is None
            found = AgentContext(name, asked.session, asked.tools, [] if spoken else None, text=asked.text)
        self._current = found
        return Opening(
            stream=found.name,
            messages=asked.messages[known:],
            tools=[] if known else asked.tools,
            prompt_ids=asked.token_ids,
            prompt_text=None if asked.text is None else asked.text[known:],
            guide=asked.guide,
            max_tokens=asked.max_tokens,
            stop=asked.stop,
        )

    def add_answer(self, asked: ParsedRequest, action: Action) -> None:
        """Append the policy's answer to the context that was placed last."""
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
