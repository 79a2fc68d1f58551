"""The sections of an audit and of a phase diagram."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from theory_lab.render import length_text, number
from theory_lab.report.parts import Cell, Column, Picture, Section, Table
from theory_lab.report.pictures import draw
from theory_lab.report.sources import Source


def audit_section(source: Source, pictures: bool, say: Callable[[str], None]) -> Section:
    """The section of rows of an audit: printed tables against what their papers say."""
    rows = source.rows
    columns = (
        Column("paper", chosen=True), Column("check", "note"), Column("verdict", "verdict", chosen=True),
        Column("printed", "note"), Column("computed", "note"), Column("note", "note"), Column("where"),
    )  # fmt: skip
    lines = [
        (Cell(r.paper), Cell(r.check), Cell(r.verdict), Cell(r.printed), Cell(r.computed), Cell(r.note), Cell(r.source))
        for r in map(_any, rows.itertuples())
    ]
    counts = ", ".join(f"{count} {verdict}" for verdict, count in rows.verdict.value_counts().items())
    papers = list(dict.fromkeys(rows.paper))
    return Section(
        title=f"Audit: {source.name}",
        lead=(f"{len(rows)} checks of printed tables against their papers' own statements: {counts}.",),
        tables=(Table("Every check", columns, lines, long=True),),
        command=f"theory-lab audit {' '.join(papers)}",
        settings=(("seed", "none: nothing is drawn that the command does not fix itself"),),
    )


def phase_section(source: Source, pictures: bool, say: Callable[[str], None]) -> Section:
    """The section of a phase diagram: where each mechanism disperses."""
    rows = source.rows
    columns = (
        Column("law", chosen=True), Column("mechanism", chosen=True), Column("scale", "number"),
        Column("keys n", "number"), Column("E[H] / log n", "number"), Column("standard error", "number"),
        Column("dead rows", "number"), Column("rows", "number"),
    )  # fmt: skip
    lines = [
        (
            Cell(r.law),
            Cell(r.mechanism),
            _number(r.scale),
            Cell(length_text(int(r.length)), float(r.length)),
            _number(r.normalized_entropy),
            _number(r.standard_error),
            _number(r.dead_rows),
            Cell(f"{int(r.rows):,}", float(r.rows)),
        )
        for r in map(_any, rows.itertuples())
    ]
    words = (
        "Normalized entropy of a row of attention, E[H] / log n: near 1 (bright) attention disperses as rows grow, "
        "near 0 (dark) it stays on few keys. One panel a law of scores and a mechanism; the line marks 1/2."
    )
    shown: tuple[Picture, ...] = ()
    if pictures:
        from theory_lab.figures.phase_plot import plot_phase

        say("drawing the phase diagram")
        content, why = draw(partial(plot_phase, rows.astype({"length": "int64"})))
        shown = (Picture("", "Phase diagram", why or words, content),)
    seeds = ", ".join(f"{seed:.0f}" for seed in rows.seed.unique())
    return Section(
        title=f"Phase diagram: {source.name}",
        lead=(words,),
        pictures=shown,
        tables=(Table("Every cell", columns, lines, "Mean over rows, with its standard error.", long=True),),
        command=f"theory-lab phase --seed {seeds}" if rows.seed.nunique() == 1 else "",
        settings=(("seed", seeds),),
    )


def _number(value: Any) -> Cell:
    return Cell(number(value), float(value) if value == value else None)


def _any(record: Any) -> Any:
    """A row whose columns were checked, which no type says."""
    return record
