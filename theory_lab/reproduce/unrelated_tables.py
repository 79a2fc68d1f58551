"""What the picture of unrelated tokens' scores shows, as one table."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import pandas as pd

    from theory_lab.probes.unrelated import UnrelatedResult

#: Places t of the tails.
GRID = np.linspace(-3.0, 8.0, 177)


def unrelated_frame(result: UnrelatedResult) -> pd.DataFrame:
    """What the picture shows.

    Returns
    -------
    DataFrame
        quantity, layer, head, x, estimate, ci_low, ci_high; beta, kappa, head_dim, length, model. ``tail`` and
        ``centered tail``: share of a layer's sampled scores times sqrt(head_dim) above x, as they are and less each
        head's mean (NaN for a share that fewer than three of them make up); ``proxy``: of one head, times head_dim;
        ``survivors``: keys a row above the threshold, of one head.
    """
    import pandas as pd

    root = math.sqrt(result.head_dim)
    scores = result.samples.astype(float) * root
    means = result.rows["mean"].to_numpy().reshape(scores.shape[:2])[:, :, None, None] * root
    parts = []
    for quantity, values in (("tail", scores), ("centered tail", scores - means)):
        for layer, part in zip(result.layers, values, strict=True):
            x = np.sort(part.reshape(-1))
            above = 1.0 - np.searchsorted(x, GRID, side="right") / x.size
            shown = np.where(above >= 3.0 / x.size, above, np.nan)
            parts.append(pd.DataFrame({"quantity": quantity, "layer": layer, "x": GRID, "estimate": shown}))
    for quantity, scale in (("proxy", result.head_dim), ("survivors", 1)):
        names = (quantity, f"{quantity}_low", f"{quantity}_high")
        ends = dict(zip(("estimate", "ci_low", "ci_high"), (result.rows[n] * scale for n in names), strict=True))
        parts.append(result.rows[["layer", "head"]].assign(quantity=quantity, **ends))
    columns = ["quantity", "layer", "head", "x", "estimate", "ci_low", "ci_high"]
    return pd.concat([part.reindex(columns=columns) for part in parts], ignore_index=True).assign(
        beta=result.beta, kappa=result.kappa, head_dim=result.head_dim, length=result.length, model=result.model
    )
