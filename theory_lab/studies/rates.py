"""Trends: what a rate tends to, from its values at growing lengths.

If H(n) = a + c log n from some length on, then H(n) / log n tends to c: the slope of H on log n estimates the limit
without the slow a / log n that H / log n itself carries.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import special


@dataclass(frozen=True)
class Trend:
    """A fitted slope with its interval.

    Attributes
    ----------
    slope : float
        Weighted least-squares slope.
    standard_error : float
        From the larger of the stated errors and the scatter about the line.
    points : int
        How many values it rests on.
    """

    slope: float
    standard_error: float
    points: int

    def interval(self, error: float) -> tuple[float, float]:
        """Two-sided Student interval of the slope; it supposes that the line is the truth over the fitted range."""
        if self.points < 3:
            return -math.inf, math.inf
        half = -float(special.stdtrit(self.points - 2.0, error / 2)) * self.standard_error
        return self.slope - half, self.slope + half


def fit_trend(x: Sequence[float], y: Sequence[float], errors: Sequence[float]) -> Trend:
    """Fit y = a + c x by least squares.

    Parameters
    ----------
    x, y : sequence of float, shape (m,)
        Points, m >= 3.
    errors : sequence of float, shape (m,)
        Standard errors of y; points with the smallest are not allowed to count more than the median one, since the
        line is an approximation.
    """
    xs, ys = np.asarray(x, float), np.asarray(y, float)
    sigma = np.maximum(np.asarray(errors, float), float(np.median(errors)))
    if not sigma.any():
        sigma = np.ones_like(xs)
        known = 0.0
    else:
        sigma = np.where(sigma > 0, sigma, sigma[sigma > 0].min())
        known = 1.0
    w = 1.0 / sigma**2
    center = float(w @ xs / w.sum())
    spread = float(w @ (xs - center) ** 2)
    slope = float(w @ ((xs - center) * ys) / spread)
    residual = ys - float(w @ ys / w.sum()) - slope * (xs - center)
    scatter = float(w @ residual**2) / max(1, len(xs) - 2)
    return Trend(slope, math.sqrt(max(known, scatter) / spread), len(xs))
