"""Training episodes that are kept word by word, and how a step's numbers are spread."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import orjson
import pytest

from opentinker import AsyncClient
from opentinker.cli.observability import bars, role_of, words_of
from opentinker.services.rollout_worker.renderer import images_of
from opentinker.services.rollout_worker.transcripts import is_kept, shortened
from opentinker.services.trainer.batch.distributions import RATIO, distributions, histogram, ratio_counts, reward_edges
from opentinker.services.trainer.rollout_log import NEWEST, RolloutLog, expired_steps
from opentinker.shared.data.step_log import StepLog
from opentinker.shared.runtime.service import Context
from opentinker.shared.types.core import Image, Message, Text, WeightVersion
from opentinker.shared.types.token_records import STEP_IMAGES, as_said, order_of_play
from opentinker.shared.types.trajectories import Group, Span, Trajectory
from tests.support.api import SPEC
from tests.support.factories import group_of, make_group, make_spec, make_trajectory, trajectory_of

V = WeightVersion


def talk(*texts: str) -> list[Message]:
    return [Message(role=role, content=text) for role, text in zip(("user", "assistant") * 4, texts, strict=False)]


def spoken(seq: int, *samples: list[Message] | None) -> Group:
    made = [make_trajectory(index=i, reward=float(i), transcript=said) for i, said in enumerate(samples)]
    return group_of(made, seq)


def test_a_bounded_number_of_episodes_of_each_batch_is_kept() -> None:
    for batch in (1, 2, 3, 8, 64):
        for wanted in (0, 1, 4, 7):
            spec = make_spec(algorithm__groups_per_batch=batch, algorithm__group_size=8, rollout__transcripts=wanted)
            kept = [(g, s) for g in range(10 * batch) for s in range(8) if is_kept(spec, g, s)]
            least, most = 10 * min(wanted, 8 * batch), 20 * (wanted + batch)
            assert (least <= len(kept) <= most) if wanted else not kept


def test_words_are_text_up_to_a_limit() -> None:
    picture = Message(role="user", content=[Text(text="look: "), Image(data=b"12345")])
    first, second = shortened([picture, *talk("567890ab")], 30)
    assert first.text == "look: [image, 5 bytes]" and [image.data for image in first.images] == [b""]
    assert second.content == "567890ab"
    assert shortened(talk("1234", "567890ab", "c"), 10)[-1].content == "567890 ... (3 more characters are left out)"


async def test_kept_episodes_have_their_first_images(tmp_path: Path) -> None:
    seen = [b"\x89PNG\r\n\x1a\n" + bytes([number]) * 100 for number in range(3)]
    said = [Message(role="user", content=[Text(text="look: "), *map(Image, [*seen, seen[0], b"no image"])])]
    group = msgspec.structs.replace(spoken(1, shortened(said, 1000)), images=images_of(said))
    keys = list(images_of(said))[:3]
    for kept, shown in ((4, 3), (STEP_IMAGES // 250, 2), (STEP_IMAGES, 0)):
        await RolloutLog(tmp_path, kept, _silent).step(V(1, 1), 0.0, [group], {})
        (line,) = map(orjson.loads, (tmp_path / "rollouts" / "step-000001.jsonl").read_bytes().splitlines())
        assert line["views"][0]["messages"][0]["images"][:4] == [*keys, keys[0]]
        expected = {key: base64.b64encode(data).decode() for key, data in zip(keys[:shown], seen, strict=False)}
        assert line.get("images", {}) == expected


def test_a_tool_s_result_is_shown_with_its_name_and_how_long_the_call_took() -> None:
    result = Message(role="tool", content="3", tool_call_id="c", name="add" * 100, call_s=0.0123456)
    for characters in (100, 0):
        (kept,) = shortened([result], characters)
        said = as_said(kept)
        assert said | {"content": "3"} == {
            "role": "tool",
            "content": "3",
            "tool": ("add" * 100)[:64],
            "call_ms": 12.346,
        }
    assert role_of({"role": "tool", "content": "3", "tool": "add", "call_ms": 12.346}) == "tool add, 12.346 ms"
    assert role_of({"role": "user", "content": "3"}) == "user"
    assert as_said(Message(role="user", content="3")) == {"role": "user", "content": "3"}


def test_bins_hold_every_number_once() -> None:
    assert histogram([0, 1, 1.5, 2, 9], [1, 2, 4]) == {"edges": [1, 2, 4], "counts": [1, 2, 1, 1]}
    assert histogram([], [1.0]) == {"edges": [1.0], "counts": [0, 0]}


@pytest.mark.parametrize(
    ("rewards", "low", "high"),
    [
        *(([0.0, 1.0], 0, 1), ([0.3], 0, 0.5), ([-1.0, 0.2], -1, 1), ([0.0], 0, 1)),
        *(([130.0, 2.0], 0, 200), ([-0.03], -0.05, 0.05)),
    ],
)
def test_bins_of_rewards_stay_as_long_as_rewards_stay_of_a_size(rewards: list[float], low: float, high: float) -> None:
    edges = reward_edges(rewards)
    assert (edges[0], edges[-1], len(edges)) == (low, high, 21)


def test_the_spread_of_a_batch_and_of_its_ratios() -> None:
    batch = [make_group(seq=seq, versions=[V(1, seq)]) for seq in range(3)]
    values = {"lr": 0.1, **ratio_counts(np.array([0.1, 1.0, 1.0, 1.5, 90.0]))}
    found = distributions(batch, V(1, 3), values)
    assert values == {"lr": 0.1} and not any(name.startswith(RATIO) for name in values)
    assert found["reward"]["counts"][1] == found["reward"]["counts"][-1] == 3
    assert sum(found["length"]["counts"]) == sum(found["turns"]["counts"]) == 6
    assert found["staleness"]["counts"][1:4] == [2, 2, 2]
    assert sum(found["ratio"]["counts"]) == 5 and found["ratio"]["counts"][-1] == 1
    assert "ratio" not in distributions(batch, V(1, 3), {})
    assert bars([1, 2], [0, 3, 1]) == ["   1 to 2  " + "#" * 40 + " 3", "2 or more  " + "#" * 14 + " 1"]


def test_of_older_steps_fewer_are_kept_and_nothing_comes_back() -> None:
    kept: list[int] = []
    for step in range(1, 3000):
        kept.append(step)
        gone = expired_steps(kept)
        kept = [one for one in kept if one not in gone]
        assert len(kept) <= 3 * NEWEST
    assert kept[-NEWEST:] == list(range(3000 - NEWEST, 3000)) and len(kept) > 1.4 * NEWEST


async def _silent(event: str, detail: dict[str, object]) -> None:
    raise AssertionError(event)


async def tell(home: Path, step: int, *batch: Group, kept: int = 4) -> None:
    spread = {"reward": histogram([1.0], [0.0, 1.0])}
    await RolloutLog(home, kept, _silent).step(V(1, step), 5.0, batch, spread)


async def test_kept_episodes_and_spreads_are_served_by_step(client: AsyncClient, ctx: Context) -> None:
    job = (await client.submit(SPEC))["id"]
    assert await client.rollouts(job) == {"steps": [], "step": None, "rollouts": []}
    assert await client.distributions(job) == []
    home = ctx.settings.data_dir / "jobs" / job
    for step in (1, 2):
        await tell(
            home, step, spoken(10 * step, talk("2+2=", "4"), None, talk("2+2=", "5")), spoken(10 * step + 1, None)
        )
    found = await client.rollouts(job)
    assert (found["step"], found["steps"]) == (2, [1, 2])
    first, second = found["rollouts"]
    assert (first["group"], first["sample"], second["sample"], second["reward"]) == (20, 0, 2, 2.0)
    assert first["views"][0]["messages"] == [{"role": "user", "content": "2+2="}, {"role": "assistant", "content": "4"}]
    assert first["versions"] == ["1.0"] and first["stops"] == ["eos"] and first["ending"] == "env_done"
    assert (await client.rollouts(job, 1))["rollouts"][0]["group"] == 10
    with pytest.raises(Exception, match="no rollouts of step 7; there are: 1, 2"):
        await client.rollouts(job, 7)
    assert [line["step"] for line in await client.distributions(job, limit=10)] == [1, 2]
    assert [line["step"] for line in await client.distributions(job, 1)] == [1]
    assert [line["step"] for line in await client.distributions(job, after=1, limit=10)] == [2]
    assert (await client.distributions(job))[0]["reward"] == {"edges": [0.0, 1.0], "counts": [0, 0, 1]}


async def test_kept_episodes_have_their_tokens_one_by_one(tmp_path: Path) -> None:
    views = [
        make_trajectory(index=i, reward=float(i), logprob=-0.1234, versions=[V(1, 2), V(1, 3)], transcript=talk("a"),
                        pieces=["p", "q", "r", "x", "y"])
        for i in range(2)
    ]  # fmt: skip
    credited = [np.array([0.5, 0.5, 0.5]), np.array([-0.5, -0.25, 0.123456])]
    said = await RolloutLog(tmp_path, 4, _silent).step(V(1, 4), 5.0, [group_of(views, 9)], {}, credited)
    assert [(one.group, one.sample, one.reward, one.ending, one.tokens) for one in said] == [
        *((9, 0, 0.0, "env_done", 3), (9, 1, 1.0, "env_done", 3))
    ]
    line = orjson.loads((tmp_path / "rollouts" / "step-000004.jsonl").read_bytes().splitlines()[1])
    assert line["group_rewards"] == {"": [0.0, 1.0]}
    assert line["views"][0]["tokens"] == {
        "text": ["p", "q", "r", "x", "y"],
        "ids": [5, 6, 7, 8, 9],
        "mask": [0, 0, 0, 1, 1],
        "logprobs": [0.0, 0.0, 0.0, -0.1234, -0.1234],
        "advantages": [0.0, 0.0, 0.0, -0.5, -0.25],
        "versions": [[3, 5, "1.2"]],
        "left_out": 1,
    }


async def test_a_step_that_is_trained_again_replaces_what_was_kept(client: AsyncClient, ctx: Context) -> None:
    job = (await client.submit(SPEC))["id"]
    home = ctx.settings.data_dir / "jobs" / job
    for seq in (1, 2):
        await tell(home, 5, spoken(seq, talk("a", "b")))
    assert [one["group"] for one in (await client.rollouts(job))["rollouts"]] == [2]
    with (home / "distributions.jsonl").open("ab") as file:
        file.write(b'{"half')
    assert [line["step"] for line in await client.distributions(job, limit=10)] == [5]


async def test_no_more_than_asked_for_is_kept(tmp_path: Path) -> None:
    await tell(tmp_path, 1, *(spoken(seq, talk("a"), talk("b"), talk("c")) for seq in range(3)), kept=4)
    lines = (tmp_path / "rollouts" / "step-000001.jsonl").read_bytes().splitlines()
    assert [(orjson.loads(line)["group"], orjson.loads(line)["sample"]) for line in lines] == [
        (0, 0),
        (0, 1),
        (0, 2),
        (1, 0),
    ]


async def test_a_disk_that_refuses_is_said_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []

    async def event(name: str, detail: dict[str, object]) -> None:
        events.append(name)

    def full(self: StepLog, line: dict[str, Any]) -> None:
        raise OSError(28, "No space left on device")

    told = RolloutLog(tmp_path, 4, event)
    with monkeypatch.context() as patch:
        patch.setattr(StepLog, "add", full)
        for step in (1, 2):
            await told.step(V(1, step), 0.0, [], {})
    await told.step(V(1, 3), 0.0, [], {})
    assert events == ["rollouts_log_failed"] and (tmp_path / "distributions.jsonl").exists()


def test_a_group_travels_with_its_words() -> None:
    group = spoken(3, talk("a", "b"))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(group), type=Group) == group


def seat(name: str, *said: str, numbers: tuple[int, ...], version: int) -> Trajectory:
    """A seat that sees one token and says one, for each pair of words, in the turns of these numbers."""
    mask = [0, 1] * (len(said) // 2)
    made = trajectory_of(
        list(range(len(mask))), mask, reward=[float(number) for number in numbers], numbers=numbers, seat=name,
        policy=f"p-{name}", transcript=talk(*said), pieces=[str(i) for i in range(len(mask))],
    )  # fmt: skip
    turns = [msgspec.structs.replace(turn, message=2 * i + 1) for i, turn in enumerate(made.turns)]
    spans = [Span(span.start, span.end, V(1, version + i)) for i, span in enumerate(made.spans)]
    return msgspec.structs.replace(made, turns=turns, spans=spans)


async def test_a_match_is_kept_whole_by_each_policy_in_the_order_of_play(tmp_path: Path) -> None:
    white = seat("white", "your move", "a1", "c3", "d4", numbers=(0, 2), version=4)
    black = seat("black", "a1", "b2", numbers=(1,), version=7)
    match = group_of([msgspec.structs.replace(black, transcript=[*talk("a1", "b2"), *talk("you lost")]), white], 9)
    for policy in ("p-white", "p-black"):
        home = tmp_path / policy
        own = match.of(policy)
        await RolloutLog(home, 4, _silent).step(V(1, 9), 5.0, [own], {}, [np.ones(int(own.trajectories[0].mask.sum()))])
        (line,) = map(orjson.loads, (home / "rollouts" / "step-000009.jsonl").read_bytes().splitlines())
        views = line["views"]
        shown = [(views[view]["seat"], views[view]["messages"][message]["content"]) for view, message in line["order"]]
        assert shown == [
            *(("white", "your move"), ("white", "a1"), ("black", "a1"), ("black", "b2")),
            *(("white", "c3"), ("white", "d4"), ("black", "you lost")),
        ]
        said = {view["seat"]: [one for one in view["messages"] if "turn" in one] for view in views}
        assert [
            (one["content"], one["turn"], one["tokens"], one["versions"], one["reward"]) for one in said["white"]
        ] == [
            ("a1", 0, [1, 2], ["1.4"], 0.0),
            ("d4", 2, [3, 4], ["1.5"], 2.0),
        ]
        assert {view["policy"]: view["tokens"]["advantages"] is None for view in views} == {
            "p-white": policy != "p-white",
            "p-black": policy != "p-black",
        }
        speaks, sees = (
            ("white by p-white", "to white, user") if policy == "p-white" else ("black by p-black", "to black")
        )
        printed = list(words_of(line))
        assert printed[0] == f"({speaks}, reward {2 if policy == 'p-white' else 1:g})" and sees in "".join(printed)
        assert printed[2:5] == ["[to white, user] your move", "[white by p-white 1.4] a1", "[to black, user] a1"]
        assert line["versions"] == (["1.4", "1.5"] if policy == "p-white" else ["1.7"]), "its numbers are its own"


def test_seats_that_act_at_the_same_time_and_words_that_were_left_out_have_their_place() -> None:
    views = [seat(name, "0", "x", "1", "y", numbers=(0, 1), version=1) for name in "ab"]
    assert order_of_play([(view.turns, len(view.transcript or [])) for view in views]) == [
        (0, 0),
        (0, 1),
        (1, 0),
        (1, 1),
        (0, 2),
        (0, 3),
        (1, 2),
        (1, 3),
    ]
    cut = [msgspec.structs.replace(views[0], transcript=talk("0", "x")), views[1]]
    assert order_of_play([(view.turns, len(view.transcript or [])) for view in cut]) == [
        (0, 0),
        (0, 1),
        (1, 0),
        (1, 1),
        (1, 2),
        (1, 3),
    ]
