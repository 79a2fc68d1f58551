"""Sizes of what a call keeps for its backward, from shapes alone: nothing is read back from the device."""

from __future__ import annotations

from typing import NamedTuple

import torch

# Rows (or keys) that share one list.
BLOCK = 64
# Room of one list: with 64 rows a block, 64 items a row, as many bytes as K and V at a head dim of 64 have.
CAPACITY = 4096
# Below this many keys no lists are made.
LIST_FROM = 1024


class Plan(NamedTuple):
    """Shape (N * H, blocks of rows, room) and dtype of the lists of keys; empty without lists."""

    items: tuple[int, int, int]
    dtype: torch.dtype

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
        return Plan((0, 0, 0), torch.int32)
    # int16, read as unsigned.
    dtype = torch.int16 if max(max_q, max_k) <= 2**16 else torch.int32
    return Plan((sequences * q.shape[1], -(-max_q // BLOCK), room(max_k)), dtype)


def room(length: int) -> int:
    """Items that a list over ``length`` keys or rows may hold."""
    return min(CAPACITY, length)
