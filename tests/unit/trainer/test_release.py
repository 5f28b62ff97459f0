"""What a trainer gives back when a job has ended."""

from __future__ import annotations

from unittest.mock import Mock

import pytest
import torch

from opentinker.services.trainer import service


def test_memory_that_torch_keeps_on_the_gpu_is_given_back_after_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    empty = Mock()
    monkeypatch.setattr(torch.cuda, "empty_cache", empty)
    service._release()
    empty.assert_not_called()  # this process has not used a GPU
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    service._release()
    empty.assert_called_once()
