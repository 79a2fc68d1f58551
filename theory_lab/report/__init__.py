"""Results as one page or as tables: HTML, Markdown, LaTeX. Needs the ``report`` extra."""

from theory_lab.report.parts import Cell, Column, Picture, Section, Table
from theory_lab.report.write import build, write_report

__all__ = ["Cell", "Column", "Picture", "Section", "Table", "build", "write_report"]
