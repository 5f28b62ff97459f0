"""What the models said, put into the group that goes on to the trainer. Pure numpy."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from opentinker.services.reference_forward.needs import REFERENCE, TEACHER
from opentinker.shared.types import Group

FIELDS = {REFERENCE: "ref_logprobs_T", TEACHER: "teacher_logprobs_T"}


def with_results(group: Group, found: dict[str, list[Any]]) -> Group:
    """`found`: by role, one result per trajectory; what nobody asked for stays as it is."""
    trajectories = group.trajectories
    for role, name in FIELDS.items():
        if role in found:
            trajectories = [
                msgspec.structs.replace(t, **{name: _bytes(logprobs_T)})
                for t, logprobs_T in zip(trajectories, found[role], strict=True)
            ]
    return msgspec.structs.replace(group, trajectories=trajectories)


def _bytes(values_T: Any) -> bytes:
    return np.asarray(values_T, dtype="<f4").tobytes()
