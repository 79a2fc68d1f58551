"""The measures: pure functions from sums over an attention map to the numbers that papers report.

For one layer, head and sequence of T tokens let A (or dA, a difference of two maps) hold the weights, row i the query
and column j the key; |.| throughout, so that signed weights are covered. Leading dimensions ``...`` are free: heads,
layers or texts. Keys k are 1-based, k = 1 the first token. What is undefined (a head without any mass, say) is NaN, and
averages leave it out.

References
----------
The definitions are those of the project's theory notes. "gSinkRatio" is reported by the TDA paper (arXiv 2601.12145)
without a formula; the one here is ours. The sink rate is that of Gu et al., "When Attention Sink Emerges in Language
Models", ICLR 2025 (arXiv 2410.10781).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

F64 = npt.NDArray[np.float64]
Numbers = npt.ArrayLike

#: Added to a row's mass before unnormalized weights are divided by it: an empty row then adds 0.
SHARE_EPSILON = 1e-8


def divide(numerator: Numbers, denominator: Numbers) -> F64:
    """Elementwise quotient in float64; NaN where the denominator is 0."""
    top, bottom = np.broadcast_arrays(np.asarray(numerator, float), np.asarray(denominator, float))
    return np.divide(top, bottom, out=np.full(top.shape, np.nan), where=bottom != 0)


def g_sink_ratio(column_mass: Numbers, k: int = 1) -> F64:
    """Share of a map's whole mass that key k takes: sum_i |A_ik| / sum_ij |A_ij|.

    Parameters
    ----------
    column_mass : array, shape (..., T)
        sum_i |A_ij| for every key j.
    k : int
        1-based key.

    Returns
    -------
    array, shape (...)
        NaN for a dead head (no mass) and where there is no key k. Averaged over heads, layers and texts it is the
        paper's gSinkRatio ("g" for global), as we define it.
    """
    mass = np.asarray(column_mass, float)
    if not 1 <= k <= mass.shape[-1]:
        return np.full(mass.shape[:-1], np.nan)
    return divide(mass[..., k - 1], mass.sum(-1))


def uniform_sink_ratio(
    length: int, k: int = 1, *, causal: bool = True, window: int | None = None, offset: int = 0
) -> float:
    """gSinkRatio(k) of weights that are equal over whatever a row sees.

    Causal: (H_T - H_{k-1}) / T with the harmonic numbers H; 0.0741 for k = 1 at T = 64, 0.00733 at 1024.
    Bidirectional: 1 / T.

    Parameters
    ----------
    length : int
        T, rows and keys.
    k : int
        1-based key.
    causal : bool
        Row i sees keys up to i + offset; otherwise all.
    window : int, optional
        As for ``attention_statistics``: a causal row sees the last ``window`` of those keys, another one the keys at
        most ``window`` away.
    offset : int
        Only where causal. A window that reaches w keys to both sides is offset w with window 2 w + 1.
    """
    if not 1 <= k <= length:
        return float("nan")
    last = np.arange(1, length + 1)
    if causal:
        last = last + offset
        first = last - (window - 1) if window is not None else np.ones_like(last)
    else:
        first, last = (last - window, last + window) if window is not None else (np.ones_like(last), last + length)
    first, last = np.maximum(first, 1), np.minimum(last, length)
    sees = (first <= k) & (k <= last)
    return float((1.0 / (last - first + 1)[sees]).sum() / (first <= last).sum())


def sink_weights(share: Numbers, column_rows: Numbers) -> F64:
    """alpha_k of Gu et al.: the mean of A_ik over the rows i that can see key k.

    Parameters
    ----------
    share : array, shape (..., T)
        sum_i of the weight of key k as a share of its row. Weights that sum to one are their own shares; unnormalized
        or signed ones enter as |A_ik| / (sum_j |A_ij| + 1e-8).
    column_rows : array, shape (T,) or (..., T)
        Rows that can see key k.

    Returns
    -------
    array, shape (..., T)
    """
    return divide(share, column_rows)


def sink_rate(alphas: Numbers, k: int = 1, eps: float = 0.3) -> float:
    """Share of heads (over all leading dimensions) whose alpha_k exceeds eps, strictly.

    Parameters
    ----------
    alphas : array, shape (..., T)
        From :func:`sink_weights`. Heads whose alpha_k is NaN are left out.
    """
    values = np.asarray(alphas, float)[..., k - 1].reshape(-1)
    values = values[~np.isnan(values)]
    return float((values > eps).mean()) if values.size else float("nan")


def sink_scan(
    alphas: Numbers, column_rows: Numbers, least_rows: int | None = None
) -> tuple[npt.NDArray[np.int64], F64]:
    """The key with the largest alpha_k, and that alpha.

    The last keys are seen by few rows (an identity map has alpha = 1 at the last key), so keys that fewer than
    ``least_rows`` rows see are left out; by default a quarter of the most that any key is seen by.

    Parameters
    ----------
    alphas : array, shape (..., T)
    column_rows : array, shape (T,)
    least_rows : int, optional

    Returns
    -------
    k : array of int, shape (...)
        1-based; 0 where no key qualifies.
    alpha : array, shape (...)
    """
    values, rows = np.asarray(alphas, float), np.asarray(column_rows)
    least = max(1, -(-int(rows.max(initial=0)) // 4)) if least_rows is None else least_rows
    usable = np.where((rows >= least) & ~np.isnan(values), values, -np.inf)
    best = usable.argmax(-1)
    alpha = np.take_along_axis(usable, best[..., None], -1)[..., 0]
    none = np.isneginf(alpha)
    return np.where(none, 0, best + 1), np.where(none, np.nan, alpha)


def sparsity(visible: Numbers, support: Numbers) -> F64:
    """Share of the entries a row may see that are exactly 0: 1 - support / visible."""
    return 1.0 - divide(support, visible)


def near_zero_rate(near_zero: Numbers, visible: Numbers) -> F64:
    """Share of the visible entries with |a| < eps, exact zeros included."""
    return divide(near_zero, visible)


def normalized_entropy(entropy: Numbers, visible: Numbers) -> F64:
    """H / log n of rows that see n >= 2 keys; NaN for the others, whose entropy is 0 whatever they do."""
    n = np.asarray(visible, float)
    return divide(entropy, np.log(np.maximum(n, 1.0)))


def entropy_of(weights: Numbers) -> F64:
    """Entropy, in nats, of |a| normalized over the last dimension; a row of zeros has 0."""
    size = np.abs(np.asarray(weights, float))
    total = size.sum(-1, keepdims=True)
    p = np.divide(size, total, out=np.zeros_like(size), where=total > 0)
    return -(p * np.log(np.where(p > 0, p, 1.0))).sum(-1)


def correlation(covariance: Numbers, variance_1: Numbers, variance_2: Numbers) -> F64:
    """Pearson correlation of the two views' scores over causal pairs i > j; NaN where a view is constant."""
    return divide(covariance, np.sqrt(np.asarray(variance_1, float) * np.asarray(variance_2, float)))


def lift(consensus: Numbers, survivors_1: Numbers, survivors_2: Numbers, visible: Numbers) -> F64:
    """P(both views survive) / (P(view 1) P(view 2)) over all visible pairs; 1 for independent views.

    NaN where one of the views has no survivor at all.
    """
    product = np.asarray(survivors_1, float) * np.asarray(survivors_2, float)
    return divide(np.asarray(consensus, float) * np.asarray(visible, float), product)


def variance_proxy(log_mgf: Numbers, exponents: Numbers, mean: Numbers) -> F64:
    """Optimal sub-Gaussian proxy on a grid: max over t of 2 (log E exp(t X) - t E X) / t^2.

    A grid gives a lower estimate of the supremum; its error is second order in the grid's spacing. Exponents of both
    signs belong in the grid.

    Parameters
    ----------
    log_mgf : array, shape (..., M)
        log E exp(t X) at each exponent.
    exponents : array, shape (M,)
        t, none of them 0.
    mean : array, shape (...)

    Returns
    -------
    array, shape (...)
        In the units of the scores squared.
    """
    t = np.asarray(exponents, float)
    centered = np.asarray(log_mgf, float) - t * np.asarray(mean, float)[..., None]
    return (2.0 * centered / (t * t)).max(-1)
