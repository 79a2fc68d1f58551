"""Lists of single keys for a block of rows, or of single rows for a block of keys.

Trained models keep few entries, scattered over most 64x64 tiles, so that skipping tiles saves little, while a
block of 64 rows has survivors with a small share of the keys. :func:`mark` runs the int8 screen with the same
rigorous margin (:mod:`theory_kernels.screen`) and keeps one bit for each (block of 64, single item): a mark can be
a false alarm, an unmarked item cannot be a survivor. A second kernel packs the marks into lists, and the exact
kernels gather the listed rows of K and V (or of Q and dO), 64 at a time, and treat them as a tile.

Bit b of word ``c * M + m`` of a block stands for item ``((32 c + 31 - b) M) + m``, M = ``MARK_TILE``: the order in
which a program that walks tiles of M items shifts its flags in, so that nothing has to be transposed.

The lists of a head share one pool of fixed size, which a few dense blocks may use up as long as the head as a whole
is sparse. A head that does not fit takes the dense path instead. Imports triton: load this module lazily.
"""

# ruff: noqa: SIM108 - branches on compile-time flags are no expressions
# mypy: disable-error-code="no-untyped-def"
# Arguments of jitted functions are pointers and tiles that Python has no types for.
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ..geometry import Geometry
from ..primitives import INTERPRETED, SIZES, any_bits, bit_count, first_bit, load_rows, sequence
from ..screen import Quantized, padded, reverse_bits, spread
from .plan import DENSE, LISTS, MARK_TILE, TILE

# Found on an H200. ``OWN``: rows (or keys) of the blocks that one program marks for.
MARK_OPTIONS = {"OWN": 128, "num_warps": 4, "num_stages": 3}


@triton.jit
def _mark_tile(
    own, A8, j, stop, cols, bits, level, THR, OWN: tl.constexpr, B: tl.constexpr, M: tl.constexpr, D: tl.constexpr,
    DP: tl.constexpr, BY_ROWS: tl.constexpr, MASKED: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    NG: tl.constexpr = OWN // B
    items = load_rows(A8, j * M, stop, cols, D, D, DP, M, MASKED)
    if UPCAST:
        acc = tl.dot(items.to(tl.float32), own.to(tl.float32)).to(tl.int32)
    else:
        acc = tl.dot(items, own, out_dtype=tl.int32)
    # Eight columns stay apart, as in the screen: the maximum needs no exchange between threads.
    if BY_ROWS:
        at = j * M + tl.arange(0, M)
        if MASKED:
            above = tl.load(THR + at, mask=at < stop, other=1000000000)
        else:
            above = tl.load(THR + at)
        best = tl.max(tl.reshape(acc, [M, NG, B // 8, 8]), 2)
        sign = (above[:, None, None] - best).to(tl.uint32, bitcast=True) >> 31
    else:
        # An addition and a maximum are one instruction; a subtraction would be two.
        best = tl.max(tl.reshape(acc + level[None, :], [M, NG, B // 8, 8]), 2)
        sign = (0 - best).to(tl.uint32, bitcast=True) >> 31
    return (bits << 1) | sign


@triton.jit
def _write_marks(
    WORDS, block, blocks, chunk, NL, bits, total, B: tl.constexpr, OWN: tl.constexpr, M: tl.constexpr,
    JOIN: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Store a chunk of marks; return ``total`` (OWN // B,) plus their number."""
    NG: tl.constexpr = OWN // B
    out = any_bits(tl.reshape(bits.to(tl.int32, bitcast=True), [M * NG, 8]), UPCAST)
    lane = tl.arange(0, M * NG)
    own = block + lane % NG
    at = WORDS + own.to(tl.int64) * NL + (chunk * M + lane // NG)
    if JOIN:
        out |= tl.load(at, mask=own < blocks, other=0)
    tl.store(at, out, mask=own < blocks)
    return total + tl.sum(tl.reshape(bit_count(out), [M, NG]), 0)


@triton.jit(do_not_specialize=SIZES)
def _mark_kernel(
    Q8, K8, THR, WORDS, PLACES, PATHS, LAYOUT, N, H, G, T, S, MAX_Q, MAX_K, OFFSET, NI, NL, BLOCKS, D: tl.constexpr,
    DP: tl.constexpr, OWN: tl.constexpr, B: tl.constexpr, M: tl.constexpr, BY_ROWS: tl.constexpr,
    CAUSAL: tl.constexpr, RAGGED: tl.constexpr, PACKED: tl.constexpr, JOIN: tl.constexpr, PATH: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    """Marks of OWN // B blocks: keys for blocks of rows, or (BY_ROWS) rows for blocks of keys.

    Causality only bounds the walk: the exact kernels mask the few pairs of the future that get a mark.
    """
    nh, block = tl.program_id(0) // BLOCKS, tl.program_id(0) % BLOCKS
    n, h = nh // H, nh % H
    g = h // (H // G)
    if BY_ROWS:
        path = tl.load(PATHS + N * H + n * G + g)
    else:
        path = tl.load(PATHS + nh)
        # Heavy blocks first: under a causal mask the last rows see the most keys and the first keys the most rows.
        block = BLOCKS - 1 - block
    if path != PATH:
        return
    q0, q_len, k0, k_len, off = sequence(LAYOUT, n, N, MAX_Q, MAX_K, OFFSET, RAGGED)
    first = block * OWN
    b = n * 0 if PACKED else n
    q_base = (b * H + h).to(tl.int64) * T + q0
    k_base = (b * G + g).to(tl.int64) * S + k0
    cols = tl.arange(0, DP)
    at = WORDS + nh.to(tl.int64) * NI * NL
    level = tl.zeros([OWN], tl.int32)
    low = n * 0
    if BY_ROWS:
        if first >= k_len:
            return
        own = tl.trans(load_rows(K8 + k_base * D, first, k_len, cols, D, D, DP, OWN, True))
        items = Q8 + q_base * D
        end = q_len
        if CAUSAL:
            low = tl.minimum(tl.maximum(first - off, 0), q_len) // M
    else:
        if first >= q_len:
            return
        own = tl.trans(load_rows(Q8 + q_base * D, first, q_len, cols, D, D, DP, OWN, True))
        rows = first + tl.arange(0, OWN)
        level = -tl.load(THR + q_base + rows, mask=rows < q_len, other=1000000000)
        items = K8 + k_base * D
        end = k_len
        if CAUSAL:
            end = tl.minimum(k_len, tl.maximum(tl.minimum(first + OWN, q_len) + off, 0))
    stop = tl.cdiv(end, M)
    total = tl.zeros([OWN // B], tl.int32)
    bits = tl.zeros([M, OWN // B, 8], tl.uint32)
    full = tl.maximum(end // M, low)
    for j in range(low, full):
        bits = _mark_tile(own, items, j, end, cols, bits, level, THR + q_base, OWN, B, M, D, DP, BY_ROWS, False, UPCAST)
        if j % 32 == 31:
            total = _write_marks(at, first // B, NI, j // 32, NL, bits, total, B, OWN, M, JOIN, UPCAST)
            bits = tl.zeros([M, OWN // B, 8], tl.uint32)
    for j in tl.range(full, stop, num_stages=1):
        bits = _mark_tile(own, items, j, end, cols, bits, level, THR + q_base, OWN, B, M, D, DP, BY_ROWS, True, UPCAST)
        if j % 32 == 31:
            total = _write_marks(at, first // B, NI, j // 32, NL, bits, total, B, OWN, M, JOIN, UPCAST)
            bits = tl.zeros([M, OWN // B, 8], tl.uint32)
    if (stop > low) & (stop % 32 != 0):
        bits = bits << (32 - stop % 32).to(tl.uint32)
        total = _write_marks(at, first // B, NI, stop // 32, NL, bits, total, B, OWN, M, JOIN, UPCAST)
    block = first // B + tl.arange(0, OWN // B)
    tl.store(PLACES + nh.to(tl.int64) * NI + block, total, mask=block < NI)


@triton.jit(do_not_specialize=SIZES)
def _pack_kernel(
    WORDS, LISTS, PLACES, BITMAP, PATHS, LAYOUT, N, H, G, MAX_Q, MAX_K, OFFSET, NI, NW, NL, capacity,
    NB: tl.constexpr, OWN: tl.constexpr, B: tl.constexpr, M: tl.constexpr, BY_ROWS: tl.constexpr, CAUSAL: tl.constexpr,
    RAGGED: tl.constexpr, PATH: tl.constexpr, DENSE: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Turn the marks of one block into a list of uint16, and the counts of a head into first places.

    Marks of keys also give the tiles that hold any, for key heads that take the path of tiles.
    """
    nh, block = tl.program_id(0) // NI, tl.program_id(0) % NI
    n, h = nh // H, nh % H
    code = PATHS + nh
    if BY_ROWS:
        code = PATHS + N * H + n * G + h // (H // G)
    if tl.load(code) != PATH:
        return
    _, q_len, _, k_len, off = sequence(LAYOUT, n, N, MAX_Q, MAX_K, OFFSET, RAGGED)
    first = block * B
    own_end, end = (k_len, q_len) if BY_ROWS else (q_len, k_len)
    lane = tl.arange(0, NB)
    counts = tl.load(PLACES + nh.to(tl.int64) * NI + lane, mask=(lane < NI) & (lane * B < own_end), other=0)
    place = tl.sum(tl.where(lane < block, counts, 0), 0)
    if tl.sum(counts, 0) > capacity:
        # More than the pool holds. The kernels of the dense path are launched after this one and see the new code.
        if block == 0:
            tl.store(code, DENSE)
        return
    tl.store(PLACES + (N * H + nh).to(tl.int64) * NI + block, place)
    if first >= own_end:
        return
    # The chunks that the program of OWN rows or keys has written.
    first = first // OWN * OWN
    low = n * 0
    if CAUSAL:
        if BY_ROWS:
            low = tl.minimum(tl.maximum(first - off, 0), end) // (32 * M)
            end = tl.where(first - off >= end, 0, end)
        else:
            end = tl.minimum(end, tl.maximum(tl.minimum(first + OWN, own_end) + off, 0))
    at = WORDS + (nh.to(tl.int64) * NI + block) * NL
    out = LISTS + nh.to(tl.int64) * capacity
    for chunk in range(low, tl.cdiv(end, 32 * M)):
        column = tl.arange(0, M)
        word = tl.load(at + chunk * M + column)
        if not BY_ROWS:
            # A chunk spans 32 M / B tiles: two words, M / B tiles to each bit.
            half = any_bits(tl.reshape(word, [M // B, B]), UPCAST).to(tl.uint32, bitcast=True)
            half = reverse_bits(half)
            odd = tl.arange(0, M // B).to(tl.uint32)
            wide = BITMAP + (nh.to(tl.int64) * NI + block) * NW + 2 * chunk
            tl.store(wide, tl.sum((spread(half & 0xFFFF) << odd).to(tl.int32, bitcast=True), 0), mask=2 * chunk < NW)
            tl.store(
                wide + 1, tl.sum((spread(half >> 16) << odd).to(tl.int32, bitcast=True), 0), mask=2 * chunk + 1 < NW
            )
        count = bit_count(word)
        mine = out + (place + tl.cumsum(count, 0) - count)
        place += tl.sum(count, 0)
        item = (chunk * 32 + 31) * M + column
        for step in range(tl.max(count, 0)):
            bit = first_bit(tl.where(word != 0, word, 1))
            tl.store(mine + step, (item - bit * M).to(tl.int16), mask=word != 0)
            word = word & (word - 1)


@triton.jit
def listed(LISTS, PLACES, nh, block, heads, NI, capacity):
    """Where the list of a block starts, and how long it is."""
    at = nh.to(tl.int64) * NI + block
    return LISTS + (nh.to(tl.int64) * capacity + tl.load(PLACES + heads.to(tl.int64) * NI + at)), tl.load(PLACES + at)


@triton.jit
def items(at, start, count, COUNT: tl.constexpr):
    """Items start .. start + COUNT - 1 of a list; past its end, one that does not exist."""
    slot = start + tl.arange(0, COUNT)
    item = tl.load(at + slot, mask=slot < count, other=-1).to(tl.int32) & 0xFFFF
    return tl.where(slot < count, item, 0x7FFFFFFF)


class Lists(NamedTuple):
    """Lists of every block of every head, empty where there is no room for any.

    Attributes
    ----------
    items : torch.Tensor
        int16 (N * H, capacity), to be read as uint16: the lists of a head one after another.
    spans : torch.Tensor
        int32 (2, N * H, blocks): lengths, then first places.
    """

    items: torch.Tensor
    spans: torch.Tensor


def make_lists(shape: tuple[int, int, int], capacity: int, device: torch.device) -> Lists:
    """Room for lists; ``shape`` is that of the marks, (N * H, blocks, words)."""
    return Lists(
        torch.empty((shape[0], capacity), dtype=torch.int16, device=device),
        torch.empty((2, *shape[:2]), dtype=torch.int32, device=device),
    )


def fill_lists(
    out: Lists,
    views: list[Quantized],
    geometry: Geometry,
    words: int,
    bitmap: torch.Tensor,
    paths: torch.Tensor,
    rows: bool,
) -> None:
    """List keys for blocks of rows, or (``rows``) rows for blocks of keys.

    Parameters
    ----------
    out : Lists
        Written for the heads that take lists.
    views : list of Quantized
        An item is listed when any view marks it.
    words : int
        Words that the marks of a block take.
    bitmap : torch.Tensor
        int32 (N * H, blocks, words): set to the tiles with a listed key, unless ``rows``.
    paths : torch.Tensor
        int32 codes; heads (or key heads) that do not take lists are left alone. Changed for those that do not fit.
    rows : bool
        The blocks are of keys.
    """
    (heads, blocks), capacity = out.spans.shape[1:], out.items.shape[1]
    marks = torch.empty((heads, blocks, words), dtype=torch.int32, device=paths.device)
    for index, x in enumerate(views):
        mark(x, geometry, marks, out.spans, paths, rows, index > 0)
    h, g = views[0].q.shape[1], views[0].k.shape[1]
    _pack_kernel[(heads * blocks,)](
        marks, *out, bitmap, paths, geometry.layout if geometry.layout is not None else marks, geometry.sequences, h, g,
        geometry.max_q, geometry.max_k, geometry.offset, blocks, bitmap.shape[2], words, capacity,
        NB=triton.next_power_of_2(blocks), OWN=MARK_OPTIONS["OWN"], B=TILE, M=MARK_TILE,
        BY_ROWS=rows, CAUSAL=geometry.causal, RAGGED=geometry.layout is not None, PATH=LISTS, DENSE=DENSE,
        UPCAST=INTERPRETED, num_warps=4,
    )  # fmt: skip


def mark(
    x: Quantized,
    geometry: Geometry,
    words: torch.Tensor,
    spans: torch.Tensor,
    paths: torch.Tensor,
    rows: bool,
    join: bool,
) -> None:
    """Fill ``words`` (N * H, blocks, words) and their number ``spans[0]`` for the heads on the path of lists.

    With ``rows`` the blocks are of keys and the marks are of rows; with ``join`` marks are added to those of an
    earlier view. Words of chunks that no pair of a block lies in are not written.
    """
    (_, h, t, d), (g, s) = x.q.shape, x.k.shape[1:3]
    options = dict(MARK_OPTIONS)
    blocks = triton.cdiv(geometry.max_k if rows else geometry.max_q, options["OWN"])
    _mark_kernel[(words.shape[0] * blocks,)](
        x.q, x.k, x.level, words, spans, paths, geometry.layout if geometry.layout is not None else words,
        geometry.sequences, h, g, t, s, geometry.max_q, geometry.max_k, geometry.offset, words.shape[1],
        words.shape[2], blocks, D=d, DP=max(32, padded(d)), B=TILE, M=MARK_TILE, BY_ROWS=rows,
        CAUSAL=geometry.causal, RAGGED=geometry.layout is not None, PACKED=geometry.packed, JOIN=join, PATH=LISTS,
        UPCAST=INTERPRETED, **options,
    )  # fmt: skip
