r"""Bounds of the scores of a block of keys, kept beside a KV cache as it grows.

A query ``q`` may skip a block whose every key scores below its threshold. With R = max |k| over the block, each kind
bounds ``max_k <q, k>`` from a few numbers:

=========  ==================================  =========================================================
kind       kept for each block                 bound
=========  ==================================  =========================================================
norm       R                                   |q| R (Cauchy-Schwarz; arXiv 2609.20888)
minmax     R, low and high of every channel    sum_c max(q_c low_c, q_c high_c)
ball       R, centre c, radius r               <q, c> + |q| r
cap        R, axis u, least m = min <k, u>     |q| R within the cap, else a m + sqrt(|q|^2 - a^2) sqrt(R^2 - m^2)
int8       R, keys k' in int8, step b, F       a b max <q', k'> + |a q'| F + |q - a q'| R
=========  ==================================  =========================================================

with ``a = <q, u>`` for a unit axis: the maximum of ``a x + sqrt(|q|^2 - a^2) y`` over ``x >= m, x^2 + y^2 <= R^2``,
so no key has to have unit norm exactly. For int8, ``q = a q' + e`` and ``k = b k' + f`` with integers q', k' and
F = max |f|, as in :mod:`theory_kernels.screen`. The smaller of a bound and |q| R is taken. The first four fit 2% of a
cache; int8 takes a quarter of it (of K and V in 16 bits), and is the only one that tells much about trained keys.

Rounding. With u = 2^-21 (four units of float32, which also covers truncating tensor-core sums and three-term tf32
products), a computed dot product of D terms is off by at most (D + 8) u sum|x_c y_c| <= (D + 8) u |x| |y|. Norms are
stored a relative 1e-4 too large, far above the rounding of a sum of 256 squares, plus 2e-18 for squares that vanish;
low, high, centre and axis are stored in the cache's dtype, which holds low and high exactly, and radius and least are
measured from the stored centre and axis. The computed bound is then raised by its own rounding and by that of the
scores it is compared with, (D + 16) u |q| R. A comparison with NaN keeps the block.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..geometry import MAX_HEAD_DIM
from ..validation import choose
from .cache import Paging, gather

KINDS = ("norm", "minmax", "ball", "cap", "int8")
# Rounding of one step of a sum, see above.
ULP = 2.0**-21
# Largest share of the bytes of K and V that the default block size lets the bounds take.
SHARE = 0.02
# Keys that a pass over a cache reads at once.
_KEYS = 1 << 16


@dataclass(frozen=True)
class BlockBounds:
    """What is kept of each block of ``block`` keys; updated in place by :func:`update_block_bounds`.

    Attributes
    ----------
    kind : str
        "norm", "minmax", "ball", "cap" or "int8".
    block : int
        Keys a block.
    norm : torch.Tensor
        float32 (B, G, blocks): largest norm, a little too large.
    vectors : torch.Tensor
        (B, G, blocks, n, D) in the cache's dtype: low and high (n = 2), centre or axis (n = 1), nothing (n = 0); or
        the keys in int8 (n = block).
    scalars : torch.Tensor
        float32 (B, G, blocks, m): radius, rounded up, or least projection on the axis, rounded down (m = 1); step and
        largest residual, rounded up (m = 2); nothing (m = 0).
    """

    kind: str
    block: int
    norm: torch.Tensor
    vectors: torch.Tensor
    scalars: torch.Tensor

    @property
    def nbytes(self) -> int:
        """Bytes that the bounds take."""
        return sum(x.numel() * x.element_size() for x in (self.norm, self.vectors, self.scalars))


def parts_of_block(kind: str, block: int) -> tuple[int, int]:
    """Vectors and scalars kept for one block of keys."""
    return {"norm": (0, 0), "minmax": (2, 0), "ball": (1, 1), "cap": (1, 1), "int8": (block, 2)}[kind]


def default_block(kind: str, head_dim: int, value_dim: int, itemsize: int) -> int:
    """Smallest of 64, 128 and 256 keys with which the bounds take at most 2% of K and V; 16 for int8."""
    if kind == "int8":
        return 16
    vectors, scalars = parts_of_block(kind, 64)
    for block in (64, 128):
        if vectors * head_dim * itemsize + 4 + 4 * scalars <= SHARE * block * (head_dim + value_dim) * itemsize:
            return block
    return 256


def make_block_bounds(
    k_cache: torch.Tensor,
    kind: str = "minmax",
    *,
    block: int | None = None,
    value_dim: int | None = None,
    lengths: int | torch.Tensor | None = None,
    page_table: torch.Tensor | None = None,
    implementation: str = "auto",
) -> BlockBounds:
    """Bounds of a cache, filled from its first ``lengths`` keys.

    Parameters
    ----------
    k_cache : torch.Tensor
        (B, G, S, D), or with ``page_table`` pages (P, G, page size, D).
    kind : str
        "norm", "minmax", "ball", "cap" or "int8".
    block : int, optional
        Keys a block, a power of two from 16 to 256; by default the smallest of 64, 128, 256 with which the bounds
        take at most 2% of the cache, and 16 for int8.
    value_dim : int, optional
        Head dim of the values, for that share; D if not given.
    lengths : int or torch.Tensor, optional
        Keys that are there already, for all sequences or (B,); by default all S for a contiguous cache, none for
        pages.
    page_table : torch.Tensor, optional
        Integer (B, pages a sequence): page of each stretch of keys.
    implementation : str
        "auto", "chunked" or "triton".

    Returns
    -------
    BlockBounds
        With room for every key the cache (or the table) can hold.

    Raises
    ------
    TypeError, ValueError
        For a wrong dtype, shape or value.
    """
    paging = Paging.of(k_cache, page_table)
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {', '.join(KINDS)}, got {kind!r}")
    d = k_cache.shape[-1]
    if value_dim is not None and not 1 <= value_dim <= MAX_HEAD_DIM:
        raise ValueError(f"value_dim must lie in 1..{MAX_HEAD_DIM}, got {value_dim}")
    if block is None:
        block = default_block(kind, d, value_dim or d, k_cache.element_size())
    if isinstance(block, bool) or not isinstance(block, int) or block not in (16, 32, 64, 128, 256):
        raise ValueError(f"block must be 16, 32, 64, 128 or 256, got {block!r}")
    shape = (paging.batch, k_cache.shape[1], -(-paging.capacity // block))
    vectors, scalars = parts_of_block(kind, block)
    device = k_cache.device
    out = BlockBounds(
        kind,
        block,
        torch.zeros(shape, dtype=torch.float32, device=device),
        torch.zeros((*shape, vectors, d), dtype=torch.int8 if kind == "int8" else k_cache.dtype, device=device),
        torch.zeros((*shape, scalars), dtype=torch.float32, device=device),
    )
    if lengths is None:
        lengths = 0 if paging.table is not None else paging.capacity
    if isinstance(lengths, int) and not lengths:
        return out
    return update_block_bounds(out, k_cache, 0, lengths, page_table=page_table, implementation=implementation)


def update_block_bounds(
    bounds: BlockBounds,
    k_cache: torch.Tensor,
    start: int | torch.Tensor,
    length: int | torch.Tensor,
    *,
    max_length: int | None = None,
    page_table: torch.Tensor | None = None,
    implementation: str = "auto",
) -> BlockBounds:
    """Take up ``length`` keys just written to the cache from position ``start`` on; in place.

    The blocks they lie in are computed anew from the cache, so the cost does not depend on the sequence's length, and
    neither does the result on how a sequence was cut into updates. On CUDA nothing waits for the device.

    Parameters
    ----------
    bounds : BlockBounds
        From :func:`make_block_bounds`.
    k_cache : torch.Tensor
        The cache, which already holds the new keys.
    start, length : int or torch.Tensor
        Position of the first new key and how many, for all sequences or integer (B,).
    max_length : int, optional
        Bound of a ``length`` that is a CUDA tensor; without it every block of the cache is looked at.
    page_table : torch.Tensor, optional
        As in :func:`make_block_bounds`.
    implementation : str
        "auto", "chunked" or "triton".

    Returns
    -------
    BlockBounds
        ``bounds``.

    Raises
    ------
    TypeError, ValueError
        For a wrong dtype, shape or value; positions past the cache (on the CPU, or given as integers).
    """
    paging = Paging.of(k_cache, page_table)
    check_bounds("bounds", bounds, k_cache, paging)
    first, count = (_positions(name, x, paging) for name, x in (("start", start), ("length", length)))
    for low, high in _known(start, length):
        if low < 0 or high < low or high > paging.capacity:
            raise ValueError(f"start and length must stay within 0..{paging.capacity}, got keys {low} to {high}")
    if max_length is not None and (isinstance(max_length, bool) or not isinstance(max_length, int) or max_length < 0):
        raise ValueError(f"max_length must be an integer of at least 0, got {max_length!r}")
    most = length if isinstance(length, int) else (paging.capacity if max_length is None else max_length)
    # Blocks that so many keys can touch: with a known start exactly, else one more.
    if isinstance(start, int) and isinstance(length, int):
        touched = (start + length - 1) // bounds.block - start // bounds.block + 1 if length else 0
    else:
        touched = min(-(-max(most - 1, 0) // bounds.block) + 1, bounds.norm.shape[2])
    if not touched or not bounds.norm.numel():
        return bounds
    chosen = choose(implementation, k_cache)
    from .operator import update_bounds, wanted

    if wanted(k_cache):
        update_bounds(
            bounds.norm, bounds.vectors, bounds.scalars, k_cache, paging.table, first, count, bounds.kind,
            bounds.block, touched, chosen,
        )  # fmt: skip
    else:
        refresh(bounds, k_cache, paging, first, count, touched, chosen)
    return bounds


def refresh(
    bounds: BlockBounds,
    k_cache: torch.Tensor,
    paging: Paging,
    start: torch.Tensor,
    length: torch.Tensor,
    touched: int,
    implementation: str,
) -> None:
    """Compute ``touched`` blocks of every head anew, from the one that ``start`` (B,) lies in on."""
    if implementation == "triton":
        from .launch import update

        update(bounds, k_cache, paging, start, length, touched)
        return
    # A pass over a long cache reads a stretch at a time.
    step = max(1, _KEYS // bounds.block)
    for begin in range(0, touched, step):
        _update(bounds, k_cache, paging, start, length, torch.arange(begin, min(begin + step, touched)))


def _update(
    bounds: BlockBounds,
    k_cache: torch.Tensor,
    paging: Paging,
    start: torch.Tensor,
    length: torch.Tensor,
    offset: torch.Tensor,
) -> None:
    """Compute the blocks ``start // block + offset`` anew in plain torch."""
    size = bounds.block
    block = (start // size)[:, None] + offset.to(start.device)[None, :]
    stop = start + length
    wanted = (block * size < stop[:, None]) & (block < bounds.norm.shape[2])
    key = (block[:, :, None] * size + torch.arange(size, device=block.device)).flatten(1)
    inside = ((key < stop[:, None]) & (key < paging.capacity)).view(len(block), 1, -1, size, 1)
    k = gather(k_cache, paging, key).unflatten(2, (-1, size))
    b, n = wanted.nonzero(as_tuple=True)
    at = (b, slice(None), block[b, n])
    for kept, new in zip((bounds.norm, bounds.vectors, bounds.scalars), measure(bounds.kind, k, inside), strict=True):
        kept[at] = new[b, :, n]


def measure(kind: str, k: torch.Tensor, inside: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Norm, vectors and scalars of blocks of keys.

    Parameters
    ----------
    k : torch.Tensor
        (B, G, blocks, block, D).
    inside : torch.Tensor
        bool, broadcastable to (B, G, blocks, block, 1): keys that are there.
    """
    wide = k if k.dtype == torch.float64 else k.float()
    wide = torch.where(inside, wide, 0.0)
    d = k.shape[-1]
    norm = _norm(wide).amax(-1)
    largest = norm.float() if norm.dtype == torch.float32 else (norm * (1 + 1e-6)).float()
    nothing = largest[..., None][..., :0]
    if kind == "norm":
        return largest, k[..., :0, :], nothing
    if kind == "minmax":
        low = torch.where(inside, wide, torch.inf).amin(-2)
        high = torch.where(inside, wide, -torch.inf).amax(-2)
        return largest, torch.stack([low, high], -2).to(k.dtype), nothing
    if kind == "int8":
        step = wide.abs().amax((-2, -1)).float() / 127.0
        step = torch.where(step > 0, step, 1.0)
        scale = step[..., None, None].to(wide.dtype)
        rounded = (wide / scale).round().clamp(-127, 127)
        # A relative 1e-6 covers the rounding of the products and differences.
        missed = (_norm(wide - rounded * scale) + 1e-6 * _norm(wide)).amax(-1)
        return largest, rounded.to(torch.int8), torch.stack([step, (missed * (1 + 1e-6)).float()], -1)
    count = inside.expand(*k.shape[:-1], 1).sum(-2)
    center = wide.sum(-2) / count.clamp_min(1)
    if kind == "ball":
        center = center.to(k.dtype)
        radius = _norm(torch.where(inside, wide - center.to(wide.dtype)[..., None, :], 0.0)).amax(-1)
        return largest, center[..., None, :], (radius * (1 + 1e-6)).float()[..., None]
    length = torch.linalg.vector_norm(center, dim=-1, keepdim=True)
    axis = torch.where(length > 0, center / torch.where(length > 0, length, 1.0), 0.0).to(k.dtype)
    u = axis.to(wide.dtype)[..., None, :]
    size = torch.linalg.vector_norm(u, dim=-1)
    along = (wide * u).sum(-1) / torch.where(size > 0, size, 1.0)
    along = along - (2 * d + 16) * 2.0**-23 * _norm(wide) - 2e-18
    least = torch.where(inside[..., 0], along, torch.inf).amin(-1)
    return largest, axis[..., None, :], least.float()[..., None]


def _norm(x: torch.Tensor) -> torch.Tensor:
    """Norms of the rows of x, a little too large."""
    return x.square().sum(-1).sqrt() * 1.0001 + 2e-18


def upper(bounds: BlockBounds, q: torch.Tensor, blocks: slice) -> torch.Tensor:
    """Upper bounds of the computed products of ``q`` (B, G, R, D) with every key of a block, (B, G, R, blocks)."""
    wide = q if q.dtype == torch.float64 else q.float()
    d = q.shape[-1]
    size = _norm(wide)[..., None]
    largest = bounds.norm[:, :, None, blocks].to(wide.dtype)
    reach = size * largest
    bound = reach
    vectors = bounds.vectors[:, :, blocks].to(wide.dtype)
    if bounds.kind == "minmax":
        low, high = vectors[..., 0, :].transpose(-1, -2), vectors[..., 1, :].transpose(-1, -2)
        box = wide.clamp_max(0.0) @ low + wide.clamp_min(0.0) @ high
        total = wide.abs().sum(-1, keepdim=True) * 1.0001
        bound = torch.fmin(reach, box + (2 * d + 8) * ULP * (total * largest))
    elif bounds.kind == "ball":
        radius = bounds.scalars[:, :, None, blocks, 0].to(wide.dtype)
        along = wide @ vectors[..., 0, :].transpose(-1, -2)
        bound = torch.fmin(reach, along + size * radius + (d + 8) * ULP * 1.01 * reach)
    elif bounds.kind == "cap":
        axis = vectors[..., 0, :]
        least = bounds.scalars[:, :, None, blocks, 0].to(wide.dtype)
        length = torch.linalg.vector_norm(axis, dim=-1)[:, :, None]
        along = wide @ axis.transpose(-1, -2) / torch.where(length > 0, length, 1.0)
        along = torch.minimum(along + (2 * d + 16) * ULP * size, size)
        across = ((size - along) * (size + along)).clamp_min(0.0).sqrt()
        aside = ((largest - least) * (largest + least)).clamp_min(0.0).sqrt()
        edge = along * least + across * aside + 16 * ULP * reach
        within = (along * largest >= size * least) | (length == 0)
        bound = torch.where(within, reach, torch.fmin(reach, edge))
    elif bounds.kind == "int8":
        step, missed = bounds.scalars[:, :, None, blocks].to(wide.dtype).unbind(-1)
        scale = wide.abs().amax(-1, keepdim=True) / 127.0
        scale = torch.where(scale > 0, scale, 1.0)
        rounded = (wide / scale).round().clamp(-127, 127)
        own = _norm(wide - rounded * scale)[..., None] + 1e-6 * size
        # Sums of integers below 2^24: exact.
        product = (rounded @ vectors.flatten(2, 3).transpose(-1, -2)).unflatten(-1, (-1, bounds.block)).amax(-1)
        edge = scale * step * product + (size + own) * missed + own * largest + 8 * ULP * reach
        bound = torch.fmin(reach, edge)
    return bound + (d + 16) * ULP * reach + 1e-34


def check_bounds(name: str, bounds: BlockBounds, k_cache: torch.Tensor, paging: Paging) -> None:
    """Raise unless ``bounds`` were made for a cache like this."""
    if not isinstance(bounds, BlockBounds):
        raise TypeError(f"{name} must be a BlockBounds from make_block_bounds, got {type(bounds).__name__}")
    want = (paging.batch, k_cache.shape[1], -(-paging.capacity // bounds.block))
    if bounds.norm.shape != want:
        raise ValueError(f"{name} must be made for {want} sequences, heads, blocks, got {tuple(bounds.norm.shape)}")
    if bounds.vectors.shape[-1] != k_cache.shape[-1] or bounds.vectors.dtype not in (k_cache.dtype, torch.int8):
        raise ValueError(
            f"{name} must be made for head dim {k_cache.shape[-1]} and {k_cache.dtype}, got "
            f"{bounds.vectors.shape[-1]} and {bounds.vectors.dtype}"
        )
    if bounds.norm.device != k_cache.device:
        raise ValueError(f"{name} must be on {k_cache.device} like the cache, got {bounds.norm.device}")


def _positions(name: str, value: int | torch.Tensor, paging: Paging) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        if value.is_floating_point() or value.dtype == torch.bool or value.shape not in ((), (paging.batch,)):
            raise ValueError(
                f"{name} must be an integer or an integer tensor of shape ({paging.batch},), got {value.dtype} of "
                f"shape {tuple(value.shape)}"
            )
        return value.to(device=paging.device, dtype=torch.int32).expand(paging.batch)
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an integer or an integer tensor, got {type(value).__name__}")
    return torch.full((paging.batch,), value, dtype=torch.int32, device=paging.device)


def _known(start: int | torch.Tensor, length: int | torch.Tensor) -> list[tuple[int, int]]:
    """First key and one past the last, of what can be read without waiting for a device."""
    if torch.compiler.is_compiling():
        return []
    values = [x.tolist() if isinstance(x, torch.Tensor) and x.device.type == "cpu" else x for x in (start, length)]
    if any(isinstance(x, torch.Tensor) for x in values):
        return []
    count = max((len(x) for x in values if isinstance(x, list)), default=1)
    first, number = ([x] * count if isinstance(x, int) else x for x in values)
    return [(a, a + n) for a, n in zip(first, number, strict=True)]
