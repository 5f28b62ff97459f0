"""Episodes and a job on real servers of the Open Reward Standard."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.samples.ors_servers import SDKS, real
from tests.samples.session_player import Playing
from tests.support.cluster import toy_cluster
from tests.support.factories import make_spec

pytestmark = pytest.mark.usefixtures("loopback_allowed")
TEMPLATE = Path(__file__).parents[2] / "examples" / "models" / "chatml_tools.jinja"


@pytest.fixture(scope="module", params=SDKS)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    with real(tmp_path_factory.mktemp(request.param), request.param) as url:
        yield request.param, url


async def test_tasks_are_played_by_tools(server: tuple[str, str]) -> None:
    _, url = server
    for split, row, sums in (("train", 3, "3+2="), ("test", 9, "4+3=")):
        playing = Playing(url, name="ors", split=split, row=row)
        assert await playing.open() == sums
        assert {tool.name: list(tool.parameters.get("properties", {})) for tool in playing.opened.tools} == {
            "hint": [],
            "submit": ["answer"],
        }
        first = await playing.say("", ("hint", {}))
        assert (first.reward, first.done, first.messages[0].text) == (-0.1, False, "odd")
        bad = await playing.say("", ("submit", {"number": 5}))
        assert (bad.reward, bad.done) == (-0.1, False) and "answer" in bad.messages[0].text
        last = await playing.say("", ("submit", {"answer": "5" if split == "train" else "7"}))
        assert (last.reward, last.done) == (1.0, True) and last.metrics["return"] == pytest.approx(0.9)
        await playing.close()


async def test_a_turn_is_handed_in_where_the_environment_asks_for_it(server: tuple[str, str]) -> None:
    sdk, url = server
    if sdk == "ors":
        pytest.skip("ors-sdk 0.1.0 has no terminal tools")
    playing = Playing(url, name="ors", environment="Said", row=0)
    await playing.open()
    last = await playing.say("2")
    assert (last.reward, last.done) == (1.0, True)
    await playing.close()


async def test_a_job_has_sessions_of_such_a_server(server: tuple[str, str], tmp_path: Path) -> None:
    _, url = server
    async with toy_cluster(tmp_path, env_egress_allow="127.0.0.0/8") as (cluster, model):
        shutil.copyfile(TEMPLATE, model / "chat_template.jinja")  # one that tells of tools
        job = await cluster.run(
            make_spec(
                model={"base": str(model), "chat_template": "model"},
                environment={"name": "ors", "config": {"url": url, "max_illegal": 1}},
                algorithm={"group_size": 2, "groups_per_batch": 2},
                rollout={"engine": "toy", "max_tokens": 16},
                train={"learner": "simulated", "steps": 2},
            )
        )
        ledger = await cluster.ledger(job)
        assert (ledger.accepted, ledger.failed) == (4, {})
