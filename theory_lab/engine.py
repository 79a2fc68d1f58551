"""Where cells run: in this process, on any executor with the ``concurrent.futures`` interface, or on a cluster.

Work is cut into tasks of whole blocks. A block's draws depend on (seed, cell, block) alone, so it does not matter
which worker runs it, in which order, or in which run.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Executor, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from typing import Protocol

from theory_lab.ending import INTERRUPTS, TERMINATIONS, begin_worker, ignored
from theory_lab.errors import InputError, WorkerError
from theory_lab.estimation import BlockSum, Cell, sampler
from theory_lab.streams import Streams
from theory_lab.studies import STUDIES, Finding, Piece

_TASK_SECONDS = 0.2
_MOST_BLOCKS = 1_000_000
#: Below this much work, starting worker processes costs more than it saves.
_POOL_WORTH_SECONDS = 1.5
#: How long workers that were ended are waited for.
_FAREWELL_SECONDS = 5.0
#: For the C library of a worker process. Blocks use arrays of some megabytes again and again; by default, and all the
#: more with Dask's settings, their pages go back to the system each time, and new ones cost as much as the work.
WORKER_ENVIRONMENT = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(128 << 20),
}
_DIED = "a worker process died (killed, or out of memory); try fewer with --workers"


@dataclass(frozen=True)
class Task:
    """Some blocks of a cell: pairs of block index and trials."""

    cell: Cell
    blocks: tuple[tuple[int, int], ...]

    @property
    def seconds(self) -> float:
        """Rough cost."""
        return sampler(self.cell).seconds_per_trial(self.cell) * sum(t for _, t in self.blocks)

    @property
    def here(self) -> bool:
        """Whether it must run in this process: there is one GPU, and it takes one process's work at a time."""
        return self.cell.device != "cpu"


@dataclass(frozen=True)
class PieceTask:
    """A piece of a study."""

    piece: Piece
    seed: int

    @property
    def seconds(self) -> float:
        """Rough cost."""
        return self.piece.cost

    @property
    def here(self) -> bool:
        """Whether it must run in this process."""
        return self.piece.local


@dataclass(frozen=True)
class TaskResult:
    """What a task left behind, blocks of a cell or findings of a piece, and the seconds it took."""

    task: Task | PieceTask
    blocks: tuple[BlockSum, ...]
    findings: tuple[Finding, ...]
    seconds: float


def run_task(task: Task | PieceTask) -> TaskResult:
    """Run a task in this process."""
    started = time.perf_counter()
    if isinstance(task, PieceTask):
        findings = tuple(STUDIES[task.piece.study].work(task.piece, task.seed))
        return TaskResult(task, (), findings, time.perf_counter() - started)
    estimator, digest = sampler(task.cell), task.cell.digest
    done = tuple(estimator.run_block(task.cell, block, trials, Streams(digest, block)) for block, trials in task.blocks)
    return TaskResult(task, done, (), time.perf_counter() - started)


def plan_tasks(cell: Cell, trials: int, have: Iterable[BlockSum] = ()) -> list[Task]:
    """Cut the blocks that a cell still needs for ``trials`` trials into tasks of about a fifth of a second.

    Blocks already drawn in full are kept; a last, partial block is drawn again at its new size, which begins with
    the same numbers.
    """
    estimator = sampler(cell)
    size = estimator.block_trials(cell)
    if trials > _MOST_BLOCKS * size:
        raise InputError("trials", trials, f"at most {_MOST_BLOCKS * size} are allowed for this cell")
    drawn = {block.block: block.trials for block in have}
    needed = []
    for block in range((trials + size - 1) // size):
        wanted = min(size, trials - block * size)
        if drawn.get(block, 0) < wanted:
            needed.append((block, wanted))
    per_task = max(1, int(_TASK_SECONDS / (estimator.seconds_per_trial(cell) * size)))
    return [Task(cell, tuple(needed[i : i + per_task])) for i in range(0, len(needed), per_task)]


def merge(have: Iterable[BlockSum], new: Iterable[BlockSum]) -> list[BlockSum]:
    """Blocks in order of their index, newer ones replacing older ones."""
    by_index = {block.block: block for block in have}
    by_index.update({block.block: block for block in new})
    return [by_index[index] for index in sorted(by_index)]


def validate_workers(workers: int | None) -> int:
    """Number of worker processes: as asked, or as many as this process may use cores."""
    if workers is None:
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if isinstance(workers, bool) or not isinstance(workers, int) or not 1 <= workers <= 4096:
        raise InputError("workers", workers, "a whole number from 1 to 4096 is allowed")
    return workers


class Elsewhere(Protocol):
    """Another place where tasks run, such as a cluster (:class:`theory_lab.distributed.cluster.Cluster`)."""

    def run(self, tasks: Sequence[Task | PieceTask], deadline: float = float("inf")) -> Iterator[list[TaskResult]]:
        """See :meth:`Engine.run`."""


class Engine:
    """Runs tasks, in this process, on an executor or elsewhere.

    Parameters
    ----------
    workers : int, optional
        Worker processes of the pool made on demand; 1 runs everything here.
    executor : concurrent.futures.Executor, optional
        Runs the tasks instead, and is not shut down.
    elsewhere : Elsewhere, optional
        Runs the tasks instead, and is not closed.
    """

    def __init__(
        self, workers: int | None = None, executor: Executor | None = None, elsewhere: Elsewhere | None = None
    ) -> None:
        self._workers = validate_workers(workers)
        self._given = executor
        self._elsewhere = elsewhere
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if self._pool is None:
            return
        if kind is None:
            self._pool.shutdown(cancel_futures=True)
        else:
            _leave(self._pool)

    def run(self, tasks: Sequence[Task | PieceTask], deadline: float = float("inf")) -> Iterator[list[TaskResult]]:
        """Yield results as they finish, those that arrive at a time as one list.

        After ``deadline`` (``time.monotonic``) no further task is begun.
        """
        if self._elsewhere is not None:
            yield from self._elsewhere.run(tasks, deadline)
            return
        elsewhere = [task for task in tasks if not task.here]
        executor = self._executor(elsewhere)
        if executor is None:
            for task in tasks:
                if time.monotonic() >= deadline:
                    return
                yield [run_task(task)]
            return
        waiting, own = iter(elsewhere), (task for task in tasks if task.here)
        running: set[Future[TaskResult]] = set()
        room = 4 * self._workers if self._given is None else 64
        while True:
            while len(running) < room and time.monotonic() < deadline:
                upcoming = next(waiting, None)
                if upcoming is None:
                    break
                try:
                    running.add(executor.submit(run_task, upcoming))
                except BrokenExecutor:  # what finished before is handed on first
                    if not running:
                        raise WorkerError(_DIED) from None
                    break
            mine = next(own, None) if time.monotonic() < deadline else None
            if mine is not None:
                yield [run_task(mine)]
            elif not running:
                return
            finished, running = wait(running, None if mine is None else 0, FIRST_COMPLETED)
            yield from _together(finished)

    def _executor(self, tasks: Sequence[Task | PieceTask]) -> Executor | None:
        if self._given is not None:
            return self._given
        if self._pool is None:
            if not worth_a_pool(tasks, self._workers):
                return None
            self._pool = start_pool(self._workers)
        return self._pool


def _together(finished: Iterable[Future[TaskResult]]) -> Iterator[list[TaskResult]]:
    """Results of futures that are done; what is there is handed on before the error of another is raised."""
    results: list[TaskResult] = []
    error: Exception | None = None
    for future in finished:
        try:
            results.append(future.result())
        except BrokenExecutor:
            error = WorkerError(_DIED)
        except Exception as other:
            error = error or other
    if results:
        yield results
    if error is not None:
        raise error


def worth_a_pool(tasks: Sequence[Task | PieceTask], workers: int) -> bool:
    """Whether starting worker processes saves time."""
    return workers > 1 and len(tasks) > 1 and sum(task.seconds for task in tasks) >= _POOL_WORTH_SECONDS


def start_pool(workers: int) -> ProcessPoolExecutor:
    """Start a pool of fresh interpreters.

    Forking a process with threads is unsafe, so workers are spawned. Spawning would run the caller's script a second
    time unless it guards its main part; tasks need nothing of it, so it is hidden while the workers start.
    """
    context = multiprocessing.get_context("spawn")
    with hidden_main(), ignored(*INTERRUPTS), _environment(WORKER_ENVIRONMENT):
        pool = ProcessPoolExecutor(workers, mp_context=context, initializer=begin_worker)
        naps = [pool.submit(_nap) for _ in range(workers)]
    wait(naps)
    return pool


@contextlib.contextmanager
def worker_pool(workers: int) -> Iterator[ProcessPoolExecutor]:
    """A pool of fresh interpreters, which end at once if the block is left by an error or a signal."""
    pool = start_pool(workers)
    try:
        yield pool
    except BaseException:
        _leave(pool)
        raise
    pool.shutdown()


def _leave(pool: ProcessPoolExecutor) -> None:
    """End a pool at once, its own thread included."""
    with ignored(*INTERRUPTS, *TERMINATIONS):  # a second Ctrl-C would leave it half ended
        manager = getattr(pool, "_executor_manager_thread", None)
        end_workers(pool)
        pool.shutdown(wait=False, cancel_futures=True)
        if manager is not None:
            # When Python exits it writes into a pipe that this thread closes: at the same moment that is a traceback.
            manager.join(_FAREWELL_SECONDS)


@contextlib.contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """What processes started here inherit; what the user has set stays."""
    added = [name for name in values if name not in os.environ]
    os.environ.update({name: values[name] for name in added})
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


def _nap() -> None:
    # Long enough that the next submission finds no idle worker and starts another.
    time.sleep(0.05)


@contextlib.contextmanager
def hidden_main() -> Iterator[None]:
    main = sys.modules["__main__"]
    names = ("__file__", "__spec__")
    saved = {name: main.__dict__[name] for name in names if name in main.__dict__}
    try:
        for name in saved:
            main.__dict__[name] = None
        main.__dict__.pop("__file__", None)
        yield
    finally:
        main.__dict__.update(saved)


def end_workers(pool: ProcessPoolExecutor) -> None:
    """Stop the workers at once: their unfinished work is not worth waiting for."""
    if hasattr(pool, "terminate_workers"):  # Python 3.14
        pool.terminate_workers()
        return
    for process in list((getattr(pool, "_processes", None) or {}).values()):
        process.terminate()
