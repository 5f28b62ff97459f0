"""What tree sampling cannot be combined with is refused at submission, with every mistake at once."""

from __future__ import annotations

from typing import Any

from opentinker.shared.spec.tree_sampling import is_tree
from tests.support.factories import make_spec, refusals

TREE = {"name": "at_grpo", "group_size": 4, "groups_per_batch": 2}
TOOL = {"type": "python"}


def refused(**changes: Any) -> dict[str, str]:
    return refusals(make_spec, **{"algorithm": TREE, **changes})


def test_a_job_samples_trees_if_its_algorithm_does() -> None:
    assert is_tree(make_spec(algorithm=TREE)) and not is_tree(make_spec())
    assert is_tree(make_spec(algorithm={"advantage": "agent_turn"}, train={"learner": "torch", "steps": 1}))


def test_every_mistake_is_named() -> None:
    found = refused(
        environment={"name": "served:mine"},
        rollout={"engine": "toy", "oversample": 1},
        reward_models=[{"base": "judge"}],
        train={"learner": "torch", "steps": 1},
    )
    assert found.keys() == {"environment.name", "rollout.oversample", "reward_models"}
    assert "outside of the env workers" in found["environment.name"]
    assert "environment.name" in refused(environment={"name": "https://example.org/env"})


def test_tools_of_the_job_cannot_be_copied() -> None:
    tools = {"name": "copy_digits", "tools": [TOOL]}
    assert "cannot be copied" in refused(environment=tools)["environment.tools"]


def test_the_number_of_candidates_is_bounded() -> None:
    assert "at most 128" in refused(algorithm={**TREE, "group_size": 129})["algorithm.group_size"]
    assert make_spec(algorithm={**TREE, "group_size": 128}, rollout__max_turns=128)
    too_many = refused(algorithm={**TREE, "group_size": 128}, rollout__max_turns=129)
    assert "16,384 candidates in an episode" in too_many["rollout.max_turns"]


def policies(**own: Any) -> dict[str, Any]:
    return {
        "policies": {"a": {}, "b": own},
        "seats": {"first": "a", "second": "b"},
        "environment": {"name": "tictactoe"},
    }


def test_all_policies_of_a_job_sample_trees_or_none() -> None:
    torch = {"train": {"learner": "torch", "steps": 1}}
    assert is_tree(make_spec(algorithm=TREE, **policies(), **torch))
    found = refused(**policies(algorithm={"name": "grpo"}), **torch)
    assert found.keys() == {"policies.b.algorithm.advantage"}
    assert "all policies share them" in found["policies.b.algorithm.advantage"]


def test_players_do_not_rotate_within_one_episode() -> None:
    found = refused(**policies(), match={"rotate": True}, train={"learner": "torch", "steps": 1})
    assert "a group is one episode" in found["match.rotate"]
