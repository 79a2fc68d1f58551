"""A cell on disk: its blocks as columns, what was drawn, and a checksum over both.

Two checksums are known. Format 2 hashes the columns' bytes and everything said about the cell; format 1, still read,
hashed the columns' decimal text.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from theory_lab.outside import parse_json
from theory_lab.parquet_pages import check_pages
from theory_lab.streams import cell_digest

if TYPE_CHECKING:
    from theory_lab.estimation.base import BlockSum

FORMAT_VERSION = 2
#: Key of the JSON text in the metadata of a Parquet file's schema.
KEY = b"theory_lab"

#: More blocks than the engine gives a cell are no cell's: a file that claims them would fill the memory.
MOST_BLOCKS = 1_000_000
_FEW = 64
#: Bytes of a cell file that are less than half a gigabyte however they are unpacked.
_SMALL = 1 << 14

NAMES = ("block", "trials", "total", "total_sq")
_KINDS = {"block": "<i8", "trials": "<i8", "total": "<f8", "total_sq": "<f8"}

#: What a damaged file may raise while it is read.
DAMAGE = (OSError, KeyError, TypeError, ValueError, IndexError, OverflowError, RecursionError, MemoryError)


class DamagedError(Exception):
    """A file that is there but cannot be used; the message names it."""


@dataclass(frozen=True)
class Summary:
    """A cell's blocks in a few numbers.

    Attributes
    ----------
    blocks : int
        Number of blocks.
    trials : int
        Trials over all blocks.
    step : int
        Trials of a full block if the blocks are 0, 1, 2, ... and all but the last are full; 0 otherwise.
    total, total_sq : float
        Correctly rounded sums over the blocks.
    """

    blocks: int
    trials: int
    step: int
    total: float
    total_sq: float


class BlockTable:
    """The blocks of a cell as arrays of one length, in order of their index."""

    def __init__(self, columns: Mapping[str, npt.NDArray[Any]]) -> None:
        self.columns = {name: np.ascontiguousarray(columns[name], dtype=_KINDS[name]) for name in NAMES}

    @staticmethod
    def of(blocks: Sequence[BlockSum]) -> BlockTable:
        """From block sums."""
        return BlockTable({name: np.array([getattr(b, name) for b in blocks], dtype=_KINDS[name]) for name in NAMES})

    def __len__(self) -> int:
        return len(self.columns["block"])

    def blocks(self) -> list[BlockSum]:
        """As block sums."""
        from theory_lab.estimation.base import BlockSum

        return [BlockSum(*row) for row in zip(*(self.columns[name].tolist() for name in NAMES), strict=True)]

    def longest(self, other: BlockTable) -> BlockTable:
        """Blocks of both; where both have one, that of more trials, and of equals one's own."""
        both = {name: np.concatenate([self.columns[name], other.columns[name]]) for name in NAMES}
        mine = np.repeat([0, 1], [len(self), len(other)])
        order = np.lexsort((mine, -both["trials"], both["block"]))
        first = np.ones(len(order), dtype=bool)
        first[1:] = np.diff(both["block"][order]) != 0
        return BlockTable({name: both[name][order[first]] for name in NAMES})

    def same(self, other: BlockTable) -> bool:
        """Whether every bit agrees."""
        return all(self.columns[name].tobytes() == other.columns[name].tobytes() for name in NAMES)

    def summary(self) -> Summary:
        """The pooled numbers."""
        block, trials = self.columns["block"], self.columns["trials"]
        whole = len(block) > 0 and bool((block == np.arange(len(block))).all())
        whole = whole and bool((trials[:-1] == trials[0]).all()) and trials[-1] <= trials[0]
        total, total_sq = (math.fsum(self.columns[name].tolist()) for name in ("total", "total_sq"))
        return Summary(len(block), int(trials.sum()), int(trials[0]) if whole else 0, total, total_sq)

    def checksum(self, digest: str, about: Mapping[str, Any]) -> str:
        """Hash of the columns' bytes, the cell's name and what is said about it (apart from the checksum)."""
        said = {name: value for name, value in about.items() if name != "checksum"}
        found = hashlib.blake2b(digest.encode(), digest_size=16)
        found.update(json.dumps(said, sort_keys=True).encode())
        for name in NAMES:
            found.update(self.columns[name].tobytes())
        return found.hexdigest()

    def agrees(self, digest: str, about: Mapping[str, Any]) -> bool:
        """Whether the checksum in ``about``, of either format, is that of these blocks, and the name is the cell's."""
        if about.get("format", 1) == 1:
            # repr of a float is exact, so equal checksums mean equal bits.
            lists = {name: self.columns[name].tolist() for name in NAMES}
            expected = hashlib.blake2b(repr((digest, lists)).encode(), digest_size=16).hexdigest()
        else:
            expected = self.checksum(digest, about)
        return about.get("checksum") == expected and cell_digest(about["cell"], about["seed"]) == digest


def block_schema() -> Any:
    """Columns of a cell file: the cell's name and its blocks."""
    import pyarrow as pa

    kinds = {"block": pa.int64(), "trials": pa.int64(), "total": pa.float64(), "total_sq": pa.float64()}
    return pa.schema([("cell", pa.dictionary(pa.int32(), pa.string())), *kinds.items()])


def name_column(names: Sequence[str], counts: Sequence[int]) -> Any:
    """Each cell's name as often as it has blocks, as a dictionary column."""
    import pyarrow as pa

    indices = np.repeat(np.arange(len(names), dtype=np.int32), counts)
    return pa.DictionaryArray.from_arrays(pa.array(indices), pa.array(names, pa.string()))


def encode(digest: str, table: BlockTable, about: Mapping[str, Any]) -> bytes:
    """A cell file; ``about`` is everything but format and checksum."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    said = {**about, "format": FORMAT_VERSION}
    said["checksum"] = table.checksum(digest, said)
    schema = block_schema().with_metadata({KEY: json.dumps(said, sort_keys=True).encode()})
    arrays = [name_column([digest], [len(table)]), *(pa.array(table.columns[name]) for name in NAMES)]
    sink = pa.BufferOutputStream()
    # Of a few rows no codec and no statistics pay; writing them takes longer than the rows.
    codec = "zstd" if len(table) > _FEW else "none"
    table_of = pa.Table.from_arrays(arrays, schema=schema)
    pq.write_table(table_of, sink, compression=codec, use_dictionary=["cell", "trials"], write_statistics=False)
    return sink.getvalue().to_pybytes()


def arrays_of(table: Any) -> dict[str, npt.NDArray[Any]]:
    """The block columns of a pyarrow table."""
    found = {}
    for name in NAMES:
        column = table.column(name)
        if column.null_count or str(column.type) != ("double" if _KINDS[name] == "<f8" else "int64"):
            raise ValueError(name)
        found[name] = column.to_numpy()
    return found


def decode(raw: bytes) -> tuple[BlockTable, dict[str, Any]]:
    """A cell file's blocks and what is said about it, unchecked; raises one of DAMAGE if it cannot be read."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        if len(raw) > _SMALL:
            check_pages(raw)
        file = pq.ParquetFile(pa.BufferReader(raw))
        about = parse_json(file.schema_arrow.metadata[KEY])
        if not isinstance(about, dict):
            raise ValueError("about")
        if file.metadata.num_rows > MOST_BLOCKS:
            raise ValueError("rows")
        table = file.read(use_threads=False)
        names = table.column("cell").unique().to_pylist() if "cell" in table.column_names else []
        if about.get("format", 1) != 1 and names != [cell_digest(about["cell"], about["seed"])]:
            raise ValueError("cell")
        return BlockTable(arrays_of(table)), about
    except pa.ArrowException as error:
        raise ValueError(str(error)) from None


def read_cell(path: Path) -> tuple[BlockTable, dict[str, Any]]:
    """A cell file whose checksum agrees.

    Raises
    ------
    FileNotFoundError
        If there is none.
    DamagedError
        If it cannot be used.
    """
    try:
        table, about = decode(path.read_bytes())
        if table.agrees(path.stem, about):
            return table, about
    except FileNotFoundError:
        raise
    except DAMAGE:
        raise DamagedError(f"{path.name} is damaged") from None
    raise DamagedError(f"{path.name} does not match its checksum")


def findings_checksum(digest: str, findings: Sequence[Mapping[str, Any]]) -> str:
    """Hash of a piece's findings, the same in both formats."""
    text = json.dumps([digest, {"findings": findings}], sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def encode_findings(digest: str, findings: Sequence[Mapping[str, Any]], about: Mapping[str, Any]) -> bytes:
    """A piece's file."""
    body = {"findings": findings, "checksum": findings_checksum(digest, findings)}
    return json.dumps({**about, **body}, sort_keys=True, indent=1).encode()


def check_findings(name: str, digest: str, raw: bytes | str) -> dict[str, Any]:
    """A piece's file as JSON, whose checksum agrees; DamagedError otherwise."""
    try:
        found = parse_json(raw)
        good = found["checksum"] == findings_checksum(digest, found["findings"])
        study, arguments = found["piece"]
        good = good and cell_digest({"study": study, **dict(arguments)}, found["seed"]) == digest
    except DAMAGE:
        raise DamagedError(f"{name} is damaged") from None
    if not good:
        raise DamagedError(f"{name} does not match its checksum")
    return dict(found)


def read_findings(path: Path) -> dict[str, Any]:
    """As :func:`read_cell`, for a piece's file."""
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        raise
    except OSError:
        raise DamagedError(f"{path.name} is damaged") from None
    return check_findings(path.name, path.stem, raw)
