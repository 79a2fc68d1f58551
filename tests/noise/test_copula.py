"""Joint tails of the Gaussian copula."""

from __future__ import annotations

import mpmath
import pytest

from theory_lab.errors import InputError
from theory_lab.noise.copula import Dependence, joint_survival, latent_threshold


def reference(a: float, rho: float) -> float:
    """Independent of the code: the density integrated twice, 30 digits, by conditioning on one normal."""
    with mpmath.workdps(30):
        root = mpmath.sqrt(1 - mpmath.mpf(rho) ** 2)
        tail = lambda x: mpmath.erfc(x / mpmath.sqrt(2)) / 2  # noqa: E731  # short
        f = lambda z: mpmath.npdf(z) * tail((a - rho * z) / root)  # noqa: E731  # short
        # Split where the integrand can bend: the threshold, and where the other view's mean passes it.
        points = sorted({a, a + 1, a + 3, a + 8, max(a, a / rho if rho > 0 else a) + 20})
        return float(mpmath.quad(f, points))


@pytest.mark.parametrize("rho", [-0.9, -0.5, -0.01, 0.0752, 0.3, 0.5, 0.9, 0.99])
@pytest.mark.parametrize("a", [-1.0, 0.0, 0.5, 2.0, 6.0])
def test_joint_survival(a: float, rho: float) -> None:
    assert joint_survival(a, rho) == pytest.approx(reference(a, rho), rel=1e-8)


def test_independent_and_degenerate() -> None:
    p = 1e-9
    assert joint_survival(latent_threshold(p), 0.0) == pytest.approx(p * p, rel=1e-9)
    assert joint_survival(float("inf"), 0.5) == 0.0
    assert joint_survival(float("-inf"), 0.5) == 1.0


@pytest.mark.parametrize(
    ("rho", "key_rho", "field"),
    [(1, 0, "rho"), (-1, 0, "rho"), (0, 1, "key_rho"), (0, -0.1, "key_rho"), (float("nan"), 0, "rho")],
)
def test_bounds(rho: float, key_rho: float, field: str) -> None:
    with pytest.raises(InputError, match=f"^{field}:"):
        Dependence(rho, key_rho)
