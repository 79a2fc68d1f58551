"""Pages of Parquet files that say more than they may."""

from __future__ import annotations

import io
import random
from pathlib import Path
from typing import Any

import fuzz_inputs as make
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from theory_lab import parquet_pages
from theory_lab.errors import InputError
from theory_lab.noise.empirical import read_scores
from theory_lab.parquet_pages import check_pages

SCORES = pa.table({"score": np.random.default_rng(0).standard_normal(3000)})
MIXED = pa.table({"a": ["x" * 5000, "y", None] * 10, "l": [[1, 2], [], None] * 10, "d": pa.array([{"q": 1.5}] * 30)})


def packed(table: pa.Table, **options: Any) -> bytes:
    sink = io.BytesIO()
    pq.write_table(table, sink, **options)
    return sink.getvalue()


@pytest.mark.parametrize(
    "options",
    [
        {}, {"compression": "none"}, {"compression": "zstd", "row_group_size": 7}, {"use_dictionary": False},
        {"data_page_version": "2.0"}, {"version": "1.0"}, {"write_page_index": True, "write_page_checksum": True},
        {"data_page_size": 64}, {"store_schema": False, "write_statistics": False},
    ],
)  # fmt: skip
def test_files_as_pyarrow_writes_them_pass(options: dict[str, Any], tmp_path: Path) -> None:
    for table in (SCORES, MIXED, SCORES.slice(0, 0), SCORES.slice(0, 1), pa.table({"n": pa.nulls(9, pa.float64())})):
        check_pages(packed(table, **options))
    (tmp_path / "a.parquet").write_bytes(packed(SCORES, **options))
    check_pages(tmp_path / "a.parquet")


@pytest.mark.parametrize("options", [{}, {"use_dictionary": False}, {"data_page_version": "2.0"}])
def test_a_page_that_is_large_when_unpacked_is_refused(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Zeros compress to nothing: the file is a thousandth of what reading it would take."""
    options = {"compression": "zstd", "data_page_size": 1 << 30, **options}
    path = tmp_path / "zeros.parquet"
    values = np.arange(200_000) if "use_dictionary" not in options else np.zeros(200_000)
    path.write_bytes(packed(pa.table({"score": np.concatenate([values, [1.0]])}), **options))
    check_pages(path)
    monkeypatch.setattr(parquet_pages, "MOST_PAGE", 100_000)
    with pytest.raises(InputError, match=r"a page of [\d,]+ bytes, and at most 100,000 are allowed"):
        read_scores(path)


@pytest.mark.parametrize("places", [0, 1, 2])
def test_a_header_among_the_data_that_lies_is_refused(places: int) -> None:
    """Its type, so that its values do not count; its size, unpacked and packed."""
    good = packed(SCORES, use_dictionary=False, compression="none")
    assert good[4:7] == b"\x15\x00\x15"  # PAR1, then: field 1, type 0; field 2, ...
    at = [5, 7, 7 + next(n for n in range(9) if good[7 + n] < 128) + 2][places]
    end = at + next(n for n in range(9) if good[at + n] < 128) + 1
    bad = good[:at] + b"\xfe\xff\xff\xff\x0f" + good[end:]
    with pytest.raises(ValueError, match="a page "):
        check_pages(bad)


def test_damage_is_a_value_error_and_never_anything_else() -> None:
    rng = random.Random(0)
    wholes = [packed(SCORES.slice(0, 40)), packed(MIXED), packed(SCORES.slice(0, 40), data_page_version="2.0")]
    said = []
    for _ in range(600):
        whole = rng.choice(wholes)
        footer = len(whole) - 8 - int.from_bytes(whole[-8:-4], "little")
        tail = whole[footer:-8] if rng.random() < 0.7 else b""
        bad = whole[: -8 - len(tail)] + make.damaged(rng, tail) if tail else make.damaged(rng, whole)
        if tail:
            bad += (len(bad) - footer).to_bytes(4, "little") + b"PAR1"
        try:
            check_pages(bad)
        except ValueError as error:
            said.append(str(error))
    assert len(said) > 100
    assert "\n" not in "".join(said)
    for empty in (b"", b"PAR1", b"PAR1PAR1", b"PAR1" + b"\x00\x01\x00\x00\x00PAR1", b"x" * 100):
        with pytest.raises(ValueError):
            check_pages(empty)
