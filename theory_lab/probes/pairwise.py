"""Images and entries of maps that are computed pair by pair, by the definition of a model's own mechanism."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from theory_lab.probes.own import Block, blocks

if TYPE_CHECKING:
    from theory_lab.probes.calls import AttentionCall

Span = tuple[int, int]


def _weights(block: Block, head: int, view: int | None) -> Tensor:
    """(R, S) of one head: the whole, or one view."""
    return (block.weights if view is None else block.parts[view - 1])[0, head]


def image_of(
    call: AttentionCall, head: int, view: int | None, rows: Span, columns: Span, size: Span, reduce: str
) -> Tensor:
    """An image of a window, as ``theory_kernels.pooled_map`` makes it, from all of its pairs.

    Parameters
    ----------
    call : AttentionCall
        Of one text.
    head, view : int
    rows, columns : (int, int)
    size : (int, int)
        Most pixels down and across.
    reduce : {"max", "sum"}

    Returns
    -------
    Tensor (pixels down, pixels across)

    Raises
    ------
    InputError
        For more keys than can be computed pair by pair.
    """
    device = call.q.device
    down, across = (min(most, end - begin) for most, (begin, end) in zip(size, (rows, columns), strict=True))
    row_of, column_of = (_pixels(span, count, device) for span, count in ((rows, down), (columns, across)))
    high = torch.full((down, across), -torch.inf, device=device)
    low = torch.full((down, across), torch.inf, device=device)
    total = torch.zeros(down, across, device=device, dtype=torch.float64)
    for (first, stop), block in blocks(call, rows, call.k.shape[2]):
        begin = max(first, rows[0])
        w = _weights(block, head, view)[begin - first : stop - first, slice(*columns)].float()
        pixel = (row_of[begin - rows[0] : stop - rows[0], None] * across + column_of).flatten()
        w = w.flatten()
        high.view(-1).scatter_reduce_(0, pixel, w, "amax")
        low.view(-1).scatter_reduce_(0, pixel, w, "amin")
        total.view(-1).scatter_add_(0, pixel, w.double())
    return total.float() if reduce == "sum" else torch.where(high >= -low, high, low)


def _pixels(span: Span, count: int, device: torch.device) -> Tensor:
    """The pixel of every row or column of a window: those of ``begin + floor(r n / count)``."""
    begin, end = span
    edges = torch.arange(1, count, device=device) * (end - begin) // count
    return torch.searchsorted(edges, torch.arange(end - begin, device=device), right=True)


def entries_of(
    call: AttentionCall, head: int, view: int | None, rows: Span, above: float
) -> tuple[NDArray[np.int64], NDArray[np.float32], NDArray[np.int64]]:
    """Weights of rows that are not zero, or larger in magnitude than `above`: (query, key), values, pointers."""
    places, values, counts = [], [], []
    for (first, stop), block in blocks(call, rows, call.k.shape[2]):
        begin = max(first, rows[0])
        w = _weights(block, head, view)[begin - first : stop - first].float()
        kept = w.abs() > above
        found = kept.nonzero()
        found[:, 0] += begin
        places.append(found)
        values.append(w[kept])
        counts.append(kept.sum(-1))
    pointers = np.concatenate([[0], torch.cat(counts).cumsum(0).cpu().numpy()]).astype(np.int64)
    return torch.cat(places).cpu().numpy(), torch.cat(values).cpu().numpy(), pointers
