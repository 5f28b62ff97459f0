"""Images -> tokens and pixels -> embeddings: one code for rollout workers, the trainer and reference-forward.

rollout worker   look(image) -> the text that stands for it in a prompt, and the pixels that vLLM is given
trainer          `mark_image_tokens` gives placeholder tokens distinct ids; `features` take their places

While the vision tower and the connector are frozen, the same image has the same features as long as the model is
loaded, and they are computed once. `shared/data/model_families.py` lists the families.
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
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import PIL.Image
import torch
from torch import Tensor
from transformers import AutoConfig, AutoImageProcessor, AutoProcessor, AutoTokenizer
from transformers.utils import cached_file

from opentinker.shared.data.model_families import VISION_FAMILIES, VisionFamily
from opentinker.shared.nn.grid_positions import Grid
from opentinker.shared.nn.layout import I64, SEEN, Seen
from opentinker.shared.types.error_text import first_line
from opentinker.shared.types.errors import BadImage, JobFailed
from opentinker.shared.types.trajectories import Trajectory

MAX_PIXELS = 1 << 24
MAX_ASPECT_RATIO = 100
KEPT_BYTES = 256 << 20
"""Bytes of cached pixels in a rollout worker, of prompt placeholders, and of features next to a model."""
FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json", "chat_template.json")
"""Files of a model directory that describe its processor. Which of them there are depends on its age and family."""
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
    grid: Grid
    """Grid of its tokens, in families that have grids; else one row."""


class ImageFeatures(NamedTuple):
    """Output of the vision tower and the connector. D: 1, plus, with DeepStack, one per decoder layer that gets more
    features."""

    layers_DFH: Tensor
    """Embeddings of the placeholder tokens first, then what is added to their hidden states after each layer."""
    grids: list[Grid]


def digest_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def unsupported_reason(base: str, config: Mapping[str, Any]) -> str:
    """Return why the model with this config.json cannot take images; empty if it can."""
    kind, supported = config.get("model_type"), ", ".join(sorted(VISION_FAMILIES))
    supported = f"images can be shown to models of type {supported} (SmolVLM-256M-Instruct is one)"
    if config.get("vision_config") is None:
        return f"model {base!r} ({kind}) has no eyes; {supported}"
    return "" if kind in VISION_FAMILIES else f"of models that see, {kind} ({base!r}) is not supported; {supported}"


class VisionProcessor:
    """The image processor of one model. Pillow processes the pixels, regardless of what is installed, so results are
    equal everywhere."""

    def __init__(
        self, family: VisionFamily, images: Any, token: tuple[str, int], replacement: Callable[[Any], str], base: str
    ) -> None:
        """`images`: the Hugging Face image processor. `token`: the placeholder. `replacement`: from the output of
        `images` for one image to the text that stands for it."""
        self.family, self.trained = family, False
        self.token, self.token_id = token
        self._images, self._replacement = images, replacement
        self._files = {name: Path(path).read_bytes() for name in FILES if (path := _file_of(base, name))}
        self._looks: LruCache[ImageInputs] = LruCache(lambda look: sum(t.nbytes for t in look.inputs.values()))
        self._words: LruCache[ImagePlaceholder] = LruCache(lambda words: len(words.text))
        self._features: LruCache[ImageFeatures] = LruCache(lambda found: found.layers_DFH.nbytes)

    @classmethod
    def of(cls, base: str) -> VisionProcessor:
        """Load the processor. Raises JobFailed for a model without one."""
        config = AutoConfig.from_pretrained(base, trust_remote_code=False)
        if why := unsupported_reason(base, config.to_dict()):
            raise JobFailed(why)
        family, expected = VISION_FAMILIES[config.model_type], config.image_token_id
        try:
            images = AutoImageProcessor.from_pretrained(base, backend="pil", trust_remote_code=False)
            if family.has_grids:
                tokenizer = AutoTokenizer.from_pretrained(base, trust_remote_code=False)
                token = tokenizer.convert_ids_to_tokens(expected)
                found = tokenizer.convert_tokens_to_ids(token) if token else None
                replacement = partial(_tokens_of_grid, token, images.merge_size)
            else:
                processor = AutoProcessor.from_pretrained(base, trust_remote_code=False)
                processor.image_processor = images
                token, found = processor.image_token, processor.image_token_id
                replacement = partial(processor.replace_image_token, image_idx=0)
        except (OSError, ValueError, TypeError, AttributeError, ImportError) as error:
            raise JobFailed(f"model {base!r} has no usable image processor: {first_line(error)}") from error
        if found != expected:
            raise JobFailed(f"model {base!r}: its processor's image token is {found}, and its config says {expected}")
        return cls(family, images, (token, found), replacement, base)

    @property
    def plain_placeholder(self) -> str:
        """An image's placeholder in a prompt without a chat template."""
        before, after = self.family.around
        return before + self.token + after

    def look(self, data: bytes) -> ImageInputs:
        """Read and process a PNG or JPEG. Raises BadImage. Results are cached, within bounds."""
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
            made = self._images([picture], return_tensors="pt", **self.family.options)
            text = self._replacement(made)
        except (ValueError, TypeError, IndexError, ZeroDivisionError) as error:
            raise BadImage(f"the model's image processor refused an image of {picture.size}: {error}") from None
        inputs = {name: value for name, value in made.items() if isinstance(value, Tensor)}
        tokens = text.count(self.token)
        grid = _grid_of(made, self._images.merge_size) if self.family.has_grids else (1, tokens)
        return ImageInputs(digest, text, tokens, inputs, grid)

    def features(self, causal: Any, shown: Sequence[Seen]) -> ImageFeatures:
        """Features of all placeholder tokens, image by image; with a gradient if the tower is `trained`, otherwise
        cached. Raises JobFailed."""
        if self.trained:
            found = [self._featured(causal, seen) for seen in shown]
        else:
            found = [self._features.get(seen.digest, partial(self._featured, causal, seen)) for seen in shown]
        layers_DFH = torch.cat([one.layers_DFH for one in found], dim=1)
        return ImageFeatures(layers_DFH, [grid for one in found for grid in one.grids])

    def _featured(self, causal: Any, seen: Seen) -> ImageFeatures:
        try:
            look = self.look(seen.data) if self.trained else self._look(seen.digest, seen.data)
        except BadImage as error:
            raise JobFailed(f"an image of a trajectory cannot be read: {error}") from None
        device = next(causal.parameters()).device
        with torch.set_grad_enabled(self.trained and torch.is_grad_enabled()):
            inputs = {name: value.to(device) for name, value in look.inputs.items()}
            found = causal.get_image_features(**inputs, return_dict=True)
            layers = [found.pooler_output, *(getattr(found, "deepstack_features", None) or ())]
            layers_DFH = torch.stack([torch.cat(list(layer)) for layer in layers])
        if layers_DFH.shape[1] != seen.tokens:
            raise JobFailed(
                f"an image has {seen.tokens} tokens in a trajectory and {layers_DFH.shape[1]} here: the models' image "
                "processors differ (preprocessor_config.json)"
            )
        return ImageFeatures(layers_DFH, [look.grid])

    def save(self, directory: Path) -> None:
        """Save the files that describe the processor, as they were when it was loaded."""
        for name, content in self._files.items():
            (directory / name).write_bytes(content)


def _file_of(base: str, name: str) -> str | None:
    path = cached_file(
        base, name, _raise_exceptions_for_missing_entries=False, _raise_exceptions_for_connection_errors=False
    )
    return None if path is None else str(path)


def _grid_of(made: Any, merge_size: int) -> Grid:
    _, height, width = made["image_grid_thw"][0].tolist()
    return height // merge_size, width // merge_size


def _tokens_of_grid(token: str, merge_size: int, made: Any) -> str:
    height, width = _grid_of(made, merge_size)
    return token * (height * width)


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
    """Token ids in which placeholders are SEEN + row of `features`, and the images that these are of.

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
    """Open an image in RGB. Raises BadImage."""
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
