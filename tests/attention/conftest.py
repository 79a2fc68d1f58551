"""The tests of the mechanisms need torch; the rest of the suite runs without it."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

if importlib.util.find_spec("torch") is None:
    collect_ignore_glob = ["test_[!s]*.py"]
else:
    import torch

    @pytest.fixture(autouse=True, scope="session")
    def _two_threads() -> None:
        torch.set_num_threads(2)
