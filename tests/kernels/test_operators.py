"""The operators under opcheck, torch.compile and autocast; and that importing the package stays cheap."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from theory_kernels import differential_threshold_attention, threshold_attention
from theory_kernels.attention.operator import threshold_backward, threshold_forward


def _operands(device: torch.device, grad: bool) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    shapes = [(1, 2, 12, 16), (1, 1, 12, 16), (1, 2, 12, 16), (1, 1, 12, 16), (1, 1, 12, 8)]
    return [torch.randn(s, generator=g).to(device).requires_grad_(grad) for s in shapes]


@pytest.mark.parametrize("two", [False, True])
@pytest.mark.parametrize("rms_eps", [None, 1e-2])
def test_opcheck_chunked(two: bool, rms_eps: float | None, device: torch.device) -> None:
    q1, k1, q2, k2, v = _operands(device, True)
    beta = torch.full((2,), 0.3, device=device, requires_grad=True)
    lam = torch.full((2,), 0.4, device=device, requires_grad=True)
    views = (q1, k1, q2, k2) if two else (q1, k1, None, None)
    torch.library.opcheck(
        threshold_forward,
        (*views, v, beta, lam if two else None, None, 1, 12, 12, 0, False, True, 1.0, 2.0, True, rms_eps,
         "chunked", None),
    )  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("screen_from", [0, 10**6])
def test_opcheck_triton(screen_from: int, device: torch.device, triton: str) -> None:
    g = torch.Generator(device).manual_seed(0)
    q1, k1, q2, k2, v = (torch.randn((1, 2, 200, 64), generator=g, device=device).requires_grad_() for _ in range(5))
    beta = torch.full((2,), 0.3, device=device, requires_grad=True)
    torch.library.opcheck(
        threshold_forward,
        (q1, k1, q2, k2, v, beta, beta, None, 1, 200, 200, 0, False, True, 1.0, 2.0, True, 1e-2, "triton",
         screen_from),
    )  # fmt: skip


def test_opcheck_backward(device: torch.device) -> None:
    q1, k1, q2, k2, v = _operands(device, False)
    beta = torch.full((2,), 0.3, device=device)
    none = torch.empty((0, 0, 0), dtype=torch.int32, device=device)
    out = torch.randn((1, 2, 12, 8), device=device)
    torch.library.opcheck(
        threshold_backward,
        (out, q1, k1, q2, k2, v, beta, beta, None, out, out[..., 0].abs().contiguous(), none,
         none.new_empty((0, 0), dtype=torch.int16), none.new_empty((2, 0, 0)), none.view(0), 1,
         12, 12, 0, False, True, 1.0, 2.0, True, True, "chunked"),
    )  # fmt: skip


def test_compile(device: torch.device) -> None:
    """One graph, no break, same numbers and gradients."""
    lengths = torch.tensor([9], device=device)
    lam = torch.tensor(0.4, device=device, requires_grad=True)

    def call(q1, k1, q2, k2, v):
        return differential_threshold_attention(
            q1, k1, q2, k2, v, beta=0.3, lam=lam, rms_eps=1e-2, lengths=lengths
        ).square()

    operands = _operands(device, True)
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    want, got = call(*operands), compiled(*operands)
    torch.testing.assert_close(got, want)
    grads = [torch.autograd.grad(x.sum(), [*operands, lam]) for x in (want, got)]
    torch.testing.assert_close(grads[1], grads[0])


@pytest.mark.gpu
# Inductor itself still meets what torch.jit has deprecated.
@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
@pytest.mark.parametrize("length", [300, 6000])
def test_inductor(length: int, device: torch.device, triton: str) -> None:
    """The default backend of torch.compile: one graph and the same bits, without and with a screen."""
    g = torch.Generator(device).manual_seed(0)
    operands = [
        torch.randn((1, 4, length, 64), generator=g, device=device).bfloat16().requires_grad_() for _ in range(3)
    ]

    def call(q, k, v):
        return threshold_attention(q, k, v, beta=0.7, rms_eps=1e-2)

    want, got = call(*operands), torch.compile(call, fullgraph=True)(*operands)
    assert torch.equal(got, want)
    do = torch.randn_like(want)
    for a, b in zip(*(torch.autograd.grad(x, operands, do) for x in (want, got)), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("implementation", ["reference", "chunked", "triton"])
def test_training_after_inference(implementation: str, device: torch.device, triton: str) -> None:
    """What a call in inference mode remembers must be fit for a later backward."""
    q, k, _, _, v = _operands(device, True)
    options = {"beta": 0.123, "kappa": 1.7, "implementation": implementation}
    with torch.inference_mode():
        first = threshold_attention(q.detach(), k.detach(), v.detach(), **options)
    out = threshold_attention(q, k, v, **options)
    assert torch.equal(first, out)
    for grad in torch.autograd.grad(out.sum(), (q, k, v)):
        assert torch.isfinite(grad).all()


@pytest.mark.parametrize("implementation", ["reference", "chunked"])
def test_fake_tensors(implementation: str) -> None:
    """Shapes can be traced without data, and tracing leaves nothing behind that a real call would meet."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    options = {"beta": 0.456, "kappa": 1.3, "implementation": implementation}
    with FakeTensorMode():
        x = torch.empty(1, 2, 12, 16)
        assert threshold_attention(x, x, x, **options).shape == (1, 2, 12, 16)
    x = torch.ones(1, 2, 12, 16)
    assert torch.isfinite(threshold_attention(x, x, x, **options)).all()


def test_autocast(device: torch.device) -> None:
    q, k, _, _, v = _operands(device, False)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        out = threshold_attention(q, k, v.bfloat16(), beta=0.3)
    want = threshold_attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), beta=0.3)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, want)


def test_import_leaves_triton_alone() -> None:
    code = """
import sys, torch
by_torch = 'triton.language' in sys.modules
import theory_kernels
print(by_torch, 'triton.language' in sys.modules)
"""
    by_torch, after = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    if by_torch == "True":
        pytest.skip("this torch imports triton by itself")
    assert after == "False"
