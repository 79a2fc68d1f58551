"""Tiny corpora and settings: one step takes a few hundredths of a second on one core."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

if not all(importlib.util.find_spec(name) for name in ("torch", "transformers", "accelerate")):
    collect_ignore_glob = ["test_*.py"]  # the models' extra is not installed: nothing here can run
else:
    from tiny_runs import TINY, make_corpus


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """60,000 tokens of 64, each mostly one more than the one before: something to learn."""
    folder = tmp_path_factory.mktemp("corpus")
    make_corpus(folder, 60_000)
    return folder


@pytest.fixture
def tiny(corpus: Path):
    """Settings of a run that takes a second."""
    from theory_lab.training import TrainSettings

    def make(**changes: Any) -> TrainSettings:
        given = {"corpus": str(corpus), "model": TINY, "steps": 6, "batch": 4, "length": 16, "device": "cpu"}
        given |= {"eval_batches": 2, "tensorboard": False, **changes}
        return TrainSettings(**given)

    return make
