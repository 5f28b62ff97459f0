"""The live view in the terminal: series by step, charts, plain lines in a pipe, each line drawn once."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from opentinker.cli.run import figures
from opentinker.cli.views.charts import Curves, bins, chart, short
from opentinker.cli.views.watch import (
    LiveView,
    PlainView,
    Update,
    clock,
    duration,
    event_line,
    facts,
    panels_of,
    step_line,
)


def trained(step: int, *, reward: float = 0.5, time: float | None = None, **values: float) -> dict[str, Any]:
    at = 1000.0 + step if time is None else time
    return {
        "source": "trainer-0",
        "step": step,
        "time": at,
        "values": {"reward/mean": reward, "exact": reward / 2, "staleness/mean": 1.0, "trainer/wait_share": 0.12}
        | values,
    }


def generated(worker: str, rate: float, *, total: float = 0.0, time: float = 1000.0) -> dict[str, Any]:
    values = {"rollout/tokens_per_s": rate, "rollout/tokens": total}
    return {"source": worker, "step": 0, "time": time, "values": values}


def update(curves: Curves, changed: list[int], *, state: str = "running", **job: Any) -> Update:
    record = {"id": "j-1", "name": "copy", "state": state, "step": 0, "steps": 400, "created": 1000.0, "reason": ""}
    return Update(job={**record, **job}, curves=curves, changed=changed, events=[])


def drawn(now: Update) -> str:
    """By the live view."""
    view = LiveView(Console(file=(out := io.StringIO()), force_terminal=True, width=100, height=40))
    view.show(now)
    view.close()
    return out.getvalue()


def test_a_step_trained_again_after_a_rollback_replaces_the_old_one() -> None:
    curves = Curves()
    curves.add([trained(step, reward=0.1) for step in (1, 2, 3, 4)])
    assert curves.add([trained(3, reward=0.9, time=2000.0)]) == [3]
    assert curves.series("reward/mean") == [0.1, 0.1, 0.9]
    assert curves.last_step == 3


def test_jobs_on_rows_show_their_loss_and_validation_beside_the_step_it_is_of() -> None:
    def point(step: int, time: float, **values: float) -> dict[str, Any]:
        return {
            "source": "trainer",
            "step": step,
            "time": time,
            "values": {k.replace("_", "/"): v for k, v in values.items()},
        }

    curves = Curves()
    curves.add([point(0, 1000.0, val_loss=4.0)])
    changed = curves.add(
        [point(n, 1000.0 + n, loss=4.0 - n, accuracy=n / 4) for n in (1, 2)] + [point(2, 1003.0, val_loss=2.5)]
    )
    assert changed == [1, 2] and curves.last_step == 2
    assert curves.series("loss") == [3.0, 2.0] and curves.series("val/loss") == [4.0, 2.5]
    out = io.StringIO()
    PlainView(out).show(update(curves, changed, kind="sft", steps=2))
    assert out.getvalue().splitlines() == [
        "step 1/2 loss 3.000 accuracy 0.25",
        "step 2/2 loss 2.000 val 2.500 accuracy 0.50",
    ]
    lines = figures(update(curves, changed, kind="sft", created=1000.0), began=1000.0)
    assert "loss 3.00 at the first step, 2.50 over the last 10" in lines
    assert "validation loss 4.00 at first, 2.50 at last" in lines


def test_a_job_with_a_teacher_shows_how_near_it_is() -> None:
    curves = Curves()
    changed = curves.add([trained(step, **{"teacher/kl": 2.0 / step}) for step in (1, 2)])
    out = io.StringIO()
    PlainView(out).show(update(curves, changed, steps=2))
    assert ["teacher kl 2.000" in line for line in out.getvalue().splitlines()] == [True, False]
    assert "teacher kl 2.00 at the first step, 1.50 over the last 10" in figures(update(curves, changed), began=1000.0)
    for seen, title in ((curves, "KL to the teacher  1.50"), (Curves(), "exact")):
        assert title in drawn(update(seen, []))


def test_a_job_whose_length_is_not_known_yet_is_drawn() -> None:
    shown = drawn(update(Curves(), [], kind="dpo", steps=0))
    assert all(text in shown for text in ("step 0/?", "validation loss", "margin"))


def test_token_rates_of_all_workers_are_added() -> None:
    curves = Curves()
    curves.add([generated("rollout-0", 1000.0), generated("rollout-1", 530.0), generated("rollout-0", 1100.0)])
    assert curves.generated == [1000.0, 1530.0, 1630.0]
    curves.add([generated("rollout-1", 500.0, time=1030.0)])
    assert curves.generated[-1] == 500.0  # rollout-0 is gone


def test_the_mean_token_rate_counts_silent_seconds_and_restarted_workers() -> None:
    curves = Curves()
    curves.add([generated("rollout-0", 700.0, total=700.0, time=1000.0)])
    assert curves.tokens_per_s is None
    curves.add([generated("rollout-0", 1000.0, total=1700.0, time=1009.0)])
    curves.add([generated("rollout-1", 400.0, total=400.0, time=1010.0)])
    curves.add([generated("rollout-0", 600.0, total=600.0, time=1020.0)])  # started again: it counts from 0
    assert curves.tokens_per_s == pytest.approx((1000 + 400 + 600) / 20)


def test_pace_and_means_come_from_the_last_steps() -> None:
    curves = Curves()
    curves.add([trained(step, reward=step / 10) for step in range(1, 11)])
    assert curves.seconds_per_step() == pytest.approx(1.0)
    assert curves.recent("reward/mean", 2) == pytest.approx(0.95)
    assert curves.recent("no such metric") is None


def test_a_rising_curve_rises() -> None:
    lines = chart([i / 99 for i in range(100)], width=40, height=5)
    assert len(lines) == 5 and all(len(line) <= 40 for line in lines)
    assert lines[0].startswith("1.00 ┤") and lines[-1].startswith("0.00 ┤")
    ends = [line[6], line[-1]] if (line := lines[-1]) else []
    assert ends[0] != "\u2800" and ends[1] == "\u2800"
    assert lines[0][-1] != "\u2800" and lines[0][6] == "\u2800"


@pytest.mark.parametrize("values", [[], [0.5], [0.5] * 300, [float("nan"), 1.0], [0.0, 1e-9]])
def test_any_series_can_be_drawn(values: list[float]) -> None:
    assert len(chart(values, width=30, height=4)) == 4


def test_bins_keep_the_mean() -> None:
    assert bins([1, 2, 3, 4], 2) == [1.5, 3.5]
    assert bins([1, 2], 5) == [1, 2]


def test_numbers_and_durations_are_short() -> None:
    assert [short(v) for v in (0.3123, 15.27, 1530.4, 12345.0, 3e-7, 0.0)] == [
        *("0.31", "15.3", "1530", "12k", "3e-07", "0.00")
    ]
    assert [duration(s) for s in (47, 192, 7500)] == ["47 s", "3:12 min", "2:05 h"]


def test_a_pipe_gets_one_line_per_so_many_steps_and_all_events() -> None:
    curves, out = Curves(), io.StringIO()
    view = PlainView(out)
    changed = curves.add([generated("rollout-0", 1530.0), *(trained(step, reward=0.31) for step in range(1, 41))])
    now = update(curves, changed)
    now.events = [{"id": "1-0", "event": "running", "time": 0.0, "epoch": 1}]
    view.show(now)
    view.show(update(curves, []))
    lines = out.getvalue().splitlines()
    assert lines[0].endswith(" running epoch=1")
    assert [line.split()[1] for line in lines[1:]] == ["1/400", "10/400", "20/400", "30/400", "40/400"]
    assert lines[-1] == "step 40/400 reward 0.31 exact 0.15 staleness 1.0 tok/s 1530 wait 12%"


def test_lines_of_a_finished_job_have_the_token_rates_of_their_time() -> None:
    curves, out = Curves(), io.StringIO()
    reports = [generated("rollout-0", rate, time=time) for rate, time in ((100.0, 1001.5), (900.0, 1002.5))]
    changed = curves.add([*(trained(step) for step in (1, 2, 3)), *reports])
    PlainView(out).show(update(curves, changed, state="succeeded", steps=3))
    assert ["tok/s 100 " in line for line in out.getvalue().splitlines()] == [True, True, False]
    assert "tok/s 900 " in out.getvalue()


def test_the_last_step_of_a_finished_job_is_always_written() -> None:
    curves, out = Curves(), io.StringIO()
    view = PlainView(out)
    view.show(update(curves, curves.add([trained(step) for step in range(1, 14)]), state="succeeded"))
    assert out.getvalue().splitlines()[-1].startswith("step 13/400")


def test_the_live_view_shows_progress_eta_curves_and_events() -> None:
    curves = Curves()
    changed = curves.add([generated("rollout-0", 1530.0), *(trained(step) for step in range(1, 101))])
    now = update(curves, changed, step=100)
    now.seen.append({"id": "1-0", "event": "checkpoint", "time": 0.0, "step": 100})
    shown = drawn(now)
    for wanted in ("step 100/400", "ETA 5:00 min", "reward", "exact", "1530", "staleness", "checkpoint step=100"):
        assert wanted in shown


def test_the_eta_of_a_job_with_a_target_is_an_upper_bound() -> None:
    curves = Curves()
    curves.add([trained(step) for step in range(1, 11)])
    assert "at most" in clock(update(curves, [], spec={"train": {"target": {"exact": 0.9}}}))
    assert "ETA" not in clock(update(curves, [], state="succeeded", finished=1010.0))


def test_figures_are_those_of_the_points() -> None:
    curves = Curves()
    curves.add([trained(step, reward=step / 20, **{"mismatch/mean": 2e-7}) for step in range(1, 21)])
    curves.add([generated("rollout-0", 90.0, total=100.0 * s, time=1000.0 + 10 * s) for s in range(1, 4)])
    lines = figures(update(curves, [], state="succeeded"), began=991.0)
    assert "first reward 10 s after start (1 s after submission)" in lines
    assert "generated 10.0 tokens/s" in lines
    assert "reward 0.05 at the first step, 0.78 over the last 10" in lines
    assert "mismatch 2e-07 on average" in lines
    assert "the trainer waited 12% of its time for trajectories" in lines
    assert figures(update(Curves(), []), began=991.0) == ["no step was trained"]


def test_evaluations_are_shown_beside_the_steps() -> None:
    curves = Curves()
    curves.add([trained(step) for step in range(1, 21)])
    for step, exact in ((0, 0.0), (10, 0.5), (20, 0.75)):
        values = {"val/episodes": 64.0, "val/exact": exact, "val/exact/low": exact / 2, "val/exact/high": 0.9}
        curves.add([{"source": "validation", "step": step, "time": 1000.0, "values": values}])
    now = update(curves, [], state="succeeded")
    assert facts(now).endswith("validation at step 20: exact 0.75 (0.38 to 0.90)")
    assert [line for line in figures(now, began=991.0) if "validation" in line] == [
        "validation at step 0: exact 0.00 (0.00 to 0.90), 64 episodes",
        "validation at step 20: exact 0.75 (0.38 to 0.90), 64 episodes",
    ]


def test_an_event_is_one_line() -> None:
    line = event_line({"id": "1-0", "event": "failed", "time": 0.0, "reason": "no such model", "epoch": ""})
    assert line.endswith(" failed reason=no such model")
    raised = event_line({"event": "failed", "time": 0.0, "reason": "two\nlines \x1b[31min red"})
    assert raised.endswith(" failed reason=two lines [31min red")


def test_games_that_were_won_stand_where_nothing_is_exact() -> None:
    curves = Curves()
    for step, rate in ((0, 0.25), (20, 0.75)):
        values = {
            "a/val/episodes": 8.0,
            "a/val/winrate/bot/low": 0.1,
            "a/val/winrate/bot": rate,
            "a/val/winrate/b": 0.5,
        }
        curves.add([{"source": "validation~a", "step": step, "time": 1.0 + step, "values": values}])
    curves.add([{"source": "trainer~b", "step": 20, "time": 30.0, "values": {"b/reward/mean": 1.0, "b/exact": 0.5}}])
    found = {panel.title: (panel.values, panel.latest) for panel in panels_of(curves, "rl")}
    assert found == {
        "a reward": ([], None),
        "b reward": ([1.0], 1.0),
        "a games won against bot": ([0.25, 0.75], 0.75),
        "b exact": ([0.5], 0.5),
    }


def test_policies_have_curves_of_their_own_and_share_a_line() -> None:
    curves = Curves()
    points = [
        {"source": f"trainer~{name}", "step": step, "time": 10.0 * step, "values": {f"{name}/reward/mean": reward}}
        for step, rewards in ((1, (0.1, 0.2)), (2, (0.3, 0.4)))
        for name, reward in zip(("speaker", "listener"), rewards, strict=True)
    ]
    assert curves.add(points) == [1, 2]
    assert {name: own.series("reward/mean") for name, own in curves.policies.items()} == {
        "speaker": [0.1, 0.3],
        "listener": [0.2, 0.4],
    }
    line = step_line(update(curves, [1, 2]), range(1, 3), 2)
    assert line == "step 2/400 speaker reward 0.20 listener reward 0.30"
    assert curves.last_step == 2 and curves.steps[2] == {"speaker/reward/mean": 0.3, "listener/reward/mean": 0.4}
