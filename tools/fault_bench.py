"""What a fault is tried on: a sweep as a user runs it, its undisturbed results, and the comparison with them."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

import theory_lab
from theory_lab.settings import Silent
from theory_lab.store.archive import Archive, Damage
from theory_lab.store.cells import DamagedError

#: Law families and lengths of the sweep: 110 cells and 5 pieces of a study, a few seconds of drawing.
NOISE = ("gaussian", "spherical", "uniform", "two-point", "student-t:3")
ASKED: dict[str, Any] = {
    "claims": ("tda-4.3", "tda-4.6", "tra-dispersion"),
    "noise": NOISE,
    "length": [2 * 4**k for k in range(10)] + [2**20],
    "trials": 80_000,
}
SWEEP = (
    "check", *ASKED["claims"], *(word for name in NOISE for word in ("--noise", name)),
    "--length", ",".join(map(str, ASKED["length"])), "--trials", str(ASKED["trials"]), "--format", "json",
)  # fmt: skip
POOL = ("--workers", "2")
#: Another sweep that shares some cells with it.
OVERLAP = (
    "check", "tda-4.3", "--noise", "gaussian", "--noise", "laplace", "--length", "2:2^20:x2",
    "--trials", str(ASKED["trials"]), "--workers", "1", "--format", "json",
)  # fmt: skip
_PATIENCE = 300.0
_FOUND = re.compile(r"to draw: (\d+) cells(?:, (\d+) of them found)?")
_LOCKS = {".lock", ".compact.lock"}


@dataclass
class Reference:
    """The undisturbed run."""

    rows: pd.DataFrame
    blocks: dict[str, list[bytes]]
    findings: dict[str, str]
    seconds: float
    drawing: float

    @property
    def cells(self) -> int:
        """Cells and pieces."""
        return len(self.blocks) + len(self.findings)


@dataclass
class Outcome:
    """What one fault left behind, after the resume."""

    lost: int = 0
    changed: int = 0
    tracebacks: int = 0
    untidy: int = 0
    notes: list[str] = field(default_factory=list)
    found: int = -1
    intact: int = -1
    #: Whether the fault came after the run had ended, so that nothing was tried.
    late: bool = False

    @property
    def good(self) -> bool:
        """Whether nothing was lost or changed, and nobody saw a traceback."""
        return not (self.lost or self.changed or self.tracebacks or self.untidy)


class Listener(Silent):
    """Progress that remembers how many cells a run found."""

    def __init__(self) -> None:
        self.found = 0

    def start(self, cells: int, done: int, work: float) -> None:
        """See :class:`theory_lab.settings.Progress`."""
        self.found = done


#: Imports what commands import, once, and forks a process for each line that it reads: a start of Python costs more
#: than most of these runs draw. It starts no thread, and its children leave it at once.
_NURSERY = """
import json, os, sys
import pyarrow.parquet, pandas, rich.table
import theory_lab.cli, theory_lab.experiments, theory_lab.render, theory_lab.progress, theory_lab.store.folder
from theory_lab.main import main
print("ready", flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    between = os.fork()
    if between:
        os.waitpid(between, 0)
        continue
    child = os.fork()
    if child:
        os.write(1, f"{child}\\n".encode())
        os._exit(0)
    os.setsid()
    null, log = os.open(os.devnull, os.O_RDWR), os.open(asked["log"], os.O_WRONLY | os.O_APPEND)
    for handle, number in ((null, 0), (null, 1), (log, 2)):
        os.dup2(handle, number)
    sys.argv = ["theory-lab", *asked["words"]]
    main()
"""
_PR_SET_CHILD_SUBREAPER = 36


class Nursery:
    """Starts commands without starting Python."""

    def __init__(self) -> None:
        # Grandchildren become this process's children when their parent ends, so that it learns how they end.
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self._process = subprocess.Popen(
            [sys.executable, "-c", _NURSERY], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        self._say("")

    def _say(self, line: str) -> str:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        if line:
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
        return self._process.stdout.readline()

    def start(self, words: tuple[str, ...], log: Path) -> Child:
        """Start a command in a session of its own; standard error goes to ``log``."""
        return Child(int(self._say(json.dumps({"words": words, "log": str(log)}))))

    def stop(self) -> None:
        """End it."""
        self._process.kill()
        self._process.communicate()


class Child:
    """A process of the nursery, with what is used of subprocess.Popen."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Its exit code, negative for a signal; None while it runs."""
        if self.returncode is None:
            with contextlib.suppress(ChildProcessError):  # not ours yet
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                if pid:
                    self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float = float("inf")) -> int:
        """Wait for its end."""
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(str(self.pid), timeout)
            time.sleep(0.005)
        return code


_nursery: Nursery | None = None


def _start_child(words: tuple[str, ...], log: Path) -> Child:
    global _nursery  # one a session
    if _nursery is None:
        _nursery = Nursery()
    return _nursery.start(words, log)


def stop_nursery() -> None:
    """End the process that starts others, if there is one."""
    global _nursery
    if _nursery is not None:
        _nursery.stop()
        _nursery = None


class Run:
    """A ``theory-lab`` command in a session of its own.

    Parameters
    ----------
    words : tuple of str
        The command.
    work : Path
        Where its log goes.
    env : dict, optional
        More of its environment.
    limit : int
        Largest file that it may write, in bytes; 0 for any.
    anew : bool
        Whether Python is started for it, as a user's shell does. With an environment or a limit it is anyway.
    """

    def __init__(
        self, words: tuple[str, ...], work: Path, env: dict[str, str] | None = None, limit: int = 0, anew: bool = False
    ) -> None:
        self.out = work
        path = work / f"log-{time.monotonic_ns()}"
        self._log = open(path, "w+")  # noqa: SIM115  # closed with the run
        self.process: subprocess.Popen[bytes] | Child
        if not (env or limit or anew):
            self.started = time.monotonic()
            self.process = _start_child(words, path)
            return
        self.started = time.monotonic()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "theory_lab.main", *words],
            stdout=subprocess.DEVNULL,
            stderr=self._log,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "OMP_NUM_THREADS": "1", **(env or {})},
            start_new_session=True,
            preexec_fn=(lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))) if limit else None,
        )

    def alive(self) -> bool:
        """Whether it still runs."""
        return self.process.poll() is None

    def wait_for_cells(self, count: int) -> None:
        """Wait until so many cells are in its results folder, or it has ended."""
        folder = self.out / "cells"
        while self.alive() and time.monotonic() - self.started < _PATIENCE:
            with contextlib.suppress(OSError):
                if sum(not name.startswith(".") for name in os.listdir(folder)) >= count:
                    return
            time.sleep(0.002)

    def wait_for(self, path: Path) -> None:
        """Wait until a file is there, or the run has ended."""
        while self.alive() and not path.exists() and time.monotonic() - self.started < _PATIENCE:
            time.sleep(0.005)

    def signal(self, number: int, group: bool = True) -> None:
        """Send a signal to the run and its workers, or to the run alone."""
        with contextlib.suppress(ProcessLookupError):
            (os.killpg if group else os.kill)(self.process.pid, number)

    def workers(self) -> list[int]:
        """Its worker processes."""
        found = []
        for pid in _children(self.process.pid):
            with contextlib.suppress(OSError):
                if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    found.append(pid)
        return found

    def survivors(self) -> list[int]:
        """Processes of its session that are still there."""
        own = self.process.pid
        return [pid for pid, words in _processes() if int(words[3]) == own and words[0] != "Z" and pid != own]

    def finish(self) -> tuple[int, str]:
        """Wait for its end: exit code and standard error."""
        try:
            code = self.process.wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            self.signal(signal.SIGKILL)
            self.process.wait()
            code = -99
        self._log.seek(0)
        text = self._log.read()
        self._log.close()
        return code, text


def _children(pid: int) -> list[int]:
    return [child for child, words in _processes() if int(words[1]) == pid]


def _processes() -> Iterator[tuple[int, list[str]]]:
    """Number of every process, and what its stat says after its name: state, parent, group, session, ..."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                words = (entry / "stat").read_text().rpartition(")")[2].split()
                if len(words) > 3:
                    yield int(entry.name), words


class Bench:
    """A folder to try faults in, and what the sweep gives undisturbed.

    Parameters
    ----------
    work : Path
        Where everything happens. What benches side by side have in common is in the folder above it.
    known : tuple of Path and Reference, optional
        The undisturbed run of another bench; by default it is run here.
    """

    def __init__(self, work: Path, known: tuple[Path, Reference] | None = None) -> None:
        self.work = work
        work.mkdir(parents=True, exist_ok=True)
        #: Number of the fault that is tried: it decides how its run is resumed.
        self.turn = 0
        self._count = 0
        self.whole, self.reference = known or self._undisturbed()

    @property
    def known(self) -> tuple[Path, Reference]:
        """The undisturbed run, for another bench."""
        return self.whole, self.reference

    @contextlib.contextmanager
    def common(self, name: str) -> Iterator[Path]:
        """A path beside all benches, held by one of them at a time."""
        path = self.work.parent / name
        with open(f"{path}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield path

    def _undisturbed(self) -> tuple[Path, Reference]:
        work = self.work
        self.whole = work / "whole"
        shutil.rmtree(self.whole, ignore_errors=True)
        run = Run((*SWEEP, *POOL, "--out", str(self.whole)), work, anew=True)
        run.wait_for(self.whole / "manifest.json")
        began = time.monotonic()
        while run.alive() and not run.workers():
            time.sleep(0.005)
        if not run.alive():  # the engine starts no pool for what is soon done
            raise SystemExit("the undisturbed run started no workers: more trials are needed")
        code, text = run.finish()
        if code not in (0, 1, 3):
            raise SystemExit(f"the undisturbed run failed with {code}:\n{text}")
        ended = time.monotonic()
        blocks, findings, problems = contents(self.whole)
        if problems:
            raise SystemExit(f"the undisturbed run left {problems}")
        rows = pd.read_parquet(self.whole / "rows.parquet").drop(columns="seconds")
        return self.whole, Reference(rows, blocks, findings, ended - run.started, ended - began)

    def fresh(self) -> Path:
        """A name for a new results folder."""
        self._count += 1
        return self.work / f"trial-{self._count}"

    def copy(self) -> Path:
        """A new results folder with the whole results."""
        path = self.fresh()
        shutil.copytree(self.whole, path)
        return path

    def start(self, out: Path, *more: str, resume: bool = False, env: dict[str, str] | None = None, limit: int = 0,
              sweep: tuple[str, ...] = SWEEP, anew: bool = False) -> Run:  # fmt: skip
        """Start the sweep."""
        where = () if {"--scheduler", "--workers"} & {*more, *sweep} else POOL
        words = (*sweep, *where, "--out", str(out), *(("--resume",) if resume else ()), *more)
        return Run(words, self.work, env, limit, anew)

    def intact(self, out: Path) -> int:
        """Cells and pieces that lie in a folder as the undisturbed run has them."""
        if not (out / "cells").is_dir():
            return 0
        blocks, findings, _ = contents(out)
        same = sum(self.reference.blocks.get(name) == found for name, found in blocks.items())
        return same + sum(self.reference.findings.get(name) == found for name, found in findings.items())

    def settle(self, out: Path, outcome: Outcome, *more: str, env: dict[str, str] | None = None) -> Outcome:
        """Resume the sweep and compare what it gives with the undisturbed run.

        The resume of every fourth fault is a command as a user types it, as is each with options of its own; the
        others call :func:`theory_lab.check`, which saves a start of Python.
        """
        outcome.intact = self.intact(out)
        if more or env or self.turn % 4 == 3:
            code, text = self.start(out, *more, resume=True, env=env, anew=True).finish()
            if found := count_tracebacks(text):
                outcome.tracebacks += found
                outcome.notes.append(f"a traceback of the resume: {last_line(text)}")
            match = _FOUND.search(text)
            outcome.found = int(match[2] or 0) if match else 0
            problem = "" if code in (0, 1, 3) else f"{code}: {last_line(text)}"
        else:
            listener = Listener()
            problem = ""
            try:
                theory_lab.check(**ASKED, out=out, resume=True, workers=1, progress=listener)
            except theory_lab.TheoryLabError as error:
                problem = str(error)
            outcome.found = listener.found
        if problem:
            outcome.lost += self.reference.cells
            outcome.notes.append(f"resume ended with {problem}")
            return outcome
        if outcome.found < outcome.intact:
            outcome.lost += outcome.intact - outcome.found
            outcome.notes.append(f"{outcome.intact} cells were intact, the resume found {outcome.found}")
        self.compare(out, outcome)
        return outcome

    def compare(self, out: Path, outcome: Outcome) -> None:
        """Hold a finished folder against the undisturbed run."""
        blocks, findings, problems = contents(out)
        for name, want in [*self.reference.blocks.items(), *self.reference.findings.items()]:
            have = blocks.get(name) if name in self.reference.blocks else findings.get(name)
            outcome.lost += have is None
            outcome.changed += have is not None and have != want
        try:
            rows = pd.read_parquet(out / "rows.parquet").drop(columns="seconds")
            pd.testing.assert_frame_equal(rows, self.reference.rows, check_exact=True)
        except (AssertionError, OSError, KeyError) as error:
            outcome.changed += 1
            outcome.notes.append(f"rows differ: {str(error).splitlines()[0] if str(error) else error!r}")
        outcome.notes += problems[:3]
        outcome.changed += len(problems)
        leavings = [p.name for p in out.rglob(".*") if p.name not in _LOCKS]
        if leavings:
            outcome.untidy += len(leavings)
            outcome.notes.append(f"left behind: {leavings[:3]}")


def contents(out: Path) -> tuple[dict[str, list[bytes]], dict[str, str], list[str]]:
    """Every sound cell and piece of a folder, and what is wrong with the others."""
    blocks: dict[str, list[bytes]] = {}
    findings: dict[str, str] = {}
    problems: list[str] = []
    archive = Archive(out)
    for name, places in archive.places().items():
        for place in places:
            try:
                if place.is_cell():
                    table = place.read()[0]
                    blocks[name] = [table.columns[column].tobytes() for column in sorted(table.columns)]
                else:
                    findings[name] = repr(place.findings()["findings"])
            except (DamagedError, FileNotFoundError) as error:
                problems.append(str(error))
    return blocks, findings, problems


def damage(out: Path) -> list[str]:
    """What ``theory-lab results verify`` finds."""
    return [found.where for found in Archive(out).verify() if isinstance(found, Damage)]


def count_tracebacks(text: str) -> int:
    """Tracebacks, and words of the interpreter that no user should see."""
    return text.count("Traceback (most recent call last)") + text.count("Exception ignored")


def last_line(text: str) -> str:
    """The last line of a log."""
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""
