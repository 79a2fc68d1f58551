"""Rows of ETA: what hard pruning changes, where suppressed weights sit, and the worked example.

Source: ETA (arXiv 2609.20888): threshold tau, mask m = sigmoid(alpha (s - tau)). Two readings of its multiplicative
suppression: ``logit``, weights exp(m s) / Z, and ``weight``, the printed formula m exp(s) / sum m exp(s).

**Hard against soft.** Let a be the soft weights, K the keys with s >= tau, and e, the suppressed mass, the sum of a
outside K.

* Dropping what is outside K changes the row by e in the sum of absolute differences: an identity.
* Dropping and renormalizing changes it by e in total variation: an identity too (outside K the row loses e, inside K
  every weight grows, by e together). Outputs differ by at most 2 e max |v|.
* Replacing the mask by 1{s >= tau}, so that survivors have the softmax of their scores as in the paper's worked
  example, is NOT within e: the mask also varies inside K, from 1/2 at the threshold to 1. For the ``weight`` reading
  what holds is TV <= sum_j p_j |m_j - 1_K(j)| / max(sum_j p_j m_j, sum_K p_j), p the plain softmax: for nonnegative f
  and g with sums F >= G, sum (f/F - g/G)_+ <= sum (f - g)_+ / F. And, since m varies by a factor of two inside K,
  TV <= e + 3 - 2 sqrt 2, the largest of x (1 - x) / (1 + x).

**The floor.** In the ``logit`` reading a suppressed key has weight exp(m s) / Z, within a factor exp(|m s|) of
exp(0) / Z. Where s < 0 < tau, |m s| <= |s| exp(-alpha |s|) <= 1 / (alpha e); where 0 <= s < tau the weight is above
exp(0) / Z: so no suppressed key falls below exp(-1 / (alpha e)) / Z, however low its score.
"""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from theory_lab.studies.base import Finding, Piece
from theory_lab.studies.search import F64, Found, Margin, describe, one_thread, search

_U = 2.0**-53
#: Of a difference of sums of weights, or of the logarithm of a weight; far above what 8 keys can cost.
_ROUNDING = 1e-12
_SPREAD = 3.0 - 2.0 * math.sqrt(2.0)


def setting(cases: F64) -> tuple[F64, F64, F64]:
    """Scores (B, W) up to 500 in size, thresholds (B,) and slopes (B,) from 1 to 100; in 3 cases of 10 a key at tau."""
    u = cases[:, 1]
    tau, alpha = u[:, 0], 10.0 ** (2.0 * u[:, 1])
    s = np.where(cases[:, 0] == -np.inf, -np.inf, np.clip(cases[:, 0], -500.0, 500.0))
    first = np.argmax(s > -np.inf, 1)
    at = np.flatnonzero(u[:, 2] < 0.3)
    s[at, first[at]] = tau[at]
    return s, tau, alpha


def eta_weights(s: F64, tau: F64, alpha: F64, reading: str, prune: str | None = None) -> F64:
    """Weights of the mechanism under test; every row is a head with its own constant threshold and slope."""
    import torch

    from theory_lab.attention.eta import ETALogit, ETAWeight

    kind = ETALogit if reading == "logit" else ETAWeight
    made = kind(tau=torch.from_numpy(tau.copy()), alpha=torch.from_numpy(alpha.copy()), prune=prune)
    return made.weights(torch.from_numpy(s.copy())[:, None, :])[:, 0].detach().numpy()


def mask(s: F64, tau: F64, alpha: F64) -> F64:
    """m = sigmoid(alpha (s - tau)), without overflow."""
    x = alpha[:, None] * (s - tau[:, None])
    small = np.exp(-np.abs(x))
    return np.where(x >= 0, 1.0, small) / (1.0 + small)


def _log_mask(s: F64, tau: F64, alpha: F64) -> F64:
    """log m, which stays finite where m underflows."""
    return -np.logaddexp(0.0, -alpha[:, None] * (s - tau[:, None]))


def _softmax(s: F64) -> F64:
    e = np.exp(s - s.max(1, keepdims=True))
    return e / e.sum(1, keepdims=True)


def _log_sum_exp(x: F64) -> F64:
    """In extended precision; -inf entries are masked, and a row of them gives -inf."""
    top = x.max(1)
    base = np.where(top > -np.inf, top, 0.0)
    with np.errstate(divide="ignore"):
        return base + np.log(np.exp((x - base[:, None]).astype(np.longdouble)).sum(1)).astype(float)


# ---- eta-hard-soft -------------------------------------------------------------------------------


def pruning(reading: str, prune: str, quantity: str) -> Margin:
    """Margin of one form of the statement, in multiples of its rounding budget (3 W + 10) u or, for
    ``excess`` and ``spread``, as it is.

    Parameters
    ----------
    reading : str
        ``logit`` or ``weight``.
    prune : str
        ``drop``, ``renormalize`` or ``exact``, as in ``theory_lab.attention.eta``.
    quantity : str
        ``identity``: |distance - mass|; ``excess``: distance - mass; ``output``: |o - o'| - 2 mass max |v|;
        ``misfit`` and ``spread``: distance minus the two bounds of the module's docstring. Distance is total variation,
        or the sum of absolute differences for ``drop``, whose rows do not sum to one.
    """

    def margin(cases: F64) -> F64:
        s, tau, alpha = setting(cases)
        kept = s >= tau[:, None]
        soft, hard = (eta_weights(s, tau, alpha, reading, p) for p in (None, prune))
        suppressed = np.where(kept, 0.0, soft).sum(1)
        distance = np.abs(soft - hard).sum(1) * (1.0 if prune == "drop" else 0.5)
        if quantity == "identity":
            found = np.abs(distance - suppressed)
        elif quantity == "output":
            v = 2.0 * cases[:, 2] - 1.0
            largest = np.abs(v).max(1)
            largest[largest == 0.0] = 1.0
            found = np.abs(((soft - hard) * v).sum(1)) / largest - 2.0 * suppressed
        elif quantity == "misfit":
            p, m = _softmax(s), mask(s, tau, alpha)
            sizes = np.maximum((p * m).sum(1), (p * kept).sum(1))
            found = distance - (p * np.abs(m - kept)).sum(1) / np.where(sizes > 0, sizes, np.nan)
        else:
            found = distance - suppressed - (_SPREAD if quantity == "spread" else 0.0)
        if quantity not in ("excess", "spread"):
            found = found / (_U * (3.0 * s.shape[1] + 10.0))
        # A row without survivors is dead: there is nothing to renormalize. Kept weights that underflow count as none.
        return np.where(np.where(kept, soft, 0.0).sum(1) > 1e-280, found, np.nan)

    return margin


def exact_identity(cases: F64) -> F64:
    """Margin: |TV - mass| of pruning and renormalizing, for whole-number weights, in rationals."""
    found = np.zeros(len(cases))
    for b, case in enumerate(cases):
        raw = [1 + int(1000 * u) for u in case[1]]
        kept = [v > 0 for v in case[0]]
        if not any(kept):
            found[b] = math.nan
            continue
        total, left = sum(raw), sum(w for w, keep in zip(raw, kept, strict=True) if keep)
        pairs = [(Fraction(w, total), Fraction(w if k else 0, left)) for w, k in zip(raw, kept, strict=True)]
        distance = sum(abs(x - y) for x, y in pairs) / 2
        found[b] = float(abs(Fraction(distance) - Fraction(total - left, total)))
    return found


def _finding(found: Found, subject: str, bound: float, method: str, assumptions: str = "met") -> Finding:
    note = ""
    if found.broken:
        s, tau, alpha = setting(found.case[None])
        note = f"smallest counterexample: scores {describe(s[0])}, tau {tau[0]:.6g}, alpha {alpha[0]:.6g}"
    return Finding.certain(
        subject, found.margin, bound, trials=found.cases, method=method, assumptions=assumptions, note=note
    )


def work_hard_soft(piece: Piece, seed: int) -> list[Finding]:
    """Every form of the statement for one reading, and the one that fails."""
    trials, reading = piece["trials"], piece["reading"]
    if reading == "exact":
        found = search(exact_identity, piece.streams(seed), trials, 0.0, width=6, rounds=1)
        return [
            Finding.certain(
                "renormalized, rational",
                found.margin,
                0.0,
                trials=found.cases,
                method="search in exact rationals; |TV - suppressed mass|",
            )
        ]
    forms = [
        ("renormalize", "identity", "renormalized", "|TV - suppressed mass| over its rounding budget", "met"),
        ("renormalize", "output", "renormalized, output", "|o - o'| / max|v| - 2 mass over its rounding budget", "met"),
        ("drop", "identity", "dropped", "|L1 - suppressed mass| over its rounding budget", "met"),
        (
            "exact",
            "excess",
            "softmax of survivors",
            "TV - suppressed mass",
            "not met: the soft weights themselves are pruned",
        ),
    ]
    if reading == "weight":
        forms += [
            ("exact", "misfit", "softmax of survivors, misfit", "TV - misfit of the mask over its budget", "met"),
            ("exact", "spread", "softmax of survivors, 3-2√2", "TV - mass - (3 - 2√2)", "met"),
        ]
    findings = []
    with one_thread():
        for block, (prune, quantity, label, method, assumptions) in enumerate(forms):
            count = trials if assumptions == "met" else max(256, trials // 10)
            streams = piece.streams(seed, block)
            bound = _ROUNDING if quantity in ("excess", "spread") else 1.0
            rounds = 20 if quantity == "spread" else 6
            found = search(pruning(reading, prune, quantity), streams, count, bound, rows=3, rounds=rounds)
            findings.append(_finding(found, f"{reading}, {label}", bound, "search; " + method, assumptions))
    return findings


# ---- eta-floor -----------------------------------------------------------------------------------


def floor(reading: str, quantity: str) -> Margin:
    """Margin: how far a suppressed weight strays from exp(0) / Z.

    ``within``: |log(a Z)| - |m s| in multiples of its rounding budget; ``below``: -log(a Z) - 1 / (alpha e). The
    budget is that of a softmax weight and of its logarithm, u (|top - m s| + |log Z| + 3 W + 20), and twice that of a
    product m s, whose mask inherits u |x| (1 - m) from its argument x = alpha (s - tau): 4 u |m s| (1 + (1 - m) |x|),
    the largest of the row. Z is summed in extended precision.
    """

    def margin(cases: F64) -> F64:
        s, tau, alpha = setting(cases)
        m = mask(s, tau, alpha)
        with np.errstate(invalid="ignore", divide="ignore"):
            x = np.where(s == -np.inf, -np.inf, m * s) if reading == "logit" else s + _log_mask(s, tau, alpha)
        top = x.max(1, keepdims=True)
        log_z = _log_sum_exp(x)
        a = eta_weights(s, tau, alpha, reading)
        suppressed = (s < tau[:, None]) & (s > -np.inf) & (a > (1e-290 if reading == "logit" else 0.0))
        with np.errstate(divide="ignore", invalid="ignore"):
            stray = np.log(a) + log_z[:, None]
            pull = np.abs(np.where(suppressed, m * s, 0.0))
            slope = np.where(s > -np.inf, alpha[:, None] * np.abs(s - tau[:, None]), 0.0)
            product = np.where(s > -np.inf, np.abs(m * s), 0.0) * (4.0 + 4.0 * (1.0 - m) * slope)
            budget = np.abs(top - x) + np.abs(log_z)[:, None] + 2.0 * product.max(1, keepdims=True)
            budget = _U * (budget + 3.0 * s.shape[1] + 20.0)
            within = (np.abs(stray) - pull) / budget
            below = -stray - 1.0 / (alpha[:, None] * math.e)
            ratio = np.where(suppressed, within if quantity == "within" else below, -np.inf)
        worst = ratio.max(1)
        return np.where(suppressed.any(1), worst, np.nan)

    return margin


def work_floor(piece: Piece, seed: int) -> list[Finding]:
    """Both forms of the floor for the ``logit`` reading; the ``weight`` reading as the control."""
    trials = piece["trials"]
    within = "search; |log(a Z)| - |m s| over its rounding budget"
    below = "search; -log(a Z) - 1/(alpha e)"
    broken = "not met: the logits are suppressed, not the weights"
    findings = []
    with one_thread():
        for block, (reading, quantity, subject, method, assumptions) in enumerate(
            (
                ("logit", "within", "logit, at exp(0)/Z", within, "met"),
                ("logit", "below", "logit, never below", below, "met"),
                ("weight", "within", "weight, at exp(0)/Z", within, broken),
                ("weight", "below", "weight, never below", below, broken),
            )
        ):
            count = trials // 2 if assumptions == "met" else max(256, trials // 20)
            bound = 1.0 if quantity == "within" else _ROUNDING
            found = search(floor(reading, quantity), piece.streams(seed, block), count, bound)
            findings.append(_finding(found, subject, bound, method, assumptions))
    return findings


# ---- eta-example ---------------------------------------------------------------------------------

_QUERY, _W, _B, _SLOPE = (0.5, -0.2, 0.8), (0.1, 0.3, -0.2), 0.1, 10.0
_SCORES = (0.9, 0.3, 0.7, 0.1, 0.85, 0.4)
_SURVIVORS = (0, 2, 4)

#: What the description of the paper's example prints: value and decimals.
PRINTED = {
    "tau": ((0.482,), (3,)),
    "mask": ((1.0, 0.14, 0.9, 0.02, 0.97, 0.31), (0, 2, 1, 2, 2, 2)),
    "m exp(s)": ((2.46, 0.19, 1.81, 0.02, 2.27, 0.46), (2,) * 6),
    "sum": ((7.21,), (2,)),
    "weights": ((0.34, 0.03, 0.25, 0.003, 0.31, 0.06), (2, 2, 2, 3, 2, 2)),
}
#: The same quantities without rounding on the way, and the logit reading, which the description does not work out.
REFERENCE = {
    "tau": ((0.482507,), (6,)),
    "mask": ((0.985, 0.139, 0.898, 0.021, 0.975, 0.305), (3,) * 6),
    "weights": ((0.3375, 0.0261, 0.2519, 0.0033, 0.3179, 0.0633), (4,) * 6),
    "logit weights": ((0.2484, 0.1067, 0.1920, 0.1026, 0.2346, 0.1157), (4,) * 6),
}
Numbers = npt.NDArray[np.float64]


def example() -> dict[str, Numbers]:
    """The worked example through the mechanism itself."""
    import torch

    from theory_lab.attention.eta import ETALogit, ETAWeight

    q = torch.tensor(_QUERY, dtype=torch.float64).reshape(1, 1, 1, 3)
    s = torch.tensor(_SCORES, dtype=torch.float64).reshape(1, 1, 1, 6)
    values = {}
    with torch.no_grad():
        for name, kind, prune in (
            ("logit weights", ETALogit, None),
            ("weights", ETAWeight, None),
            ("hard", ETAWeight, "exact"),
        ):
            made = kind(1, 3, alpha=_SLOPE, prune=prune)
            made.w.copy_(torch.tensor([_W], dtype=torch.float64))
            made.b.fill_(_B)
            values[name] = made.weights(s, q=q).reshape(-1).numpy()
    logit = sum(w * x for w, x in zip(_W, _QUERY, strict=True)) + _B
    tau = np.array([1.0 / (1.0 + math.exp(-logit))])
    values["tau"] = tau
    values["mask"] = mask(np.array([_SCORES]), tau, np.array([_SLOPE]))[0]
    values["m exp(s)"] = values["mask"] * np.exp(_SCORES)
    values["sum"] = np.array([values["m exp(s)"].sum()])
    return values


def stepwise_example() -> dict[str, Numbers]:
    """Every quantity of the example from the printed figures of the step before it, as the description proceeds."""
    tau = np.array(PRINTED["tau"][0])
    parts = np.array(PRINTED["mask"][0]) * np.round(np.exp(_SCORES), 2)
    shown = np.array(PRINTED["m exp(s)"][0])
    return {
        "tau": example()["tau"],
        "mask": mask(np.array([_SCORES]), tau, np.array([_SLOPE]))[0],
        "m exp(s)": parts,
        "sum": np.array([shown.sum()]),
        "weights": shown / PRINTED["sum"][0][0],
    }


def misprint(values: Numbers, printed: tuple[tuple[float, ...], tuple[int, ...]]) -> Numbers:
    """Distance from what is printed in units of its last decimal: at most 1/2 if rounded, below 1 if truncated."""
    shown, decimals = printed
    return np.abs(values - np.array(shown)) * 10.0 ** np.array(decimals)


def work_example(piece: Piece, seed: int) -> list[Finding]:
    """Every printed digit, the survivors and the blocks of the example."""
    exact, steps = example(), stepwise_example()
    direct = "not met: every step from the printed figures of the one before"
    rows: list[tuple[str, dict[str, Numbers], dict[str, tuple[tuple[float, ...], tuple[int, ...]]], float, str]] = [
        *((name, exact, REFERENCE, 0.5, "met") for name in REFERENCE),
        # The description truncates its threshold and one mask.
        *((f"{name}, printed", steps, PRINTED, 1.0, "met") for name in PRINTED),
        *((f"{name}, without rounding", exact, PRINTED, 1.0, direct) for name in ("m exp(s)", "sum")),
    ]
    findings = []
    for subject, values, printed, bound, assumptions in rows:
        name = subject.split(",")[0]
        off = misprint(values[name], printed[name])
        notes = []
        for token, (shown, decimals) in enumerate(zip(*printed[name], strict=True)):
            true = float(exact[name][token])
            if round(true, decimals) != shown:
                notes.append(
                    f"{shown:g} printed{f' for token {token + 1}' if len(off) > 1 else ''}, exactly {true:.6g}"
                )
        findings.append(
            Finding.certain(
                subject,
                float(off.max()),
                bound + 1e-9,
                trials=len(off),
                method="distance from the figures shown, in units of their last decimal",
                assumptions=assumptions,
                note="; ".join(notes),
            )
        )
    kept = tuple(np.flatnonzero(exact["hard"]).tolist())
    wrong = len(set(kept) ^ set(_SURVIVORS))
    blocks = sum(max(_SCORES[i : i + 2]) < exact["tau"][0] for i in (0, 2, 4))
    return [
        *findings,
        Finding.certain("survivors 1, 3, 5", float(wrong), 0.0, trials=6, method="tokens that differ"),
        Finding.certain("blocks of two", float(blocks), 0.0, trials=3, method="blocks skipped; the example keeps all"),
    ]
