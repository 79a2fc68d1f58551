"""The ``torch.library`` operators behind the public function: opaque to ``torch.compile``, with autograd."""

# mypy: disable-error-code="no-untyped-def"
# The fake and autograd functions get their types from the operators they stand for.

import torch
from torch import Tensor

from ..attention.operator import _register
from ..geometry import Geometry
from . import chunked
from .plan import make_plan


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    factor: Tensor,
    eps: Tensor,
    layout: Tensor | None,
    sequences: int,
    max_q: int,
    max_k: int,
    offset: int,
    packed: bool,
    causal: bool,
    mode: int,
    implementation: str,
    keep: bool,
    want_factor: bool,
    want_alpha: bool,
    list_from: int | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return output (B, H, T, E) and what the backward shares.

    That is the values averaged with the slopes as weights (empty unless ``keep``), anchor, state, level and limit of
    each row (4, B, H, T), and lists of keys with their lengths (:mod:`.lists`), empty without lists.
    """
    geometry = Geometry(layout, sequences, max_q, max_k, offset, packed, causal)
    if implementation == "triton":
        from . import launch

        plan = make_plan("triton", sequences, q, v, max_q, max_k, causal, list_from)
        return launch.forward(q, k, v, factor, eps, geometry, mode, keep, plan)
    # Autocast has already been applied to the operands; inside, float32 products must stay float32.
    with torch.autocast(v.device.type, enabled=False):
        out, rows = chunked.forward(q, k, v, factor, eps, geometry)
    none = torch.empty((0, 0, 0), dtype=torch.int32, device=q.device)
    return out, v.new_empty((0, 0, 0, 0)), rows, none, none.new_empty((0, 0))


def _fake_forward(
    q, k, v, factor, eps, layout, sequences, max_q, max_k, offset, packed, causal, mode, implementation, keep,
    want_factor, want_alpha, list_from,
):  # fmt: skip
    plan = make_plan(implementation, sequences, q, v, max_q, max_k, causal, list_from)
    shape = (*q.shape[:3], v.shape[-1])
    rows = chunked.wide(q.dtype)
    return (
        v.new_empty(shape),
        v.new_empty(shape if keep and implementation == "triton" else (0, 0, 0, 0)),
        q.new_empty((4 if implementation == "triton" else 2, *q.shape[:3]), dtype=rows),
        q.new_empty(plan.items, dtype=torch.int32),
        q.new_empty(plan.items[:2], dtype=torch.int32),
    )


def _gradients(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    factor: Tensor,
    eps: Tensor,
    layout: Tensor | None,
    tilted: Tensor,
    rows: Tensor,
    items: Tensor,
    counts: Tensor,
    sequences: int,
    max_q: int,
    max_k: int,
    offset: int,
    packed: bool,
    causal: bool,
    mode: int,
    implementation: str,
    want_factor: bool,
    want_alpha: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of q, k, v, of the factor of every row (B, H, T), and of alpha (H,)."""
    geometry = Geometry(layout, sequences, max_q, max_k, offset, packed, causal)
    if implementation == "triton":
        from . import launch

        return launch.backward(
            grad, q, k, v, factor, eps, tilted, rows, items, counts, geometry, mode, want_factor, want_alpha
        )
    with torch.autocast(v.device.type, enabled=False):
        g = chunked.backward(grad, q, k, v, factor, eps, rows, geometry)
    return g.q, g.k, g.v, g.factor, g.alpha


def _fake_gradients(
    grad, q, k, v, factor, eps, layout, tilted, rows, items, counts, sequences, max_q, max_k, offset, packed,
    causal, mode, implementation, want_factor, want_alpha,
):  # fmt: skip
    like = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v)]
    return (*like, rows.new_empty(rows.shape[1:]), torch.empty_like(eps))


def _setup(ctx, inputs, output) -> None:
    q, k, v, factor, eps, layout = inputs[:6]
    _, tilted, rows, items, counts = output
    ctx.static = inputs[6:]
    ctx.save_for_backward(q, k, v, factor, eps, layout, tilted, rows, items, counts)
    ctx.mark_non_differentiable(tilted, rows, items, counts)
    ctx.set_materialize_grads(False)


def _backward(ctx, grad, *_):
    q, k, v, factor, eps, layout, *kept = ctx.saved_tensors
    if grad is None:
        return (None,) * 18
    (sequences, max_q, max_k, offset, packed, causal, mode, implementation, _, want_factor, want_alpha, _) = ctx.static
    dq, dk, dv, dfactor, dalpha = entmax_backward(
        grad, q, k, v, factor, eps, layout, *kept, sequences, max_q, max_k, offset, packed, causal, mode,
        implementation, want_factor, want_alpha,
    )  # fmt: skip
    dfactor = dfactor.sum_to_size(factor.shape).to(factor.dtype) if want_factor else None
    return (dq, dk, dv, dfactor, dalpha if want_alpha else None, *(None,) * 13)


entmax_forward = _register("entmax_attention_forward", _forward, _fake_forward)
entmax_backward = _register("entmax_attention_backward", _gradients, _fake_gradients)
torch.library.register_autograd("theory_kernels::entmax_attention_forward", _backward, setup_context=_setup)
