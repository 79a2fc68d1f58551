"""From paths to files: what ``theory-lab report`` does."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from theory_lab.errors import InputError
from theory_lab.outside import reason
from theory_lab.report import check, experiments, maps, probe
from theory_lab.report.parts import Section
from theory_lab.report.sources import Source, read

SECTIONS: dict[str, Callable[[Source, bool, Callable[[str], None]], Section]] = {
    "check": check.check_section,
    "probe": probe.probe_section,
    "experiments": experiments.experiments_section,
    "audit": maps.audit_section,
    "phase": maps.phase_section,
}


def _quiet(message: str) -> None:
    """Say nothing."""


def build(results: Sequence[str], pictures: bool = True, say: Callable[[str], None] = _quiet) -> list[Section]:
    """Read results and make a section of each.

    Parameters
    ----------
    results : sequence of str
        Results folders and row files.
    pictures : bool
        Whether to draw pictures.
    say : callable
        Told what is being drawn.

    Raises
    ------
    InputError, StoreError
        If one of them cannot be read; nothing has been drawn by then.
    """
    if not results:
        raise InputError("results", "no path", "at least one results folder or row file is needed")
    sources = [read(name) for name in results]
    return [_section(source, pictures, say) for source in sources]


def _section(source: Source, pictures: bool, say: Callable[[str], None]) -> Section:
    try:
        return SECTIONS[source.kind](source, pictures, say)
    except InputError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        # Rows may come from anywhere: single columns are checked, what they say together is not.
        raise InputError("results", source.name, f"its rows do not fit together ({reason(error)})") from error


def validate_target(field: str, path: str) -> None:
    """Raise InputError if a file cannot be written there."""
    target = Path(path)
    if not path or target.is_dir():
        raise InputError(field, path or "(empty)", "a file name is allowed")
    if not target.absolute().parent.is_dir():
        raise InputError(field, path, "its folder must exist")
    if not os.access(target.absolute().parent, os.W_OK):
        raise InputError(field, path, "it cannot be written")


def write_report(
    results: Sequence[str],
    html: str | None = None,
    md: str | None = None,
    latex: str | None = None,
    title: str = "Theory Lab report",
    say: Callable[[str], None] = _quiet,
) -> list[Path]:
    """Write results as one page, or as tables.

    Parameters
    ----------
    results : sequence of str
        Results folders and row files.
    html, md, latex : str or None
        Files to write: a page that needs nothing else, GitHub's Markdown, a LaTeX document.
    title : str
        Heading.
    say : callable
        Told what is being drawn.

    Returns
    -------
    list of Path
        What was written.

    Raises
    ------
    InputError, StoreError
        Before anything is written if the input is at fault.
    """
    targets = {name: path for name, path in (("html", html), ("md", md), ("latex", latex)) if path is not None}
    if not targets:
        raise InputError("html", "nothing to write", "name a file with --html, --md or --latex")
    for name, path in targets.items():
        validate_target(name, path)
    resolved = [Path(path).resolve() for path in targets.values()]
    if len(set(resolved)) < len(resolved):
        raise InputError(", ".join(targets), resolved[0].name, "a file of its own is needed for each")
    if html is not None:
        from theory_lab.report.html import require_jinja
        from theory_lab.report.pictures import require_matplotlib

        require_jinja()
        require_matplotlib()
    sections = build(results, html is not None, say)
    from theory_lab.store import write_whole

    contents = {}
    if html is not None:
        from theory_lab.report.html import to_html

        contents[html] = to_html(title, sections)
    if md is not None:
        from theory_lab.report.markdown import to_markdown

        contents[md] = to_markdown(title, sections)
    if latex is not None:
        from theory_lab.report.latex import to_latex

        contents[latex] = to_latex(title, sections)
    for path, text in contents.items():
        write_whole(path, text.encode())
    return [Path(path) for path in contents]
