"""The kind ``tails``: are the scores of unrelated tokens of a trained model what the theorems assume?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from theory_lab.errors import InputError
from theory_lab.reproduce.compute.probe import model_need

if TYPE_CHECKING:
    from collections.abc import Mapping

    import pandas as pd

    from theory_lab.reproduce.needs import Need
    from theory_lab.reproduce.run import Context
    from theory_lab.reproduce.spec import Experiment

_POINTS = 49  # of the tail's grid, from 0 to 1


def need(experiment: Experiment, settings: Mapping[str, Any], data: str) -> Need | None:
    """The model, if it is not on this machine."""
    return model_need(experiment, settings)


def compute(experiment: Experiment, settings: dict[str, Any], context: Context) -> pd.DataFrame:
    """Tail and survivors of the pooled heads, and the sigma that every head needs.

    Scores are those of :func:`theory_lab.probes.unrelated.unrelated_scores`: queries of a text, keys of another.

    Returns
    -------
    DataFrame
        quantity (``tail``: P(score > t); ``survivors``: n P(score > tau_n), beta = kappa = 1; ``sigma``: sqrt(d proxy)
        of one head), x (t; n; the layer), estimate, ci_low, ci_high (over texts), heads_low, heads_high (10% and 90%
        of the heads), head_dim, length, model, seed.
    """
    import pandas as pd

    from theory_lab.probes.unrelated import unrelated_scores

    lengths = np.asarray(sorted(set(settings["lengths"])), float)
    if lengths[0] < 2:
        raise experiment.error("lengths", int(lengths[0]), "at least 2 keys are needed")
    try:
        result = unrelated_scores(
            settings["model"], length=settings["tokens"], seed=experiment.seed, progress=context.progress
        )
    except InputError as error:
        key = {"length": "tokens", "model": "model"}.get(error.field)
        if key is not None:
            raise experiment.error(key, error.value, error.allowed) from None
        raise
    dim = result.head_dim
    grid = np.linspace(0.0, 1.0, _POINTS)
    taus = np.sqrt(2.0 * np.log(lengths) / dim)
    records = [_record("tail", t, _share(result.samples, t), experiment) for t in grid]
    records += [
        _record("survivors", n, n * _share(result.samples, tau), experiment)
        for n, tau in zip(lengths, taus, strict=True)
    ]
    sigma = np.sqrt(result.rows[["proxy", "proxy_low", "proxy_high"]].to_numpy(float) * dim)
    records += [
        {"quantity": "sigma", "x": float(layer), "estimate": middle, "ci_low": low, "ci_high": high}
        for layer, (middle, low, high) in zip(result.rows.layer, sigma, strict=True)
    ]
    about = {"head_dim": dim, "length": result.length, "model": settings["model"], "seed": experiment.seed}
    return pd.DataFrame(records).assign(**about)


def _share(samples: np.ndarray, level: float) -> np.ndarray:
    """Share of scores above a level, (layers, heads, texts)."""
    return np.asarray((samples > level).mean(-1, dtype=np.float64))


def _record(quantity: str, x: float, values: np.ndarray, experiment: Experiment) -> dict[str, Any]:
    from theory_lab.probes.bootstrap import interval

    found = interval(values.mean((0, 1)), experiment.seed)
    low, high = np.quantile(values.mean(-1), [0.1, 0.9])
    return {
        "quantity": quantity, "x": float(x), "estimate": found.estimate, "ci_low": found.ci_low,
        "ci_high": found.ci_high, "heads_low": float(low), "heads_high": float(high),
    }  # fmt: skip
