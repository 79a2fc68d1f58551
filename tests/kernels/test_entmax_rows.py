"""Row entmax: exact solvers, the general one and the kernels against each other, and every gradient."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from theory_kernels import entmax
from theory_kernels.entmax_rows import entmax15, entmax_bisect, sparsemax, sparsemax_bisect
from theory_kernels.entmax_rows.operator import entmax_backward, entmax_forward

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
BOTH = pytest.mark.parametrize("implementation", ["chunked", "triton"])


def draw(*shape: int, scale: float = 1.0, dtype: torch.dtype = F32, seed: int = 0) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    return (scale * torch.randn(shape, generator=g)).to(dtype)


def run(
    x: torch.Tensor, alpha, grad: torch.Tensor, implementation: str, method: str = "auto"
) -> dict[str, torch.Tensor]:
    leaf = x.detach().requires_grad_()
    a = alpha.detach().to(F64 if x.dtype == F64 else F32).requires_grad_() if isinstance(alpha, torch.Tensor) else alpha
    p = entmax(leaf, a, implementation=implementation, method=method)
    wanted = [leaf, a] if isinstance(a, torch.Tensor) else [leaf]
    grads = torch.autograd.grad(p, wanted, grad.to(p.dtype))
    return {"p": p.detach(), **dict(zip(("x", "alpha"), grads, strict=False))}


def assert_within_budget(
    x: torch.Tensor, alpha, implementation: str, device: torch.device, method: str = "auto"
) -> None:
    """Error against float64 <= 2 (error of the reference in the same precision + rounding band)."""
    x = x.to(device)
    alpha = alpha.to(device) if isinstance(alpha, torch.Tensor) else alpha
    grad = draw(*x.shape, dtype=x.dtype, seed=7).to(device)
    exact = run(x.double(), alpha.double() if isinstance(alpha, torch.Tensor) else alpha, grad, "reference", "auto")
    eager = run(x, alpha, grad, "reference")
    got = run(x, alpha, grad, implementation, method)
    # log p carries the rounding of log n and of the scores; 1 / eps of it goes through the power, and float32's own
    # functions have one or two units in the last place.
    eps = alpha.double().reshape(-1, 1) - 1.0 if isinstance(alpha, torch.Tensor) else torch.tensor(alpha - 1.0)
    growth = (1.0 / eps.clamp(min=1.0 / (1.0 + math.log(max(2, x.shape[-1]))))).max().item()
    band = torch.finfo(x.dtype).eps + 8.0 * torch.finfo(F32).eps * (1.0 + growth)
    size = grad.double().abs().amax()
    for name, want in exact.items():
        have = got[name].double()
        assert have.shape == want.shape
        assert bool(torch.isfinite(have).all()), name
        scale = want.norm() if name == "p" else (exact["p"] ** (1.0 if name == "alpha" else 0.5)).norm() * size
        error, allowed = (have - want).norm(), 2 * ((eager[name].double() - want).norm() + band * scale)
        assert float(error) <= float(allowed), f"{name}: {float(error):.2e} > {float(allowed):.2e}"


SIZES = [1, 63, 129, 1025]


@BOTH
@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("alpha", [1.5, 2.0, 1.2])
def test_within_budget(alpha: float, n: int, implementation: str, device: torch.device, triton: str, poisoned) -> None:
    assert_within_budget(draw(2 if n < 600 else 1, n), alpha, implementation, device)


@BOTH
@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
@pytest.mark.parametrize("alpha", [1.7])
def test_half_precision(alpha: float, dtype: torch.dtype, implementation: str, device, triton: str, poisoned) -> None:
    assert_within_budget(draw(2, 129, scale=3.0, dtype=dtype), alpha, implementation, device)


@BOTH
@pytest.mark.parametrize("n", [63, 600])
def test_alpha_by_row_with_its_gradient(
    n: int, implementation: str, device: torch.device, triton: str, poisoned
) -> None:
    alpha = torch.tensor([1.0 + 1e-4, 1.5, 2.0])
    assert_within_budget(draw(3, n), alpha[:, None], implementation, device)
    if n < 600:
        assert_within_budget(draw(2, n), alpha[1], implementation, device)


@BOTH
@pytest.mark.parametrize("alpha", [1.5, 2.0, 1.3])
def test_flat_rows_keep_everything(alpha: float, implementation: str, device, triton: str, poisoned) -> None:
    """No room to keep the scores of such a part apart: the row is read pass by pass. One row is flat, one is not."""
    x = draw(2, 608)
    x[0] *= 1e-5
    assert_within_budget(x, alpha, implementation, device)
    assert int((entmax(x.to(device), alpha, implementation=implementation)[0] > 0).sum()) == 608


@BOTH
def test_a_flat_row_behind_masked_scores(implementation: str, device: torch.device, triton: str, poisoned) -> None:
    x = draw(1, 1104, scale=1e-5) - 5.0
    x[:, :512] = -math.inf
    for alpha in (1.5, 1.3):
        p = entmax(x.to(device), alpha, implementation=implementation).cpu()
        assert not p[:, :512].any()
        assert float((p[:, 512:] * 592 - 1.0).abs().max()) <= 0.02


def exact_sparsemax(row: list[float]) -> list[Fraction]:
    z = [Fraction(value) for value in row]
    ordered = sorted(z, reverse=True)
    total, tau = Fraction(0), Fraction(0)
    for k, value in enumerate(ordered, 1):
        total += value
        if value > (total - 1) / k:
            tau = (total - 1) / k
    return [max(value - tau, Fraction(0)) for value in z]


@pytest.mark.parametrize("implementation", ["reference", "chunked", "triton"])
@pytest.mark.parametrize("scale", [1e-3, 10.0])
def test_sparsemax_is_the_exact_rational_one(scale: float, implementation: str, device, triton: str) -> None:
    x = draw(3, 40, scale=scale)
    got = entmax(x.to(device), 2.0, implementation=implementation).cpu()
    for row, p in zip(x.tolist(), got.tolist(), strict=True):
        want = exact_sparsemax(row)
        # x - max, its distance from tau and the step to it: three roundings of numbers of at most 1 (+ |x - max| < 1).
        assert max(abs(Fraction(a) - b) for a, b in zip(p, want, strict=True)) <= Fraction(4 * 2**-23)


@pytest.mark.parametrize("dtype", [F32, F64], ids=str)
@pytest.mark.parametrize("alpha", [1.5, 2.0])
@pytest.mark.parametrize("implementation", ["reference", "chunked"])
def test_exact_and_general_solvers_agree(alpha: float, implementation: str, dtype: torch.dtype) -> None:
    for scale in (1e-3, 1.0, 30.0):
        x = draw(20, 300, scale=scale, dtype=dtype)
        exact, general = (entmax(x, alpha, method=m, implementation=implementation) for m in ("exact", "newton"))
        # cumsum's rounding grows like n in the worst case and meets tau with the square root of the support.
        assert float((exact - general).abs().max()) <= 64 * torch.finfo(dtype).eps


@BOTH
@pytest.mark.parametrize(("n", "alpha"), [(33, 1.0), (33, 1.5), (33, 10.0), (600, 1.2), (1025, 2.0)])
def test_minus_infinity(n: int, alpha: float, implementation: str, device: torch.device, triton: str, poisoned) -> None:
    x = draw(4, n)
    x[:, 3] = -math.inf
    x[1, ::2] = -math.inf
    x[2] = -math.inf
    x[3, 1:] = -math.inf
    leaf = x.clone().to(device).requires_grad_()
    p = entmax(leaf, alpha, implementation=implementation)
    (dx,) = torch.autograd.grad(p.square().sum(), leaf)
    p, leaf = p.detach(), leaf.detach()
    assert not p[leaf == -math.inf].any()
    assert not dx[leaf == -math.inf].any()
    assert not p[2].any()
    assert p[3, 0] == 1.0
    assert bool(torch.isfinite(dx).all())
    cut = x[1, 1::2][x[1, 1::2] > -math.inf].to(device)
    alone = entmax(cut[None], alpha, implementation="reference")[0]
    assert float((p[1][x[1] > -math.inf] - alone).abs().max()) <= 1e-6


@BOTH
def test_nan_and_infinity_stay_in_their_row(implementation: str, device: torch.device, triton: str) -> None:
    for n, alphas in ((20, (1.5, 1.3)), (600, (1.5, 1.3)), (1100, (2.0,))):
        x = draw(3, n)
        x[0, 5], x[1, n - 7] = math.nan, math.inf
        for alpha in alphas:
            p = entmax(x.to(device), alpha, implementation=implementation)
            assert bool(torch.isnan(p[:2]).all())
            assert float(p[2].sum()) == pytest.approx(1.0, abs=1e-6)


@BOTH
def test_alpha_just_above_one_is_softmax(implementation: str, device: torch.device, triton: str) -> None:
    x = draw(2, 257, scale=4.0).to(device)
    soft = torch.softmax(x.double(), -1)
    for alpha, allowed in ((1.0, 4e-7), (1.0 + 1e-6, 4e-4)):
        # log p differs by eps / 2 (x - max)^2 to first order, at most 1e-6 / 2 * 28^2.
        p = entmax(x, alpha, implementation=implementation).double()
        assert float((p - soft).abs().max()) <= allowed
    # A number that float32 holds as 1 + eps: the general solver at its smallest eps.
    p = entmax(x, 1.0 + 2**-23, implementation=implementation).double()
    assert float((p - soft).abs().max()) <= 1e-4


@BOTH
@pytest.mark.parametrize("alpha", [1.5, 10.0])
def test_peaked_rows_sum_to_one_by_themselves(alpha: float, implementation: str, device, triton: str) -> None:
    for scale in (1.0, 1000.0):
        p = entmax(draw(4, 200, scale=scale).to(device), alpha, implementation=implementation).double()
        # A threshold off by half a unit of float32 moves p = u^(1 / (alpha - 1)) by dp / du of that: steep near 0.
        steep = torch.where(p > 0, p.clamp_min(1e-30) ** (2.0 - alpha) / (alpha - 1.0), 0.0)
        assert bool(((p.sum(-1) - 1.0).abs() <= 5e-7 + 2.0**-24 * steep.sum(-1)).all())


@BOTH
@pytest.mark.parametrize("scale", [1e-6, 1.0])
def test_alpha_of_ten_is_monotone(scale: float, implementation: str, device: torch.device, triton: str) -> None:
    x = draw(2, 200, scale=scale).sort(-1).values.to(device)
    p = entmax(x, 10.0, implementation=implementation).double()
    assert bool((p.diff(dim=-1) >= 0).all())
    assert float((p.sum(-1) - 1.0).abs().max()) <= 1e-6


@BOTH
def test_tied_scores_share_alike_at_alpha_of_ten(implementation: str, device: torch.device, triton: str) -> None:
    p = entmax(torch.zeros(1, 600, device=device), 10.0, implementation=implementation)
    assert float((p - 1 / 600).abs().max()) <= 1e-8


@BOTH
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_any_dimension_and_strides(dim: int, implementation: str, device: torch.device, triton: str) -> None:
    x = draw(3, 8, 5).to(device)
    want = entmax(x.movedim(dim, -1).contiguous(), 1.5, implementation="reference").movedim(-1, dim)
    for y in (x, x.transpose(0, 2).contiguous().transpose(0, 2), x.repeat_interleave(2, 1)[:, ::2]):
        got = entmax(y, 1.5, dim, implementation=implementation)
        assert got.shape == x.shape
        assert float((got - want).abs().max()) <= 1e-6
    alpha = torch.full([1 if i == dim % 3 else s for i, s in enumerate(x.shape)], 1.5, device=device)
    got = entmax(x, alpha, dim, implementation=implementation)
    assert float((got - want).abs().max()) <= 1e-6


@pytest.mark.parametrize("alpha", [1.05, 1.5, 1.8])
def test_gradcheck(alpha: float) -> None:
    x = draw(3, 9, scale=2.0, dtype=F64).requires_grad_()
    a = torch.full((3, 1), alpha, dtype=F64, requires_grad=True)
    for implementation in ("reference", "chunked"):
        torch.autograd.gradcheck(lambda x, a, i=implementation: entmax(x, a, implementation=i), (x, a))
    for number in (1.0, 1.5, 2.0):
        torch.autograd.gradcheck(lambda x, n=number: entmax(x, n), (x,))


def test_stands_in_for_the_entmax_package(device: torch.device) -> None:
    package = pytest.importorskip("entmax")
    x = draw(4, 6, 30, scale=2.0).to(device)
    for dim in (-1, 1):
        pairs = [
            (sparsemax(x, dim), package.sparsemax(x, dim)),
            (sparsemax(x, dim=dim, k=5), package.sparsemax(x, dim=dim, k=5)),
            (entmax15(x, dim=dim, k=5), package.entmax15(x, dim=dim, k=5)),
            (sparsemax_bisect(x, dim, 30), package.sparsemax_bisect(x, dim, 30)),
            (entmax_bisect(x, 1.3, dim, n_iter=60), package.entmax_bisect(x, 1.3, dim, n_iter=60)),
            (entmax_bisect(x, alpha=1.7, dim=dim, ensure_sum_one=False), package.entmax_bisect(x, alpha=1.7, dim=dim)),
        ]
        for ours, theirs in pairs:
            assert float((ours - theirs).abs().max()) <= 2e-6
    leaves = [torch.full((4, 6, 1), 1.3, device=device, dtype=F64, requires_grad=True) for _ in range(2)]
    weight = draw(4, 6, 30, dtype=F64, seed=1).to(device)
    for leaf, function in zip(leaves, (entmax_bisect, package.entmax_bisect), strict=True):
        (function(x.double(), leaf) * weight).sum().backward()
    assert float((leaves[0].grad - leaves[1].grad).abs().max()) <= 1e-7


def test_opcheck(device: torch.device) -> None:
    x = draw(4, 12).to(device).requires_grad_()
    alpha = torch.tensor([1.3], device=device, requires_grad=True)
    torch.library.opcheck(entmax_forward, (x, alpha, 0, 1.0, 2.0, "chunked"))
    p = torch.rand(4, 12, device=device)
    torch.library.opcheck(entmax_backward, (p, p, alpha.detach(), 0, True, "chunked"))


def test_two_runs_are_bitwise_equal(device: torch.device, triton: str) -> None:
    x, grad = draw(1, 600).to(device), draw(1, 600, seed=1).to(device)
    alpha = torch.tensor([1.3], device=device)
    first, second = (run(x, alpha, grad, "triton") for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0,)])
def test_nothing_to_do(shape: tuple[int, ...], device: torch.device) -> None:
    x = torch.empty(shape, device=device, requires_grad=True)
    assert entmax(x, 1.5).shape == shape
    assert entmax_bisect(x, 1.5).shape == shape


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"x": [1.0]}, TypeError, "x must be a tensor"),
        ({"x": torch.ones(3, dtype=torch.int64)}, TypeError, "x must be float32"),
        ({"x": torch.tensor(1.0)}, ValueError, "at least one dimension"),
        ({"alpha": 0.9}, ValueError, "alpha must be finite and >= 1, got 0.9"),
        ({"alpha": math.nan}, ValueError, "alpha"),
        ({"alpha": torch.tensor([1.5, 0.5])[:, None]}, ValueError, "got values from 0.5"),
        ({"alpha": torch.full((3, 1), 1.5)}, ValueError, "alpha must broadcast"),
        ({"alpha": torch.tensor(2)}, TypeError, "floating-point"),
        ({"alpha": "1.5"}, TypeError, "alpha must be a number"),
        ({"dim": 2}, ValueError, "dim must lie in -2..1"),
        ({"dim": 1.0}, TypeError, "dim must be an int"),
        ({"method": "sort"}, ValueError, "method must be one of"),
        ({"method": "exact", "alpha": 1.3}, ValueError, "method 'exact'"),
        ({"implementation": "fast"}, ValueError, "implementation must be one of"),
    ],
    ids=str,
)
def test_bad_input(arguments: dict, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        entmax(**{"x": torch.zeros(2, 4), **arguments})


LARGE = [(7, 2048), (5, 4096), (9, 3008), (3, 16384), (3, 32768), (3, 40_000), (2, 131_073), (2, 1 << 20)]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
@pytest.mark.parametrize("shape", LARGE, ids=str)
def test_large(shape: tuple[int, int], dtype: torch.dtype, device: torch.device, triton: str, poisoned) -> None:
    for alpha in (1.5, 2.0, 1.3, torch.tensor([1.7])):
        assert_within_budget(draw(*shape, dtype=dtype), alpha, "triton", device)
    flat = (draw(*shape) * 1e-3).to(dtype)
    flat[0] = draw(shape[1], seed=3).to(dtype)
    assert_within_budget(flat, 1.5, "triton", device)


@pytest.mark.gpu
def test_four_large_runs_are_bitwise_equal(device: torch.device, triton: str) -> None:
    for shape in ((64, 4096), (8, 1 << 18)):
        x, grad = draw(*shape, dtype=BF16).to(device), draw(*shape, dtype=BF16, seed=1).to(device)
        for alpha in (1.5, torch.tensor([1.3], device=device)):
            first, *others = (run(x, alpha, grad, "triton") for _ in range(4))
            assert all(torch.equal(first[name], other[name]) for other in others for name in first)


@pytest.mark.parametrize("alpha", [1.5, 2.0])
@pytest.mark.parametrize(
    ("dtype", "n", "capacity"),
    [(BF16, 1024, 16), (BF16, 1008, 64), (F16, 1024, 8)],
    ids=["bfloat16", "masked", "float16"],
)
def test_rows_in_one_warp(
    dtype: torch.dtype, n: int, capacity: int, alpha: float, device: torch.device, triton: str, poisoned,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Rows of all kinds: with few weights, with more than a list holds, masked, and no numbers."""
    from theory_kernels.entmax_rows import launch

    shape = launch.Warp(128, capacity, 0)
    monkeypatch.setattr(launch, "whole", lambda *_: None)
    monkeypatch.setattr(launch, "warp", lambda *_: shape)
    x = draw(10, n) * torch.tensor([1.0, 30.0, 0.01, 1.0, 1.0, 1.0, 1.0, 0.0, 0.3, 3.0])[:, None]
    x[3], x[4, 5], x[5, 9], x[6, ::2] = -math.inf, math.nan, math.inf, -math.inf
    x = x.to(dtype).to(device)
    p = entmax(x, alpha, implementation="triton")
    want = entmax(x.double(), alpha, implementation="reference")
    assert bool(p[4:6].isnan().all())
    assert not p[3].any()
    sound = [0, 1, 2, 6, 7, 8, 9]
    error = (p.double() - want)[sound].abs().amax(-1) / want[sound].amax(-1)
    # Half a unit of the dtype for the weight, and for float32 a few for the threshold that a weight comes from.
    assert float(error.max()) <= 0.5 * torch.finfo(dtype).eps + 4.0 * torch.finfo(F32).eps
