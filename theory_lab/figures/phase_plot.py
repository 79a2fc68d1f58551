"""The picture of the dispersion phase diagram: one heat map a law and mechanism."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from theory_lab.figures import style
from theory_lab.figures.check_plot import validate_plot_file

if TYPE_CHECKING:
    import pandas as pd

    from theory_lab.reproduce.spec import Experiment

_NAMES = {
    "gaussian": "Gaussian",
    "uniform": "uniform",
    "laplace": "Laplace",
    "student-t3": "Student t, ν = 3",
    "spherical": "spherical, d = 64",
    "softmax": "softmax",
    "ssmax": "SSMax, s = 0.43",
    "entmax-1.5": "1.5-entmax",
    "sparsemax": "sparsemax",
    "tra": "TRA",
    "tda": "TDA, λ = 0.5",
}
_LEVEL = 0.5


def plot_phase(frame: pd.DataFrame, path: str) -> None:
    """Draw a phase diagram.

    Parameters
    ----------
    frame : DataFrame
        From :func:`theory_lab.phase.phase_diagram`.
    path : str
        Where to write the picture: .png, .pdf or .svg.

    Raises
    ------
    InputError, StoreError
        If the file cannot be written.
    """
    validate_plot_file(path)
    about = f"seed {frame.seed.iloc[0]}, {len(frame)} cells"
    with style.applied():
        style.save(draw(frame), path, {"title": "dispersion phase diagram", "description": about})


def draw_phase(frame: pd.DataFrame, experiment: Experiment) -> Any:
    """The picture of an experiment of the kind ``phase``."""
    return draw(frame, experiment.options.get("width", "double"), experiment.options.get("height"))


def draw(frame: pd.DataFrame, width: str = "double", height: float | None = None) -> Any:
    """One heat map a law (rows) and mechanism (columns); inside :func:`theory_lab.figures.style.applied`."""
    laws, mechanisms = list(dict.fromkeys(frame.law)), list(dict.fromkeys(frame.mechanism))
    rows, columns = len(laws), len(mechanisms)
    figure = style.new_figure(width, height or 0.95 * rows + 0.75)
    grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    mesh, dead = None, False
    for r, law in enumerate(laws):
        for c, mechanism in enumerate(mechanisms):
            axes = grid[r][c]
            axes.grid(False)
            part = frame[(frame.law == law) & (frame.mechanism == mechanism)]
            table = part.pivot_table(index="scale", columns="length", values="normalized_entropy")
            x, y = np.log2(np.asarray(table.columns, float)), np.log2(np.asarray(table.index, float))
            mesh = axes.pcolormesh(
                x, y, table.to_numpy(), cmap=style.SEQUENTIAL, vmin=0.0, vmax=1.0, shading="nearest", rasterized=True
            )
            empty = part[part.dead_rows > 0.5]
            axes.scatter(np.log2(empty.length), np.log2(empty.scale), s=1.6, color="#9a9a9a", linewidths=0)
            dead = dead or len(empty) > 0
            _annotate(axes, x, y, table.to_numpy())
            _ticks(axes, x, y)
            if r == 0:
                axes.set_title(_NAMES.get(mechanism, mechanism), loc="center")
            if c == 0:
                axes.set_ylabel(_NAMES.get(law, law))
    note = "\ndots: more than half of the rows have no weight at all" if dead else ""
    figure.supxlabel("row length n, keys" + note, fontsize=7.5)
    figure.supylabel("standard deviation of the scores", fontsize=7.5)
    if mesh is not None:
        bar = figure.colorbar(mesh, ax=grid, fraction=0.025, pad=0.01, ticks=[0.0, 0.25, 0.5, 0.75, 1.0])
        bar.set_label("E[H] / log n")
        bar.ax.axhline(_LEVEL, color="white", linewidth=1.0)
        bar.outline.set_visible(False)
    return figure


def _annotate(axes: Any, x: np.ndarray, y: np.ndarray, z: np.ndarray) -> None:
    """The line where the normalized entropy crosses 1/2, labeled on itself; else a word on the side it is on."""
    from matplotlib import patheffects

    outline = [patheffects.withStroke(linewidth=1.6, foreground="black")]
    if len(x) > 1 and len(y) > 1 and z.min() < _LEVEL < z.max():
        lines = axes.contour(x, y, z, levels=[_LEVEL], colors="white", linewidths=0.9)
        lines.set_path_effects(outline)
        longest = max((p for p in lines.allsegs[0] if len(p)), key=len, default=None)
        if longest is not None and len(longest) > 2:
            # In the middle of the line, but inside the panel.
            px, py = longest[len(longest) // 2]
            px = min(max(px, x[0] + 0.09 * (x[-1] - x[0])), x[-1] - 0.09 * (x[-1] - x[0]))
            py = min(max(py, y[0] + 0.12 * (y[-1] - y[0])), y[-1] - 0.12 * (y[-1] - y[0]))
            text = axes.text(px, py, "0.5", color="white", fontsize=5.8, ha="center", va="center")
            text.set_path_effects(outline)
    else:
        word = "all above 0.5" if z.min() >= _LEVEL else "all below 0.5"
        text = axes.text(
            0.5, 0.5, word, transform=axes.transAxes, color="white", fontsize=5.8, ha="center", va="center"
        )
        text.set_path_effects(outline)


def _ticks(axes: Any, x: np.ndarray, y: np.ndarray) -> None:
    inner = x[:: max(1, math.ceil(len(x) / 3))]
    axes.set_xticks(inner, [f"$2^{{{v:g}}}$" for v in inner])
    axes.set_yticks(y, [f"{2.0**v:g}" for v in y])
    axes.tick_params(labelsize=6.2, length=1.5)
