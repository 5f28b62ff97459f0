"""A person plays an episode over HTTP, on a real env worker; environments say what they are."""

from __future__ import annotations

import asyncio
import re
import time
from typing import Any

import msgspec
import pytest

from opentinker.services.scheduler.environments import plays_api
from opentinker.shared import api_types
from opentinker.shared.runtime.service import Context
from opentinker.shared.security.authorization import Role
from opentinker.shared.state.plays import ENDED_S, MAX_PLAYS, PLAY_S, Play, PlayAnswer, Plays
from opentinker.shared.state.store import Store
from opentinker.shared.types.env_protocol import SeatPrompt
from tests.integration.client.test_cli import typed
from tests.integration.rollout_worker.env_workers import Workers, workers
from tests.support.api import OPERATOR, Http, bearing, fits, new_key_of

__all__ = ["workers"]
COUNTING = "tests.samples.env_samples:Counting"


def played(name: str = "copy_digits", **config: Any) -> dict[str, Any]:
    return {"environment": {"name": name, "config": config}}


async def asked(http: Http, method: str, path: str, status: int, **request: Any) -> Any:
    found, body = await http(method, path, **request)
    assert found == status, body
    return body


async def begun(http: Http, body: dict[str, Any], status: int = 201) -> dict[str, Any]:
    return dict(await asked(http, "POST", "/v1/plays", status, json=body))


async def said(http: Http, episode: dict[str, Any], *texts: str, status: int = 200) -> dict[str, Any]:
    body = {"turn": episode["turn"], "actions": [{"text": text} for text in texts]}
    return dict(await asked(http, "POST", f"/v1/plays/{episode['id']}/turns", status, json=body))


async def test_a_person_plays_until_the_episode_ends(http: Http, workers: Workers) -> None:
    await workers.start("env-0")
    episode = await begun(http, {**played(digits=3), "row": 1, "seed": 4})
    fits(episode, api_types.PlayedEpisode)
    (prompt,) = episode["prompts"]
    (message,) = prompt["messages"]
    digits = message["content"].removesuffix("=")
    assert (message["role"], len(digits), episode["turn"], episode["done"]) == ("user", 3, 0, False)
    ended = await said(http, episode, digits)
    assert ended["done"] and ended["reward"] == 1.0 and ended["prompts"] == [] and ended["error"] == ""
    gone = await said(http, ended, "1", status=404)
    assert "may have ended" in str(gone)


async def test_seats_act_in_turn_and_a_bot_takes_the_other(http: Http, workers: Workers) -> None:
    await workers.start("env-0")
    both = await begun(http, played("tictactoe"))
    first = both["prompts"][0]["seat"]
    second = (await said(http, both, "5"))["prompts"][0]["seat"]
    assert first and second and first != second
    alone = await begun(http, {**played("tictactoe"), "bots": {second: "random"}})
    assert [(await said(http, alone, "5"))["prompts"][0]["seat"]] == [first]


async def test_seats_are_named_with_the_bots_that_may_take_them(http: Http, workers: Workers) -> None:
    await workers.start("env-0")
    found = await asked(http, "POST", "/v1/plays/seats", 200, json=played("tictactoe"))
    fits(found, api_types.PlayableSeats)
    assert found["environment"] == "tictactoe" and found["bots"] == ["perfect", "random"]
    assert found["seats"] == ["first", "second"] and found["players"] == {"first": "", "second": ""}
    of_job = {"first": "", "f*": "random", "s*": "perfect", "*": "random"}
    prefilled = await asked(http, "POST", "/v1/plays/seats", 200, json={**played("tictactoe"), "bots": of_job})
    assert prefilled["players"] == {"first": "", "second": "perfect"}
    by_config = await asked(http, "POST", "/v1/plays/seats", 200, json=played("proposed_sums", solvers=2))
    assert by_config["seats"] == ["proposer", "solver_1", "solver_2"] and by_config["bots"] == []
    wrong = await asked(http, "POST", "/v1/plays/seats", 422, json=played(digits=-1))
    assert "environment.config.digits" in str(wrong)


async def test_bots_that_cannot_play_are_refused_before_the_episode_opens(http: Http, workers: Workers) -> None:
    await workers.start("env-0")
    for bots, field, words in (
        ({"second": "randon"}, "bots.second", "has no bot 'randon'; its bots are: perfect, random"),
        ({"third": "random"}, "bots.third", "no such seat"),
        ({"*": "random"}, "bots", "leave one to a model or a person"),
    ):
        refused = await begun(http, {**played("tictactoe"), "bots": bots}, 422)
        (mistake,) = refused["errors"]
        assert mistake["field"] == field and words in mistake["problem"]
    no_name = await begun(http, {**played("tictactoe"), "bots": {"second": ""}}, 422)
    assert "bots.second" in str(no_name)


async def test_seats_that_act_together_answer_together(http: Http, workers: Workers) -> None:
    await workers.start("env-0")
    episode = await begun(http, played("matching_pennies"))
    assert len(episode["prompts"]) == 2
    refused = await said(http, episode, "heads", status=422)
    assert "one for each prompt" in str(refused)
    after = await said(http, episode, "heads", "heads")
    assert after["rewards"] and not after["error"]


async def test_a_turn_that_is_not_the_next_is_refused(http: Http, workers: Workers) -> None:
    await workers.start("env-0")
    episode = await begun(http, played(COUNTING))
    assert (await said(http, episode, "a"))["turn"] == 1
    assert "next turn of this episode is 1, not 0" in str(await said(http, episode, "b", status=409))


async def test_a_turn_whose_answer_was_lost_is_sent_again_and_played_once(http: Http, workers: Workers) -> None:
    await workers.start("env-0")
    episode = await begun(http, played("tictactoe"))
    lost = await said(http, episode, "5")
    assert await said(http, episode, "5") == lost and lost["turn"] == 1
    for move in ("1", "4", "2"):
        lost = await said(http, lost, move)
    ended = await said(http, lost, "6")
    assert ended["done"] and await said(http, lost, "6") == ended
    await said(http, lost, "3", status=404)


async def test_a_turn_that_is_sent_twice_at_the_same_time_has_one_answer(http: Http, workers: Workers) -> None:
    await workers.start("env-0")
    episode = await begun(http, played(COUNTING))
    one, other = await asyncio.gather(said(http, episode, "a"), said(http, episode, "a"))
    assert one == other and one["turn"] == 1


async def test_an_ended_play_answers_no_turn_again(http: Http, workers: Workers) -> None:
    await workers.start("env-0")
    episode = await begun(http, played(COUNTING))
    await said(http, episode, "a")
    await asked(http, "DELETE", f"/v1/plays/{episode['id']}", 200)
    await said(http, episode, "a", status=404)


async def test_what_cannot_be_played_says_why(http: Http, workers: Workers, ctx: Context) -> None:
    none = await begun(http, played(), 409)
    assert "no env worker answers" in str(none)
    await workers.start("env-0")
    wrong = await begun(http, played(digits=-1), 422)
    assert "environment.config.digits" in str(wrong)
    kept = await begun(http, played("math", path=f"{ctx.settings.data_dir}/jobs/j-bbbbbbbbbb/rows.jsonl"), 422)
    assert "kept by the server" in str(kept)
    unknown = await begun(http, {"environment": {"name": "copy_digits", "colour": 1}}, 422)
    assert "environment.colour" in str(unknown)


async def test_a_key_plays_a_few_at_a_time_and_the_oldest_ends(http: Http, workers: Workers) -> None:
    await workers.start("env-0")
    plays = [await begun(http, played(COUNTING)) for _ in range(MAX_PLAYS + 1)]
    await said(http, plays[0], "a", status=404)
    for one in plays[1:]:
        assert (await said(http, one, "a"))["turn"] == 1
    await asked(http, "DELETE", f"/v1/plays/{plays[1]['id']}", 200)
    await said(http, plays[1], "a", status=404)


async def test_nobody_else_plays_an_episode(http: Http, workers: Workers, store: Store) -> None:
    await workers.start("env-0")
    episode = await begun(http, played(COUNTING))
    request = {"json": {"turn": 0, "actions": [{"text": "a"}]}, "headers": bearing(await new_key_of(store, "red"))}
    await asked(http, "POST", f"/v1/plays/{episode['id']}/turns", 404, **request)


async def test_an_environment_says_what_it_is(http: Http, workers: Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    await workers.start("env-0")
    found = await asked(http, "GET", "/v1/environment?name=kuhn_poker", 200)
    fits(found, api_types.EnvironmentDescription)
    assert found["doc"].startswith("One hand.") and found["bots"] == ["equilibrium", "random"] and found["can_fork"]
    assert found["seats"] == ["first", "second"]
    assert found["settings"]["properties"]["rules"]["description"].startswith("Name the game")
    blocking = await asked(http, "GET", "/v1/environment?name=tests.samples.listed_rows:Listed", 200)
    assert blocking["settings"]["type"] == "object"
    monkeypatch.setenv("OPENTINKER_API_KEY", OPERATOR)
    shown = await asyncio.to_thread(typed, "env", "about", "kuhn_poker", "--url", http.url)
    assert shown.stdout.startswith("One hand."), shown.stderr
    assert "seats: first, second\nscripted players: equilibrium, random; can fork" in shown.stdout
    assert re.search(r"(?m)^rules +boolean +true +Name the game", shown.stdout), shown.stdout
    assert "example episode\nPlayed by random guesses." in shown.stdout and "\nassistant" in shown.stdout
    assert blocking["example"] == ""
    report = {"environment": "kuhn_poker@1", "verdict": "ready for training", "transcript": "user: a new hand"}
    await asked(http, "POST", "/v1/checks", 201, json=report)
    checked = await asked(http, "GET", "/v1/environment?name=kuhn_poker", 200)
    assert checked["example"] == "Played by a check: ready for training.\n\nuser: a new hand"
    assert "no such environment" in str(await asked(http, "GET", "/v1/environment?name=kuhn_pocker", 422))


async def test_a_viewer_has_no_module_imported(http: Http, store: Store) -> None:
    headers = bearing(await new_key_of(store, role=Role.VIEWER))
    refused = await asked(http, "GET", f"/v1/environment?name={COUNTING}", 403, headers=headers)
    assert "jobs:write" in str(refused)


async def test_a_play_moves_from_where_it_stands_and_no_other_way(store: Store) -> None:
    plays = Plays(store.redis)
    before = Play(id="p", environment="e", worker="w", together=False, seats=[""])
    assert await plays.begin("red", "ada", before, time.time()) == []
    after = msgspec.structs.replace(before, turn=1)
    first, second = (PlayAnswer(turn=turn, actions="digest", answer=msgspec.Raw(b'{"turn":1}')) for turn in (0, 1))
    assert await plays.move("red", before, after, first) and await plays.find("red", "p") == after
    assert 0 < await store.redis.ttl("play:red:p") <= PLAY_S
    assert 0 < await store.redis.ttl("play_answer:red:p") <= PLAY_S
    assert not await plays.move("red", before, msgspec.structs.replace(before, turn=1, seats=["x"]), second)
    assert await plays.answered("red", "p") == first
    await plays.end("red", "ada", "p", second)
    assert not await plays.move("red", after, before, first) and await plays.find("red", "p") is None
    assert await plays.answered("red", "p") == second and 0 < await store.redis.ttl("play_answer:red:p") <= ENDED_S


def test_a_prompt_in_tokens_is_shown_with_the_reason_why_it_is_no_text() -> None:
    (message,) = plays_api._shown(SeatPrompt(prompt_ids=list(range(1234))))["messages"]
    assert "1,234 token ids" in message["content"] and "no model" in message["content"]
