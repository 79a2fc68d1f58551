"""The report as one page: no network, no script from elsewhere, every text escaped."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from theory_lab import __version__
from theory_lab.errors import InputError
from theory_lab.report.parts import Picture, Section, Table, visible

_TEMPLATES = Path(__file__).parent / "templates"

#: More rows than this at a time make sorting slow; the rest are shown on request, and on paper.
_MOST_SHOWN = 200


def require_jinja() -> None:
    """Raise InputError if pages cannot be filled in."""
    try:
        import jinja2  # noqa: F401  # only whether it is there
    except ImportError:
        raise InputError("html", "jinja2 is not installed", "pip install 'theory-lab[report]'") from None


def to_html(title: str, sections: Sequence[Section]) -> str:
    """Fill in the page.

    The page's policy admits the one style sheet and the one script that it holds, by their hashes, and pictures as
    data; so even a text that escaped its escaping could load and run nothing.
    """
    require_jinja()
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    style = (_TEMPLATES / "report.css").read_text(encoding="utf-8")
    script = (_TEMPLATES / "report.js").read_text(encoding="utf-8")
    policy = "; ".join(
        (
            "default-src 'none'",
            "img-src data:",
            f"style-src '{_hash(style)}'",
            f"script-src '{_hash(script)}'",
            "base-uri 'none'",
            "form-action 'none'",
        )
    )
    return environment.get_template("report.html.j2").render(
        title=visible(title), sections=[_section(s, i) for i, s in enumerate(sections)], style=style, script=script,
        policy=policy, version=__version__, most=_MOST_SHOWN,
    )  # fmt: skip


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _section(section: Section, index: int) -> dict[str, Any]:
    places = {picture.name: f"s{index}p{i}" for i, picture in enumerate(section.pictures) if picture.name}
    return {
        "id": f"s{index}",
        "title": visible(section.title),
        "lead": [visible(text) for text in section.lead],
        "overview": [_table(table, f"s{index}o{i}", places) for i, table in enumerate(section.overview)],
        "pictures": [
            {
                "id": f"s{index}p{i}",
                "title": visible(picture.title),
                "caption": visible(picture.caption),
                "uri": _data(picture),
            }
            for i, picture in enumerate(section.pictures)
        ],
        "tables": [_table(table, f"s{index}t{i}", places) for i, table in enumerate(section.tables)],
        "command": visible(section.command),
        "settings": [(visible(name), visible(value)) for name, value in section.settings],
    }


def _table(table: Table, name: str, places: dict[str, str]) -> dict[str, Any]:
    # Padding is worth three characters; digits are wider than letters, and so are a verdict's bold capitals.
    wider = {"number": 1.2, "verdict": 1.25}
    widths = [3 + width * wider.get(c.kind, 1.0) for c, width in zip(table.columns, table.widths(), strict=True)]
    return {
        "id": name,
        "title": visible(table.title),
        "caption": visible(table.caption),
        "long": table.long,
        "columns": table.columns,
        # Fixed shares: a browser that had to look at every cell would take a second to sort a thousand rows.
        "widths": [f"{100 * width / sum(widths):.2f}%" for width in widths],
        "pixels": round(6.8 * sum(widths)),
        "choices": [(i, visible(c.title), table.choices(i)) for i, c in enumerate(table.columns) if c.chosen],
        "rows": [
            [(cell.text, "" if cell.value is None else repr(cell.value), places.get(cell.target, "")) for cell in row]
            for row in table.rows
        ],
    }  # fmt: skip


def _data(picture: Picture) -> str:
    if not picture.content:
        return ""
    return f"data:{picture.media};base64,{base64.b64encode(picture.content).decode()}"
