"""Packing: loose cells, and smaller packs, into packs.

Inputs are never changed in place, so that everything slow happens without a lock. A new pack is whole, durable and
visible before anything that went into it is removed; a crash in between leaves a cell twice, which is harmless, and the
next packing removes it.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from theory_lab.store import manifest
from theory_lab.store.cells import FORMAT_VERSION, BlockTable, DamagedError, read_cell, read_findings
from theory_lab.store.files import locked, remove_leavings, write_atomically
from theory_lab.store.packs import PACK_CELLS, PACK_ROWS, Pack, PackWriter, orphans, pack_names, sealed_count

#: Packs of fewer cells than this are merged once there are ``MOST_SMALL`` of them.
_SMALL = PACK_CELLS // 2
_MOST_SMALL = 8
#: Where damaged packs are put, for whoever wants to look at them.
SET_ASIDE = "set-aside"


@dataclass(frozen=True)
class Compaction:
    """What a packing did.

    Attributes
    ----------
    cells, rows : int
        Cells and pieces, and rows of blocks, that were written into new packs.
    loose, packs : int
        Loose files and older packs that went into them.
    damaged : tuple of str
        What could not be used: loose files stay where they are, packs are put into ``set-aside``.
    busy : bool
        Whether another process was packing, so that nothing was done.
    """

    cells: int = 0
    rows: int = 0
    loose: int = 0
    packs: int = 0
    damaged: tuple[str, ...] = ()
    busy: bool = False


def compact(
    path: Path, whole: bool = True, tell: Callable[[int, int], None] | None = None, check: bool = False
) -> Compaction:
    """Pack the loose cells of a store, and merge packs.

    Parameters
    ----------
    path : Path
        The store.
    whole : bool
        Merge every pack that is smaller than it could be; otherwise small ones only, and only when there are many.
    tell : callable, optional
        Told how many cells are done, and how many there are.
    check : bool
        Read every pack, to set aside what is damaged.

    Raises
    ------
    OSError
        If something cannot be written. Nothing is lost.
    """
    cells, packs = path / "cells", path / "packs"
    packs.mkdir(exist_ok=True)
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(locked(path / ".compact.lock", 0.0))
        except BlockingIOError:
            return Compaction(busy=True)
        with locked(path / ".lock"):
            manifest.raise_format(path)  # an older program would not see packs
        # Whoever packs holds the lock that we hold now: these are what killed ones left.
        remove_leavings(packs)
        for orphan in orphans(packs):
            orphan.unlink(missing_ok=True)
        work = _Work(path, cells, packs)
        work.choose(whole, check)
        try:
            return work.run(tell)
        except BaseException:
            work.abandon()
            raise


class _Work:
    """One packing."""

    def __init__(self, path: Path, cells: Path, packs: Path) -> None:
        self._path, self._cells, self._folder = path, cells, packs
        self._loose: dict[str, list[Path]] = {}
        self._packs: list[Pack] = []
        self._places: dict[str, list[tuple[Pack, int]]] = {}
        #: Loose files that went into the pack being written, with what tells this version of them from another.
        self._used: dict[Path, tuple[int, int, int]] = {}
        self._writer: PackWriter | None = None
        self._damaged: list[str] = []
        self._unsound: set[Pack] = set()
        self._written: set[str] = set()

    def choose(self, whole: bool, check: bool) -> None:
        """Choose what to pack."""
        for file in self._cells.iterdir():
            if file.suffix in (".parquet", ".json") and not file.name.startswith("."):
                self._loose.setdefault(file.stem, []).append(file)
        names = sorted(pack_names(self._folder))
        if not whole and not check:
            names = [name for name in names if sealed_count(self._folder, name) < _SMALL]
            if len(names) < _MOST_SMALL:
                names = []
        packs = [Pack(self._folder, name) for name in names]
        if check:
            self._packs = packs
        elif whole:
            self._packs = self._not_full(packs)
        else:
            self._packs = [pack for pack in packs if pack.sealed]
        for pack in self._packs:
            if pack.damage and not pack.names:
                self._damaged.append(pack.damage)
                self._unsound.add(pack)
            for row, name in enumerate(pack.names):
                self._places.setdefault(name, []).append((pack, row))

    def _not_full(self, packs: list[Pack]) -> list[Pack]:
        """Packs with room, without a seal, or with a cell that lies elsewhere too; none if one alone has room."""
        seen = Counter(name for pack in packs for name in pack.names)
        seen.update(self._loose.keys())
        twice = {pack for pack in packs if any(seen[name] > 1 for name in pack.names)}
        room = {pack for pack in packs if len(pack.names) < PACK_CELLS and pack.rows < PACK_ROWS}
        unsealed = {pack for pack in packs if not pack.sealed}
        if len(room) < 2 and not self._loose:
            room = set()
        return [pack for pack in packs if pack in room | twice | unsealed]

    def run(self, tell: Callable[[int, int], None] | None) -> Compaction:
        """Write packs, then remove what went into them."""
        names = sorted(self._loose.keys() | self._places.keys())
        done = rows = loose = 0
        for index, name in enumerate(names):
            if self._writer is not None and self._writer.full:
                rows += self._writer.rows
                loose += self._close()
            done += self._add(name)
            if tell is not None:
                tell(index + 1, len(names))
        if self._writer is not None:
            rows += self._writer.rows
            loose += self._close()
        removed = self._remove_packs()
        self._tidy_timings()
        return Compaction(done, rows, loose, removed, tuple(self._damaged))

    def abandon(self) -> None:
        """Leave no temporary file behind."""
        if self._writer is not None:
            self._writer.abandon()

    def _add(self, name: str) -> int:
        """Put a cell or piece into the pack; how many, 0 or 1, there was of it."""
        found = [*self._loose_cells(name), *self._packed_cells(name)]
        if not found:
            return 0
        if self._writer is None:
            self._writer = PackWriter(self._folder)
        first, about = found[0]
        if first is None:
            self._writer.add_piece(name, about)
            return 1
        table = first
        for other, _ in found[1:]:
            table = table if other is None else table.longest(other)
        said = {**about, "format": FORMAT_VERSION}
        said["checksum"] = table.checksum(name, said)
        self._writer.add(name, table, said)
        return 1

    def _loose_cells(self, name: str) -> Iterator[tuple[BlockTable | None, dict[str, Any]]]:
        for file in self._loose.get(name, []):
            try:
                mark = _mark(file)
                if file.suffix == ".json":
                    yield None, read_findings(file)
                else:
                    yield read_cell(file)
                self._used[file] = mark
            except FileNotFoundError:
                continue
            except DamagedError as error:
                self._damaged.append(str(error))

    def _packed_cells(self, name: str) -> Iterator[tuple[BlockTable | None, dict[str, Any]]]:
        for pack, row in self._places.get(name, []):
            try:
                if pack.is_cell(row):
                    yield pack.read(row)
                else:
                    yield None, pack.findings(row)
                pack.forget()
            except DamagedError as error:
                self._damaged.append(str(error))
                self._unsound.add(pack)

    def _close(self) -> int:
        """Make the pack visible, then remove the loose files in it; how many."""
        assert self._writer is not None
        self._writer.finish()
        with locked(self._path / ".lock"):
            self._written.add(self._writer.seal())
            self._writer = None
            removed = 0
            for file, mark in self._used.items():
                with contextlib.suppress(FileNotFoundError):
                    if _mark(file) == mark:  # nobody has replaced it by a longer version
                        file.unlink()
                        removed += 1
        self._used = {}
        return removed

    def _remove_packs(self) -> int:
        """Remove the older packs, since all that was read from them lies in new ones; set aside what could not be."""
        gone = 0
        with locked(self._path / ".lock"):
            for pack in self._packs:
                if pack.id in self._written:
                    continue
                for file in pack.files():
                    if pack in self._unsound:
                        (self._path / SET_ASIDE).mkdir(exist_ok=True)
                        with contextlib.suppress(FileNotFoundError):
                            file.rename(self._path / SET_ASIDE / file.name)
                    else:
                        file.unlink(missing_ok=True)
                gone += 1
        return gone

    def _tidy_timings(self) -> None:
        """One line a cell in the list of times."""
        with locked(self._path / ".lock"):
            found = read_timings(self._path)
            text = "".join(f"{name},{seconds:.6f}\n" for name, seconds in found.items())
            write_atomically(self._path / "timings.csv", lambda file: file.write(text.encode()))


def _mark(file: Path) -> tuple[int, int, int]:
    """What tells this version of a file from one that replaces it."""
    about = os.stat(file)
    return about.st_ino, about.st_size, about.st_mtime_ns


def read_timings(path: Path) -> dict[str, float]:
    """Seconds a cell took, by its name; lines that make no sense are left out."""
    try:
        lines = (path / "timings.csv").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return {}
    with contextlib.suppress(ValueError):  # nearly always they all make sense
        return {digest: float(value) for digest, value in (line.split(",") for line in lines)}
    found: dict[str, float] = {}
    for line in lines:
        digest, _, value = line.partition(",")
        with contextlib.suppress(ValueError):
            found[digest] = float(value)
    return found
