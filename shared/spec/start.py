"""The checkpoint that the job starts from, if not the weights in `model.base`."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator, Field, field_validator

from opentinker.shared.spec.base import SpecPart

PART = r"j-[a-z0-9]{10}(~[a-z][a-z0-9_]{0,31})?"
"""A job, or one policy of it."""
CHECKPOINT = re.compile(rf"(j-[a-z0-9]{{10}}@live|{PART}@([0-9]{{1,12}}|latest))")
SAVED = re.compile(rf"{PART}@([0-9]{{1,12}}|latest)")
"""Those of them that are on a disk."""
PUBLISHED = re.compile(r"(?!j-[a-z0-9]{10}$)[a-z0-9][a-z0-9._-]{0,62}")
"""Names that checkpoints may be published under; no job's id."""


def _is_saved(value: str) -> str:
    if not SAVED.fullmatch(value) and not PUBLISHED.fullmatch(value):
        raise ValueError(
            "must be JOB@STEP or JOB@latest (of one policy JOB~POLICY@STEP), as in j-0123456789@50, or a published name"
        )
    return value


SavedCheckpoint = Annotated[str, AfterValidator(_is_saved)]
"""A checkpoint on a disk, or its published name."""


class Origin(SpecPart):
    """Names a checkpoint."""

    checkpoint: str = Field(alias="from")

    @property
    def published(self) -> bool:
        """Return whether it is a published name."""
        return "@" not in self.checkpoint

    @property
    def job(self) -> str:
        """Empty where a name stands."""
        return "" if self.published else self.checkpoint.partition("@")[0]

    @property
    def step(self) -> int | None:
        """None: the newest."""
        step = self.checkpoint.partition("@")[2]
        return int(step) if step.isdigit() else None


class StartSpec(Origin):
    checkpoint: str = Field(alias="from")
    """`JOB@STEP` or `JOB@latest` (`JOB~POLICY@STEP` of a job with several policies): start from the weights of a
    checkpoint of your jobs; or its published name
    (`opentinker publish`). It must hold full weights with the tensors of model.base (which gives the tokenizer) if this
    job trains all weights, otherwise an adapter of model.base as model.lora describes. With `kl_coef` these weights are
    the reference; a float32 job with `kl_coef` cannot start from a checkpoint of a bfloat16 one, whose files are
    rounded. A critic in it is used if this job trains one. `JOB@live` (inference only): the policy of an unfinished job
    of kind rl, followed version by version; dtype, fp32_head and lora are that job's."""
    optimizer: bool = False
    """Also load the optimizer's moments. Learning-rate schedule, step count, seeds and data order are new either
    way."""

    @field_validator("checkpoint")
    @classmethod
    def _named(cls, value: str) -> str:
        if not CHECKPOINT.fullmatch(value) and not PUBLISHED.fullmatch(value):
            raise ValueError(
                "must be JOB@STEP or JOB@latest (of one policy JOB~POLICY@STEP; inference: or JOB@live), as in "
                "j-0123456789@50, or a published name"
            )
        return value

    @property
    def live(self) -> bool:
        return self.checkpoint.endswith("@live")
