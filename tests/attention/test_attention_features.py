"""The measured columns of TDA's Table 1."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from attention_inputs import NAMES
from torch import Tensor

from theory_lab.attention import Mechanism, feature_table, get, measure_features
from theory_lab.attention.base import Scope, safe_softmax
from theory_lab.attention.features import COLUMNS, PAPER, Features, markdown_table
from theory_lab.errors import InputError


@pytest.fixture(scope="module")
def table() -> dict[str, Features]:
    return {f.name: f for f in feature_table()}


def test_every_mechanism_is_measured(table: dict[str, Features]) -> None:
    assert sorted(table) == NAMES


@pytest.mark.parametrize("name", sorted(PAPER))
def test_agrees_with_what_the_paper_states(table: dict[str, Features], name: str) -> None:
    assert table[name].disagreements() == []
    assert table[name].columns() == PAPER[name]


def test_only_tda_has_all_four(table: dict[str, Features]) -> None:
    assert [name for name, f in table.items() if all(f.columns())] == ["tda"]


@pytest.mark.parametrize(
    ("name", "answers"),
    [
        ("ssmax", "...L"),
        ("lssa", "...L"),
        ("entmax", "Z..."),
        ("sparsemax", "Z..."),
        ("rela", "Z.N."),
        ("diff-softmax", ".SN."),
        ("diff-rela", "ZSN."),
        ("asentmax-theta", "Z..."),
        ("asentmax", "Z..L"),
        ("adaptive-temperature", "...."),
        ("gated-softmax", "..N."),
        ("dex", "...."),
        ("eta-weight", "...."),
        ("eta-logit", "...."),
    ],
)
def test_what_the_formulas_imply(table: dict[str, Features], name: str, answers: str) -> None:
    assert "".join(a if yes else "." for a, yes in zip("ZSNL", table[name].columns(), strict=True)) == answers


def test_margins_are_far_from_the_decision(table: dict[str, Features]) -> None:
    """A yes is at least a per cent, a no at most rounding: nothing is decided within a factor of 10^6."""
    for f in table.values():
        for column in (*COLUMNS, "position_dependent"):
            measured = getattr(f, column)
            assert measured.margin > 1e-2 if measured.holds else measured.margin < 1e-14, (f.name, column, measured)


def test_position_dependence_is_told_apart(table: dict[str, Features]) -> None:
    found = {name for name, f in table.items() if f.position_dependent.holds}
    assert found == {"streaming-llm", "h2o", "sparse-transformer", "landmark"}


def test_parameters_decide_not_names() -> None:
    """The same class answers differently where its parameters switch an effect off."""
    off = measure_features(get("asentmax", heads=4, hidden_dim=12), name="asentmax at its start")
    assert off.name == "asentmax at its start"
    assert not off.length_aware.holds
    tra = measure_features(get("tra", kappa=1e6))
    assert not tra.length_aware.holds
    assert measure_features(get("tda", beta=0.5, lam=0.0, learnable=False)).columns() == (True, False, True, True)
    assert measure_features(get("eta-weight", tau=0.5, prune="drop")).columns() == (True, False, True, False)
    assert measure_features(get("entmax", alpha=1.0)).columns() == (False, False, False, False)


def test_a_wrong_statement_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PAPER, "softmax", (True, False, False, True))
    assert measure_features("softmax").disagreements() == ["exact_zeros", "length_aware"]


def test_a_mechanism_of_ones_own() -> None:
    class Shifted(Mechanism):
        """Softmax minus a constant that shrinks with n."""

        def row_weights(self, scores: tuple[Tensor, ...], scope: Scope) -> Tensor:
            p = safe_softmax(scores[0], scope.visible)
            return (p - 0.5 / scope.n.sqrt()).masked_fill(~scope.visible, 0.0)

    f = measure_features(Shifted())
    assert f.name == "Shifted"
    assert f.columns() == (False, True, True, True)
    with pytest.raises(InputError, match="mechanism"):
        measure_features(3)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="name"):
        measure_features("nothing")


def test_documented_table_is_the_measured_one(table: dict[str, Features]) -> None:
    """Names and answers of the table in the documentation; its margins may round differently elsewhere."""
    page = Path(__file__).parents[2] / "docs" / "mechanisms.md"

    def answers(text: str) -> list[list[str]]:
        rows = [line.strip("| ").split("|") for line in text.splitlines() if line.startswith("| ")]
        cells = [[cell.strip().split(" (")[0] for cell in row] for row in rows if len(row) >= 6]
        return [row[:6] for row in cells]

    assert answers(page.read_text(encoding="utf-8")) == answers(markdown_table(table.values()))


def test_same_seed_same_answer() -> None:
    with torch.no_grad():
        assert measure_features("tda", seed=3) == measure_features("tda", seed=3)
    assert measure_features("tda", seed=3) != measure_features("tda", seed=4)
