"""Sums over the calls of one layer, and the measures of each head from them.

A sequence may reach attention in one call, or in several: segments of its rows (which is how one forward pass of a
causal model serves every shorter length), a prompt in pieces, or one token at a time out of a KV cache. Everything a
measure needs is a sum over rows, or over pairs, so calls add up; column masses grow with the keys.

Sums stay on the device of the statistics, in float64, so that a GPU need not wait for the host between layers; what
leaves it is a few numbers a head (:meth:`HeadSums.snapshot`), from which :func:`head_measures` makes the measures.
Shapes: B sequences of a batch, H heads, S keys, V views.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from theory_lab.probes import measures
from theory_lab.probes.measures import F64

#: Groups of measures that a probe chooses from.
GROUPS = ("sinks", "sparsity", "entropy", "maxima", "survivors", "scores")

Vectors = dict[str, Tensor]

_ROW_SUMS = ("visible", "seen", "counted", "mass", "dead", "entropy", "normalized", "support")


def parts_needed(groups: Sequence[str]) -> tuple[str, ...]:
    """What ``attention_statistics`` must compute for these groups (its argument ``need``)."""
    wanted = {"sinks": "columns", "sparsity": "near_zero", "scores": "scores"}
    return ("rows", *(part for group, part in wanted.items() if group in groups))


class HeadSums:
    """Sums of one layer over the calls of a batch of sequences.

    Parameters
    ----------
    unit_rows : bool
        Whether every row's weights sum to one, so that weights are their own shares of the row. Of others the sink
        weights need the shares that :meth:`add` takes, and are left out without them.
    """

    def __init__(self, *, unit_rows: bool = True) -> None:
        self.unit_rows = unit_rows
        self.calls = 0
        self._sums: Vectors = {}  # (B, H)
        self._maxima: Vectors = {}  # (B, H)
        self._minima: Vectors = {}  # (B, H)
        self._columns: Vectors = {}  # (B, H, S) mass, (B, 1, S) rows
        self._moments: list[Vectors] = []  # one a view: count, mean, square, and (B, H, M) log_mgf
        self._product: Tensor | None = None  # (B, H) sum over pairs of products of the views' deviations

    def add(self, call: Any, shares: Mapping[int, Tensor] | None = None) -> None:
        """Add the AttentionStatistics of a call, and sums of shares (B, H) by 1-based key, always the same keys."""
        visible = call.visible
        seen, counted = visible > 0, visible > 1
        normalized = call.entropy / visible.double().clamp_min_(2.0).log_()  # a lone key has entropy 0
        rows = (visible, seen, counted, call.mass, seen & (call.mass == 0), call.entropy, normalized, call.support)
        for name, row in zip(_ROW_SUMS, rows, strict=True):
            self._plus(name, _total(row))
        self._most("maximum", call.maximum.amax(-1))
        self._near_zero("", call.near_zero)
        if call.survivors is not None:
            for number, view in enumerate(call.survivors, 1):
                self._plus(f"survivors_{number}", _total(view))
        if call.consensus is not None:
            self._plus("consensus", _total(call.consensus))
        for number, view in enumerate(call.views, 1):
            self._plus(f"support_{number}", _total(view.support))
            self._most(f"maximum_{number}", view.maximum.amax(-1))
            self._near_zero(f"_{number}", view.near_zero)
        for key, share in (shares or {}).items():
            self._plus(f"share_{key}", share)
        self._grow("mass", call.column_mass)
        self._grow("rows", None if call.column_rows is None else call.column_rows.double()[:, None])
        self._scores(call)
        self.calls += 1

    def _plus(self, name: str, value: Tensor) -> None:
        self._sums[name] = self._sums[name] + value if name in self._sums else value

    def _most(self, name: str, value: Tensor) -> None:
        self._maxima[name] = torch.maximum(self._maxima[name], value) if name in self._maxima else value

    def _near_zero(self, view: str, counts: Tensor | None) -> None:
        if counts is not None:
            for index, count in enumerate(counts.double().unbind(-1)):
                self._plus(f"near_zero{view}_{index}", count)

    def _grow(self, name: str, new: Tensor | None) -> None:
        """Add columns; later calls may see more keys than earlier ones."""
        if new is None:
            return
        old = self._columns.get(name)
        if old is not None:
            long, short = (old, new) if old.shape[-1] >= new.shape[-1] else (new, old)
            new = long.clone()
            new[..., : short.shape[-1]] += short
        self._columns[name] = new

    def _scores(self, call: Any) -> None:
        """Merge moments as Chan, Golub and LeVeque do: exact for means far from 0, where sums of squares are not."""
        moved: list[tuple[Tensor, Tensor, Tensor]] = []
        first = not self._moments
        for number, view in enumerate(call.scores):
            count = view.count.double()
            some = count > 0
            mean, variance = torch.where(some, view.mean, 0.0), torch.where(some, view.variance, 0.0)
            for extremes, name, value, pick in (
                (self._minima, f"score_min_{number}", view.minimum, torch.fmin),
                (self._maxima, f"score_max_{number}", view.maximum, torch.fmax),
            ):
                extremes[name] = pick(extremes[name], value) if name in extremes else value
            for index in range(view.exceedances.shape[-1]):
                self._plus(f"exceed_{number}_{index}", view.exceedances[..., index].double())
            log_mgf = torch.where(some[..., None], view.log_mgf, -torch.inf)
            if first:
                self._moments.append({"count": count, "mean": mean, "square": variance * count, "log_mgf": log_mgf})
                continue
            old = self._moments[number]
            before = old["count"]
            total = (before + count).clamp_min(1.0)
            shift = mean - old["mean"]
            weights = ((before / total).log()[..., None], (count / total).log()[..., None])
            self._moments[number] = {
                "count": before + count,
                "mean": old["mean"] + shift * count / total,
                "square": old["square"] + variance * count + shift.square() * before * count / total,
                "log_mgf": torch.logaddexp(old["log_mgf"] + weights[0], log_mgf + weights[1]),
            }
            moved.append((shift, before, count))
        if call.covariance is None:
            return
        count = call.scores[0].count.double()
        product = torch.where(count > 0, call.covariance, 0.0) * count
        if self._product is not None:
            (shift1, before, added), (shift2, _, _) = moved
            cross = shift1 * shift2 * before * added / (before + added).clamp_min(1.0)
            product = self._product + product + cross
        self._product = product

    def snapshot(self, sink_keys: Sequence[int] = (1,)) -> Vectors:
        """What the measures of the sequences so far need, a (B, H) tensor each."""
        found = {**self._sums, **self._maxima, **self._minima}
        for number, view in enumerate(self._moments):
            for name in ("count", "mean", "square"):
                found[f"score_{name}_{number}"] = view[name]
            for index in range(view["log_mgf"].shape[-1]):
                found[f"log_mgf_{number}_{index}"] = view["log_mgf"][..., index]
        if self._product is not None:
            found["product"] = self._product
        if "mass" in self._columns:
            mass, rows = self._columns["mass"], self._columns["rows"]
            found["column_total"] = mass.sum(-1)
            nothing = torch.full_like(found["visible"], torch.nan)
            for k in sink_keys:
                here = k <= mass.shape[-1]
                found[f"column_mass_{k}"] = mass[..., k - 1] if here else nothing
                share = mass[..., k - 1] if self.unit_rows and here else self._sums.get(f"share_{k}")
                if not here and (self.unit_rows or share is not None):
                    found[f"sink_weight_{k}"] = nothing
                elif share is not None:
                    found[f"sink_weight_{k}"] = share / rows[..., k - 1]
            if self.unit_rows:
                # As measures.sink_scan does it.
                least = torch.ceil(rows.amax(-1, keepdim=True) / 4).clamp_min(1.0)
                alphas = torch.where(rows >= least, mass / rows.clamp_min(1.0), -torch.inf)
                top, key = alphas.max(-1)
                found["top_key"] = (key + 1).double()
                found["top_key_weight"] = top
        return found


def _total(rows: Tensor) -> Tensor:
    """Sum over rows in float64, without a copy of them."""
    return rows.sum(-1, dtype=torch.float64)


def stack(snapshots: Sequence[Vectors]) -> Tensor:
    """(snapshots, names, B, H); all must have the same names."""
    return torch.stack([value for snapshot in snapshots for value in snapshot.values()]).unflatten(
        0, (len(snapshots), -1)
    )


def pack(snapshots: Sequence[Vectors]) -> dict[str, F64]:
    """Snapshots on the host: name -> (snapshots, B, H); all must have the same names."""
    return unpack(list(snapshots[0]), [stack(snapshots)]) if snapshots else {}


def unpack(names: Sequence[str], stacked: Sequence[Tensor]) -> dict[str, F64]:
    """What :func:`stack` gave, on the host, in one transfer: name -> (snapshots of all, B, H)."""
    return dict(zip(names, torch.cat(list(stacked)).transpose(0, 1).cpu().numpy(), strict=True))


def head_measures(
    sums: Mapping[str, F64],
    *,
    near_zero: Sequence[float] = (),
    sink_keys: Sequence[int] = (1,),
    groups: Sequence[str] = GROUPS,
) -> dict[str, npt.NDArray[Any]]:
    """The measures of every head from the sums of :meth:`HeadSums.snapshot`.

    Parameters
    ----------
    sums : mapping of str to array
        All of one shape, such as (H,) or (B, H).
    near_zero : sequence of float
        The bounds that the statistics were made with.
    sink_keys : sequence of int
        1-based keys, as in the snapshot.
    groups : sequence of str
        Of :data:`GROUPS`.

    Returns
    -------
    dict
        Column name -> array. What has no value (a measure of two views of a mechanism with one, say) is left out.
    """
    makers: dict[str, Callable[[], dict[str, npt.NDArray[Any]]]] = {
        "sinks": lambda: _sinks(sums, sink_keys),
        "sparsity": lambda: _sparsity(sums, near_zero),
        "entropy": lambda: {
            "entropy": measures.divide(sums["entropy"], sums["seen"]),
            "normalized_entropy": measures.divide(sums["normalized"], sums["counted"]),
            "support": measures.divide(sums["support"], sums["seen"]),
        },
        "maxima": lambda: {
            "max_abs" + end: sums["maximum" + end] for end in ("", "_1", "_2") if "maximum" + end in sums
        },
        "survivors": lambda: _survivors(sums),
        "scores": lambda: _scores(sums),
    }
    found: dict[str, npt.NDArray[Any]] = {}
    for group in GROUPS:
        if group in groups:
            found |= makers[group]()
    found["dead_rows"] = measures.divide(sums["dead"], sums["seen"])
    found["dead_head"] = sums["mass"] == 0
    found["rows"] = sums["seen"].astype(np.int64)
    found["visible"] = sums["visible"].astype(np.int64)
    return found


def _sinks(sums: Mapping[str, F64], sink_keys: Sequence[int]) -> dict[str, npt.NDArray[Any]]:
    found: dict[str, npt.NDArray[Any]] = {}
    if "column_total" not in sums:
        return found
    for k in sink_keys:
        found[f"g_sink_ratio_{k}"] = measures.divide(sums[f"column_mass_{k}"], sums["column_total"])
        if f"sink_weight_{k}" in sums:
            found[f"sink_weight_{k}"] = sums[f"sink_weight_{k}"]
    if "top_key" in sums:
        found["top_key"] = sums["top_key"].astype(np.int64)
        found["top_key_weight"] = sums["top_key_weight"]
    return found


def _sparsity(sums: Mapping[str, F64], near_zero: Sequence[float]) -> dict[str, npt.NDArray[Any]]:
    found = {}
    for end in ("", "_1", "_2"):
        if "support" + end in sums:
            found["sparsity" + end] = measures.sparsity(sums["visible"], sums["support" + end])
        for index, eps in enumerate(near_zero):
            name = f"near_zero{end}_{index}"
            if name in sums:
                found[f"near_zero_{eps:g}{end}"] = measures.near_zero_rate(sums[name], sums["visible"])
    return found


def _survivors(sums: Mapping[str, F64]) -> dict[str, npt.NDArray[Any]]:
    if "survivors_2" in sums:
        first, second = sums["survivors_1"], sums["survivors_2"]
        return {
            "survivors_1": measures.divide(first, sums["seen"]),
            "survivors_2": measures.divide(second, sums["seen"]),
            "consensus": measures.divide(sums["consensus"], sums["seen"]),
            "lift": measures.lift(sums["consensus"], first, second, sums["visible"]),
        }
    if "survivors_1" in sums:
        return {"survivors": measures.divide(sums["survivors_1"], sums["seen"])}
    return {}


def _scores(sums: Mapping[str, F64]) -> dict[str, npt.NDArray[Any]]:
    found: dict[str, npt.NDArray[Any]] = {}
    two = "score_count_1" in sums
    for number in range(2 if two else 1):
        end = f"_{number + 1}" if two else ""
        if f"score_count_{number}" not in sums:
            return found
        count = sums[f"score_count_{number}"]
        found["score_mean" + end] = np.where(count > 0, sums[f"score_mean_{number}"], np.nan)
        found["score_sd" + end] = np.sqrt(measures.divide(sums[f"score_square_{number}"], count))
        found["score_min" + end] = sums[f"score_min_{number}"]
        found["score_max" + end] = sums[f"score_max_{number}"]
    if "product" in sums:
        found["view_correlation"] = measures.correlation(
            sums["product"], sums["score_square_0"], sums["score_square_1"]
        )
    return found
