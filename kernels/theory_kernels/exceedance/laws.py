"""Upper tails of the noise laws in float64, and the integers that stand for them in the sampler."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import NamedTuple

FAMILIES = ("gaussian", "uniform", "rademacher", "student-t")
# Bits of the first comparison, and of the one that settles a tie.
FIRST_BITS = 16
TIE_BITS = 32


class Noise(NamedTuple):
    """A law of scores, mean 0.

    Attributes
    ----------
    family : str
        "gaussian", "uniform", "rademacher" or "student-t".
    variance : float
        Variance of a score, > 0 (sigma^2 / d for TDA).
    dof : float
        Degrees of freedom of student-t, > 2.
    correlation : float or None
        None for one view; otherwise two views whose scores of a key have a Gaussian copula with this
        correlation, in [-1, 1].
    """

    family: str = "gaussian"
    variance: float = 1.0
    dof: float = 5.0
    correlation: float | None = None


def check(noise: Noise) -> None:
    """ValueError or TypeError unless the law makes sense."""
    if not isinstance(noise, Noise):
        raise TypeError(f"noise must be a theory_kernels.Noise, got {type(noise).__name__}")
    if noise.family not in FAMILIES:
        raise ValueError(f"noise.family must be one of {', '.join(FAMILIES)}, got {noise.family!r}")
    if not (math.isfinite(noise.variance) and noise.variance > 0):
        raise ValueError(f"noise.variance must be finite and > 0, got {noise.variance!r}")
    if noise.family == "student-t" and not (math.isfinite(noise.dof) and noise.dof > 2):
        raise ValueError(f"noise.dof must be finite and > 2 for a finite variance, got {noise.dof!r}")
    if noise.correlation is not None and not -1 <= noise.correlation <= 1:
        raise ValueError(f"noise.correlation must lie in [-1, 1], got {noise.correlation!r}")


def _beta_fraction(a: float, b: float, x: float) -> float:
    """Continued fraction of the incomplete beta function (DLMF 8.17.22), by Lentz's method."""
    tiny = 1e-300
    c, d = 1.0, 1.0 - (a + b) * x / (a + 1.0)
    d = 1.0 / (d if abs(d) > tiny else tiny)
    value = d
    for m in range(1, 1000):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        for term in (even, odd):
            d = 1.0 + term * d
            d = 1.0 / (d if abs(d) > tiny else tiny)
            c = 1.0 + term / c
            c = c if abs(c) > tiny else tiny
            step = c * d
            value *= step
        if abs(step - 1.0) < 1e-16:
            break
    return value


def regularized_beta(a: float, b: float, x: float) -> float:
    """Regularized incomplete beta function I_x(a, b) (DLMF 8.17.2)."""
    if x <= 0.0:
        return 0.0
    if x >= 1.0:
        return 1.0
    front = math.exp(math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x))
    if x < (a + 1.0) / (a + b + 2.0):
        return front * _beta_fraction(a, b, x) / a
    return 1.0 - front * _beta_fraction(b, a, 1.0 - x) / b


def tail(noise: Noise, tau: float) -> float:
    """P(X > tau) in float64."""
    if math.isnan(tau):
        raise ValueError("tau must not be NaN")
    scale = math.sqrt(noise.variance)
    if noise.family == "gaussian":
        return 0.5 * math.erfc(tau / scale / math.sqrt(2.0))
    if noise.family == "uniform":
        edge = math.sqrt(3.0) * scale
        return min(max((edge - tau) / (2.0 * edge), 0.0), 1.0)
    if noise.family == "rademacher":
        return 1.0 if tau < -scale else 0.5 if tau < scale else 0.0
    t = tau / (scale * math.sqrt((noise.dof - 2.0) / noise.dof))
    if math.isinf(t):
        return 0.0 if t > 0 else 1.0
    half = 0.5 * regularized_beta(0.5 * noise.dof, 0.5, noise.dof / (noise.dof + t * t))
    return half if t > 0 else 1.0 - half


def _normal_quantile(p: float) -> float:
    """x with P(Z > x) = p, by bisection on erfc: slow, exact to the last bits in both tails."""
    low, high = -40.0, 40.0
    for _ in range(200):
        middle = 0.5 * (low + high)
        if 0.5 * math.erfc(middle / math.sqrt(2.0)) > p:
            low = middle
        else:
            high = middle
    return 0.5 * (low + high)


def joint_tail(p1: float, p2: float, correlation: float) -> float:
    """P(both exceed) for tails p1, p2 under a Gaussian copula.

    Plackett's identity: the derivative of the orthant probability in the correlation is the bivariate
    density, so P(rho) = p1 p2 + integral from 0 to rho; substituting r = sin(theta) removes the singularity
    at 1 (Drezner and Wesolowsky, 1990).
    """
    low, high = max(0.0, p1 + p2 - 1.0), min(p1, p2)
    if correlation == 0.0 or p1 in (0.0, 1.0) or p2 in (0.0, 1.0):
        return p1 * p2
    if correlation >= 1.0:
        return high
    if correlation <= -1.0:
        return low
    x, y = _normal_quantile(p1), _normal_quantile(p2)
    end, panels = math.asin(correlation), 400
    total = 0.0
    for index in range(panels):
        middle, half = (index + 0.5) * end / panels, 0.5 * end / panels
        for node, weight in ((0.0, 8 / 9), (math.sqrt(0.6), 5 / 9), (-math.sqrt(0.6), 5 / 9)):
            angle = middle + half * node
            sine, cosine = math.sin(angle), math.cos(angle)
            total += weight * half * math.exp(-0.5 * (x * x - 2 * x * y * sine + y * y) / (cosine * cosine))
    return min(max(p1 * p2 + total / (2.0 * math.pi), low), high)


def digits(p: float) -> tuple[int, int]:
    """First 16 bits of p (65536 for p = 1) and the next 32: all the sampler compares a uniform with."""
    scaled = Fraction(p) * (1 << FIRST_BITS)
    first = int(scaled)
    return first, int((scaled - first) * (1 << TIE_BITS))
