"""Fast forms of the mechanisms: kernels of ``theory_kernels``, or torch's scaled dot-product attention.

A form takes a mechanism and a checked :class:`theory_lab.attention.fast.Call` and returns the output. It computes what
the mechanism's reference computes, up to rounding; what it cannot do goes to the reference: :func:`fast_form` knows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from theory_lab.attention.alpha_entmax import Entmax, Sparsemax
from theory_lab.attention.asentmax import ASEntmax, ASEntmaxTheta
from theory_lab.attention.base import Mechanism, rms_norm, trusted
from theory_lab.attention.differential import DEX, DiffReLA, DiffSoftmax
from theory_lab.attention.eta import _ETA, ETALogit, ETAWeight
from theory_lab.attention.fast import Call, scale_of
from theory_lab.attention.rela import ReLA
from theory_lab.attention.softmax import GatedSoftmax, Softmax, SSMax
from theory_lab.attention.tda import TDA, TRA

Form = Callable[[Any, Call], Tensor]

#: Largest head dimension of the kernels.
_MOST_DIM = 256


class Entry(NamedTuple):
    """A form and whether it is a kernel's: kernels know neither masks with holes nor counts from outside.

    ``fits`` says whether the kernel knows the mechanism's parameters.
    """

    form: Form
    kernel: bool
    fits: Callable[[Any], bool] | None = None


def fast_form(mechanism: Mechanism, call: Call) -> Form | None:
    """The form that computes a call, or None: a subclass may compute anything, so only exact types have one."""
    entry = FORMS.get(type(mechanism))
    if entry is None:
        return None
    form, kernel, fits = entry
    if not kernel:
        if call.cu_seqlens is not None or call.implementation not in ("auto", "kernel"):
            return None
        # SSMax counts what a row sees, and a mask is counted in the reference alone.
        return None if form is _ssmax and call.mask is not None and call.n is None else form
    if call.mask is not None or call.n is not None or (call.key_mask is not None and call.span is None):
        return None
    if max(call.q.shape[-1], call.v.shape[-1]) > _MOST_DIM or min(call.q.shape[-1], call.v.shape[-1]) < 1:
        return None
    return form if fits is None or fits(mechanism) else None


# ---- softmax and its relatives -------------------------------------------------------------------


def _factor(q: Tensor, factor: Tensor) -> Tensor:
    """q times a factor broadcastable to (B, H, T, 1), rounded once."""
    return (q * factor.to(torch.promote_types(q.dtype, torch.float32))).to(q.dtype)


def _sdpa(call: Call, q: Tensor, k: Tensor) -> Tensor:
    """softmax(q k^T / sqrt(D)) v over what a row sees; 0 for a row that sees nothing."""
    v = call.v
    t, s = q.shape[2], k.shape[2]
    mask, causal = call.mask, False
    if call.key_mask is not None:
        pad = ~call.key_mask[:, None, :, None]
        # Padding may hold NaN, and 0 * NaN is NaN.
        k, v = k.masked_fill(pad, 0.0), v.masked_fill(pad, 0.0)
        keys = call.key_mask[:, None, None, :]
        mask = keys if mask is None else mask & keys
    if call.causal and t > 1:
        if mask is None and t == s:
            causal = True
        else:
            order = torch.ones(t, s, dtype=torch.bool, device=q.device).tril(s - t)
            mask = order if mask is None else mask & order
    if mask is not None:
        mask = mask.expand(*torch.broadcast_shapes(mask.shape, (1, 1, t, s)))
    out = nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1]
    )
    if mask is None:
        return out
    return out.masked_fill(~mask.any(-1, keepdim=True), 0.0)


def _softmax(mechanism: Softmax, call: Call) -> Tensor:
    if not mechanism.temperature_.requires_grad and mechanism.temperature_.ndim == 0 and _is_one(mechanism):
        return _sdpa(call, call.q, call.k)
    return _sdpa(call, _factor(call.q, 1.0 / mechanism.value("temperature", _like(call))), call.k)


def _is_one(mechanism: Softmax) -> bool:
    stored = mechanism.temperature_
    return not trusted(stored) and stored.device.type == "cpu" and float(stored) == 1.0


def _gated(mechanism: GatedSoftmax, call: Call) -> Tensor:
    out = _sdpa(call, call.q, call.k)
    return (out * mechanism._gate(call.scope, _like(call))).to(out.dtype)


def _ssmax(mechanism: SSMax, call: Call) -> Tensor:
    n = call.scope.n
    return _sdpa(call, _factor(call.q, mechanism.value("s", _like(call)) * torch.log(n)), call.k)


def _diff_softmax(mechanism: DiffSoftmax, call: Call) -> Tensor:
    first, second = (_sdpa(call, q, k) for q, k in _pairs(call))
    return _norm(first, mechanism.eps, second, mechanism.value("lam", _like(call))) * mechanism.scale


def _dex(mechanism: DEX, call: Call) -> Tensor:
    out = _sdpa(call, call.q, call.k)
    o = out.to(torch.promote_types(out.dtype, torch.float32))
    return mechanism.adapt(o).to(out.dtype)


# ---- thresholds ----------------------------------------------------------------------------------


def _pairs(call: Call) -> list[tuple[Tensor, Tensor]]:
    assert call.q2 is not None
    assert call.k2 is not None
    return [(call.q, call.k), (call.q2, call.k2)]


def _like(call: Call) -> Tensor:
    """A tensor whose dtype, device and heads say how a parameter is to be cast and broadcast."""
    wide = torch.promote_types(call.q.dtype, torch.float32)
    return torch.empty((1, call.q.shape[1], 1, 1), dtype=wide, device=call.q.device)


def _norm(out: Tensor, eps: float, minus: Tensor | None = None, lam: Tensor | None = None) -> Tensor:
    o = out.to(torch.promote_types(out.dtype, torch.float32))
    if minus is not None and lam is not None:
        o = o - lam * minus.to(o.dtype)
    return rms_norm(o, eps).to(out.dtype)


def geometry(call: Call) -> tuple[Call, dict[str, Any]]:
    """A call as the kernels take it, and their arguments: padding in front is moved to the end of the keys."""
    options: dict[str, Any] = {"causal": call.causal, "implementation": _implementation(call)}
    if call.cu_seqlens is not None:
        return call, options | {
            "cu_seqlens": call.cu_seqlens, "cu_seqlens_k": call.cu_seqlens_k, "max_seqlen": call.max_seqlen
        }  # fmt: skip
    options["query_offset"] = call.offset
    span = call.span
    if span is None:
        return call, options
    first, count = span
    b, _, s, _ = call.k.shape
    if bool((first > 0).any()):
        place = (torch.arange(s, device=first.device) + first[:, None]) % s

        def moved(x: Tensor) -> Tensor:
            return x.gather(2, place[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3]))

        call = replace(call, k=moved(call.k), v=moved(call.v), k2=None if call.k2 is None else moved(call.k2))
        options["query_offset"] = call.offset - first
    rows = torch.full((b,), call.q.shape[2], dtype=torch.int32, device=first.device)
    return call, options | {"lengths": count, "query_lengths": rows}


def _implementation(call: Call) -> str:
    return call.implementation if call.implementation in ("chunked", "triton") else "auto"


def _tra(mechanism: TRA, call: Call) -> Tensor:
    from theory_kernels import threshold_attention

    call, options = geometry(call)
    out = threshold_attention(
        call.q, call.k, call.v, beta=mechanism.value("beta"), kappa=mechanism.kappa, power=mechanism.p,
        rms_eps=mechanism.eps or None, **options,
    )  # fmt: skip
    return out if mechanism.eps > 0 else _norm(out, 0.0)


def _tda(mechanism: TDA, call: Call) -> Tensor:
    from theory_kernels import differential_threshold_attention

    call, options = geometry(call)
    (q1, k1), (q2, k2) = _pairs(call)
    out = differential_threshold_attention(
        q1, k1, q2, k2, call.v, beta=mechanism.value("beta"), lam=mechanism.value("lam"), kappa=mechanism.kappa,
        power=mechanism.p, rms_eps=mechanism.eps or None, **options,
    )  # fmt: skip
    return out if mechanism.eps > 0 else _norm(out, 0.0)


def _rectified(call: Call) -> tuple[Call, dict[str, Any]]:
    """ReLA is threshold attention with a threshold of 0 on scaled dot products."""
    call, options = geometry(call)
    return call, options | {"beta": 0.0, "normalize": False}


def _scaled(q: Tensor) -> Tensor:
    # The same factor as the reference's division, so that power-of-four head dims lose nothing.
    return q * scale_of(q.shape[-1])


def _rela(mechanism: ReLA, call: Call) -> Tensor:
    from theory_kernels import threshold_attention

    call, options = _rectified(call)
    out = threshold_attention(_scaled(call.q), call.k, call.v, power=mechanism.p, **options)
    normed = _norm(out, mechanism.eps)
    if mechanism.gate is None:
        return normed
    return (normed * torch.sigmoid(mechanism.gate.to(_like(call)) * out)).to(out.dtype)


def _diff_rela(mechanism: DiffReLA, call: Call) -> Tensor:
    from theory_kernels import differential_threshold_attention

    call, options = _rectified(call)
    (q1, k1), (q2, k2) = _pairs(call)
    out = differential_threshold_attention(
        _scaled(q1), k1, _scaled(q2), k2, call.v, lam=mechanism.value("lam"), power=mechanism.p, **options
    )
    return _norm(out, mechanism.eps) * mechanism.scale


# ---- entmax --------------------------------------------------------------------------------------


class _Alpha(NamedTuple):
    """What was seen of a stored alpha: which tensor it was, whether it suits the kernel, and its one value."""

    state: tuple[int, int]
    fits: bool
    number: float | None


def _seen_alpha(mechanism: Entmax) -> _Alpha | None:
    """Range and value of alpha, read once for each change of it, as a read waits for the device.

    None where values cannot be looked at and were not before.
    """
    alpha = mechanism.alpha_
    if torch.compiler.is_compiling():
        return None
    seen: _Alpha | None = mechanism.__dict__.get("_alpha_seen")
    state = None if alpha.is_inference() else (alpha.data_ptr(), alpha._version)
    if seen is not None and seen.state == state:
        return seen
    if trusted(alpha):
        return None
    low, high = (float(end) for end in mechanism.value("alpha").detach().aminmax())
    fits = low >= 1.0 + 2.0**-20 and high <= 2.0
    seen = _Alpha(state or (0, 0), fits, low if low == high else None)
    if state is not None:
        mechanism.__dict__["_alpha_seen"] = seen
    return seen


def _alpha_fits(mechanism: Entmax) -> bool:
    """Whether every alpha lies in (1, 2], the range of the kernel; trusted where values cannot be looked at."""
    seen = _seen_alpha(mechanism)
    return seen is None or seen.fits


def _alpha(mechanism: Entmax) -> Tensor | float:
    """alpha for the kernel: a number (1.5 and 2 have closed steps), unless it is learned or differs by head."""
    if mechanism.alpha_.requires_grad:
        # A graph captured now has to follow what is learned, also where it needs no gradient itself.
        return mechanism.value("alpha")
    seen = _seen_alpha(mechanism)
    if seen is None:
        # Traced: other numbers have no closed form to miss.
        return mechanism.fixed_alpha if mechanism.fixed_alpha in (1.5, 2.0) else mechanism.value("alpha")
    if mechanism.fixed_alpha is not None:
        mechanism.fixed_alpha = seen.number
    return mechanism.value("alpha") if seen.number is None else seen.number


def _entmax_attention(mechanism: Entmax, call: Call, **temperature: Any) -> Tensor:
    from theory_kernels.entmax_attention import entmax_attention

    call, options = geometry(call)
    return entmax_attention(call.q, call.k, call.v, alpha=_alpha(mechanism), **temperature, **options)


def _entmax(mechanism: Entmax, call: Call) -> Tensor:
    return _entmax_attention(mechanism, call)


def _sparsemax(mechanism: Sparsemax, call: Call) -> Tensor:
    from theory_kernels.entmax_attention import entmax_attention

    call, options = geometry(call)
    return entmax_attention(call.q, call.k, call.v, alpha=2.0, **options)


def _asentmax_theta(mechanism: ASEntmaxTheta, call: Call) -> Tensor:
    return _entmax_attention(mechanism, call, theta=mechanism.value("theta"))


def _asentmax(mechanism: ASEntmax, call: Call) -> Tensor:
    scale = mechanism.logit_scale(call.scope, _like(call))
    return _entmax_attention(mechanism, call, temperature=scale[..., 0])


# ---- elastic thresholds --------------------------------------------------------------------------


def _eta(mechanism: _ETA, call: Call) -> Tensor:
    from theory_kernels import elastic_attention

    tau = mechanism.thresholds(call.scope, _like(call))
    call, options = geometry(call)
    return elastic_attention(
        call.q, call.k, call.v, tau=tau[..., 0] if tau.ndim else tau, sharpness=mechanism.value("alpha"),
        reading="weight" if isinstance(mechanism, ETAWeight) else "logit", prune=mechanism.prune, **options,
    )  # fmt: skip


FORMS: dict[type[Mechanism], Entry] = {
    Softmax: Entry(_softmax, False),
    GatedSoftmax: Entry(_gated, False),
    SSMax: Entry(_ssmax, False),
    DiffSoftmax: Entry(_diff_softmax, False),
    DEX: Entry(_dex, False),
    TRA: Entry(_tra, True),
    TDA: Entry(_tda, True),
    ReLA: Entry(_rela, True),
    DiffReLA: Entry(_diff_rela, True),
    Entmax: Entry(_entmax, True, _alpha_fits),
    Sparsemax: Entry(_sparsemax, True),
    ASEntmaxTheta: Entry(_asentmax_theta, True, _alpha_fits),
    ASEntmax: Entry(_asentmax, True, _alpha_fits),
    ETALogit: Entry(_eta, True),
    ETAWeight: Entry(_eta, True),
}
