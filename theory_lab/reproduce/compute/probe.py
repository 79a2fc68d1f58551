"""The kind ``probe``: what a trained model's attention does on real texts, and what other mechanisms make of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from theory_lab.errors import InputError
from theory_lab.reproduce.needs import DATA, DOWNLOAD, Need
from theory_lab.reproduce.words import BASELINE

if TYPE_CHECKING:
    from collections.abc import Mapping

    import pandas as pd

    from theory_lab.reproduce.run import Context
    from theory_lab.reproduce.spec import Experiment


def need(experiment: Experiment, settings: Mapping[str, Any], data: str) -> Need | None:
    """The model, if it is not on this machine."""
    return model_need(experiment, settings)


def model_need(experiment: Experiment, settings: Mapping[str, Any]) -> Need | None:
    """What has to be fetched before ``settings["model"]`` can be measured."""
    from pathlib import Path

    from theory_lab.models.catalog import find_model, is_known

    if experiment.needs:
        return Need(DATA, experiment.needs)
    name = settings["model"]
    if is_known(name):
        return None if find_model(name).cached else Need(DOWNLOAD, f"theory-lab models fetch {name}")
    return None if Path(name).is_dir() else Need(DOWNLOAD, f"{name} is no model on this machine")


def compute(experiment: Experiment, settings: dict[str, Any], context: Context) -> pd.DataFrame:
    """Measures by mechanism and length (and layer), averaged over heads, with intervals over texts.

    Returns
    -------
    DataFrame
        weights, length, [layer,] measure, estimate, ci_low, ci_high, texts, heads, dead_heads, model, seed; and, for
        gSinkRatio, rows of uniform attention.
    """
    import pandas as pd

    from theory_lab.models import load_model
    from theory_lab.probes import probe

    groups = _groups(experiment, settings["measures"])
    loaded = load_model(settings["model"])
    frames = []
    context.partial.mkdir(parents=True, exist_ok=True)
    try:
        for number, name in enumerate(settings["as"]):
            result = probe(
                loaded,
                lengths=settings["lengths"],
                layers=settings.get("layers"),
                metrics=groups,
                as_=None if name == "model" else name,
                windows=settings.get("windows", 1),
                seed=experiment.seed,
                out=context.partial / str(number),
                progress=context.progress,
            )
            found = result.summary(by_layer=settings.get("by_layer", False))
            frames.append(found.assign(weights=_label(settings["model"], name)))
    except InputError as error:
        key = {"as": "as", "lengths": "lengths", "layers": "layers", "text": "lengths"}.get(error.field.split(" ")[0])
        if key is not None:
            raise experiment.error(key, error.value, error.allowed) from None
        raise
    rows = pd.concat(frames, ignore_index=True)
    missing = [m for m in settings["measures"] if m not in set(rows.measure)]
    if missing:
        raise experiment.error("measures", missing[0], f"known: {', '.join(sorted(set(rows.measure)))}")
    rows = rows[rows.measure.isin(settings["measures"])]
    rows = pd.concat([rows, *_uniform(rows)], ignore_index=True)
    return rows.assign(model=settings["model"], seed=experiment.seed)


_GROUP_OF = {
    "g_sink": "sinks", "sink_": "sinks", "top_key": "sinks", "sparsity": "sparsity", "near_zero": "sparsity",
    "entropy": "entropy", "normalized_entropy": "entropy", "support": "entropy", "max_abs": "maxima",
    "survivors": "survivors", "consensus": "survivors", "lift": "survivors", "score_": "scores",
    "view_correlation": "scores",
}  # fmt: skip


def _groups(experiment: Experiment, measures: tuple[str, ...]) -> list[str]:
    found = []
    for measure in measures:
        group = next((group for head, group in _GROUP_OF.items() if measure.startswith(head)), None)
        if group is None:
            raise experiment.error("measures", measure, f"names that begin with {', '.join(_GROUP_OF)} are known")
        found.append(group)
    return list(dict.fromkeys(found))


def _label(model: str, name: str) -> str:
    if name == "model":
        return f"{model}, its own softmax"
    return f"{name.partition(':')[0].upper()} on its scores"


def _uniform(rows: pd.DataFrame) -> list[pd.DataFrame]:
    """What uniform causal attention gives, where that is known."""
    import pandas as pd

    from theory_lab.probes.measures import uniform_sink_ratio

    sinks = rows[rows.measure == "g_sink_ratio_1"]
    if sinks.empty or "layer" in rows:
        return []
    lengths = sorted(sinks.length.unique())
    values = [uniform_sink_ratio(int(n)) for n in lengths]
    return [
        pd.DataFrame(
            {"weights": BASELINE, "length": lengths, "measure": "g_sink_ratio_1", "estimate": values, "ci_low": values,
             "ci_high": values}
        )
    ]  # fmt: skip
