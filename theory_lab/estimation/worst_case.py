"""``worst-case``: the supremum over ALL mean-zero laws with the given proxy, between a witness and a certificate.

A simulation tries one law; a theorem speaks of all. For "mean 0, variance proxy v, how large can P(X > tau) be?" both
ends are given:

witness
    A law that reaches p: the two-point law with its upper atom at tau. Its proxy is verified by maximizing its
    cumulant function numerically, independently of the closed form that produced it.
certificate
    A function f >= 1{x > tau} on the whole line, built from 1, x and exponential moments. For a law of the class
    E[f(X)] is at most the certified value, hence so is P(X > tau). Three kinds are tried and the least value wins:

    ``chernoff``
        f = exp(t (x - tau)): value exp(-tau^2 / (2 v)) at t = tau / v.
    ``tangent``
        f = l (e^{tx} - e^{t y} - t e^{t y} (x - y)), with l such that f(tau) = 1. An exponential minus its tangent
        at y <= tau is convex and nonnegative, so f >= 0 everywhere and f >= 1 from tau on. With E X = 0 and
        E e^{tX} <= e^{v t^2 / 2} the value is
        (e^{v t^2 / 2} - e^{ty} (1 - t y)) / (e^{t tau} - e^{ty} (1 + t (tau - y))). Any t and y certify. At the lower
        atom y of the witness and the t at which its proxy is attained the value is the witness's p itself: the
        two-point law is the worst law, exactly.
    ``linear-program``
        f = c + m x + sum_k l_k e^{t_k x} with l_k >= 0, chosen by a linear program on a grid of x and t. f is convex,
        so its minima over x < tau and over x >= tau are found off the grid, and c is raised by what they lack. Only
        asked where the tangent leaves a gap, which it has not been seen to do; the tests compare the two.

For two independent views the probabilities multiply, at both ends.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import scipy

from theory_lab.claims.base import Point, Statistic
from theory_lab.errors import InputError
from theory_lab.noise.discrete import extremal_probability

# Beyond tau^2/v = 64 the program's coefficients span more than float64 does; the tangent certificate needs no program.
_LINEAR_PROGRAM_LIMIT = 64.0
# It holds exp(tau^2/v), which is beyond float64 from 709 on.
_TANGENT_LIMIT = 600.0


@dataclass(frozen=True)
class Certificate:
    """A dual bound on P(X > tau): its kind, its value, and how to rebuild it."""

    kind: str
    value: float
    detail: str


@dataclass(frozen=True)
class Sandwich:
    """Both ends of the supremum of E[statistic].

    Attributes
    ----------
    lower, upper : float
        What the witness reaches and what the certificate allows.
    probability : float
        The witness's P(X > tau).
    proxy_excess : float
        Witness's numerically maximized proxy relative to the allowed one, minus 1 (rounding only).
    certificate : Certificate
        The one that gives ``upper``.
    """

    lower: float
    upper: float
    probability: float
    proxy_excess: float
    certificate: Certificate

    @property
    def gap(self) -> float:
        """upper - lower."""
        return self.upper - self.lower


def two_point_proxy(p: float, tau: float) -> tuple[float, float]:
    """Maximize 2 log E exp(tX) / t^2 for the two-point law with upper atom ``tau`` of probability ``p``.

    Returns
    -------
    proxy, t : float
        The maximum, and where it is attained (infinite flatness near 0 makes t approximate only for p near 1/2).
    """
    low = -tau * p / (1.0 - p)

    def curve(t: float) -> float:
        top, bottom = math.log(p) + t * tau, math.log1p(-p) + t * low
        peak = max(top, bottom)
        return 2.0 * (peak + math.log(math.exp(top - peak) + math.exp(bottom - peak))) / (t * t)

    guess = 2.0 * math.log((1.0 - p) / p) / (tau - low)
    variance = p * tau * tau + (1.0 - p) * low * low
    if abs(guess) * (tau - low) < 1e-3:
        return max(variance, ((tau - low) / 2.0) ** 2), guess
    bounds = sorted((0.2 * guess, 3.0 * guess))
    found = scipy.optimize.minimize_scalar(
        lambda t: -curve(t), bounds=(bounds[0], bounds[1]), method="bounded", options={"xatol": 1e-12 * abs(guess)}
    )
    return max(variance, -float(found.fun), curve(guess)), float(found.x)


def chernoff(tau: float, v: float) -> Certificate:
    """exp(-tau^2 / (2v))."""
    return Certificate("chernoff", math.exp(-tau * tau / (2 * v)), f"t = {tau / v:.6g}")


def tangent_value(tau: float, v: float, t: float, y: float) -> float:
    """Certified value of the tangent certificate with exponent ``t`` != 0 and touching point ``y`` < ``tau``."""
    # Divided by e^{ty}, so that nothing overflows: with s = t (tau - y) and q = v t^2 / 2 - t y.
    s, q = t * (tau - y), v * t * t / 2 - t * y
    return (math.expm1(q) + t * y) / (math.expm1(s) - s)


def tangent(tau: float, v: float) -> Certificate:
    """Best tangent certificate: started at the witness's lower atom, then improved numerically."""
    p = extremal_probability(tau, v)
    start = np.array([2.0 * math.log((1.0 - p) / p) * (1.0 - p) / tau, -tau * p / (1.0 - p)])
    if abs(start[0]) * tau < 1e-3:
        start[0] = 1e-3 / tau

    def value(x: np.ndarray) -> float:
        t, y = float(x[0]), float(x[1])
        if y >= tau or abs(t) * tau < 1e-9 or abs(t * (tau - y)) > _TANGENT_LIMIT + 1.0:
            return math.inf
        return tangent_value(tau, v, t, y)

    found = scipy.optimize.minimize(value, start, method="Nelder-Mead", options={"xatol": 1e-12, "fatol": 1e-15})
    t, y = (float(c) for c in (found.x if found.fun <= value(start) else start))
    return Certificate("tangent", tangent_value(tau, v, t, y), f"t = {t:.6g}, y = {y:.6g}")


def linear_program(tau: float, v: float, exponents: int = 40, points: int = 400) -> Certificate:
    """Certificate from a linear program over exponential moments, repaired off its grid.

    Its value is infinite where the solver finds nothing, which certifies nothing.
    """
    # In units of sqrt(v): the moments become E exp(tX) <= exp(t^2/2).
    c = tau / math.sqrt(v)
    t = np.concatenate([np.linspace(0.05, 1.6 * c + 1.0, exponents), -np.linspace(0.2, 3.0, 6)])
    x = np.concatenate([-np.geomspace(1e-8, 8.0, points // 2), np.linspace(0.0, c, points - points // 2)])
    # f >= 0 on the grid and f(c) >= 1; f is convex, so f'(c) >= 0 settles everything beyond c. Moments are divided by
    # exp(t^2/2), so that each multiplier is its share of the objective.
    rows = np.hstack([np.ones((x.size, 1)), x[:, None], np.exp(np.outer(x, t) - t * t / 2)])
    slope_at_c = np.concatenate([[0.0, 1.0], t * np.exp(t * c - t * t / 2)])[None, :]
    rows = np.vstack([rows, rows[-1:], slope_at_c])
    wanted = np.concatenate([np.zeros(x.size), [1.0, 0.0]])
    size = np.abs(rows).max(axis=1)
    solved = scipy.optimize.linprog(
        np.concatenate([[1.0, 0.0], np.ones(t.size)]),
        A_ub=-rows / size[:, None],
        b_ub=-wanted / size,
        bounds=[(None, None)] * 2 + [(0, None)] * t.size,
        method="highs",
    )
    if solved.status != 0 or solved.x is None:
        return Certificate("linear-program", math.inf, f"not solved: {solved.message}")
    shift, slope, weights = float(solved.x[0]), float(solved.x[1]), np.maximum(solved.x[2:], 0.0)
    lack = _lack(c, shift, slope, weights, t)
    kept = int((weights > 1e-12 * max(1e-300, float(weights.max()))).sum())
    return Certificate(
        "linear-program",
        shift + lack + float(weights.sum()),
        f"{kept} exponential moments, raised by {lack:.2g} off the grid",
    )


def _lack(c: float, shift: float, slope: float, weights: np.ndarray, t: np.ndarray) -> float:
    """How far the convex f(x) = shift + slope x + sum w e^{tx - t^2/2} falls short of 1{x > c}, off the grid."""

    def f(x: float) -> float:
        return shift + slope * x + float(weights @ np.exp(np.minimum(t * x - t * t / 2, 700.0)))

    def derivative(x: float) -> float:
        return slope + float((weights * t) @ np.exp(np.minimum(t * x - t * t / 2, 700.0)))

    lo, hi = -1.0, c
    while derivative(lo) > 0 and lo > -1e6:
        lo *= 2.0
    if derivative(lo) > 0:
        return math.inf  # f falls without end to the left: no certificate
    while derivative(hi) < 0 and hi < 1e6:
        hi = 2.0 * hi + 1.0
    bottom = float(scipy.optimize.brentq(derivative, lo, hi, xtol=1e-14)) if derivative(hi) > 0 else hi
    # The minimum is flat, so its value is right to second order in the error of its place.
    below = 0.0 - f(min(bottom, c))
    above = 1.0 - f(max(bottom, c))
    return max(0.0, below, above)


def sandwich(point: Point, statistic: Statistic) -> Sandwich:
    """Bound the supremum of E[statistic] over all laws of Assumption 4.1 from both sides.

    Raises
    ------
    InputError
        If the views are correlated: the class of all dependent pairs has no certificate here.
    """
    if statistic == "consensus" and point.rho != 0:
        raise InputError("rho", point.rho, "the worst case is known for independent views only (rho = 0)")
    power = 2 if statistic == "consensus" else 1
    tau, v = point.tau, point.proxy
    if tau == 0:
        # Laws with P(X > 0) as close to 1 as one likes exist, and 1 is a trivial certificate.
        top = Certificate("trivial", 1.0, "P(X > 0) <= 1, approached but not reached")
        return Sandwich(float(point.length), float(point.length), 1.0, 0.0, top)
    p = extremal_probability(tau, v)
    if not 1e-6 < tau * tau / v < _TANGENT_LIMIT:
        # Next to 0 the trivial certificate is within a percent; far out float64 has no finer one than Chernoff's.
        best = chernoff(tau, v) if tau * tau > v else Certificate("trivial", 1.0, "P(X > tau) <= 1")
        return Sandwich(point.length * p**power, point.length * max(best.value, p) ** power, p, 0.0, best)
    proxy, _ = two_point_proxy(p, tau)
    certificates = [chernoff(tau, v), tangent(tau, v)]
    best = min(certificates, key=lambda c: c.value)
    if best.value > p * (1 + 1e-6) and tau * tau / v < _LINEAR_PROGRAM_LIMIT:
        certificates.append(linear_program(tau, v))
        best = min(certificates, key=lambda c: c.value)
    # Rounding may put the two ends, equal in exact arithmetic, a few ulp out of order.
    upper = max(best.value, p)
    return Sandwich(point.length * p**power, point.length * upper**power, p, proxy / v - 1.0, best)
