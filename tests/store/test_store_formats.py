"""Formats: a folder of format 1 on the disk, and what later versions make of it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pandas as pd
import pytest

import theory_lab
from theory_lab.claims import Point
from theory_lab.errors import InputError, StoreError
from theory_lab.estimation import BlockSum, Cell
from theory_lab.experiments import COLUMNS
from theory_lab.store import Archive, Store
from theory_lab.store.archive import Damage
from theory_lab.store.cells import decode
from theory_lab.store.compact import compact
from theory_lab.store.migrate import migrate

OLD = Path(__file__).parent / "format1"
#: What the program of format 1 drew into it, as it printed it then.
LONG = Cell("survivors", Point("laplace", 64), "tail", 0)
BLOCKS = [
    BlockSum(0, 262144, 141621.0, 216537.0),
    BlockSum(1, 262144, 141957.0, 217587.0),
    BlockSum(2, 175712, 95011.0, 145443.0),
]
ASKED = {
    "claims": ["tda-4.3", "tra-dispersion"],
    "noise": "laplace",
    "length": [16, 64, 4096],
    "trials": 3000,
    "workers": 1,
}


class Listener(theory_lab.experiments.Silent):
    def __init__(self) -> None:
        self.heard: list[str] = []
        self.done = -1

    def start(self, cells: int, done: int, work: float) -> None:
        self.done = done

    def say(self, message: str) -> None:
        self.heard.append(message)


@pytest.fixture
def old(tmp_path: Path) -> Path:
    shutil.copytree(OLD, tmp_path / "old")
    return tmp_path / "old"


def _sound(path: Path) -> int:
    found = list(Archive(path).verify())
    assert [item for item in found if isinstance(item, Damage)] == []
    return len(found)


def test_a_folder_of_format_1_is_read_as_it_is(old: Path) -> None:
    table, damaged = Archive(old).table()
    assert damaged == []
    assert sorted(table.column("trials").to_pylist(), key=str) == [3000, 3000, 3000, 700_000, None]
    assert _sound(old) == 6
    assert json.loads((old / "manifest.json").read_text())["format"] == 1  # looking changes nothing


@pytest.mark.parametrize("by", ["resume", "migrate", "compact"])
def test_a_folder_of_format_1_is_continued(old: Path, by: str) -> None:
    """Every block keeps its bits, whichever way the folder comes to the present format, and nothing is drawn again."""
    if by == "migrate":
        assert migrate(old).rewritten == 4
        raw = (old / "cells" / f"{LONG.digest}.parquet").read_bytes()
        assert decode(raw)[1]["format"] == 2
    elif by == "compact":
        assert compact(old).cells == 5
    store = Store(old, resume=True)
    assert json.loads((old / "manifest.json").read_text())["format"] == 2
    assert store.load(LONG) == (BLOCKS, None)
    assert store.pooled_all([LONG.digest], [700_000]) == [(378589.0, 579567.0)]
    before = pd.read_parquet(OLD / "rows.parquet")
    listener = Listener()
    again = theory_lab.check(**ASKED, out=old, resume=True, progress=listener)
    assert (listener.done, listener.heard) == (4, [])  # read, not drawn
    results = [name for name in COLUMNS if name != "seconds"]
    pd.testing.assert_frame_equal(again[results], before[results], check_exact=True)
    assert _sound(old) == 6


def test_cells_of_another_version_are_kept_and_findings_are_not(old: Path) -> None:
    text = (old / "manifest.json").read_text().replace(theory_lab.__version__, "0.0.7")
    (old / "manifest.json").write_text(text)
    piece = next((old / "cells").glob("*.json"))
    piece.write_text(piece.read_text().replace(f'"theory_lab": "{theory_lab.__version__}"', '"theory_lab": "0.0.7"'))
    with pytest.raises(StoreError, match=r"written by version 0\.0\.7.*results migrate"):
        Store(old, resume=True)
    done = migrate(old)
    assert (done.before["theory_lab"], done.rewritten, done.damaged) == ("0.0.7", 4, ())
    listener = Listener()
    theory_lab.check(**ASKED, out=old, resume=True, progress=listener)
    assert listener.heard == ["tra-dispersion was worked out by version 0.0.7; it is drawn again"]
    assert Store(old, resume=True).load(LONG) == (BLOCKS, None)


def test_other_draws_and_later_formats_are_refused(old: Path) -> None:
    good = json.loads((old / "manifest.json").read_text())
    (old / "manifest.json").write_text(json.dumps({**good, "stream": 99}))
    with pytest.raises(StoreError, match="stream version 99"):
        migrate(old)
    (old / "manifest.json").write_text(json.dumps({**good, "format": 99}))
    for call in (Archive, migrate):
        with pytest.raises(StoreError, match="format 99"):
            call(old)
    with pytest.raises(InputError, match="no such folder"):
        migrate(old / "nowhere")


@pytest.mark.parametrize("how", ["gone", "{", "", "[]", '{"format": "2"}', "\x00\x01"])
def test_a_lost_manifest_is_written_anew(old: Path, how: str) -> None:
    if how == "gone":
        (old / "manifest.json").unlink()
    else:
        (old / "manifest.json").write_text(how)
    with pytest.raises(InputError, match="--resume"):
        Store(old)
    assert Store(old, resume=True).load(LONG) == (BLOCKS, None)
    assert json.loads((old / "manifest.json").read_text())["theory_lab"] == theory_lab.__version__


def test_a_lost_manifest_of_cells_of_two_versions(old: Path) -> None:
    (old / "manifest.json").write_text("{")
    piece = next((old / "cells").glob("*.json"))
    piece.write_text(piece.read_text().replace(f'"theory_lab": "{theory_lab.__version__}"', '"theory_lab": "0.0.7"'))
    with pytest.raises(StoreError, match="several versions"):
        Store(old, resume=True)


def test_a_folder_of_a_probe_is_left_alone(tmp_path: Path) -> None:
    """It has cells and rows too, of its own kind."""
    (tmp_path / "cells").mkdir()
    (tmp_path / "rows.parquet").write_bytes(b"a probe's")
    manifest = {**json.loads((OLD / "manifest.json").read_text()), "kind": "probe"}
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    for call in (Archive, migrate, lambda path: Store(path, resume=True)):
        with pytest.raises(InputError, match="this is a probe's"):
            call(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"cells", "rows.parquet", "manifest.json"}


def test_the_manifest_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text('{"name": "a browser extension"}')
    with pytest.raises(InputError, match="something else"):
        Store(tmp_path, resume=True)
    assert [path.name for path in tmp_path.iterdir()] == ["manifest.json"]


def test_a_file_that_claims_a_billion_rows_is_not_read(tmp_path: Path) -> None:
    """Run lengths make a small file of it; read, it would fill the memory."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    store = Store(tmp_path / "r")
    store.save(LONG, BLOCKS, 0.0)
    path = tmp_path / "r" / "cells" / f"{LONG.digest}.parquet"
    table = pq.read_table(path)
    many = table.take(pa.array([0] * 1_000_001)).replace_schema_metadata(table.schema.metadata)
    pq.write_table(many, path)
    assert store.load(LONG) == ([], f"{path.name} is damaged")
