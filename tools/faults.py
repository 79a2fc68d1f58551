"""Disturb runs of ``theory-lab check`` in every way that a machine or a user might, and count what is lost.

    python tools/faults.py                    every kind, about 230 faults
    python tools/faults.py --kinds sigkill-run,disk-full --share 0.1   with --out, records of kinds not tried are kept
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
import json
import platform
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))

from fault_bench import Bench, Outcome, can_mount, stop_nursery
from fault_kinds import KINDS, Kind, stop_cluster

from theory_lab.store.versions import provenance

#: A fault that comes after its run has ended is tried again, at another moment.
_ATTEMPTS = 8


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


def main() -> int:
    """Run the harness."""
    options = _options()
    kinds = [kind for kind in KINDS if not options.kinds or kind.name in options.kinds.split(",")]
    if options.list:
        for kind in KINDS:
            print(f"{kind.name:<18} {kind.count:>3}  {kind.what}")
        return 0
    work = Path(options.work or tempfile.mkdtemp(prefix="faults-")).absolute()
    missing = _missing(work)
    left_out = {kind.name: missing[kind.needs] for kind in kinds if kind.needs in missing}
    bench = Bench(work / "bench")
    reference = bench.reference
    print(f"undisturbed: {reference.cells} cells and pieces, {reference.seconds:.1f} s", flush=True)
    records: list[Record] = []
    tried: list[Kind] = []
    try:
        for kind in kinds:
            if kind.name in left_out:
                continue
            tried.append(kind)
            records += _try(bench, kind, options)
            if options.out:  # after each kind, so that a harness that is stopped leaves what it has
                _write(
                    Path(options.out),
                    *_with_earlier(Path(options.out), records, tried),
                    left_out,
                    reference.cells,
                    options.seed,
                    len(records),
                )
    finally:
        stop_cluster()
        stop_nursery()
    if options.out:
        records, tried = _with_earlier(Path(options.out), records, tried)
    _print(records, tried, left_out)
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
    parser.add_argument("--out", default="", help="folder for faults.csv and summary.json")
    parser.add_argument("--work", default="", help="folder to work in, kept; a temporary one by default")
    parser.add_argument("--list", action="store_true", help="list the kinds")
    return parser.parse_args()


def _missing(work: Path) -> dict[str, str]:
    work.mkdir(parents=True, exist_ok=True)
    missing = {}
    if not can_mount(work):
        missing["root"] = "mounting a small disk needs root"
    for name, module, what in (("dask", "distributed", "dask.distributed"), ("torch", "transformers", "transformers")):
        if importlib.util.find_spec(module) is None:
            missing[name] = f"{what} is not installed"
    return missing


def _try(bench: Bench, kind: Kind, options: argparse.Namespace) -> list[Record]:
    """All faults of a kind."""
    records = []
    for trial in range(max(1, round(kind.count * options.share))):
        began = time.monotonic()
        before = set(bench.work.iterdir())
        try:
            for attempt in range(_ATTEMPTS):
                outcome = kind.apply(bench, np.random.default_rng([options.seed, KINDS.index(kind), trial, attempt]))
                if not outcome.late or not outcome.good:
                    break
            else:
                raise RuntimeError(f"{_ATTEMPTS} times the run ended before the fault")
        except Exception as error:  # a fault of the harness is no success of the store
            outcome = Outcome(
                lost=1, notes=[f"the harness failed: {error!r} {traceback.format_exc().splitlines()[-3:]}"]
            )
        took = time.monotonic() - began
        record = Record(
            kind.name, trial, outcome.lost, outcome.changed, outcome.tracebacks, outcome.untidy, outcome.intact,
            outcome.found, round(took, 2), "; ".join(outcome.notes),
        )  # fmt: skip
        records.append(record)
        state = "ok" if outcome.good else "FAILED"
        print(f"{kind.name:<18} {trial:>3} {state} {took:6.1f} s  {record.notes}", flush=True)
        if outcome.good:
            for path in set(bench.work.iterdir()) - before:
                shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
    return records


def _with_earlier(out: Path, records: list[Record], kinds: list[Kind]) -> tuple[list[Record], list[Kind]]:
    """With the records of kinds that were tried before and not now."""
    records, names = list(records), {kind.name for kind in kinds}
    if (out / "faults.csv").exists():
        with open(out / "faults.csv", newline="") as file:
            rows = [row for row in csv.DictReader(file) if row["kind"] not in names]
        wholes = ("trial", "lost", "changed", "tracebacks", "untidy", "intact", "found")
        for row in rows:
            numbers = {name: int(row[name]) for name in wholes}
            records.append(Record(row["kind"], **numbers, seconds=float(row["seconds"]), notes=row["notes"]))
        names |= {row["kind"] for row in rows}
    order = [kind.name for kind in KINDS]
    records.sort(key=lambda record: (order.index(record.kind), record.trial))
    return records, [kind for kind in KINDS if kind.name in names]


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


def _write(
    out: Path, records: list[Record], kinds: list[Kind], left_out: dict[str, str], cells: int, seed: int, own: int
) -> None:
    out.mkdir(parents=True, exist_ok=True)
    with open(out / "faults.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, list(Record.__dataclass_fields__), lineterminator="\n")
        writer.writeheader()
        writer.writerows(asdict(record) for record in records)
    versions = {**provenance(), "pyarrow": metadata.version("pyarrow")}
    if own < len(records):  # some are of an earlier run, of other code perhaps
        del versions["commit"]
    summary = {
        "faults": len(records),
        "kinds": _sums(records, kinds),
        "not_tried": left_out,
        "cells_and_pieces": cells,
        "seed": seed,
        "seconds": round(sum(record.seconds for record in records), 1),
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        **versions,
    }
    (out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")


if __name__ == "__main__":
    raise SystemExit(main())
