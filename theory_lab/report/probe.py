"""The section of a probe: what a trained model's attention does, by length, by layer and by head."""

from __future__ import annotations

import shlex
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from theory_lab.errors import InputError
from theory_lab.report.parts import Cell, Column, Picture, Section, Table
from theory_lab.report.pictures import shrink
from theory_lab.report.sources import Source

if TYPE_CHECKING:
    import pandas as pd

    from theory_lab.probes.plan import ProbeResult

_KEYS = ("model", "weights", "text", "window", "start", "length", "layer", "head", "rows", "visible")
_WHOLE = ("text", "window", "start", "length", "layer", "head", "top_key", "rows", "visible")

#: What each of the pictures of theory_lab.figures.probe_plot shows.
_CAPTIONS = {
    "sinks": (
        "The first token's share",
        "How much of all attention goes to the first token, against the length of the sequence: of every layer (gray) "
        "and of the whole model, with its interval over texts. The dashed line is what the token would get if every "
        "row weighed all the keys that it sees alike; far above it, the token is a sink.",
    ),
    "layers": (
        "Layer by layer",
        "Zeros and near zeros, and the entropy of a row over log n (1: spread over all keys; 0: on a single one), by "
        "layer.",
    ),
    "heads": (
        "Head by head",
        "One cell a head, averaged over texts, at the longest length. A hatched cell has no value: its head has no "
        "weight at all.",
    ),
}


def probe_section(source: Source, pictures: bool, say: Callable[[str], None]) -> Section:
    """The section of rows of a probe.

    Parameters
    ----------
    source : Source
        Rows of kind ``probe``.
    pictures : bool
        Whether to draw them.
    say : callable
        Told each picture before it is drawn.
    """
    rows = source.rows.astype({name: "int64" for name in _WHOLE if name in source.rows and name != "text"})
    result = _result(rows, source.about)
    summary = result.summary()
    return Section(
        title=f"Probe of {result.model}: {source.name}",
        lead=tuple(_lead(rows, result, summary)),
        overview=(_by_length(summary, result),),
        pictures=tuple(_pictures(result, say)) if pictures else (),
        tables=(_by_layer(result), _by_head(rows, summary, result)),
        command=_command(rows, source.about),
        settings=tuple(_settings(rows, source.about)),
    )


def _result(rows: pd.DataFrame, about: dict[str, Any]) -> ProbeResult:
    from theory_lab.probes.plan import SINK_EPS, ProbeResult

    models, weights = list(dict.fromkeys(rows.model)), list(dict.fromkeys(rows.weights))
    for name, found in (("model", models), ("weights", weights)):
        if len(found) > 1:
            raise InputError(f"results: column {name}", ", ".join(found), "one value is allowed in a file")
    settings = _stored(about)
    plan: Any = SimpleNamespace(
        lengths=tuple(sorted(rows.length.unique())),
        windows=int(rows.window.nunique()),
        mechanism=SimpleNamespace(label=weights[0]),
        sink_eps=float(settings.get("sink_eps", SINK_EPS)),
        seed=int(settings.get("seed", 0)),
    )
    return ProbeResult(rows, plan, models[0])


def _stored(about: dict[str, Any]) -> dict[str, Any]:
    settings = about.get("settings")
    return settings if isinstance(settings, dict) else {}


def _lead(rows: pd.DataFrame, result: ProbeResult, summary: pd.DataFrame) -> Iterator[str]:
    from theory_lab.render_probe import _notes, short

    sinks = summary[(summary.measure == "g_sink_ratio_1") & summary.estimate.notna()]
    if len(sinks):
        last: Any = sinks.sort_values("length").iloc[-1]
        equal = rows.loc[rows.length == last.length, "g_sink_uniform_1"].mean()
        interval = f" ({short(last.ci_low)} to {short(last.ci_high)})" if last.ci_low < last.ci_high else ""
        yield (
            f"At {int(last.length):,} tokens the first one gets {short(last.estimate)}{interval} of all attention; "
            f"equal weights would give it {short(equal)}."
        )
    weights = result.plan.mechanism.label
    if weights != "model":
        yield f"What if: the weights are those of {weights}, on the model's own queries and keys."
    yield from _notes(result, summary)


def _by_length(summary: pd.DataFrame, result: ProbeResult) -> Table:
    from theory_lab.render_probe import _columns

    columns = _columns(summary, result)
    lines = []
    for length in sorted(summary.length.unique()):
        part = summary[summary.length == length].set_index("measure")
        lines.append((_count(length), *(_estimate(part, name) for name, _ in columns)))
    heads = (Column("tokens T", "number"), *(Column(title, "number") for _, title in columns))
    return Table(
        "By length", heads, lines, "Averages over layers, heads and texts; in parentheses the interval over texts."
    )


def _by_layer(result: ProbeResult) -> Table:
    from theory_lab.render_probe import _columns

    table = result.summary(by_layer=True)
    columns = _columns(table, result)
    lines = []
    for (length, layer), part in table.groupby(["length", "layer"], sort=True):
        part = part.set_index("measure")
        lines.append((_count(length), _count(layer), *(_estimate(part, name) for name, _ in columns)))
    heads = (Column("tokens T", "number", chosen=True), Column("layer", "number", chosen=True),
             *(Column(title, "number") for _, title in columns))  # fmt: skip
    words = "Averages over heads and texts; in parentheses the interval over texts."
    return Table("By layer", heads, lines, words, long=True)


def _by_head(rows: pd.DataFrame, summary: pd.DataFrame, result: ProbeResult) -> Table:
    """Every head, averaged over texts and windows."""
    from theory_lab.render_probe import _columns

    measured = [name for name in rows.columns if name not in (*_KEYS, "top_key", "dead_head")]
    columns = [(name, title) for name, title in _columns(summary, result) if name in measured]
    columns += [("sink_weight_1", "mean weight on key 1")] if "sink_weight_1" in measured else []
    grouped = rows.groupby(["length", "layer", "head"], sort=True)
    means = grouped[[name for name, _ in columns]].mean()
    tops = grouped.top_key.agg(lambda keys: keys.mode().iloc[0]) if "top_key" in rows else None
    lines = []
    for place, values in zip(means.index, means.itertuples(index=False), strict=True):
        top = () if tops is None else (_count(tops.loc[place]),)
        lines.append((*map(_count, place), *map(_value, values), *top))
    heads = (
        *(Column(title, "number", chosen=True) for title in ("tokens T", "layer", "head")),
        *(Column(title, "number") for _, title in columns),
        *((Column("key with the most weight", "number"),) if tops is not None else ()),
    )
    words = "Averages over texts; the key with the most weight (from 1) is that of most texts."
    return Table("By head", heads, lines, words, long=True)


def _count(value: Any) -> Cell:
    return Cell(f"{int(value):,}", float(value))


def _value(value: float) -> Cell:
    from theory_lab.render_probe import short

    return Cell(short(value), float(value) if value == value else None)


def _estimate(part: pd.DataFrame, name: str) -> Cell:
    from theory_lab.render_probe import _cell

    found: Any = part.estimate.get(name)
    return Cell(_cell(part, name), None if found is None or found != found else float(found))


def _pictures(result: ProbeResult, say: Callable[[str], None]) -> Iterator[Picture]:
    say(f"drawing the probe of {result.model}")
    with tempfile.TemporaryDirectory(prefix="theory-lab-report-") as folder:
        for path in result.plot(folder):
            name = Path(path).stem
            title, caption = _CAPTIONS.get(name, (name, ""))
            yield Picture("", title, caption, shrink(Path(path).read_bytes()))


def _command(rows: pd.DataFrame, about: dict[str, Any]) -> str:
    from theory_lab.probes.texts import shipped

    words = ["theory-lab", "probe", str(rows.model.iloc[0])]
    words += ["--length", ",".join(map(str, sorted(rows.length.unique())))]
    texts = list(dict.fromkeys(rows.text))
    if set(texts) - {text.name for text in shipped()}:
        # Their names; where they lie is not stored.
        words += [word for text in texts for word in ("--text", str(text))]
    for name, flag in (("layer", "--layers"), ("head", "--heads")):
        found = sorted(int(number) for number in rows[name].dropna().unique())
        if found != list(range(len(found))):
            words += [flag, ",".join(map(str, found))]
    if rows.window.nunique() > 1:
        words += ["--windows", str(rows.window.nunique())]
    if rows.weights.iloc[0] != "model":
        words += ["--as", str(rows.weights.iloc[0])]
    settings = _stored(about)
    for name, flag in (("metrics", "--metrics"), ("near_zero", "--near-zero"), ("sink_keys", "--sink-key")):
        if about.get(name):
            words += [flag, ",".join(map(str, about[name]))]
    for name, flag in (("device", "--device"), ("dtype", "--dtype")):
        if about.get(name):
            words += [flag, str(about[name]).removeprefix("torch.")]
    for name, flag in (("sink_eps", "--sink-eps"), ("seed", "--seed")):
        words += [flag, str(settings[name])] if name in settings else []
    return shlex.join(words)


def _settings(rows: pd.DataFrame, about: dict[str, Any]) -> Iterator[tuple[str, str]]:
    yield "texts", ", ".join(dict.fromkeys(rows.text))
    settings = _stored(about)
    for name in ("seed", "sink_eps"):
        if name in settings:
            yield name.replace("_", " "), str(settings[name])
    for name, title in (("theory_lab", "theory-lab"), ("device", "device"), ("dtype", "dtype"), ("commit", "commit"),
                        ("fingerprint", "fingerprint of the model's weights"), ("numpy", "numpy"), ("pandas", "pandas"),
                        ("scipy", "scipy")):  # fmt: skip
        if about.get(name):
            yield title, str(about[name])
    if not about:
        yield "settings", "not stored in this file; theory-lab probe --out DIR keeps them"
    yield "rows", f"{len(rows):,}"
