"""Measured speedups against length."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from theory_lab.figures import style

if TYPE_CHECKING:
    import pandas as pd

    from theory_lab.reproduce.spec import Experiment


def draw_speed(frame: pd.DataFrame, experiment: Experiment) -> Any:
    """Speedup over the peer, one panel a direction, with the spread of the runs as a band."""
    options = experiment.options
    directions = list(experiment.settings["directions"])
    figure = style.new_figure(options.get("width", "double"), options.get("height", 2.7))
    grid = figure.subplots(1, len(directions), sharey=True, squeeze=False)[0]
    styles = style.series_styles(list(experiment.settings["mechanisms"]))
    for axes, direction in zip(grid, directions, strict=True):
        ends = []
        axes.set_yscale("log", base=2)
        for name, look in styles.items():
            part = frame[(frame.mechanism == name) & (frame.direction == direction)].sort_values("length")
            if part.empty:
                continue
            axes.plot(part.length, part.estimate, **look)
            style.band(axes, part.length, part.ci_low, part.ci_high, look["color"])
            if len(part) > 1:
                ends.append((float(part.estimate.iloc[-1]), name, look["color"]))
            else:  # one length alone: the name belongs beside it
                # Away from the line at 1, which would cross it.
                up = part.estimate.iloc[0] >= 1
                axes.annotate(name, (part.length.iloc[0], part.estimate.iloc[0]), xytext=(4, 0), color=look["color"],
                              textcoords="offset points", fontsize=6.8, va="bottom" if up else "center")  # fmt: skip
        style.length_axis(axes, "tokens", sorted(frame.length.unique()))
        axes.axhline(1.0, color="0.35", ls="--", lw=1.0)
        axes.set_title(direction.replace("+", " + "))
        _ticks(axes, frame)
        style.label_ends(axes, ends)
    grid[0].set_ylabel(f"speedup over {experiment.settings['peer']}, ×")
    same = f"as fast as {experiment.settings['peer']}"
    grid[0].text(frame.length.max(), 0.95, same, fontsize=6.4, color="0.35", va="top", ha="right")
    return figure


def _ticks(axes: Any, frame: pd.DataFrame) -> None:
    import math

    low, high = math.floor(math.log2(frame.ci_low.min())), math.ceil(math.log2(frame.ci_high.max()))
    powers = range(low, high + 1, max(1, (high - low) // 7))
    axes.set_yticks([2.0**k for k in powers], [f"{2**k}" if k >= 0 else f"1/{2**-k}" for k in powers])
    axes.set_ylim(2.0**low, 2.0**high)
    axes.minorticks_off()
