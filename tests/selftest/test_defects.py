"""A self-test that cannot fail is worthless: defects are put into the code, and each must be found.

Every defect is one that somebody could make. Where the self-test draws, its chance to miss the defect is far below 1e-6
at the size used here.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from scipy import special

from theory_lab.claims import Point
from theory_lab.estimation import Cell, direct, importance, intervals, tail
from theory_lab.noise import continuous
from theory_lab.selftest import Certificate, Setup, agreement, known, noise, randomness, verdicts
from theory_lab.selftest import intervals as interval_checks
from theory_lab.selftest import streams as stream_checks
from theory_lab.selftest.base import Check
from theory_lab.selftest.certificate import Group
from theory_lab.selftest.running import _findings
from theory_lab.streams import Stream, Streams, cell_digest

SETUP = Setup("quick", 20261130)


def failures(*checks: Check) -> list[str]:
    """Names of the findings that fail a certificate of these checks."""
    found = tuple(finding for check in checks for finding in _findings(check, SETUP))
    assert found
    return [f.name for _, f in Certificate.of(SETUP, (Group("some", found, 0.0),), complete=False).failures]


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Agreement over fewer laws: Gaussian scores alone."""
    cases = [
        ("S of gaussian", "survivors", Point("gaussian", 64, beta=0.3)),
        ("C of gaussian", "consensus", Point("gaussian", 64, beta=0.3)),
    ]
    monkeypatch.setattr(agreement, "_cases", lambda: cases)
    monkeypatch.setattr(agreement, "default_families", lambda: ["gaussian"])


def test_nothing_is_found_without_a_defect(few: None) -> None:
    """The checks that find the defects below pass on the code as it is."""
    assert not failures(agreement.with_exact, agreement.by_inversion, stream_checks.cells_share_nothing)
    assert not failures(interval_checks.fixed_size, interval_checks.sequential, interval_checks.students)


# ---- samplers ----------------------------------------------------------------------------------------------------


def test_a_sampler_that_is_one_percent_off(few: None, monkeypatch: pytest.MonkeyPatch) -> None:
    right = direct.threshold_word
    monkeypatch.setattr(direct, "threshold_word", lambda p: right(1.01 * p))
    assert {"S of gaussian, direct", "C of gaussian, direct"} == set(failures(agreement.with_exact))


def test_counts_that_are_one_percent_off(few: None, monkeypatch: pytest.MonkeyPatch) -> None:
    right = tail.draw_counts
    monkeypatch.setattr(tail, "draw_counts", lambda streams, n, p, rows: right(streams, n, 1.01 * p, rows))
    assert "S of gaussian, tail" in failures(agreement.with_exact)


def test_counts_of_the_right_mean_and_the_wrong_spread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Survivors that come in twos: no test of means can see it."""

    tail_counts = tail.draw_counts

    def doubled(streams: Streams, n: int, p: float, rows: int) -> np.ndarray:
        return 2 * tail_counts(streams, n, p / 2, rows)

    monkeypatch.setattr(tail, "draw_counts", doubled)
    assert "rows of S, tail" in failures(agreement.rows)


def test_weights_of_the_wrong_size(few: None, monkeypatch: pytest.MonkeyPatch) -> None:
    right = importance._Proposal.draw
    monkeypatch.setattr(importance._Proposal, "draw", lambda self, *given: 1.005 * right(self, *given))
    assert "S of gaussian, 4,096 keys, importance" in failures(agreement.with_exact)


def test_scores_that_are_three_percent_too_wide(few: None, monkeypatch: pytest.MonkeyPatch) -> None:
    right = continuous.GaussianLaw.isf
    monkeypatch.setattr(continuous.GaussianLaw, "isf", lambda self, u: 1.03 * right(self, u))
    monkeypatch.setattr(noise, "FAMILIES", ("gaussian", "laplace"))
    found = failures(noise.draws, noise.variances, noise.quantiles)
    assert {"histogram, gaussian", "mean square, gaussian", "variance, gaussian", "quantiles, gaussian"} <= set(found)
    assert not any("laplace" in name for name in found)


def test_a_wrong_exact_value(few: None, monkeypatch: pytest.MonkeyPatch) -> None:
    right = continuous.GaussianLaw.sf
    monkeypatch.setattr(continuous.GaussianLaw, "sf", lambda self, t: right(self, t) * (1 + 1e-12))
    assert failures(known.answers) == ["tail", "survivors", "consensus"]


# ---- streams -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("field", ["head_dim", "rho", "noise", "seed"])
def test_a_stream_that_two_cells_share(field: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cell's name forgets a field."""

    def forgetful(self: Cell) -> str:
        identity = {key: value for key, value in self.identity().items() if key != field}
        return cell_digest(identity, 0 if field == "seed" else self.seed)

    monkeypatch.setattr(Cell, "digest", property(forgetful))
    assert "words common to two streams" in failures(stream_checks.cells_share_nothing)


def test_cells_of_a_run_that_share_a_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen in the rows of whole runs, without looking at a stream."""
    right = Streams.__init__

    def shared(self: Streams, digest: str, block: int) -> None:
        right(self, "0" * 32, block)

    monkeypatch.setattr(Streams, "__init__", shared)
    found = failures(verdicts.familywise)
    assert "correlation of cells of a run" in found
    assert "correlation of runs of neighboring seeds" in found


@pytest.mark.parametrize("part", ["block", "purpose"])
def test_blocks_or_purposes_that_share_a_stream(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = Stream.__init__

    def same(self: Stream, digest: str, block: int, purpose: int) -> None:
        right(self, digest, 0 if part == "block" else block, 0 if part == "purpose" else purpose)

    monkeypatch.setattr(Stream, "__init__", same)
    found = failures(stream_checks.battery, stream_checks.words_are_philox, stream_checks.cells_share_nothing)
    assert f"correlation with the next word, neighboring {part}s" in found
    assert {"words of Philox-4x64-10", "words common to two streams"} <= set(found)


def _words(count: int, seed: int = 1) -> np.ndarray:
    return np.random.Generator(np.random.PCG64(seed)).integers(0, 1 << 64, count, np.uint64)


def _stuck(words: np.ndarray) -> np.ndarray:
    """One bit of 64 is set 51 times in 100."""
    extra = np.random.Generator(np.random.PCG64(2)).random(len(words)) < 0.02
    return words | (extra.astype(np.uint64) << np.uint64(17))


def _again(words: np.ndarray) -> np.ndarray:
    """Every 50th word is the one before it."""
    words[50::50] = words[49:-1:50]
    return words


def _rising(words: np.ndarray) -> np.ndarray:
    """Words 1, 2 and 3 of every 8 come in rising order."""
    words.reshape(-1, 8)[:, :3].sort(axis=1)
    return words


def _coarse(words: np.ndarray) -> np.ndarray:
    """Only 2^22 different values."""
    return words & np.uint64(((1 << 22) - 1) << 42)


def _lattice(words: np.ndarray) -> np.ndarray:
    """Birthdays on a lattice, as those of a linear congruence are: their spacings repeat too often."""
    return np.arange(len(words), dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)


def _even(words: np.ndarray) -> np.ndarray:
    """Bytes in turn: every one exactly as often as it should, which chance never is."""
    return np.arange(8 * len(words), dtype=np.uint64).astype(np.uint8).view("<u8")


@pytest.mark.parametrize(
    ("spoil", "tests"),
    [
        (_stuck, ("bit frequency",)),
        (_again, ("bits shared with the next word", "correlation with the next word")),
        (_rising, ("runs up and down",)),
        (_coarse, ("bit frequency", "byte frequency", "serial: pairs of bytes", "birthday spacings")),
        (_lattice, ("runs up and down", "birthday spacings", "serial: pairs of words")),
        (_even, ("byte frequency", "serial: pairs of bytes")),
    ],
)
def test_words_that_are_not_random(spoil: Callable, tests: tuple[str, ...]) -> None:
    words = spoil(_words(1 << 18))
    found = {test(words).name: test(words).p for test in randomness.BATTERY}
    for name in tests:
        p = found[name]
        assert p is not None, name
        assert p < 1e-9, name


# ---- intervals and verdicts --------------------------------------------------------------------------------------


@pytest.mark.parametrize("factor", [0.98, 1.02])
def test_clopper_pearson_too_short_or_too_long(factor: float, monkeypatch: pytest.MonkeyPatch) -> None:
    right = intervals.clopper_pearson

    def other(hits: int, size: int, error: float) -> tuple[float, float]:
        low, high = right(hits, size, error)
        mean = hits / size
        return mean - factor * (mean - low), min(1.0, mean + factor * (high - mean))

    monkeypatch.setattr(intervals, "clopper_pearson", other)
    found = failures(interval_checks.fixed_size, known.answers)
    assert len(found) == 10  # nine sizes and errors, and the constants


def test_an_interval_that_forgets_that_it_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        intervals, "beta_mixture", lambda hits, size, error, prior: intervals.clopper_pearson(hits, size, error)
    )
    assert any("beta-mixture" in name for name in failures(interval_checks.sequential))


def test_a_normal_quantile_in_place_of_students(monkeypatch: pytest.MonkeyPatch) -> None:
    def normal(mean: float, variance: float, size: int, error: float) -> tuple[float, float]:
        half = -float(special.ndtri(error / 2)) * np.sqrt(variance / size)
        return max(0.0, mean - half), mean + half

    monkeypatch.setattr(intervals, "student", normal)
    assert failures(interval_checks.students, known.answers) == ["student, normal rows", "student"]


def test_half_of_empirical_bernstein(monkeypatch: pytest.MonkeyPatch) -> None:
    right = intervals.empirical_bernstein

    def half(mean: float, variance: float, size: int, ceiling: float, error: float) -> tuple[float, float]:
        low, high = right(mean, variance, size, ceiling, error)
        return (mean + low) / 2, (mean + high) / 2

    monkeypatch.setattr(intervals, "empirical_bernstein", half)
    assert any("empirical-bernstein" in name for name in failures(interval_checks.bounded_values))


def test_a_run_without_a_correction_for_its_cells(monkeypatch: pytest.MonkeyPatch) -> None:
    import theory_lab.estimation.verdicts as judging

    monkeypatch.setattr(judging, "share", lambda alpha, cells: alpha)
    assert "false VIOLATED in any of 16 cells" in failures(verdicts.familywise)


def test_verdicts_that_are_always_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    import theory_lab.estimation.verdicts as judging

    for verdict, check in (("HOLDS", verdicts.power), ("VIOLATED", verdicts.true_cases)):
        number = judging.VERDICTS.index(judging.Verdict(verdict))
        monkeypatch.setattr(judging, "judge", lambda low, *given, number=number: np.full(np.shape(low), number))
        assert failures(check)


def test_a_wrong_constant(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = known.stored()
    for entry in entries:
        if entry["kind"] == "sharp-threshold" and entry["given"]["noise"] == "laplace":
            entry["value"] = entry["value"][:12] + str((int(entry["value"][12]) + 1) % 10) + entry["value"][13:]
    monkeypatch.setattr(known, "stored", lambda: entries)
    assert failures(known.answers) == ["sharp-threshold"]


def test_a_check_that_breaks_down_has_failed() -> None:
    def broken(setup: Setup):
        yield from ()
        raise ZeroDivisionError("float division by zero")

    assert failures(broken) == ["broken broke down"]
