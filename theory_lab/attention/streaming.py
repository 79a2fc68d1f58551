"""Entropy and support of one attention row of millions of scores, streamed in chunks. NumPy only, no torch.

Softmax needs one pass with a running maximum. SSMax multiplies by s log n, so it needs n, or a pass to count it.
Entmax keeps a bounded buffer of keys that may still be in the support: a threshold solved on part of the keys is
a lower bound of the threshold of all, so what it excludes is out for good. If even those overflow the buffer (a
law so narrow, or an alpha so near 1, that the support is a good part of n), they go to a histogram that keeps the
count and the mean of every bin, which gives the threshold to second order in the bin width; a second pass then
corrects threshold and entropy by a Newton step on the scores themselves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from theory_lab.errors import InputError

Array = NDArray[np.float64]
Source = Iterable[Any] | Callable[[], Iterable[Any]] | Array

_CHUNK = 1 << 17
_BUFFER = 1 << 19
_BINS = 1 << 17
_ROUGH_BINS = 1 << 13
_MAX_PASSES = 60
MECHANISMS = ("softmax", "ssmax", "entmax")


class RowStatistics(NamedTuple):
    """Statistics of one row.

    Attributes
    ----------
    n : int
        Visible keys (scores above -inf).
    entropy : float
        Shannon entropy of the weights in nats; 0 for an empty row.
    normalized_entropy : float
        entropy / log n; 0 for n <= 1.
    support : int
        Keys with non-zero weight in exact arithmetic: n for softmax and SSMax.
    max_weight : float
        The largest weight.
    threshold : float
        tau of entmax, in p = [(alpha - 1) z - tau]^(1/(alpha - 1)); the log-partition of softmax and SSMax.
    passes : int
        Times the source was read.
    """

    n: int
    entropy: float
    normalized_entropy: float
    support: int
    max_weight: float
    threshold: float
    passes: int


class _Reader:
    """Reads a source in float64 chunks of bounded size, as often as the source allows."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.passes = 0
        self.once = isinstance(source, Iterator)
        if not (callable(source) or isinstance(source, Iterable)):
            raise InputError("source", type(source).__name__, "an array, an iterable of arrays, or a function of none")

    def __iter__(self) -> Iterator[Array]:
        if self.once and self.passes:
            raise InputError(
                "source",
                type(self.source).__name__,
                "a source that can be read twice (a list, or a function that returns an iterator): "
                "this row needs a second pass",
            )
        self.passes += 1
        chunks = self.source() if callable(self.source) else self.source
        if isinstance(chunks, np.ndarray):
            chunks = (chunks,) if chunks.ndim == 1 else chunks
        for chunk in chunks:
            array = np.asarray(chunk)
            if array.dtype.kind != "f" or array.ndim != 1:
                raise InputError("source", f"{array.dtype} of shape {array.shape}", "1-D chunks of floats")
            for start in range(0, array.size, _CHUNK):
                part = np.asarray(array[start : start + _CHUNK], dtype=np.float64)
                top = part.max()  # propagates NaN
                if math.isnan(top) or top == math.inf:
                    raise InputError(
                        "source",
                        f"{'NaN' if math.isnan(top) else '+inf'} in a chunk of {array.size} scores",
                        "numbers, or -inf for masked",
                    )
                if part.min() == -math.inf:
                    part = part[part > -math.inf]
                if part.size:
                    yield part


def row_statistics(
    source: Source,
    mechanism: str = "softmax",
    *,
    alpha: float = 1.5,
    s: float = 0.43,
    temperature: float = 1.0,
    n: int | None = None,
) -> RowStatistics:
    """Entropy, support and threshold of a row given as chunks of scores.

    Parameters
    ----------
    source : array, iterable of 1-D arrays, or function returning one
        The scores; -inf is masked and not counted. A list or a function can be read twice, an iterator once.
    mechanism : str
        "softmax", "ssmax" or "entmax".
    alpha : float
        Of entmax, at least 1 (1 is softmax).
    s : float
        Of SSMax: logits are multiplied by s log n.
    temperature : float
        Scores are divided by it first, > 0.
    n : int, optional
        Number of visible keys, if known: saves SSMax its counting pass. Checked against the count.

    Returns
    -------
    RowStatistics

    Raises
    ------
    InputError
        Bad parameters, NaN or +inf scores, no scores at all, or a second pass over a one-shot iterator.
    """
    if mechanism not in MECHANISMS:
        raise InputError("mechanism", repr(mechanism), ", ".join(MECHANISMS))
    for field, value, good, allowed in (
        ("alpha", alpha, 1.0 <= alpha < math.inf, "a number in [1, inf)"),
        ("s", s, math.isfinite(s), "a finite number"),
        ("temperature", temperature, 0.0 < temperature < math.inf, "a number in (0, inf)"),
    ):
        if not good:
            raise InputError(field, repr(value), allowed)
    reader = _Reader(source)
    if mechanism == "ssmax":
        if n is None:
            n = sum(chunk.size for chunk in reader)
        result = _softmax(reader, s * math.log(max(n, 1)) / temperature)
    elif mechanism == "softmax" or alpha == 1.0:
        result = _softmax(reader, 1.0 / temperature)
    else:
        result = _entmax(reader, alpha, 1.0 / temperature)
    if n is not None and n != result.n:
        raise InputError("n", repr(n), f"the number of visible scores, {result.n}")
    return result


def _finish(n: int, entropy: float, support: int, top: float, threshold: float, passes: int) -> RowStatistics:
    if n == 0:
        raise InputError("source", "no visible scores", "at least one score above -inf")
    entropy = min(max(entropy, 0.0), math.log(n))
    return RowStatistics(n, entropy, entropy / math.log(n) if n > 1 else 0.0, support, top, threshold, passes)


def _softmax(reader: _Reader, scale: float) -> RowStatistics:
    top, total, moment, n = -math.inf, 0.0, 0.0, 0
    for chunk in reader:
        z = chunk if scale == 1.0 else chunk * scale
        high = float(z.max())
        if high > top:
            if n:
                # Both sums refer to the running maximum: rebase them.
                shrink = math.exp(top - high)
                moment = (moment + (top - high) * total) * shrink
                total *= shrink
            top = high
        z = z - top
        e = np.exp(z)
        total += float(e.sum())
        # Below -745 a weight is 0 and its term 0 * z must stay finite: z is finite here, so it does.
        moment += float(e @ z)
        n += z.size
    if n == 0:
        return _finish(0, 0.0, 0, 0.0, 0.0, reader.passes)
    return _finish(n, math.log(total) - moment / total, n, 1.0 / total, top + math.log(total), reader.passes)


# ---- entmax ----
#
# Scores stay as they are until their maximum is subtracted (scaling first would round away close differences);
# then d = rate (z - max) with rate = (alpha - 1) / temperature has its threshold tau in [-1, 0).


def _entmax(reader: _Reader, alpha: float, scale: float) -> RowStatistics:
    eps = alpha - 1.0
    rate = eps * scale
    held: list[Array] = []
    size, n = 0, 0
    top, cut = -math.inf, -math.inf
    bins: _Histogram | None = None
    for chunk in reader:
        n += chunk.size
        top = max(top, float(chunk.max()))
        # The largest weight is at most 1.
        cut = max(cut, math.nextafter(top - 1.0 / rate, -math.inf))
        if bins is not None:
            bins.add(chunk, top, cut)
            continue
        near = chunk[chunk > cut]
        held.append(near)
        size += near.size
        if size > _BUFFER:
            cut = _raise_cut(held, top, cut, eps, rate)
            held = [part[part > cut] for part in held]
            size = sum(part.size for part in held)
            if size > _BUFFER // 2:
                bins = _Histogram(cut, top, _BINS)
                for part in held:
                    bins.add(part, top, cut)
                held = []
    if n == 0:
        return _finish(0, 0.0, 0, 0.0, 0.0, reader.passes)
    if bins is not None:
        d, count = bins.nodes(top)
        return _more_passes(reader, eps, rate, top, _threshold(rate * d, count, eps), n)
    d = rate * (np.concatenate(held) - top)
    if eps > 1.0:
        tau, p = _steep(d, eps)
    else:
        tau = _threshold(d, np.ones(d.size), eps)
        gap = d - tau
        p = gap[gap > 0] ** (1.0 / eps)
    p = p / p.sum()
    return _finish(n, -float(p @ np.log(p)), p.size, float(p.max()), rate * top + tau, reader.passes)


def _raise_cut(held: list[Array], top: float, cut: float, eps: float, rate: float) -> float:
    """A lower bound of the score at the threshold from the scores held so far, refined until it stops paying.

    Rounding every score down to its bin moves the threshold by at most a bin's width.
    """
    while True:
        rough = _Histogram(max(cut, min(float(part.min()) for part in held if part.size)), top, _ROUGH_BINS)
        for part in held:
            rough.add(part, top, cut)
        d, count = rough.nodes(top)
        better = max(cut, top + _threshold(rate * d, count, eps) / rate - rough.width)
        better = min(better, math.nextafter(top, -math.inf))  # ties at the top: tau may round to it
        if top - better > 0.5 * (top - cut):
            return better
        cut = better


def _more_passes(reader: _Reader, eps: float, rate: float, top: float, tau: float, n: int) -> RowStatistics:
    """Statistics at tau (of the scores minus their maximum), corrected to first order for what tau is off by.

    One pass does, unless an outlier came after many scores that were closer together than the final bins: then
    Newton steps, kept in a bracket, go on until the weights sum to one within 1e-6.
    """
    low, high = -1.0, 0.0
    while True:
        total, moment, slope, tilt, support = 0.0, 0.0, 0.0, 0.0, 0
        for chunk in reader:
            gap = rate * (chunk - top) - tau
            if float(gap.min()) <= 0.0:
                gap = gap[gap > 0]
            logs = np.log(gap) / eps
            p = gap if eps == 1.0 else (gap * gap if eps == 0.5 else np.exp(logs))
            steep = p / gap
            total += float(p.sum())
            moment += float(p @ logs)
            slope += float(steep.sum()) / eps
            tilt += float(steep @ logs) / eps
            support += gap.size
        low, high = (tau, high) if total >= 1.0 else (low, tau)
        step = (total - 1.0) / slope
        if abs(total - 1.0) <= 1e-6 or high - low <= 4e-16 * -low or reader.passes >= _MAX_PASSES:
            break
        following = tau + math.log(total) * total / slope
        tau = following if low < following < high else low + (high - low) / 2.0
    # Of -sum p log p: moving tau by step moves every p by -step p / (eps gap), and the sum of p to 1.
    entropy = -(moment - step * (tilt + slope))
    return _finish(n, entropy, support, (-tau - step) ** (1.0 / eps), rate * top + tau + step, reader.passes)


class _Histogram:
    """Counts and sums of offsets in equal bins from `low` up; grows at the top by shifting and coarsening."""

    def __init__(self, low: float, top: float, size: int) -> None:
        self.low, self.size = low, size
        # Half of the bins are headroom for later, higher scores.
        self.width = max(top - low, 1e-300) * 2.0 / size
        self.count, self.total = np.zeros(size), np.zeros(size)

    def add(self, y: Array, top: float, cut: float) -> None:
        """Count the scores above `cut` and not below `low`; `top` is the maximum of all scores so far."""
        if y.size == 0:
            return
        if top - self.low >= self.width * (self.size - 1):
            self._make_room(top, cut)
        offset = y - self.low
        if float(offset.min()) < 0.0 or float(y.min()) <= cut:
            offset = offset[(offset >= 0.0) & (y > cut)]
        if offset.size == 0:
            return
        index = (offset / self.width).astype(np.int64)
        self.count += np.bincount(index, minlength=self.size)
        self.total += np.bincount(index, offset, minlength=self.size)

    def _make_room(self, top: float, cut: float) -> None:
        drop = min(max(math.floor((cut - self.low) / self.width), 0), self.size)
        moved = drop * self.width
        self.low += moved
        zeros = np.zeros(drop)
        self.total = np.concatenate([(self.total - self.count * moved)[drop:], zeros])
        self.count = np.concatenate([self.count[drop:], zeros])
        while top - self.low >= self.width * (self.size - 1):
            self.width *= 2.0
            zeros = np.zeros(self.size // 2)
            self.count = np.concatenate([self.count.reshape(-1, 2).sum(1), zeros])
            self.total = np.concatenate([self.total.reshape(-1, 2).sum(1), zeros])

    def nodes(self, top: float) -> tuple[Array, Array]:
        """Bin means relative to `top`, and counts, of the bins that hold anything."""
        full = self.count > 0
        count = self.count[full]
        return self.total[full] / count - (top - self.low), count


def _threshold(d: Array, count: Array, eps: float) -> float:
    """tau in [-1, 0) with sum count (d - tau)_+^(1/eps) = 1, for d <= 0 with a maximum of 0 (up to rounding)."""
    if eps == 1.0 or eps == 0.5:
        return _sorted_threshold(d, count, eps)
    low, high = -1.0, -(float(count.sum()) ** -eps)
    power = 1.0 / eps
    tau = low if eps <= 1.0 else high
    for _ in range(200):
        gap = d - tau
        inside = gap > 0
        gap = gap[inside]
        terms = count[inside] * gap**power
        total = float(terms.sum())
        if total >= 1.0:
            low = tau
        if total <= 1.0:
            high = tau
        # Newton on the logarithm of the sum: near-linear for small eps, where the sum spans many decades.
        slope = float((terms / gap).sum()) * power
        following = tau + math.log(total) * total / slope if total > 0.0 else high
        if not low < following < high:
            following = low + (high - low) / 2.0
        if total == 1.0 or following in (low, high) or abs(following - tau) <= 1e-16 * -tau:
            break
        tau = following
    return tau


def _sorted_threshold(d: Array, count: Array, eps: float) -> float:
    order = np.argsort(-d)
    d, count = d[order], count[order]
    k, first = np.cumsum(count), np.cumsum(count * d)
    if eps == 1.0:
        taus = (first - 1.0) / k
    else:
        mean = first / k
        variance = np.maximum(np.cumsum(count * d * d) / k - mean * mean, 0.0)
        taus = mean - np.sqrt(np.maximum(1.0 / k - variance, 0.0))
    return float(taus[max(int((taus < d).sum()) - 1, 0)])


def _steep(d: Array, eps: float) -> tuple[float, Array]:
    """tau and the weights of the support for alpha > 2, where the slope at the threshold is infinite.

    The unknown is v, the smallest supported weight; the others are (v^eps + d_j - d_k)^(1/eps), a sum of
    non-negative terms. The equation is convex and increasing in v. k is the last rank whose predecessors,
    measured from it, weigh less than 1.
    """
    power = 1.0 / eps
    d = -np.sort(-d)
    inside, outside = 1, d.size + 1
    while outside - inside > 1:
        rank = (inside + outside) // 2
        if float(((d[:rank] - d[rank - 1]) ** power).sum()) < 1.0:
            inside = rank
        else:
            outside = rank
    gaps = d[:inside] - d[inside - 1]
    low, high = 0.0, 1.0 / inside
    v = high
    p = gaps
    for _ in range(200):
        base = v**eps + gaps
        p = base**power
        total = float(p.sum())
        if total <= 1.0:
            low = v
        if total >= 1.0:
            high = v
        slope = float(((v**eps / base) ** (1.0 - power)).sum()) if v**eps > 0.0 else float((gaps == 0).sum())
        following = v - (total - 1.0) / slope
        if not low < following < high:
            following = low + (high - low) / 2.0
        if total == 1.0 or following in (low, high) or abs(following - v) <= 1e-17:
            break
        v = following
    return float(d[inside - 1]) - v**eps, p
