"""Two sweeps over the scores: a bound of every row's threshold, and lists of the keys that it leaves.

The threshold of a row over any subset of its keys is at most the threshold over all: more keys only add to the sum that
must be 1. :func:`bounds` keeps, for each row, the largest score of each of a few slots of columns - elementwise maxima,
nothing else - and solves for the threshold of those, which are scores of distinct keys. :func:`fill_lists` sweeps
again and lists, for a block of rows, the keys whose score passes the bound in some row, less a margin for the rounding
of the products; or, for a block of keys, the rows. What is not listed has weight 0.

A list has a fixed room; a block that needs more, or hits most of what it sees, has length -1 and walks everything.
Imports triton: load this module lazily.
"""

# ruff: noqa: SIM108 - branches on compile-time flags are no expressions
# mypy: disable-error-code="no-untyped-def"
# Arguments of jitted functions are pointers and tiles that Python has no types for.
from __future__ import annotations

import triton
import triton.language as tl

from ..primitives import (
    SIZES,
    any_bits,
    bit_count,
    dot,
    either,
    first_bit,
    head_at,
    higher,
    load_rows,
    maxima,
    row_block,
    sequence,
)
from .weights import largest_root, solver_step, weights

# Largest (alpha - 1) z that is told from its neighbors: products of float32, summed in other orders by other kernels,
# then differ by a few 2^-22 of it.
_MOST = tl.constexpr(2.0**17)


@triton.jit(do_not_specialize=SIZES)
def norms_kernel(
    K, NORMS, LAYOUT, N, H, G, MAX_Q, MAX_K, OFFSET, BLOCKS, kb, kh, kt, D: tl.constexpr, DP: tl.constexpr,
    BR: tl.constexpr, RAGGED: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Largest norm of a key of each sequence and key head, as the bits of a float32, ordered like integers."""
    ng, block = tl.program_id(0) // BLOCKS, tl.program_id(0) % BLOCKS
    n, g = ng // G, ng % G
    _, _, k0, k_len, _ = sequence(LAYOUT, n, N, MAX_Q, MAX_K, OFFSET, RAGGED)
    b = n * 0 if PACKED else n
    at = head_at(K, b, g, k0, kb, kh, kt)
    x = load_rows(at, block * BR, k_len, tl.arange(0, DP), kt, D, DP, BR, True).to(tl.float32)
    size = tl.sqrt(tl.max(tl.sum(x * x, 1), 0))
    tl.atomic_max(NORMS + ng, size.to(tl.int32, bitcast=True))


@triton.jit
def last_keys(rows, off, q_len, k_len, CAUSAL: tl.constexpr):
    """Last key that each row sees; -1 for rows that see none."""
    last = k_len - 1 + rows * 0
    if CAUSAL:
        last = tl.minimum(last, rows + off)
    return tl.where(rows < q_len, last, -1)


@triton.jit
def sees(first, B: tl.constexpr, off, q_len, k_len, CAUSAL: tl.constexpr):
    """Ends of the keys that all, and that some, of the rows ``first`` .. ``first + B - 1`` see."""
    every = k_len + first * 0
    some = every
    if CAUSAL:
        every = tl.minimum(tl.maximum(first + off + 1, 0), k_len)
        some = tl.minimum(tl.maximum(tl.minimum(first + B, q_len) + off, 0), k_len)
    return every, some


@triton.jit
def seen_by(first, B: tl.constexpr, off, q_len, CAUSAL: tl.constexpr):
    """First row that sees some, and first that sees all, of the keys ``first`` .. ``first + B - 1``."""
    some = first * 0
    every = some
    if CAUSAL:
        some = tl.minimum(tl.maximum(first - off, 0), q_len)
        every = tl.minimum(tl.maximum(first + B - 1 - off, 0), q_len)
    return some, every


@triton.jit
def _slot_maxima(
    best, q, at, start, hi, last, cols, kt, D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    NS: tl.constexpr, MASKED: tl.constexpr, PREC: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    k = load_rows(at, start, hi, cols, kt, D, DP, BN, MASKED)
    acc = dot(q, tl.trans(k), tl.zeros([BM, BN], tl.float32), PREC, UPCAST)
    if MASKED:
        keys = start + tl.arange(0, BN)
        acc = tl.where(keys[None, :] <= last[:, None], acc, float("-inf"))
    # Eight columns stay apart: they lie in different threads of the product's layout, so no thread needs another's.
    return higher(best, maxima(tl.reshape(acc, [BM, NS, BN // (8 * NS), 8]), 2, UPCAST))


@triton.jit
def _row_sums(x):
    """Sums over the slots of each row; those that lie in one thread first."""
    return tl.sum(tl.sum(x, 1), 1)


@triton.jit
def _slot_sums(raw, factor, state, eps, filled, MODE: tl.constexpr):
    p, s = weights(raw * factor[:, None, None], state[:, None, None], eps, filled, MODE, True)
    count = tl.zeros_like(state)
    if MODE == 1:
        count = _row_sums((s > 0.0).to(tl.float32))
    return _row_sums(p), _row_sums(s), count


@triton.jit(do_not_specialize=SIZES)
def bounds_kernel(
    Q, K, FACTOR, EPS, NORMS, ROWS, LAYOUT, N, H, G, T, S, MAX_Q, MAX_K, OFFSET, plane, BLOCKS, qb, qh, qt, kb, kh, kt,
    fb, fh, ft, D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, NS: tl.constexpr,
    MODE: tl.constexpr, CAUSAL: tl.constexpr, RAGGED: tl.constexpr, PACKED: tl.constexpr, PREC: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    """Anchor (the largest score), an upper bound of the state, the level that a listed score must pass, and a limit.

    Where float32 cannot tell scores apart that differ by 1, the limit is the factor at which it can, elsewhere inf. A
    row has its weights at the lower of the two: keys that are the same to float32 then share theirs.

    A row with a score of NaN or +inf, or a factor that is negative or no finite number, has the state NaN, which makes
    its output and gradients NaN, and the level -inf, with which every block of keys lists it.
    """
    nh, b, h, g, first, q0, q_len, k0, k_len, off = row_block(
        LAYOUT, N, H, G, MAX_Q, MAX_K, OFFSET, BLOCKS, BM, RAGGED, PACKED
    )
    if first >= q_len:
        return
    rows = first + tl.arange(0, BM)
    last = last_keys(rows, off, q_len, k_len, CAUSAL)
    cols = tl.arange(0, DP)
    q_at = head_at(Q, b, h, q0, qb, qh, qt)
    at = head_at(K, b, g, k0, kb, kh, kt)
    q = load_rows(q_at, first, q_len, cols, qt, D, DP, BM, True)
    hi = k_len
    full = k_len // BN
    if CAUSAL:
        hi = tl.minimum(k_len, tl.maximum(tl.minimum(first + BM, q_len) + off, 0))
        full = tl.minimum(full, tl.maximum(first + off + 1, 0) // BN)
    best = tl.full([BM, NS, 8], float("-inf"), tl.float32)
    for j in range(full):
        best = _slot_maxima(best, q, at, j * BN, hi, last, cols, kt, D, DP, BM, BN, NS, False, PREC, UPCAST)
    for j in tl.range(full, tl.cdiv(hi, BN), num_stages=1):
        best = _slot_maxima(best, q, at, j * BN, hi, last, cols, kt, D, DP, BM, BN, NS, True, PREC, UPCAST)
    anchor = maxima(maxima(best, 1, UPCAST), 1, UPCAST)
    eps = tl.load(EPS + h)
    factor = tl.load(FACTOR + b * fb + h * fh + (q0 + rows) * ft, mask=rows < q_len, other=0.0) * eps
    sound = (anchor < float("inf")) & (factor >= 0.0) & (factor < float("inf"))
    alive = sound & (anchor > float("-inf"))
    # What some slots hold tells the size of scores better than their largest, which may happen to be near 0.
    most = tl.max(tl.max(tl.where(best > float("-inf"), tl.abs(best), 0.0), 2), 1)
    hot = alive & (most * factor > _MOST)
    limit = tl.where(hot, tl.where(last == 0, 0.0, _MOST / tl.where(hot, most, 1.0)), float("inf"))
    factor = tl.minimum(factor, limit)
    # The mark of a row that will be NaN: no register holds another one through the solver.
    factor = tl.where(alive, factor, tl.where(anchor == float("-inf"), 0.0, float("nan")))
    anchor = tl.where(alive, anchor, 0.0)
    filled = (best > float("-inf")) & alive[:, None, None]
    raw = tl.where(filled, best - anchor[:, None, None], 0.0)
    start = 0.0 if MODE == 0 else 1.0
    state = tl.full([BM], start, tl.float32)
    high, low = state, state - (32.0 if MODE == 0 else 1.0)
    step, go = 0, 1
    while go > 0:
        total, slope, count = _slot_sums(raw, factor, state, eps, filled, MODE)
        # A bound need not be close to the last bit.
        state, low, high, large = solver_step(state, low, high, total, slope, count, eps, 0.04, MODE)
        step += 1
        go = tl.where(step < 30, tl.max((large & alive).to(tl.int32), 0), 0)
    # A little more than the solution, checked: an upper bound of the state is a lower bound of the threshold.
    state = state + 1e-3 * (1.0 if MODE == 0 else state)
    total, slope, count = _slot_sums(raw, factor, state, eps, filled, MODE)
    state = tl.where(total >= 1.0, tl.minimum(state, high), high)
    wide = q.to(tl.float32)
    size = tl.load(NORMS + nh // H * G + g).to(tl.float32, bitcast=True)
    # Products and their sums in float32 (or three tf32 products) are off by a few (D + 8) units of rounding of |q| |k|.
    slack = (D + 8) * 4.8e-7 * tl.sqrt(tl.sum(wide * wide, 1)) * size
    positive = factor > 0.0
    reach = largest_root(state, eps, MODE) / tl.where(positive, factor, 1.0)
    # Norms whose squares overflow leave no bound.
    level = tl.where(positive & (slack < float("inf")), anchor - reach - slack, float("-inf"))
    sound = factor == factor
    level = tl.where(alive | (sound == 0), level, float("inf"))
    state = tl.where(sound, state, float("nan"))
    out = ROWS + (b * H + h).to(tl.int64) * T + q0 + rows
    tl.store(out, anchor, mask=rows < q_len)
    tl.store(out + plane, state, mask=rows < q_len)
    tl.store(out + 2 * plane, level, mask=rows < q_len)
    tl.store(out + 3 * plane, limit, mask=rows < q_len)


@triton.jit
def _marks(
    bits, own, at, start, stop, levels, LEVELS, cols, stride, D: tl.constexpr, DP: tl.constexpr, OWN: tl.constexpr,
    B: tl.constexpr, M: tl.constexpr, BY_ROWS: tl.constexpr, MASKED: tl.constexpr, PREC: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    """Shift in, for M items, whether a score with one of the B rows (or keys) of each block passes its level."""
    items = load_rows(at, start, stop, cols, stride, D, DP, M, MASKED)
    acc = dot(items, own, tl.zeros([M, OWN], tl.float32), PREC, UPCAST)
    if BY_ROWS:
        rows = start + tl.arange(0, M)
        if MASKED:
            level = tl.load(LEVELS + rows, mask=rows < stop, other=float("inf"))
        else:
            level = tl.load(LEVELS + rows)
        best = tl.max(tl.reshape(acc, [M, OWN // B, B // 8, 8]), 2)
        # NaN passes: the row it makes NaN has to reach the gradient of this key.
        hit = (best <= level[:, None, None]) == 0
    else:
        if UPCAST:
            # The interpreter runs a custom reduction element by element.
            hit = tl.max(tl.reshape(acc - levels[None, :], [M, OWN // B, B // 8, 8]), 2) > 0.0
        else:
            # A comparison that joins the last one is one instruction; a difference and a maximum are two.
            hit = tl.reduce(tl.reshape(acc > levels[None, :], [M, OWN // B, B // 8, 8]), 2, either)
    return (bits << 1) | hit.to(tl.uint32)


@triton.jit
def _ones_from(bit):
    """int32 with the bits from ``bit`` (any integer) upwards."""
    some = -1 << tl.minimum(tl.maximum(bit, 0), 31)
    return tl.where(bit > 31, 0, some)


@triton.jit
def _pack(
    ITEMS, bits, cursor, chunk, own, blocks, least, stop, room, OWN: tl.constexpr, B: tl.constexpr, M: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    """Append the marked items of 32 tiles, from ``least`` up to ``stop``, to the lists; returns the new lengths."""
    NG: tl.constexpr = OWN // B
    word = any_bits(tl.reshape(bits.to(tl.int32, bitcast=True), [M * NG, 8]), UPCAST)
    word = tl.trans(tl.reshape(word, [M, NG]))
    lane = tl.arange(0, M)[None, :]
    top = chunk * 32 + 31
    word = word & _ones_from(top + 1 - (stop[:, None] - 1 - lane + M) // M)
    word = word & ~_ones_from(top + 1 - (least[:, None] - lane + M - 1) // M)
    count = bit_count(word)
    place = cursor[:, None] + tl.cumsum(count, 1) - count
    # The first tile was shifted in first, so it stands highest.
    item = top * M + lane
    at = ITEMS + (own.to(tl.int64) * room)[:, None] + place
    inside = (own < blocks)[:, None]
    for step in range(tl.max(tl.max(count, 1), 0)):
        bit = first_bit(tl.where(word != 0, word, 1))
        keep = (word != 0) & (place + step < room) & inside
        tl.store(at + step, item - bit * M, mask=keep)
        word = word & (word - 1)
    return cursor + tl.sum(count, 1)


@triton.jit(do_not_specialize=SIZES)
def lists_kernel(
    Q, K, LEVELS, ITEMS, COUNTS, LAYOUT, N, H, G, T, S, MAX_Q, MAX_K, OFFSET, NL, capacity, BLOCKS, qb, qh, qt, kb, kh,
    kt, D: tl.constexpr, DP: tl.constexpr, OWN: tl.constexpr, B: tl.constexpr, M: tl.constexpr, BY_ROWS: tl.constexpr,
    PAD: tl.constexpr, CAUSAL: tl.constexpr, RAGGED: tl.constexpr, PACKED: tl.constexpr, PREC: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    """Lists of OWN // B blocks: keys for blocks of rows, or (BY_ROWS) rows for blocks of keys.

    Causality only bounds the walk: the exact kernels mask the few pairs of the future that get listed.
    """
    nh, block = tl.program_id(0) // BLOCKS, tl.program_id(0) % BLOCKS
    # Heavy blocks first: under a causal mask the last rows see the most keys and the first keys the most rows.
    if not BY_ROWS:
        block = BLOCKS - 1 - block
    n, h = nh // H, nh % H
    g = h // (H // G)
    q0, q_len, k0, k_len, off = sequence(LAYOUT, n, N, MAX_Q, MAX_K, OFFSET, RAGGED)
    first = block * OWN
    b = n * 0 if PACKED else n
    q_at = head_at(Q, b, h, q0, qb, qh, qt)
    k_at = head_at(K, b, g, k0, kb, kh, kt)
    levels_at = LEVELS + (b * H + h).to(tl.int64) * T + q0
    cols = tl.arange(0, DP)
    low = n * 0
    levels = 0.0
    if BY_ROWS:
        if first >= k_len:
            return
        own = load_rows(k_at, first, k_len, cols, kt, D, DP, OWN, True)
        at, stride, end = q_at, qt, q_len
        if CAUSAL:
            low = tl.minimum(tl.maximum(first - off, 0), q_len)
    else:
        if first >= q_len:
            return
        own = load_rows(q_at, first, q_len, cols, qt, D, DP, OWN, True)
        rows = first + tl.arange(0, OWN)
        levels = tl.load(levels_at + rows, mask=rows < q_len, other=float("inf"))
        at, stride, end = k_at, kt, k_len
        if CAUSAL:
            end = tl.minimum(k_len, tl.maximum(tl.minimum(first + OWN, q_len) + off, 0))
    own = tl.trans(own)
    own_blocks = first // B + tl.arange(0, OWN // B)
    # Items that all of a block sees are listed if marked; the few that a part of it sees are listed all, after those.
    if BY_ROWS:
        _, least = seen_by(own_blocks * B, B, off, q_len, CAUSAL)
        until = least * 0 + q_len
    else:
        until, _ = sees(own_blocks * B, B, off, q_len, k_len, CAUSAL)
        least = until * 0
    items = ITEMS + nh.to(tl.int64) * NL * capacity
    cursor = tl.zeros([OWN // B], tl.int32)
    bits = tl.zeros([M, OWN // B, 8], tl.uint32)
    stop = tl.cdiv(end, M)
    full = tl.maximum(end // M, low // M)
    for j in range(low // M, full):
        bits = _marks(bits, own, at, j * M, end, levels, levels_at, cols, stride, D, DP, OWN, B, M, BY_ROWS, False,
                      PREC, UPCAST)  # fmt: skip
        if j % 32 == 31:
            cursor = _pack(items, bits, cursor, j // 32, own_blocks, NL, least, until, capacity, OWN, B, M, UPCAST)
            bits = tl.zeros([M, OWN // B, 8], tl.uint32)
    for j in tl.range(full, stop, num_stages=1):
        bits = _marks(bits, own, at, j * M, end, levels, levels_at, cols, stride, D, DP, OWN, B, M, BY_ROWS, True,
                      PREC, UPCAST)  # fmt: skip
        if j % 32 == 31:
            cursor = _pack(items, bits, cursor, j // 32, own_blocks, NL, least, until, capacity, OWN, B, M, UPCAST)
            bits = tl.zeros([M, OWN // B, 8], tl.uint32)
    if (stop > low // M) & (stop % 32 != 0):
        bits = bits << (32 - stop % 32).to(tl.uint32)
        cursor = _pack(items, bits, cursor, stop // 32, own_blocks, NL, least, until, capacity, OWN, B, M, UPCAST)
    if BY_ROWS:
        late, late_stop = seen_by(own_blocks * B, B, off, q_len, CAUSAL)
    else:
        late, late_stop = sees(own_blocks * B, B, off, q_len, k_len, CAUSAL)
    # Walking everything in order is worth about twice as many gathered items.
    fits = (cursor <= capacity - PAD) & (2 * cursor <= end - low) & (own_blocks < NL)
    pad = tl.arange(0, PAD)[None, :]
    ends = items + own_blocks.to(tl.int64)[:, None] * capacity + cursor[:, None] + pad
    last = late[:, None] + pad
    tl.store(ends, tl.where(last < late_stop[:, None], last, 0x7FFFFFFF), mask=fits[:, None] & (pad >= 0))
    tl.store(COUNTS + nh.to(tl.int64) * NL + own_blocks, tl.where(fits, cursor, -1), mask=own_blocks < NL)


@triton.jit
def list_of(ITEMS, COUNTS, IDENTITY, at, capacity, first, even, stop, late, BN: tl.constexpr):
    """Where the list of block ``at`` lies, its first place, the end of whole tiles that need no mask, and its end.

    A block without a list walks from ``first`` to ``stop``, up to ``even`` without a mask. ``late`` is the number of
    items at the end of a list that some of the block do not see.
    """
    count = tl.load(COUNTS + at)
    listing = count >= 0
    items = tl.where(listing, ITEMS + at * capacity, IDENTITY)
    begin, even = tl.where(listing, 0, first), tl.where(listing, count // BN * BN, even)
    return items, begin, even, tl.where(listing, count + late, stop)
