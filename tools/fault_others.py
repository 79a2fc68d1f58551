"""Faults of what is not a sweep: a training run and a probe, killed at a random moment and started again."""

from __future__ import annotations

import hashlib
import shutil
import signal
import time
from pathlib import Path

import numpy as np
import pandas as pd
from fault_bench import Bench, Outcome, Run, count_tracebacks, last_line

_TRAIN = (
    "train", "--size", "recall", "--task", "recall", "--steps", "40", "--batch", "2", "--length", "64",
    "--save-every", "5", "--device", "cpu", "--format", "json",
)  # fmt: skip
_PROBE = ("probe", "softmax-pico", "--length", "32", "--windows", "1", "--format", "parquet", "--quiet")


def _model(bench: Bench) -> Path:
    """A model that was trained undisturbed."""
    with bench.common("model") as path:
        if not path.exists():
            _whole(Run((*_TRAIN, "--out", str(path)), bench.work))
    return path


def _whole(run: Run) -> float:
    code, text = run.finish()
    if code != 0:
        raise RuntimeError(f"undisturbed, it ended with {code}: {last_line(text)}")
    return time.monotonic() - run.started


def _hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _killed(bench: Bench, words: tuple[str, ...], sign: Path, longest: float, rng: np.random.Generator) -> Outcome:
    """Start a command, kill it at a random moment after ``sign`` appears, and run it again to its end."""
    run = Run(words, bench.work)
    run.wait_for(sign)
    time.sleep(rng.uniform(0.0, longest))
    late = not run.alive()
    run.signal(signal.SIGKILL)
    _, text = run.finish()
    outcome = Outcome(tracebacks=count_tracebacks(text), late=late)
    code, text = Run(words, bench.work).finish()
    outcome.tracebacks += count_tracebacks(text)
    if code != 0:
        outcome.lost += 1
        outcome.notes.append(f"started again, it ended with {code}: {last_line(text)}")
    return outcome


def kill_training(bench: Bench, rng: np.random.Generator) -> Outcome:
    """SIGKILL of a training run: the weights at its end are those of an undisturbed one."""
    model, out = _model(bench), bench.fresh()
    record = pd.read_csv(model / "log.csv")
    longest = max(1.0, 0.05 * len(record))
    outcome = _killed(bench, (*_TRAIN, "--out", str(out)), out / "log.csv", longest, rng)
    if not outcome.lost and _hash(out / "model.safetensors") != _hash(model / "model.safetensors"):
        outcome.changed += 1
        outcome.notes.append("the weights differ")
    return outcome


def kill_probe(bench: Bench, rng: np.random.Generator) -> Outcome:
    """SIGKILL of a probe: its rows at the end are those of an undisturbed one."""
    with bench.common("probed") as whole:
        if not whole.exists():
            _whole(Run((*_PROBE, "--out", str(whole)), bench.work))
    out = bench.fresh()
    outcome = _killed(bench, (*_PROBE, "--out", str(out)), out, 2.0, rng)
    if not outcome.lost and not _same_tables(whole, out):
        outcome.changed += 1
        outcome.notes.append("the rows differ")
    shutil.rmtree(out, ignore_errors=True)
    return outcome


def _same_tables(a: Path, b: Path) -> bool:
    """Whether two folders hold the same tables, apart from times."""
    names = sorted(path.relative_to(a) for path in a.rglob("*.parquet"))
    if names != sorted(path.relative_to(b) for path in b.rglob("*.parquet")) or not names:
        return False
    for name in names:
        left, right = (pd.read_parquet(folder / name).drop(columns="seconds", errors="ignore") for folder in (a, b))
        if not left.equals(right):
            return False
    return True
