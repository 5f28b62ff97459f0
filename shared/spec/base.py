"""Base of every part of a job spec: frozen, closed, documented under its fields, with all its mistakes reported
together."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    ValidationError,
    ValidationInfo,
    model_validator,
)

from opentinker.shared.types.mistakes import Mistakes, mistakes_of, without_branches

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Steps = Annotated[int, Field(gt=0, le=100_000_000)]
Tokens = Annotated[int, Field(gt=0, le=16_777_216)]
Count = Annotated[int, Field(gt=0, le=1_000_000)]
"""A count without a tighter bound."""
Workers = Annotated[int, Field(gt=0, le=4096)]
MAX_RANKS = 64
"""Ranks of a job, with those of all its policies."""
MAX_ENGINE_RANKS = 16
"""Ranks of an engine, which are on one machine."""
Ranks = Annotated[int, Field(gt=0, le=MAX_RANKS)]
Coefficient = Annotated[float, Field(ge=0.0, le=1e6)]
Factor = Annotated[float, Field(gt=0.0, le=1e6)]
Seconds = Annotated[float, Field(gt=0.0, le=31_536_000.0)]
"""At most a year."""
STORED = "stored"
"""Context of a validation: the spec was accepted once, maybe by an earlier release."""


class SpecPart(BaseModel):
    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=True,
        protected_namespaces=(),
        allow_inf_nan=False,
        serialize_by_alias=True,
    )
    STAND_INS: ClassVar[dict[str, Any]] = {}
    """Take the place of wrong values of required fields, so that contradictions between the others can be judged."""

    @classmethod
    def written(cls, data: dict[str, Any]) -> list[dict[str, Any]]:
        """Return mistakes in which fields were given."""
        return []

    def resolve(self) -> list[dict[str, Any]]:
        """Fills in what follows from other fields; returns what is wrong between fields right in themselves."""
        return []

    def mistakes_at_submission(self) -> list[dict[str, Any]]:
        """Return what is wrong in a spec that is submitted, and no reason not to read one that was accepted once."""
        return []

    @classmethod
    def stand_ins(cls, data: dict[str, Any], wrong: set[Any]) -> dict[str, Any]:
        """Return what takes the place of fields that are wrong."""
        return {name: value for name, value in cls.STAND_INS.items() if name in wrong}

    @model_validator(mode="wrap")
    @classmethod
    def _every_mistake(cls, data: Any, handler: ModelWrapValidatorHandler[Self], info: ValidationInfo) -> Self:
        """Fields that are wrong in themselves do not hide the others' contradictions: those are judged without them."""
        wrong = cls.written(data) if isinstance(data, dict) else []
        names: set[Any] = set()
        try:
            part = handler(data)
        except ValidationError as error:
            found = error.errors(include_url=False)
            if not isinstance(data, dict) or any(not item["loc"] for item in found):
                raise
            wrong += without_branches([mistake for item in found for mistake in mistakes_of(item, data)])
            names = {item["loc"][0] for item in found}
            try:
                right = {name: value for name, value in data.items() if name not in names}
                part = handler({**right, **cls.stand_ins(data, names)})
            except ValidationError:  # a required field is wrong: the others cannot be judged
                raise Mistakes(wrong) from None
        judged = part.resolve()  # of what is wrong in itself, its stand-in was judged
        if info.context != STORED:
            judged += part.mistakes_at_submission()
        mistakes = wrong + [mistake for mistake in judged if mistake["field"].partition(".")[0] not in names]
        if mistakes:
            raise Mistakes(mistakes)
        return part
