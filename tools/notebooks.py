"""Write each notebook's .ipynb from its Markdown twin: the same cells, no outputs, cell ids that do not change.

``python tools/notebooks.py`` writes those that differ; with ``--check`` it names them and exits with 1.
"""

from __future__ import annotations

import sys
from pathlib import Path

import jupytext
import nbformat

FOLDER = Path(__file__).resolve().parent.parent / "notebooks"


def build(markdown: Path) -> str:
    """Text of the .ipynb that goes with a notebook's Markdown."""
    notebook = jupytext.read(markdown)
    for index, cell in enumerate(notebook.cells):
        cell["id"] = f"cell-{index:02}"
    notebook.metadata.get("jupytext", {}).pop("text_representation", None)
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    return nbformat.writes(notebook) + "\n"


def stale(folder: Path = FOLDER) -> list[Path]:
    """The .ipynb files that are missing, differ from their Markdown, or have none."""
    twins = {markdown.with_suffix(".ipynb"): build(markdown) for markdown in folder.glob("[0-9]*.md")}
    found = set(folder.glob("*.ipynb")) | set(twins)
    return sorted(p for p in found if not p.exists() or p not in twins or p.read_text(encoding="utf-8") != twins[p])


def main() -> int:
    """Write or check; return the exit code."""
    names = stale()
    for path in names:
        markdown = path.with_suffix(".md")
        if "--check" in sys.argv or not markdown.exists():
            print(f"{path.name}: differs from {markdown.name}, or one of the two is missing", file=sys.stderr)
        else:
            path.write_text(build(markdown), encoding="utf-8")
            print(f"{path.name}: written")
    return int("--check" in sys.argv and bool(names))


if __name__ == "__main__":
    sys.exit(main())
