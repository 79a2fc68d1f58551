"""What a paper printed: numbers with their rounding, as strings, so that 3.1190 stays 3.1190."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from theory_lab.audit_data import NOT_PRINTED, Quantity, parse_printed
from theory_lab.reproduce.document import Part


@dataclass(frozen=True)
class Printed:
    """One printed table.

    Attributes
    ----------
    source : str
        Where it stands.
    units : mapping of column to unit
        In the order of the columns; the unit may be empty.
    rows : mapping of row to cells
        Each as printed; ``-`` where nothing is printed.
    """

    source: str
    units: dict[str, str]
    rows: dict[str, dict[str, str]]

    def value(self, row: str, column: str) -> Quantity | None:
        """A cell as the interval of all numbers that round to it; None for a word or an empty cell."""
        text = self.rows.get(row, {}).get(column, NOT_PRINTED)
        return parse_printed(text)


def read_printed(top: Part) -> Printed:
    """Read ``[paper]``."""
    part = top.inside("paper")
    source = part.text("source")
    units = _columns(part)
    inner = part.inside("rows")
    if not inner.keys():
        raise part.error("rows", "an empty table", "at least one row is needed")
    rows = {name: _row(inner, name, units) for name in inner.keys()}  # noqa: SIM118  # a Part is no mapping
    part.done()
    return Printed(source, units, rows)


def _columns(part: Part) -> dict[str, str]:
    units: dict[str, str] = {}
    columns = part.take("columns")
    if not isinstance(columns, list) or not columns:
        raise part.error("columns", columns, "a list such as [{ name = 'loss', unit = 'nats' }] is needed")
    for column in columns:
        good = isinstance(column, dict) and isinstance(column.get("name"), str) and column["name"].strip()
        if not good or set(column) - {"name", "unit"} or not isinstance(column.get("unit", ""), str):
            raise part.error("columns", column, "a table with a name and, if there is one, a unit is needed")
        if column["name"] in units:
            raise part.error("columns", column["name"], "every column has a name of its own")
        units[column["name"]] = column.get("unit", "")
    return units


def _row(part: Part, name: str, units: dict[str, str]) -> dict[str, str]:
    cells: Any = part.take(name)
    if not isinstance(cells, list) or len(cells) != len(units):
        raise part.error(name, cells, f"a list of {len(units)} cells, one a column, is needed")
    for cell in cells:
        if not isinstance(cell, str) or not cell.strip():
            raise part.error(name, cell, "a string as printed is needed, or '-'")
        if parse_printed(cell) is None and any(c.isdigit() for c in cell):
            raise part.error(name, cell, "a number as printed ('3.1190', '~38', '65K'), a word, or '-' is needed")
    return dict(zip(units, cells, strict=True))
