"""The pictures of a probe: sinks against length, layerwise zeros, heads by layers."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from theory_lab.errors import InputError, StoreError
from theory_lab.figures import style
from theory_lab.figures.check_plot import validate_plot_file
from theory_lab.reproduce.probe_tables import Heat, ProbeTables

if TYPE_CHECKING:
    import pandas as pd

    from theory_lab.probes.plan import ProbeResult
    from theory_lab.reproduce.spec import Experiment

_BLACK, _ORANGE, _BLUE, _RED, _SKY, _GREEN = "#000000", "#E69F00", "#0072B2", "#D55E00", "#56B4E9", "#009E73"
_GRAY = "0.75"
_VIEW_NAMES = {"": "difference", "_1": "view 1", "_2": "view 2"}
_VIEW_STYLES = {"": (_BLACK, "o"), "_1": (_BLUE, "^"), "_2": (_ORANGE, "s")}


def validate_plot(path: str) -> None:
    """Raise InputError unless the pictures can be written to that file, or into that (new or existing) folder."""
    if not path:
        raise InputError("plot", "''", f"a folder, or a file name ending in {', '.join(style.SUFFIXES)}, is allowed")
    target = Path(path)
    if target.suffix.lower() in style.SUFFIXES and not target.is_dir():
        validate_plot_file(path)
        return
    if target.suffix and not target.is_dir():
        raise InputError("plot", path, f"a folder, or a file name ending in {', '.join(style.SUFFIXES)}, is allowed")
    if target.exists() and not target.is_dir():
        raise InputError("plot", path, "a folder is allowed, and this is a file")
    nearest = target.absolute()
    while not nearest.exists():
        nearest = nearest.parent
    if not nearest.is_dir() or not os.access(nearest, os.W_OK):
        raise InputError("plot", path, "it cannot be written")
    validate_plot_file(str(nearest / "try.png"))


def plot_probe(result: ProbeResult, path: str) -> list[str]:
    """Draw a probe.

    Parameters
    ----------
    result : ProbeResult
    path : str
        A file (.png, .pdf, .svg) for one picture of everything, or a folder for one picture each: ``sinks``,
        ``layers``, ``heads``.

    Returns
    -------
    list of str
        What was written.

    Raises
    ------
    InputError, StoreError
        If nothing can be written there, or there is nothing to draw.
    """
    validate_plot(path)
    tables = ProbeTables.of(result) if len(result.rows) else None
    if tables is None or not (tables.has_sinks or tables.zeros() or "normalized_entropy" in result.rows):
        raise InputError("plot", path, "there is nothing to draw: pictures show sinks, sparsity and entropy")
    target = Path(path)
    if target.suffix.lower() in style.SUFFIXES and not target.is_dir():
        _overview(result, tables, str(target))
        return [str(target)]
    try:
        target.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StoreError(f"plot: {path}; the folder cannot be made ({error.strerror or error})") from None
    makers: dict[str, Callable[[ProbeResult, ProbeTables, str], bool]] = {
        "sinks": _sinks,
        "layers": _layers,
        "heads": _heads,
    }
    written = []
    for name, draw in makers.items():
        file = str(target / f"{name}.png")
        if draw(result, tables, file):
            written.append(file)
    return written


def _about(result: ProbeResult) -> str:
    texts, lengths = result.rows.text.nunique(), ", ".join(str(n) for n in result.plan.lengths)
    return (
        f"{model_name(result.model)}, weights {result.plan.mechanism.label}, {texts} texts, lengths {lengths}, "
        f"seed {result.plan.seed}"
    )


def model_name(model: str) -> str:
    """A model's name without the folders around it."""
    path = Path(model)
    return path.name if path.is_absolute() else model


def _title(result: ProbeResult) -> str:
    weights, model = result.plan.mechanism.label, model_name(result.model)
    return model if weights == "model" else f"{model}, weights of {weights}"


def _save(figure: Any, path: str, result: ProbeResult) -> bool:
    style.save(figure, path, {"title": _title(result), "description": _about(result)})
    return True


@style.applied_large()
def _overview(result: ProbeResult, tables: ProbeTables, path: str) -> None:
    figure = style.new_figure(11.5, 7.6)
    figure.suptitle(_title(result), x=0.01, ha="left")
    _panels(figure, tables)
    _save(figure, path, result)


def _panels(figure: Any, tables: ProbeTables) -> None:
    """Four panels: sinks, zeros and two maps of heads, as far as they were measured."""
    panels = iter(figure.subplots(2, 2).flat)
    if tables.has_sinks:
        _draw_sinks(next(panels), tables)
    if tables.zeros():
        _draw_zeros(next(panels), tables)
    for heat in tables.heats(2):
        axes = next(panels, None)
        if axes is not None:
            _draw_heat(figure, axes, tables, heat)
    for axes in panels:
        axes.set_axis_off()


def draw_overview(frame: pd.DataFrame, experiment: Experiment) -> Any:
    """The overview of an experiment's rows, those of :meth:`ProbeTables.frame`, for a page."""
    options = experiment.options
    figure = style.new_figure(options.get("width", "double"), options.get("height", 4.8))
    _panels(figure, ProbeTables.from_frame(frame))
    return figure


# ---- sinks against length --------------------------------------------------------------------------------------------


@style.applied_large()
def _sinks(result: ProbeResult, tables: ProbeTables, path: str) -> bool:
    if not tables.has_sinks:
        return False
    figure = style.new_figure(6.4, 4.6)
    _draw_sinks(figure.subplots(), tables, title=_title(result))
    return _save(figure, path, result)


def _draw_sinks(axes: Any, tables: ProbeTables, title: str = "") -> None:
    """gSinkRatio(1) of every layer and of the model, beside equal weights."""
    layers, model = tables.measure("g_sink_ratio_1", by_layer=True), tables.measure("g_sink_ratio_1")
    uniform = tables.measure("g_sink_uniform_1").set_index("length").estimate
    single = len(model) == 1
    for index, (_, part) in enumerate(layers.groupby("layer")):
        label = "each layer" if index == 0 else None
        axes.plot(
            part.length, part.estimate, color=_GRAY, lw=0.7, marker="." if single else None, label=label, zorder=1
        )
    low = (model.estimate - model.ci_low).fillna(0).clip(lower=0)
    high = (model.ci_high - model.estimate).fillna(0).clip(lower=0)
    look = {"color": _BLUE, "marker": "o", "ms": 5, "lw": 1.8, "zorder": 3}
    if model.ci_low.notna().any():
        label = "all heads, 95% interval over texts"
        axes.errorbar(model.length, model.estimate, yerr=[low, high], capsize=3, label=label, **look)
    else:
        axes.plot(model.length, model.estimate, label="all heads (one text: no interval)", **look)
    axes.plot(uniform.index, uniform.to_numpy(), color=_BLACK, ls="--", lw=1.4, marker="_" if single else None,
              label="equal weights", zorder=2)  # fmt: skip
    axes.set_xscale("log", base=2)
    every = max(1, -(-len(uniform) // 8))
    shown = list(uniform.index)[::-1][::every]
    axes.set_xticks(shown, [f"{n:,}" for n in shown])
    axes.minorticks_off()
    axes.set_yscale("log")
    lowest = min(float(uniform.min()), float(layers.estimate[layers.estimate > 0].min()))
    axes.set_ylim(max(lowest * 0.7, 1e-6), 1.3)
    axes.set_yticks([t for t in (1e-5, 1e-4, 1e-3, 1e-2, 0.1, 1) if t > lowest * 0.7])
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_xlabel("length T")
    axes.set_ylabel("share of the mass on token 1")
    axes.set_title(title or "gSinkRatio(1): the first token's share", loc="left")
    axes.legend(frameon=False, loc="lower left")


# ---- layers ----------------------------------------------------------------------------------------------------------


@style.applied_large()
def _layers(result: ProbeResult, tables: ProbeTables, path: str) -> bool:
    measured = set(tables.layers.measure)
    panels: list[Callable[[Any, ProbeTables], None]] = []
    if tables.zeros():
        panels.append(_draw_zeros)
    if "normalized_entropy" in measured:
        panels.append(_draw_entropy)
    if measured & {"max_abs_1", "max_abs_2"}:
        panels.append(_draw_maxima)
    if not panels:
        return False
    figure = style.new_figure(0.6 + 5.0 * len(panels), 4.2)
    figure.suptitle(_title(result), x=0.01, ha="left")
    for axes, draw in zip(figure.subplots(1, len(panels), squeeze=False).flat, panels, strict=True):
        draw(axes, tables)
    return _save(figure, path, result)


def _draw_zeros(axes: Any, tables: ProbeTables) -> None:
    measures = tables.zeros()
    exact = measures[0].startswith("sparsity")
    lines = []
    for index, name in enumerate(measures):
        if exact:
            view = name.removeprefix("sparsity")
            color, marker = _VIEW_STYLES[view]
            label = _VIEW_NAMES[view] if len(measures) > 1 else "exact zeros"
        else:
            color, marker = ((_BLUE, "o"), (_ORANGE, "s"), (_GREEN, "^"), (_RED, "D"))[index % 4]
            label = f"below {name.removeprefix('near_zero_')}"
        lines.append((name, label, color, marker))
    _by_layer(axes, tables, lines, tables.longest)
    axes.set_ylim(-0.03, 1.03)
    axes.set_ylabel("share of visible entries")
    axes.set_title(f"{'Exact' if exact else 'Near'} zeros by layer, T = {tables.longest:,}", loc="left")


def _draw_entropy(axes: Any, tables: ProbeTables) -> None:
    lengths = sorted(tables.model.length.unique())
    chosen = lengths if len(lengths) <= 2 else [lengths[0], lengths[-1]]
    styles = ((_SKY, "o"), (_BLACK, "s"))
    for length, (color, marker) in zip(chosen, styles[-len(chosen) :], strict=True):
        _by_layer(axes, tables, [("normalized_entropy", f"T = {length:,}", color, marker)], length)
    axes.set_ylim(-0.03, 1.03)
    axes.set_ylabel("mean of H / log n over rows and heads")
    axes.set_title("Normalized entropy by layer", loc="left")


def _draw_maxima(axes: Any, tables: ProbeTables) -> None:
    lines = [("max_abs" + view, f"|{_VIEW_NAMES[view]}|", *_VIEW_STYLES[view]) for view in ("_1", "_2", "")]
    _by_layer(axes, tables, lines, tables.longest)
    axes.set_ylabel("largest weight of any head and text")
    axes.set_title(f"Largest weights by layer, T = {tables.longest:,}", loc="left")


def _by_layer(axes: Any, tables: ProbeTables, lines: list[tuple[str, str, str, str]], length: int) -> None:
    for name, label, color, marker in lines:
        part = tables.measure(name, by_layer=True)
        part = part[part.length == length]
        low = (part.estimate - part.ci_low).fillna(0).clip(lower=0)
        high = (part.ci_high - part.estimate).fillna(0).clip(lower=0)
        axes.errorbar(part.layer, part.estimate, yerr=[low, high], color=color, marker=marker, ms=4, lw=1.2,
                      capsize=2, elinewidth=0.9, label=label)  # fmt: skip
    axes.set_xlabel("layer")
    axes.xaxis.get_major_locator().set_params(integer=True)
    if tables.layers.layer.nunique() == 1:
        axes.set_xticks(tables.layers.layer.unique())
    axes.legend(frameon=False)


# ---- heads -----------------------------------------------------------------------------------------------------------


@style.applied_large()
def _heads(result: ProbeResult, tables: ProbeTables, path: str) -> bool:
    shown = tables.heats(3)
    if not shown:
        return False
    layers, heads = tables.heads.layer.nunique(), tables.heads["head"].nunique()
    wide = layers >= heads
    x, y = (layers, heads) if wide else (heads, layers)
    if wide:
        figure = style.new_figure(max(5.0, 1.9 + 0.21 * x), max(2.3, 0.9 + 0.17 * y) * len(shown) + 0.4)
        grid = figure.subplots(len(shown), 1, squeeze=False)
    else:
        figure = style.new_figure(max(3.2, 1.6 + 0.21 * x) * len(shown), max(3.0, 1.0 + 0.17 * y))
        grid = figure.subplots(1, len(shown), squeeze=False)
    figure.suptitle(f"{_title(result)}, T = {tables.longest:,}", x=0.01, ha="left")
    for axes, heat in zip(grid.flat, shown, strict=True):
        _draw_heat(figure, axes, tables, heat, wide=wide)
    return _save(figure, path, result)


def _draw_heat(figure: Any, axes: Any, tables: ProbeTables, heat: Heat, wide: bool = True) -> None:
    """Heads by layers, averaged over texts; a hatched cell has no value (a dead head)."""
    name, title, limits = heat
    part = tables.heads[tables.heads.measure == name]
    table = part.pivot(index="head", columns="layer", values="estimate")
    values = table.to_numpy(float)
    along, across = table.columns.to_numpy(int), table.index.to_numpy(int)
    names = ("layer", "head")
    if not wide:
        values, along, across, names = values.T, across, along, names[::-1]
    axes.set_facecolor("white")
    axes.patch.set_hatch("////")
    axes.patch.set_edgecolor("0.6")
    mesh = axes.pcolormesh(
        np.arange(len(along) + 1), np.arange(len(across) + 1), np.ma.masked_invalid(values), cmap="cividis",
        vmin=limits[0], vmax=limits[1], edgecolors="white", linewidth=0.3,
    )  # fmt: skip
    for set_ticks, labels in ((axes.set_xticks, along), (axes.set_yticks, across)):
        step = max(1, -(-len(labels) // 16))
        set_ticks(np.arange(0, len(labels), step) + 0.5, [str(v) for v in labels[::step]])
    axes.set_xlabel(names[0])
    axes.set_ylabel(names[1])
    axes.tick_params(length=2)
    axes.set_title(title, loc="left")
    figure.colorbar(mesh, ax=axes, fraction=0.04, pad=0.015)
    for spine in axes.spines.values():
        spine.set_visible(False)
