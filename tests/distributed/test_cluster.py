"""Cells on Dask workers: the same bits, whatever is lost on the way."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from odd_studies import piece, process_ids

from theory_lab.cases import build_cases
from theory_lab.claims import Point
from theory_lab.distributed import cluster as clusters
from theory_lab.distributed import dispatch, sending, work
from theory_lab.distributed.address import Scheduler
from theory_lab.distributed.cluster import Cluster
from theory_lab.engine import Task, TaskResult, plan_tasks, run_task
from theory_lab.errors import InputError, WorkerError
from theory_lab.estimation import Cell
from theory_lab.experiments import COLUMNS, Budget, Settings, run
from theory_lab.noise import get_family
from theory_lab.store import Store

GRID = Settings(noise=("gaussian", "two-point"), length=(2, 100, 10**6), rho=(0.0, 0.3), trials=300_000)
LENGTHS = (*(2 * 4**k for k in range(10)), 2**20)
SWEEP = Settings(("tda-4.3",), noise=("gaussian",), length=LENGTHS, kappa=(1.0, 2.0))
RESULTS = [name for name in COLUMNS if name != "seconds"]


def same(rows: pd.DataFrame, others: pd.DataFrame) -> None:
    pd.testing.assert_frame_equal(rows[RESULTS], others[RESULTS], check_exact=True)


def cells(count: int, trials: int = 300_000) -> list[Task]:
    """Tasks of ``count`` cells, some ten milliseconds each."""
    points = [Point("gaussian", 1000, kappa=1.0 + k / count) for k in range(count)]
    return [task for point in points for task in plan_tasks(Cell("survivors", point, "tail", 0), trials)]


def collect(cluster: Cluster, tasks: list[Any], **more: Any) -> list[TaskResult]:
    return [result for results in cluster.run(tasks, **more) for result in results]


def check_once(found: list[TaskResult], tasks: list[Task]) -> None:
    """Every task has one result, that of this process."""
    assert len(found) == len(tasks)
    by_task = {result.task: result.blocks for result in found}
    assert [by_task[task] for task in tasks] == [run_task(task).blocks for task in tasks]


def test_same_bits(cluster: Cluster) -> None:
    """Studies, which are pieces, included."""
    same(run(GRID, elsewhere=cluster), run(GRID, workers=1))


def test_same_bits_drawn_until_decided(cluster: Cluster) -> None:
    settings = replace(GRID, claims=("tda-4.3",), budget=Budget(trials=3e6), trials=None, rho=None)
    same(run(settings, elsewhere=cluster), run(settings, workers=1))


def test_no_more_begins_after_the_deadline(cluster: Cluster) -> None:
    assert collect(cluster, cells(4), deadline=time.monotonic()) == []


def test_a_killed_worker_changes_nothing(cluster: Cluster) -> None:
    tasks = cells(60)
    victim = process_ids(cluster)[0]
    found: list[TaskResult] = []
    for results in cluster.run(tasks):
        found += results
        if victim:
            os.kill(victim, signal.SIGKILL)
            victim = 0
    check_once(found, tasks)


def test_a_worker_that_hangs_changes_nothing(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its batches are sent to the other one."""
    monkeypatch.setattr(dispatch, "_GRACE", 0.2)
    tasks = cells(60)
    victim = process_ids(cluster)[0]
    found: list[TaskResult] = []
    try:
        for results in cluster.run(tasks):
            if not found:
                os.kill(victim, signal.SIGSTOP)
            found += results
    finally:
        os.kill(victim, signal.SIGKILL)
    check_once(found, tasks)


def test_a_late_batch_counts_once(cluster: Cluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(dispatch, "_GRACE", 0.2)
    found = collect(cluster, [piece("sleep", folder=str(tmp_path))])
    (tmp_path / "release").touch()  # the slow one ends, and nobody wants it
    assert [finding.subject for result in found for finding in result.findings] == ["quick"]
    tasks = cells(4)
    check_once(collect(cluster, tasks), tasks)


def test_what_ends_its_workers_is_named_and_the_rest_goes_on(cluster: Cluster) -> None:
    tasks = cells(10)
    found: list[TaskResult] = []
    running = cluster.run([*tasks[:5], piece("kill"), *tasks[5:]])
    with pytest.raises(WorkerError, match="the piece of kill ended its worker each time it was tried"):
        found.extend(itertools.chain.from_iterable(running))
    check_once(found, tasks)


def test_memory_is_bounded(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is tried again, and how often, is tested above: here it is given up after the first time."""
    give_up = dispatch.Dispatcher.deadly

    def at_once(plan: dispatch.Dispatcher, number: int) -> list[int]:
        plan._flying[number] = replace(plan._flying[number], alone=True)
        return give_up(plan, number)

    monkeypatch.setattr(dispatch.Dispatcher, "deadly", at_once)
    assert "memory limit 953.7 MiB each" in cluster.describe()
    with pytest.raises(WorkerError, match=r"the piece of grow ended its worker.*out of memory"):
        collect(cluster, [piece("grow")])


def test_an_error_meant_for_the_user_arrives(cluster: Cluster) -> None:
    with pytest.raises(InputError, match="noise: x; another is allowed"):
        collect(cluster, [*cells(1), piece("refuse")])


@pytest.mark.parametrize("name", ["numpy", "theory_lab", "source"])
def test_other_versions_are_refused(cluster: Cluster, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """At once, and of a worker that joins later with its first batch."""
    mine = {**work.versions(), name: "0.0.1"}
    for module in (clusters, sending):
        monkeypatch.setattr(module, "versions", lambda needs=None: mine)
    what = "another state of theory_lab's source code" if name == "source" else f"{name} .*and here it is 0.0.1"
    with pytest.raises(WorkerError, match=what):
        cluster._check_versions()
    with pytest.raises(WorkerError, match=what):
        collect(cluster, cells(1))


def test_laws_are_sent_by_name_and_hash(cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A relative name means the sender's file, also once it has changed; scores do not travel."""
    monkeypatch.chdir(tmp_path)
    for seed in (0, 1):
        np.save("scores.npy", np.random.Generator(np.random.Philox(seed)).normal(size=50_000))
        get_family.cache_clear()
        settings = Settings(claims=("tda-4.3",), noise=("file:scores.npy",), length=(100,), trials=10**5)
        same(run(settings, elsewhere=cluster), run(settings, workers=1))
    order = pickle.dumps(work.Order((), {}, work.laws_of(_tasks(settings)), str(tmp_path)))
    assert len(order) < 1000
    monkeypatch.setattr(sending, "laws_of", lambda tasks: (("file:scores.npy", "empirical:0"),))
    with pytest.raises(WorkerError, match=r"finds other scores under file:scores\.npy"):
        run(settings, elsewhere=cluster)
    monkeypatch.setattr(sending, "laws_of", lambda tasks: (("file:gone.npy", "empirical:0"),))
    with pytest.raises(WorkerError, match=r"cannot read what file:gone\.npy names"):
        run(settings, elsewhere=cluster)


def _tasks(settings: Settings) -> list[Task]:
    return [task for case in build_cases(settings) for task in plan_tasks(case.cell(0), settings.trials)]


def test_an_interrupted_run_keeps_what_is_finished(cluster: Cluster, tmp_path: Path) -> None:
    """Ctrl-C, and SIGTERM, which raises the same: finished rows are handed over, and the workers are free again."""

    def interrupt() -> None:
        until = time.monotonic() + 60.0
        while time.monotonic() < until and not list(tmp_path.glob("out/cells/*.parquet")):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    partial: list[pd.DataFrame] = []
    hand = threading.Thread(target=interrupt)
    hand.start()
    with pytest.raises(KeyboardInterrupt):
        run(SWEEP, elsewhere=cluster, store=Store(tmp_path / "out"), on_partial=partial.append)
    hand.join()
    finished = partial[0]
    resumed = run(SWEEP, elsewhere=cluster, store=Store(tmp_path / "out", resume=True))
    assert 0 < len(finished) < len(resumed)
    same(resumed, run(SWEEP, workers=1))
    # The rows in common differ in what depends on how many there are: the level of their intervals.
    both = finished.merge(resumed, on=["length", "kappa"], suffixes=("", "_resumed"))
    assert (both.estimate == both.estimate_resumed).all()


@contextlib.contextmanager
def listening(answer: bytes) -> Iterator[int]:
    """A port where something listens that is no Dask scheduler."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(8)

        def serve() -> None:
            with contextlib.suppress(OSError), server.accept()[0] as there:
                there.sendall(answer)
                while there.recv(100):
                    pass

        threading.Thread(target=serve, daemon=True).start()
        yield server.getsockname()[1]


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])


@pytest.mark.parametrize("what", ["nothing", "silence", "a web server"])
def test_no_scheduler_there(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clusters, "_CONNECT_SECONDS", 0.5)
    answer = b"HTTP/1.1 400 Bad Request\r\n\r\n" if what == "a web server" else b""
    with listening(answer) if what != "nothing" else contextlib.nullcontext(free_port()) as port:
        began = time.monotonic()
        with pytest.raises(InputError, match=f"scheduler: tcp://127.0.0.1:{port}; no Dask scheduler answers there"):
            Cluster(Scheduler(f"tcp://127.0.0.1:{port}"))
        assert time.monotonic() - began < 10.0


def test_no_logger_of_dask_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dask gives some loggers levels of their own: a lost scheduler printed a traceback through tornado.application."""
    monkeypatch.delenv("THEORY_LAB_DEBUG", raising=False)
    names = [*logging.root.manager.loggerDict, "tornado.application", "distributed.client"]
    loud = [logging.getLogger(n) for n in names if n.partition(".")[0] in ("tornado", "asyncio", "distributed")]
    before = [logger.level for logger in loud]  # the cluster of these tests keeps them quiet as long as it is open
    try:
        for logger in loud:
            logger.setLevel(logging.WARNING)
        with clusters._quiet_logs():
            assert [logger.name for logger in loud if logger.isEnabledFor(logging.CRITICAL)] == []
        assert all(logger.isEnabledFor(logging.ERROR) for logger in loud)
    finally:
        for logger, level in zip(loud, before, strict=True):
            logger.setLevel(level)


def test_options_of_local_workers_do_not_fit_an_address() -> None:
    with pytest.raises(InputError, match="workers: 3; workers of tcp://there:1 are what they were started as"):
        Cluster(Scheduler("tcp://there:1"), workers=3)
    with pytest.raises(InputError, match="worker-memory"):
        Cluster(Scheduler("tcp://there:1"), memory=10**9)


@pytest.fixture
def scheduler(tmp_path: Path) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """A scheduler and a worker as a user starts them."""
    address = f"tcp://127.0.0.1:{free_port()}"
    dask = [sys.executable, "-m", "dask"]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "cwd": tmp_path}
    started = [
        subprocess.Popen([*dask, "scheduler", "--host", address, "--no-dashboard"], **quiet),
        subprocess.Popen([*dask, "worker", address, "--nthreads", "1", "--no-dashboard"], **quiet),
    ]
    try:
        yield address, started[0]
    finally:
        for process in started:
            process.terminate()
        for process in started:
            process.wait(timeout=20)


def test_a_lost_scheduler_loses_no_result(scheduler: Any, cli: Any, tmp_path: Path) -> None:
    address, process = scheduler
    grid = ["check", "tda-4.3", "--noise", "gaussian", "--length", "2:2^20:x4", "--kappa", "1,2"]
    words = [*grid, "--out", "out", "--quiet"]

    def kill_once_something_is_there() -> None:
        until = time.monotonic() + 60.0
        while time.monotonic() < until and not list(tmp_path.glob("out/cells/*.parquet")):
            time.sleep(0.02)
        process.kill()

    killer = threading.Thread(target=kill_once_something_is_there)
    killer.start()
    lost = cli(*words, env={"THEORY_LAB_SCHEDULER": address})
    killer.join()
    assert lost.returncode == 2, lost.stderr
    assert f"theory-lab: error: the scheduler {address} is lost; what was finished is kept" in lost.stderr
    assert "Traceback" not in lost.stderr
    kept = {path.name: path.read_bytes() for path in tmp_path.glob("out/cells/*.parquet")}
    assert kept
    resumed = run(SWEEP, workers=1, store=Store(tmp_path / "out", resume=True))
    assert all((tmp_path / "out/cells" / name).read_bytes() == content for name, content in kept.items())
    same(resumed, run(SWEEP, workers=1))
