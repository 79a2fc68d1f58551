"""Tasks with right answers, made from a seed; and how well a model does them at any length.

``get_task("recall")`` is a source to train on and a test to take; :func:`evaluate` (imports torch) gives exact-match
accuracy with intervals; :func:`open_source` opens a task or a corpus by its name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from theory_lab.tasks.base import Task
from theory_lab.tasks.registry import get_task, list_tasks, open_source
from theory_lab.tasks.source import BOS, EOS, IGNORED, PAD, Examples, Source

if TYPE_CHECKING:
    from theory_lab.tasks.evaluation import TaskResult, evaluate

__all__ = [
    "BOS",
    "EOS",
    "IGNORED",
    "PAD",
    "Examples",
    "Source",
    "Task",
    "TaskResult",
    "evaluate",
    "get_task",
    "list_tasks",
    "open_source",
]


def __getattr__(name: str) -> Any:
    if name in ("evaluate", "TaskResult"):
        from theory_lab.tasks import evaluation

        return getattr(evaluation, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
