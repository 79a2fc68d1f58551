"""``tail``: exact in law, but draws only what exceeds a floor.

The number of keys above a floor is binomial, and their values follow the law conditioned on exceeding it; nothing
else of the row matters to a thresholded mechanism. A row of 2^40 keys costs nanoseconds.

Binomial counts are drawn by inverting a table of the distribution function on raw bits; only where a count has a
standard deviation above ~20,000, or where the success probability changes from row to row, NumPy's binomial
generator is used instead, whose stream may change between NumPy versions.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache

import numpy as np
import numpy.typing as npt
from scipy import special

from theory_lab.estimation.base import BlockSum, Cell, Estimator, Shape, never_exceeds
from theory_lab.estimation.direct import row_factors
from theory_lab.noise import Law
from theory_lab.noise.copula import joint_survival, latent_threshold, survival_given_view
from theory_lab.streams import F64, Stream, Streams, open_uniform

I64 = npt.NDArray[np.int64]

_BLOCK_ROWS = 1 << 18
_BLOCK_SECONDS = 0.25
_ROW_CHUNK = 1 << 16
_TABLE_LIMIT = 1 << 19
# Above this many survivors a row, the second view is not drawn survivor by survivor: the number of keys that survive
# in both is binomial with the joint probability.
_STAGED_LIMIT = 1 << 16

# Purposes of the streams of a block, apart from those of ``direct``: their cells never meet anyway.
_COUNTS, _TIES, _VALUES, _SECOND, _NUMPY = 16, 17, 18, 19, 20


class CountTable:
    """Inversion table of Binomial(n, p): draws counts from 16 bits each, as exact as a float64 distribution function.

    Parameters
    ----------
    n : int
        Number of keys.
    p : float
        Probability that a key exceeds the floor.
    """

    def __init__(self, n: int, p: float) -> None:
        mean, sd = n * p, math.sqrt(n * p * (1 - p))
        self.first = max(0, math.floor(mean - 12 * sd - 40))
        last = min(n, math.ceil(mean + 12 * sd + 40))
        # Ratios of neighboring terms, summed: no large logarithms of factorials whose difference would cancel.
        k = np.arange(self.first, last, dtype=np.float64)
        log_pmf = np.concatenate([[0.0], np.cumsum(np.log((n - k) / (k + 1.0)) + math.log(p / (1.0 - p)))])
        pmf = np.exp(log_pmf - log_pmf.max())
        # The window leaves out less than 1e-30 of the mass, so that its own sum normalizes it.
        cdf = np.cumsum(pmf / pmf.sum())
        self._cdf = cdf[: int(np.searchsorted(cdf, 1.0 - 2.0**-53)) + 1].copy()
        self._cdf[-1] = 1.0
        lanes = np.arange(1 << 16, dtype=np.float64) * 2.0**-16
        low = np.searchsorted(self._cdf, lanes, side="right")
        high = np.searchsorted(self._cdf, lanes + 2.0**-16 * (1 - 2.0**-37), side="right")
        guide = np.minimum(low, len(self._cdf) - 1)
        # Negative where the next bits decide: one look-up says both.
        self._guide = np.where(low == high, guide, ~guide).astype(np.int32)

    def draw(self, counts: Stream, ties: Stream, rows: int) -> I64:
        """Draw ``rows`` counts, shape (rows,)."""
        lanes = counts.lanes16(rows)
        drawn = self._guide.take(lanes.astype(np.intp), mode="clip")  # every lane is within; clipping skips a check
        unclear = np.flatnonzero(drawn < 0)
        if unclear.size:
            rest = open_uniform(ties.words(unclear.size))
            u = (lanes[unclear] + rest) * 2.0**-16
            drawn[unclear] = np.minimum(np.searchsorted(self._cdf, u, side="right"), len(self._cdf) - 1)
        return drawn.astype(np.int64) + self.first


@lru_cache(maxsize=64)
def _table(n: int, p: float) -> CountTable | None:
    sd = math.sqrt(n * p * (1 - p))
    return CountTable(n, p) if 24 * sd + 100 < _TABLE_LIMIT else None


def _numpy_binomial(streams: Streams, n: int, p: float | F64, rows: int) -> I64:
    seed = streams[_NUMPY].words(2)
    return np.random.Generator(np.random.Philox(key=seed)).binomial(n, p, size=rows)


def draw_counts(streams: Streams, n: int, p: float, rows: int) -> I64:
    """Draw how many of ``n`` independent keys exceed a floor of tail probability ``p``, for each of ``rows`` rows."""
    if p <= 0.0 or n == 0:
        return np.zeros(rows, dtype=np.int64)
    if p >= 1.0:
        return np.full(rows, n, dtype=np.int64)
    table = _table(n, p)
    if table is None:
        return _numpy_binomial(streams, n, p, rows)
    return table.draw(streams[_COUNTS], streams[_TIES], rows)


def draw_exceedances(streams: Streams, law: Law, n: int, floor: float, rows: int) -> tuple[I64, F64]:
    """Draw the scores above ``floor`` of ``rows`` rows of ``n`` independent keys.

    Returns
    -------
    counts : ndarray, shape (rows,)
        How many scores of each row exceed the floor.
    values : ndarray, shape (counts.sum(),)
        Those scores, row after row, each from the law conditioned on exceeding the floor.
    """
    p = law.tail(floor)
    counts = draw_counts(streams, n, p, rows)
    return counts, law.isf(p * streams[_VALUES].uniforms(int(counts.sum())))


class Tail(Estimator):
    """Draw the number of survivors of each row, and the second view of the survivors."""

    name = "tail"

    def block_trials(self, cell: Cell) -> int:
        affordable = int(math.log2(_BLOCK_SECONDS / self.seconds_per_trial(cell)))
        return min(_BLOCK_ROWS, 1 << max(6, affordable))

    def seconds_per_trial(self, cell: Cell) -> float:
        n, p = cell.point.length, cell.point.tail
        # Survivors of correlated views are thinned one by one; too many of them only where keys depend on each other.
        staged = (
            cell.statistic == "consensus" and cell.point.rho != 0 and (n * p <= _STAGED_LIMIT or cell.point.key_rho)
        )
        return 4e-9 + (1.5e-7 * n * p if staged else 0.0) + (1e-6 if cell.point.key_rho else 0.0)

    def shape(self, cell: Cell) -> Shape:
        n = cell.point.length
        if never_exceeds(cell.point):
            return Shape("certain", "no score of this law can exceed tau")
        if cell.point.key_rho:
            # A row's count lies in [0, n] and is very skewed: only a finite-sample interval can be trusted.
            return Shape("bounded", "rows of equicorrelated keys", ceiling=float(n))
        return Shape("bernoulli", "survivors drawn only", float(n), per_trial=n)

    def run_block(self, cell: Cell, block: int, trials: int, streams: Streams) -> BlockSum:
        counts = row_counts(cell, trials, streams)
        return BlockSum(block, trials, float(counts.sum()), float((counts.astype(float) ** 2).sum()))


def row_counts(cell: Cell, rows: int, streams: Streams) -> I64:
    """Draw S_i or C_i for each of ``rows`` rows, shape (rows,)."""
    # In chunks, so that memory stays the same however many rows there are.
    return np.concatenate(
        [_chunk_counts(cell, min(_ROW_CHUNK, rows - start), streams) for start in range(0, rows, _ROW_CHUNK)]
    )


def _chunk_counts(cell: Cell, rows: int, streams: Streams) -> I64:
    point = cell.point
    law, n = point.law(), point.length
    p = law.tail(point.tau)
    if p <= 0.0:
        return np.zeros(rows, dtype=np.int64)
    if point.key_rho:
        return _equicorrelated(cell, p, rows, streams)
    if cell.statistic == "survivors":
        return draw_counts(streams, n, p, rows)
    if point.rho == 0:
        return draw_counts(streams, n, p * p, rows)
    a = latent_threshold(p)
    if n * p > _STAGED_LIMIT:
        return draw_counts(streams, n, joint_survival(a, point.rho), rows)
    first = draw_counts(streams, n, p, rows)

    def second_view(owner: I64) -> F64:
        z = -special.ndtri(p * streams[_VALUES].uniforms(owner.size))
        return survival_given_view(a, z, point.rho)

    return _thin(first, second_view, streams)


def _equicorrelated(cell: Cell, p: float, rows: int, streams: Streams) -> I64:
    """Counts of rows whose keys share a factor: given the factors, keys are independent."""
    point = cell.point
    a = latent_threshold(p)
    p1, factor2 = row_factors(streams, rows, point.key_rho, a, point.rho)
    if cell.statistic == "survivors":
        return _numpy_binomial(streams, point.length, p1, rows)
    own2 = (a - math.sqrt(point.key_rho) * factor2) / math.sqrt(1 - point.key_rho)
    if point.rho == 0:
        return _numpy_binomial(streams, point.length, p1 * special.ndtr(-own2), rows)
    first = _numpy_binomial(streams, point.length, p1, rows)

    def second_view(owner: I64) -> F64:
        e1 = -special.ndtri(p1[owner] * streams[_VALUES].uniforms(owner.size))
        return survival_given_view(own2[owner], e1, point.rho)

    return _thin(first, second_view, streams)


def _thin(first: I64, second_view: Callable[[I64], F64], streams: Streams) -> I64:
    """Keep each survivor of view 1 with its probability to survive in view 2, a bounded number at a time."""
    ends = np.cumsum(first)
    kept = np.zeros(first.size, dtype=np.int64)
    for start in range(0, int(ends[-1]) if first.size else 0, _ROW_CHUNK):
        owner = np.searchsorted(ends, np.arange(start, min(start + _ROW_CHUNK, int(ends[-1]))), side="right")
        alive = streams[_SECOND].uniforms(owner.size) < second_view(owner)
        kept += np.bincount(owner[alive], minlength=first.size)
    return kept
