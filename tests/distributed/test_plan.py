"""Plans: what a run will take."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence

import numpy as np
import pytest

from theory_lab.claims import Point
from theory_lab.distributed.plan import calibrate, makespan, plan_run
from theory_lab.engine import PieceTask, Task, TaskResult, plan_tasks
from theory_lab.errors import InputError
from theory_lab.estimation import Cell
from theory_lab.experiments import run
from theory_lab.settings import Budget, Settings
from theory_lab.store import Store
from theory_lab.studies import Piece
from theory_lab.studies.tda import _distinct


class Machine:
    """A machine on which every kind of task takes its own multiple of its estimate, give or take a half."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._factors: dict[str, float] = {}
        self.now = 0.0

    def seconds(self, task: Task | PieceTask) -> float:
        kind = task.piece.study if isinstance(task, PieceTask) else task.cell.estimator + task.cell.point.noise
        factor = self._factors.setdefault(kind, self._rng.uniform(0.2, 5.0))
        return task.seconds * factor * random.Random(repr(task)).uniform(0.5, 1.5)

    def run(self, some: Sequence[Task | PieceTask]) -> list[TaskResult]:
        """All at a time."""
        took = [self.seconds(task) for task in some]
        self.now += max(took)
        return [TaskResult(task, (), (), seconds) for task, seconds in zip(some, took, strict=True)]


def tasks() -> list[Task | PieceTask]:
    """Some thousand tasks of six kinds, and pieces."""
    found: list[Task | PieceTask] = []
    for estimator in ("tail", "direct", "importance"):
        for noise in ("gaussian", "laplace"):
            for kappa in range(1, 300):
                cell = Cell("survivors", Point(noise, 100, kappa=float(kappa)), estimator, 0)
                found += plan_tasks(cell, 100_000 + 1000 * kappa)
    found += [PieceTask(Piece.of("some", 0.2 + 0.01 * k, k=k), 0) for k in range(20)]
    return found


@pytest.mark.parametrize("width", [1, 2, 16])
@pytest.mark.parametrize("seed", range(4))
def test_the_work_is_right_within_30_percent(seed: int, width: int) -> None:
    machine, every = Machine(seed), tasks()
    results, expect = calibrate(every, 8.0, machine.run, width, lambda: machine.now)
    assert machine.now < 10.0
    assert len(results) < 0.6 * len(every)
    truth = sum(map(machine.seconds, every))
    assert sum(map(expect, every)) == pytest.approx(truth, rel=0.3)


def test_a_task_far_longer_than_any_tried_is_not_scaled_like_those() -> None:
    short = [PieceTask(Piece.of("some", 0.1, k=k), 0) for k in range(5)]
    long = PieceTask(Piece.of("some", 20.0, k=5), 0)
    other = [PieceTask(Piece.of(name, 0.1), 0) for name in ("a", "b", "c")]

    def run(some: Sequence[Task | PieceTask]) -> list[TaskResult]:
        return [TaskResult(task, (), (), 0.001 if task in short else 0.1) for task in some]

    _, expect = calibrate([*short, long, *other], 50.0, run, 1, iter(range(100)).__next__)
    assert expect(long) == pytest.approx(20.0)
    assert expect(short[0]) == pytest.approx(0.001)


def test_a_long_task_of_one_of_two_studies_is_scaled_by_both() -> None:
    tasks = [PieceTask(Piece.of(name, 0.1), 0) for name in ("a", "b")]
    long = PieceTask(Piece.of("b", 20.0, k=1), 0)

    def run(some: Sequence[Task | PieceTask]) -> list[TaskResult]:
        return [TaskResult(task, (), (), 0.05 if task.piece.study == "a" else 0.2) for task in some]

    _, expect = calibrate([*tasks, long], 50.0, run, 1, iter(range(100)).__next__)
    assert expect(long) == pytest.approx(20.0 * (0.5 + 2.0) / 2)


@pytest.mark.parametrize(("mean", "draws"), [(0.07, 30_000), (1.0, 1000), (300.0, 400), (8e5, 8)])
def test_a_rate_study_knows_how_many_tables_it_will_make(mean: float, draws: int) -> None:
    rng = np.random.Generator(np.random.Philox(1))
    found = [np.unique(rng.poisson(mean, draws)).size for _ in range(200)]
    error = np.std(found) / math.sqrt(len(found))
    assert _distinct(mean, draws) == pytest.approx(np.mean(found), abs=6 * error + 0.02 * np.mean(found))


def test_makespan() -> None:
    assert makespan([3.0, 1.0, 1.0, 1.0], 2) == 3.0
    assert makespan([1.0] * 7, 2) == 4.0
    assert makespan([5.0], 100) == 5.0


def test_what_the_folder_has_is_not_planned(tmp_path) -> None:
    settings = Settings(("tda-4.3",), noise=("gaussian",), length=(10, 100), trials=20_000)
    fresh = plan_run(settings, 2, price_per_hour=3600.0)
    assert (fresh.cells, fresh.pieces, fresh.found, fresh.draws) == (2, 0, 0, 40_000)
    assert fresh.price == pytest.approx(2 * fresh.seconds)
    run(settings, store=Store(tmp_path / "out"), workers=1)
    again = plan_run(settings, 2, store=Store(tmp_path / "out", resume=True))
    assert (again.cells, again.found, again.draws, again.work) == (0, 2, 0, 0.0)


def test_what_cannot_be_planned() -> None:
    with pytest.raises(InputError, match="plan: with a budget"):
        plan_run(Settings(("tda-4.3",), budget=Budget(seconds=1.0)), 2)


def test_the_command(cli) -> None:
    words = ("check", "tda-4.3", "--noise", "gaussian", "--length", "100", "--trials", "1000", "--workers", "8")
    found = cli(*words, "--plan", "--price-per-hour", "0.5", "--format", "json")
    assert found.returncode == 0, found.stderr
    plan = json.loads(found.stdout)
    assert plan["cells"] == 1
    assert plan["workers"] == 8
    assert plan["price"] == pytest.approx(0.5 * plan["hours"])
