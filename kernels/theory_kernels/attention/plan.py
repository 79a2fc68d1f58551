"""Which path the Triton implementation takes: from shapes here, from a few sampled tiles on the device.

Three paths share the work of a head (codes of :data:`TILES`, :data:`LISTS`, :data:`DENSE`): active 64x64 tiles
only; single keys (or query rows) gathered for each block of 64; everything. Nothing is read back from the device.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

# Rows and keys that one bit of the tile bitmap stands for.
TILE = 64
# Key tiles in one word of the bitmap.
WORD = 32
# Tiles tried a head to see how dense it is.
SAMPLES = 32
# From how many active ones on a query head, and a key head, takes the dense path, or lists single keys or rows where
# few enough are hit (crossovers measured on an H200). The backward for keys needs marks of its own.
DENSE_FROM, DENSE_FROM_KEYS = 14, 22
LIST_FROM, LIST_FROM_KEYS = 6, 8
# Below this many keys no lists are made: marking costs what they save.
LIST_LENGTH = 4096
# The most that lists may hold of all pairs of a block of 64 and a single key or row, in percent, a view.
LIST_MOST = 12
# Largest share of the bytes of K and V that the marks of single keys, and their lists, may each take.
LIST_SHARE = 1 / 4
# Keys (or rows) in one chunk of marks: 32 tiles of this many, see :mod:`.lists`.
MARK_TILE = 128
# Below this many keys the screen costs more than it saves (measured on an H200, see kernels/README.md).
SCREEN_FROM = 4608
# With a backward to follow, which shares the bitmap, it pays earlier.
SCREEN_FROM_TRAINING = 2048
# Up to this many query rows the keys are split over programs instead (decode, short prefill).
SPLIT_ROWS = 64

TILES, LISTS, DENSE = 0, 1, 2


class Plan(NamedTuple):
    """Shapes of what a call keeps for its backward.

    Attributes
    ----------
    screened : bool
        A bitmap of active tiles is made first.
    bitmap : tuple of int
        (N * H, blocks of rows, words): one bit a 64x64 tile.
    marks : tuple of int
        (N * H, blocks of rows, words): one bit a key and block of 64 rows, of which lists are made; empty where
        they would be too large.
    capacity : int
        Items that the lists of a head may hold together.
    paths : int
        Number of path codes: one a query head, then one a key head.
    """

    screened: bool
    bitmap: tuple[int, int, int]
    marks: tuple[int, int, int]
    capacity: int
    paths: int


def mark_words(length: int) -> int:
    """Words that hold one bit for each of ``length`` keys or rows, in whole chunks."""
    return -(-length // (32 * MARK_TILE)) * MARK_TILE


def list_capacity(max_q: int, max_k: int, causal: bool, views: int) -> int:
    """Items that the lists of a head may hold together, for blocks of rows and for blocks of keys alike."""
    pairs = max_q * max_k // (2 if causal and max_q == max_k else 1) // TILE
    return min(pairs * LIST_MOST * views // 100, 2**31 - 1)


def make_plan(
    implementation: str,
    sequences: int,
    q: torch.Tensor,
    v: torch.Tensor,
    max_q: int,
    max_k: int,
    causal: bool,
    views: int,
    screen_from: int | None,
) -> Plan:
    """Plan of a call; ``screen_from`` overrides the length from which the screen is used."""
    limit = SCREEN_FROM if screen_from is None else screen_from
    # The list kernels are bound to 64x64 tiles, of which 512 bytes a row fill the shared memory.
    row_bytes = max(q.shape[-1], v.shape[-1]) * q.element_size()
    if implementation != "triton" or max_k < limit or max_q <= SPLIT_ROWS or row_bytes > 512:
        return Plan(False, (0, 0, 0), (0, 0, 0), 0, 0)
    heads, rows = sequences * q.shape[1], -(-max_q // TILE)
    words = -(-max_k // (TILE * WORD))
    marks = (heads, rows, mark_words(max_k))
    capacity = list_capacity(max_q, max_k, causal, views)
    size = max(4 * marks[0] * marks[1] * marks[2], 4 * heads * -(-max_k // TILE) * mark_words(max_q))
    size = max(size, 2 * heads * capacity // views)
    given = v.shape[0] * v.shape[1] * v.shape[2] * (q.shape[-1] + v.shape[-1]) * v.element_size()
    # Items are 16 bits wide.
    if size > LIST_SHARE * given or max(max_q, max_k) > 2**16 or max_k < LIST_LENGTH:
        marks, capacity = (0, 0, 0), 0
    return Plan(True, (heads, rows, words), marks, capacity, heads + sequences * v.shape[1])
