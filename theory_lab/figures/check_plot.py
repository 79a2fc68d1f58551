"""The picture of a check: estimate, interval, exact value and bound against length, one panel a claim."""

from __future__ import annotations

import contextlib
import math
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from theory_lab.errors import InputError, StoreError

if TYPE_CHECKING:
    import pandas as pd

_SUFFIXES = (".png", ".pdf", ".svg")
# Okabe and Ito's palette, ordered so that neighbors differ in lightness too; shapes differ as well, for gray prints.
_COLORS = ("#000000", "#E69F00", "#0072B2", "#D55E00", "#56B4E9", "#009E73", "#CC79A7", "#7F7F7F", "#8A7E00", "#5D3A9B")
_SHAPES = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "*")
_LABEL_STEP = 0.042  # of the axes' height
_CONSTANTS = ("kappa", "beta", "sigma", "rho", "key_rho", "head_dim")


def validate_plot_file(path: str) -> None:
    """Raise InputError if a picture cannot be written there."""
    target = Path(path)
    if target.suffix.lower() not in _SUFFIXES:
        raise InputError("plot", path, f"a file name ending in {', '.join(_SUFFIXES)} is allowed")
    if not target.absolute().parent.is_dir():
        raise InputError("plot", path, "its folder must exist")
    if target.is_dir() or not os.access(target.absolute().parent, os.W_OK):
        raise InputError("plot", path, "it cannot be written")
    try:
        import matplotlib  # noqa: F401  # only whether it is there
    except ImportError:
        raise InputError("plot", "matplotlib is not installed", "pip install 'theory-lab[plot]'") from None


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
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = _drawable(rows)
    claims = list(dict.fromkeys(rows.claim))
    tallest = max((len(rows[rows.claim == c]) for c in claims if _is_search(rows[rows.claim == c])), default=0)
    width = sum(8.0 if _is_search(rows[rows.claim == claim]) else 5.6 for claim in claims)
    figure = Figure(figsize=(0.6 + width, max(3.4 if tallest else 4.9, 1.8 + 0.27 * tallest)), layout="constrained")
    FigureCanvasAgg(figure)
    handles: dict[str, Any] = {}
    styles = _series_styles(rows)
    for index, claim in enumerate(claims):
        axes = figure.add_subplot(1, len(claims), index + 1)
        _draw_panel(axes, rows[rows.claim == claim], claim, styles, handles)
    figure.legend(
        handles.values(),
        handles.keys(),
        loc="outside lower center",
        ncols=4 if len(claims) > 1 else 2,
        frameon=False,
        fontsize=8,
    )
    _save(figure, path, rows)


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


def _draw_findings(axes: Any, rows: pd.DataFrame, claim_id: str, handles: dict[str, Any]) -> None:
    """What was found in searches, which know no length: each finding's distance from its bound, in its own unit."""
    import pandas as pd

    rows = rows.reset_index(drop=True)
    repeated = rows.noise.duplicated(keep=False)
    lengths = [f"n = {n}" if n is not pd.NA else "limit" for n in rows.length]
    details = [
        m.removeprefix("measured: ") if m.startswith("measured: ") else n
        for m, n in zip(rows.method, lengths, strict=True)
    ]
    rows = rows.assign(noise=[f"{n}: {d}" if r else n for n, d, r in zip(rows.noise, details, repeated, strict=True)])
    places = range(len(rows) - 1, -1, -1)
    for place, record in zip(places, rows.itertuples(), strict=True):
        row: Any = record
        bad, control = row.verdict == "VIOLATED", row.assumptions != "met"
        color = "#B00020" if bad else "#0072B2"
        excess = row.estimate - row.bound
        axes.hlines(place, 0, excess, color=color, lw=1.2)
        label = ("VIOLATED" if bad else "HOLDS") + (", control" if control else "")
        handles[label] = axes.scatter(
            [excess],
            [place],
            marker="X" if bad else "o",
            s=42,
            edgecolors=color,
            facecolors="white" if control else color,
            zorder=3,
        )
    axes.axvline(0, color="black", ls="--", lw=1.6)
    axes.set_xscale("symlog", linthresh=1e-3)
    edge = max(1e-2, float((rows.estimate - rows.bound).abs().max())) * 5
    axes.set_xlim(-edge, edge)
    axes.set_yticks(
        list(places),
        [f"{name} †" if a != "met" else name for name, a in zip(rows.noise, rows.assumptions, strict=True)],
        fontsize=8,
    )
    axes.set_ylim(-0.7, len(rows) - 0.3)
    axes.set_xlabel("worst found - bound, each in its own unit (symmetric log; left of 0 holds)")
    axes.set_title(claim_id, fontsize=9.5, loc="left")
    axes.grid(True, axis="x", color="0.9", lw=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.xaxis.set_major_locator(_few_ticks(edge))


def _few_ticks(edge: float) -> Any:
    """Ticks of a symmetric logarithmic axis at few enough powers of ten to be read."""
    from matplotlib.ticker import FixedLocator

    top = math.floor(math.log10(edge))
    step = max(1, (top + 3) // 4)
    powers = [10.0**k for k in range(top, -4, -step)]
    return FixedLocator([-p for p in powers] + [0.0] + powers)


def _series_styles(rows: pd.DataFrame) -> dict[str, tuple[str, str]]:
    names = sorted({name for _, name in _series(rows)}, key=list(dict.fromkeys(n for _, n in _series(rows))).index)
    # The shapes shift by one each time the colors begin again, so that no two series look alike.
    count = len(_COLORS)
    return {name: (_COLORS[i % count], _SHAPES[(i + i // count) % len(_SHAPES)]) for i, name in enumerate(names)}


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
    axes: Any, rows: pd.DataFrame, claim_id: str, styles: dict[str, tuple[str, str]], handles: dict[str, Any]
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
    axes.set_title(f"{claim.id}\n{bound_text}", fontsize=9.5, loc="left")
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
    zero, ends = [], []
    last = rows.length.max()
    common = rows.groupby("length").bound.nunique().max() == 1
    if rows.length.nunique() == 1:
        axes.set_xlim(last / 2, last * 2)
    for group, label in _series(rows):
        color, shape = styles[label]
        bounds = group.drop_duplicates("length")
        single = "_" if len(bounds) == 1 else None  # a line of one point cannot be seen
        # One bound for all is drawn in black; where each series has its own, in the series' color.
        shade = "black" if common else color
        (line,) = axes.plot(
            bounds.length, bounds.bound, color=shade, ls="--", lw=1.6 if common else 1.1, marker=single, ms=26, mew=1.8,
            zorder=5,
        )  # fmt: skip
        handles.setdefault("bound of the claim", line)
        alive = group[group.estimate > 0]
        if alive.empty:
            zero.append(label)
            continue
        if alive.exact.notna().any():
            axes.plot(alive.length, alive.exact, color=color, lw=1.0, marker=single, ms=16, mew=1.2, zorder=2)
        low, high = (alive.estimate - alive.ci_low).clip(lower=0), (alive.ci_high - alive.estimate).clip(lower=0)
        points = axes.errorbar(
            alive.length, alive.estimate, yerr=[low, high], fmt=shape, color=color, ms=4.5, mfc=color,
            mec="white", mew=0.5, elinewidth=1.2, capsize=2, zorder=3,
        )  # fmt: skip
        if alive.length.max() == last and rows.length.nunique() > 1:
            ends.append((float(alive.estimate.iloc[-1]), label, color))
        else:
            cut = f" (0 from n = {group.length[group.estimate == 0].min():,})" if len(alive) < len(group) else ""
            handles[label + cut] = points
        bad = alive[alive.verdict == "VIOLATED"]
        if len(bad):
            handles["VIOLATED"] = axes.scatter(
                bad.length, bad.estimate, s=75, facecolors="none", edgecolors="#B00020", lw=1.0, zorder=4
            )
    _label_ends(axes, ends)
    handles.setdefault("line: exact value; bars: intervals", axes.plot([], [], color="0.3", lw=1.0)[0])
    statistic = bound_text.split(" <= ")[0]
    if isinstance(claim, Claim):
        statistic = {"survivors": "E[S], survivors a row", "consensus": "E[C], survivors of both views a row"}[
            claim.statistic
        ]
    axes.set_xlabel("visible keys n = i + 1")
    axes.set_ylabel(statistic)
    if axes.get_yscale() == "log":
        axes.yaxis.set_minor_formatter(NullFormatter())
    axes.grid(True, which="major", color="0.9", lw=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    if zero:
        axes.text(0.02, 0.02, "exactly 0 at every n here: " + ", ".join(zero), transform=axes.transAxes, fontsize=7,
                  color="0.35")  # fmt: skip


def _label_ends(axes: Any, ends: list[tuple[float, str, str]]) -> None:
    """Write each series' name beside its last point, moved apart where they would overlap."""
    to_axes = axes.transData + axes.transAxes.inverted()
    ordered = sorted(ends)
    heights = [min(1.0, max(0.0, float(to_axes.transform((axes.get_xlim()[1], value))[1]))) for value, _, _ in ordered]
    for height, (_, label, color) in zip(_spread(heights, _LABEL_STEP), ordered, strict=True):
        axes.text(1.01, height, label, color=color, fontsize=7.5, va="center", transform=axes.transAxes)


def _spread(heights: list[float], step: float) -> list[float]:
    """Move sorted heights apart to at least ``step``, each crowd about its own middle, within [0, 1]."""
    crowds: list[tuple[float, int]] = []  # middle and size
    for height in heights:
        crowds.append((height, 1))
        while len(crowds) > 1:
            (low, m), (high, k) = crowds[-2:]
            if high - low >= step * (m + k) / 2:
                break
            crowds[-2:] = [((low * m + high * k) / (m + k), m + k)]
    placed = [middle + step * (i - (size - 1) / 2) for middle, size in crowds for i in range(size)]
    shift = max(0.0, -placed[0]) if placed else 0.0
    shift = shift or (min(0.0, 1.0 - placed[-1]) if placed else 0.0)
    return [height + shift for height in placed]


def _save(figure: Any, path: str, rows: pd.DataFrame) -> None:
    from theory_lab import __version__

    about = f"theory-lab {__version__}, seed {rows.seed.iloc[0]}, {len(rows)} rows; bars: interval of each verdict"
    key = {".png": "Description", ".pdf": "Subject", ".svg": "Description"}[Path(path).suffix.lower()]
    target = Path(path).absolute()
    try:
        handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.stem}-", suffix=target.suffix)
        os.close(handle)
        try:
            figure.savefig(name, dpi=160, metadata={key: about})
            os.chmod(name, 0o644)
            os.replace(name, target)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(name)
            raise
    except OSError as error:
        raise StoreError(f"plot: {path}; cannot be written ({error.strerror or error})") from error
