"""Kernel tests run on a GPU where there is one, and in Triton's interpreter otherwise."""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch

HAS_CUDA = torch.cuda.is_available()
HAS_TRITON = importlib.util.find_spec("triton") is not None
if not HAS_CUDA:
    # Read when triton is first imported, which theory_kernels puts off until a kernel is used.
    os.environ.setdefault("TRITON_INTERPRET", "1")


if HAS_TRITON and not HAS_CUDA:
    from theory_kernels.interpreter import let_numpy_index_tensors

    from .quick_interpreter import quicken

    let_numpy_index_tensors()
    quicken()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs a CUDA device; skipped without one")
    # The first product in a thread of autograd says that it makes itself a context; nothing is wrong.
    config.addinivalue_line("filterwarnings", "ignore:Attempting to run cuBLAS:UserWarning")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "gpu" in item.keywords and not HAS_CUDA:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
        if "triton" in getattr(item, "fixturenames", ()) and not HAS_TRITON:
            item.add_marker(pytest.mark.skip(reason="triton is not installed"))


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if HAS_CUDA else "cpu")


@pytest.fixture
def triton() -> str:
    """Ask for this fixture to be skipped where triton is not installed."""
    return "triton"


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory of torch.empty is NaN (or a large integer), so an element nobody wrote shows."""
    original = torch.empty

    def empty(*args, **kwargs):
        out = original(*args, **kwargs)
        return out.fill_(float("nan")) if out.is_floating_point() else out.fill_(101)

    monkeypatch.setattr(torch, "empty", empty)
