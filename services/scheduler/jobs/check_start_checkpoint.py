"""The checkpoint that a new job starts from: found, and compared with what the job trains. `kept_checkpoints.py` keeps
it for the job. Functions without `async` block.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from opentinker.services.scheduler.artifacts import checkpoint_dir
from opentinker.services.scheduler.artifacts.catalog import ArtifactCatalog
from opentinker.shared.data.safetensors_header import NAMED, Shapes, difference, shapes_in
from opentinker.shared.runtime.service import Context
from opentinker.shared.spec import JobSpec, LoraSpec, StartSpec
from opentinker.shared.spec.start import Origin
from opentinker.shared.types.core import JobRecord, split_part
from opentinker.shared.types.errors import NotFound
from opentinker.shared.types.manifest import ADAPTER, CRITIC, OPTIMIZER, Manifest

Mistakes = list[dict[str, Any]]


@dataclass(frozen=True)
class SourceCheckpoint:
    job: JobRecord
    directory: Path
    manifest: Manifest

    @property
    def name(self) -> str:
        """Return the name of the checkpoint, with a number in the place of `latest`."""
        return f"{self.job.id}@{self.manifest.step}"


async def find(ctx: Context, start: Origin, tenant: str) -> SourceCheckpoint | str:
    """Return the checkpoint, or the reason why it cannot be used. A job of another tenant looks like one that does not
    exist."""
    artifacts = ArtifactCatalog(ctx)
    source, step = start.job, start.step
    if start.published:
        try:
            named = await artifacts.index.publication(tenant, start.checkpoint)
        except NotFound as error:
            return str(error)
        source, step = named.job, named.step
    jobs = [job for job in await ctx.store.jobs([source]) if job.tenant == tenant]
    if not jobs:
        return f"you have no job {source}; `opentinker jobs` lists yours"
    if why := lacks_policy(jobs[0]):
        return why
    try:
        held = checkpoint_dir.choose(await artifacts.checkpoints(jobs[0]), step)
    except NotFound as error:
        return f"job {source} has {error}"
    try:
        return SourceCheckpoint(jobs[0], await artifacts.on_disk(held), held.manifest)
    except (NotFound, OSError) as error:
        return f"the checkpoint of step {held.manifest.step} cannot be fetched from the artifact store: {error}"


def lacks_policy(job: JobRecord) -> str:
    """Return why the job's id names no checkpoint, if it has several policies and the id is not of one of them."""
    if not job.policies or split_part(job.id)[1]:
        return ""
    return f"job {job.id} has several policies: take a checkpoint of one, {job.parts[0]}@latest"


async def mistakes_in_live(ctx: Context, start: StartSpec, spec: JobSpec | None, base: str, tenant: str) -> Mistakes:
    """Return mistakes regarding the job whose live policy is to be served. `base` as in `mistakes_in`."""
    found = [job for job in await ctx.store.jobs([start.job]) if job.tenant == tenant]
    if not found:
        return [_wrong(f"you have no job {start.job}; `opentinker jobs` lists yours")]
    (job,) = found
    if job.kind != "rl" or job.state.final:
        why = f"has {job.state}" if job.state.final else f"is of kind {job.kind}, which publishes no versions"
        return [_wrong(f"job {job.id} {why}: take a checkpoint of it, {job.id}@latest")]
    if why := lacks_policy(job):
        return [_wrong(why)]
    return [] if spec is None else _unlike(job, spec, base)


def _unlike(job: JobRecord, spec: JobSpec, base: str) -> Mistakes:
    """Return mismatches with the versions that the trainer of this job sends."""
    model, engine = job.spec["model"], job.spec["rollout"]["engine"]
    lora = None if spec.model.lora is None else spec.model.lora.model_dump(mode="json")
    found: list[tuple[str, Any, str]] = []
    if model["base"] != base:
        found.append(("model.base", spec.model.base, f"is not that of job {job.id}, {model['base']}"))
    if lora is not None and lora != model["lora"]:
        found.append(("model.lora", lora, f"is not that of job {job.id}: leave it out"))
    if spec.rollout.engine != engine:
        found.append(("rollout.engine", spec.rollout.engine, f"must be that of job {job.id}, {engine!r}"))
    return [{"field": field, "value": value, "problem": problem} for field, value, problem in found]


def followed(plain: dict[str, Any], job: JobRecord) -> dict[str, Any]:
    """The part `model` of a job that serves the live policy of this one: what its trainer sends is of this kind."""
    theirs = job.spec["model"]
    return {**plain["model"], **{name: theirs[name] for name in ("dtype", "fp32_head", "lora")}}


def mistakes_in(chosen: SourceCheckpoint, spec: JobSpec, base: str) -> Mistakes:
    """Return mismatches. `base`: model.base, an absolute path if it is a directory."""
    files = chosen.manifest.files
    weights = [name for name in files if name.endswith(".safetensors") and "/" not in name]
    held = "an adapter" if ADAPTER in weights else "full weights" if weights else "nothing"
    try:
        lora, wanted = _wanted(chosen, spec, held)
        if held != wanted:
            does = _DOES.get(spec.kind, "trains")
            instead = (_TO_SERVE if spec.kind in _DOES else _TO_TRAIN).get(held, "")
            return [_wrong(f"it holds {_KINDS[held]}, and this job {does} {_KINDS[wanted]}{instead}")]
        if lora is not None:
            problems = _other_adapter(chosen, lora, base)
        else:
            problems = _other_model(chosen.directory, weights, Path(base)) if weights else []
    except (OSError, ValueError) as error:
        problems = [f"it cannot be read: {error}"]
    return [_wrong(problem) for problem in problems] + _rounded_reference(chosen, spec) + _lacking_state(chosen, spec)


def _wanted(chosen: SourceCheckpoint, spec: JobSpec, held: str) -> tuple[LoraSpec | None, str]:
    """The adapter that the job is about, and which kind of checkpoint it can begin with."""
    lora = spec.model.lora
    if spec.kind not in _DOES:
        simulated = spec.train.learner == "simulated"
        return lora, "nothing" if simulated else "full weights" if lora is None else "an adapter"
    if lora is None and held == "an adapter":
        lora = adapter_in(chosen)
    if held == "nothing" and spec.rollout.engine == "toy":  # which has no weights
        return lora, "nothing"
    return lora, "full weights" if lora is None else "an adapter"


_KINDS = {"nothing": "no weights (learner = 'simulated')", "full weights": "full weights", "an adapter": "an adapter"}
_DOES = {"inference": "serves", "eval": "plays with"}
"""Verbs of jobs that train nothing."""
_TO_TRAIN = {
    "full weights": "; to train an adapter on them, download it and give the directory as model.base",
    "an adapter": "; to train all weights, `opentinker download --merge` makes a directory for model.base",
}

_TO_SERVE = {
    "nothing": "; serve it with rollout.engine = 'toy', which has no weights either",
    "full weights": "; leave model.lora out to serve them",
}


def _wrong(problem: str, field: str = "from") -> dict[str, Any]:
    return {"field": f"start.{field}", "value": None, "problem": problem}


def _lacking_state(chosen: SourceCheckpoint, spec: JobSpec) -> Mistakes:
    if spec.start is None or not spec.start.optimizer:
        return []
    if OPTIMIZER not in chosen.manifest.files:
        return [_wrong("the checkpoint has no optimizer state", "optimizer")]
    trains_critic = spec.algorithm.advantage == "gae" and spec.value_model is None
    if trains_critic and CRITIC not in chosen.manifest.files:
        problem = "this job trains a critic and the checkpoint has none, so only the weights can be taken over"
        return [_wrong(problem, "optimizer")]
    return []


def _rounded_reference(chosen: SourceCheckpoint, spec: JobSpec) -> Mistakes:
    """A bfloat16 job's trainer state has the float32 weights that a float32 job begins with; its model files, which
    reference-forward reads, have them rounded. A bfloat16 job rounds them itself."""
    narrow = chosen.job.spec["model"]["dtype"] == "bfloat16" and spec.model.dtype == "float32"
    if spec.kind != "rl" or spec.algorithm.kl_coef == 0 or not narrow or spec.train.learner == "simulated":
        return []
    merge = "" if spec.model.lora is None else " --merge"
    return [
        _wrong(
            "it is of a bfloat16 job: a float32 one begins with its float32 weights, and the reference of "
            f"algorithm.kl_coef = {spec.algorithm.kl_coef:g} would be the rounded ones. Set model.dtype = 'bfloat16', "
            f"or begin with the rounded ones too: `opentinker download{merge}` makes a directory for model.base"
        )
    ]


def _other_adapter(chosen: SourceCheckpoint, lora: LoraSpec, base: str) -> list[str]:
    of = chosen.job.spec["model"]["base"]
    if of != base:
        return [f"it is an adapter of {of}, and model.base is {base}"]
    shapes = shapes_in(chosen.directory / ADAPTER)
    config = orjson.loads((chosen.directory / "adapter_config.json").read_bytes())
    if (config["r"], config["lora_alpha"]) != (lora.rank, lora.alpha):
        return [
            f"its adapter has rank {config['r']} and alpha {config['lora_alpha']:g}, model.lora has rank {lora.rank} "
            f"and alpha {lora.alpha:g}: {_some(shapes, sorted(shapes))}"
        ]
    if isinstance(lora.target_modules, str):
        return []  # which layers that means the trainer finds out, and it compares
    modules = {name: name.partition(".lora_")[0] for name in shapes}
    odd = sorted(name for name, module in modules.items() if not any(_is(module, t) for t in lora.target_modules))
    absent = [t for t in lora.target_modules if not any(_is(module, t) for module in modules.values())]
    return ([f"model.lora.target_modules leaves out what its adapter has: {_some(shapes, odd)}"] if odd else []) + (
        [f"its adapter has nothing for {', '.join(absent)} of model.lora.target_modules"] if absent else []
    )


def adapter_in(chosen: SourceCheckpoint) -> LoraSpec | None:
    """Return the checkpoint's adapter as a job would describe it. Blocking. Raises OSError, ValueError."""
    if ADAPTER not in chosen.manifest.files:
        return None
    config = orjson.loads((chosen.directory / "adapter_config.json").read_bytes())
    targets = config["target_modules"]
    return LoraSpec(
        rank=config["r"],
        alpha=config["lora_alpha"],
        target_modules="all-linear" if targets == "all-linear" else sorted(targets),
    )


def _is(module: str, target: str) -> bool:
    """Return whether `target` names the module, by the rule that peft applies to a list of target modules."""
    return module == target or module.endswith(f".{target}")


def _other_model(directory: Path, files: list[str], base: Path) -> list[str]:
    """Compare headers with a base that is a directory here; the trainer compares the models themselves."""
    if not base.is_dir():
        return []
    have, want = shapes_in(*(directory / name for name in files)), shapes_in(*base.glob("*.safetensors"))
    if not have.keys() & want.keys():
        return []  # an older way of naming tensors
    odd = difference(have, {name: want[name] for name in have if name in want})  # a tied head may be absent in one
    return [f"it is of another model than {base}: {odd}"] if odd else []


def _some(shapes: Shapes, names: list[str]) -> str:
    said = ", ".join(f"{name} {list(shapes[name])}" for name in names[:NAMED])
    return f"{said} ({len(names)} tensors)"
