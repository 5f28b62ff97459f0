"""A game server of the published make: any language can serve these routes, and any client of ours can play on it.

POST /reset {instance_id, job_id, **kwargs} -> observation, system_prompt, game_state
POST /step {instance_id, job_id, action}    -> observation, reward, done, info
POST /finalize {instance_id, job_id}        GET /health, /stats, /stats/step, /stats/cumulative, /stats/jobs
POST /stats/reset, /stats/reset_all         DELETE /stats/job/{id}
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import inspect
import logging
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar, get_args, get_type_hints
from weakref import WeakValueDictionary

import orjson
from aiohttp import web

from opentinker.environment.game_stats import BaseGameStats, GameStats, JobStats
from opentinker.envs.game import AbstractGame, check_arguments, opening_of, run_in_turn
from opentinker.shared.runtime.parent_death import hold_command

__all__ = ["BaseGameStats", "GameStats", "create_game_app", "create_game_server", "run_game_server", "serve"]

T = TypeVar("T")
Key = tuple[str, str]
"""Job and instance."""
IDLE_S = 3600.0
"""A game that was idle for this time is forgotten."""
FORGOTTEN = 4
"""Idle games forgotten with each new game, at most."""
OPTION_TYPES = (int, float, str)
SHARD_POLL_S = 0.5
_log = logging.getLogger("opentinker")


class _Played(NamedTuple):
    game: AbstractGame
    used_at: float
    """Monotonic."""


class GameRoutes:
    """Games are played in threads, one call at a time: they share the process's random numbers. Calls of games that
    share nothing (`concurrent`) run concurrently. With `most_games` at once, more are refused until some are done."""

    def __init__(
        self,
        game_class: type[AbstractGame],
        stats_class: type[BaseGameStats] | None,
        arguments: dict[str, Any],
        most_games: int = 100_000,
    ) -> None:
        check_arguments(game_class, arguments)
        self.game_class, self.arguments, self.most_games = game_class, arguments, most_games
        self.games: dict[Key, _Played] = {}
        """The one that was played last is the last."""
        self.stats = JobStats(stats_class or BaseGameStats)
        self.turn = asyncio.Lock()
        self.turns: WeakValueDictionary[Key, asyncio.Lock] = WeakValueDictionary()
        """Locks of games with calls."""
        self.beginning = 0
        """Games that are not among `games` yet."""

    async def reset(self, body: dict[str, Any]) -> dict[str, Any]:
        instance, job = _ids(body)
        kwargs = {name: value for name, value in body.items() if name not in ("instance_id", "job_id")}
        async with self._turn_of((job, instance)):
            known = self._find((job, instance))
            if known is None:
                await self._make_room()
            self.beginning += known is None
            try:
                game, answer = await self._call(partial(self._begin, known, kwargs))
            finally:
                self.beginning -= known is None
            self._keep((job, instance), game)
            self.stats.of(job).register_game_start(instance, job)
        return answer

    def _turn_of(self, key: Key) -> asyncio.Lock:
        """A game, one that begins too, is asked one thing at a time."""
        return self.turns.setdefault(key, asyncio.Lock())

    def _begin(self, known: AbstractGame | None, kwargs: dict[str, Any]) -> tuple[AbstractGame, dict[str, Any]]:
        game = self.game_class(**self.arguments) if known is None else known
        system, first = opening_of(game, kwargs)
        return game, {"observation": first, "system_prompt": system, "game_state": game.get_state()}

    async def _make_room(self) -> None:
        """Make room for one more game. Raises HTTPServiceUnavailable."""
        for _ in range(FORGOTTEN):
            oldest = next(iter(self.games), None)
            if oldest is None or time.monotonic() - self.games[oldest].used_at < IDLE_S:
                break
            await self._drop(*oldest)
        if len(self.games) + self.beginning >= self.most_games:
            raise web.HTTPServiceUnavailable(text=f"{self.most_games} games are being played")

    async def step(self, body: dict[str, Any]) -> dict[str, Any]:
        instance, job = _ids(body)
        async with self._turn_of((job, instance)):
            game = self._find((job, instance))
            if game is None:
                raise web.HTTPNotFound(text=f"no game {instance} of job {job}: reset it first")
            result = await self._call(partial(game.step, str(body.get("action", ""))))
            stats = self.stats.of(job)
            stats.record_step(instance, result.reward)
            stats.record_game_result(result.info, result.reward, result.done, instance, job)
            if result.done:
                await self._drop(job, instance)
        return {
            "observation": result.observation,
            "reward": result.reward,
            "done": result.done,
            "info": result.info,
        }

    async def finalize(self, body: dict[str, Any]) -> dict[str, Any]:
        instance, job = _ids(body)
        async with self._turn_of((job, instance)):
            await self._drop(job, instance)
        return {"status": "ok"}

    def _find(self, key: Key) -> AbstractGame | None:
        """Find a game and note that it was played now."""
        if (played := self.games.get(key)) is None:
            return None
        self._keep(key, played.game)
        return played.game

    def _keep(self, key: Key, game: AbstractGame) -> None:
        self.games.pop(key, None)
        self.games[key] = _Played(game, time.monotonic())

    async def _drop(self, job: str, instance: str) -> None:
        played = self.games.pop((job, instance), None)
        if played is None:
            return
        self.stats.of(job).register_game_end(instance, job)
        try:
            await self._call(played.game.close)
        except Exception:  # noqa: BLE001 - the game's own code, and no concern of the client
            _log.exception("a game could not be closed")

    async def _call(self, function: Callable[[], T]) -> T:
        return await run_in_turn(self.game_class, function, self.turn)

    def statistics(self, job: str) -> dict[str, float]:
        stats = self.stats.told(job)
        return stats.get_cumulative_stats() | stats.get_step_stats()


def _ids(body: dict[str, Any]) -> tuple[str, str]:
    instance = body.get("instance_id")
    if not isinstance(instance, str) or not instance:
        raise web.HTTPUnprocessableEntity(text="instance_id must be a text")
    return instance, str(body.get("job_id") or "default")


def create_game_app(
    game_class: type[AbstractGame], stats_class: type[BaseGameStats] | None = None, **game_kwargs: Any
) -> web.Application:
    """The routes as an aiohttp application. Raises ValueError for arguments that the game does not take."""
    return app_of(GameRoutes(game_class, stats_class, game_kwargs))


def app_of(routes: GameRoutes) -> web.Application:
    stats = routes.stats

    def play(handler: Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]) -> Any:
        async def answer(request: web.Request) -> web.Response:
            try:
                body = orjson.loads(await request.read() or b"{}")
            except orjson.JSONDecodeError as error:
                raise web.HTTPBadRequest(text=f"the body is not JSON: {error}") from None
            if not isinstance(body, dict):
                raise web.HTTPUnprocessableEntity(text="the body must be an object")
            return _json(await handler(body))

        return answer

    def tell(function: Callable[[str], Any]) -> Any:
        async def answer(request: web.Request) -> web.Response:
            return _json(function(request.match_info.get("job") or request.query.get("job_id", "default")))

        return answer

    async def health(_: web.Request) -> web.Response:
        return _json({"status": "healthy"})

    async def jobs(_: web.Request) -> web.Response:
        return _json({"jobs": sorted(stats.jobs)})

    app = web.Application()
    app.add_routes(
        [
            web.post("/reset", play(routes.reset)),
            web.post("/step", play(routes.step)),
            web.post("/finalize", play(routes.finalize)),
            web.get("/health", health),
            web.get("/stats", tell(routes.statistics)),
            web.get("/stats/step", tell(lambda job: stats.told(job).get_step_stats())),
            web.get("/stats/cumulative", tell(lambda job: stats.told(job).get_cumulative_stats())),
            web.get("/stats/jobs", jobs),
            web.post("/stats/reset", tell(lambda job: stats.of(job).reset_step_stats())),
            web.post("/stats/reset_all", tell(lambda job: stats.of(job).reset_all())),
            web.delete("/stats/job/{job}", tell(stats.forget)),
        ]
    )
    return app


create_game_server = create_game_app


def run_game_server(
    game_class: type[AbstractGame],
    host: str = "0.0.0.0",
    port: int = 8081,
    stats_class: type[BaseGameStats] | None = None,
    **game_kwargs: Any,
) -> None:
    """Serve until interrupted. It has no authentication: use 127.0.0.1 unless the network is yours."""
    web.run_app(create_game_app(game_class, stats_class, **game_kwargs), host=host, port=port, print=None)


def serve(
    game_class: type[AbstractGame],
    stats_class: type[BaseGameStats] | None = None,
    *,
    port: int = 8081,
    argv: Sequence[str] | None = None,
    spread: Mapping[str, tuple[int, int]] | None = None,
) -> None:
    """Run as a program: --host, --port, --shards, and the parameters of the game's constructor, as options. `spread`:
    options that differ by shard, with their default and what each next shard adds to it."""
    parser = options_of(game_class, port)
    arguments = vars(parser.parse_args(argv))
    host, port, shards = arguments.pop("host"), arguments.pop("port"), arguments.pop("shards")
    try:
        game_class(**arguments).close()
    except (ImportError, ValueError) as error:
        parser.error(str(error))
    if shards > 1:
        steps = {
            name: (arguments[name] if arguments[name] is not None else default, step)
            for name, (default, step) in (spread or {}).items()
        }
        sys.exit(run_shards(port, shards, steps))
    run_game_server(game_class, host, port, stats_class, **arguments)


def run_shards(port: int, shards: int, spread: Mapping[str, tuple[int, int]] | None = None) -> str | None:
    """Starts this program once for each of `shards` ports from `port` on. When one of them ends, or Ctrl-C is pressed,
    all end; they never outlive this process. Returns which one ended, None after Ctrl-C."""
    servers = {}
    for shard in range(shards):
        own = [f"--{name}={first + shard * step}" for name, (first, step) in (spread or {}).items()]
        program = [*sys.orig_argv, "--port", str(port + shard), "--shards", "1", *own]
        servers[port + shard] = subprocess.Popen(hold_command(program))
    try:
        while not (ended := [at for at, server in servers.items() if server.poll() is not None]):
            with contextlib.suppress(subprocess.TimeoutExpired):
                servers[port].wait(SHARD_POLL_S)
        status = servers[ended[0]].returncode
        return f"the server at port {ended[0]} ended with status {status}; the others were stopped"
    except KeyboardInterrupt:
        return None
    finally:
        for server in servers.values():
            server.terminate()
        for server in servers.values():
            server.wait()


def options_of(game_class: type[AbstractGame], port: int) -> argparse.ArgumentParser:
    """`--max-steps` and `--max_steps` are the same. Of the constructor, what takes a text or a number is an option."""
    parser = argparse.ArgumentParser(description=f"A game server of {game_class.__name__}.")
    parser.add_argument("--host", default="0.0.0.0", help="127.0.0.1 unless the network is yours: nobody is asked who")
    parser.add_argument("--port", type=int, default=port)
    parser.add_argument("--shards", type=int, default=1, help="So many servers, each a process, at consecutive ports.")
    types = get_type_hints(game_class.__init__)
    for name, parameter in inspect.signature(game_class).parameters.items():
        kind = _option_type(types.get(name), parameter.default)
        if kind is not None:
            names = dict.fromkeys([f"--{name.replace('_', '-')}", f"--{name}"])
            parser.add_argument(*names, dest=name, type=kind, default=parameter.default)
    return parser


def _option_type(hint: Any, default: Any) -> type | None:
    """int, float or str, by its type hint (`int | None` too), else by its default; None for anything else."""
    kinds = [kind for kind in get_args(hint) if kind is not type(None)] or [hint]
    kind = kinds[0] if len(kinds) == 1 and kinds[0] in OPTION_TYPES else type(default)
    return kind if kind in OPTION_TYPES else None


def _json(value: Any) -> web.Response:
    return web.Response(body=orjson.dumps(value, default=str), content_type="application/json")
