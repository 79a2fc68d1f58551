"""Measurements on the layers of trained models: sinks, sparsity, entropy, survivors, correlation, at any length.

Importing this package imports no torch: names are loaded on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from theory_lab.probes.calls import AttentionCall
    from theory_lab.probes.plan import ProbeResult
    from theory_lab.probes.probing import probe
    from theory_lab.probes.summary import summarize
    from theory_lab.probes.texts import Text, read_text, shipped
    from theory_lab.probes.watching import watch

_LAZY = {
    "AttentionCall": "theory_lab.probes.calls",
    "ProbeResult": "theory_lab.probes.plan",
    "Text": "theory_lab.probes.texts",
    "probe": "theory_lab.probes.probing",
    "read_text": "theory_lab.probes.texts",
    "shipped": "theory_lab.probes.texts",
    "summarize": "theory_lab.probes.summary",
    "watch": "theory_lab.probes.watching",
}

__all__ = ["AttentionCall", "ProbeResult", "Text", "probe", "read_text", "shipped", "summarize", "watch"]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
