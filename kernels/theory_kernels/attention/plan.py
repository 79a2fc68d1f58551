"""Which path the Triton implementation takes, decided from shapes alone (no read of the device)."""

from __future__ import annotations

from typing import NamedTuple

import torch

# Rows and keys that one bit of the tile bitmap stands for.
TILE = 64
# Key tiles in one word of the bitmap.
WORD = 32
# Tiles tried a head to see whether it is dense.
SAMPLES = 32
# How many of them must hold a possible survivor for the dense path (crossover measured on an H200).
DENSE_FROM = 14
# Below this many keys the screen costs more than it saves (measured on an H200, see kernels/README.md).
SCREEN_FROM = 4608
# With a backward to follow, which shares the bitmap, it pays earlier.
SCREEN_FROM_TRAINING = 2048
# Up to this many query rows the keys are split over programs instead (decode, short prefill).
SPLIT_ROWS = 64


class Plan(NamedTuple):
    """``screened``: a bitmap of active tiles is made first; ``bitmap``: its shape; ``samples``: tiles tried a head."""

    screened: bool
    bitmap: tuple[int, int, int]
    samples: int


def make_plan(
    implementation: str,
    sequences: int,
    q: torch.Tensor,
    v: torch.Tensor,
    max_q: int,
    max_k: int,
    screen_from: int | None,
) -> Plan:
    """Plan of a call; ``screen_from`` overrides the length from which the screen is used."""
    limit = SCREEN_FROM if screen_from is None else screen_from
    # The list kernels are bound to 64x64 tiles, of which 512 bytes a row fill the shared memory.
    row_bytes = max(q.shape[-1], v.shape[-1]) * q.element_size()
    if implementation != "triton" or max_k < limit or max_q <= SPLIT_ROWS or row_bytes > 512:
        return Plan(False, (0, 0, 0), 0)
    rows = -(-max_q // TILE)
    words = -(-max_k // (TILE * WORD))
    return Plan(True, (sequences * q.shape[1], rows, words), SAMPLES)
