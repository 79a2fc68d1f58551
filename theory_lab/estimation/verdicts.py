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

from theory_lab.errors import InputError
from theory_lab.estimation.intervals import Interval


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


def judge(found: Interval, bound: float, tolerance: float) -> Verdict:
    """Verdict of one interval."""
    if found.low > bound:
        return Verdict.VIOLATED
    if found.high <= (1.0 + tolerance) * bound:
        return Verdict.HOLDS
    return Verdict.INCONCLUSIVE


def decide(tests: Sequence[Test], alpha: float, tolerance: float) -> list[Decision]:
    """Decide every cell of a run, with familywise error at most ``alpha``.

    Raises
    ------
    InputError
        If ``alpha`` is outside (0, 1) or ``tolerance`` is negative.
    """
    validate_levels(alpha, tolerance)
    decisions: dict[int, Decision] = {}
    open_cells = [i for i, test in enumerate(tests) if test.random]
    for i, test in enumerate(tests):
        if not test.random:
            found = test.interval(alpha)
            decisions[i] = Decision(judge(found, test.bound, tolerance), found, 0.0)
    while open_cells:
        error = alpha / len(open_cells)
        left = []
        for i in open_cells:
            found = tests[i].interval(error)
            decisions[i] = Decision(judge(found, tests[i].bound, tolerance), found, error)
            if decisions[i].verdict is Verdict.INCONCLUSIVE:
                left.append(i)
        if len(left) == len(open_cells):
            break
        open_cells = left
    return [decisions[i] for i in range(len(tests))]


def validate_levels(alpha: float, tolerance: float) -> None:
    """Raise InputError unless 0 < alpha < 1 and tolerance >= 0 is finite."""
    if not 0.0 < alpha < 1.0:
        raise InputError("alpha", alpha, "a number between 0 and 1 is allowed")
    if not (math.isfinite(tolerance) and tolerance >= 0.0):
        raise InputError("tolerance", tolerance, "a finite number of at least 0 is allowed")
