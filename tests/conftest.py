"""Shared helpers of the tests."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def cli(tmp_path: Path):
    """Run ``theory-lab`` in a process of its own, in an empty folder."""

    def call(*words: object, timeout: float = 120, env: dict[str, str] | None = None, **more):
        return subprocess.run(
            [sys.executable, "-m", "theory_lab.main", *map(str, words)],
            capture_output=True,
            text=True,
            timeout=timeout,
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT), **(env or {})},
            **more,
        )

    return call
