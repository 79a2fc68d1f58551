"""Measurements on the attention layers of trained models, at any length, without an n x n map.

Importing this package imports neither torch nor transformers: names are loaded on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from theory_lab.probes.calls import AttentionCall, Visibility
    from theory_lab.probes.capturing import capture
    from theory_lab.probes.maps import AttentionMap, Captured, SparseMap, attention_map, sparse_rows
    from theory_lab.probes.plan import ProbeResult
    from theory_lab.probes.probing import probe
    from theory_lab.probes.summary import summarize
    from theory_lab.probes.texts import Text, read_text, shipped
    from theory_lab.probes.watching import Watch, watch

_LAZY = {
    "AttentionCall": "theory_lab.probes.calls",
    "AttentionMap": "theory_lab.probes.maps",
    "Captured": "theory_lab.probes.maps",
    "ProbeResult": "theory_lab.probes.plan",
    "SparseMap": "theory_lab.probes.maps",
    "Text": "theory_lab.probes.texts",
    "Visibility": "theory_lab.probes.calls",
    "Watch": "theory_lab.probes.watching",
    "attention_map": "theory_lab.probes.maps",
    "capture": "theory_lab.probes.capturing",
    "probe": "theory_lab.probes.probing",
    "read_text": "theory_lab.probes.texts",
    "shipped": "theory_lab.probes.texts",
    "sparse_rows": "theory_lab.probes.maps",
    "summarize": "theory_lab.probes.summary",
    "watch": "theory_lab.probes.watching",
}

__all__ = [
    "AttentionCall",
    "AttentionMap",
    "Captured",
    "ProbeResult",
    "SparseMap",
    "Text",
    "Visibility",
    "Watch",
    "attention_map",
    "capture",
    "probe",
    "read_text",
    "shipped",
    "sparse_rows",
    "summarize",
    "watch",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
