"""The sharp threshold: its effective beta by law and length, and what survives it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from theory_lab.figures import style

if TYPE_CHECKING:
    import pandas as pd

    from theory_lab.reproduce.spec import Experiment


def draw_threshold(rows: pd.DataFrame, experiment: Experiment) -> Any:
    """Effective beta against the length (exact), and E[S] at that threshold (simulated, with its intervals)."""
    options = experiment.options
    figure = style.new_figure(options.get("width", "double"), options.get("height", 2.7))
    left, right = figure.subplots(1, 2, sharex=True)
    rows = rows.assign(length=rows.length.astype("int64"))
    styles = style.series_styles(list(rows.noise))
    ends, right_ends = [], []
    for noise, part in rows.groupby("noise", sort=False):
        part = part.sort_values("length")
        look = styles[str(noise)]
        left.plot(part.length, part.effective_beta, **look)
        ends.append((float(part.effective_beta.iloc[-1]), str(noise), look["color"]))
        # Side by side about their length, so that no interval hides another.
        number = list(styles).index(str(noise))
        place = part.length * 2.0 ** (0.28 * (number - (len(styles) - 1) / 2))
        spread = [part.estimate - part.ci_low, part.ci_high - part.estimate]
        right.errorbar(place, part.estimate, yerr=spread, fmt=look["marker"], color=look["color"], ms=2.6, mec="white",
                       elinewidth=0.8, capsize=0)  # fmt: skip
        right_ends.append((float(part.estimate.iloc[-1]), str(noise), look["color"]))
    for axes in (left, right):
        style.length_axis(axes, "visible keys n = i + 1", sorted(rows.length.unique()))
    left.axhline(1.0, color="black", ls="--", lw=1.2)
    left.text(rows.length.min(), 1.01, "the paper's threshold, β = σ", fontsize=6.8, va="bottom")
    left.set_ylim(0, 1.12)
    left.set_ylabel("effective β of the sharp threshold")
    left.set_title("how much lower the threshold may be")
    right.axhline(1.0, color="black", ls="--", lw=1.2)
    far = float((rows[["ci_low", "ci_high"]] - 1.0).abs().max().max())
    right.set_ylim(1 - 2.2 * far, 1 + 2.2 * far)
    right.set_ylabel("E[S] at the sharp threshold, keys")
    right.set_title("and it keeps κ = 1 survivor a row")
    style.label_ends(left, ends)
    style.label_ends(right, right_ends)
    return figure
