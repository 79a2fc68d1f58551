"""What a worker does with a batch: check that it may, run the tasks, hand back what counts.

This module is imported on the workers and, to read what is sent, by the scheduler. It needs no Dask.
"""

from __future__ import annotations

import contextlib
import hashlib
import pickle
import platform
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from theory_lab import __version__
from theory_lab.engine import PieceTask, Task, run_task
from theory_lab.errors import InputError, TheoryLabError, WorkerError
from theory_lab.estimation.base import BlockSum
from theory_lab.noise import get_family
from theory_lab.streams import STREAM_VERSION
from theory_lab.studies import Finding

#: Laws whose scores lie in files: they are named, and never sent.
_FILED = ("file:", "model:")
#: The parts of the source code that decide what is drawn.
_DRAWING = ("streams.py", "engine.py", "noise", "claims", "estimation", "studies", "attention")
_lock = threading.Lock()


@dataclass(frozen=True)
class Outcome:
    """What a task left behind; its task is known by its place in the batch."""

    blocks: tuple[BlockSum, ...]
    findings: tuple[Finding, ...]
    seconds: float


@dataclass(frozen=True)
class Order:
    """A batch as it is sent.

    Attributes
    ----------
    tasks : tuple of Task or PieceTask
    versions : mapping
        Of the sender; see :func:`versions`.
    laws : tuple of (str, str)
        Of each law whose scores lie in a file: what it was called, and the hash of its scores.
    folder : str
        Of the sender: relative names of files start there.
    """

    tasks: tuple[Task | PieceTask, ...]
    versions: Mapping[str, str]
    laws: tuple[tuple[str, str], ...]
    folder: str


@dataclass(frozen=True)
class Report:
    """What comes back: an outcome for each task, or for those before the one that failed, and its error."""

    outcomes: tuple[Outcome, ...]
    error: Exception | None = None


@cache
def versions() -> dict[str, str]:
    """What must be the same on both sides for the same bits: versions, the recipe of draws, and our source code."""
    return {
        "theory_lab": __version__,
        **{name: metadata.version(name) for name in ("numpy", "scipy", "distributed")},
        "python": ".".join(platform.python_version_tuple()[:2]),
        "stream": str(STREAM_VERSION),
        "source": _source_digest(),
    }


def _source_digest() -> str:
    """Hash of the source files that draw: two checkouts may differ though both call themselves one version."""
    root = Path(__file__).resolve().parent.parent
    found = hashlib.blake2b(digest_size=8)
    for path in sorted(file for name in _DRAWING for file in (root / name, *(root / name).rglob("*.py"))):
        if path.is_dir():
            continue
        found.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return found.hexdigest()


def difference(mine: Mapping[str, str], theirs: Mapping[str, str], names: Iterable[str] = ()) -> str | None:
    """In what two sides differ, in a few words; None if in nothing that matters."""
    for name in names or mine:
        if mine[name] != theirs.get(name):
            if name == "source":
                return f"another state of theory_lab's source code, though both call it {mine['theory_lab']}"
            return f"{name} {theirs.get(name, 'missing')}, and here it is {mine[name]}"
    return None


def laws_of(tasks: Iterable[Task | PieceTask]) -> tuple[tuple[str, str], ...]:
    """Names of the laws of tasks whose scores lie in files, and the hashes of these scores."""
    names: dict[str, None] = {}
    for task in tasks:
        if isinstance(task, Task):
            if task.cell.point.noise.startswith(_FILED):
                names[task.cell.point.noise] = None
        else:
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
        unlike = difference(order.versions, versions())
        if unlike is not None:
            raise WorkerError(f"a worker on {platform.node()} has {unlike}: install the same there")
        _load_laws(order)
    except TheoryLabError as error:
        return Report((), error)
    outcomes: list[Outcome] = []
    for task in order.tasks:
        try:
            result = run_task(task)
        except Exception as error:
            return Report(tuple(outcomes), _sendable(error))
        outcomes.append(Outcome(result.blocks, result.findings, result.seconds))
    return Report(tuple(outcomes))


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
        with _inside(folder):
            return get_family(name)
    except InputError as error:
        where = f"a worker on {platform.node()} cannot read what {name} names"
        raise WorkerError(f"{where} ({error}): give it the same files under the same names") from None


@contextlib.contextmanager
def _inside(folder: str) -> Iterator[None]:
    """Relative names mean what they mean to the sender, where its folder is there too."""
    if Path(folder).is_dir():
        with contextlib.chdir(folder):
            yield
    else:
        yield
