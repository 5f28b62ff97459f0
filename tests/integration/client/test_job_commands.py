"""`jobs`, `job`, `cancel`, `logs` and `events` against a scheduler."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import pty
import signal
import subprocess
import sys
import termios
from pathlib import Path

import orjson
import pytest
import yaml

from opentinker import AsyncClient
from opentinker.cli import common
from opentinker.cli.artifacts import _kinds
from opentinker.cli.observability import bars
from opentinker.cli.views.job_summary import doing
from opentinker.cli.views.job_table import ChangeLines
from opentinker.cli.views.watch import event_line
from opentinker.sdk.job_text import state_of
from opentinker.shared.runtime.service import Context
from opentinker.shared.state.store import Store
from opentinker.shared.types.manifest import short_list
from tests.conftest import until
from tests.integration.client.test_cli import environ, typed
from tests.support.api import OPERATOR, SPEC, write_checkpoint
from tests.support.factories import make_spec

WAIT_S = 60.0


@pytest.fixture
def on(client: AsyncClient, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setenv("OPENTINKER_API_KEY", OPERATOR)
    return ["--url", client.url]


async def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    return await asyncio.to_thread(typed, *arguments)


async def test_mistakes_that_only_a_server_finds_are_reported_with_all_others(on: list[str], tmp_path: Path) -> None:
    seats = {"white": {"frozen": "j-0000000000@5"}, "black": "player"}
    spec = {**SPEC, "policies": {"player": {}}, "seats": seats, "train": {"steps": 3, "lrr": 1}}
    (tmp_path / "job.json").write_bytes(orjson.dumps(spec))
    for command in ("submit", "validate"):
        done = await run(command, tmp_path / "job.json", *on)
        assert done.returncode == 2 and done.stderr.startswith("error: 2 mistakes"), done.stderr
        assert "train.lrr: unknown setting; did you mean train.lr? (job.json:1)" in done.stderr
        assert "seats.white.frozen = 'j-0000000000@5'" in done.stderr
    alone = await run("validate", tmp_path / "job.json", "--quick", *on)
    assert alone.stderr.startswith("error: 1 mistake")


async def listed(*arguments: object) -> list[str]:
    return [job["name"] for job in orjson.loads((await run("jobs", "--json", *arguments)).stdout)]


async def test_jobs_are_selected_by_state_kind_and_name_and_cancelled(client: AsyncClient, on: list[str]) -> None:
    ids = [(await client.submit(make_spec(name=f"sweep {n}")))["id"] for n in range(3)]
    other = (await client.submit(make_spec(name="other")))["id"]
    await client.cancel(ids[0])
    await client.cancel(ids[2])
    assert await listed("--name", "Sweep", *on) == ["sweep 1", "sweep 2", "sweep 0"], "what is over comes last"
    assert await listed("--state", "queued", "--kind", "rl", "-n", 2, *on) == ["other", "sweep 1"]
    assert await listed("--name", "sweep", "--sort", "created", *on) == ["sweep 2", "sweep 1", "sweep 0"]
    assert await listed("--kind", "sft", *on) == []
    own = (await client.job(other))["model"], (await client.job(other))["environment"], (await client.job(other))["key"]
    for option, value in zip(("--model", "--environment", "--owner"), own, strict=True):
        assert len(await listed(option, value, *on)) == 4, option
        assert await listed(option, "another", *on) == [], option
    assert "choose from queued" in (await run("jobs", "--state", "done", *on)).stderr
    both = await run("cancel", ids[1], "j-0000000000", *on)
    assert both.returncode == 1 and both.stdout == f"{ids[1]}  cancelled\n" and "no job 'j-0000000000'" in both.stderr
    assert "--yes" in (await run("cancel", "--all", *on)).stderr
    for wrong in (("cancel",), ("cancel", other, "--all"), ("cancel", other, "--kind", "rl")):
        assert (await run(*wrong, *on)).returncode == 2
    rest = await run("cancel", "--all", "--state", "queued", "--yes", "--json", *on)
    assert {job["id"] for job in orjson.loads(rest.stdout)} == {other}
    assert (await run("cancel", "--all", "--yes", *on)).stdout == "none of these jobs is active\n"


async def test_a_list_that_is_cut_says_so_on_stderr(client: AsyncClient, on: list[str], store: Store) -> None:
    for n in range(4):
        job = (await client.submit(make_spec(name=f"run {n}", project="maths" if n else "")))["id"]
    for limit, options, said in (
        (3, "", "the first 3 of 4 jobs; -n for more\n"),
        (2, "--project maths --json", "the first 2 of 3 jobs; -n for more\n"),
        (3, "--project maths", ""),
        (4, "", ""),
    ):
        done = await run("jobs", "-n", limit, *options.split(), *on)
        assert done.stderr == said, options
        shown = orjson.loads(done.stdout) if "--json" in options else done.stdout.splitlines()[1:]
        assert len(shown) == limit
    for n in range(3):
        detail = {"group": n, "reason": "env_error", "error": "KeyError"}
        await store.update(job, event="group_failed", failure=True, detail=detail)
    for options, said in (("-n 2", "the newest 2 failures; -n for more\n"), ("", "")):
        done = await run("failures", job, "--json", *options.split(), *on)
        assert (len(orjson.loads(done.stdout)["failures"]), done.stderr) == (2 if said else 3, said)
    for options, said in (
        ("-n 3", "only the newest 3 jobs are counted; -n for more\n"),
        ("-n 3 --by key", "only the newest 3 jobs are counted; -n for more\n"),
        ("--by day", ""),
        (f"--job {job}", ""),
        ("", ""),
    ):
        assert (await run("usage", *options.split(), *on)).stderr == said, options


async def test_answers_are_printed_as_json_yaml_or_a_table(client: AsyncClient, on: list[str]) -> None:
    id = (await client.submit(make_spec(name="Qwen3: ü")))["id"]
    await client.cancel(id)
    as_json, as_yaml = [(await run("jobs", "-o", form, *on)).stdout for form in ("json", "yaml")]
    assert yaml.safe_load(as_yaml) == orjson.loads(as_json) and as_yaml.startswith("- id: ")
    assert as_json == (await run("jobs", "--json", *on)).stdout == (await run("jobs", "-ojson", *on)).stdout
    assert (await run("jobs", "-o", "table", *on)).stdout.startswith("id ")
    events = [orjson.loads(line) for line in (await run("events", id, "-f", "--json", *on)).stdout.splitlines()]
    assert list(yaml.safe_load_all((await run("events", id, "-f", "-o", "yaml", *on)).stdout)) == events != []
    refused = await run("job", "j-0000000000", "--output", "yaml", *on)
    assert refused.returncode == 1 and yaml.safe_load(refused.stdout)["exit_status"] == 1
    wrong = await run("jobs", "-o", "xml", *on)
    assert wrong.returncode == 2 and "'-o': 'xml' is not one of 'table', 'json', 'yaml'" in wrong.stderr


async def test_jobs_have_projects_tags_and_notes(client: AsyncClient, on: list[str]) -> None:
    first, second = [(await client.submit(make_spec(name=name)))["id"] for name in ("one", "two")]
    assert "tags" not in (await run("jobs", *on)).stdout
    done = await run("label", first, second, "--project", "maths", "--tag", "base", "--tag", "odd", *on)
    assert done.stdout == f"{first}  one  project maths  base, odd\n{second}  two  project maths  base, odd\n"
    await run("label", second, "--untag", "odd", "--name", "best of two", "--notes", "lr 1e-4", *on)
    assert await listed("--tag", "odd", *on) == ["one"]
    assert await listed("--project", "maths", "--sort", "-name", *on) == ["one", "best of two"]
    assert await listed("--search", "1E-4", *on) == await listed("--notes", "LR", *on) == ["best of two"]
    assert "base, odd" in (await run("jobs", *on)).stdout
    assert "maths    2     2 queued" in (await run("jobs", "--group", "project", *on)).stdout
    for wrong in (("label", first), ("label", first, second, "--name", "both"), ("jobs", "--group", "tag", "--watch")):
        assert (await run(*wrong, *on)).returncode == 2
    for other in (("--json",), ("--group", "tag"), ("--watch",)):  # which shows no columns
        refused = await run("jobs", "--columns", "id", *other, *on)
        assert refused.returncode == 2 and "--columns" in refused.stdout + refused.stderr
    chosen = (await run("jobs", "--columns", "name,kind,notes", "--sort", "name", *on)).stdout
    assert chosen.split("\n")[:2] == ["name         kind  notes", "best of two  rl    lr 1e-4"]
    assert "'nam' is unknown; choose from id, name" in (await run("jobs", "--columns", "id,nam", *on)).stderr
    assert "must be one of created" in (await run("jobs", "--sort", "colour", *on)).stderr


async def test_the_status_of_a_server_elsewhere_begins_with_its_workers(client: AsyncClient, on: list[str]) -> None:
    assert (await run("status", *on)).stdout.splitlines()[0].startswith("workers: ")


async def test_a_job_is_shown_shortly_unless_all_is_asked_for(client: AsyncClient, on: list[str]) -> None:
    id = (await client.submit(make_spec(name="mine")))["id"]
    short, full = (await run("job", id, *on)).stdout, (await run("job", id, "--full", *on)).stdout
    assert len(short.splitlines()) < 20 < len(full.splitlines())
    assert "spec" not in short and '"algorithm"' in full and "s ago)" in short
    assert "since  " in full and "e+09" not in full


async def test_the_policies_of_a_job_are_evaluated_by_a_command(
    client: AsyncClient, ctx: Context, on: list[str]
) -> None:
    game = {"environment": {"name": "signalling"}, "seats": {"speaker": "a", "listener": "b"}}
    id = (await client.submit(make_spec(**game, policies={"a": {}, "b": {}})))["id"]
    early = await run("eval", id, "--swap", *on)
    assert early.returncode == 1 and "seats.speaker.frozen" in early.stderr and "none yet" in early.stderr
    for policy in ("a", "b"):
        write_checkpoint(ctx, f"{id}~{policy}", 10, {"trainer/state.json": b"{}"})
    made = await run("eval", id, "--swap", "--set", "evaluation.episodes=5", "--json", *on)
    spec = (await client.job(orjson.loads(made.stdout)["id"]))["spec"]
    assert spec["start"]["from"] == f"{id}~a@10" and spec["seats"]["speaker"]["frozen"] == f"{id}~b@10"
    assert spec["evaluation"]["episodes"] == 5 and list(spec["seats"]) == ["speaker"]


async def test_the_report_of_a_check_is_saved_for_the_page(client: AsyncClient, on: list[str]) -> None:
    unasked = await run("env", "check", "copy_digits", "--episodes", 2, *on)
    assert unasked.returncode == 2 and "--save" in unasked.stderr
    for _ in range(2):
        checked = await run("env", "check", "copy_digits", "--episodes", 2, "--save", "--json", *on)
        assert checked.returncode == 0, checked.stderr
    (saved,) = await client.environment_checks()
    assert (saved["environment"], saved["verdict"], saved["errors"]) == ("copy_digits", "ready for training", 0)
    assert f"saved: #/environments/{saved['id']}" in checked.stderr
    report = (await client.environment_check(saved["id"]))["report"]
    assert report["transcript"] == orjson.loads(checked.stdout)["transcript"] and "expert" in report["facts"]


async def test_a_job_that_is_not_there_is_said_without_routes(on: list[str]) -> None:
    for command in ("job", "events", "logs", "watch", "artifacts"):
        done = await run(command, "j-nope", *on)
        assert done.returncode == 1 and "no job 'j-nope'" in done.stderr and "/v1" not in done.stderr
        assert "jobs lists yours" in done.stderr and "Traceback" not in done.stderr
    missing = orjson.loads((await run("job", "j-nope", "--json", *on)).stdout)
    assert missing["status"] == 404 and "no job 'j-nope'" in missing["error"]


async def test_levels_of_logs_have_their_usual_names(client: AsyncClient, on: list[str]) -> None:
    id = (await client.submit(make_spec()))["id"]
    assert (await run("logs", id, "--level", "WARN", *on)).returncode == 0
    assert "choose from debug" in (await run("logs", id, "--level", "loud", *on)).stderr


async def test_what_to_delete_is_asked_in_words(on: list[str]) -> None:
    done = await run("delete", "j-0000000000", *on)
    assert done.returncode == 2 and "say what to delete: --step STEP" in done.stderr
    assert "Invalid value" not in done.stderr


async def test_a_downloaded_checkpoint_is_said_to_be_loaded_as_what_it_is(
    client: AsyncClient, ctx: Context, on: list[str], tmp_path: Path
) -> None:
    id = (await client.submit(make_spec()))["id"]
    for step, file, loader in (
        (1, "model.safetensors", "transformers.AutoModelForCausalLM"),
        (2, "adapter_config.json", "peft.AutoPeftModelForCausalLM"),
    ):
        write_checkpoint(ctx, id, step, {file: b"{}"})
        done = await run("download", id, tmp_path / str(step), "--step", step, *on)
        assert f"load it with: {loader}.from_pretrained(" in done.stdout, done.stderr
        assert (tmp_path / str(step) / file).exists()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_table_fits_its_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = Terminal()
    monkeypatch.setattr("sys.stdout", shown)
    monkeypatch.setattr("shutil.get_terminal_size", lambda *_, **__: os.terminal_size((40, 20)))
    row = ["j-0123456789", "a long name of a job", "queued", "waits for a free rollout worker"]
    common.print_table(["id", "name", "state", "reason"], [row], empty="", last_below=True)
    lines = shown.getvalue().splitlines()
    assert lines[0].split() == ["id", "name", "state"] and max(map(len, lines)) <= 40
    assert lines[-1] == "  waits for a free rollout worker"


def test_lists_and_counts_are_short_and_grammatical() -> None:
    assert short_list(range(1, 8)) == "1, 2, 3, 4, 5, 6, 7"
    assert short_list(range(1, 201)) == "1, 2, 3, ... (194 more) ..., 198, 199, 200"
    assert [line.partition("#")[0].strip() for line in bars([2, 3, 4, 6], [1, 1, 1, 1, 1], 1)] == [
        *("1", "2", "3", "4 to 5", "6 or more")
    ]
    files = [{"kind": "logs", "bytes": 1000}, {"kind": "logs", "bytes": 500}]
    assert _kinds(files) == "2 logs (1.5 kB)"  # type: ignore[arg-type]


def test_events_and_endings_read_as_people_write() -> None:
    line = event_line({"event": "running", "time": 0.0, "epoch": -1, "since": 1795393246.6, "state": "running"})
    assert "epoch" not in line and "1795393246" not in line and "since=" in line
    job = {"state": "failed", "kind": "rl", "step": 1, "steps": 2, "reason": "no such model."}
    assert doing(job) == ["It failed after 1 of 2 steps: no such model."]
    raised = job | {"id": "j-1", "waiting_for": "", "reason": "two\nlines \x1b[31min red"}
    assert doing(raised) == ["It failed after 1 of 2 steps: two lines [31min red."]
    assert state_of(raised) == "failed: two lines [31min red"


# --- jobs --watch -----------------------------------------------------------------------------------------------------


def watching(stdout: int, *arguments: str) -> subprocess.Popen[bytes]:
    argv = [sys.executable, "-m", "opentinker.cli", "jobs", "--watch", *arguments]
    return subprocess.Popen(argv, stdout=stdout, env={**environ(), "OPENTINKER_API_KEY": OPERATOR, "TERM": "xterm"})


async def interrupted(process: subprocess.Popen[bytes]) -> int:
    process.send_signal(signal.SIGINT)
    return await asyncio.to_thread(process.wait, WAIT_S)


@pytest.mark.parametrize("as_json", [False, True])
async def test_a_pipe_has_a_line_per_change(client: AsyncClient, on: list[str], tmp_path: Path, as_json: bool) -> None:
    id = (await client.submit(make_spec(name="watched")))["id"]
    file = tmp_path / "lines"
    with file.open("w") as out:
        process = watching(out.fileno(), "--state", "queued", *on, *(["--json"] if as_json else []))
    try:
        await until(lambda: id in file.read_text())
        await client.cancel(id)
        await until(lambda: file.read_text().count(id) == 2)
        assert await interrupted(process) == 130
    finally:
        process.kill()
        process.wait()
    first, last = file.read_text().splitlines()
    if as_json:
        assert (orjson.loads(first)["name"], orjson.loads(last)) == ("watched", {"id": id, "listed": False})
    else:
        assert f"  {id}  watched  queued  0/" in first and last.endswith(f"  {id}  no longer listed")


async def test_jobs_watched_on_a_terminal_are_a_table_redrawn_in_place(client: AsyncClient, on: list[str]) -> None:
    id = (await client.submit(make_spec(name="watched")))["id"]
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (20, 100))
    os.set_blocking(ours, False)
    process = watching(theirs, *on)
    os.close(theirs)
    shown = b""

    def shows(text: bytes) -> bool:
        nonlocal shown
        with contextlib.suppress(BlockingIOError):
            shown += os.read(ours, 65536)
        return text in shown

    try:
        await until(lambda: shows(b"queued"))
        assert id.encode() in shown and b"1 job at " in shown
        await client.cancel(id)
        await until(lambda: shows(b"cancelled"))
        assert b"\x1b[1A" in shown, "the cursor moves up before the table is drawn again"
        assert await interrupted(process) == 130
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def test_jobs_watched_report_progress_in_forty_parts() -> None:
    out = io.StringIO()
    lines = ChangeLines(out)
    job = {"id": "j-1", "name": "n", "kind": "rl", "state": "running", "steps": 400, "reason": "", "waiting_for": ""}
    for step in range(401):
        lines.show([{**job, "step": step}])  # type: ignore[typeddict-item]
    assert [line.split("  ")[4] for line in out.getvalue().splitlines()] == [f"{n}/400" for n in range(0, 401, 10)]
    lines.show([{**job, "step": 400, "state": "failed", "reason": "two\nlines \x1b[31min red"}])  # type: ignore[typeddict-item]
    assert out.getvalue().splitlines()[-1].endswith("two lines [31min red")
