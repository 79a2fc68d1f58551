"""The measures against hand-made maps and numbers known in advance."""

from __future__ import annotations

import math

import numpy as np
import pytest

from theory_lab.probes import bootstrap, measures


@pytest.mark.parametrize(("length", "value"), [(64, 0.0741), (1024, 0.00733), (8192, 0.00117)])
def test_uniform_baseline(length: int, value: float):
    assert measures.uniform_sink_ratio(length) == pytest.approx(value, rel=5e-3)


@pytest.mark.parametrize("window", [None, 1, 5])
@pytest.mark.parametrize(("causal", "offset"), [(True, 0), (True, 2), (False, 0)])
@pytest.mark.parametrize("k", [1, 2, 9, 12])
def test_uniform_baseline_is_that_of_a_uniform_map(causal: bool, offset: int, window: int | None, k: int):
    import torch
    from theory_kernels import attention_statistics

    nothing = torch.zeros(1, 1, 12, 4)
    uniform = attention_statistics(nothing, nothing, causal=causal, query_offset=offset, window=window)
    ratio = float(measures.g_sink_ratio(uniform.column_mass[0, 0], k))
    found = measures.uniform_sink_ratio(12, k, causal=causal, window=window, offset=offset)
    # float32 weights, summed exactly
    assert found == pytest.approx(ratio, rel=1e-6)


def test_g_sink_ratio_counts_signed_weights_and_leaves_dead_heads_out():
    columns = np.array([[3.0, 1.0], [0.0, 0.0]])
    assert measures.g_sink_ratio(columns, 1)[0] == 0.75
    assert np.isnan(measures.g_sink_ratio(columns, 1)[1])
    assert np.isnan(measures.g_sink_ratio(columns, 3)).all()


def test_an_identity_map_is_no_sink_where_the_tail_is_left_out():
    share, rows = np.ones(64), np.arange(64, 0, -1)
    alphas = measures.sink_weights(share, rows)
    assert alphas[-1] == 1.0  # the trap: the last key is seen by one row
    key, alpha = measures.sink_scan(alphas, rows)
    assert rows[key - 1] >= 16
    assert alpha <= 1 / 16


def test_sink_rate_is_strict():
    alphas = np.array([[0.3, 0.0], [0.31, 0.0], [np.nan, 0.0]])
    assert measures.sink_rate(alphas, 1, 0.3) == 0.5


def test_entropy_of_signed_and_empty_rows():
    assert measures.entropy_of([[0.0, 0.0], [1.0, -1.0]]) == pytest.approx([0.0, math.log(2)])
    assert np.isnan(measures.normalized_entropy([0.0], [1]))[0]


def test_lift_of_independent_views_is_one():
    assert measures.lift(25, 50, 50, 100) == pytest.approx(1.0)
    assert np.isnan(measures.lift(0, 0, 50, 100))


def test_variance_proxy_of_a_gaussian_and_of_a_shifted_one():
    t = np.array([-4.0, -1.0, 0.5, 3.0])
    assert measures.variance_proxy(0.5 * 0.7 * t * t + 2.0 * t, t, 2.0) == pytest.approx(0.7)


@pytest.mark.parametrize("texts", [2, 3, 5, 6])
def test_intervals_cover_for_few_texts(texts: int):
    # 600 data sets: the coverage's standard error is about 1%, and 5 of them are the band.
    values = np.random.Generator(np.random.Philox(key=1)).standard_normal((600, texts))
    hits = 0
    for row in values:
        found = bootstrap.interval(row, seed=0)
        hits += found.ci_low <= 0.0 <= found.ci_high
    assert 0.88 <= hits / 600 <= 0.995


def test_one_text_has_no_interval_and_none_has_no_estimate():
    one = bootstrap.interval([3.0])
    assert (one.estimate, one.texts) == (3.0, 1)
    assert math.isnan(one.ci_low)
    assert math.isnan(bootstrap.interval([np.nan]).estimate)
