"""Scores from files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from theory_lab.errors import InputError
from theory_lab.noise import Scale, get_family
from theory_lab.noise.empirical import Empirical, bootstrap_proxy, empirical_proxy, read_scores


@pytest.fixture
def scores() -> np.ndarray:
    return np.random.Generator(np.random.Philox(key=5)).normal(0.02, 0.125, 4000)


@pytest.mark.parametrize("suffix", ["npy", "csv", "csv-with-header", "parquet"])
def test_formats_agree(tmp_path: Path, scores: np.ndarray, suffix: str) -> None:
    path = tmp_path / f"s.{suffix.split('-')[0]}"
    if suffix == "npy":
        np.save(path, scores)
    elif suffix == "parquet":
        pd.DataFrame({"score": scores, "layer": 1}).to_parquet(path)
    else:
        pd.Series(scores, name="score").to_csv(path, index=False, header="header" in suffix)
    np.testing.assert_array_equal(read_scores(path), scores)


def test_scaled_law_is_centered_with_the_proxy(tmp_path: Path, scores: np.ndarray) -> None:
    np.save(tmp_path / "s.npy", scores)
    law = Empirical(str(tmp_path / "s.npy")).scaled(Scale(1 / 64, 64))
    assert law.probabilities @ law.atoms == pytest.approx(0, abs=1e-14)
    assert empirical_proxy(law.atoms, law.probabilities) == pytest.approx(1 / 64, rel=1e-6)


def test_raw_law_is_the_file(tmp_path: Path) -> None:
    np.save(tmp_path / "s.npy", np.array([3.0, 1.0, 1.0, -2.0]))
    law = Empirical(str(tmp_path / "s.npy"), raw=True).scaled(Scale(1 / 64, 64))
    np.testing.assert_array_equal(law.atoms, [-2, 1, 3])
    np.testing.assert_allclose(law.sf(np.array([-3.0, -2.0, 0.0, 1.0, 3.0])), [1, 0.75, 0.75, 0.25, 0])
    np.testing.assert_array_equal(law.isf(np.array([0.9, 0.6, 0.3, 0.1])), [-2, 1, 1, 3])


def test_proxy_of_known_laws() -> None:
    assert empirical_proxy(np.array([-1.0, 1.0])) == pytest.approx(1.0, rel=1e-6)
    # Kearns and Saul: atoms 1-p and -p, p = 0.1.
    skewed = np.array([0.9] + [-0.1] * 9)
    assert empirical_proxy(skewed) == pytest.approx(0.8 / (2 * np.log(9)), rel=1e-6)
    assert empirical_proxy(-skewed) == pytest.approx(empirical_proxy(skewed), rel=1e-6)


def test_bootstrap_interval_covers_normals() -> None:
    """The proxy of a normal is its variance; a percentile interval must be near it and contain the estimate."""
    x = np.random.Generator(np.random.Philox(key=6)).normal(0, 1, 3000)
    found = bootstrap_proxy(x)
    assert found.ci_low <= found.value <= found.ci_high
    assert found.ci_low < 1.1
    assert found.ci_high > 0.95


def test_identity_is_the_content(tmp_path: Path, scores: np.ndarray) -> None:
    np.save(tmp_path / "a.npy", scores)
    np.save(tmp_path / "b.npy", scores[::-1])
    np.save(tmp_path / "c.npy", scores + 1e-9)
    a, b, c = (get_family(f"file:{tmp_path / name}.npy").identity for name in "abc")
    assert a == b
    assert a != c


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("nan.npy", np.array([1.0, np.nan]), "1 of 2 scores are NaN"),
        ("inf.npy", np.array([1.0, np.inf]), "NaN or infinite"),
        ("one.npy", np.array([1.0]), "at least two different"),
        ("same.npy", np.array([1.0, 1.0]), "at least two different"),
        ("none.npy", np.array([]), "at least two different"),
        ("text.npy", np.array(["a", "b"]), "text"),
        ("complex.npy", np.array([1j, 2.0]), "complex"),
        ("text.csv", b"a\nb\n", "text"),
        ("empty.csv", b"", "unreadable"),
        ("two.csv", b"1,2\n3,4\n", "2 columns"),
        ("garbage.npy", b"\x00\x01", "unreadable"),
        ("garbage.parquet", b"PAR1", "unreadable"),
        ("scores.txt", b"1\n2\n", ".txt"),
        ("missing.npy", None, "not found"),
    ],
)
def test_bad_files(tmp_path: Path, name: str, content: object, message: str) -> None:
    path = tmp_path / name
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        np.save(path, content)
    with pytest.raises(InputError, match="noise file") as caught:
        read_scores(path)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_never_unpickles(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "sprung",))

    np.save(tmp_path / "trap.npy", np.array([Trap()], dtype=object), allow_pickle=True)
    with pytest.raises(InputError):
        read_scores(tmp_path / "trap.npy")
    assert not (tmp_path / "sprung").exists()
