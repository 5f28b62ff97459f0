"""After a power cut everything that was acknowledged, or is needed to start, is there; what is torn is mended or named.

The disk of these tests loses what nobody waited for (unsynced_disk.py); `test_power_cuts.py` cuts a real one.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import orjson
import pytest

from opentinker.envs.runtime.packages import Packages
from opentinker.local.embedded import EmbeddedServers, shipped_conf
from opentinker.local.server_users import Access
from opentinker.local.up import Plan, api_port, operator_key
from opentinker.sdk.environments import pack
from opentinker.services.scheduler.artifacts.store import DirectoryStore
from opentinker.services.scheduler.environments.upload import Unreadable, Uploads
from opentinker.services.trainer import checkpoint
from opentinker.shared.data import uploads
from opentinker.shared.data.step_log import StepLog, lineage
from opentinker.shared.evaluation.records import Evaluations
from opentinker.shared.messaging.bus import Bus
from opentinker.shared.messaging.permissions import OPERATOR
from opentinker.shared.messaging.subjects import SERVICES
from opentinker.shared.security.key_text import new_key, read_key, write_key
from opentinker.shared.state.store import Store
from opentinker.shared.types.core import WeightVersion
from opentinker.shared.types.errors import SpecError
from opentinker.shared.types.manifest import Manifest
from tests.samples.upload_samples import package, receive
from tests.support.deploy.unsynced_disk import Cut, UnsyncedDisk

SECRETS = [(server, user) for server in ("nats", "valkey") for user in (*SERVICES, OPERATOR)]
both = pytest.mark.parametrize("how", Cut, ids=lambda how: how.value)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[UnsyncedDisk]:
    disk = UnsyncedDisk(monkeypatch)
    yield disk
    disk.close()


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Of the disk: it was there before anything of ours."""
    (tmp_path / "disk").mkdir()
    return tmp_path / "disk" / "data"


# --- what is on the disk when it is said to be ---------------------------------------------------------------------


@both
def test_the_second_start_finds_files_of_the_first(disk: UnsyncedDisk, data: Path, tmp_path: Path, how: Cut) -> None:
    access = Access(data / "run" / "access", shipped_conf("nats.conf"))
    access.deal(data / "dealt", "local")
    write_key(data / "run" / "operator-key", key := new_key("local"))
    port = api_port(Plan(data_dir=data, port=None, host="127.0.0.1"))
    passwords = [access.password(server, user) for server, user in SECRETS]
    disk.cut(data.parent, tmp_path / "left", how)
    left = tmp_path / "left" / "data"
    for path in (data / "run" / "access").iterdir():
        assert (left / "run" / "access" / path.name).read_bytes() == path.read_bytes(), path.name
    again = Access(left / "run" / "access", shipped_conf("nats.conf"))
    assert [again.password(server, user) for server, user in SECRETS] == passwords
    assert read_key(left / "run" / "operator-key") == key
    assert (left / "run" / "api-port").read_text() == str(port)
    assert (left / "dealt" / "trainer" / "nats-trainer").read_text() == access.password("nats", "trainer")


@both
def test_an_answered_upload_is_complete(disk: UnsyncedDisk, data: Path, tmp_path: Path, how: Cut) -> None:
    source = package(tmp_path / "source")
    (source / "levels" / "deep").mkdir(parents=True)
    (source / "levels" / "deep" / "one.txt").write_text("x")
    _, version, _ = receive(Uploads(data, 1), pack(source), "lab")
    disk.cut(data.parent, tmp_path / "left", how)
    left = tmp_path / "left" / "data"
    assert Uploads(left, 1).versions("lab", "small") == [version]
    assert uploads.intact(left, version.digest).name == "small"


@both
async def test_job_reports_survive(disk: UnsyncedDisk, data: Path, tmp_path: Path, how: Cut, bus: Bus) -> None:
    home = data / "jobs" / "j-1"
    told: list[str] = []

    async def event(kind: str, detail: dict[str, object]) -> None:
        told.append(kind)

    async def guard() -> None:
        pass

    evaluations = Evaluations(bus, "j-1", home, event, guard)
    await evaluations.keep(3, [{"index": 0}])
    await evaluations.add(WeightVersion(1, 3), {"val/episodes": 1.0}, {})
    evaluations.close()
    steps = StepLog(home / "metrics.jsonl")
    steps.add({"epoch": 1, "step": 3})
    steps.sync()
    steps.add({"epoch": 1, "step": 4})  # since the checkpoint: it may be lost
    checkpoint.fence(home / "checkpoints", 1)
    manifest = Manifest(job="j-1", step=3, epoch=1, version=WeightVersion(1, 3), resumed={1: 0}, position=0)

    def save(place: Path) -> None:
        _write(place / "model" / "weights", b"1")

    made = checkpoint.commit(home / "checkpoints", manifest, save)
    await DirectoryStore(data / "artifacts").put("lab/j-1/x/weights", made / "model" / "weights")
    await DirectoryStore(data / "artifacts").put("lab/j-1/log", _write(data / "staged" / "log", b"log\n"))
    disk.cut(data.parent, tmp_path / "left", how)
    left = tmp_path / "left" / "data"
    home = left / "jobs" / "j-1"
    assert told == ["validation"]
    assert [line["step"] for line in lineage(home / "validation.jsonl", {1: 0}, 3)] == [3]
    assert next(line["step"] for line in lineage(home / "metrics.jsonl", {1: 0}, 9)) == 3
    assert (home / "transcripts" / "step-000003.jsonl").read_bytes() == b'{"index":0}\n'
    found = checkpoint.find_newest(home / "checkpoints")
    assert found is not None and found[1].step == 3
    assert (left / "artifacts" / "lab" / "j-1" / "x" / "weights").read_bytes() == b"1"
    assert (left / "artifacts" / "lab" / "j-1" / "log").read_bytes() == b"log\n"


def _write(path: Path, content: bytes) -> Path:
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    return path


# --- what an earlier release, or a broken disk, has left -----------------------------------------------------------


async def test_servers_start_when_a_power_cut_has_emptied_every_file_of_the_first_start(tmp_path: Path) -> None:
    """Of NATS what it does not sync itself: the metadata of streams that may forget."""
    data = tmp_path / "data"
    with EmbeddedServers(data, default_ports={}) as servers:
        async with Bus.connect(servers.operator_url("nats"), "test") as bus:
            await bus.ensure_streams()
        servers.sync_streams()
    emptied = [path for path in (data / "run").rglob("*") if path.is_file()]
    emptied += data.glob("nats/jetstream/*/streams/METRICS/meta.*")
    assert {"servers.json", "nats-issuer", "valkey-users.acl", "meta.inf"} <= {path.name for path in emptied}
    for path in emptied:
        path.write_bytes(b"\0" * 9 if path.name == "nats-trainer" else b"")
    with EmbeddedServers(data, default_ports={}) as servers:
        async with (
            Store.connect(servers.operator_url("valkey"), "test") as store,
            Bus.connect(servers.operator_url("nats"), "test") as bus,
        ):
            await bus.ensure_streams()
            assert await store.redis.ping()
        assert all(servers.access.password(server, user) for server, user in SECRETS)


def test_an_empty_operator_key_is_made_anew(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "operator-key").write_bytes(b"")
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("OPENTINKER_ADMIN_KEY_FILE")
        made = operator_key(Plan(data_dir=tmp_path))
    assert made == tmp_path / "run" / "operator-key" and read_key(made) and made.stat().st_mode & 0o777 == 0o600
    with pytest.raises(FileExistsError):
        write_key(made, new_key("local"))


@pytest.mark.parametrize("tail", [b"\0" * 973, b'{"epoch":1,"st', b"\0" * 200_000], ids=["zeros", "half", "many zeros"])
def test_a_torn_end_of_a_log_costs_no_line_that_is_written_after_it(tmp_path: Path, tail: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"epoch":1,"step":1}\n{"epoch":1,"step":2}\n' + tail)
    StepLog(path).add({"epoch": 2, "step": 3})
    assert [orjson.loads(line)["step"] for line in path.read_bytes().splitlines()] == [1, 2, 3]
    path.write_bytes(tail)
    StepLog(path).add({"epoch": 2, "step": 3})
    assert path.read_bytes() == b'{"epoch":2,"step":3}\n'


def test_a_damaged_list_of_versions_is_that_name_s_problem_alone(tmp_path: Path) -> None:
    held = Uploads(tmp_path, 1)
    source = package(tmp_path / "source")
    for name in ("first", "second"):
        receive(held, pack(source), "lab", name)
    (uploads.home(tmp_path) / "names" / "lab" / "first.json").write_bytes(b"")
    assert list(held.names("lab")) == ["second"]
    assert held.resolve("upload:second", "lab").version == 1
    with pytest.raises(SpecError, match=r"versions of environment 'first' is damaged; push it again"):
        held.resolve("upload:first", "lab")
    with pytest.raises(Unreadable):
        held.delete("lab", "first", None)
    held.delete("lab", "second", None)
    receive(held, pack(source), "lab", "first")
    assert held.resolve("upload:first", "lab").version == 1


@pytest.mark.parametrize("damaged", ["small.py", "package.json"])
async def test_a_damaged_package_is_refused_and_repaired_by_a_push(tmp_path: Path, damaged: str) -> None:
    held = Uploads(tmp_path, 1)
    source = package(tmp_path / "source")
    _, version, _ = receive(held, pack(source))
    place = uploads.package_dir(tmp_path, version.digest)
    file = next(place.rglob(damaged))
    whole = file.read_bytes()
    file.write_bytes(b"")
    name = str(uploads.Reference("small", version.version, version.digest))
    with pytest.raises(SpecError, match=r"is damaged on the server's disk .*; push it again to repair it"):
        await Packages(tmp_path).find(name)
    assert list(held.names("default")) == ["small"], "others of the tenant go on"
    _, again, new = receive(held, pack(source))
    assert again == version and not new
    assert uploads.intact(tmp_path, version.digest) and file.read_bytes() == whole
    assert not list(uploads.home(tmp_path).glob(".incoming-*"))
