"""Packages of environments before anybody plays them: what is taken, what is refused, versions, and quotas."""

from __future__ import annotations

import io
import os
import tarfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opentinker.client import ApiError
from opentinker.sdk.environments import pack
from opentinker.services.scheduler.environments import upload
from opentinker.services.scheduler.environments.upload import Uploads
from opentinker.services.scheduler.environments.upload_quota import MIB, OverQuota, Quota, StoredVersion, bytes_of, room
from opentinker.shared.data import uploads
from opentinker.shared.data.uploads import Pin, Reference
from opentinker.shared.spec import parse_spec
from opentinker.shared.types.errors import NotFound, SpecError
from tests.samples.upload_samples import NO_LOCK, PARITY, numbered, package, receive, tar_of
from tests.support.factories import make_spec

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


def test_a_lock_without_packages_is_a_lock() -> None:
    assert uploads.pins(NO_LOCK) == []
