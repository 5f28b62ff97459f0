"""One episode, as the field names its states:

    PENDING      open the environment, render its first messages
    GENERATING   the policy samples a turn          (mask 1, behaviour logprobs, weight-version spans)
    INTERACTING  the environment answers            (mask 0)  -> GENERATING, or
    TERMINATED   with a reason: the environment is done, or turns, tokens or context are used up

The environment's last reply says which seats act next, and in which of their contexts; each (seat, stream) is a
separate stream of tokens and becomes a trajectory. Several seats are a round: they sample side by side, and the
environment gets their actions together, in its order. Limits of turns and tokens count per seat, that of context per
stream. A turn cut by its budget still gets its environment step. A failure is data: EpisodeFailed with its Ending.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from contextlib import nullcontext
from typing import NamedTuple

import msgspec
import numpy as np

from opentinker.services.rollout_worker.engines.base import Completion, EngineError, EngineLost, Sampling, Shown
from opentinker.services.rollout_worker.episode_protocol import PAUSES_S, Busy, EpisodeFailed, Sessions, lateness
from opentinker.services.rollout_worker.observation import observation_of
from opentinker.services.rollout_worker.opening_check import Opening, opening_of
from opentinker.services.rollout_worker.seat_map import LoadedPolicy, Player, SeatMap, learner_of
from opentinker.services.rollout_worker.token_stream import Stream
from opentinker.services.rollout_worker.transcripts import is_kept
from opentinker.services.rollout_worker.untrainable import Untrainable, reason_against, structure_of, trained_streams
from opentinker.services.rollout_worker.url_player import UrlFailed, UrlPlayer
from opentinker.shared.asyncio_tools import gather_all
from opentinker.shared.spec import JobSpec
from opentinker.shared.time_limit import TimeLimit
from opentinker.shared.types.core import Ending, Message, StopReason, Ticket
from opentinker.shared.types.env_protocol import OpenSession, Policy, SeatAction, SeatPrompt, SessionReply
from opentinker.shared.types.errors import BadImage
from opentinker.shared.types.trajectories import Picture, Trajectory, Turn


class Sampled(NamedTuple):
    completion: Completion
    seconds: float
    """How long the engine took."""
    words: str | None = None
    """Answer of a model behind a URL; its tokens are for people to look at."""
    untrainable: str = ""
    """As in Turn."""


class Episode:
    """Plays sample `index` of a ticket once. `run` gives a trajectory per seat and stream, or raises EpisodeFailed."""

    def __init__(
        self, spec: JobSpec, ticket: Ticket, index: int, seats: SeatMap, sessions: Sessions, busy: Busy = nullcontext
    ) -> None:
        """`busy`: entered while the episode waits for a lane."""
        self._busy = busy
        self.spec, self.ticket, self.index, self.sessions = spec, ticket, index, sessions
        self.seats = seats.turned(ticket.row, index)
        self.is_trained = True
        """False: of an evaluation, where turns that could not be trained count like the others."""
        self.attempt = uuid.uuid4().hex[:12]
        self.is_kept = is_kept(spec, ticket.seq, index)
        self.session = f"{ticket.job}-{ticket.seq}-{index}-{self.attempt}"
        self.streams: dict[tuple[str, str], Stream] = {}
        self.latest: dict[str, Stream] = {}
        """Where each seat acted last."""
        self.owed: dict[str, dict[str, float]] = {}
        """Rewards of seats that have not acted yet."""
        self.turn = 0
        self.openings: list[Opening] = []
        """Of the seats that act first."""
        self.open_s = 0.0
        """Until the environment showed its first observation."""
        self.metrics: dict[str, float] = {}
        self.wants_tokens = False
        self.row: int | None = None
        self.state = "PENDING"
        self.done = self.truncated = False

    @property
    def sampled(self) -> int:
        return sum(stream.sampled for stream in self.streams.values())

    @property
    def rewards(self) -> dict[str, float]:
        """Return the rewards of all seats so far: of models, also of those without a turn, and of bots."""
        found = {seat: sum(parts.values()) for seat, parts in self.owed.items()}
        for stream in self.streams.values():
            found[stream.seat] = found.get(stream.seat, 0.0) + sum(turn.reward for turn in stream.turns)
        return found

    @property
    def said(self) -> list[Message]:
        """Return all messages, stream after stream."""
        return [message for stream in self.streams.values() for message in stream.said]

    async def run(self) -> list[Trajectory]:
        started = time.monotonic()
        worker = None
        engine = self.seats.first.engine  # the one that may sleep
        limit = TimeLimit(self.spec.rollout.episode_timeout_s, lambda: engine.asleep_s)
        try:
            async with limit.running():
                reply = self._good(await self._open(limit))
                self.open_s = time.monotonic() - started
                worker = reply.worker
                self.wants_tokens, self.row = reply.wants_tokens, reply.row
                ending = await self._play(worker, reply)
        except TimeoutError:
            late = Ending.TIMEOUT if self.state == "GENERATING" else Ending.ENV_TIMEOUT
            raise EpisodeFailed(late, lateness(limit, self.state, worker, self.turn)) from None
        except EngineLost:
            raise  # not this episode's failure: the process ends and the ticket goes elsewhere
        except EngineError as error:
            raise EpisodeFailed(Ending.ENGINE_ERROR, str(error)) from None
        except UrlFailed as error:
            raise EpisodeFailed(Ending.URL_FAILED, str(error)) from None
        finally:
            self.state = "TERMINATED"
            if worker is not None and not self._is_closed:
                await self.sessions.close(worker=worker, session=self.session)
        seconds = time.monotonic() - started
        acted = [stream for stream in self.streams.values() if stream.turns]
        try:
            trained = trained_streams(acted) if self.is_trained else acted
        except Untrainable as error:
            raise EpisodeFailed(Ending.UNTRAINABLE, str(error)) from None
        return [self._trajectory(stream, ending, seconds) for stream in trained]

    @property
    def _is_closed(self) -> bool:
        """Return whether the env worker has closed the session, as it does with an episode that is done."""
        return self.done

    async def _open(self, limit: TimeLimit) -> SessionReply:
        request = OpenSession(
            job=self.ticket.job,
            session=self.session,
            environment=self.spec.environment.name,
            isolation=self.spec.environment.isolation or "process",
            config=self.spec.environment.config,
            row=self.ticket.row,
            seed=self.ticket.seed,
            deadline_s=self.spec.rollout.episode_timeout_s,
            pauses_s=PAUSES_S if self.seats.first.engine.sleeps else 0.0,
            policy=Policy(model=self.seats.first.spec.model.base, context_length=self.seats.context),
            bots=self.seats.bots,
            tools=[tool.model_dump() for tool in self.spec.environment.tools],
            tool_turns=self.spec.environment.tool_turns,
        )
        with self._busy("env"):
            return await self.sessions.open(request, limit.paused)

    @staticmethod
    def _good(reply: SessionReply) -> SessionReply:
        if reply.failure is not None:
            raise EpisodeFailed(reply.failure, reply.error)
        return reply

    async def _play(self, worker: str, reply: SessionReply) -> Ending:
        """Turns until an ending that is ordinary data."""
        while True:
            await self._look(reply)
            streams = self._observe(reply)
            if streams is None:
                self.truncated = True
                return Ending.CONTEXT
            self.openings = self.openings or [opening_of(stream) for stream in streams]
            reply = await self._take_turn(worker, streams, reply)
            self.metrics = reply.metrics
            self.done, self.truncated = reply.done, reply.truncated
            ending = self._ending(reply)
            if ending is not None:
                is_left = self.truncated and any(prompt.messages for prompt in reply.prompts)
                if is_left and self._has_critic(reply):
                    self._observe(reply)  # the state whose value counts: critics know those before a turn
                return ending

    def _ending(self, reply: SessionReply) -> Ending | None:
        if reply.done:
            return Ending.ENV_DONE
        if any(self._turns(prompt.seat) >= self.spec.rollout.max_turns for prompt in reply.prompts):
            self.truncated = True
            return Ending.MAX_TURNS
        if any(self._sampled(prompt.seat) >= self.spec.rollout.max_tokens for prompt in reply.prompts):
            self.truncated = True
            return Ending.MAX_TOKENS
        return None

    async def _take_turn(self, worker: str, streams: list[Stream], asked: SessionReply) -> SessionReply:
        """The turn of every seat that is asked, side by side, and the environment's answer to all of them."""
        self.state = "GENERATING"
        with self._busy("generation"):
            sampled = await gather_all(
                [
                    self._sample(stream, prompt, place)
                    for place, (stream, prompt) in enumerate(zip(streams, asked.prompts, strict=True))
                ]
            )
        actions = [self._act(stream, turn) for stream, turn in zip(streams, sampled, strict=True)]
        self.state = "INTERACTING"
        generated = time.monotonic()
        with self._busy("env"):
            reply = self._good(await self.sessions.step(worker, asked.step(self.session, self.turn, actions)))
        env_s = time.monotonic() - generated
        self._check_rewards(asked, reply)
        for stream, turn in zip(streams, sampled, strict=True):
            self._record(stream, turn, reply, env_s)
        self._pay_others(reply)
        self.turn += 1
        return reply

    @staticmethod
    def _check_rewards(asked: SessionReply, reply: SessionReply) -> None:
        if asked.round and (reply.reward or reply.components):
            raise EpisodeFailed(Ending.ENV_BAD_REPLY, "rewards of a round must name their seats")

    def _pay_others(self, reply: SessionReply) -> None:
        """Add what seats that did not act alone have earned to their last turns, or owe it to them."""
        for seat, parts in reply.rewards.items():
            if seat in self.latest:
                self.latest[seat].award(parts)
            else:
                owed = self.owed.setdefault(seat, {})
                owed.update({name: owed.get(name, 0.0) + value for name, value in parts.items()})

    async def _sample(self, stream: Stream, asked: SeatPrompt, place: int, candidate: int = 0) -> Sampled:
        began = time.monotonic()
        if isinstance(stream.player, UrlPlayer):
            words, completion = await stream.player.ask(stream.said, asked, self.spec.rollout.stop)
            return Sampled(completion, time.monotonic() - began, words)
        completion = await self._generate(stream, stream.player, asked, place, candidate)
        is_trained = self.is_trained and learner_of(stream.player) is not None
        return Sampled(completion, time.monotonic() - began, untrainable=reason_against(completion, asked) * is_trained)

    def _act(self, stream: Stream, sampled: Sampled) -> SeatAction:
        """Append the output to the stream and return what the environment gets of it."""
        action = self._action(stream, sampled)
        stream.sample(sampled.completion, action.text, sampled.untrainable)
        return action

    def _action(self, stream: Stream, sampled: Sampled) -> SeatAction:
        """Return what the environment gets of an output that follows the stream."""
        completion, renderer = sampled.completion, stream.player.renderer
        written = [*stream.begun, *completion.ids]
        text = renderer.text(written) if sampled.words is None else sampled.words
        has_tokens = self.wants_tokens and sampled.words is None
        said = renderer.said(written, stream.tools, stop=completion.stop, turn=self.turn)
        return SeatAction(
            seat=stream.seat,
            text=text,
            stop=completion.stop,
            tool_calls=said.calls,
            problem=said.problem,
            words=said.words,
            ids=completion.ids if has_tokens else [],
            logprobs=completion.logprobs if has_tokens else [],
            prompt_tokens=len(stream.ids) if has_tokens else 0,
        )

    def _record(self, stream: Stream, sampled: Sampled, reply: SessionReply, env_s: float) -> None:
        """Append the turn, with the reward of the seat that acted alone and what the seat was owed."""
        stream.turns.append(
            Turn(
                start=len(stream.ids) - (0 if sampled.untrainable else len(sampled.completion.ids)),
                end=len(stream.ids),
                stop=sampled.completion.stop,
                reward=reply.reward,
                number=self.turn,
                message=len(stream.said) - 1,
                components=reply.components,
                untrainable=sampled.untrainable,
                generate_s=sampled.seconds,
                env_s=env_s,
            )
        )
        self.latest[stream.seat] = stream
        if stream.seat in self.owed:
            stream.award(self.owed.pop(stream.seat))

    async def _look(self, reply: SessionReply) -> None:
        """Preprocess the images in a thread; rendering finds them in the cache."""
        for prompt in reply.prompts:
            player = self._player_of(prompt.seat)
            if isinstance(player, LoadedPolicy) and any(message.images for message in prompt.messages):
                try:
                    await asyncio.to_thread(player.renderer.look, prompt.messages)
                except BadImage as error:
                    raise EpisodeFailed(Ending.ENV_BAD_REPLY, str(error)) from None

    def _observe(self, reply: SessionReply) -> list[Stream] | None:
        """Add their observations to the streams of the seats that act next, and return these streams. Return None, and
        add nothing, if an observation does not fit into the context of one."""
        seen = [(prompt, *self._seen(prompt)) for prompt in reply.prompts]
        if any(len(stream.ids) + len(ids) >= stream.player.context for _, stream, ids, _ in seen):
            return None
        for prompt, stream, ids, pictures in seen:
            stream.observe(ids, prompt.messages, pictures)
        return [stream for _, stream, _, _ in seen]

    def _seen(self, prompt: SeatPrompt) -> tuple[Stream, list[int], list[Picture]]:
        """Return the stream of a seat, the tokens that it sees next and where they show what images."""
        stream = self.streams.get((prompt.seat, prompt.stream))
        new = stream is None
        if stream is None:
            player = self._player_of(prompt.seat)
            stream = Stream(prompt.seat, prompt.stream, prompt.tools, player)
            self.streams[prompt.seat, prompt.stream] = stream
        elif prompt.tools and prompt.tools != stream.tools:
            raise EpisodeFailed(Ending.ENV_BAD_REPLY, "the tools of a stream cannot change after its first turn")
        ids, pictures = observation_of(stream, prompt, new=new, begins=self.turn == 0)
        return stream, ids, pictures

    def _has_critic(self, reply: SessionReply) -> bool:
        players = [self._player_of(prompt.seat) for prompt in reply.prompts]
        return any(isinstance(one, LoadedPolicy) and one.spec.algorithm.advantage == "gae" for one in players)

    def _player_of(self, seat: str) -> Player:
        player = self.seats.at(seat)
        if player is None:
            raise EpisodeFailed(Ending.ENV_BAD_REPLY, f"seat {seat!r} acts next, and [seats] names no player for it")
        return player

    def _turns(self, seat: str) -> int:
        return sum(len(stream.turns) for stream in self.streams.values() if stream.seat == seat)

    def _sampled(self, seat: str) -> int:
        return sum(stream.sampled for stream in self.streams.values() if stream.seat == seat)

    async def _generate(
        self, stream: Stream, policy: LoadedPolicy, asked: SeatPrompt, place: int, candidate: int
    ) -> Completion:
        """`policy`: that of the stream; `place`: of the seat in the round; 0 where one seat acts. `candidate`: which
        one of the turn; 0 outside of trees."""
        rollout = self.spec.rollout
        budget = rollout.max_tokens - self._sampled(stream.seat)
        for limit in (rollout.max_tokens_per_turn, asked.max_tokens):
            if limit is not None:
                budget = min(budget, limit)
        room = policy.context - len(stream.ids)
        shown: list[Shown] = []
        if stream.pictures:  # evicted entries are computed again
            shown = await asyncio.to_thread(policy.renderer.shown, list(stream.pictures), dict(stream.images))
        completion = await policy.engine.generate(
            f"{self.session}-{self.turn}" + (f"-{place}" if place else "") + (f"c{candidate}" if candidate else ""),
            stream.ids,
            Sampling(
                temperature=rollout.temperature,
                top_p=rollout.top_p,
                top_k=rollout.top_k,
                max_tokens=min(budget, room),
                stop=[*rollout.stop, *asked.stop],
                structure=structure_of(asked, policy.renderer, stream),
                seed=None
                if rollout.seed is None
                else turn_seed(self.ticket.seed, self.index + candidate, self.turn, place),
            ),
            shown=shown,
        )
        if completion.stop == StopReason.LENGTH and room < budget:
            return msgspec.structs.replace(completion, stop=StopReason.CONTEXT)
        return completion

    def _trajectory(self, stream: Stream, ending: Ending, seconds: float) -> Trajectory:
        return msgspec.structs.replace(
            stream.trajectory(self.index, self.attempt, ending, is_kept=self.is_kept),
            row=self.row,
            truncated=self.truncated,
            metrics=self.metrics,
            bots=self.seats.bot_rewards(self.rewards),
            idle=self.seats.idle_seats(self.latest, {seat: sum(parts.values()) for seat, parts in self.owed.items()}),
            seconds=seconds,
        )


def seconds_of(episode: Episode, trajectories: list[Trajectory]) -> dict[str, float]:
    """Return where the time of an episode went, see `rollout/open_s` and so on in docs/metrics.md."""
    turns = [turn for trajectory in trajectories for turn in trajectory.turns]
    env_s = sum(turn.env_s for turn in turns)

    def told(phase: str, whole: float) -> float:
        return min(max(0.0, episode.metrics.get(f"time/{phase}_s", 0.0)), whole)

    return {
        "open_s": episode.open_s,
        "start_s": told("start", episode.open_s),
        "generate_s": sum(turn.generate_s for turn in turns),
        "env_s": env_s,
        "verify_s": told("verify", env_s),
        "tool_s": sum(message.call_s or 0.0 for message in episode.said),
    }


def turn_seed(group_seed: int, index: int, turn: int, place: int = 0) -> int:
    """A different, reproducible sampling seed for each turn of each sample of a group, and each place of a round."""
    return int(np.random.SeedSequence([group_seed & 0xFFFFFFFF, index, turn, place]).generate_state(1)[0])
