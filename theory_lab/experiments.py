"""From a specification to results: the Python side of ``theory-lab check``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from theory_lab.cases import Cases, build_cases, build_pieces, device_notes
from theory_lab.distributed.address import asked_scheduler, parse_memory
from theory_lab.engine import Elsewhere, Engine
from theory_lab.errors import InputError, StoreError, TheoryLabError
from theory_lab.estimation.device import require_gpu
from theory_lab.grids import parse_budget
from theory_lab.runner import COLUMNS, Runner
from theory_lab.settings import Budget, Progress, Settings, Silent
from theory_lab.streams import validate_seed
from theory_lab.studies import Piece

if TYPE_CHECKING:
    import pandas as pd

    from theory_lab.distributed.cluster import Cluster
    from theory_lab.store import Store

__all__ = [
    "COLUMNS",
    "Budget",
    "Progress",
    "Settings",
    "Silent",
    "build_cases",
    "build_pieces",
    "check",
    "open_cluster",
    "prepare",
    "run",
]


class Prepared(NamedTuple):
    """What a run will do: cases, pieces of studies, and a line for each study that is left out."""

    cases: Cases
    pieces: list[Piece]
    skipped: list[str]


def prepare(settings: Settings) -> Prepared:
    """Find out what is impossible before anything is drawn or written.

    Returns
    -------
    Prepared
        For :func:`run`.

    Raises
    ------
    InputError
        If a combination is impossible, or something that it needs is missing.
    DeviceError
        If the GPU that was asked for does not work.
    """
    prepared = Prepared(build_cases(settings), *build_pieces(settings))
    if settings.device == "cuda":
        require_gpu()
    return prepared


def run(
    settings: Settings,
    *,
    prepared: Prepared | None = None,
    store: Store | None = None,
    workers: int | None = None,
    executor: Executor | None = None,
    elsewhere: Elsewhere | None = None,
    progress: Progress | None = None,
    on_partial: Callable[[pd.DataFrame], None] | None = None,
) -> pd.DataFrame:
    """Check everything that ``settings`` ask for; one row a case or finding.

    Parameters
    ----------
    settings : Settings
        What to check.
    prepared : Prepared, optional
        What :func:`prepare` made of them.
    store : Store, optional
        Where finished cells are kept and found.
    workers, executor, elsewhere
        Where cells run; see :class:`theory_lab.engine.Engine`.
    progress : Progress, optional
        Told what happens.
    on_partial : callable, optional
        Given the rows of the finished cells if the run is interrupted or the store fails.
    """
    cases, pieces, skipped = prepared or prepare(settings)
    show = progress or Silent()
    for line in [*skipped, *device_notes(settings, cases, pieces)]:
        show.say(line)
    runner = Runner(settings, cases, pieces, store, show)
    try:
        with Engine(workers, executor, elsewhere) as engine:
            runner.load()
            if settings.budget is None:
                runner.fixed(engine)
            else:
                runner.sequential(engine, settings.budget)
    except (KeyboardInterrupt, TheoryLabError):
        if on_partial is not None:
            on_partial(runner.rows(finished_only=True))
        raise
    finally:
        show.stop()
    rows = runner.rows()
    if store is not None:
        try:
            store.write_rows(rows, settings.describe())
        except StoreError:
            if on_partial is not None:
                on_partial(rows)
            raise
    return rows


def check(
    claims: str | Iterable[str] | None = None,
    *,
    noise: str | Iterable[str] | None = None,
    length: int | Iterable[int] | None = None,
    kappa: float | Iterable[float] | None = None,
    beta: float | Iterable[float] | None = None,
    sigma: float | Iterable[float] | None = None,
    rho: float | Iterable[float] | None = None,
    key_rho: float | Iterable[float] | None = None,
    lam: float | Iterable[float] | None = None,
    head_dim: int | Iterable[int] | None = None,
    trials: int | None = None,
    estimator: str = "auto",
    device: str = "cpu",
    seed: int = 0,
    alpha: float = 1e-3,
    tolerance: float = 0.01,
    bound_scale: float = 1.0,
    budget: Budget | str | None = None,
    workers: int | None = None,
    executor: Executor | None = None,
    scheduler: str | None = None,
    worker_memory: str | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    progress: Progress | None = None,
) -> pd.DataFrame:
    """Check claims by simulation: the same as ``theory-lab check``.

    Every argument from ``noise`` to ``head_dim`` takes one value or several; all combinations are checked.

    Parameters
    ----------
    claims : str or iterable of str, optional
        Ids, as ``theory-lab claims`` lists them. By default all: the theorems, their general forms where those say
        something else, and every study that depends on all of the grid arguments that are given.
    noise : str or iterable of str, optional
        Families, as ``theory-lab noise`` lists them, ``file:PATH``, or ``any`` for the worst law of all. By default
        every built-in family and ``any``.
    length : int or iterable of int, optional
        n = i + 1, visible keys. By default 2, 8, 32, ... 2^30.
    kappa, beta, sigma, head_dim : optional
        Constants of the threshold beta sqrt(2 log(n / kappa) / d), and the scale of the noise: its variance proxy
        is sigma^2/d. By default 1, 1, 1 and 64.
    rho, key_rho : float or iterable of float
        Correlation of the two views, in (-1, 1), and equicorrelation of the keys of a row, in [0, 1). By default 0.
    lam : float or iterable of float
        lambda, the weight of the second view, in [0, 1); for claims about differences of views. By default 0.5.
    trials : int, optional
        Rows (or weighted samples) a cell; by default about a second's worth at most. With ``budget``, the most.
    estimator : str
        ``auto``, ``direct``, ``tail``, ``importance``, ``exact`` or ``worst-case``.
    device : str
        ``cpu``, or ``cuda`` to draw every score on a GPU where its kernel knows the law (needs torch and triton). The
        same seed draws other numbers there.
    seed : int
        Same seed, same bits, for any number of workers.
    alpha : float
        Probability that any verdict of the run is wrong (Holm over its cells).
    tolerance : float
        HOLDS needs an upper end of at most (1 + tolerance) times the bound.
    bound_scale : float
        Factor on every bound: does a stronger (or weaker) claim hold?
    budget : Budget or str, optional
        Draw sequentially until every cell is decided or the budget is spent: ``"30s"``, ``"1e9"`` (trials).
    workers : int, optional
        Worker processes; by default one a core, and none for work of a second or less.
    executor : concurrent.futures.Executor, optional
        Runs the work instead.
    scheduler : str, optional
        Runs the work on workers of ``dask.distributed``: ``"local"``, ``"local:N"`` or ``"tcp://HOST:PORT"``.
    worker_memory : str, optional
        What each worker of a local scheduler may hold, such as ``"2GiB"``.
    out : path, optional
        Results folder; ``resume=True`` continues or extends one.
    progress : Progress, optional
        Told what happens.

    Returns
    -------
    pandas.DataFrame
        One row a case or finding, with the columns :data:`COLUMNS`.

    Raises
    ------
    InputError
        If an argument cannot be used; the message names it, its value and what is allowed.
    StoreError
        If the results folder cannot be used.
    WorkerError
        If a worker, or the scheduler, is lost for good.
    DeviceError
        If the GPU fails.

    References
    ----------
    TDA: arXiv 2601.12145, Theorems 4.3 and 4.6.
    """
    settings = Settings(
        claims=_many(claims, "claims", str) or (),
        noise=_many(noise, "noise", str),
        length=_many(length, "length", _as_whole),
        kappa=_many(kappa, "kappa", float),
        beta=_many(beta, "beta", float),
        sigma=_many(sigma, "sigma", float),
        rho=_many(rho, "rho", float),
        key_rho=_many(key_rho, "key_rho", float),
        lam=_many(lam, "lambda", float),
        head_dim=_many(head_dim, "head_dim", _as_whole),
        trials=None if trials is None else _one(trials, "trials", _as_whole, "a whole number is allowed"),
        estimator=estimator,
        device=device,
        seed=validate_seed(seed),
        alpha=_one(alpha, "alpha", float, "a number is allowed"),
        tolerance=_one(tolerance, "tolerance", float, "a number is allowed"),
        bound_scale=_one(bound_scale, "bound_scale", float, "a number is allowed"),
        budget=_budget(budget),
    )
    if executor is not None and not hasattr(executor, "submit"):
        raise InputError("executor", executor, "an executor with the interface of concurrent.futures is allowed")
    if resume and out is None:
        raise InputError("resume", True, "it needs out=DIR, the folder to continue")
    if executor is not None and scheduler is not None:
        raise InputError("scheduler", scheduler, "with executor=, it has no meaning: give one of them")
    prepared = prepare(settings)  # what is impossible must not leave a folder behind
    with open_cluster(scheduler, workers, worker_memory, (progress or Silent()).say) as cluster:
        store = None
        if out is not None:
            from theory_lab.store import Store

            store = Store(out, resume)
        if cluster is not None:
            workers = None
        return run(
            settings,
            prepared=prepared,
            store=store,
            workers=workers,
            executor=executor,
            elsewhere=cluster,
            progress=progress,
        )


@contextmanager
def open_cluster(
    scheduler: str | None, workers: int | None, memory: str | None, say: Callable[[str], None]
) -> Iterator[Cluster | None]:
    """The workers of the scheduler that was asked for, until the context ends; None if none was.

    Raises
    ------
    InputError, WorkerError
        See :class:`theory_lab.distributed.cluster.Cluster`.
    """
    asked = asked_scheduler(scheduler)
    if asked is None:
        if memory is not None:
            raise InputError("worker-memory", memory, "it needs a local scheduler: --scheduler local")
        yield None
        return
    size = None if memory is None else parse_memory(memory)
    from theory_lab.distributed.cluster import Cluster

    with Cluster(asked, workers, size, say) as cluster:
        say(cluster.describe())
        yield cluster


def _one(value: Any, field: str, kind: Callable[[Any], Any], allowed: str) -> Any:
    """One value, converted; InputError if it cannot be."""
    try:
        return kind(value)
    except (TypeError, ValueError, OverflowError):
        raise InputError(field, value, allowed) from None


def _budget(value: Any) -> Budget | None:
    if value is None or isinstance(value, Budget):
        return value
    if isinstance(value, str):
        return Budget(*parse_budget(value))
    raise InputError("budget", value, "a time such as '30s', a number of trials as text, or a Budget is allowed")


def _as_whole(value: Any) -> int:
    if isinstance(value, bool) or int(value) != value:
        raise ValueError
    return int(value)


def _many(value: Any, field: str, kind: Callable[[Any], Any]) -> tuple[Any, ...] | None:
    """One value or several, as a tuple of ``kind``; None stays None."""
    if value is None:
        return None
    items = [value] if isinstance(value, (str, bytes)) or not isinstance(value, Iterable) else list(value)
    try:
        return tuple(kind(item) for item in items)
    except (TypeError, ValueError, OverflowError):
        allowed = {_as_whole: "whole numbers are allowed", float: "numbers are allowed"}.get(kind, "names are allowed")
        raise InputError(field, value, allowed) from None
