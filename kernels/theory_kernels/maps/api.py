"""Public maps: validation and dispatch."""

# mypy: disable-error-code="no-untyped-def"
# The private functions repeat the types of the public ones, all at once.
from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from ..validation import check_heads, check_number, check_operands
from . import chunked, reference
from .pixels import pixels_of
from .problem import WEIGHTS, Head, Law, Sight

REDUCTIONS = ("max", "sum")
READINGS = ("logit", "weight")
IMPLEMENTATIONS = ("auto", "reference", "chunked")


class SparseRows(NamedTuple):
    """Weights that are not zero, as compressed sparse rows.

    ``pointers`` int64 (B * H * rows + 1,): entries ``pointers[r]`` up to ``pointers[r + 1]`` belong to row r, where
    ``r = (b * H + h) * rows + i``; ``columns`` int64 and ``values`` (entries,), ascending columns within a row.
    """

    pointers: torch.Tensor
    columns: torch.Tensor
    values: torch.Tensor


def pooled_map(
    q: torch.Tensor,
    k: torch.Tensor,
    q2: torch.Tensor | None = None,
    k2: torch.Tensor | None = None,
    *,
    rows: tuple[int, int] | None = None,
    columns: tuple[int, int] | None = None,
    resolution: int | tuple[int, int] = 512,
    reduce: str = "max",
    row_samples: int | None = None,
    normalizers: torch.Tensor | None = None,
    implementation: str = "auto",
    **mechanism: Any,
) -> torch.Tensor:
    """Image of a window of the T x S attention map at a fixed resolution, without the map.

    Pixel r of R over the window's n rows covers ``begin + floor(r n / R)`` up to, not including,
    ``begin + floor((r + 1) n / R)``, and columns likewise: each entry lies in exactly one pixel. A window smaller than
    the resolution has one pixel an entry.

    Parameters
    ----------
    q, k : torch.Tensor
        (B, H, T, D) and (B, G, S, D), H a multiple of G; float32, float16, bfloat16, float64.
    q2, k2 : torch.Tensor, optional
        The second view of ``weights="tda"``, shaped alike.
    rows, columns : (int, int), optional
        The window, from the first up to, not including, the last; default everything.
    resolution : int or (int, int)
        Most pixels down and across.
    reduce : str
        "max": the entry of largest magnitude, with its sign (the positive one of two alike); "sum": the sum.
    row_samples : int, optional
        Read at most so many of a pixel's rows, evenly spread: a maximum is then a lower bound (of positive weights),
        and a sum an estimate that takes the other rows to be like these. None reads every entry.
    normalizers : torch.Tensor, optional
        (B, H, T) from :func:`row_normalizers` with the same arguments. NaN entries are computed where needed and
        WRITTEN BACK: with one tensor for all zooms, a zoom costs its window only. Otherwise every call reads whole
        rows first.
    implementation : str
        "auto" and "chunked": O(T) memory; "reference": all weights in memory.
    **mechanism
        What the weights are and who sees whom, as in :func:`theory_kernels.attention_statistics`: ``weights``
        ("softmax", "entmax", "tra", "tda", "eta"), ``scale``, ``alpha``, ``beta``, ``lam``, ``kappa``, ``power``,
        ``normalize``, ``eta_threshold``, ``eta_sharpness``, ``eta_reading``, ``softcap``, ``sinks``, ``causal``,
        ``query_offset``, ``window``, ``key_starts``, ``lengths``, ``query_starts``, ``query_lengths``, ``mask``.

    Returns
    -------
    torch.Tensor
        (B, H, R, C), float32 (float64 for float64 operands); 0 where nothing is seen.

    Raises
    ------
    TypeError, ValueError
        For operands that do not fit together, or values out of range.
    """
    task = _Task(q, k, q2, k2, implementation, **mechanism)
    begin, end = _span("rows", rows, q.shape[2])
    left, right = _span("columns", columns, k.shape[2])
    down, across = _resolution(resolution)
    if reduce not in REDUCTIONS:
        raise ValueError(f"reduce must be one of {', '.join(REDUCTIONS)}, got {reduce!r}")
    if row_samples is not None:
        row_samples = _whole("row_samples", row_samples, 1)
    cache = task.cache(normalizers)
    with torch.no_grad():
        across_pixels = pixels_of(left, right, across, None, q.device)
        down_pixels = pixels_of(begin, end, down, row_samples, q.device)
        images = []
        for b in range(q.shape[0]):
            for h in range(q.shape[1]):
                head = task.head(b, h)
                norm = task.fill(head, cache[b, h], down_pixels.members)
                images.append(task.form.image(head, down_pixels, across_pixels, reduce, norm))
        shape = (*q.shape[:2], down_pixels.members.shape[0], across_pixels.members.shape[0])
        return torch.stack(images).view(shape) if images else q.new_zeros(shape, dtype=task.dtype)


def row_normalizers(
    q: torch.Tensor,
    k: torch.Tensor,
    q2: torch.Tensor | None = None,
    k2: torch.Tensor | None = None,
    *,
    rows: tuple[int, int] | None = None,
    implementation: str = "auto",
    **mechanism: Any,
) -> torch.Tensor:
    """What turns a score into a weight, for each row: computed once, a window then needs its own entries only.

    Parameters
    ----------
    q, k, q2, k2, implementation, **mechanism
        As in :func:`pooled_map`.
    rows : (int, int), optional
        Compute these rows only; (0, 0) none.

    Returns
    -------
    torch.Tensor
        (B, H, T), float32 (float64 for float64 operands), NaN for the rows not asked for, 0 for rows that see nothing:
        softmax and eta, the logarithm of the partition function (with its sink); entmax, the threshold; tra and tda,
        ``tau_i``.

    Raises
    ------
    TypeError, ValueError
        As in :func:`pooled_map`.
    """
    task = _Task(q, k, q2, k2, implementation, **mechanism)
    begin, end = (0, 0) if rows == (0, 0) else _span("rows", rows, q.shape[2])
    cache = task.cache(None)
    with torch.no_grad():
        for b in range(q.shape[0]):
            for h in range(q.shape[1]):
                task.fill(task.head(b, h), cache[b, h], torch.arange(begin, end, device=q.device))
    return cache


def sparse_rows(
    q: torch.Tensor,
    k: torch.Tensor,
    q2: torch.Tensor | None = None,
    k2: torch.Tensor | None = None,
    *,
    rows: tuple[int, int] | None = None,
    above: float = 0.0,
    normalizers: torch.Tensor | None = None,
    implementation: str = "auto",
    **mechanism: Any,
) -> SparseRows:
    """Weights larger than ``above`` in magnitude (0 drops the exact zeros only), as compressed sparse rows.

    Parameters
    ----------
    q, k, q2, k2, rows, normalizers, implementation, **mechanism
        As in :func:`pooled_map`.
    above : float
        Keep ``|w| > above``, >= 0.

    Returns
    -------
    SparseRows
        Row pointers, columns and values.

    Raises
    ------
    TypeError, ValueError
        As in :func:`pooled_map`.
    """
    task = _Task(q, k, q2, k2, implementation, **mechanism)
    begin, end = _span("rows", rows, q.shape[2])
    above = check_number("above", above, 0.0, True)
    cache = task.cache(normalizers)
    counts, found, values = [], [], []
    step = max(1, min(256, (1 << 20) // k.shape[2]))
    with torch.no_grad():
        for b in range(q.shape[0]):
            for h in range(q.shape[1]):
                head = task.head(b, h)
                for first in range(begin, end, step):
                    index = torch.arange(first, min(first + step, end), device=q.device)
                    w = reference.weights(head, index, task.fill(head, cache[b, h], index))
                    kept = w.abs() > above
                    counts.append(kept.sum(-1))
                    found.append(kept.nonzero()[:, 1])
                    values.append(w[kept])
        if not counts:
            empty = torch.zeros(0, dtype=torch.int64, device=q.device)
            return SparseRows(torch.zeros(1, dtype=torch.int64, device=q.device), empty, empty.to(task.dtype))
        pointers = torch.nn.functional.pad(torch.cat(counts).cumsum(0), (1, 0))
        return SparseRows(pointers, torch.cat(found), torch.cat(values))


class _Task:
    """Checked arguments, cut into heads."""

    def __init__(
        self, q, k, q2, k2, implementation, *, weights="softmax", scale=None, alpha=1.5, beta=1.0, lam=0.5, kappa=1.0,
        power=2.0, normalize=None, eta_threshold=None, eta_sharpness=10.0, eta_reading="logit", softcap=None,
        sinks=None, causal=True, query_offset=0, window=None, key_starts=None, lengths=None, query_starts=None,
        query_lengths=None, mask=None,
    ) -> None:  # fmt: skip
        if weights not in WEIGHTS:
            raise ValueError(f"weights must be one of {', '.join(WEIGHTS)}, got {weights!r}")
        if implementation not in IMPLEMENTATIONS:
            raise ValueError(f"implementation must be one of {', '.join(IMPLEMENTATIONS)}, got {implementation!r}")
        self.form: Any = reference if implementation == "reference" else chunked
        self.views = _views(q, k, q2, k2, weights)
        self.device, self.shape = q.device, (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
        self.dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
        self.normalize = weights in ("tra", "tda") if normalize is None else bool(normalize)
        if eta_reading not in READINGS:
            raise ValueError(f"eta_reading must be one of {', '.join(READINGS)}, got {eta_reading!r}")
        if weights in ("tra", "tda") and (scale is not None or softcap is not None):
            raise ValueError(f"scale and softcap belong to softmax, entmax and eta, got weights={weights!r}")
        power = check_number("power", power, 1.0, True)
        self.law = Law(
            weights, check_number("scale", q.shape[3] ** -0.5 if scale is None else scale, 0.0, True),
            None if softcap is None else check_number("softcap", softcap, 0.0, False),
            check_number("alpha", alpha, 1.0, True), check_number("kappa", kappa, 0.0, False), power,
            check_number("eta_sharpness", eta_sharpness, 0.0, False), eta_reading,
        )  # fmt: skip
        self.beta, self.lam = self._a_head("beta", beta), self._a_head("lam", lam)
        if sinks is not None and weights != "softmax":
            raise ValueError(f"sinks join the partition function of softmax, got weights={weights!r}")
        self.sinks = None if sinks is None else self._a_head("sinks", sinks)
        self.eta_tau = None
        if weights == "eta":
            if eta_threshold is None:
                raise ValueError("eta_threshold is needed for weights='eta', got None")
            level = torch.as_tensor(eta_threshold, dtype=self.dtype, device=q.device)
            level = level[None, :, None] if level.dim() == 1 else level
            try:
                self.eta_tau = level.expand(self.shape[:3])
            except RuntimeError:
                raise ValueError(
                    f"eta_threshold must be a number, (H,) or (B, H, T), got {tuple(level.shape)}"
                ) from None
        if window is not None:
            window = _whole("window", window, 1)
        self.sights = self._sights(causal, query_offset, window, key_starts, lengths, query_starts, query_lengths)
        self.mask = self._mask(mask)
        self._ready: dict[tuple[int, int, int], torch.Tensor] = {}

    def _a_head(self, name, value) -> list[float]:
        if isinstance(value, bool) or not isinstance(value, (int, float, torch.Tensor)):
            raise TypeError(f"{name} must be a number or a tensor, got {type(value).__name__}")
        level = torch.as_tensor(value, dtype=torch.float64).detach()
        if level.shape not in ((), (self.shape[1],)):
            raise ValueError(f"{name} must be a number or have shape ({self.shape[1]},), got {tuple(level.shape)}")
        if bool(level.isnan().any()) or (name != "sinks" and not bool(level.isfinite().all())):
            raise ValueError(f"{name} must be finite, got {level.tolist()}")
        return level.expand(self.shape[1]).tolist()

    def _integers(self, name, value, default, low, high) -> list[int]:
        batch = self.shape[0]
        if value is None:
            return [default] * batch
        if isinstance(value, bool) or not isinstance(value, (int, torch.Tensor)):
            raise TypeError(f"{name} must be an integer or an integer tensor, got {type(value).__name__}")
        level = torch.as_tensor(value)
        if level.is_floating_point() or level.is_complex() or level.dtype == torch.bool:
            raise TypeError(f"{name} must be an integer tensor, got dtype {level.dtype}")
        if level.shape not in ((), (batch,)):
            raise ValueError(f"{name} must have shape ({batch},), got {tuple(level.shape)}")
        found = level.expand(batch).tolist()
        if low is not None and not all(low <= x <= high for x in found):
            raise ValueError(f"{name} must lie in {low}..{high}, got {found}")
        return found

    def _sights(self, causal, query_offset, window, key_starts, lengths, query_starts, query_lengths) -> list[Sight]:
        _, _, t, s = self.shape
        offset = self._integers("query_offset", query_offset, 0, None, None)
        start = self._integers("key_starts", key_starts, 0, 0, s)
        stop = self._integers("lengths", lengths, s, 0, s)
        first = self._integers("query_starts", query_starts, 0, 0, t)
        last = self._integers("query_lengths", query_lengths, t, 0, t)
        sights = []
        for b in range(self.shape[0]):
            a, z = first[b], last[b]
            if causal or t == s:
                # A row whose own key is padding is padding too.
                if query_starts is None and key_starts is not None:
                    a = max(0, start[b] - offset[b])
                if query_lengths is None and lengths is not None:
                    z = min(t, stop[b] - offset[b])
            sights.append(Sight(start[b], stop[b], offset[b], bool(causal), window, a, z, None))
        return sights

    def _mask(self, mask) -> torch.Tensor | None:
        if mask is None:
            return None
        if not isinstance(mask, torch.Tensor) or mask.dtype != torch.bool:
            raise TypeError(f"mask must be a bool tensor, got {getattr(mask, 'dtype', type(mask).__name__)}")
        if mask.dim() != 4:
            raise ValueError(f"mask must have shape (B|1, H|1, T, S), got {tuple(mask.shape)}")
        try:
            return mask.to(self.device).expand(self.shape)
        except RuntimeError:
            raise ValueError(f"mask must broadcast to {self.shape}, got {tuple(mask.shape)}") from None

    def head(self, b: int, h: int) -> Head:
        """One head's operands, in the accumulation dtype."""
        views = []
        sight = self.sights[b]
        for index, (q, k) in enumerate(self.views):
            g = h // (q.shape[1] // k.shape[1])
            key = (index, b, g)
            if key not in self._ready:
                self._ready = {old: x for old, x in self._ready.items() if old[1:] == key[1:]}
                self._ready[key] = self._operand(k[b, g], sight.start, sight.stop)
            first, last = max(0, sight.first), max(0, sight.last)
            views.append((self._operand(q[b, h], first, last), self._ready[key]))
        if self.mask is not None:
            sight = Sight(
                sight.start, sight.stop, sight.offset, sight.causal, sight.window, sight.first, sight.last,
                self.mask[b, h],
            )  # fmt: skip
        return Head(
            tuple(views), sight, self.law, self.beta[h], self.lam[h], None if self.sinks is None else self.sinks[h],
            None if self.eta_tau is None else self.eta_tau[b, h],
        )  # fmt: skip

    def _operand(self, x: torch.Tensor, first: int, last: int) -> torch.Tensor:
        wide = x.detach().to(self.dtype)
        if first > 0 or last < x.shape[0]:
            # What lies in the padding must not matter, NaN included.
            row = torch.arange(x.shape[0], device=x.device)[:, None]
            wide = torch.where((row >= first) & (row < last), wide, 0.0)
        if not self.normalize:
            return wide
        largest = wide.abs().amax(-1, keepdim=True)
        scaled = wide / torch.where(largest > 0, largest, 1.0)
        norm = scaled.square().sum(-1, keepdim=True).sqrt()
        # Rounded back to the input dtype: the scores are those of the operands a kernel multiplies.
        return (scaled / torch.where(norm > 0, norm, 1.0)).to(x.dtype).to(self.dtype)

    def cache(self, given: torch.Tensor | None) -> torch.Tensor:
        """The caller's normalizers, or a tensor of NaN."""
        if given is None:
            return torch.full(self.shape[:3], math.nan, dtype=self.dtype, device=self.device)
        if given.shape != self.shape[:3] or given.dtype != self.dtype or given.device != self.device:
            raise ValueError(
                f"normalizers must be {self.dtype} of shape {self.shape[:3]} on {self.device}, "
                f"got {given.dtype} of shape {tuple(given.shape)} on {given.device}"
            )
        return given

    def fill(self, head: Head, cache: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """Normalizers of the rows ``index``, computed where the cache has NaN."""
        missing = index.flatten()
        missing = missing[cache[missing].isnan()].unique()
        if missing.numel():
            cache[missing] = self.form.normalizers(head, missing)
        return cache[index]


def _views(q, k, q2, k2, weights):
    if (q2 is None) != (k2 is None) or (q2 is not None) != (weights == "tda"):
        raise ValueError(f"q2 and k2 belong to weights='tda', which needs both, got weights={weights!r}")
    named = {"q": q, "k": k} | ({} if q2 is None else {"q2": q2, "k2": k2})
    check_operands(tuple(named), tuple(named.values()), data=True)
    check_heads("q", q, "k", k)
    if q2 is None:
        return [(q, k)]
    if q2.shape != q.shape:
        raise ValueError(f"q2 must be shaped like q {tuple(q.shape)}, got {tuple(q2.shape)}")
    if k2.shape != k.shape:
        raise ValueError(f"k2 must be shaped like k {tuple(k.shape)}, got {tuple(k2.shape)}")
    return [(q, k), (q2, k2)]


def _whole(name, value, low) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an integer, got {type(value).__name__}")
    if value < low:
        raise ValueError(f"{name} must be at least {low}, got {value}")
    return value


def _span(name, value, size) -> tuple[int, int]:
    if value is None:
        value = (0, size)
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise TypeError(f"{name} must be a pair of integers, got {value!r}")
    begin, end = (_whole(name, x, 0) for x in value)
    if not begin < end <= size:
        raise ValueError(f"{name} must be a span that is not empty within 0..{size}, got {begin}..{end}")
    return begin, end


def _resolution(value) -> tuple[int, int]:
    pair = (value, value) if isinstance(value, int) and not isinstance(value, bool) else value
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        raise TypeError(f"resolution must be an integer or a pair of them, got {value!r}")
    down, across = (_whole("resolution", x, 1) for x in pair)
    return down, across
