"""The kinds of faults: each function disturbs one run, or one folder, and returns what is left after the resume."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from fault_bench import OVERLAP, Bench, Outcome, Run, count_tracebacks, damage, last_line
from fault_disk import flip, remount, small_disk
from fault_others import kill_probe, kill_training

Rng = np.random.Generator
#: Seconds that processes may outlive their run: on a busy machine a worker that is just starting needs some to notice.
_OUTLIVE = 30.0
Fault = Callable[[Bench, Rng], Outcome]


@dataclass(frozen=True)
class Kind:
    """A kind of fault."""

    name: str
    what: str
    apply: Fault
    #: Faults of this kind in a full run of the harness, and kills by SIGKILL that each brings.
    count: int
    kills: int = 0
    needs: str = ""


def _strike(bench: Bench, run: Run, rng: Rng, number: int, group: bool = True) -> bool:
    """Send a signal at a random moment; whether it came too late.

    The moment is one after a random number of cells, from none to all but a few, is on the disk.
    """
    late = _wait(bench, run, rng)
    run.signal(number, group)
    return late


def _wait(bench: Bench, run: Run, rng: Rng) -> bool:
    run.wait_for(run.out / "manifest.json")
    run.wait_for_cells(int(rng.integers(0, bench.reference.cells - 5)))
    time.sleep(rng.uniform(0.0, 0.05))
    return not run.alive()


def _begin(bench: Bench, *more: str, out: Path | None = None, **options: object) -> Run:
    path = out or bench.fresh()
    run = bench.start(path, *more, **options)  # type: ignore[arg-type]  # passed on as they are
    run.out = path
    return run


def _after(run: Run, allowed: tuple[int, ...] = (), late: bool = False) -> Outcome:
    """The end of a disturbed run: its exit code, if it may be told, must be one of those allowed."""
    code, text = run.finish()
    outcome = Outcome(tracebacks=count_tracebacks(text), late=late)
    if outcome.tracebacks:
        outcome.notes.append(f"a traceback: {last_line(text)}")
    if allowed and code not in (*allowed, 0, 1, 3):
        outcome.tracebacks += 1
        outcome.notes.append(f"ended with {code}: {last_line(text)}")
    deadline = time.monotonic() + _OUTLIVE
    while run.survivors() and time.monotonic() < deadline:
        time.sleep(0.05)
    if left := run.survivors():
        outcome.untidy += len(left)
        outcome.notes.append(f"{len(left)} processes outlive the run")
        run.signal(signal.SIGKILL)
    return outcome


def kill_all(bench: Bench, rng: Rng) -> Outcome:
    """SIGKILL of the run and its workers; every other run draws in its own process."""
    run = _begin(bench, *(("--workers", "1") if rng.random() < 0.5 else ()), anew=bool(rng.random() < 0.2))
    late = _strike(bench, run, rng, signal.SIGKILL)
    return bench.settle(run.out, _after(run, late=late))


def kill_main(bench: Bench, rng: Rng) -> Outcome:
    """SIGKILL of the main process alone; its workers must go by themselves."""
    run = _begin(bench)
    late = _strike(bench, run, rng, signal.SIGKILL, group=False)
    return bench.settle(run.out, _after(run, late=late))


def kill_worker(bench: Bench, rng: Rng) -> Outcome:
    """SIGKILL of a worker of the process pool."""
    run = _begin(bench)
    late = _wait(bench, run, rng)
    pids = run.workers()
    if pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(rng.choice(pids)), signal.SIGKILL)
    return bench.settle(run.out, _after(run, (2,), late=late or not pids))


def kill_resume(bench: Bench, rng: Rng) -> Outcome:
    """SIGKILL of a run, and SIGKILL again of its resume."""
    run = _begin(bench)
    late = _strike(bench, run, rng, signal.SIGKILL)
    run.finish()
    again = _begin(bench, out=run.out, resume=True)
    late = _strike(bench, again, rng, signal.SIGKILL) or late
    return bench.settle(run.out, _after(again, late=late))


def terminate(bench: Bench, rng: Rng) -> Outcome:
    """SIGTERM of the main process, as a batch system sends it."""
    run = _begin(bench)
    late = _strike(bench, run, rng, signal.SIGTERM, group=False)
    return bench.settle(run.out, _after(run, (-signal.SIGTERM, 130, 143), late=late))


def interrupt(bench: Bench, rng: Rng) -> Outcome:
    """Ctrl-C, which reaches the whole process group."""
    run = _begin(bench)
    late = _strike(bench, run, rng, signal.SIGINT)
    return bench.settle(run.out, _after(run, (130,), late=late))


def interrupt_twice(bench: Bench, rng: Rng) -> Outcome:
    """Ctrl-C, and again within a fifth of a second."""
    run = _begin(bench)
    late = _strike(bench, run, rng, signal.SIGINT)
    time.sleep(rng.uniform(0.0, 0.2))
    run.signal(signal.SIGINT)
    return bench.settle(run.out, _after(run, (130, -signal.SIGINT), late=late))


def disk_full(bench: Bench, rng: Rng) -> Outcome:
    """A disk that fills up (a small tmpfs), and is larger at the resume."""
    with small_disk(bench.work / "disk", f"{int(rng.integers(150, 650))}k") as disk:
        run = _begin(bench, out=disk / "r")
        outcome = _after(run, (2,))
        outcome.late = run.process.returncode != 2
        remount(disk, "size=64m")
        return bench.settle(run.out, outcome)


def file_limit(bench: Bench, rng: Rng) -> Outcome:
    """Writing fails with EFBIG: no file may be larger than a few hundred bytes or kilobytes."""
    run = _begin(bench, limit=int(2 ** rng.uniform(7, 14)))
    outcome = _after(run, (2,))
    outcome.late = run.process.returncode != 2
    return bench.settle(run.out, outcome)


def read_only(bench: Bench, rng: Rng) -> Outcome:
    """The disk becomes read-only while the run writes (tmpfs remounted)."""
    with small_disk(bench.work / "disk", "64m") as disk:
        run = _begin(bench, out=disk / "r")
        late = _wait(bench, run, rng)
        while run.alive() and not remount(disk, "ro"):  # refused while a file is open for writing
            time.sleep(0.001)
        outcome = _after(run, (2,), late=late)
        remount(disk, "rw")
        return bench.settle(run.out, outcome)


def _cells(out: Path) -> list[Path]:
    return sorted(path for path in (out / "cells").iterdir() if not path.name.startswith("."))


def _broken(path: Path, how: str, rng: Rng, others: list[Path]) -> None:
    raw = path.read_bytes()
    about = path.stat()
    if how == "gone":
        path.unlink()
        return
    path.write_bytes(
        {
            "flip": lambda: flip(raw, rng),
            "truncate": lambda: raw[: int(rng.integers(1, len(raw)))],
            "empty": lambda: b"",
            "garbage": lambda: rng.bytes(len(raw)),
            "swap": lambda: others[int(rng.integers(len(others)))].read_bytes(),
        }[how]()
    )
    if rng.random() < 0.5:  # and the file's times do not tell
        os.utime(path, ns=(about.st_atime_ns, about.st_mtime_ns))


def corrupt_cells(how: str) -> Fault:
    """Damage 1 to 5 files of cells or findings."""

    def apply(bench: Bench, rng: Rng) -> Outcome:
        out = bench.copy()
        files = _cells(out)
        for index in rng.choice(len(files), size=int(rng.integers(1, 6)), replace=False):
            _broken(files[index], how, rng, files)
        return bench.settle(out, Outcome())

    return apply


def corrupt_pack(part: str) -> Fault:
    """Damage a packed store: ``results verify`` must tell, ``--drop`` and the resume must repair."""

    def apply(bench: Bench, rng: Rng) -> Outcome:
        out = bench.copy()
        _results("compact", out)
        paths = sorted((out / "packs").glob(f"*.{part}"))
        how = str(rng.choice(["flip", "truncate", "empty", "garbage", "gone"]))
        _broken(paths[0], how, rng, paths)
        outcome = Outcome()
        told = damage(out)
        if not told:
            outcome.changed += 1
            outcome.notes.append(f"{how} of a pack's {part} went unnoticed")
        code, text = Run(("results", "verify", str(out), "--drop", "--quiet"), bench.work).finish()
        outcome.tracebacks += count_tracebacks(text) + (code != 1)
        return bench.settle(out, outcome)

    return apply


def corrupt_file(name: str) -> Fault:
    """Damage a file beside the cells."""

    def apply(bench: Bench, rng: Rng) -> Outcome:
        out = bench.copy()
        how = str(rng.choice(["flip", "truncate", "empty", "garbage", "gone"]))
        _broken(out / name, how, rng, [])
        outcome = bench.settle(out, Outcome())
        outcome.notes = [f"{how}: {note}" for note in outcome.notes]
        return outcome

    return apply


def _results(name: str, out: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "theory_lab.main", "results", name, str(out), "--quiet"],
        check=True,
        capture_output=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def kill_compact(bench: Bench, rng: Rng) -> Outcome:
    """SIGKILL of ``results compact``, while it packs."""
    out = bench.copy()
    run = Run(("results", "compact", str(out), "--quiet"), bench.work)
    run.wait_for(out / ".compact.lock")
    time.sleep(rng.uniform(0.0, 0.4))
    late = not run.alive()
    run.signal(signal.SIGKILL)
    outcome = _after(run, late=late)
    outcome = bench.settle(out, outcome)
    _results("compact", out)  # and the next one tidies up
    bench.compare(out, outcome)
    return outcome


def compact_meanwhile(bench: Bench, rng: Rng) -> Outcome:
    """``results compact`` again and again while the run writes."""
    run = _begin(bench)
    run.wait_for(run.out / "packs")
    packings = 0
    while run.alive() and packings < 4:
        time.sleep(rng.uniform(0.0, 0.5))
        with contextlib.suppress(subprocess.CalledProcessError):  # before the first cell there is nothing to open
            _results("compact", run.out)
        packings += 1
    return bench.settle(run.out, _after(run, (0,)))


def clock_back(bench: Bench, rng: Rng) -> Outcome:
    """The clock is set back by up to three years between two runs."""
    run = _begin(bench)
    late = _strike(bench, run, rng, signal.SIGKILL)
    outcome = _after(run, late=late)
    days = int(rng.integers(1, 1100))
    library = _libfaketime()
    if library is None:  # then the files come from the future, which is the same to whoever compares
        for path in run.out.rglob("*"):
            os.utime(path, (time.time() + 86400 * days,) * 2)
        return bench.settle(run.out, outcome)
    # Time of files and of the run: monotonic clocks are left alone, as an administrator who sets the clock leaves them.
    env = {"LD_PRELOAD": library, "FAKETIME": f"-{days}d", "FAKETIME_DONT_FAKE_MONOTONIC": "1"}
    return bench.settle(run.out, outcome, env=env)


def _libfaketime() -> str | None:
    for folder in Path("/usr/lib").glob("*/faketime"):
        if (folder / "libfaketimeMT.so.1").exists():
            return str(folder / "libfaketimeMT.so.1")
    return None


def two_writers(bench: Bench, rng: Rng) -> Outcome:
    """Two processes run the same sweep, or overlapping ones, into one folder; every other time one is killed."""
    first = _begin(bench)
    first.wait_for(first.out / "manifest.json")
    other = OVERLAP if rng.random() < 0.5 else None
    more = {} if other is None else {"sweep": other}
    second = bench.start(first.out, resume=True, **more)
    second.out = first.out
    late = False
    if rng.random() < 0.5:
        late = _strike(bench, second if rng.random() < 0.5 else first, rng, signal.SIGKILL)
    code, text = second.finish()
    outcome = _after(first, late=late)
    outcome.tracebacks += count_tracebacks(text)
    if code not in (0, 1, 3, -signal.SIGKILL):
        outcome.lost += 1
        outcome.notes.append(f"the second writer ended with {code}: {last_line(text)}")
    return bench.settle(first.out, outcome)


def leavings(bench: Bench, rng: Rng) -> Outcome:
    """What killed writers leave: temporary files, locks, halves of packs."""
    run = _begin(bench)
    late = _strike(bench, run, rng, signal.SIGKILL)
    outcome = _after(run, late=late)
    out = run.out
    for folder in (out, out / "cells", out / "packs"):
        folder.mkdir(parents=True, exist_ok=True)
    cells = _cells(out)
    names = [path.name for path in cells] or ["0" * 32 + ".parquet"]
    for index in range(int(rng.integers(1, 20))):
        (out / "cells" / f".{names[index % len(names)]}-{index:08x}").write_bytes(rng.bytes(int(rng.integers(0, 3000))))
    (out / ".manifest.json-abc").write_bytes(b"{")
    (out / ".rows.parquet-abc").write_bytes(rng.bytes(100))
    (out / ".lock").write_text(str(os.getpid()))
    (out / ".compact.lock").write_text("left")
    (out / "packs" / ".1-2.blocks").write_bytes(rng.bytes(500))
    for end in ("blocks.parquet", "json"):
        (out / "packs" / f"{rng.integers(1 << 60):016x}.{end}").write_bytes(rng.bytes(300))
    outcome = bench.settle(out, outcome)
    _results("compact", out)
    bench.compare(out, outcome)
    return outcome


def version_one(bench: Bench, rng: Rng) -> Outcome:
    """SIGKILL of ``results migrate`` on a folder whose cells are of format 1."""
    import hashlib
    import json

    import pyarrow as pa
    import pyarrow.parquet as pq

    from theory_lab.store.cells import KEY, NAMES, read_cell

    out = bench.copy()
    for path in (out / "cells").glob("*.parquet"):
        table, about = read_cell(path)
        columns = {name: table.columns[name].tolist() for name in NAMES}
        about["checksum"] = hashlib.blake2b(repr((path.stem, columns)).encode(), digest_size=16).hexdigest()
        del about["format"]
        kept = pa.table(columns).replace_schema_metadata({KEY: json.dumps(about).encode()})
        pq.write_table(kept, path)
    manifest = json.loads((out / "manifest.json").read_text())
    (out / "manifest.json").write_text(json.dumps({**manifest, "format": 1}))
    run = Run(("results", "migrate", str(out)), bench.work)
    time.sleep(rng.uniform(0.0, 0.5))
    late = not run.alive()
    run.signal(signal.SIGKILL)
    return bench.settle(out, _after(run, late=late))


class Cluster:
    """A Dask scheduler and two workers, as processes."""

    def __init__(self, work: Path) -> None:
        self._work = work
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.address = ""

    def start(self) -> None:
        """Start what does not run."""
        if not self._runs("scheduler"):
            self.stop()
            port = _free_port()
            self.address = f"tcp://127.0.0.1:{port}"
            self._start("scheduler", "scheduler", "--host", "127.0.0.1", "--port", str(port), "--no-dashboard")
        for name in ("worker-0", "worker-1"):
            if not self._runs(name):
                single = ("--nthreads", "1", "--nworkers", "1", "--no-dashboard", "--no-nanny")
                self._start(name, "worker", self.address, *single)
        from distributed import Client

        with Client(self.address, timeout=60) as client:
            client.wait_for_workers(2, timeout=120)

    def _runs(self, name: str) -> bool:
        return name in self.processes and self.processes[name].poll() is None

    def _start(self, name: str, *words: str) -> None:
        log = open(self._work / f"dask-{name}.log", "ab")  # noqa: SIM115  # for as long as the process lives
        self.processes[name] = subprocess.Popen(
            [sys.executable, "-m", "dask", *words], stdout=log, stderr=log, stdin=subprocess.DEVNULL,
            env={**os.environ, "OMP_NUM_THREADS": "1"}, cwd=self._work, start_new_session=True,
        )  # fmt: skip

    def kill(self, name: str) -> None:
        """SIGKILL of one of them."""
        self.processes[name].kill()
        self.processes[name].wait()

    def stop(self) -> None:
        """End all of them."""
        for process in self.processes.values():
            process.kill()
            process.wait()
        self.processes = {}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


_cluster: Cluster | None = None


def cluster(bench: Bench) -> Cluster:
    """The cluster of this session, running."""
    global _cluster  # one a session
    if _cluster is None:
        _cluster = Cluster(bench.work)
    _cluster.start()
    return _cluster


def stop_cluster() -> None:
    """End the cluster, if there is one."""
    if _cluster is not None:
        _cluster.stop()


def kill_dask(who: str) -> Fault:
    """SIGKILL of a Dask worker, or of the scheduler."""

    def apply(bench: Bench, rng: Rng) -> Outcome:
        dask = cluster(bench)
        run = _begin(bench, "--scheduler", dask.address)
        late = _wait(bench, run, rng)
        dask.kill("scheduler" if who == "scheduler" else f"worker-{rng.integers(2)}")
        return bench.settle(run.out, _after(run, (2,), late=late))

    return apply


def kill_dask_client(bench: Bench, rng: Rng) -> Outcome:
    """SIGKILL of a run that uses Dask."""
    dask = cluster(bench)
    run = _begin(bench, "--scheduler", dask.address)
    late = _strike(bench, run, rng, signal.SIGKILL)
    return bench.settle(run.out, _after(run, late=late), "--scheduler", cluster(bench).address)


KINDS = (
    Kind("sigkill-run", "SIGKILL of the run and its workers at a random moment", kill_all, 50, 1),
    Kind("sigkill-main", "SIGKILL of the main process alone", kill_main, 6, 1),
    Kind("sigkill-twice", "SIGKILL of a run, then of its resume", kill_resume, 5, 2),
    Kind("sigkill-worker", "SIGKILL of a worker of the process pool", kill_worker, 8, 1),
    Kind("dask-worker", "SIGKILL of a Dask worker", kill_dask("worker"), 6, 1, "dask"),
    Kind("dask-scheduler", "SIGKILL of the Dask scheduler", kill_dask("scheduler"), 6, 1, "dask"),
    Kind("dask-client", "SIGKILL of a run on Dask", kill_dask_client, 4, 1, "dask"),
    Kind("sigterm", "SIGTERM of the main process", terminate, 6),
    Kind("ctrl-c", "Ctrl-C", interrupt, 6),
    Kind("ctrl-c-twice", "Ctrl-C twice within 0.2 s", interrupt_twice, 8),
    Kind("disk-full", "disk full: a small tmpfs", disk_full, 8, 0, "root"),
    Kind("file-limit", "writing fails: RLIMIT_FSIZE", file_limit, 6),
    Kind("read-only", "disk read-only while it is written to", read_only, 6, 0, "root"),
    Kind("cell-flipped", "1 to 8 bytes of 1 to 5 cell files changed", corrupt_cells("flip"), 12),
    Kind("cell-truncated", "1 to 5 cell files cut short", corrupt_cells("truncate"), 5),
    Kind("cell-empty", "1 to 5 cell files of length 0", corrupt_cells("empty"), 3),
    Kind("cell-garbage", "1 to 5 cell files of random bytes", corrupt_cells("garbage"), 4),
    Kind("cell-swapped", "1 to 5 cell files with another cell's content", corrupt_cells("swap"), 4),
    Kind("cell-gone", "1 to 5 cell files removed", corrupt_cells("gone"), 3),
    Kind("pack-blocks", "a pack's blocks damaged", corrupt_pack("blocks.parquet"), 6),
    Kind("pack-cells", "a pack's table of cells damaged", corrupt_pack("cells.parquet"), 5),
    Kind("pack-seal", "a pack's seal damaged", corrupt_pack("json"), 4),
    Kind("manifest", "manifest.json damaged or gone", corrupt_file("manifest.json"), 6),
    Kind("timings", "timings.csv damaged or gone", corrupt_file("timings.csv"), 3),
    Kind("rows", "rows.parquet damaged or gone", corrupt_file("rows.parquet"), 4),
    Kind("clock-back", "clock set back by up to 3 years", clock_back, 5, 1),
    Kind("two-writers", "two processes write to one folder at once", two_writers, 8),
    Kind("leavings", "temporary files, locks and halves of packs left over", leavings, 5, 1),
    Kind("sigkill-compact", "SIGKILL of results compact", kill_compact, 6, 1),
    Kind("compact-meanwhile", "results compact while the run writes", compact_meanwhile, 3),
    Kind("sigkill-training", "SIGKILL of theory-lab train", kill_training, 4, 1, "torch"),
    Kind("sigkill-probe", "SIGKILL of theory-lab probe", kill_probe, 3, 1, "torch"),
    Kind("sigkill-migrate", "SIGKILL of results migrate", version_one, 3, 1),
)
