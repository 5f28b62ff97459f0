"""Tasks with drawn parameters."""

import random
from typing import Any


def create_suite(task_registry: dict[str, Any], n_task_combinations: int, seed: int) -> dict[str, list[Any]]:
    suite: dict[str, list[Any]] = {}
    for name, task in sorted(task_registry.items()):
        suite[name] = []
        for number in range(n_task_combinations):
            random.seed(f"{seed} {name} {number}")
            suite[name].append(task(task.generate_random_params()))
    return suite
