"""Families with a density, all symmetric about 0.

Each law is X = scale * Y with Y standard. Tails and quantiles come from ``scipy.special``, which keeps relative
accuracy far into the tail and imports quickly.
"""

from __future__ import annotations

import math

import numpy as np
from scipy import special

from theory_lab.errors import InputError
from theory_lab.noise.base import ArrayLike, Family, Law, Scale, positive_part_symmetric_isf, shortest
from theory_lab.streams import F64


def _folded(u: ArrayLike) -> F64:
    """min(u, 1 - u): the tail mass on the nearer side."""
    u = np.asarray(u, dtype=np.float64)
    return np.minimum(u, 1.0 - u)


class GaussianLaw(Law):
    """Normal with mean 0 and variance ``v``: the law whose proxy is its variance by definition."""

    log_concave = True

    def __init__(self, v: float) -> None:
        self.variance = self.proxy = v
        self._s = math.sqrt(v)

    def sf(self, t: ArrayLike) -> F64:
        return special.ndtr(-np.asarray(t) / self._s)

    def isf(self, u: ArrayLike) -> F64:
        return -self._s * special.ndtri(np.asarray(u, dtype=np.float64))

    def log_pdf(self, x: F64) -> F64:
        return -0.5 * (x / self._s) ** 2 - math.log(self._s * math.sqrt(2 * math.pi))

    def tail_rate(self, t: float) -> float:
        return t / self.variance


class Gaussian(Family):
    name = "gaussian"
    summary = "normal; variance = proxy = sigma^2/d (the default)"
    follows_tau = False

    def scaled(self, scale: Scale) -> Law:
        return GaussianLaw(scale.proxy)


class BetaLaw(Law):
    """X = a (2B - 1) with B ~ Beta(shape, shape) on (0, 1).

    Strictly sub-Gaussian, the proxy is the variance a^2/(2 shape + 1) (Marchal and Arbel, 2017). Shape 1 is the
    uniform law; shape (d-1)/2 with a = 1 is the law of the cosine of two random directions in R^d.
    """

    def __init__(self, shape: float, a: float) -> None:
        self._shape = shape
        self._a = a
        self.variance = self.proxy = a * a / (2 * shape + 1)
        self.upper = a
        self.log_concave = shape >= 1
        self._log_norm = -special.betaln(shape, shape) - (2 * shape - 1) * math.log(2) - math.log(a)

    def sf(self, t: ArrayLike) -> F64:
        # P(B > b) = P(B < 1 - b) by symmetry: the small side, so nothing cancels.
        lower = np.clip((1.0 - np.asarray(t) / self._a) / 2.0, 0.0, 1.0)
        return special.betainc(self._shape, self._shape, lower)

    def isf(self, u: ArrayLike) -> F64:
        lower = special.betaincinv(self._shape, self._shape, _folded(u))
        return positive_part_symmetric_isf(u, self._a * (1.0 - 2.0 * lower))

    def log_pdf(self, x: F64) -> F64:
        y = x / self._a
        with np.errstate(divide="ignore", invalid="ignore"):
            body = special.xlogy(self._shape - 1, (1 - y) * (1 + y))
        return np.where(np.abs(y) < 1, body + self._log_norm, -np.inf)

    def tail_rate(self, t: float) -> float:
        return 2 * (self._shape - 1) * t / ((self._a - t) * (self._a + t))


class Uniform(Family):
    name = "uniform"
    summary = "uniform on [-a, a]; variance = proxy = a^2/3"
    follows_tau = False

    def scaled(self, scale: Scale) -> Law:
        return BetaLaw(1.0, math.sqrt(3 * scale.proxy))


class SymmetricBeta(Family):
    """Symmetric beta on [-a, a]; ``shape`` > 0."""

    follows_tau = False

    def __init__(self, shape: float = 2.0) -> None:
        text = shortest(shape) if math.isfinite(shape) else str(shape)
        if not 1e-3 <= shape <= 1e6:
            raise InputError("noise", f"beta({text})", "a shape from 0.001 to 1e6 is allowed")
        self.shape = shape
        self.name = f"beta({text})"
        self.summary = f"symmetric beta({text}, {text}) on [-a, a]; strictly sub-Gaussian, proxy = variance"

    def scaled(self, scale: Scale) -> Law:
        return BetaLaw(self.shape, math.sqrt(scale.proxy * (2 * self.shape + 1)))


class Spherical(Family):
    name = "spherical"
    summary = "sigma * <u, w>, u and w uniform on the unit sphere of R^d: what cosine scores really follow"
    follows_tau = False

    def scaled(self, scale: Scale) -> Law:
        return BetaLaw((scale.head_dim - 1) / 2.0, math.sqrt(scale.proxy * scale.head_dim))

    def check_head_dim(self, head_dim: int) -> None:
        if head_dim < 2:
            raise InputError("head_dim", head_dim, "spherical noise needs a head dimension of at least 2")


class TruncatedNormalLaw(Law):
    """Normal(0, s^2) conditioned on |X| <= c s."""

    log_concave = True

    def __init__(self, cut: float, s: float) -> None:
        self._c = cut
        self._s = s
        self._mass = 1.0 - 2.0 * float(special.ndtr(-cut))
        self.upper = cut * s
        self.variance = self.proxy = s * s * TruncatedNormalLaw.relative_variance(cut)

    @staticmethod
    def relative_variance(cut: float) -> float:
        """Variance of a standard normal truncated to [-cut, cut].

        Symmetric truncation keeps the law strictly sub-Gaussian, so this is also its optimal proxy
        (Barreto, Marchal and Arbel, 2024), at most the parent's.
        """
        if cut < 0.1:  # the closed form cancels; series in cut^2
            return cut * cut / 3 * (1 - 2 * cut * cut / 15)
        density = math.exp(-cut * cut / 2) / math.sqrt(2 * math.pi)
        return 1.0 - 2.0 * cut * density / (1.0 - 2.0 * float(special.ndtr(-cut)))

    def sf(self, t: ArrayLike) -> F64:
        y = np.clip(np.asarray(t) / self._s, -self._c, self._c)
        # Far out, ndtr(-y) - ndtr(-c) loses digits only where the two agree, next to the cut.
        return (special.ndtr(-y) - special.ndtr(-self._c)) / self._mass

    def isf(self, u: ArrayLike) -> F64:
        inner = special.ndtr(-self._c) + _folded(u) * self._mass
        return positive_part_symmetric_isf(u, -self._s * special.ndtri(inner))

    def log_pdf(self, x: F64) -> F64:
        body = -0.5 * (x / self._s) ** 2 - math.log(self._s * math.sqrt(2 * math.pi) * self._mass)
        return np.where(np.abs(x) <= self.upper, body, -np.inf)

    def tail_rate(self, t: float) -> float:
        return t / (self._s * self._s)


class TruncatedNormal(Family):
    """Normal truncated to ``cut`` of its parent's standard deviations on either side."""

    follows_tau = False

    def __init__(self, cut: float = 2.0) -> None:
        text = shortest(cut) if math.isfinite(cut) else str(cut)
        if not 1e-3 <= cut <= 30:
            raise InputError("noise", f"truncated-normal({text})", "a cut from 0.001 to 30 is allowed")
        self.cut = cut
        self.name = f"truncated-normal({text})"
        self.summary = f"normal cut at {text} of its standard deviations; bounded, proxy = variance"

    def scaled(self, scale: Scale) -> Law:
        return TruncatedNormalLaw(self.cut, math.sqrt(scale.proxy / TruncatedNormalLaw.relative_variance(self.cut)))


class StudentTLaw(Law):
    """Student's t with ``nu`` degrees of freedom times ``s``: polynomial tails, no proxy."""

    proxy = None

    def __init__(self, nu: float, s: float) -> None:
        self.nu = nu
        self._s = s
        self.variance = s * s * nu / (nu - 2) if nu > 2 else math.inf
        self._log_norm = (
            special.gammaln((nu + 1) / 2) - special.gammaln(nu / 2) - 0.5 * math.log(nu * math.pi) - math.log(s)
        )

    def sf(self, t: ArrayLike) -> F64:
        return np.asarray(special.stdtr(self.nu, -np.asarray(t) / self._s), dtype=np.float64)

    def isf(self, u: ArrayLike) -> F64:
        return np.asarray(-self._s * special.stdtrit(self.nu, np.asarray(u, dtype=np.float64)), dtype=np.float64)

    def log_pdf(self, x: F64) -> F64:
        return self._log_norm - (self.nu + 1) / 2 * np.log1p((x / self._s) ** 2 / self.nu)

    def tail_rate(self, t: float) -> float:
        return (self.nu + 1) * t / (self.nu * self._s * self._s + t * t)


class StudentT(Family):
    """Student's t; ``nu`` > 1 so that the mean exists."""

    sub_gaussian = False
    follows_tau = False

    def __init__(self, nu: float = 3.0) -> None:
        text = shortest(nu) if math.isfinite(nu) else str(nu)
        if not 1 < nu <= 1e6:
            raise InputError("noise", f"student-t({text})", "degrees of freedom above 1 and up to 1e6 are allowed")
        self.nu = nu
        self.name = f"student-t({text})"
        scaled_by = "variance" if nu > 2 else "scale parameter squared"
        self.summary = f"Student's t, {text} degrees of freedom; no proxy, {scaled_by} = sigma^2/d; negative control"

    def scaled(self, scale: Scale) -> Law:
        shrink = (self.nu - 2) / self.nu if self.nu > 2 else 1.0
        return StudentTLaw(self.nu, math.sqrt(scale.proxy * shrink))


class LaplaceLaw(Law):
    """Laplace with scale ``b``: exponential tails, so no proxy."""

    proxy = None
    log_concave = True

    def __init__(self, b: float) -> None:
        self._b = b
        self.variance = 2 * b * b

    def sf(self, t: ArrayLike) -> F64:
        y = np.asarray(t, dtype=np.float64) / self._b
        small = 0.5 * np.exp(-np.abs(y))
        return np.where(y >= 0, small, 1.0 - small)

    def isf(self, u: ArrayLike) -> F64:
        return positive_part_symmetric_isf(u, -self._b * np.log(2 * _folded(u)))

    def log_pdf(self, x: F64) -> F64:
        return -np.abs(x) / self._b - math.log(2 * self._b)

    def tail_rate(self, t: float) -> float:
        return 1.0 / self._b if t >= 0 else -1.0 / self._b


class Laplace(Family):
    name = "laplace"
    summary = "Laplace; no proxy, variance = sigma^2/d; negative control"
    sub_gaussian = False
    follows_tau = False

    def scaled(self, scale: Scale) -> Law:
        return LaplaceLaw(math.sqrt(scale.proxy / 2))
