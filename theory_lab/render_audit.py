"""An audit for people: contradictions first, wrapped to the terminal, readable without color."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from theory_lab.audit import VERDICTS

if TYPE_CHECKING:
    import pandas as pd

# Marks say without color what matters.
_MARKS = {"CONTRADICTS": "✗", "UNDECIDED": "?", "NOT MEASURED": "·", "AGREES": "✓"}
_STYLES = {"CONTRADICTS": "bold red", "UNDECIDED": "yellow", "NOT MEASURED": "dim", "AGREES": "green"}
_MEANINGS = {
    "CONTRADICTS": "fails for every number that rounds to what is printed, or by measurement",
    "UNDECIDED": "depends on digits that are not printed, or the measurement is not conclusive",
    "NOT MEASURED": "the toolkit cannot measure it here; what it needs is said",
    "AGREES": "holds for every number that rounds to what is printed, or by measurement",
}
_LOG_WIDTH = 120


def _console(width: int | None) -> Console:
    if width is None and not sys.stdout.isatty():
        width = _LOG_WIDTH
    return Console(width=width, highlight=False)


def print_audit(frame: pd.DataFrame, *, width: int | None = None) -> None:
    """Print an audit of one or several papers.

    Parameters
    ----------
    frame : pandas.DataFrame
        As :func:`theory_lab.audit.audit` returns it, or several of them concatenated.
    width : int, optional
        Columns to fill; by default those of the terminal, or 120 without one.
    """
    console = _console(width)
    if frame.empty:
        console.print("no statements")
        return
    for paper in frame["paper"].unique():
        _print_paper(console, str(paper), frame[frame["paper"] == paper])
    for verdict in VERDICTS:
        if (frame["verdict"] == verdict).any():
            console.print(Text.assemble(_label(verdict), f": {_MEANINGS[verdict]}."))


def _label(verdict: str) -> Text:
    return Text(f"{_MARKS[verdict]} {verdict}", style=_STYLES[verdict])


def _print_paper(console: Console, paper: str, rows: pd.DataFrame) -> None:
    table = Table(box=SIMPLE_HEAD, pad_edge=False, expand=False)
    table.add_column(paper, no_wrap=True)
    table.add_column("statement", ratio=5)
    table.add_column("found", ratio=6)
    counts = []
    for verdict in VERDICTS:
        group = rows[rows["verdict"] == verdict]
        if group.empty:
            continue
        counts.append(f"{len(group)} {verdict}")
        if len(counts) > 1:
            table.add_section()
        for record in group.itertuples(index=False):
            table.add_row(_label(verdict), _statement(record), _found(record))
    console.print(table)
    console.print(f"{paper}: {len(rows)} statements: {', '.join(counts)}.\n", soft_wrap=False)


def _lines(parts: Iterable[tuple[str, str]]) -> Text:
    """Lines in one cell, the first plain and the others dim unless a style is given."""
    text = Text()
    for line, style in parts:
        if line:
            text.append("\n" if text else "").append(line, style=style)
    return text


def _statement(row: Any) -> Text:
    return _lines([(row.statement, ""), (f"({row.source})", "dim")])


def _found(row: Any) -> Text:
    """What was computed, the printed figures that it was computed from, and the note."""
    printed = f"printed: {row.printed}" if row.printed and row.verdict != "AGREES" else ""
    check = "" if row.verdict == "NOT MEASURED" else row.check
    return _lines([(check, ""), (row.computed, _STYLES[row.verdict]), (printed, ""), (row.note, "dim")])
