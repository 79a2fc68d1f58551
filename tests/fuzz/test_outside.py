"""Properties of what makes texts and files from outside harmless."""

from __future__ import annotations

import csv
import io
import json
import re
import time
import unicodedata
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from fuzz_files import is_formula
from hypothesis import given, settings
from hypothesis import strategies as st

from theory_lab import render
from theory_lab.campaigns.plan import slug
from theory_lab.errors import InputError, StoreError
from theory_lab.models.checks import check_folder, check_tokenizer
from theory_lab.models.headers import read_safetensors
from theory_lab.outside import (
    MOST_NESTED,
    MOST_TOML,
    defused,
    defused_frame,
    defused_line,
    foreign,
    one_line,
    parse_json,
    parse_toml,
    read_npy,
    reason,
    undefused,
    visible,
)
from theory_lab.reproduce.document import Document
from theory_lab.store import export
from theory_lab.training.logs import Table

#: Halves of pairs included, which Python's file names hold.
ANY = st.text(st.characters(), max_size=40)
NASTY = st.one_of(ANY, st.text("=+-@'\t\r\n＝＋－＠ 1.5eExnaif", max_size=8))


@given(NASTY)
def test_what_is_defused_can_be_had_again(text: str) -> None:
    assert undefused(defused(text)) == text.replace("\r\n", "\n").replace("\r", "\n")
    assert "\r" not in defused(text)
    assert not is_formula(defused(text))


@settings(max_examples=40)
@given(st.lists(NASTY, min_size=1, max_size=4))
def test_a_csv_file_of_any_texts_has_no_formula_and_loses_nothing(texts: list[str]) -> None:
    texts = [text.encode("utf-8", "replace").decode() for text in texts]
    plain = [text.replace("\r\n", "\n").replace("\r", "\n") for text in texts]
    written = defused_frame(pd.DataFrame({"=name": texts, "n": range(len(texts))})).to_csv(index=False)
    rows = list(csv.reader(io.StringIO(written, newline="")))
    assert not any(is_formula(cell) for row in rows for cell in row)
    assert [undefused(row[0]) for row in rows[1:]] == plain
    assert undefused(rows[0][0]) == "=name"


@given(NASTY)
def test_a_line_above_the_rows_is_no_formula_in_any_cell(text: str) -> None:
    for whole in (text, f"a,{text}", f'a; "{text}"', f"a,,{text},=1"):
        line = f"# note: {defused_line(whole)}"
        assert "\n" not in line
        assert not any(is_formula(cell.strip(' "')) for cell in re.split("[,;]", line)), line


def test_every_csv_writer_guards_texts_and_leaves_numbers(tmp_path: Path) -> None:
    hostile = ["=1+1", "+1+1", "-1+2", "@SUM(A1)", "\tx", "\r=1", "plain"]
    frame = pd.DataFrame(
        {"name": hostile, "=c": [-1.5, 2.0, -3, 4, 5, 6, 7], "mixed": ["=x", -2, 3.5, "-", "-7", None, ""]}
    )
    log = Table(tmp_path / "log.csv", ("step", "note"))
    (tmp_path / "log.csv").write_text('step,note\n1,=1+1\n2,-1.5\n"3","@SUM(A1)"\n', encoding="utf-8")
    log.begin(5)
    written = [render.to_csv(frame), export.to_csv(frame), (tmp_path / "log.csv").read_text(encoding="utf-8")]
    for text in written:
        cells = [cell for row in csv.reader(io.StringIO(text, newline="")) for cell in row]
        assert not any(is_formula(cell) for cell in cells)
        assert "'=1+1" in cells
        assert "-1.5" in cells
    for text in written[:2]:
        read = pd.read_csv(io.StringIO(text), dtype={"mixed": str}, keep_default_na=False)
        assert read["'=c"].tolist() == frame["=c"].tolist()
        assert read["mixed"].tolist() == ["'=x", "-2", "3.5", "-", "-7", "", ""]


@given(ANY, ANY, ANY)
def test_an_error_is_one_plain_line(field: str, value: str, allowed: str) -> None:
    for error in (InputError(field, value, allowed), StoreError(f"{field} {value}")):
        line = str(error)
        assert not {unicodedata.category(c) for c in line} & {"Cc", "Cf", "Cs", "Zl", "Zp"}
        assert visible(line) == line == one_line(line)
    assert len(str(InputError(field * 100, value * 1000, allowed * 1000))) < 2000


def test_an_error_about_anything_can_be_shown() -> None:
    deep: list[object] = []
    deep.append(deep)
    assert "a value of type int" in str(InputError("n", 10**5000, "less"))
    assert str(InputError("n", deep, "less"))


@given(st.text(max_size=30).filter(slug))  # a plan with a name that leaves nothing is refused
def test_a_folder_of_a_run_lies_inside(name: str) -> None:
    inside = (Path("/results") / f"{slug(name)}/seed-0").resolve()
    assert inside.is_relative_to("/results")


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, "nan nan", "", "\ud800", b"\xff"])
def test_json_that_is_none_is_a_value_error(text: str | bytes) -> None:
    with pytest.raises(ValueError):
        parse_json(text)


@pytest.mark.parametrize("pair", ["[]", '{"a":}'])
def test_nesting_is_bounded_whatever_the_reader_bears(pair: str, tmp_path: Path) -> None:
    """Python 3.12's reader takes thousands of levels, and what walks through them later a thousand at most."""
    cut = len(pair) - 1
    deep = {levels: pair[:cut] * levels + "0" + pair[cut:] * levels for levels in (MOST_NESTED, MOST_NESTED + 1)}
    parse_json(deep[MOST_NESTED])
    parse_json(f"[{'[],' * 1000}0]")
    for raw in (deep[MOST_NESTED + 1], deep[MOST_NESTED + 1].encode()):
        with pytest.raises(ValueError, match="nested too deep"):
            parse_json(raw)
    with pytest.raises(ValueError, match="nested too deep"):
        parse_toml("x = " + "[" * (MOST_NESTED + 1) + "]" * (MOST_NESTED + 1))
    (tmp_path / "config.json").write_text(f'{{"x": {deep[MOST_NESTED]}}}', encoding="utf-8")
    with pytest.raises(InputError, match=r"its config\.json cannot be read \(nested too deep\)"):
        check_folder(tmp_path)
    header = f'{{"a": {deep[MOST_NESTED]}}}'.encode()
    (tmp_path / "a.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(InputError, match=r"its header is no JSON object of tensors \(nested too deep\)"):
        read_safetensors(tmp_path / "a.safetensors")


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("tokenizer.json", {"model": {"vocab": {"a": 0, "b": 1 << 31}}}, "numbers the token 'b' 2147483648"),
        ("tokenizer.json", {"added_tokens": [{"id": 1 << 32, "content": "c"}]}, "numbers the token 'c' 4294967296"),
        ("tokenizer.json", {"padding": {"strategy": {"Fixed": 1 << 40}}}, "pads with Fixed = 1099511627776"),
        ("tokenizer.json", {"padding": {"pad_to_multiple_of": 1 << 40}}, "pads with pad_to_multiple_of = 10995"),
        ("tokenizer_config.json", {"added_tokens_decoder": {"3000000000": {}}}, "numbers the token '3000000000'"),
        ("vocab.json", {"d": 10**400}, "numbers the token 'd' 1000"),
        ("added_tokens.json", {"e": 1 << 31}, "numbers the token 'e' 2147483648"),
    ],
)  # fmt: skip
def test_a_tokenizer_counts_to_what_vocabularies_have(
    name: str, content: dict[str, object], why: str, tmp_path: Path
) -> None:
    """Readers count through all numbers up to the largest, and fill up texts: 20 seconds, or all memory."""
    (tmp_path / name).write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(InputError, match=why):
        check_tokenizer(tmp_path)
    for harmless in (
        {"model": {"vocab": [["a", -1.5]]}, "padding": "x", "added_tokens": {"a": 1}},
        {"a": 300_000},
    ):
        (tmp_path / name).write_text(json.dumps(harmless), encoding="utf-8")
        check_tokenizer(tmp_path)


def test_a_reason_is_more_than_a_heading() -> None:
    assert reason(ValueError("Value of 'heads':\n  3 of 32\nmore")) == "ValueError: Value of 'heads': 3 of 32"
    assert reason(ValueError("first\nsecond")) == "ValueError: first"
    assert reason(ValueError("\n")) == "ValueError"


_DEEP, _LINES = ".".join(["a"] * 5000), "".join(f"b{i}=1\n" for i in range(50_000))


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (f"[{_DEEP}]\n{_LINES}", "line 1: keys of at most 32 parts"),  # the decoder alone: a minute
        (f"x = '''\n'{_DEEP}'''\n# {_DEEP}\n{_DEEP}=1", "line 4: keys of at most 32 parts"),
        ("x." + '\'a\' . "\\"" . a-b.' * 11 + "c=1", "line 1: keys of at most 32 parts"),
        ("x = 1\n" * MOST_TOML, "at most 512 KiB"),
        (f"x = {'[' * 5000}", "nested too deep"),
        (f"x = {'1' * 5000}", "4300 digits"),
        ('y = "' + '\\"' * 200_000 + ". " * 40, "Unterminated"),
    ],
    ids=["table", "key", "quoted", "size", "lists", "digits", "string"],
)
def test_toml_is_refused_within_seconds(text: str, why: str) -> None:
    began = time.process_time()
    with pytest.raises(ValueError, match=why):
        parse_toml(text)
    assert time.process_time() - began < 2


def test_toml_that_is_only_large_is_read_and_its_lines_found(tmp_path: Path) -> None:
    """The decoder's worst within the bounds; dots that part no key count for nothing."""
    dots = f"dots = [\"{_DEEP}\", '{_DEEP}', 1.5, {'0.1, ' * 100}]  # {_DEEP}\nmore = '''\n{_DEEP}'''\n"
    table = ".".join(["a"] * 31) + ".b"
    path = tmp_path / "large.toml"
    path.write_text(f"{dots}[{table}]\n" + "".join(f"{table}{i}=1\n" for i in range(2000)), encoding="utf-8")
    began = time.process_time()
    document = Document.read(path, "large.toml")
    assert document.line(("more",)) == 2
    assert time.process_time() - began < 4


@settings(max_examples=30)
@given(st.sampled_from(["<f8", "<f4", ">i4", "|u1"]), st.lists(st.integers(0, 4), max_size=3), st.integers(0, 40))
def test_an_array_is_read_as_numpy_wrote_it_and_not_if_it_is_cut(kind: str, shape: list[int], cut: int) -> None:
    import tempfile

    array = np.arange(int(np.prod(shape))).reshape(shape).astype(kind)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "a.npy")
        np.save(path, array)
        np.testing.assert_array_equal(read_npy(path, 1000), array)
        if array.size:
            path.write_bytes(path.read_bytes()[: -min(max(cut, 1), array.nbytes)])
            with pytest.raises(ValueError):
                read_npy(path, 1000)
            with pytest.raises(ValueError, match="at most 0"):
                read_npy(path, 0)


def test_a_library_panics_in_one_line_and_an_interruption_passes() -> None:
    panic = type("PanicException", (BaseException,), {})
    with pytest.raises(InputError, match="PanicException: index"), foreign(lambda why: InputError("x", why, "y")):
        raise panic("index\nout of bounds")
    for kind in (KeyboardInterrupt, MemoryError, InputError):
        error = InputError("a", "b", "c") if kind is InputError else kind()
        with pytest.raises(kind), foreign(lambda why: StoreError(why)):
            raise error


def test_a_model_may_not_be_larger_than_its_files(tmp_path: Path) -> None:
    """A library would fill up with random numbers what the files lack, and allocate them first."""
    import torch

    from theory_lab.models.checks import check_announced, check_built
    from theory_lab.models.headers import Header, Tensor

    few = Header((Tensor("a", (1000,), 0, 4000),))
    check_built(tmp_path, lambda: torch.nn.Linear(1000, 1000), few)
    with pytest.raises(InputError, match=r"a model of 10,000,100,000 numbers, and its files hold 1,000"):
        check_built(tmp_path, lambda: torch.nn.Linear(100_000, 100_000), few)
    check_announced(tmp_path, {"num_hidden_layers": 30, "vocab_size": 250_880, "max_position_embeddings": 1 << 20}, few)
    for key in ("num_hidden_layers", "n_layer", "llama.block_count", "num_labels", "num_local_experts"):
        with pytest.raises(InputError, match=key):
            check_announced(tmp_path, {"text_config": {key: 10**6}}, few)
