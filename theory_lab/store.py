"""Where results lie: a folder with one Parquet file a finished cell.

::

    DIR/manifest.json          format, stream and toolkit versions
    DIR/cells/<digest>.parquet one row a block: block, trials, total, total_sq; provenance in the schema's metadata
    DIR/cells/<digest>.json    findings of a study's piece, with provenance and a checksum
    DIR/timings.csv            seconds a cell took, apart so that cell files hold nothing that varies between runs
    DIR/rows.parquet           the run's rows with their verdicts, written last

Files are written to a temporary name, flushed to disk and renamed, so that a crash leaves the old file or the new one.
Each cell carries a checksum; one that does not match is recomputed.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from theory_lab import __version__
from theory_lab.errors import InputError, StoreError
from theory_lab.estimation.base import BlockSum, Cell
from theory_lab.streams import STREAM_VERSION
from theory_lab.studies import Finding, Piece

if TYPE_CHECKING:
    import pandas as pd

FORMAT_VERSION = 1
_KEY = b"theory_lab"


@cache
def provenance() -> dict[str, Any]:
    """Versions and, in a source checkout, the commit: everything about the code, nothing about the host."""
    versions = {name: metadata.version(name) for name in ("numpy", "scipy", "pandas")}
    return {"theory_lab": __version__, "stream": STREAM_VERSION, "commit": _commit(), **versions}


def _commit() -> str | None:
    root = Path(__file__).resolve().parent.parent
    if not (root / ".git").exists():
        return None
    try:
        found = subprocess.run(
            ["git", "-C", str(root), "rev-parse", "HEAD"], capture_output=True, text=True, timeout=5, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip()


def require_pyarrow() -> None:
    """Raise InputError if Parquet files cannot be handled."""
    try:
        import pyarrow  # noqa: F401  # only whether it is there
    except ImportError:
        raise InputError("out", "pyarrow is not installed", "pip install 'theory-lab[cli]' to keep results") from None


class Store:
    """A results folder.

    Parameters
    ----------
    path : path
        The folder; made if it does not exist.
    resume : bool
        Whether results already there may be used and extended.

    Raises
    ------
    InputError
        If the folder holds results and ``resume`` is False, or holds something else.
    StoreError
        If it cannot be written, or was written by another version.
    """

    def __init__(self, path: str | Path, resume: bool = False) -> None:
        require_pyarrow()
        if not isinstance(path, (str, Path)) or not str(path):
            raise InputError("out", path, "the path of a folder is allowed")
        self.path = Path(path)
        self._cells = self.path / "cells"
        self._timings: dict[str, float] | None = None
        with self._writing():
            known = self._check(resume)
            self._cells.mkdir(parents=True, exist_ok=True)
            if not known:
                self._write(self.path / "manifest.json", lambda f: f.write(self._manifest().encode()))
            self._probe()

    @staticmethod
    def _manifest() -> str:
        return json.dumps({"format": FORMAT_VERSION, **provenance()}, indent=2, sort_keys=True) + "\n"

    def _check(self, resume: bool) -> bool:
        """Whether the folder is a store already; raise if it may not be used."""
        manifest = self.path / "manifest.json"
        if self.path.exists() and not self.path.is_dir():
            raise InputError("out", str(self.path), "a folder is allowed, and this is a file")
        if not manifest.exists():
            # cells/ alone is what a crash between two steps of this constructor leaves behind.
            ours = ("cells", ".lock")
            others = [p.name for p in self.path.iterdir() if p.name not in ours] if self.path.exists() else []
            if others:
                raise InputError("out", str(self.path), "a new, empty or results folder is allowed")
            return False
        if not resume:
            raise InputError("out", str(self.path), "it holds results: add --resume, or name another folder")
        try:
            found = json.loads(manifest.read_text())
            written = {name: found[name] for name in ("format", "stream", "theory_lab")}
        except (OSError, ValueError, KeyError, TypeError):
            raise StoreError(f"out: {self.path}; its manifest.json is damaged; name another folder") from None
        mine = {"format": FORMAT_VERSION, "stream": STREAM_VERSION, "theory_lab": __version__}
        if written != mine:
            raise StoreError(
                f"out: {self.path}; written by version {written['theory_lab']} (format {written['format']}), this is "
                f"{__version__} (format {FORMAT_VERSION}); name another folder or use that version"
            )
        return True

    def _probe(self) -> None:
        """Fail now, not after an hour's work, if cells cannot be written."""
        with tempfile.NamedTemporaryFile(dir=self._cells, prefix=".probe-"):
            pass

    @contextlib.contextmanager
    def _writing(self, advice: str = "name a folder that can be") -> Iterator[None]:
        try:
            yield
        except OSError as error:
            reason = error.strerror or str(error)
            raise StoreError(f"out: {self.path}; it cannot be written ({reason}); {advice}") from error

    def _write(self, target: Path, fill: Callable[[Any], object]) -> None:
        _write_atomically(target, fill)

    def _cell_path(self, cell: Cell) -> Path:
        return self._cells / f"{cell.digest}.parquet"

    def save(self, cell: Cell, blocks: Sequence[BlockSum], seconds: float) -> None:
        """Write a cell; StoreError if the disk is full or the folder cannot be written.

        What is stored is never lost to a smaller run: of each block the longer version is kept.
        """
        with self._writing("cells written before are kept"), self._locked():
            stored, _ = self.load(cell)
            self._save(cell, longest(stored, blocks), seconds)

    def _save(self, cell: Cell, blocks: Sequence[BlockSum], seconds: float) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        columns = _columns(blocks)
        about = {"cell": cell.identity(), "seed": cell.seed, "checksum": _checksum(cell, columns), **provenance()}
        if cell.device != "cpu":
            about |= {name: metadata.version(name) for name in ("torch", "triton")}
        table = pa.table(columns, schema=_schema()).replace_schema_metadata(
            {_KEY: json.dumps(about, sort_keys=True).encode()}
        )
        self._write(self._cell_path(cell), lambda file: pq.write_table(table, file, compression="zstd"))
        self._log_seconds(cell.digest, seconds)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Keep other processes from writing a cell between our reading and replacing it."""
        with open(self.path / ".lock", "a", encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def load(self, cell: Cell) -> tuple[list[BlockSum], str | None]:
        """Read a cell.

        Returns
        -------
        blocks : list of BlockSum
            Empty if there is nothing usable.
        damage : str or None
            What is wrong with a file that is there but cannot be used.
        """
        import pyarrow as pa
        import pyarrow.parquet as pq

        path = self._cell_path(cell)
        if not path.exists():
            return [], None
        try:
            table = pq.read_table(path)
            about = json.loads(table.schema.metadata[_KEY])
            columns = {name: table.column(name).to_pylist() for name in _schema().names}
        except (OSError, pa.ArrowException, KeyError, TypeError, ValueError):
            return [], f"{path.name} is damaged"
        if about.get("checksum") != _checksum(cell, columns):
            return [], f"{path.name} does not match its checksum"
        return [BlockSum(*row) for row in zip(*columns.values(), strict=True)], None

    def save_piece(self, piece: Piece, seed: int, findings: Sequence[Finding], seconds: float) -> None:
        """Write the findings of a study's piece; StoreError as for :meth:`save`."""
        body = {"findings": [finding.to_json() for finding in findings]}
        about = {"piece": [piece.study, piece.arguments], "seed": seed, **provenance()}
        text = json.dumps({**body, "checksum": _json_checksum(piece, seed, body), **about}, sort_keys=True, indent=1)
        with self._writing("what was written before is kept"):
            self._write(self._piece_path(piece, seed), lambda file: file.write(text.encode()))
            self._log_seconds(piece.digest(seed), seconds)

    def load_piece(self, piece: Piece, seed: int) -> tuple[tuple[Finding, ...] | None, str | None]:
        """Read findings: None if there is nothing usable, and what is wrong with a file that is there."""
        path = self._piece_path(piece, seed)
        if not path.exists():
            return None, None
        try:
            found = json.loads(path.read_bytes())
            body = {"findings": found["findings"]}
            if found["checksum"] != _json_checksum(piece, seed, body):
                return None, f"{path.name} does not match its checksum"
            return tuple(Finding.from_json(about) for about in body["findings"]), None
        except (OSError, ValueError, KeyError, TypeError):
            return None, f"{path.name} is damaged"

    def _piece_path(self, piece: Piece, seed: int) -> Path:
        return self._cells / f"{piece.digest(seed)}.json"

    def _log_seconds(self, digest: str, seconds: float) -> None:
        with open(self.path / "timings.csv", "a", encoding="utf-8") as log:
            log.write(f"{digest},{seconds:.6f}\n")
        if self._timings is not None:
            self._timings[digest] = seconds

    def seconds(self, digest: str) -> float:
        """Seconds that a stored cell or piece took; 0 if unknown."""
        if self._timings is None:
            self._timings = {}
            with contextlib.suppress(OSError):
                for line in (self.path / "timings.csv").read_text(encoding="utf-8", errors="replace").splitlines():
                    digest, _, value = line.partition(",")
                    with contextlib.suppress(ValueError):
                        self._timings[digest] = float(value)
        return self._timings.get(digest, 0.0)

    def cell_count(self) -> int:
        """Number of cells and pieces."""
        return sum(1 for path in self._cells.iterdir() if not path.name.startswith("."))

    def write_rows(self, rows: pd.DataFrame, settings: dict[str, Any]) -> None:
        """Write the run's rows and what was asked for."""
        with self._writing("the cells are kept"):
            about = json.dumps({"settings": settings, **provenance()}, sort_keys=True)
            self._write(self.path / "rows.parquet", lambda file: file.write(rows_to_parquet(rows, about)))


def rows_to_parquet(rows: pd.DataFrame, about: str = "{}") -> bytes:
    """Serialize rows to Parquet, with ``about`` (JSON) in the schema's metadata."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.Table.from_pandas(rows, preserve_index=False)
    table = table.replace_schema_metadata({**(table.schema.metadata or {}), _KEY: about.encode()})
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd")
    return sink.getvalue().to_pybytes()


def _write_atomically(target: Path, fill: Callable[[Any], object]) -> None:
    """Write a file so that it appears whole, and on the disk, or not at all."""
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}-")
    try:
        with os.fdopen(handle, "wb") as file:
            fill(file)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o644)
        os.replace(name, target)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


def write_whole(path: str, content: bytes) -> None:
    """Write a file of the user's so that it appears whole or not at all; StoreError if it cannot be written."""
    try:
        _write_atomically(Path(path).absolute(), lambda file: file.write(content))
    except OSError as error:
        raise StoreError(f"out: {path}; it cannot be written ({error.strerror or error})") from error


def longest(stored: Sequence[BlockSum], new: Sequence[BlockSum]) -> list[BlockSum]:
    """Blocks of both, in order; where both have one, that of more trials."""
    kept = {block.block: block for block in stored}
    for block in new:
        if block.block not in kept or kept[block.block].trials < block.trials:
            kept[block.block] = block
    return [kept[index] for index in sorted(kept)]


def _schema() -> Any:
    import pyarrow as pa

    kinds = {"block": pa.int64(), "trials": pa.int64(), "total": pa.float64(), "total_sq": pa.float64()}
    return pa.schema(list(kinds.items()))


def _columns(blocks: Sequence[BlockSum]) -> dict[str, list[Any]]:
    return {name: [getattr(block, name) for block in blocks] for name in ("block", "trials", "total", "total_sq")}


def _json_checksum(piece: Piece, seed: int, body: dict[str, Any]) -> str:
    text = json.dumps([piece.digest(seed), body], sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _checksum(cell: Cell, columns: dict[str, list[Any]]) -> str:
    # repr of a float is exact, so equal checksums mean equal bits.
    return hashlib.blake2b(repr((cell.digest, columns)).encode(), digest_size=16).hexdigest()
