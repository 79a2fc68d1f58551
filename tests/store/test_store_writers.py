"""Several processes and threads on one folder."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from theory_lab.claims import Point
from theory_lab.errors import StoreError
from theory_lab.estimation import BlockSum, Cell
from theory_lab.store import Archive, Store
from theory_lab.store import folder as folder_module
from theory_lab.store.archive import Damage
from theory_lab.store.compact import compact
from theory_lab.store.files import locked

#: Each process writes longer and longer versions of the same cells, in an order of its own, and packs now and then.
_WRITER = """
import random, sys
from theory_lab.store import Store
from theory_lab.store.compact import compact
sys.path.insert(0, {here!r})
from test_store_writers import cell, drawn
order = [(i, n) for n in (1, 2, 3) for i in range(12)]
random.Random({seed}).shuffle(order)
store = Store({path!r}, resume=True)
for step, (i, n) in enumerate(order):
    store.save(cell(i), drawn(i)[:n], 1.0)
    if step % 9 == {seed}:
        compact(store.path)
"""


def cell(index: int) -> Cell:
    return Cell("survivors", Point("gaussian", 10 + index), "tail", 0)


def drawn(index: int) -> list[BlockSum]:
    return [BlockSum(block, 8, 0.1 * index + block, 1.0) for block in range(3)]


def _whole(path: Path, count: int) -> None:
    store = Store(path, resume=True)
    assert store.cell_count() == count
    for i in range(count):
        assert store.load(cell(i)) == (drawn(i), None), i
    assert not [found for found in Archive(path).verify() if isinstance(found, Damage)]
    assert {p.name for p in path.rglob(".*")} <= {".lock", ".compact.lock"}


def test_processes_that_write_the_same_cells(tmp_path: Path) -> None:
    """Whoever comes last with less of a cell takes nothing away, and packing takes nothing from anybody."""
    path = tmp_path / "r"
    Store(path)
    codes = [_WRITER.format(here=str(Path(__file__).parent), path=str(path), seed=seed) for seed in (1, 2)]
    processes = [subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True) for code in codes]
    for process in processes:
        _, told = process.communicate(timeout=120)
        assert process.returncode == 0, told
    _whole(path, 12)


def test_threads_that_share_a_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_module, "LOOSE_CELLS", 7)
    store = Store(tmp_path / "r")
    errors: list[BaseException] = []

    def write(parity: int) -> None:
        try:
            for i in range(parity, 24, 2):
                store.save(cell(i), drawn(i), 1.0)
                store.save(cell(i), drawn(i)[:1], 1.0)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=write, args=(parity,)) for parity in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    _whole(tmp_path / "r", 24)


def test_a_reader_follows_a_packing(tmp_path: Path) -> None:
    """What was opened before others packed, twice over, finds every cell."""
    store = Store(tmp_path / "r")
    store.save_many([(cell(i), drawn(i), 1.0) for i in range(4)])
    reader = Store(tmp_path / "r", resume=True)
    compact(tmp_path / "r")
    assert reader.load(cell(0)) == (drawn(0), None)
    store.save_many([(cell(i), drawn(i), 1.0) for i in range(4, 8)])
    compact(tmp_path / "r")
    for i in range(8):
        assert reader.load(cell(i)) == (drawn(i), None), i


def test_a_writer_that_hangs_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(tmp_path / "r")
    monkeypatch.setattr(folder_module, "PATIENCE", 0.05)
    with locked(tmp_path / "r" / ".lock"), pytest.raises(StoreError, match=r"another process holds .*\.lock"):
        store.save(cell(0), drawn(0), 1.0)


def test_leavings_of_killed_writers_are_swept(tmp_path: Path) -> None:
    Store(tmp_path / "r").save(cell(0), drawn(0), 1.0)
    for place in ("cells/.x.parquet-1", ".manifest.json-2", "packs/.3.blocks", "packs/0123456789abcdef.blocks.parquet"):
        (tmp_path / "r" / place).write_bytes(b"half")
    Store(tmp_path / "r", resume=True)
    compact(tmp_path / "r")
    assert len(list((tmp_path / "r" / "packs").iterdir())) == 3
    _whole(tmp_path / "r", 1)
