"""The attention explorer: a page, or a notebook widget, to look at maps of any length by hand.

Importing this package imports neither torch nor the server: names are loaded on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from theory_lab.explore.server import serve
    from theory_lab.explore.session import Session, open_session
    from theory_lab.explore.widget import explore

_LAZY = {
    "Session": "theory_lab.explore.session",
    "explore": "theory_lab.explore.widget",
    "open_session": "theory_lab.explore.session",
    "serve": "theory_lab.explore.server",
}

__all__ = ["Session", "explore", "open_session", "serve"]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
