"""From the results of a campaign to the measured numbers behind figures and tables.

An entry of a plan's ``figures`` says which file of measured numbers it fills, and how::

    [[figures]]                                     # a table: one row a run, one column a value
    into = "tda/table-2"
    columns = { "validation loss" = "loss", "sparsity" = "zeros" }

    [[figures]]                                     # curves: one series a run, or one a value of one run
    into = "tda/figure-sinks"
    x = "length"
    value = "g_sink_ratio_1"

    [[figures]]                                     # a table turned: one row a value, one column a run
    into = "tda/table-4"
    rows = { "500 tokens, 4 needles" = "sequence_accuracy(multi-needle:needles=4)@500" }

``names`` shows a run under another name, and ``panels`` says which panel of the curves it belongs to. A value "loss
over Softmax" is the percent by which the run's loss exceeds that of the run Softmax with the same seed: pairs saw the
same tokens in the same order, and their differences vary less than the losses do.

A number is the mean over the seeds; its interval is Student's at 95% over the seeds, which are the independent units,
and empty where there is one seed. Shares of right answers have an interval of their own; see
:mod:`theory_lab.campaigns.answers`.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from theory_lab.campaigns import answers
from theory_lab.campaigns.work import results
from theory_lab.errors import InputError
from theory_lab.outside import defused, defused_line, reason
from theory_lab.store import write_whole

if TYPE_CHECKING:
    from theory_lab.campaigns.plan import Campaign

Result = dict[str, Any]

#: Percent of a share.
_PERCENT = ("zeros", "dead_rows", "dead_head", "zeros_1", "zeros_2")


def gather(campaign: Campaign, out: str | Path, into: str | Path) -> list[Path]:
    """Write the files of measured numbers that the campaign's finished runs fill.

    Parameters
    ----------
    campaign : Campaign
    out : path
        Its folder of results.
    into : path
        The experiments folder: files go to ``INTO/<paper>/measured/<name>.csv``.

    Returns
    -------
    list of Path
        What was written; entries whose runs have no result yet are left out.

    Raises
    ------
    InputError
        If nothing is finished, or an entry asks for what no result holds.
    """
    found = results(campaign, out)
    if not found:
        raise InputError("out", str(out), "finished runs of this campaign are needed; there are none")
    written = []
    for entry in campaign.figures:
        try:
            rows = _rows(entry, found)
            text = _csv(campaign, entry, found, rows)
        except InputError:
            raise
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:  # as files hold anything
            what = f"its results do not hold what {entry['into']} asks for ({reason(error)}): measure them again"
            raise InputError("out", str(out), what) from error
        if not rows:
            continue
        paper, _, name = str(entry["into"]).partition("/")
        path = Path(into) / paper / "measured" / f"{name}.csv"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError("into", str(into), f"a folder that can be written ({reason(error)})") from None
        write_whole(str(path), text.encode("utf-8", "replace"))
        written.append(path)
    return written


def mean_and_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Mean over seeds and Student's 95% interval; NaN ends for fewer than two."""
    from scipy import stats

    array = np.asarray(values, dtype=np.float64)
    mean = float(array.mean())
    if len(array) < 2:
        return mean, math.nan, math.nan
    half = float(stats.t.ppf(0.975, len(array) - 1) * array.std(ddof=1) / math.sqrt(len(array)))
    return mean, mean - half, mean + half


def _rows(entry: Mapping[str, Any], found: Sequence[Result]) -> list[dict[str, Any]]:
    names = entry.get("runs") or list(dict.fromkeys(result["name"] for result in found))
    by_name = {name: [r for r in found if r["name"] == name] for name in names}
    by_name = {name: rs for name, rs in by_name.items() if rs}
    if not by_name:
        return []
    if "value" in entry and entry.get("x") is None:
        return _map(str(entry["value"]), by_name)
    if "x" in entry:
        return list(_curves(entry, by_name))
    return list(_table(entry, by_name))


def _table(entry: Mapping[str, Any], by_name: Mapping[str, list[Result]]) -> Iterable[dict[str, Any]]:
    """Rows are runs and columns values; or, with ``rows``, rows are values and columns runs."""
    values: Mapping[str, str] = entry.get("columns") or entry["rows"]
    for name, rs in by_name.items():
        for label, what in values.items():
            measure, _, base = what.partition(" over ")
            if base:
                numbers = _over(rs, by_name.get(base, []), measure) if name != base else []
            else:
                numbers = [number for number in (scalar(r, what) for r in rs) if number is not None]
            asked = answers.parse(what)
            own = [share for r in rs for share in answers.shares(r, asked).values()] if asked else []
            if numbers:
                shown = entry.get("names", {}).get(name, name)
                place = (shown, label) if "columns" in entry else (label, shown)
                yield {"row": place[0], "column": place[1], **_numbers(numbers, own, _ends(what))}


def _over(rs: Sequence[Result], base: Sequence[Result], measure: str) -> list[float]:
    """Percent by which a value exceeds that of another run with the same seed: the same tokens in the same order."""
    other = {r["seed"]: scalar(r, measure) for r in base}
    pairs = [(scalar(r, measure), other.get(r["seed"])) for r in rs]
    return [100.0 * (one / two - 1.0) for one, two in pairs if one is not None and two]


def _ends(what: str) -> tuple[float, float]:
    """Between what a measure lies: an interval over few seeds may reach beyond."""
    name = what.partition("@")[0]
    if name in _PERCENT:
        return 0.0, 100.0
    return (0.0, 1.0) if name.startswith("g_sink_ratio") else (-math.inf, math.inf)


def _curves(entry: Mapping[str, Any], by_name: Mapping[str, list[Result]]) -> Iterable[dict[str, Any]]:
    """A series a run of one ``value``, or a series a value (``series``) of the runs named, a panel each if several."""
    series: Mapping[str, str] = entry.get("series") or {"": str(entry["value"])}
    for name, rs in by_name.items():
        for label, what in series.items():
            at: dict[float, list[float]] = {}
            for result in rs:
                for x, value in curve(result, str(entry["x"]), what).items():
                    at.setdefault(x, []).append(value)
            several = len(by_name) > 1
            asked = answers.parse(what)
            own = [answers.shares(r, asked) for r in rs] if asked else []
            for x in sorted(at):
                shown = label or entry.get("names", {}).get(name, name)
                row = {"series": shown, "x": x, **_numbers(at[x], [by[x] for by in own if x in by], _ends(what))}
                panel = entry.get("panels", {}).get(name, name if label and several else None)
                yield row if panel is None else {**row, "panel": panel}


def _map(what: str, by_name: Mapping[str, list[Result]]) -> list[dict[str, Any]]:
    """A grid of one model, that of the first run's first seed: single models have maps, averages of them have none."""
    result = next(iter(by_name.values()))[0]
    if what == "inhibition":
        found = result["measured"].get("inhibition") or {}
        tokens = _unlike(found.get("tokens", []))
        return [
            {"row": tokens[i], "column": tokens[j], "value": value, "low": "", "high": ""}
            for i, line in enumerate(found.get("map", []))
            for j, value in enumerate(line[: i + 1])
        ]
    rows = [row for row in result["measured"]["learned"] if what in row]
    return [
        {"row": str(row["layer"]), "column": str(head), "value": value, "low": "", "high": ""}
        for row in rows
        for head, value in enumerate(row[what])
    ]


def _unlike(tokens: Sequence[str]) -> list[str]:
    """Tokens as names: without spaces around them, repeated ones numbered."""
    seen: dict[str, int] = {}
    names = []
    for token in tokens:
        name = token.strip() or repr(token)
        seen[name] = seen.get(name, 0) + 1
        names.append(name if seen[name] == 1 else f"{name}#{seen[name]}")
    return names


def _numbers(
    values: Sequence[float], own: Sequence[answers.Share] = (), within: tuple[float, float] = (-math.inf, math.inf)
) -> dict[str, Any]:
    mean, low, high = mean_and_interval(values)
    low, high = max(low, within[0]), min(high, within[1])
    if own and all(map(math.isfinite, (end for share in own for end in share))):
        low, high = answers.interval(values, own, (low, high))
    ends = {"low": "", "high": ""} if math.isnan(low) else {"low": f"{low:.7g}", "high": f"{high:.7g}"}
    return {"value": f"{mean:.7g}", **ends, "seeds": len(values)}


def scalar(result: Result, what: str) -> float | None:
    """One number of one run.

    ``loss``, ``loss@1024``: held-out loss, nats a token. ``accuracy@16384``, ``sequence_accuracy(TASK)@4000``: percent.
    Any measure of heads, such as
    ``zeros`` (percent), ``g_sink_ratio_1@512`` or ``view_correlation``: mean over layers at the longest length that is
    not beyond training's, or at the length named. ``tokens_per_second``.
    """
    name, _, at = what.partition("@")
    measured = result["measured"]
    if name == "loss":
        if not at:
            return float(result["train"]["val_loss"])
        texts = measured.get("loss", {}).get(at)
        return float(np.mean(texts)) if texts else None
    if (asked := answers.parse(what)) is not None:
        if asked.length is None:
            raise InputError("figures", what, f"a length is needed in a table, as in {what}@4000")
        share = answers.shares(result, asked).get(asked.length)
        return None if share is None else share.value
    if name == "tokens_per_second":
        return float(result["train"]["tokens_per_second"])
    trained = int(result["train"]["settings"]["length"])
    lengths = sorted({row["length"] for row in measured.get("heads", [])})
    wanted = int(at) if at else max((n for n in lengths if n <= trained), default=None)
    found = [_head(row, name) for row in measured.get("heads", []) if row["length"] == wanted]
    values = [value for value in found if value is not None]
    return float(np.mean(values)) if values else None


def curve(result: Result, x: str, what: str) -> dict[float, float]:
    """A run's value by ``length``, by ``layer`` (at training's length) or by ``step`` (through training)."""
    measured = result["measured"]
    if (asked := answers.parse(what)) is not None:
        if x != "length":
            raise InputError("x", x, f"{what} is by length")
        return {length: share.value for length, share in answers.shares(result, asked).items()}
    if x == "step":
        pairs = [(row["step"], row.get(what)) for row in result["layers"]]
    elif x == "layer":
        trained = int(result["train"]["settings"]["length"])
        rows = measured.get("heads", [])
        longest = max((row["length"] for row in rows if row["length"] <= trained), default=None)
        pairs = [(row["layer"], _head(row, what)) for row in rows if row["length"] == longest]
    elif x == "length" and what == "loss":
        return {float(n): float(np.mean(texts)) for n, texts in measured.get("loss", {}).items()}
    elif x == "length":
        pairs = [(row["length"], _head(row, what)) for row in measured.get("heads", [])]
    else:
        raise InputError("x", x, "length, layer or step")
    at: dict[float, list[float]] = {}
    for place, value in pairs:
        if value is not None:
            at.setdefault(float(place), []).append(float(value))
    most: Callable[[list[float]], float] = max if what.startswith("max_abs") else lambda v: float(np.mean(v))
    return {place: most(values) for place, values in at.items()}


def _head(row: Mapping[str, Any], name: str) -> float | None:
    column = name.replace("zeros", "sparsity")
    value = row.get(column)
    if value is None or value != value:
        return None
    return 100.0 * float(value) if name in _PERCENT else float(value)


def _csv(campaign: Campaign, entry: Mapping[str, Any], found: Sequence[Result], rows: list[dict[str, Any]]) -> str:
    names = entry.get("runs")
    used = [r for r in found if not names or r["name"] in names]
    device = ", ".join(sorted({r["train"]["device"] for r in used}))
    seeds = ", ".join(str(seed) for seed in sorted({r["seed"] for r in used}))
    stream = io.StringIO()
    stream.write(f"# device: {defused_line(device)}\n# seed: {seeds}\n")
    stream.write(f"# made by: theory-lab campaign gather {defused_line(campaign.name)}\n")
    if entry.get("note"):
        stream.write(f"# note: {defused_line(entry['note'])}\n")
    columns = list(dict.fromkeys(key for row in rows for key in row))
    writer = csv.DictWriter(stream, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows({key: defused(value) for key, value in row.items()} for row in rows)
    return stream.getvalue()
