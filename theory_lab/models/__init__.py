"""Trained models to measure: a small catalog, any local folder, any GGUF file, and the Hugging Face Hub.

Importing this package imports neither torch nor transformers: names are loaded on first use. Weights are read from
safetensors or GGUF alone; nothing is ever unpickled, and no code of a model's folder runs unless the caller says so.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from theory_lab.models.cache import cache_dir
from theory_lab.models.catalog import KnownModel, find_model, list_models

if TYPE_CHECKING:
    from theory_lab.models.conversion import convert_gguf
    from theory_lab.models.fetching import fetch_model, remove_model
    from theory_lab.models.loading import LoadedModel, load_model

_LAZY = {
    "LoadedModel": "theory_lab.models.loading",
    "convert_gguf": "theory_lab.models.conversion",
    "fetch_model": "theory_lab.models.fetching",
    "load_model": "theory_lab.models.loading",
    "remove_model": "theory_lab.models.fetching",
}

__all__ = [
    "KnownModel",
    "LoadedModel",
    "cache_dir",
    "convert_gguf",
    "fetch_model",
    "find_model",
    "list_models",
    "load_model",
    "remove_model",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
