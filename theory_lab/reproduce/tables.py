"""Tables: the paper's value, ours with its interval, and the difference, in three blocks that are never mixed."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from theory_lab.audit_data import NOT_PRINTED, parse_printed
from theory_lab.reproduce.latex import Block, to_latex

if TYPE_CHECKING:
    import pandas as pd

    from theory_lab.reproduce.spec import Experiment

BLOCKS = ("the paper", "measured here", "difference")
_NONE = "–"


def cells(experiment: Experiment, frame: pd.DataFrame) -> pd.DataFrame:
    """Our numbers as row, column, value, low, high, text."""
    if experiment.kind.name != "benchmark":
        return frame
    printed = experiment.printed
    base = next(iter(printed.units)) if printed is not None else "speedup"
    first = experiment.settings["directions"][0]
    found = frame.assign(
        row=frame.length.astype(str),
        column=[base if d == first else f"{base}, {d.replace('+', ' + ')}" for d in frame.direction],
        text="",
    )
    return found.rename(columns={"estimate": "value", "ci_low": "low", "ci_high": "high"})


def compare(experiment: Experiment, frame: pd.DataFrame) -> pd.DataFrame:
    """One row a cell: the paper's number as printed, ours with its ends, and the difference with its ends.

    The difference's ends take in our interval and the paper's rounding. Words agree or disagree.
    """
    import pandas as pd

    printed = experiment.printed
    ours = {(str(c["row"]), str(c["column"])): c for c in cells(experiment, frame).to_dict("records")}
    keys = [(r, c) for r, row in printed.rows.items() for c in row] if printed is not None else []
    keys += [key for key in ours if key not in set(keys)]
    if all(row.isdigit() for row, _ in keys):
        keys.sort(key=lambda key: int(key[0]))  # stable: columns keep their order
    records = []
    for row, column in keys:
        text = printed.rows.get(row, {}).get(column, NOT_PRINTED) if printed is not None else NOT_PRINTED
        record: dict[str, Any] = {
            "row": row,
            "column": column,
            "unit": _unit(printed.units, column) if printed is not None else "",
            "paper": "" if text == NOT_PRINTED else text,
        }
        cell = ours.get((row, column))
        word = str(cell.get("text", "")) if cell else ""
        value, low, high = (_of(cell, name) for name in ("value", "low", "high"))
        record |= {"ours": word, "value": value, "low": low, "high": high, "difference": ""}
        record |= dict.fromkeys(("difference_value", "difference_low", "difference_high"), math.nan)
        number = parse_printed(text)
        if word and text != NOT_PRINTED:
            record["difference"] = "agrees" if word == text else "disagrees"
        elif number is not None and not math.isnan(value):
            record["difference_value"] = value - number.middle
            ends = (value, value) if math.isnan(low) or math.isnan(high) else (low, high)
            record["difference_low"] = ends[0] - float(number.high)
            record["difference_high"] = ends[1] - float(number.low)
        records.append(record)
    return pd.DataFrame(records)


def _unit(units: Mapping[str, str], column: str) -> str:
    """A column's unit; "speed, with this" has that of "speed"."""
    return units.get(column, units.get(column.partition(",")[0], ""))


def _of(cell: Mapping[Any, Any] | None, name: str) -> float:
    value = cell.get(name) if cell else None
    return math.nan if value is None else float(value)


def render(experiment: Experiment, frame: pd.DataFrame, provenance: str) -> dict[str, str]:
    """The table as Markdown (``md``) and LaTeX (``tex``)."""
    table = compare(experiment, frame)
    blocks = {name: _block(table, which) for which, name in enumerate(BLOCKS)}
    return {"md": _markdown(experiment, blocks, provenance), "tex": to_latex(experiment, blocks, provenance)}


def _block(table: pd.DataFrame, which: int) -> Block:
    """Header and rows of one block; columns without a single entry are left out."""
    rows, columns = list(dict.fromkeys(table.row)), _columns(table)
    units = dict(zip(table.column, table.unit, strict=True))
    at = {(r["row"], r["column"]): r for r in table.to_dict("records")}
    texts = {key: (_paper, _ours, _difference)[which](record) for key, record in at.items()}
    kept = [c for c in columns if any(texts.get((r, c)) for r in rows)]
    body = [[r, *(texts.get((r, c)) or _NONE for c in kept)] for r in rows if any(texts.get((r, c)) for c in kept)]
    return ["", *(f"{c} ({units[c]})" if units[c] else c for c in kept)], body


def _columns(table: pd.DataFrame) -> list[str]:
    """Columns in the order of the fullest row; what it lacks comes last."""
    fullest = max((list(part.column) for _, part in table.groupby("row", sort=False)), key=len, default=[])
    return list(dict.fromkeys([*fullest, *table.column]))


def _paper(record: Mapping[Any, Any]) -> str:
    return str(record["paper"])


def _decimals(record: Mapping[Any, Any]) -> int | None:
    match = re.fullmatch(r"~?-?\d+(?:\.(\d+))?", record["paper"])
    return None if match is None else len(match.group(1) or "")


def _show(value: float, decimals: int | None) -> str:
    return f"{value:.4g}" if decimals is None else f"{value:.{decimals}f}"


def _ours(record: Mapping[Any, Any]) -> str:
    if record["ours"]:
        return str(record["ours"])
    if math.isnan(record["value"]):
        return ""
    decimals = _decimals(record)
    text = _show(record["value"], decimals)
    if math.isnan(record["low"]) or math.isnan(record["high"]):
        return text
    return f"{text} [{_show(record['low'], decimals)}, {_show(record['high'], decimals)}]"


def _difference(record: Mapping[Any, Any]) -> str:
    if record["difference"]:
        return str(record["difference"])
    if math.isnan(record["difference_value"]):
        return ""
    decimals = _decimals(record)
    value, low, high = (_show(record[f"difference_{n}"], decimals) for n in ("value", "low", "high"))
    sign = "+" if record["difference_value"] > 0 else ""
    return f"{sign}{value} [{low}, {high}]".replace("-", "−")


def _markdown(experiment: Experiment, blocks: dict[str, Block], provenance: str) -> str:
    from theory_lab.report.markdown import escape
    from theory_lab.reproduce.spec import OWN

    # A user's own file may be another's: what is Markdown in ours is text there.
    words = (experiment.title, experiment.caption, experiment.source)
    title, caption, source = map(escape, words) if experiment.folder == OWN else words
    lines = [f"# {title}", "", caption, "", f"Source: {source}.", ""]
    for name, (head, body) in blocks.items():
        lines += [f"## {name[0].upper()}{name[1:]}", ""]
        if name == BLOCKS[0] and experiment.printed is not None:
            lines += [f"As printed in {experiment.printed.source}.", ""]
        if not body:
            lines += ["Nothing." if name != BLOCKS[1] else "Not measured.", ""]
            continue
        lines += ["| " + " | ".join(map(_escape_md, head)) + " |", "|" + "---|" * len(head)]
        lines += ["| " + " | ".join(map(_escape_md, row)) + " |" for row in body] + [""]
    return "\n".join([*lines, f"<!-- {provenance} -->", ""])


def _escape_md(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")
