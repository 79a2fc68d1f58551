"""The tests of the mechanisms need torch; the rest of the suite runs without it."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

if importlib.util.find_spec("torch") is None:
    collect_ignore = [p.name for p in Path(__file__).parent.glob("test_*.py") if p.name != "test_row_statistics.py"]
else:
    import torch

    @pytest.fixture(autouse=True, scope="session")
    def _one_thread() -> None:
        torch.set_num_threads(1)
