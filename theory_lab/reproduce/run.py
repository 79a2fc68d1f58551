"""From experiments to files: compute what is not known yet, draw, and write each file whole."""

from __future__ import annotations

import json
import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import BrokenExecutor, Future, ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from theory_lab.ending import INTERRUPTS, begin_worker, ignored
from theory_lab.errors import InputError, StoreError, TheoryLabError, WorkerError
from theory_lab.outside import defused_frame
from theory_lab.reproduce import cache
from theory_lab.reproduce.kinds import DRAWINGS
from theory_lab.reproduce.needs import Need
from theory_lab.reproduce.spec import Experiment
from theory_lab.reproduce.state import drawn, need, sidecar

if TYPE_CHECKING:
    import pandas as pd

    from theory_lab.settings import Progress

PICTURES = ("png", "pdf", "svg")
TABLES = ("md", "csv", "tex")
DEFAULT_FORMATS = ("png", "pdf", "md", "csv", "tex")

#: From this many experiments on, pictures are drawn by processes of their own: a second's worth of imports each.
_MANY = 8


class Drawers:
    """Draws at once, or in a few processes: a picture takes a second or two, mostly text and fonts."""

    def __init__(self, workers: int | None) -> None:
        self._count = min(workers or os.cpu_count() or 1, 4)
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> Drawers:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=kind is not None)

    def draw(self, *job: Any) -> Future[list[str]]:
        """A future of the lines that :func:`_write` has to say."""
        if self._count == 1:
            done: Future[list[str]] = Future()
            done.set_result(_write(*job))
            return done
        if self._pool is None:
            # A fresh interpreter: a fork would copy the threads' locks of whatever has been computed here.
            context = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(self._count, mp_context=context, initializer=begin_worker)
        with ignored(*INTERRUPTS):  # a process may be started for it
            return self._pool.submit(_write, *job)


@dataclass
class Context:
    """What a computation is given beside its settings.

    Attributes
    ----------
    data : str
        Folder with results of trained models.
    workers : int or None
        Worker processes; None for one a core.
    partial : Path
        A folder of its own for unfinished work.
    progress : Progress or None
        Told what happens.
    device, seed : str
        For the provenance; a computation that reads what was measured elsewhere says where and with which seed.
    """

    data: str
    workers: int | None
    partial: Path
    progress: Progress | None = None
    device: str = "cpu"
    seed: str = ""

    def remembered(self, name: str, make: Callable[[], list[dict[str, Any]]]) -> list[dict[str, Any]]:
        """Records of one piece of work: those that an interrupted run left, or those made now, which are kept."""
        from theory_lab.store import write_whole

        path = self.partial / f"{name}.json"
        try:
            found: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
            return found
        except (OSError, ValueError):
            records = make()
        self.partial.mkdir(parents=True, exist_ok=True)
        write_whole(str(path), json.dumps(records).encode())
        return records


@dataclass
class Outcome:
    """What became of one experiment."""

    experiment: Experiment
    files: list[Path] = field(default_factory=list)
    cached: bool = False
    unchanged: bool = False
    lacking: Need | None = None
    failure: str = ""
    bad_input: bool = False
    seconds: float = 0.0


def reproduce(
    chosen: Sequence[Experiment],
    out: Path,
    *,
    quick: bool = False,
    force: bool = False,
    formats: Sequence[str] = DEFAULT_FORMATS,
    data: str = "results",
    workers: int | None = None,
    say: Callable[[str], object] = lambda line: None,
    progress: Callable[[], Progress] | None = None,
) -> list[Outcome]:
    """Compute and draw experiments.

    Parameters
    ----------
    chosen : sequence of Experiment
        From :func:`theory_lab.reproduce.select`.
    out : Path
        Where files go: ``out/<paper>/<name>.<suffix>``.
    quick : bool
        The size for two CPU cores.
    force : bool
        Compute and draw again, whatever is known.
    formats : sequence of str
        Of png, pdf, svg for pictures and md, csv, tex for tables; the numbers (csv) are always written.
    data : str
        Folder with results of trained models.
    workers : int, optional
        Worker processes.
    say, progress : callable, optional
        Told a line at a time; makes the progress of one computation.

    Returns
    -------
    list of Outcome
        One an experiment, in order. A failure of one does not stop the others.

    Raises
    ------
    InputError, StoreError
        For what is wrong before anything is computed: settings, formats, a folder that cannot be written.
    """
    for form in formats:
        if form not in (*PICTURES, *TABLES):
            raise InputError("format", form, f"known: {', '.join((*PICTURES, *TABLES))}")
    size = "quick" if quick else "full"
    _writable(out)
    if any(not e.is_table for e in chosen):
        from theory_lab.figures.style import require_matplotlib

        require_matplotlib()
    outcomes = []
    with Drawers(workers if len(chosen) >= _MANY else 1) as drawers:
        waiting: list[tuple[Outcome, str, float, Future[list[str]]]] = []
        for number, experiment in enumerate(chosen, 1):
            head = f"[{number}/{len(chosen)}] {experiment.id}"
            began = time.perf_counter()
            outcome = Outcome(experiment)
            outcomes.append(outcome)
            try:
                drawn_later = _one(outcome, out, size, force, formats, data, workers, say, progress, head, drawers)
                if drawn_later is not None:
                    waiting.append((outcome, head, began, drawn_later))
            except (TheoryLabError, MemoryError) as error:
                _failed(outcome, error, head, say)
            outcome.seconds = time.perf_counter() - began
        for outcome, head, began, later in waiting:
            try:
                for line in later.result():
                    say(line)
            except BrokenExecutor:
                _failed(outcome, WorkerError("a drawing process ended without an answer"), head, say)
            except (TheoryLabError, MemoryError) as error:
                _failed(outcome, error, head, say)
            outcome.seconds = time.perf_counter() - began
    return outcomes


def _failed(outcome: Outcome, error: BaseException, head: str, say: Callable[[str], object]) -> None:
    outcome.files = []
    outcome.failure = str(error) or "out of memory"
    outcome.bad_input = isinstance(error, InputError)
    say(f"{head}: failed: {outcome.failure}")


def _one(
    outcome: Outcome,
    out: Path,
    size: str,
    force: bool,
    formats: Sequence[str],
    data: str,
    workers: int | None,
    say: Callable[[str], object],
    progress: Callable[[], Progress] | None,
    head: str,
    drawers: Drawers,
) -> Future[list[str]] | None:
    """Compute if need be, and draw, or hand the drawing on."""
    experiment = outcome.experiment
    size = size if experiment.quick else "full"  # where nothing differs there is one size
    inputs = experiment.kind.inputs(experiment, data)
    digest = cache.results_digest(experiment, size, inputs)
    drawing = cache.drawing_digest(experiment, digest)
    wanted = _wanted(experiment, formats)
    before = drawn(out, experiment)
    if not force and before is not None and before.get("drawing") == drawing and set(wanted) <= set(before["files"]):
        outcome.files = [out / experiment.folder / name for name in before["files"]]
        outcome.unchanged = True
        say(f"{head}: fresh")
        return None
    found = None if force else cache.load(digest)
    if found is None:
        outcome.lacking = need(experiment, size, data)
        if outcome.lacking is not None:
            say(f"{head}: {outcome.lacking.state}: {outcome.lacking.why}")
            return None
        say(f"{head}: computing, {size} size")
        began = time.perf_counter()
        context = Context(data, workers, cache.partial_folder(digest), progress() if progress else None)
        frame = experiment.kind.load()(experiment, experiment.at(size), context)
        about = {
            "experiment": experiment.id,
            "size": size,
            "hash": cache.experiment_hash(experiment, size),
            "seed": context.seed or experiment.seed,
            "device": context.device,
            "seconds": round(time.perf_counter() - began, 3),
            "version": _version(),
        }
        cache.save(digest, frame, about)
        _forget(context.partial)
    else:
        # Another experiment may have asked for the same numbers before.
        frame, about = found[0], {**found[1], "experiment": experiment.id}
        outcome.cached = True
    say(f"{head}: {'drawing' if not experiment.is_table else 'printing'}{' from known results' if found else ''}")
    later = drawers.draw(experiment, frame, about, drawing, out, wanted)
    outcome.files = [out / experiment.folder / name for name in wanted]
    return later


def _version() -> str:
    from theory_lab import __version__

    return __version__


def _forget(folder: Path) -> None:
    import shutil

    shutil.rmtree(folder, ignore_errors=True)


def _wanted(experiment: Experiment, formats: Sequence[str]) -> list[str]:
    kinds = TABLES if experiment.is_table else PICTURES
    # The numbers are always there; a picture needs at least one picture, a table at least its text.
    suffixes = [form for form in formats if form in kinds] or [kinds[0]]
    return [f"{experiment.name}.{form}" for form in dict.fromkeys([*suffixes, "csv"])]


def _writable(out: Path) -> None:
    """Before minutes go into numbers that then cannot be drawn."""
    import tempfile

    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except (OSError, NotADirectoryError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise InputError("out", str(out), f"a folder that can be written is needed ({why})") from None


def describe(experiment: Experiment, about: dict[str, Any]) -> str:
    """The provenance line of a file: nothing about the host, and nothing that changes between equal runs."""
    return (
        f"{experiment.id}, {about['size']} size, experiment {about['hash'][:16]}, theory-lab {about['version']}, "
        f"seed {about['seed']}, device {about['device']}"
    )


def _write(
    experiment: Experiment,
    frame: pd.DataFrame,
    about: dict[str, Any],
    drawing: str,
    out: Path,
    wanted: Sequence[str],
) -> list[str]:
    """Draw and write; what there is to say."""
    from theory_lab.store import write_whole

    said: list[str] = []
    folder = out / experiment.folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
        sidecar(out, experiment).unlink(missing_ok=True)  # until every file is new, none of them is fresh
    except OSError as error:
        raise StoreError(f"out: {folder}; it cannot be written ({error.strerror})") from None
    line = describe(experiment, about)
    numbers = frame
    if experiment.is_table:
        from theory_lab.reproduce import tables

        texts = tables.render(experiment, frame, line)
        for name in wanted:
            if not name.endswith(".csv"):
                write_whole(str(folder / name), texts[name.rpartition(".")[2]].encode())
        numbers = tables.compare(experiment, frame)
    else:
        from theory_lab.figures import style

        with style.applied(experiment.options.get("font"), said.append):
            figure = DRAWINGS[experiment.draw].load()(frame, experiment)
            style.tame(figure)
            # One layout serves every format: it is the slow part.
            figure.draw_without_rendering()
            figure.set_layout_engine("none")
            for name in wanted:
                if not name.endswith(".csv"):
                    style.save(figure, folder / name, {"title": experiment.title, "description": line})
    text = defused_frame(numbers).to_csv(index=False, lineterminator="\n", float_format="%.10g")
    write_whole(str(folder / f"{experiment.name}.csv"), text.encode())
    record = {
        **{key: about[key] for key in ("experiment", "size", "hash", "seed", "device", "version")},
        "title": experiment.title,
        "source": experiment.source,
        "caption": experiment.caption,
        "drawing": drawing,
        "files": sorted(wanted),
    }
    write_whole(str(sidecar(out, experiment)), (json.dumps(record, indent=1, sort_keys=True) + "\n").encode())
    return said
