"""What a claim is: data, and three pure functions (statistic, bound, exact).

It knows nothing of how it is estimated.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache
from typing import Any, Literal

from theory_lab.errors import InputError
from theory_lab.noise import ANY_LAW, Family, Law, Scale, get_family
from theory_lab.noise.copula import Dependence, joint_survival, latent_threshold

Kind = Literal["expectation", "rate", "invariance", "feature"]
Statistic = Literal["survivors", "consensus"]

#: The longest row: 2^50 keys still count exactly in a float64.
MAX_LENGTH = 1 << 50


@lru_cache(maxsize=1)  # laws of files may be large
def _scaled(family: Family, scale: Scale) -> Law:
    """A law, which is asked for several times in a row and may take a root to find."""
    return family.scaled(scale)


@dataclass(frozen=True)
class Point:
    """One setting at which a claim is checked.

    Attributes
    ----------
    noise : str
        Name of a noise family, or ``any`` for all laws with the proxy.
    length : int
        n = i + 1, the number of keys that query i sees, at least 1.
    head_dim : int
        Head dimension d, at least 1.
    kappa : float
        Allowed expected number of spurious survivors, from 1e-100 to 1e100. Larger than ``length`` is legal: then
        tau = 0.
    beta : float
        Scale of the threshold, from 0 to 1e50.
    sigma : float
        Noise scale: the scores' variance proxy is sigma^2/d, from 1e-200 to 1e200.
    rho : float
        Correlation of the two views (latent Gaussian copula), in (-1, 1).
    key_rho : float
        Equicorrelation of the keys of a row, in [0, 1).
    """

    noise: str = "gaussian"
    length: int = 1024
    head_dim: int = 64
    kappa: float = 1.0
    beta: float = 1.0
    sigma: float = 1.0
    rho: float = 0.0
    key_rho: float = 0.0

    def __post_init__(self) -> None:
        for name, check in CHECKS.items():
            check(getattr(self, name))
        check_proxy(self.sigma, self.head_dim)
        if self.noise != ANY_LAW:
            get_family(self.noise).check_head_dim(self.head_dim)

    @property
    def tau(self) -> float:
        """Row threshold beta sqrt(2 max(0, log(n / kappa)) / d) (TDA, section 4).

        The clamp is ours: for n <= kappa the printed formula is imaginary, and tau = 0 satisfies the theorem.
        """
        return threshold(self.length, self.kappa, self.beta, self.head_dim)

    @property
    def proxy(self) -> float:
        """sigma^2/d."""
        return self.sigma * self.sigma / self.head_dim

    @property
    def tightness(self) -> float:
        """b = (beta / sigma)^2; the theorem asks for b >= 1."""
        return (self.beta / self.sigma) ** 2

    @property
    def chernoff(self) -> float:
        """(kappa / n)^b clamped to 1: the Chernoff bound exp(-tau^2 / (2 proxy)) on P(X > tau)."""
        return math.exp(-self.tightness * max(0.0, math.log(self.length / self.kappa)))

    @property
    def family(self) -> Family:
        """The noise family (not for ``any``)."""
        return get_family(self.noise)

    def law(self) -> Law:
        """The law of one score."""
        return _scaled(self.family, Scale(self.proxy, self.head_dim, self.tau))

    @cached_property
    def tail(self) -> float:
        """P(X > tau) of one score (not for ``any``)."""
        return self.law().tail(self.tau)

    @cached_property
    def joint_tail(self) -> float:
        """P(X_1 > tau, X_2 > tau) of a key's scores in two views whose latent normals have correlation ``rho``."""
        return joint_survival(latent_threshold(self.tail), self.rho)

    def with_(self, **changes: Any) -> Point:
        """A copy with some fields changed."""
        return replace(self, **changes)

    def identity(self) -> dict[str, Any]:
        """What fixes the draws: every field, the noise by content."""
        return {**{name: getattr(self, name) for name in _FIELDS}, "noise": self.noise_identity}

    @property
    def noise_identity(self) -> str:
        """What fixes the draws of the noise: its family by content."""
        return self.noise if self.noise == ANY_LAW else self.family.identity


_FIELDS = tuple(field.name for field in fields(Point))


def threshold(length: int, kappa: float, beta: float, head_dim: int) -> float:
    """:attr:`Point.tau`."""
    return beta * math.sqrt(2.0 * max(0.0, math.log(length / kappa)) / head_dim)


def check_proxy(sigma: float, head_dim: int) -> None:
    """InputError unless sigma^2/d is a number to compute with."""
    if not 1e-200 < sigma * sigma / head_dim < 1e200:
        raise InputError("sigma", sigma, "sigma^2/d must lie between 1e-200 and 1e200")


# Squares and quotients of what is allowed, and their powers in a bound, are numbers that a float holds.
def _check_kappa(kappa: float) -> None:
    if not 1e-100 <= kappa <= 1e100:
        raise InputError("kappa", kappa, "a number from 1e-100 to 1e100 is allowed")


def _check_beta(beta: float) -> None:
    if not 0 <= beta <= 1e50:
        raise InputError("beta", beta, "a number from 0 to 1e50 is allowed")


@dataclass(frozen=True)
class Statement:
    """What is claimed, in words.

    Attributes
    ----------
    id, kind, paper, source : str
        Name, kind, the paper (``tda``, ``asentmax``, ``eta``, ``ours``), and where it stands.
    statement, bound_text : str
        The statement and the inequality that is checked, in plain text.
    assumptions : tuple of str
        What the statement supposes.
    exact_text : str
        How an exact value is computed, or that there is none.
    parameters : tuple of str
        Settings that matter; the others are reported as missing.
    """

    id: str
    kind: Kind
    paper: str
    source: str
    statement: str
    bound_text: str
    assumptions: tuple[str, ...]
    exact_text: str
    parameters: tuple[str, ...]


@dataclass(frozen=True)
class Claim(Statement):
    """An inequality E[statistic] <= bound, and the functions that go with it.

    Attributes
    ----------
    statistic : str
        ``survivors`` (S_i) or ``consensus`` (C_i).
    bound : callable
        Point -> the right-hand side. A sweep hands in one object with one point after the other: keep nothing of it.
    exact : callable
        Point -> the expectation itself, by closed form or quadrature; None where neither exists.
    unmet : callable
        Point -> which assumptions fail there, as short phrases; empty where all hold.
    """

    statistic: Statistic
    bound: Callable[[Point], float]
    exact: Callable[[Point], float | None]
    unmet: Callable[[Point], tuple[str, ...]]


def whole(value: object, field: str, low: int, high: int) -> int:
    """Return ``value`` as an int within [low, high]; InputError otherwise."""
    integral = isinstance(value, int) and not isinstance(value, bool)
    if not integral or not low <= value <= high:  # type: ignore[operator]  # integral says it is an int
        raise InputError(field, value, f"a whole number from {low} to {high} is allowed")
    return value  # type: ignore[return-value]  # the same


def positive(value: float, field: str) -> float:
    """Return ``value`` if it is finite and above 0; InputError otherwise."""
    if not (math.isfinite(value) and value > 0):
        raise InputError(field, value, "a finite number above 0 is allowed")
    return value


#: What each number of a point must be, whatever the others are: name -> a function that raises InputError.
CHECKS: dict[str, Callable[[Any], object]] = {
    "length": lambda value: whole(value, "length", 1, MAX_LENGTH),
    "head_dim": lambda value: whole(value, "head_dim", 1, 1 << 20),
    "kappa": _check_kappa,
    "sigma": lambda value: positive(value, "sigma"),
    "beta": _check_beta,
    "rho": lambda value: Dependence(rho=value),
    "key_rho": lambda value: Dependence(key_rho=value),
}
