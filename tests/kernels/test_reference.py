"""The reference itself: against loops, by gradcheck, and at the places where the formula is fragile."""

from __future__ import annotations

import math

import pytest
import torch
from theory_kernels import differential_threshold_attention, threshold_attention

F64 = torch.float64


def _draw(*shapes: tuple[int, ...], seed: int = 0) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=g, dtype=F64, requires_grad=True) for shape in shapes]


def test_loops_agree() -> None:
    q, k, v = (x.detach() for x in _draw((1, 2, 7, 4), (1, 1, 7, 4), (1, 1, 7, 3)))
    beta, kappa, power = [0.3, 0.6], 2.0, 2.5
    got = threshold_attention(
        q, k, v, beta=torch.tensor(beta, dtype=F64), kappa=kappa, power=power, implementation="reference"
    )
    for h in range(2):
        for i in range(7):
            tau = beta[h] * math.sqrt(2 * max(0.0, math.log((i + 1) / kappa)) / 4)
            want = torch.zeros(3, dtype=F64)
            for j in range(i + 1):
                s = float(q[0, h, i] @ k[0, 0, j]) / float(q[0, h, i].norm() * k[0, 0, j].norm())
                want += max(s - tau, 0.0) ** power * v[0, 0, j]
            torch.testing.assert_close(got[0, h, i], want, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("power", [2.0, 2.5, 1.0])
@pytest.mark.parametrize("rms_eps", [None, 1e-2])
@pytest.mark.parametrize("normalize", [True, False])
def test_gradcheck(power: float, rms_eps: float | None, normalize: bool) -> None:
    operands = _draw((1, 2, 4, 3), (1, 1, 5, 3), (1, 2, 4, 3), (1, 1, 5, 3), (1, 1, 5, 2), seed=3)
    beta = torch.tensor([0.2, 0.4], dtype=F64, requires_grad=True)
    lam = torch.tensor(0.3, dtype=F64, requires_grad=True)

    def call(implementation: str):
        return lambda q1, k1, q2, k2, v, b, m: differential_threshold_attention(
            q1, k1, q2, k2, v, beta=b, lam=m, power=power, rms_eps=rms_eps, normalize=normalize, query_offset=1,
            implementation=implementation,
        )  # fmt: skip

    # At p = 1 the gradient jumps where s = tau; these inputs keep every score 1e-3 away from it.
    for implementation in ("reference", "chunked"):
        assert torch.autograd.gradcheck(call(implementation), (*operands, beta, lam), eps=1e-6, atol=1e-6)


@pytest.mark.parametrize("implementation", ["reference", "chunked", "triton"])
def test_rows_without_survivors(implementation: str, device: torch.device, triton: str) -> None:
    """A threshold above 1 kills every row but the first (tau = 0): exactly 0, and gradient 0."""
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn((1, 1, 20, 16), generator=g).to(device).requires_grad_() for _ in range(3))
    beta = torch.tensor(50.0, requires_grad=True)
    out = threshold_attention(q, k, v, beta=beta, rms_eps=1e-12, implementation=implementation)
    assert not out[:, :, 1:].any()
    grads = torch.autograd.grad(out[:, :, 1:].sum(), (q, k, v, beta))
    assert not any(x.any() for x in grads)


@pytest.mark.parametrize("implementation", ["reference", "chunked", "triton"])
@pytest.mark.parametrize("screen_from", [0, 10**6])
def test_negative_beta_does_not_leak(implementation: str, screen_from: int, device: torch.device, triton: str) -> None:
    """A masked score of 0 lies above a negative threshold; the future must still not matter."""
    g = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn((1, 1, 24, 16), generator=g).to(device) for _ in range(3))
    first = threshold_attention(q, k, v, beta=-0.5, implementation=implementation, screen_from=screen_from)
    k[:, :, 12:], v[:, :, 12:] = 7.0, 1e6
    second = threshold_attention(q, k, v, beta=-0.5, implementation=implementation, screen_from=screen_from)
    assert torch.equal(first[:, :, :12], second[:, :, :12])
    assert first[:, :, :12].any()


@pytest.mark.parametrize("implementation", ["reference", "chunked", "triton"])
@pytest.mark.parametrize("screen_from", [0, 10**6])
# The interpreter's numpy notices the NaN rows that nobody goes on to read.
@pytest.mark.filterwarnings("ignore:All-NaN slice", "ignore:invalid value")
def test_padding_may_hold_anything(implementation: str, screen_from: int, device: torch.device, triton: str) -> None:
    g = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn((2, 1, 24, 16), generator=g).to(device) for _ in range(3))
    lengths = torch.tensor([24, 9], device=device)
    options = {"beta": 0.3, "lengths": lengths, "implementation": implementation, "screen_from": screen_from}
    clean = threshold_attention(q, k, v, **options)
    for x in (q, k, v):
        x[1, :, 9:] = float("nan")
    operands = [x.requires_grad_() for x in (q, k, v)]
    out = threshold_attention(*operands, **options)
    assert torch.equal(clean, out)
    assert not out[1, :, 9:].any()
    for grad in torch.autograd.grad(out.sum(), operands):
        assert torch.isfinite(grad).all()
        assert not grad[1, :, 9:].any()


@pytest.mark.parametrize("implementation", ["reference", "chunked", "triton"])
def test_zero_and_huge_rows(implementation: str, device: torch.device, triton: str) -> None:
    """Zero vectors have score 0 with everything; squares of 1e4 overflow float16 but norms do not."""
    q, k, v = (torch.ones((1, 1, 4, 16), dtype=torch.float16, device=device) for _ in range(3))
    q[:, :, 1], k[:, :, 2] = 0.0, 1e4
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    out = threshold_attention(q, k, v, beta=0.1, implementation=implementation)
    assert torch.isfinite(out).all()
    assert not out[:, :, 1].any()
    assert out[:, :, 2].any()
    for grad in torch.autograd.grad(out.sum(), (q, k, v)):
        assert torch.isfinite(grad).all()


@pytest.mark.parametrize("implementation", ["reference", "chunked", "triton"])
def test_kappa_clamps(implementation: str, device: torch.device, triton: str) -> None:
    """For n <= kappa the printed formula is imaginary; the threshold is 0 and beta has no effect."""
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn((1, 1, 8, 16), generator=g).to(device) for _ in range(3))
    outs = [threshold_attention(q, k, v, beta=b, kappa=4.0, implementation=implementation) for b in (0.0, 1.0)]
    assert torch.equal(outs[0][:, :, :4], outs[1][:, :, :4])
    assert not torch.equal(outs[0][:, :, 4:], outs[1][:, :, 4:])


@pytest.mark.parametrize("implementation", ["chunked", "triton"])
def test_p1_gradients_outside_a_margin(implementation: str, device: torch.device, triton: str) -> None:
    """At p = 1 the derivative jumps at s = tau: rows with a score within rounding of it get no gradient."""
    g = torch.Generator().manual_seed(5)
    q, k, v, do = (torch.randn((1, 1, 40, 16), generator=g).bfloat16().to(device) for _ in range(4))

    def call(name: str, dtype: torch.dtype):
        leaves = [x.to(dtype).requires_grad_() for x in (q, k, v)]
        out = threshold_attention(*leaves, beta=0.5, power=1.0, implementation=name)
        return torch.autograd.grad(out, leaves, keep.to(dtype))

    unit_q, unit_k = (x.double() / x.double().norm(dim=-1, keepdim=True) for x in (q, k))
    row = torch.arange(1, 41, dtype=F64, device=device)
    gap = (unit_q @ unit_k.transpose(-1, -2) - 0.5 * (2 * row.log() / 16).sqrt()[:, None]).abs()
    near = (gap < 4 * torch.finfo(torch.bfloat16).eps).tril().any(-1)
    assert int((~near).sum()) > 0
    keep = torch.where(near[..., None], 0.0, do.double()).bfloat16()
    exact, got = call("reference", F64), call(implementation, torch.bfloat16)
    eager = call("reference", torch.bfloat16)
    for want, have, low in zip(exact, got, eager, strict=True):
        error = (have.double() - want).norm()
        assert error <= 2 * ((low.double() - want).norm() + torch.finfo(torch.bfloat16).eps * want.norm())
