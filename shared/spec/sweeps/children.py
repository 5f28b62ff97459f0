"""From the spec of a sweep to the specs of its jobs. A sweep is validated by making them: a mistake names the parameter
whose value a job's spec refuses."""

from __future__ import annotations

import copy
import itertools
import random
from collections.abc import Iterable, Iterator, Mapping, Set
from typing import Annotated, Any, NamedTuple, get_args

import orjson
from pydantic import Field, ValidationError, WithJsonSchema

from opentinker.shared.spec import JobSpec, parse_spec
from opentinker.shared.spec.labels import MAX_CHARACTERS
from opentinker.shared.spec.notify import sweep_mistakes
from opentinker.shared.spec.sweeps.metric import metric_mistakes, policies_of
from opentinker.shared.spec.sweeps.table import MAX_PARAMETERS, METRICS, SweepTable, leaves_of
from opentinker.shared.types.errors import SpecError, plural
from opentinker.shared.types.mistakes import UNKNOWN, WHOLE, fill, mistake, mistakes_of, short
from opentinker.shared.types.sweeps import TABLE, is_sweep

FIXED = {"name", "project", "tags", "notes", "kind", TABLE}
"""Fields of a spec that are the same for all jobs of a sweep, or name them."""
NOT_VARIED = "cannot be varied within a sweep"
MAX_BYTES = 1 << 16
"""Size of a sweep's spec: it is made and validated once for each of up to 1,000 jobs."""
SAMPLED = 64
"""Combinations of `tpe`, which are not known before, that are validated."""
REDRAWN = 100
"""Times that a combination which was there before is drawn again."""
REPORTED = 20
"""Wrong combinations that are reported."""
Settings = dict[str, Any]
"""Values of the parameters of one trial, by path."""


_KIND = JobSpec.model_fields["kind"]


class SubmittedSpec(JobSpec):
    """A job spec; with `kind = "sweep"` or a table [sweep] it describes a sweep. A schema: `parse_spec` and
    `parse_sweep` validate."""

    kind: Annotated[Any, WithJsonSchema({"type": "string", "enum": [*get_args(_KIND.annotation), TABLE]})] = Field(
        "rl", description=f"{_KIND.description} `sweep`: many jobs of the kind that sweep.kind names."
    )
    sweep: SweepTable | None = None
    """Settings that are varied, and how; see docs/sweeps.md."""


class SweepSpec(SubmittedSpec):
    """A job spec with a table [sweep]: one job for each choice of values. See docs/sweeps.md."""

    sweep: SweepTable
    """Settings that are varied, and how."""


def spec_schema() -> dict[str, Any]:
    """Return the JSON schema of a job spec which may have a table [sweep]."""
    return {**SubmittedSpec.model_json_schema(), "title": JobSpec.__name__}


class Sweep(NamedTuple):
    """A validated sweep."""

    table: SweepTable
    base: dict[str, Any]
    """Spec of its jobs as it was written, without [sweep]."""
    trials: list[Settings]
    """Every trial of a grid or of random search, in order; of `tpe` none is known before."""

    @property
    def first_job(self) -> dict[str, Any]:
        """The spec of its first job, as plain data."""
        return child_of(self.table, self.base, first_of(self.table), self.table.job_seeds[0])

    @property
    def most_trials(self) -> int:
        return len(self.trials) or self.table.most_trials

    @property
    def most_jobs(self) -> int:
        return self.most_trials * self.table.repeats

    @property
    def size(self) -> str:
        """Return how many jobs there will be; of random search also why there are fewer than asked for."""
        asked, few = self.table.trials, f"up to {plural(self.most_jobs, 'job')}"
        if self.table.method != "random" or asked is None or len(self.trials) >= min(asked, self.table.most_trials):
            return few
        return f"{few} (trials = {asked}, but its parameters have {plural(len(self.trials), 'combination')})"


def first_job(data: dict[str, Any]) -> dict[str, Any]:
    """Return the spec's data without [sweep]: of a sweep, that of its first job. Raises SpecError."""
    return parse_sweep(data).first_job if is_sweep(data) else data


def parse_sweep(data: Any) -> Sweep:
    """Validate plain data. Raises SpecError with every mistake; those in [sweep] begin with `sweep.`."""
    if not isinstance(data, dict) or data.get(TABLE) is None:
        raise SpecError.of(TABLE, None, "is needed, e.g. [sweep.parameters] train.lr = [1e-5, 1e-4]")
    try:
        size = len(orjson.dumps(data, default=str))
    except TypeError as error:
        raise SpecError.of(WHOLE, None, f"cannot be stored: {error}") from None
    if size > MAX_BYTES:
        raise SpecError.of(WHOLE, None, f"has {size:,} bytes as JSON; that of a sweep may have {MAX_BYTES:,}")
    base = _of_jobs(data)
    try:
        table = SweepTable.model_validate(data[TABLE])
    except ValidationError as error:
        found = [one for item in error.errors(include_url=False) for one in mistakes_of(item)]
        found = [{**one, "field": _below(one["field"])} for one in found]
        if any(one["field"] == f"{TABLE}.kind" for one in found):  # then it is unknown which settings its jobs have
            raise SpecError(_once(found)) from None
        raise SpecError(_once(found + _of_first_job(data[TABLE], base, found))) from None
    kind = base.get("kind", "rl")
    if kind in ("inference", "tinker"):
        raise SpecError.of("kind", kind, "has no end and no metric to compare: a sweep is of rl, sft, dpo or eval jobs")
    policies = policies_of(base)
    full = table.with_defaults(kind if isinstance(kind, str) and kind in METRICS else "rl", policies)
    silent = [] if table.notify_jobs else sweep_mistakes(base.get("notify"), str(full.metric), full.goal)
    wrong = _misplaced(table, base) + silent + metric_mistakes(table, full, policies)
    if table.kind not in (None, kind):
        problem = f"contradicts kind = {kind!r}: leave one of them out, or write kind = {TABLE!r}"
        wrong.append(mistake(f"{TABLE}.kind", table.kind, problem))
    table = _with_number_types(table, base)
    own = table.unread_options() + (table.grid_mistakes() if table.method == "grid" else [])
    wrong += [{**one, "field": _below(one["field"])} for one in own]
    if wrong:
        raise SpecError(_once(wrong + _of_first_job(data[TABLE], base, wrong)))
    if wrong := _wrong_values(table, base):
        raise SpecError(wrong)
    trials = list(combinations(table))
    checked = trials if table.method != "tpe" else draws(table, SAMPLED)
    if wrong := _wrong_combinations(table, base, checked):
        raise SpecError(wrong)
    return Sweep(table.with_defaults(kind if kind in METRICS else "rl", policies), base, trials)


def _of_jobs(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the spec of a sweep's jobs: without [sweep], and with the kind that [sweep] names where `kind` is
    `sweep`."""
    base = {name: value for name, value in data.items() if name != TABLE}
    if base.get("kind") != TABLE:
        return base
    table = data[TABLE]
    kind = table.get("kind") if isinstance(table, dict) else None
    return {**base, "kind": kind if isinstance(kind, str) and kind in METRICS else "rl"}


def child_of(table: SweepTable, base: Mapping[str, Any], settings: Settings, seed: int | None = None) -> dict[str, Any]:
    """Return the spec of a trial's job as plain data. Raises SpecError: a parameter's path leads through what is no
    table."""
    spec: dict[str, Any] = orjson.loads(orjson.dumps(base, default=str))
    for path, value in settings.items():
        _put(spec, path, copy.deepcopy(value))
    if seed is not None:
        for path in _seeded(spec):
            _put(spec, path, seed)
    return spec


def named(spec: dict[str, Any], sweep: str, number: int, settings: Settings, seed: int | None = None) -> dict[str, Any]:
    """Return a job's spec with its sweep's id among its tags, and a name that tells it from the sweep's other jobs; as
    it is if it has no name or tags that could be changed."""
    name, tags = spec.get("name"), spec.get("tags", [])
    if not isinstance(name, str) or not isinstance(tags, list):
        return spec
    told = " ".join(f"{path.rpartition('.')[2]}={_short(value)}" for path, value in settings.items())
    seeded = "" if seed is None else f" seed={seed}"
    full = f"{name} #{number} {told}"[: MAX_CHARACTERS - len(seeded)].strip() + seeded
    short = f"{name[: MAX_CHARACTERS - 8 - len(seeded)]} #{number}{seeded}"
    return {**spec, "name": full if full.isprintable() else short, "tags": [*tags, sweep]}


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _seeded(spec: Mapping[str, Any]) -> list[str]:
    """Return the settings that `seeds` sets."""
    kind = spec.get("kind", "rl")
    if kind == "eval":
        return ["evaluation.seed"]
    if kind != "rl":
        return ["train.seed"]
    train = spec.get("train")
    simulated = isinstance(train, dict) and train.get("learner") == "simulated"
    return ["rollout.seed"] if simulated else ["rollout.seed", "train.seed"]


def _put(spec: dict[str, Any], path: str, value: Any) -> None:
    """Raises SpecError."""
    *above, name = path.split(".")
    table: Any = spec
    for part in above:
        if isinstance(table, list):
            table = table[int(part)] if part.isdecimal() and int(part) < len(table) else None
        else:
            table = table.setdefault(part, {})
        if not isinstance(table, dict | list):
            raise SpecError.of(path, None, f"{part} is not a table")
    if isinstance(table, list):
        if not name.isdecimal() or int(name) >= len(table):
            raise SpecError.of(path, None, "is not an entry of the list")
        table[int(name)] = value
    else:
        table[name] = value


def _below(field: str) -> str:
    return TABLE if field == WHOLE else f"{TABLE}.{field}"


def _parameter(path: str) -> str:
    return f"{TABLE}.parameters.{path}"


# --- what is tried ---------------------------------------------------------------------------------------------------


def combinations(table: SweepTable) -> Iterator[Settings]:
    """Yield the settings of all trials of a grid or of random search; the last parameter of a grid varies fastest."""
    if table.method == "grid":
        every = itertools.product(*(one.grid or () for one in table.parameters.values()))
        for values in itertools.islice(every, table.most_trials):
            yield dict(zip(table.parameters, values, strict=True))
    elif table.method == "random":
        yield from draws(table, table.most_trials)


def draws(table: SweepTable, count: int) -> list[Settings]:
    """Draw `count` trials, without repetitions unless there are no others."""
    chances = random.Random(table.seed)
    found: list[Settings] = []
    seen: set[bytes] = set()
    for _ in range(count):
        for _ in range(REDRAWN):
            settings = {path: one.draw(chances.random()) for path, one in table.parameters.items()}
            key = orjson.dumps(settings)
            if key not in seen:
                break
        else:
            return found
        seen.add(key)
        found.append(settings)
    return found


# --- mistakes --------------------------------------------------------------------------------------------------------


def _misplaced(table: SweepTable, base: Mapping[str, Any]) -> list[dict[str, Any]]:
    found = []
    for path in table.parameters:
        if path.partition(".")[0] in FIXED:
            found.append(mistake(_parameter(path), None, NOT_VARIED))
        elif table.seeds and path in _seeded(base):
            found.append(mistake(_parameter(path), None, "is set by sweep.seeds"))
    return found


def first_of(table: SweepTable) -> Settings:
    """Return the first value of each parameter."""
    return {path: one.ends[0] for path, one in table.parameters.items()}


def _with_number_types(table: SweepTable, base: Mapping[str, Any]) -> SweepTable:
    """Return the table with ranges of whole numbers where a setting is one: 1 and 10 are also the ends of a range of
    fractions."""
    try:
        plain = parse_spec(child_of(table, base, first_of(table))).model_dump(mode="json")
    except SpecError:
        return table
    parameters = {}
    for path, one in table.parameters.items():
        at: Any = plain
        for part in path.split("."):
            at = at.get(part) if isinstance(at, dict) else None
        ranged = one.values is None and one.integer is None
        parameters[path] = one.model_copy(update={"integer": False}) if ranged and isinstance(at, float) else one
    fill(table, {"parameters": parameters})
    return table


def _mistakes(table: SweepTable, base: Mapping[str, Any], settings: Settings) -> list[dict[str, Any]]:
    """Return what is wrong with the job of a trial, with all seeds."""
    found: list[dict[str, Any]] = []
    for seed in table.job_seeds[:1]:
        try:
            spec = child_of(table, base, settings, seed)
            parse_spec(named(spec, "s-0123456789", 0, settings, seed))
        except SpecError as error:
            found += error.mistakes
    return found


def _wrong_values(table: SweepTable, base: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return what is wrong with the spec of the jobs, and with each value on its own. Where the first job is wrong,
    only the parameters that it is wrong in are looked at further."""
    first = first_of(table)
    wrong = _mistakes(table, base, first)
    own = {(one["field"], one["problem"]) for one in _mistakes(table, base, {})} if wrong else set()
    found = [_of_combination(one, table, first, own) for one in wrong]
    for path, parameter in table.parameters.items():
        its = any(_is_of(path, one["field"]) for one in wrong)
        for value in parameter.ends[1:] if its or not wrong else []:
            if len(found) >= REPORTED:
                return _once(found)
            for one in _mistakes(table, base, {**first, path: value}):
                if _is_of(path, one["field"]):
                    found.append({**one, "field": _parameter(path)})
                elif not wrong:
                    problem = f"{one['field']}: {one['problem']}"
                    found.append({**one, "field": _parameter(path), "value": short(value), "problem": problem})
    return _once(found)


def _wrong_combinations(table: SweepTable, base: Mapping[str, Any], trials: Iterable[Settings]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for settings in trials:
        for one in _mistakes(table, base, settings)[:1]:
            problem = f"with {_told(settings)}: {one['field']}: {one['problem']}"
            found.append({**of_parameter(one, table), "problem": problem[:500]})
        if len(found) == REPORTED:
            break
    return found


def _of_combination(
    one: dict[str, Any], table: SweepTable, settings: Settings, own: Set[tuple[str, str]]
) -> dict[str, Any]:
    """Return a mistake of a trial's job under its parameter; one in another setting names the combination, unless the
    spec has it without the parameters (`own`: field and problem)."""
    found = of_parameter(one, table)
    if found is not one or (one["field"], one["problem"]) in own:
        return found
    return {**one, "problem": f"with {_told(settings)}: {one['problem']}"[:500]}


def _of_first_job(written: Any, base: Mapping[str, Any], wrong: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return what else is wrong with the first job of a sweep whose table has the mistakes `wrong`. In place of a wrong
    range its first number is taken."""
    every = written.get("parameters") if isinstance(written, dict) else None
    leaves = leaves_of(every, "") if isinstance(every, dict) else []
    if not 0 < len(leaves) <= MAX_PARAMETERS:
        return []
    values = {path: _first_written(value) for path, value in leaves if path.partition(".")[0] not in FIXED}
    known: Settings = {path: value for path, value in values.items() if value is not None}
    try:
        table = SweepTable.model_validate({"parameters": {path: {"values": [v]} for path, v in known.items()}})
    except ValidationError:
        return []
    faulty = [path for path in values if any(_is_of(_parameter(path), one["field"]) for one in wrong)]

    def is_told(one: dict[str, Any]) -> bool:
        """Return whether a mistake is about a value that is wrong in [sweep] already, or absent here."""
        field, unknown = one["field"], one["problem"].startswith(UNKNOWN)
        absent = any(_is_of(field, path) for path, value in values.items() if value is None)
        return absent or (not unknown and any(_is_of(path, field) for path in faulty))

    found = [mistake(_parameter(path), None, NOT_VARIED) for path, _ in leaves if path.partition(".")[0] in FIXED]
    return found + [of_parameter(one, table) for one in _mistakes(table, base, known) if not is_told(one)]


def _first_written(value: Any) -> Any:
    """Return the first value of a parameter as it was written; None if there is none."""
    if not isinstance(value, dict):
        return value
    if isinstance(values := value.get("values"), list):
        return values[0] if values else None
    return value.get("low", value.get("high"))


def _told(settings: Settings) -> str:
    return ", ".join(f"{path} = {value!r}" for path, value in settings.items())


def _is_of(path: str, field: str) -> bool:
    return field == path or field.startswith(f"{path}.")


def of_parameter(one: dict[str, Any], table: SweepTable) -> dict[str, Any]:
    """Return a mistake of a job's spec under the parameter that it is about, if there is one."""
    path = next((path for path in table.parameters if _is_of(path, one["field"])), None)
    return one if path is None else {**one, "field": _parameter(path)}


def _once(mistakes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for one in mistakes:
        found.setdefault((one["field"], one["problem"]), one)
    return list(found.values())
