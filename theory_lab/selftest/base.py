"""What a check of the self-test is, and how many of them become one verdict.

A check compares what the installed code computes with something that does not come from the same lines: a constant
derived with mpmath, a distribution summed exactly, or a law that its draws must follow. It leaves findings behind: an
*exact* one passes or fails by itself, a *random* one has a p-value, the probability of a result at least as bad if the
code is right. Random findings are judged together by Holm's procedure, so that a sound installation fails with
probability :data:`LEVEL` at most, whatever the seed and however the checks depend on each other.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from scipy import special

from theory_lab.streams import Stream, cell_digest

_T = TypeVar("_T")

#: From the shortest to the longest; see :meth:`Setup.pick`.
SIZES = ("quick", "standard", "nightly")

#: Probability that a sound installation fails, over seeds.
LEVEL = 1e-4


@dataclass(frozen=True)
class Finding:
    """One comparison.

    Attributes
    ----------
    name : str
        What is compared, unique in its group.
    amount : int
        How much was drawn or evaluated, in `unit`.
    unit : str
        Such as "words" or "runs".
    measured : str
        The statistic, in words.
    p : float or None
        p-value of a random finding, in [0, 1]; None for an exact one.
    passed : bool or None
        Whether an exact finding is as it must be; None for a random one.
    """

    name: str
    amount: int
    unit: str
    measured: str
    p: float | None = None
    passed: bool | None = None

    def __post_init__(self) -> None:
        if (self.p is None) == (self.passed is None):
            raise ValueError(f"{self.name}: a finding is either random or exact")
        if self.p is not None and not 0.0 <= self.p <= 1.0:  # NaN too: what cannot be computed has not passed
            object.__setattr__(self, "p", 0.0)
            object.__setattr__(self, "measured", f"{self.measured}; its p-value is no number")


@dataclass(frozen=True)
class Setup:
    """Size and seed of a self-test, and the share of a check's cases that is meant.

    Attributes
    ----------
    size, seed : str, int
        One of :data:`SIZES`; 0 to 2^63 - 1.
    part : tuple of int
        (i, n): the i-th of n shares, from 0. Processes take a share each.
    """

    size: str
    seed: int
    part: tuple[int, int] = (0, 1)

    def share(self, cases: Sequence[_T]) -> Sequence[_T]:
        """Those of a check's cases that belong to :attr:`part`; the shares in turn are all cases in their order."""
        index, many = self.part
        return cases[index * len(cases) // many : (index + 1) * len(cases) // many]

    def pick(self, quick: int, standard: int, nightly: int) -> int:
        """The amount for this size."""
        return {"quick": quick, "standard": standard, "nightly": nightly}[self.size]

    def first_seed(self, name: str) -> int:
        """Where the seeds of a check begin; it uses this one and its successors, as people do.

        Below 2^62, so that no successor leaves the range of seeds.
        """
        found = hashlib.blake2b(f"self-test/{self.seed}/{name}".encode(), digest_size=8).digest()
        return int.from_bytes(found, "little") >> 2

    def stream(self, name: str) -> Stream:
        """A stream of the toolkit, apart from those of every cell."""
        return Stream(cell_digest({"self-test": name}, self.first_seed(name)), 0, 0)

    def generator(self, name: str) -> np.random.Generator:
        """Numbers that do not come from the toolkit's own streams: NumPy's PCG64."""
        return np.random.Generator(np.random.PCG64(self.first_seed(name)))


#: A check: its findings, one by one.
Check = Callable[[Setup], Iterator[Finding]]
#: Checks that ask :meth:`Setup.share` for their cases, none of which knows of another.
_SHARED: set[Check] = set()
#: Shares of such a check: more than it has cases, so that each may be drawn by itself.
_SHARES = 64


def shared(check: Check) -> Check:
    """Mark a check whose cases may be drawn apart."""
    _SHARED.add(check)
    return check


def shares(check: Check) -> list[tuple[int, int]]:
    """What :attr:`Setup.part` may be: together, and in this order, they find what the check finds by itself."""
    return [(index, _SHARES) for index in range(_SHARES)] if check in _SHARED else [(0, 1)]


def holm(p: Sequence[float]) -> list[float]:
    """p-values corrected for their number (Holm, 1979): all below a level may be rejected at that familywise level."""
    order = sorted(range(len(p)), key=lambda i: p[i])
    corrected, largest = [0.0] * len(p), 0.0
    for rank, index in enumerate(order):
        largest = max(largest, min(1.0, (len(p) - rank) * p[index]))
        corrected[index] = largest
    return corrected


# ---- p-values ----------------------------------------------------------------------------------------------------


def at_least(count: int, size: int, probability: float) -> float:
    """P(Binomial(size, probability) >= count): for errors that a promise limits from above."""
    return float(special.betainc(count, size - count + 1.0, probability)) if count > 0 else 1.0


def at_most(count: int, size: int, probability: float) -> float:
    """P(Binomial(size, probability) <= count): for successes that a promise limits from below."""
    return float(special.betaincc(count + 1.0, size - count, probability)) if count < size else 1.0


def both_sides(count: int, size: int, probability: float) -> float:
    """Two-sided p-value of a binomial count: twice the smaller tail."""
    return min(1.0, 2.0 * min(at_least(count, size, probability), at_most(count, size, probability)))


def normal(z: float) -> float:
    """Two-sided p-value of a standard normal."""
    return float(2.0 * special.ndtr(-abs(z)))


def poisson(count: int, mean: float) -> float:
    """Two-sided p-value of a Poisson count."""
    low = float(special.pdtr(count, mean))
    high = float(special.pdtrc(count - 1, mean)) if count > 0 else 1.0
    return min(1.0, 2.0 * min(low, high))


def chi_square(observed: np.ndarray, expected: np.ndarray) -> tuple[float, int, float]:
    """Statistic, degrees of freedom and two-sided p-value: counts that fit too well are wrong too.

    Neighboring classes are joined until each is expected at least 10 times.
    """
    observed, expected = _joined(np.asarray(observed, float), np.asarray(expected, float))
    degrees = len(expected) - 1
    if degrees < 1:
        raise ValueError("a chi-square test needs two classes")
    statistic = float(((observed - expected) ** 2 / expected).sum())
    low, high = float(special.chdtr(degrees, statistic)), float(special.chdtrc(degrees, statistic))
    return statistic, degrees, min(1.0, 2.0 * min(low, high))


def _joined(observed: np.ndarray, expected: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    if expected.min() >= 10.0:
        return observed, expected
    kept_o: list[float] = []
    kept_e: list[float] = []
    run_o = run_e = 0.0
    for o, e in zip(observed, expected, strict=True):
        run_o, run_e = run_o + o, run_e + e
        if run_e >= 10.0:
            kept_o.append(run_o)
            kept_e.append(run_e)
            run_o = run_e = 0.0
    if kept_e:
        kept_o[-1] += run_o
        kept_e[-1] += run_e
    return np.array(kept_o), np.array(kept_e)


def said(value: float) -> str:
    """A number as certificates print it."""
    return "0" if value == 0 else f"{value:.3g}" if math.isfinite(value) else str(value)
