"""The picture of a check: estimate, interval, exact value and bound against length, one panel a claim."""

from __future__ import annotations

import math
import os
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

from theory_lab.errors import InputError
from theory_lab.figures import style

if TYPE_CHECKING:
    import pandas as pd

    from theory_lab.reproduce.spec import Experiment

_CONSTANTS = ("kappa", "beta", "sigma", "rho", "key_rho", "head_dim")
_PANEL = 2.7  # inches
#: Color and marker of a finding.
_VERDICTS = {
    "HOLDS": (style.COLORS[2], "o"),
    "VIOLATED": (style.ALARM, "X"),
    "INCONCLUSIVE": (style.COLORS[7], "D"),
}


def validate_plot_file(path: str) -> None:
    """Raise InputError if a picture cannot be written there."""
    target = Path(path)
    if target.suffix.lower() not in style.SUFFIXES:
        raise InputError("plot", path, f"a file name ending in {', '.join(style.SUFFIXES)} is allowed")
    if not target.absolute().parent.is_dir():
        raise InputError("plot", path, "its folder must exist")
    if target.is_dir() or not os.access(target.absolute().parent, os.W_OK):
        raise InputError("plot", path, "it cannot be written")
    style.require_matplotlib()


def plot_check(rows: pd.DataFrame, path: str) -> None:
    """Draw rows of a check.

    Parameters
    ----------
    rows : DataFrame
        From :func:`theory_lab.check`.
    path : str
        Where to write the picture: .png, .pdf or .svg.

    Raises
    ------
    InputError, StoreError
        If the file cannot be written.
    """
    validate_plot_file(path)
    from theory_lab import __version__

    with style.applied():
        figure = draw(_drawable(rows))
        about = f"theory-lab {__version__}, seed {rows.seed.iloc[0]}, {len(rows)} rows; bars: interval of each verdict"
        style.save(figure, path, {"title": "theory-lab check", "description": about})


def draw_check(rows: pd.DataFrame, experiment: Experiment) -> Any:
    """The picture of an experiment of the kind ``check``."""
    return draw(rows, experiment.options.get("width", "double"), experiment.options.get("height"))


def draw(rows: pd.DataFrame, width: str = "double", height: float | None = None) -> Any:
    """One panel a claim; to be called inside :func:`theory_lab.figures.style.applied`."""
    claims = list(dict.fromkeys(rows.claim))
    parts = [rows[rows.claim == claim] for claim in claims]
    searches = [len(_findings(part)) for part in parts if _is_search(part)]
    columns = 1 if searches or len(claims) == 1 else 2
    lines = -(-len(claims) // columns)
    panel = 0.75 + 0.145 * max(searches) if searches else _PANEL
    figure = style.new_figure(width, height or lines * panel + 0.45)
    handles: dict[str, Any] = {}
    styles = style.series_styles([name for _, name in _series(rows)])
    for index, (claim, part) in enumerate(zip(claims, parts, strict=True)):
        axes = figure.add_subplot(lines, columns, index + 1)
        _draw_panel(axes, part, claim, styles, handles)
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=3 if width == "double" else 2)
    return figure


def _drawable(rows: pd.DataFrame) -> pd.DataFrame:
    """The theorems' rows if there are any, else those of the first four claims."""
    from theory_lab.claims import CLAIMS

    theorems = rows[rows.claim.isin(list(CLAIMS))]
    if len(theorems):
        return theorems
    if rows.empty:
        raise InputError("plot", "no rows", "there is nothing to draw")
    return rows[rows.claim.isin(list(dict.fromkeys(rows.claim))[:4])]


def _is_search(rows: pd.DataFrame) -> bool:
    """Whether a claim's rows are findings of searches rather than points along a length."""
    long = rows[rows.length.notna()]
    along = long.length.nunique() >= 3 and (long.estimate > 0).any()
    return bool((rows.estimator == "study").all()) and not along


def _findings(rows: pd.DataFrame) -> pd.DataFrame:
    """What a search shows: the finding nearest to its bound, or furthest beyond it, of each subject."""
    rows = rows.assign(excess=rows.estimate - rows.bound, control=rows.assumptions != "met", limit=rows.length.isna())
    # One line a subject: of the many lengths that hold, the closest call says it all.
    worst = rows.sort_values("excess", ascending=False, kind="stable")
    worst = worst.drop_duplicates(["noise", "control", "limit", "verdict"]).sort_index()
    return worst.reset_index(drop=True)


def _draw_findings(axes: Any, rows: pd.DataFrame, claim_id: str, handles: dict[str, Any]) -> None:
    """What was found in searches, which know no length: each finding's distance from its bound, in its own unit."""
    import pandas as pd

    counts = rows.groupby(["noise", rows.assumptions != "met", rows.length.isna(), "verdict"]).size()
    rows = _findings(rows)
    repeated = rows.noise.duplicated(keep=False)
    keys = zip(rows.noise, rows.control, rows.limit, rows.verdict, strict=True)
    several = [bool(counts.loc[key] > 1) for key in keys]
    lengths = [
        "limit" if pd.isna(n) else f"closest at n = {n:,}" if many else f"n = {n:,}"
        for n, many in zip(rows.length, several, strict=True)
    ]
    details = [
        m.removeprefix("measured: ") if m.startswith("measured: ") else n
        for m, n in zip(rows.method, lengths, strict=True)
    ]
    names = [f"{n}: {d}" if r else n for n, d, r in zip(rows.noise, details, repeated, strict=True)]
    places = range(len(rows) - 1, -1, -1)
    for place, record in zip(places, rows.itertuples(), strict=True):
        row: Any = record
        color, marker = _VERDICTS[row.verdict]
        axes.hlines(place, 0, row.excess, color=color, lw=1.0)
        label = row.verdict + (", control" if row.control else "")
        handles[label] = axes.scatter(
            [row.excess], [place], marker=marker, s=18, linewidths=0.9, edgecolors=color,
            facecolors="white" if row.control else color, zorder=3,
        )  # fmt: skip
        if row.ci_high > row.ci_low:
            axes.hlines(place, row.ci_low - row.bound, row.ci_high - row.bound, color=color, lw=3.2, alpha=0.25)
    axes.axvline(0, color="black", ls="--", lw=1.1)
    axes.set_xscale("symlog", linthresh=1e-3)
    edge = max(1e-2, float(rows.excess.abs().max())) * 5
    axes.set_xlim(-edge, edge)
    axes.set_yticks(
        list(places), [f"{name} †" if control else name for name, control in zip(names, rows.control, strict=True)]
    )
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(-0.7, len(rows) - 0.3)
    axes.set_xlabel("worst found − bound, each in its own unit (symmetric log): left of 0 holds, right is violated")
    axes.set_title(claim_id)
    axes.grid(False, axis="y")
    axes.spines["left"].set_visible(False)
    axes.xaxis.set_major_locator(_few_ticks(edge))


def _few_ticks(edge: float) -> Any:
    """Ticks of a symmetric logarithmic axis at few enough powers of ten to be read."""
    from matplotlib.ticker import FixedLocator

    top = math.floor(math.log10(edge))
    step = max(1, (top + 3) // 4)
    powers = [10.0**k for k in range(top, -4, -step)]
    return FixedLocator([-p for p in powers] + [0.0] + powers)


def _series(rows: pd.DataFrame) -> list[tuple[Any, str]]:
    """Rows by noise and whatever constants vary, each with its label."""
    # A study's subject says already what varies in it.
    studies = (rows.estimator == "study").all()
    varying = [] if studies else [name for name in _CONSTANTS if rows[name].nunique(dropna=True) > 1]
    found = []
    for key, group in rows.groupby(["noise", *varying], sort=False, dropna=False):
        noise, *values = key
        label = "any law (worst case)" if noise == "any" else str(noise)
        parts = [f"{name} {value:g}" for name, value in zip(varying, values, strict=True) if value == value]
        found.append((group.sort_values("length"), ", ".join([label, *parts])))
    return found


def _draw_panel(
    axes: Any, rows: pd.DataFrame, claim_id: str, styles: dict[str, dict[str, Any]], handles: dict[str, Any]
) -> None:
    from matplotlib.ticker import NullFormatter

    from theory_lab.catalog import find
    from theory_lab.claims import Claim

    if _is_search(rows):
        _draw_findings(axes, rows, claim_id, handles)
        return
    claim = find(claim_id)
    rows = rows[rows.length.notna()].assign(length=lambda frame: frame.length.astype("int64"))
    bound_text = claim.bound_text.split(";")[0]
    axes.set_title(f"{claim.id}: {_pretty(bound_text)}")
    positive = rows[rows.estimate > 0]
    if positive.empty:
        why = "every estimate is 0: scores exceed the threshold\nnever, or too rarely for a float64"
        axes.text(0.5, 0.5, why, ha="center", transform=axes.transAxes)
        axes.set_axis_off()
        return
    axes.set_xscale("log")
    highest = float(max(positive.estimate.max(), rows.bound.max()))
    if highest > 20 * float(positive.estimate.min()):
        axes.set_yscale("log")
        # Far below the bound nothing is to be learned; a window keeps the bound readable.
        floor = max(float(positive.estimate.min()), float(rows.bound[rows.bound > 0].min()) * 1e-6) / 3
        axes.set_ylim(floor, highest * 3)
    else:
        axes.set_ylim(0, highest * 1.15)
    first, last = rows.length.min(), rows.length.max()
    axes.set_xlim((last / 2, last * 2) if first == last else (first / 1.6, last * 2.2))
    common = rows.groupby("length").bound.nunique().max() == 1
    zero, ends = _draw_series(axes, rows, styles, handles, common)
    style.label_ends(axes, ends)
    handles.setdefault("exact value", axes.plot([], [], color="0.3", lw=0.9)[0])
    statistic = bound_text.split(" <= ")[0]
    if isinstance(claim, Claim):
        statistic = {"survivors": "E[S], survivors a row", "consensus": "E[C], survivors of both views a row"}[
            claim.statistic
        ]
    # Below the axis, where no line crosses it.
    note = textwrap.fill(f"(exactly 0 at every n: {', '.join(zero)})", 56) if zero else ""
    axes.set_xlabel(f"visible keys n = i + 1\n{note}".rstrip())
    axes.set_ylabel(_pretty(statistic))
    if axes.get_yscale() == "log":
        axes.yaxis.set_minor_formatter(NullFormatter())
    axes.minorticks_off()


def _draw_series(
    axes: Any, rows: pd.DataFrame, styles: dict[str, dict[str, Any]], handles: dict[str, Any], common: bool
) -> tuple[list[str], list[tuple[float, str, str]]]:
    """Bounds, exact values, estimates with their intervals; names that are 0 everywhere, and the lines' ends."""
    zero, ends = [], []
    last = rows.length.max()
    for group, label in _series(rows):
        color, shape = styles[label]["color"], styles[label]["marker"]
        bounds = group.drop_duplicates("length")
        single = "_" if len(bounds) == 1 else None  # a line of one point cannot be seen
        # One bound for all is drawn in black; where each series has its own, in the series' color.
        (line,) = axes.plot(
            bounds.length, bounds.bound, color="black" if common else color, ls="--", lw=1.4 if common else 0.9,
            marker=single, ms=20, mew=1.4, zorder=5,
        )  # fmt: skip
        handles.setdefault("bound of the claim", line)
        alive = group[group.estimate > 0]
        if alive.empty:
            zero.append(label)
            continue
        if alive.exact.notna().any():
            axes.plot(alive.length, alive.exact, color=color, lw=0.9, ls="-", marker=single, ms=12, mew=1.0, zorder=2)
        low, high = (alive.estimate - alive.ci_low).clip(lower=0), (alive.ci_high - alive.estimate).clip(lower=0)
        points = axes.errorbar(
            alive.length, alive.estimate, yerr=[low, high], fmt=shape, color=color, mfc=color, mec="white",
            elinewidth=0.9, zorder=3,
        )  # fmt: skip
        if alive.length.max() == last and rows.length.nunique() > 1:
            ends.append((float(alive.estimate.iloc[-1]), label, color))
        else:
            cut = f" (0 from n = {group.length[group.estimate == 0].min():,})" if len(alive) < len(group) else ""
            handles[label + cut] = points
        bad = alive[alive.verdict == "VIOLATED"]
        if len(bad):
            handles["VIOLATED"] = axes.scatter(
                bad.length, bad.estimate, s=34, facecolors="none", edgecolors=style.ALARM, lw=0.9, zorder=4
            )
    handles.setdefault("estimate and its interval", axes.errorbar([], [], yerr=[], fmt="o", color="0.3", mec="white"))
    return zero, ends


def _pretty(text: str) -> str:
    """A bound as mathematics is written."""
    text = text.replace("<=", "≤").replace(">=", "≥").replace("kappa^2", "κ²").replace("kappa", "κ")
    text = text.replace("lambda", "λ").replace("tau", "τ").replace("beta", "β")
    return text.replace("S_i", "$S_i$").replace("C_i", "$C_i$")
