"""Packs: many cells in few files, for stores that no folder of small files could serve.

::

    packs/<id>.blocks.parquet  cell, block, trials, total, total_sq; sorted by cell, a cell never in two row groups
    packs/<id>.json            the seal: sizes and hashes of both Parquet files
    packs/<id>.cells.parquet   one row a cell or piece: what was drawn, sums, where its blocks lie, checksum, findings

The table of cells is written last: with it, the pack is there. A sealed pack's sums are believed without reading its
blocks. Of a pack whose seal is missing or does not agree, every cell has to agree with its own checksum first.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from theory_lab.outside import parse_json
from theory_lab.parquet_pages import check_pages
from theory_lab.store.cells import (
    DAMAGE,
    FORMAT_VERSION,
    MOST_BLOCKS,
    NAMES,
    BlockTable,
    DamagedError,
    Summary,
    arrays_of,
    block_schema,
    check_findings,
    name_column,
)
from theory_lab.store.files import sync_folder, write_atomically

#: Rows of a row group, unless a single cell has more.
GROUP_ROWS = 1 << 17
#: A pack is closed at this many cells or rows, so that damage to one costs a part of a large store at most.
PACK_CELLS = 1 << 14
PACK_ROWS = 1 << 25

#: Parts of a cell's identity that have a column of their own.
_TEXTS = ("statistic", "estimator", "noise")
_WHOLES = ("length", "head_dim")
_NUMBERS = ("kappa", "beta", "sigma", "rho", "key_rho")
_CACHED_GROUPS = 8
_SUMS = ("blocks", "trials", "step", "total", "total_sq")
_CELLS = ".cells.parquet"


def cells_schema() -> Any:
    """Columns of a pack's table of cells."""
    import pyarrow as pa

    kinds = [("cell", pa.string()), ("kind", pa.string()), ("seed", pa.int64()), ("study", pa.string())]
    kinds += [(name, pa.string()) for name in _TEXTS]
    kinds += [(name, pa.int64()) for name in _WHOLES]
    kinds += [(name, pa.float64()) for name in _NUMBERS]
    kinds += [(name, pa.int64()) for name in ("blocks", "trials", "step")]
    kinds += [("total", pa.float64()), ("total_sq", pa.float64()), ("first_row", pa.int64())]
    return pa.schema([*kinds, ("about", pa.string()), ("findings", pa.string())])


def cell_row(digest: str, about: Mapping[str, Any], summary: Summary, first_row: int) -> dict[str, Any]:
    """A cell's row in the table of cells."""
    identity = about["cell"]
    known = {name: identity.get(name) for name in (*_TEXTS, *_WHOLES, *_NUMBERS)}
    return {
        "cell": digest,
        "kind": "cell",
        "seed": about["seed"],
        **known,
        "blocks": summary.blocks,
        "trials": summary.trials,
        "step": summary.step,
        "total": summary.total,
        "total_sq": summary.total_sq,
        "first_row": first_row,
        "about": json.dumps(about, sort_keys=True),
    }


def piece_row(digest: str, found: Mapping[str, Any]) -> dict[str, Any]:
    """A piece's row in the table of cells; its file's text is kept as it is."""
    text = json.dumps(found, sort_keys=True)
    return {"cell": digest, "kind": "findings", "seed": found["seed"], "study": found["piece"][0], "findings": text}


class PackWriter:
    """Writes one pack, cells in order of their names; nothing is visible before :meth:`seal`."""

    def __init__(self, folder: Path) -> None:
        import pyarrow.parquet as pq

        self._folder = folder
        self._temporary = folder / f".{id(self):x}-{np.random.default_rng().integers(1 << 62):x}.blocks"
        # Numbers of trials repeat, indices of blocks count up, and sums share their exponents.
        self._file = pq.ParquetWriter(
            self._temporary,
            block_schema(),
            compression="zstd",
            compression_level=1,
            use_dictionary=["cell", "trials"],
            column_encoding={
                "block": "DELTA_BINARY_PACKED",
                "total": "BYTE_STREAM_SPLIT",
                "total_sq": "BYTE_STREAM_SPLIT",
            },
            store_schema=False,
        )
        self._held: list[tuple[str, BlockTable]] = []
        self._held_rows = 0
        self.rows = 0
        self.id = ""
        self._table = self._seal = b""
        self._cells: list[dict[str, Any]] = []

    @property
    def cells(self) -> int:
        """Cells and pieces so far."""
        return len(self._cells)

    @property
    def full(self) -> bool:
        """Whether the next cell belongs into another pack."""
        return self.cells >= PACK_CELLS or self.rows >= PACK_ROWS

    def add(self, digest: str, table: BlockTable, about: Mapping[str, Any]) -> None:
        """Add a cell."""
        if self._held and self._held_rows + len(table) > GROUP_ROWS:
            self._flush()
        self._cells.append(cell_row(digest, about, table.summary(), self.rows))
        self._held.append((digest, table))
        self._held_rows += len(table)
        self.rows += len(table)

    def add_piece(self, digest: str, found: Mapping[str, Any]) -> None:
        """Add a piece's findings."""
        self._cells.append(piece_row(digest, found))

    def _flush(self) -> None:
        import pyarrow as pa

        names = name_column([digest for digest, _ in self._held], [len(table) for _, table in self._held])
        columns = [pa.array(np.concatenate([table.columns[n] for _, table in self._held])) for n in NAMES]
        self._file.write_table(
            pa.Table.from_arrays([names, *columns], schema=block_schema()), row_group_size=max(1, self._held_rows)
        )
        self._held, self._held_rows = [], 0

    def finish(self) -> None:
        """Put everything on the disk under temporary names; slow, and needs no lock."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        if self._held:
            self._flush()
        self._file.close()
        with open(self._temporary, "rb+") as file:
            os.fsync(file.fileno())
        sink = pa.BufferOutputStream()
        table = pa.Table.from_pylist(self._cells, schema=cells_schema())
        pq.write_table(table, sink, compression="zstd", store_schema=False)
        self._table = sink.getvalue().to_pybytes()
        blocks_hash = file_hash(self._temporary)
        cells_hash = hashlib.blake2b(self._table, digest_size=16).hexdigest()
        self.id = hashlib.blake2b(f"{blocks_hash} {cells_hash}".encode(), digest_size=8).hexdigest()
        seal = {
            "format": FORMAT_VERSION,
            "cells": {"count": len(self._cells), "bytes": len(self._table), "blake2b": cells_hash},
            "blocks": {"rows": self.rows, "bytes": self._temporary.stat().st_size, "blake2b": blocks_hash},
        }
        self._seal = (json.dumps(seal, indent=1, sort_keys=True) + "\n").encode()

    def seal(self) -> str:
        """Make the pack visible and durable; returns its id. The caller holds the store's lock."""
        self._temporary.chmod(0o644)
        self._temporary.replace(self._folder / f"{self.id}.blocks.parquet")
        write_atomically(self._folder / f"{self.id}.json", lambda file: file.write(self._seal))
        sync_folder(self._folder)
        write_atomically(self._folder / f"{self.id}.cells.parquet", lambda file: file.write(self._table))
        sync_folder(self._folder)
        return self.id

    def abandon(self) -> None:
        """Leave nothing behind."""
        with contextlib.suppress(Exception):
            self._file.close()
        with contextlib.suppress(OSError):
            self._temporary.unlink()


def file_hash(path: Path) -> str:
    """blake2b of a file's bytes."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


class Pack:
    """A pack that is read.

    Attributes
    ----------
    id : str
        Its name.
    sealed : bool
        Whether its table of cells is that of its seal, so that the sums in it may be believed.
    damage : str or None
        What is wrong with it.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self.id = name
        self.blocks_path = folder / f"{name}.blocks.parquet"
        self.cells_path = folder / f"{name}.cells.parquet"
        self.seal_path = folder / f"{name}.json"
        self.damage: str | None = None
        self.seal: dict[str, Any] = {}
        self._file: Any = None
        self._starts: Any = None
        self._groups: OrderedDict[int, dict[str, Any]] = OrderedDict()
        self._cells: Any = None
        self._read: dict[str, Any] = {}
        self._arrays: dict[str, Any] = {}
        self._kinds: list[str] | None = None
        self.names: list[str] = []
        self._open()

    def _open(self) -> None:
        """Read the names, and everything of a pack whose seal does not vouch for the rest."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        raw = b""
        try:
            raw = self.cells_path.read_bytes()
            check_pages(raw)
            self._cells = pq.ParquetFile(pa.BufferReader(raw))
            if self._cells.schema_arrow.names != cells_schema().names or self._cells.metadata.num_rows > PACK_CELLS:
                raise ValueError("no table of cells")
        except (pa.ArrowException, *DAMAGE):
            self.damage = f"{self.cells_path.name} is damaged"
        try:
            self.seal = parse_json(self.seal_path.read_bytes())
            mine = self.seal["cells"]["blake2b"]
            self.sealed = mine == hashlib.blake2b(raw, digest_size=16).hexdigest() and not self.damage
            if not self.sealed and not self.damage:
                self.damage = f"{self.cells_path.name} does not match its checksum"
        except DAMAGE:
            self.sealed, self.seal = False, {}
            self.damage = self.damage or f"{self.seal_path.name} is missing or damaged"
        try:
            for name in ("cell",) if self.sealed else cells_schema().names:
                self.of_all(name)
        except DamagedError as error:
            self.sealed, self.damage = False, str(error)
            empty = cells_schema().empty_table()
            self._read = {name: empty.column(name) for name in empty.column_names}
        self.names = self.of_all("cell").to_pylist()

    def of_all(self, name: str) -> Any:
        """A column of the table of cells, read when it is first asked for; DamagedError if it cannot be.

        What a resumed run needs is a small part of the table: what is said about each cell is most of it.
        """
        if name not in self._read:
            import pyarrow as pa

            try:
                self._read[name] = self._cells.read(columns=[name], use_threads=False).column(0)
            except (pa.ArrowException, AttributeError, *DAMAGE):
                raise DamagedError(f"{self.cells_path.name} is damaged") from None
        return self._read[name]

    @property
    def table(self) -> Any:
        """The table of cells; DamagedError if it cannot be read."""
        import pyarrow as pa

        return pa.Table.from_arrays([self.of_all(name) for name in cells_schema().names], schema=cells_schema())

    def column(self, name: str) -> Any:
        """A column of numbers of the table of cells, as an array; missing ones are 0."""
        if name not in self._arrays:
            found = self.of_all(name).to_numpy()
            self._arrays[name] = np.nan_to_num(found) if found.dtype.kind == "f" else found
        return self._arrays[name]

    def is_cell(self, row: int) -> bool:
        """Whether a row is a cell, and no piece."""
        if self._kinds is None:
            self._kinds = self.of_all("kind").to_pylist()
        return self._kinds[row] == "cell"

    def summary(self, row: int) -> Summary:
        """A cell's sums; to be believed if the pack is sealed."""
        return Summary(*(self.of_all(name)[row].as_py() for name in _SUMS))

    def totals(self) -> list[list[Any]]:
        """Trials of every cell that may be taken as a whole, 0 for the others; and their sums."""
        trials, step, total, total_sq = (self.of_all(name).to_pylist() for name in _SUMS[1:])
        if not self.sealed:
            trials = [0] * len(trials)
        return [[have if size else 0 for have, size in zip(trials, step, strict=True)], total, total_sq]

    def about(self, row: int) -> dict[str, Any]:
        """What is said about a cell."""
        return dict(parse_json(self.of_all("about")[row].as_py()))

    def findings(self, row: int) -> dict[str, Any]:
        """A piece's findings whose checksum agrees; DamagedError otherwise."""
        digest = self.names[row]
        return check_findings(f"{digest} in pack {self.id}", digest, self.of_all("findings")[row].as_py() or "")

    def read(self, row: int) -> tuple[BlockTable, dict[str, Any]]:
        """A cell whose checksum agrees; DamagedError otherwise."""
        import pyarrow as pa

        digest = self.names[row]
        try:
            about = self.about(row)
            table = self._slice(int(self.column("first_row")[row]), int(self.column("blocks")[row]))
            if table.agrees(digest, about):
                return table, about
        except (pa.ArrowException, *DAMAGE):
            raise DamagedError(f"{digest} in pack {self.id} is damaged") from None
        raise DamagedError(f"{digest} in pack {self.id} does not match its checksum")

    def _slice(self, first: int, rows: int) -> BlockTable:
        import pyarrow.parquet as pq

        if self._file is None:
            check_pages(self.blocks_path)
            self._file = pq.ParquetFile(self.blocks_path)
            about = self._file.metadata
            sizes = [about.row_group(i).num_rows for i in range(about.num_row_groups)]
            if max(sizes, default=0) > max(MOST_BLOCKS, GROUP_ROWS):
                raise ValueError("a row group is too large")
            self._starts = np.concatenate([[0], np.cumsum(sizes)])
        group = int(np.searchsorted(self._starts, first, side="right")) - 1
        if group not in self._groups:
            self._groups[group] = arrays_of(self._file.read_row_group(group, columns=list(NAMES), use_threads=False))
            if len(self._groups) > _CACHED_GROUPS:
                self._groups.popitem(last=False)
        start = first - int(self._starts[group])
        return BlockTable({name: values[start : start + rows] for name, values in self._groups[group].items()})

    def forget(self, groups: int = 1) -> None:
        """Keep at most so many row groups in memory."""
        while len(self._groups) > groups:
            self._groups.popitem(last=False)

    @property
    def rows(self) -> int:
        """Rows of blocks."""
        return int(self.column("blocks").sum())

    def files(self) -> list[Path]:
        """Its files, in the order in which they may be removed."""
        return [self.seal_path, self.cells_path, self.blocks_path]


class Packs:
    """All packs of a store, read on first use and again when others have written."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._known: dict[str, Pack] = {}
        #: Of each cell, its place among those of all packs, one after the other; and where each pack begins.
        self._first: dict[str, int] | None = None
        self._starts: list[int] = []
        #: Cells that lie in several packs.
        self._others: dict[str, list[tuple[Pack, int]]] = {}
        self._totals: list[list[Any]] | None = None

    def refresh(self) -> None:
        """Look for packs that appeared or went."""
        names = pack_names(self.folder)
        if names == self._known.keys():
            return
        self._known = {name: self._known.get(name) or Pack(self.folder, name) for name in sorted(names)}
        self._first = self._totals = None

    def __iter__(self) -> Iterator[Pack]:
        return iter(self._known.values())

    def __len__(self) -> int:
        return len(self._known)

    def find(self, digest: str) -> list[tuple[Pack, int]]:
        """Where a cell or piece lies: pairs of pack and row, most trials first."""
        place = self._index().get(digest)
        if place is None:
            return []
        return self._others.get(digest) or [self._at(place)]

    def pooled_all(self, digests: Sequence[str], trials: Sequence[int]) -> list[tuple[float, float] | None]:
        """Sums of cells; None for one whose blocks are not, in one sealed pack, those of a run of its ``trials``."""
        index = self._index()
        if self._totals is None:
            parts = [pack.totals() for pack in self]
            self._totals = [list(chain.from_iterable(part[i] for part in parts)) for i in range(3)]
        have, total, total_sq = self._totals
        found: list[tuple[float, float] | None] = []
        for digest, wanted in zip(digests, trials, strict=True):
            place = index.get(digest)
            if place is not None and have[place] != wanted and digest in self._others:
                number = dict(zip(self, self._starts, strict=True))
                places = [number[pack] + row for pack, row in self._others[digest]]
                place = next((other for other in places if have[other] == wanted), None)
            whole = place is not None and wanted > 0 and have[place] == wanted
            found.append((total[place], total_sq[place]) if place is not None and whole else None)
        return found

    def _at(self, place: int) -> tuple[Pack, int]:
        number = bisect_right(self._starts, place) - 1
        return list(self)[number], place - self._starts[number]

    def _index(self) -> dict[str, int]:
        if self._first is None:
            first: dict[str, int] = {}
            self._starts, self._others = [], {}
            start = 0
            for pack in self:
                self._starts.append(start)
                start += len(pack.names)
                places = range(start - len(pack.names), start)
                if first.keys().isdisjoint(pack.names):  # as nearly always
                    first.update(zip(pack.names, places, strict=True))
                    continue
                for name, place in zip(pack.names, places, strict=True):
                    if first.setdefault(name, place) != place:
                        self._others.setdefault(name, [self._at(first[name])]).append(self._at(place))
            for found in self._others.values():
                found.sort(key=lambda pair: -pair[0].column("trials")[pair[1]])
            self._first = first
        return self._first

    def names(self) -> set[str]:
        """Names of all cells and pieces."""
        return {name for pack in self for name in pack.names}


def pack_names(folder: Path) -> set[str]:
    """Ids of the packs in a folder: whatever has a table of cells."""
    try:
        found = [path.name for path in folder.iterdir()]
    except FileNotFoundError:
        return set()
    return {n.removesuffix(_CELLS) for n in found if n.endswith(_CELLS) and not n.startswith(".")}


def sealed_count(folder: Path, name: str) -> int:
    """Cells and pieces of a pack by its seal; very many if that cannot be read."""
    try:
        return int(parse_json((folder / f"{name}.json").read_bytes())["cells"]["count"])
    except DAMAGE:
        return PACK_CELLS


def orphans(folder: Path) -> list[Path]:
    """Files of packs that were never finished, or lost their table of cells."""
    whole = pack_names(folder)
    try:
        return sorted(path for path in folder.iterdir() if path.name.split(".")[0] not in whole)
    except FileNotFoundError:
        return []
