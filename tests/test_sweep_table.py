"""The table of a sweep: one line a claim and noise, however many values a constant takes."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

import theory_lab
from theory_lab import render
from theory_lab.settings import Settings

KAPPAS = np.linspace(1.0, 3.0, 40).tolist()


@pytest.fixture(scope="module")
def rows() -> pd.DataFrame:
    grid = {"noise": ["gaussian", "uniform"], "length": [50, 100], "beta": [1.0, 1.2], "kappa": KAPPAS}
    return theory_lab.check(["tda-4.3", "tda-4.6"], **grid, estimator="exact")


@pytest.fixture(autouse=True)
def _wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """A narrow terminal, or what another test left of one, would fold columns."""
    monkeypatch.setenv("COLUMNS", "200")


def shown(rows: pd.DataFrame, capsys: pytest.CaptureFixture[str], full: bool = False) -> list[str]:
    render.print_table(rows, Settings(), full=full)
    return [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]


def test_constants_of_many_values_are_folded(rows: pd.DataFrame, capsys: pytest.CaptureFixture[str]) -> None:
    lines = shown(rows, capsys)
    assert any(line.startswith("claim noise beta at kappa at n ") for line in lines)
    told = [line for line in lines if line.startswith(("tda-4.3 gaussian 1 ", "tda-4.6 uniform 1.2 "))]
    assert len(told) == 2
    group = rows[(rows.claim == "tda-4.3") & (rows.noise == "gaussian") & (rows.beta == 1.0)]
    tightest = group.loc[group.slack.idxmax()]
    kappa, length = render.number(tightest.kappa), render.length_text(int(tightest.length))
    assert told[0].startswith(f"tda-4.3 gaussian 1 {kappa} {length} exact {render.number(tightest.estimate)} ")
    assert told[0].endswith(f"HOLDS {len(group)} of {len(group)}")
    assert any("at the kappa and length n where" in line for line in lines)
    assert any(line.endswith(f"--full prints all {len(rows)} rows, --format csv writes them.") for line in lines)


def test_constants_of_few_values_keep_a_line_each(rows: pd.DataFrame, capsys: pytest.CaptureFixture[str]) -> None:
    lines = shown(rows[rows.kappa < 1.3], capsys)
    assert any(line.startswith("claim noise kappa beta at n ") for line in lines)
    assert any(line.endswith(f"--full prints all {(rows.kappa < 1.3).sum()} rows.") for line in lines)


def test_a_full_table_has_every_row(rows: pd.DataFrame, capsys: pytest.CaptureFixture[str]) -> None:
    lines = shown(rows, capsys, full=True)
    assert sum(line.startswith(("tda-4.3 gaussian ", "tda-4.3 uniform ")) for line in lines) == len(rows) // 2
