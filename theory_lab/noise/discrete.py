"""Families made of atoms: Rademacher, the two-point extremal law, and scores read from a file."""

from __future__ import annotations

import math

import numpy as np
import scipy
from scipy import special

from theory_lab.noise.base import ArrayLike, Family, Law, Scale
from theory_lab.streams import F64


class AtomLaw(Law):
    """A finite law.

    Parameters
    ----------
    atoms : ndarray, shape (m,)
        Distinct values in increasing order.
    probabilities : ndarray, shape (m,)
        Their positive probabilities, which sum to 1.
    proxy : float or None
        Optimal variance proxy.
    """

    discrete = True

    def __init__(self, atoms: F64, probabilities: F64, proxy: float | None) -> None:
        self.atoms = atoms
        self.probabilities = probabilities
        self.proxy = proxy
        self.upper = float(atoms[-1])
        mean = float(probabilities @ atoms)
        self.variance = float(probabilities @ (atoms - mean) ** 2)
        # tails[k] = P(X > atoms[k - 1]), summed from the small end: tails[0] = 1, tails[m] = 0.
        self._tails = np.concatenate([np.cumsum(probabilities[::-1])[::-1], [0.0]])
        self._tails[0] = 1.0

    def sf(self, t: ArrayLike) -> F64:
        return self._tails[np.searchsorted(self.atoms, t, side="right")]

    def isf(self, u: ArrayLike) -> F64:
        # Least k with P(X > atoms[k]) <= u; the tails decrease, so search their reverse.
        beyond = self._tails[1:][::-1]
        k = len(self.atoms) - np.searchsorted(beyond, u, side="right")
        return self.atoms[np.clip(k, 0, len(self.atoms) - 1)]


class Rademacher(Family):
    name = "rademacher"
    summary = "+s or -s with probability 1/2; variance = proxy = s^2"
    follows_tau = False

    def scaled(self, scale: Scale) -> Law:
        s = math.sqrt(scale.proxy)
        return AtomLaw(np.array([-s, s]), np.array([0.5, 0.5]), scale.proxy)


def kearns_saul_proxy(p: float, spread: float) -> float:
    """Optimal proxy of the law D(1-p) with probability p, -Dp otherwise (Kearns and Saul, 1998), D = ``spread``."""
    gap = 1.0 - 2.0 * p
    if abs(gap) < 1e-6:  # (1 - 2p) / log((1-p)/p) -> 1/2, with a relative error of gap^2/3
        return spread * spread / 4
    return spread * spread * gap / (2.0 * math.log((1.0 - p) / p))


def extremal_probability(tau: float, proxy: float) -> float:
    """Probability p of the two-point law with upper atom ``tau`` and optimal proxy ``proxy``.

    The largest P(X >= tau) over every mean-zero law with that proxy; see ``estimation.worst_case`` for the proof.

    Parameters
    ----------
    tau : float
        Upper atom, positive (score units).
    proxy : float
        Variance proxy, positive.
    """
    target = max(tau * tau / proxy, 1e-300)  # below 1e-30, p is 1 but for rounding

    def excess(logit: float) -> float:
        # In logit(p): tau^2 / proxy of the law with atoms tau and -tau p/(1-p) falls as p grows.
        log_1mp = -np.logaddexp(0.0, logit)
        ratio = 2.0 if abs(logit) < 1e-9 else logit / math.tanh(logit / 2.0)  # log((1-p)/p) / (1-2p), exactly
        return math.log(2.0 * ratio) + 2.0 * log_1mp - math.log(target)

    lo, hi = -2.0, 2.0
    while excess(lo) < 0:
        lo *= 2.0
    while excess(hi) > 0:
        hi *= 2.0
    logit = float(scipy.optimize.brentq(excess, lo, hi, xtol=1e-14, rtol=8.9e-16))
    return float(special.expit(logit))


class TwoPoint(Family):
    """The Kearns-Saul law, re-solved for each row so that its upper atom sits at the threshold.

    The atom lies one ulp above tau, so that the strict inequality s > tau counts it. Where tau = 0 (no more visible
    keys than kappa) the theorem is trivial and the Rademacher law stands in.
    """

    name = "two-point"
    summary = "two atoms, the upper one at the row's threshold: the worst law there is for Theorem 4.3"

    def scaled(self, scale: Scale) -> Law:
        if scale.tau <= 0:
            return Rademacher().scaled(scale)
        p = extremal_probability(scale.tau, scale.proxy)
        rest = max(1.0 - p, 1e-16)  # of a p that is 1 but for rounding
        atoms = np.array([-scale.tau * p / rest, np.nextafter(scale.tau, np.inf)])
        return AtomLaw(atoms, np.array([1.0 - p, p]), scale.proxy)
