"""What scheduling costs: Dask against the process pool, a million cells on a thousand workers, plans against runs.

Run it with the extra ``cluster`` installed: ``python benchmarks/scheduling.py`` (about five minutes on two cores), or
one part of it: ``throughput``, ``constants``, ``simulation``, ``plans``. ``--json FILE`` keeps the numbers.

throughput   10,000 cells of about 10 ms on two local workers: process pool and Dask in turns, medians over the turns.
constants    CPU seconds that a batch, and a cell in it, cost the process of client and scheduler.
simulation   the dispatcher and its sizing of batches as they are, driven by an invented clock, with these constants.
plans        what ``theory-lab check --plan`` says, and how long the same command takes.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
import math
import os
import pickle
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

from theory_lab import engine
from theory_lab.claims import Point
from theory_lab.distributed.address import Scheduler
from theory_lab.distributed.dispatch import Dispatcher
from theory_lab.distributed.pace import Pace
from theory_lab.distributed.work import Order, run_order, versions
from theory_lab.engine import Engine, Task, TaskResult, run_task
from theory_lab.estimation import Cell

WORKERS = 2
#: CPU seconds of the sending process, where ``constants`` was not run before: medians of the kept results.
BATCH_COST, CELL_COST, STORE_COST = 6.3e-3, 1.8e-5, 1.5e-3
#: Seconds between a batch that is ready on one side and known on the other.
LATENCY = 0.01


def cells(count: int, trials: int) -> list[Task]:
    """One task each of ``count`` cells."""
    points = (Point("gaussian", 1000, kappa=1.0 + k / count) for k in range(count))
    return [Task(Cell("survivors", point, "tail", 0), ((0, trials),)) for point in points]


def trials_of(seconds: float) -> int:
    """Trials of such a cell that take about this long here."""
    trials = 1 << 18
    took = min(run_task(task).seconds for task in cells(5, trials))
    return max(1, int(trials * seconds / took))


def drain(results: Iterator[list[TaskResult]]) -> tuple[int, float]:
    """Number of results, and seconds that workers spent on them."""
    found = list(itertools.chain.from_iterable(results))
    return len(found), sum(result.seconds for result in found)


def cpu_seconds() -> float:
    """CPU seconds of this process and its workers so far: what a busy machine does not change."""
    import psutil

    me = psutil.Process()
    times = [process.cpu_times() for process in (me, *me.children(recursive=True))]
    return sum(spent.user + spent.system for spent in times)


def throughput(count: int, turns: int) -> dict[str, Any]:
    """Cells a second, pool and Dask in turns."""
    from theory_lab.distributed.cluster import Cluster

    tasks = cells(count, trials_of(0.01))
    engine._POOL_WORTH_SECONDS = 0.0  # even of few cells
    walls: dict[str, list[float]] = {"pool": [], "dask": []}
    overheads: dict[str, list[float]] = {"pool": [], "dask": []}
    used: dict[str, list[float]] = {"pool": [], "dask": []}
    lasted = []
    with Cluster(Scheduler(workers=WORKERS)) as cluster, Engine(WORKERS) as pool:
        places: dict[str, Any] = {"pool": pool, "dask": Engine(elsewhere=cluster)}
        for place in places.values():
            drain(place.run(tasks[:400]))  # workers are started, and have imported what they need
        for turn in range(turns):
            for name in ("pool", "dask") if turn % 2 == 0 else ("dask", "pool"):
                spent, began = cpu_seconds(), time.perf_counter()
                done, busy = drain(places[name].run(tasks))
                wall = time.perf_counter() - began
                assert done == count
                used[name].append((cpu_seconds() - spent) / count)
                walls[name].append(wall)
                overheads[name].append((WORKERS * wall - busy) / count)
                lasted.append(busy / count)
    ratio = statistics.median(p / d for p, d in zip(walls["pool"], walls["dask"], strict=True))
    return {
        "cells": count,
        "cell_seconds": statistics.median(lasted),
        "pool_cells_per_second": count / statistics.median(walls["pool"]),
        "dask_cells_per_second": count / statistics.median(walls["dask"]),
        "throughput_ratio": ratio,
        "ratios": [p / d for p, d in zip(walls["pool"], walls["dask"], strict=True)],
        "pool_overhead_per_cell": statistics.median(overheads["pool"]),
        "dask_overhead_per_cell": statistics.median(overheads["dask"]),
        "pool_cpu_per_cell": statistics.median(used["pool"]),
        "dask_cpu_per_cell": statistics.median(used["dask"]),
    }


class Fixed(Pace):
    """A pace that sends batches of a fixed number of tasks."""

    def __init__(self, tasks: int) -> None:
        super().__init__()
        self._tasks = tasks

    def first(self) -> tuple[float, int]:
        return math.inf, self._tasks

    def knows(self, kind: str) -> bool:
        return False

    def target(self, workers: int, left: float, until: float = math.inf) -> float:
        return math.inf


def constants(count: int) -> dict[str, float]:
    """CPU seconds of the process that is client and scheduler: for a batch, for a cell in it, for a cell on the disk.

    A batch: what batches of one cell cost beyond their cells. A cell: writing and reading it, and its outcome, as the
    client and the scheduler do, and its part in the dispatcher.
    """
    from theory_lab.distributed.cluster import Cluster
    from theory_lab.store import Store

    tasks = cells(count, 1)
    with Cluster(Scheduler(workers=WORKERS)) as cluster:
        drain(cluster.run(tasks[:100]))
        cluster._pace = Fixed(1)
        began = time.process_time()
        drain(cluster.run(tasks))
        one = (time.process_time() - began) / count

    order = Order(tuple(tasks), versions(), (), os.getcwd())
    report = run_order(order)
    sent, received = pickle.dumps(order), pickle.dumps(report)

    def dispatched() -> None:
        plan = Dispatcher(["kind"] * count, [0.01] * count, Pace())
        while (batch := plan.next(0.0, 10**6, math.inf)) is not None:
            plan.done(batch.number, [0.01] * len(batch.tasks))

    steps = [lambda: pickle.dumps(order), lambda: pickle.loads(sent), lambda: pickle.loads(received), dispatched]
    cell = sum(min(_cpu(step) for _ in range(5)) for step in (*steps, steps[0])) / count
    with tempfile.TemporaryDirectory() as folder:
        store = Store(os.path.join(folder, "results"))
        rows = [(task.cell, found.blocks, 0.01) for task, found in zip(tasks, report.outcomes, strict=True)]
        began = time.perf_counter()
        store.save_many(rows)
        kept = (time.perf_counter() - began) / count
    return {"batch_cost": one - cell, "cell_cost": cell, "bytes_per_cell": len(sent) / count, "store_cost": kept}


def _cpu(step: Callable[[], object]) -> float:
    began = time.process_time()
    step()
    return time.process_time() - began


def simulate(
    count: int, workers: int, cell_seconds: float, batch_cost: float, cell_cost: float, slow: float = 0.01
) -> dict[str, Any]:
    """A run of the dispatcher on invented workers.

    The sending process does one thing at a time: sending a batch costs half of ``batch_cost``, receiving it the other
    half and ``cell_cost`` for each cell. Cells last ``cell_seconds`` in the mean, with a spread of a factor e^0.5;
    their own estimates are a third of that. A part ``slow`` of the workers takes four times as long. A worker runs one
    batch after the other.
    """
    rng = random.Random(0)
    pace = Pace(batch_cost)
    estimate = cell_seconds / 3.0
    began = time.perf_counter()
    plan = Dispatcher(["kind"] * count, [estimate] * count, pace)
    lasts = [cell_seconds * rng.lognormvariate(-0.125, 0.5) for _ in range(4096)]
    speed = [4.0 if index < slow * workers else 1.0 for index in range(workers)]
    free = [(0.0, index) for index in range(workers)]  # when a worker has done what it was sent
    heapq.heapify(free)
    arrivals: list[tuple[float, int, list[float]]] = []
    clock = busy = work = 0.0
    batches = done = copies = 0
    while not plan.finished:
        batch = plan.next(clock, workers, math.inf)
        quiet = batch is None and not (arrivals and arrivals[0][0] <= clock)
        late = plan.late(clock, workers, math.inf) if quiet else []
        for sent in [batch] if batch is not None else late:
            clock += 0.5 * batch_cost
            busy += 0.5 * batch_cost
            ready, worker = heapq.heappop(free)
            seconds = [lasts[index % 4096] * speed[worker] for index in sent.tasks]
            end = max(ready, clock + LATENCY) + sum(seconds)
            heapq.heappush(free, (end, worker))
            heapq.heappush(arrivals, (end + LATENCY, sent.number, seconds))
            batches += 1
            copies += sent.generation > 0
        if batch is not None:
            continue
        if arrivals:
            ended, number, seconds = heapq.heappop(arrivals)
            clock = max(clock, min(ended, clock + 0.1))
            if ended > clock:  # nothing yet: look around, as the true loop does
                heapq.heappush(arrivals, (ended, number, seconds))
                continue
            new, _ = plan.done(number, seconds)
            cost = 0.5 * batch_cost + cell_cost * len(seconds)
            clock += cost
            busy += cost
            done += len(new)
            work += sum(seconds[position] for position in new)
    assert done == count
    ideal = count * cell_seconds / workers
    return {
        "cells": count,
        "workers": workers,
        "cell_seconds": cell_seconds,
        "seconds": clock,
        "ideal_seconds": ideal,
        "efficiency": ideal / clock,
        "batches": batches,
        "cells_per_batch": count / batches,
        "batches_sent_twice": copies,
        "sender_busy": busy / clock,
        "scheduling_per_cell": (workers * clock - work) / count,
        "simulated_in": time.perf_counter() - began,
    }


ONE_LAW = ("check", "tda-4.3", "--noise", "gaussian")
PLANS = (
    ("check", "tda-4.3"),
    ("check", "tda-4.6", "--noise", "gaussian", "--rho", "0,0.3,0.5"),
    (*ONE_LAW, "--length", "1000", "--kappa", "1:5:+0.002", "--trials", "100000"),
    (*ONE_LAW, "--length", "10^6", "--estimator", "tail", "--trials", "50000000"),
    ("check", "tra-dispersion", "tda-4.7"),
    ("check",),
)


def plans(workers: int) -> list[dict[str, Any]]:
    """Expected and true seconds of some commands."""
    found = []
    for words in PLANS:
        command = [sys.executable, "-m", "theory_lab.main", *words, "--workers", str(workers), "--quiet"]
        said = subprocess.run([*command, "--plan", "--format", "json"], capture_output=True, text=True, check=True)
        expected = json.loads(said.stdout)
        began = time.perf_counter()
        subprocess.run([*command, "--format", "csv"], capture_output=True, check=False)
        took = time.perf_counter() - began
        found.append({"command": " ".join(words), "expected": expected["seconds"], "took": took,
                      "ratio": expected["seconds"] / took, "tasks": expected["tasks"]})  # fmt: skip
        print(
            f"  {found[-1]['ratio']:5.2f} = {expected['seconds']:6.1f} s / {took:6.1f} s   theory-lab {' '.join(words)}"
        )
    return found


def main() -> None:
    """Run the parts that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help="throughput, constants, simulation, plans; all")
    parser.add_argument("--cells", type=int, default=10_000)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--json", metavar="FILE")
    asked = parser.parse_args()
    parts = asked.parts or ["throughput", "constants", "simulation", "plans"]
    found: dict[str, Any] = {"machine": f"{os.cpu_count()} cores, Python {platform.python_version()}"}
    todo: dict[str, Callable[[], Any]] = {
        "throughput": lambda: throughput(asked.cells, asked.turns),
        "constants": lambda: constants(500),
    }
    for part in ("throughput", "constants"):
        if part in parts:
            print(part, f"(load {os.getloadavg()[0]:.1f})")
            found[part] = todo[part]()
            for name, value in found[part].items():
                print(f"  {name:24} {value if not isinstance(value, float) else format(value, '.4g')}")
    if "simulation" in parts:
        cost = {
            "batch_cost": BATCH_COST,
            "cell_cost": CELL_COST,
            "store_cost": STORE_COST,
            **found.get("constants", {}),
        }
        print(f"simulation of 10^6 cells on 1,000 workers; a batch costs {cost['batch_cost'] * 1e3:.2f} ms, "
              f"a cell {cost['cell_cost'] * 1e6:.0f} us")  # fmt: skip
        found["simulation"] = []
        for seconds, keep in itertools.product((0.01, 0.1, 1.0), (False, True)):
            each = cost["cell_cost"] + keep * cost["store_cost"]
            one = simulate(10**6, 1000, seconds, cost["batch_cost"], each)
            found["simulation"].append({**one, "kept": keep})
            print(f"  cells of {seconds:g} s{', kept' if keep else ''}: {one['seconds']:8.1f} s,",
                  f"ideal {one['ideal_seconds']:.1f} s ({one['efficiency']:.0%});",
                  f"{one['batches']:,} batches of {one['cells_per_batch']:.0f} cells,",
                  f"{one['batches_sent_twice']} sent twice; sender busy {one['sender_busy']:.0%};",
                  f"{one['scheduling_per_cell'] * 1e3:.2f} ms of a worker a cell")  # fmt: skip
    if "plans" in parts:
        print(f"plans against runs on {WORKERS} workers (load {os.getloadavg()[0]:.1f})")
        found["plans"] = plans(WORKERS)
    if asked.json:
        with open(asked.json, "w", encoding="utf-8") as file:
            json.dump(found, file, indent=1)


if __name__ == "__main__":
    main()
