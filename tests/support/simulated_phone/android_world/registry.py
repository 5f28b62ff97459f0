"""The tasks by family."""

from typing import Any

from android_world import tasks


class TaskRegistry:
    ANDROID_WORLD_FAMILY = "android_world"

    def get_registry(self, family: str) -> dict[str, Any]:
        if family != self.ANDROID_WORLD_FAMILY:
            raise ValueError(f"there is no family {family}")
        return {task.__name__: task for task in tasks.ALL}
