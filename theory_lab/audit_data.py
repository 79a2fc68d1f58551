"""A paper's tables and statements as data: printed numbers with their rounding, and strict reading of TOML.

Cells are strings, because 3.1190 says more than 3.119: a printed number stands for the interval of all numbers that
round to it. Bounds are exact fractions, so that no comparison is decided by binary rounding.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

from theory_lab.errors import InputError
from theory_lab.outside import parse_toml

#: How a table says that its source prints nothing there.
NOT_PRINTED = "-"

_NUMBER = re.compile(r"(~?)(-?\d+(?:\.(\d+))?)(K?)")


@dataclass(frozen=True)
class Quantity:
    """A number known to lie in [low, high].

    Attributes
    ----------
    low, high : Fraction
        Equal for an exact number.
    unit : Fraction or None
        One unit of the last printed digit, for a number that was rounded to it; None for others.
    text : str
        As printed.
    """

    low: Fraction
    high: Fraction
    unit: Fraction | None = None
    text: str = ""

    @property
    def middle(self) -> float:
        """Center of the interval."""
        return float((self.low + self.high) / 2)

    def show(self) -> str:
        """Center and half-width."""
        half = float((self.high - self.low) / 2)
        return f"{self.middle:.6g}" + (f" ± {half:.2g}" if half else "")


def exact(value: float | Fraction) -> Quantity:
    """A number without rounding; a float means its shortest decimal form."""
    fraction = value if isinstance(value, Fraction) else Fraction(repr(value))
    return Quantity(fraction, fraction, None, f"{float(fraction):.6g}")


#: Characters of a printed number, at most.
_LONGEST = 100


def parse_printed(text: str) -> Quantity | None:
    """Read a number as printed; None if it is none.

    ``3.1190`` is anything that rounds to it; ``~38`` ("about 38") allows one whole unit of the last digit either
    way; ``65K`` is 65 thousand, rounded, where K may mean 1,000 or 1,024.
    """
    match = _NUMBER.fullmatch(text)
    if match is None or len(text) > _LONGEST:
        return None
    about, digits, decimals, kilo = match.groups()
    unit = Fraction(1, 10 ** len(decimals or ""))
    value, half = Fraction(digits), unit if about else unit / 2
    low, high = value - half, value + half
    if kilo:
        return Quantity(min(low * 1000, low * 1024), max(high * 1000, high * 1024), None, text)
    return Quantity(low, high, None if about else unit, text)


def less(a: Quantity, b: Quantity) -> bool | None:
    """Whether a < b; None where the printed digits cannot tell."""
    if a.high < b.low or (a.high == b.low and a.unit is not None and a.unit == b.unit):
        return True  # rounding to the same digit keeps order, so different prints are different numbers
    return False if a.low >= b.high else None


def at_most(a: Quantity, b: Quantity) -> bool | None:
    """Whether a <= b; None where the printed digits cannot tell."""
    if a.high <= b.low:
        return True
    after = less(b, a)
    return None if after is None else not after


def agree(a: Quantity, b: Quantity) -> bool:
    """Whether some number fits both."""
    if a.unit is not None and a.unit == b.unit:
        return a.low == b.low
    return a.low <= b.high and b.low <= a.high


Cell = Quantity | str | None


class Named(NamedTuple):
    """A cell with what names it; ``value`` is a word where the column holds words, None where nothing is printed."""

    name: str
    value: Cell


@dataclass(frozen=True)
class Table:
    """One printed table: row labels, column names, units and cells."""

    id: str
    title: str
    source: str
    units: dict[str, str]
    cells: dict[str, dict[str, Cell]]

    def unit_text(self, column: str) -> str:
        """The unit as it follows a number."""
        unit = self.units[column]
        return unit if unit in ("", "%") else f" {unit}"


class Entry:
    """A TOML table that is asked for every key by name and type; what nobody asked for is an error."""

    def __init__(self, values: Any, file: str, where: str, path: str = "") -> None:
        self.file, self.where, self.path = file, where, path
        if not isinstance(values, dict):
            raise self.error("", values, "a table of keys is needed")
        self._values: dict[str, Any] = values
        self._asked: set[str] = set()

    def _name(self, key: str) -> str:
        return ".".join(part for part in (self.path, key) if part)

    def error(self, key: str, value: object, allowed: str) -> InputError:
        """The error that names file, entry and key."""
        name = self._name(key)
        return InputError(f"{self.file}, {self.where}" + (f", key '{name}'" if name else ""), value, allowed)

    def has(self, key: str) -> bool:
        """Whether the key is there."""
        return key in self._values

    def take(self, key: str) -> Any:
        """The value, of any type; an error if it is missing."""
        self._asked.add(key)
        if key not in self._values:
            raise self.error(key, "missing", f"there are: {', '.join(self._values) or 'no keys'}")
        return self._values[key]

    def text(self, key: str, default: str | None = None) -> str:
        """A string that says something."""
        if default is not None and key not in self._values:
            return default
        value = self.take(key)
        if not isinstance(value, str) or not value.strip():
            raise self.error(key, value, "a non-empty string is needed")
        return value

    def whole(self, key: str, low: int, default: int) -> int:
        """A whole number of at least ``low``."""
        if key not in self._values:
            return default
        value = self.take(key)
        if isinstance(value, bool) or not isinstance(value, int) or value < low:
            raise self.error(key, value, f"a whole number of at least {low} is needed")
        return value

    def choice(self, key: str, options: Sequence[str], default: str | None = None) -> str:
        """One of some strings."""
        return pick(self.text(key, default), options, self, key)

    def texts(self, key: str) -> list[str]:
        """One string, or a list of at least one."""
        value = self.take(key)
        items = [value] if isinstance(value, str) else value
        if not isinstance(items, list) or not items or not all(isinstance(item, str) for item in items):
            raise self.error(key, value, "a string or a list of strings is needed")
        if len(set(items)) < len(items):
            raise self.error(key, value, "every name once is allowed")
        return items

    def inside(self, key: str) -> Entry:
        """The table under a key."""
        return Entry(self.take(key), self.file, self.where, self._name(key))

    def done(self) -> None:
        """Fail on keys that nobody asked for."""
        for key in self._values:
            if key not in self._asked:
                near = difflib.get_close_matches(key, self._asked, n=1)
                raise self.error(key, "unknown key", f"{f'did you mean {near[0]}? ' if near else ''}"
                                 f"known: {', '.join(sorted(self._asked))}")  # fmt: skip


def pick(name: str, options: Sequence[str], entry: Entry, key: str) -> str:
    """``name`` if it is one of the options; else the error that lists them."""
    if name not in options:
        near = difflib.get_close_matches(name, options, n=1)
        raise entry.error(key, name, f"{f'did you mean {near[0]}? ' if near else ''}known: {', '.join(options)}")
    return name


def read_toml(file: Path) -> dict[str, Any]:
    """The file's data; one error for a file that cannot be read or is not TOML."""
    try:
        return parse_toml(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError("file", str(file), f"cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise InputError("file", str(file), f"not valid TOML: {error}") from None


def read_table(values: Any, file: str, number: int) -> Table:
    """Validate one ``[[table]]``."""
    entry = Entry(values, file, f"table {number}")
    entry.where = f"table '{entry.text('id')}'"
    units: dict[str, str] = {}
    columns = entry.take("columns")
    if not isinstance(columns, list) or not columns:
        raise entry.error("columns", columns, "a list of tables with a name and a unit is needed")
    for index, column in enumerate(columns):
        part = Entry(column, file, entry.where, f"columns[{index}]")
        name = part.text("name")
        if name in units:
            raise part.error("name", name, "every column has a name of its own")
        units[name] = part.text("unit", " ").strip()
        part.done()
    rows = entry.inside("rows")
    names = entry.take("rows")
    if not names:
        raise entry.error("rows", names, "at least one row is needed")
    cells = {name: dict(zip(units, _read_row(rows, name, len(units)), strict=True)) for name in names}
    table = Table(entry.text("id"), entry.text("title"), entry.text("source"), units, cells)
    entry.done()
    return table


def _read_row(rows: Entry, name: str, width: int) -> list[Cell]:
    cells = rows.take(name)
    if not isinstance(cells, list) or len(cells) != width:
        raise rows.error(name, cells, f"a list of {width} cells, one a column, is needed")
    return [_read_cell(rows, name, cell) for cell in cells]


def _read_cell(rows: Entry, name: str, cell: Any) -> Cell:
    if cell == NOT_PRINTED:
        return None
    if isinstance(cell, str) and cell.strip():
        number = parse_printed(cell)
        if number is None and re.search(r"\d", cell):
            raise rows.error(name, cell, "a number as printed ('3.1190', '~38', '65K'), a word, or '-' is needed")
        return cell if number is None else number
    if isinstance(cell, int) and not isinstance(cell, bool):
        return exact(cell)
    raise rows.error(name, cell, "a string as printed, or a whole number if it is exact, is needed")
