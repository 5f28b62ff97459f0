"""Transcripts of episodes, for people to read and for reward models, never for the trainer. A group that is too large
for a message is sent without them."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from opentinker.services.rollout_worker.renderer import digest_of
from opentinker.services.rollout_worker.seat_map import LoadedPolicy, Player
from opentinker.shared.messaging.bus import TooLarge
from opentinker.shared.spec import JobSpec
from opentinker.shared.types.core import Image, Message, Text
from opentinker.shared.types.errors import JobFailed
from opentinker.shared.types.trajectories import Group, Trajectory

CHARACTERS = 20_000
"""Characters of all messages of a training episode in one context; they travel with its group."""
NAME = 64
"""Characters of the name of a tool: a policy may call one that does not exist."""
TOKENS = 2048
"""Number of tokens, from the first, that are kept individually for a training episode in one context."""


def together(trajectories: Sequence[Trajectory]) -> tuple[list[Trajectory], dict[str, bytes]]:
    """Return the trajectories without their images, and these, each of them once."""
    images = {digest: data for trajectory in trajectories for digest, data in trajectory.images.items()}
    return [msgspec.structs.replace(t, images={}) if t.images else t for t in trajectories], images


def is_kept(spec: JobSpec, group: int, sample: int) -> bool:
    """Return whether to keep an episode: about `rollout.transcripts` of a batch, spread over its groups, regardless of
    outcome."""
    wanted, groups = spec.rollout.transcripts, spec.algorithm.groups_per_batch
    if not wanted:
        return False
    chosen = min(wanted, groups)
    return group % (groups // chosen) == 0 and sample < -(-wanted // chosen)


def for_judges(player: Player, said: Sequence[Message]) -> list[Message] | None:
    """Return a conversation without its images, for reward models, which read; None if they do not judge the player."""
    if not isinstance(player, LoadedPolicy) or not player.spec.reward_models:
        return None
    return [msgspec.structs.replace(one, content=one.text) if one.images else one for one in said]


def _as_text(message: Message, text: str) -> Message:
    """Return it with references to its images alone."""
    images = [Image(b"", image.media_type, digest_of(image)) for image in message.images]
    content: str | list[Text | Image] = [Text(text), *images] if images else text
    return Message(role=message.role, content=content, name=message.name[:NAME], call_s=message.call_s)


def shortened(messages: Sequence[Message], characters: int) -> list[Message]:
    """Return the beginning of the conversation as text, with a note about what is left out. Images are named in the
    text and referred to by their digests."""
    left = characters
    kept: list[Message] = []
    for at, message in enumerate(messages):
        text = message.text + "".join(f"[image, {len(image.data)} bytes]" for image in message.images)
        if len(text) > left:
            more = len(text) - left + sum(len(later.text) for later in messages[at + 1 :])
            content = f"{text[:left]} ... ({more} more characters are left out)"
            return [*kept, _as_text(message, content)]
        kept.append(_as_text(message, text))
        left -= len(text)
    return kept


def has_transcripts(group: Group) -> bool:
    return any(trajectory.transcript for trajectory in group.trajectories)


def without_transcripts(group: Group) -> Group:
    bare = [msgspec.structs.replace(t, transcript=None, pieces=None) for t in group.trajectories]
    return msgspec.structs.replace(group, trajectories=bare)


def too_large(group: Group, error: TooLarge, spec: JobSpec, context: int) -> JobFailed:
    """Return the failure of a job whose groups fit into no message, with the settings that decide their size."""
    longest = max(len(trajectory.mask_T) for trajectory in group.trajectories)
    shown = sum(map(len, group.images.values()))
    pictures = f" and its images {shown} bytes" if shown else ""
    turns = f", rollout.max_turns is {spec.rollout.max_turns}" if group.is_tree else ""
    return JobFailed(
        f"a group must fit into one message, and group {group.seq} with {error.size} bytes does not (limit "
        f"{error.limit}, NATS max_payload): algorithm.group_size is {group.samples}, its longest "
        f"episode has {longest} tokens{pictures}, rollout.context_length is {context}{turns}. "
        "Lower one of them, or raise max_payload in the server's configuration"
    )
