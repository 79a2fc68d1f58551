"""H2O's last row by simulating its cache: its choice of keys rests on every earlier row, in O(n (heavy + recent)).

Scores of earlier rows must be invented. Each repeats the score that the last row gives a key with probability 1/2 and
draws it anew from the same law otherwise: every row has the law's scores, and keys differ in how heavy they are. With
rows that share nothing the cache would be a choice at random.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from theory_lab.streams import Stream, Streams

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]
Law = Callable[["Stream", int], F64]

HEAVY, RECENT = 64, 64
_CHUNK = 256  # rows of scores drawn at once


def last_row_keys(n: int, heavy: int, recent: int, batch: int, scores: Callable[[int, I64], F64]) -> I64:
    """Keys in the cache of row n - 1, the last.

    Parameters
    ----------
    n, heavy, recent : int
        Rows, and keys kept by accumulated weight and by recency, as in :class:`theory_lab.attention.decoding.H2O`.
    batch : int
        Independent caches.
    scores : callable
        (row, keys (batch, slots)) -> scores (batch, slots); a slot that holds no key has -1 and its score is ignored.

    Returns
    -------
    int64 array, shape (batch, min(n, heavy + recent))
    """
    size = min(n, heavy + recent)
    keys = np.full((batch, size), -1, np.int64)
    heat = np.zeros((batch, size))
    lines = np.arange(batch)
    free = np.zeros(batch, np.int64)  # where the next key goes
    for row in range(n):
        keys[lines, free], heat[lines, free] = row, 0.0
        if row == n - 1:
            break
        z = np.where(keys >= 0, scores(row, keys), -np.inf)
        e = np.exp(z - z.max(-1, keepdims=True))
        heat += e / e.sum(-1, keepdims=True)
        if row + 1 < size:
            free += 1
            continue
        # The row saw a full cache: the coldest of the keys that are not recent makes room, the older one on a tie.
        cold = np.where(keys <= row - recent + 1, heat, np.inf)
        tied = cold == cold.min(-1, keepdims=True)
        free = np.where(tied, keys, n).argmin(-1)
    return keys


def last_row_weights(base: F64, law: Law, streams: list[Streams], scale: float) -> F64:
    """Weights (rows, n) of the last row, whose scores are ``scale * base``; earlier rows as the module says."""
    rows, n = base.shape
    size = min(n, HEAVY + RECENT)
    chunks = _drawn(rows, size, law, streams)
    drawn = next(chunks) if n > 1 else (np.empty(0), np.empty(0))
    lines = np.arange(rows)[:, None]

    def scores(row: int, keys: I64) -> F64:
        nonlocal drawn
        at = row % _CHUNK
        if row and at == 0:
            drawn = next(chunks)
        fresh, repeats = drawn[0][:, at], drawn[1][:, at]
        return scale * np.where(repeats, base[lines, keys], fresh)

    keys = last_row_keys(n, HEAVY, RECENT, rows, scores)
    kept = scale * base[lines, keys]
    e = np.exp(kept - kept.max(-1, keepdims=True))
    weights = np.zeros_like(base)
    weights[lines, keys] = e / e.sum(-1, keepdims=True)
    return weights


def _drawn(rows: int, size: int, law: Law, streams: list[Streams]) -> Iterator[tuple[F64, npt.NDArray[np.bool_]]]:
    """Scores (rows, _CHUNK, size) drawn anew, and whether a key repeats its own instead."""
    shape = (_CHUNK, size)
    while True:
        fresh = np.stack([law(stream[2], _CHUNK * size).reshape(shape) for stream in streams])
        repeats = np.stack([stream[3].uniforms(_CHUNK * size).reshape(shape) < 0.5 for stream in streams])
        yield fresh[:rows], repeats[:rows]
