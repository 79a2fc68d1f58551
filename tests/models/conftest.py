"""Shared by the tests of models."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def one_thread():
    """Tiny matrices: a second thread costs far more than it brings."""
    try:
        import torch
    except ImportError:
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("THEORY_LAB_CACHE", str(folder))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return folder
