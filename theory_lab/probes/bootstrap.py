"""Intervals over texts.

Texts are the units that a probe samples: tokens, heads and windows of one text are not independent of each other. So a
measure is averaged within each text first, and resampling draws whole texts. Few texts make a percentile interval too
narrow; it is widened as Hesterberg proposes, so that its coverage is that of a t interval where one would do.

No percentile reaches beyond the smallest and the largest text, and those enclose the mean of n symmetric texts with
probability 1 - 2^(1 - n) only: half the time for two. So fewer than six texts get a t interval with the bootstrap's
standard error, wide as it then is; it may leave the range of the measure.

References
----------
Hesterberg, "What Teachers Should Know About the Bootstrap", The American Statistician 69 (2015), section 4.2.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from theory_lab.streams import Stream, cell_digest

F64 = npt.NDArray[np.float64]

RESAMPLES = 4000
LEVEL = 0.95
#: Texts from which percentiles can reach the level: 1 - 2^(1 - 6) = 0.97.
PERCENTILES_FROM = 6
METHOD = f"expanded percentile bootstrap over texts, {LEVEL:.0%}, {RESAMPLES} resamples"


def method(texts: int) -> str:
    """The name of the interval over so many texts."""
    if texts >= PERCENTILES_FROM:
        return METHOD
    return f"t interval over texts, {LEVEL:.0%}, its standard error from {RESAMPLES} bootstrap resamples"


@dataclass(frozen=True)
class TextInterval:
    """A mean over texts with its interval; the ends are NaN for fewer than two texts."""

    estimate: float
    ci_low: float
    ci_high: float
    texts: int


def resample(texts: int, seed: int, resamples: int = RESAMPLES) -> npt.NDArray[np.int64]:
    """Which texts each resample holds, shape (resamples, texts); the same seed and number give the same draws."""
    stream = Stream(cell_digest({"bootstrap": "texts", "texts": texts, "resamples": resamples}, seed), 0, 0)
    uniforms = stream.uniforms(resamples * texts).reshape(resamples, texts)
    return np.minimum((uniforms * texts).astype(np.int64), texts - 1)


def expanded_level(texts: int, level: float = LEVEL) -> float:
    """Tail probability at which to read the percentiles: Phi(sqrt(n / (n - 1)) t) for the t quantile of n texts."""
    from scipy import special

    t = float(special.stdtrit(texts - 1, (1.0 - level) / 2.0))
    return float(special.ndtr(math.sqrt(texts / (texts - 1)) * t))


def ends(draws: npt.ArrayLike, estimate: npt.ArrayLike, texts: int, level: float = LEVEL) -> tuple[F64, F64]:
    """Ends of the interval from resampled values, shape (resamples, ...), and the estimate (...) -> (...), (...)."""
    values, center = np.asarray(draws, float), np.asarray(estimate, float)
    if texts < PERCENTILES_FROM:
        from scipy import special

        t = -float(special.stdtrit(texts - 1, (1.0 - level) / 2.0))
        # A bootstrap variance is short by the factor (n - 1) / n.
        half = t * np.nanstd(values, axis=0) * math.sqrt(texts / (texts - 1))
        return center - half, center + half
    tail = expanded_level(texts, level)
    low, high = np.nanquantile(values, [tail, 1.0 - tail], axis=0)
    return low, high


def interval(values: npt.ArrayLike, seed: int = 0, statistic: Callable[[F64], F64] | None = None) -> TextInterval:
    """Mean over texts with its bootstrap interval.

    Parameters
    ----------
    values : array, shape (n,)
        One value a text; NaN where a text has none, and such texts are left out.
    seed : int
    statistic : callable, optional
        From (resamples, n) to (resamples,); the mean if not given.
    """
    x = np.asarray(values, float).reshape(-1)
    x = x[~np.isnan(x)]
    of = statistic or (lambda table: table.mean(-1))
    if x.size == 0:
        return TextInterval(math.nan, math.nan, math.nan, 0)
    estimate = float(of(x[None, :])[0])
    if x.size == 1:
        return TextInterval(estimate, math.nan, math.nan, 1)
    low, high = ends(of(x[resample(x.size, seed)]), estimate, x.size)
    return TextInterval(estimate, float(low), float(high), x.size)
