"""Disturb runs of ``theory-lab check`` in every way that a machine or a user might, and count what is lost.

    python tools/faults.py                    every kind, about 230 faults
    python tools/faults.py --kinds sigkill-run,disk-full --share 0.1   with --out, records of kinds not tried are kept
    python tools/faults.py --processes 16     the same faults side by side, for many cores
    python tools/faults.py --list

First the sweep runs undisturbed. Then each fault strikes a run, or its folder, at a moment or place drawn from the
seed; the run is resumed, and every cell, finding and row is compared with the undisturbed ones, bit for bit. Lost is a
cell that was on the disk unharmed and was not found by the resume, or is missing after it; changed is one whose bits
differ. A traceback that a user would have seen, a process that outlives its run and a temporary file left over count
as failures too.

Mounting small disks needs root, the Dask kinds need ``dask.distributed``; without them those kinds are left out, and
the table says so. Exit code: 0 nothing lost or changed, 1 otherwise.
"""

from __future__ import annotations

import argparse
import csv
import importlib.util
import io
import json
import multiprocessing
import os
import platform
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from multiprocessing.util import Finalize
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "kernels"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from fault_bench import Bench, Outcome, Reference, stop_nursery
from fault_disk import can_mount
from fault_kinds import KINDS, Kind, stop_cluster
from fault_page import ROOT, write_page

from theory_lab.store import write_whole
from theory_lab.store.versions import provenance

#: A fault that comes after its run has ended is tried again, at another moment.
_ATTEMPTS = 8
#: A kind's name, and the number of a fault of it.
_Job = tuple[str, int]


@dataclass
class Record:
    """One fault, as it is written down."""

    kind: str
    trial: int
    lost: int
    changed: int
    tracebacks: int
    untidy: int
    intact: int
    found: int
    seconds: float
    notes: str


@dataclass
class Tried:
    """What was tried so far, beside what an earlier run left in the same folder."""

    kinds: list[Kind]
    share: float
    earlier: list[Record]
    records: list[Record] = field(default_factory=list)

    def complete(self) -> list[Kind]:
        """Kinds all of whose faults were tried."""
        return [kind for kind in self.kinds if len(self._of(kind)) == trials(kind, self.share)]

    def all(self) -> tuple[list[Record], list[Kind]]:
        """What is known of every kind: of one that was cut short only if there was nothing before."""
        names = {kind.name for kind in self.complete()}
        before = [record for record in self.earlier if record.kind not in names]
        names |= {record.kind for record in self.records} - {record.kind for record in before}
        order = [kind.name for kind in KINDS]
        found = [*before, *(record for record in self.records if record.kind in names)]
        found.sort(key=lambda record: (order.index(record.kind), record.trial))
        return found, [kind for kind in KINDS if kind.name in {record.kind for record in found}]

    def _of(self, kind: Kind) -> list[Record]:
        return [record for record in self.records if record.kind == kind.name]


def main() -> int:
    """Run the harness."""
    options = _options()
    if options.list:
        for kind in KINDS:
            print(f"{kind.name:<18} {kind.count:>3}  {kind.what}")
        return 0
    if options.write_docs:
        return write_page(Path(options.write_docs))
    # What is started here finds the same code, wherever it runs and whether or not it is installed.
    folders = [str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, folders))
    began, deadline = time.monotonic(), time.time() + options.seconds
    kinds = [kind for kind in KINDS if not options.kinds or kind.name in options.kinds.split(",")]
    work = Path(options.work or tempfile.mkdtemp(prefix="faults-")).absolute()
    missing = _missing(work)
    left_out = {kind.name: missing[kind.needs] for kind in kinds if kind.needs in missing}
    kinds = [kind for kind in kinds if kind.name not in left_out]
    bench = Bench(work / "bench")
    reference = bench.reference
    print(f"undisturbed: {reference.cells} cells and pieces, {reference.seconds:.1f} s", flush=True)
    out = Path(options.out) if options.out else None
    tried = Tried(kinds, options.share, _earlier(out) if out else [])
    jobs = [(kind.name, trial) for kind in kinds for trial in range(trials(kind, options.share))]

    def keep() -> None:
        if out:
            about = {
                "cells_and_pieces": reference.cells, "seed": options.seed, "processes": options.processes,
                "wall_seconds": round(time.monotonic() - began, 1), "commit": options.commit,
            }  # fmt: skip
            _write(out, tried, left_out, len(jobs) - len(tried.records), about)

    written = 0.0
    try:
        made = _here(bench, jobs, options.seed, deadline) if options.processes == 1 else _apart(
            work, bench, jobs, options.seed, deadline, options.processes
        )  # fmt: skip
        for record in made:
            tried.records.append(record)
            state = "FAILED" if record.lost or record.changed or record.tracebacks or record.untidy else "ok"
            print(f"{record.kind:<18} {record.trial:>3} {state} {record.seconds:6.1f} s  {record.notes}", flush=True)
            if time.monotonic() - written > 5.0:  # a harness that is stopped leaves what it has
                keep()
                written = time.monotonic()
    finally:
        keep()
        stop_cluster()
        stop_nursery()
    records, shown = tried.all()
    _print(records, shown, left_out)
    print(f"{len(tried.records)} of {len(jobs)} faults tried now, {time.monotonic() - began:,.0f} s")
    if not options.work:
        shutil.rmtree(work, ignore_errors=True)
    return int(any(r.lost or r.changed or r.tracebacks or r.untidy for r in records))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--kinds", default="", help="names of kinds, separated by commas; all by default")
    parser.add_argument(
        "--share", type=float, default=1.0, help="share of the faults of a full run; at least one a kind"
    )
    parser.add_argument("--seed", type=int, default=0, help="of moments, places and bytes")
    parser.add_argument(
        "--processes", type=int, default=1, help="faults side by side; each keeps about two cores busy (default 1)"
    )
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no fault after so long")
    parser.add_argument("--out", default="", help="folder for faults.csv and summary.json")
    parser.add_argument("--work", default="", help="folder to work in, kept; a temporary one by default")
    parser.add_argument("--commit", help="of the code, where it is no checkout")
    parser.add_argument("--list", action="store_true", help="list the kinds")
    parser.add_argument(
        "--write-docs", metavar="FOLDER",
        help="take faults.csv and summary.json of a run into figures/reliability, and write docs/reliability.md",
    )  # fmt: skip
    options = parser.parse_args()
    for name in filter(None, options.kinds.split(",")):
        if name not in {kind.name for kind in KINDS}:
            parser.error(f"kinds: {name}; --list shows them")
    if options.processes < 1:
        parser.error(f"processes: {options.processes}; 1 or more is allowed")
    return options


def _missing(work: Path) -> dict[str, str]:
    work.mkdir(parents=True, exist_ok=True)
    missing = {}
    if not can_mount(work):
        missing["root"] = "mounting a small disk needs root"
    for need, modules in (("dask", ("distributed",)), ("torch", ("torch", "transformers", "accelerate"))):
        for module in modules:
            if importlib.util.find_spec(module) is None:
                missing[need] = f"{module} is not installed"
    return missing


def trials(kind: Kind, share: float) -> int:
    """Faults of a kind, for a share of a full run."""
    return max(1, round(kind.count * share))


def _here(bench: Bench, jobs: list[_Job], seed: int, deadline: float) -> Iterator[Record]:
    for job in jobs:
        yield from _try(bench, [job], seed, deadline)


def _apart(work: Path, bench: Bench, jobs: list[_Job], seed: int, deadline: float, processes: int) -> Iterator[Record]:
    """The same faults in processes side by side, each with a bench, a nursery and a cluster of its own."""
    # What takes longest comes first. A cluster is worth some faults: those that need one go by fours.
    needs = {kind.name: kind.needs for kind in KINDS}
    long = [job for job in jobs if needs[job[0]] == "torch"]
    dask = [job for job in jobs if needs[job[0]] == "dask"]
    parts = [[job] for job in reversed(long)] + [dask[at : at + 4] for at in range(0, len(dask), 4)]
    parts += [[job] for job in jobs if job not in [*long, *dask]]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(processes, len(parts)), context, _begin, (str(work), bench.known)) as pool:
        waiting = [pool.submit(_try, None, part, seed, deadline) for part in parts]
        try:
            for future in as_completed(waiting):
                yield from future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


_bench: Bench | None = None


def _begin(work: str, known: tuple[Path, Reference]) -> None:
    """What a process of the pool does first."""
    global _bench  # one a process
    _bench = Bench(Path(work) / f"bench-{os.getpid()}", known)
    for end in (stop_cluster, stop_nursery):
        Finalize(None, end, exitpriority=1)


def _try(bench: Bench | None, jobs: list[_Job], seed: int, deadline: float) -> list[Record]:
    """Try faults one after another; none begins after the deadline."""
    bench = bench or _bench
    assert bench is not None
    return [_one(bench, name, trial, seed) for name, trial in jobs if time.time() < deadline]


def _one(bench: Bench, name: str, trial: int, seed: int) -> Record:
    names = [kind.name for kind in KINDS]
    place = names.index(name)
    kind = KINDS[place]
    began, before = time.monotonic(), set(bench.work.iterdir())
    try:
        for attempt in range(_ATTEMPTS):
            bench.turn = sum(other.count for other in KINDS[:place]) + trial + attempt
            outcome = kind.apply(bench, np.random.default_rng([seed, place, trial, attempt]))
            if not outcome.late or not outcome.good:
                break
        else:
            raise RuntimeError(f"{_ATTEMPTS} times the run ended before the fault")
    except Exception as error:  # a fault of the harness is no success of the store
        outcome = Outcome(lost=1, notes=[f"the harness failed: {error!r} {traceback.format_exc().splitlines()[-3:]}"])
    if outcome.good:
        for path in set(bench.work.iterdir()) - before:
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
    return Record(
        name, trial, outcome.lost, outcome.changed, outcome.tracebacks, outcome.untidy, outcome.intact,
        outcome.found, round(time.monotonic() - began, 2), "; ".join(outcome.notes),
    )  # fmt: skip


def _earlier(out: Path) -> list[Record]:
    """Records of an earlier run."""
    if not (out / "faults.csv").exists():
        return []
    wholes = ("trial", "lost", "changed", "tracebacks", "untidy", "intact", "found")
    with open(out / "faults.csv", newline="") as file:
        return [
            Record(
                row["kind"], **{name: int(row[name]) for name in wholes}, seconds=float(row["seconds"]),
                notes=row["notes"],
            )
            for row in csv.DictReader(file)
        ]  # fmt: skip


def _sums(records: list[Record], kinds: list[Kind]) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for kind in kinds:
        mine = [record for record in records if record.kind == kind.name]
        if not mine:
            continue
        names = ("lost", "changed", "tracebacks", "untidy")
        sums = {name: sum(getattr(record, name) for record in mine) for name in names}
        seconds = round(float(np.mean([record.seconds for record in mine])), 1)
        rows.append(
            {"kind": kind.name, "what": kind.what, "tried": len(mine), "sigkills": kind.kills * len(mine)}
            | sums
            | {"seconds": seconds}
        )
    return rows


def _print(records: list[Record], kinds: list[Kind], left_out: dict[str, str]) -> None:
    rows = _sums(records, kinds)
    heads = {name: name for name in _WIDTHS}
    print("\n" + _line("kind", heads, "s each"))
    total = dict.fromkeys(_WIDTHS, 0)
    for row in rows:
        for name in total:
            total[name] += int(str(row[name]))
        print(_line(str(row["kind"]), row, str(row["seconds"])))
    print(_line(f"{len(rows)} kinds", total, ""))
    for name, why in left_out.items():
        print(f"not tried: {name}: {why}")


_WIDTHS = {"tried": 5, "sigkills": 8, "lost": 5, "changed": 7, "tracebacks": 10, "untidy": 6}


def _line(name: str, row: Mapping[str, object], seconds: str) -> str:
    return f"{name:<18} " + " ".join(f"{row[n]:>{width}}" for n, width in _WIDTHS.items()) + f" {seconds:>7}"


def _write(out: Path, tried: Tried, left_out: dict[str, str], open_: int, about: dict[str, object]) -> None:
    out.mkdir(parents=True, exist_ok=True)
    records, kinds = tried.all()
    text = io.StringIO()
    writer = csv.DictWriter(text, list(Record.__dataclass_fields__), lineterminator="\n")
    writer.writeheader()
    writer.writerows(asdict(record) for record in records)
    write_whole(str(out / "faults.csv"), text.getvalue().encode())
    known = about.pop("commit")
    versions = {**provenance(), "pyarrow": metadata.version("pyarrow")}
    versions["commit"] = versions["commit"] or known
    if versions["commit"] is None or any(record in tried.earlier for record in records):
        del versions["commit"]  # unknown, or of other code perhaps
    summary = {
        "faults": len(records),
        "kinds": _sums(records, kinds),
        "not_tried": left_out,
        "not_begun": open_,
        "seconds": round(sum(record.seconds for record in records), 1),
        **about,
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "cores": os.cpu_count(),
        **versions,
    }
    write_whole(str(out / "summary.json"), (json.dumps(summary, indent=1) + "\n").encode())


if __name__ == "__main__":
    raise SystemExit(main())
