"""From a specification to cells, to results: the only place that knows claims, estimators, engine and store.

A *case* is a claim at a point. Its *cell* is what has to be drawn for it; two claims about the same statistic at the
same point share one. A *row* is a case with its estimate, interval and verdict.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from theory_lab import __version__
from theory_lab.claims import CLAIMS, Claim, Point, get_claim
from theory_lab.claims.base import whole
from theory_lab.engine import Engine, Task, TaskResult, merge, plan_tasks
from theory_lab.errors import InputError, StoreError
from theory_lab.estimation import (
    CERTAIN,
    SAMPLERS,
    BlockSum,
    Cell,
    Sample,
    choose,
    default_trials,
    validate_estimator,
)
from theory_lab.estimation.intervals import Interval, interval
from theory_lab.estimation.verdicts import Decision, Test, Verdict, decide, validate_levels
from theory_lab.estimation.worst_case import sandwich
from theory_lab.noise import ANY_LAW, default_families, get_family
from theory_lab.streams import validate_seed

if TYPE_CHECKING:
    import pandas as pd

    from theory_lab.store import Store

__all__ = ["COLUMNS", "Budget", "Progress", "Settings", "check", "run"]

#: Columns of a row, in order.
COLUMNS = (
    "claim", "noise", "length", "head_dim", "kappa", "beta", "sigma", "rho", "key_rho", "lambda", "estimator",
    "trials", "estimate", "standard_error", "relative_error", "ci_low", "ci_high", "ci_error", "method", "bound",
    "exact", "slack", "verdict", "assumptions", "seed", "device", "seconds", "version",
)  # fmt: skip

#: 2, 8, 32, ... 2^29, 2^30.
DEFAULT_LENGTHS = (*(2 * 4**k for k in range(15)), 1 << 30)
DEFAULT_CLAIMS = ("tda-4.3", "tda-4.6")


class Progress(Protocol):
    """What a run tells its user."""

    def start(self, cells: int, done: int) -> None:
        """Work begins on ``cells`` cells, of which ``done`` were found finished."""

    def advance(self, finished: int, seconds: float) -> None:
        """``finished`` more cells are complete; ``seconds`` of computing went by."""

    def say(self, message: str) -> None:
        """Something worth a line happened."""

    def stop(self) -> None:
        """Work has ended, in whatever way."""


class Silent:
    """Progress that shows nothing."""

    def start(self, cells: int, done: int) -> None:
        """Do nothing."""

    def advance(self, finished: int, seconds: float) -> None:
        """Do nothing."""

    def say(self, message: str) -> None:
        """Do nothing."""

    def stop(self) -> None:
        """Do nothing."""


@dataclass(frozen=True)
class Budget:
    """Limit of a sequential run: trials over all cells, or seconds of wall time."""

    trials: float = math.inf
    seconds: float = math.inf

    def __post_init__(self) -> None:
        for name, value in (("trials", self.trials), ("seconds", self.seconds)):
            if not value > 0:
                raise InputError("budget", value, f"a number of {name} above 0 is allowed")


@dataclass(frozen=True)
class Settings:
    """What to check, and how well.

    Every grid field is a tuple; the cases are all their combinations. See :func:`check` for their meaning.
    """

    claims: tuple[str, ...] = ()
    noise: tuple[str, ...] = ()
    length: tuple[int, ...] = DEFAULT_LENGTHS
    kappa: tuple[float, ...] = (1.0,)
    beta: tuple[float, ...] = (1.0,)
    sigma: tuple[float, ...] = (1.0,)
    rho: tuple[float, ...] = (0.0,)
    key_rho: tuple[float, ...] = (0.0,)
    head_dim: tuple[int, ...] = (64,)
    trials: int | None = None
    estimator: str = "auto"
    seed: int = 0
    alpha: float = 1e-3
    tolerance: float = 0.01
    bound_scale: float = 1.0
    budget: Budget | None = None

    def __post_init__(self) -> None:
        validate_estimator(self.estimator)
        validate_seed(self.seed)
        validate_levels(self.alpha, self.tolerance)
        if self.trials is not None:
            whole(self.trials, "trials", 1, 1 << 62)
        if not (math.isfinite(self.bound_scale) and self.bound_scale > 0):
            raise InputError("bound_scale", self.bound_scale, "a finite number above 0 is allowed")
        for name in ("length", "kappa", "beta", "sigma", "rho", "key_rho", "head_dim"):
            if not getattr(self, name):
                raise InputError(name, "no value", "at least one is needed")
        for claim in self.claims:
            get_claim(claim)
        for spec in self.noise:
            if spec != ANY_LAW:
                get_family(spec)

    def describe(self) -> dict[str, Any]:
        """JSON-serializable form."""
        about = {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "budget"}
        about["budget"] = None if self.budget is None else {
            k: v for k, v in vars(self.budget).items() if math.isfinite(v)
        }  # fmt: skip
        return about


@dataclass(frozen=True)
class Case:
    """A claim at a point, by an estimator (never ``auto``)."""

    claim: Claim
    point: Point
    estimator: str
    bound: float

    def cell(self, seed: int) -> Cell | None:
        """What must be drawn; None if nothing must."""
        return None if self.estimator in CERTAIN else Cell(self.claim.statistic, self.point, self.estimator, seed)


@dataclass
class Work:
    """A cell under way."""

    cell: Cell
    target: int = 0
    blocks: list[BlockSum] = field(default_factory=list)
    seconds: float = 0.0
    looks: int = 0
    pending: int = 0
    saved: bool = True

    @property
    def trials(self) -> int:
        """Trials drawn so far."""
        return sum(block.trials for block in self.blocks)

    def sample(self) -> Sample:
        """The pooled observations."""
        return SAMPLERS[self.cell.estimator].pool(self.cell, self.blocks)


def build_cases(settings: Settings) -> list[Case]:
    """All combinations of the settings, each once, in the order claim, noise, constants, length.

    Raises
    ------
    InputError
        If a combination is impossible.
    """
    named = settings.claims or tuple(CLAIMS)
    families = settings.noise or (*default_families(), ANY_LAW)
    if settings.estimator == "worst-case":
        families = (ANY_LAW,)
    elif not settings.noise and settings.estimator != "auto":
        families = tuple(default_families())
    cases: dict[tuple[str, Point], Case] = {}
    for claim_id, noise in itertools.product(named, families):
        claim = get_claim(claim_id)
        name = noise if noise == ANY_LAW else get_family(noise).name
        grid = itertools.product(
            settings.head_dim, settings.kappa, settings.beta, settings.sigma, settings.rho, settings.key_rho,
            sorted(set(settings.length)),
        )  # fmt: skip
        for head_dim, kappa, beta, sigma, rho, key_rho, length in grid:
            rho_used = rho if "rho" in claim.parameters else 0.0
            point = Point(name, length, head_dim, kappa, beta, sigma, rho_used, key_rho)
            if noise == ANY_LAW:
                point = point.with_(key_rho=0.0)  # by linearity the bound is the same
                if not settings.noise and settings.estimator == "auto" and rho_used != 0:
                    continue  # the class of all correlated pairs has no certificate
            bound = claim.bound(point) * settings.bound_scale
            if not settings.claims and claim_id not in DEFAULT_CLAIMS and _adds_nothing(claim, point):
                continue
            cases.setdefault((claim_id, point), Case(claim, point, _estimator(settings, claim, point), bound))
    return list(cases.values())


def _adds_nothing(claim: Claim, point: Point) -> bool:
    """Whether a general form coincides with the theorem it generalizes."""
    theorem = get_claim(claim.id.rsplit("-", 1)[0])
    return math.isclose(claim.bound(point), theorem.bound(point), rel_tol=1e-9)


def _estimator(settings: Settings, claim: Claim, point: Point) -> str:
    if settings.estimator == "auto":
        return choose(claim.statistic, point)
    if point.noise == ANY_LAW and settings.estimator != "worst-case":
        raise InputError("noise", ANY_LAW, "only the estimators auto and worst-case speak of all laws")
    return settings.estimator


def run(
    settings: Settings,
    *,
    store: Store | None = None,
    workers: int | None = None,
    executor: Executor | None = None,
    progress: Progress | None = None,
    on_partial: Callable[[pd.DataFrame], None] | None = None,
) -> pd.DataFrame:
    """Check every case of ``settings``; one row a case.

    Parameters
    ----------
    settings : Settings
        What to check.
    store : Store, optional
        Where finished cells are kept and found.
    workers, executor
        Where cells run; see :class:`theory_lab.engine.Engine`.
    progress : Progress, optional
        Told what happens.
    on_partial : callable, optional
        Given the rows of the finished cells if the run is interrupted or the store fails.
    """
    cases = build_cases(settings)
    works: dict[Cell, Work] = {}
    for case in cases:
        cell = case.cell(settings.seed)
        if cell is not None:
            works.setdefault(cell, Work(cell))
    show = progress or Silent()
    runner = _Runner(settings, cases, works, store, show)
    try:
        with Engine(workers, executor) as engine:
            runner.load()
            if settings.budget is None:
                runner.fixed(engine)
            else:
                runner.sequential(engine, settings.budget)
    except (KeyboardInterrupt, StoreError):
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


class _Runner:
    """State of one run."""

    def __init__(
        self,
        settings: Settings,
        cases: Sequence[Case],
        works: dict[Cell, Work],
        store: Store | None,
        progress: Progress,
    ) -> None:
        self._settings = settings
        self._cases = cases
        self._works = works
        self._store = store
        self._progress = progress
        self._by_digest = {work.cell.digest: work for work in works.values()}
        self._certain = {case: _evaluate(case) for case in cases if case.cell(settings.seed) is None}

    def load(self) -> None:
        """Set every cell's target and take what the store has."""
        for work in self._works.values():
            work.target = self._settings.trials or default_trials(work.cell)
            if self._store is not None:
                work.blocks, damage = self._store.load(work.cell)
                if damage:
                    self._progress.say(f"{damage}; it is drawn again")
                work.seconds = self._store.seconds(work.cell)

    def fixed(self, engine: Engine) -> None:
        """Draw every cell's trials."""
        for work in self._works.values():
            work.blocks = _cut(work, work.target)
        tasks = [task for work in self._works.values() for task in plan_tasks(work.cell, work.target, work.blocks)]
        self._progress.start(len(self._works), len(self._works) - len({task.cell for task in tasks}))
        self._draw(engine, tasks)

    def sequential(self, engine: Engine, budget: Budget) -> None:
        """Double the trials of undecided cells until all are decided or the budget is spent."""
        deadline = time.monotonic() + budget.seconds
        cap = self._settings.trials or math.inf
        spent = 0
        # What the store has is dealt out as if drawn now, so that a resumed run looks at the same sizes.
        stored = {work.cell: work.blocks for work in self._works.values()}
        for work in self._works.values():
            work.blocks = []
            first = SAMPLERS[work.cell.estimator].block_trials(work.cell)
            work.target = int(min(first, max(1, default_trials(work.cell) >> 4), cap))
        self._progress.start(len(self._works), 0)
        active = list(self._works.values())
        while active and time.monotonic() < deadline:
            affordable = []
            for work in active:
                step = work.target - work.trials
                if spent + step <= budget.trials:
                    spent += step
                    affordable.append(work)
            before = {work.cell: work.blocks for work in affordable}
            tasks = []
            for work in affordable:
                work.blocks = _cut_blocks(merge(work.blocks, stored[work.cell]), work.cell, work.target)
                tasks += plan_tasks(work.cell, work.target, work.blocks)
            self._draw(engine, tasks, deadline, count=False)
            for work in affordable:
                if work.trials > sum(block.trials for block in before[work.cell]):
                    work.looks += 1
                else:  # cut short before anything new was complete
                    work.blocks = before[work.cell]
            undecided = self._undecided_cells()
            left = [w for w in affordable if w.cell in undecided and w.trials == w.target and w.target < cap]
            self._progress.advance(len(active) - len(left), 0.0)
            for work in left:
                work.target = int(min(2 * work.target, cap))
            active = left

    def _draw(self, engine: Engine, tasks: list[Task], deadline: float = math.inf, count: bool = True) -> None:
        for task in tasks:
            self._by_digest[task.cell.digest].pending += 1
        try:
            for result in engine.run(tasks, deadline):
                self._take(result, count)
        finally:
            # Blocks of a cell that was cut short are kept up to the first gap.
            for work in self._works.values():
                if work.pending:
                    work.pending = 0
                    work.blocks = _contiguous(work)
                    self._save(work)

    def _take(self, result: TaskResult, count: bool) -> None:
        work = self._by_digest[result.task.cell.digest]
        work.blocks = merge(work.blocks, result.blocks)
        work.seconds += result.seconds
        work.saved = False
        work.pending -= 1
        if work.pending == 0:
            self._save(work)
        self._progress.advance(int(count and work.pending == 0), result.seconds)

    def _save(self, work: Work) -> None:
        if self._store is not None and not work.saved and work.blocks:
            self._store.save(work.cell, work.blocks, work.seconds)
        work.saved = True

    def _interval(self, case: Case, error: float) -> Interval:
        cell = case.cell(self._settings.seed)
        if cell is None:
            return self._certain[case][1]
        work = self._works[cell]
        return interval(work.sample(), error, work.looks, case.bound)

    def _is_random(self, case: Case) -> bool:
        cell = case.cell(self._settings.seed)
        return cell is not None and SAMPLERS[cell.estimator].empty_sample(cell).model != "certain"

    def _decide(self, cases: Sequence[Case]) -> list[Decision]:
        tests = [Test(case.bound, partial(self._interval, case), self._is_random(case)) for case in cases]
        return decide(tests, self._settings.alpha, self._settings.tolerance)

    def _drawn(self, case: Case) -> bool:
        cell = case.cell(self._settings.seed)
        return cell is None or bool(self._works[cell].blocks)

    def _undecided_cells(self) -> set[Cell | None]:
        """Cells with a case that has no verdict yet."""
        cases = [case for case in self._cases if self._drawn(case)]
        decisions = self._decide(cases)
        return {
            case.cell(self._settings.seed)
            for case, decision in zip(cases, decisions, strict=True)
            if decision.verdict is Verdict.INCONCLUSIVE
        }

    def _finished(self, case: Case) -> bool:
        cell = case.cell(self._settings.seed)
        return cell is None or self._works[cell].trials >= self._works[cell].target

    def rows(self, finished_only: bool = False) -> pd.DataFrame:
        """One row a case; only those of finished cells if asked."""
        import pandas as pd

        cases = [c for c in self._cases if self._drawn(c) and (not finished_only or self._finished(c))]
        rows = [self._row(case, decision) for case, decision in zip(cases, self._decide(cases), strict=True)]
        frame = pd.DataFrame(rows, columns=list(COLUMNS))
        for name in ("rho", "lambda", "standard_error", "relative_error", "exact", "slack"):
            frame[name] = frame[name].astype(float)
        return frame

    def _row(self, case: Case, decision: Decision) -> dict[str, Any]:
        point, cell = case.point, case.cell(self._settings.seed)
        exact = case.claim.exact(point)
        if cell is None:
            estimate, _, method, seconds = self._certain[case]
            trials, standard_error = 0, 0.0 if case.estimator == "exact" else math.nan
        else:
            work = self._works[cell]
            sample = work.sample()
            estimate, trials, seconds = sample.estimate, sample.trials, work.seconds
            standard_error, method = sample.standard_error, decision.interval.method
        return {
            "claim": case.claim.id,
            "noise": point.noise,
            "length": point.length,
            "head_dim": point.head_dim,
            "kappa": point.kappa,
            "beta": point.beta,
            "sigma": point.sigma,
            "rho": point.rho if "rho" in case.claim.parameters else None,
            "key_rho": point.key_rho,
            "lambda": None,
            "estimator": case.estimator,
            "trials": trials,
            "estimate": estimate,
            "standard_error": standard_error,
            "relative_error": standard_error / estimate if estimate else (0.0 if method == "certain" else math.nan),
            "ci_low": decision.interval.low,
            "ci_high": decision.interval.high,
            "ci_error": decision.error,
            "method": method,
            "bound": case.bound,
            "exact": exact,
            "slack": estimate / case.bound if case.bound else math.nan,
            "verdict": str(decision.verdict),
            "assumptions": "; ".join(case.claim.unmet(point)) or "met",
            "seed": self._settings.seed,
            "device": "cpu",
            "seconds": seconds,
            "version": __version__,
        }


def _evaluate(case: Case) -> tuple[float, Interval, str, float]:
    """Estimate, interval, method and seconds of a case without randomness."""
    started = time.perf_counter()
    if case.estimator == "exact":
        value = case.claim.exact(case.point)
        if value is None:
            raise InputError("estimator", "exact", f"{case.claim.id} has no exact value for noise '{case.point.noise}'")
        return value, Interval(value, value, "exact"), "exact", time.perf_counter() - started
    found = sandwich(case.point, case.claim.statistic)
    ends = Interval(found.lower, found.upper, "sandwich")
    method = f"sandwich: two-point witness, {found.certificate.kind} certificate"
    return found.lower, ends, method, time.perf_counter() - started


def _cut_blocks(blocks: Iterable[BlockSum], cell: Cell, trials: int) -> list[BlockSum]:
    """The blocks of a run of ``trials`` trials, without what a longer run left in the store."""
    size = SAMPLERS[cell.estimator].block_trials(cell)
    return [b for b in blocks if b.trials == min(size, trials - b.block * size)]


def _cut(work: Work, trials: int) -> list[BlockSum]:
    return _cut_blocks(work.blocks, work.cell, trials)


def _contiguous(work: Work) -> list[BlockSum]:
    """Blocks before the first gap, and before the first one cut short."""
    size = SAMPLERS[work.cell.estimator].block_trials(work.cell)
    kept = []
    for expected, block in enumerate(work.blocks):
        if block.block != expected:
            break
        kept.append(block)
        if block.trials < size:
            break
    return kept


def check(
    claims: str | Iterable[str] | None = None,
    *,
    noise: str | Iterable[str] | None = None,
    length: int | Iterable[int] | None = None,
    kappa: float | Iterable[float] = 1.0,
    beta: float | Iterable[float] = 1.0,
    sigma: float | Iterable[float] = 1.0,
    rho: float | Iterable[float] = 0.0,
    key_rho: float | Iterable[float] = 0.0,
    head_dim: int | Iterable[int] = 64,
    trials: int | None = None,
    estimator: str = "auto",
    seed: int = 0,
    alpha: float = 1e-3,
    tolerance: float = 0.01,
    bound_scale: float = 1.0,
    budget: Budget | None = None,
    workers: int | None = None,
    executor: Executor | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    progress: Progress | None = None,
) -> pd.DataFrame:
    """Check claims by simulation: the same as ``theory-lab check``.

    Every argument from ``noise`` to ``head_dim`` takes one value or several; all combinations are checked.

    Parameters
    ----------
    claims : str or iterable of str, optional
        Ids, as ``theory-lab claims`` lists them. By default the theorems, and their general forms where those say
        something else.
    noise : str or iterable of str, optional
        Families, as ``theory-lab noise`` lists them, ``file:PATH``, or ``any`` for the worst law of all. By default
        every built-in family and ``any``.
    length : int or iterable of int, optional
        n = i + 1, visible keys. By default 2, 8, 32, ... 2^30.
    kappa, beta, sigma, head_dim : optional
        Constants of the threshold beta sqrt(2 log(n / kappa) / d), and the scale of the noise: its variance proxy
        is sigma^2/d.
    rho, key_rho : float or iterable of float
        Correlation of the two views, in (-1, 1), and equicorrelation of the keys of a row, in [0, 1).
    trials : int, optional
        Rows (or weighted samples) a cell; by default about a second's worth at most. With ``budget``, the most.
    estimator : str
        ``auto``, ``direct``, ``tail``, ``importance``, ``exact`` or ``worst-case``.
    seed : int
        Same seed, same bits, for any number of workers.
    alpha : float
        Probability that any verdict of the run is wrong (Holm over its cells).
    tolerance : float
        HOLDS needs an upper end of at most (1 + tolerance) times the bound.
    bound_scale : float
        Factor on every bound: does a stronger (or weaker) claim hold?
    budget : Budget, optional
        Draw sequentially until every cell is decided or the budget is spent.
    workers : int, optional
        Worker processes; by default one a core, and none for work of a second or less.
    executor : concurrent.futures.Executor, optional
        Runs the work instead.
    out : path, optional
        Results folder; ``resume=True`` continues or extends one.
    progress : Progress, optional
        Told what happens.

    Returns
    -------
    pandas.DataFrame
        One row a case, with the columns :data:`COLUMNS`.

    Raises
    ------
    InputError
        If an argument cannot be used; the message names it, its value and what is allowed.
    StoreError
        If the results folder cannot be used.

    References
    ----------
    TDA: arXiv 2601.12145, Theorems 4.3 and 4.6.
    """
    settings = Settings(
        claims=_many(claims, "claims", str),
        noise=_many(noise, "noise", str),
        length=DEFAULT_LENGTHS if length is None else _many(length, "length", _as_whole),
        kappa=_many(kappa, "kappa", float),
        beta=_many(beta, "beta", float),
        sigma=_many(sigma, "sigma", float),
        rho=_many(rho, "rho", float),
        key_rho=_many(key_rho, "key_rho", float),
        head_dim=_many(head_dim, "head_dim", _as_whole),
        trials=trials,
        estimator=estimator,
        seed=seed,
        alpha=alpha,
        tolerance=tolerance,
        bound_scale=bound_scale,
        budget=budget,
    )
    if resume and out is None:
        raise InputError("resume", True, "it needs out=DIR, the folder to continue")
    store = None
    if out is not None:
        build_cases(settings)  # an impossible combination must not leave a folder behind
        from theory_lab.store import Store

        store = Store(out, resume)
    return run(settings, store=store, workers=workers, executor=executor, progress=progress)


def _as_whole(value: Any) -> int:
    if isinstance(value, bool) or int(value) != value:
        raise ValueError
    return int(value)


def _many(value: Any, field: str, kind: Callable[[Any], Any]) -> tuple[Any, ...]:
    """One value or several, as a tuple of ``kind``; None is empty."""
    if value is None:
        return ()
    items = [value] if isinstance(value, (str, bytes)) or not isinstance(value, Iterable) else list(value)
    try:
        return tuple(kind(item) for item in items)
    except (TypeError, ValueError, OverflowError):
        allowed = {_as_whole: "whole numbers are allowed", float: "numbers are allowed"}.get(kind, "names are allowed")
        raise InputError(field, value, allowed) from None
