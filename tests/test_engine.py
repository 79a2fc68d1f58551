"""The engine: the same bits whatever runs the work."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import BrokenExecutor, Future, ThreadPoolExecutor

import pandas as pd
import pytest

import theory_lab
from theory_lab import engine
from theory_lab.claims import Point
from theory_lab.engine import Engine, merge, plan_tasks, start_pool, validate_workers, worker_pool
from theory_lab.errors import InputError, WorkerError
from theory_lab.estimation import BlockSum, Cell
from theory_lab.experiments import COLUMNS

GRID = {"noise": ["gaussian", "two-point"], "length": [2, 100, 10**6], "rho": [0.0, 0.3], "trials": 300_000}
RESULTS = [name for name in COLUMNS if name != "seconds"]


@pytest.fixture(scope="module")
def alone() -> pd.DataFrame:
    return theory_lab.check(**GRID, workers=1)


def test_same_bits_for_any_number_of_workers(alone: pd.DataFrame, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "_POOL_WORTH_SECONDS", 0.0)  # even this little work goes to processes
    pd.testing.assert_frame_equal(theory_lab.check(**GRID, workers=3)[RESULTS], alone[RESULTS], check_exact=True)


def test_any_executor(alone: pd.DataFrame) -> None:
    with ThreadPoolExecutor(3) as threads:
        rows = theory_lab.check(**GRID, executor=threads)
        assert threads.submit(int, "7").result() == 7  # it was not shut down
    pd.testing.assert_frame_equal(rows[RESULTS], alone[RESULTS], check_exact=True)


def test_seeds_matter(alone: pd.DataFrame) -> None:
    other = theory_lab.check(**GRID, seed=1, workers=1)
    moved = (other.estimate != alone.estimate)[alone.standard_error > 0]
    assert moved.mean() > 0.9


def test_plan_covers_the_trials_once() -> None:
    cell = Cell("survivors", Point("gaussian", 1000), "tail", 0)
    tasks = plan_tasks(cell, 1_000_000)
    blocks = [block for task in tasks for block in task.blocks]
    assert [index for index, _ in blocks] == list(range(len(blocks)))
    assert sum(trials for _, trials in blocks) == 1_000_000


def test_plan_extends() -> None:
    """Full blocks are kept, a partial last one is drawn again, new ones are added."""
    cell = Cell("survivors", Point("gaussian", 1000), "tail", 0)
    size = plan_tasks(cell, 10**6)[0].blocks[0][1]
    have = [BlockSum(0, size, 1.0, 1.0), BlockSum(1, 10, 1.0, 1.0)]
    blocks = [block for task in plan_tasks(cell, 2 * size + 5, have) for block in task.blocks]
    assert blocks == [(1, size), (2, 5)]
    assert plan_tasks(cell, size, have) == []
    assert merge(have, [BlockSum(1, size, 2.0, 2.0)])[1].total == 2.0


def test_deadline_stops_new_work() -> None:
    cell = Cell("survivors", Point("gaussian", 1000), "tail", 0)
    with Engine(1) as runner:
        assert list(runner.run(plan_tasks(cell, 10**7), deadline=time.monotonic())) == []


@pytest.mark.parametrize("workers", [0, -1, 1.5, True, 5000])
def test_bad_workers(workers: object) -> None:
    with pytest.raises(InputError, match="workers"):
        validate_workers(workers)


def test_a_script_needs_no_main_guard(tmp_path) -> None:
    """Worker processes do not run the caller's script a second time."""
    script = tmp_path / "script.py"
    script.write_text(
        "import theory_lab\nfrom theory_lab import engine\nengine._POOL_WORTH_SECONDS = 0\nprint('once')\n"
        "rows = theory_lab.check('tda-4.3', noise='gaussian', length=[10, 100], trials=300000, workers=2)\n"
        "print(len(rows))\n"
    )
    found = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120, check=True)
    assert found.stdout.split() == ["once", "2"]


def test_a_dead_worker_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    class Dying(ThreadPoolExecutor):
        def submit(self, *_: object):
            future: Future = Future()
            future.set_exception(BrokenExecutor("gone"))
            return future

    with Dying(1) as executor, pytest.raises(WorkerError, match="a worker process died"):
        theory_lab.check("tda-4.3", noise="gaussian", length=10, executor=executor)


def test_an_interrupted_pool_leaves_no_thread_behind() -> None:
    """One that is still closing its pipe when Python exits, and writes into it, prints a traceback."""
    managers = []

    def interrupted() -> None:
        with worker_pool(1) as pool:
            managers.append(pool._executor_manager_thread)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert [thread.is_alive() for thread in managers] == [False]


def test_nor_does_an_interrupted_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """And a second Ctrl-C does not keep it from that."""
    managers = []

    def interrupted() -> None:
        with Engine(1) as found:
            found._pool = start_pool(1)
            managers.append(found._pool._executor_manager_thread)
            raise KeyboardInterrupt

    end = engine.end_workers

    def end_and_interrupt(pool: object) -> None:
        end(pool)
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(engine, "end_workers", end_and_interrupt)
    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert [thread.is_alive() for thread in managers] == [False]
