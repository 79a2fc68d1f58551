"""Both ends of the worst case: the witness is in the class, the certificate is one."""

from __future__ import annotations

import math

import numpy as np
import pytest

from theory_lab.claims import Point
from theory_lab.errors import InputError
from theory_lab.estimation.worst_case import chernoff, linear_program, sandwich, tangent, tangent_value, two_point_proxy
from theory_lab.noise import Scale, default_families, get_family
from theory_lab.noise.discrete import extremal_probability


@pytest.mark.parametrize(("length", "value"), [(2, 0.82843), (100, 0.990551), (10**6, 0.999999), (2**40, 1.0)])
def test_sandwich_of_survivors(length: int, value: float) -> None:
    found = sandwich(Point("any", length), "survivors")
    assert found.lower == pytest.approx(value, abs=1e-5)
    assert found.lower <= found.upper <= 1.0 + 1e-12
    assert found.gap < 1e-9
    assert abs(found.proxy_excess) < 1e-9


def test_tight_constants() -> None:
    """At n = 2: 2 (sqrt 2 - 1), from tau^2 / v = 2 log 2."""
    assert sandwich(Point("any", 2), "survivors").lower == pytest.approx(2 * (math.sqrt(2) - 1), rel=1e-12)


def test_consensus_is_the_square() -> None:
    one, both = (sandwich(Point("any", 1000), s) for s in ("survivors", "consensus"))
    assert both.lower == pytest.approx(one.lower**2 / 1000)
    assert both.upper <= 1 / 1000 * (1 + 1e-9)


@pytest.mark.parametrize("c", [0.05, 0.7, 1.0, 1.5, 3.0, 5.3, 7.4])
def test_certificates_dominate_every_law(c: float) -> None:
    """No family with the proxy exceeds any certificate; the two-point law reaches the best one."""
    bounds = [chernoff(c, 1.0), tangent(c, 1.0), linear_program(c, 1.0)]
    for spec in [s for s in default_families() if get_family(s).sub_gaussian]:
        p = get_family(spec).scaled(Scale(1.0, 64, c)).tail(c)
        for bound in bounds:
            assert p <= bound.value * (1 + 1e-9), (spec, bound)
    assert min(b.value for b in bounds) == pytest.approx(extremal_probability(c, 1.0), rel=1e-9)


@pytest.mark.parametrize("c", [0.3, 1.2, 4.0])
def test_tangent_dominates_the_indicator(c: float) -> None:
    """The function behind a certificate is above 1{x >= c} on a fine grid, for any t and y."""
    rng = np.random.Generator(np.random.Philox(key=7))
    x = np.linspace(-40, 40, 20_001)
    for _ in range(50):
        t, y = float(rng.uniform(-3, 6)), float(c - rng.exponential(2.0))
        if abs(t) < 1e-2:
            continue
        scale = 1.0 / (math.exp(t * (c - y)) - 1 - t * (c - y))
        f = scale * (np.exp(np.clip(t * (x - y), -700, 700)) - 1 - t * (x - y))
        assert np.all(f >= (x >= c) - 1e-9)
        expectation = scale * (math.exp(t * t / 2 - t * y) - 1 + t * y)
        assert tangent_value(c, 1.0, t, y) == pytest.approx(expectation, rel=1e-8)


def test_linear_program_agrees_with_the_closed_form() -> None:
    """Independent of the tangent's algebra, and within half a percent of it."""
    for c in (0.8, 1.2, 2.0, 3.5, 4.5):
        program, closed = linear_program(c, 1.0).value, tangent(c, 1.0).value
        assert closed * (1 - 1e-9) <= program <= closed * 1.005


def test_witness_proxy_is_found_numerically() -> None:
    p = extremal_probability(0.5, 1 / 64)
    assert two_point_proxy(p, 0.5)[0] == pytest.approx(1 / 64, rel=1e-9)
    assert two_point_proxy(p * 1.01, 0.5)[0] > 1 / 64


def test_trivial_row() -> None:
    found = sandwich(Point("any", 3, kappa=5.0), "survivors")
    assert (found.lower, found.upper) == (3.0, 3.0)


def test_correlated_views_are_refused() -> None:
    with pytest.raises(InputError, match=r"^rho: 0\.5;"):
        sandwich(Point("any", 10, rho=0.5), "consensus")


@pytest.mark.parametrize("ratio", [599.0, 599.999999, 600.0, 650.0, 720.0, 999.0, 1001.0])
def test_far_out_the_ends_meet(ratio: float) -> None:
    """tau^2 / proxy on both sides of where the tangent certificate's exponentials leave float64."""
    beta = math.sqrt(ratio / (2.0 * math.log(2**30)))
    found = sandwich(Point("any", length=2**30, beta=beta), "survivors")
    assert 0.0 < found.lower <= found.upper <= 2**30 * math.exp(-ratio / 2.0) * (1 + 1e-9)
    assert found.upper <= 4.0 * found.lower
