"""Other people's tests, through lm-evaluation-harness: HellaSwag, ARC, PIQA, SCROLLS and hundreds more.

The harness fetches its data sets from the Hub; a folder of its YAML files brings sets of one's own, which need no
network. Such files can name Python functions beside them: use folders that you trust.

References
----------
Gao et al., "The Language Model Evaluation Harness", Zenodo 10.5281/zenodo.12608602.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from theory_lab.errors import InputError
from theory_lab.tasks.base import whole
from theory_lab.tasks.scoring import check_level, exact_interval

if TYPE_CHECKING:
    import pandas as pd

    from theory_lab.models.loading import LoadedModel

#: Metrics that are 1 or 0 for each sample.
_YES_OR_NO = ("acc", "acc_norm", "acc_bytes", "exact_match", "em")


def run_harness(
    model: LoadedModel,
    tasks: Sequence[str],
    *,
    limit: int | None = None,
    fewshot: int | None = None,
    batch: int = 8,
    include: str | Path | None = None,
    level: float = 0.95,
    seed: int = 0,
) -> pd.DataFrame:
    """Let a model take tests of lm-evaluation-harness.

    Parameters
    ----------
    model : LoadedModel
        A causal language model with its tokenizer.
    tasks : sequence of str
        The harness' names, such as ``hellaswag`` or ``scrolls_qasper``.
    limit : int, optional
        The first so many samples of each.
    fewshot : int, optional
        Solved examples before each question; the task's own number if None.
    batch : int
        Sequences a forward pass.
    include : path, optional
        A folder with YAML files of further tasks.
    level : float
        Confidence level of the intervals.
    seed : int
        Of the examples and the bootstrap.

    Returns
    -------
    DataFrame
        One row a task and metric: ``task``, ``metric``, ``filter``, ``value``, ``low``, ``high``, ``method``
        (``clopper-pearson`` for metrics that are 1 or 0 for each sample, else ``normal`` from the harness' standard
        error, ``none`` where it gives none), ``stderr``, ``samples``, ``fewshot``, ``version`` of the task, ``model``.

    Raises
    ------
    InputError
        If lm-eval is not installed, a task is not known or its data cannot be had, or the model lacks a tokenizer.
    """
    import pandas as pd

    if not tasks:
        raise InputError("harness", "none", "at least one task of lm-evaluation-harness is needed")
    level, batch = check_level(level), whole("batch", batch, 1)
    limit = None if limit is None else whole("limit", limit, 1)
    fewshot = None if fewshot is None else whole("fewshot", fewshot, 0)
    if model.tokenizer is None:
        raise InputError("model", model.name, "a model with a tokenizer is needed for tests of words")
    if include is not None and not Path(include).is_dir():
        raise InputError("harness-tasks", str(include), "a folder of lm-evaluation-harness' YAML files is allowed")
    evaluator, language_model, manager = _harness(tasks, include)
    wrapped = language_model(pretrained=model.model, tokenizer=model.tokenizer, batch_size=batch, backend="causal")
    try:
        found = evaluator.simple_evaluate(
            model=wrapped, tasks=list(tasks), num_fewshot=fewshot, limit=limit, task_manager=manager, log_samples=False,
            bootstrap_iters=1000, random_seed=seed, numpy_random_seed=seed, torch_random_seed=seed,
            fewshot_random_seed=seed,
        )  # fmt: skip
    except (ConnectionError, OSError) as error:  # those of datasets and the Hub are among them
        line = next((part for part in str(error).splitlines() if part.strip()), type(error).__name__)
        raise InputError("harness", ", ".join(tasks), f"its data cannot be had ({line[:160]})") from error
    return pd.DataFrame([{**row, "model": model.name} for row in _rows(found, level)])


def _harness(tasks: Sequence[str], include: str | Path | None) -> tuple[Any, Any, Any]:
    """Its evaluator, its model class, and a manager that knows the tasks."""
    try:
        from lm_eval import evaluator
        from lm_eval.models.huggingface import HFLM
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise InputError("harness", f"lm-eval: {error}", "pip install 'theory-lab[harness]'") from None
    manager = None
    if include is not None:
        # Without its own ten thousand, which take many seconds to read, where the folder's will do.
        manager = TaskManager(include_path=str(include), include_defaults=False)
    if manager is None or not set(tasks) <= set(manager.all_tasks):
        manager = TaskManager(include_path=None if include is None else str(include))
    for name in tasks:
        if name not in manager.all_tasks:
            raise InputError("harness", name, "lm-evaluation-harness has no such task; see lm-eval ls tasks")
    return evaluator, HFLM, manager


def _rows(found: dict[str, Any], level: float) -> Iterator[dict[str, Any]]:
    """Rows of the harness' results, whose keys read ``metric,filter`` and ``metric_stderr,filter``."""
    for task, metrics in found["results"].items():
        samples = int(found.get("n-samples", {}).get(task, {}).get("effective", 0))
        for key, value in metrics.items():
            metric, comma, filtered = key.partition(",")
            if not comma or metric.endswith("_stderr") or isinstance(value, (str, bool)):
                continue
            error = metrics.get(f"{metric}_stderr,{filtered}")
            error = float(error) if isinstance(error, (int, float)) else math.nan
            low, high, method = _interval(metric, float(value), error, samples, level)
            yield {
                "task": task,
                "metric": metric,
                "filter": filtered,
                "value": float(value),
                "low": low,
                "high": high,
                "method": method,
                "stderr": error,
                "samples": samples,
                "fewshot": found.get("n-shot", {}).get(task),
                "version": found.get("versions", {}).get(task),
            }


def _interval(metric: str, value: float, error: float, samples: int, level: float) -> tuple[float, float, str]:
    hits = value * samples
    if metric in _YES_OR_NO and samples and abs(hits - round(hits)) < 1e-6 * samples:
        return *exact_interval(round(hits), samples, 1.0 - level), "clopper-pearson"
    if math.isfinite(error) and error > 0:
        from scipy import special

        half = float(special.ndtri(0.5 + level / 2.0)) * error
        return value - half, value + half, "normal"
    return math.nan, math.nan, "none"
