"""What a run will take, before it is run: cells, draws, time and price, from a short calibration on this machine."""

from __future__ import annotations

import contextlib
import heapq
import importlib
import math
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from theory_lab.cases import build_cases, build_pieces
from theory_lab.engine import PieceTask, Task, TaskResult, run_task, validate_workers, worker_pool, worth_a_pool
from theory_lab.errors import InputError
from theory_lab.runner import Runner
from theory_lab.settings import Settings, Silent
from theory_lab.studies import STUDIES

if TYPE_CHECKING:
    from theory_lab.store import Store

#: Seconds that calibration takes, about; one task more may begin within them.
CALIBRATION_SECONDS = 5.0
#: Pieces whose own estimate is longer are not run for calibration.
_LONG_PIECE = 2.5
#: A task of more than this many times the estimate of the longest that was run is another matter.
_FAR = 5.0
#: Seconds that a result costs the process that collects them, apart from what is measured.
_COLLECT = 4e-4
#: The order in which tasks are tried is random, and always the same.
_SEED = 20260101


@dataclass(frozen=True)
class Plan:
    """What a run is expected to take.

    Attributes
    ----------
    cells, pieces : int
        Cells, and pieces of studies, that are not finished yet.
    found : int
        Cells and pieces that the results folder has.
    draws : int
        Rows, or weighted samples, to draw.
    tasks : int
        Units of work.
    work : float
        Seconds of one worker for all of them.
    longest : float
        Seconds of the longest task: no number of workers makes the run shorter.
    workers : int
        Workers that the time is for.
    seconds : float
        The run's time, from the command to its rows.
    hours : float
        Worker-hours that are paid for.
    price : float or None
        For the given price of a worker's hour.
    measured : int
        Tasks that were run to find out.
    """

    cells: int
    pieces: int
    found: int
    draws: int
    tasks: int
    work: float
    longest: float
    workers: int
    seconds: float
    hours: float
    price: float | None
    measured: int

    def describe(self) -> dict[str, Any]:
        """JSON-serializable form."""
        return asdict(self)


def plan_run(
    settings: Settings,
    workers: int,
    *,
    price_per_hour: float | None = None,
    store: Store | None = None,
    keep: bool = False,
    seconds: float = CALIBRATION_SECONDS,
    started: float = 0.0,
) -> Plan:
    """Plan a run.

    Parameters
    ----------
    settings : Settings
    workers : int
        Workers, each as fast as this process on this machine.
    price_per_hour : float, optional
        Of one worker.
    store : Store, optional
        What it holds is not planned.
    keep : bool
        Whether the run will write a results folder.
    seconds : float
        For calibration, about.
    started : float
        Seconds that the command took until here, as the run's will.

    Raises
    ------
    InputError
        For a sequential run, whose length its budget says, and for one on a GPU.
    """
    if settings.budget is not None:
        raise InputError("plan", "with a budget", "the budget says how long it draws: leave one of them out")
    if settings.device != "cpu":
        raise InputError("plan", f"device {settings.device}", "runs on the CPU can be planned")
    cases = build_cases(settings)
    pieces, _ = build_pieces(settings)
    runner = Runner(settings, cases, pieces, store, Silent())
    runner.load()
    tasks = runner.tasks()
    elsewhere = [task for task in tasks if not task.here]
    start = importing = 0.0
    modules = _modules(tasks)
    if worth_a_pool(elsewhere, workers):
        # As many at a time as there will be: workers slow each other down.
        width = min(workers, validate_workers(None))
        began = time.perf_counter()
        with worker_pool(width) as pool:
            list(pool.map(_import, [modules] * width))  # no part of what a task takes
            start = time.perf_counter() - began
            results, expect = calibrate(tasks, seconds, lambda some: list(pool.map(run_task, some)), width)
    else:
        importing = _import(modules)
        results, expect = calibrate(tasks, seconds, lambda some: [run_task(task) for task in some])
    expected = [expect(task) for task in tasks]
    a_case = _seconds_per_case(runner, results)
    a_cell = _seconds_per_saved_cell(results) if keep else 0.0
    cells = len({task.cell for task in tasks if isinstance(task, Task)})
    left = cells + sum(isinstance(task, PieceTask) for task in tasks)
    collecting = len(tasks) * _COLLECT + cells * a_cell
    drawing = max(makespan(expected, workers), collecting) if start else sum(expected) + collecting
    total = started + importing + start + drawing + len(cases) * a_case
    every, all_pieces = runner.counts()
    return Plan(
        cells=cells,
        pieces=left - cells,
        found=every + all_pieces - left,
        draws=sum(trials for task in tasks if isinstance(task, Task) for _, trials in task.blocks),
        tasks=len(tasks),
        work=sum(expected),
        longest=max(expected, default=0.0),
        workers=workers,
        seconds=total,
        hours=workers * total / 3600.0,
        price=None if price_per_hour is None else workers * total / 3600.0 * price_per_hour,
        measured=len(results),
    )


def _modules(tasks: Sequence[Task | PieceTask]) -> tuple[str, ...]:
    """What the first task of some studies imports."""
    needed = any(isinstance(task, PieceTask) and STUDIES[task.piece.study].needs_torch for task in tasks)
    return ("torch",) if needed else ()


def _import(names: Sequence[str]) -> float:
    """Import modules; returns the seconds that it took."""
    began = time.perf_counter()
    for name in names:
        with contextlib.suppress(ImportError):  # its tasks will say so
            importlib.import_module(name)
    return time.perf_counter() - began


def _stratum(task: Task | PieceTask) -> tuple[str, ...]:
    """Tasks whose estimates are off by a like factor."""
    if isinstance(task, PieceTask):
        return ("piece", task.piece.study)
    return (task.cell.estimator, task.cell.statistic, task.cell.point.noise)


def calibrate(
    tasks: Sequence[Task | PieceTask],
    seconds: float,
    run: Callable[[Sequence[Task | PieceTask]], list[TaskResult]],
    width: int = 1,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[list[TaskResult], Callable[[Task | PieceTask], float]]:
    """Run some tasks of every kind, ``width`` at a time, and say how long others of these kinds will take.

    Tasks are grouped by estimator, statistic and noise, or by study. Each group has one of its tasks run, groups of
    short ones first; then they take turns, those with the most work first, until each has used its share of the time.
    Within a group the order is random. A group's own estimates are then scaled by measured over estimated seconds of
    its tasks that were run; those of a group of which none could be run, and those of tasks far longer than any that
    was run, by the median of these factors over the groups.

    Returns
    -------
    results : list of TaskResult
        Of the tasks that were run.
    expect : callable
        Seconds of a task.
    """
    groups: dict[tuple[str, ...], list[Task | PieceTask]] = {}
    for task in tasks:
        groups.setdefault(_stratum(task), []).append(task)
    shuffled = random.Random(_SEED)
    weights = {key: sum(task.seconds for task in group) for key, group in groups.items()}
    queues = {}
    for key, group in groups.items():
        short = [task for task in group if isinstance(task, Task) or task.seconds <= _LONG_PIECE]
        queues[key] = shuffled.sample(short, len(short))
    results: list[TaskResult] = []
    trials: dict[tuple[str, ...], _Trial] = {key: _Trial() for key in groups}
    end = clock() + seconds

    def attempt(keys: Sequence[tuple[str, ...]]) -> None:
        chosen = [(key, queues[key].pop()) for key in keys if queues[key]]
        if not chosen or clock() >= end:
            return
        for (key, task), result in zip(chosen, run([task for _, task in chosen]), strict=True):
            results.append(result)
            trials[key].add(max(task.seconds, 1e-9), result.seconds)

    def turns(keys: Sequence[tuple[str, ...]]) -> None:
        """Each key once, or more often where there are fewer of them than run at a time."""
        keys = list(keys) * -(-width // max(len(keys), 1))
        for first in range(0, len(keys), width):
            attempt(keys[first : first + width])

    turns(sorted((key for key in queues if queues[key]), key=lambda key: queues[key][-1].seconds))
    by_weight = sorted(queues, key=lambda key: -weights[key])
    share = {key: width * max(seconds * weights[key] / sum(weights.values()), 0.02 * seconds) for key in groups}
    while clock() < end:
        hungry = [key for key in by_weight if queues[key] and trials[key].measured < share[key]]
        if not hungry:
            break
        turns(hungry)
    ratios = [trial.measured / trial.estimated for trial in trials.values() if trial.estimated]
    median = statistics.median(ratios) if ratios else 1.0

    def expect(task: Task | PieceTask) -> float:
        estimate, trial = max(task.seconds, 1e-9), trials.get(_stratum(task))
        known = trial is not None and estimate <= _FAR * trial.longest
        return estimate * (trial.measured / trial.estimated if trial is not None and known else median)

    return results, expect


@dataclass
class _Trial:
    """What is known of a group."""

    estimated: float = 0.0
    measured: float = 0.0
    longest: float = 0.0

    def add(self, estimated: float, measured: float) -> None:
        self.estimated += estimated
        self.measured += measured
        self.longest = max(self.longest, estimated)


def makespan(seconds: Sequence[float], workers: int) -> float:
    """When the last of ``workers`` is done, each taking the next task as soon as it is free."""
    free = [0.0] * workers
    for value in seconds:
        heapq.heapreplace(free, free[0] + value)
    return max(free)


def _seconds_per_case(runner: Runner, results: Sequence[TaskResult]) -> float:
    """Seconds that verdict and row of a case take, by making those of the cells that calibration finished."""
    runner.take(results)
    began = time.perf_counter()
    rows = len(runner.rows(finished_only=True))
    return (time.perf_counter() - began) / rows if rows else 0.0


def _seconds_per_saved_cell(results: Sequence[TaskResult]) -> float:
    """Seconds that writing a cell takes here."""
    from theory_lab.store import Store

    done = [(result.task.cell, result.blocks, result.seconds) for result in results if isinstance(result.task, Task)]
    if not done:
        return 0.0
    with tempfile.TemporaryDirectory() as folder:
        store = Store(Path(folder) / "trial")
        began = time.perf_counter()
        store.save_many(done[:64])
        return (time.perf_counter() - began) / len(done[:64])


def seconds_since_start() -> float:
    """Seconds that this process exists; 0 where the system does not say."""
    try:
        with open("/proc/self/stat", encoding="ascii") as stat, open("/proc/uptime", encoding="ascii") as uptime:
            began = int(stat.read().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
            return max(float(uptime.read().split()[0]) - began, 0.0)
    except (OSError, ValueError, IndexError):
        return 0.0


def show(plan: Plan) -> str:
    """The plan as lines of text."""
    many = "" if plan.workers == 1 else "s"
    lines = [
        f"cells    {plan.cells:,}, and {plan.pieces:,} pieces of studies"
        + (f"; {plan.found:,} more are in the results folder" if plan.found else ""),
        f"draws    {plan.draws:.4g} rows or weighted samples, in {plan.tasks:,} tasks",
        f"work     {_time(plan.work)} of one worker (from {plan.measured} tasks that were run); the longest task "
        f"takes {_time(plan.longest)}",
        f"time     {_time(plan.seconds)} with {plan.workers:,} worker{many} as fast as this machine",
        f"workers  {plan.hours:.3g} hours in all" + ("" if plan.price is None else f", price {plan.price:.4g}"),
    ]
    return "\n".join(lines)


def _time(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.3g} s"
    if seconds < 7200:
        return f"{seconds / 60:.3g} min"
    return f"{seconds / 3600:.3g} h" if math.isfinite(seconds) else "for ever"
