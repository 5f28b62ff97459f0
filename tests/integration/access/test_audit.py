"""The audit log: every act has its line before its answer, and no line can be changed, lost or moved unseen."""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest

from opentinker.services.scheduler.http import audit as scheduler_audit
from opentinker.shared.runtime.service import Context
from opentinker.shared.security.audit_log import AuditBroken, AuditFile, files_of, folder, verify, writers
from opentinker.shared.security.authorization import Role
from tests.support.api import OPERATOR, SPEC, bearing, new_key_of
from tests.support.scheduling import scheduler

PER_FILE = 900


@pytest.fixture
def chain(tmp_path: Path) -> Path:
    """Twenty lines in several files."""
    log = AuditFile(tmp_path / "audit", "scheduler-0", file_bytes=PER_FILE)
    for number in range(20):
        log.append([{"action": "test", "number": number}])
    (present,) = writers(tmp_path / "audit")
    assert len(files_of(present)) >= 3
    return present


def lines(present: Path) -> list[tuple[Path, bytes]]:
    return [(path, line) for path in files_of(present) for line in path.read_bytes().splitlines(keepends=True)]


def write(changed: list[tuple[Path, bytes]]) -> None:
    for path, group in itertools.groupby(changed, key=lambda pair: pair[0]):
        path.write_bytes(b"".join(line for _, line in group))


def test_a_chain_that_nobody_touched_is_whole(chain: Path) -> None:
    found = verify(chain)
    assert (found.lines, found.first, found.last) == (20, 1, 20)
    assert verify(chain, expected=found.hash) == found
    hashes = [orjson.loads(line)["hash"] for _, line in lines(chain)]
    assert len(set(hashes)) == 20 and all(verify(chain, expected=hash) for hash in hashes)


def test_every_changed_missing_doubled_or_moved_line_is_found(chain: Path) -> None:
    """But the last one that is cut off: for that there is `expected`."""
    whole = lines(chain)
    last = verify(chain).hash
    tried = 0
    for at, (path, line) in enumerate(whole):
        content = orjson.loads(line)
        variants: list[list[tuple[Path, bytes]]] = [
            [*whole[:at], *whole[at + 1 :]],
            [*whole[:at], (path, line), (path, line), *whole[at + 1 :]],
            [*whole[:at], (path, line.replace(b'"test"', b'"tost"')), *whole[at + 1 :]],
            [*whole[:at], (path, line.replace(b'"seq"', b' "seq"')), *whole[at + 1 :]],
            [*whole[:at], (path, orjson.dumps(content | {"number": 99}) + b"\n"), *whole[at + 1 :]],
            [*whole[:at], (path, b"{}\n"), *whole[at + 1 :]],
        ]
        if at + 1 < len(whole):
            after = whole[at + 1]
            variants.append([*whole[:at], (path, after[1]), (after[0], line), *whole[at + 2 :]])
        for variant in variants:
            write(variant)
            with pytest.raises(AuditBroken):
                verify(chain, expected=last)
            tried += 1
        write(whole)
    assert verify(chain).hash == last and tried == 20 * 6 + 19


def test_a_line_made_anew_with_a_right_hash_breaks_the_one_behind_it(chain: Path, tmp_path: Path) -> None:
    whole = lines(chain)
    other = AuditFile(tmp_path / "other", "scheduler-0", file_bytes=1 << 20)
    other.append([{"action": "test", "number": 7}])
    ((_, forged),) = lines(*writers(tmp_path / "other"))
    write([(whole[0][0], forged), *whole[1:]])
    with pytest.raises(AuditBroken, match="does not follow"):
        verify(chain)


def test_a_lost_file_is_missed_unless_it_is_said(chain: Path) -> None:
    first, second, *_ = files_of(chain)
    first.unlink()
    with pytest.raises(AuditBroken, match="lines are missing"):
        verify(chain)
    start = orjson.loads(second.read_bytes().splitlines()[0])["seq"]
    assert verify(chain, first=start).first == start
    second.unlink()
    with pytest.raises(AuditBroken, match="lines are missing"):
        verify(chain, first=start)


def test_a_torn_last_line_is_cut_off_and_said(tmp_path: Path) -> None:
    """As a power cut leaves it: nobody had been told that it was written."""
    AuditFile(tmp_path, "s").append([{"action": "a"}, {"action": "b"}])
    (present,) = writers(tmp_path)
    with present.open("ab") as file:
        file.write(b'{"seq":3,"action":"c","pre')
    AuditFile(tmp_path, "s").append([{"action": "d"}])
    found = [orjson.loads(line) for _, line in lines(present)]
    assert [line.get("action", line.get("event")) for line in found] == ["a", "b", "cut", "d"]
    assert found[2]["bytes"] == 26 and verify(present).lines == 4


def test_two_writers_of_one_chain_do_not_break_it(tmp_path: Path) -> None:
    one, two = AuditFile(tmp_path, "s"), AuditFile(tmp_path, "s")
    for number in range(5):
        one.append([{"n": number}])
        two.append([{"n": number}, {"n": -number}])
    (present,) = writers(tmp_path)
    assert verify(present).lines == 15


# --- the scheduler --------------------------------------------------------------------------------------------------


def entries(ctx: Context) -> list[dict[str, Any]]:
    (present,) = writers(folder(ctx.settings.data_dir))
    verify(present)
    return [orjson.loads(line) for _, line in lines(present)]


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


async def test_refusals_do_not_fill_the_disk(ctx: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler_audit, "REFUSALS_BURST", 3.0)
    monkeypatch.setattr(scheduler_audit, "REFUSALS_PER_S", 0.0001)
    async with scheduler(ctx) as url, aiohttp.ClientSession() as session:
        for _ in range(10):
            assert (await session.get(f"{url}/v1/jobs")).status == 401
        assert len(entries(ctx)) == 3


async def test_a_log_that_cannot_be_written_ends_no_request(
    ctx: Context, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(AuditFile, "append", full)
    async with scheduler(ctx) as url, aiohttp.ClientSession() as session:
        assert (await session.post(f"{url}/v1/jobs", json=SPEC, headers=bearing())).status == 201
    assert "audit_not_written" in capsys.readouterr().out


def test_the_command_tells_a_whole_log_from_a_broken_one(tmp_path: Path) -> None:
    AuditFile(folder(tmp_path), "scheduler-0").append([{"action": "a"}, {"action": "b"}])
    command = [sys.executable, "-m", "opentinker.cli", "audit", "verify", "--data-dir", str(tmp_path), "--json"]
    done = subprocess.run(command, capture_output=True, check=False)
    (log,) = orjson.loads(done.stdout)["logs"]
    assert (done.returncode, log["lines"]) == (0, 2)
    assert subprocess.run([*command, "--expect", log["hash"]], capture_output=True, check=False).returncode == 0
    (present,) = writers(folder(tmp_path))
    first, _ = present.read_bytes().splitlines(keepends=True)
    present.write_bytes(first)
    assert subprocess.run([*command, "--expect", log["hash"]], capture_output=True, check=False).returncode == 1
    present.write_bytes(first.replace(b'"a"', b'"c"'))
    done = subprocess.run(command, capture_output=True, check=False)
    assert done.returncode == 1 and "line 1 was changed" in orjson.loads(done.stdout)["broken"][0]
