"""The kind ``phase``: the dispersion phase diagram."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from theory_lab.errors import InputError

if TYPE_CHECKING:
    import pandas as pd

    from theory_lab.reproduce.run import Context
    from theory_lab.reproduce.spec import Experiment


def compute(experiment: Experiment, settings: dict[str, Any], context: Context) -> pd.DataFrame:
    """Rows of :func:`theory_lab.phase.phase_diagram`."""
    from theory_lab.phase import phase_diagram

    try:
        return phase_diagram(**settings, seed=experiment.seed, workers=context.workers or 2)
    except InputError as error:
        if error.field in experiment.kind.fields:
            raise experiment.error(error.field, error.value, error.allowed) from None
        raise
