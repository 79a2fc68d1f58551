"""From the rows of a probe, one a head, to layers and the whole model, with intervals over texts."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from theory_lab.probes.bootstrap import ends, resample
from theory_lab.probes.measures import F64

if TYPE_CHECKING:
    import pandas as pd

#: What identifies a row; everything else is a measure.
KEYS = ("model", "weights", "text", "window", "start", "length", "layer", "head")
#: Counts that are facts of the run and no measures to average.
_FACTS = ("rows", "visible", "top_key", "calls")
#: Measures of which a maximum over heads and texts is taken, without an interval.
_EXTREME = ("max_abs", "max_abs_1", "max_abs_2", "score_max", "score_max_1", "score_max_2")
_LOWEST = ("score_min", "score_min_1", "score_min_2")
_COLUMNS = 512


def summarize(rows: pd.DataFrame, *, by_layer: bool = False, sink_eps: float = 0.3, seed: int = 0) -> pd.DataFrame:
    """Average every measure over heads, layers and windows within each text, then over texts.

    Parameters
    ----------
    rows : DataFrame
        One row a (text, window, length, layer, head).
    by_layer : bool
        One line a layer instead of one for the model.
    sink_eps : float
        Threshold of the sink rate: the share of heads whose weight on key k exceeds it.
    seed : int
        Of the bootstrap.

    Returns
    -------
    DataFrame
        weights, length, [layer,] measure, estimate, ci_low, ci_high (NaN where there is no interval: one text, or an
        extreme), texts, heads (a text's head values that the average is over), dead_heads (left out of it).

    Notes
    -----
    The average over heads leaves out what is undefined for a head: gSinkRatio of a dead head, for instance, which
    ``dead_heads`` counts.
    """
    import pandas as pd

    table = rows.copy()
    for name in [c for c in table.columns if c.startswith("sink_weight_")]:
        k = name.removeprefix("sink_weight_")
        exceeds = (table[name] > sink_eps).astype(float)
        table[f"sink_rate_{k}"] = exceeds.where(table[name].notna())
    table["dead_heads"] = table.pop("dead_head").astype(float)
    measured = [c for c in table.columns if c not in (*KEYS, *_FACTS)]
    keys = ["weights", "length", *(["layer"] if by_layer else [])]
    texts = list(dict.fromkeys(rows.text))
    groups = table.groupby([*keys, "text"], sort=True)
    places = table.groupby(keys, sort=True).size().index
    full = pd.MultiIndex.from_product([range(len(places)), texts])
    full = pd.MultiIndex.from_tuples([(*_tuple(places[at]), text) for at, text in full], names=[*keys, "text"])
    shape = (len(places), len(texts), len(measured))
    means = groups[measured].mean().reindex(full).to_numpy(float).reshape(shape)
    counts = groups[measured].count().reindex(full, fill_value=0).to_numpy().reshape(shape).max(1)
    highest, lowest = groups[measured].max(), groups[measured].min()
    estimate, low, high, number = _intervals(means, seed)
    for extremes, names, pick in ((highest, _EXTREME, "max"), (lowest, _LOWEST, "min")):
        for name in names:
            if name in measured:
                at = measured.index(name)
                estimate[:, at] = getattr(extremes[name].groupby(level=keys, sort=True), pick)().to_numpy(float)
                low[:, at] = high[:, at] = math.nan
    dead = estimate[:, measured.index("dead_heads")]
    records = []
    for at, place in enumerate(places):
        where = dict(zip(keys, _tuple(place), strict=True))
        for m, name in enumerate(measured):
            records.append(
                {
                    **where,
                    "measure": name,
                    "estimate": estimate[at, m],
                    "ci_low": low[at, m],
                    "ci_high": high[at, m],
                    "texts": int(number[at, m]),
                    "heads": int(counts[at, m]),
                    "dead_heads": dead[at],
                }
            )
    return pd.DataFrame(records)


def _tuple(place: Any) -> tuple[Any, ...]:
    return place if isinstance(place, tuple) else (place,)


def _intervals(values: F64, seed: int) -> tuple[F64, F64, F64, npt.NDArray[np.int64]]:
    """Mean over the texts (axis 1) of (P, texts, M) with its interval; NaN texts are left out."""
    shape = values.shape[0], values.shape[2]
    flat = np.moveaxis(values, 1, 0).reshape(values.shape[1], -1)
    there = ~np.isnan(flat)
    number = there.sum(0)
    estimate, low, high = (np.full(flat.shape[1], np.nan) for _ in range(3))
    some = number > 0
    estimate[some] = np.nansum(flat[:, some], 0) / number[some]
    for pattern in np.unique(there.T, axis=0):
        texts = int(pattern.sum())
        if texts < 2:
            continue
        (columns,) = np.nonzero((pattern == there.T).all(-1))
        picks = resample(texts, seed)
        weights = np.zeros((len(picks), texts))
        np.add.at(weights, (np.arange(len(picks))[:, None], picks), 1.0 / texts)
        for part in np.array_split(columns, -(-len(columns) // _COLUMNS)):
            x = flat[pattern][:, part]
            low[part], high[part] = ends(weights @ x, estimate[part], texts)
            # Rounding must not make an interval of what is constant.
            constant = np.ptp(x, axis=0) == 0
            low[part[constant]] = high[part[constant]] = estimate[part[constant]]
    return estimate.reshape(shape), low.reshape(shape), high.reshape(shape), number.reshape(shape)
