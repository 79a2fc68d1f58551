"""What a query sees, read off the mask that a model hands to its attention function.

transformers builds masks from causality, padding, windows, caches, packed texts and more, differently for each backend
and version. Nothing is assumed of how: each row of the mask is reduced to its first and last visible key and their
number, a simple description is fitted to these three numbers, and it is used only if it gives them back in every row.
That costs one pass over the mask, once a mask, and O(T) memory. Everything else stays an explicit mask.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from theory_lab.probes.calls import Visibility

#: Added to a logit, this makes its weight an exact zero in float32, so that smaller values hide a key as -inf does.
_HIDDEN = -1e4
#: Mask entries looked at in one go.
_BLOCK = 1 << 24

_memory = threading.local()


class Indescribable(Exception):
    """A mask that does more than hide keys, or one of an unknown kind."""


def read_mask(
    mask: Any, *, backend: str, q: torch.Tensor, k: torch.Tensor, causal: bool, window: int | None
) -> Visibility:
    """Describe what the queries of an attention call see.

    Parameters
    ----------
    mask : Tensor, BlockMask or None
        As the attention function got it.
    backend : str
        Name of the attention function, which decides what no mask means.
    q, k : Tensor (B, H, T, D), (B, G, S, D)
        Only their shapes are used.
    causal : bool
        Whether the module says that its queries see no later keys.
    window : int or None
        The sliding window the function was told of; only FlashAttention goes by it, others by the mask.

    Raises
    ------
    Indescribable
        If the mask adds anything but "hidden" to the scores.
    """
    batch, queries, keys = q.shape[0], q.shape[2], k.shape[2]
    if mask is None:
        return _without_mask(backend, queries, keys, causal, window)
    known = _recall(mask, (batch, queries, keys, causal, backend))
    if known is not None:
        return known
    if not isinstance(mask, torch.Tensor):
        seen = _of_block_mask(mask, batch, queries, keys, causal, q.device)
    elif mask.ndim == 2:
        seen = _of_padding(mask, queries, keys, causal, window)
    elif mask.ndim == 4:
        seen = _of_tensor(mask, queries, keys, causal)
    else:
        raise Indescribable(f"its mask has {mask.ndim} axes")
    _remember(mask, (batch, queries, keys, causal, backend), seen)
    return seen


def _without_mask(backend: str, queries: int, keys: int, causal: bool, window: int | None) -> Visibility:
    if "flash" in backend:
        # FlashAttention aligns the last query with the last key.
        return Visibility(
            causal=causal, query_offset=keys - queries if causal else 0, window=window if causal else None
        )
    if queries == 1:
        return Visibility(causal=causal, query_offset=keys - 1 if causal else 0)
    # SDPA aligns the first query with the first key; the eager functions know no causality but the mask's.
    return Visibility(causal=causal and backend == "sdpa")


def _of_padding(mask: torch.Tensor, queries: int, keys: int, causal: bool, window: int | None) -> Visibility:
    """A 2D mask of valid keys, as FlashAttention takes it."""
    valid = torch.nn.functional.pad(mask.bool(), (0, max(0, keys - mask.shape[1])))[:, :keys]
    first, last, count = (part[:, None, None] for part in _summarize(valid))
    if not bool((count == last - first + 1).logical_or(count == 0).all()):
        raise Indescribable("its padding lies inside the text")
    offset = keys - queries if causal else 0
    starts = torch.where(count > 0, first, keys).flatten()
    lengths = torch.where(count > 0, last + 1, 0).flatten()
    seen = Visibility(causal=causal, query_offset=offset, window=window if causal else None)
    return _with_ends(seen, starts, lengths, queries, keys, mask.device, causal)


def _of_block_mask(
    mask: Any, batch: int, queries: int, keys: int, causal: bool, device: torch.device | str
) -> Visibility:
    """A FlexAttention mask, read through its index function."""
    function = getattr(mask, "mask_mod", None)
    if function is None:
        raise Indescribable(f"its mask is a {type(mask).__name__}")
    one = torch.arange(batch, device=device).reshape(-1, 1, 1, 1)
    head = torch.zeros(1, 1, 1, 1, dtype=torch.long, device=device)
    column = torch.arange(keys, device=device).reshape(1, 1, 1, -1)

    def rows(start: int, stop: int) -> torch.Tensor:
        row = torch.arange(start, stop, device=device).reshape(1, 1, -1, 1)
        return function(one, head, row, column).expand(batch, 1, stop - start, keys)

    return _fit(rows, (batch, 1), queries, keys, causal, device)


def _of_tensor(mask: torch.Tensor, queries: int, keys: int, causal: bool) -> Visibility:
    """A 4D mask: True where a key is seen, or 0 there and a huge negative number elsewhere."""
    if mask.shape[-1] < keys or mask.shape[-2] not in (1, queries):
        raise Indescribable(f"its mask of {tuple(mask.shape)} does not fit {queries} queries and {keys} keys")
    mask = mask[..., :keys]

    def rows(start: int, stop: int) -> torch.Tensor:
        block = mask[:, :, start:stop] if mask.shape[2] > 1 else mask
        if block.dtype == torch.bool:
            return block
        if not block.is_floating_point():
            raise Indescribable(f"its mask holds {block.dtype} numbers")
        seen = block == 0
        if not bool((seen | (block <= _HIDDEN)).all()):
            raise Indescribable("it adds a bias to the scores")
        return seen

    return _fit(rows, (mask.shape[0], mask.shape[1]), queries if mask.shape[2] > 1 else 1, keys, causal, mask.device,
                queries=queries)  # fmt: skip


def _blocks(rows: int, width: int) -> Iterator[tuple[int, int]]:
    step = max(1, _BLOCK // max(width, 1))
    for start in range(0, rows, step):
        yield start, min(rows, start + step)


def _summarize(seen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """First and last True of the last axis, and their number; first and last mean nothing where there is none."""
    small = seen.to(torch.uint8)
    count = seen.sum(-1)
    first = small.argmax(-1)
    last = seen.shape[-1] - 1 - small.flip(-1).argmax(-1)
    return first, last, count


def _fit(
    rows: Callable[[int, int], torch.Tensor],
    heads: tuple[int, int],
    given: int,
    keys: int,
    causal: bool,
    device: torch.device | str,
    queries: int | None = None,
) -> Visibility:
    """The simplest description of the rows ``rows(start, stop)`` (B, H, rows, S), or those rows themselves."""
    queries = given if queries is None else queries
    parts = [_summarize(rows(start, stop)) for start, stop in _blocks(given, heads[0] * heads[1] * keys)]
    # A few numbers a row: what follows is easier to follow on the CPU, and no slower.
    first, last, count = (torch.cat([part[index] for part in parts], dim=-1).cpu() for index in range(3))
    solid = bool((count == last - first + 1).logical_or(count == 0).all())
    alike = all(bool((part == part[:, :1]).all()) for part in (first, last, count))
    if solid and alike:
        ends = [part[:, 0].expand(-1, queries) for part in (first, last, count)]
        order = (_fit_causal, _fit_bidirectional) if causal else (_fit_bidirectional, _fit_causal)
        for fit in order:
            found = fit(ends[0], ends[1], ends[2], keys)
            if found is not None:
                seen, starts, lengths = found
                reach = seen.query_offset
                if (
                    isinstance(reach, int)
                    and reach > 0
                    and not causal
                    and queries == keys
                    and seen.window == 2 * reach + 1
                ):
                    # As many keys to both sides (ModernBERT): a query's own key lies in the middle, not at the end.
                    seen = Visibility(causal=False, window=reach)
                return _with_ends(seen, starts, lengths, queries, keys, device, causal)
    whole = torch.cat([rows(start, stop) for start, stop in _blocks(given, heads[0] * heads[1] * keys)], dim=2)
    return Visibility(causal=causal, mask=whole.expand(-1, -1, queries, -1))


_Fitted = tuple[Visibility, torch.Tensor, torch.Tensor]


def _fit_causal(first: torch.Tensor, last: torch.Tensor, count: torch.Tensor, keys: int) -> _Fitted | None:
    filled = count > 0
    row = torch.arange(first.shape[1])
    shift = torch.where(filled, last - row, -(keys + first.shape[1])).amax(1)  # (B,), of the rows no padding cuts short
    starts = torch.where(filled, first, keys).amin(1)
    lengths = torch.where(filled, last + 1, 0).amax(1)
    common = shift.amax()
    for offset in (common.expand_as(shift), shift):
        position = row + offset[:, None]
        late = filled & (first > starts[:, None])
        widths = (position - first + 1)[late].unique()
        if widths.numel() > 1:
            continue
        window = int(widths) if widths.numel() else _closing(position, filled, lengths)
        reach = position - (window if window is not None else keys + int(position.max()) + 1) + 1
        low = torch.maximum(starts[:, None], reach)
        high = torch.minimum(position, lengths[:, None] - 1)
        if not _same(first, last, filled, low, high):
            continue
        if window is not None:
            starts = torch.where(starts <= reach[:, 0], 0, starts)  # the window hides those keys already
        uncut = (position[:, -1] < lengths) & (lengths > 0)
        lengths = torch.where(uncut, keys, lengths)  # causality hides those keys already
        same = bool((offset == offset[:1]).all())
        return Visibility(causal=True, query_offset=int(offset[0]) if same else offset, window=window), starts, lengths
    return None


def _closing(position: torch.Tensor, filled: torch.Tensor, lengths: torch.Tensor) -> int | None:
    """The window that makes a row empty because a padded text ended too far before it; None if none does."""
    after = filled[:, :-1] & ~filled[:, 1:]
    widths = (position[:, 1:] - lengths[:, None] + 1)[after].unique()
    return int(widths) if widths.numel() == 1 and int(widths) > 0 else None


def _fit_bidirectional(first: torch.Tensor, last: torch.Tensor, count: torch.Tensor, keys: int) -> _Fitted | None:
    filled = count > 0
    starts = torch.where(filled, first, keys).amin(1)
    lengths = torch.where(filled, last + 1, 0).amax(1)
    if not _same(first, last, filled, starts[:, None].expand_as(first), lengths[:, None].expand_as(first) - 1):
        return None
    return Visibility(causal=False), starts, lengths


def _same(first: torch.Tensor, last: torch.Tensor, filled: torch.Tensor, low: torch.Tensor, high: torch.Tensor) -> bool:
    """Whether low to high are the visible keys of every row, none where ``filled`` is False."""
    agree = (low == first) & (high == last)
    return bool(torch.where(filled, agree, low > high).all())


def _with_ends(
    seen: Visibility,
    starts: torch.Tensor,
    lengths: torch.Tensor,
    queries: int,
    keys: int,
    device: torch.device | str,
    causal: bool,
) -> Visibility:
    """Add the ends of the keys and queries, where there is padding at all."""
    starts, lengths = starts.cpu(), lengths.cpu()
    offset = seen.query_offset
    if not isinstance(offset, int):
        seen = replace(seen, query_offset=offset.to(device))
    # Queries are tokens among the keys: those of a causal model at its offset, an encoder's at the same places. Those
    # of cross-attention are others, whose padding is not known here.
    shift = offset if causal else 0
    own = causal or queries == keys
    more: dict[str, Any] = {}
    if bool((starts > 0).any()):
        more["key_starts"] = starts.to(device)
        if own:
            more["query_starts"] = (starts - shift).clamp(0, queries).to(device)
    if bool((lengths < keys).any()):
        more["lengths"] = lengths.to(device)
        if own:
            more["query_lengths"] = (lengths - shift).clamp(0, queries).to(device)
    return replace(seen, **more)


def _recall(mask: Any, key: tuple[Any, ...]) -> Visibility | None:
    """What was found of this very mask before: a model hands one mask to many layers."""
    kept = getattr(_memory, "kept", {}).get(id(mask))
    if kept is None or kept[0]() is not mask or kept[1] != (key, _version(mask)):
        return None
    return kept[2]


def _version(mask: Any) -> int | None:
    """Changes with every write to a tensor; None where that is not counted."""
    return None if isinstance(mask, torch.Tensor) and mask.is_inference() else getattr(mask, "_version", None)


def _remember(mask: Any, key: tuple[Any, ...], seen: Visibility) -> None:
    if seen.mask is not None and seen.mask.untyped_storage().data_ptr() == mask.untyped_storage().data_ptr():
        return  # it would keep the mask alive
    if isinstance(mask, torch.Tensor) and mask.is_inference():
        return  # nothing counts what is written to it
    kept = _memory.__dict__.setdefault("kept", {})
    for dead in [name for name, entry in kept.items() if entry[0]() is None]:
        del kept[dead]
    try:
        kept[id(mask)] = (weakref.ref(mask), (key, _version(mask)), seen)
    except TypeError:  # a kind of mask that cannot be referred to weakly
        return
