"""Which way a metric is better: the default goal of a sweep, and what the page marks as best."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from opentinker.shared.types.metric_directions import MAXIMIZED, MINIMIZED, goal_of

PAGE = Path(__file__).parents[3] / "dashboard/src/lib/compare/direction.ts"


@pytest.mark.parametrize(
    ("goal", "metrics"),
    [
        (
            "maximize",
            "reward/mean val/reward/mean val/reward/low reward/env/gsm8k reward/team/red exact val/exact/high",
        ),
        ("maximize", "success val/pass/8 val/winrate/random val/wins/random accuracy rewards/accuracy val/rating"),
        ("maximize", "val/task/algebra/pass/1 pool/past/winrate/lowest trainer/tokens_per_s rollout/tokens_per_s"),
        ("minimize", "loss val/loss models/m/loss perplexity teacher/kl mismatch/mean drift/mean swap/mismatch failed"),
        ("minimize", "val/failed val/losses val/losses/random step_seconds val/seconds swap/pause_s rollout/env_s"),
        ("minimize", "trainer/wait_share failed/timeout dropped/stale env/tool_ms/search time/verify_s tool_errors"),
        (None, "entropy grad_norm loss/policy loss/kl reward/std reward/seat/white val/rating/error val/draws lr ess"),
        (None, "my_score steps invalid survived_s score/loss tokens env/tool_errors_per_s rollout/swaps_per_s"),
    ],
)
def test_the_name_of_a_metric_says_which_way_it_is_better(goal: str | None, metrics: str) -> None:
    assert {name: goal_of(name) for name in metrics.split()} == dict.fromkeys(metrics.split(), goal)


def test_the_metrics_of_a_policy_are_better_as_those_without_it() -> None:
    names = ["speaker/loss", "speaker/val/winrate/random", "speaker/entropy"]
    assert [goal_of(name, ["speaker"]) for name in names] == ["minimize", "maximize", None]
    assert goal_of("speaker/loss") is None, "an environment's own metric"


@pytest.mark.parametrize(("list_name", "patterns"), [("RISES", MAXIMIZED), ("FALLS", MINIMIZED)])
def test_the_page_has_the_same_table(list_name: str, patterns: tuple[str, ...]) -> None:
    found = re.search(rf"const {list_name} = \[\n(.*?)\n\];", PAGE.read_text(), re.DOTALL)
    assert found is not None
    written = [line.strip().removeprefix("/").removesuffix("/,") for line in found[1].splitlines()]
    assert tuple(one.replace("\\/", "/") for one in written) == patterns
