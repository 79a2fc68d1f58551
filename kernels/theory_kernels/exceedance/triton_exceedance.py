"""Monte Carlo counts inside a kernel; the stream is the one of reference.py. Imports triton: load lazily."""

# mypy: disable-error-code="no-untyped-def"
# Arguments of jitted functions are pointers and tiles that Python has no types for.
from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..primitives import INTERPRETED, SIZES

LANES = 16 if INTERPRETED else 128
# Philox blocks of one program: enough to hide its start, few enough to fill the machine.
EACH = 8 if INTERPRETED else 512


@triton.jit
def _half(bits, level, valid, below, ties, MASKED: tl.constexpr):
    less, same = bits < level, bits == level
    if MASKED:
        less, same = less & valid, same & valid
    return below + less.to(tl.int32), ties + same.to(tl.int32)


@triton.jit
def _word(word, level, at, n, below, ties, MASKED: tl.constexpr):
    below, ties = _half(word & 0xFFFF, level, at < n, below, ties, MASKED)
    return _half(word >> 16, level, at + 1 < n, below, ties, MASKED)


@triton.jit
def _block(seed, block, trial, row, level0, level1, level2, n, b0, t0, b1, t1, b2, t2, CLASSES: tl.constexpr,
           MASKED: tl.constexpr):  # fmt: skip
    zero = trial * 0
    w0, w1, w2, w3 = tl.philox(seed, zero + block, trial, zero + row, zero)
    at = block * 8
    b0, t0 = _word(w0, level0, at, n, b0, t0, MASKED)
    b0, t0 = _word(w1, level0, at + 2, n, b0, t0, MASKED)
    b0, t0 = _word(w2, level0, at + 4, n, b0, t0, MASKED)
    b0, t0 = _word(w3, level0, at + 6, n, b0, t0, MASKED)
    if CLASSES == 3:
        b1, t1 = _word(w0, level1, at, n, b1, t1, MASKED)
        b1, t1 = _word(w1, level1, at + 2, n, b1, t1, MASKED)
        b1, t1 = _word(w2, level1, at + 4, n, b1, t1, MASKED)
        b1, t1 = _word(w3, level1, at + 6, n, b1, t1, MASKED)
        b2, t2 = _word(w0, level2, at, n, b2, t2, MASKED)
        b2, t2 = _word(w1, level2, at + 2, n, b2, t2, MASKED)
        b2, t2 = _word(w2, level2, at + 4, n, b2, t2, MASKED)
        b2, t2 = _word(w3, level2, at + 6, n, b2, t2, MASKED)
    return b0, t0, b1, t1, b2, t2


@triton.jit(do_not_specialize=SIZES)
def _draw_kernel(
    BELOW, TIES, FIRST, LENGTH, seed, ROWS, TRIALS, TRIAL_BLOCKS, SPANS, plane,
    EACH: tl.constexpr, LANES: tl.constexpr, CLASSES: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    span = pid % SPANS
    trial = pid // SPANS % TRIAL_BLOCKS * LANES + tl.arange(0, LANES)
    row = pid // SPANS // TRIAL_BLOCKS
    n = tl.load(LENGTH + row)
    start = span * EACH
    if start * 8 >= n:
        return
    level0 = tl.load(FIRST + row).to(tl.uint32)
    level1 = tl.load(FIRST + (CLASSES // 2) * ROWS + row).to(tl.uint32)
    level2 = tl.load(FIRST + (CLASSES - 1) * ROWS + row).to(tl.uint32)
    b0 = tl.zeros([LANES], tl.int32)
    t0, b1, t1, b2, t2 = b0, b0, b0, b0, b0
    whole = tl.minimum(start + EACH, n // 8)
    for block in range(start, whole):
        b0, t0, b1, t1, b2, t2 = _block(seed, block, trial, row, level0, level1, level2, n, b0, t0, b1, t1, b2, t2,
                                        CLASSES, False)  # fmt: skip
    for block in range(tl.maximum(whole, start), tl.minimum(start + EACH, tl.cdiv(n, 8))):
        b0, t0, b1, t1, b2, t2 = _block(seed, block, trial, row, level0, level1, level2, n, b0, t0, b1, t1, b2, t2,
                                        CLASSES, True)  # fmt: skip
    at = row.to(tl.int64) * TRIALS + trial
    inside = trial < TRIALS
    # Integers add up to the same sum in any order, so these atomics keep runs bitwise equal.
    tl.atomic_add(BELOW + at, b0, mask=inside)
    tl.atomic_add(TIES + at, t0, mask=inside & (t0 > 0))
    if CLASSES == 3:
        tl.atomic_add(BELOW + plane + at, b1, mask=inside)
        tl.atomic_add(TIES + plane + at, t1, mask=inside & (t1 > 0))
        tl.atomic_add(BELOW + 2 * plane + at, b2, mask=inside)
        tl.atomic_add(TIES + 2 * plane + at, t2, mask=inside & (t2 > 0))


@triton.jit(do_not_specialize=SIZES)
def _settle_kernel(BELOW, TIES, REST, seed, ROWS, TRIALS, TRIAL_BLOCKS, LANES: tl.constexpr):
    """Decide the ties with the 32 next bits of the tail."""
    pid = tl.program_id(0)
    trial = pid % TRIAL_BLOCKS * LANES + tl.arange(0, LANES)
    row = pid // TRIAL_BLOCKS % ROWS
    kind = pid // TRIAL_BLOCKS // ROWS
    at = (kind * ROWS + row).to(tl.int64) * TRIALS + trial
    inside = trial < TRIALS
    ties = tl.load(TIES + at, mask=inside, other=0)
    below = tl.load(BELOW + at, mask=inside, other=0)
    rest = tl.load(REST + kind * ROWS + row).to(tl.uint32)
    zero = trial * 0
    for index in range(tl.max(ties, 0)):
        word, _, _, _ = tl.philox(seed, zero + index, trial, zero + row, zero + 1 + kind)
        below += ((word < rest) & (index < ties)).to(tl.int32)
    tl.store(BELOW + at, below, mask=inside)


def counts(
    first: list[list[int]], rest: list[list[int]], length: list[int], trials: int, seed: int, device: torch.device
) -> torch.Tensor:
    """Decisions below each threshold, int32 (thresholds, rows, trials); see reference.py."""
    classes, rows = len(first), len(length)
    out = torch.zeros((classes, rows, trials), dtype=torch.int32, device=device)
    if not out.numel() or max(length) == 0:
        return out
    ties = torch.zeros_like(out)
    first_t = torch.tensor(first, dtype=torch.int64, device=device)
    rest_t = torch.tensor(rest, dtype=torch.int64, device=device)
    length_t = torch.tensor(length, dtype=torch.int32, device=device)
    trial_blocks = triton.cdiv(trials, LANES)
    spans = triton.cdiv(max(length), 8 * EACH)
    _draw_kernel[(rows * trial_blocks * spans,)](
        out, ties, first_t, length_t, seed, rows, trials, trial_blocks, spans, rows * trials,
        EACH=EACH, LANES=LANES, CLASSES=classes, num_warps=max(1, LANES // 32),
    )  # fmt: skip
    _settle_kernel[(classes * rows * trial_blocks,)](
        out, ties, rest_t, seed, rows, trials, trial_blocks, LANES=LANES, num_warps=max(1, LANES // 32)
    )
    return out
