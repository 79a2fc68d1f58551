"""Results to report on, small and hostile."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest
from report_inputs import HOSTILE

from theory_lab.experiments import run
from theory_lab.settings import Settings
from theory_lab.store import Store, rows_to_parquet


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A results folder of a small check, with two findings as a search leaves them."""
    settings = Settings(("tda-4.3", "tda-4.6"), ("gaussian", "spherical", "laplace"), (2, 512, 2**20), trials=20_000)
    rows = run(settings, workers=1)
    missing = dict.fromkeys(("length", "head_dim", "kappa", "beta", "sigma", "rho", "key_rho", "exact", "slack"))
    found = rows.iloc[:2].assign(
        **missing, claim="asentmax-theta", noise=["entmax-1.5", "entmax-2"], estimator="study", method="search",
        estimate=7.0, standard_error=0.0, ci_low=7.0, ci_high=7.0, bound=0.0, verdict="VIOLATED",
        note="smallest counterexample: scores (0, -2)",
    )  # fmt: skip
    path = tmp_path_factory.mktemp("results") / "small"
    Store(path).write_rows(pd.concat([rows, found.astype(rows.dtypes)], ignore_index=True), settings.describe())
    return path


@pytest.fixture(scope="session")
def rows(folder: Path) -> pd.DataFrame:
    """Its rows."""
    return pd.read_parquet(folder / "rows.parquet")


@pytest.fixture
def hostile(rows: pd.DataFrame, tmp_path: Path) -> Path:
    """Rows whose texts try to break out, as CSV."""
    frame = pd.concat([rows] * 2, ignore_index=True).head(len(HOSTILE)).copy()
    texts = [text.replace("\ud800", "") for text in HOSTILE]  # UTF-8 has no half pairs
    for column in ("noise", "note", "method", "assumptions", "claim"):
        frame[column] = texts
    path = tmp_path / "hostile.parquet"
    path.write_bytes(rows_to_parquet(frame))
    return path
