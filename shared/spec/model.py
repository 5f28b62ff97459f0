"""The model to train."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from opentinker.shared.spec.base import Factor, SpecPart
from opentinker.shared.types.mistakes import mistake


class LoraSpec(SpecPart):
    rank: Annotated[int, Field(gt=0, le=4096)] = 16
    """Rank of the adapter matrices."""
    alpha: Factor = 32.0
    """The adapter is scaled by alpha / rank."""
    dropout: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    """Dropout before the adapter during training."""
    target_modules: Annotated[list[str], Field(max_length=1000)] | Literal["all-linear"] = "all-linear"
    """Names of the layers that get an adapter; `all-linear` means all but the head."""
    init: Literal["kaiming", "gaussian", "orthogonal"] = "kaiming"
    """Initialisation of A and B. `kaiming`: A uniform, B zero. `gaussian`: A normal with deviation 1 / rank, B zero.
    `orthogonal`: both from one orthogonal matrix, so that their product is zero up to rounding; the rank must be even.
    Others (pissa, olora, loftq) would change the base, which is the reference and the model that vLLM applies the
    adapter to."""

    def resolve(self) -> list[dict[str, Any]]:
        if self.init == "orthogonal" and self.rank % 2:
            return [mistake("rank", self.rank, "must be even for init = 'orthogonal'")]
        return []


class ModelSpec(SpecPart):
    base: Annotated[str, Field(min_length=1)]
    """Directory or hub id of a Hugging Face causal language model (safetensors; no remote code), or of a vision model
    (docs/environments/images.md). docs/submitting.md explains relative paths."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of generation and of the trainer's forward pass; master weights are float32."""
    fp32_head: bool = False
    """Compute logits in float32 from bfloat16 hidden states and head weights, in generation and in training, so that
    both round alike where it matters most. Needs a float32 copy of the head's weights for each forward pass."""
    lora: LoraSpec | None = None
    """Train an adapter instead of all weights."""
    train_vision: bool = False
    """Train the vision tower and the connector of a vision model too. They travel to rollout workers with each version.
    False: they are frozen, and an image's features are computed once."""
    chat_template: Literal["model", "plain"] = "model"
    """`plain` joins message contents without any markup; `model` refuses a tokenizer that has no chat template."""
    special_tokens_in_content: Literal["split", "parse"] = "split"
    """How the text of a control token (`<|im_end|>`) in message contents and rows is tokenized. `split`: as ordinary
    text; only the chat template writes control tokens. `parse`: as the token, so an author of contents can end a turn
    and speak as the assistant: for trusted contents that contain such tokens on purpose. docs/environments/tokens.md
    lists the tokens."""
    tool_format: Literal["auto", "hermes", "llama3_json", "mistral", "qwen3_coder"] = "auto"
    """Format of the model's tool calls, if the environment offers tools. `auto`: detected from the chat template; a job
    whose template shows none of these formats fails at the first prompt. `hermes` covers Qwen."""

    def resolve(self) -> list[dict[str, Any]]:
        found = []
        if self.fp32_head and self.dtype == "float32":
            problem = "does not apply: with dtype = 'float32' the logits are computed in float32 already"
            found.append(mistake("fp32_head", True, problem))
        if self.train_vision and self.lora is not None:
            problem = "does not apply to model.lora: adapters are on the language model alone"
            found.append(mistake("train_vision", True, problem))
        if self.tool_format != "auto" and self.chat_template == "plain":
            problem = "does not apply to chat_template = 'plain', which cannot tell a model of tools"
            found.append(mistake("tool_format", self.tool_format, problem))
        return found
