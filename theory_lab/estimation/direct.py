"""``direct``: every score of every row is drawn. The plain witness.

A score is drawn by inversion: X = isf(U) for a uniform U, so X > tau iff U < P(X > tau). That comparison is made on
the raw bits, most significant byte first, and the remaining 56 bits are drawn only where the first byte cannot
decide (one time in 256). The decision is that of a 64-bit uniform, exactly; the value of a score is computed only
where the statistic needs it, which is nowhere but among the survivors of the first of two correlated views.
"""

from __future__ import annotations

import numpy as np
from scipy import special

from theory_lab.estimation.base import BlockSum, Cell, Estimator, Shape
from theory_lab.noise.copula import latent_threshold, survival_given_factor, survival_given_view
from theory_lab.streams import F64, U64, Stream, Streams, open_uniform, threshold_word

#: Scores decided at a time: the working set stays within a core's cache.
CHUNK = 1 << 16
_BLOCK_DRAWS = 1 << 22
_DEPENDENT_CHUNK = 1 << 13
_LOW56 = (1 << 56) - 1

# Purposes of the streams of a block.
_VIEW1, _VIEW2, _TIES1, _TIES2, _TIES12, _REST1, _SECOND, _FACTOR1, _FACTOR2 = range(9)


def _ties_below(stream: Stream, count: int, low: np.uint64) -> np.ndarray:
    """Decide ``count`` scores whose first byte equals the threshold's, by their other 56 bits."""
    return (stream.words(count) >> np.uint64(8)) < low


def count_below(first: Stream, ties: Stream, count: int, threshold: int) -> int:
    """Count how many of ``count`` 64-bit uniforms lie below ``threshold``, byte by byte.

    Parameters
    ----------
    first, ties : Stream
        Where the leading bytes and, for undecided scores, the other bits come from.
    threshold : int
        From :func:`theory_lab.streams.threshold_word`.
    """
    high, low = np.uint8(threshold >> 56), np.uint64(threshold & _LOW56)
    hits = 0
    for start in range(0, count, CHUNK):
        lanes = first.lanes8(min(CHUNK, count - start))
        tied = int(np.count_nonzero(lanes == high))
        hits += int(np.count_nonzero(lanes < high)) + int(np.count_nonzero(_ties_below(ties, tied, low)))
    return hits


def _count_both_below(streams: Streams, count: int, threshold: int) -> int:
    """Count keys of two independent views that lie below ``threshold`` in both."""
    high, low = np.uint8(threshold >> 56), np.uint64(threshold & _LOW56)
    hits = 0
    for start in range(0, count, CHUNK):
        size = min(CHUNK, count - start)
        view1, view2 = streams[_VIEW1].lanes8(size), streams[_VIEW2].lanes8(size)
        in1, in2, tie1, tie2 = view1 < high, view2 < high, view1 == high, view2 == high
        hits += int(np.count_nonzero(in1 & in2))
        only1 = int(np.count_nonzero(tie1 & in2))
        only2 = int(np.count_nonzero(in1 & tie2))
        both = int(np.count_nonzero(tie1 & tie2))
        hits += int(np.count_nonzero(_ties_below(streams[_TIES1], only1, low)))
        hits += int(np.count_nonzero(_ties_below(streams[_TIES2], only2, low)))
        pairs = _ties_below(streams[_TIES12], 2 * both, low).reshape(both, 2)
        hits += int(np.count_nonzero(pairs.all(axis=1)))
    return hits


def _survivor_uniforms(streams: Streams, size: int, threshold: int) -> F64:
    """Draw ``size`` scores; return the uniforms of those below ``threshold``, in order of the keys."""
    high, low = np.uint64(threshold >> 56), np.uint64(threshold & _LOW56)
    lanes = streams[_VIEW1].lanes8(size)
    first = lanes[lanes <= np.uint8(threshold >> 56)].astype(np.uint64)
    rest = streams[_REST1].words(first.size) >> np.uint64(8)
    alive = (first < high) | (rest < low)
    return open_uniform(((first << np.uint64(56)) | rest)[alive])


def _count_correlated(streams: Streams, count: int, p: float, rho: float) -> int:
    """Count keys that survive in both of two correlated views: the second is drawn given the first's score."""
    threshold, a = threshold_word(p), latent_threshold(p)
    hits = 0
    for start in range(0, count, CHUNK):
        u = _survivor_uniforms(streams, min(CHUNK, count - start), threshold)
        z = -special.ndtri(u)
        hits += int(np.count_nonzero(streams[_SECOND].uniforms(u.size) < survival_given_view(a, z, rho)))
    return hits


def row_factors(streams: Streams, rows: int, key_rho: float, a: float, rho: float) -> tuple[F64, F64]:
    """Draw the rows' common factors; return each row's survival probability in view 1 and the view-2 factor.

    Returns
    -------
    probability, factor2 : ndarray, shape (rows,)
    """
    factor1 = -special.ndtri(streams[_FACTOR1].uniforms(rows))
    own = -special.ndtri(streams[_FACTOR2].uniforms(rows))
    factor2 = rho * factor1 + np.sqrt((1 - rho) * (1 + rho)) * own
    return survival_given_factor(a, factor1, key_rho), factor2


class Direct(Estimator):
    """Draw every score of view 1 (and of view 2, where the views are independent), and count."""

    name = "direct"

    def block_trials(self, cell: Cell) -> int:
        return max(1, _BLOCK_DRAWS // cell.point.length)

    def seconds_per_trial(self, cell: Cell) -> float:
        per_score = 1e-9 if cell.statistic == "survivors" else 3e-9
        if cell.point.rho or cell.point.key_rho:
            per_score = 2e-8
        return cell.point.length * per_score

    def shape(self, cell: Cell) -> Shape:
        n = cell.point.length
        if cell.point.key_rho:
            # A row's count lies in [0, n] and is very skewed: only a finite-sample interval can be trusted.
            return Shape("bounded", "rows of equicorrelated keys", ceiling=float(n))
        return Shape("bernoulli", "every score drawn", float(n), per_trial=n)

    def certain(self, cell: Cell) -> bool:
        return False

    def run_block(self, cell: Cell, block: int, trials: int, streams: Streams) -> BlockSum:
        point = cell.point
        p = point.law().tail(point.tau)
        if point.key_rho:
            counts = self._dependent_rows(cell, p, trials, streams)
            return BlockSum(block, trials, float(counts.sum()), float((counts.astype(float) ** 2).sum()))
        draws = trials * point.length
        if cell.statistic == "survivors":
            hits = count_below(streams[_VIEW1], streams[_TIES1], draws, threshold_word(p))
        elif point.rho == 0:
            hits = _count_both_below(streams, draws, threshold_word(p))
        else:
            hits = _count_correlated(streams, draws, p, point.rho)
        return BlockSum(block, trials, float(hits), float(hits))

    def _dependent_rows(self, cell: Cell, p: float, rows: int, streams: Streams) -> np.ndarray:
        """Counts of each row when its keys share a factor: given the factor, keys are independent."""
        point = cell.point
        a = latent_threshold(p)
        p1, factor2 = row_factors(streams, rows, point.key_rho, a, point.rho)
        own2 = (a - np.sqrt(point.key_rho) * factor2) / np.sqrt(1 - point.key_rho)
        thresholds = (np.minimum(p1, 1 - 2.0**-53) * 2.0**64).astype(np.uint64)
        counts = np.zeros(rows, dtype=np.int64)
        # Either many short rows at a time, or a long row in pieces.
        width = min(point.length, _DEPENDENT_CHUNK)
        height = _DEPENDENT_CHUNK // width
        for top in range(0, rows, height):
            group = slice(top, min(top + height, rows))
            for start in range(0, point.length, width):
                shape = (group.stop - top, min(width, point.length - start))
                u: U64 = streams[_VIEW1].words(shape[0] * shape[1]).reshape(shape)
                alive = u < thresholds[group, None]
                if cell.statistic == "consensus":
                    owner = np.nonzero(alive)[0]
                    # Own parts e1, e2 of the two views have correlation rho too, so corr(Z1, Z2) = rho.
                    e1 = -special.ndtri(open_uniform(u[alive]))
                    p2 = survival_given_view(own2[group][owner], e1, point.rho)
                    kept = owner[streams[_VIEW2].uniforms(owner.size) < p2]
                    counts[group] += np.bincount(kept, minlength=shape[0])
                else:
                    counts[group] += np.count_nonzero(alive, axis=1)
        return counts
