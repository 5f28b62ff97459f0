"""Lines of metrics.jsonl as a resuming trainer reads them."""

from __future__ import annotations

from pathlib import Path

from opentinker.shared.data.step_log import lineage


def test_lines_that_are_not_of_a_step_are_left_out_of_the_lineage(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(b'{"epoch": 1, "step": 1}\n{}\nnull\n5\n{"epoch": 1}\n{"epoch": 1, "step": 2}\n{"epoch": 1, "st')
    assert [line["step"] for line in lineage(file, {1: 0}, 2)] == [1, 2]
