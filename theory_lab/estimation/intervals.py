"""Confidence intervals for the mean of a sample, each with its guarantee.

========================  ===========================================================================================
method                    guarantee
========================  ===========================================================================================
``clopper-pearson``       at least the stated level for any number of independent zeros and ones (Clopper and Pearson,
                          1934)
``beta-mixture``          the same, and at every stopping time: Ville's inequality for the mixture of likelihood ratios
                          over a beta prior (Robbins, 1970)
``empirical-bernstein``   at least the stated level for independent values in a known range (Maurer and Pontil, 2009,
                          Theorem 4)
``student``               asymptotic only: the central limit theorem for independent rows. Used by studies for rows so
                          crowded that their statistic hardly varies
``certain``               no randomness
========================  ===========================================================================================

Sequential runs look at the data when the number of trials has doubled. ``beta-mixture`` needs nothing more; for the
other methods look k spends 6 / (pi k)^2 of the error probability, so that all looks hold at once.
"""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import scipy
from scipy import special

from theory_lab.estimation.base import Sample
from theory_lab.streams import F64

#: Intervals of so many samples have their two ends found side by side: of large counts each takes some 20 microseconds.
_WORTH_A_THREAD = 2048


@dataclass(frozen=True)
class Interval:
    """A two-sided confidence interval; ``method`` is a key of the module's table."""

    low: float
    high: float
    method: str


def clopper_pearson(hits: int, size: int, error: float) -> tuple[float, float]:
    """Exact interval of a binomial proportion, with probability ``error``/2 of missing on either side."""
    low, high = binomial_intervals(np.array([hits], float), np.array([size - hits], float), error)
    return float(low[0]), float(high[0])


def binomial_intervals(hits: F64, misses: F64, error: float) -> tuple[F64, F64]:
    """:func:`clopper_pearson` of many samples, each array of shape (m,)."""
    which = None
    if len(hits) > 1:  # short runs count the same again and again, and the quantiles are what takes time
        pairs, which = np.unique(hits + 1j * misses, return_inverse=True)
        hits, misses = pairs.real, pairs.imag
    low, high = np.zeros(len(hits)), np.ones(len(hits))
    hit, missed = hits > 0, misses > 0

    def lower() -> None:
        low[hit] = special.betaincinv(hits[hit], misses[hit] + 1.0, error / 2.0)

    def upper() -> None:
        high[missed] = special.betainccinv(hits[missed] + 1.0, misses[missed], error / 2.0)

    if len(hits) < _WORTH_A_THREAD:
        lower()
        upper()
    else:
        with ThreadPoolExecutor(1) as other:
            done = other.submit(lower)
            upper()
            done.result()
    return (low[which], high[which]) if which is not None else (low, high)


def beta_mixture(hits: int, size: int, error: float, prior_mean: float) -> tuple[float, float]:
    """Interval of a binomial proportion that holds at every stopping time at once.

    The prior, beta with one pseudo-hit and mean ``prior_mean``, must be chosen before seeing the data; it affects the
    width, never the guarantee.
    """
    center = min(max(prior_mean, 1e-300), 0.5)
    a, b = 1.0, (1.0 - center) / center
    misses = size - hits
    log_mixture = _log_beta_ratio(a, b, hits, misses)

    def log_wealth(p: float) -> float:
        return log_mixture - float(special.xlogy(hits, p)) - float(special.xlog1py(misses, -p)) + math.log(error)

    mode = hits / size
    low = 0.0
    if hits > 0:
        floor = mode
        while log_wealth(floor) < 0 and floor > 1e-290:
            floor *= 0.5
        low = float(scipy.optimize.brentq(log_wealth, floor, mode, xtol=1e-300, rtol=1e-12))
    high = 1.0
    if hits < size:
        ceiling = max(mode, 1.0 / size)
        while ceiling < 1.0 and log_wealth(ceiling) < 0:
            ceiling = min(1.0, ceiling * 2.0)
        start = mode if hits > 0 else 0.0
        high = 1.0 if log_wealth(1.0 - 1e-16) < 0 else float(
            scipy.optimize.brentq(log_wealth, start, min(ceiling, 1.0 - 1e-16), xtol=1e-300, rtol=1e-12)
        )  # fmt: skip
    return low, high


def _log_beta_ratio(a: float, b: float, hits: int, misses: int) -> float:
    """log B(a + hits, b + misses) - log B(a, b), without the cancellation of large log-gammas.

    It is log[Gamma(a + hits) / Gamma(a)] + log[Gamma(a + b) / Gamma(b)]
    - log[Gamma(b + misses + hits + a) / Gamma(b + misses)].
    """
    rising = -_log_gamma_step(b + misses, hits + a)
    return float(special.gammaln(a + hits) - special.gammaln(a)) + rising + _log_gamma_step(b, a)


def _log_gamma_step(x: float, step: float) -> float:
    """log Gamma(x + step) - log Gamma(x), accurate for large x."""
    if x < 1e5:
        return float(special.gammaln(x + step) - special.gammaln(x))
    # Stirling's series, with the difference of the leading terms taken analytically.
    z = x + step

    def tail(y: float) -> float:
        return 1.0 / (12.0 * y) - 1.0 / (360.0 * y**3)

    return (x - 0.5) * math.log1p(step / x) + step * math.log(z) - step + tail(z) - tail(x)


def empirical_bernstein(mean: float, variance: float, size: int, ceiling: float, error: float) -> tuple[float, float]:
    """Interval of the mean of independent values in [0, ceiling], from their sample mean and variance."""
    low, high = bounded_intervals(np.array(mean), np.array(variance), np.array(size), np.array(ceiling), error)
    return float(low), float(high)


def bounded_intervals(mean: F64, variance: F64, size: F64, ceiling: F64, error: float) -> tuple[F64, F64]:
    """:func:`empirical_bernstein` of many samples, each array of one shape."""
    log_term = math.log(4.0 / error)
    least = np.maximum(size, 2.0)  # of one value nothing is known
    half = np.sqrt(2.0 * variance * log_term / least) + 7.0 * ceiling * log_term / (3.0 * (least - 1))
    low, high = np.maximum(0.0, mean - half), np.minimum(ceiling, mean + half)
    return np.where(size < 2, 0.0, low), np.where(size < 2, ceiling, high)


def student(mean: float, variance: float, size: int, error: float) -> tuple[float, float]:
    """Asymptotic interval of a mean of independent rows; without variation seen, nothing above is excluded."""
    if size < 2 or variance == 0.0:
        return 0.0, math.inf
    half = -float(special.stdtrit(size - 1.0, error / 2.0)) * math.sqrt(variance / size)
    return max(0.0, mean - half), mean + half


def interval(sample: Sample, error: float, look: int = 0, prior: float = 0.0) -> Interval:
    """Confidence interval of the expectation, in units of the statistic.

    Parameters
    ----------
    sample : Sample
        The pooled observations.
    error : float
        Probability, in (0, 1), that the interval misses.
    look : int
        0 for a sample whose size was fixed in advance; k >= 1 for the k-th look of a sequential run.
    prior : float
        Guess of the expectation made before drawing (the bound), for ``beta-mixture``.
    """
    if sample.model == "certain":
        return Interval(sample.estimate, sample.estimate, "certain")
    hits, size = sample.total, sample.size
    if size == 0:
        most = sample.ceiling if sample.model == "bounded" else 1.0 if sample.model == "bernoulli" else math.inf
        return Interval(0.0, sample.scale * most, "nothing drawn")
    if sample.model == "bernoulli":
        if look:
            low, high = beta_mixture(int(hits), size, error, prior / sample.scale)
        else:
            low, high = clopper_pearson(int(hits), size, error)
        high = min(1.0, high + sample.resolution)
        return Interval(sample.scale * low, sample.scale * high, "beta-mixture" if look else "clopper-pearson")
    spent = error * 6.0 / (math.pi * look) ** 2 if look else error
    mean = sample.total / size
    if sample.model == "bounded":
        low, high = empirical_bernstein(mean, sample.variance, size, sample.ceiling, spent)
        return Interval(sample.scale * low, sample.scale * high, "empirical-bernstein")
    low, high = student(mean, sample.variance, size, spent)
    return Interval(sample.scale * low, sample.scale * high, "student")
