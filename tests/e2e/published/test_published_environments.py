"""Programs written for the published client, against `opentinker up`: they submit, fit, infer, die and come back."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import orjson
import pytest
import pytest_asyncio

from opentinker.client import AsyncClient
from opentinker.client.settings import Settings, spec_of
from opentinker.client.utils.utils import resolve_path, tolerant_merge_dicts, verify_raw_prompt_format
from opentinker.environment import GameEnvironment, StaticDatasetGenerator
from opentinker.local.discovery import key_in, read_state
from opentinker.shared.data.jsonl import RowError
from opentinker.shared.spec import parse_spec
from tests.conftest import until
from tests.e2e.test_run import pids
from tests.samples.published_games import HigherLower
from tests.support.cluster import JOB_S, ROOT, toy_model
from tests.support.listening import runs

CONFIG: dict[str, Any] = {
    "tokenizer_path": "some/model",
    "adv_estimator": "grpo",
    "rollout_n": 4,
    "batch_size": 8,
    "max_prompt_tokens": 100,
    "max_new_tokens": 50,
    "temperature": 0.7,
    "top_p": 0.9,
}
TOY = {
    "model": {"chat_template": "plain"},
    "rollout": {"engine": "toy"},
    "train": {"learner": "simulated", "simulated_step_s": 0.02},
}


class System:
    """`opentinker up`, as a newcomer starts it in a directory of their own, where the programs lie too."""

    def __init__(self, folder: Path, toy: Path, tiny: Path, state: dict[str, Any]) -> None:
        self.folder, self.toy, self.tiny = folder, toy, tiny
        self.client = AsyncClient(state["url"], api_key=key_in(state))

    @contextmanager
    def running(self, *arguments: object, log: Path, **environ: str) -> Iterator[subprocess.Popen[bytes]]:
        process = start(*arguments, folder=self.folder, log=log, **environ)
        try:
            yield process
        finally:
            process.kill()
            process.wait()

    def training(
        self, *arguments: object, log: Path, **environ: str
    ) -> AbstractContextManager[subprocess.Popen[bytes]]:
        program = ["-P", "-m", "opentinker.client", "train.py", self.client.url, *arguments]
        return self.running(*program, log=log, **environ)

    async def newest(self) -> Any:
        jobs = await self.client.jobs()
        return jobs[0] if jobs else None


def start(*arguments: object, folder: Path, log: Path, **environ: str) -> subprocess.Popen[bytes]:
    """This tree's, without settings of whoever runs the tests."""
    rest = {key: value for key, value in os.environ.items() if not key.startswith("OPENTINKER_")}
    environ = {**rest, "PYTHONPATH": str(ROOT / "src"), "PYTHONUNBUFFERED": "1", **environ}
    with log.open("wb") as out:
        return subprocess.Popen([sys.executable, *map(str, arguments)], env=environ, cwd=folder, stdout=out, stderr=out)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def system(tmp_path_factory: pytest.TempPathFactory, tiny: Path) -> AsyncIterator[System]:
    folder = tmp_path_factory.mktemp("published")
    for program in (ROOT / "tests" / "samples" / "published_programs").glob("[a-z]*.py"):
        shutil.copy(program, folder)
    checkout = folder / "checkout"  # of the published package: what is started there must not import it
    (checkout / "opentinker").mkdir(parents=True)
    (checkout / "opentinker" / "__init__.py").touch()
    log, toy = folder / "up.log", toy_model(folder / "toy")
    command = ("-P", "-m", "opentinker.cli", "up", "--port", 0, "--data-dir", folder / "data")
    up = start(*command, folder=checkout, log=log, OPENTINKER_PRELOAD="false")
    try:
        await until(lambda: read_state(folder / "data").get("ready") or up.poll() is not None)
        system = System(folder, toy, tiny, read_state(folder / "data"))
        async with system.client:
            yield system
        started = pids(folder / "data")
        up.send_signal(signal.SIGINT)
        assert await ended(up) == 0, log.read_text()
        assert not any(map(runs, started))
    finally:
        up.kill()
        up.wait()


async def ended(process: subprocess.Popen[bytes]) -> int:
    await until(lambda: process.poll() is not None, timeout_s=JOB_S)
    return process.returncode


@pytest.mark.nightly
@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.asyncio(loop_scope="module")
async def test_the_published_programs_run_as_they_stand(system: System, tmp_path: Path) -> None:
    log = tmp_path / "train"
    with system.training(system.tiny, 6, log=log) as process:
        assert await ended(process) == 0, log.read_text()
    said = log.read_text()
    assert "step 6: reward " in said and "COMPLETED" in said.splitlines()[-1]
    assert "settings without effect here: ppo_mini_batch_size" in said
    job = await system.client.job((await system.newest())["id"])
    assert (job["state"], job["step"], job["name"]) == ("succeeded", 6, "number game")
    assert job["spec"]["rollout"]["max_tokens"] == 4 and job["spec"]["algorithm"]["group_size"] == 4
    assert job["spec"]["validation"]["every"] == 5

    rows = [{"prompt": f"{number}=", "ground_truth": number} for number in ("12", "345")]
    (system.folder / "rows.jsonl").write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in rows))
    log = tmp_path / "infer"
    with system.running("infer.py", system.client.url, system.tiny, log=log) as process:
        assert await ended(process) == 0, log.read_text()
    first, *rest = log.read_text().splitlines()
    assert first.startswith("2 samples: mean reward ") and rest == ["results 2 12", "COMPLETED"]
    lines = [orjson.loads(line) for line in (system.folder / "results.jsonl").read_bytes().splitlines()]
    assert [(line["messages"][0]["content"], line["done"]) for line in lines] == [("12=", True), ("345=", True)]
    assert (await system.newest())["state"] == "succeeded"


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.asyncio(loop_scope="module")
async def test_a_program_that_was_killed_is_started_again_and_goes_on(system: System, tmp_path: Path) -> None:
    before = (await system.newest() or {}).get("id")
    arguments = system.toy, 60, orjson.dumps(TOY).decode()

    async def begun() -> bool:
        job = await system.newest()
        return job is not None and job["id"] != before and job["step"] >= 2

    with system.training(*arguments, log=tmp_path / "first"):
        await until(begun)
        job = (await system.newest())["id"]
    log = tmp_path / "second"
    with system.training(*arguments, log=log, OPENTINKER_ATTACH=job) as process:
        assert await ended(process) == 0, log.read_text()
    record = await system.client.job(job)
    assert (record["state"], record["step"]) == ("succeeded", 60)
    assert (await system.newest())["id"] == job


# --- settings -------------------------------------------------------------------------------------------------------


def spec(*configs: Any, **options: Any) -> Any:
    defaults = {"steps": 10, "save_freq": 5, "test_freq": 0, "first_too": False}
    return parse_spec(spec_of(Settings(*configs), {"name": "served:x"}, **{**defaults, **options}))


def test_experiment_name_is_the_display_name_as_it_stands() -> None:
    assert (
        spec(CONFIG, {"experiment_name": "Qwen3 lr 0.0001 (Versuch für Ö)"}).name == "Qwen3 lr 0.0001 (Versuch für Ö)"
    )
    assert spec({"tokenizer_path": "m"}).name == "game"


def test_settings_of_the_published_programs_are_used() -> None:
    args = SimpleNamespace(
        lora={"lora_rank": 8, "lora_alpha": 16, "lr": 3e-5},
        kl={"kl_loss_coef": 0.001, "kl_loss_type": "low_var_kl"},
        multi_turn={"max_assistant_turns": 5, "max_tokens_per_turn": 20},
        val_batch_size=30,
    )
    job = spec(CONFIG, args, test_freq=20, first_too=True)
    assert (job.algorithm.name, job.algorithm.group_size, job.algorithm.groups_per_batch) == ("grpo", 4, 8)
    assert (job.algorithm.kl_coef, job.algorithm.kl_in, job.algorithm.kl_estimator) == (0.001, "loss", "k3")
    assert (job.model.lora.rank, job.model.lora.alpha, job.train.lr) == (8, 16.0, 3e-5)
    assert (job.rollout.max_turns, job.rollout.max_tokens_per_turn, job.rollout.context_length) == (5, 20, 150)
    assert (job.rollout.temperature, job.rollout.top_p) == (0.7, 0.9)
    assert (job.train.steps, job.train.checkpoint_every) == (10, 5)
    assert (job.validation.every, job.validation.episodes, job.validation.at_start) == (20, 30, True)


@pytest.mark.parametrize(("estimator", "name", "size"), [("gae", "ppo", 1), ("rloo", "rloo", 4), (None, "ppo", 1)])
def test_estimators_are_presets(estimator: str | None, name: str, size: int) -> None:
    job = spec(CONFIG | {"adv_estimator": estimator, "batch_size": 16})
    assert (job.algorithm.name, job.algorithm.group_size) == (name, size)
    assert spec(CONFIG | {"adv_estimator": "grpo_per_step"}).algorithm.advantage == "per_turn"


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"adv_estimator": "magic"}, "adv_estimator = 'magic'"),
        ({"tokenizer_path": None}, "tokenizer_path is missing"),
        ({"kl": {"kl_loss_coef": 0.1, "kl_loss_type": "odd"}}, "kl: 'odd'"),
    ],
)
def test_settings_that_are_wrong_are_named(config: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        spec(CONFIG | config)


def test_a_turn_that_may_be_longer_than_all_turns_is_as_long_as_they_and_the_user_is_told() -> None:
    settings = Settings(CONFIG | {"multi_turn": {"max_tokens_per_turn": 512}})
    job = spec_of(settings, {"name": "served:x"}, steps=9, save_freq=-1, test_freq=0, first_too=False)
    assert job["rollout"]["max_tokens_per_turn"] == 50 and "checkpoint_every" not in job["train"]
    assert settings.notes == ["multi_turn.max_tokens_per_turn = 512 is more than max_new_tokens: a turn has 50 at most"]
    assert spec(CONFIG, save_freq=20000).train.checkpoint_every == 10


def test_settings_that_nobody_reads_are_named_part_by_part() -> None:
    settings = Settings(CONFIG | {"lora": {"lora_rank": 4, "exclude_modules": "x"}, "seed": 3})
    spec_of(settings, {"name": "served:x"}, steps=1, save_freq=1, test_freq=0, first_too=False)
    assert settings.unused() == ["lora.exclude_modules", "seed"]


def test_of_several_names_of_one_thing_one_is_used_and_others_that_differ_are_named() -> None:
    differing = {
        "model_path": "some/model",
        "multi_turn": {"max_assistant_turns": 5, "max_user_turns": 3},
        "kl": {"kl_loss_coef": 0.1, "kl_coef": 0.2},
        "lora": {"rank": 8, "lora_alpha": 4, "lr": 0.5},
        "lr": 0.1,
    }
    settings = Settings(CONFIG | differing | {"tokenizer_path": "other/model"})
    job = parse_spec(spec_of(settings, {"name": "served:x"}, steps=1, save_freq=1, test_freq=0, first_too=False))
    assert (job.model.base, job.rollout.max_turns, job.algorithm.kl_coef, job.train.lr) == ("some/model", 5, 0.1, 0.1)
    assert settings.unused() == ["kl.kl_coef", "lora.lr", "multi_turn.max_user_turns", "tokenizer_path"]


def test_a_name_that_says_nothing_hides_no_other() -> None:
    silent = {
        "model_path": "some/model",
        "multi_turn": {"max_assistant_turns": 4, "max_user_turns": 0},
        "kl": {"kl_loss_coef": 0.0, "kl_coef": 0.01},
        "algorithm": "agent_loop",
    }
    settings = Settings(CONFIG | silent)
    job = parse_spec(spec_of(settings, {"name": "served:x"}, steps=1, save_freq=1, test_freq=0, first_too=False))
    assert (job.rollout.max_turns, job.algorithm.kl_coef, job.algorithm.name) == (4, 0.01, "grpo")
    assert settings.unused() == []
    parts = CONFIG | {"adv_estimator": None, "algorithm": {"adv_estimator": "rloo", "gamma": 1}}
    settings = Settings(parts)
    assert spec_of(settings, {"name": "x"}, steps=1, save_freq=1, test_freq=0, first_too=False)["algorithm"][
        "name"
    ] == ("rloo")
    assert settings.unused() == ["algorithm.gamma"]


def test_overrides_of_all_configs_are_laid_over_each_other() -> None:
    submitted = {"opentinker": {"resources": {"trainer_gpus": 2}, "train": {"lr": 0.1}}}
    job = spec(
        CONFIG | submitted, {"opentinker": {"rollout": {"max_turns": 3}}}, {"opentinker": {"train": {"lr": 0.2}}}
    )
    assert (job.resources.trainer_gpus, job.rollout.max_turns, job.train.lr) == (2, 3, 0.2)


def test_a_game_has_as_many_turns_as_it_says_where_no_setting_does() -> None:
    assert spec(CONFIG, turns=20).rollout.max_turns == 20
    assert spec(CONFIG | {"multi_turn": {"max_user_turns": 4}}, turns=20).rollout.max_turns == 4
    assert spec(CONFIG | {"adv_estimator": "reinforce_plus_plus_baseline"}).algorithm.advantage == (
        "reinforce_pp_baseline"
    )
    assert spec(CONFIG, test_freq=5).validation.config == {"split": "val"}


def test_what_the_program_says_of_the_spec_itself_comes_last() -> None:
    job = spec(CONFIG | {"opentinker": {"train": {"lr": 0.5}, "resources": {"rollout_workers": 2}}})
    assert (job.train.lr, job.train.steps, job.resources.rollout_workers) == (0.5, 10, 2)


# --- data and helpers -----------------------------------------------------------------------------------------------


def test_rows_of_files_are_samples(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(
        '{"prompt": "1+1?", "reward_model": {"ground_truth": "2"}, "level": 3}\n'
        '{"prompt": [{"role": "user", "content": "2+2?"}], "ground_truth": "4"}\n'
    )
    data = StaticDatasetGenerator(str(path), shuffle=False, extra_keys=["level"], system_prompt="Be exact.")
    first, second = data.generate_sample(0), data.generate_sample(3)
    assert first["prompt"] == [{"role": "system", "content": "Be exact."}, {"role": "user", "content": "1+1?"}]
    assert first["env_kwargs"] == {"ground_truth": "2", "data_source": "math", "level": 3}
    assert second["ground_truth"] == "4" and len(data) == 2
    path.write_text('{"question": "1+1?"}\n')
    with pytest.raises(
        RowError, match=r"rows\.jsonl, line 1: prompt must be a text or a chat; the columns are: question"
    ):
        StaticDatasetGenerator(str(path))


def test_an_environment_has_loaders_and_an_interaction_file() -> None:
    env = GameEnvironment(HigherLower, {"batch_size": 4, "num_steps": 3, "val_batch_size": 5}, {"tries": 2}, job_id="j")
    train, validation = env.get_dataloader()
    assert (len(train), len(next(iter(train))), len(validation.dataset)) == (3, 4, 5)
    row = next(iter(validation))[0]
    assert row["raw_prompt"][0]["content"] == "You guess numbers." and row == next(iter(validation))[0]
    path = Path(env.get_interaction_config_path())
    assert '"higherlower"' in path.read_text()
    env.cleanup()
    assert not path.exists()


async def test_loaders_of_one_s_own_say_the_start_states() -> None:
    class Listed(GameEnvironment):
        def _setup_dataloader(self) -> None:
            super()._setup_dataloader()
            rows = [{"interaction_kwargs": {"env_kwargs": {"secret": secret}}} for secret in (7, 8)]
            self.val_dataloader = SimpleNamespace(dataset=rows)

    kind = Listed(HigherLower, {}).environment_class()
    for split, row, expected in (("val", 1, 8), ("val", 2, 7)):
        environment: Any = kind(kind.Config(split=split))
        await environment.open(row, 0)
        assert environment._game.secret == expected
    drawn: Any = kind(kind.Config())
    await drawn.open(1, 0)
    assert 1 <= drawn._game.secret <= 9


def test_helpers(tmp_path: Path) -> None:
    (tmp_path / "here").touch()
    assert resolve_path("here", tmp_path) == str(tmp_path / "here") and resolve_path("org/model") == "org/model"
    assert tolerant_merge_dicts({"a": {"b": 1}, "c": 1}, {"a": {"d": 2}, "c": {}}) == {"a": {"b": 1, "d": 2}, "c": {}}
    with pytest.raises(ValueError, match="row 1"):
        verify_raw_prompt_format([{"raw_prompt": []}, {"raw_prompt": "text"}])
