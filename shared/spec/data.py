"""Data of sft and dpo: rows of a file or a data set, and how they become tokens."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from opentinker.shared.spec.base import Count, Factor, SpecPart, Steps, Tokens
from opentinker.shared.spec.evaluation import PREFIX
from opentinker.shared.types.mistakes import fill, mistake

if TYPE_CHECKING:
    from opentinker.shared.spec import JobSpec

Format = Literal["messages", "prompt_completion", "preference"]
COLUMNS: dict[Format, tuple[str, ...]] = {
    "messages": ("messages",),
    "prompt_completion": ("prompt", "completion"),
    "preference": ("chosen", "rejected"),
}
"""Columns that a row of the format must have. A preference may have a `prompt` too."""
OPTIONAL = ("prompt",)
FORMATS: dict[str, tuple[Format, ...]] = {"sft": ("messages", "prompt_completion"), "dpo": ("preference",)}
"""By kind of job."""
JSONL = (".jsonl", ".jsonl.gz", ".jsonl.xz")
PARQUET = ".parquet"
JSON = ".json"
"""A list of objects."""
TARGETS = {"sft": {"accuracy"}, "dpo": {"rewards/accuracy", "rewards/margin"}}
"""Metrics that grow as the job learns."""


class DataSpec(SpecPart):
    path: Annotated[str, Field(min_length=1)]
    """A .jsonl (also .jsonl.gz, .jsonl.xz), .json (a list) or .parquet file, a directory of .parquet files or one saved
    by Hugging Face datasets, or a data set's hub id. Code of data sets is never run."""
    split: Annotated[str, Field(min_length=1)] | None = None
    """Split of a hub id, or of a saved directory with several; default `train`."""
    subset: Annotated[str, Field(min_length=1)] | None = None
    """Subset of a hub id with several (the hub calls it a configuration), e.g. `main` of openai/gsm8k; also for
    `validation` if that is the same id."""
    format: Format | None = None
    """`messages`: a chat, [{role, content}, ...]. `prompt_completion`: each a text or a list of messages, of the user
    and of the assistant. `preference`: `chosen` and `rejected`, each a completion of `prompt`, or without a prompt a
    whole chat with a common beginning. Default: detected from the columns."""
    columns: dict[str, str] = {}
    """Other column names than those of the format, e.g. {prompt = "question", completion = "answer"}."""
    mask: Literal["completion", "assistant"] = "completion"
    """Tokens that are learned. `completion`: the assistant's turns of the completion, or the last turn of `messages`.
    `assistant`: all of the assistant's turns. End-of-turn tokens are included, exactly as in the chat template: by its
    generation tags, otherwise by rendering the chat turn by turn."""
    max_length: Tokens | None = None
    """Tokens per row; default: the model's maximum, at most 4096."""
    longer: Literal["refuse", "drop", "cut"] = "refuse"
    """Handling of longer rows: `refuse` fails the job, `drop` leaves them out, `cut` truncates them. The job's log
    reports their number."""
    batch_size: Count = 16
    """Rows (dpo: pairs) per step."""
    epochs: Count | None = None
    """Passes over the rows, instead of `train.steps`."""
    shuffle: bool = True
    """Shuffle the rows in every epoch by `train.seed`; false: the order of the file."""
    validation: Annotated[float, Field(gt=0.0, lt=1.0)] | str | None = None
    """Rows that are never trained on: a share of the rows, drawn by `train.seed`, or a path or hub id as above."""
    validation_split: Annotated[str, Field(min_length=1)] | None = None
    """Like `split`, for the path in `validation`; default `validation`."""
    validate_every: Steps | None = None
    """Steps between evaluations on `validation`, which also run before the first and after the last step. Default: only
    those two."""

    def resolve(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        known = {name for columns in COLUMNS.values() for name in (*columns, *OPTIONAL)}
        if unknown := sorted(self.columns.keys() - known):
            problem = f"no format has {', '.join(unknown)}; there are: {', '.join(sorted(known))}"
            found.append(mistake("columns", self.columns, problem))
        if self.validation == "" or (isinstance(self.validation, float) and not 0.0 < self.validation < 1.0):
            problem = "must be a share, more than 0 and less than 1, or a path or hub id"
            found.append(mistake("validation", self.validation, problem))
        if self.validate_every is not None and self.validation is None:
            found.append(mistake("validate_every", self.validate_every, "needs `validation`: rows to validate on"))
        if self.validation_split is not None and not isinstance(self.validation, str):
            found.append(mistake("validation_split", self.validation_split, "needs a path or hub id in `validation`"))
        for field, path in (("split", self.path), ("subset", self.path), ("validation_split", self.validation)):
            if getattr(self, field) is not None and isinstance(path, str) and path.endswith((*JSONL, JSON, PARQUET)):
                found.append(mistake(field, getattr(self, field), f"does not apply to a file ({path})"))
        return found

    def column(self, name: str) -> str:
        """Return the data's name of a column."""
        return self.columns.get(name, name)


class DpoSpec(SpecPart):
    beta: Factor = 0.1
    """Strength of the pull towards the reference, which is the model that the job starts from."""
    loss: Literal["sigmoid", "ipo"] = "sigmoid"
    """`sigmoid`: DPO. `ipo`: squared distance of the per-token margin from 1/(2 beta)."""
    label_smoothing: Annotated[float, Field(ge=0.0, lt=0.5)] = 0.0
    """sigmoid: assumed share of pairs with swapped labels."""

    def resolve(self) -> list[dict[str, Any]]:
        if self.loss == "ipo" and self.label_smoothing:
            return [mistake("label_smoothing", self.label_smoothing, "does not apply to 'ipo'")]
        return []


def settle_supervised(spec: JobSpec) -> list[dict[str, Any]]:
    """Return mistakes between [data] and the other parts of an sft or dpo job."""
    found: list[tuple[str, Any, str]] = []
    by = f"does not apply to kind = {spec.kind!r}"
    if spec.train.learner != "torch":
        found.append(("train.learner", spec.train.learner, by))
    if spec.model.train_vision:
        found.append(("model.train_vision", True, f"{by}: rows show no images"))
    for name, usual in (("rollout_workers", 1), ("rollout_gpus", 0)):
        if (value := getattr(spec.resources, name)) != usual:
            found.append((f"resources.{name}", value, f"{by}: nothing is generated"))
    targets = set(TARGETS[spec.kind])
    if spec.data is not None and spec.data.validation is not None:
        targets |= {f"{PREFIX}{name}" for name in targets}
    if odd := sorted(spec.train.target.keys() - targets):
        may = ", ".join(sorted(targets))
        found.append(("train.target", spec.train.target, f"{', '.join(odd)}: a target may name {may}"))
    if spec.data is not None:
        if spec.data.format is not None and spec.data.format not in FORMATS[spec.kind]:
            may = " or ".join(FORMATS[spec.kind])
            found.append(("data.format", spec.data.format, f"{by}, which takes {may}"))
        if spec.kind == "dpo" and spec.data.mask != "completion":
            found.append(("data.mask", spec.data.mask, f"{by}: completions are compared"))
    if spec.kind == "dpo" and not found:
        fill(spec, {"dpo": spec.dpo or DpoSpec()})
    return [mistake(*one) for one in found]


class NoFormat(ValueError):
    """`field`: of the spec's part `data`."""

    def __init__(self, field: str, problem: str) -> None:
        self.field = field
        super().__init__(problem)


def format_of(columns: Iterable[str], kind: str, data: DataSpec) -> Format:
    """The format of rows with these columns. Raises NoFormat, naming what there is."""
    there = list(columns)
    said = f"the columns are: {', '.join(there) or '(none)'}"

    def lacking(format: Format) -> list[str]:
        return [data.column(name) for name in COLUMNS[format] if data.column(name) not in there]

    if data.format is not None:
        if missing := lacking(data.format):
            raise NoFormat("format", f"{data.format} needs {' and '.join(missing)}; {said}")
        fitting = [data.format]
    else:
        fitting = [format for format in FORMATS[kind] if not lacking(format)]
    if not fitting:
        wanted = ", or ".join(" and ".join(data.column(name) for name in COLUMNS[format]) for format in FORMATS[kind])
        raise NoFormat("columns", f"a row needs {wanted}; {said}. Other names are given by data.columns")
    if len(fitting) > 1:
        raise NoFormat("format", f"must be given, the rows have what {' and '.join(fitting)} need; {said}")
    (format,) = fitting
    used = {*COLUMNS[format], *OPTIONAL} if format != "messages" else set(COLUMNS[format])
    if odd := sorted(name for name in data.columns if name not in used or data.columns[name] not in there):
        raise NoFormat("columns", f"{', '.join(odd)}: not a column that {format} rows use and these have; {said}")
    return format


def renamed(row: Mapping[str, Any], data: DataSpec, format: Format) -> dict[str, Any]:
    """The row's columns that the format uses, by the names that we use."""
    names = COLUMNS[format] if format == "messages" else (*COLUMNS[format], *OPTIONAL)
    return {name: row.get(data.column(name)) for name in names}
