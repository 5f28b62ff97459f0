"""Games of several policies in a real browser: curves side by side, and matches as conversations."""

from __future__ import annotations

from typing import Any

import orjson
from playwright.async_api import expect

from opentinker.shared.messaging.bus import Bus
from opentinker.shared.runtime.service import Context
from opentinker.shared.state.admission import Admission
from opentinker.shared.types.pools import PoolRecord
from tests.e2e.page.conftest import IN_BROWSER, Open
from tests.e2e.page.running_jobs import Trainer, played, reward, saved
from tests.support.api import SPEC, Http, write_checkpoint

pytestmark = IN_BROWSER

POLICIES = ("speaker", "listener")

GAME = {
    **{"name": "game", "model": SPEC["model"], "environment": {"name": "signalling"}},
    **{"algorithm": {"group_size": 2, "groups_per_batch": 4}, "train": {"steps": 24}},
    "policies": {"speaker": {}, "listener": {"algorithm": {"groups_per_batch": 2}, "train": {"steps": 48}}},
    "seats": {name: name for name in POLICIES},
}


def keep_episodes(ctx: Context, part: str, answer: str) -> None:
    """Store an evaluation episode of a policy."""
    kept = ctx.settings.data_dir / "jobs" / part / "transcripts"
    kept.mkdir(parents=True)
    said = [{"role": "user", "content": "row 0"}, {"role": "assistant", "content": answer}]
    episode = {
        "index": 0,
        "state": 0,
        "sample": 0,
        "reward": 1.0,
        "metrics": {},
        "ending": "env_done",
        "messages": said,
    }
    (kept / "step-000001.jsonl").write_bytes(orjson.dumps(episode) + b"\n")


async def new_game(http: Http, bus: Bus, ctx: Context) -> str:
    """Return a job with two policies, each with curves and a checkpoint of its own."""
    status, body = await http.submit(GAME)
    assert status == 201, body
    job: str = body["id"]
    for name, mean in zip(POLICIES, (0.25, 0.75), strict=True):
        trainer = Trainer(bus, job, f"trainer~{name}")
        for step in range(1, 4):
            values = {**reward(mean * step / 3), "entropy": 3 - step, "loss/policy": -mean, "loss/kl": mean / 10}
            await trainer.says(step, {f"{name}/{metric}": value for metric, value in values.items()})
        other = POLICIES[name == "speaker"]
        won = {other: mean, "random": 0.5 + mean / 2, "random/low": 0.4, "random/high": 0.9}
        rated = {f"{name}/val/winrate/{opponent}": rate for opponent, rate in won.items()}
        await trainer.says(3, {**rated, f"{name}/val/rating": 100 * mean, f"{name}/val/rating/error": 20})
        write_checkpoint(ctx, f"{job}~{name}", 3 if name == "speaker" else 6, {"model.safetensors": b"weights"})
    return job


async def test_games_of_policies_are_compared(opened: Open, http: Http, bus: Bus, ctx: Context) -> None:
    jobs = [await new_game(http, bus, ctx) for _ in range(2)]
    await Trainer(bus, jobs[1], "trainer~speaker").says(4, {"speaker/reward/mean": 0.75})
    for place, job in enumerate(jobs):
        for name in POLICIES:
            keep_episodes(ctx, f"{job}~{name}", f"{name} of game {place}")
    tab = await opened(http.url, "compare", ",".join(jobs))
    for name in POLICIES:
        await expect(tab.page.locator(f'[data-chart="{name}/reward/mean"] .key')).to_have_count(2)
    best = tab.page.locator("table.compared").get_by_title("best")
    await expect(best.first).to_have_text("0.75 ★")
    await tab.page.locator(".pairs summary").click()
    pair = tab.page.locator(".pair-of")
    await expect(pair).to_contain_text("speaker of game 0")
    await expect(pair).to_contain_text("speaker of game 1")
    await tab.page.get_by_label("Right").select_option(f"{jobs[1]}~listener")
    await expect(pair).to_contain_text("listener of game 1")
    other = await opened(tab.page.url.partition("/#")[0])
    await other.page.goto(tab.page.url)
    await expect(other.page.locator(".pair-of")).to_contain_text("listener of game 1")


async def test_policies_of_one_game_are_drawn_side_by_side_and_one_alone(
    opened: Open, http: Http, bus: Bus, ctx: Context
) -> None:
    job = await new_game(http, bus, ctx)
    tab = await opened(http.url, "jobs", job)
    legend = tab.page.locator('[data-chart="Reward"] .legend')
    await expect(legend).to_have_text("listener 0.75speaker 0.25")
    await expect(tab.page.locator('[data-chart="Entropy"] .legend .key')).to_have_count(2)
    await expect(tab.page.locator('[data-chart="Loss"] .legend')).to_contain_text("listener KL term 0.075")
    await expect(tab.page.locator(".top [data-policy=listener]")).to_contain_text("3 / 48")
    rates = tab.page.get_by_role("region", name="Win rates").locator("tr")
    assert [await row.locator("th, td").all_inner_texts() for row in await rates.all()] == [
        ["policy", "against listener", "against speaker", "against random"],
        ["listener", "–", "75%", "88%\n40% to 90%"],
        ["speaker", "25%", "–", "63%\n40% to 90%"],
    ]
    await expect(tab.page.locator('[data-chart="Rating"] .legend')).to_have_text("listener 75speaker 25")
    lines = (await saved(tab, "Reward as CSV")).decode().splitlines()
    assert lines[0] == "step,listener,speaker" and lines[3] == "3,0.75,0.25"
    await tab.page.get_by_role("group", name="policy").get_by_role("button", name="speaker").click()
    await expect(legend).to_have_text("reward 0.25")
    await tab.go("jobs", job, "checkpoints")
    await expect(tab.page.locator("tbody td").first).to_have_text("3")
    await tab.shows(f"opentinker download {job} DIR --policy speaker")
    await tab.page.get_by_role("group", name="policy").get_by_role("button", name="listener").click()
    await expect(tab.page.locator("tbody td").first).to_have_text("6")
    await expect(tab.page.get_by_role("button", name="Continue training")).to_have_count(0)
    assert len(await saved(tab, "Download")) > len(b"weights")


def write_match(ctx: Context, job: str) -> None:
    """One training episode of both policies, as the speaker's trainer keeps it."""
    episode: dict[str, Any] = {
        **{"step": 3, "group": 7, "sample": 0, "environment": "signalling", "worker": "r-0", "versions": ["1.2"]},
        **{"reward": 0.5, "rewards": {"speaker": 0.5}, "group_rewards": {"speaker": [0.5, 0.0]}, "components": {}},
        **{"scores": {}, "metrics": {"exact": 1.0}, "ending": "env_done", "stops": ["eos"], "tokens": 1, "turns": 1},
        **{"seconds": 0.1, "order": [[0, 0], [0, 1], [1, 0], [1, 1]]},
        "views": [played("speaker", "say 3", "q", 0, "1.2"), played("listener", "heard q", "3", 1, "1.5")],
    }
    folder = ctx.settings.data_dir / "jobs" / f"{job}~speaker" / "rollouts"
    folder.mkdir(parents=True)
    (folder / "step-000003.jsonl").write_bytes(orjson.dumps(episode) + b"\n")


def write_evaluation(ctx: Context, job: str) -> None:
    """One evaluation episode of the speaker with the listener, of which the listener's tokens were not kept."""
    said: list[dict[str, Any]] = []
    views = []
    for turn, (seat, shown, word, version) in enumerate(
        (("speaker", "say 3", "q", "1.3"), ("listener", "hear q", "3", "1.2"))
    ):
        view = played(seat, shown, word, turn, version)
        of_seat = {"seat": seat, "stream": "", "policy": seat}
        said += [
            {name: value for name, value in (one | of_seat).items() if name != "reward"} for one in view["messages"]
        ]
        views.append({**of_seat, "tokens": view["tokens"]})
    exam: dict[str, Any] = {
        **{
            "index": 0,
            "opponent": "listener",
            "outcome": 0.5,
            "reward": 1.0,
            "seats": {"speaker": 1.0, "listener": 1.0},
        },
        **{"metrics": {"exact": 1.0}, "ending": "env_done", "messages": said, "views": views[:1]},
    }
    folder = ctx.settings.data_dir / "jobs" / f"{job}~speaker" / "transcripts"
    folder.mkdir(parents=True)
    (folder / "step-000003.jsonl").write_bytes(orjson.dumps(exam) + b"\n")


async def test_an_evaluation_is_a_conversation_too(opened: Open, http: Http, bus: Bus, ctx: Context) -> None:
    job = await new_game(http, bus, ctx)
    write_evaluation(ctx, job)
    tab = await opened(http.url, "jobs", job, "episodes")
    await tab.page.get_by_role("button", name="evaluations", exact=True).click()
    heads = tab.page.locator(".match .message > small")
    await expect(heads.first).to_have_text("to speaker · user")
    assert await heads.all_text_contents() == [
        "to speaker · user",
        "speaker · weights speaker 1.3",
        "to listener · user",
        "listener · weights listener 1.2",
    ]
    await tab.page.get_by_role("button", name="version", exact=True).click()
    await tab.page.locator(".tokens span", has_text="q").click()
    await tab.shows("weights speaker 1.3")


async def test_members_of_a_pool_are_listed_with_their_results(opened: Open, http: Http, ctx: Context) -> None:
    pools = {"past": {"policy": "speaker", "every": 2}}
    status, body = await http.submit({**GAME, "seats": {**GAME["seats"], "third": {"pool": "past"}}, "pools": pools})
    assert status == 201, body
    won = {"0.0": (1500, 100, 400), "1.2": (0, 0, 0)}
    record = PoolRecord(
        members=[*won], win_rates={}, outcomes=won, recent={"0.0": (50.0, 0.0, 50.0)}, ratings={"0.0": (12.4, 5.0)}
    )
    await Admission(ctx.store.redis, body["id"], 1, policies=POLICIES, policy="speaker").set_pools({"past": record})
    tab = await opened(http.url, "jobs", body["id"])
    rows = tab.page.get_by_role("region", name="Pool past").locator("tr")
    await expect(rows).to_have_count(3)
    shown = [await row.locator("th, td").all_inner_texts() for row in await rows.all()]
    assert shown[0] == ["version", "games", "won", "drawn", "lost", "win rate", "rating"]
    assert shown[1] == ["1.2", "0", "0", "0", "0", "–", "–"]
    assert shown[2][:6] == ["0.0", "2,000", "1,500", "100", "400", "50%"] and shown[2][6] == "12 ± 5"


async def test_a_match_is_a_conversation_of_its_seats_with_the_version_of_each_policy(
    opened: Open, http: Http, bus: Bus, ctx: Context
) -> None:
    job = await new_game(http, bus, ctx)
    write_match(ctx, job)
    tab = await opened(http.url, "jobs", job, "episodes")
    messages = tab.page.locator(".match .message")
    await expect(messages.locator(".words")).to_have_text(["say 3", "q", "heard q", "3"])
    heads = ["to speaker · user", "speaker · weights speaker 1.2 · reward 0.5"]
    heads += ["to listener · user", "listener · weights listener 1.5 · reward 0.5"]
    await expect(messages.locator("small").first).to_have_text(heads[0])
    assert await messages.locator("> small").all_text_contents() == heads
    await tab.page.get_by_role("button", name="version", exact=True).click()
    colours = [
        await messages.nth(place).locator(".tokens span").evaluate("e => e.style.background") for place in (1, 3)
    ]
    assert len(set(colours)) == 2, "each policy's version has a colour"
    await tab.page.locator(".tokens span", has_text="3").click()
    await tab.shows("weights listener 1.5")
    await tab.page.get_by_role("group", name="policy").get_by_role("button", name="listener").click()
    await tab.shows("No episodes yet")
