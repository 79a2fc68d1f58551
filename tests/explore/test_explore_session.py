"""What the explorer answers."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from made_captures import made

from theory_lab.errors import InputError
from theory_lab.explore import session as module
from theory_lab.explore.session import Session, open_session

ASKED = {
    "pane": "p0", "layer": "1", "head": "2", "rows": "0,60", "columns": "0,60", "resolution": "16", "reduce": "max",
    "quality": "quick",
}  # fmt: skip


def test_meta_is_json_and_describes_panes() -> None:
    header, numbers = Session([made()], ["tra", "tda:beta=0.3"]).answer("meta", {})
    about = json.loads(json.dumps(header, allow_nan=False))
    assert numbers.size == 0
    assert [pane["label"] for pane in about["panes"]] == [
        "the model's own", "tra", "view 1", "view 2", "difference, tda:beta=0.3",
    ]  # fmt: skip
    assert [pane["diverging"] for pane in about["panes"]] == [False] * 4 + [True]
    # Views and their difference share a scale; different mechanisms do not.
    assert len({pane["group"] for pane in about["panes"]}) == 3
    model = about["models"][0]
    assert len(model["words"]) == 60
    assert model["layers"][2] == {
        "layer": 2, "heads": 4, "rows": 60, "columns": 60, "sight": {"causal": True, "offset": 0, "span": None},
    }  # fmt: skip


def test_map_is_the_captured_one() -> None:
    captured = made()
    session = Session([captured], ["tda:beta=0.3"])
    for pane, more in (("p0", {}), ("p1", {"view": 1}), ("p3", {})):
        header, numbers = session.answer("map", {**ASKED, "pane": pane, "rows": "10,60"})
        as_ = None if pane == "p0" else "tda:beta=0.3"
        want = captured.map(1, 2, ((10, 60), (0, 60)), resolution=16, as_=as_, **more)
        np.testing.assert_array_equal(numbers, want.image)
        assert header["shape"] == (16, 16)
        assert header["exact"]


def test_a_picture_too_dear_is_sampled_at_first(monkeypatch: pytest.MonkeyPatch) -> None:
    captured = made(tokens=400)
    session = Session([captured])
    words = {**ASKED, "rows": "0,400", "columns": "0,400"}
    exact = captured.map(1, 2, resolution=16).image
    monkeypatch.setattr(module, "CHEAP_PAIRS", 20_000.0)  # of 80,000 that are seen
    header, numbers = session.answer("map", words)
    assert not header["exact"]
    assert header["soon"]
    assert (header["read"], header["of"]) == (6, 25)
    assert (numbers <= exact).all()
    assert (numbers < exact).any()
    header, numbers = session.answer("map", {**words, "quality": "fine"})
    assert header["exact"]
    np.testing.assert_array_equal(numbers, exact)
    # One that would take long is left to a click.
    monkeypatch.setattr(module, "CHEAP_PAIRS", 100.0)
    header, _ = session.answer("map", {**words, "quality": "fine"})
    assert (header["exact"], header["soon"], header["read"]) == (False, False, 1)
    header, numbers = session.answer("map", {**words, "quality": "all"})
    assert header["exact"]
    np.testing.assert_array_equal(numbers, exact)


def test_strongest_pair_and_every_panes_value() -> None:
    captured = made()
    session = Session([captured], ["tra:beta=0.1"])
    words = {"pane": "p0", "layer": "0", "head": "1", "rows": "20,30", "columns": "0,12"}
    header, _ = session.answer("pair", words)
    image = captured.map(0, 1).image
    r, c = np.unravel_index(image[20:30, :12].argmax(), (10, 12))
    assert (header["row"], header["column"]) == (20 + r, c)
    assert header["value"] == pytest.approx(float(image[20 + r, c]), rel=1e-5)
    other = captured.map(0, 1, as_="tra:beta=0.1").image[20 + r, c]
    assert header["values"] == {"p0": header["value"], "p1": pytest.approx(float(other), rel=1e-5)}


def test_thumbnails_read_all_of_a_short_text_and_a_few_rows_of_a_long_one() -> None:
    captured = made(tokens=400)
    session = Session([captured])
    header, numbers = session.answer("thumbnails", {"pane": "p0", "layer": "2", "size": "10"})
    assert numbers.shape == (4, 10, 10)
    assert header == {"layer": 2, "size": 10, "heads": 4, "read": 2}
    header, numbers = session.answer("thumbnails", {"pane": "p0", "layer": "2", "size": "100"})
    assert header["read"] is None
    np.testing.assert_array_equal(numbers[3], captured.map(2, 3, resolution=100).image)


def test_two_models_and_their_alignment() -> None:
    first, second = made("one"), made("two", tokens=50, seed=1)
    header, _ = open_session(first, compare=second).answer("meta", {})
    assert [one["aligned"] for one in header["models"]] == [True, False]
    assert [pane["label"] for pane in header["panes"]] == ["one", "two"]
    header, _ = open_session(first, compare=made("one", seed=2), as_="tra").answer("meta", {})
    assert [one["aligned"] for one in header["models"]] == [True, True]
    assert [pane["label"] for pane in header["panes"]] == [
        "one (first)", "one (first): tra", "one (second)", "one (second): tra",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "change", "field"),
    [
        ("nothing", {}, "question"),
        ("map", {"pane": "p9"}, "pane"),
        ("map", {"layer": "99"}, "layer"),
        ("map", {"layer": "-1"}, "layer"),
        ("map", {"head": "4"}, "head"),
        ("map", {"head": "x"}, "head"),
        ("map", {"rows": "0,61"}, "window rows"),
        ("map", {"rows": "0"}, "rows"),
        ("map", {"columns": "5,5"}, "window columns"),
        ("map", {"resolution": "100000"}, "resolution"),
        ("map", {"resolution": "٣"}, "resolution"),
        ("map", {"reduce": "min"}, "reduce"),
        ("map", {"quality": None}, "quality"),
        ("thumbnails", {"size": "0"}, "size"),
    ],
)
def test_bad_questions_are_named(kind: str, change: dict[str, Any], field: str) -> None:
    words = {name: value for name, value in {**ASKED, **change}.items() if value is not None}
    with pytest.raises(InputError) as caught:
        Session([made()]).answer(kind, words)
    assert caught.value.field == field


def test_a_pair_is_searched_in_small_windows_only() -> None:
    with pytest.raises(InputError, match="1,048,576 pairs are searched"):
        Session([made(tokens=1100)]).answer("pair", {**ASKED, "rows": "0,1100", "columns": "0,1100"})


def test_bad_sessions_are_refused_at_once() -> None:
    for made_with, allowed in (
        (lambda: Session([]), "one or two are allowed"),
        (lambda: Session([made()], ["tra"] * 9), "at most 8"),
        (lambda: Session([made()], ["none"]), "is allowed"),
        (lambda: Session([made()], head=4), "heads 0 to 3 of layer 0"),
        (lambda: Session([made()], layer=3), "layers 0-2 were captured"),
        (lambda: Session([made(heads=2)], ["tda"]), "views=neighbors"),
        (lambda: open_session("smollm2-135m"), "the words themselves"),
    ):
        with pytest.raises(InputError) as caught:
            made_with()
        assert allowed in str(caught.value)
