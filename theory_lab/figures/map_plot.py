"""A small map of signed numbers, such as what one token does to another: diverging colors with 0 in the middle."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from theory_lab.figures import style

if TYPE_CHECKING:
    import pandas as pd

    from theory_lab.reproduce.spec import Experiment


def draw_map(frame: pd.DataFrame, experiment: Experiment) -> Any:
    """Rows and columns in the order in which they first appear; ``the#2`` is shown as ``the``."""
    import seaborn

    options = experiment.options
    rows, columns = list(dict.fromkeys(frame.row)), list(dict.fromkeys(frame.column))
    table = frame.pivot(index="row", columns="column", values="value").loc[rows, columns]
    edge = max(float(table.abs().max().max()), 1e-12)
    figure = style.new_figure(options.get("width", "single"), options.get("height", 0.9 + 0.24 * len(rows)))
    axes = figure.add_subplot()
    signed = bool((table < 0).any().any())
    seaborn.heatmap(
        table, ax=axes, cmap=style.DIVERGING if signed else style.SEQUENTIAL, vmin=-edge if signed else 0.0, vmax=edge,
        linewidths=0.4, square=False, cbar_kws={"label": options.get("ylabel", "value"), "shrink": 0.8},
        xticklabels=[_shown(c) for c in columns], yticklabels=[_shown(r) for r in rows],
    )  # fmt: skip
    axes.grid(False)
    axes.set_facecolor("0.93")
    axes.tick_params(length=0)
    axes.tick_params(axis="y", rotation=0)
    if len(columns) > 12:  # words side by side would run into each other
        axes.tick_params(axis="x", rotation=90)
    axes.set_xlabel(options.get("xlabel", "key"))
    axes.set_ylabel(options.get("rowlabel", "query"))
    return figure


def _shown(name: object) -> str:
    """A name without the number that tells it from its twins."""
    return re.sub(r"(?<=.)#\d+$", "", str(name))
