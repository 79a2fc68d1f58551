"""Shared by the tests of tasks."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def one_thread():
    """Tiny matrices: a second thread costs far more than it brings, above all where the cores are busy."""
    try:
        import torch
    except ImportError:
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
