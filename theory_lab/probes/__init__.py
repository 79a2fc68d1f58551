"""Measurements on the attention layers of trained models, at any length, without an n x n map.

Importing this package imports neither torch nor transformers: names are loaded on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from theory_lab.probes.calls import AttentionCall, Visibility
    from theory_lab.probes.plan import ProbeResult
    from theory_lab.probes.probing import probe
    from theory_lab.probes.summary import summarize
    from theory_lab.probes.texts import Text, read_text, shipped
    from theory_lab.probes.watching import Watch, watch

_LAZY = {
    "AttentionCall": "theory_lab.probes.calls",
    "ProbeResult": "theory_lab.probes.plan",
    "Text": "theory_lab.probes.texts",
    "Visibility": "theory_lab.probes.calls",
    "Watch": "theory_lab.probes.watching",
    "probe": "theory_lab.probes.probing",
    "read_text": "theory_lab.probes.texts",
    "shipped": "theory_lab.probes.texts",
    "summarize": "theory_lab.probes.summary",
    "watch": "theory_lab.probes.watching",
}

__all__ = [
    "AttentionCall",
    "ProbeResult",
    "Text",
    "Visibility",
    "Watch",
    "probe",
    "read_text",
    "shipped",
    "summarize",
    "watch",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
