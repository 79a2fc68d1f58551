"""Studies that misbehave, for workers of the tests, and how to find these workers."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from distributed import WorkerPlugin

from theory_lab.distributed.cluster import Cluster
from theory_lab.engine import PieceTask
from theory_lab.errors import InputError
from theory_lab.studies import STUDIES, Finding, Piece


def process_ids(cluster: Cluster, workers: int = 2) -> list[int]:
    """Of the workers, once those that were ended have successors."""
    until = time.monotonic() + 100.0
    while time.monotonic() < until:
        found = [pid for pid in cluster._client.run(os.getpid, on_error="return").values() if isinstance(pid, int)]
        if len(found) == workers:
            return found
        time.sleep(0.05)
    raise TimeoutError


class OddStudies(WorkerPlugin):
    """Makes every process of every worker, those started later included, know the studies."""

    name = "odd-studies"

    def setup(self, worker: object) -> None:
        """Called by Dask when a worker process starts."""
        import theory_lab.catalog  # noqa: F401  # lists the true studies when it is first imported

        some = next(iter(STUDIES.values()))
        for name, what in (("kill", kill), ("sleep", sleep), ("grow", grow), ("refuse", refuse)):
            STUDIES[name] = replace(some, id=name, work=what)


def piece(study: str, **arguments: Any) -> PieceTask:
    """A task of such a study."""
    return PieceTask(Piece.of(study, 0.01, **arguments), 0)


def kill(piece: Piece, seed: int) -> list[Finding]:
    """End the worker."""
    os.kill(os.getpid(), signal.SIGKILL)
    return []


def sleep(piece: Piece, seed: int) -> list[Finding]:
    """Quick for all but the first that tries, which waits for a file."""
    folder = Path(piece["folder"])
    try:
        (folder / "tried").touch(exist_ok=False)
    except FileExistsError:
        return [Finding.certain("quick", 1.0, 1.0)]
    while not (folder / "release").exists():
        time.sleep(0.02)
    return [Finding.certain("slow", 1.0, 1.0)]


def grow(piece: Piece, seed: int) -> list[Finding]:
    """Take memory until something stops it."""
    held = []
    while True:
        held.append(np.ones(2**23))  # 64 MiB
        time.sleep(0.02)


def refuse(piece: Piece, seed: int) -> list[Finding]:
    """An error meant for the user."""
    raise InputError("noise", "x", "another is allowed")
