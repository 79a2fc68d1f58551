"""The look of every drawing, against small baseline pictures.

After a wanted change of the look: THEORY_LAB_BASELINES=write pytest tests/figures/test_look.py, and look at them.
"""

from __future__ import annotations

import os
from itertools import pairwise
from pathlib import Path

import matplotlib
import numpy as np
import pytest
from figure_samples import SAMPLES
from matplotlib.testing.compare import compare_images

from theory_lab.figures import style
from theory_lab.reproduce.kinds import DRAWINGS

BASELINES = Path(__file__).with_name("baselines")
#: Root mean square over pixels of 0 to 255. The same figure drawn again is at 0, one without its grid at 1.2.
TOLERANCE = 0.8
DPI = 60


def draw(name: str, change=None) -> object:
    """The picture of a sample, drawn inside the style; ``change`` may alter its frame."""
    make, experiment = SAMPLES[name]
    frame = make() if change is None else change(make())
    with style.applied():
        figure = DRAWINGS[experiment.draw].load()(frame, experiment)
        figure.set_dpi(DPI)
    return figure


def picture(name: str, path: Path, change=None, rc: dict | None = None) -> Path:
    make, experiment = SAMPLES[name]
    frame = make() if change is None else change(make())
    with style.applied(), matplotlib.rc_context(rc or {}):
        DRAWINGS[experiment.draw].load()(frame, experiment).savefig(path, dpi=DPI)
    return path


@pytest.mark.parametrize("name", list(SAMPLES))
def test_look(name: str, tmp_path: Path) -> None:
    if os.environ.get("THEORY_LAB_BASELINES") == "write":
        BASELINES.mkdir(exist_ok=True)
        picture(name, BASELINES / f"{name}.png")
    found = compare_images(str(BASELINES / f"{name}.png"), str(picture(name, tmp_path / "now.png")), tol=TOLERANCE)
    assert found is None, found


def _without_an_interval(frame):
    return frame.assign(ci_low=frame.estimate, ci_high=frame.estimate)


def _moved(frame):
    return frame.assign(estimate=frame.estimate * np.where(frame.noise == "gaussian", 1.5, 1.0))


def _one_series_less(frame):
    return frame[frame.mechanism != "entmax"]


@pytest.mark.parametrize(
    ("name", "change", "rc"),
    [
        ("laws", _without_an_interval, None),
        ("laws", _one_series_less, None),
        ("bounds", None, {"font.size": 9, "axes.labelsize": 9}),
        ("bounds", None, {"axes.grid": False}),
        ("bounds", None, {"lines.linewidth": 3, "lines.markersize": 6}),
        ("threshold", lambda frame: frame.assign(effective_beta=frame.effective_beta * 0.9), None),
    ],
    ids=["bands gone", "a series gone", "larger type", "no grid", "heavier lines", "values moved"],
)
def test_a_real_change_fails(name: str, change, rc, tmp_path: Path) -> None:
    """The tolerance is small enough to see what a person would see."""
    found = compare_images(
        str(BASELINES / f"{name}.png"), str(picture(name, tmp_path / "now.png", change, rc)), tol=TOLERANCE
    )
    assert found is not None


def test_every_drawing_has_a_sample() -> None:
    assert {experiment.draw for _, experiment in SAMPLES.values()} == set(DRAWINGS) - {"table"}


def test_sizes_and_type() -> None:
    """Widths are those of one and of two columns; nothing is too small to be read in print."""
    for name, (_, experiment) in SAMPLES.items():
        figure = draw(name)
        assert figure.get_size_inches()[0] == style.WIDTHS[experiment.options.get("width", "double")]
        sizes = [text.get_fontsize() for text in figure.findobj(matplotlib.text.Text) if text.get_text().strip()]
        assert min(sizes) >= 5.8, name


def test_series_can_be_told_apart_without_color() -> None:
    styles = style.series_styles([f"s{i}" for i in range(20)])
    assert len({(look["marker"], look["linestyle"]) for look in styles.values()}) == 20
    # In gray, as a print shows them, neighbors of the first six differ too.
    gray = [float(np.dot(matplotlib.colors.to_rgb(color), [0.2126, 0.7152, 0.0722])) for color in style.COLORS[:6]]
    assert min(abs(a - b) for a, b in pairwise(gray)) > 0.05


def test_missing_font(tmp_path: Path) -> None:
    """One line, and the picture is drawn all the same; a user's own settings change nothing."""
    said: list[str] = []
    with style.applied("No Such Font 12", said.append):
        figure = style.new_figure("single", 1)
        figure.text(0.5, 0.5, "words")
        style.save(figure, tmp_path / "a.png", {"title": "t"})
    assert said == ["font 'No Such Font 12' is not installed: DejaVu Sans is used instead"]
    with style.applied(), matplotlib.rc_context({}):
        other = style.new_figure("single", 1)
        other.text(0.5, 0.5, "words")
        style.save(other, tmp_path / "b.png", {"title": "t"})
    with matplotlib.rc_context({"font.size": 30, "savefig.dpi": 20, "axes.facecolor": "red"}), style.applied():
        third = style.new_figure("single", 1)
        third.text(0.5, 0.5, "words")
        style.save(third, tmp_path / "c.png", {"title": "t"})
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes() == (tmp_path / "c.png").read_bytes()


def test_a_name_that_was_moved_is_tied_to_its_line() -> None:
    """Four series end at one value: their names stand apart, each with a line to it; a fifth is left alone."""
    figure = style.new_figure("single", 2)
    axes = figure.subplots()
    axes.set(xlim=(0, 1), ylim=(0, 1))
    style.label_ends(axes, [(0.9, f"s{i}", "black") for i in range(4)] + [(0.2, "alone", "black")])
    heights = sorted(text.get_position()[1] for text in axes.texts)
    assert np.diff(heights).min() > 0.05
    assert len(axes.lines) == 4
    assert {round(line.get_ydata()[0], 6) for line in axes.lines} == {0.9}
    assert sorted(line.get_ydata()[1] for line in axes.lines) == heights[1:]
    assert axes.get_xlim() == (0, 1)
