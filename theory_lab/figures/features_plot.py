"""Yes and no by mechanism and feature, with a mark where the paper prints its own answer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from theory_lab.figures import style

if TYPE_CHECKING:
    import pandas as pd

    from theory_lab.reproduce.spec import Experiment

_YES, _NO = style.COLORS[2], "0.92"


def _two_lines(text: str) -> str:
    """Broken at the space or hyphen nearest to its middle."""
    places = [i + 1 for i, letter in enumerate(text) if letter in " -"]
    at = min(places, key=lambda place: abs(place - len(text) / 2), default=len(text))
    return f"{text[:at].rstrip()}\n{text[at:]}"


def draw_features(frame: pd.DataFrame, experiment: Experiment) -> Any:
    """One square a mechanism and feature, dark for yes; a frame where the paper prints the same, a cross where not."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Rectangle

    options = experiment.options
    rows, columns = list(dict.fromkeys(frame.row)), list(dict.fromkeys(frame.column))
    figure = style.new_figure(options.get("width", "single"), options.get("height", 0.9 + 0.19 * len(rows)))
    axes = figure.add_subplot()
    printed = experiment.printed.rows if experiment.printed is not None else {}
    disagrees = False
    for record in frame.to_dict("records"):
        x, y = columns.index(record["column"]), rows.index(record["row"])
        yes = record["text"] == "yes"
        axes.add_patch(Rectangle((x - 0.46, y - 0.42), 0.92, 0.84, facecolor=_YES if yes else _NO, linewidth=0))
        axes.text(x, y, record["text"], ha="center", va="center", fontsize=6.4, color="white" if yes else "0.35")
        theirs = printed.get(record["row"], {}).get(record["column"], "-")
        if theirs == record["text"]:
            frame_of = Rectangle((x - 0.46, y - 0.42), 0.92, 0.84, fill=False, edgecolor="black", linewidth=1.3)
            axes.add_patch(frame_of)
        elif theirs != "-":
            disagrees = True
            axes.plot([x], [y], marker="x", ms=12, mew=2, color=style.ALARM)
    axes.set_xlim(-0.55, len(columns) - 0.45)
    axes.set_ylim(len(rows) - 0.45, -0.55)
    axes.set_xticks(range(len(columns)), [_two_lines(column) for column in columns])
    axes.set_yticks(range(len(rows)), rows)
    axes.xaxis.tick_top()
    axes.tick_params(length=0)
    axes.grid(False)
    axes.spines[:].set_visible(False)
    marks = [
        Line2D([], [], marker="s", mfc="none", mec="black", ls="", ms=6, mew=1.3, label="the paper prints the same")
    ]
    if disagrees:
        marks.append(Line2D([], [], marker="x", color=style.ALARM, ls="", ms=6, label="the paper prints the opposite"))
    figure.legend(handles=marks, loc="outside lower center")
    return figure
