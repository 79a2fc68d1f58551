"""Rows of attention of many mechanisms: one panel a law and a family of mechanisms."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from theory_lab.figures import style

if TYPE_CHECKING:
    import pandas as pd

    from theory_lab.reproduce.spec import Experiment

#: Families whose members are compared in one panel.
FAMILIES = {
    "sums to one, dense": (
        "softmax", "gated-softmax", "ssmax", "adaptive-temperature", "lssa", "dex", "eta-logit", "eta-weight",
    ),
    "sums to one, sparse": ("entmax", "sparsemax", "asentmax-theta", "asentmax"),
    "does not sum to one": ("rela", "diff-rela", "diff-softmax", "tra", "tda"),
    "a choice of keys": ("streaming-llm", "h2o", "sparse-transformer", "landmark"),
}  # fmt: skip
NAMES = {
    "softmax": "softmax", "gated-softmax": "gated softmax", "ssmax": "SSMax", "adaptive-temperature": "adaptive temp.",
    "lssa": "LSSA", "dex": "DEX", "diff-softmax": "diff. softmax", "eta-logit": "ETA (logit)",
    "eta-weight": "ETA (weight)", "entmax": "1.5-entmax", "sparsemax": "sparsemax",
    "asentmax-theta": "ASEntmax (θ = 1)", "asentmax": "ASEntmax (start)", "rela": "ReLA", "diff-rela": "diff. ReLA",
    "tra": "TRA", "tda": "TDA", "streaming-llm": "StreamingLLM", "h2o": "H2O", "sparse-transformer": "Sparse Transf.",
    "landmark": "landmark",
}  # fmt: skip
LAWS = {"gaussian": "Gaussian", "uniform": "uniform", "laplace": "Laplace", "student-t3": "Student t, ν = 3",
        "spherical": "spherical, d = 64"}  # fmt: skip
_WORDS = {
    "normalized_entropy": "E[H] / log n",
    "planted_weight": "share of the relevant key",
    "support_share": "share of keys with weight",
}


def draw_mechanisms(frame: pd.DataFrame, experiment: Experiment) -> Any:
    """One statistic against the length of the row, with bands; laws down, families across."""
    options = experiment.options
    statistic = options.get("statistic", "normalized_entropy")
    frame = frame[frame.statistic == statistic]
    laws = list(dict.fromkeys(frame.law))
    present = set(frame.mechanism)
    if options.get("families", True):
        families = {title: [m for m in members if m in present] for title, members in FAMILIES.items()}
        families = {title: members for title, members in families.items() if members}
        return _grid(frame, laws, families, statistic, options)
    return _laws(frame, laws, statistic, options)


def _grid(frame: pd.DataFrame, laws: list[str], families: dict[str, list[str]], statistic: str, options: Any) -> Any:
    figure = style.new_figure(options.get("width", "double"), options.get("height", 1.15 * len(laws) + 1.35))
    grid = figure.subplots(len(laws), len(families), sharex=True, sharey=True, squeeze=False)
    for c, (title, members) in enumerate(families.items()):
        styles = style.series_styles([NAMES[m] for m in members])
        for r, law in enumerate(laws):
            axes = grid[r][c]
            part = frame[frame.law == law]
            for member in members:
                _line(axes, part[part.mechanism == member], NAMES[member], styles)
            _frame(axes, frame, statistic)
            axes.set_xlabel("row length n, keys" if r == len(laws) - 1 else "")
            axes.set_ylabel(f"{LAWS[law]}\n{_WORDS[statistic]}" if c == 0 else "")
            if r == 0:
                axes.set_title(title)
        # Under its column, where the eye falls; nothing is left to be told apart by color alone.
        handles, labels = grid[-1][c].get_legend_handles_labels()
        grid[-1][c].legend(handles, labels, loc="upper left", bbox_to_anchor=(-0.12, -0.42), fontsize=6.2,
                           labelspacing=0.25, borderpad=0, handlelength=2.2)  # fmt: skip
    return figure


def _laws(frame: pd.DataFrame, laws: list[str], statistic: str, options: Any) -> Any:
    """One panel a law, names beside the lines of the last."""
    figure = style.new_figure(options.get("width", "double"), options.get("height", 2.4))
    grid = figure.subplots(1, len(laws), sharey=True, squeeze=False)[0]
    members = list(dict.fromkeys(frame.mechanism))
    styles = style.series_styles([NAMES[m] for m in members])
    for axes, law in zip(grid, laws, strict=True):
        part = frame[frame.law == law]
        ends = []
        for member in members:
            line = part[part.mechanism == member].sort_values("length")
            _line(axes, line, NAMES[member], styles)
            ends.append((float(line.estimate.iloc[-1]), NAMES[member], styles[NAMES[member]]["color"]))
        _frame(axes, frame, statistic)
        axes.set_title(f"{LAWS[law]} scores" + (" of irrelevant keys" if statistic == "planted_weight" else ""))
        axes.set_xlabel("row length n, keys")
        style.label_ends(axes, ends)
    grid[0].set_ylabel(_WORDS[statistic])
    return figure


def _line(axes: Any, part: pd.DataFrame, name: str, styles: dict[str, dict[str, Any]]) -> None:
    part = part.sort_values("length")
    look = styles[name]
    axes.plot(part.length, part.estimate, label=name, **{**look, "markersize": 2.6})
    style.band(axes, part.length, part.ci_low.clip(lower=0), part.ci_high.clip(upper=1), look["color"])


def _frame(axes: Any, frame: pd.DataFrame, statistic: str) -> None:
    style.length_axis(axes, "", sorted(frame.length.unique()))
    axes.set_ylim(-0.03, 1.05)
    axes.set_yticks([0.0, 0.5, 1.0])
