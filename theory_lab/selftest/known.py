"""Known answers: what the code computes against constants that ``tools/known_answers.py`` derives with mpmath.

The constants lie in ``known_answers.json``; neither mpmath nor the script is needed to compare with them. Each carries
the relative tolerance that float64 must keep, derived with it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from importlib import resources
from typing import Any

import numpy as np

from theory_lab.claims.base import Point
from theory_lab.claims.tda import exact_consensus, exact_survivors
from theory_lab.estimation import intervals
from theory_lab.noise import Law, Scale, get_family
from theory_lab.noise.discrete import extremal_probability, kearns_saul_proxy
from theory_lab.selftest.base import Finding, Setup, said
from theory_lab.selftest.streams import philox
from theory_lab.studies.ours import sharp_threshold

Numbers = tuple[float, ...]


def _law(given: dict[str, Any]) -> Law:
    return get_family(given["noise"]).scaled(Scale(given["proxy"], given["head_dim"]))


def _one(function: Callable[..., float | None]) -> Callable[[dict[str, Any]], Numbers]:
    return lambda given: (float(function(**given)),)  # type: ignore[arg-type]  # None exists for noise "any" alone


#: How the toolkit computes each kind of constant.
COMPUTE: dict[str, Callable[[dict[str, Any]], Numbers]] = {
    "tail": lambda given: (_law(given).tail(given["t"]),),
    "quantile": lambda given: (float(_law(given).isf(given["u"])),),
    "survivors": _one(lambda **given: exact_survivors(Point(**given))),
    "consensus": _one(lambda **given: exact_consensus(Point(**given))),
    "extremal": _one(lambda tau, proxy: extremal_probability(tau, proxy)),
    "kearns-saul": _one(lambda p, spread: kearns_saul_proxy(p, spread)),
    "clopper-pearson": lambda given: intervals.clopper_pearson(**given),
    "beta-mixture": lambda given: intervals.beta_mixture(
        given["hits"], given["size"], given["error"], given["prior"]
    ),
    "empirical-bernstein": lambda given: intervals.empirical_bernstein(**given),
    "student": lambda given: intervals.student(**given),
    "sharp-threshold": _one(lambda noise, length: sharp_threshold(noise, length)),
}  # fmt: skip


def stored() -> list[dict[str, Any]]:
    """The constants: kind, given, value (decimal text, or a list of them) and rtol."""
    text = (resources.files("theory_lab.selftest") / "known_answers.json").read_text(encoding="utf-8")
    answers: list[dict[str, Any]] = json.loads(text)["answers"]
    return answers


def compare(entry: dict[str, Any]) -> float:
    """Largest relative error of an entry, in units of its tolerance; at most 1 is right."""
    if entry["kind"] == "philox":
        given = {name: sum(int(w, 16) << 64 * i for i, w in enumerate(ws)) for name, ws in entry["given"].items()}
        found = [f"{word:016x}" for word in philox(given["counter"], given["key"])]
        numpy_found = _numpy_philox(**given)
        return 0.0 if found == entry["value"] == numpy_found else math.inf
    values = entry["value"] if isinstance(entry["value"], list) else [entry["value"]]
    computed = COMPUTE[entry["kind"]](entry["given"])
    if len(computed) != len(values):
        return math.inf
    worst = 0.0
    for got, text in zip(computed, values, strict=True):
        true = float(text)
        off = abs(got - true) / abs(true) if true else abs(got)
        worst = max(worst, off / entry["rtol"] if off == off else math.inf)
    return worst


def _numpy_philox(counter: int, key: int) -> list[str]:
    """NumPy's words for a counter; it adds one before it draws."""
    before = (counter - 1) % (1 << 256)
    words = [
        np.array([value >> 64 * i & (1 << 64) - 1 for i in range(n)], np.uint64) for value, n in ((before, 4), (key, 2))
    ]
    drawn = np.random.Philox(counter=words[0], key=words[1]).random_raw(4)
    return [f"{int(word):016x}" for word in drawn]


def answers(setup: Setup) -> Iterator[Finding]:
    """Every stored constant, by kind."""
    by_kind: dict[str, list[dict[str, Any]]] = {}
    for entry in stored():
        by_kind.setdefault(entry["kind"], []).append(entry)
    for kind, entries in by_kind.items():
        errors = [compare(entry) for entry in entries]
        worst = max(errors)
        given = entries[errors.index(worst)]["given"]
        where = "" if worst <= 1 else f", at {', '.join(f'{k} {v}' for k, v in given.items())}"
        yield Finding(
            kind, len(entries), "constants", f"largest error {said(worst)} of what is allowed{where}",
            passed=worst <= 1.0,
        )  # fmt: skip


CHECKS = (answers,)
