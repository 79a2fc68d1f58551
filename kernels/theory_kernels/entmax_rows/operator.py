"""The ``torch.library`` operators behind :func:`.api.entmax`: opaque to ``torch.compile``, with autograd."""

# mypy: disable-error-code="no-untyped-def"
# The fake and autograd functions get their types from the operators they stand for.
import torch
from torch import Tensor

from ..attention.operator import _register
from . import chunked, reference


def _wide(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _forward(x: Tensor, alpha: Tensor | None, power: int, low: float, high: float, implementation: str) -> Tensor:
    """Weights of rows (R, n), contiguous.

    ``alpha`` is (1,) or (R,) in float32 or float64, known to lie in [low, high]; without
    it ``power`` = 1 / (alpha - 1) is 1 or 2.
    """
    if implementation == "triton":
        from . import launch

        return launch.forward(x, alpha, power, low, high)
    with torch.autocast(x.device.type, enabled=False):
        if implementation == "reference":
            return reference.solve(x.to(_wide(x)), alpha, power).to(x.dtype)
        return chunked.forward(x, alpha, power)


def _fake_forward(x, alpha, power, low, high, implementation):
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _gradients(
    grad: Tensor, p: Tensor, alpha: Tensor | None, power: int, wants_alpha: bool, implementation: str
) -> tuple[Tensor, Tensor]:
    """Gradients of x, in its dtype, and of alpha, in its shape (empty where not wanted)."""
    if implementation == "triton":
        from . import launch

        dx, dalpha = launch.backward(grad, p, alpha, power, wants_alpha)
    else:
        with torch.autocast(p.device.type, enabled=False):
            dx, dalpha = chunked.backward(p, grad, alpha, power, wants_alpha)
    if wants_alpha and alpha is not None and alpha.shape[0] == 1:
        dalpha = dalpha.sum(0, keepdim=True)
    return dx, dalpha


def _fake_gradients(grad, p, alpha, power, wants_alpha, implementation):
    shape = alpha.shape if wants_alpha else (0,)
    return torch.empty_like(p), p.new_empty(shape, dtype=_wide(p))


def _setup(ctx, inputs, output) -> None:
    _, alpha, power, _, _, implementation = inputs
    ctx.static = (power, implementation)
    ctx.save_for_backward(output, alpha)
    ctx.set_materialize_grads(False)


def _backward(ctx, grad):
    if grad is None:
        return (None,) * 6
    p, alpha = ctx.saved_tensors
    power, implementation = ctx.static
    wants_alpha = alpha is not None and ctx.needs_input_grad[1]
    dx, dalpha = entmax_backward(grad, p, alpha, power, wants_alpha, implementation)
    return dx, dalpha if wants_alpha else None, None, None, None, None


entmax_forward = _register("entmax_forward", _forward, _fake_forward)
entmax_backward = _register("entmax_backward", _gradients, _fake_gradients)
torch.library.register_autograd("theory_kernels::entmax_forward", _backward, setup_context=_setup)
