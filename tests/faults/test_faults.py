"""The fault harness: a few of its faults, and that it would notice."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import fault_page
import faults
import numpy as np
import pandas as pd
import pytest
from fault_bench import Bench, Outcome, count_tracebacks, stop_nursery
from fault_kinds import KINDS

from theory_lab.store import rows_to_parquet
from theory_lab.store.cells import BlockTable, encode, read_cell


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    yield Bench(tmp_path_factory.mktemp("faults") / "bench")
    stop_nursery()


@pytest.mark.parametrize("name", ["sigkill-run", "cell-flipped", "manifest"])
def test_nothing_is_lost(bench: Bench, name: str) -> None:
    kind = next(kind for kind in KINDS if kind.name == name)
    outcome = kind.apply(bench, np.random.default_rng(0))
    assert outcome.good, outcome
    assert outcome.found >= outcome.intact >= 0


def test_what_is_lost_or_changed_is_noticed(bench: Bench) -> None:
    out = bench.copy()
    cells = sorted((out / "cells").glob("*.parquet"))
    table, about = read_cell(cells[0])
    # One unit in the last place of one sum, with a checksum that agrees.
    columns = {**table.columns, "total_sq": np.nextafter(table.columns["total_sq"], np.inf)}
    cells[0].write_bytes(encode(cells[0].stem, BlockTable(columns), about))
    cells[1].unlink()
    (out / "cells" / ".left-1").write_bytes(b"")
    rows = pd.read_parquet(out / "rows.parquet")
    (out / "rows.parquet").write_bytes(rows_to_parquet(rows.assign(estimate=np.nextafter(rows.estimate, 1.0))))
    outcome = Outcome()
    bench.compare(out, outcome)
    assert (outcome.lost, outcome.changed, outcome.untidy) == (1, 2, 1)
    assert not outcome.good
    assert bench.intact(out) == bench.reference.cells - 2
    assert count_tracebacks("x\nTraceback (most recent call last):\n  File\n") == 1


def test_kinds_are_enough() -> None:
    assert len({kind.name for kind in KINDS}) == len(KINDS) >= 10
    assert sum(kind.count for kind in KINDS) >= 200
    assert sum(kind.count * kind.kills for kind in KINDS) >= 50


def test_table_and_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], bench: Bench
) -> None:
    """Records of kinds that are not tried again are kept; a loss is exit code 1."""
    monkeypatch.setattr(faults, "Bench", lambda work: bench)
    lossy = faults.Kind("rows", "loses", lambda bench, rng: Outcome(lost=2, notes=["two, with a comma"]), 3)
    kept = faults.Kind("manifest", "keeps", lambda bench, rng: Outcome(), 2, 1)
    monkeypatch.setattr(faults, "KINDS", (kept, lossy))
    out = tmp_path / "figures"
    for kinds, code in (("manifest", 0), ("rows", 1)):
        monkeypatch.setattr(sys, "argv", ["faults", "--kinds", kinds, "--out", str(out), "--work", str(tmp_path / "w")])
        assert faults.main() == code
    assert "2 kinds" in capsys.readouterr().out
    summary = json.loads((out / "summary.json").read_text())
    assert summary["faults"] == 5
    assert "commit" not in summary  # two runs, perhaps of different code
    assert [(kind["kind"], kind["tried"], kind["lost"]) for kind in summary["kinds"]] == [
        ("manifest", 2, 0),
        ("rows", 3, 6),
    ]
    assert len(pd.read_csv(out / "faults.csv")) == 5


def test_the_same_faults_side_by_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bench: Bench) -> None:
    """In one process and in two; and none begins after the time is over."""
    monkeypatch.setattr(faults, "Bench", lambda work: bench)
    monkeypatch.setenv("PYTHONPATH", "")
    found = []
    for processes, more in (("1", []), ("2", []), ("1", ["--seconds", "0"])):
        out = tmp_path / f"{processes}{len(more)}"
        words = ["--kinds", "cell-flipped,rows", "--share", "0.17", "--processes", processes, "--out", str(out)]
        monkeypatch.setattr(sys, "argv", ["faults", *words, *more])
        assert faults.main() == 0
        found.append(pd.read_csv(out / "faults.csv").drop(columns="seconds"))
    assert len(found[0]) == 3
    pd.testing.assert_frame_equal(found[0], found[1])
    assert found[2].empty
    assert json.loads((out / "summary.json").read_text())["not_begun"] == 3


def test_a_kind_cut_short_does_not_replace_a_whole_one() -> None:
    def records(kind: str, *numbers: int, seconds: float) -> list[faults.Record]:
        return [faults.Record(kind, number, 0, 0, 0, 0, 1, 1, seconds, "") for number in numbers]

    some = [kind for kind in KINDS if kind.name in ("rows", "timings", "manifest")]
    tried = faults.Tried(some, 1.0, [*records("rows", *range(4), seconds=1), *records("timings", *range(3), seconds=1)])
    tried.records += [*records("rows", 1, 0, seconds=2), *records("timings", 0, 2, 1, seconds=2)]
    tried.records += records("manifest", 5, seconds=2)
    found, kinds = tried.all()
    assert [(record.kind, record.trial, record.seconds) for record in found] == [
        ("manifest", 5, 2), *(("timings", number, 2) for number in range(3)),
        *(("rows", number, 1) for number in range(4)),
    ]  # fmt: skip
    assert [kind.name for kind in kinds] == ["manifest", "timings", "rows"]


def test_the_page_is_written_from_the_files_of_a_run(tmp_path: Path) -> None:
    root, run = tmp_path / "root", tmp_path / "run"
    (root / "docs").mkdir(parents=True)
    run.mkdir()
    page = root / "docs" / "reliability.md"
    page.write_text("before\n<!-- measured -->\nold\n<!-- end -->\nafter\n")
    kinds = [
        {
            "kind": "rows",
            "what": "rows gone",
            "tried": 2,
            "sigkills": 1,
            "lost": 1,
            "changed": 0,
            "tracebacks": 0,
            "untidy": 0,
        }
    ]
    summary = {
        "faults": 2, "kinds": kinds, "not_tried": {"disk-full": "mounting needs root"}, "not_begun": 3, "seed": 4,
        "processes": 8, "wall_seconds": 90.0, "date": "2026-01-02", "commit": "0123456789",
        "cores": 6,
    }  # fmt: skip
    (run / "summary.json").write_text(json.dumps(summary))
    (run / "faults.csv").write_text(
        "kind,trial,lost,changed,tracebacks,untidy,notes\nrows,0,1,0,0,0,a|b\nrows,1,0,0,0,0,\n"
    )
    assert fault_page.write_page(run, root) == 0
    text = page.read_text()
    assert text.startswith("before\n<!-- measured -->\n2 faults of 1 kinds, with 1 SIGKILLs")
    assert text.endswith("<!-- end -->\nafter\n")
    for words in (
        "| rows gone (`rows`) | 2 | 1 | 0 | 0 | 0 |", "commit 0123456, seed 4, on 2026-01-02, 8 faults at a time, "
        "90 seconds, on a machine with 6 cores",
        "Not tried: `disk-full`, because mounting needs root.", "3 more faults were not begun",
        "- `rows`, number 0: 1 lost (a/b)",
    ):  # fmt: skip
        assert words in text
    assert "old" not in text
    assert (root / "figures" / "reliability" / "faults.csv").exists()


def test_the_page_states_what_was_measured() -> None:
    """docs/reliability.md against figures/reliability: its sum, and each of its rows."""
    root = Path(faults.__file__).resolve().parents[1]
    page = (root / "docs" / "reliability.md").read_text(encoding="utf-8")
    summary = json.loads((root / "figures" / "reliability" / "summary.json").read_text())
    records = pd.read_csv(root / "figures" / "reliability" / "faults.csv")
    names = ("tried", "lost", "changed", "tracebacks", "untidy")
    total = {name: sum(kind[name] for kind in summary["kinds"]) for name in (*names, "sigkills")}
    assert total["tried"] == summary["faults"] == len(records)
    assert total["lost"] == records.lost.sum()
    assert total["changed"] == records.changed.sum()
    assert f"{total['tried']} faults of {len(summary['kinds'])} kinds, with {total['sigkills']} SIGKILLs" in page
    assert f"{total['lost']} results lost, {total['changed']} changed" in page
    assert "commit" not in summary or f"commit {summary['commit'][:7]}" in page
    for kind in summary["kinds"]:
        assert f"(`{kind['kind']}`) | " + " | ".join(str(kind[name]) for name in names) + " |" in page
