"""A results folder under way: what a run finds in it and writes to it.

::

    DIR/manifest.json          format, stream and toolkit versions
    DIR/cells/<digest>.parquet one row a block (cell, block, trials, total, total_sq); provenance in the metadata
    DIR/cells/<digest>.json    findings of a study's piece, with provenance and a checksum
    DIR/packs/                 many cells in few files; see :mod:`theory_lab.store.packs`
    DIR/timings.csv            seconds a cell took, apart so that cell files hold nothing that varies between runs
    DIR/rows.parquet           the run's rows with their verdicts, written last

Files are written to a temporary name, flushed to disk and renamed, so that a crash leaves the old file or the new one.
Each cell carries a checksum; one that does not match is recomputed. Every write happens under one lock, so that any
number of processes may share a folder; a cell is never replaced by less of it.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib import metadata
from itertools import repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any

from theory_lab import __version__
from theory_lab.errors import InputError, StoreError
from theory_lab.estimation.base import BlockSum, Cell
from theory_lab.store import manifest
from theory_lab.store.cells import (
    FORMAT_VERSION,
    BlockTable,
    DamagedError,
    encode,
    encode_findings,
    read_cell,
    read_findings,
)
from theory_lab.store.compact import compact, read_timings
from theory_lab.store.files import (
    PATIENCE,
    locked,
    refuse_links,
    remove_leavings,
    sync_file,
    sync_folder,
    write_atomically,
)
from theory_lab.store.packs import Packs
from theory_lab.store.rows import rows_to_parquet
from theory_lab.store.versions import provenance, require_pyarrow
from theory_lab.studies import Finding, Piece

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["FORMAT_VERSION", "LOOSE_CELLS", "Store", "longest"]

#: More cells than this in files of their own are packed.
LOOSE_CELLS = 1024
#: New cells are put on the disk together: at most so many, or so many seconds' worth.
_SYNC_FILES, _SYNC_SECONDS = 256, 2.0


class Store:
    """A results folder.

    Parameters
    ----------
    path : path
        The folder; made if it does not exist.
    resume : bool
        Whether results already there may be used and extended. A folder of an older format is brought to this one:
        its cells stay as they are until they are extended or packed.

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
        self._packs = Packs(self.path / "packs")
        self._timings: dict[str, float] | None = None
        self._unsynced: list[Path] = []
        self._synced = time.monotonic()
        with self._writing():
            self._known(resume)  # nothing is put into a folder that is not ours
            self._cells.mkdir(parents=True, exist_ok=True)
            (self.path / "packs").mkdir(exist_ok=True)
            with self._locked():
                if self._known(resume) != FORMAT_VERSION:
                    self._write(self.path / manifest.NAME, lambda f: f.write(manifest.text()))
                remove_leavings(self.path, manifest.TEMPORARY)
                remove_leavings(self._cells)
                self._probe()
                self._at_first = {name.partition(".")[0] for name in os.listdir(self._cells)}
            self._loose = len(self._at_first)
            with contextlib.suppress(BlockingIOError), locked(self.path / ".compact.lock", 0.0):
                remove_leavings(self.path / "packs")  # of a packing that was killed; one under way holds the lock
            self._packs.refresh()

    def _known(self, resume: bool) -> int | None:
        """Format of the store that the folder is already, None for none; raise if it may not be used."""
        if self.path.exists() and not self.path.is_dir():
            raise InputError("out", str(self.path), "a folder is allowed, and this is a file")
        refuse_links(self.path, "out")
        found = manifest.read(self.path) if self.path.exists() else None
        lost = found is None
        if lost:
            manifest.check_folder(self.path)
            found = manifest.recover(self.path)
        if found is None:
            return None
        if not resume:
            raise InputError("out", str(self.path), "it holds results: add --resume, or name another folder")
        manifest.refuse_other_versions(self.path, found)
        return None if lost else int(found["format"])

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

    def _write(self, target: Path, fill: Callable[[Any], object], durable: bool = True) -> None:
        write_atomically(target, fill, durable)

    def _write_new(self, target: Path, content: bytes) -> bool:
        """Write a cell or piece; whether it is a new file.

        A process that dies loses nothing that it wrote. Against power failures new files are put on the disk together,
        every few seconds, since a disk takes longer for one than a cell may take to draw; what replaces an older
        version is put there first.
        """
        fresh = not target.exists()
        self._write(target, lambda file: file.write(content), durable=not fresh)
        if fresh:
            self._unsynced.append(target)
            if len(self._unsynced) >= _SYNC_FILES or time.monotonic() - self._synced > _SYNC_SECONDS:
                self._sync()
        return fresh

    def _sync(self) -> None:
        while self._unsynced:
            sync_file(self._unsynced.pop())
        sync_folder(self._cells)
        self._synced = time.monotonic()

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Keep other processes from writing between our reading and replacing."""
        with locked(self.path / ".lock", PATIENCE):
            yield

    def save(self, cell: Cell, blocks: Sequence[BlockSum], seconds: float) -> None:
        """Write a cell; StoreError if the disk is full or the folder cannot be written.

        What is stored is never lost to a smaller run: of each block the longer version is kept.
        """
        self.save_many([(cell, blocks, seconds)])

    def save_many(self, cells: Iterable[tuple[Cell, Sequence[BlockSum], float]]) -> None:
        """Write cells, each with its blocks and the seconds it took, under one lock; as :meth:`save`."""
        fresh = 0
        with self._writing("cells written before are kept"):
            with self._locked():
                self._packs.refresh()
                for cell, blocks, seconds in cells:
                    digest = cell.digest
                    table = BlockTable.of(sorted(blocks, key=lambda block: block.block))
                    stored, _ = self._table(digest)
                    table = table if stored is None else stored.longest(table)
                    content = encode(digest, table, _about(cell))
                    fresh += self._write_new(self._cells / f"{digest}.parquet", content)
                    self._log_seconds(digest, seconds)
            self._grown(fresh)

    def _grown(self, fresh: int) -> None:
        """Pack the loose cells when there are many."""
        self._loose += fresh
        if self._loose > LOOSE_CELLS:
            with contextlib.suppress(OSError):  # no room for a pack beside its cells: they can wait, the run cannot
                compact(self.path, whole=False)
            # What stays must not set off a packing with each cell that follows.
            self._loose = min(len(os.listdir(self._cells)), LOOSE_CELLS // 2)

    def _table(self, digest: str) -> tuple[BlockTable | None, str | None]:
        """All blocks of a cell that are stored and sound, and what is wrong with a file that is there."""
        found: list[BlockTable] = []
        damage = None
        for _ in range(2):
            try:
                found.append(read_cell(self._cells / f"{digest}.parquet")[0])
            except FileNotFoundError:
                pass
            except DamagedError as error:
                damage = str(error)
            places = self._packs.find(digest)
            gone = False
            for pack, row in places:
                try:
                    found.append(pack.read(row)[0])
                except DamagedError as error:
                    gone = gone or not pack.cells_path.exists()
                    damage = str(error)
            if found or (places and not gone):
                break
            # Another process may have moved the cell into a pack, or packs into one, since we looked.
            known = [pack.id for pack in self._packs]
            self._packs.refresh()
            if known == [pack.id for pack in self._packs]:
                break
        if not found:
            return None, damage
        table = found[0]
        for other in found[1:]:
            table = table.longest(other)
        return table, damage

    def load(self, cell: Cell) -> tuple[list[BlockSum], str | None]:
        """Read a cell.

        Returns
        -------
        blocks : list of BlockSum
            Empty if there is nothing usable.
        damage : str or None
            What is wrong with a file that is there but cannot be used.
        """
        table, damage = self._table(cell.digest)
        return ([] if table is None else table.blocks()), damage

    def _loose_sums(self, digest: str, trials: int) -> tuple[float, float] | None:
        with contextlib.suppress(FileNotFoundError, DamagedError):
            found = read_cell(self._cells / f"{digest}.parquet")[0].summary()
            # A cell's blocks are of one size, of which `step` is; a last one that is cut short makes up the rest.
            if found.step and found.trials == trials:
                return found.total, found.total_sq
        return None

    def pooled_all(self, digests: Sequence[str], trials: Sequence[int]) -> list[tuple[float, float] | None]:
        """The two sums of each of many cells, by name, that is whole: the blocks of a run of its ``trials`` are stored.

        The sums are correctly rounded, as those of the blocks one by one would be, so that the pooled sample has the
        same bits. Cells in packs are not read for this.

        Returns
        -------
        list of (float, float) or None
            Sums of the observations and of their squares; None for a cell that has to be loaded.
        """
        found = self._packs.pooled_all(digests, trials)
        for index, digest in enumerate(digests):
            if digest in self._at_first:
                found[index] = self._loose_sums(digest, trials[index]) or found[index]
        return found

    def holds(self, digest: str) -> bool:
        """Whether anything of a cell was stored when the folder was opened, sound or not."""
        return digest in self._at_first or bool(self._packs.find(digest))

    def save_piece(self, piece: Piece, seed: int, findings: Sequence[Finding], seconds: float) -> None:
        """Write the findings of a study's piece; StoreError as for :meth:`save`."""
        digest = piece.digest(seed)
        about = {"piece": [piece.study, piece.arguments], "seed": seed, **provenance()}
        content = encode_findings(digest, [finding.to_json() for finding in findings], about)
        path = self._piece_path(piece, seed)
        with self._writing("what was written before is kept"):
            with self._locked():
                fresh = self._write_new(path, content)
                self._log_seconds(digest, seconds)
            self._grown(fresh)

    def load_piece(self, piece: Piece, seed: int) -> tuple[tuple[Finding, ...] | None, str | None]:
        """Read findings: None if there is nothing usable, and what is wrong with a file that is there."""
        digest, damage = piece.digest(seed), None
        try:
            return _findings(read_findings(self._piece_path(piece, seed))), None
        except FileNotFoundError:
            self._packs.refresh()
        except DamagedError as error:
            damage = str(error)
        for pack, row in self._packs.find(digest):
            try:
                return _findings(pack.findings(row)), damage
            except DamagedError as error:
                damage = str(error)
        return None, damage

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
            self._timings = read_timings(self.path)
        return self._timings.get(digest, 0.0)

    def seconds_all(self, digests: Sequence[str]) -> list[float]:
        """:meth:`seconds` of many."""
        if self._timings is None:
            self._timings = read_timings(self.path)
        return list(map(self._timings.get, digests, repeat(0.0)))

    def cell_count(self) -> int:
        """Number of cells and pieces."""
        self._packs.refresh()
        loose = {path.stem for path in self._cells.iterdir() if not path.name.startswith(".")}
        return len(loose | self._packs.names())

    def write_rows(self, rows: pd.DataFrame, settings: dict[str, Any]) -> None:
        """Write the run's rows and what was asked for."""
        about = json.dumps({"settings": settings, **provenance()}, sort_keys=True)
        content = rows_to_parquet(rows, about)
        with self._writing("the cells are kept"), self._locked():
            self._sync()
            self._write(self.path / "rows.parquet", lambda file: file.write(content))


def _about(cell: Cell) -> dict[str, Any]:
    """What is said about a cell beside its blocks."""
    about = {"cell": cell.identity(), "seed": cell.seed, **provenance()}
    if cell.device != "cpu":
        about |= {name: metadata.version(name) for name in ("torch", "triton")}
    return about


def _findings(found: dict[str, Any]) -> tuple[Finding, ...]:
    if found.get("theory_lab") != __version__:  # cells rest on the stream's version, a study on all its code
        raise DamagedError(f"{found['piece'][0]} was worked out by version {found.get('theory_lab')}")
    try:
        return tuple(Finding.from_json(about) for about in found["findings"])
    except (KeyError, TypeError) as error:  # the checksum agrees, yet another version's findings are built otherwise
        raise DamagedError(f"findings of {found['piece'][0]} cannot be read ({error})") from None


def longest(stored: Sequence[BlockSum], new: Sequence[BlockSum]) -> list[BlockSum]:
    """Blocks of both, in order; where both have one, that of more trials."""
    return BlockTable.of(stored).longest(BlockTable.of(new)).blocks()
