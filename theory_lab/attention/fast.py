"""Outputs without weights: a mechanism through the fastest form that computes the same numbers.

A mechanism's own ``forward`` materializes its weights, which defines it and does not scale. :func:`attend` returns the
output alone, through a kernel of ``theory_kernels`` or torch's scaled dot-product attention where the mechanism has
such a form (:mod:`theory_lab.attention.forms`), and through the reference where it has not or a call asks for what the
form cannot do.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from theory_lab.attention.base import Mechanism, Scope, trusted
from theory_lab.attention.checks import check_key_mask, same_kind, shape_of
from theory_lab.errors import InputError, hint

IMPLEMENTATIONS = ("auto", "kernel", "reference", "chunked", "triton")

# Weights of more elements than this are computed in blocks of rows where no gradient is wanted.
_MOST_WEIGHTS = 1 << 26


@dataclass(frozen=True)
class Call:
    """The arguments of one call of :func:`attend`, checked; shapes as in :meth:`Mechanism.forward`."""

    q: Tensor
    k: Tensor
    v: Tensor
    q2: Tensor | None = None
    k2: Tensor | None = None
    causal: bool = True
    key_mask: Tensor | None = None
    mask: Tensor | None = None
    n: Tensor | int | None = None
    x: Tensor | None = None
    cu_seqlens: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    max_seqlen: int | None = None
    implementation: str = "auto"

    @property
    def offset(self) -> int:
        """Key position of the first query row: queries are the last T of the S positions."""
        return 0 if self.cu_seqlens is not None else self.k.shape[2] - self.q.shape[2]

    @property  # not cached: torch.compile cannot enter the lock of Python 3.11's cached_property
    def span(self) -> tuple[Tensor, Tensor] | None:
        """First valid key and number of valid keys of each sequence, int32 (B,); None where the mask has holes.

        Reads the mask on the host, so not while a graph is captured or compiled.
        """
        if self.key_mask is None or trusted(self.key_mask):
            return None
        keep = self.key_mask.expand(self.k.shape[0], -1)
        count = keep.sum(-1)
        first = keep.int().argmax(-1)
        place = torch.arange(keep.shape[1], device=keep.device)
        whole = (place >= first[:, None]) & (place < (first + count)[:, None])
        return (first.int(), count.int()) if torch.equal(whole, keep) else None

    @property  # not cached: torch.compile cannot enter the lock of Python 3.11's cached_property
    def scope(self) -> Scope:
        """What thresholds, gates and temperatures read of a scope: n, x and q, in float32 or wider. No visibility."""
        wide = torch.promote_types(self.q.dtype, torch.float32)
        n = self._counts().to(wide)
        visible = torch.empty((*self.q.shape[:3], 0), dtype=torch.bool, device=self.q.device)
        x = None if self.x is None else self.x.to(wide)
        return Scope(visible, n, self.causal, self.q.shape[-1], x, self.q.to(wide))

    def _counts(self) -> Tensor:
        """Keys that a row sees, at least 1, broadcastable to (B, H, T, 1)."""
        t, s, device = self.q.shape[2], self.k.shape[2], self.q.device
        if self.n is not None:
            return torch.as_tensor(self.n, device=device)
        row = torch.arange(t, device=device)
        if self.cu_seqlens is not None:
            ends_k = self.cu_seqlens if self.cu_seqlens_k is None else self.cu_seqlens_k
            which = torch.searchsorted(self.cu_seqlens.to(torch.int64), row, right=True) - 1
            seen = ends_k.diff().to(torch.int64)[which]
            if self.causal:
                seen = torch.minimum(seen, row - self.cu_seqlens.to(torch.int64)[which] + 1)
        elif self.key_mask is not None:
            total = self.key_mask.long().cumsum(-1)
            seen = total[:, s - t :] if self.causal else total[:, -1:].expand(-1, t)
            seen = seen[:, None]
        else:
            seen = row + (s - t + 1) if self.causal else torch.full_like(row, s)
        return seen.clamp(min=1)[..., None]

    def sequences(self) -> list[tuple[slice, slice]]:
        """Rows and keys of each packed sequence; reads the lengths on the host."""
        assert self.cu_seqlens is not None
        q = self.cu_seqlens.tolist()
        k = q if self.cu_seqlens_k is None else self.cu_seqlens_k.tolist()
        return [(slice(*a), slice(*b)) for a, b in zip(pairwise(q), pairwise(k), strict=True)]

    def part(self, rows: slice, keys: slice) -> Call:
        """Queries `rows` and keys `keys`, as a call of its own."""

        def cut(tensor: Tensor | None, axis: int, where: slice) -> Tensor | None:
            if tensor is None or tensor.ndim < -axis or tensor.shape[axis] == 1:
                return tensor
            return tensor[..., where] if axis == -1 else tensor[..., where, :]

        mask = cut(cut(self.mask, -2, rows), -1, keys)
        n = cut(self.n, -2, rows) if isinstance(self.n, Tensor) else self.n
        return replace(
            self,
            q=self.q[:, :, rows],
            k=self.k[:, :, keys],
            v=self.v[:, :, keys],
            q2=None if self.q2 is None else self.q2[:, :, rows],
            k2=None if self.k2 is None else self.k2[:, :, keys],
            key_mask=None if self.key_mask is None else self.key_mask[:, keys],
            mask=mask,
            n=n,
            x=None if self.x is None else self.x[:, rows],
            cu_seqlens=None,
            cu_seqlens_k=None,
            max_seqlen=None,
        )


def attend(
    mechanism: Mechanism,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    q2: Tensor | None = None,
    k2: Tensor | None = None,
    causal: bool = True,
    key_mask: Tensor | None = None,
    mask: Tensor | None = None,
    n: Tensor | int | None = None,
    x: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen: int | None = None,
    implementation: str = "auto",
) -> Tensor:
    """The output of a mechanism, its weights never in memory where a fast form exists.

    Parameters
    ----------
    mechanism : Mechanism
        Built in, registered, or a subclass; its parameters receive gradients as in its own forward.
    q : Tensor
        (B, H, T, D).
    k, v : Tensor
        (B, K, S, D) and (B, K, S, V), H a multiple of K.
    q2, k2 : Tensor, optional
        The second view of mechanisms with two.
    causal, key_mask, mask, n, x
        As in :meth:`Mechanism.forward`: queries are the last T of the S positions.
    cu_seqlens, cu_seqlens_k : Tensor, optional
        Packed sequences, integer (N + 1,) from 0 to the total: B is 1 and sequence i takes rows cu[i] to cu[i + 1] - 1.
    max_seqlen : int, optional
        Bound of the packed lengths, which the kernels then trust.
    implementation : str
        "auto"; "kernel" is the same but refuses what would go to the reference; "reference" always goes there;
        "chunked" and "triton" choose among the forms of ``theory_kernels``.

    Returns
    -------
    Tensor
        (B, H, T, V), the dtype of v.

    Raises
    ------
    InputError
        As :meth:`Mechanism.forward`, and for an implementation that the call does not have.

    Notes
    -----
    The call does not wait for the device, except that a key mask is looked at to see whether it has holes. Under
    ``torch.compile`` and while a CUDA graph is captured no values are checked.
    """
    if implementation not in IMPLEMENTATIONS:
        near = hint(str(implementation), IMPLEMENTATIONS)
        raise InputError("implementation", repr(implementation), f"{near}one of {', '.join(IMPLEMENTATIONS)}")
    if not isinstance(mechanism, Mechanism):
        raise InputError("mechanism", repr(mechanism), "a Mechanism, such as theory_lab.attention.get makes")
    mechanism._check_qkv(q, k, v, q2, k2)
    if x is not None:
        same_kind("x", x, q)
    if causal and cu_seqlens is None and q.shape[2] > k.shape[2]:
        raise InputError("k", shape_of(k), "at least as many keys as queries when causal")
    if key_mask is not None:
        key_mask = check_key_mask(key_mask, k.shape[0], k.shape[2], k.device)
    if cu_seqlens is not None:
        _check_packed(q, k, cu_seqlens, cu_seqlens_k, [key_mask, mask, n])
    elif cu_seqlens_k is not None or max_seqlen is not None:
        raise InputError("cu_seqlens", "None", "the packed lengths, which cu_seqlens_k and max_seqlen belong to")
    call = Call(
        q, k, v, q2, k2, causal, key_mask, mask, n, x, cu_seqlens, cu_seqlens_k, max_seqlen, implementation
    )  # fmt: skip
    if implementation != "reference":
        from theory_lab.attention.forms import fast_form

        form = fast_form(mechanism, call)
        if form is not None:
            return form(mechanism, call)
        if implementation != "auto":
            raise InputError(
                "implementation",
                repr(implementation),
                f"auto or reference: {type(mechanism).__name__} has no fast form for this call",
            )
    return _reference(mechanism, call)


def has_fast(mechanism: Mechanism) -> bool:
    """Whether some calls of a mechanism have a fast form."""
    from theory_lab.attention.forms import FORMS

    return type(mechanism) in FORMS


def _check_packed(
    q: Tensor, k: Tensor, cu_seqlens: Tensor, cu_seqlens_k: Tensor | None, excluded: list[Tensor | int | None]
) -> None:
    if any(value is not None for value in excluded):
        raise InputError("cu_seqlens", shape_of(cu_seqlens), "packed sequences exclude key_mask, mask and n")
    if q.shape[0] != 1:
        raise InputError("q", shape_of(q), "a batch of 1 for packed sequences")
    if cu_seqlens_k is None and k.shape[2] != q.shape[2]:
        raise InputError("cu_seqlens_k", "None", f"given, as k has {k.shape[2]} positions and q {q.shape[2]}")
    for field, tensor in (("cu_seqlens", cu_seqlens), ("cu_seqlens_k", cu_seqlens_k)):
        if tensor is None:
            continue
        if tensor.is_floating_point() or tensor.ndim != 1 or tensor.shape[0] < 2 or tensor.device != q.device:
            raise InputError(field, f"{tensor.dtype} of {shape_of(tensor)}", f"integers (N + 1,) on {q.device}")
        if tensor.shape != cu_seqlens.shape:
            raise InputError(field, shape_of(tensor), f"the {shape_of(cu_seqlens)} of cu_seqlens")


def _reference(mechanism: Mechanism, call: Call) -> Tensor:
    if call.cu_seqlens is not None:
        out = call.v.new_zeros((1, *call.q.shape[1:3], call.v.shape[-1]))
        pieces = []
        for rows, keys in call.sequences():
            if rows.stop == rows.start:
                continue
            if keys.stop == keys.start:
                pieces.append(out[:, :, rows])
                continue
            pieces.append(_packed_part(mechanism, call, rows, keys))
        return torch.cat(pieces, 2) if pieces else out
    b, h, t, _ = call.q.shape
    s = call.k.shape[2]
    wanted = (call.q, call.k, call.v, call.q2, call.k2, call.x, *mechanism.parameters())
    recorded = torch.is_grad_enabled() and any(w is not None and w.requires_grad for w in wanted)
    local = not (mechanism.uses_positions or mechanism.causal_only) and type(mechanism).forward is Mechanism.forward
    rows_at_once = max(1, _MOST_WEIGHTS // max(1, b * h * s))
    if recorded or not local or rows_at_once >= t:
        return _whole(mechanism, call)
    made = []
    for first in range(0, t, rows_at_once):
        stop = min(first + rows_at_once, t)
        keys = slice(0, call.offset + stop) if call.causal else slice(0, s)
        made.append(_whole(mechanism, call.part(slice(first, stop), keys)))
    return torch.cat(made, 2)


def _packed_part(mechanism: Mechanism, call: Call, rows: slice, keys: slice) -> Tensor:
    """One packed sequence: row i sees keys up to i, wherever its keys end."""
    part = call.part(rows, keys)
    t, s = rows.stop - rows.start, keys.stop - keys.start
    if call.causal and t < s:
        return _reference(mechanism, replace(part, k=part.k[:, :, :t], v=part.v[:, :, :t],
                                             k2=None if part.k2 is None else part.k2[:, :, :t]))  # fmt: skip
    if call.causal and t > s:
        order = torch.ones(t, s, dtype=torch.bool, device=call.q.device).tril()
        return _reference(mechanism, replace(part, causal=False, mask=order))
    return _reference(mechanism, part)


def _whole(mechanism: Mechanism, call: Call) -> Tensor:
    return mechanism(
        call.q, call.k, call.v, q2=call.q2, k2=call.k2, causal=call.causal, key_mask=call.key_mask, mask=call.mask,
        n=call.n, x=call.x,
    ).output  # fmt: skip


def scale_of(head_dim: int) -> float:
    """1 / sqrt(D), the scale of dot products."""
    return 1.0 / math.sqrt(head_dim)
