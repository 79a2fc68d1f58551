"""Where results lie: a folder of Parquet files that survives crashes, several writers and its own size.

Importing this package is cheap; what draws and decides is imported with :class:`Store`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from theory_lab.store.archive import Archive
    from theory_lab.store.cells import FORMAT_VERSION
    from theory_lab.store.files import write_whole
    from theory_lab.store.folder import Store, longest
    from theory_lab.store.rows import rows_to_parquet
    from theory_lab.store.versions import provenance, require_pyarrow

_HOMES = {
    "Archive": "archive",
    "FORMAT_VERSION": "cells",
    "write_whole": "files",
    "Store": "folder",
    "longest": "folder",
    "provenance": "versions",
    "require_pyarrow": "versions",
    "rows_to_parquet": "rows",
}

__all__ = [
    "FORMAT_VERSION",
    "Archive",
    "Store",
    "longest",
    "provenance",
    "require_pyarrow",
    "rows_to_parquet",
    "write_whole",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
