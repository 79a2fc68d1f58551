"""From experiments to files: cached by content, fresh or stale, whole, the same bits twice."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest
from reproduce_samples import RECORD, SMALL

from theory_lab.errors import InputError, StoreError
from theory_lab.reproduce import cache
from theory_lab.reproduce.code import _shape, code_digest, modules
from theory_lab.reproduce.kinds import DRAWINGS, KINDS
from theory_lab.reproduce.run import reproduce
from theory_lab.reproduce.state import FRESH, NEVER, STALE, drawn, state


def test_end_to_end(make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, said = tmp_path / "out", []
    experiment = make()
    assert state(experiment, out, "results").word == NEVER
    (outcome,) = reproduce([experiment], out, quick=True, workers=1, say=said.append)
    assert not outcome.failure
    assert not outcome.cached
    folder = out / "own"
    assert sorted(p.name for p in folder.iterdir()) == ["small.csv", "small.json", "small.pdf", "small.png"]
    numbers = pd.read_csv(folder / "small.csv")
    assert sorted(numbers.length.unique()) == [2, 8]
    assert "seconds" not in numbers  # nothing that differs between equal runs
    record = json.loads((folder / "small.json").read_text())
    assert record["size"] == "quick"
    assert record["seed"] == 0
    assert record["device"] == "cpu"
    assert state(experiment, out, "results") == state(experiment, out, "results")
    assert state(experiment, out, "results").word == FRESH

    # A second run does nothing; a run elsewhere only draws, to the same bits.
    (again,) = reproduce([experiment], out, quick=True, workers=1)
    assert again.unchanged
    with monkeypatch.context() as patch:
        patch.setattr("theory_lab.reproduce.compute.check.compute", _never)
        (elsewhere,) = reproduce([experiment], tmp_path / "there", quick=True, workers=1)
    assert elsewhere.cached
    for name in record["files"]:
        assert (tmp_path / "there" / "own" / name).read_bytes() == (folder / name).read_bytes(), name

    # Computed from nothing, the bits are still the same.
    monkeypatch.setenv("THEORY_LAB_CACHE", str(tmp_path / "empty"))
    (anew,) = reproduce([experiment], tmp_path / "anew", quick=True, workers=1)
    assert not anew.cached
    for name in record["files"]:
        assert (tmp_path / "anew" / "own" / name).read_bytes() == (folder / name).read_bytes(), name

    # Another caption draws again; another setting computes again.
    (recaptioned,) = reproduce([make(SMALL.replace('"C"', '"Other"'))], out, quick=True, workers=1)
    assert recaptioned.cached
    assert not recaptioned.unchanged
    changed = make(SMALL.replace("length = [2, 8]", "length = [2, 16]"))
    assert state(changed, out, "results").word == STALE
    (recomputed,) = reproduce([changed], out, quick=True, workers=1)
    assert not recomputed.cached


def _never(*_: object) -> None:
    raise AssertionError("computed although the results are known")


def test_provenance_is_inside(make, tmp_path: Path) -> None:
    from PIL import Image

    reproduce([make()], tmp_path, quick=True, formats=["png", "pdf", "svg"], workers=1)
    with Image.open(tmp_path / "own" / "small.png") as picture:
        about = dict(picture.info)
    digest = cache.experiment_hash(make(), "quick")[:16]
    for part in ("own.small", "quick size", digest, "theory-lab", "seed 0", "device cpu"):
        assert part in about["Description"]
    assert "theory-lab" in about["Software"]
    pdf = (tmp_path / "own" / "small.pdf").read_bytes()
    assert digest.encode() in pdf
    assert b"CreationDate" not in pdf
    assert digest in (tmp_path / "own" / "small.svg").read_text()


def test_provenance_names_the_experiment_that_is_drawn(make, tmp_path: Path) -> None:
    """Two experiments with the same settings share their rows, and not their names."""
    reproduce([make()], tmp_path, quick=True, workers=1)
    twin = make(SMALL.replace('"Small"', '"Twin"'), name="twin")
    (outcome,) = reproduce([twin], tmp_path, quick=True, workers=1)
    assert outcome.cached
    assert json.loads((tmp_path / "own" / "twin.json").read_text())["experiment"] == "own.twin"
    assert b"own.twin" in (tmp_path / "own" / "twin.png").read_bytes()


def test_damaged_results_are_computed_again(make, tmp_path: Path) -> None:
    experiment = make()
    digest = cache.results_digest(experiment, "quick")
    reproduce([experiment], tmp_path / "a", quick=True, workers=1)
    path = cache.cache_folder() / f"{digest}.parquet"
    path.write_bytes(path.read_bytes()[:100])
    (outcome,) = reproduce([experiment], tmp_path / "b", quick=True, workers=1)
    assert not outcome.cached
    assert not outcome.failure
    # Rows that belong to something else are not taken either.
    other = make(SMALL.replace("seed = 0\n", "").replace('kind = "check"', 'kind = "check"\nseed = 5'))
    path.rename(cache.cache_folder() / f"{cache.results_digest(other, 'quick')}.parquet")
    assert cache.load(cache.results_digest(other, "quick")) is None


def test_interrupted_work_is_kept(make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in the middle: finished cells stay, and the next run does only the rest, to the same rows."""
    from theory_lab.runner import Runner

    experiment = make()
    whole = Runner.fixed

    def stop(self: Runner, engine: object) -> None:
        whole(self, engine)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Runner, "fixed", stop)
        with pytest.raises(KeyboardInterrupt):
            reproduce([experiment], tmp_path, quick=True, workers=1)
    partial = cache.partial_folder(cache.results_digest(experiment, "quick"))
    assert len(list((partial / "cells").glob("*.parquet"))) > 0
    assert drawn(tmp_path, experiment) is None
    (outcome,) = reproduce([experiment], tmp_path, quick=True, workers=1)
    assert not outcome.failure
    assert not partial.exists()


@pytest.mark.parametrize(
    ("old", "new", "key"),
    [
        ('"tda-4.3"', '"tda-43"', "settings.claims"),
        ('"gaussian", "two-point"', '"gauss"', "settings.noise"),
        ("trials = 1000", "trials = 0", "settings.trials"),
    ],
)
def test_values_that_cannot_be_used(make, tmp_path: Path, old: str, new: str, key: str) -> None:
    """Found when the experiment runs, and still with the file, the line and the key; the others go on."""
    good = make(name="good")
    bad = make(SMALL.replace(old, new), name="bad")
    first, second = reproduce([bad, good], tmp_path / "out", quick=True, workers=1)
    assert first.failure.startswith("bad.toml, line ")
    assert f"key '{key}'" in first.failure
    assert not (tmp_path / "out" / "own" / "bad.png").exists()
    assert not second.failure


def test_where_nothing_can_be_written(make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(InputError, match="out"):
        reproduce([make()], file / "under", quick=True)
    with pytest.raises(InputError, match="format: gif"):
        reproduce([make()], tmp_path, formats=["gif"])

    def full(*_: object, **__: object) -> None:
        raise StoreError("out: the disk is full")

    monkeypatch.setattr("theory_lab.figures.style.save", full)
    (outcome,) = reproduce([make()], tmp_path / "full", quick=True, workers=1)
    assert "full" in outcome.failure
    assert drawn(tmp_path / "full", make()) is None  # nothing counts as drawn
    assert cache.has(cache.results_digest(make(), "quick"))  # and nothing computed is lost


def test_results_of_trained_models(make, tmp_path: Path) -> None:
    """Numbers that appear in the data folder fill a table in; numbers that change make it stale."""
    from theory_lab.reproduce import tables

    experiment = make(RECORD, "losses")
    data = tmp_path / "results"
    (lacking,) = reproduce([experiment], tmp_path / "out", data=str(data))
    assert lacking.lacking is not None
    assert "losses.csv" in lacking.lacking.why
    assert state(experiment, tmp_path / "out", str(data)).word == "needs data"
    (data / "own").mkdir(parents=True)
    file = data / "own" / "losses.csv"
    file.write_text(
        "row,column,value,low,high,text\nA_b,loss,3.2,3.1,3.3,\nA_b,good,41,,,\nA_b,finite,,,,no\nD,loss,3,,,\n"
    )
    (outcome,) = reproduce([experiment], tmp_path / "out", data=str(data))
    assert not outcome.failure
    text = (tmp_path / "out" / "own" / "losses.md").read_text()
    paper, ours, difference = text.split("## ")[1:]
    assert "3.1190" in paper
    assert "3.2" not in paper
    assert "3.2000 [3.1000, 3.3000]" in ours
    assert "3.1190" not in ours
    # 3.2 - 3.1190, with the interval and the rounding of the last printed digit.
    assert "+0.0810 [−0.0191, 0.1810]" in difference
    assert "+1 [0, 2]" in difference.replace("−0", "0")
    assert "disagrees" in difference
    frame = tables.compare(experiment, pd.read_csv(file))
    assert list(frame.row) == ["A_b"] * 3 + ["C"] * 3 + ["D"]
    latex = (tmp_path / "out" / "own" / "losses.tex").read_text()
    assert r"A\_b" in latex
    assert r"(\%)" in latex
    assert latex.count(r"\begin{tabular}") == latex.count(r"\end{tabular}") == 3
    assert state(experiment, tmp_path / "out", str(data)).word == FRESH
    file.write_text(file.read_text().replace("3.2,", "3.25,"))
    assert state(experiment, tmp_path / "out", str(data)).word == STALE


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "columns needed: row, column, value"),
        ("row,column\na,b\n", "columns needed: value"),
        ("row,column,value\n", "no rows"),
        ("row,column,value\na,b,high\n", "line 2, column 'value': high; a finite number"),
        ("row,column,value\na,b,nan\n", "line 2, column 'value'"),
        ("row,column,value\na,,1\n", "line 2, column 'column': empty"),
        ("row,column,value,low,high\na,b,1,2,3\n", "an interval around 1"),
        ("# seed: 1\nrow,column,value\na,b,1\na,c,2\na,b,3\n", "line 5: a b; row, column of line 3 again"),
        ("# seed: 1\nrow,column\n", "line 2: row, column; columns needed: value"),
    ],
)
def test_bad_results(make, tmp_path: Path, text: str, words: str) -> None:
    experiment = make(RECORD, "losses")
    (tmp_path / "results" / "own").mkdir(parents=True)
    (tmp_path / "results" / "own" / "losses.csv").write_text(text)
    (outcome,) = reproduce([experiment], tmp_path / "out", data=str(tmp_path / "results"))
    assert words in outcome.failure


def test_results_say_where_they_come_from(make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers that ship beside the experiments are found anywhere; the user's own go first."""
    monkeypatch.setattr("theory_lab.audit.experiments_dir", lambda: tmp_path / "experiments")
    shipped, own = tmp_path / "experiments" / "own" / "measured", tmp_path / "results" / "own"
    for folder, device in ((shipped, "NVIDIA H200"), (own, "my own")):
        folder.mkdir(parents=True)
        (folder / "losses.csv").write_text(f"# device: {device}\n# seed: 3, 4\n#\nrow,column,value\nC,loss,3\n")
    for data, device in (("elsewhere", "NVIDIA H200"), (str(tmp_path / "results"), "my own")):
        (outcome,) = reproduce([make(RECORD, "losses")], tmp_path / "out", data=data)
        assert not outcome.failure
        assert f"seed 3, 4, device {device}" in (tmp_path / "out" / "own" / "losses.md").read_text()


def test_wide_tables_keep_within_the_page(make, tmp_path: Path) -> None:
    """By their own reckoning, and by LaTeX's where it is installed."""
    import shutil
    import subprocess

    from theory_lab.reproduce import latex

    names = [f"ARC-Challenge {k}, normalized" for k in range(13)]
    columns = ", ".join(f'{{ name = "{name}" }}' for name in names)
    cells = ", ".join(["'3.1190'"] * 13)
    rows = "\n".join(f'"Gated Softmax {k}" = [{cells}]' for k in range(20))
    text = RECORD[: RECORD.index("columns =")] + f"columns = [{columns}]\n\n[paper.rows]\n{rows}\n"
    lines = [f'Gated Softmax {k},"{name}",3.2,3.1,3.3' for k in range(20) for name in names]
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "losses.csv").write_text("row,column,value,low,high\n" + "\n".join(lines) + "\n")
    (outcome,) = reproduce([make(text, "losses")], tmp_path / "out", data=str(tmp_path))
    assert not outcome.failure
    written = (tmp_path / "out" / "own" / "losses.tex").read_text()
    assert written.count("3.2000 [3.1000, 3.3000]") == 20 * 13  # every cell once
    assert written.count(r"\begin{table}") == written.count(r"\caption") == written.count(r"\addtocounter") + 1
    block = (["", *names], [["Gated Softmax 1", *["3.2000 [3.1000, 3.3000]"] * 13]])
    found = latex.groups(block, "footnotesize")
    assert [column for group in found for column in group] == list(range(1, 14))
    assert max(map(len, found)) == 3
    if shutil.which("pdflatex") is not None:
        page = "\\documentclass{article}\n\\begin{document}\n" + written + "\\end{document}\n"
        (tmp_path / "page.tex").write_text(page)
        ran = subprocess.run(
            ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "-no-shell-escape", "page.tex"],
            cwd=tmp_path, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert ran.returncode == 0, ran.stdout[-2000:]
        assert "Overfull" not in ran.stdout
        assert "Float too large" not in ran.stdout


COSTS = """\
title = "T"
source = "S"
caption = "C"
kind = "costs"

[settings]
dtype = "bfloat16"
heads = 2
bytes = 2

[draw]
as = "curves"
"""


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("", "", ""),
        ("probed_s", "seconds", "line 1: device, dtype, weights, length, plain_s, seconds"),
        ("0.25", "-1", "line 2, column 'probed_s': -1; a positive number"),
        ("bfloat16", "float32", "key 'settings.dtype': bfloat16; no row of the file"),
        ("GPU,float32", "CPU,float32", "column 'device': CPU, GPU; one device"),
    ],
)
def test_costs_of_a_probe(make, tmp_path: Path, old: str, new: str, words: str) -> None:
    """Rows of benchmarks/probe.py as curves; what cannot be used is named."""
    text = "device,dtype,weights,length,plain_s,probed_s,ratio,ratio_low,ratio_high,plain_peak_gb,probed_peak_gb\n"
    text += "GPU,bfloat16,model,64,0.125,0.25,2,1.9,2.5,1,1.5\nGPU,float32,tda:views=siblings,64,1,2,2,2,2,1,1\n"
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "costs.csv").write_text(text.replace(old, new) if old else text)
    (outcome,) = reproduce([make(COSTS, "costs")], tmp_path / "out", data=str(tmp_path), formats=["svg"])
    if words:
        assert words in outcome.failure
        return
    assert not outcome.failure
    rows = pd.read_csv(tmp_path / "out" / "own" / "costs.csv").set_index(["panel", "series"]).value
    assert rows["seconds", "probed"] == 0.25
    assert rows["peak memory, GB", "all maps, if held"] == 2 * 64 * 64 * 2 / 1e9
    assert rows["probed over plain", "own weights"] == 2
    assert json.loads((tmp_path / "out" / "own" / "costs.json").read_text())["device"] == "GPU"


def test_results_that_are_no_text(make, tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "losses.csv").write_bytes(b"row,column,value\n\xff\xfe,b,1\n")
    (outcome,) = reproduce([make(RECORD, "losses")], tmp_path / "out", data=str(tmp_path))
    assert "losses.csv: not UTF-8 text" in outcome.failure


def test_a_folder_that_takes_no_files_is_said_first(make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not after minutes of computing."""
    monkeypatch.setattr("theory_lab.reproduce.compute.check.compute", _never)
    with pytest.raises(InputError, match="a folder that can be written"):
        reproduce([make()], Path("/proc/self"), quick=True, workers=1)


def test_code_digests(tmp_path: Path) -> None:
    """Comments and docstrings do not count; code does, and so does code that is imported."""
    import ast

    one = ast.parse('"""A."""\n\ndef f(x):\n    """B."""\n    return x + 1  # why\n')
    two = ast.parse('"""C."""\ndef f(x):\n\n    return (x + 1)\n')
    three = ast.parse("def f(x):\n    return x + 2\n")
    assert _shape(one) == _shape(two) != _shape(three)
    assert code_digest(["theory_lab.phase"]) == code_digest(["theory_lab.phase", "theory_lab.streams"])
    assert code_digest(["theory_lab.phase"]) != code_digest(["theory_lab.streams"])
    assert code_digest(["theory_lab.nothing"]) != code_digest([])
    # What a computation is told by, or shown by, is no part of it.
    for kind in KINDS.values():
        reached = modules(kind.modules({"claims": ("tda-4.3",)}))
        assert "theory_lab.reproduce.run" not in reached
        assert not any(name.startswith("theory_lab.figures") for name in reached), kind.name
    assert "theory_lab.noise.continuous" in modules(KINDS["check"].modules({"claims": ("tda-4.3",)}))
    assert "theory_lab.studies.eta" not in modules(KINDS["check"].modules({"claims": ("tda-4.3",)}))


@pytest.mark.parametrize("name", list(KINDS))
def test_kinds_have_what_they_name(name: str) -> None:
    kind = KINDS[name]
    assert callable(kind.load())
    assert set(kind.required) <= set(kind.fields)
    assert set(kind.drawings) <= set(DRAWINGS)
    settings = {"claims": ("tda-4.3",), "mechanisms": ("softmax",)}
    from theory_lab.reproduce.code import _path

    for module in kind.modules(settings):
        assert _path(module) is not None, module


@pytest.mark.parametrize("name", list(DRAWINGS))
def test_drawings_have_what_they_name(name: str) -> None:
    assert callable(DRAWINGS[name].load())
