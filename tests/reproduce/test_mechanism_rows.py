"""Rows of mechanisms for the figures: H2O's simulated cache is the mechanism's own."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from theory_lab.attention import get
from theory_lab.phase import LAWS
from theory_lab.reproduce.compute import h2o
from theory_lab.streams import Streams


@pytest.mark.parametrize(
    ("n", "heavy", "recent"), [(1, 3, 2), (4, 3, 2), (5, 3, 2), (41, 3, 4), (40, 0, 3), (33, 4, 1)]
)
def test_the_simulated_cache_is_that_of_the_mechanism(n: int, heavy: int, recent: int) -> None:
    """The keys of the last row, for the same scores of every row, ties and underflow included."""
    generator = np.random.default_rng(n)
    matrix = generator.normal(size=(3, n, n)) * 3
    matrix[1] = np.round(matrix[1])  # ties
    matrix[2] *= 300  # weights that underflow to 0
    lines = np.arange(3)[:, None]
    keys = h2o.last_row_keys(n, heavy, recent, 3, lambda row, kept: matrix[lines, row, kept])
    weights = get("h2o", heavy=heavy, recent=recent).double().weights(torch.from_numpy(matrix)[:, None], causal=True)
    for line in range(2):
        expected = torch.nonzero(weights[line, 0, -1]).flatten().tolist()
        assert sorted(keys[line][keys[line] >= 0].tolist()) == expected
    # Weights that are 0 do not show which keys were kept; those that are not must be among them.
    assert set(torch.nonzero(weights[2, 0, -1]).flatten().tolist()) <= set(keys[2].tolist())


def test_rows_of_h2o(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row no longer than the cache is plain softmax; a longer one keeps the recent and heavy ones."""
    monkeypatch.setattr(h2o, "HEAVY", 8)
    monkeypatch.setattr(h2o, "RECENT", 8)
    streams = [Streams("0" * 32, row) for row in range(96)]
    base = np.stack([LAWS["gaussian"](stream[0], 400) for stream in streams])
    short = h2o.last_row_weights(base[:, :16], LAWS["gaussian"], streams, 1.0)
    assert np.allclose(short, np.exp(base[:, :16]) / np.exp(base[:, :16]).sum(-1, keepdims=True), rtol=1e-14)
    long = h2o.last_row_weights(base, LAWS["gaussian"], streams, 1.0)
    assert np.all((long > 0).sum(-1) == 16)
    assert np.all(long[:, -8:] > 0)  # the recent ones
    # The eight others have been chosen for weight: their mean score is far (five standard errors) above the law's, 0.
    heavy = [base[row, :-8][long[row, :-8] > 0].mean() for row in range(96)]
    assert np.mean(heavy) > 5 / np.sqrt(96 * 8)
