"""The page's files: what may be served, and one module of all of them for notebooks."""

from __future__ import annotations

import re
from importlib import resources

_KINDS = {"html": "text/html", "css": "text/css", "js": "text/javascript"}
#: In the order in which they build on each other.
MODULES = ("color.js", "controls.js", "transport.js", "grid.js", "mapview.js", "explorer.js")
FILES = ("index.html", "explorer.css", "page.js", *MODULES)


def read(name: str) -> tuple[bytes, str]:
    """Content and media type of one of :data:`FILES`; KeyError for any other name."""
    if name not in FILES:
        raise KeyError(name)
    content = (resources.files("theory_lab.explore") / "static" / name).read_bytes()
    return content, f"{_KINDS[name.rpartition('.')[2]]}; charset=utf-8"


def module() -> str:
    """All modules as one, which notebooks load: the same code as the page's, without its imports of itself."""
    parts = []
    for name in MODULES:
        text = read(name)[0].decode()
        text = re.sub(r'^import \{[^}]*\} from "\./[a-z]+\.js";\n', "", text, flags=re.MULTILINE)
        parts.append(re.sub(r"^export (?=class|function|async function|const)", "", text, flags=re.MULTILINE))
    return "\n".join(parts) + "\nexport default { render };\n"


def style() -> str:
    """The style sheet."""
    return read("explorer.css")[0].decode()
