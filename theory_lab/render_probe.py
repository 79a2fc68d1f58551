"""What a probe measured, as a table for people."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from theory_lab.render import _console, _table, number

if TYPE_CHECKING:
    import pandas as pd

    from theory_lab.probes.plan import ProbeResult
    from theory_lab.probes.unrelated import UnrelatedResult

#: Measure -> column title, in the order of the table; those with a number in the name are found by prefix.
_TITLES = {
    "g_sink_ratio_": "gSinkRatio({})",
    "g_sink_uniform_": "equal weights",
    "sink_rate_": "sink rate({})",
    "sparsity": "exact zeros",
    "sparsity_1": "of view 1",
    "sparsity_2": "of view 2",
    "near_zero_": "below {}",
    "normalized_entropy": "entropy / log n",
    "support": "keys with weight",
    "survivors": "survivors a row",
    "survivors_1": "survivors, view 1",
    "survivors_2": "view 2",
    "consensus": "consensus",
    "lift": "lift",
    "view_correlation": "correlation",
    "score_mean": "mean score",
    "score_sd": "sd",
    "max_abs": "largest weight",
    "max_abs_1": "of view 1",
    "max_abs_2": "of view 2",
    "dead_rows": "dead rows",
    "dead_heads": "dead heads",
}
_WITHOUT_INTERVAL = ("g_sink_uniform_", "support", "max_abs", "score_sd")


def print_probe(result: ProbeResult) -> None:
    """Print the averages of a probe, one line a length, and what the reader should know."""
    console = _console()
    if result.rows.empty:
        console.print("no rows")
        return
    summary = result.summary()
    columns = _columns(summary, result)
    lines = []
    for length in sorted(summary.length.unique()):
        part = summary[summary.length == length].set_index("measure")
        lines.append([f"{length:,}", *(_cell(part, name) for name, _ in columns)])
    weights = result.plan.mechanism.label
    title = result.model if weights == "model" else f"{result.model}, weights of {weights} on its queries and keys"
    # Tables as wide as the terminal: what does not fit beside the rest goes below it.
    while columns:
        count = max(1, _fitting(console.width, [name for _, name in columns], lines))
        table = _table(("tokens T", "r"), *((name, "r") for _, name in columns[:count]), title=title)
        for line in lines:
            table.add_row(*line[: count + 1])
        console.print(table)
        columns, lines, title = columns[count:], [[line[0], *line[count + 1 :]] for line in lines], ""
    for note in _notes(result, summary):
        console.print(note, soft_wrap=True, markup=False)


def _fitting(width: int, titles: list[str], lines: list[list[str]]) -> int:
    """How many columns fit beside the first; each takes three more places than its text."""
    used = 3 + max(len("tokens T"), *(len(line[0]) for line in lines))
    for count, title in enumerate(titles):
        used += 3 + max(len(title), *(len(line[count + 1]) for line in lines))
        if used > width:
            return count
    return len(titles)


def _columns(summary: pd.DataFrame, result: ProbeResult) -> list[tuple[str, str]]:
    """(measure, title) of what is worth a column."""
    found = []
    present = list(dict.fromkeys(summary.measure))
    for key, title in _TITLES.items():
        names = [n for n in present if n == key or (key.endswith("_") and n.startswith(key))]
        for name in names:
            if key == "near_zero_" and name[-2:] in ("_1", "_2"):
                continue
            values = summary[summary.measure == name].estimate
            if key in ("sparsity", "dead_rows", "dead_heads") and (values == 0).all():
                continue
            if key == "support" and not (summary[summary.measure == "sparsity"].estimate > 0).any():
                continue
            if key == "sink_rate_" and f"g_sink_ratio_{name[10:]}" not in present:
                continue
            found.append((name, title.format(name.removeprefix(key))))
    return found


def _cell(part: pd.DataFrame, name: str) -> str:
    if name not in part.index:
        return "-"
    row = part.loc[name]
    text = short(row.estimate)
    if any(name.startswith(prefix) for prefix in _WITHOUT_INTERVAL) or math.isnan(row.ci_low):
        return text
    if row.ci_low == row.ci_high:
        return text
    return f"{text} ({short(row.ci_low)}, {short(row.ci_high)})"


def short(value: float) -> str:
    """Three significant digits."""
    if value is None or math.isnan(value):
        return "-"
    if value == 0:
        return "0"
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"


def _notes(result: ProbeResult, summary: pd.DataFrame) -> list[str]:
    from theory_lab.probes.bootstrap import METHOD

    rows, plan = result.rows, result.plan
    texts = list(dict.fromkeys(rows.text))
    heads = rows.groupby(["layer", "head"]).ngroups
    windows = f", {plan.windows} windows each" if plan.windows > 1 else ""
    listed = ", ".join(texts[:6]) + (", ..." if len(texts) > 6 else "")
    lines = [
        f"Averages over {heads} heads in {rows.layer.nunique()} layers and {len(texts)} "
        f"text{'s' if len(texts) > 1 else ''}{windows}: {listed}.",
        f"In parentheses: {METHOD}."
        if len(texts) > 1
        else "One text: no interval, since heads and tokens of one text are no independent sample. Give more texts.",
    ]
    if any(summary.measure.str.startswith("g_sink_ratio")):
        lines.append(
            "gSinkRatio(k): key k's share of a head's whole mass; equal weights: the same if a row weighed all keys "
            f"alike; sink rate(k): share of heads whose mean weight on key k exceeds {plan.sink_eps:g}."
        )
    dead = summary[(summary.measure == "dead_heads") & (summary.estimate > 0)]
    if len(dead):
        lines.append("Dead heads have no weight at all; gSinkRatio leaves them out.")
    return lines + [f"Note: {note}" for note in result.notes]


def print_unrelated(result: UnrelatedResult) -> None:
    """Print what the scores of unrelated tokens are like, one line a layer."""
    console = _console()
    table = _table(
        ("layer", "r"), ("mean, in sd of a sphere", "r"), ("sd", "r"), ("proxy x d (Assumption 4.1: <= sigma^2)", "r"),
        ("heads with proxy x d <= 1", "r"), ("survivors a row", "r"), ("centered", "r"), ("spherical law", "r"),
        title=result.title,
    )  # fmt: skip
    for line in result.layer_lines():
        table.add_row(*line)
    console.print(table)
    for note in result.notes():
        console.print(note, soft_wrap=True, markup=False)


__all__ = ["number", "print_probe", "print_unrelated", "short"]
