"""alpha-entmax against 60-digit arithmetic, the `entmax` package, and its own limits."""

from __future__ import annotations

import math

import mpmath
import numpy as np
import pytest
import torch

from theory_lab.attention import entmax, entmax_threshold, get
from theory_lab.errors import InputError

Row = list[float]


def reference(row: Row, alpha: float, digits: int = 60) -> list[mpmath.mpf]:
    """Weights of one row, for alpha 1.5 and 2, by sorting in 60 digits, or in more."""
    with mpmath.workdps(digits):
        half = mpmath.mpf(alpha) - 1
        x = [mpmath.mpf(z) * half if z > -math.inf else None for z in row]
        ordered = sorted((v for v in x if v is not None), reverse=True)
        first, second = mpmath.mpf(0), mpmath.mpf(0)
        tau = mpmath.mpf(0)
        top = ordered[0]
        for k, v in enumerate(ordered, 1):
            d = v - top
            # v is in the support iff the sum of (x_j - v)^(1/half) over what precedes it is below one.
            s, q = first + d, second + d * d
            used = s - k * d if alpha == 2.0 else q - 2 * d * s + k * d * d
            if used >= 1:
                break
            first, second = s, q
            if alpha == 2.0:
                tau = (first - 1) / k
            else:
                mean = first / k
                tau = mean - mpmath.sqrt((1 - (second - k * mean * mean)) / k)
        power = 1 if alpha == 2.0 else 2
        return [mpmath.mpf(0) if v is None or v - top <= tau else (v - top - tau) ** power for v in x]


def ulps(got: list[float], want: list[mpmath.mpf]) -> float:
    worst = 0.0
    for g, w in zip(got, want, strict=True):
        if w == 0:
            worst = max(worst, 0.0 if g == 0 else math.inf)
        else:
            worst = max(worst, float(abs(mpmath.mpf(g) - w) / mpmath.mpf(float(np.spacing(float(w))))))
    return worst


def random_rows() -> list[Row]:
    g = np.random.default_rng(20)
    rows = []
    for index in range(1000):
        size = int(g.integers(1, 40))
        scale = 10.0 ** g.uniform(-3, 1.5)
        row = g.standard_normal(size) * scale
        if index % 5 == 0:
            row[1:][g.random(size - 1) < 0.3] = -math.inf
        rows.append(row.tolist())
    return rows


# Rows whose last key is out by less than float64 resolves, found by a search: sorting alone lets it in, for
# alpha = 2 (first three) and 1.5.
BARELY_OUT: list[Row] = [
    [0.7053103604005952, -0.2548122268140793, -0.27475093320674204],
    [0.0998017386614887, -0.822843272817882, -0.8615207670781967],
    [1.1796844503179793, 0.5012404572541473, -0.8121668219171055, 0.3404624537860633],
    [-0.05450987400870278, 1.849395603582776, -0.1483993714509586],
    [0.26688760075751217, 1.6840014857175947, -0.24846193164659214],
    [0.44428560417355095, 1.5505514878387032, -0.3041358895284148],
]


def adversarial_rows() -> list[Row]:
    g = np.random.default_rng(21)
    rows: list[Row] = []
    for k in range(40):
        # A key planted on the threshold, or one to three ulp beside it.
        base = g.standard_normal(int(g.integers(2, 12))).tolist()
        alpha = 2.0 if k % 2 else 1.5
        p = reference(base, alpha)
        top = max(base)
        with mpmath.workdps(60):
            lead = p[base.index(top)] ** (mpmath.mpf(alpha) - 1)
            edge = float((mpmath.mpf(top) * (mpmath.mpf(alpha) - 1) - lead) / (mpmath.mpf(alpha) - 1))
        for _ in range(k % 4):
            edge = math.nextafter(edge, math.inf if k % 8 < 4 else -math.inf)
        rows.append([*base, edge, edge])
    for k in range(20):
        rows.append([float(g.standard_normal())] * (1 + 7 * k))
    for k in range(20):
        rows.append((10.0 ** (k % 16) + g.standard_normal(12)).tolist())
    for k in range(20):
        rows.append((1000.0 * g.standard_normal(2 + k)).tolist())
    for k in range(20):
        # Neighbors one ulp apart.
        value, row = float(g.standard_normal()), []
        for _ in range(3 + k):
            row.append(value)
            value = math.nextafter(value, -math.inf)
        rows.append(row)
    for k in range(20):
        rows.append([*(g.standard_normal(5) * 10.0 ** (-20 * (k % 15))).tolist(), -1e300, -math.inf])
    rows += BARELY_OUT
    for k in range(14):
        # Gaps whose powers sum to 1 up to rounding: whether the last key is in is below float64's resolution.
        m = 3 + 2 * k
        rows.append([*[1.0 / m if k % 2 else 2.0 / math.sqrt(m)] * m, 0.0])
    for k in range(20):
        # Sums that meet the support condition with equality, or miss it by 1e-300.
        tiny = [0.0, 1e-300, -1e-300, 5e-324][k % 4]
        rows.append(
            [
                [0.0, tiny, -0.5],
                [0.0, -1.0 + tiny, -1.0],
                [tiny, 0.0, -0.5, -0.5],
                [0.0, -2.0, tiny, -2.0],
                [1.0, 1.0 + tiny, -1.0, 0.0],
            ][k // 4]
        )
    for k in range(20):
        rows.append([1e300 if k % 2 else -1e300, *(g.standard_normal(3) * 1e300 / 10.0 ** (15 * k)).tolist()])
    return rows


@pytest.mark.parametrize("alpha", [1.5, 2.0])
@pytest.mark.parametrize(("kind", "count"), [("random", 1000), ("adversarial", 200)])
def test_sorting_is_exact_to_two_ulp(alpha: float, kind: str, count: int) -> None:
    rows = random_rows() if kind == "random" else adversarial_rows()
    assert len(rows) == count
    # Rows of every length in one batch: the mask must not cost accuracy either.
    longest = max(len(row) for row in rows)
    batch = torch.tensor([row + [-math.inf] * (longest - len(row)) for row in rows], dtype=torch.float64)
    got = entmax(batch, alpha).tolist()
    # 1e-300 beside 0.5 needs more than 60 digits; a longer reference is a stricter one.
    digits = 60 if kind == "random" else 700
    errors = [ulps(g[: len(row)], reference(row, alpha, digits)) for g, row in zip(got, rows, strict=True)]
    worst = int(np.argmax(errors))
    assert errors[worst] <= 2.0, (errors[worst], rows[worst])


def test_the_ulp_gate_sees_plain_float64() -> None:
    """The same rows, solved in plain float64, miss the gate: the test above can fail."""
    rows = random_rows()[:100]
    errors = []
    for row in rows:
        z = np.sort(np.array([v for v in row if v > -math.inf]))[::-1]
        sums = np.cumsum(z)
        size = int((1 + np.arange(1, z.size + 1) * z > sums).sum())
        tau = (sums[size - 1] - 1) / size
        errors.append(ulps(np.maximum(np.array(row) - tau, 0).tolist(), reference(row, 2.0)))
    assert max(errors) > 2.0


def mp_general(row: Row, alpha: float) -> list[float]:
    """Any alpha > 1, by bisection in 60 digits on the distance of tau below the maximum."""
    with mpmath.workdps(60):
        eps = mpmath.mpf(alpha) - 1
        d = [eps * (mpmath.mpf(z) - mpmath.mpf(max(row))) for z in row]
        low, high = -mpmath.mpf(1), mpmath.mpf(0)
        for _ in range(190):
            tau = (low + high) / 2
            total = mpmath.fsum((v - tau) ** (1 / eps) for v in d if v > tau)
            low, high = (tau, high) if total >= 1 else (low, tau)
        return [float((v - low) ** (1 / eps)) if v > low else 0.0 for v in d]


@pytest.mark.parametrize("alpha", [1.0 + 1e-6, 1.05, 1.3, 1.9, 2.0 + 1e-9, 2.7, 4.0, 10.0])
def test_general_alpha_against_sixty_digits(alpha: float) -> None:
    g = np.random.default_rng(22)
    rows = [(g.standard_normal(7) * s).tolist() for s in (0.01, 0.3, 1.0, 30.0)]
    rows += [[0.2] * 7, [0.0, -1e-12, -1e-9, -1e-3, -0.1, -0.11, -5.0]]
    got = entmax(torch.tensor(rows, dtype=torch.float64), alpha)
    want = torch.tensor([mp_general(row, alpha) for row in rows], dtype=torch.float64)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=2e-15)


@pytest.mark.parametrize("alpha", [1.0, 1.2, 1.5, 1.77, 2.0, 3.0])
def test_agrees_with_the_entmax_package(alpha: float) -> None:
    package = pytest.importorskip("entmax")
    z = 2.0 * torch.randn(50, 30, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    exact = {
        1.0: lambda: torch.softmax(z, -1),
        1.5: lambda: package.entmax15(z, dim=-1),
        2.0: lambda: package.sparsemax(z, dim=-1),
    }
    want = exact[alpha]() if alpha in exact else package.entmax_bisect(z, alpha=alpha, dim=-1, n_iter=80)
    torch.testing.assert_close(entmax(z, alpha), want, rtol=1e-9, atol=1e-12)


def test_gradient_agrees_with_the_entmax_package() -> None:
    package = pytest.importorskip("entmax")
    z = torch.randn(20, 12, generator=torch.Generator().manual_seed(2), dtype=torch.float64, requires_grad=True)
    alpha = torch.full((20, 1), 1.6, dtype=torch.float64, requires_grad=True)
    seed = torch.randn(20, 12, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    ours = torch.autograd.grad((entmax(z, alpha) * seed).sum(), (z, alpha))
    theirs = torch.autograd.grad((package.entmax_bisect(z, alpha=alpha, dim=-1, n_iter=80) * seed).sum(), (z, alpha))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("alpha", [1.0 + 1e-6, 1.2, 1.5, 1.9, 2.0, 2.7, 4.0])
def test_gradcheck_to_scores_and_alpha(alpha: float) -> None:
    z = torch.randn(3, 9, generator=torch.Generator().manual_seed(0), dtype=torch.float64, requires_grad=True)
    a = torch.tensor(alpha, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(entmax, (z, a), eps=5e-7, atol=1e-6)


def test_derivative_to_alpha_at_and_around_one() -> None:
    """At alpha = 1 there is only a right side; the derivative there is the limit of those to its right."""
    z = torch.randn(4, 9, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    seed = torch.arange(9, dtype=torch.float64)

    def slope(value: float) -> float:
        a = torch.tensor(value, dtype=torch.float64, requires_grad=True)
        return float(torch.autograd.grad((entmax(z, a) * seed).sum(), a)[0])

    step = 1e-4
    ahead = [float((entmax(z, 1.0 + k * step) * seed).sum()) for k in range(3)]
    assert slope(1.0) == pytest.approx((4 * ahead[1] - 3 * ahead[0] - ahead[2]) / (2 * step), rel=1e-5)
    assert slope(1.0 + 1e-12) == pytest.approx(slope(1.0), rel=1e-9)
    assert slope(1.0 + 1e-6) == pytest.approx(slope(1.0), rel=1e-4)


def test_alpha_tends_to_softmax() -> None:
    z = torch.randn(10, 40, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    soft = torch.softmax(z, -1)
    for gap in (1e-6, 1e-9, 1e-12, 1e-15):
        p = entmax(z, 1.0 + gap)
        assert (p - soft).abs().max() < 10 * gap + 1e-15
        assert (p.sum(-1) - 1).abs().max() < 1e-15


def test_alpha_ten_in_float32() -> None:
    g = torch.Generator().manual_seed(0)
    for scale in (1e-6, 1.0, 1000.0):
        z = (scale * torch.randn(50, 100, generator=g)).requires_grad_()
        p = entmax(z, 10.0)
        assert p.dtype == torch.float32
        torch.testing.assert_close(p, entmax(z.double(), 10.0).float(), rtol=1e-6, atol=0)
        assert (p.sum(-1) - 1).abs().max() < 1e-6
        (gradient,) = torch.autograd.grad((p * torch.arange(100)).sum(), z)
        assert torch.isfinite(gradient).all()


def test_alpha_may_differ_by_row() -> None:
    z = torch.randn(5, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    values = [1.0, 1.3, 2.0, 3.0, 10.0]
    mixed = entmax(z, torch.tensor(values, dtype=torch.float64)[:, None])
    for row, alpha in enumerate(values):
        torch.testing.assert_close(mixed[row], entmax(z[row], alpha), rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("alpha", [1.2, 1.5, 2.0, 3.0])
def test_appending_below_the_threshold_changes_nothing(alpha: float) -> None:
    """ASEntmax's non-vanishing property: to one ulp where the solver sorts, to rounding elsewhere."""
    z = torch.randn(200, 12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    tau = entmax_threshold(z, alpha) / (alpha - 1)
    extra = tau - torch.rand(200, 9, generator=torch.Generator().manual_seed(1), dtype=torch.float64) - 1e-12
    before, after = entmax(z, alpha), entmax(torch.cat([z, extra], -1), alpha)
    assert (after[:, 12:] == 0).all()
    if alpha in (1.5, 2.0):
        spacing = torch.tensor(np.spacing(before.numpy()))
        assert ((after[:, :12] - before).abs() <= spacing).all()
    else:
        torch.testing.assert_close(after[:, :12], before, rtol=1e-13, atol=1e-15)


def test_threshold_separates_the_support() -> None:
    z = torch.randn(100, 12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for alpha in (1.3, 1.5, 2.0, 4.0):
        tau = entmax_threshold(z, alpha)
        p = entmax(z, alpha)
        assert torch.equal(p > 0, (alpha - 1) * z > tau + 1e-14)
    assert torch.isnan(entmax_threshold(torch.full((1, 3), -math.inf), 1.5)).all()


def test_learnable_alpha_below_one_acts_as_one() -> None:
    m = get("entmax", alpha=1.2, learnable=True)
    with torch.no_grad():
        m.alpha_.fill_(0.7)
    z = torch.randn(1, 1, 3, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    torch.testing.assert_close(m.weights(z), torch.softmax(z, -1))


@pytest.mark.parametrize(
    ("scores", "alpha", "field"),
    [
        (torch.zeros(3), 0.5, "alpha"),
        (torch.zeros(3), math.inf, "alpha"),
        (torch.zeros(3), math.nan, "alpha"),
        (torch.zeros(2, 3), torch.ones(3, 1) + 1, "alpha"),
        (torch.zeros(2, 0), 1.5, "scores"),
        (torch.tensor([math.nan, 0.0]), 1.5, "scores"),
        (torch.tensor([math.inf, 0.0]), 1.5, "scores"),
        (torch.zeros(3, dtype=torch.long), 1.5, "scores"),
        ([0.0, 1.0], 1.5, "scores"),
    ],
)
def test_bad_input(scores: torch.Tensor, alpha: float, field: str) -> None:
    with pytest.raises(InputError) as caught:
        entmax(scores, alpha)
    assert caught.value.field == field
