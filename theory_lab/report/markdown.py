"""The report's tables in GitHub's Markdown."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from theory_lab.report.parts import Section, Table, visible

#: Characters that mean something in Markdown or HTML, or in an address that GitHub would make a link of; the backslash
#: takes the meaning away.
_SPECIAL = re.compile(r"([\\`*_{}\[\]<>#|~&$@]|:(?=//)|(?<=www)\.)")
#: What makes a list or a heading of the line that it begins.
_BEGINS = re.compile(r"^(\d{0,9})([-+=.)])(?=[-=\s]|$)")


def escape(text: str) -> str:
    """The text as Markdown that shows it, inside a line: in a cell, say."""
    return _SPECIAL.sub(r"\\\1", visible(text).strip())


def _line_of(text: str) -> str:
    """The same for a text that begins a line."""
    return _BEGINS.sub(r"\1\\\2", escape(text))


def to_markdown(title: str, sections: Sequence[Section]) -> str:
    """Headings, what was found, tables, and how to repeat it."""
    return "\n".join([f"# {escape(title)}", "", *(line for section in sections for line in _section(section))])


def _section(section: Section) -> Iterator[str]:
    yield from (f"## {escape(section.title)}", "")
    for text in section.lead:
        yield from (_line_of(text), "")
    for table in (*section.overview, *section.tables):
        yield from _table(table)
    yield from ("### To repeat it", "")
    if section.command:
        command = visible(section.command)
        fence = "`" * (1 + max([2, *(len(run) for run in re.findall("`+", command))]))
        yield from (f"{fence}sh", command, fence, "")
    for name, value in section.settings:
        yield f"- {_line_of(name)}: {escape(value)}"
    yield ""


def _table(table: Table) -> Iterator[str]:
    yield from (f"### {escape(table.title)}", "")
    if table.caption:
        yield from (_line_of(table.caption), "")
    yield _line(column.title for column in table.columns)
    yield "|" + "|".join(" ---: " if column.kind == "number" else " --- " for column in table.columns) + "|"
    for row in table.rows:
        yield _line(cell.text for cell in row)
    yield ""


def _line(texts: Iterator[str] | Sequence[str]) -> str:
    return "| " + " | ".join(escape(text) for text in texts) + " |"
