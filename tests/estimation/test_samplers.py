"""Estimators against exact values, against each other, and against a naive simulation."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from theory_lab.claims import Point
from theory_lab.claims.tda import exact_consensus, exact_survivors
from theory_lab.estimation import SAMPLERS, BlockSum, Cell, Sample
from theory_lab.estimation.direct import count_below
from theory_lab.estimation.tail import CountTable, draw_counts, draw_exceedances, row_counts
from theory_lab.noise import Scale, default_families, get_family
from theory_lab.streams import Stream, Streams, cell_digest, threshold_word

# Every comparison in this file is allowed to fail by chance with this probability, so that no lucky seed is needed:
# about 500 comparisons give a familywise 1e-6.
LEVEL = 2e-9
SIGMAS = float(stats.norm.isf(LEVEL / 2))

STRUCTURES = [
    ("survivors", {}),
    ("survivors", {"key_rho": 0.4}),
    ("consensus", {}),
    ("consensus", {"rho": 0.5}),
    ("consensus", {"rho": -0.4}),
    ("consensus", {"key_rho": 0.3}),
    ("consensus", {"key_rho": 0.3, "rho": 0.6}),
]


def sample_of(estimator: str, statistic: str, point: Point, trials: int, seed: int = 1) -> Sample:
    cell = Cell(statistic, point, estimator, seed)
    sampler = SAMPLERS[estimator]
    size = sampler.block_trials(cell)
    blocks = [
        sampler.run_block(cell, b, min(size, trials - b * size), Streams(cell.digest, b))
        for b in range((trials + size - 1) // size)
    ]
    return sampler.pool(cell, blocks)


def truth(statistic: str, point: Point) -> float:
    return exact_survivors(point) if statistic == "survivors" else exact_consensus(point)


def close(sample: Sample, value: float, sigmas: float = SIGMAS) -> bool:
    if sample.model == "bernoulli":  # exact test: the normal approximation is poor for few hits
        p = min(1.0, value / sample.scale)
        tails = stats.binom.cdf(sample.total, sample.size, p), stats.binom.sf(sample.total - 1, sample.size, p)
        return 2 * min(tails) > 2 * stats.norm.sf(sigmas)
    rounding = 1e-9 * abs(value)
    return abs(sample.estimate - value) <= sigmas * sample.standard_error + rounding


@pytest.mark.parametrize("estimator", ["direct", "tail", "importance"])
@pytest.mark.parametrize(("statistic", "structure"), STRUCTURES, ids=lambda x: str(x))
@pytest.mark.parametrize("noise", default_families())
def test_against_exact(noise: str, statistic: str, structure: dict, estimator: str) -> None:
    for n in (1, 2, 7, 100):
        point = Point(noise, n, kappa=0.8, beta=0.9, **structure)
        trials = 1 << 15 if estimator == "importance" else 3 * (1 << 13)
        assert close(sample_of(estimator, statistic, point, trials), truth(statistic, point)), point


@pytest.mark.parametrize("noise", ["gaussian", "spherical", "two-point"])
@pytest.mark.parametrize("length", [2, 101, 10**6 + 1])
def test_table_of_survivors_within_four_standard_errors(noise: str, length: int) -> None:
    value = {
        ("gaussian", 2): 0.2390, ("gaussian", 101): 0.1202, ("gaussian", 10**6 + 1): 0.0734,
        ("spherical", 2): 0.2420, ("spherical", 101): 0.0913, ("spherical", 10**6 + 1): 0.0013863,
        ("two-point", 2): 0.82843, ("two-point", 101): 0.99064, ("two-point", 10**6 + 1): 0.999999,
    }[noise, length]  # fmt: skip
    point = Point(noise, length)
    runs = {"tail": 1 << 19, "importance": 1 << 17, **({"direct": 1 << 18} if length < 1000 else {})}
    for estimator, trials in runs.items():
        sample = sample_of(estimator, "survivors", point, trials)
        assert abs(sample.estimate - value) <= 4 * sample.standard_error + 6e-5, estimator


@pytest.mark.parametrize("rho", [0.0, 0.0752, 0.1231, 0.3, 0.5])
@pytest.mark.parametrize("length", [10**3, 10**4, 10**6, 10**8])
def test_table_of_consensus_within_four_standard_errors(rho: float, length: int) -> None:
    point = Point("gaussian", length, rho=rho)
    sample = sample_of("importance", "consensus", point, 1 << 17)
    assert abs(sample.estimate - exact_consensus(point)) <= 4 * sample.standard_error
    assert sample.standard_error < 0.01 * sample.estimate


def test_against_naive_normals() -> None:
    """The plainest possible simulation, with NumPy's own normals and no line of the estimators' code."""
    n, rows, rho = 50, 40_000, 0.4
    point = Point("gaussian", n, rho=rho)
    rng = np.random.Generator(np.random.PCG64(9))
    z1 = rng.standard_normal((rows, n))
    z2 = rho * z1 + math.sqrt(1 - rho**2) * rng.standard_normal((rows, n))
    tau = math.sqrt(2 * math.log(n))
    survivors, consensus = int((z1 > tau).sum()), int(((z1 > tau) & (z2 > tau)).sum())
    for estimator in ("direct", "tail"):
        for statistic, hits in (("survivors", survivors), ("consensus", consensus)):
            sample = sample_of(estimator, statistic, point, rows)
            table = [[hits, rows * n - hits], [sample.total, sample.size - sample.total]]
            assert stats.fisher_exact(table).pvalue > LEVEL


def test_against_naive_sphere() -> None:
    """Cosines of random directions, drawn as such, against the spherical law."""
    d, n, rows = 8, 40, 3000
    rng = np.random.Generator(np.random.PCG64(10))
    q, k = rng.standard_normal((rows, 1, d)), rng.standard_normal((rows, n, d))
    cosines = (q * k).sum(-1) / (np.linalg.norm(q, axis=-1) * np.linalg.norm(k, axis=-1))
    law = get_family("spherical").scaled(Scale(1 / d, d))
    assert stats.kstest(cosines.ravel()[::7], lambda t: 1 - law.sf(t)).pvalue > LEVEL


@pytest.mark.parametrize(("statistic", "structure"), STRUCTURES, ids=lambda x: str(x))
@pytest.mark.parametrize("noise", ["gaussian", "spherical", "two-point", "student-t(3)"])
def test_direct_and_tail_agree(noise: str, statistic: str, structure: dict) -> None:
    point = Point(noise, 64, **structure)
    a, b = (sample_of(e, statistic, point, 1 << 14, seed=2) for e in ("direct", "tail"))
    spread = math.hypot(a.standard_error, b.standard_error)
    assert abs(a.estimate - b.estimate) <= SIGMAS * spread


def test_equicorrelation_keeps_the_mean_and_widens_the_rows() -> None:
    rows = 1 << 15
    spread = []
    for key_rho in (0.0, 0.5):
        cell = Cell("survivors", Point("gaussian", 64, key_rho=key_rho), "tail", 3)
        counts = row_counts(cell, rows, Streams(cell.digest, 0))
        se = counts.std() / math.sqrt(rows)
        assert abs(counts.mean() - exact_survivors(cell.point)) < SIGMAS * se
        spread.append(counts.var())
    assert spread[1] > 2 * spread[0]


@pytest.mark.parametrize("p", [0.3, 1 / 256, 1e-3, 2.0**-20, 255.5 / 256])
def test_count_below_is_binomial(p: float) -> None:
    size = 1 << 20
    digest = cell_digest({"count": p}, 0)
    hits = count_below(Stream(digest, 0, 0), Stream(digest, 0, 1), size, threshold_word(p))
    assert stats.binomtest(hits, size, p).pvalue > LEVEL


def test_count_below_decides_like_whole_words() -> None:
    """The byte-wise decision equals that of the 64-bit number it stands for."""
    digest, size = cell_digest({"words": 1}, 0), 5000
    lanes = Stream(digest, 0, 0).lanes8(size)
    for high in (3, 0, 255):
        threshold = (high << 56) | (1 << 55)
        tied = np.flatnonzero(lanes == high)
        rest = Stream(digest, 0, 1).words(tied.size) >> np.uint64(8)
        whole = [int(lane) << 56 for lane in lanes]
        for index, low in zip(tied, rest, strict=True):
            whole[index] |= int(low)
        hits = count_below(Stream(digest, 0, 0), Stream(digest, 0, 1), size, threshold)
        assert hits == sum(w < threshold for w in whole)


@pytest.mark.parametrize(
    ("n", "p"), [(1, 0.3), (64, 0.02), (10**6, 1e-6), (1 << 40, 2.0**-40), (1 << 40, 1e-9), (1000, 0.9), (10**5, 0.5)]
)
def test_count_table_is_binomial(n: int, p: float) -> None:
    digest = cell_digest({"table": [n, p]}, 0)
    counts = CountTable(n, p).draw(Stream(digest, 0, 0), Stream(digest, 0, 1), 1 << 17)
    edges = np.unique(stats.binom.ppf(np.linspace(0.001, 0.999, 12), n, p))
    observed = np.histogram(counts, np.concatenate([[-np.inf], edges + 0.5, [np.inf]]))[0]
    expected = np.diff(stats.binom.cdf(np.concatenate([[-1], edges, [n]]), n, p)) * counts.size
    keep = expected > 5
    assert stats.chisquare(observed[keep], expected[keep] * observed[keep].sum() / expected[keep].sum()).pvalue > LEVEL
    assert observed[~keep].sum() < 100


def test_counts_without_a_table() -> None:
    """Standard deviations above the table's reach come from NumPy's generator."""
    n, p = 1 << 40, 0.1
    counts = draw_counts(Streams(cell_digest({"wide": 1}, 0), 0), n, p, 2000)
    z = (counts - n * p) / math.sqrt(n * p * (1 - p))
    assert abs(z.mean()) < SIGMAS / math.sqrt(2000)
    assert 0.8 < z.std() < 1.2


def test_exceedances_follow_the_conditional_law() -> None:
    point = Point("gaussian", 10**6)
    law = point.law()
    counts, values = draw_exceedances(Streams(cell_digest({"exceed": 1}, 0), 0), law, point.length, point.tau, 1 << 17)
    assert counts.sum() == values.size
    assert values.min() > point.tau
    p = law.tail(point.tau)
    assert stats.kstest(values, lambda x: 1 - law.sf(x) / p).pvalue > LEVEL


@pytest.mark.parametrize("estimator", SAMPLERS)
@pytest.mark.parametrize(("statistic", "structure"), STRUCTURES, ids=lambda x: str(x))
def test_more_trials_extend_a_block(estimator: str, statistic: str, structure: dict) -> None:
    """The first trials of a block do not depend on how many follow: the totals of a prefix are never larger."""
    cell = Cell(statistic, Point("gaussian", 3, **structure), estimator, 4)
    sampler = SAMPLERS[estimator]
    totals = [sampler.run_block(cell, 0, t, Streams(cell.digest, 0)).total for t in (1, 50, 51, 1000, 1001)]
    assert totals == sorted(totals)
    if statistic == "survivors" and estimator == "tail":
        rows = [row_counts(cell, t, Streams(cell.digest, 0)) for t in (100, 70_000)]
        np.testing.assert_array_equal(rows[0], rows[1][:100])


def test_rows_beyond_memory_are_streamed() -> None:
    """A row of 2^24 keys and many rows of few: the working set stays a few megabytes."""
    import tracemalloc

    for estimator, n, trials in (("direct", 1 << 24, 1), ("tail", 1 << 40, 1 << 18), ("direct", 2, 1 << 21)):
        cell = Cell("survivors", Point("gaussian", n), estimator, 5)
        tracemalloc.start()
        SAMPLERS[estimator].run_block(cell, 0, trials, Streams(cell.digest, 0))
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 32 << 20, (estimator, peak)


@pytest.mark.parametrize("noise", ["gaussian", "student-t(3)", "laplace", "spherical"])
@pytest.mark.parametrize("rho", [0.0, 0.3])
def test_rare_events_are_precise(noise: str, rho: float) -> None:
    """E[C_i] at n = 10^9: a relative error under 1%."""
    point = Point(noise, 10**9, rho=rho)
    sample = sample_of("importance", "consensus", point, 1 << 18)
    assert sample.standard_error < 0.01 * sample.estimate
    assert close(sample, exact_consensus(point))


def test_weights_respect_their_ceiling() -> None:
    """The largest observation cannot exceed the ceiling that the interval rests on."""
    for noise in default_families():
        for rho in (0.0, 0.7, -0.5):
            for n in (3, 1000, 10**9):
                cell = Cell("consensus", Point(noise, n, rho=rho, kappa=0.5), "importance", 6)
                sampler = SAMPLERS["importance"]
                one = [sampler.run_block(cell, b, 1, Streams(cell.digest, b)) for b in range(20)]
                sample = sampler.shape(cell)
                assert sample.model == "certain" or max(b.total for b in one) <= sample.ceiling * (1 + 1e-12)


def test_pooling_ignores_order() -> None:
    cell = Cell("survivors", Point("gaussian", 10), "tail", 0)
    blocks = [BlockSum(b, 5, 0.1 * b, 0.01 * b) for b in range(6)]
    assert SAMPLERS["tail"].pool(cell, blocks) == SAMPLERS["tail"].pool(cell, blocks[::-1])


@pytest.mark.parametrize(
    "point",
    [
        Point("gaussian", 1000, kappa=1.3),
        Point("student-t:3", 2, head_dim=7, kappa=1, beta=0, sigma=1e-7, rho=-0.5, key_rho=0.25),
        Point("any", 1 << 40, kappa=1e22, beta=1e-300),
        Point("gaussian", 10, kappa=np.float64(2.5)),
    ],
)
def test_a_cell_is_named_by_its_identity(point: Point, monkeypatch: pytest.MonkeyPatch) -> None:
    """However the text of the name is made; and whatever the name of the noise holds."""
    for noise in (point.noise_identity, '50%, "raw"\n%r'):
        monkeypatch.setattr(Point, "noise_identity", noise)
        cell = Cell("survivors", point, "tail", 7)
        assert cell.digest == cell_digest(cell.identity(), 7)
        assert cell.identity()["noise"] == noise
