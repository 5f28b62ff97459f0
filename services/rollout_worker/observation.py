"""Turns a seat's next observation into tokens of its stream."""

from __future__ import annotations

from opentinker.services.rollout_worker.episode_protocol import EpisodeFailed
from opentinker.services.rollout_worker.token_stream import Stream
from opentinker.services.rollout_worker.url_player import UrlPlayer
from opentinker.shared.types.core import Ending, StopReason
from opentinker.shared.types.env_protocol import SeatPrompt
from opentinker.shared.types.errors import BadImage, JobFailed
from opentinker.shared.types.trajectories import Picture


def observation_of(stream: Stream, prompt: SeatPrompt, *, new: bool, begins: bool) -> tuple[list[int], list[Picture]]:
    """Return the tokens that follow in the stream and where they show what images. `new`: the stream begins with them;
    `begins`: the episode does. Raise EpisodeFailed, and JobFailed if no episode of the job would begin."""
    pictures: list[Picture] = []
    if (prompt.prompt_ids, prompt.prompt_text) != (None, None) and any(m.images for m in prompt.messages):
        raise EpisodeFailed(
            Ending.ENV_BAD_REPLY, "images are shown in messages, not together with prompt_ids or prompt_text"
        )
    if isinstance(stream.player, UrlPlayer):
        if prompt.guide is not None:
            raise EpisodeFailed(Ending.ENV_BAD_REPLY, "nothing can be forced of a model behind a URL")
        observed = stream.player.observe(prompt)
    elif prompt.prompt_ids is not None:
        if prompt.prompt_ids[: len(stream.ids)] != stream.ids:
            raise EpisodeFailed(Ending.ENV_BAD_REPLY, "prompt_ids do not begin with the stream's tokens so far")
        observed = prompt.prompt_ids[len(stream.ids) :]
    elif prompt.prompt_text is not None:
        observed = stream.player.renderer.plain(prompt.prompt_text, first=new)
    else:
        observed, pictures = _render(stream, prompt, new=new, begins=begins)
    context = stream.player.context
    if begins and not 0 < len(observed) < context:
        raise EpisodeFailed(Ending.PROMPT, f"the first observation has {len(observed)} tokens; 1 to {context - 1} fit")
    if new and not observed:
        raise EpisodeFailed(Ending.ENV_BAD_REPLY, f"stream {prompt.stream!r} of seat {prompt.seat!r} begins empty")
    return observed, pictures


def _render(stream: Stream, prompt: SeatPrompt, *, new: bool, begins: bool) -> tuple[list[int], list[Picture]]:
    renderer = stream.player.renderer
    try:
        if new:
            ids = renderer.prompt(prompt.messages, prompt.tools)
        else:
            ids = renderer.extend(stream.turns[-1].stop == StopReason.EOS, prompt.messages)
        call = None if prompt.guide is None else prompt.guide.call
        stream.begun = [] if call is None else renderer.begin_call(call)
        ids = [*ids, *stream.begun]
        return ids, renderer.pictures(prompt.messages, ids)
    except BadImage as error:
        raise EpisodeFailed(Ending.ENV_BAD_REPLY, str(error)) from None
    except JobFailed as error:
        if begins:
            raise  # no episode of the job would begin
        raise EpisodeFailed(Ending.ENV_BAD_REPLY, str(error)) from None
