"""The ``torch.library`` operators behind :func:`.api.elastic_attention`."""

# mypy: disable-error-code="no-untyped-def"
# The fake and autograd functions get their types from the operators they stand for.
import torch
from torch import Tensor

from ..attention.operator import _geometry, _register
from . import chunked


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tau: Tensor,
    sharpness: Tensor,
    layout: Tensor | None,
    sequences: int,
    max_q: int,
    max_k: int,
    offset: int,
    packed: bool,
    causal: bool,
    scale: float,
    reading: str,
    prune: str,
    implementation: str,
) -> tuple[Tensor, Tensor]:
    """Output (B, H, T, E) and the softmax's log sums (B, H, T), +inf in rows without one."""
    geometry = _geometry(layout, sequences, max_q, max_k, offset, packed, causal)
    if implementation == "triton":
        from . import launch

        return launch.forward(q, k, v, tau, sharpness, geometry, scale, reading, prune)
    return chunked.forward(q, k, v, tau, sharpness, geometry, scale, reading, prune)


def _fake_forward(
    q, k, v, tau, sharpness, layout, sequences, max_q, max_k, offset, packed, causal, scale, reading, prune,
    implementation,
):  # fmt: skip
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    return v.new_empty((*q.shape[:3], v.shape[-1])), v.new_empty(q.shape[:3], dtype=wide)


def _gradients(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tau: Tensor,
    sharpness: Tensor,
    layout: Tensor | None,
    out: Tensor,
    lse: Tensor,
    sequences: int,
    max_q: int,
    max_k: int,
    offset: int,
    packed: bool,
    causal: bool,
    scale: float,
    reading: str,
    prune: str,
    implementation: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, tau and the sharpness."""
    geometry = _geometry(layout, sequences, max_q, max_k, offset, packed, causal)
    if implementation == "triton":
        from . import launch

        found = launch.backward(grad, q, k, v, tau, sharpness, out, lse, geometry, scale, reading, prune)
    else:
        found = chunked.backward(grad, q, k, v, tau, sharpness, out, lse, geometry, scale, reading, prune)
    return found.q, found.k, found.v, found.tau, found.sharpness


def _fake_gradients(
    grad, q, k, v, tau, sharpness, layout, out, lse, sequences, max_q, max_k, offset, packed, causal, scale, reading,
    prune, implementation,
):  # fmt: skip
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v, tau, sharpness))


def _setup(ctx, inputs, output) -> None:
    q, k, v, tau, sharpness, layout = inputs[:6]
    out, lse = output
    ctx.static = inputs[6:]
    ctx.save_for_backward(q, k, v, tau, sharpness, layout, out, lse)
    ctx.mark_non_differentiable(lse)
    ctx.set_materialize_grads(False)


def _backward(ctx, grad, *_):
    if grad is None:
        return (None,) * 16
    q, k, v, tau, sharpness, layout, out, lse = ctx.saved_tensors
    found = elastic_backward(grad, q, k, v, tau, sharpness, layout, out, lse, *ctx.static)
    return (*found, *(None,) * 11)


elastic_forward = _register("elastic_forward", _forward, _fake_forward)
elastic_backward = _register("elastic_backward", _gradients, _fake_gradients)
torch.library.register_autograd("theory_kernels::elastic_forward", _backward, setup_context=_setup)
