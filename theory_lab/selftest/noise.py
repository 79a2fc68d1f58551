"""Noise: draws follow their law's own tail function, and its variance and quantiles agree with it."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from theory_lab.noise import Law, Scale, default_families, get_family
from theory_lab.noise.continuous import StudentTLaw
from theory_lab.noise.discrete import AtomLaw
from theory_lab.selftest.base import Finding, Setup, chi_square, normal, said, shared

#: Every family with its defaults, and some at the edges of their parameters.
FAMILIES = (*default_families(), "beta(0.5)", "beta(5)", "truncated-normal(4)", "student-t(6)", "student-t(1.5)")

_SCALE = Scale(1.7 / 64, 64, 0.31)
_CHUNK = 1 << 20
#: Tail probabilities that bound the classes of a histogram, nearer and nearer to 0 on either side.
_TAILS = np.concatenate([np.geomspace(1e-7, 1e-2, 21), np.linspace(0.02, 0.5, 49)])


def law_of(family: str) -> Law:
    """The law that is tested: proxy 1.7/64, head dimension 64, threshold 0.31."""
    return get_family(family).scaled(_SCALE)


@shared
def draws(setup: Setup) -> Iterator[Finding]:
    """Histograms that reach into both tails; mean and mean square where the tails allow it."""
    amount = setup.pick(1 << 17, 1 << 21, 1 << 25)
    for name in setup.share(FAMILIES):
        law, stream = law_of(name), setup.stream(f"noise {name}")
        edges, expected = _classes(law)
        counts = np.zeros(len(expected), dtype=np.int64)
        total = squares = 0.0
        for start in range(0, amount, _CHUNK):
            x = law.draw(stream, min(_CHUNK, amount - start))
            counts += np.bincount(np.searchsorted(edges, x, side="left"), minlength=len(expected))
            total, squares = total + float(x.sum()), squares + float(x @ x)
        statistic, degrees, p = chi_square(counts, expected * amount)
        yield Finding(f"histogram, {name}", amount, "scores", f"chi-square {said(statistic)} on {degrees}", p)
        # Twice the moments that the variance needs: else one extreme score makes the sum far from normal.
        if math.isfinite(moment(law, 4)):
            z = total / math.sqrt(amount * law.variance)
            yield Finding(f"mean, {name}", amount, "scores", f"z = {z:+.2f}", normal(z))
        fourth = moment(law, 4)
        spread = fourth - law.variance**2
        if math.isfinite(moment(law, 8)) and spread > 1e-9 * fourth:
            z = (squares / amount - law.variance) / math.sqrt(spread / amount)
            yield Finding(f"mean square, {name}", amount, "scores", f"z = {z:+.2f}", normal(z))


def _classes(law: Law) -> tuple[np.ndarray, np.ndarray]:
    """Upper ends of the classes but the last, and the probability of each, from the law's tail function alone."""
    if isinstance(law, AtomLaw):
        edges = law.atoms[:-1]
    else:
        edges = np.unique(np.concatenate([-law.isf(_TAILS), law.isf(_TAILS)]))
    tails = np.concatenate([[1.0], law.sf(edges), [0.0]])
    # The mass below -x is that above x: no digits are lost in the lower tail either.
    below = 1.0 - tails if isinstance(law, AtomLaw) else np.concatenate([[0.0], law.sf(-edges), [1.0]])
    expected = np.where(tails[:-1] > 0.5, np.diff(below), -np.diff(tails))
    return edges, expected


def moment(law: Law, order: int) -> float:
    """E |X|^order; infinite where the tail is too heavy for it.

    The integral of isf(u)^order over the upper half, doubled, with u = exp(-s) / 2: Gauss-Legendre on short pieces.
    """
    if isinstance(law, AtomLaw):
        return float(law.probabilities @ np.abs(law.atoms) ** order)
    if isinstance(law, StudentTLaw) and law.nu <= order:
        return math.inf
    nodes, weights = np.polynomial.legendre.leggauss(12)
    starts = np.arange(0.0, 120.0, 0.25)
    s = starts[:, None] + 0.125 * (nodes + 1.0)
    scale = float(law.isf(0.1))
    values = (law.isf(np.exp(-s) / 2.0) / scale) ** order * np.exp(-s)
    return float(0.125 * (values @ weights).sum()) * scale**order


def variances(setup: Setup) -> Iterator[Finding]:
    """The stated variance against the integral of the quantile function; the proxy is at least the variance."""
    for name in FAMILIES:
        law = law_of(name)
        if not math.isfinite(law.variance):
            continue
        error = abs(moment(law, 2) / law.variance - 1.0)
        good = error < 1e-9 and (law.proxy is None or law.variance <= law.proxy * (1 + 1e-12))
        yield Finding(f"variance, {name}", 1, "integrals", f"relative error {said(error)}", passed=good)


def quantiles(setup: Setup) -> Iterator[Finding]:
    """P(X > isf(u)) <= u, and > u just below: over u from 1e-12 to 1 - 1e-6."""
    amount = setup.pick(200, 2000, 20_000)
    u = np.concatenate([np.geomspace(1e-12, 0.5, amount // 2), 1.0 - np.geomspace(1e-6, 0.49, amount // 2)])
    for name in FAMILIES:
        law = law_of(name)
        x = law.isf(u)
        # One rounding of a score, in probability: next to the end of a bounded support it is all that counts.
        step = np.abs(x) * 1e-12 + 1e-300
        above, below = law.sf(x + step), law.sf(x - step)
        # SciPy before 1.17 ends its search for Student's quantile at 3e-10 of the probability.
        allowed = 1e-9 if isinstance(law, StudentTLaw) else 1e-12
        wrong = int(np.count_nonzero(above > u * (1 + allowed)) + np.count_nonzero(below < u * (1 - allowed)))
        yield Finding(f"quantiles, {name}", amount, "probabilities", f"{wrong} off", passed=wrong == 0)


CHECKS = (draws, variances, quantiles)
