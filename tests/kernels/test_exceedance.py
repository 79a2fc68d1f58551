"""Monte Carlo exceedances: known answers of the generator, equal streams, and the laws they follow."""

from __future__ import annotations

import math

import pytest
import torch
from theory_kernels import Noise, exceedance_counts
from theory_kernels.exceedance import laws, reference

LAWS = [
    Noise("gaussian", 1 / 64),
    Noise("uniform", 1 / 64),
    Noise("rademacher", 1 / 64),
    Noise("student-t", 1 / 64, dof=3.0),
    Noise("gaussian", 1 / 64, correlation=0.5),
    Noise("student-t", 1 / 64, dof=5.0, correlation=-0.4),
]


@pytest.mark.parametrize(
    ("counter", "seed", "words"),
    [
        (0, 0, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (0xFFFFFFFF, 2**64 - 1, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    ],
)
def test_philox_known_answers(counter: int, seed: int, words: tuple[int, ...]) -> None:
    """The published vectors of Philox-4x32-10 (Salmon et al., SC 2011)."""
    c = torch.tensor([counter])
    assert tuple(int(w) for w in reference.philox(seed, c, c, c, c)) == words


@pytest.mark.parametrize("noise", LAWS, ids=lambda n: f"{n.family}-{n.correlation}")
def test_triton_counts_the_same_stream(noise: Noise, device: torch.device, triton: str, poisoned: None) -> None:
    arguments = (noise, [-0.2, 0.05, 0.3, 0.1, 0.1], [1, 8, 101, 77, 0], 21, 2**63 + 11)
    got = exceedance_counts(*arguments, device=device, implementation="triton")
    want = exceedance_counts(*arguments, implementation="reference")
    for have, expected in zip(got, want, strict=True):
        assert (have is None) == (expected is None)
        if have is not None:
            assert torch.equal(have.cpu(), expected)


def test_ties_are_settled(device: torch.device, triton: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tail of a quarter of 2^-16 comes from ties alone: without them the count would be 0."""
    p = 0.25 / 65536
    assert laws.digits(p) == (0, 1 << 30)
    monkeypatch.setattr(laws, "tail", lambda noise, tau: p)
    n, trials = (1 << 16, 128) if device.type == "cuda" else (1 << 12, 64)
    got = exceedance_counts(Noise(), 1.0, n, trials, 3, implementation="reference").first
    mean = n * trials * p
    assert abs(int(got.sum()) - mean) <= 5 * math.sqrt(mean)
    if device.type == "cuda":
        other = exceedance_counts(Noise(), 1.0, n, trials, 3, device=device).first
        assert torch.equal(other.cpu(), got)


@pytest.mark.parametrize("noise", LAWS, ids=lambda n: f"{n.family}-{n.correlation}")
def test_means_and_variances(noise: Noise) -> None:
    """Counts are binomial: mean within 5 standard errors, variance within 5 of its own."""
    n, trials, tau = 64, 4000, 0.11
    p = laws.tail(noise, tau)
    got = exceedance_counts(noise, tau, n, trials, 7)
    probabilities = [p]
    if noise.correlation is not None:
        probabilities += [p, laws.joint_tail(p, p, noise.correlation)]
    for counts, q in zip(got, probabilities, strict=False):
        assert counts is not None
        x, v = counts.double(), n * q * (1 - q)
        assert abs(float(x.mean()) - n * q) <= 5 * math.sqrt(v / trials)
        fourth = v * (1 + 3 * v - 6 * q * (1 - q))
        assert abs(float(x.var()) - v) <= 5 * math.sqrt(max(fourth - v * v, v) / trials) + 1e-12


def test_power_of_the_means_test() -> None:
    """The test above would notice a tail that is 10% off."""
    n, trials, tau = 64, 4000, 0.11
    p = laws.tail(LAWS[0], tau)
    x = exceedance_counts(LAWS[0], tau, n, trials, 7).first.double()
    assert abs(float(x.mean()) - 1.1 * n * p) > 5 * math.sqrt(n * p * (1 - p) / trials)


def test_expected_survivors_of_the_theory() -> None:
    """E[S_i] for gaussian noise, sigma = beta = kappa = 1, d = 64: 0.2390 at n = 2 and 0.1202 at n = 101."""
    noise, ns, trials = Noise("gaussian", 1 / 64), [2, 101], 20_000
    taus = [math.sqrt(2 * math.log(n) / 64) for n in ns]
    for n, tau, want in zip(ns, taus, (0.2390, 0.1202), strict=True):
        assert n * laws.tail(noise, tau) == pytest.approx(want, abs=5e-5)
    mean = exceedance_counts(noise, taus, ns, trials, 1).first.double().mean(1)
    for got, want in zip(mean.tolist(), (0.2390, 0.1202), strict=True):
        assert abs(got - want) <= 5 * math.sqrt(want / trials)


@pytest.mark.parametrize(("rho", "want"), [(0.0, 0.008), (0.0752, 0.033), (0.1231, 0.074), (0.3, 0.931), (0.5, 8.62)])
def test_expected_consensus_of_the_theory(rho: float, want: float) -> None:
    """E[C_i] n at n = 10^4 for correlated gaussian views, rounded as printed in the table."""
    n = 10**4
    p = laws.tail(Noise("gaussian", 1 / 64), math.sqrt(2 * math.log(n) / 64))
    value = n * n * laws.joint_tail(p, p, rho)
    digits = len(str(want).split(".")[1])
    assert round(value, digits) == pytest.approx(want, abs=1e-9)


def test_tails_against_closed_forms() -> None:
    for t in (-2.0, -0.3, 0.0, 0.7, 3.0, 30.0):
        # Variance dof / (dof - 2) makes the scale 1. Three degrees of freedom have a closed form.
        x = t / math.sqrt(3.0)
        want = 0.5 - (math.atan(x) + x / (1 + x * x)) / math.pi
        assert laws.tail(Noise("student-t", 3.0, dof=3.0), t) == pytest.approx(want, rel=1e-9, abs=1e-12)
    edge = math.sqrt(3.0)
    assert [laws.tail(Noise("uniform"), t) for t in (-9.0, 0.0, edge / 2, 9.0)] == pytest.approx([1, 0.5, 0.25, 0])
    assert [laws.tail(Noise("rademacher"), t) for t in (-1.1, -1.0, 0.9, 1.0)] == [1.0, 0.5, 0.5, 0.0]
    # Quadrant probability: 1/4 + asin(rho) / (2 pi).
    for rho in (-0.9, -0.3, 0.2, 0.99):
        want = 0.25 + math.asin(rho) / (2 * math.pi)
        assert laws.joint_tail(0.5, 0.5, rho) == pytest.approx(want, abs=1e-12)
    assert laws.joint_tail(0.3, 0.3, 1.0) == 0.3
    assert laws.joint_tail(0.3, 0.3, -1.0) == 0.0


def test_trials_and_rows_are_independent_of_their_number() -> None:
    few = exceedance_counts(Noise(), 0.3, [50, 60], 5, 9).first
    many = exceedance_counts(Noise(), 0.3, [50, 60, 70], 12, 9).first
    assert torch.equal(few, many[:2, :5])
    assert not torch.equal(few, exceedance_counts(Noise(), 0.3, [50, 60], 5, 10).first)
    assert exceedance_counts(Noise(), 0.3, 10, 0, 9).first.shape == (1, 0)
