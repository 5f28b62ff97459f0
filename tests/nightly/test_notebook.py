"""The notebook runs from its first cell to its last, on a cluster with real services."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from tests.support.cluster import PYTHONPATH, ROOT, Cluster

pytestmark = pytest.mark.nightly


@pytest.mark.timeout(900)
async def test_the_first_job_of_the_notebook_learns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    make = [sys.executable, str(ROOT / "examples/models/make_tiny.py"), str(tmp_path / "runs/models/tiny")]
    await asyncio.to_thread(subprocess.run, make, check=True, cwd=ROOT)
    text = (ROOT / "examples/notebooks/first_job.ipynb").read_text()
    notebook: Any = nbformat.reads(text, as_version=nbformat.NO_CONVERT)  # type: ignore[no-untyped-call]
    assert all(not cell.get("outputs") for cell in notebook.cells), "outputs are not committed"
    async with Cluster(tmp_path / "cluster", heavy=True) as cluster:
        monkeypatch.setenv("OPENTINKER_URL", cluster.client.url)
        monkeypatch.setenv("PYTHONPATH", PYTHONPATH)
        player = NotebookClient(notebook, timeout=800, resources={"metadata": {"path": str(tmp_path)}})
        await player.async_execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    drawn = [output.data.get("text/html", "") for output in outputs if "data" in output]
    assert any("succeeded" in html and "<svg" in html for html in drawn), drawn
    assert any("first sweep" in html and "2 of 2 trials" in html for html in drawn), drawn
    assert "at last" in str(outputs) and "model.safetensors" in str(outputs), outputs
