"""Scores of a trained model's unrelated tokens against what the theorems assume of them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from theory_lab.figures import style

if TYPE_CHECKING:
    import pandas as pd

    from theory_lab.reproduce.spec import Experiment

_COLOR = style.COLORS[2]
_GAUSSIAN: dict[str, Any] = {"color": "black", "linestyle": (0, (1.2, 1)), "lw": 1.0}
_SPHERICAL: dict[str, Any] = {"color": "0.5", "linestyle": (0, (5, 1, 1.2, 1)), "lw": 1.0}


def draw_tails(frame: pd.DataFrame, experiment: Experiment) -> Any:
    """The tail of the scores, the survivors it gives, and the sigma that each head needs.

    Dark bands and bars are intervals over texts, light bands the middle 80% of the heads.
    """
    options = experiment.options
    dim = int(frame.head_dim.iloc[0])
    figure = style.new_figure(options.get("width", "double"), options.get("height", 2.8))
    tail, survivors, sigma = figure.subplots(1, 3)
    for axes, quantity in ((tail, "tail"), (survivors, "survivors")):
        part = frame[frame.quantity == quantity].sort_values("x")
        axes.plot(part.x, part.estimate, color=_COLOR, lw=1.3, label="real scores, all heads")
        style.band(axes, part.x, part.ci_low, part.ci_high, _COLOR)
        axes.fill_between(part.x, part.heads_low, part.heads_high, color=_COLOR, alpha=0.1, linewidth=0)
    _tail(tail, dim)
    _survivors(survivors, frame, dim)
    _sigma(sigma, frame[frame.quantity == "sigma"])
    figure.legend(*tail.get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return figure


def _sigma(axes: Any, part: pd.DataFrame) -> None:
    heads = part.groupby("x").cumcount()
    # Side by side about their layer, so that bars do not hide each other.
    place = part.x + 0.6 * (heads / max(int(heads.max()), 1) - 0.5)
    spread = [(part.estimate - part.ci_low).clip(lower=0), (part.ci_high - part.estimate).clip(lower=0)]
    axes.errorbar(place, part.estimate, yerr=spread, fmt="o", color=_COLOR, ms=1.4, mew=0, elinewidth=0.4, capsize=0)
    axes.axhline(1.0, color="black", ls="--", lw=1.1)
    axes.text(0.98, 1.02, "assumed where β = 1", fontsize=6.4, va="bottom", ha="right",
              transform=axes.get_yaxis_transform())  # fmt: skip
    axes.set_ylim(0, None)
    axes.set_xlabel("layer")
    axes.set_ylabel("σ = √(d · proxy)")
    axes.set_title("what each head needs")


def _gaussian(t: np.ndarray, dim: int) -> np.ndarray:
    from scipy import special

    return np.asarray(special.ndtr(-t * math.sqrt(dim)))


def _spherical(t: np.ndarray, dim: int) -> np.ndarray:
    from scipy import stats

    return np.asarray(0.5 * stats.beta.sf(t * t, 0.5, (dim - 1) / 2))


def _tail(axes: Any, dim: int) -> None:
    t = np.linspace(0, 0.98, 99)
    axes.plot(t, _gaussian(t, dim), label="Gaussian, variance 1/d", **_GAUSSIAN)
    axes.plot(t, _spherical(t, dim), label="cosines of random directions", **_SPHERICAL)
    axes.set_yscale("log")
    axes.set_ylim(1e-7, 1)
    axes.set_xlim(0, 1)
    axes.set_xlabel("cosine t")
    axes.set_ylabel("P(score > t)")
    axes.set_title("tail")


def _survivors(axes: Any, frame: pd.DataFrame, dim: int) -> None:
    lengths = np.sort(frame.x[frame.quantity == "survivors"].unique())
    tau = np.sqrt(2 * np.log(lengths) / dim)
    axes.plot(lengths, lengths * _gaussian(tau, dim), **_GAUSSIAN)
    axes.plot(lengths, lengths * _spherical(tau, dim), **_SPHERICAL)
    style.length_axis(axes, "visible keys n", [float(n) for n in lengths])
    axes.set_yscale("log")
    axes.axhline(1.0, color="black", ls="--", lw=1.1)
    axes.text(lengths[-1], 0.85, "bound of Theorem 4.3", fontsize=6.4, va="top", ha="right")
    axes.set_ylabel("n P(score > τ), survivors a row")
    axes.set_title("survivors, β = κ = 1")
