"""The self-test as a command, its certificate, and the numbers that it rests on."""

from __future__ import annotations

import itertools
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from theory_lab.errors import InputError, WorkerError
from theory_lab.selftest import (
    GROUPS,
    LEVEL,
    Certificate,
    Finding,
    Setup,
    agreement,
    base,
    known,
    run_selftest,
    running,
)
from theory_lab.selftest.certificate import Group, code_hash
from theory_lab.selftest.streams import philox

ROOT = Path(__file__).resolve().parents[2]


def test_command_passes_here(cli, tmp_path: Path) -> None:
    """Quick size: everything passes, the certificate says of what, and torch is not imported."""
    code = "import sys; from theory_lab.main import main\ntry: main()\nfinally: assert 'torch' not in sys.modules"
    (tmp_path / "run.py").write_text(code)
    done = subprocess.run(
        [sys.executable, "run.py", "selftest", "--json", "certificate.json", "--quiet"],
        cwd=tmp_path, capture_output=True, text=True, env={"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    assert "VERDICT: PASS" in done.stdout
    found = json.loads((tmp_path / "certificate.json").read_text())
    assert found["verdict"] == "PASS"
    assert found["complete"] is True
    assert [group["name"] for group in found["groups"]] == list(GROUPS)
    assert found["hash"] in done.stdout
    assert found["code"] == code_hash()
    rows = [row for group in found["groups"] for row in group["findings"]]
    names = [(group["name"], row["check"]) for group in found["groups"] for row in group["findings"]]
    assert len(set(names)) == len(names) > 200
    assert all(row["amount"] > 0 for row in rows)
    assert sum("p" in row for row in rows) > 150


def test_a_failure_is_exit_code_1_and_named(tmp_path: Path) -> None:
    """A defect in the installed code: the command prints the certificate all the same, and what failed."""
    code = (
        "import theory_lab.estimation.intervals as i\nright = i.clopper_pearson\n"
        "i.clopper_pearson = lambda hits, size, error: right(hits, size, 1.1 * error)\n"
        "from theory_lab.main import main\nmain()"
    )
    (tmp_path / "run.py").write_text(code)
    words = ["selftest", "--only", "known answers", "--only", "random streams", "--json", "certificate.json", "--quiet"]
    done = subprocess.run(
        [sys.executable, "run.py", *words], cwd=tmp_path, capture_output=True, text=True,
        env={"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 1, done.stdout + done.stderr
    assert "VERDICT: FAIL" in done.stdout
    assert "ONLY: known answers, random streams" in done.stdout
    assert "  known answers: clopper-pearson (5 constants): largest error " in done.stdout
    assert json.loads((tmp_path / "certificate.json").read_text())["verdict"] == "FAIL"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--size", "huge"), "'huge' is not one of 'quick', 'standard', 'nightly'"),
        (("--seed", "-1"), "seed: -1"),
        (("--seed", "x"), "seed: x"),
        (("--processes", "0"), "processes: 0; 1 to 1,024 is allowed"),
        (("--processes", "two"), "processes: two"),
        (("--seed", str(1 << 63)), "2^63 - 1"),
        (("--only", "intervalls"), "did you mean 'intervals'?"),
        (("--json", "nowhere/certificate.json"), "its folder has to exist"),
        (("--json", "."), "this is a folder"),
    ],
)
def test_bad_input(cli, words: tuple[str, ...], message: str) -> None:
    done = cli("selftest", *words)
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""


def test_unknown_size_in_a_program() -> None:
    with pytest.raises(InputError, match="size: quik; did you mean 'quick'"):
        run_selftest("quik")


def test_same_seed_same_certificate() -> None:
    """But for times, and in however many processes; another seed draws other numbers."""
    groups = ["random streams", "noise", "intervals"]
    first, again = (run_selftest("quick", 5, groups=groups, processes=processes) for processes in (1, 2))
    other = run_selftest("quick", 6, groups=groups[:1])
    assert first.hash == again.hash
    assert first.groups[0].findings != other.groups[0].findings
    assert sum(group.seconds > 0 for group in again.groups) == 3
    assert not first.complete
    assert "ONLY: random streams, noise, intervals" in first.to_text()


def test_shares_of_a_check_are_the_check() -> None:
    """Every number of cases: each case once, and in order."""
    for many in range(70):
        cases = list(range(many))
        parts = [Setup("quick", 0, part).share(cases) for part in base.shares(agreement.with_exact)]
        assert list(itertools.chain.from_iterable(parts)) == cases
        assert max(map(len, parts)) <= 2
    assert base.shares(known.answers) == [(0, 1)]


def test_a_lost_worker_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(running.GROUPS, "noise", (_ends_its_process,))
    with pytest.raises(WorkerError, match="a worker process died"):
        run_selftest("quick", groups=["noise"], processes=2)


def _ends_its_process(setup: Setup) -> Iterator[Finding]:
    os._exit(1)
    yield


def _certificate(*findings: Finding) -> Certificate:
    return Certificate.of(Setup("quick", 0), (Group("one", findings, 1.0),), complete=True)


def test_verdicts_of_certificates() -> None:
    exact, wrong = Finding("a", 1, "x", "", passed=True), Finding("b", 1, "x", "", passed=False)
    assert _certificate(exact).passed
    assert not _certificate(exact, wrong).passed
    assert not _certificate().passed  # nothing tested
    many = [Finding(str(i), 1, "x", "", p=0.5) for i in range(99)]
    assert _certificate(*many, Finding("c", 1, "x", "", p=1.01 * LEVEL / 100)).passed
    assert not _certificate(*many, Finding("c", 1, "x", "", p=0.99 * LEVEL / 100)).passed
    assert not _certificate(Finding("nan", 1, "x", "", p=math.nan)).passed
    with pytest.raises(ValueError, match="two findings of one name"):
        _certificate(exact, Finding("a", 1, "x", "", passed=False))
    with pytest.raises(ValueError, match="either random or exact"):
        Finding("neither", 1, "x", "")


def test_hash_tells_an_altered_certificate() -> None:
    found = _certificate(Finding("a", 100, "draws", "z = 1", p=0.3))
    other = _certificate(Finding("a", 101, "draws", "z = 1", p=0.3))
    assert found.hash != other.hash


def test_holm_is_holms() -> None:
    """Against its definition: the k-th smallest of m is multiplied by m - k + 1, and none falls below one before."""
    assert base.holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert base.holm([0.9, 0.8]) == [1.0, 1.0]
    assert base.holm([]) == []


def test_p_values_against_scipys() -> None:
    for count, size, p in ((0, 10, 0.3), (3, 10, 0.3), (10, 10, 0.3), (700, 1000, 0.7), (5, 10**6, 1e-6)):
        assert base.at_least(count, size, p) == pytest.approx(stats.binom.sf(count - 1, size, p), rel=1e-9)
        assert base.at_most(count, size, p) == pytest.approx(stats.binom.cdf(count, size, p), rel=1e-9)
    for count in (0, 3, 40):
        low, high = stats.poisson.cdf(count, 7.5), stats.poisson.sf(count - 1, 7.5)
        assert base.poisson(count, 7.5) == pytest.approx(min(1, 2 * min(low, high)), rel=1e-9)
    observed, expected = np.array([18, 25, 30, 27]), np.full(4, 25.0)
    statistic, degrees, p = base.chi_square(observed, expected)
    assert (statistic, degrees) == (pytest.approx(stats.chisquare(observed).statistic), 3)
    assert p == pytest.approx(min(1, 2 * min(stats.chi2.cdf(statistic, 3), stats.chi2.sf(statistic, 3))))
    # Classes that are rarely met are joined, and nothing is lost.
    joined_o, joined_e = base._joined(np.array([1.0, 2, 30, 3, 1, 0]), np.array([4.0, 7, 20, 3, 2, 1]))
    assert joined_o.sum() == 37
    assert joined_e.sum() == 37
    assert joined_e.min() >= 10


def test_p_values_of_sound_code_are_calibrated() -> None:
    """Of 20 seeds of the battery, the share of p-values below 5% and 0.1% is what it should be."""
    p = [
        f.p
        for seed in range(20)
        for check in (GROUPS["random streams"][3],)
        for f in check(Setup("quick", 1000 + seed))
        if f.p is not None
    ]
    assert stats.binom.sf(sum(q < 0.05 for q in p) - 1, len(p), 0.05) > 1e-6
    assert stats.binom.sf(sum(q < 1e-3 for q in p) - 1, len(p), 1e-3) > 1e-6


def test_constants_are_what_mpmath_derives() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "tools" / "known_answers.py", "--check"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_philox_is_numpys() -> None:
    """At counters with every word in use; NumPy adds one first, with a carry across words."""
    for counter, key in ((0, 0), ((1 << 64) - 1, 5), ((1 << 256) - 1, (1 << 128) - 1), (1 << 200 | 77, 1 << 70 | 3)):
        words = np.array([counter >> 64 * i & (1 << 64) - 1 for i in range(4)], np.uint64)
        keys = np.array([key & (1 << 64) - 1, key >> 64], np.uint64)
        drawn = np.random.Philox(counter=words, key=keys).random_raw(4).tolist()
        assert drawn == list(philox((counter + 1) % (1 << 256), key))
