"""The kind ``features``: the four columns of TDA's Table 1, measured on the mechanisms themselves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from theory_lab.errors import hint

if TYPE_CHECKING:
    import pandas as pd

    from theory_lab.reproduce.run import Context
    from theory_lab.reproduce.spec import Experiment


def compute(experiment: Experiment, settings: dict[str, Any], context: Context) -> pd.DataFrame:
    """One row a mechanism and column: yes or no, and how far from the other answer.

    Returns
    -------
    DataFrame
        row, column, text, margin (see :mod:`theory_lab.attention.features`).
    """
    import pandas as pd

    from theory_lab.attention import list_mechanisms
    from theory_lab.attention.features import COLUMNS, measure_features

    known = list_mechanisms()
    labels = dict(zip(settings["rows"], settings["mechanisms"], strict=False))
    if len(settings["rows"]) != len(settings["mechanisms"]):
        raise experiment.error("rows", settings["rows"], "one name a mechanism, in the same order, is needed")
    records = []
    for label, name in labels.items():
        if name not in known:
            raise experiment.error("mechanisms", name, f"{hint(name, known)}known: {', '.join(known)}")
        found = measure_features(name, seed=experiment.seed)
        for column in COLUMNS:
            measured = getattr(found, column)
            records.append(
                {
                    "row": label,
                    "column": _WORDS[column],
                    "text": "yes" if measured.holds else "no",
                    "margin": measured.margin,
                }
            )
    return pd.DataFrame(records)


_WORDS = {
    "exact_zeros": "exact zeros",
    "signed_weights": "signed weights",
    "no_sum_to_one": "no sum-to-one",
    "length_aware": "length-aware",
}
