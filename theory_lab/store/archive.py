"""A results folder as it lies there: read, listed and checked, and nothing written."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from theory_lab.errors import InputError, StoreError
from theory_lab.parquet_pages import check_pages
from theory_lab.store import manifest
from theory_lab.store.cells import (
    DAMAGE,
    FORMAT_VERSION,
    BlockTable,
    DamagedError,
    Summary,
    read_cell,
    read_findings,
)
from theory_lab.store.compact import read_timings
from theory_lab.store.files import refuse_links
from theory_lab.store.packs import Pack, Packs, cell_row, cells_schema, file_hash, orphans, piece_row

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Damage:
    """Something that cannot be used.

    Attributes
    ----------
    where : str
        The file, or the cell within a pack.
    what : str
        What is wrong with it.
    path : Path
        The file.
    """

    where: str
    what: str
    path: Path


@dataclass(frozen=True)
class Place:
    """Where a cell or piece lies: a file of its own, or a row of a pack."""

    name: str
    path: Path | None = None
    pack: Pack | None = None
    row: int = 0

    @property
    def text(self) -> str:
        """For people."""
        return f"cells/{self.path.name}" if self.path else f"pack {self.pack.id}" if self.pack else ""

    def is_cell(self) -> bool:
        """Whether it is a cell, and no piece of a study."""
        if self.path:
            return self.path.suffix == ".parquet"
        assert self.pack is not None
        return self.pack.is_cell(self.row)

    def read(self) -> tuple[BlockTable, dict[str, Any]]:
        """A cell; DamagedError if it cannot be used."""
        if self.path:
            return read_cell(self.path)
        assert self.pack is not None
        return self.pack.read(self.row)

    def findings(self) -> dict[str, Any]:
        """A piece's file; DamagedError if it cannot be used."""
        if self.path:
            return read_findings(self.path)
        assert self.pack is not None
        return self.pack.findings(self.row)


class Archive:
    """A results folder that is only read.

    Parameters
    ----------
    path : path
        The folder.

    Raises
    ------
    InputError
        If there is none, or it is something else.
    StoreError
        If a later format wrote it.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not self.path.exists():
            raise InputError("store", str(path), "no such folder")
        if not self.path.is_dir():
            raise InputError("store", str(path), "a results folder is allowed, and this is a file")
        try:
            refuse_links(self.path, "store")
            found = manifest.read(self.path)
            if found is None and not (self.path / "cells").is_dir():
                raise InputError("store", str(path), "a folder that theory-lab check wrote with --out DIR is allowed")
            self.damaged_manifest = found is None
            self.version = found or manifest.recover(self.path) or {"format": FORMAT_VERSION}
            if self.version["format"] > FORMAT_VERSION:
                raise StoreError(
                    f"store: {path}; written in format {self.version['format']}, and this version reads up to "
                    f"{FORMAT_VERSION}"
                )
            self.packs = Packs(self.path / "packs")
            self.packs.refresh()
        except OSError as error:
            raise StoreError(f"store: {path}; it cannot be read ({error.strerror or error})") from None

    def loose(self) -> list[Path]:
        """Files of cells and pieces that are in no pack, by name."""
        try:
            found = [
                p for p in (self.path / "cells").iterdir() if p.suffix in (".parquet", ".json") and p.name[0] != "."
            ]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise StoreError(f"store: {self.path}; it cannot be read ({error.strerror or error})") from None
        return sorted(found)

    def places(self, prefix: str = "") -> dict[str, list[Place]]:
        """Where every cell and piece lies whose name begins so."""
        found: dict[str, list[Place]] = {}
        for file in self.loose():
            if file.stem.startswith(prefix):
                found.setdefault(file.stem, []).append(Place(file.stem, path=file))
        for pack in self.packs:
            for row, name in enumerate(pack.names):
                if name.startswith(prefix):
                    found.setdefault(name, []).append(Place(name, pack=pack, row=row))
        return found

    def table(self) -> tuple[Any, list[Damage]]:
        """Every cell and piece once, with its sums, as a pyarrow table; and what could not be read of it.

        Sealed packs are believed, files of their own are read.
        """
        import pyarrow as pa
        import pyarrow.compute as pc

        rows, damaged = [], []
        for file in self.loose():
            try:
                rows.append(_loose_row(file))
            except FileNotFoundError:  # packed by another process since
                continue
            except DamagedError as error:
                damaged.append(Damage(f"cells/{file.name}", str(error), file))
        parts = [pa.Table.from_pylist(rows, schema=cells_schema())]
        for pack in self.packs:
            try:
                parts.append(pack.table)
            except DamagedError as error:
                damaged.append(Damage(f"packs/{pack.id}", str(error), pack.cells_path))
        damaged += [Damage(f"packs/{p.id}", p.damage, p.cells_path) for p in self.packs if p.damage]
        whole = pa.concat_tables(parts)
        if len(whole) and pc.count_distinct(whole.column("cell")).as_py() < len(whole):
            whole = whole.sort_by([("cell", "ascending"), ("trials", "descending")])
            names = whole.column("cell").combine_chunks()
            first = pa.concat_arrays([pa.array([True]), pc.not_equal(names[1:], names[:-1])])
            whole = whole.filter(first)
        return whole, damaged

    def find(self, prefix: str) -> list[list[Place]]:
        """Cells and pieces whose name begins so, each with its places."""
        return [places for _, places in sorted(self.places(prefix).items())]

    def rows(self) -> pd.DataFrame:
        """Rows of the last run; InputError if there are none, or they are damaged."""
        import pandas as pd

        path = self.path / "rows.parquet"
        if not path.exists():
            raise InputError("store", str(self.path), "it has no rows.parquet yet: finish its run first")
        try:
            check_pages(path)
            return pd.read_parquet(path)
        except Exception:  # whatever pandas and pyarrow make of damaged bytes
            raise InputError("store", str(self.path), "its rows.parquet is damaged: resume its run") from None

    def seconds(self) -> dict[str, float]:
        """Seconds a cell took, by its name."""
        return read_timings(self.path)

    def bytes(self) -> int:
        """Size on the disk."""
        size = 0
        for folder in (self.path, self.path / "cells", self.path / "packs"):
            if folder.is_dir():
                size += sum(entry.stat().st_size for entry in folder.iterdir() if entry.is_file())
        return size

    def verify(self) -> Iterator[Damage | str]:
        """Check everything; yields the name of each file or packed cell, and a Damage for each that is damaged."""
        if self.damaged_manifest:
            yield Damage(
                "manifest.json", "missing or damaged; the next --resume writes it anew", self.path / manifest.NAME
            )
        for file in self.loose():
            try:
                _loose_row(file)
                yield file.name
            except FileNotFoundError:
                continue
            except DamagedError as error:
                yield Damage(f"cells/{file.name}", str(error), file)
        for pack in self.packs:
            yield from _verify_pack(pack)
        for path in orphans(self.path / "packs"):
            if not path.name.startswith("."):
                yield Damage(f"packs/{path.name}", "its table of cells is missing", path)
        rows = self.path / "rows.parquet"
        if rows.exists():
            try:
                self.rows()
                yield rows.name
            except InputError:
                yield Damage("rows.parquet", "it cannot be read; the next --resume writes it anew", rows)


def _loose_row(file: Path) -> dict[str, Any]:
    if file.suffix == ".json":
        return piece_row(file.stem, read_findings(file))
    table, about = read_cell(file)
    return cell_row(file.stem, about, table.summary(), 0)


def _verify_pack(pack: Pack) -> Iterator[Damage | str]:
    if pack.damage:
        yield Damage(f"packs/{pack.id}", pack.damage, pack.cells_path)
    sound = True
    for row, name in enumerate(pack.names):
        try:
            if pack.is_cell(row):
                table, _ = pack.read(row)
                if not _same_sums(table.summary(), pack.summary(row)):
                    raise DamagedError(f"{name} in pack {pack.id} does not match its sums")
            else:
                pack.findings(row)
            pack.forget()
            yield name
        except DamagedError as error:
            sound = False
            yield Damage(f"packs/{pack.id}: {name}", str(error), pack.blocks_path)
    if not sound or not pack.seal:
        return
    try:
        if file_hash(pack.blocks_path) != pack.seal["blocks"]["blake2b"]:
            yield Damage(
                f"packs/{pack.blocks_path.name}", "its bytes changed, though none that is used", pack.blocks_path
            )
    except DAMAGE:
        yield Damage(f"packs/{pack.blocks_path.name}", "it cannot be read", pack.blocks_path)


def _same_sums(a: Summary, b: Summary) -> bool:
    pairs = zip((a.total, a.total_sq), (b.total, b.total_sq), strict=True)
    same = all(x == y or (math.isnan(x) and math.isnan(y)) for x, y in pairs)
    return same and (a.blocks, a.trials, a.step) == (b.blocks, b.trials, b.step)
