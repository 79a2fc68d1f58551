"""Arguments of maps: the window and the pixels of an image, and one head's part of what heads share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from theory_lab.errors import InputError

if TYPE_CHECKING:
    import torch

#: First row or column, and one past the last.
Span = tuple[int, int]


def edges(span: Span, pixels: int) -> NDArray[np.int64]:
    begin, end = span
    return begin + np.arange(pixels + 1, dtype=np.int64) * (end - begin) // pixels


def checked_span(name: str, value: Any, size: int) -> Span:
    good = isinstance(value, (tuple, list)) and len(value) == 2 and all(isinstance(x, (int, np.integer)) for x in value)
    if not good or not 0 <= value[0] < value[1] <= size:
        raise InputError(name, value, f"first and last of 0 <= first < last <= {size} are allowed")
    return int(value[0]), int(value[1])


def checked_resolution(value: Any) -> tuple[int, int]:
    pair = value if isinstance(value, (tuple, list)) else (value, value)
    if len(pair) != 2 or not all(isinstance(x, int) and not isinstance(x, bool) and x >= 1 for x in pair):
        raise InputError("resolution", value, "a whole number of at least 1, or a pair of them, is allowed")
    return pair[0], pair[1]


def one_head(x: torch.Tensor, head: int, heads: int) -> torch.Tensor:
    place = head // (heads // x.shape[1])
    return x[:, place : place + 1]


def one_of(value: Any, name: str, head: int) -> Any:
    """A head's part of an argument that differs by head."""
    if value is None:
        return None
    if isinstance(value, (int, float)):
        return value
    if name in ("mask", "eta_threshold") and value.ndim > 1:
        return value if value.shape[1] == 1 else value[:, head : head + 1]
    return value[head : head + 1] if value.numel() > 1 else value
