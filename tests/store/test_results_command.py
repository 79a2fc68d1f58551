"""``theory-lab results``: what it prints, writes and returns."""

from __future__ import annotations

import csv
import io
import json
import shutil
from functools import partial
from pathlib import Path

import pandas as pd
import pytest

from theory_lab.commands.results import command
from theory_lab.errors import InputError, StoreError
from theory_lab.store import Archive, Store, rows_to_parquet
from theory_lab.store.export import export

OLD = Path(__file__).parent / "format1"
LONG = "cff2bdf6ebede800c1cbd2a50eb953c3"
PIECE = "b7fba86ccabaa9a6876abbb6be79ee40"


@pytest.fixture
def store(tmp_path: Path) -> Path:
    shutil.copytree(OLD, tmp_path / "r")
    return tmp_path / "r"


@pytest.fixture
def lab(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    """Call the command: exit code and what it printed, on a terminal wide enough for its tables."""
    monkeypatch.setenv("COLUMNS", "200")

    def call(*words: object) -> tuple[int, str]:
        code = command.main([str(word) for word in words], standalone_mode=False)
        return code or 0, capsys.readouterr().out

    return call


@pytest.mark.parametrize("packed", [False, True])
def test_ls(store: Path, lab, packed: bool) -> None:
    if packed:
        assert lab("compact", store, "--quiet") == (
            0, "packed 5 cells and pieces, 6 blocks; 5 files and 0 packs went in\n",
        )  # fmt: skip
    code, text = lab("ls", store)
    assert code == 0
    assert f"format {2 if packed else 1}, theory_lab 0.1.0, stream 1" in text
    assert "4 cells and 1 pieces of studies" in text
    assert "6 blocks, 709,000 trials" in text
    assert "survivors laplace tail 2 64 to 2^12 4 703,000" in " ".join(text.split())
    _, text = lab("ls", store, "--cells")
    assert LONG in text
    assert PIECE in text
    rows = json.loads(lab("ls", store, "--format", "json")[1])
    found = next(row for row in rows if row["cell"] == LONG)
    assert (found["trials"], found["total"], found["length"], found["step"]) == (700_000, 378589.0, 64, 262144)
    frame = pd.read_csv(io.StringIO(lab("ls", store, "--format", "csv")[1]))
    assert sorted(frame.cell) == sorted(row["cell"] for row in rows)


@pytest.mark.parametrize("packed", [False, True])
def test_show(store: Path, lab, packed: bool) -> None:
    if packed:
        lab("compact", store, "--quiet")
    about = json.loads(lab("show", store, LONG[:4], "--format", "json", "--error", "0.05")[1])
    # 378,589 of 700,000 x 64 keys survive.
    assert about["estimate"] == 378589 / 700_000
    p = 378589 / 700_000 / 64
    assert about["standard_error"] == pytest.approx(64 * (p * (1 - p) / (64 * 700_000)) ** 0.5, rel=1e-9)
    assert about["ci_low"] < about["estimate"] < about["ci_high"]
    assert about["ci_high"] - about["ci_low"] == pytest.approx(2 * 1.96 * about["standard_error"], rel=1e-2)
    assert (about["blocks"], about["length"], about["checksum"]) == (3, 64, "agrees")
    assert ("pack" in about["in"]) == packed
    assert "findings:        3" in lab("show", store, PIECE[:6])[1]
    text = lab("show", store, "tda-4.3")[1]
    assert "VIOLATED" in text
    rows = pd.read_csv(io.StringIO(lab("show", store, "tda-4.3", "--format", "csv")[1]))
    assert rows.claim.unique().tolist() == ["tda-4.3"]


def test_what_cannot_be_shown(store: Path, lab) -> None:
    for what, message in (
        ("ffff", "no cell's name begins so"),
        ("cf", "at least 4 digits"),
        ("tda-9", "at least 4 digits"),
        ("tda-4.6", "did not check it"),
    ):
        with pytest.raises(InputError, match=message):
            lab("show", store, what)
    (store / "cells" / f"{LONG}.parquet").write_bytes(b"")
    with pytest.raises(StoreError, match="is damaged"):
        lab("show", store, LONG)


def test_verify_names_what_is_damaged_and_drops_it(store: Path, lab) -> None:
    assert lab("verify", store, "--quiet") == (0, "6 sound, 0 damaged\n")
    path = store / "cells" / f"{LONG}.parquet"
    raw = bytearray(path.read_bytes())
    raw[raw.index(b"PAR1") + 40] ^= 1
    path.write_bytes(raw)
    code, text = lab("verify", store, "--quiet")
    assert code == 1
    assert f"damaged: cells/{LONG}.parquet: {LONG}.parquet is damaged" in text
    assert text.endswith("5 sound, 1 damaged\n")
    assert lab("verify", store, "--drop", "--quiet")[0] == 1
    assert (store / "set-aside" / path.name).read_bytes() == bytes(raw)
    assert lab("verify", store, "--quiet") == (0, "5 sound, 0 damaged\n")
    assert Store(store, resume=True).cell_count() == 4


def test_verify_of_a_pack(store: Path, lab) -> None:
    lab("compact", store, "--quiet")
    blocks = next((store / "packs").glob("*.blocks.parquet"))
    blocks.write_bytes(blocks.read_bytes()[:-100])
    code, text = lab("verify", store, "--quiet")
    assert code == 1
    assert text.count("damaged: packs/") == 4
    assert lab("verify", store, "--drop", "--quiet")[0] == 1
    assert lab("verify", store, "--quiet") == (0, "2 sound, 0 damaged\n")  # rows, and the findings


@pytest.mark.parametrize("ending", ["csv", "json", "parquet"])
def test_export(store: Path, lab, tmp_path: Path, ending: str) -> None:
    readers = {"csv": pd.read_csv, "json": partial(pd.read_json, precise_float=True), "parquet": pd.read_parquet}
    read = readers[ending]
    path = tmp_path / f"out.{ending}"
    rows = Archive(store).rows()
    assert lab("export", store, "--to", path)[0] == 0
    frame = read(path)
    assert frame.estimate.tolist() == rows.estimate.tolist()
    assert frame.columns.tolist() == rows.columns.tolist()
    lab("export", store, "--to", path, "--what", "cells")
    assert sorted(read(path).trials.dropna()) == [3000, 3000, 3000, 700_000]
    if ending == "json":
        with pytest.raises(InputError, match="blocks go to"):
            lab("export", store, "--to", path, "--what", "blocks")
        assert len(read(path)) == 5  # what was there stays
    else:
        lab("export", store, "--to", path, "--what", "blocks")
        found = read(path)
        assert found[found.cell == LONG].total.tolist() == [141621.0, 141957.0, 95011.0]


def test_no_text_of_a_csv_is_a_formula(store: Path, tmp_path: Path) -> None:
    rows = Archive(store).rows()
    hostile = ["=1+1", "+1+1", "-1+2", "@SUM(A1)", "\tx", "\n=1"]
    (store / "rows.parquet").write_bytes(rows_to_parquet(rows.assign(note=hostile, **{"=evil": 1.5})))
    export(Archive(store), str(tmp_path / "out.csv"))
    with open(tmp_path / "out.csv", newline="") as file:
        found = list(csv.DictReader(file))
    assert [row["note"] for row in found] == [f"'{text}" for text in hostile]
    assert [row["'=evil"] for row in found] == ["1.5"] * 6
    assert float(found[0]["estimate"]) == rows.estimate.iloc[0]
    for row in found:
        for value in row.values():
            try:
                float(value)  # a negative number is a number
            except ValueError:
                assert not value.startswith(("=", "+", "-", "@", "\t", "\r")), value


@pytest.mark.parametrize(
    "words", [("ls",), ("verify",), ("compact",), ("migrate",), ("show", LONG), ("export", "--to", "x.csv")]
)
def test_what_is_no_results_folder(tmp_path: Path, lab, words: tuple[str, ...]) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "mine").mkdir()
    for name, message in (
        ("nowhere", "no such folder"),
        ("file", "this is a file"),
        ("mine", "theory-lab check wrote"),
    ):
        with pytest.raises(InputError, match=message):
            lab(words[0], tmp_path / name, *words[1:])
    assert list((tmp_path / "mine").iterdir()) == []


def test_where_an_export_cannot_go(store: Path, lab, tmp_path: Path) -> None:
    for target, message in (("x.xlsx", "ending in"), ("no/x.csv", "folder that exists"), ("d.csv", "this is a folder")):
        (tmp_path / "d.csv").mkdir(exist_ok=True)
        with pytest.raises(InputError, match=message):
            lab("export", store, "--to", tmp_path / target)
