"""Estimators agree: with exact values, with each other, and with scores that are drawn one by one and counted."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
from scipy import special

from theory_lab.claims.base import Point, Statistic
from theory_lab.claims.tda import exact_consensus, exact_survivors
from theory_lab.estimation import SAMPLERS
from theory_lab.estimation.base import BlockSum, Cell, Sample
from theory_lab.estimation.tail import row_counts
from theory_lab.noise import default_families
from theory_lab.noise.copula import latent_threshold
from theory_lab.selftest.base import Finding, Setup, both_sides, chi_square, normal, said, shared
from theory_lab.streams import F64, Streams

_CHUNK = 1 << 20


def _cases() -> list[tuple[str, Statistic, Point]]:
    """Name, statistic and point. Thresholds are lower than the theorem's, so that there is much to count."""
    many: list[tuple[str, Statistic, Point]] = [
        (f"S of {name}", "survivors", Point(name, 64, beta=0.3)) for name in default_families()
    ]
    many += [(f"C of {name}", "consensus", Point(name, 64, beta=0.4)) for name in ("gaussian", "spherical")]
    many += [(f"C, rho {rho}", "consensus", Point(length=64, beta=0.4, rho=rho)) for rho in (0.5, -0.3)]
    return many


def _exact(statistic: Statistic, point: Point) -> float:
    value = exact_survivors(point) if statistic == "survivors" else exact_consensus(point)
    assert value is not None
    return value


def draw(cell: Cell, trials: int) -> Sample:
    """A cell's sample of that many trials, block by block as a run draws it."""
    estimator = SAMPLERS[cell.estimator]
    size = estimator.block_trials(cell)
    blocks: list[BlockSum] = [
        estimator.run_block(cell, block, min(size, trials - block * size), Streams(cell.digest, block))
        for block in range(-(-trials // size))
    ]
    return estimator.pool(cell, blocks)


@shared
def with_exact(setup: Setup) -> Iterator[Finding]:
    """Every estimator against the exact value: a binomial test of counts, a z-test of weights."""
    keys = setup.pick(1 << 22, 1 << 27, 1 << 31)
    cases = [(what, statistic, point, name) for what, statistic, point in _cases() for name in SAMPLERS]
    rare: list[tuple[str, Statistic, Point]] = [
        (f"S of {name}, 4,096 keys", "survivors", Point(name, 4096)) for name in default_families()
    ]
    rare += [(f"C, rho {rho}, 10^7 keys", "consensus", Point(length=10**7, rho=rho)) for rho in (0.0, 0.5, -0.3)]
    cases += [(what, statistic, point, "") for what, statistic, point in rare]
    for what, statistic, point, name in setup.share(cases):
        exact = _exact(statistic, point)
        if name:
            # The plain witness is the slowest, and for correlated views much so.
            trials = {"direct": keys // 64 // (8 if point.rho else 1), "tail": keys // 64, "importance": keys >> 4}[
                name
            ]
            cell = Cell(statistic, point, name, setup.first_seed(f"agreement {what}"))
            yield _against(f"{what}, {name}", draw(cell, trials), exact)
        elif exact > 0:  # bounded laws may end below the threshold
            cell = Cell(statistic, point, "importance", setup.first_seed(f"rare {what}"))
            yield _against(f"{what}, importance", draw(cell, keys >> 4), exact)


def _against(name: str, sample: Sample, exact: float) -> Finding:
    if sample.model == "bernoulli":
        p = both_sides(int(sample.total), sample.size, exact / sample.scale)
        off = sample.estimate / exact - 1.0
        return Finding(name, sample.size, "keys", f"{off:+.2e} from the exact value", p)
    z = (sample.estimate - exact) / sample.standard_error if sample.variance > 0 else 0.0
    # Weights without any spread are the exact value, up to the rounding of their sum.
    if sample.variance <= 1e-24 * (sample.total / sample.size) ** 2:
        good = math.isclose(sample.estimate, exact, rel_tol=1e-9)
        return Finding(name, sample.size, "weights", f"constant, {sample.estimate / exact - 1:+.1e} off", passed=good)
    return Finding(name, sample.size, "weights", f"z = {z:+.2f}", normal(z))


@shared
def by_inversion(setup: Setup) -> Iterator[Finding]:
    """Scores drawn from the law one by one, compared with the threshold and counted, against the exact value."""
    amount = setup.pick(1 << 18, 1 << 22, 1 << 26)
    for name in setup.share(default_families()):
        point = Point(name, 64, beta=0.3)
        law, stream, hits = point.law(), setup.stream(f"inversion {name}"), 0
        for start in range(0, amount, _CHUNK):
            hits += int(np.count_nonzero(law.draw(stream, min(_CHUNK, amount - start)) > point.tau))
        exact = _exact("survivors", point) / 64
        off = hits / amount / exact - 1.0
        yield Finding(
            f"S of {name}, inversion", amount, "keys", f"{off:+.2e} from the exact value",
            both_sides(hits, amount, exact),
        )  # fmt: skip


@shared
def pairs_by_inversion(setup: Setup) -> Iterator[Finding]:
    """Correlated pairs of scores drawn one by one, and counted where both pass, against the exact value."""
    amount = setup.pick(1 << 18, 1 << 22, 1 << 26)
    for rho in setup.share((0.5, -0.3)):
        # Both latent normals in full, correlated by their definition.
        point = Point(length=64, beta=0.4, rho=rho)
        a = latent_threshold(point.law().tail(point.tau))
        stream, hits = setup.stream(f"pairs {rho}"), 0
        for start in range(0, amount, _CHUNK):
            x, y = special.ndtri(stream.uniforms(2 * min(_CHUNK, amount - start))).reshape(2, -1)
            hits += int(np.count_nonzero((x > a) & (rho * x + math.sqrt(1 - rho * rho) * y > a)))
        exact = _exact("consensus", point) / 64
        off = hits / amount / exact - 1.0
        yield Finding(
            f"C, rho {rho}, inversion", amount, "keys", f"{off:+.2e} from the exact value",
            both_sides(hits, amount, exact),
        )  # fmt: skip


@shared
def rows(setup: Setup) -> Iterator[Finding]:
    """The whole distribution of a row's count, not its mean alone: binomial, or a mixture where keys share a factor."""
    many, some = setup.pick(1 << 17, 1 << 22, 1 << 26), setup.pick(1 << 11, 1 << 15, 1 << 18)
    cases: list[tuple[str, Statistic, Point]] = [
        ("S", "survivors", Point(length=64, beta=0.3)),
        ("S of 10^6 keys", "survivors", Point(length=10**6, beta=0.9)),
        ("C, rho 0.5", "consensus", Point(length=64, beta=0.4, rho=0.5)),
        ("S, key_rho 0.3", "survivors", Point(length=64, beta=0.6, key_rho=0.3)),
    ]
    for what, statistic, point in setup.share(cases):
        most = min(point.length, 4000)
        pmf = _row_distribution(statistic, point, most)
        seed = setup.first_seed(f"rows {what}")
        cell = Cell(statistic, point, "tail", seed)
        amount = many if not (point.rho or point.key_rho) else many >> 3
        size = 1 << 16
        counts = np.zeros(most + 1, dtype=np.int64)
        for block, start in enumerate(range(0, amount, size)):
            drawn = row_counts(cell, min(size, amount - start), Streams(cell.digest, block))
            counts += np.bincount(np.minimum(drawn, most), minlength=most + 1)
        statistic_, degrees, p = chi_square(counts, pmf * amount)
        yield Finding(f"rows of {what}, tail", amount, "rows", f"chi-square {said(statistic_)} on {degrees}", p)
        if point.length <= 64:
            drawn = np.empty(some, dtype=np.int64)
            direct, cell = SAMPLERS["direct"], Cell(statistic, point, "direct", seed)
            for block in range(some):
                drawn[block] = direct.run_block(cell, block, 1, Streams(cell.digest, block)).total
            counts = np.bincount(drawn, minlength=most + 1)
            statistic_, degrees, p = chi_square(counts, pmf * some)
            yield Finding(f"rows of {what}, direct", some, "rows", f"chi-square {said(statistic_)} on {degrees}", p)


def _row_distribution(statistic: Statistic, point: Point, most: int) -> F64:
    """P(count = k) for k = 0..most, the last class holding what lies beyond."""
    h = np.arange(most + 1.0)
    if not point.key_rho:
        below = special.bdtr(h, point.length, _exact(statistic, point) / point.length)
        below[-1] = 1.0
        return np.diff(below, prepend=0.0)
    # Given the row's factor the keys are independent: a Gauss-Hermite mixture of binomials.
    nodes, weights = np.polynomial.hermite_e.hermegauss(200)
    a = latent_threshold(point.law().tail(point.tau))
    p = special.ndtr((math.sqrt(point.key_rho) * nodes - a) / math.sqrt(1 - point.key_rho))
    below = special.bdtr(h[:, None], point.length, p) @ (weights / weights.sum())
    below[-1] = 1.0
    return np.diff(below, prepend=0.0)


CHECKS = (with_exact, by_inversion, pairs_by_inversion, rows)
