"""One protocol test for every noise family, and what each promises."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import integrate, optimize, stats

from theory_lab.errors import InputError
from theory_lab.noise import Scale, default_families, get_family, list_families
from theory_lab.noise.discrete import AtomLaw, extremal_probability, kearns_saul_proxy
from theory_lab.streams import Stream, cell_digest

SPECS = [*default_families(), "beta(0.5)", "beta(5)", "truncated-normal(0.05)", "truncated-normal(4)", "student-t(2.5)",
         "student-t(1.5)"]  # fmt: skip
D = 64
SCALE = Scale(1.7 / D, D, 0.31)


def law_of(spec: str):
    return get_family(spec).scaled(SCALE)


@pytest.mark.parametrize("spec", SPECS)
def test_name_round_trips(spec: str) -> None:
    family = get_family(spec)
    assert get_family(family.name).name == family.name
    assert family.identity == get_family(family.name).identity


@pytest.mark.parametrize("spec", SPECS)
def test_tail_is_a_tail(spec: str) -> None:
    law = law_of(spec)
    reach = law.upper if math.isfinite(law.upper) else 10.0
    tails = law.sf(np.linspace(-2 * reach, 2 * reach, 801))
    assert np.all(np.diff(tails) <= 0)
    assert tails[0] == pytest.approx(1.0, abs=1e-2 if not get_family(spec).sub_gaussian else 0)
    assert law.sf(law.upper) == 0.0


@pytest.mark.parametrize("spec", SPECS)
def test_quantile_inverts_tail(spec: str) -> None:
    law = law_of(spec)
    # The arcsine density is infinite at its ends, so that one ulp of a score there is worth 1e-8 of tail.
    smallest = 1e-6 if spec == "beta(0.5)" else 1e-15
    u = np.concatenate([np.geomspace(smallest, 0.5, 40), 1 - np.geomspace(1e-6, 0.49, 20)])
    x = law.isf(u)
    # Next to the end of a bounded support a score's own rounding moves the tail by about 1e-16.
    rounding = 1e-11 if spec == "beta(0.5)" else 1e-15
    assert np.all(law.sf(x) <= u * (1 + 1e-9) + rounding)
    assert np.all(law.sf(np.nextafter(x, -np.inf) - 1e-9 * np.abs(x)) >= u * (1 - 1e-6) - rounding)


@pytest.mark.parametrize("spec", SPECS)
def test_mean_zero_and_variance(spec: str) -> None:
    law = law_of(spec)
    if isinstance(law, AtomLaw):
        assert law.probabilities @ law.atoms == pytest.approx(0.0, abs=1e-12)
        assert law.variance == pytest.approx(law.probabilities @ law.atoms**2, rel=1e-9)
        return
    # Symmetry gives mean 0; E X^2 = 4 int_0^inf t P(X > t) dt.
    t = np.array([0.01, 0.1, 0.3])
    np.testing.assert_allclose(law.sf(-t), 1 - law.sf(t), rtol=1e-12)
    if math.isinf(law.variance):
        return
    upper = law.upper if math.isfinite(law.upper) else np.inf
    value, _ = integrate.quad(lambda s: 4 * s * law.tail(s), 0, upper, limit=400)
    assert value == pytest.approx(law.variance, rel=2e-5)


@pytest.mark.parametrize("spec", [s for s in SPECS if get_family(s).sub_gaussian])
def test_proxy_is_as_requested_and_optimal(spec: str) -> None:
    """The proxy is the supremum of 2 log E exp(tX) / t^2, found numerically."""
    law = law_of(spec)
    assert law.proxy == pytest.approx(SCALE.proxy, rel=1e-12)
    assert law.variance <= law.proxy * (1 + 1e-12)

    def curve(t: float) -> float:
        if isinstance(law, AtomLaw):
            return 2 * math.log(law.probabilities @ np.exp(t * law.atoms)) / t**2
        # E exp(tX) = 1 + 2 int_0^inf t sinh(ts) P(X > s) ds for a symmetric law.
        reach = min(law.upper, 14 * math.sqrt(law.variance) + abs(t) * law.variance)
        value, _ = integrate.quad(lambda s: 2 * t * math.sinh(t * s) * law.tail(s), 0, reach, limit=400, epsrel=1e-11)
        return 2 * math.log1p(value) / t**2

    sd = math.sqrt(SCALE.proxy)
    values = [curve(t / sd) for t in (0.1, 0.3, 1, 2, 3, 4, 5)] + [curve(-t / sd) for t in (0.3, 1, 3)]
    assert max(values) <= SCALE.proxy * (1 + 1e-7)
    best = optimize.minimize_scalar(lambda t: -curve(t), bounds=(0.02 / sd, 8 / sd), method="bounded")
    assert max(-best.fun, law.variance) == pytest.approx(SCALE.proxy, rel=1e-4)


@pytest.mark.parametrize("spec", ["student-t(3)", "laplace"])
def test_controls_have_no_proxy(spec: str) -> None:
    law = law_of(spec)
    assert law.proxy is None
    assert law.variance == pytest.approx(SCALE.proxy)
    # log P(X > t) falls slower than any -t^2 / (2v): the implied proxy grows without end.
    t = np.array([2.0, 4.0, 8.0, 16.0]) * math.sqrt(SCALE.proxy)
    implied = -(t**2) / (2 * np.log(law.sf(t)))
    assert np.all(np.diff(implied) > 0)


@pytest.mark.parametrize("spec", [s for s in SPECS if not law_of(s).discrete])
def test_density_is_the_derivative(spec: str) -> None:
    law = law_of(spec)
    reach = min(law.upper * 0.9, 3 * math.sqrt(SCALE.proxy))
    x = np.linspace(0.02, reach, 9)
    h = 1e-6
    slope = (law.sf(x - h) - law.sf(x + h)) / (2 * h)
    np.testing.assert_allclose(np.exp(law.log_pdf(x)), slope, rtol=1e-5)
    rate = -(law.log_pdf(x + h) - law.log_pdf(x - h)) / (2 * h)
    np.testing.assert_allclose([law.tail_rate(float(t)) for t in x], rate, rtol=1e-4, atol=1e-5)
    if math.isfinite(law.upper):
        assert np.all(np.isneginf(law.log_pdf(np.array([law.upper * 1.01, -law.upper * 1.01]))))


@pytest.mark.parametrize("spec", SPECS)
def test_draws_follow_the_law(spec: str) -> None:
    law = law_of(spec)
    x = law.draw(Stream(cell_digest({"test": spec}, 11), 0, 0), 40_000)
    # A familywise error of 1e-6 over all families: no lucky seed is needed.
    level = 1e-6 / len(SPECS)
    if isinstance(law, AtomLaw):
        hits = int((x == law.atoms[-1]).sum())
        assert stats.binomtest(hits, x.size, float(law.probabilities[-1])).pvalue > level
    else:
        assert stats.kstest(x, lambda t: 1 - law.sf(t)).pvalue > level


def test_names_keep_every_digit() -> None:
    assert get_family("beta(2.0000001)").name == "beta(2.0000001)"
    assert get_family("student-t(3.1234567)").nu == 3.1234567
    assert get_family("student-t(nu=4)").name == "student-t(4)"


def test_kearns_saul() -> None:
    """Proxy of the two-point law against a numerical maximum, on both sides of 1/2 and at it."""
    for p in (1e-6, 0.01, 0.3, 0.5, 0.7, 0.99):
        low, high = -2.0 * p, 2.0 * (1 - p)

        def curve(t: float, p=p, low=low, high=high) -> float:
            return 2 * np.logaddexp(math.log(p) + t * high, math.log1p(-p) + t * low) / t**2

        grid = np.concatenate([np.linspace(-30, -0.01, 20_000), np.linspace(0.01, 30, 20_000)])
        best = max(curve(t) for t in grid)
        assert kearns_saul_proxy(p, 2.0) == pytest.approx(best, rel=1e-4)


@pytest.mark.parametrize("ratio", [1e-6, 0.1, 0.999999, 1.0, 1.000001, 1.386, 9.2, 27.6, 55.0])
def test_extremal_probability_has_the_proxy(ratio: float) -> None:
    p = extremal_probability(math.sqrt(ratio), 1.0)
    assert kearns_saul_proxy(p, math.sqrt(ratio) / (1 - p)) == pytest.approx(1.0, rel=1e-6)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("gausian", "did you mean 'gaussian'"),
        ("gaussian(2)", "does not take 1 parameter"),
        ("student-t(x)", "'x' is not a number"),
        ("student-t(1)", "above 1"),
        ("student-t(nan)", "up to 1e6"),
        ("student-t(1e308)", "up to 1e6"),
        ("beta(0)", "0.001 to 1e6"),
        ("beta(1e300)", "0.001 to 1e6"),
        ("beta(size=3)", "no parameter 'size'"),
        ("truncated-normal(-1)", "0.001 to 30"),
        ("", "known:"),
        ("file:", "suffix"),
        ("file:scores.npy,cooked", "one of .npy"),
    ],
)
def test_bad_names(spec: str, message: str) -> None:
    with pytest.raises(InputError, match="noise") as caught:
        get_family(spec)
    assert message in str(caught.value)


def test_spherical_needs_two_dimensions() -> None:
    with pytest.raises(InputError, match="head_dim: 1;"):
        get_family("spherical").check_head_dim(1)


def test_every_family_is_listed() -> None:
    assert [f.name for f in list_families()][: len(default_families())] == default_families()
    assert all(f.summary for f in list_families())


def test_entry_point_adds_a_family(monkeypatch: pytest.MonkeyPatch) -> None:
    from importlib import metadata

    import theory_lab.noise as noise
    from theory_lab.noise.continuous import Uniform

    class Entry:
        name = "mine"

        @staticmethod
        def load():
            return Uniform

    monkeypatch.setattr(metadata, "entry_points", lambda group: [Entry] if group == "theory_lab.noise" else [])
    noise._registry.cache_clear()
    noise.get_family.cache_clear()
    try:
        assert isinstance(get_family("mine"), Uniform)
    finally:
        noise._registry.cache_clear()
        noise.get_family.cache_clear()
