"""From right and wrong answers to accuracies with intervals.

Sequences are independent; answers within one are not, since they share a text. Two accuracies are therefore given:

``accuracy``
    Of questions: right ones among all. With several questions a sequence its interval is that of Korn and Graubard
    (Survey Methodology 24, 1998): Clopper and Pearson's at the effective number of questions, which the spread of
    the number right between sequences tells (``korn-graubard``, clustered by sequence). Where all answers are right, or
    all are wrong, that spread tells nothing, and a sequence counts as one answer. With one question a sequence it is
    Clopper and Pearson's, exact (``clopper-pearson``).
``sequence_accuracy``
    Of sequences: those with every question right. Always Clopper and Pearson's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy import special

from theory_lab.errors import InputError
from theory_lab.tasks.source import I64


@dataclass(frozen=True)
class Proportion:
    """A share with its two-sided confidence interval."""

    estimate: float
    low: float
    high: float
    method: str


def check_level(level: object) -> float:
    """A confidence level; InputError otherwise."""
    if isinstance(level, bool) or not isinstance(level, (int, float)) or not 0.0 < level < 1.0:
        raise InputError("level", level, "a confidence level between 0 and 1 is allowed, such as 0.95")
    return float(level)


def exact_interval(hits: float, size: float, error: float) -> tuple[float, float]:
    """Clopper and Pearson's interval, whose formula takes effective numbers, which need not be whole, as well.

    Parameters
    ----------
    hits, size : float
        0 <= hits <= size, size > 0.
    error : float
        Probability of missing, half of it on either side.
    """
    half = error / 2.0
    low = float(special.betaincinv(hits, size - hits + 1.0, half)) if hits > 0 else 0.0
    high = float(special.betainccinv(hits + 1.0, size - hits, half)) if hits < size else 1.0
    return low, high


def proportion(right: npt.ArrayLike, asked: npt.ArrayLike, level: float = 0.95) -> Proportion:
    """The share of right answers, clustered by sequence.

    Parameters
    ----------
    right, asked : array_like of int, shape (sequences,)
        Right answers and questions of each sequence.
    level : float
        Confidence level.

    Returns
    -------
    Proportion
    """
    hits, sizes = np.asarray(right, dtype=np.float64), np.asarray(asked, dtype=np.float64)
    count, total = len(sizes), float(sizes.sum())
    if total == 0:
        return Proportion(math.nan, 0.0, 1.0, "nothing asked")
    share = float(hits.sum()) / total
    error = 1.0 - check_level(level)
    if sizes.max() <= 1:
        return Proportion(share, *exact_interval(float(hits.sum()), total, error), "clopper-pearson")
    effective = min(_effective(hits, sizes, share, error), total)
    low, high = exact_interval(share * effective, effective, error)
    return Proportion(share, min(low, share), max(high, share), f"korn-graubard of {count} sequences")


def _effective(hits: npt.NDArray[np.float64], sizes: npt.NDArray[np.float64], share: float, error: float) -> float:
    """Independent answers that would tell as much as these."""
    count, total = len(sizes), float(sizes.sum())
    if count == 1 or share in (0.0, 1.0):
        return float(count)
    variance = count / (count - 1.0) * float(np.square(hits - share * sizes).sum()) / total**2
    if variance == 0.0:
        return total
    # The variance itself is an estimate with count - 1 degrees of freedom.
    spread = float(special.stdtrit(total - 1.0, error / 2.0) / special.stdtrit(count - 1.0, error / 2.0))
    return share * (1.0 - share) / variance * spread**2


def by_question(correct: npt.NDArray[np.bool_], queries: I64) -> tuple[int, int]:
    """Right answers and questions of one sequence.

    Parameters
    ----------
    correct : ndarray of bool, shape (length,)
        Whether each scored token was predicted.
    queries : ndarray of int64, shape (length,)
        The question of each token, -1 where nothing is scored.

    Returns
    -------
    right, asked : int
        An answer of several tokens is right if all of them are.
    """
    scored = queries >= 0
    numbers, index = np.unique(queries[scored], return_inverse=True)
    wrong = np.bincount(index, weights=~correct[scored], minlength=len(numbers))
    return int((wrong == 0).sum()), len(numbers)


def clustered_mean(totals: npt.ArrayLike, sizes: npt.ArrayLike) -> tuple[float, float]:
    """A mean over all scored tokens and its standard error, clustered by sequence.

    Parameters
    ----------
    totals, sizes : array_like, shape (sequences,)
        Sum over the tokens of each sequence, and their number.
    """
    values, counts = np.asarray(totals, dtype=np.float64), np.asarray(sizes, dtype=np.float64)
    mean = float(values.sum() / counts.sum())
    if len(values) < 2:
        return mean, math.nan
    spread = np.square(values - mean * counts).sum() * len(values) / (len(values) - 1.0)
    return mean, float(np.sqrt(spread) / counts.sum())
