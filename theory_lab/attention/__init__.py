"""Attention mechanisms as plain PyTorch references, behind one protocol and a registry.

Importing this package does not import torch: names that need it are loaded on first use, and
`theory_lab.attention.streaming` (NumPy only) works without it.

Shape letters used throughout: B batch, H query heads, K key/value heads, T queries, S keys, D head
dimension, V value dimension, C hidden dimension.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from theory_lab.attention.registry import get, list_mechanisms, register, resolve, unregister

if TYPE_CHECKING:
    from theory_lab.attention.alpha_entmax import entmax, entmax_threshold
    from theory_lab.attention.base import AttentionResult, Mechanism, Scope
    from theory_lab.attention.fast import attend
    from theory_lab.attention.features import feature_table, measure_features
    from theory_lab.attention.streaming import RowStatistics, row_statistics

_LAZY = {
    "AttentionResult": "theory_lab.attention.base",
    "Mechanism": "theory_lab.attention.base",
    "Scope": "theory_lab.attention.base",
    "entmax": "theory_lab.attention.alpha_entmax",
    "entmax_threshold": "theory_lab.attention.alpha_entmax",
    "attend": "theory_lab.attention.fast",
    "feature_table": "theory_lab.attention.features",
    "measure_features": "theory_lab.attention.features",
    "RowStatistics": "theory_lab.attention.streaming",
    "row_statistics": "theory_lab.attention.streaming",
}

__all__ = [
    "AttentionResult",
    "Mechanism",
    "RowStatistics",
    "Scope",
    "attend",
    "entmax",
    "entmax_threshold",
    "feature_table",
    "get",
    "list_mechanisms",
    "measure_features",
    "register",
    "resolve",
    "row_statistics",
    "unregister",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        value = getattr(importlib.import_module(_LAZY[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(_LAZY))
