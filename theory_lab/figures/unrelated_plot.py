"""The picture of unrelated tokens' scores: their tails beside the laws of the theory, proxies and survivors."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from theory_lab.errors import StoreError
from theory_lab.figures import style
from theory_lab.figures.probe_plot import model_name, validate_plot

if TYPE_CHECKING:
    from theory_lab.probes.unrelated import UnrelatedResult


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
    d = result.head_dim
    figure = style.new_figure(11.5, 7.8)
    figure.suptitle(
        f"{model_name(result.model)}: cosines of unrelated tokens, d = {d}, T = {result.length:,}, "
        f"{len(result.texts)} texts",
        x=0.01, ha="left",
    )  # fmt: skip
    grid = figure.subplots(2, 2)
    scores = result.samples.astype(float) * math.sqrt(d)
    means = result.rows["mean"].to_numpy().reshape(scores.shape[:2])[:, :, None, None] * math.sqrt(d)
    colors = _draw_tails(grid[0][0], result, scores, "As they are")
    _draw_tails(grid[0][1], result, scores - means, "Less each head's mean")
    grid[0][0].set_ylabel("P(X sqrt(d) > t)")
    grid[0][0].legend(frameon=False, loc="lower left")
    bar = figure.colorbar(colors, ax=grid[0][1], fraction=0.04, pad=0.015)
    bar.set_label("layer")
    _draw_heads(figure, grid[1][0], result, result.rows.proxy.to_numpy() * d, "Variance proxy x d; 1 is sigma = 1", 1.0)
    survivors = result.rows.survivors.to_numpy()
    allowed = f"Survivors a row, beta = {result.beta:g}; {result.kappa:g} is allowed"
    _draw_heads(figure, grid[1][1], result, survivors, allowed, result.kappa)
    about = f"{model_name(result.model)}, unrelated tokens of {', '.join(result.texts)}"
    style.save(figure, path, {"title": f"{model_name(result.model)}: unrelated tokens", "description": about})


def _draw_tails(axes: Any, result: UnrelatedResult, scores: Any, title: str) -> Any:
    """Survival functions of every layer's heads pooled, beside the Gaussian's and the spherical law's."""
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    from theory_lab.noise import Scale, get_family

    d = result.head_dim
    norm = Normalize(min(result.layers), max(max(result.layers), min(result.layers) + 1))
    shades = colormaps["viridis"]
    t = np.linspace(-3.0, 8.0, 441)
    lowest = 3.0 / scores[0].size
    for layer, part in zip(result.layers, scores, strict=True):
        x = np.sort(part.reshape(-1))
        above = 1.0 - np.searchsorted(x, t, side="right") / x.size
        axes.plot(t, np.where(above >= lowest, above, np.nan), color=shades(norm(layer)), lw=0.9, alpha=0.9)
    for family, dash, label in (("gaussian", "--", "Gaussian, proxy 1/d"), ("spherical", ":", "spherical law")):
        law = get_family(family).scaled(Scale(1.0 / d, d))
        axes.plot(t, law.sf(t / math.sqrt(d)), color="black", ls=dash, lw=1.8, label=label, zorder=5)
    axes.set_yscale("log")
    axes.set_ylim(lowest, 1.3)
    axes.set_xlim(-3.0, 8.0)
    axes.set_xlabel("t")
    axes.set_title(title, loc="left")
    return ScalarMappable(norm, shades)


def _draw_heads(figure: Any, axes: Any, result: UnrelatedResult, values: Any, title: str, middle: float) -> None:
    """Heads by layers; blue below the middle, red above it, on a logarithmic scale."""
    from matplotlib.colors import LogNorm

    heads = sorted(result.rows["head"].unique())
    table = values.reshape(len(result.layers), len(heads)).T
    # Symmetric about the middle, three decades at most either way.
    reach = max(middle / max(float(np.min(table)), middle / 1e3), float(np.max(table)) / middle, 1.5)
    reach = min(reach, 1e3)
    x, y = np.arange(len(result.layers) + 1), np.arange(len(heads) + 1)
    mesh = axes.pcolormesh(x, y, np.clip(table, middle / reach, middle * reach), cmap="RdBu_r",
                           norm=LogNorm(middle / reach, middle * reach), edgecolors="white", linewidth=0.3)  # fmt: skip
    for place, labels in ((axes.set_xticks, list(result.layers)), (axes.set_yticks, heads)):
        step = max(1, -(-len(labels) // 16))
        place(np.arange(0, len(labels), step) + 0.5, [str(v) for v in labels[::step]])
    axes.set_xlabel("layer")
    axes.set_ylabel("head")
    axes.tick_params(length=2)
    axes.set_title(title, loc="left")
    for spine in axes.spines.values():
        spine.set_visible(False)
    bar = figure.colorbar(mesh, ax=axes, fraction=0.04, pad=0.015)
    ticks = [v for v in (0.001, 0.01, 0.1, 0.25, 0.5, 1, 2, 4, 10, 100, 1000) if middle / reach <= v <= middle * reach]
    bar.set_ticks(ticks, labels=[f"{v:g}" for v in ticks])
    bar.ax.minorticks_off()
