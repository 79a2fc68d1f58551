"""The picture of unrelated tokens' scores: their tails beside the laws of the theory, proxies and survivors."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from theory_lab.errors import StoreError
from theory_lab.figures import style
from theory_lab.figures.probe_plot import model_name, validate_plot
from theory_lab.reproduce.unrelated_tables import GRID, unrelated_frame

if TYPE_CHECKING:
    import pandas as pd

    from theory_lab.probes.unrelated import UnrelatedResult
    from theory_lab.reproduce.spec import Experiment


def plot_unrelated(result: UnrelatedResult, path: str) -> list[str]:
    """Draw into one file, or ``unrelated.png`` into a folder; the files written.

    Raises
    ------
    InputError, StoreError
        If nothing can be written there.
    """
    validate_plot(path)
    target = Path(path)
    if target.suffix.lower() not in style.SUFFIXES or target.is_dir():
        try:
            target.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StoreError(f"plot: {path}; the folder cannot be made ({error.strerror or error})") from None
        target = target / "unrelated.png"
    _draw(result, str(target))
    return [str(target)]


@style.applied_large()
def _draw(result: UnrelatedResult, path: str) -> None:
    figure = style.new_figure(11.5, 7.8)
    figure.suptitle(
        f"{model_name(result.model)}: cosines of unrelated tokens, d = {result.head_dim}, T = {result.length:,}, "
        f"{len(result.texts)} texts",
        x=0.01, ha="left",
    )  # fmt: skip
    _panels(figure, unrelated_frame(result))
    about = f"{model_name(result.model)}, unrelated tokens of {', '.join(result.texts)}"
    style.save(figure, path, {"title": f"{model_name(result.model)}: unrelated tokens", "description": about})


def draw_unrelated(frame: pd.DataFrame, experiment: Experiment) -> Any:
    """Tails of every layer, proxies and survivors of every head, for a page."""
    options = experiment.options
    figure = style.new_figure(options.get("width", "double"), options.get("height", 4.8))
    _panels(figure, frame)
    return figure


def _panels(figure: Any, frame: pd.DataFrame) -> None:
    beta, kappa = float(frame.beta.iloc[0]), float(frame.kappa.iloc[0])
    grid = figure.subplots(2, 2)
    colors = _draw_tails(grid[0][0], frame, "tail", "As they are")
    _draw_tails(grid[0][1], frame, "centered tail", "Less each head's mean")
    grid[0][0].set_ylabel("P(X sqrt(d) > t)")
    grid[0][1].legend(frameon=False, loc="upper right")
    bar = figure.colorbar(colors, ax=grid[0][1], fraction=0.04, pad=0.015)
    bar.set_label("layer")
    _draw_heads(figure, grid[1][0], frame, "proxy", "Variance proxy x d; 1 is sigma = 1", 1.0)
    allowed = f"Survivors a row, beta = {beta:g}; {kappa:g} is allowed"
    _draw_heads(figure, grid[1][1], frame, "survivors", allowed, kappa)


def _draw_tails(axes: Any, frame: pd.DataFrame, quantity: str, title: str) -> Any:
    """Survival functions of every layer's heads pooled, beside the Gaussian's and the spherical law's."""
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    from theory_lab.noise import Scale, get_family

    part = frame[frame.quantity == quantity]
    d = int(frame.head_dim.iloc[0])
    low, high = int(part.layer.min()), int(part.layer.max())
    norm = Normalize(low, max(high, low + 1))
    shades = colormaps["viridis"]
    for layer in part.layer.unique():
        line = part[part.layer == layer]
        axes.plot(line.x, line.estimate, color=shades(norm(layer)), lw=0.9, alpha=0.9)
    for family, dash, label in (("gaussian", "--", "Gaussian, proxy 1/d"), ("spherical", ":", "spherical law")):
        law = get_family(family).scaled(Scale(1.0 / d, d))
        axes.plot(GRID, law.sf(GRID / math.sqrt(d)), color="black", ls=dash, lw=1.8, label=label, zorder=5)
    axes.set_yscale("log")
    axes.set_ylim(0.8 * float(part.estimate.min()), 1.3)
    axes.set_xlim(GRID[0], GRID[-1])
    axes.set_xlabel("t")
    axes.set_title(title, loc="left")
    return ScalarMappable(norm, shades)


def _draw_heads(figure: Any, axes: Any, frame: pd.DataFrame, quantity: str, title: str, middle: float) -> None:
    """Heads by layers; blue below the middle, red above it, on a logarithmic scale."""
    from matplotlib.colors import LogNorm

    table = frame[frame.quantity == quantity].pivot(index="head", columns="layer", values="estimate")
    heads, layers, values = table.index.astype(int), table.columns.astype(int), table.to_numpy(float)
    # Symmetric about the middle, three decades at most either way.
    reach = max(middle / max(float(np.min(values)), middle / 1e3), float(np.max(values)) / middle, 1.5)
    reach = min(reach, 1e3)
    x, y = np.arange(len(layers) + 1), np.arange(len(heads) + 1)
    mesh = axes.pcolormesh(x, y, np.clip(values, middle / reach, middle * reach), cmap="RdBu_r",
                           norm=LogNorm(middle / reach, middle * reach), edgecolors="white", linewidth=0.3)  # fmt: skip
    for place, labels in ((axes.set_xticks, layers), (axes.set_yticks, heads)):
        step = max(1, -(-len(labels) // 16))
        place(np.arange(0, len(labels), step) + 0.5, [str(v) for v in labels[::step]])
    axes.set_xlabel("layer")
    axes.set_ylabel("head")
    axes.tick_params(length=2)
    axes.set_title(title, loc="left")
    for spine in axes.spines.values():
        spine.set_visible(False)
    bar = figure.colorbar(mesh, ax=axes, fraction=0.04, pad=0.015)
    every = (0.001, 0.01, 0.1, 1, 10, 100, 1000) if reach > 20 else (0.1, 0.25, 0.5, 1, 2, 4, 10)
    ticks = [v for v in every if middle / reach <= v <= middle * reach]
    bar.set_ticks(ticks, labels=[f"{v:g}" for v in ticks])
    bar.ax.minorticks_off()
