"""Shared helpers of the tests."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from nursery import Nursery

ROOT = Path(__file__).resolve().parent.parent
# Tests are many and small: threads that wait for each other spin, and cost several times what they save. Read by
# torch and NumPy when they are first imported, here and in what the tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    """A warm process that forks one for each command."""
    made = Nursery(ROOT)
    yield made
    made.stop()


@pytest.fixture
def cli(tmp_path: Path, request: pytest.FixtureRequest) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run ``theory-lab`` in a process of its own, in an empty folder; ``fresh`` also starts an interpreter for it."""

    def call(
        *words: object, timeout: float = 120, env: dict[str, str] | None = None, fresh: bool = not hasattr(os, "fork")
    ) -> subprocess.CompletedProcess[str]:
        said, environment = list(map(str, words)), {**os.environ, "PYTHONPATH": str(ROOT), **(env or {})}
        if not fresh:
            return request.getfixturevalue("nursery").run(said, tmp_path, environment, timeout)
        return subprocess.run(
            [sys.executable, "-m", "theory_lab.main", *said],
            capture_output=True, text=True, timeout=timeout, cwd=tmp_path, env=environment,
        )  # fmt: skip

    return call
