"""Claims of the TDA paper (arXiv 2601.12145) about spurious survivors, and their general forms.

S_i counts the keys of row i whose score exceeds the threshold tau_i; C_i counts those that do so in both views.
"""

from __future__ import annotations

import math

from theory_lab.claims.base import Claim, Point
from theory_lab.noise import ANY_LAW
from theory_lab.noise.empirical import Empirical


def unmet_noise(point: Point) -> list[str]:
    """Which of Assumption 4.1 fails: mean zero, sub-Gaussian with variance proxy sigma^2/d."""
    if point.noise == ANY_LAW:
        return []
    if not point.family.sub_gaussian:
        return ["noise has no sub-Gaussian proxy"]
    family = point.family
    unmet = []
    if isinstance(family, Empirical) and family.raw:
        if family.is_shifted:
            unmet.append(f"the scores' mean is {family.mean:.3g}, not 0")
        if family.proxy > point.proxy * (1 + 1e-9):
            unmet.append(f"the scores' proxy is {family.proxy / point.proxy:.4g} x sigma^2/d")
    return unmet


def unmet_beta(point: Point) -> list[str]:
    return ["beta < sigma"] if point.beta < point.sigma else []


def _unmet_independence(point: Point) -> list[str]:
    return ["views are correlated"] if point.rho != 0 else []


def _unmet_joint(point: Point) -> list[str]:
    return (
        ["sum of the views not shown to have proxy 2(1+rho)sigma^2/d"]
        if (point.rho != 0 and point.noise != "gaussian")
        else []
    )


def exact_survivors(point: Point) -> float | None:
    """E[S_i] = n P(X > tau), by linearity for any dependence between keys; None for the class of all laws."""
    if point.noise == ANY_LAW:
        return None
    return point.length * point.tail


def exact_consensus(point: Point) -> float | None:
    """E[C_i] = n P(X_1 > tau, X_2 > tau): a square for independent views, one integral for a Gaussian copula."""
    if point.noise == ANY_LAW:
        return None
    if point.rho == 0:
        return point.length * point.tail * point.tail
    return point.length * point.joint_tail


def general_survivor_bound(point: Point) -> float:
    """n (kappa/n)^b with b = (beta/sigma)^2, that is n^(1-b) kappa^b; n itself where tau = 0."""
    return point.length * point.chernoff


def correlated_consensus_bound(point: Point) -> float:
    """kappa^(2b/(1+rho)) n^(1 - 2b/(1+rho)), from the Chernoff bound on the sum of the two scores."""
    exponent = 2.0 * point.tightness / (1.0 + point.rho)
    return point.length * math.exp(-exponent * max(0.0, math.log(point.length / point.kappa)))


_ONE_VIEW = ("noise", "length", "head_dim", "kappa", "beta", "sigma", "key_rho")
_TWO_VIEWS = (*_ONE_VIEW, "rho")
NOISE_ASSUMPTION = "scores of spurious keys have mean 0 and variance proxy sigma^2/d (Assumption 4.1)"

CLAIMS = (
    Claim(
        id="tda-4.3",
        kind="expectation",
        paper="tda",
        source="TDA, Theorem 4.3",
        statement="The expected number of spurious survivors of a row is at most kappa, however long the row.",
        bound_text="E[S_i] <= kappa",
        assumptions=(NOISE_ASSUMPTION, "beta >= sigma"),
        statistic="survivors",
        bound=lambda point: point.kappa,
        exact=exact_survivors,
        exact_text="n P(X > tau), from the family's tail function",
        unmet=lambda point: tuple(unmet_noise(point) + unmet_beta(point)),
        parameters=_ONE_VIEW,
    ),
    Claim(
        id="tda-4.3-general",
        kind="expectation",
        paper="ours",
        source="general form of TDA, Theorem 4.3, by the same Chernoff bound",
        statement=(
            "For any beta and sigma the expected number of survivors is at most n^(1-b) kappa^b, b = (beta/sigma)^2."
        ),
        bound_text="E[S_i] <= n^(1-b) kappa^b",
        assumptions=(NOISE_ASSUMPTION,),
        statistic="survivors",
        bound=general_survivor_bound,
        exact=exact_survivors,
        exact_text="n P(X > tau), from the family's tail function",
        unmet=lambda point: tuple(unmet_noise(point)),
        parameters=_ONE_VIEW,
    ),
    Claim(
        id="tda-4.6",
        kind="expectation",
        paper="tda",
        source="TDA, Theorem 4.6",
        statement="The expected number of keys that survive in both views is at most kappa^2/(i+1), so it vanishes.",
        bound_text="E[C_i] <= kappa^2 / n",
        assumptions=(NOISE_ASSUMPTION, "beta >= sigma", "the two views are independent (Assumption 4.5)"),
        statistic="consensus",
        bound=lambda point: point.kappa**2 / point.length,
        exact=exact_consensus,
        exact_text="n P(X > tau)^2; one-dimensional quadrature for correlated views",
        unmet=lambda point: tuple(unmet_noise(point) + unmet_beta(point) + _unmet_independence(point)),
        parameters=_TWO_VIEWS,
    ),
    Claim(
        id="tda-4.6-correlated",
        kind="expectation",
        paper="ours",
        source="form of TDA, Theorem 4.6, for correlated views",
        statement=(
            "With views of correlation rho the expected consensus is at most "
            "kappa^(2b/(1+rho)) n^(1-2b/(1+rho)), b = (beta/sigma)^2."
        ),
        bound_text="E[C_i] <= kappa^(2b/(1+rho)) n^(1-2b/(1+rho))",
        assumptions=(
            NOISE_ASSUMPTION,
            "the sum of a key's two scores has variance proxy 2(1+rho)sigma^2/d (jointly Gaussian views do)",
        ),
        statistic="consensus",
        bound=correlated_consensus_bound,
        exact=exact_consensus,
        exact_text="n P(X > tau)^2; one-dimensional quadrature for correlated views",
        unmet=lambda point: tuple(unmet_noise(point) + _unmet_joint(point)),
        parameters=_TWO_VIEWS,
    ),
)
