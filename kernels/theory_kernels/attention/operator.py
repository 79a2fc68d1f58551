"""The ``torch.library`` operators behind the public functions: opaque to ``torch.compile``, with autograd."""

# mypy: disable-error-code="no-untyped-def"
# The fake and autograd functions get their types from the operators they stand for.
from collections.abc import Callable

import torch
from torch import Tensor

from ..geometry import Geometry
from . import chunked
from .plan import make_plan


def _geometry(
    layout: Tensor | None, sequences: int, max_q: int, max_k: int, offset: int, packed: bool, causal: bool
) -> Geometry:
    return Geometry(layout, sequences, max_q, max_k, offset, packed, causal)


def _views(q1: Tensor, k1: Tensor, q2: Tensor | None, k2: Tensor | None) -> list[tuple[Tensor, Tensor]]:
    views = [(q1, k1)]
    if q2 is not None and k2 is not None:
        views.append((q2, k2))
    return views


def _forward(
    q1: Tensor,
    k1: Tensor,
    q2: Tensor | None,
    k2: Tensor | None,
    v: Tensor,
    beta: Tensor,
    lam: Tensor | None,
    layout: Tensor | None,
    sequences: int,
    max_q: int,
    max_k: int,
    offset: int,
    packed: bool,
    causal: bool,
    kappa: float,
    power: float,
    normalize: bool,
    rms_eps: float | None,
    implementation: str,
    screen_from: int | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return output (B, H, T, E), output scale (B, H, T), and what the backward shares (:class:`.plan.Plan`).

    That is the bitmap of tiles, lists of keys, their spans (:class:`.lists.Lists`) and the path of each head. The
    scale is empty without ``rms_eps``, the others without a screen.
    """
    geometry = _geometry(layout, sequences, max_q, max_k, offset, packed, causal)
    views = _views(q1, k1, q2, k2)
    if implementation == "triton":
        from . import launch

        plan = make_plan("triton", sequences, q1, v, max_q, max_k, causal, len(views), screen_from)
        return launch.forward(views, v, beta, lam, geometry, kappa, power, normalize, rms_eps, plan)
    # Autocast has already been applied to the operands; inside, float32 products must stay float32.
    with torch.autocast(v.device.type, enabled=False):
        out, scale = chunked.forward(views, v, beta, lam, geometry, kappa, power, normalize, rms_eps)
    if rms_eps is None:
        scale = scale.new_empty(0)
    none = torch.empty((0, 0, 0), dtype=torch.int32, device=q1.device)
    items, spans = none.new_empty((0, 0), dtype=torch.int16), none.new_empty((2, 0, 0))
    return out, scale, none, items, spans, none.new_empty(0)


def _fake_forward(
    q1, k1, q2, k2, v, beta, lam, layout, sequences, max_q, max_k, offset, packed, causal,
    kappa, power, normalize, rms_eps, implementation, screen_from,
):  # fmt: skip
    views = 1 if q2 is None else 2
    plan = make_plan(implementation, sequences, q1, v, max_q, max_k, causal, views, screen_from)
    wide = torch.float64 if v.dtype == torch.float64 else torch.float32
    return (
        v.new_empty((*q1.shape[:3], v.shape[-1])),
        v.new_empty(q1.shape[:3] if rms_eps is not None else (0,), dtype=wide),
        q1.new_empty(plan.bitmap, dtype=torch.int32),
        q1.new_empty((plan.marks[0], plan.capacity), dtype=torch.int16),
        q1.new_empty((2, *plan.marks[:2]), dtype=torch.int32),
        q1.new_empty(plan.paths, dtype=torch.int32),
    )


def _gradients(
    grad: Tensor,
    q1: Tensor,
    k1: Tensor,
    q2: Tensor | None,
    k2: Tensor | None,
    v: Tensor,
    beta: Tensor,
    lam: Tensor | None,
    layout: Tensor | None,
    out: Tensor,
    scale: Tensor,
    bitmap: Tensor,
    items: Tensor,
    spans: Tensor,
    paths: Tensor,
    sequences: int,
    max_q: int,
    max_k: int,
    offset: int,
    packed: bool,
    causal: bool,
    kappa: float,
    power: float,
    normalize: bool,
    rms: bool,
    implementation: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of q1, k1, q2, k2, v, beta and lam (empty for a missing second view)."""
    geometry = _geometry(layout, sequences, max_q, max_k, offset, packed, causal)
    views = _views(q1, k1, q2, k2)
    if rms and implementation == "triton":
        from .triton_norm import norm_backward

        grad = norm_backward(grad, out, scale, v.dtype)
    elif rms:
        # o = r x with r = (mean x^2 + eps)^(-1/2): dx = r (do - o mean(do o)).
        wide, o = grad.to(scale.dtype), out.to(scale.dtype)
        grad = (scale[..., None] * (wide - o * (wide * o).mean(-1, keepdim=True))).to(v.dtype)
    if implementation == "triton":
        from . import launch

        g = launch.backward(grad, views, v, beta, lam, bitmap, items, spans, paths, geometry, kappa, power, normalize)
    else:
        with torch.autocast(v.device.type, enabled=False):
            g = chunked.backward(grad, views, v, beta, lam, geometry, kappa, power, normalize)
    second = g.views[1] if len(views) == 2 else (q1.new_empty(0), k1.new_empty(0))
    return (*g.views[0], *second, g.v, g.beta, g.lam)


def _fake_gradients(
    grad, q1, k1, q2, k2, v, beta, lam, layout, out, scale, bitmap, items, spans, paths, sequences, max_q, max_k,
    offset, packed, causal, kappa, power, normalize, rms, implementation,
):  # fmt: skip
    def like(x: Tensor | None, other: Tensor) -> Tensor:
        return other.new_empty(0) if x is None else torch.empty_like(x, memory_format=torch.contiguous_format)

    return (
        like(q1, q1), like(k1, k1), like(q2, q1), like(k2, k1), like(v, v), like(beta, beta), like(beta, beta)
    )  # fmt: skip


def _setup(ctx, inputs, output) -> None:
    q1, k1, q2, k2, v, beta, lam, layout = inputs[:8]
    out, scale, bitmap, items, spans, paths = output
    ctx.static = inputs[8:]
    rms = ctx.static[9] is not None
    # The output and its scale are only needed to undo the output norm.
    ctx.save_for_backward(
        q1,
        k1,
        q2,
        k2,
        v,
        beta,
        lam,
        layout,
        out if rms else None,
        scale if rms else None,
        bitmap,
        items,
        spans,
        paths,
    )
    ctx.mark_non_differentiable(scale, bitmap, items, spans, paths)
    ctx.set_materialize_grads(False)


def _backward(ctx, grad, *_):
    q1, k1, q2, k2, v, beta, lam, layout, out, scale, bitmap, items, spans, paths = ctx.saved_tensors
    if grad is None:
        return (None,) * 20
    (sequences, max_q, max_k, offset, packed, causal, kappa, power, normalize, rms_eps, implementation, _) = ctx.static
    empty = v.new_empty(0)
    dq1, dk1, dq2, dk2, dv, dbeta, dlam = threshold_backward(
        grad, q1, k1, q2, k2, v, beta, lam, layout,
        empty if out is None else out, empty if scale is None else scale, bitmap, items, spans, paths,
        sequences, max_q, max_k, offset, packed, causal, kappa, power, normalize, rms_eps is not None,
        implementation,
    )  # fmt: skip
    two = q2 is not None
    return (
        dq1, dk1, dq2 if two else None, dk2 if two else None, dv, dbeta, dlam if two else None,
        *(None,) * 13,
    )  # fmt: skip


def _register(name: str, implementation: Callable, fake: Callable, mutates: tuple[str, ...] = ()) -> Callable:
    """Define an operator; unlike the ``custom_op`` decorator this adds no Python layer to every call."""
    qualified = f"theory_kernels::{name}"
    torch.library.define(qualified, torch.library.infer_schema(implementation, mutates_args=mutates))
    torch.library.impl(qualified, "default", implementation)
    torch.library.register_fake(qualified, fake)
    return getattr(torch.ops.theory_kernels, name).default


threshold_forward = _register("threshold_forward", _forward, _fake_forward)
threshold_backward = _register("threshold_backward", _gradients, _fake_gradients)
torch.library.register_autograd("theory_kernels::threshold_forward", _backward, setup_context=_setup)
