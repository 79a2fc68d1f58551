"""Rows of a run as Parquet."""

from __future__ import annotations

from typing import TYPE_CHECKING

from theory_lab.store.cells import KEY

if TYPE_CHECKING:
    import pandas as pd


def rows_to_parquet(rows: pd.DataFrame, about: str = "{}") -> bytes:
    """Serialize rows to Parquet, with ``about`` (JSON) in the schema's metadata."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.Table.from_pandas(rows, preserve_index=False)
    table = table.replace_schema_metadata({**(table.schema.metadata or {}), KEY: about.encode()})
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd")
    return sink.getvalue().to_pybytes()
