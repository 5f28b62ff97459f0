"""The token stream of one seat in an episode, while it grows; the episode makes a trajectory of it."""

from __future__ import annotations

import math

import msgspec
import numpy as np

from opentinker.services.rollout_worker.engines.base import Completion
from opentinker.services.rollout_worker.renderer import images_of
from opentinker.services.rollout_worker.seat_map import LoadedPolicy, Player
from opentinker.services.rollout_worker.transcripts import CHARACTERS, TOKENS, for_judges, shortened
from opentinker.shared.types.core import Ending, Message, Tool
from opentinker.shared.types.trajectories import Picture, Span, Trajectory, Turn


class Stream:
    """One context of one seat: the trajectory's arrays while they grow."""

    def __init__(self, seat: str, name: str, tools: list[Tool], player: Player) -> None:
        self.seat, self.name, self.tools, self.player = seat, name, tools, player
        self.ids: list[int] = []
        self.mask: list[int] = []
        self.logprobs: list[float] = []
        self.spans: list[Span] = []
        self.turns: list[Turn] = []
        self.sampled = 0
        """Tokens that an engine of ours has sampled."""
        self.said: list[Message] = []
        """Both sides' words so far."""
        self.spoken = 0
        """How many of these messages there are up to the policy's last."""
        self.begun: list[int] = []
        """Tokens of a call that the next turn was made to begin with; they are the last of `ids`."""
        self.pictures: list[Picture] = []
        self.images: dict[str, bytes] = {}

    def observe(self, ids: list[int], messages: list[Message], pictures: list[Picture]) -> None:
        """`pictures`: where `ids` show what images."""
        if pictures:
            self.pictures += [picture.moved(len(self.ids)) for picture in pictures]
            self.images |= images_of(messages)
        self.ids += ids
        self.mask += [0] * len(ids)
        self.logprobs += [0.0] * len(ids)
        self.said += messages

    def sample(self, completion: Completion, text: str, untrainable: str = "") -> None:
        """`untrainable`: why the tokens are not trained. A logprob that is not finite, of a player that does not learn,
        becomes 0."""
        start, count = len(self.ids), len(completion.ids)
        self.ids += completion.ids
        self.mask += [0 if untrainable else 1] * count
        self.logprobs += [0.0] * count if untrainable else [p if math.isfinite(p) else 0.0 for p in completion.logprobs]
        if not untrainable:
            self.spans += [Span(start + s.start, start + s.end, s.version) for s in completion.spans]
        if isinstance(self.player, LoadedPolicy):
            self.sampled += len(completion.ids)
        self.said.append(Message(role="assistant", content=text))
        self.spoken = len(self.said)

    def take_rewards(self, other: Stream) -> None:
        """Move what the turns of another stream of the seat have earned to the last turn of this one."""
        earned, components = self.turns[-1].reward, dict(self.turns[-1].components)
        for turn in other.turns:
            earned += turn.reward
            for name, value in turn.components.items():
                components[name] = components.get(name, 0.0) + value
        self.turns[-1] = msgspec.structs.replace(self.turns[-1], reward=earned, components=components)
        other.turns = [msgspec.structs.replace(turn, reward=0.0, components={}) for turn in other.turns]

    def award(self, parts: dict[str, float]) -> None:
        """Named rewards that came after the stream's last turn, and are its own."""
        last = self.turns[-1]
        components = dict(last.components)
        for name, value in parts.items():
            components[name] = components.get(name, 0.0) + value
        self.turns[-1] = msgspec.structs.replace(last, reward=last.reward + sum(parts.values()), components=components)

    def trajectory(self, index: int, attempt: str, ending: Ending, *, is_kept: bool) -> Trajectory:
        """Return the stream as the trajectory of sample `index`. `is_kept`: with its transcript, for people."""
        return Trajectory(
            index=index,
            attempt=attempt,
            seat=self.seat,
            stream=self.name,
            policy=self.player.name,
            ids_T=np.asarray(self.ids, dtype="<i4").tobytes(),
            mask_T=np.asarray(self.mask, dtype="u1").tobytes(),
            logprobs_T=np.asarray(self.logprobs, dtype="<f4").tobytes(),
            spans=merge(self.spans),
            turns=self.turns,
            ending=ending,
            reward=float(sum(turn.reward for turn in self.turns)),
            messages=for_judges(self.player, self.said[: self.spoken]),
            transcript=shortened(self.said, CHARACTERS) if is_kept else None,
            pieces=self.player.renderer.pieces(self.ids[:TOKENS]) if is_kept else None,
            pictures=self.pictures,
            images=self.images,
        )


def merge(spans: list[Span]) -> list[Span]:
    """Join neighbours of the same version, turn boundaries included only where they touch."""
    merged: list[Span] = []
    for span in spans:
        if merged and merged[-1].version == span.version and merged[-1].end == span.start:
            merged[-1] = Span(merged[-1].start, span.end, span.version)
        else:
            merged.append(span)
    return merged
