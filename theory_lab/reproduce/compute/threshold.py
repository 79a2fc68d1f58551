"""The kind ``threshold``: the sharp threshold of each law as an effective beta, and what survives it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from theory_lab.errors import InputError

if TYPE_CHECKING:
    import pandas as pd

    from theory_lab.reproduce.run import Context
    from theory_lab.reproduce.spec import Experiment


def compute(experiment: Experiment, settings: dict[str, Any], context: Context) -> pd.DataFrame:
    """Rows of the claim ``ours-sharp-threshold`` with the effective beta of each.

    Returns
    -------
    DataFrame
        noise, length, effective_beta (by the law's quantile function, exact but for rounding), and the simulated
        E[S] at that threshold: estimate, ci_low, ci_high, bound, trials, verdict; seed.
    """
    import theory_lab
    from theory_lab.studies.ours import effective_beta

    try:
        rows = theory_lab.check(
            "ours-sharp-threshold", **settings, seed=experiment.seed, workers=context.workers,
            progress=context.progress,
        )  # fmt: skip
    except InputError as error:
        if error.field in experiment.kind.fields:
            raise experiment.error(error.field, error.value, error.allowed) from None
        raise
    betas = [
        effective_beta(noise, int(length), int(dim))
        for noise, length, dim in zip(rows.noise, rows.length, rows.head_dim, strict=True)
    ]
    kept = ["noise", "length", "estimate", "ci_low", "ci_high", "bound", "trials", "verdict", "seed"]
    return rows[kept].assign(effective_beta=betas)
