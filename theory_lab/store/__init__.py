"""Where results lie: a folder of Parquet files that survives crashes, several writers and its own size."""

from __future__ import annotations

from theory_lab.store.cells import FORMAT_VERSION
from theory_lab.store.files import write_whole
from theory_lab.store.folder import Store, longest
from theory_lab.store.provenance import provenance, require_pyarrow
from theory_lab.store.rows import rows_to_parquet

__all__ = ["FORMAT_VERSION", "Store", "longest", "provenance", "require_pyarrow", "rows_to_parquet", "write_whole"]
