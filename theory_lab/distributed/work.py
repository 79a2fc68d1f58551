"""What a worker does with a batch: check that it may, run the tasks, hand back what counts.

This module is imported on the workers and, to read what is sent, by the scheduler. It needs no Dask.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import pickle
import platform
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol

from theory_lab import __version__
from theory_lab.engine import PieceTask, Task, TaskResult, run_task
from theory_lab.errors import InputError, TheoryLabError, WorkerError
from theory_lab.estimation.base import BlockSum
from theory_lab.noise import get_family
from theory_lab.streams import STREAM_VERSION
from theory_lab.studies import Finding

#: Laws whose scores lie in files: they are named, and never sent.
_FILED = ("file:", "model:")
_lock = threading.Lock()
#: A process has one working folder, and perhaps several threads.
_in_folder = threading.Lock()


@dataclass(frozen=True)
class Needs:
    """What must be the same on both sides for the same bits, beside Python and Dask.

    Attributes
    ----------
    packages : tuple of str
    source : tuple of str
        Parts of theory_lab's source code.
    kernels : bool
        Whether the code of ``theory_kernels`` counts too.
    """

    packages: tuple[str, ...]
    source: tuple[str, ...]
    kernels: bool = False


#: Of what is drawn.
CELLS = Needs(("numpy", "scipy"), ("streams.py", "engine.py", "noise", "claims", "estimation", "studies", "attention"))
#: Of what is measured on models.
PROBES = Needs(("numpy", "torch", "transformers"), ("streams.py", "attention", "models", "probes"), kernels=True)


class Job(Protocol):
    """Work of another sort than cells and pieces, such as a window of a probe. It is sent as it is."""

    @property
    def kind(self) -> str:
        """What it is an example of: those of a kind share what is learned of their cost."""

    @property
    def title(self) -> str:
        """It in words, such as "the window 0 of 'text'"."""

    @property
    def seconds(self) -> float:
        """Rough cost, without :meth:`prepare`."""

    @property
    def startup(self) -> float:
        """Seconds that :meth:`prepare` may take on a worker that runs the first of the kind."""

    @property
    def here(self) -> bool:
        """Whether it must run in this process."""

    @property
    def needs(self) -> Needs:
        """What must be the same on both sides."""

    def prepare(self) -> None:
        """Have ready on this worker what it shares with others, such as a model; TheoryLabError if that cannot be."""

    def run(self) -> Any:
        """Do it; what it returns is sent back."""


Sent = Task | PieceTask | Job


@dataclass(frozen=True)
class Done:
    """What a job left behind, and the seconds it took."""

    task: Job
    value: Any
    seconds: float


@dataclass(frozen=True)
class Outcome:
    """What a task left behind; its task is known by its place in the batch."""

    blocks: tuple[BlockSum, ...]
    findings: tuple[Finding, ...]
    seconds: float
    value: Any = None

    def of(self, task: Sent) -> TaskResult | Done:
        """It, with its task."""
        if isinstance(task, Task | PieceTask):
            return TaskResult(task, self.blocks, self.findings, self.seconds)
        return Done(task, self.value, self.seconds)


@dataclass(frozen=True)
class Order:
    """A batch as it is sent.

    Attributes
    ----------
    tasks : tuple of Task, PieceTask or Job
        All of one sort.
    versions : mapping
        Of the sender; see :func:`versions`.
    laws : tuple of (str, str)
        Of each law whose scores lie in a file: what it was called, and the hash of its scores.
    folder : str
        Of the sender: relative names of files start there.
    """

    tasks: tuple[Sent, ...]
    versions: Mapping[str, str]
    laws: tuple[tuple[str, str], ...]
    folder: str


@dataclass(frozen=True)
class Report:
    """What comes back: an outcome for each task, or for those before the one that failed, and its error."""

    outcomes: tuple[Outcome, ...]
    error: Exception | None = None


def needs_of(tasks: Iterable[Sent]) -> Needs:
    """What the tasks, all of one sort, need to be the same on both sides."""
    first = next(iter(tasks), None)
    return CELLS if first is None or isinstance(first, Task | PieceTask) else first.needs


@cache
def versions(needs: Needs = CELLS) -> dict[str, str]:
    """What must be the same on both sides for the same bits: versions, the recipe of draws, and our source code."""
    return {
        "theory_lab": __version__,
        **{name: _version(name) for name in (*needs.packages, "distributed")},
        "python": ".".join(platform.python_version_tuple()[:2]),
        "stream": str(STREAM_VERSION),
        "source": _source_digest(needs),
    }


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "missing"


def _source_digest(needs: Needs) -> str:
    """Hash of the source files that count: two checkouts may differ though both call themselves one version."""
    root = Path(__file__).resolve().parent.parent
    places = [(root, root / name) for name in needs.source]
    if needs.kernels:
        spec = importlib.util.find_spec("theory_kernels")
        folders = [] if spec is None else spec.submodule_search_locations or []
        places += [(Path(folder), Path(folder)) for folder in folders]
    found = hashlib.blake2b(digest_size=8)
    for start, path in sorted((start, file) for start, top in places for file in (top, *top.rglob("*.py"))):
        if path.is_dir():
            continue
        found.update(path.relative_to(start).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return found.hexdigest()


def difference(mine: Mapping[str, str], theirs: Mapping[str, str], names: Iterable[str] = ()) -> str | None:
    """In what two sides differ, in a few words; None if in nothing that matters."""
    for name in names or mine:
        if mine[name] != theirs.get(name):
            if name == "source":
                return f"another state of theory_lab's source code, though both call it {mine['theory_lab']}"
            return f"{name} {theirs.get(name, 'missing')}, and here it is {mine[name]}"
    return None


def laws_of(tasks: Iterable[Sent]) -> tuple[tuple[str, str], ...]:
    """Names of the laws of tasks whose scores lie in files, and the hashes of these scores."""
    names: dict[str, None] = {}
    for task in tasks:
        if isinstance(task, Task):
            if task.cell.point.noise.startswith(_FILED):
                names[task.cell.point.noise] = None
        elif isinstance(task, PieceTask):
            names.update(dict.fromkeys(_filed(task.piece.arguments)))
    return tuple((name, get_family(name).identity) for name in names)


def _filed(value: Any) -> Iterator[str]:
    if isinstance(value, str) and value.startswith(_FILED):
        yield value
    elif isinstance(value, tuple):
        for item in value:
            yield from _filed(item)


def run_order(order: Order) -> Report:
    """Run a batch. An error comes back beside what was finished before it."""
    try:
        unlike = difference(order.versions, versions(needs_of(order.tasks)))
        if unlike is not None:
            raise WorkerError(f"a worker on {platform.node()} has {unlike}: install the same there")
        _load_laws(order)
    except TheoryLabError as error:
        return Report((), error)
    outcomes: list[Outcome] = []
    for task in order.tasks:
        try:
            outcomes.append(_run_one(task))
        except Exception as error:
            return Report(tuple(outcomes), _sendable(error))
    return Report(tuple(outcomes))


def _run_one(task: Sent) -> Outcome:
    if isinstance(task, Task | PieceTask):
        result = run_task(task)
        return Outcome(result.blocks, result.findings, result.seconds)
    task.prepare()  # what is loaded once is no part of what a job takes
    began = time.perf_counter()
    value = task.run()
    return Outcome((), (), time.perf_counter() - began, value)


def _sendable(error: Exception) -> Exception:
    """The error, or one that says the same if it cannot be sent."""
    try:
        pickle.loads(pickle.dumps(error))  # our own bytes
    except Exception:
        return WorkerError(f"a worker on {platform.node()} failed ({type(error).__name__}: {error})")
    return error


def _load_laws(order: Order) -> None:
    """Read the scores that the tasks need from this machine's files, and see that they are the sender's."""
    for name, identity in order.laws:
        with _lock:
            family = _family(name, order.folder)
            if family.identity != identity:
                get_family.cache_clear()  # read for another run, from another folder or before the file changed
                family = _family(name, order.folder)
        if family.identity != identity:
            raise WorkerError(f"a worker on {platform.node()} finds other scores under {name} than are found here")


def _family(name: str, folder: str) -> Any:
    try:
        with inside(folder):
            return get_family(name)
    except InputError as error:
        where = f"a worker on {platform.node()} cannot read what {name} names"
        raise WorkerError(f"{where} ({error}): give it the same files under the same names") from None


@contextlib.contextmanager
def inside(folder: str) -> Iterator[None]:
    """Relative names mean what they mean to the sender, where its folder is there too."""
    if Path(folder).is_dir():
        with _in_folder, contextlib.chdir(folder):
            yield
    else:
        yield
