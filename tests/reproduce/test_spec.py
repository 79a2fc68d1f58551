"""Reading experiments: what is wrong with a file is one line that names the file, the line and the key."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from theory_lab.audit import experiments_dir
from theory_lab.errors import InputError
from theory_lab.reproduce import Experiment, experiments, load, select
from theory_lab.reproduce.document import Document
from theory_lab.reproduce.kinds import DRAWINGS, KINDS

GOOD = """\
# a comment
title = "T"
source = "S"
caption = \"\"\"\\
two \\
lines\"\"\"
kind = "check"

[settings]
claims = ["tda-4.3"]
length = [2,
  8]

[quick]
trials = 10

[draw]
as = "bounds"
"""


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    return path


def read(tmp_path: Path, text: str) -> Experiment:
    return load(written(tmp_path, text), "own", "mine.toml")


def test_good(tmp_path: Path) -> None:
    made = read(tmp_path, GOOD)
    assert made.id == "own.mine"
    assert made.caption == "two lines"
    assert made.at("full") == {"claims": ("tda-4.3",), "length": (2, 8)}
    assert made.at("quick")["trials"] == 10
    assert made.seed == 0


@pytest.mark.parametrize(
    ("old", "new", "line", "key", "words"),
    [
        ("length =", "lenght =", 11, "settings.lenght", "did you mean 'length'"),
        ('title = "T"', 'title = "T"\ncolour = 1', 3, "colour", "unknown key"),
        ("trials = 10", 'trials = "10"', 15, "quick.trials", "a whole number is needed"),
        ("trials = 10", "trials = true", 15, "quick.trials", "a whole number is needed"),
        ("length = [2,\n  8]", "length = []", 11, "settings.length", "an empty grid"),
        ("length = [2,\n  8]", 'length = "2:"', 11, "settings.length", "ranges"),
        ("length = [2,\n  8]", "length = [2.5]", 11, "settings.length", "a whole number"),
        ("length = [2,\n  8]", "length = [2, 2]", 11, "settings.length", "every value once"),
        ('claims = ["tda-4.3"]', "claims = []", 10, "settings.claims", "an empty grid"),
        ('claims = ["tda-4.3"]', "claims = [4.3]", 10, "settings.claims", "in quotes"),
        ('claims = ["tda-4.3"]', 'noise = "gaussian"', 9, "settings.claims", "missing"),
        ('kind = "check"', 'kind = "chek"', 7, "kind", "did you mean 'check'"),
        ('as = "bounds"', 'as = "phase"', 18, "draw.as", "known: bounds, ratio"),
        ('as = "bounds"', 'as = "bounds"\nwidth = "wide"', 19, "draw.width", "single, double"),
        ('as = "bounds"', 'as = "bounds"\nheight = "tall"', 19, "draw.height", "a finite number"),
        ('as = "bounds"', 'as = "bounds"\nheight = -3', 19, "draw.height", "0.5 to 20 inches"),
        ('as = "bounds"', 'as = "bounds"\nheight = 1e9', 19, "draw.height", "0.5 to 20 inches"),
        ('kind = "check"', 'kind = "check"\nseed = -1', 8, "seed", "2^63"),
        ('caption = """\\\ntwo \\\nlines"""', 'caption = ""', 4, "caption", "not empty"),
        ("[settings]\n", "[settings]\n# why\n\n", 12, "settings.claims", "in quotes"),
    ],
)
def test_bad(tmp_path: Path, old: str, new: str, line: int, key: str, words: str) -> None:
    text = GOOD.replace(old, new)
    if "# why" in new:
        text = text.replace('["tda-4.3"]', "[1]")
    with pytest.raises(InputError) as caught:
        read(tmp_path, text)
    message = str(caught.value)
    assert message.startswith(f"mine.toml, line {line}, key '{key}': ")
    assert words in message
    assert "\n" not in message


def test_not_toml(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"mine\.toml, line 2, column \d+: not valid TOML"):
        read(tmp_path, "# fine\ntitle = = 3\n")


def test_unreadable(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"none\.toml.*cannot be read"):
        select([str(tmp_path / "none.toml")])
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="not UTF-8"):
        select([str(tmp_path / "bytes.toml")])


@pytest.mark.parametrize(
    ("paper", "key"),
    [
        ('source = "x"\ncolumns = []\n[paper.rows]\na = ["1"]', "paper.columns"),
        ('source = "x"\ncolumns = [{ name = "c" }]\n[paper.rows]\na = [1]', "paper.rows.a"),
        ('source = "x"\ncolumns = [{ name = "c" }]\n[paper.rows]\na = ["1", "2"]', "paper.rows.a"),
        ('source = "x"\ncolumns = [{ name = "c" }]\n[paper.rows]\na = ["1..2"]', "paper.rows.a"),
        ('source = "x"\ncolumns = [{ name = "c", units = "%" }]\n[paper.rows]\na = ["1"]', "paper.columns"),
        ('source = "x"\ncolumns = [{ name = "c" }]\n[paper.rows]\n', "paper.rows"),
    ],
)
def test_bad_printed(tmp_path: Path, paper: str, key: str) -> None:
    with pytest.raises(InputError, match=rf"line \d+, key '{key}'"):
        read(tmp_path, GOOD + "\n[paper]\n" + paper)


def test_lines_of_multi_line_statements() -> None:
    text = 'a = [\n  1,\n]\n\n# why\nb = """\nx = 1\n"""\n[t]\nc = 1\n[t.u]\nd = { e = 1 }\n'
    document = Document(text, "f", tomllib.loads(text))
    places = {("a",): 1, ("b",): 6, ("t",): 9, ("t", "c"): 10, ("t", "u", "d"): 12, ("t", "u", "d", "e"): 12}
    assert {key: document.line(key) for key in places} == places
    assert document.line(("t", "nothing")) == 9
    assert document.line(("nothing",)) == 1


def test_shipped() -> None:
    """Everything that ships reads, and the list of the papers' figures and tables is complete."""
    known = experiments()
    listed = {
        "tda.figure-survivors", "tda.figure-dispersion", "tda.figure-sparsity", "tda.figure-maxima",
        "tda.figure-sinks", "tda.figure-inhibition", "tda.figure-passkey", "tda.table-1", "tda.table-2",
        "tda.table-3", "tda.table-4", "tda.table-5", "tda.table-6a", "tda.table-6b", "asentmax.figure-dispersion",
        "asentmax.figure-nonvanishing", "asentmax.table-recall", "asentmax.table-ablation",
        "asentmax.figure-temperatures", "eta.figure-density", "eta.figure-decode-speed", "eta.table-calibration",
        "ours.slack", "ours.sharp-threshold", "ours.independence-horizon", "ours.phase", "ours.kernel-speed",
        "ours.real-tails",
    }  # fmt: skip
    assert listed <= set(known)
    assert {e.kind.name for e in known.values()} == set(KINDS)
    assert {e.draw for e in known.values()} == set(DRAWINGS)
    assert [e.folder for e in known.values()] == sorted(
        (e.folder for e in known.values()), key=["tda", "asentmax", "eta", "ours"].index
    )


def test_printed_values_are_those_of_the_audit() -> None:
    """The papers' values stand in two files, for the audit and for the tables: they must not drift apart."""
    pairs = {
        "tda.table-1": "features", "tda.table-2": "lm", "tda.table-3": "scrolls", "tda.table-4": "needles",
        "tda.table-5": "kernel", "tda.table-6a": "power", "tda.table-6b": "beta", "asentmax.table-recall": "recall",
        "asentmax.table-ablation": "ablation",
    }  # fmt: skip
    known = experiments()
    for name, table in pairs.items():
        folder = known[name].folder
        data = tomllib.loads((experiments_dir() / folder / "tables.toml").read_text(encoding="utf-8"))
        audit = next(t for t in data["table"] if t["id"] == table)
        columns = [c["name"] for c in audit["columns"]]
        printed = known[name].printed
        assert printed is not None
        assert {row: [cells[c] for c in columns] for row, cells in printed.rows.items()} == audit["rows"], name


def test_select() -> None:
    known = experiments()
    assert [e.id for e in select(["all"])] == list(known)
    assert {e.folder for e in select(["eta"])} == {"eta"}
    assert [e.id for e in select(["ours.slack", "ours.slack"])] == ["ours.slack"]
    shipped = experiments_dir() / "ours" / "slack.toml"
    assert [e.id for e in select([str(shipped)])] == ["ours.slack"]
    with pytest.raises(InputError, match=r"did you mean 'ours\.slack'"):
        select(["ours.slak"])


def test_a_copied_file_is_ones_own(tmp_path: Path) -> None:
    copy = tmp_path / "slack.toml"
    copy.write_text((experiments_dir() / "ours" / "slack.toml").read_text(encoding="utf-8"))
    assert [e.id for e in select([str(copy)])] == ["own.slack"]
