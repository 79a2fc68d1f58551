"""What a noise family and a law are.

A *family* is a shape, such as ``gaussian`` or ``student-t(3)``. A *law* is a family scaled to what a theorem asks
for: the distribution of one spurious score (THEORY Assumption 4.1: mean zero, sub-Gaussian with variance proxy
sigma^2/d). The variance proxy of X is the least v with E exp(t X) <= exp(v t^2 / 2) for every t.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np

from theory_lab.streams import F64, Stream, open_uniform

ArrayLike = float | F64


@dataclass(frozen=True)
class Scale:
    """What a law is scaled to.

    Attributes
    ----------
    proxy : float
        Requested variance proxy sigma^2/d (score units squared), positive.
    head_dim : int
        Head dimension d; only laws that depend on the geometry use it.
    tau : float
        The row's threshold (score units); only laws re-solved for each row use it.
    """

    proxy: float
    head_dim: int
    tau: float = 0.0


class Law(ABC):
    """The distribution of one score.

    Attributes
    ----------
    variance : float
        Variance, possibly infinite.
    proxy : float or None
        Optimal sub-Gaussian variance proxy; None where no finite one exists.
    upper : float
        Supremum of the support, possibly infinite.
    discrete : bool
        True where the law has atoms and no density.
    """

    variance: float
    proxy: float | None
    upper: float = math.inf
    discrete: bool = False

    @abstractmethod
    def sf(self, t: ArrayLike) -> F64:
        """P(X > t), elementwise, accurate relatively far into the tail."""

    @abstractmethod
    def isf(self, u: ArrayLike) -> F64:
        """Upper quantile inf{x : P(X > x) <= u}, elementwise, accurate for small u."""

    def tail(self, t: float) -> float:
        """P(X > t) for one t, as a float."""
        return float(self.sf(t))

    def draw(self, stream: Stream, size: int) -> F64:
        """Draw ``size`` scores by inversion, shape (size,)."""
        return self.isf(open_uniform(stream.words(size)))

    def log_pdf(self, x: F64) -> F64:
        """Logarithm of the density, elementwise; only for laws with ``discrete`` False."""
        raise TypeError(f"{type(self).__name__} has no density")

    def tail_rate(self, t: float) -> float:
        """-(d/dx) log density at t: the rate of the exponential tail that hugs the density beyond t."""
        raise TypeError(f"{type(self).__name__} has no density")

    #: True where the density is log-concave, so that an exponential proposal beyond t has bounded weights.
    log_concave: bool = False


class Family(ABC):
    """A shape of noise.

    Attributes
    ----------
    name : str
        Canonical name with its parameters, such as ``student-t(3)``; parsing it gives an equal family.
    summary : str
        One line for ``theory-lab noise``.
    sub_gaussian : bool
        False for negative controls, whose scale is their variance because they have no proxy.
    follows_tau : bool
        False where the law does not depend on the scale's ``tau``, so that one law serves every threshold.
    """

    name: str
    summary: str
    sub_gaussian: bool = True
    follows_tau: bool = True

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "scaled" in vars(cls) and "follows_tau" not in vars(cls):
            cls.follows_tau = True  # what a parent says of its law says nothing of another one

    @abstractmethod
    def scaled(self, scale: Scale) -> Law:
        """Return the law with the requested proxy (or, for negative controls, variance)."""

    def check_head_dim(self, head_dim: int) -> None:  # noqa: B027  # most families exist in every dimension
        """Raise InputError if this family does not exist in that dimension."""

    @property
    def identity(self) -> str:
        """What enters the cell's name: the canonical name, or more where the name does not fix the law."""
        return self.name


def shortest(value: float) -> str:
    """The shortest text that reads back as the same number."""
    return str(int(value)) if value == int(value) and abs(value) < 1e15 else repr(float(value))


def positive_part_symmetric_isf(u: ArrayLike, upper_isf_of_half: F64) -> F64:
    """Reflect an upper-half quantile: sign from which half ``u`` lies in, magnitude as given."""
    return np.where(np.asarray(u) <= 0.5, upper_isf_of_half, -upper_isf_of_half)
