"""Presets and their parts: what a spec resolves to, what is refused and why, and that the learner can run all of it."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from opentinker.services.trainer import checkpoint
from opentinker.services.trainer.batch.micro_batch import micro_batches
from opentinker.services.trainer.learners.base import NonFinite
from opentinker.services.trainer.learners.rl import RlLearner
from opentinker.shared.spec import AlgorithmSpec, parse_spec
from opentinker.shared.spec.algorithm_parts import (
    ADVANTAGES,
    AGGREGATIONS,
    CORRECTIONS,
    LOSSES,
    OPTIONS,
    PRESETS,
    TREE_SAMPLED,
)
from opentinker.shared.types.errors import JobFailed
from opentinker.shared.types.manifest import Manifest, read_manifest
from tests.support.factories import SMALLEST, group_of, refusals, trajectory_of, version
from tests.support.learning import as_trees, digest, random_groups, torch_learner, torch_spec


def resolved(**fields: Any) -> AlgorithmSpec:
    return parse_spec({**SMALLEST, **taught(**fields), "algorithm": fields}).algorithm


def taught(**fields: Any) -> dict[str, Any]:
    """The teacher, where the algorithm needs one."""
    return {"teacher": {"base": "t"}} if fields.get("name") == "distill" or fields.get("distill_coef") else {}


def refused(**fields: Any) -> dict[str, str]:
    return refusals(resolved, **fields)


# --- resolution -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_gives_every_part_and_survives_storage(name: str) -> None:
    spec = parse_spec({**SMALLEST, **taught(name=name), "algorithm": {"name": name}})
    for part in ("advantage", "loss", "correction", "aggregation"):
        assert getattr(spec.algorithm, part) is not None
    stored = spec.model_dump(mode="json")
    assert parse_spec(stored) == spec and parse_spec(stored).model_dump(mode="json") == stored
    assert {key: stored["algorithm"][key] for key in PRESETS[name].values if stored["algorithm"][key] is not None}


def test_default_is_grpo_with_decoupled_clipping_and_a_loglinear_proximal_policy() -> None:
    plain = resolved()
    assert (plain.name, plain.advantage, plain.loss, plain.proximal) == ("grpo", "grpo", "decoupled_ppo", "loglinear")
    assert (plain.clip_low, plain.clip_high, plain.behaviour_cap, plain.kl_coef) == (0.2, 0.2, 5.0, 0.0)
    assert plain.critic_lr is None and plain.dual_clip is None


def test_a_given_field_overrides_the_preset_and_a_replaced_part_brings_its_own_defaults() -> None:
    assert resolved(name="dapo").clip_high == 0.28
    assert resolved(name="dapo", clip_high=0.3).clip_high == 0.3
    assert resolved(name="dapo", loss="ppo").clip_high == 0.2
    assert resolved(name="gspo", loss="ppo").clip_low == 0.2
    assert resolved(name="dapo", drop_zero_variance=False).max_zero_variance_batches is None
    shaped = parse_spec({**SMALLEST, "algorithm": {"name": "dapo"}, "rollout": {"max_tokens": 101}}).algorithm
    assert (shaped.overlong_length, shaped.overlong_buffer) == (101, 21)
    assert resolved(name="reinforce_pp").kl_in is None
    with_kl = resolved(name="reinforce_pp", kl_coef=0.1)
    assert (with_kl.kl_in, with_kl.kl_estimator) == ("reward", "k1")


def test_a_team_is_paid_as_one_unless_told_otherwise() -> None:
    assert resolved(team=RED).team_weight == 1.0 and resolved().team_weight is None
    assert resolved(name="at_grpo", team=RED).team_weight == 0.5 and resolved(name="at_grpo").team_weight is None
    spec = resolved(team={"red": ["r1", "r2"], "blue": ["b*"]}, team_weight=0.3)
    assert spec.seats_named == [("team.red", "r1"), ("team.red", "r2"), ("team.blue", "b*")]
    assert resolved(episode_peers=RED).seats_named == [("episode_peers.red", "a"), ("episode_peers.red", "b")]
    nobody: list[dict[str, list[str]]] = [{}, {"red": []}, {"red": [""]}]
    for team in nobody:
        assert refused(team=team)


RED = {"red": ["a", "b"]}
PRESET_OF = {"gae": "ppo", "none": "distill"}
"""Of choices that do not stand with the default preset."""


def test_every_part_and_option_of_the_tables_is_a_field_that_takes_it() -> None:
    for part, table in (("advantage", ADVANTAGES), ("loss", LOSSES), ("aggregation", AGGREGATIONS)):
        for choice, component in table.items():
            spec = resolved(**{part: choice, **({"name": PRESET_OF[choice]} if choice in PRESET_OF else {})})
            assert all(getattr(spec, option) == default for option, default in component.options.items())
    for correction in CORRECTIONS:
        assert resolved(loss="ppo", proximal="loglinear", correction=correction).correction == correction
    assert set(OPTIONS) < set(AlgorithmSpec.model_fields)


@pytest.mark.parametrize(
    ("fields", "named", "why"),
    [
        ({"critic_lr": 1e-3}, "critic_lr", "'gae'"),
        ({"name": "cispo", "dual_clip": 3.0}, "dual_clip", "belongs to loss = 'ppo'"),
        ({"loss": "ppo", "behaviour_cap": 2.0}, "behaviour_cap", "decoupled_ppo"),
        ({"tis_cap": 2.0}, "tis_cap", "correction = 'none'"),
        ({"name": "ppo", "normalize_std": True}, "normalize_std", "'grpo' | 'per_turn'"),
        ({"advantage": "rloo", "baseline_over": "turns"}, "baseline_over", "'grpo' | 'dr_grpo'"),
        ({"team_weight": 0.5}, "team_weight", "team is not set"),
        ({"team": {"red": ["a"]}}, "team.red", "names one seat alone"),
        ({"team": {"red": ["a", "b", "a"]}}, "team.red", "twice"),
        ({"team": {"red": ["a", "b"], "blue": ["c", "b"]}}, "team.blue", "and in team.red"),
        ({"team": RED, "drop_zero_variance": True}, "drop_zero_variance", "with teams"),
        ({"name": "distill", "team": RED}, "team", "ignores the reward"),
        ({"name": "spiral", "episode_peers": RED}, "episode_peers", "'rloo' | 'maxrl' | 'per_turn'"),
        ({"episode_peers": {"red": ["a"]}}, "episode_peers.red", "names one seat alone"),
        ({"episode_peers": RED, "drop_zero_variance": True}, "drop_zero_variance", "may differ within one"),
        ({"kl_estimator": "k2"}, "kl_estimator", "kl_coef is 0"),
        ({"kl_in": "reward"}, "kl_in", "kl_coef is 0"),
        ({"max_zero_variance_batches": 3}, "max_zero_variance_batches", "drop_zero_variance is false"),
        ({"overlong_length": 9}, "overlong_length", "overlong_shaping is false"),
        ({"group_size": 1}, "group_size", "others of its group"),
        ({"advantage": "per_turn", "group_size": 1}, "group_size", "others of its group"),
        ({"name": "ppo", "drop_zero_variance": True}, "drop_zero_variance", "no group baseline"),
        ({"name": "spiral", "drop_zero_variance": True}, "drop_zero_variance", "no group baseline"),
        ({"baseline_decay": 0.9}, "baseline_decay", "belongs to advantage = 'rae'"),
        ({"loss": "dppo", "proximal": "loglinear"}, "proximal", "does not apply to loss = 'dppo'"),
        ({"proximal": "behaviour"}, "proximal", "plain PPO"),
        ({"correction": "tis"}, "correction", "twice"),
        ({"loss": "ppo", "correction": "icepop"}, "correction", "always 1"),
        (
            {"loss": "cispo", "proximal": "loglinear", "correction": "tis", "max_staleness": 1},
            "correction",
            "up to one version of lag",
        ),
        ({"name": "dapo", "kl_coef": 0.1, "kl_in": "reward"}, "drop_zero_variance", "KL in the reward"),
        ({"advantage": "maxrl", "kl_coef": 0.1, "kl_in": "reward"}, "kl_in", "0 or more"),
        ({"advantage": "maxrl", "overlong_shaping": True}, "overlong_shaping", "0 or more"),
        ({"name": "reinforce_pp", "group_size": 1, "groups_per_batch": 1}, "groups_per_batch", "one trajectory"),
        ({"name": "gspo", "advantage": "per_turn"}, "loss", "one advantage per trajectory"),
        ({"name": "at_grpo", "group_size": 1}, "group_size", "others of its group"),
        ({"name": "at_grpo", "loss": "gspo"}, "loss", "one advantage per trajectory"),
        ({"name": "at_grpo", "kl_coef": 0.1, "kl_in": "reward"}, "kl_in", "before the KL is known"),
        ({"name": "at_grpo", "overlong_shaping": True}, "overlong_shaping", "the tokens of an episode"),
        ({"name": "at_grpo", "drop_zero_variance": True}, "drop_zero_variance", "may differ turn by turn"),
        ({"name": "at_grpo", "episode_peers": RED}, "episode_peers", "does not apply to advantage = 'agent_turn'"),
        ({"correction": "geometric", "geometric_low": 2.0}, "geometric_low", "larger than geometric_high"),
        ({"advantage": "fancy"}, "advantage", "grpo"),
        ({"advantage": "none"}, "distill_coef", "nothing but the teacher"),
        ({"name": "distill", "overlong_shaping": True}, "overlong_shaping", "ignores the reward"),
        ({"name": "distill", "kl_coef": 0.1, "kl_in": "reward"}, "kl_in", "ignores the reward"),
        ({"name": "gspo", "distill_coef": 0.1}, "distill_coef", "one advantage per trajectory"),
        ({"name": "dapo", "distill_coef": 0.1}, "drop_zero_variance", "the teacher judges"),
    ],
)
def test_what_does_not_apply_is_refused_by_name_with_the_reason(fields: dict[str, Any], named: str, why: str) -> None:
    found = refused(**fields)
    assert set(found) == {f"algorithm.{named}"}
    assert why in found[f"algorithm.{named}"]


def test_mistakes_of_values_and_of_choices_come_together() -> None:
    assert set(refused(critic_lr=1.0, clip_low="x", group_size=1)) == {
        "algorithm.critic_lr",
        "algorithm.clip_low",
        "algorithm.group_size",
    }


@pytest.mark.parametrize("name", ["ppo", "reinforce_pp", "spiral", "distill"])
def test_group_size_one_is_fine_without_a_group_baseline(name: str) -> None:
    assert resolved(name=name, group_size=1).group_size == 1


def test_overlong_lengths_must_fit() -> None:
    for lengths in ({"overlong_length": 10_000}, {"overlong_length": 10, "overlong_buffer": 11}):
        assert "overlong" in str(refused(overlong_shaping=True, **lengths))


# --- on the learner -------------------------------------------------------------------------------------------------


def everything_masked(metrics: dict[str, float]) -> bool:
    """Steps on the same groups take the policy ever further from the one that sampled them."""
    return all(metrics[f"masked/{sign}"] == 1.0 for sign in ("positive", "negative"))


def test_every_combination_of_parts_makes_a_step(small: Path) -> None:
    """One learner, its spec exchanged: all losses with all estimators, then corrections, KL, entropy, aggregation."""
    learner = torch_learner(small)
    combinations: list[dict[str, Any]] = [
        {"advantage": advantage, "loss": loss}
        for advantage, loss in itertools.product(ADVANTAGES, LOSSES)
        if advantage not in PRESET_OF and not (advantage in ("per_turn", TREE_SAMPLED) and loss == "gspo")
    ]
    for loss, proximal, correction in itertools.product(
        ("ppo", "cispo", "gspo", "sapo"), ("loglinear", "recomputed"), CORRECTIONS
    ):
        combinations.append({"loss": loss, "proximal": proximal, "correction": correction})
    for place, estimator, aggregation in itertools.product(("loss", "reward"), ("k1", "k2", "k3"), AGGREGATIONS):
        combinations.append({"kl_coef": 0.1, "kl_in": place, "kl_estimator": estimator, "aggregation": aggregation})
    combinations += [{"entropy_coef": 0.1}, {"overlong_shaping": True, "overlong_length": 4, "overlong_buffer": 2}]
    plain = random_groups(0, groups=2, reference=True)
    trees = as_trees(random_groups(0, groups=2, reference=True, two_turns=False))
    for fields in combinations:
        groups = trees if fields.get("advantage") == TREE_SAMPLED else plain
        learner.spec = torch_spec(small, algorithm={"groups_per_batch": 2, **fields})
        metrics = learner.step(groups, version(2))
        assert all(np.isfinite(value) for value in metrics.values()), fields
        assert metrics["grad_norm"] > 0 or everything_masked(metrics), fields
        assert {"masked/positive", "masked/negative", "ess", "ratio/k3", "ratio/outside"} <= set(metrics)


def test_a_batch_s_own_updates_do_not_move_its_sequences_out_of_the_geometric_window(small: Path) -> None:
    groups = random_groups(0, groups=2)
    algorithm: dict[str, Any] = {"groups_per_batch": 2, "updates_per_batch": 2}
    algorithm |= {"loss": "importance_sampling", "correction": "geometric", "geometric_low": 0.0, "geometric_high": 1.0}
    found = [torch_learner(small, algorithm=algorithm, train={"lr": lr}).step(groups, version(0)) for lr in (0.0, 0.05)]
    assert 0 < found[0]["masked/positive"] < 1
    for sign in ("positive", "negative"):
        assert found[0][f"masked/{sign}"] == found[1][f"masked/{sign}"]


def test_entropy_bonus_raises_entropy(small: Path) -> None:
    """With equal rewards there is no other gradient."""
    ids, mask = [7, 8, 9, 1], [0, 1, 1, 1]
    groups = [group_of([trajectory_of(ids, mask, reward=1.0) for _ in range(2)])]
    batch = {"group_size": 2, "groups_per_batch": 1}
    learner = torch_learner(small, algorithm={**batch, "entropy_coef": 1.0}, train={"lr": 1e-4})
    entropy = [learner.step(groups, version(step))["entropy"] for step in range(4)]
    assert entropy == sorted(entropy) and entropy[-1] > entropy[0]
    still = torch_learner(small, algorithm=batch)
    assert still.step(groups, version(0))["grad_norm"] == 0


def test_masked_share_is_told_by_the_sign_of_the_advantage(small: Path) -> None:
    """Behaviour far below pi: ratios are huge, so good tokens are clipped and bad ones are not."""
    made = [trajectory_of([7, 8, 9], [0, 1, 1], reward=r, logprobs=[0.0, -20.0, -20.0]) for r in (1.0, 0.0)]
    learner = torch_learner(small, algorithm={"name": "grpo", "loss": "ppo", "group_size": 2, "groups_per_batch": 1})
    metrics = learner.step([group_of(made)], version(0))
    assert (metrics["masked/positive"], metrics["masked/negative"], metrics["clip_share"]) == (1.0, 0.0, 0.5)
    bounded = torch_learner(small, algorithm={"loss": "ppo", "dual_clip": 3.0, "group_size": 2, "groups_per_batch": 1})
    assert bounded.step([group_of(made)], version(0))["masked/negative"] == 1.0


PPO = {"name": "ppo", "critic_lr": 1e-3}


@pytest.mark.parametrize("parts", [{}, {"model": {"lora": {"rank": 4}}}], ids=["full", "lora"])
def test_a_critic_does_not_travel(small: Path, parts: dict[str, Any]) -> None:
    sent, plain = torch_learner(small, algorithm=PPO, **parts), torch_learner(small, **parts)
    assert {info.name for info in sent.snapshot(version(4)).manifest} == {
        info.name for info in plain.snapshot(version(4)).manifest
    }


def committed(root: Path, learner: RlLearner, step: int) -> Path:
    manifest = Manifest(job="j", epoch=1, step=step, version=version(step), baselines=learner.baselines)
    return checkpoint.commit(root, manifest, learner.save)


def test_running_baselines_resume_to_the_bit(small: Path, tmp_path: Path) -> None:
    spiral = {"name": "spiral"}
    unbroken = torch_learner(small, algorithm=spiral)
    for step in range(4):
        unbroken.step(random_groups(step), version(step))
    first = torch_learner(small, algorithm=spiral)
    for step in range(2):
        first.step(random_groups(step), version(step))
    saved = committed(tmp_path, first, 2)
    assert read_manifest(saved).baselines == first.baselines and first.baselines["copy_digits"][""] != 0.0
    second = torch_learner(small, saved, algorithm=spiral)
    for step in range(2, 4):
        second.step(random_groups(step), version(step))
    assert second.baselines == unbroken.baselines and digest(second) == digest(unbroken)
    another = RlLearner(torch_spec(small, algorithm=spiral))
    another.start(saved, optimizer=True)
    assert another.baselines == {}, "another job has other opponents"


def test_a_refused_step_leaves_the_running_baselines_alone(small: Path) -> None:
    learner = torch_learner(small, algorithm={"name": "spiral"})
    learner.step(random_groups(0), version(0))
    before = learner.baselines
    with torch.no_grad():
        next(iter(learner.parameters.values())).fill_(float("nan"))
    with pytest.raises(NonFinite):
        learner.step(random_groups(1), version(1))
    assert learner.baselines == before


def test_a_critic_learns_the_returns(small: Path) -> None:
    """Reward 1 for one prompt and 0 for another: the critic explains it within a few steps."""
    groups = [
        group_of([trajectory_of([prompt, 9, 1], [0, 1, 1], reward=reward) for _ in range(4)], seq)
        for seq, (prompt, reward) in enumerate([(7, 1.0), (8, 0.0)])
    ]
    learner = torch_learner(small, algorithm={**PPO, "groups_per_batch": 2, "value_clip": 1.0}, train={"lr": 0.0})
    metrics = [learner.step(groups, version(step)) for step in range(15)]
    assert metrics[0]["critic/explained_variance"] == pytest.approx(0.0)
    assert metrics[-1]["critic/explained_variance"] > 0.9
    assert metrics[-1]["loss/value"] < 0.1 * metrics[0]["loss/value"]


def test_values_before_the_batch_have_no_dropout_and_its_gradient_has(small: Path) -> None:
    learner = torch_learner(small, algorithm=PPO, model={"lora": {"rank": 4, "dropout": 0.5}})
    critic = learner.critic
    assert critic is not None
    for step in range(2):  # neither the adapter nor the head is zero any more
        learner.step(random_groups(step), version(step))
    micros = [m for u in micro_batches(random_groups(2), version(2), learner.spec, torch.device("cpu")) for m in u]

    def measured() -> torch.Tensor:
        critic.measure(micros, lambda: None)
        return torch.cat([micro.values_M for micro in micros if micro.values_M is not None])

    before = measured()
    assert before.abs().max() > 0.01 and torch.equal(measured(), before)
    for micro in micros:
        assert micro.values_M is not None
        micro.returns_M = micro.values_M  # without dropout there is nothing to learn
        assert critic.accumulate(micro) > 0
    assert torch.equal(measured(), before)


def test_a_refused_step_leaves_the_critic_alone(small: Path) -> None:
    learner = torch_learner(small, algorithm={**PPO, "updates_per_batch": 2})
    learner.step(random_groups(0), version(0))
    before = digest(learner)
    groups = random_groups(1)
    logprobs = [float("nan") * m for m in groups[3].trajectories[0].mask.tolist()]
    t = groups[3].trajectories[0]
    broken = trajectory_of(t.ids.tolist(), t.mask.tolist(), logprobs=logprobs)
    with pytest.raises(NonFinite, match="refused"):
        learner.step([*groups[:3], group_of([broken, *groups[3].trajectories[1:]], 3)], version(1))
    assert digest(learner) == before


def test_a_checkpoint_without_a_critic_cannot_resume_ppo(small: Path, tmp_path: Path) -> None:
    learner = torch_learner(small)
    learner.step(random_groups(0), version(0))
    learner.save(tmp_path / "c")
    with pytest.raises(JobFailed, match="no usable critic"):
        torch_learner(small, tmp_path / "c", algorithm=PPO)
