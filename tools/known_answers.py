"""Derive the constants of ``theory-lab selftest`` with mpmath, to 40 digits, and write them to the package.

Nothing here imports theory_lab: every law, statistic and interval is written out from its definition, so that an
agreement says something. Each constant carries the relative tolerance that float64 must keep: a few roundings, times
how much the value reacts to a rounding of its inputs (its condition), or what an iterative solution promises.

    python tools/known_answers.py            # writes theory_lab/selftest/known_answers.json
    python tools/known_answers.py --check    # says whether the file is what would be written
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mpmath
from mpmath import mp, mpf

FILE = Path(__file__).resolve().parent.parent / "theory_lab" / "selftest" / "known_answers.json"
EPS = 2.0**-52
DIGITS = 40
SHOWN = 20

Entry = dict[str, Any]
Function = Callable[[Any], Any]


def normal_tail(x: Any) -> Any:
    """P(Z > x)."""
    return mpmath.erfc(x / mpmath.sqrt(2)) / 2


def tail_of(family: str, proxy: Any, head_dim: int, tau: Any) -> Function:
    """P(X > t) of a family with that proxy, as a function of t >= 0."""
    name, _, inner = family.partition("(")
    number = mpf(inner[:-1]) if inner else None
    if name == "gaussian":
        return lambda t: normal_tail(t / mpmath.sqrt(proxy))
    if name == "spherical":
        # <u, w> for independent directions: its square is Beta(1/2, (d - 1)/2).
        a = mpmath.sqrt(proxy * head_dim)
        half = mpf(head_dim - 1) / 2
        return lambda t: mpmath.betainc(half, mpf(1) / 2, 0, max(mpf(0), 1 - (t / a) ** 2), regularized=True) / 2
    if name == "uniform":
        a = mpmath.sqrt(3 * proxy)
        return lambda t: max(mpf(0), (a - t) / (2 * a))
    if name == "beta":
        a = mpmath.sqrt(proxy * (2 * number + 1))
        return lambda t: mpmath.betainc(number, number, 0, max(mpf(0), (1 - t / a) / 2), regularized=True)
    if name == "truncated-normal":
        mass = 1 - 2 * normal_tail(number)
        variance = 1 - 2 * number * mpmath.npdf(number) / mass
        s = mpmath.sqrt(proxy / variance)
        return lambda t: max(mpf(0), normal_tail(t / s) - normal_tail(number)) / mass
    if name == "student-t":
        s = mpmath.sqrt(proxy * (number - 2) / number if number > 2 else proxy)
        return lambda t: (
            mpmath.betainc(number / 2, mpf(1) / 2, 0, number / (number + (t / s) ** 2), regularized=True) / 2
        )
    if name == "laplace":
        b = mpmath.sqrt(proxy / 2)
        return lambda t: mpmath.exp(-t / b) / 2
    if name == "rademacher":
        return lambda t: mpf(1) / 2 if t < mpmath.sqrt(proxy) else mpf(0)
    if name == "two-point":
        p = extremal(tau, proxy)
        return lambda t: p if t <= tau else mpf(0)
    raise ValueError(family)


def kearns_saul(p: Any, spread: Any) -> Any:
    """Proxy of the law with atoms D(1-p) and -Dp: D^2 (1 - 2p) / (2 log((1-p)/p))."""
    return spread**2 * (1 - 2 * p) / (2 * mpmath.log((1 - p) / p))


def extremal(tau: Any, proxy: Any) -> Any:
    """The p at which the two-point law with upper atom tau has that proxy."""

    def excess(logit: Any) -> Any:
        p = 1 / (1 + mpmath.exp(-logit))
        return mpmath.log(kearns_saul(p, tau / (1 - p)) / proxy)

    logit = mpmath.findroot(excess, (mpf(-200), mpf(2) - mpf(1) / 3), solver="anderson", tol=mpf(10) ** -60)
    return 1 / (1 + mpmath.exp(-logit))


def condition(function: Function, x: Any) -> float:
    """|x f'(x) / f(x)|: by how many roundings f moves when x moves by one."""
    value = function(x)
    return float(abs(x * mpmath.diff(function, x) / value)) if value else 0.0


def entry(kind: str, value: Any, rtol: float, **given: Any) -> Entry:
    """A constant as it is stored; a list for a pair of ends."""
    shown = [mpmath.nstr(v, SHOWN) for v in value] if isinstance(value, tuple) else mpmath.nstr(value, SHOWN)
    return {"kind": kind, "given": given, "value": shown, "rtol": float(f"{rtol:.2g}")}


def threshold(point: dict[str, Any]) -> tuple[Any, Any]:
    """tau and the proxy of a setting."""
    n, d = point["length"], point.get("head_dim", 64)
    kappa, beta, sigma = (mpf(point.get(name, 1.0)) for name in ("kappa", "beta", "sigma"))
    tau = beta * mpmath.sqrt(2 * max(mpf(0), mpmath.log(n / kappa)) / d)
    return tau, sigma**2 / d


# ---- what is derived ---------------------------------------------------------------------------------------------

SMOOTH = ("gaussian", "spherical", "uniform", "beta(2)", "beta(0.5)", "truncated-normal(2)", "student-t(3)",
          "student-t(1.5)", "laplace")  # fmt: skip
FAMILIES = (*SMOOTH, "rademacher", "two-point")


def tails() -> Iterator[Entry]:
    """Tail functions, at thresholds that the families reach, and quantiles."""
    proxy, head_dim = 0.03125, 48
    for family in SMOOTH:
        tail = tail_of(family, mpf(proxy), head_dim, mpf(0))
        for t in (0.0625, 0.1875, 0.3125, 0.875):
            value = tail(mpf(t))
            if value <= 0:
                continue
            near = condition(tail, mpf(t))
            # Next to the end of a support the difference 1 - t/a loses digits: part of the condition.
            yield entry("tail", value, EPS * (16 + 8 * near), noise=family, proxy=proxy, head_dim=head_dim, t=t)
            # The quantile of the stored tail is t again.
            u = float(value)
            back = _root(tail, mpf(u), t * (1 - mpf(10) ** -6), t * (1 + mpf(10) ** -6))
            steep = 1.0 / near if near else 1.0
            # SciPy before 1.17 ends its search for Student's quantile at 3e-10 of the probability.
            search = 1e-9 * steep if family.startswith("student") else 0.0
            yield entry(
                "quantile", back, search + EPS * (16 + 64 * steep), noise=family, proxy=proxy, head_dim=head_dim, u=u
            )


def survivors() -> Iterator[Entry]:
    """E[S] = n P(X > tau)."""
    points = (
        {"length": 2}, {"length": 101}, {"length": 1000001}, {"length": 64, "beta": 0.75, "kappa": 2.5},
        {"length": 4096, "head_dim": 128, "sigma": 1.25},
    )  # fmt: skip
    for family in FAMILIES:
        for point in points:
            tau, proxy = threshold(point)
            tail = tail_of(family, proxy, point.get("head_dim", 64), tau)
            value = point["length"] * tail(tau)
            if value <= 0:
                continue
            near = 1.0 if family in ("rademacher", "two-point") else condition(tail, tau)
            if family == "two-point":
                near = float(tau**2 / proxy)
            yield entry("survivors", value, EPS * (32 + 8 * near), noise=family, **point)


def consensus() -> Iterator[Entry]:
    """E[C] = n P(Z_1 > a, Z_2 > a), by integrating the conditional probability."""
    for length in (100, 10**4, 10**8):
        for rho in (0.0, 0.0752, 0.3, 0.5, 0.9, -0.25):
            tau, proxy = threshold({"length": length})
            a, r = tau / mpmath.sqrt(proxy), mpf(rho)
            value = length * (normal_tail(a) ** 2 if rho == 0 else joint_tail(a, r))
            # joint_survival integrates to a relative 1e-12.
            near = 2.0 * float(a * a)
            yield entry("consensus", value, (0 if rho == 0 else 4e-12) + EPS * (32 + 8 * near), length=length, rho=rho)


def joint_tail(a: Any, r: Any) -> Any:
    """P(Z_1 > a, Z_2 > a) of normals with correlation r."""
    slope = mpmath.sqrt(1 - r * r)
    ends = [a, a + mpf(1) / 4, a + 1, a + 3, a + 8, a + 40]
    return mpmath.quad(lambda x: mpmath.npdf(x) * normal_tail((a - r * x) / slope), ends)


def extremes() -> Iterator[Entry]:
    """The two-point law that attains the bound, and its proxy."""
    for tau in (0.125, 0.5, 2.0, 5.0, 8.0):
        value = extremal(mpf(tau), mpf(1))
        yield entry("extremal", value, EPS * (64 + 16 * tau * tau), tau=tau, proxy=1.0)
    for p in (1e-9, 0.015625, 0.3125, 0.96875):
        yield entry("kearns-saul", kearns_saul(mpf(p), mpf(2)), EPS * 64, p=p, spread=2.0)


def intervals() -> Iterator[Entry]:
    """Ends of the confidence intervals."""
    for hits, size, error in ((0, 20, 0.05), (3, 20, 0.05), (20, 20, 0.1), (150, 4096, 1e-3), (7, 10**6, 1e-6)):
        low, high = binomial_ends(hits, size, mpf(error) / 2)
        yield entry("clopper-pearson", (low, high), 1e-11, hits=hits, size=size, error=error)
    for hits, size, error, prior in ((0, 100, 0.05, 0.01), (7, 100, 0.05, 0.05), (300, 4096, 1e-3, 0.1)):
        b = (1 - mpf(prior)) / mpf(prior)
        mixture = mpmath.log(mpmath.beta(1 + hits, b + size - hits)) - mpmath.log(mpmath.beta(1, b))
        target = mixture + mpmath.log(mpf(error))

        def wealth(p: Any, hits: int = hits, size: int = size, target: Any = target) -> Any:
            return target - (hits * mpmath.log(p) if hits else 0) - (size - hits) * mpmath.log(1 - p)

        mode = mpf(hits) / size
        low = mpf(0) if hits == 0 else _bisect(wealth, mode / 1000, mode)
        high = _bisect(wealth, mode if hits else mpf(10) ** -9, mpf(1) - mpf(10) ** -9)
        yield entry("beta-mixture", (low, high), 1e-10, hits=hits, size=size, error=error, prior=prior)
    for mean, variance, size, ceiling, error in ((0.5, 0.0625, 4000, 1.0, 0.01), (2.0, 1.5, 100_000, 3.0, 1e-6)):
        log = mpmath.log(4 / mpf(error))
        half = mpmath.sqrt(2 * mpf(variance) * log / size) + 7 * mpf(ceiling) * log / (3 * mpf(size - 1))
        yield entry(
            "empirical-bernstein", (mpf(mean) - half, mpf(mean) + half), EPS * 64,
            mean=mean, variance=variance, size=size, ceiling=ceiling, error=error,
        )  # fmt: skip
    for mean, variance, size, error in ((7.0, 2.25, 12, 0.05), (3.0, 0.5, 400, 1e-6)):
        quantile = student_quantile(mpf(size - 1), mpf(error))
        half = quantile * mpmath.sqrt(mpf(variance) / size)
        yield entry(
            "student", (mpf(mean) - half, mpf(mean) + half), 1e-12, mean=mean, variance=variance, size=size, error=error
        )


def binomial_ends(hits: int, size: int, half: Any) -> tuple[Any, Any]:
    """Where the binomial tails of a count are `half`."""
    low = mpf(0) if hits == 0 else _root(lambda p: 1 - _at_most(hits - 1, size, p), half)
    high = mpf(1) if hits == size else _root(lambda p: _at_most(hits, size, p), half)
    return low, high


def student_quantile(nu: Any, error: Any) -> Any:
    """The x with P(|T| > x) = error."""
    half = mpf(1) / 2
    return _root(lambda x: mpmath.betainc(nu / 2, half, 0, nu / (nu + x * x), regularized=True), error, mpf(1), mpf(60))


def own_results() -> Iterator[Entry]:
    """The sharp threshold of the smooth laws, and the independence horizon."""
    for family in ("gaussian", "spherical", "beta(2)", "laplace"):
        for length in (100, 10**6):
            proxy = mpf(1) / 64
            tail = tail_of(family, proxy, 64, mpf(0))
            value = _root(tail, mpf(1) / length, mpf(0), mpf(4))
            yield entry("sharp-threshold", value, EPS * 256, noise=family, length=length)


def _at_most(hits: int, size: int, p: Any) -> Any:
    """P(Binomial(size, p) <= hits), term by term."""
    term = total = (1 - p) ** size
    for k in range(1, hits + 1):
        term *= p * (size - k + 1) / ((1 - p) * k)
        total += term
    return total


def _root(function: Function, value: Any, low: Any = None, high: Any = None) -> Any:
    """Where a monotone function takes a value; between 0 and 1 unless told."""
    low, high = (mpf(10) ** -12 if low is None else low), (1 - mpf(10) ** -12 if high is None else high)
    return _bisect(lambda x: function(x) - value, low, high)


def _bisect(function: Function, low: Any, high: Any) -> Any:
    """Bisection, to the working precision: no start can lead it astray."""
    at_low = function(low)
    if at_low * function(high) > 0:
        raise ValueError("no change of sign")
    for _ in range(mp.prec + 20):
        middle = (low + high) / 2
        if function(middle) * at_low > 0:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def philox() -> Iterator[Entry]:
    """The published test vectors of Philox-4x64-10 (Random123, kat_vectors)."""
    zero, one = "0" * 16, "f" * 16
    pi = ("243f6a8885a308d3", "13198a2e03707344", "a4093822299f31d0", "082efa98ec4e6c89")
    pi_key = ("452821e638d01377", "be5466cf34e90c6c")
    of_zeros = ("16554d9eca36314c", "db20fe9d672d0fdc", "d7e772cee186176b", "7e68b68aec7ba23b")
    of_ones = ("87b092c3013fe90b", "438c3c67be8d0224", "9cc7d7c69cd777b6", "a09caebf594f0ba0")
    of_pi = ("a528f45403e61d95", "38c72dbd566e9788", "a5a1610e72fd18b5", "57bd43b5e52b7fe6")
    published = (((zero,) * 4, (zero,) * 2, of_zeros), ((one,) * 4, (one,) * 2, of_ones), (pi, pi_key, of_pi))
    for counter, key, words in published:
        yield {
            "kind": "philox",
            "given": {"counter": list(counter), "key": list(key)},
            "value": list(words),
            "rtol": 0.0,
        }


def derive() -> list[Entry]:
    """Every constant."""
    with mpmath.workdps(DIGITS):
        parts = (tails, survivors, consensus, extremes, intervals, own_results, philox)
        return [found for part in parts for found in part()]


def text(entries: list[Entry]) -> str:
    """The file: an entry a line, so that changes can be read."""
    lines = ",\n".join("  " + json.dumps(found) for found in entries)
    return f'{{"derived": "tools/known_answers.py, mpmath, {DIGITS} digits", "answers": [\n{lines}\n]}}\n'


if __name__ == "__main__":
    made = text(derive())
    if "--check" in sys.argv[1:]:
        same = FILE.read_text(encoding="utf-8") == made
        print("as derived" if same else f"{FILE.name} differs from what mpmath derives", file=sys.stderr)
        sys.exit(0 if same else 1)
    FILE.write_text(made, encoding="utf-8")
