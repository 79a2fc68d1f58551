"""The one style of every picture: sizes, colors that survive gray print and color blindness, bands, labels, saving."""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from theory_lab.errors import InputError, StoreError

#: Widths of one and of two columns of a paper, in inches.
WIDTHS = {"single": 3.35, "double": 6.9}
SUFFIXES = (".png", ".pdf", ".svg")
#: Okabe and Ito's palette, ordered so that neighbors differ in lightness too; shapes and dashes differ as well.
COLORS = ("#000000", "#E69F00", "#0072B2", "#D55E00", "#56B4E9", "#009E73", "#CC79A7", "#7F7F7F", "#8A7E00", "#5D3A9B")
SHAPES = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "*")
DASHES: tuple[Any, ...] = (
    "-",
    (0, (4, 1.2)),
    (0, (1.2, 1)),
    (0, (5, 1, 1.2, 1)),
    (0, (7, 1.5)),
    (0, (3, 1, 1, 1, 1, 1)),
)
#: What is wrong: a bound that does not hold. It comes with a shape of its own, never by color alone.
ALARM = "#B00020"
#: Monotone in lightness, and the same to every eye.
SEQUENTIAL = "cividis"
#: Diverging, with a light middle.
DIVERGING = "PuOr"

#: The style sheet.
SHEET = Path(__file__).with_name("theory_lab.mplstyle")
_DEFAULT_FONT = "DejaVu Sans"
_TYPE_SIZES = (
    "font.size",
    "axes.titlesize",
    "axes.labelsize",
    "xtick.labelsize",
    "ytick.labelsize",
    "legend.fontsize",
)


def require_matplotlib() -> None:
    """Raise InputError if nothing can be drawn."""
    try:
        import matplotlib  # noqa: F401  # only whether it is there
    except ImportError:
        raise InputError("plot", "matplotlib is not installed", "pip install 'theory-lab[plot]'") from None


@contextlib.contextmanager
def applied(font: str | None = None, say: Callable[[str], object] | None = None) -> Iterator[None]:
    """Draw and save inside: the style sheet over matplotlib's own defaults, whatever the user's settings are.

    Parameters
    ----------
    font : str, optional
        A font family to use in place of the default.
    say : callable, optional
        Told, in one line, that the font is missing and which one takes its place.
    """
    import matplotlib
    from matplotlib import font_manager, style

    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        style.use(str(SHEET))
        if font is not None and font != _DEFAULT_FONT:
            try:
                # The search would log its own failure; the line of ours is enough.
                logging.getLogger("matplotlib.font_manager").disabled = True
                font_manager.findfont(font, fallback_to_default=False)
                matplotlib.rcParams["font.sans-serif"] = [font, _DEFAULT_FONT]
            except ValueError:
                if say is not None:
                    say(f"font '{font}' is not installed: {_DEFAULT_FONT} is used instead")
            finally:
                logging.getLogger("matplotlib.font_manager").disabled = False
        yield


def new_figure(width: str | float = "double", height: float = 2.6) -> Any:
    """A figure with a canvas that needs no screen; ``width`` is a name of :data:`WIDTHS` or inches."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    inches = WIDTHS[width] if isinstance(width, str) else width
    figure = Figure(figsize=(inches, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def series_styles(names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Color, marker and line style of each series; no two look alike, even in gray."""
    count = len(COLORS)
    return {
        name: {
            "color": COLORS[i % count],
            # Shapes and dashes shift by one each time the colors begin again.
            "marker": SHAPES[(i + i // count) % len(SHAPES)],
            "linestyle": DASHES[(i + i // count) % len(DASHES)],
        }
        for i, name in enumerate(dict.fromkeys(names))
    }


def band(axes: Any, x: Any, low: Any, high: Any, color: str) -> None:
    """The interval of a line, as a band behind it."""
    axes.fill_between(x, low, high, color=color, alpha=0.22, linewidth=0, zorder=1.5)


def label_ends(axes: Any, ends: Sequence[tuple[float, str, str]], size: float = 6.8) -> None:
    """Write each series' name beside its last point, moved apart where they would overlap.

    A thin line leads from a name that was moved to where its series ends: in gray it is all that tells. ``ends`` holds
    (value, name, color) of each line's last point. Call it when limits and scales are set.
    """
    to_axes = axes.transData + axes.transAxes.inverted()
    inches = axes.get_window_extent().height / axes.figure.dpi
    step = size * 1.18 / 72 / max(inches, 0.5)
    ordered = sorted(ends, key=lambda end: end[0])
    right = axes.get_xlim()[1]
    heights = [min(1.0, max(0.0, float(to_axes.transform((right, value))[1]))) for value, _, _ in ordered]
    placed = spread(heights, step)
    moved = [abs(to - at) > 0.3 * step for at, to in zip(heights, placed, strict=True)]
    beside = 1 + 0.17 / max(axes.get_window_extent().width / axes.figure.dpi, 0.5) if any(moved) else 1.015
    for at, to, far, (_, label, color) in zip(heights, placed, moved, ordered, strict=True):
        axes.text(beside, to, label, color=color, fontsize=size, va="center", transform=axes.transAxes)
        if far:
            axes.plot([1.004, beside - 0.004], [at, to], color=color, lw=0.5, transform=axes.transAxes, clip_on=False,
                      scalex=False, scaley=False)  # fmt: skip


def spread(heights: Sequence[float], step: float) -> list[float]:
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


def length_axis(axes: Any, label: str, lengths: Sequence[float], most: int = 6) -> None:
    """A logarithmic axis of lengths with ticks at powers of two that can be read, about ``most`` of them."""
    import math

    axes.set_xscale("log", base=2)
    axes.set_xlabel(label)
    low, high = math.log2(min(lengths)), math.log2(max(lengths))
    step = max(1, math.ceil((high - low) / most))
    powers = range(math.ceil(low - 1e-9), math.floor(high + 1e-9) + 1, step)
    axes.set_xticks([2.0**k for k in powers], [power_text(k) for k in powers])
    axes.minorticks_off()


def power_text(exponent: int) -> str:
    """2^k as people write it: 512, 4K, 1M, and powers beyond."""
    value = 1 << exponent
    if value < 1024:
        return str(value)
    if value < 1 << 20:
        return f"{value >> 10}K"
    return f"{value >> 20}M" if value < 1 << 30 else f"$2^{{{exponent}}}$"


@contextlib.contextmanager
def applied_large() -> Iterator[None]:
    """As :func:`applied`, with type for a picture of several panels that fills a screen rather than a page's column."""
    import matplotlib
    from matplotlib import style

    with applied():
        larger = {str(name): 1.35 * size for name, size in matplotlib.rcParams.items() if name in _TYPE_SIZES}
        style.use({**larger, "savefig.dpi": 160})
        yield


def tame(figure: Any) -> None:
    """Let texts from outside that only look like mathematics, such as a name with two dollars, stand as they are.

    matplotlib would refuse to draw them, and with them the whole picture.
    """
    from matplotlib.mathtext import MathTextParser
    from matplotlib.text import Text

    parser: Any = MathTextParser("path")
    for axes in figure.axes:
        for axis in (axes.xaxis, axes.yaxis):
            axis.get_ticklabels()  # these come into being when they are asked for
    for text in figure.findobj(Text):
        if "$" in text.get_text():
            try:
                parser.parse(text.get_text())
            except (ValueError, RecursionError):
                text.set_parse_math(False)


def save(figure: Any, path: str | Path, about: Mapping[str, str]) -> None:
    """Write a picture whole, with its provenance inside and nothing that changes from run to run.

    Parameters
    ----------
    figure : Figure
        Drawn inside :func:`applied`, and saved inside it too.
    path : path
        .png, .pdf or .svg.
    about : mapping
        ``title`` and ``description``; both go into the file's metadata.

    Raises
    ------
    StoreError
        If the file cannot be written.
    """
    from theory_lab import __version__

    tame(figure)
    target = Path(path).absolute()
    maker = f"theory-lab {__version__}"
    title, description = about.get("title", ""), about.get("description", "")
    metadata: dict[str, dict[str, Any]] = {
        ".png": {"Title": title, "Description": description, "Software": maker},
        ".pdf": {"Title": title, "Subject": description, "Creator": maker, "CreationDate": None},
        ".svg": {"Title": title, "Description": description, "Creator": maker, "Date": None},
    }
    try:
        handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.stem}-", suffix=target.suffix)
        os.close(handle)
        try:
            figure.savefig(name, metadata=metadata[target.suffix.lower()])
            os.chmod(name, 0o644)
            os.replace(name, target)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(name)
            raise
    except OSError as error:
        raise StoreError(f"plot: {path}; cannot be written ({error.strerror or error})") from error
