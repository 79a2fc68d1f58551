"""An empty cache and an empty output folder for each test."""

from __future__ import annotations

from pathlib import Path

import pytest
from reproduce_samples import SMALL

from theory_lab.reproduce import Experiment, load


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THEORY_LAB_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def make(tmp_path: Path):
    """Write an experiment and load it."""

    def write(text: str = SMALL, name: str = "small") -> Experiment:
        path = tmp_path / f"{name}.toml"
        path.write_text(text)
        return load(path, "own", path.name)

    return write
