"""Curves with their intervals as bands: of probes, of results of trained models, and whatever else has series and x."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from theory_lab.audit_data import Quantity, parse_printed
from theory_lab.errors import InputError
from theory_lab.figures import style
from theory_lab.reproduce.words import BASELINE

if TYPE_CHECKING:
    import pandas as pd

    from theory_lab.reproduce.spec import Experiment

_BASE_LOOK: dict[str, Any] = {"color": "0.45", "linestyle": (0, (4, 2)), "lw": 1.0}


def draw_curves(frame: pd.DataFrame, experiment: Experiment) -> Any:
    """The picture of a frame with series, x, value, low, high (and panel, if there are several)."""
    options = experiment.options
    panels = list(dict.fromkeys(frame.panel)) if "panel" in frame else [""]
    figure = style.new_figure(options.get("width", "double"), options.get("height", 2.5))
    styles = style.series_styles([name for name in frame.series if name != BASELINE])
    grid = figure.subplots(1, len(panels), squeeze=False, sharey=not options.get("own_scales", False))[0]
    for axes, panel in zip(grid, panels, strict=True):
        part = frame[frame.panel == panel] if "panel" in frame else frame
        draw_panel(axes, part, styles, options, frame if len(panels) > 1 else None)
        _printed(axes, experiment, styles, alone=len(panels) == 1)
        axes.set_title(panel)
        if axes is grid[0] and (len(panels) == 1 or "ylabel" in options):
            axes.set_ylabel(options.get("ylabel", "value"))
    if len(panels) > 1:  # names beside the lines of every panel would take the room of the panels
        handles = {n: h for axes in grid for h, n in zip(*axes.get_legend_handles_labels(), strict=True)}
        figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=min(len(handles), 4))
    return figure


def _printed(axes: Any, experiment: Experiment, styles: dict[str, dict[str, Any]], alone: bool) -> None:
    """What the paper printed, as hollow diamonds over its rounding: rows are series, columns numbers along x.

    They are explained in the legend; ``alone``, a panel has none, and a line above it says so.
    """
    if experiment.printed is None:
        return
    drawn = False
    for row, cells in experiment.printed.rows.items():
        for column in cells:
            x, y = parse_printed(column), experiment.printed.value(row, column)
            if y is not None and column == experiment.options.get("level"):
                _level(axes, cells[column], y)
            if x is None or y is None:
                continue
            color = styles[row]["color"] if row in styles else "0.3"
            half = float(y.high - y.low) / 2
            axes.errorbar([x.middle], [y.middle], yerr=[half], fmt="D", mfc="white", mec=color, ecolor=color, ms=5,
                          mew=1.0, zorder=5, label=None if drawn else "as the paper printed it")  # fmt: skip
            drawn = True
    if drawn and alone:
        # Above the lines, where none of them can cross it.
        axes.text(1.0, 1.02, "◇ as the paper printed it", transform=axes.transAxes, fontsize=6.4, ha="right")


def _level(axes: Any, text: str, value: Quantity) -> None:
    """A printed number that belongs to no place along x, as a dotted line over its rounding."""
    axes.axhspan(float(value.low), float(value.high), color="0.3", alpha=0.12, lw=0)
    axes.axhline(value.middle, color="0.3", ls=(0, (1, 1.5)), lw=1.0)
    axes.annotate(f"the paper prints {text}", (0.02, value.middle), (0, 3), xycoords=axes.get_yaxis_transform(),
                  textcoords="offset points", fontsize=6.4, color="0.3")  # fmt: skip
    axes.set_ylim(None, max(axes.get_ylim()[1], 1.15 * float(value.high)))


def draw_panel(
    axes: Any, frame: pd.DataFrame, styles: dict[str, dict[str, Any]], options: Any, whole: pd.DataFrame | None = None
) -> None:
    """Lines with bands. Alone, each name stands beside its last point; ``whole`` is the frame of all panels."""
    every = [float(x) for x in np.sort(frame.x.unique())]
    if options.get("xlog", True):
        if every and every[0] <= 0:
            raise InputError("draw.xlog", "true", f"x begins at {every[0]:g}: xlog = false is needed")
        if _powers(every):
            style.length_axis(axes, options.get("xlabel", "tokens"), every, most=6 if whole is None else 3)
        else:
            axes.set_xscale("log")
    elif all(x == int(x) for x in every):
        axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_xlabel(options.get("xlabel", "tokens"))
    # Values within one decade are easier to read on a plain axis.
    ylog = options.get("ylog", False) and float(frame.value.max()) > 10 * float(frame.value.min())
    if ylog:
        axes.set_yscale("log")
    ends: list[tuple[float, str, str]] = []
    for name, part in frame.groupby("series", sort=False):
        part = part.sort_values("x")
        look = _BASE_LOOK if name == BASELINE else styles[str(name)]
        axes.plot(part.x, part.value, label=str(name), **look)
        known = part.low.notna() & part.high.notna()
        if known.any():
            style.band(axes, part.x[known], part.low[known], part.high[known], look["color"])
        if known.any() and len(part) == 1:
            ends_of = [part.value - part.low, part.high - part.value]
            axes.errorbar(part.x, part.value, yerr=ends_of, color=look["color"], fmt="none")
        ends.append((float(part.value.iloc[-1]), str(name), look["color"]))
    span = every[-1] / every[0] if options.get("xlog", True) else 1.0
    if span > 1:
        axes.set_xlim(every[0] / span**0.03, every[-1] * span**0.03)
    if not ylog and options.get("zero", True):
        shown = frame if whole is None or options.get("own_scales", False) else whole
        top = None if whole is None else 1.04 * float(shown[["value", "high"]].max().max())
        axes.set_ylim(min(0.0, float(shown.value.min())), top)
    if whole is None:
        style.label_ends(axes, ends)


def _powers(values: Sequence[float]) -> bool:
    return len(values) > 1 and all(v >= 1 and math.log2(v) == int(math.log2(v)) for v in values)


def draw_probe(frame: pd.DataFrame, experiment: Experiment) -> Any:
    """Measures of a probed model against length or layer: one panel a measure, one line a mechanism."""
    along = "layer" if "layer" in frame else "length"
    words = {"g_sink_ratio_1": "gSinkRatio(1)", "view_correlation": "correlation of the views"}
    table = frame.rename(columns={"estimate": "value", "ci_low": "low", "ci_high": "high", along: "x"})
    table = table.assign(series=table.weights, panel=[words.get(m, m.replace("_", " ")) for m in table.measure])
    if table.panel.nunique() == 1:
        table = table.drop(columns="panel")
    return draw_curves(table, experiment)
