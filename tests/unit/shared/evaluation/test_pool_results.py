"""Results of a policy against the members of its pool, as they are shown."""

from __future__ import annotations

import msgspec
import pytest

from opentinker.shared.evaluation.pool_results import member_results
from opentinker.shared.types.pools import PoolRecord

RECORD = PoolRecord(
    members=["0.0", "1.20", "1.40"],
    win_rates={"0.0": 0.9, "1.20": 0.5, "1.40": 0.5},
    outcomes={"0.0": (180, 20, 40), "1.20": (30, 40, 30), "1.40": (0, 0, 0)},
    recent={"0.0": (90.0, 0.0, 10.0), "1.20": (50.0, 0.0, 50.0), "1.40": (0.0, 0.0, 0.0)},
    ratings={"0.0": (-380.0, 40.0), "1.20": (0.0, 35.0)},
)


def test_games_and_ratings_are_of_all_and_win_rates_of_recent_ones() -> None:
    oldest, equal, new = member_results(RECORD)
    assert (oldest["version"], oldest["won"], oldest["drawn"], oldest["lost"]) == ("0.0", 180, 20, 40)
    assert oldest["win_rate"] == pytest.approx(90.5 / 101) and equal["win_rate"] == 0.5
    assert (oldest["rating"], oldest["rating_error"]) == (-380.0, 40.0), "as the trainer has fitted it"
    assert (new["win_rate"], new["rating"], new["rating_error"]) == (None, None, None), "no game yet"


def test_less_than_one_recent_game_is_no_win_rate() -> None:
    recent = {"0.0": (1.5, 0.0, 0.5), "1.20": (0.5, 0.0, 0.5), "1.40": (0.0, 0.25, 0.5)}
    won, even, faded = member_results(msgspec.structs.replace(RECORD, recent=recent))
    assert won["win_rate"] == pytest.approx(2.0 / 3) and even["win_rate"] == 0.5
    assert (faded["won"], faded["win_rate"], faded["rating"]) == (0, None, None)


def test_records_of_earlier_versions_have_members_without_results() -> None:
    old = msgspec.json.decode(b'{"members": ["0.0"], "win_rates": {"0.0": 0.5}}', type=PoolRecord)
    (member,) = member_results(old)
    assert (member["version"], member["won"], member["win_rate"], member["rating"]) == ("0.0", 0, None, None)
