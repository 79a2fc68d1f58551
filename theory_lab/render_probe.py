"""What a probe measured, as a table for people."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from theory_lab.outside import visible
from theory_lab.render import _console, _table

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
        console.print(visible(note), soft_wrap=True, markup=False)


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
    sparse = bool((summary[summary.measure == "sparsity"].estimate > 0).any())
    for key, title in _TITLES.items():
        names = [n for n in present if n == key or (key.endswith("_") and n.startswith(key))]
        several = title if "{}" in title else title + " ({})"
        for name in names:
            if key == "near_zero_" and (sparse or name[-2:] in ("_1", "_2")):
                continue
            values = summary[summary.measure == name].estimate
            if key in ("sparsity", "dead_rows", "dead_heads") and (values == 0).all():
                continue
            if key == "support" and (not sparse or "survivors" in present):
                continue
            if key == "sink_rate_" and f"g_sink_ratio_{name[10:]}" not in present:
                continue
            found.append((name, (title if len(names) == 1 else several).format(name.removeprefix(key))))
    return found


def _cell(part: pd.DataFrame, name: str) -> str:
    if name not in part.index:
        return "-"
    row: Any = part.loc[name]
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
    from theory_lab.probes.bootstrap import method

    rows, plan = result.rows, result.plan
    texts = list(dict.fromkeys(rows.text))
    heads = rows.groupby(["layer", "head"]).ngroups
    windows = f", {plan.windows} windows each" if plan.windows > 1 else ""
    listed = ", ".join(texts[:6]) + (", ..." if len(texts) > 6 else "")
    lines = [
        f"Averages over {heads} heads in {rows.layer.nunique()} layers and {len(texts)} "
        f"text{'s' if len(texts) > 1 else ''}{windows}: {listed}.",
        f"In parentheses: {method(len(texts))}."
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
    """Print what the scores of unrelated tokens are like, one line a layer, and what the reader should know."""
    from theory_lab.probes.bootstrap import method
    from theory_lab.probes.unrelated import SKIPPED

    console = _console()
    d, rows = result.head_dim, result.rows
    root = math.sqrt(d)
    table = _table(
        ("layer", "r"), ("mean x sqrt(d)", "r"), ("sd x sqrt(d)", "r"), ("proxy x d", "r"), ("largest", "r"),
        ("heads at most 1", "r"), ("survivors a row", "r"), ("largest", "r"), ("centered", "r"),
        title=f"{result.model}: cosines of unrelated tokens, d = {d}, T = {result.length:,}",
    )  # fmt: skip
    groups = [(str(layer), part) for layer, part in rows.groupby("layer")]
    for index, (layer, part) in enumerate([*groups, ("all", rows)]):
        if index == len(groups):
            table.add_section()
        within = int((part.proxy_high * d <= 1).sum())
        table.add_row(
            layer, short(part["mean"].mean() * root), short(part.sd.mean() * root), short(part.proxy.mean() * d),
            short(part.proxy.max() * d), f"{within} of {len(part)}", short(part.survivors.mean()),
            short(part.survivors.max()), short(part.survivors_centered.mean()),
        )  # fmt: skip
    console.print(table)
    above = int((rows.survivors_low > result.kappa).sum())
    for note in (
        "A line averages over its heads. Unrelated: queries of each text against keys of the text before it, of "
        f"{len(result.texts)} texts, key before query, without the first {SKIPPED} token.",
        "proxy x d: sub-Gaussian variance proxy about the mean, 1 for sigma = 1 (Assumption 4.1 wants mean 0 and proxy "
        "at most sigma^2/d); 'heads at most 1' counts those whose interval's upper end is.",
        f"survivors a row: keys above TDA's threshold at beta = {result.beta:g}, kappa = {result.kappa:g}; its theorem "
        f"says at most {result.kappa:g} if the assumption holds. {above} of {len(rows)} heads are above it (interval's "
        "lower end); centered: with each head's mean taken off. In the same rows the spherical law has "
        f"{short(result.spherical)}, the Gaussian {short(result.gaussian)}.",
        f"Intervals: {method(len(result.texts))}; --format csv prints them head by head.",
    ):
        console.print(visible(note), soft_wrap=True, markup=False)
