"""What leaves a store for other programs: rows, cells or blocks as CSV, Parquet or JSON."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

from theory_lab.errors import InputError, StoreError
from theory_lab.outside import defused, defused_frame
from theory_lab.store.archive import Archive
from theory_lab.store.cells import NAMES, DamagedError
from theory_lab.store.files import write_atomically

if TYPE_CHECKING:
    import pandas as pd

ENDINGS = (".csv", ".parquet", ".json")
WHAT = ("rows", "cells", "blocks")
#: Rows of blocks that are held in memory at a time.
_CHUNK = 1 << 19


def to_csv(frame: pd.DataFrame) -> str:
    """CSV whose texts are guarded, and quoted, so that none of them breaks out of its field."""
    return defused_frame(frame).to_csv(index=False, quoting=csv.QUOTE_NONNUMERIC, lineterminator="\n")


def export(archive: Archive, target: str, what: str = "rows") -> int:
    """Write a store's rows, cells or blocks to a file, whole or not at all.

    Parameters
    ----------
    archive : Archive
        The store.
    target : str
        The file; its ending says how: .csv (texts guarded against formulas), .parquet or .json.
    what : str
        ``rows`` of the last run, ``cells`` with their sums, or all their ``blocks``.

    Returns
    -------
    int
        Rows written.

    Raises
    ------
    InputError
        If the ending is another, or there is nothing to export.
    StoreError
        If it cannot be written, or a cell is damaged.
    """
    path = Path(target).absolute()
    if path.suffix.lower() not in ENDINGS:
        raise InputError("to", target, f"a file name ending in {', '.join(ENDINGS)} is allowed")
    if not path.parent.is_dir():
        raise InputError("to", target, "a file in a folder that exists is allowed")
    if path.is_dir():
        raise InputError("to", target, "a file is allowed, and this is a folder")
    written = 0

    def fill(file: Any) -> None:
        nonlocal written
        if what == "blocks":
            written = _blocks(archive, file, path.suffix.lower())
        else:
            frame = archive.rows() if what == "rows" else _cells(archive)
            written = len(frame)
            file.write(_encode(frame, path.suffix.lower()))

    try:
        write_atomically(path, fill)
    except OSError as error:
        raise StoreError(f"to: {target}; it cannot be written ({error.strerror or error})") from error
    return written


def _encode(frame: pd.DataFrame, ending: str) -> bytes:
    if ending == ".csv":
        return to_csv(frame).encode()
    if ending == ".json":
        from theory_lab.render import to_json

        return (to_json(frame) + "\n").encode()
    sink = io.BytesIO()
    frame.to_parquet(sink, index=False)
    return sink.getvalue()


def _cells(archive: Archive) -> pd.DataFrame:
    table, damaged = archive.table()
    if damaged:
        raise StoreError(f"store: {archive.path}; {damaged[0].what}: theory-lab results verify {archive.path}")
    return table.drop_columns(["first_row"]).to_pandas()


def _blocks(archive: Archive, file: Any, ending: str) -> int:
    """Stream all blocks, cell by cell."""
    import pyarrow as pa
    import pyarrow.csv as pc
    import pyarrow.parquet as pq

    from theory_lab.store.cells import block_schema, name_column

    if ending == ".json":
        raise InputError("to", "a .json file of blocks", "blocks go to .csv or .parquet")
    schema = block_schema()
    if ending == ".csv":
        schema = pa.schema([("cell", pa.string()), *list(schema)[1:]])
        writer: Any = pc.CSVWriter(file, schema)
    else:
        writer = pq.ParquetWriter(file, schema, compression="zstd")
    shown = defused if ending == ".csv" else str
    held: list[Any] = []
    rows = written = 0

    def flush() -> None:
        nonlocal held, rows
        if held:
            writer.write_table(pa.concat_tables(held).unify_dictionaries().cast(schema))
        held, rows = [], 0

    for name, places in sorted(archive.places().items()):
        if not places[0].is_cell():
            continue
        try:
            table = places[0].read()[0]
            for place in places[1:]:
                table = table.longest(place.read()[0])
        except DamagedError as error:
            raise StoreError(f"store: {archive.path}; {error}: theory-lab results verify {archive.path}") from None
        columns = [name_column([shown(name)], [len(table)]), *(pa.array(table.columns[n]) for n in NAMES)]
        held.append(pa.Table.from_arrays(columns, schema=block_schema()))
        rows += len(table)
        written += len(table)
        if rows >= _CHUNK:
            flush()
    flush()
    writer.close()
    return written
