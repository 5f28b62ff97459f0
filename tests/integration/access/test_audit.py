"""The audit log: every act has its line before its answer, and no line is lost or moved unnoticed."""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest

from opentinker.services.scheduler.http.audit import REFUSALS_BURST
from opentinker.shared.runtime.service import Context
from opentinker.shared.security.audit_log import AuditBroken, AuditFile, Verified, files_of, folder, verify, writers
from opentinker.shared.security.authorization import Role
from tests.support.api import OPERATOR, SPEC, bearing, new_key_of
from tests.support.scheduling import scheduler

PER_FILE = 250


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """Twenty lines in several files."""
    file = AuditFile(tmp_path / "audit", "scheduler-0", file_bytes=PER_FILE)
    for number in range(20):
        file.append([{"action": "test", "number": number}])
    (current,) = writers(tmp_path / "audit")
    assert len(files_of(current)) >= 3
    return current


def lines(current: Path) -> list[tuple[Path, bytes]]:
    return [(path, line) for path in files_of(current) for line in path.read_bytes().splitlines(keepends=True)]


def write(changed: list[tuple[Path, bytes]]) -> None:
    for path, group in itertools.groupby(changed, key=lambda pair: pair[0]):
        path.write_bytes(b"".join(line for _, line in group))


def test_every_missing_doubled_moved_or_unreadable_line_is_found(log: Path) -> None:
    """Except for a missing end."""
    whole = lines(log)
    assert verify(log) == Verified(lines=20, first=1, last=20)
    for at, (path, line) in enumerate(whole[:-1]):
        after = whole[at + 1]
        for variant in (
            [*whole[:at], *whole[at + 1 :]],
            [*whole[:at], (path, line), (path, line), *whole[at + 1 :]],
            [*whole[:at], (path, b"{}\n"), *whole[at + 1 :]],
            [*whole[:at], (path, line[: len(line) // 2] + b"\n"), *whole[at + 1 :]],
            [*whole[:at], (path, after[1]), (after[0], line), *whole[at + 2 :]],
        ):
            write(variant)
            with pytest.raises(AuditBroken):
                verify(log)
    write(whole)
    assert verify(log).lines == 20


def test_lines_of_an_older_version_are_continued(tmp_path: Path) -> None:
    """Each held the hash of the one before it."""
    (tmp_path / "s.jsonl").write_bytes(b'{"seq":1,"action":"a","prev":"00","hash":"1f"}\n')
    AuditFile(tmp_path, "s").append([{"action": "b"}])
    assert verify(tmp_path / "s.jsonl").lines == 2


def test_a_removed_file_is_reported_unless_its_lines_are_excepted(log: Path) -> None:
    first, second, *_ = files_of(log)
    first.unlink()
    with pytest.raises(AuditBroken, match="lines are missing"):
        verify(log)
    start = orjson.loads(second.read_bytes().splitlines()[0])["seq"]
    assert verify(log, first=start).first == start
    second.unlink()
    with pytest.raises(AuditBroken, match="lines are missing"):
        verify(log, first=start)


@pytest.mark.parametrize("torn", [b'{"seq":3,"action":"c","pre', b"\0" * 300 + b'"what":2}\n'])
def test_a_torn_last_line_is_cut_off_and_said(tmp_path: Path, torn: bytes) -> None:
    """As a power cut leaves it: no caller was told that it was written."""
    AuditFile(tmp_path, "s").append([{"action": "a"}, {"action": "b"}])
    (current,) = writers(tmp_path)
    with current.open("ab") as file:
        file.write(torn)
    AuditFile(tmp_path, "s").append([{"action": "d"}])
    found = [orjson.loads(line) for _, line in lines(current)]
    assert [line.get("action", line.get("event")) for line in found] == ["a", "b", "cut", "d"]
    assert found[2]["bytes"] == len(torn) and verify(current).lines == 4


def test_two_writers_of_one_log_number_its_lines_without_gaps(tmp_path: Path) -> None:
    one, two = AuditFile(tmp_path, "s"), AuditFile(tmp_path, "s")
    for number in range(5):
        one.append([{"n": number}])
        two.append([{"n": number}, {"n": -number}])
    (current,) = writers(tmp_path)
    assert verify(current).lines == 15


# --- the scheduler --------------------------------------------------------------------------------------------------


def entries(ctx: Context) -> list[dict[str, Any]]:
    (current,) = writers(folder(ctx.settings.data_dir))
    verify(current)
    return [orjson.loads(line) for _, line in lines(current)]


async def test_who_did_what_to_what_is_there_when_the_answer_is(ctx: Context) -> None:
    member = await new_key_of(ctx.store, "acme", Role.MEMBER)
    viewer = await new_key_of(ctx.store, "acme", Role.VIEWER)
    async with scheduler(ctx) as url, aiohttp.ClientSession() as session:
        made = await session.post(f"{url}/v1/jobs", json=SPEC, headers=bearing(member))
        job = (await made.json())["id"]
        line = entries(ctx)[-1]
        assert (line["action"], line["result"], line["made"]) == ("jobs:write", 201, f"/v1/jobs/{job}")
        assert (line["tenant"], line["role"], line["key"]) == ("acme", "member", member.split("_")[2])
        assert line["from"] == "127.0.0.1" and line["method"] == "POST" and line["path"] == "/v1/jobs"

        await session.get(f"{url}/v1/jobs/{job}", headers=bearing(member))
        assert len(entries(ctx)) == 1, "to look is no act"
        await session.post(f"{url}/v1/jobs/{job}/cancel", headers=bearing(viewer))
        await session.post(f"{url}/v1/jobs/{job}/cancel", headers=bearing(OPERATOR))
        await session.post(f"{url}/v1/jobs/{job}/cancel", headers=bearing(member))
        await session.get(f"{url}/v1/jobs/{job}/checkpoints/latest/download", headers=bearing(member))
        await session.post(f"{url}/v1/environments?name=x", data=b"no tar", headers=bearing(member))
        await session.get(f"{url}/v1/jobs", headers={"Authorization": f"Bearer {member[:-1]}_"})
        seen = [(e["action"], e["result"], e.get("role", ""), e["path"].rpartition("/")[2]) for e in entries(ctx)[1:]]
        assert seen == [
            ("jobs:write", 403, "", "cancel"),
            ("jobs:write", 404, "operator", "cancel"),
            ("jobs:write", 200, "member", "cancel"),
            ("checkpoints:read", "begins", "member", "download"),
            ("checkpoints:read", 404, "member", "download"),
            ("environments:write", 422, "member", "environments"),
            ("jobs:read", 401, "", "jobs"),
        ]
        assert entries(ctx)[1]["claimed_key"] == viewer.split("_")[2]
    text = "".join(path.read_text() for path in files_of(*writers(folder(ctx.settings.data_dir))))
    assert not any(key.split("_")[3] in text for key in (member, viewer, OPERATOR)), "no secret is in it"


async def test_refusals_do_not_fill_the_disk(ctx: Context) -> None:
    async with scheduler(ctx) as url, aiohttp.ClientSession() as session:
        for refused in range(1, 1000):
            async with session.get(f"{url}/v1/jobs") as response:
                assert response.status == 401
            if len(entries(ctx)) < refused:
                break
        assert REFUSALS_BURST <= len(entries(ctx)) < refused


async def test_a_log_that_cannot_be_written_ends_no_request(
    ctx: Context, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(AuditFile, "append", full)
    async with scheduler(ctx) as url, aiohttp.ClientSession() as session:
        assert (await session.post(f"{url}/v1/jobs", json=SPEC, headers=bearing())).status == 201
    assert "audit_write_failed" in capfd.readouterr().err


def test_the_command_reports_a_missing_line(tmp_path: Path) -> None:
    AuditFile(folder(tmp_path), "scheduler-0").append([{"action": "a"}, {"action": "b"}])
    command = [sys.executable, "-m", "opentinker.cli", "audit", "verify", "--data-dir", str(tmp_path), "--json"]
    done = subprocess.run(command, capture_output=True, check=False)
    assert (done.returncode, orjson.loads(done.stdout)["logs"]) == (0, [{"log": "scheduler-0", "lines": 2, "last": 2}])
    (current,) = writers(folder(tmp_path))
    current.write_bytes(current.read_bytes().splitlines(keepends=True)[1])
    done = subprocess.run(command, capture_output=True, check=False)
    assert done.returncode == 1 and "line 2 where 1 is expected" in orjson.loads(done.stdout)["broken"][0]
