"""The picture of a check."""

from __future__ import annotations

from pathlib import Path

import matplotlib.image as image
import numpy as np
import pytest
from matplotlib.collections import PathCollection

import theory_lab
from theory_lab.errors import InputError, StoreError
from theory_lab.figures import check_plot, style


@pytest.fixture(scope="module")
def rows():
    return theory_lab.check(
        ["tda-4.3", "tda-4.6"],
        noise=["gaussian", "two-point", "laplace", "rademacher", "any"],
        length=[2, 8, 512, 2**20],
        trials=20_000,
    )


@pytest.mark.parametrize("suffix", ["png", "pdf", "svg"])
def test_formats(rows, tmp_path: Path, suffix: str) -> None:
    target = tmp_path / f"p.{suffix}"
    check_plot.plot_check(rows, str(target))
    assert target.stat().st_size > 5000
    assert [p.name for p in tmp_path.iterdir()] == [target.name]
    if suffix == "png":
        pixels = image.imread(target)
        assert pixels.shape[1] > 1500
        assert np.std(pixels) > 0.02
    if suffix == "svg":
        text = target.read_text()
        assert "seed 0" in text


def test_what_is_drawn(rows, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Bounds, estimates and exact values are the rows' own; nothing is drawn that was not computed."""
    kept = []
    monkeypatch.setattr(style, "save", lambda figure, path, about: kept.append(figure))
    check_plot.plot_check(rows, str(tmp_path / "p.png"))
    left, right = kept[0].axes
    assert left.get_xscale() == left.get_yscale() == "log"
    assert left.get_xlabel().startswith("visible keys n = i + 1")
    mine = rows[(rows.claim == "tda-4.6") & (rows.noise == "gaussian")]
    drawn = [line.get_ydata() for line in right.lines if len(line.get_ydata()) == len(mine)]
    for column in ("estimate", "exact", "bound"):
        assert any(np.array_equal(y, mine[column]) for y in drawn), column
    texts = {text.get_text() for text in left.texts}
    assert {"gaussian", "two-point", "laplace", "any law (worst case)"} <= texts
    assert any("rademacher" in text for text in [*texts, left.get_xlabel()])


def test_nothing_but_zeros(tmp_path: Path) -> None:
    zeros = theory_lab.check("tda-4.3", noise="rademacher", length=[100, 1000])
    check_plot.plot_check(zeros, str(tmp_path / "p.png"))
    assert (tmp_path / "p.png").exists()


def test_one_length_and_many_constants(tmp_path: Path) -> None:
    many = theory_lab.check(
        ["tda-4.3", "tda-4.6", "tda-4.6-correlated"],
        noise="gaussian",
        length=100,
        kappa=[0.5, 1, 2],
        rho=[0, 0.2],
        trials=1000,
    )
    check_plot.plot_check(many, str(tmp_path / "p.png"))


@pytest.mark.parametrize("name", ["p.doc", "p", "missing/p.png"])
def test_bad_files(rows, tmp_path: Path, name: str) -> None:
    with pytest.raises(InputError, match="plot"):
        check_plot.plot_check(rows, str(tmp_path / name))


def test_full_disk(rows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(style.os, "replace", full)
    with pytest.raises(StoreError, match="No space left"):
        check_plot.plot_check(rows, str(tmp_path / "p.png"))
    assert list(tmp_path.iterdir()) == []


def test_findings_of_searches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Claims without a length: each finding's distance from its bound, on the right where it is violated."""
    rows = theory_lab.check("ours-independence-horizon", rho=[0.3], trials=4096).assign(length=None, estimator="study")
    kept = []
    monkeypatch.setattr(style, "save", lambda figure, path, about: kept.append(figure))
    check_plot.plot_check(rows, str(tmp_path / "p.png"))
    dots = [found for found in kept[0].axes[0].collections if isinstance(found, PathCollection)]
    drawn = [float(found.get_offsets()[0][0]) for found in dots]
    assert drawn == pytest.approx((rows.estimate - rows.bound).tolist())


def test_crowded_labels_are_spread() -> None:
    placed = style.spread([0.5, 0.5, 0.5, 0.9], 0.1)
    assert placed == pytest.approx([0.4, 0.5, 0.6, 0.9])
    assert style.spread([0.0, 0.0], 0.1)[0] >= 0
    assert style.spread([1.0, 1.0], 0.1)[-1] <= 1
