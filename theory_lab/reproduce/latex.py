"""Tables as LaTeX that compiles without a package and keeps within the page: wide ones are cut into groups of columns.

Widths are estimated, generously, for the type that LaTeX uses by default; the page is that of ``article``.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from theory_lab.reproduce.spec import Experiment

#: Header (the first cell is that of the row names) and rows.
Block = tuple[list[str], list[list[str]]]

_PAGE = 345.0  # points: the text width of article at 10 pt, the narrowest in common use
_LINES = 46  # of a float, so that it fits below its caption
_GAP = 6.0  # points between two columns, half on either side
_POINT = {"small": 9.0, "footnotesize": 8.0}
_EM = {
    **dict.fromkeys("[](),.:;'!|ijlt ", 0.32), **dict.fromkeys("0123456789", 0.535), **dict.fromkeys("mwMW%@", 0.95),
    **dict.fromkeys("+−=–<>≤×~", 0.83),
}  # fmt: skip

_LATEX = {"&": r"\&", "%": r"\%", "#": r"\#", "_": r"\_", "$": r"\$", "{": r"\{", "}": r"\}", "~": r"$\sim$",
          "^": r"\^{}", "\\": r"\textbackslash{}", "−": "$-$", "–": "--", "≤": r"$\le$", "×": r"$\times$",
          "κ": r"$\kappa$", "λ": r"$\lambda$", "β": r"$\beta$", "α": r"$\alpha$", "θ": r"$\theta$"}  # fmt: skip


#: Keeps a line of text off the rule above it.
_STRUT = r"\rule{0pt}{2.5ex}"


def escape_latex(text: str) -> str:
    """Text that LaTeX sets as it stands."""
    return "".join(_LATEX.get(letter, letter) for letter in text)


def width(text: str, size: str) -> float:
    """An upper estimate of a text's width in points."""
    return _POINT[size] * sum(_EM.get(c, 0.77 if c.isupper() else 0.55) for c in text)


def to_latex(experiment: Experiment, blocks: Mapping[str, Block], provenance: str) -> str:
    """Every block as one or more tabulars, spread over as many floats of one number as they need."""
    shown = {name: block for name, block in blocks.items() if block[1]}
    fits = all(_total(block, range(1, len(block[0])), "small") <= _PAGE for block in shown.values())
    size = "small" if fits else "footnotesize"
    floats: list[list[str]] = [[]]
    lines = 0
    for name, block in shown.items():
        for number, group in enumerate(groups(block, size)):
            tall = len(block[1]) + 4
            if lines and lines + tall > _LINES:
                floats.append([])
                lines = 0
            floats[-1] += _tabular(block, group, name if number == 0 else f"{name}, continued", size)
            lines += tall
    caption = f"{experiment.title}. {experiment.source}."
    written = [f"% {provenance}"]
    for number, body in enumerate(floats):
        again = [] if number == 0 else [r"\addtocounter{table}{-1}"]
        words = caption if number == 0 else f"{experiment.title}, continued."
        written += [
            r"\begin{table}",
            *again,
            r"\centering",
            rf"\{size}",
            rf"\setlength{{\tabcolsep}}{{{_GAP / 2:g}pt}}",
        ]
        written += [*body, rf"\caption{{{escape_latex(words)}}}", r"\end{table}", ""]
    return "\n".join(written)


def groups(block: Block, size: str) -> list[list[int]]:
    """Columns in groups that fit the page beside the row names, in even shares."""
    count = len(block[0]) - 1
    for number in range(1, count + 1):
        cuts = [1 + round(count * k / number) for k in range(number + 1)]
        found = [list(range(low, high)) for low, high in itertools.pairwise(cuts)]
        if all(_total(block, group, size) <= _PAGE for group in found):
            return found
    return [[column] for column in range(1, count + 1)]  # nothing narrower can be made


def _total(block: Block, columns: Sequence[int] | range, size: str) -> float:
    return sum(_column(block, column, size) + _GAP for column in (0, *columns))


def _column(block: Block, column: int, size: str) -> float:
    texts = [*_head(block, column, size), *(row[column] for row in block[1])]
    return max(width(text, size) for text in texts)


def _head(block: Block, column: int, size: str) -> list[str]:
    """A column's name in lines no wider than its numbers, where its words allow."""
    room = max((width(row[column], size) for row in block[1]), default=0.0)
    lines: list[str] = []
    for word in block[0][column].split(" "):
        if lines and width(f"{lines[-1]} {word}", size) <= room:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return lines


def _tabular(block: Block, columns: Sequence[int], title: str, size: str) -> Iterator[str]:
    heads = [_shown(_head(block, column, size)) for column in columns]
    yield r"\begin{tabular}{@{}l" + "r" * len(columns) + "@{}}"
    yield rf"\multicolumn{{{len(columns) + 1}}}{{@{{}}l}}{{\textbf{{{escape_latex(title)}}}}} \\ \hline"
    yield " & ".join(["", *heads]).strip() + r" \\ \hline"
    shown = [row for row in block[1] if any(row[column] != "–" for column in columns)]
    for number, row in enumerate(shown):
        yield (_STRUT if number == 0 else "") + " & ".join(escape_latex(row[c]) for c in (0, *columns)) + r" \\"
    yield from (r"\hline", r"\end{tabular}", "", r"\medskip", "")


def _shown(lines: Sequence[str]) -> str:
    """The lines of a head above each other, to the right."""
    if len(lines) == 1:
        return escape_latex(lines[0])
    return rf"\shortstack[r]{{{_STRUT}" + r" \\ ".join(map(escape_latex, lines)) + "}"
