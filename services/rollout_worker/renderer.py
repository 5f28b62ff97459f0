"""Messages -> token ids, and sampled ids -> text. Token in, token out: sampled ids are never decoded and re-encoded.

The first prompt is the chat template's rendering. What follows a model turn is the template's text after an assistant
message, rendered with a marker, which no message holds, in the place of the model's own words: only new text is
tokenised. Control tokens in the contents of messages stay text (`shared/data/control_tokens.py`).

For a vision model, the template writes one placeholder per image, which is replaced by the output of the model's
processor for that image (`shared/nn/vision.py`); `pictures` records which tokens these are, and of which image.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opentinker.services.rollout_worker import tool_calls
from opentinker.services.rollout_worker.engines.base import Shown
from opentinker.services.rollout_worker.tool_calls import ParsedReply
from opentinker.shared.data.chat_format import Chat, as_chat, as_function
from opentinker.shared.data.control_tokens import ControlTokens, Mode, absent_from
from opentinker.shared.data.model_files import code_in
from opentinker.shared.types import codec
from opentinker.shared.types.core import Image, Message, StopReason, Tool, ToolCall
from opentinker.shared.types.errors import BadImage, JobFailed
from opentinker.shared.types.guide import Guide
from opentinker.shared.types.trajectories import Picture

if TYPE_CHECKING:
    from opentinker.shared.nn.vision import ImagePlaceholder, VisionProcessor

MAX_TOKENS_PER_CHARACTER = 6
"""Tokens: a sign has at most 4 bytes, and some are written with a modifier."""
BEFORE = [Message(role="user", content=".")]
MAX_IMAGES = 64
"""In one observation or request."""


class Renderer:
    """`mode`, `tool_format` and `special_tokens` are those of the spec's [model] (chat_template, tool_format and
    special_tokens_in_content). Raises JobFailed when the tokenizer cannot do it.

    `sight`: of a model that images can be shown to; else `blind` says why they cannot.
    """

    def __init__(
        self,
        tokenizer: Any,
        mode: str,
        eos_ids: frozenset[int],
        tool_format: str = "auto",
        special_tokens: Mode = "split",
        sight: VisionProcessor | None = None,
        blind: str = "the model does not see",
    ) -> None:
        self._tokenizer = tokenizer
        self._sight, self._blind = sight, blind
        self._plain = mode == "plain"
        self._tool_format = tool_format
        self._cache: dict[bytes, list[int]] = {}
        self.eos_ids = eos_ids
        """Tokens that end a turn; the engine stops there too."""
        if not eos_ids:
            raise JobFailed("the model's tokenizer names no end-of-sequence token: set eos_token in its directory")
        if not self._plain and not tokenizer.chat_template:
            raise JobFailed(
                "the model's tokenizer has no chat template; add one to the model directory, "
                'or set model.chat_template = "plain" to join message contents without markup'
            )
        self._control = ControlTokens(tokenizer, special_tokens, templated=not self._plain)
        self._in_parts = sight is not None and (self._plain or self._takes_parts(sight.token))

    @classmethod
    def load_light(cls, base: str, mode: str, tool_format: str = "auto", special_tokens: Mode = "split") -> Renderer:
        """Load from a local directory, without transformers; a turn ends only with the tokenizer's eos."""
        from opentinker.shared.data.light_tokenizer import LightTokenizer

        tokenizer = LightTokenizer(Path(base))
        ends = frozenset([tokenizer.eos_token_id] if tokenizer.eos_token_id is not None else [])
        return cls(tokenizer, mode, ends, tool_format, special_tokens, blind="the simulated engine does not see")

    @classmethod
    def load(cls, base: str, mode: str, tool_format: str = "auto", special_tokens: Mode = "split") -> Renderer:
        """Tokenizer and end-of-turn ids of a Hugging Face model directory or hub id."""
        from transformers import AutoTokenizer

        if why := code_in(Path(base).expanduser()):
            raise JobFailed(f"model {base!r} {why}")
        try:
            tokenizer = AutoTokenizer.from_pretrained(base, trust_remote_code=False)
        except (OSError, ValueError) as error:
            raise JobFailed(f"no tokenizer in model {base!r}: {str(error).splitlines()[0]}") from None
        own = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        sight, blind = _sight_of(base)
        ends = frozenset([*own, *end_tokens(base)])
        return cls(tokenizer, mode, ends, tool_format, special_tokens, sight, blind)

    @property
    def vocab_size(self) -> int:
        return len(self._tokenizer)

    @property
    def digit_ids(self) -> frozenset[int]:
        """Tokens that are a single digit."""
        return frozenset(ids[0] for d in "0123456789" if len(ids := self._control.encode(d)) == 1)

    def _template(self, chat: Chat, offered: Chat, generate: bool) -> str:
        tools = {"tools": offered} if offered else {}
        try:
            return str(
                self._tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=generate, **tools)
            )
        except Exception as error:  # noqa: BLE001 - a template is the model's code: any exception of it fails the job
            roles = [message["role"] for message in chat]
            raise JobFailed(f"the model's chat template refused {roles}: {error}") from None

    def prompt(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> list[int]:
        """`rendered`, of episodes: siblings of a group share the work."""
        key = hashlib.sha256(codec.encode([messages, tools])).digest()
        if key not in self._cache:
            if len(self._cache) >= 256:
                self._cache.clear()
            self._cache[key] = self.rendered(messages, tools)
        return list(self._cache[key])

    def rendered(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> list[int]:
        """Ids up to where the model's first turn begins. May be called in a thread, one call at a time.

        Raises JobFailed also if tools are offered that the model cannot be told of, or whose calls cannot be read.
        """
        (chat, offered), word = self._control.defuse((self._chat(messages), [as_function(tool) for tool in tools]))
        if tools and self._plain:
            raise JobFailed('tools need a chat template that describes them: model.chat_template is "plain"')
        text = self._joined(chat) if self._plain else self._template(chat, offered, generate=True)
        if tools:
            self._check_tools(text, chat)
        return self._control.encode(self._expanded(text, messages), word)

    def _chat(self, messages: Sequence[Message]) -> Chat:
        return [as_chat(message, self._in_parts) for message in messages]

    def _check_tools(self, text: str, chat: Chat) -> None:
        """Raises JobFailed if a prompt with tools does not differ from one without, or if no call could be read."""
        if text == self._template(chat, [], generate=True):
            raise JobFailed(
                "the model's chat template says nothing of the tools that may be called: use a model that was trained"
                " with tools, or put a template that describes them into its directory"
            )
        assert self.tool_format

    def _joined(self, chat: Chat) -> str:
        if not self._in_parts:
            return "".join(message["content"] for message in chat)
        assert self._sight is not None
        parts = [part for message in chat for part in message["content"]]
        return "".join(self._sight.plain_placeholder if part["type"] == "image" else part["text"] for part in parts)

    def plain(self, text: str, *, first: bool) -> list[int]:
        """Ids of a text that no template has written. A stream that begins with it (`first`) begins with the special
        tokens of the tokenizer's own, as servers of `/v1/completions` have it."""
        return list(self._tokenizer.encode(text, add_special_tokens=first))

    def extend(self, ended_with_eos: bool, messages: Sequence[Message]) -> list[int]:
        """Ids between the model's last sampled token and its next turn."""
        if self._plain:
            chat, word = self._control.defuse(self._chat(messages))
            return self._control.encode(self._expanded(self._joined(chat), messages), word)
        results = [message for message in messages if message.role == "tool"]
        ids = self._after_calls(messages, results) if results else None
        if ids is None:
            ids = self._after(lambda marker: Message(role="assistant", content=marker), messages)
        if ids is None:
            raise JobFailed("the model's chat template does not write what an assistant says")
        return ids[1:] if ended_with_eos and ids and ids[0] in self.eos_ids else ids

    def _after(self, turn: Callable[[str], Message], messages: Sequence[Message]) -> list[int] | None:
        """Ids of what the template writes after an assistant's `turn`, made of a marker that ends it; None if it does
        not write the marker."""
        marker = absent_from(self._chat(messages))
        chat, word = self._control.defuse(self._chat([*BEFORE, turn(marker), *messages]))
        _, found, after = self._template(chat, [], generate=True).rpartition(marker)
        return self._control.encode(self._expanded(after, messages), word) if found else None

    def _after_calls(self, messages: Sequence[Message], results: list[Message]) -> list[int] | None:
        """Return the tokens that follow an assistant's calls, from the end-of-turn token on; None if the template
        writes none of them. The calls are stand-ins: the model's own text is in its own tokens."""

        def calling(marker: str) -> Message:
            calls = [ToolCall(id=m.tool_call_id, name=m.name or "tool", arguments={"text": marker}) for m in results]
            return Message(role="assistant", tool_calls=calls)

        def calling_once(marker: str) -> Message:
            return Message(role="assistant", tool_calls=calling(marker).tool_calls[-1:])

        try:
            ids = self._after(calling, messages)
        except JobFailed:
            if len(results) == 1:
                raise
            ids = self._after(calling_once, messages)  # some templates know one call per message
        if ids is None:
            return None
        end = next((place for place, token in enumerate(ids) if token in self.eos_ids), None)
        if end is None:
            raise JobFailed("the model's chat template puts no end-of-turn token after an assistant's tool calls")
        return ids[end:]

    # --- images -------------------------------------------------------------------------------------------------

    def look(self, messages: Sequence[Message]) -> None:
        """Blocking, for milliseconds an image; what follows is quick then. Raises BadImage."""
        if self._sight is not None:
            self._looks(messages)

    def pictures(self, messages: Sequence[Message], ids: Sequence[int]) -> list[Picture]:
        """Return the images of `messages` with their places in `ids`, which render those messages."""
        if self._sight is None:
            return []
        looks = self._looks(messages)
        places = [place for place, token in enumerate(ids) if token == self._sight.token_id] if looks else []
        if len(places) != sum(look.tokens for look in looks):
            raise JobFailed("the model's tokenizer does not keep image tokens apart: is its image token a special one?")
        found, at = [], 0
        for look in looks:
            found.append(Picture(look.digest, _runs(places[at : at + look.tokens])))
            at += look.tokens
        return found

    def shown(self, pictures: Sequence[Picture], images: Mapping[str, bytes]) -> list[Shown]:
        """Return the images as engine inputs. `images`: by digest. Blocking if their pixels have been evicted."""
        if self._sight is None:
            return []
        return [Shown(picture, self._sight.look(images[picture.digest]).inputs) for picture in pictures]

    def _looks(self, messages: Sequence[Message]) -> list[ImagePlaceholder]:
        """Raises JobFailed if the model cannot see, BadImage."""
        images = [image for message in messages for image in message.images]
        if self._sight is None:
            if images:
                raise JobFailed(f"the messages show images, and {self._blind}")
            return []
        if len(images) > MAX_IMAGES:
            raise BadImage(f"{len(images)} images at once, and {MAX_IMAGES} are allowed")
        if any(self._sight.token in message.text for message in messages):
            raise BadImage(f"a text holds {self._sight.token}, which stands for an image in this model's prompts")
        return [self._sight.words(image.data) for image in images]

    def _expanded(self, text: str, messages: Sequence[Message]) -> str:
        """Replace each image's placeholder with the tokens of the image. Raises JobFailed, BadImage."""
        looks = self._looks(messages)
        if not looks:
            return text
        assert self._sight is not None
        first, *others = text.split(self._sight.token)
        if len(others) != len(looks):
            raise JobFailed(
                f"the model's chat template shows {len(others)} of {len(looks)} images: use the one that the model "
                'comes with, or set model.chat_template = "plain"'
            )
        return first + "".join(look.text + between for look, between in zip(looks, others, strict=True))

    def _takes_parts(self, token: str) -> bool:
        """Return whether the chat template accepts contents made of parts; many that do accept nothing else."""
        marker = absent_from(token)
        parts = [{"type": "image"}, {"type": "text", "text": marker}]
        try:
            text = self._tokenizer.apply_chat_template([{"role": "user", "content": parts}], tokenize=False)
        except Exception:  # noqa: BLE001 - a template is the model's code: with any exception it supports no parts
            return False
        return marker in text and text.count(token) == 1

    def said(self, ids: Sequence[int], tools: Sequence[Tool], *, stop: StopReason, turn: int) -> ParsedReply:
        """Parse the calls of `tools` in the sampled tokens."""
        if not tools:
            return ParsedReply()
        own = ids[:-1] if ids and ids[-1] in self.eos_ids else ids
        text: str = self._tokenizer.decode(own, skip_special_tokens=False)  # some formats are written in them
        return tool_calls.parse(self.tool_format, text, tools, stop=stop, turn=turn)

    def structure(self, guide: Guide, tools: Sequence[Tool]) -> str:
        """Return what an engine needs to force it (`Sampling.structure`). Raises JobFailed for an unknown format."""
        return tool_calls.structure(self.tool_format if tools else "", guide, tools)

    def begin_call(self, name: str) -> list[int]:
        """Return the tokens with which a call of this tool begins; of any tool, if the name is empty. Raises JobFailed
        for an unknown format."""
        return self.plain(tool_calls.beginning(self.tool_format, name), first=False)

    @property
    def tool_format(self) -> str:
        """Raises JobFailed if it is to be recognised and cannot be."""
        if self._tool_format == "auto":
            template = self._tokenizer.chat_template
            words = "".join(template.values()) if isinstance(template, dict) else template
            found = tool_calls.recognise(words)
            if found is None:
                known = ", ".join(sorted(tool_calls.FORMATS))
                raise JobFailed(
                    "the environment offers tools, and the model's chat template does not show in which format it"
                    f" calls them: set model.tool_format to one of {known}"
                )
            self._tool_format = found
        return self._tool_format

    def piece(self, id: int) -> str:
        """One token alone, special ones too."""
        return str(self._tokenizer.decode([id], skip_special_tokens=False))

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """The text of each token, special ones too. Where several make one sign, the last of them has it."""
        found: list[str] = []
        begin = shown = 0
        for place in range(len(ids)):
            before = self._tokenizer.decode(ids[begin:shown], skip_special_tokens=False)
            now = self._tokenizer.decode(ids[begin : place + 1], skip_special_tokens=False)
            if now.endswith("\ufffd") and place - shown < MAX_TOKENS_PER_CHARACTER and place + 1 < len(ids):
                found.append("")
                continue
            found.append(now[len(before) :])
            begin, shown = shown, place + 1
        return found

    def text(self, ids: Sequence[int]) -> str:
        """Decode the model's output without end-of-turn and other special tokens."""
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))


def images_of(messages: Sequence[Message]) -> dict[str, bytes]:
    """Return the images of messages by digest."""
    return {digest_of(image): image.data for message in messages for image in message.images}


def digest_of(image: Image) -> str:
    """Return the SHA-256 of the encoded image, in hexadecimal."""
    return hashlib.sha256(image.data).hexdigest()


def _runs(places: Sequence[int]) -> list[tuple[int, int]]:
    """[start, end) of neighbours."""
    runs: list[tuple[int, int]] = []
    for place in places:
        start = runs.pop()[0] if runs and runs[-1][1] == place else place
        runs.append((start, place + 1))
    return runs


def _sight_of(base: str) -> tuple[VisionProcessor | None, str]:
    """Return the model's image processor, or the reason why it cannot show images. Nothing of it is loaded for text
    models."""
    from transformers import PretrainedConfig

    try:
        config, _ = PretrainedConfig.get_config_dict(base)
    except OSError:  # a tokenizer alone
        config = {}
    if config.get("vision_config") is None:
        return None, f"model {base!r} has no eyes"
    from opentinker.shared.nn.vision import VisionProcessor, unsupported_reason

    why = unsupported_reason(base, config)
    return (None, why) if why else (VisionProcessor.of(base), "")


def end_tokens(base: str) -> list[int]:
    """Return the tokens with which a model ends its output: from generation_config.json, which knows about end-of-turn
    tokens, else from config.json."""
    from transformers import GenerationConfig, PretrainedConfig

    try:
        ids = GenerationConfig.from_pretrained(base).eos_token_id
    except OSError:  # the model has no such file
        ids = None
    if ids is None:
        config, _ = PretrainedConfig.get_config_dict(base)
        ids = config.get("eos_token_id", config.get("text_config", {}).get("eos_token_id"))
    return [] if ids is None else [ids] if isinstance(ids, int) else list(ids)
