"""The store: nothing computed is lost, nothing damaged is believed."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow.parquet as pq
import pytest

import theory_lab
from theory_lab.claims import Point
from theory_lab.errors import InputError, StoreError
from theory_lab.estimation import BlockSum, Cell
from theory_lab.experiments import COLUMNS
from theory_lab.store import Store

RESULTS = [name for name in COLUMNS if name != "seconds"]
GRID = {
    "claims": "tda-4.3",
    "noise": ["gaussian", "laplace"],
    "length": [2, 64, 10**6],
    "trials": 100_000,
    "workers": 1,
}
CELL = Cell("survivors", Point("gaussian", 10), "tail", 0)
BLOCKS = [BlockSum(0, 5, 3.0, 7.0), BlockSum(1, 5, 0.1 + 0.2, 0.3)]


class Listener(theory_lab.experiments.Silent):
    def __init__(self) -> None:
        self.said: list[str] = []
        self.done = -1

    def start(self, cells: int, done: int, work: float) -> None:
        self.done = done

    def say(self, message: str) -> None:
        self.said.append(message)


def same(a: pd.DataFrame, b: pd.DataFrame) -> None:
    pd.testing.assert_frame_equal(a[RESULTS], b[RESULTS], check_exact=True)


def test_round_trip(tmp_path: Path) -> None:
    store = Store(tmp_path / "r")
    store.save(CELL, BLOCKS, 1.5)
    assert store.load(CELL) == (BLOCKS, None)
    again = Store(tmp_path / "r", resume=True)
    assert again.load(CELL) == (BLOCKS, None)
    assert again.seconds(CELL.digest) == 1.5
    assert again.cell_count() == 1


def test_cell_files_carry_provenance_and_nothing_of_the_host(tmp_path: Path) -> None:
    import json

    for name in ("a", "b"):
        Store(tmp_path / name).save(CELL, BLOCKS, 1.5 if name == "a" else 99.0)
    files = [tmp_path / name / "cells" / f"{CELL.digest}.parquet" for name in ("a", "b")]
    assert files[0].read_bytes() == files[1].read_bytes()
    about = json.loads(pq.read_schema(files[0]).metadata[b"theory_lab"])
    assert about["seed"] == 0
    assert about["cell"]["length"] == 10
    assert {"theory_lab", "numpy", "scipy", "commit", "stream", "checksum"} <= about.keys()
    assert os.uname().nodename not in json.dumps(about)


def test_resume_draws_nothing_twice(tmp_path: Path) -> None:
    first = theory_lab.check(**GRID, out=tmp_path / "r")
    listener = Listener()
    second = theory_lab.check(**GRID, out=tmp_path / "r", resume=True, progress=listener)
    assert listener.done == 6
    same(first, second)
    same(first, pd.read_parquet(tmp_path / "r" / "rows.parquet"))


def test_more_trials_extend(tmp_path: Path) -> None:
    theory_lab.check(**GRID, out=tmp_path / "r")
    more = {**GRID, "trials": 1_000_000}
    same(theory_lab.check(**more, out=tmp_path / "r", resume=True), theory_lab.check(**more))
    # A smaller run on the larger store is that of a fresh one as well.
    same(theory_lab.check(**GRID, out=tmp_path / "r", resume=True), theory_lab.check(**GRID))


@pytest.mark.parametrize("damage", ["truncate", "flip", "empty", "text", "swap"])
def test_damaged_cell_is_drawn_again(tmp_path: Path, damage: str) -> None:
    first = theory_lab.check(**GRID, out=tmp_path / "r")
    files = sorted((tmp_path / "r" / "cells").glob("*.parquet"))
    raw = files[0].read_bytes()
    bad = {
        "truncate": raw[:-20],
        "flip": raw[:6] + bytes([raw[6] ^ 255]) + raw[7:],
        "empty": b"",
        "text": b"not parquet",
        "swap": files[1].read_bytes(),
    }[damage]
    files[0].write_bytes(bad)
    listener = Listener()
    same(first, theory_lab.check(**GRID, out=tmp_path / "r", resume=True, progress=listener))
    if damage != "flip":
        assert len(listener.said) == 1
        assert "drawn again" in listener.said[0]
    assert files[0].read_bytes() == raw


def test_every_flipped_byte_is_harmless(tmp_path: Path) -> None:
    """Whatever single byte of a cell file changes, the blocks read are the right ones or none."""
    store = Store(tmp_path / "r")
    store.save(CELL, BLOCKS, 0.0)
    path = tmp_path / "r" / "cells" / f"{CELL.digest}.parquet"
    raw = path.read_bytes()
    for index in range(len(raw)):
        path.write_bytes(raw[:index] + bytes([raw[index] ^ 0x41]) + raw[index + 1 :])
        blocks, damage = store.load(CELL)
        assert (blocks == BLOCKS) == (damage is None), index


def test_new_and_old_folders(tmp_path: Path) -> None:
    theory_lab.check(**GRID, out=tmp_path / "r")
    with pytest.raises(InputError, match="--resume"):
        Store(tmp_path / "r")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("x")
    with pytest.raises(InputError, match="new, empty or results folder"):
        Store(tmp_path / "mine", resume=True)
    (tmp_path / "file").write_text("x")
    with pytest.raises(InputError, match="this is a file"):
        Store(tmp_path / "file")
    with pytest.raises(InputError, match="resume"):
        theory_lab.check(**GRID, resume=True)


@pytest.mark.parametrize(("name", "value"), [("theory_lab", "0.0.9"), ("format", 99), ("stream", 0)])
def test_another_version_is_refused(tmp_path: Path, name: str, value: object) -> None:
    import json

    Store(tmp_path / "r")
    manifest = tmp_path / "r" / "manifest.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), name: value}))
    with pytest.raises(StoreError, match="written by version"):
        Store(tmp_path / "r", resume=True)


def test_an_impossible_run_leaves_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(InputError):
        theory_lab.check(noise="spherical", head_dim=1, out=tmp_path / "r")
    assert not (tmp_path / "r").exists()


def test_full_disk_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk fills up at the fourth cell: three are kept, no partial file, and a resume ends like a fresh run."""
    saved = []
    real = Store._write

    def full(self: Store, target: Path, fill, durable: bool = True) -> None:
        if target.suffix == ".parquet":
            if len(saved) == 3:
                raise OSError(errno.ENOSPC, "No space left on device")
            saved.append(target)
        real(self, target, fill, durable)

    monkeypatch.setattr(Store, "_write", full)
    with pytest.raises(StoreError, match="No space left on device"):
        theory_lab.check(**GRID, out=tmp_path / "r")
    monkeypatch.undo()
    assert len(list((tmp_path / "r" / "cells").iterdir())) == 3
    listener = Listener()
    same(theory_lab.check(**GRID, out=tmp_path / "r", resume=True, progress=listener), theory_lab.check(**GRID))
    assert listener.done == 3


def test_failed_write_removes_its_temporary_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(tmp_path / "r")

    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(StoreError, match="Input/output error"):
        store.save(CELL, BLOCKS, 0.0)
    assert list((tmp_path / "r" / "cells").iterdir()) == []


def test_killed_run_resumes_bit_for_bit(tmp_path: Path) -> None:
    """Killed between its cells; killed anywhere, and with worker processes: see tests/faults."""
    noise, lengths = ["gaussian", "two-point", "student-t(3)"], [2 * 4**k for k in range(10)]
    asked: dict[str, Any] = {"claims": ["tda-4.3", "tda-4.6"], "noise": noise, "length": lengths, "workers": 1}
    fresh = theory_lab.check(**asked, out=tmp_path / "fresh")
    words = [word for name in noise for word in ("--noise", name)]
    process = subprocess.Popen(
        [sys.executable, "-m", "theory_lab.main", "check", "tda-4.3", "tda-4.6", *words,
         "--length", ",".join(map(str, lengths)), "--workers", "1", "--out", "r"],
        cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
        env={**os.environ, "PYTHONPATH": str(Path(theory_lab.__file__).parent.parent)},
    )  # fmt: skip
    deadline = time.monotonic() + 60
    while len(list(tmp_path.glob("r/cells/*.parquet"))) < 5 and time.monotonic() < deadline:
        time.sleep(0.005)
    os.killpg(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert len(list(tmp_path.glob("r/cells/*.parquet"))) >= 5
    same(theory_lab.check(**asked, out=tmp_path / "r", resume=True), fresh)
    for path in tmp_path.glob("fresh/cells/*.parquet"):
        assert (tmp_path / "r" / "cells" / path.name).read_bytes() == path.read_bytes()


def test_findings_are_kept_and_checked(tmp_path: Path) -> None:
    asked = {"claims": "tra-dispersion", "noise": "gaussian", "length": [16, 64], "trials": 500, "workers": 1}
    first = theory_lab.check(**asked, out=tmp_path / "r")
    files = list((tmp_path / "r" / "cells").glob("*.json"))
    assert len(files) == 1
    listener = Listener()
    same(first, theory_lab.check(**asked, out=tmp_path / "r", resume=True, progress=listener))
    assert listener.done == 1
    raw = files[0].read_text()
    for bad in (raw[:-30], raw.replace('"trials": 500', '"trials": 501'), "[]", ""):
        files[0].write_text(bad)
        listener = Listener()
        same(first, theory_lab.check(**asked, out=tmp_path / "r", resume=True, progress=listener))
        assert "drawn again" in listener.said[0]
        assert files[0].read_text() == raw


def test_a_smaller_run_loses_nothing(tmp_path: Path) -> None:
    asked = {"claims": "tda-4.3", "noise": "gaussian", "length": 1000, "estimator": "tail", "workers": 1}
    long = theory_lab.check(**asked, trials=700_000, out=tmp_path / "r")
    short = theory_lab.check(**asked, trials=100_000, out=tmp_path / "r", resume=True)
    theory_lab.check(**asked, budget="1e5", out=tmp_path / "r", resume=True)
    assert short.trials.tolist() == [100_000]
    listener = Listener()
    same(long, theory_lab.check(**asked, trials=700_000, out=tmp_path / "r", resume=True, progress=listener))
    assert listener.done == 1
