"""What a report is made of: sections of tables and pictures, whatever they are written as.

A cell keeps its value beside its text, so that a table sorts by the number and not by what four digits of it look like.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from theory_lab.outside import visible as visible  # what a report is made of is shown through it

Kind = Literal["text", "number", "verdict", "note"]

#: Characters beyond which a column's text breaks into lines.
_WIDEST: dict[Kind, int] = {"text": 20, "number": 22, "verdict": 16, "note": 24}


@dataclass(frozen=True)
class Cell:
    """One entry of a table.

    Attributes
    ----------
    text : str
        What is shown; made harmless by :func:`visible`.
    value : float or None
        What a number sorts by; None where there is none.
    target : str
        Name of a picture of the same section to point at, or nothing.
    """

    text: str
    value: float | None = None
    target: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "text", visible(self.text))


@dataclass(frozen=True)
class Column:
    """A column: its title, what kind of cells it holds, and whether readers choose rows by its values."""

    title: str
    kind: Kind = "text"
    chosen: bool = False


@dataclass(frozen=True)
class Table:
    """A table with a title and a caption in plain words."""

    title: str
    columns: tuple[Column, ...]
    rows: Sequence[tuple[Cell, ...]]
    caption: str = ""
    long: bool = False

    def widths(self) -> list[int]:
        """Characters that each column would like on a line: its longest text, but none so many that others starve."""
        return [self._width(index, column) for index, column in enumerate(self.columns)]

    def _width(self, index: int, column: Column) -> int:
        mark = 4 if column.kind == "verdict" else 0  # a sign before it, and bold letters
        texts = [len(row[index].text) + mark for row in self.rows]
        return min(_WIDEST[column.kind], max([*texts, *(3 + len(word) for word in column.title.split())]))

    def choices(self, index: int) -> list[str]:
        """Values of a column in the order in which they appear."""
        return list(dict.fromkeys(row[index].text for row in self.rows))


@dataclass(frozen=True)
class Picture:
    """A picture with its caption in plain words.

    Attributes
    ----------
    name : str
        What cells point at; empty if nothing does.
    title, caption : str
        Shown below the picture; the title also stands in for it where it cannot be seen.
    content : bytes
        The file; empty if it could not be drawn, and then ``caption`` says why.
    media : str
        Its media type, ``image/png`` or ``image/svg+xml``.
    """

    name: str
    title: str
    caption: str
    content: bytes = b""
    media: str = "image/png"


@dataclass(frozen=True)
class Section:
    """The part of a report that speaks of one result.

    Attributes
    ----------
    title : str
        Heading.
    lead : tuple of str
        Paragraphs that say what was found.
    overview, tables, pictures
        What is shown, in this order: overview, pictures, tables.
    command : str
        The command line that repeats it; empty if it is not known.
    settings : tuple of (name, value)
        What else is needed to repeat it: seed, versions, device.
    """

    title: str
    lead: tuple[str, ...] = ()
    overview: tuple[Table, ...] = ()
    pictures: tuple[Picture, ...] = ()
    tables: tuple[Table, ...] = ()
    command: str = ""
    settings: tuple[tuple[str, str], ...] = field(default=())
