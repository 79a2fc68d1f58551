"""Sizes of what a call keeps for its backward, from shapes alone: nothing is read back from the device."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

# Rows (or keys) that share one list.
BLOCK = 64
# Room of one list, int32 (copies of 16-bit items into shared memory would not be asynchronous): with 64 rows a block,
# 64 items a row, as many bytes as K and V of a head have at a head dim of 64.
CAPACITY = 4096
# Numbers after those that are marked: up to a block that a part of a block sees, then such that do not exist. The exact
# kernels read lists in whole tiles, of at most 64 then.
PAD = 128
# Up to this many rows, those of the query heads of a key head together, scores are written down (see :mod:`.decode`).
FEW_ROWS = 32
# The most that lists may take, relative to queries, keys, values and output together.
MOST = 1.5
# Below this many keys no lists are made.
LIST_FROM = 1024


class Plan(NamedTuple):
    """Shape (N * H, blocks of rows, room) of the lists of keys, int32; empty without lists."""

    items: tuple[int, int, int]

    @property
    def listed(self) -> bool:
        return self.items[2] > 0


def make_plan(
    implementation: str,
    sequences: int,
    q: torch.Tensor,
    v: torch.Tensor,
    max_q: int,
    max_k: int,
    causal: bool,
    list_from: int | None,
) -> Plan:
    """Plan of a call; ``list_from`` overrides the number of keys from which lists are made."""
    limit = LIST_FROM if list_from is None else list_from
    if implementation != "triton" or max_k < limit or max_q < 2:
        return Plan((0, 0, 0))
    items = (sequences * q.shape[1], -(-max_q // BLOCK), room(max_k))
    # Without a bound of packed lengths, every sequence would get lists for all of the batch.
    given = q.shape[1] * q.shape[2] + v.shape[1] * v.shape[2]
    given *= q.shape[0] * (q.shape[-1] + v.shape[-1]) * q.element_size()
    return Plan((0, 0, 0) if 4 * math.prod(items) > MOST * given else items)


def room(length: int, rows: bool = False) -> int:
    """Numbers that a list over ``length`` keys, or ``rows``, may hold, with those at its end.

    The first keys are looked at by rows of every length, so lists of rows are less even than lists of keys.
    """
    return min(CAPACITY * 3 // 2 if rows else CAPACITY, length) + BLOCK + PAD
