"""How a results folder behaves at its full size: 10^5 cells, 10^8 rows of blocks.

A synthetic store is built (real cells of the tail sampler, counts drawn at random in place of simulated ones), and
every command is run on it as a user would, in a process of its own: wall time, processor time, peak memory.

    python benchmarks/store.py                          10^5 cells of 10^3 blocks, about 1 GB
    python benchmarks/store.py --cells 2000 --blocks 50
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from theory_lab.claims import Point
from theory_lab.estimation import Cell, sampler
from theory_lab.store import Store
from theory_lab.store.cells import BlockTable
from theory_lab.store.packs import PackWriter
from theory_lab.store.versions import provenance

#: What a resume does before it draws: open the folder, and ask for each cell of the sweep.
_RESUME = """
import json, sys, time
sys.path.insert(0, {here!r})
from store import made_cells
from theory_lab.store import Store
cells, trials = made_cells({cells}), {blocks}
from theory_lab.estimation import sampler
want = trials * sampler(cells[0]).block_trials(cells[0])
began, worked = time.perf_counter(), time.process_time()
store = Store({path!r}, resume=True)
opened, named = time.perf_counter(), time.process_time()
found = sum(store.pooled(cell, want) is not None for cell in cells)
ended, done = time.perf_counter(), time.process_time()
assert found == len(cells), found
times = {{"opening_s": opened - began, "asking_s": ended - opened}}
print(json.dumps({{**times, "opening_cpu_s": named - worked, "asking_cpu_s": done - named}}))
"""

#: The command that resumes the sweep, and what it took until it would draw.
_CHECK = """
import io, json, sys, time
from contextlib import redirect_stdout
began = float(sys.argv[1])
from theory_lab import cli
from theory_lab.engine import Engine
def run(self, tasks, deadline=0.0):
    times["before_drawing_s"], times["before_drawing_cpu_s"] = time.time() - began, time.process_time()
    assert not tasks, len(tasks)
    return iter(())
Engine.run, times, shown = run, dict(), io.StringIO()
with redirect_stdout(shown):
    code = cli.execute(sys.argv[2:])
assert code == 0, code
print(json.dumps(times | dict(lines=shown.getvalue().count(chr(10)))))
"""

_FAMILIES = ("gaussian", "uniform", "two-point", "laplace", "spherical")
_KAPPAS = tuple(1.0 + k / 10 for k in range(10))


def made_cells(count: int) -> list[Cell]:
    """Cells that differ in length, kappa and family."""
    return [
        Cell("survivors", Point(_FAMILIES[i % 5], 2 + i // 50, kappa=_KAPPAS[i // 5 % 10]), "tail", 0)
        for i in range(count)
    ]


def sweep(count: int, blocks: int) -> list[str]:
    """The command that asks for these cells, or for as many of them as make whole lengths."""
    (cell,) = made_cells(1)
    trials = blocks * sampler(cell).block_trials(cell)
    families = [word for name in _FAMILIES for word in ("--noise", name)]
    grid = ["--length", f"2:{count // 50 + 1}:+1", "--kappa", ",".join(map(repr, _KAPPAS))]
    return ["check", "tda-4.3", *families, *grid, "--estimator", "tail", "--trials", str(trials), "--workers", "1"]


def build(path: Path, count: int, blocks: int) -> float:
    """Make the store; returns seconds."""
    began = time.perf_counter()
    Store(path)
    rng = np.random.default_rng(0)
    cells = sorted(made_cells(count), key=lambda cell: cell.digest)
    writer = PackWriter(path / "packs")
    timings = []
    for cell in cells:
        if writer.full:
            writer.finish()
            writer.seal()
            writer = PackWriter(path / "packs")
        table = _drawn(cell, blocks, rng)
        about = {"cell": cell.identity(), "seed": 0, **provenance(), "format": 2}
        about["checksum"] = table.checksum(cell.digest, about)
        writer.add(cell.digest, table, about)
        timings.append(f"{cell.digest},1.000000\n")
    writer.finish()
    writer.seal()
    (path / "timings.csv").write_text("".join(timings))
    return time.perf_counter() - began


def _drawn(cell: Cell, blocks: int, rng: np.random.Generator) -> BlockTable:
    size = sampler(cell).block_trials(cell)
    total = rng.poisson(0.3 * size, blocks).astype(float)
    columns = {"block": np.arange(blocks), "trials": np.full(blocks, size), "total": total}
    return BlockTable({**columns, "total_sq": total + rng.poisson(0.1 * size, blocks)})


def _peak(pid: int) -> int:
    """Peak memory of a process so far, in KiB."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def measured(name: str, words: list[str], expected: int = 0) -> dict[str, Any]:
    """Run a process; wall time, processor time and peak memory. A word ``NOW`` becomes the time."""
    words = [str(time.time()) if word == "NOW" else word for word in words]
    began = time.perf_counter()
    with tempfile.TemporaryFile() as out:
        process = subprocess.Popen(
            words, stdout=out, stderr=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
        peak = 0
        while not (ended := os.wait4(process.pid, os.WNOHANG))[0]:
            peak = max(peak, _peak(process.pid))  # what wait4 says of it holds this process's memory too
            time.sleep(0.005)
        wall = time.perf_counter() - began
        _, status, used = ended
        out.seek(0)
        text = out.read().decode()
    if os.waitstatus_to_exitcode(status) != expected:
        raise SystemExit(f"{name} ended with {os.waitstatus_to_exitcode(status)}:\n{text}")
    result = {"what": name, "wall_s": wall, "cpu_s": used.ru_utime + used.ru_stime, "peak_mb": peak / 1024}
    if text.startswith("{"):
        result |= json.loads(text)
    print(
        "  ".join(
            f"{key} {value:.2f}" if isinstance(value, float) else f"{value:<34}" for key, value in result.items()
        ),
        flush=True,
    )
    return result


def saving(path: Path, count: int, blocks: int) -> dict[str, Any]:
    """What it costs to save new cells one by one, packing included."""
    rng = np.random.default_rng(1)
    store = Store(path, resume=True)
    cells = [Cell("survivors", Point("gaussian", 2 + i, beta=0.5), "tail", 1) for i in range(count)]
    tables = [_drawn(cell, blocks, rng).blocks() for cell in cells]
    walls, work = [], time.process_time()
    for cell, table in zip(cells, tables, strict=True):
        began = time.perf_counter()
        store.save(cell, table, 1.0)
        walls.append(time.perf_counter() - began)
    return {
        "what": f"save, {count} cells of {blocks} blocks",
        "median_ms": 1e3 * float(np.median(walls)),
        "mean_ms": 1e3 * float(np.mean(walls)),
        "longest_s": max(walls),
        "cpu_ms": 1e3 * (time.process_time() - work) / count,
    }


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--cells", type=int, default=100_000, help="50 or more")
    parser.add_argument("--blocks", type=int, default=1000)
    parser.add_argument("--saves", type=int, default=3000)
    parser.add_argument("--work", default="", help="folder to work in; a temporary one by default")
    parser.add_argument("--keep", action="store_true", help="use the store that is there, and leave it")
    parser.add_argument("--quick", action="store_true", help="without saving, packing and verifying")
    parser.add_argument("--json", default="", help="file for the results")
    options = parser.parse_args()
    work = Path(options.work or tempfile.mkdtemp(prefix="store-")).absolute()
    path = work / "store"
    results: list[dict[str, Any]] = []
    if not (options.keep and path.exists()):
        shutil.rmtree(path, ignore_errors=True)
        work.mkdir(parents=True, exist_ok=True)
        seconds = build(path, options.cells, options.blocks)
        results.append({"what": "built", "wall_s": seconds})
    size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    print(
        f"{options.cells:,} cells of {options.blocks:,} blocks: {size / 1e6:,.0f} MB "
        f"in {sum(1 for _ in path.rglob('*'))} files"
    )
    results.append({"what": "size", "cells": options.cells, "rows": options.cells * options.blocks, "bytes": size})
    lab = [sys.executable, "-m", "theory_lab.main", "results"]
    resume = _RESUME.format(here=str(Path(__file__).parent), cells=options.cells, blocks=options.blocks, path=str(path))
    check = [*sweep(options.cells, options.blocks), "--out", str(path), "--resume", "--quiet"]
    name = made_cells(options.cells)[options.cells // 2].digest
    for what, words in (
        ("results ls", [*lab, "ls", str(path)]),
        ("resume", [sys.executable, "-c", resume]),
        ("check --resume", [sys.executable, "-c", _CHECK, "NOW", *check]),
        ("check --resume --format csv", [*lab[:-1], *check, "--format", "csv"]),
        ("results show CELL", [*lab, "show", str(path), name]),
        ("results ls --format csv", [*lab, "ls", str(path), "--format", "csv"]),
        (
            "results export --what cells",
            [*lab, "export", str(path), "--what", "cells", "--to", str(work / "cells.parquet")],
        ),
    ):
        for _ in range(3):
            results.append(measured(what, words))
    if not options.quick:
        results.append(saving(path, options.saves, 4))
        print(results[-1], flush=True)
        results.append(measured("results compact", [*lab, "compact", str(path), "--quiet"]))
        results.append(measured("results verify", [*lab, "verify", str(path), "--quiet"]))
    if options.json:
        Path(options.json).write_text(json.dumps(results, indent=1) + "\n")
    if not options.keep:
        shutil.rmtree(path, ignore_errors=True)


if __name__ == "__main__":
    main()
