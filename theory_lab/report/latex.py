"""The report's tables as a LaTeX document that compiles with pdflatex and nothing but the usual packages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from theory_lab.report.parts import Section, Table, visible

_SPECIAL = {
    "\\": r"\textbackslash{}", "{": r"\{", "}": r"\}", "$": r"\$", "&": r"\&", "#": r"\#", "_": r"\_\allowbreak{}",
    "%": r"\%", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}", ">": r"\textgreater{}",
    "|": r"\textbar{}", '"': r"\textquotedbl{}", "`": r"\textasciigrave{}", "'": r"\textquotesingle{}",
    "-": r"{-}\allowbreak{}", "/": r"/\allowbreak{}", "[": "{[}", "]": "{]}", ",": "{,}", "?": "?{}", "!": "!{}",
    # pdfTeX knows no more of Unicode than it is told; these are what the toolkit itself writes.
    "†": r"\textdagger{}", "×": r"\texttimes{}", "≤": r"$\leq$", "≥": r"$\geq$", "·": r"\textperiodcentered{}",
    "α": r"$\alpha$", "β": r"$\beta$", "κ": r"$\kappa$", "λ": r"$\lambda$", "ρ": r"$\rho$", "σ": r"$\sigma$",
    "τ": r"$\tau$", "θ": r"$\theta$", "μ": r"$\mu$", "ε": r"$\varepsilon$", "∞": r"$\infty$", "−": "$-$", "→": r"$\to$",
    "±": r"\textpm{}", "…": r"\ldots{}", "⏎": r"$\hookleftarrow$", "Δ": r"$\Delta$", "√": r"$\surd$", "∑": r"$\sum$",
}  # fmt: skip

_HEAD = r"""% Written by theory-lab report. Each table stands between marks; it needs array, booktabs and longtable.
\documentclass[9pt]{extarticle}
\usepackage[utf8]{inputenc}
\usepackage[T1]{fontenc}
\usepackage{textcomp}
\IfFileExists{lmodern.sty}{\usepackage{lmodern}}{}
\usepackage[a4paper,landscape,margin=12mm]{geometry}
\usepackage{array}
\usepackage{booktabs}
\usepackage{longtable}
\setlength{\tabcolsep}{3pt}
\setlength{\emergencystretch}{3em}
"""


def escape(text: str) -> str:
    """The text as LaTeX that shows it; a character that pdfTeX cannot show becomes its number, such as U+4E2D."""
    return "".join(_character(c) for c in visible(text))


def _character(character: str) -> str:
    if character in _SPECIAL:
        return _SPECIAL[character]
    code = ord(character)
    if code < 128 or (0xC0 <= code <= 0xFF and code not in (0xD7, 0xF7)):
        return character
    return rf"\texttt{{U+{code:04X}}}"


def to_latex(title: str, sections: Sequence[Section]) -> str:
    """A document of the tables; the tables can be taken out of it one by one."""
    lines = [
        _HEAD + rf"\title{{{escape(title)}}}",
        r"\date{}",
        r"\begin{document}",
        r"\maketitle",
        *(line for index, section in enumerate(sections) for line in _section(section, index)),
        r"\end{document}",
        "",
    ]
    return "\n".join(lines)


def _section(section: Section, index: int) -> Iterator[str]:
    yield rf"\section*{{{escape(section.title)}}}"
    for text in section.lead:
        yield from (escape(text), "")
    for place, table in enumerate((*section.overview, *section.tables)):
        yield from _table(table, f"{index + 1}.{place + 1}")
    yield r"\subsection*{To repeat it}"
    if section.command:
        yield from (r"\begin{flushleft}\ttfamily " + escape(section.command) + r"\end{flushleft}", "")
    for name, value in section.settings:
        yield rf"{escape(name)}: {escape(value)}\par"


def _table(table: Table, name: str) -> Iterator[str]:
    count = len(table.columns)
    specification = "".join(_column(width) for width in _widths(table))
    heads = " & ".join(rf"\textbf{{{escape(column.title)}}}" for column in table.columns) + r" \\"
    yield f"% table {name} begins"
    yield r"{\scriptsize"
    yield rf"\begin{{longtable}}{{@{{}}{specification}@{{}}}}"
    caption = f"{escape(table.title)}. {escape(table.caption)}" if table.caption else escape(table.title)
    yield rf"\multicolumn{{{count}}}{{@{{}}p{{0.98\linewidth}}@{{}}}}{{{caption}}}\\[1ex]"
    yield from (r"\toprule", heads, r"\midrule", r"\endfirsthead", r"\toprule", heads, r"\midrule", r"\endhead")
    yield from (r"\bottomrule", r"\endfoot")
    for row in table.rows:
        yield " & ".join(escape(cell.text) for cell in row) + r" \\"
    yield r"\end{longtable}}"
    yield f"% table {name} ends"
    yield ""


def _column(spec: tuple[str, float]) -> str:
    side, share = spec
    return rf">{{\{side}\arraybackslash}}p{{{share:.4f}\linewidth}}"


def _widths(table: Table) -> list[tuple[str, float]]:
    """Each column's side and its share of the line."""
    room = 0.98 - 0.008 * len(table.columns)  # what is left beside the gaps between the columns
    widths = table.widths()
    return [
        ("raggedleft" if column.kind == "number" else "raggedright", room * width / sum(widths))
        for column, width in zip(table.columns, widths, strict=True)
    ]
