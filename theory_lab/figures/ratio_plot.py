"""Estimates as shares of their bound, or the bound as a multiple of them: how tight a theorem is, law by law."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from theory_lab.figures import style

if TYPE_CHECKING:
    import pandas as pd

    from theory_lab.reproduce.spec import Experiment


def draw_ratio(rows: pd.DataFrame, experiment: Experiment) -> Any:
    """E / bound against the length, one line a law or a correlation; 1 is where the bound is reached.

    Lines are exact values where they are known, dots estimates with their intervals. By correlation (kappa = beta =
    sigma = 1), the independence horizon of each is marked.
    """
    options = experiment.options
    rows = rows[rows.length.notna()].assign(length=lambda f: f.length.astype("int64"))
    by = options.get("by", "noise")
    names = {key: _name(by, key) for key in dict.fromkeys(rows[by])}
    styles = style.series_styles(list(names.values()))
    figure = style.new_figure(options.get("width", "double"), options.get("height", 2.8))
    axes = figure.add_subplot()
    axes.set_xscale("log")
    axes.set_yscale("log")
    floor = options.get("floor", 1e-6)
    shown = (rows.estimate / rows.bound).clip(lower=floor)
    axes.set_ylim(max(floor, shown.min() / 2), max(2.0, float(shown.max()) * 2))
    first, last = rows.length.min(), rows.length.max()
    axes.set_xlim(first / 1.5, last * 1.5)
    axes.axhline(1.0, color="black", ls="--", lw=1.3, zorder=4)
    axes.text(0.55, 1.15, options.get("bound", "the theorem's bound"), fontsize=6.8, va="bottom", ha="center",
              transform=axes.get_yaxis_transform())  # fmt: skip
    ends: list[tuple[float, str, str]] = []
    gone: dict[str, list[str]] = {}
    for key, part in rows.groupby(by, sort=False):
        part, look, name = part.sort_values("length"), styles[names[key]], names[key]
        line = part.exact.where(part.exact.notna(), part.estimate) / part.bound
        alive = line > 0
        if not alive.iloc[-1] and alive.sum() < 4:
            first_gone = "at every n" if not alive.any() else f"from n = {part.length[~alive].min():,} on"
            gone.setdefault(first_gone, []).append(name)
        _draw_line(axes, part, line, look, floor)
        if by == "rho":
            _horizon(axes, float(key), first, last, look["color"])
        if not alive.iloc[-1]:
            continue
        if line.iloc[-1] >= floor:
            ends.append((float(line.iloc[-1]), name, look["color"]))
        else:
            at = int(np.flatnonzero(line >= floor)[-1])
            axes.annotate(name, (part.length.iloc[at], max(float(line.iloc[at]), floor * 2)), xytext=(3, 0),
                          textcoords="offset points", fontsize=6.8, color=look["color"], va="bottom")  # fmt: skip
    style.label_ends(axes, ends)
    notes = [f"0 {when}: {', '.join(some)}" for when, some in gone.items()]
    axes.text(0.01, 0.02, "\n".join(notes), transform=axes.transAxes, fontsize=6.2, color="0.35")
    axes.set_xlabel("visible keys n = i + 1")
    axes.set_ylabel(options.get("ylabel", "estimate / bound"))
    axes.minorticks_off()
    return figure


def _draw_line(axes: Any, part: pd.DataFrame, line: pd.Series[float], look: dict[str, Any], floor: float) -> None:
    """The exact line, the interval as a band, and the simulated dots, where something survives at all."""
    axes.plot(part.length, line.where(line > 0), color=look["color"], ls=look["linestyle"], lw=1.1)
    dots = part[(part.estimate > 0) & (part.trials > 0)]
    low, high = dots.ci_low / dots.bound, dots.ci_high / dots.bound
    style.band(axes, dots.length, low.clip(lower=floor / 10), high, look["color"])
    middle = dots.estimate / dots.bound
    spread = [(middle - low).clip(lower=0), (high - middle).clip(lower=0)]
    axes.errorbar(dots.length, middle, yerr=spread, fmt=look["marker"], color=look["color"], mec="white",
                  elinewidth=0.9)  # fmt: skip


def _name(by: str, key: Any) -> str:
    if key == "any":
        return "any law (worst case)"
    return f"ρ = {key:g}" if by == "rho" else str(key)


def _horizon(axes: Any, rho: float, first: float, last: float, color: str) -> None:
    """Mark the independence horizon, the length from which the bound for independent views fails."""
    from theory_lab.studies.ours import independence_horizon

    n = independence_horizon(rho)
    if not first < n < last:
        return
    axes.plot([n], [1.0], marker="o", ms=5, mfc="white", mec=color, mew=1.2, zorder=6)
    axes.annotate(f"n = {_round(n)}", (n, 1.0), xytext=(-4, 4), textcoords="offset points", fontsize=6.8,
                  color=color, va="bottom", ha="right", zorder=7,
                  bbox={"facecolor": "white", "alpha": 0.8, "linewidth": 0, "pad": 0.6})  # fmt: skip


def _round(n: float) -> str:
    digits = f"{n:.1e}"
    mantissa, exponent = digits.split("e")
    return f"{round(n):,}" if n < 1e6 else rf"${mantissa} \times 10^{{{int(exponent)}}}$"
