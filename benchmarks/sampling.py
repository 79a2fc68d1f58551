"""How fast the samplers are, as ratios within one run.

Run ``python benchmarks/sampling.py``; it prints a table and exits with 1 if a goal is missed. The yardstick is the
rate at which NumPy's fastest suitable bit generator fills float32 normals into a buffer that stays in the cache,
measured in the same process, interleaved with what it is compared with; medians over rounds.

"direct" is the estimator as a user runs it: P(X > tau) worked out, streams made, every score of every row decided.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable

import numpy as np

from theory_lab.claims import Point
from theory_lab.estimation import SAMPLERS, Cell
from theory_lab.estimation.direct import CHUNK, count_below
from theory_lab.streams import Stream, Streams, threshold_word

BUFFER = 1 << 14
BIT_GENERATORS = (np.random.SFC64, np.random.PCG64DXSM, np.random.PCG64, np.random.Philox)


def seconds(work: Callable[[], object], least: float = 0.02) -> float:
    """Seconds of one call, repeated until ``least`` seconds are spent."""
    work()
    calls, started = 0, time.perf_counter()
    while (spent := time.perf_counter() - started) < least:
        work()
        calls += 1
    return spent / calls


def normals(kind: type[np.random.BitGenerator]) -> float:
    """Normals a second into a cache-sized float32 buffer."""
    generator, buffer = np.random.Generator(kind(1)), np.empty(BUFFER, dtype=np.float32)
    return BUFFER / seconds(lambda: generator.standard_normal(out=buffer, dtype=np.float32))


def counting() -> float:
    """Exceedances decided a second, on raw bits."""
    first, ties = Stream("0" * 32, 0, 0), Stream("0" * 32, 0, 1)
    threshold = threshold_word(1e-4)
    return CHUNK / seconds(lambda: count_below(first, ties, CHUNK, threshold))


def direct(statistic: str, length: int, **dependence: float) -> float:
    """Scores a second of the direct estimator.

    A consensus of independent views decides two scores a key. With dependence only the first is counted: the second
    view is drawn for survivors alone.
    """
    point = Point("gaussian", length, **dependence)  # type: ignore[arg-type]  # rho and key_rho are floats
    cell = Cell(statistic, point, "direct", 0)  # type: ignore[arg-type]  # one of two words
    rows = max(1, (1 << 22) // length)
    scores = rows * length * (2 if statistic == "consensus" and not dependence else 1)
    return scores / seconds(lambda: SAMPLERS["direct"].run_block(cell, 0, rows, Streams(cell.digest, 0)))


def tail_rows_per_direct_row(length: int = 1 << 20) -> float:
    """Rows that ``tail`` draws in the time of one row of ``direct``."""
    per_row = {}
    for name, rows in (("direct", 1), ("tail", 1 << 18)):
        cell = Cell("survivors", Point("gaussian", length), name, 0)
        per_row[name] = (
            seconds(lambda c=cell, r=rows: SAMPLERS[c.estimator].run_block(c, 0, r, Streams(c.digest, 0))) / rows
        )
    return per_row["direct"] / per_row["tail"]


def _timed_blocks(first: int) -> tuple[float, float]:
    cell = Cell("survivors", Point("gaussian", 1 << 20), "direct", 0)
    started = time.monotonic()
    for block in range(first, first + 40):
        SAMPLERS["direct"].run_block(cell, block, 4, Streams(cell.digest, block))
    return started, time.monotonic()


def _timed_normals(first: int) -> tuple[float, float]:
    generator, buffer = np.random.Generator(np.random.SFC64(first)), np.empty(BUFFER, dtype=np.float32)
    started = time.monotonic()
    for _ in range(1500):
        generator.standard_normal(out=buffer, dtype=np.float32)
    return started, time.monotonic()


def two_cores_over_one(rounds: int) -> tuple[float, float]:
    """Throughput of two worker processes over that of one: ours, and NumPy's normals as a measure of the machine.

    Where the two cores are threads of one, or other work shares them, neither reaches 2.
    """
    kinds = (_timed_blocks, _timed_normals)
    ratios: dict[Callable[[int], tuple[float, float]], list[float]] = {kind: [] for kind in kinds}
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        pool.map(_timed_blocks, [0, 0], chunksize=1)  # start both
        for _ in range(rounds):
            for kind in kinds:
                before = pool.apply(kind, (0,))
                spans = pool.map(kind, [0, 60], chunksize=1)
                after = pool.apply(kind, (0,))
                alone = (before[1] - before[0] + after[1] - after[0]) / 2
                together = max(end for _, end in spans) - min(start for start, _ in spans)
                ratios[kind].append(2 * alone / together)
    return statistics.median(ratios[_timed_blocks]), statistics.median(ratios[_timed_normals])


def main() -> int:
    """Measure and print; 1 if a goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    rates: dict[str, list[float]] = {}
    for _ in range(rounds):
        for kind in BIT_GENERATORS:
            rates.setdefault(f"float32 normals, {kind.__name__}", []).append(normals(kind))
        rates.setdefault("exceedances counted by inversion", []).append(counting())
        for statistic in ("survivors", "consensus"):
            for length in (64, 4096, 1 << 20):
                rates.setdefault(f"direct, {statistic}, n = {length}", []).append(direct(statistic, length))
        rates.setdefault("direct, consensus, n = 4096, rho = 0.5", []).append(direct("consensus", 4096, rho=0.5))
        rates.setdefault("direct, survivors, n = 4096, key_rho = 0.3", []).append(
            direct("survivors", 4096, key_rho=0.3)
        )
    medians = {name: statistics.median(values) for name, values in rates.items()}
    best = max((name for name in medians if name.startswith("float32")), key=medians.__getitem__)
    print(f"{'what':44} {'per second':>12} {'spread':>8} {'ratio':>7}")
    for name, values in rates.items():
        spread = (np.quantile(values, 0.75) - np.quantile(values, 0.25)) / medians[name]
        print(f"{name:44} {medians[name]:12.3g} {spread:8.1%} {medians[name] / medians[best]:7.2f}")
    slowest = min(medians[n] for n in medians if n.startswith("direct")) / medians[best]
    ours, machine = two_cores_over_one(rounds)
    goals = [
        ("direct over the fastest normals, worst case", slowest, 0.8),
        ("counting over the fastest normals", medians["exceedances counted by inversion"] / medians[best], 3.0),
        ("direct on two cores over the same, worst case", slowest * ours, 0.8 * 1.9),
        ("tail rows in the time of one direct row, n = 2^20", tail_rows_per_direct_row(), 10_000.0),
    ]
    print(f"\nyardstick: {best}")
    print(f"two cores over one: {ours:.2f}; NumPy's normals on this machine: {machine:.2f}")
    for name, value, goal in goals:
        print(f"{name:52} {value:12.4g}  goal {goal:g}  {'met' if value >= goal else 'MISSED'}")
    return int(any(value < goal for _, value, goal in goals))


if __name__ == "__main__":
    sys.exit(main())
