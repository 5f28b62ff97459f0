"""Description inside a checkpoint directory: written by the trainer, read by it and by the scheduler.

{data_dir}/jobs/{job}/checkpoints/step-000050/manifest.json    a committed checkpoint; jobs/{job}~{policy}/ of a policy
{data_dir}/jobs/{job}/checkpoints/.epoch                       trainers of a lower epoch may not write here
{data_dir}/jobs/{job}/checkpoints/.rewind                      the manifest with which a job goes back to a checkpoint
{data_dir}/jobs/{job}/start/manifest.json                      the checkpoint of another job that this one starts from
{data_dir}/jobs/{job}/start/adapters/{name}/manifest.json      an adapter that an inference job serves with its base
{data_dir}/jobs/{job}/start/seats/{checkpoint}/manifest.json   one that plays seats of the job
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from opentinker.shared.types.core import WeightVersion
from opentinker.shared.types.pools import Members

MANIFEST = "manifest.json"
EPOCH = ".epoch"
REWIND = ".rewind"
START = "start"
ADAPTER = "adapter_model.safetensors"
ENDS = 3
"""Steps shown at either end of a long list."""
TRAINER_STATE = "trainer/"
"""Files under it are for resuming (optimizer, random state); a model loads without them."""
OPTIMIZER, CRITIC = f"{TRAINER_STATE}optimizer.safetensors", f"{TRAINER_STATE}critic.safetensors"


SeatBaselines = dict[str, dict[str, float]]
"""Running mean reward by environment and seat."""


class FileEntry(msgspec.Struct, frozen=True, kw_only=True):
    bytes: int
    sha256: str


class DataCursor(msgspec.Struct, frozen=True, kw_only=True):
    """Progress of a job that learns from rows."""

    position: int
    """Rows used since the job began, in the order given by the seed."""
    rows: int
    """Number of rows."""
    fingerprint: str
    """Fingerprint of the tokenized rows: the data order is meaningless for other rows."""


class Rewind(msgspec.Struct, frozen=True, kw_only=True):
    """The job went back, see `services/trainer/rewinder.py`."""

    step: int
    """The step that it went back from."""
    alarm: str


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint and its job's position when it was taken. JSON on disk."""

    job: str
    policy: str = ""
    """Name of the policy, in a job with several."""
    epoch: int
    """Epoch of the trainer that wrote it."""
    step: int
    version: WeightVersion
    resumed: dict[int, int] = {}
    """Epoch -> the step it resumed from: which versions belong to this lineage."""
    stream_floor: int = 0
    """Every group up to this position of the trajectory stream is accounted for."""
    consumed: list[int] = []
    """Group seqs that were trained or discarded and whose messages lie above the floor."""
    ledger: dict[str, int] = {}
    """Groups since the job began: `trained`, and `discarded/REASON` by reason; the others come again."""
    next_seq: int = 0
    """The first ticket number never issued, as far as the trainer knows."""
    position: int | None = None
    """Deterministic jobs: groups issued for the steps up to this one, without those of rolled-back steps."""
    seen: dict[str, WeightVersion] = {}
    """Newest version of each other policy that has played in a match which this one was trained on."""
    data: DataCursor | None = None
    """sft, dpo."""
    baselines: SeatBaselines = {}
    """rl with advantage = rae: running means that the next rewards are compared with."""
    pools: Members = {}
    """Opponent pools that hold versions of this policy."""
    rewinds: int = 0
    """Times that the job has gone back to a checkpoint because of an alarm."""
    rewound: Rewind | None = None
    """Only in the file .rewind: why the job continues from this step with the accounting of a later one."""
    files: dict[str, FileEntry] = {}
    """By path inside the directory. Filled in when the checkpoint is committed."""
    created: float = 0.0
    """Unix seconds; filled in when the checkpoint is committed."""

    @property
    def name(self) -> str:
        """Name of its directory."""
        return name_of(self.step)

    @property
    def age(self) -> tuple[int, int]:
        """Sort key, oldest first: a checkpoint of a lower epoch is older, even at a higher step."""
        return self.epoch, self.step


def start_of(data_dir: Path, job: str, policy: str = "") -> Path:
    """Return the directory of the checkpoint that a job, or one of its policies, starts from, from submission to the
    end of the job."""
    home = data_dir / "jobs" / job / START
    return home / "policies" / policy if policy else home


def adapter_of(data_dir: Path, job: str, name: str) -> Path:
    """Return the directory of an inference job's adapter, from submission to the end of the job."""
    return start_of(data_dir, job) / "adapters" / name


def frozen_of(data_dir: Path, job: str, checkpoint: str) -> Path:
    """Return the directory of a frozen checkpoint that plays seats of a job, from submission to the end of the job."""
    return start_of(data_dir, job) / "seats" / checkpoint


def name_of(step: int) -> str:
    return f"step-{step:06d}"


def read_manifest(directory: Path) -> Manifest:
    """Raises OSError, msgspec.MsgspecError."""
    return msgspec.json.decode((directory / MANIFEST).read_bytes(), type=Manifest)


def fenced_epoch(root: Path) -> int:
    """Return the lowest epoch that may write below `root`; 0 if none is set."""
    try:
        return int((root / EPOCH).read_text())
    except FileNotFoundError:
        return 0


def short_list(steps: Sequence[int]) -> str:
    """`1, 2, 3, ... (81 more) ..., 198, 199, 200`: a list of steps, the middle of a long one left out."""
    if len(steps) <= 2 * ENDS + 1:
        return ", ".join(map(str, steps))
    left_out = f"... ({len(steps) - 2 * ENDS} more) ..."
    return ", ".join([*map(str, steps[:ENDS]), left_out, *map(str, steps[-ENDS:])])


def instead(job: str, others: list[int]) -> str:
    """Return the advice for a damaged checkpoint, given the steps of the others, best first."""
    if not others:
        return "there is no other"
    return f"there are others, of step {short_list(others)}: opentinker download {job} DIR --step {others[0]}"
