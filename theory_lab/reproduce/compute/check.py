"""The kind ``check``: claims against simulation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from theory_lab.errors import InputError, StoreError

if TYPE_CHECKING:
    import pandas as pd

    from theory_lab.reproduce.run import Context
    from theory_lab.reproduce.spec import Experiment

#: Columns that differ between two equal runs.
_VARYING = ["seconds"]


def compute(experiment: Experiment, settings: dict[str, Any], context: Context) -> pd.DataFrame:
    """Rows of :func:`theory_lab.check`; an interrupted run continues where it was."""
    import theory_lab

    words = {("lam" if name == "lambda" else name): value for name, value in settings.items()}
    claims = words.pop("claims")
    context.partial.parent.mkdir(parents=True, exist_ok=True)
    try:
        try:
            rows = _checked(theory_lab.check, claims, words, experiment, context)
        except StoreError:  # left by another version, or damaged
            import shutil

            shutil.rmtree(context.partial, ignore_errors=True)
            rows = _checked(theory_lab.check, claims, words, experiment, context)
    except InputError as error:
        key = {"claim": "claims", "lam": "lambda"}.get(error.field, error.field)
        if key in experiment.kind.fields:
            raise experiment.error(key, error.value, error.allowed) from None
        raise
    return rows.drop(columns=_VARYING)


def _checked(run: Any, claims: Any, words: dict[str, Any], experiment: Experiment, context: Context) -> pd.DataFrame:
    resume = (context.partial / "manifest.json").exists()
    return run(
        claims,
        **words,
        seed=experiment.seed,
        workers=context.workers,
        out=context.partial,
        resume=resume,
        progress=context.progress,
    )
