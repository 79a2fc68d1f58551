"""From the rows of a probe, one a head, to layers and the whole model, with intervals over texts."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from theory_lab.probes.bootstrap import ends, resample

if TYPE_CHECKING:
    import pandas as pd

#: What identifies a row; everything else is a measure.
KEYS = ("model", "weights", "text", "window", "start", "length", "layer", "head")
#: Counts that are facts of the run and no measures to average.
_FACTS = ("rows", "visible", "top_key", "calls")
#: Measures of which a maximum over heads and texts is taken, without an interval.
_EXTREME = ("max_abs", "max_abs_1", "max_abs_2", "score_max", "score_max_1", "score_max_2")
_LOWEST = ("score_min", "score_min_1", "score_min_2")


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
    groups = table.groupby([*keys, "text"], sort=True)
    means = groups[measured].mean()
    counts = groups[measured].count()
    highest, lowest = groups[measured].max(), groups[measured].min()
    texts = list(dict.fromkeys(rows.text))
    records = []
    for key, block in means.groupby(level=keys, sort=True):
        at = dict(zip(keys, key if isinstance(key, tuple) else (key,), strict=True))
        present = [t for t in texts if (*at.values(), t) in block.index]
        where = pd.MultiIndex.from_tuples([(*at.values(), t) for t in present], names=[*keys, "text"])
        values = block.loc[where]
        dead = float(values["dead_heads"].mean())
        for name in measured:
            x = values[name].to_numpy(float)
            heads = counts.loc[where, name].to_numpy()
            if name in _EXTREME or name in _LOWEST:
                extreme = highest.loc[where, name].max() if name in _EXTREME else lowest.loc[where, name].min()
                found = (float(extreme), math.nan, math.nan, len(x))
            else:
                found = _interval(x, seed)
            record = dict(zip(("estimate", "ci_low", "ci_high", "texts"), found, strict=True))
            records.append({**at, "measure": name, **record, "heads": int(heads.max(initial=0)), "dead_heads": dead})
    return pd.DataFrame(records)


def _interval(x: np.ndarray, seed: int) -> tuple[float, float, float, int]:
    x = x[~np.isnan(x)]
    if x.size < 2:
        return (float(x[0]) if x.size else math.nan, math.nan, math.nan, x.size)
    estimate = float(x.mean())
    if np.ptp(x) == 0:
        return estimate, estimate, estimate, x.size
    low, high = ends(x[resample(x.size, seed)].mean(-1), x.size)
    return estimate, float(low), float(high), x.size
