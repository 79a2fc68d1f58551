"""Verdicts, from the interval alone, with the run's error rate under control.

A cell is VIOLATED if the lower end of its interval exceeds the bound, HOLDS if the upper end is at most
(1 + tolerance) times the bound, INCONCLUSIVE otherwise. A cell can be wrong in at most one of the two ways, so Holm's
step-down procedure over the cells keeps the probability of any wrong verdict in the run at most alpha, however the
cells depend on each other: while any of m cells becomes decided at error alpha / (cells not yet decided), it is
decided, and the next are tested at the larger level that leaves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from theory_lab.errors import InputError
from theory_lab.estimation.intervals import Interval
from theory_lab.streams import F64

I64 = npt.NDArray[np.int64]


class Verdict(StrEnum):
    """What the interval says about the bound."""

    HOLDS = "HOLDS"
    VIOLATED = "VIOLATED"
    INCONCLUSIVE = "INCONCLUSIVE"


@dataclass(frozen=True)
class Test:
    """A cell up for a verdict.

    Attributes
    ----------
    bound : float
        Right-hand side of the claim.
    interval : callable
        Error probability -> interval.
    random : bool
        False for intervals without randomness, which cost nothing of alpha.
    """

    __test__ = False  # not a test case, whatever pytest makes of the name

    bound: float
    interval: Callable[[float], Interval]
    random: bool = True


@dataclass(frozen=True)
class Decision:
    """A verdict, the interval it rests on, and that interval's error probability (0 if it is not random)."""

    verdict: Verdict
    interval: Interval
    error: float


class Intervals(NamedTuple):
    """Intervals of many cells as columns of one length; ``methods`` holds texts."""

    low: F64
    high: F64
    methods: npt.NDArray[np.object_]


class Tests(Protocol):
    """Cells up for a verdict, as columns.

    Attributes
    ----------
    bounds : ndarray, shape (m,)
        Right-hand sides of the claims.
    random : ndarray of bool, shape (m,)
        See :class:`Test`.
    """

    bounds: F64
    random: npt.NDArray[np.bool_]

    def intervals(self, rows: I64, error: float) -> Intervals:
        """Intervals of some cells, each with the error probability ``error``."""


class Listed:
    """Tests one by one as columns."""

    def __init__(self, tests: Sequence[Test]) -> None:
        self._tests = tests
        self.bounds = np.array([test.bound for test in tests], dtype=float)
        self.random = np.array([test.random for test in tests], dtype=bool)

    def intervals(self, rows: I64, error: float) -> Intervals:
        """See :class:`Tests`."""
        found = [self._tests[row].interval(error) for row in rows.tolist()]
        methods = np.empty(len(found), dtype=object)
        methods[:] = [one.method for one in found]
        return Intervals(np.array([i.low for i in found], float), np.array([i.high for i in found], float), methods)


class Joined:
    """Tests of several kinds, one after the other."""

    def __init__(self, *parts: Tests) -> None:
        self._parts = parts
        self._starts = np.cumsum([0, *(len(part.bounds) for part in parts)])
        self.bounds = np.concatenate([part.bounds for part in parts])
        self.random = np.concatenate([part.random for part in parts])

    def intervals(self, rows: I64, error: float) -> Intervals:
        """See :class:`Tests`."""
        cuts = np.searchsorted(rows, self._starts)  # rows rise
        found = [
            part.intervals(rows[cuts[i] : cuts[i + 1]] - self._starts[i], error) for i, part in enumerate(self._parts)
        ]
        return Intervals(*(np.concatenate(columns) for columns in zip(*found, strict=True)))


@dataclass(frozen=True)
class Decisions:
    """Verdicts of many cells as columns of one length; ``verdicts`` are indices of :data:`VERDICTS`."""

    verdicts: I64
    intervals: Intervals
    errors: F64

    def listed(self, start: int = 0) -> list[Decision]:
        """Those from ``start`` on, one by one."""
        columns = (column[start:].tolist() for column in (self.verdicts, *self.intervals, self.errors))
        return [
            Decision(VERDICTS[verdict], Interval(low, high, method), error)
            for verdict, low, high, method, error in zip(*columns, strict=True)
        ]


#: Verdicts by number.
VERDICTS = (Verdict.HOLDS, Verdict.VIOLATED, Verdict.INCONCLUSIVE)
_HOLDS, _VIOLATED, _INCONCLUSIVE = range(3)


def judge(low: F64, high: F64, bound: F64, tolerance: float) -> I64:
    """Verdicts of intervals, as indices of :data:`VERDICTS`."""
    with np.errstate(over="ignore"):  # what no float holds is infinite
        most = (1.0 + tolerance) * bound
    holds = np.where(high <= most, _HOLDS, _INCONCLUSIVE)
    return np.where(low > bound, _VIOLATED, holds)


def share(alpha: float, cells: int) -> float:
    """Error probability of each of so many undecided cells."""
    return alpha / cells


def settle(tests: Tests, alpha: float, tolerance: float) -> Decisions:
    """Decide every cell of a run, with familywise error at most ``alpha``.

    Raises
    ------
    InputError
        If ``alpha`` is outside (0, 1) or ``tolerance`` is negative.
    """
    validate_levels(alpha, tolerance)
    size = len(tests.bounds)
    verdicts, errors = np.empty(size, dtype=np.int64), np.zeros(size)
    found = Intervals(np.empty(size), np.empty(size), np.empty(size, dtype=object))

    def look(rows: I64, error: float) -> I64:
        """Decide some cells; those that stay undecided."""
        seen = tests.intervals(rows, error)
        for whole, part in zip(found, seen, strict=True):
            whole[rows] = part
        verdicts[rows] = judge(seen.low, seen.high, tests.bounds[rows], tolerance)
        return rows[verdicts[rows] == _INCONCLUSIVE]

    look(np.flatnonzero(~tests.random), alpha)
    rows = np.flatnonzero(tests.random)
    while len(rows):
        error = share(alpha, len(rows))
        left = look(rows, error)
        errors[rows] = error
        if len(left) == len(rows):
            break
        rows = left
    return Decisions(verdicts, found, errors)


def decide(tests: Sequence[Test], alpha: float, tolerance: float) -> list[Decision]:
    """:func:`settle` for tests one by one."""
    return settle(Listed(tests), alpha, tolerance).listed()


def validate_levels(alpha: float, tolerance: float) -> None:
    """Raise InputError unless 0 < alpha < 1 and tolerance >= 0 is finite."""
    if not 0.0 < alpha < 1.0:
        raise InputError("alpha", alpha, "a number between 0 and 1 is allowed")
    if not (math.isfinite(tolerance) and tolerance >= 0.0):
        raise InputError("tolerance", tolerance, "a finite number of at least 0 is allowed")
