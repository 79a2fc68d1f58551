"""The kinds ``overview`` and ``unrelated``: one model's attention head by head, on real texts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from theory_lab.errors import InputError
from theory_lab.reproduce.compute.probe import model_need

if TYPE_CHECKING:
    from collections.abc import Mapping

    import pandas as pd

    from theory_lab.reproduce.needs import Need
    from theory_lab.reproduce.run import Context
    from theory_lab.reproduce.spec import Experiment


def need(experiment: Experiment, settings: Mapping[str, Any], data: str) -> Need | None:
    """The model, if it is not on this machine."""
    return model_need(experiment, settings)


def compute(experiment: Experiment, settings: dict[str, Any], context: Context) -> pd.DataFrame:
    """Sinks and zeros by length and layer, and two measures of every head.

    Returns
    -------
    DataFrame
        length, layer, head (empty where there is an average over them), measure, estimate, ci_low, ci_high (over
        texts), texts, model, seed.
    """
    from theory_lab.probes import probe
    from theory_lab.reproduce.probe_tables import ProbeTables

    name = settings.get("as", ("model",))
    if len(name) > 1:
        raise experiment.error("as", name, "one mechanism is allowed")
    try:
        result = probe(
            settings["model"],
            lengths=settings["lengths"],
            layers=settings.get("layers"),
            metrics=["sinks", "sparsity", "entropy"],
            as_=None if name[0] == "model" else name[0],
            windows=settings.get("windows", 1),
            seed=experiment.seed,
            out=context.partial,
            progress=context.progress,
        )
    except InputError as error:
        raise _named(error, experiment) from None
    tables = ProbeTables.of(result)
    shown = ["g_sink_ratio_1", "g_sink_uniform_1", *tables.zeros(), *(name for name, _, _ in tables.heats(2))]
    return tables.frame(shown).assign(model=settings["model"], seed=experiment.seed)


def compute_unrelated(experiment: Experiment, settings: dict[str, Any], context: Context) -> pd.DataFrame:
    """Rows of :func:`theory_lab.reproduce.unrelated_tables.unrelated_frame`, with the seed."""
    from theory_lab.probes.unrelated import unrelated_scores
    from theory_lab.reproduce.unrelated_tables import unrelated_frame

    try:
        result = unrelated_scores(
            settings["model"], length=settings["tokens"], seed=experiment.seed, progress=context.progress
        )
    except InputError as error:
        raise _named(error, experiment) from None
    return unrelated_frame(result).assign(seed=experiment.seed)


def _named(error: InputError, experiment: Experiment) -> InputError:
    """The error with the line of the setting that is wrong, if it is one of the experiment's."""
    field = error.field.split(" ")[0]
    key = {"length": "tokens", "text": "lengths"}.get(field, field)
    return experiment.error(key, error.value, error.allowed) if key in experiment.kind.fields else error
