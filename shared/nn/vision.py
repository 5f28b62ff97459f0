"""Images -> tokens and pixels -> embeddings: one code for rollout workers, the trainer and reference-forward.

rollout worker   look(image) -> the text that stands for it in a prompt, and the pixels that vLLM is given
trainer          `mark_image_tokens` gives placeholder tokens ids of their own; `embeddings` are what stands in their
places

The tower that sees, and what joins it with the language model, are frozen: the same image has the same embeddings as
long as the model is loaded, and they are computed once.
"""

from __future__ import annotations

import hashlib
import io
import struct
import threading
import zlib
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
import PIL.Image
import torch
from torch import Tensor
from transformers import AutoConfig, AutoImageProcessor, AutoProcessor

from opentinker.shared.nn.layout import I64, SEEN, Seen
from opentinker.shared.types.errors import BadImage, JobFailed
from opentinker.shared.types.trajectories import Trajectory

FAMILIES: dict[str, dict[str, Any]] = {"idefics3": {"return_row_col_info": True}}
"""By `model_type`: options of its image processor other than pixels. Another family also needs its fields in
`vllm_images.py`, position codes if it counts them in several dimensions, and a vLLM model that works without
torchvision, which has no CPU build."""
VISION_MODULES = r".*\b(vision_model|connector)\b.*"
"""Names of what is no part of the language model: it gets no adapters."""
MAX_PIXELS = 1 << 24
MAX_ASPECT_RATIO = 100
KEPT_BYTES = 256 << 20
"""Bytes of cached pixels in a rollout worker, of prompt placeholders, and of embeddings next to a model."""
MALFORMED = (OSError, SyntaxError, ValueError, EOFError, struct.error, zlib.error, OverflowError)
"""Exceptions of Pillow for invalid or truncated images."""
V = TypeVar("V")


@dataclass(frozen=True)
class ImagePlaceholder:
    """An image's part of a prompt."""

    digest: str
    text: str
    """Text of the image: placeholder tokens, and the family's tokens around them."""
    tokens: int
    """How many placeholder tokens."""


@dataclass(frozen=True)
class ImageInputs(ImagePlaceholder):
    """One image as the model's processor makes it."""

    inputs: dict[str, Tensor]
    """Inputs of the vision tower, by the names of the Hugging Face model."""


def digest_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def unsupported_reason(base: str, config: Mapping[str, Any]) -> str:
    """Why images cannot be shown to the model with this config.json; empty if they can."""
    kind, supported = config.get("model_type"), ", ".join(sorted(FAMILIES))
    supported = f"images can be shown to models of type {supported} (SmolVLM-256M-Instruct is one)"
    if config.get("vision_config") is None:
        return f"model {base!r} ({kind}) has no eyes; {supported}"
    return "" if kind in FAMILIES else f"of models that see, {kind} ({base!r}) is not supported; {supported}"


class VisionProcessor:
    """The image processor of one model. Pillow processes the pixels, regardless of what is installed, so results are
    equal everywhere."""

    def __init__(self, family: str, processor: Any) -> None:
        self.processor = processor
        self.token: str = processor.image_token
        self.token_id: int = processor.image_token_id
        self._options = FAMILIES[family]
        self._looks: LruCache[ImageInputs] = LruCache(lambda look: sum(t.nbytes for t in look.inputs.values()))
        self._words: LruCache[ImagePlaceholder] = LruCache(lambda words: len(words.text))
        self._embeddings: LruCache[Tensor] = LruCache(lambda tensor: tensor.nbytes)

    @classmethod
    def of(cls, base: str) -> VisionProcessor:
        """Load the processor. Raises JobFailed if there is none."""
        config = AutoConfig.from_pretrained(base, trust_remote_code=False)
        if why := unsupported_reason(base, config.to_dict()):
            raise JobFailed(why)
        try:
            processor = AutoProcessor.from_pretrained(base, trust_remote_code=False)
            processor.image_processor = AutoImageProcessor.from_pretrained(base, backend="pil", trust_remote_code=False)
        except (OSError, ValueError, TypeError, ImportError) as error:
            said = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise JobFailed(f"model {base!r} has no usable image processor: {said}") from error
        if processor.image_token_id != config.image_token_id:
            raise JobFailed(
                f"model {base!r}: its processor's image token is {processor.image_token_id}, and its config says "
                f"{config.image_token_id}"
            )
        return cls(config.model_type, processor)

    def look(self, data: bytes) -> ImageInputs:
        """At a PNG or JPEG. Raises BadImage. Kept, within bounds."""
        digest = digest_of(data)
        return self._looks.get(digest, lambda: self._look(digest, data))

    def words(self, data: bytes) -> ImagePlaceholder:
        """Return the placeholder of a PNG or JPEG, cached for longer than its pixels. Raises BadImage."""
        digest = digest_of(data)

        def make() -> ImagePlaceholder:
            look = self._looks.get(digest, lambda: self._look(digest, data))
            return ImagePlaceholder(digest, look.text, look.tokens)

        return self._words.get(digest, make)

    def _look(self, digest: str, data: bytes) -> ImageInputs:
        picture = _opened(data)
        try:
            made = self.processor.image_processor([picture], return_tensors="pt", **self._options)
            text = self.processor.replace_image_token(made, image_idx=0)
        except (ValueError, TypeError, IndexError, ZeroDivisionError) as error:
            raise BadImage(f"the model's image processor refused an image of {picture.size}: {error}") from None
        inputs = {name: value for name, value in made.items() if isinstance(value, Tensor)}
        return ImageInputs(digest, text, text.count(self.token), inputs)

    def embeddings(self, causal: Any, shown: Sequence[Seen]) -> Tensor:
        """[F, hidden] of all placeholder tokens, image by image. Raises JobFailed."""
        return torch.cat([self._embeddings.get(seen.digest, partial(self._embed, causal, seen)) for seen in shown])

    def _embed(self, causal: Any, seen: Seen) -> Tensor:
        try:
            look = self._look(seen.digest, seen.data)
        except BadImage as error:
            raise JobFailed(f"an image of a trajectory cannot be read: {error}") from None
        device = next(causal.parameters()).device
        with torch.no_grad():
            inputs = {name: value.to(device) for name, value in look.inputs.items()}
            found = causal.get_image_features(**inputs, return_dict=True).pooler_output
            embeddings = torch.cat(list(found))
        if len(embeddings) != seen.tokens:
            raise JobFailed(
                f"an image has {seen.tokens} tokens in a trajectory and {len(embeddings)} here: the models' image "
                "processors differ (preprocessor_config.json)"
            )
        return embeddings

    def save(self, directory: Path) -> None:
        """Processor and tokenizer."""
        self.processor.save_pretrained(directory)


class LruCache(Generic[V]):
    """Cache of recent values by digest, up to KEPT_BYTES. Thread-safe: concurrent misses compute the value twice."""

    def __init__(self, size: Callable[[V], int]) -> None:
        self._size = size
        self._found: OrderedDict[str, V] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def get(self, digest: str, make: Callable[[], V]) -> V:
        with self._lock:
            if digest in self._found:
                self._found.move_to_end(digest)
                return self._found[digest]
        made = make()
        with self._lock:
            if digest not in self._found:
                self._found[digest] = made
                self._bytes += self._size(made)
            while self._bytes > KEPT_BYTES and len(self._found) > 1:
                self._bytes -= self._size(self._found.popitem(last=False)[1])
        return made


def mark_image_tokens(
    trajectories: Sequence[Trajectory], images: Mapping[str, bytes]
) -> tuple[list[I64], tuple[Seen, ...]]:
    """Token ids in which placeholders are SEEN + row of `embeddings`, and the images that these are of.

    So trajectories share what they have in common as long as they show the same image, and no further. Raises JobFailed
    if they do not agree on an image's tokens.
    """
    shown: dict[str, Seen] = {}
    first: dict[str, int] = {}
    rows, count = [], 0
    for trajectory in trajectories:
        ids = trajectory.ids.astype(np.int64)
        for picture in trajectory.pictures:
            if picture.digest not in shown:
                shown[picture.digest] = Seen(picture.digest, images[picture.digest], picture.tokens)
                first[picture.digest] = count
                count += picture.tokens
            elif shown[picture.digest].tokens != picture.tokens:
                raise JobFailed(
                    f"an image has {picture.tokens} tokens in one trajectory and {shown[picture.digest].tokens} in "
                    "another: the rollout workers' image processors differ (preprocessor_config.json)"
                )
            row = SEEN + first[picture.digest]
            for start, end in picture.runs:
                ids[start:end] = np.arange(row, row + end - start)
                row += end - start
        rows.append(ids)
    return rows, tuple(shown.values())


def _opened(data: bytes) -> PIL.Image.Image:
    """In RGB. Raises BadImage."""
    try:
        with PIL.Image.open(io.BytesIO(data), formats=("PNG", "JPEG")) as picture:
            width, height = picture.size
            size = f"an image has {width} x {height} pixels"
            if width * height > MAX_PIXELS:
                raise BadImage(f"{size}, and {MAX_PIXELS:,} are allowed: scale it down")
            if max(width, height) > MAX_ASPECT_RATIO * min(width, height):
                raise BadImage(f"{size}: one side is over {MAX_ASPECT_RATIO} times the other")
            return picture.convert("RGB")
    except PIL.UnidentifiedImageError:
        raise BadImage("an image is neither PNG nor JPEG, whatever its type says") from None
    except (PIL.Image.DecompressionBombError, PIL.Image.DecompressionBombWarning) as error:
        raise BadImage(f"an image is too large: {error}") from None
    except MALFORMED as error:
        raise BadImage(f"an image cannot be read as PNG or JPEG: {error}") from None
