"""The kind ``mechanisms``: rows of attention of every mechanism on common laws of scores.

Every law has unit variance. Mechanisms that compare logits see ``scale`` times the draws, those that compare cosines
see the same draws over sqrt(d), d = 64. All mechanisms of a row share its draws, so that their difference is theirs.
Each is one row's function but H2O, whose cache is simulated (:mod:`theory_lab.reproduce.compute.h2o`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from theory_lab.errors import hint
from theory_lab.phase import HEAD_DIM, LAWS
from theory_lab.reproduce.compute import h2o
from theory_lab.streams import Streams, cell_digest

if TYPE_CHECKING:
    import pandas as pd
    from torch import Tensor

    from theory_lab.reproduce.run import Context
    from theory_lab.reproduce.spec import Experiment

#: How each mechanism is set: as its paper sets it, learnable parts at their start.
SETTINGS: dict[str, dict[str, Any]] = {
    "softmax": {},
    "gated-softmax": {"heads": 1, "hidden_dim": 4},
    "ssmax": {"s": 0.43},
    "adaptive-temperature": {},
    "lssa": {},
    "dex": {"value_dim": 4},
    "diff-softmax": {"lam": 0.5},
    "eta-logit": {"tau": 0.5},
    "eta-weight": {"tau": 0.5},
    "entmax": {"alpha": 1.5},
    "sparsemax": {},
    "asentmax-theta": {"theta": 1.0},
    "asentmax": {"heads": 1, "hidden_dim": 4},
    "rela": {},
    "diff-rela": {"lam": 0.5},
    "tra": {"beta": 1.0},
    "tda": {"beta": 1.0, "lam": 0.5},
    "streaming-llm": {},
    "h2o": {"heavy": h2o.HEAVY, "recent": h2o.RECENT},
    "sparse-transformer": {},
    "landmark": {},
}
_MOST_SCORES = 1 << 20
STATISTICS = ("normalized_entropy", "planted_weight", "support_share")
_LEVEL = 0.95


def compute(experiment: Experiment, settings: dict[str, Any], context: Context) -> pd.DataFrame:
    """Entropy, support and the weight of a planted key, by law, mechanism and length.

    Returns
    -------
    DataFrame
        law, mechanism, length, statistic, estimate, ci_low, ci_high (Student's interval, 95%, NaN for one row),
        rows, dead_rows (the share of rows without any weight, whose entropy counts as 0), seed.

        normalized_entropy is H(|a|) / log n; planted_weight the share of the absolute weight that the planted key
        gets; support_share the share of keys with a weight that is not 0.
    """
    import pandas as pd
    import torch

    mechanisms = settings.get("mechanisms", tuple(SETTINGS))
    for name in mechanisms:
        if name not in SETTINGS:
            raise experiment.error("mechanisms", name, f"{hint(name, SETTINGS)}known: {', '.join(SETTINGS)}")
    for law in settings["laws"]:
        if law not in LAWS:
            raise experiment.error("laws", law, f"{hint(law, LAWS)}known: {', '.join(LAWS)}")
    lengths = settings["lengths"]
    for n in lengths:
        if not 4 <= n <= 1 << 22:
            raise experiment.error("lengths", n, "whole numbers from 4 to 2^22 are allowed")
    rows = settings.get("rows", 32)
    if rows < 2:
        raise experiment.error("rows", rows, "at least 2, for an interval")
    planted = settings.get("planted")
    made = {name: _make(name) for name in mechanisms}
    records: list[dict[str, Any]] = []
    jobs = [(law, n) for law in settings["laws"] for n in sorted(set(lengths))]
    if context.progress is not None:
        context.progress.start(len(jobs), 0, float(sum(n for _, n in jobs)))
    try:
        with torch.no_grad():
            for law, n in jobs:
                count = max(2, min(rows, _MOST_SCORES // n))
                records += context.remembered(
                    f"{law}-{n}",
                    partial(_cell, law, n, made, settings.get("scale", 1.0), planted, count, experiment.seed),
                )
                if context.progress is not None:
                    context.progress.advance(1, float(n))
    finally:
        if context.progress is not None:
            context.progress.stop()
    return pd.DataFrame(records)


def _make(name: str) -> Any:
    from theory_lab.attention import get

    return get(name, **SETTINGS[name]).double()


def _cell(
    law: str, n: int, made: dict[str, Any], scale: float, planted: float | None, rows: int, seed: int
) -> list[dict[str, Any]]:
    import torch

    digest = cell_digest({"mechanisms": law, "length": n, "planted": planted}, seed)
    draws: list[list[np.ndarray]] = []
    every = [Streams(digest, row) for row in range(rows)]
    for streams in every:
        draws.append([LAWS[law](streams[i], n) for i in range(2)])
        if planted is not None:
            for view in draws[-1]:
                view[n // 2] = planted
    stacked = [scale * np.stack([views[v] for views in draws]) for v in range(2)]
    logits: list[Tensor] = [torch.from_numpy(view)[:, None, None, :] for view in stacked]
    cosines = [s / math.sqrt(HEAD_DIM) for s in logits]
    found = []
    for name, mechanism in made.items():
        views = cosines if mechanism.cosine else logits
        if name == "h2o":
            weights = torch.from_numpy(h2o.last_row_weights(stacked[0] / scale, LAWS[law], every, scale))
        else:
            weights = _weights(mechanism, views[: mechanism.views])
        values, dead = _statistics(weights.abs(), n, None if planted is None else n // 2)
        for statistic, each in values.items():
            estimate, low, high = student(each)
            found.append(
                {
                    "law": law, "mechanism": name, "length": n, "statistic": statistic, "estimate": estimate,
                    "ci_low": low, "ci_high": high, "rows": rows, "dead_rows": dead, "seed": seed,
                }
            )  # fmt: skip
    return found


def _weights(mechanism: Any, views: Sequence[Tensor]) -> Tensor:
    """Weights (rows, n) of the last query; side inputs are zeros, where learnable parts have their start."""
    import torch

    rows = views[0].shape[0]
    side = {
        "head_dim": HEAD_DIM,
        "x": torch.zeros(rows, 1, 4, dtype=torch.float64),
        "q": torch.zeros(rows, 1, 1, HEAD_DIM, dtype=torch.float64),
    }
    weights: Tensor = mechanism.weights(*views, causal=True, **side)
    return weights[:, 0, 0, :]


def _statistics(weights: Tensor, n: int, planted: int | None) -> tuple[dict[str, np.ndarray], float]:
    import torch

    total = weights.sum(-1)
    dead = total == 0
    p = weights / torch.where(dead, torch.ones_like(total), total)[:, None]
    entropy = torch.special.entr(p).sum(-1) / math.log(n)
    values = {"normalized_entropy": entropy, "support_share": (weights > 0).double().mean(-1)}
    if planted is not None:
        values["planted_weight"] = p[:, planted]
    return {name: value.numpy() for name, value in values.items()}, float(dead.double().mean())


def student(values: np.ndarray) -> tuple[float, float, float]:
    """Mean and its 95% interval by Student's t; the interval has no width if all values are equal."""
    from scipy import stats

    mean = float(values.mean())
    if values.size < 2:
        return mean, math.nan, math.nan
    half = float(stats.t.ppf(0.5 + _LEVEL / 2, values.size - 1) * values.std(ddof=1) / math.sqrt(values.size))
    return mean, mean - half, mean + half
