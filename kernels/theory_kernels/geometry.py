"""Where rows and keys lie, how many keys a row sees, and the threshold that follows from it.

Shape legend, used in every module of the package::

    B batch          H query heads        G key heads (H is a multiple of G)
    T query length   S key length         D key head dim      E value head dim
    N sequences (N = B unless the batch is packed)
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import NamedTuple

import torch

FLOAT_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
MAX_HEAD_DIM = 256


class Geometry(NamedTuple):
    """Positions of queries and keys.

    Attributes
    ----------
    layout : torch.Tensor or None
        int32 of shape (5, N): first query row, query length, first key, key length and
        query offset of every sequence. None when all sequences are full and share ``offset``.
    sequences, max_q, max_k : int
        N, and upper bounds of the query and key lengths.
    offset : int
        Key position of query row 0 (used when ``layout`` is None).
    packed : bool
        True when the sequences lie one after another in a batch of one.
    causal : bool
        Row i sees the keys j <= i + offset; otherwise every key.
    """

    layout: torch.Tensor | None
    sequences: int
    max_q: int
    max_k: int
    offset: int
    packed: bool
    causal: bool


class Gradients(NamedTuple):
    """Gradients of an attention call; ``views`` holds (dq, dk) of each view. beta and lam have shape (H,)."""

    views: list[tuple[torch.Tensor, torch.Tensor]]
    v: torch.Tensor
    beta: torch.Tensor
    lam: torch.Tensor


def rows_of(geometry: Geometry, device: torch.device) -> torch.Tensor:
    """Return the (5, N) int64 layout, built from the plain integers where there is none."""
    if geometry.layout is not None:
        return geometry.layout.to(device=device, dtype=torch.int64)
    row = torch.tensor(
        [[0], [geometry.max_q], [0], [geometry.max_k], [geometry.offset]], dtype=torch.int64, device=device
    )
    return row.expand(5, geometry.sequences)


def visible_counts(geometry: Geometry, device: torch.device) -> torch.Tensor:
    """Number of keys each row sees, int64 of shape (N, max_q); 0 for rows that do not exist."""
    _, q_len, _, k_len, offset = rows_of(geometry, device)
    row = torch.arange(geometry.max_q, device=device)[None, :]
    if geometry.causal:
        seen = torch.minimum((row + offset[:, None] + 1).clamp_min(0), k_len[:, None])
    else:
        seen = k_len[:, None].expand(-1, geometry.max_q)
    return torch.where(row < q_len[:, None], seen, 0)


def visible_mask(geometry: Geometry, first: int, stop: int, keys: int, device: torch.device) -> torch.Tensor:
    """Pairs (row, key) that may interact, bool of shape (N, stop - first, keys)."""
    _, q_len, _, k_len, offset = rows_of(geometry, device)
    row = torch.arange(first, stop, device=device)[None, :, None]
    key = torch.arange(keys, device=device)[None, None, :]
    mask = (row < q_len[:, None, None]) & (key < k_len[:, None, None])
    if geometry.causal:
        mask = mask & (key <= row + offset[:, None, None])
    return mask


def without_padding(x: torch.Tensor, geometry: Geometry, keys: bool) -> torch.Tensor:
    """(B, H, T, D) with the rows past their sequence's length set to 0: what lies there must not matter."""
    if geometry.layout is None:
        return x
    length = rows_of(geometry, x.device)[3 if keys else 1]
    inside = torch.arange(x.shape[2], device=x.device)[None, :] < length[:, None]
    return torch.where(inside[:, None, :, None], x, 0.0)


def _coefficients(max_n: int, kappa: float, head_dim: int, device: torch.device) -> torch.Tensor:
    n = torch.arange(max_n + 1, dtype=torch.float64, device=device).clamp_min(1.0)
    return (2.0 * (n / kappa).log().clamp_min(0.0) / head_dim).sqrt()


# Tensors of past calls; a CUDA graph capture reads them but must not add one that lives in its own pool.
_TABLES: dict[tuple, torch.Tensor] = {}
_MAX_TABLES = 64
_TABLES_LOCK = threading.Lock()


def remembered(key: tuple, device: torch.device, make: Callable[[], torch.Tensor]) -> torch.Tensor:
    """The read-only tensor of that key, made once; from where CUDA graphs read it, see :func:`held_tables`."""
    if torch.compiler.is_compiling():
        return make()
    table = _TABLES.get(key)
    if table is None:
        # A tensor made in inference mode could not be saved for a later backward.
        with torch.inference_mode(False):
            table = make()
        if type(table) is torch.Tensor and not (device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
            with _TABLES_LOCK:
                if len(_TABLES) >= _MAX_TABLES:
                    _TABLES.pop(next(iter(_TABLES)))
                _TABLES[key] = table
    return table


def held_tables() -> tuple[torch.Tensor, ...]:
    """Every remembered tensor: whoever captures a CUDA graph keeps them as long as the graph, which reads some."""
    with _TABLES_LOCK:
        return tuple(_TABLES.values())


def constant(value: float, heads: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A read-only tensor (heads,) of one value, made once."""
    key = ("constant", value, heads, dtype, device)
    return remembered(key, device, lambda: torch.full((heads,), value, dtype=dtype, device=device))


def tau_coefficients(max_n: int, kappa: float, head_dim: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Threshold of a row that sees n keys, for beta = 1 and n = 0 .. max_n.

    ``tau_i = beta * sqrt(2 max(0, log(n_i / kappa)) / d)``, arXiv 2601.12145, equation of
    Theorem 4.3, with the logarithm clamped at 0: it is negative for n < kappa.

    Parameters
    ----------
    max_n : int
        Largest number of visible keys.
    kappa, head_dim
        As in the formula.
    dtype : torch.dtype
        float64 keeps float64; every other dtype gives float32, so that a half-precision run has the
        same threshold as a float32 run.
    device : torch.device

    Returns
    -------
    torch.Tensor
        Shape (max_n + 1,); entry 0 is 0.
    """
    if dtype == torch.float64:
        return _coefficients(max_n, kappa, head_dim, device)
    key = ("tau", max_n, kappa, head_dim, device)
    return remembered(key, device, lambda: _coefficients(max_n, kappa, head_dim, device).float())


def split_packed(geometry: Geometry) -> list[tuple[slice, slice, Geometry]]:
    """Cut a packed batch into (query rows, keys, geometry) of its sequences; reads the layout on the host."""
    assert geometry.layout is not None
    parts = []
    for q0, q_len, k0, k_len, offset in geometry.layout.t().tolist():
        part = Geometry(None, 1, q_len, k_len, offset, False, geometry.causal)
        parts.append((slice(q0, q0 + q_len), slice(k0, k0 + k_len), part))
    return parts


def _length_tensor(name: str, value: torch.Tensor, count: int, limit: int, device: torch.device) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name} must be an integer tensor, got {type(value).__name__}")
    if value.is_floating_point() or value.is_complex() or value.dtype == torch.bool:
        raise TypeError(f"{name} must be an integer tensor, got dtype {value.dtype}")
    if value.shape != (count,):
        raise ValueError(f"{name} must have shape ({count},), got {tuple(value.shape)}")
    if value.device.type == "cpu" and count and not torch.compiler.is_compiling():
        low, high = int(value.min()), int(value.max())
        if low < 0 or high > limit:
            raise ValueError(f"{name} must lie in 0..{limit}, got values from {low} to {high}")
    return value.to(device=device, dtype=torch.int32).clamp(0, limit)


def _cumulative(name: str, value: torch.Tensor, total: int, device: torch.device) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name} must be an integer tensor, got {type(value).__name__}")
    if value.is_floating_point() or value.is_complex() or value.dtype == torch.bool:
        raise TypeError(f"{name} must be an integer tensor, got dtype {value.dtype}")
    if value.dim() != 1 or value.numel() < 2:
        raise ValueError(f"{name} must have shape (sequences + 1,), got {tuple(value.shape)}")
    if value.device.type == "cpu" and not torch.compiler.is_compiling():
        steps = value.diff()
        if int(value[0]) != 0 or int(value[-1]) != total or bool((steps < 0).any()):
            raise ValueError(f"{name} must rise from 0 to {total}, got {value.tolist()}")
    return value.to(device=device, dtype=torch.int32)


def _offsets(query_offset: int | torch.Tensor, count: int, device: torch.device) -> torch.Tensor:
    if isinstance(query_offset, torch.Tensor):
        if query_offset.is_floating_point() or query_offset.shape not in ((), (count,)):
            raise ValueError(
                f"query_offset must be an integer or an integer tensor of shape ({count},), "
                f"got {query_offset.dtype} of shape {tuple(query_offset.shape)}"
            )
        return query_offset.to(device=device, dtype=torch.int32).expand(count)
    return torch.full((count,), query_offset, dtype=torch.int32, device=device)


def build_geometry(
    q: torch.Tensor,
    k: torch.Tensor,
    *,
    causal: bool,
    query_offset: int | torch.Tensor,
    lengths: torch.Tensor | None,
    query_lengths: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    cu_seqlens_k: torch.Tensor | None,
    max_seqlen: int | None,
) -> Geometry:
    """Turn the public arguments into a :class:`Geometry`; raises ValueError or TypeError on a mismatch."""
    batch, t, s = q.shape[0], q.shape[2], k.shape[2]
    if isinstance(query_offset, bool) or not isinstance(query_offset, (int, torch.Tensor)):
        raise TypeError(f"query_offset must be an int or an integer tensor, got {type(query_offset).__name__}")
    if cu_seqlens is not None:
        if lengths is not None or query_lengths is not None:
            raise ValueError("cu_seqlens excludes lengths and query_lengths: give one of the two")
        if batch != 1:
            raise ValueError(f"packed sequences need a batch of 1, got q of shape {tuple(q.shape)}")
        cu_q = _cumulative("cu_seqlens", cu_seqlens, t, q.device)
        cu_k = cu_q if cu_seqlens_k is None else _cumulative("cu_seqlens_k", cu_seqlens_k, s, q.device)
        if cu_seqlens_k is None and s != t:
            raise ValueError(f"cu_seqlens alone needs q and k of one length, got {t} and {s}: give cu_seqlens_k")
        if cu_k.shape != cu_q.shape:
            raise ValueError(f"cu_seqlens_k must have shape {tuple(cu_q.shape)}, got {tuple(cu_k.shape)}")
        n = cu_q.shape[0] - 1
        layout = torch.stack([cu_q[:-1], cu_q.diff(), cu_k[:-1], cu_k.diff(), _offsets(query_offset, n, q.device)])
        if max_seqlen is not None and max_seqlen < 0:
            raise ValueError(f"max_seqlen must be at least 0, got {max_seqlen}")
        # Without max_seqlen the whole length is a bound that needs no read of the device.
        bound_q, bound_k = (t, s) if max_seqlen is None else (min(t, max_seqlen), min(s, max_seqlen))
        return Geometry(layout.contiguous(), n, bound_q, bound_k, 0, True, causal)
    if cu_seqlens_k is not None:
        raise ValueError("cu_seqlens_k needs cu_seqlens")
    ragged = lengths is not None or query_lengths is not None or isinstance(query_offset, torch.Tensor)
    if not ragged:
        return Geometry(None, batch, t, s, int(query_offset), False, causal)
    offset = _offsets(query_offset, batch, q.device)
    full = torch.full((batch,), s, dtype=torch.int32, device=q.device)
    k_len = full if lengths is None else _length_tensor("lengths", lengths, batch, s, q.device)
    if query_lengths is not None:
        q_len = _length_tensor("query_lengths", query_lengths, batch, t, q.device)
    elif causal and lengths is not None:
        # A causal row past its sequence's last key is padding.
        q_len = (k_len - offset).clamp(0, t)
    else:
        q_len = torch.full((batch,), t, dtype=torch.int32, device=q.device)
    zero = torch.zeros(batch, dtype=torch.int32, device=q.device)
    return Geometry(torch.stack([zero, q_len, zero, k_len, offset]).contiguous(), batch, t, s, 0, False, causal)
