"""Packs: many cells in few files, made at any moment, killed at any moment, damaged anywhere."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from theory_lab.claims import Point
from theory_lab.estimation import BlockSum, Cell
from theory_lab.store import Archive, Store
from theory_lab.store import compact as compact_module
from theory_lab.store import folder as folder_module
from theory_lab.store import packs as packs_module
from theory_lab.store.archive import Damage
from theory_lab.store.compact import SET_ASIDE, compact


def cell(index: int, seed: int = 0) -> Cell:
    return Cell("survivors", Point("gaussian", 10 + index), "tail", seed)


def drawn(index: int, blocks: int = 3, last: int = 5) -> list[BlockSum]:
    """Blocks of eight trials, the last of fewer."""
    trials = [8] * (blocks - 1) + [last]
    return [BlockSum(b, n, 0.1 * index + b, float(n * index)) for b, n in enumerate(trials)]


@pytest.fixture
def full(tmp_path: Path) -> Path:
    """Twenty cells in files of their own."""
    store = Store(tmp_path / "r")
    store.save_many([(cell(i), drawn(i), float(i)) for i in range(20)])
    return tmp_path / "r"


def check_all(path: Path, count: int = 20) -> None:
    store = Store(path, resume=True)
    assert store.cell_count() == count
    for i in range(count):
        assert store.load(cell(i)) == (drawn(i), None)
        assert store.seconds(cell(i).digest) == float(i)


def damage(path: Path) -> list[Damage]:
    return [found for found in Archive(path).verify() if isinstance(found, Damage)]


def test_packing_keeps_every_bit(full: Path) -> None:
    before, _ = Archive(full).table()
    done = compact(full)
    assert (done.cells, done.rows, done.loose, done.packs) == (20, 60, 20, 0)
    assert list((full / "cells").iterdir()) == []
    check_all(full)
    after, _ = Archive(full).table()
    names = [name for name in before.column_names if name != "first_row"]
    assert after.select(names).sort_by("cell").equals(before.select(names).sort_by("cell"))
    assert compact(full).cells == 0  # nothing is left to do
    assert damage(full) == []


def test_packs_are_the_same_bytes_however_they_came_about(full: Path, tmp_path: Path) -> None:
    compact(full)
    other = Store(tmp_path / "other")
    for i in reversed(range(20)):
        other.save(cell(i), drawn(i), 0.0)
        if i == 7:
            compact(tmp_path / "other")
    compact(tmp_path / "other")
    packs = [{p.name: p.read_bytes() for p in (path / "packs").iterdir()} for path in (full, tmp_path / "other")]
    assert packs[0] == packs[1]


def test_a_packed_cell_is_extended(full: Path) -> None:
    compact(full)
    longer = drawn(3, blocks=5, last=8)
    Store(full, resume=True).save(cell(3), longer, 1.0)
    Store(full, resume=True).save(cell(4), drawn(4)[:1], 1.0)  # a smaller run takes nothing away
    store = Store(full, resume=True)
    assert store.load(cell(3))[0] == longer
    assert store.load(cell(4))[0] == drawn(4)
    assert store.pooled_all([cell(3).digest], [21]) == [_sums(drawn(3))]
    assert store.pooled_all([cell(3).digest], [40]) == [_sums(longer)]
    assert store.cell_count() == 20
    compact(full)
    assert Store(full, resume=True).load(cell(3))[0] == longer
    assert len(list((full / "packs").iterdir())) == 3


def test_what_is_said_of_cells_may_be_damaged_under_a_seal_that_agrees(full: Path) -> None:
    """Sums and names are there; what cannot be read any more is one damage, and the cells are drawn again."""
    compact(full)
    (path,) = (full / "packs").glob("*.cells.parquet")
    metadata = pq.ParquetFile(path).metadata
    (column,) = [i for i in range(metadata.num_columns) if metadata.schema.column(i).name == "about"]
    chunk = metadata.row_group(0).column(column)
    raw = bytearray(path.read_bytes())
    end = (chunk.dictionary_page_offset or chunk.data_page_offset) + chunk.total_compressed_size
    raw[end - 40 : end] = bytes(40)
    path.write_bytes(raw)
    seal = path.with_name(path.name.replace(".cells.parquet", ".json"))
    about = json.loads(seal.read_text())
    about["cells"]["blake2b"] = hashlib.blake2b(raw, digest_size=16).hexdigest()
    seal.write_text(json.dumps(about))
    store = Store(full, resume=True)
    assert store.pooled_all([cell(3).digest], [21]) == [_sums(drawn(3))]
    blocks, said = store.load(cell(3))
    assert blocks == []
    assert said is not None
    table, damaged = Archive(full).table()
    assert len(table) == 0
    assert [found.what for found in damaged] == [f"{path.name} is damaged"]


def _sums(blocks: list[BlockSum]) -> tuple[float, float]:
    import math

    return math.fsum(b.total for b in blocks), math.fsum(b.total_sq for b in blocks)


def test_pooled_sums_are_those_of_the_blocks(full: Path) -> None:
    """With the sums of a pack, of a file, and not at all for another number of trials or a gap."""
    gap = [drawn(50)[0], drawn(50)[2]]
    Store(full, resume=True).save(cell(50), gap, 0.0)
    for _ in range(2):
        store = Store(full, resume=True)
        for i in range(20):
            assert store.pooled_all([cell(i).digest], [21]) == [_sums(drawn(i))]
            assert store.pooled_all([cell(i).digest], [20]) == [None]
        assert store.pooled_all([cell(50).digest], [13]) == [None]
        assert store.pooled_all([cell(99).digest], [21]) == [None]
        compact(full)


def test_many_cells_are_packed_by_themselves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_module, "LOOSE_CELLS", 5)
    monkeypatch.setattr(compact_module, "_MOST_SMALL", 3)
    monkeypatch.setattr(packs_module, "GROUP_ROWS", 7)
    monkeypatch.setattr(packs_module, "PACK_CELLS", 9)
    store = Store(tmp_path / "r")
    other = Store(tmp_path / "r", resume=True)  # looks on, with what it knew at first
    for i in range(40):
        store.save(cell(i), drawn(i), float(i))
    for i in range(40):
        assert other.load(cell(i)) == (drawn(i), None)
    assert len(list((tmp_path / "r" / "cells").iterdir())) <= 5
    check_all(tmp_path / "r", 40)
    assert damage(tmp_path / "r") == []


@pytest.mark.parametrize("step", range(1, 12))
def test_a_packing_that_dies_loses_nothing(full: Path, monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """It dies at each of its steps in turn: a write, a rename, a removal."""
    Store(full, resume=True).save(cell(0), drawn(0), 0.0)
    left = [step]

    class Killed(BaseException):
        pass

    def dying(real):
        def call(*words, **more):
            left[0] -= 1
            if left[0] == 0:
                raise Killed
            return real(*words, **more)

        return call

    for name in ("replace", "unlink", "fsync"):
        monkeypatch.setattr(os, name, dying(getattr(os, name)))
    try:
        compact(full)
    except Killed:
        pass
    else:
        assert step > 4, "the packing has fewer steps than this test thinks"
    monkeypatch.undo()
    check_all(full)
    compact(full)
    check_all(full)
    assert damage(full) == []
    assert len(list((full / "packs").iterdir())) == 3
    assert [p.name for p in full.rglob(".*")] in ([".lock", ".compact.lock"], [".compact.lock", ".lock"])


@pytest.mark.parametrize("how", ["flip", "truncate", "empty", "gone"])
@pytest.mark.parametrize("part", ["blocks.parquet", "cells.parquet", "json"])
def test_a_damaged_pack_is_not_believed(full: Path, part: str, how: str) -> None:
    """Whatever is damaged: what is read is right or missing, ``verify`` tells, and a packing sets it aside."""
    compact(full)
    path = next((full / "packs").glob(f"*.{part}"))
    raw = path.read_bytes()
    rng = np.random.default_rng(0)
    for at in rng.integers(0, len(raw), 12) if how == "flip" else [0]:
        bad = {
            "flip": raw[:at] + bytes([raw[at] ^ 0x41]) + raw[at + 1 :],
            "truncate": raw[:-9],
            "empty": b"",
            "gone": b"",
        }
        path.write_bytes(bad[how])
        if how == "gone":
            path.unlink()
        store = Store(full, resume=True)
        for i in range(20):
            blocks, problem = store.load(cell(i))
            assert blocks == drawn(i) or (not blocks and (problem or part == "cells.parquet")), (at, i)
            (pooled,) = store.pooled_all([cell(i).digest], [21])
            assert pooled in (None, _sums(drawn(i))), (at, i)
        assert damage(full), at
    if how == "empty" and part == "blocks.parquet":
        assert len(compact(full, check=True).damaged) == 20
        assert len(list((full / SET_ASIDE).iterdir())) == 3
        assert damage(full) == []


def test_a_packing_that_fails_stops_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a disk that is nearly full there may be room for cells, and none for a pack beside them."""
    monkeypatch.setattr(folder_module, "LOOSE_CELLS", 4)
    tried = []

    def full(self: object) -> None:
        tried.append(self)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(packs_module.PackWriter, "finish", full)
    store = Store(tmp_path / "r")
    for i in range(20):
        store.save(cell(i), drawn(i), float(i))
    assert 2 <= len(tried) <= 8
    check_all(tmp_path / "r")
    assert {p.name for p in (tmp_path / "r").rglob(".*")} == {".lock", ".compact.lock"}


def test_another_process_packs_already(full: Path) -> None:
    from theory_lab.store.files import locked

    with locked(full / ".compact.lock"):
        assert compact(full).busy
    check_all(full)
