"""Small made-up frames for every drawing: what matters is how they look, not what they say."""

from __future__ import annotations

import numpy as np
import pandas as pd

from theory_lab.reproduce import Experiment
from theory_lab.reproduce.kinds import KINDS
from theory_lab.reproduce.printed import Printed

LENGTHS = [4, 64, 1024, 16384]


def experiment(kind: str, draw: str, options: dict | None = None, printed: Printed | None = None, **settings):
    """An experiment without a file."""
    return Experiment(
        folder="own", name=draw, file="", title=draw, source="s", caption="c", kind=KINDS[kind], settings=settings,
        quick={}, seed=0, draw=draw, options=options or {}, printed=printed,
    )  # fmt: skip


def _check() -> pd.DataFrame:
    rows = []
    for noise, slope in (("gaussian", -0.1), ("spherical", -0.5), ("student-t(3)", 0.6)):
        for n in LENGTHS:
            exact = 0.3 * n**slope
            rows.append(
                {
                    "claim": "tda-4.3", "noise": noise, "length": n, "estimate": exact * 1.02, "ci_low": exact * 0.8,
                    "ci_high": exact * 1.25, "exact": exact, "bound": 1.0, "trials": 1000,
                    "estimator": "tail", "verdict": "VIOLATED" if exact > 1 else "HOLDS", "assumptions": "met",
                    "method": "m", "kappa": 1.0, "beta": 1.0, "sigma": 1.0, "rho": 0.0, "key_rho": 0.0, "head_dim": 64,
                }
            )  # fmt: skip
    return pd.DataFrame(rows)


def _findings() -> pd.DataFrame:
    rows = _check().assign(claim="asentmax-paths", length=None, estimator="study").iloc[[0, 4, 11]]
    verdicts = ["HOLDS", "INCONCLUSIVE", "VIOLATED"]
    return rows.assign(noise=["one", "two", "three"], assumptions=["met", "met", "control"], verdict=verdicts)


def _phase() -> pd.DataFrame:
    return pd.DataFrame(
        [
            {"law": law, "mechanism": m, "scale": s, "length": n, "normalized_entropy": min(1.0, n**0.1 / s / 2.2),
             "standard_error": 0.0, "dead_rows": 0.9 if m == "tra" and s < 1 else 0.0, "rows": 4, "seed": 0}
            for law in ("gaussian", "uniform") for m in ("softmax", "tra") for s in (0.5, 1.0, 2.0) for n in LENGTHS
        ]
    )  # fmt: skip


def _mechanisms() -> pd.DataFrame:
    return pd.DataFrame(
        [
            {"law": law, "mechanism": m, "length": n, "statistic": "normalized_entropy", "estimate": n**-power,
             "ci_low": n**-power - 0.05, "ci_high": n**-power + 0.05, "rows": 8, "dead_rows": 0.0, "seed": 0}
            for law in ("gaussian", "uniform")
            for m, power in (("softmax", 0.01), ("ssmax", 0.05), ("entmax", 0.1), ("tra", 0.3), ("landmark", 0.2))
            for n in LENGTHS
        ]
    )  # fmt: skip


def _threshold() -> pd.DataFrame:
    return pd.DataFrame(
        [
            {"noise": noise, "length": n, "effective_beta": top - 1 / n, "estimate": 1.0 + 0.01 / n, "ci_low": 0.98,
             "ci_high": 1.02, "bound": 1.0, "trials": 9, "verdict": "HOLDS", "seed": 0}
            for noise, top in (("gaussian", 0.9), ("spherical", 0.8)) for n in LENGTHS
        ]
    )  # fmt: skip


def _speed() -> pd.DataFrame:
    return pd.DataFrame(
        [
            {"mechanism": m, "direction": "forward", "length": n, "estimate": base * n**0.2, "ci_low": base * n**0.19,
             "ci_high": base * n**0.21, "ms": 1.0, "ms_p10": 1.0, "ms_p90": 1.0, "gpu": "g"}
            for m, base in (("TRA", 0.9), ("TDA", 0.5)) for n in LENGTHS
        ]
    )  # fmt: skip


def _probe() -> pd.DataFrame:
    return pd.DataFrame(
        [
            {"weights": w, "length": n, "measure": "g_sink_ratio_1", "estimate": top * n**-0.2,
             "ci_low": top * n**-0.25, "ci_high": top * n**-0.15}
            for w, top in (("model", 0.9), ("TRA on its scores", 0.3), ("uniform attention", 0.1)) for n in LENGTHS
        ]
    )  # fmt: skip


def _curves() -> pd.DataFrame:
    return pd.DataFrame(
        [
            {"series": s, "x": float(x), "value": top - x / 100, "low": top - x / 80, "high": top - x / 120, "text": ""}
            for s, top in (("Softmax", 60.0), ("TDA", 90.0)) for x in (500, 1000, 2000, 4000)
        ]
    )  # fmt: skip


def _map() -> pd.DataFrame:
    words = ["The", "quick", "brown", "fox"]
    return pd.DataFrame(
        [
            {"row": f"{r} {a}", "column": f"{c} {b}", "value": (c - r) / 4 if c <= r else np.nan, "low": np.nan,
             "high": np.nan, "text": ""}
            for r, a in enumerate(words) for c, b in enumerate(words)
        ]
    )  # fmt: skip


def _tails() -> pd.DataFrame:
    t = np.linspace(0, 1, 9)
    rows = [
        {"quantity": "tail", "x": x, "estimate": 10.0 ** (-6 * x), "ci_low": 10.0 ** (-7 * x),
         "ci_high": 10.0 ** (-5 * x), "heads_low": 10.0 ** (-9 * x), "heads_high": 10.0 ** (-4 * x)}
        for x in t
    ]  # fmt: skip
    rows += [
        {"quantity": "survivors", "x": float(n), "estimate": n**0.5, "ci_low": n**0.4, "ci_high": n**0.6,
         "heads_low": n**0.1, "heads_high": n**0.8}
        for n in LENGTHS
    ]  # fmt: skip
    rows += [
        {"quantity": "sigma", "x": float(layer), "estimate": 1.0 + head / 10, "ci_low": 0.9, "ci_high": 1.4}
        for layer in range(4) for head in range(3)
    ]  # fmt: skip
    return pd.DataFrame(rows).assign(head_dim=64)


def _panels() -> pd.DataFrame:
    more = _curves().assign(panel="less", value=_curves().value / 500, low=np.nan, high=np.nan)
    one = (
        _curves()
        .query("x == 1000 and series == 'TDA'")
        .assign(panel="less", series="alone", value=0.1, low=0.05, high=0.12)
    )
    return pd.concat([_curves().assign(panel="more"), more, one])


def _overview() -> pd.DataFrame:
    rows = [
        {"length": n, "measure": measure, "estimate": top * n**-0.2, "ci_low": top * n**-0.22,
         "ci_high": top * n**-0.18}
        for n in (64, 512) for measure, top in (("g_sink_ratio_1", 0.9), ("g_sink_uniform_1", 0.2))
    ]  # fmt: skip
    rows += [
        {**row, "layer": layer, "estimate": row["estimate"] * (1 - layer / 6)} for row in rows for layer in range(4)
    ]
    rows += [
        {"length": 512, "layer": layer, "measure": "near_zero_0.001", "estimate": layer / 5, "ci_low": layer / 5 - 0.05,
         "ci_high": layer / 5 + 0.04}
        for layer in range(4)
    ]  # fmt: skip
    rows += [
        {"length": 512, "layer": layer, "head": head, "measure": measure,
         "estimate": np.nan if layer == head == 2 else (layer + head) / 6}
        for layer in range(4) for head in range(3) for measure in ("g_sink_ratio_1", "normalized_entropy")
    ]  # fmt: skip
    return pd.DataFrame(rows)


def _unrelated() -> pd.DataFrame:
    rows = [
        {"quantity": quantity, "layer": layer, "x": t, "estimate": 0.5 * np.exp(-((t + 3) ** 2) / (2 + layer))}
        for quantity in ("tail", "centered tail") for layer in range(3) for t in np.linspace(-3, 4, 15)
    ]  # fmt: skip
    rows += [
        {"quantity": quantity, "layer": layer, "head": head, "estimate": 2.0 ** (layer - head), "ci_low": 0.1,
         "ci_high": 9.0}
        for quantity in ("proxy", "survivors") for layer in range(3) for head in range(3)
    ]  # fmt: skip
    return pd.DataFrame(rows).assign(beta=1.0, kappa=1.0, head_dim=64)


def _features() -> pd.DataFrame:
    answers = {"Softmax": ("no", "no"), "TRA": ("yes", "no"), "TDA": ("yes", "yes")}
    return pd.DataFrame(
        [
            {"row": row, "column": column, "text": text, "margin": 0.1}
            for row, texts in answers.items()
            for column, text in zip(("exact zeros", "signed weights"), texts, strict=True)
        ]
    )


_TABLE_1 = Printed(
    "s", {"exact zeros": "", "signed weights": ""},
    {"TRA": {"exact zeros": "yes", "signed weights": "yes"}, "TDA": {"exact zeros": "yes", "signed weights": "-"}},
)  # fmt: skip
_PASSKEY = Printed("s", {"4000": "%"}, {"Softmax": {"4000": "6"}, "TDA": {"4000": "15"}})

#: Name -> (frame, experiment).
SAMPLES = {
    "bounds": (_check, experiment("check", "bounds", claims=("tda-4.3",))),
    "findings": (_findings, experiment("check", "bounds", claims=("asentmax-paths",))),
    "ratio": (_check, experiment("check", "ratio", {"floor": 1e-3}, claims=("tda-4.3",))),
    "phase": (_phase, experiment("phase", "phase")),
    "mechanisms": (_mechanisms, experiment("mechanisms", "mechanisms")),
    "laws": (_mechanisms, experiment("mechanisms", "mechanisms", {"families": False})),
    "features": (_features, experiment("features", "features", {"width": "single"}, _TABLE_1)),
    "threshold": (_threshold, experiment("threshold", "threshold")),
    "speed": (_speed, experiment("benchmark", "speed", peer="FA2", mechanisms=("TRA", "TDA"), directions=("forward",))),
    "probe": (_probe, experiment("probe", "probe", {"ylabel": "gSinkRatio(1)"})),
    "curves": (_curves, experiment("record", "curves", {"xlog": False, "ylabel": "%", "width": "single"}, _PASSKEY)),
    "panels": (_panels, experiment("record", "curves", {"xlog": False, "own_scales": True, "ylog": True})),
    "overview": (_overview, experiment("overview", "overview")),
    "unrelated": (_unrelated, experiment("unrelated", "unrelated")),
    "map": (_map, experiment("record", "map", {"width": "single"})),
    "tails": (_tails, experiment("tails", "tails")),
}
