"""Dependence between scores, as a Gaussian copula over any marginal.

Score j of view t is Q(Z_tj), with Q the marginal's quantile function and Z standard normal. Two independent axes:

- ``rho``: correlation of the two views of one key, corr(Z_1j, Z_2j) = rho, in (-1, 1);
- ``key_rho``: equicorrelation of the keys of a row, corr(Z_tj, Z_tk) = key_rho, in [0, 1), through one common factor
  per row and view. By linearity it leaves E[S_i] and E[C_i] unchanged, and only widens their distribution.

For Gaussian marginals ``rho`` is the Pearson correlation of the scores; for others the latent one.
A score survives iff its latent normal exceeds ``latent_threshold(P(X > tau))``, so that survival depends on the
marginal through that probability alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import scipy
from scipy import special

from theory_lab.errors import InputError
from theory_lab.streams import F64


@dataclass(frozen=True)
class Dependence:
    """Correlations of the latent normals.

    Raises
    ------
    InputError
        If ``rho`` is outside (-1, 1) or ``key_rho`` outside [0, 1).
    """

    rho: float = 0.0
    key_rho: float = 0.0

    def __post_init__(self) -> None:
        if not -1 < self.rho < 1:
            raise InputError("rho", self.rho, "a number strictly between -1 and 1 is allowed")
        if not 0 <= self.key_rho < 1:
            raise InputError("key_rho", self.key_rho, "a number from 0 to below 1 is allowed")


def latent_threshold(probability: float) -> float:
    """The a with P(Z > a) = ``probability`` for a standard normal Z."""
    return -float(special.ndtri(probability))


def survival_given_view(a: float | F64, z: F64, rho: float) -> F64:
    """P(Z_2 > a | Z_1 = z) for standard normals with correlation ``rho``, elementwise."""
    return special.ndtr((rho * z - a) / math.sqrt((1 - rho) * (1 + rho)))


def survival_given_factor(a: float, factor: F64, key_rho: float) -> F64:
    """P(Z > a | the row's common factor), elementwise; equicorrelation ``key_rho``."""
    return special.ndtr((math.sqrt(key_rho) * factor - a) / math.sqrt(1 - key_rho))


def joint_survival(a: float, rho: float) -> float:
    """P(Z_1 > a, Z_2 > a), relatively accurate far into the tail.

    Integrates the derivative in rho of the joint tail (Plackett, 1954),
    P(rho) = P(0) + int_0^rho exp(-a^2 / (1 + r)) / (2 pi sqrt(1 - r^2)) dr, whose integrand is positive. For
    negative rho, where P(0) and the integral would cancel, the conditional form is integrated instead.
    """
    if rho == 0.0:
        return float(special.ndtr(-a)) ** 2
    if not math.isfinite(a):
        return 0.0 if a > 0 else 1.0
    if rho > 0:
        # Substituting r = sin(angle) removes the endpoint singularity.
        def plackett(angle: float) -> float:
            return math.exp(-a * a / (1.0 + math.sin(angle)) + a * a / (1.0 + rho))

        value, _ = scipy.integrate.quad(plackett, 0.0, math.asin(rho), epsabs=0.0, epsrel=1e-12, limit=200)
        return float(special.ndtr(-a)) ** 2 + value * math.exp(-a * a / (1.0 + rho)) / (2 * math.pi)
    slope = math.sqrt((1 - rho) * (1 + rho))

    def log_integrand(x: float) -> float:
        z = a + x
        return -0.5 * z * z + float(special.log_ndtr((rho * z - a) / slope))

    # The integrand is log-concave; scale by its maximum, so that nothing underflows.
    grid = np.linspace(0.0, 12.0 + abs(a), 2001)
    logs = np.array([log_integrand(float(x)) for x in grid])
    top = float(logs.max())
    alive = grid[logs > top - 60.0]
    peak = float(grid[int(logs.argmax())])
    value, _ = scipy.integrate.quad(
        lambda x: math.exp(log_integrand(x) - top),
        0.0,
        float(alive[-1]) + 0.1,
        points=[peak] if 0 < peak < alive[-1] else None,
        epsabs=0.0,
        epsrel=1e-12,
        limit=400,
    )
    return value * math.exp(top) / math.sqrt(2 * math.pi)
