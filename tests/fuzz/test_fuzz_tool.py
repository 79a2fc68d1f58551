"""tools/fuzz.py: parts of a target side by side, and inputs that end their process."""

from __future__ import annotations

import importlib.util
import os
import random
import signal
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import fuzz_harness as harness
import fuzz_targets
import pytest

from theory_lab.errors import InputError


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    before, bytecode = list(sys.path), sys.dont_write_bytecode
    path = Path(__file__).resolve().parents[2] / "tools" / "fuzz.py"
    spec = importlib.util.spec_from_file_location("fuzz_tool", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.path[:], sys.dont_write_bytecode = before, bytecode
    return module


def _make(rng: random.Random) -> int:
    return rng.randrange(60)


def _run(value: int, place: harness.Place) -> str:
    if value == 7:
        os.kill(os.getpid(), signal.SIGKILL)
    if value % 2:
        raise InputError("number", value, f"even ones are allowed, of class {'abc'[value % 3]}")
    return "taken"


def test_the_same_findings_in_however_many_processes(tool: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """An input that ends its process is counted, and those behind it are run."""
    target = harness.Target("numbers", _make, _run, limited=False, settled=2)
    monkeypatch.setattr(fuzz_targets, "TARGETS", (target,))
    inputs = 400
    fatal = [index for index in range(inputs) if _make(harness.seeded("numbers", 0, index)) == 7]
    assert fatal
    merged: list[dict[str, Any]] = []
    for processes in (1, 3):
        parts = tool.parts_of(target, 0, 0, inputs)
        assert len(parts) > 5
        done = sorted(tool.together(parts, processes, None), key=lambda part: part.first)
        merged.append(tool.merged(part.tally for part in done))
    for tally in merged:
        assert tally["inputs"] == inputs
        assert tally["found"] == len(fatal)
        assert tally["taken"] + tally["refused"] == inputs - len(fatal)
        assert tally["findings"][0]["kind"] == "crash"
        assert tally["findings"][0]["index"] == fatal[0]
        assert len(tally["messages"]) == 4
    for key in ("inputs", "taken", "refused", "found", "messages", "findings"):
        assert merged[0][key] == merged[1][key], key


def test_no_part_begins_after_the_end(tool: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    target = harness.Target("numbers", _make, _run, limited=False, settled=2)
    monkeypatch.setattr(fuzz_targets, "TARGETS", (target,))
    assert list(tool.together(tool.parts_of(target, 0, 0, 400), 2, 0.0)) == []
