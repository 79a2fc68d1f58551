"""Resuming a finished sweep: what it takes grows with the number of cells, and little with each."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

import theory_lab
from theory_lab.claims import CLAIMS
from theory_lab.estimation import Cell
from theory_lab.experiments import Settings, build_cases
from theory_lab.store import Store
from theory_lab.store.cells import BlockTable
from theory_lab.store.packs import PackWriter
from theory_lab.store.versions import provenance

#: Calls of functions, Python's and C's, that a cell may cost: 51 were counted, and 279 while each was an object.
MOST_CALLS = 100


def grid(kappas: int) -> dict[str, Any]:
    return {
        "claims": ["tda-4.3", "tda-4.6"],
        "noise": ["gaussian", "uniform"],
        "length": [100, 2000],
        "kappa": np.linspace(1.0, 3.0, kappas).tolist(),
        "beta": 0.7,
        "trials": 50,
    }


def finished(path: Path, asked: dict[str, Any]) -> int:
    """A folder with every cell of a sweep, its counts made up; returns how many."""
    Store(path)
    settings = Settings(**{name: tuple(np.atleast_1d(v).tolist()) for name, v in asked.items() if name != "trials"})
    cells = {cell.digest: cell for case in build_cases(settings) if (cell := case.cell(0)) is not None}
    writer = PackWriter(path / "packs")
    for index, (name, cell) in enumerate(sorted(cells.items())):
        columns = {"block": [0], "trials": [50], "total": [index % 40], "total_sq": [index % 40]}
        table = BlockTable({column: np.array(values) for column, values in columns.items()})
        about = {"cell": cell.identity(), "seed": 0, **provenance(), "format": 2}
        about["checksum"] = table.checksum(name, about)
        writer.add(name, table, about)
    writer.finish()
    writer.seal()
    return len(cells)


def counted(path: Path, asked: dict[str, Any]) -> tuple[Counter[str], int]:
    """Calls by kind while the sweep is resumed; and its rows."""
    calls: Counter[str] = Counter()

    def count(frame: FrameType, event: str, argument: Any) -> None:
        calls[event] += 1
        if event == "c_call" and argument.__name__ in ("open", "stat", "listdir", "scandir"):
            calls["files"] += 1

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        rows = theory_lab.check(**asked, workers=1, out=path, resume=True)
    finally:
        sys.setprofile(before)
    assert (rows.trials == 50).all()
    return calls, len(rows)


def test_a_finished_sweep_costs_little_for_each_cell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(*given: object) -> None:
        raise AssertionError("nothing is left to draw")

    monkeypatch.setattr("theory_lab.engine.run_task", nothing)
    sizes = []
    for kappas in (10, 60, 240):  # the first imports what is needed
        path = tmp_path / str(kappas)
        cells = finished(path, grid(kappas))
        calls, rows = counted(path, grid(kappas))
        assert rows == cells
        sizes.append((cells, calls))
    (small, few), (large, many) = sizes[1:]
    assert many["call"] + many["c_call"] - few["call"] - few["c_call"] < MOST_CALLS * (large - small)
    assert many["files"] == few["files"]


def test_columns_are_what_single_cells_are() -> None:
    """Every column of a sweep, against the scalar functions of its points."""
    settings = Settings(
        tuple(CLAIMS), ("gaussian", "two-point", "student-t", "laplace", "truncated-normal", "rademacher", "spherical"),
        (1, 77, 10**6), kappa=(1, 0.3), beta=(1.0, 0.8), sigma=(1.0, 0.5), rho=(0.0, 0.4), head_dim=(8, 64),
    )  # fmt: skip
    for group in build_cases(settings).groups:
        points = group.points
        kept = list(points)
        assert [p.tail for p in kept] == points.tails.tolist()
        assert [p.tau for p in kept] == points.taus.tolist()
        assert [group.claim.bound(p) for p in kept] == group.bounds.tolist()
        assert [group.claim.exact(p) for p in kept] == points.map(group.claim.exact, joint=True)
        assert [group.claim.unmet(p) for p in kept] == points.map(group.claim.unmet)
        some = [0, len(kept) // 2, len(kept) - 1]
        assert [points.take(np.array(some))[i] for i in range(3)] == [kept[i] for i in some]


def test_names_of_cells_in_a_sweep_are_their_digests() -> None:
    from theory_lab.estimation.base import digests

    settings = Settings(("tda-4.6",), ("gaussian",), (5, 50), kappa=(1, 1.5), rho=(0.0, -0.25), head_dim=(3, 64))
    (group,) = build_cases(settings).groups
    for estimator, seed in (("tail", 0), ("direct", 2**62)):
        cells = [Cell("consensus", point, estimator, seed) for point in group.points]
        assert digests("consensus", group.points, estimator, seed) == [cell.digest for cell in cells]
