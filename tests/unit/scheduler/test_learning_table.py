"""The script that shows that every preset learns: its sampler is honest, its runs learn, its verdict can be bad."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from examples import learning_table
from examples.learning_table import MODEL, PRESETS, TASKS, Curve, Run, kept, learn, settings_of, spec_of, verdict
from examples.local_rollouts import CONTEXT, Rollouts
from examples.models.make_tiny import make_tiny
from opentinker.services.trainer.learners.rl import RlLearner
from opentinker.shared.types.core import WeightVersion
from tests.support.learning import loaded, plain_logprobs


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("learning") / "model", **MODEL, context_length=CONTEXT)


@pytest.mark.parametrize("task", TASKS)
async def test_what_it_samples_is_a_valid_group_with_the_logprobs_of_the_weights(model: Path, task: str) -> None:
    spec = spec_of(Run("grpo", task, 0, 0), model)
    learner = loaded(RlLearner(spec))
    rollouts = Rollouts(spec, learner, 0)
    rollouts.engine.version = WeightVersion(1, 7)
    sampled = await rollouts.batch()
    assert sampled is not None and not rollouts.sessions.players
    learner.causal.set_attn_implementation("sdpa")
    for group in sampled.groups:
        group.check()
        assert {t.ids[: t.turns[0].start].tobytes() for t in group.trajectories} == {
            group.trajectories[0].ids[: group.trajectories[0].turns[0].start].tobytes()
        }
        for t in group.trajectories[:2]:
            assert {span.version for span in t.spans} == {WeightVersion(1, 7)}
            plain = [0.0, *plain_logprobs(learner.causal, t.ids.tolist()).tolist()]
            honest = [x * m for x, m in zip(plain, t.mask.tolist(), strict=True)]
            assert t.logprobs.tolist() == pytest.approx(honest, abs=1e-5)
    turns = {len(t.turns) for group in sampled.groups for t in group.trajectories}
    assert max(turns) == (2 if task == "two_turns" else 1)


@pytest.mark.parametrize(("preset", "lag"), [("grpo", 0), ("ppo", 2)])
async def test_a_bandit_is_learnt_on_policy_and_behind(model: Path, preset: str, lag: int) -> None:
    curve = await learn(Run(preset, "bandit", lag, 0, 45), model)
    assert sum(curve.exact[:5]) / 5 < 0.1
    assert curve.final > 0.3


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_has_a_valid_job_for_every_task(model: Path, preset: str) -> None:
    for task in TASKS:
        assert spec_of(Run(preset, task, 2, 1), model).algorithm.name == preset


def curve(*exact: float) -> Curve:
    return Curve([x for x in exact for _ in range(10)], [float(i) for i in range(10 * len(exact))])


def test_a_level_is_reached_by_the_mean_of_ten_steps() -> None:
    assert curve(0.0, 1.0).first(0.5) == (15, 14.0)
    assert curve(0.0, 0.4).first(0.5) is None
    assert curve(0.0, 0.4).final == pytest.approx(0.4)


def test_the_verdict_names_who_does_not_learn_and_who_is_worse_behind(capsys: pytest.CaptureFixture[str]) -> None:
    good = {Run("grpo", "bandit", lag, seed): curve(0.1, 0.9 + 0.01 * seed) for lag in (0, 2) for seed in range(3)}
    assert verdict(good)
    assert not verdict(good | {Run("grpo", "bandit", 0, 1): curve(0.1, 0.2)})
    assert "NOT LEARNT: bandit by grpo at lag 0" in capsys.readouterr().out
    slow = {Run("grpo", "bandit", 2, seed): curve(0.1, 0.5 + 0.01 * seed) for seed in range(3)}
    assert not verdict(good | slow)
    assert "WORSE BEHIND: bandit by grpo" in capsys.readouterr().out


def test_finished_runs_are_read_back(tmp_path: Path) -> None:
    path = tmp_path / "results"
    assert kept(None) == kept(path) == {}
    run = Run("grpo", "bandit", 2, 1)
    path.write_bytes(msgspec.json.encode((settings_of(run), run, curve(0.5))) + b"\n")
    assert kept(path) == {run: curve(0.5)}
    path.write_bytes(msgspec.json.encode(("other settings", run, curve(0.5))) + b"\n")
    assert kept(path) == {}
    path.write_bytes(msgspec.json.encode((settings_of(run), run._replace(steps=20), curve(0.5))) + b"\n")
    assert kept(path) == {}, "runs of other lengths are other runs"


def test_a_run_that_ended_before_its_steps_is_marked() -> None:
    whole, cut = (learning_table.cells("bandit", "grpo", 2, [curve(0.5, 0.9)], length) for length in (20, 30))
    assert learning_table.row(whole).count("|") == 9
    assert (whole[-1], cut[-1]) == ("0.90 +- 0.00", "0.90 +- 0.00*")
