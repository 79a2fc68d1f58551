"""The claims' bounds and exact values, against the project's checked tables."""

from __future__ import annotations

import math

import pytest

from theory_lab.claims import CLAIMS, Point, get_claim
from theory_lab.errors import InputError


def four_digits(value: float, printed: float) -> bool:
    """Whether ``value`` rounds to ``printed``, given with up to four significant digits."""
    digits = f"{printed:.10g}".replace(".", "").lstrip("0")
    step = 10.0 ** (math.floor(math.log10(abs(printed))) - max(len(digits), 1) + 1)
    return abs(value - printed) <= 0.5000001 * step


SURVIVORS = [
    ("gaussian", 2, 0.2390), ("gaussian", 101, 0.1202), ("gaussian", 10**6 + 1, 0.0734),
    ("spherical", 2, 0.2420), ("spherical", 101, 0.0913), ("spherical", 10**6 + 1, 0.0014),
    ("two-point", 2, 0.82843), ("two-point", 100, 0.9906), ("two-point", 10**6, 0.999999),
]  # fmt: skip

# E[C_i] n for correlated Gaussian views. At rho = 0.3, n = 10^6 a table in circulation has 5.43; 40-digit quadrature
# gives 5.42487.
CONSENSUS = {
    0.0: [0.010, 0.008, 0.006, 0.005, 0.004],
    0.0752: [0.031, 0.033, 0.037, 0.043, 0.062],
    0.1231: [0.058, 0.074, 0.100, 0.140, 0.293],
    0.3: [0.412, 0.931, 2.21, 5.42, 34.9],
    0.5: [2.36, 8.62, 33.0, 131, 2176],
}
LENGTHS = [10**3, 10**4, 10**5, 10**6, 10**8]


@pytest.mark.parametrize(("noise", "length", "value"), SURVIVORS)
def test_exact_survivors(noise: str, length: int, value: float) -> None:
    assert four_digits(get_claim("tda-4.3").exact(Point(noise, length)), value)


@pytest.mark.parametrize("rho", CONSENSUS)
@pytest.mark.parametrize("index", range(5))
def test_exact_consensus(rho: float, index: int) -> None:
    n, printed = LENGTHS[index], CONSENSUS[rho][index]
    value = get_claim("tda-4.6").exact(Point("gaussian", n, rho=rho)) * n
    # The table prints 0.010 for 0.01017: three decimals below 1.
    assert abs(value - printed) <= 0.000501 if printed < 1 else four_digits(value, printed)


@pytest.mark.parametrize("claim", CLAIMS.values(), ids=list(CLAIMS))
@pytest.mark.parametrize(
    "noise", ["gaussian", "spherical", "uniform", "beta(2)", "truncated-normal(2)", "rademacher", "two-point"]
)
def test_exact_is_within_bound_where_assumptions_hold(claim, noise: str) -> None:
    for n in (1, 2, 3, 10, 10**4, 10**9):
        for kappa in (0.1, 1.0, 7.5):
            for beta in (1.0, 1.3):
                point = Point(noise, n, kappa=kappa, beta=beta)
                assert not claim.unmet(point)
                assert claim.exact(point) <= claim.bound(point) * (1 + 1e-12), point


def test_general_forms_reduce_to_the_theorems() -> None:
    for n in (2, 1000, 10**9):
        point = Point("gaussian", n, kappa=0.7)
        assert get_claim("tda-4.3-general").bound(point) == pytest.approx(0.7)
        assert get_claim("tda-4.6-correlated").bound(point) == pytest.approx(0.49 / n)


def test_general_forms_hold_where_the_theorems_fail() -> None:
    weak = Point("gaussian", 10**4, beta=0.8)
    assert get_claim("tda-4.3").exact(weak) > get_claim("tda-4.3").bound(weak)
    assert get_claim("tda-4.3-general").exact(weak) <= get_claim("tda-4.3-general").bound(weak)
    assert get_claim("tda-4.3").unmet(weak) == ("beta < sigma",)
    joined = Point("gaussian", 10**4, rho=0.5)
    assert get_claim("tda-4.6").exact(joined) > get_claim("tda-4.6").bound(joined)
    for rho in (-0.9, -0.3, 0.1, 0.5, 0.95):
        for n in (2, 100, 10**4, 10**8):
            point = Point("gaussian", n, rho=rho)
            assert get_claim("tda-4.6-correlated").exact(point) <= get_claim("tda-4.6-correlated").bound(point)
    assert "views are correlated" in get_claim("tda-4.6").unmet(joined)


def test_threshold_is_clamped() -> None:
    """For n <= kappa the printed formula is imaginary; tau = 0 there."""
    assert Point(length=3, kappa=5).tau == 0.0
    assert Point(length=5, kappa=5).tau == 0.0
    assert Point(length=6, kappa=5).tau > 0.0
    assert Point(length=1000, beta=0.0).tau == 0.0
    assert Point(length=101).tau == pytest.approx(math.sqrt(2 * math.log(101) / 64))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("length", 0),
        ("length", 2**60),
        ("length", 1.5),
        ("head_dim", 0),
        ("kappa", 0.0),
        ("kappa", -1.0),
        ("kappa", math.nan),
        ("kappa", math.inf),
        ("kappa", 1e-101),
        ("kappa", 1e101),
        ("sigma", 0.0),
        ("sigma", math.inf),
        ("beta", -0.1),
        ("beta", math.nan),
        ("beta", 1e51),
        ("rho", 1.0),
        ("rho", -1.0),
        ("rho", math.nan),
        ("key_rho", 1.0),
        ("key_rho", -0.1),
        ("noise", "gausian"),
    ],
)
def test_bad_points(field: str, value: object) -> None:
    with pytest.raises(InputError, match=f"^{field}: "):
        Point(**{field: value})


def test_unknown_claim() -> None:
    with pytest.raises(InputError, match=r"did you mean 'tda-4\.3'"):
        get_claim("tda-43")
