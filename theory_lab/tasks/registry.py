"""Tasks and sources by name, as people type them: ``recall:queries=8``, ``recall + copy``, ``corpus:DIR``."""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path
from typing import Any

from theory_lab.errors import InputError, hint
from theory_lab.tasks.base import Task
from theory_lab.tasks.source import Source

_BUILTIN = {
    "recall": "theory_lab.tasks.recall:Recall",
    "copy": "theory_lab.tasks.sequences:Copy",
    "reverse": "theory_lab.tasks.sequences:Reverse",
    "sort": "theory_lab.tasks.sequences:Sort",
    "local-count": "theory_lab.tasks.tagging:LocalCount",
    "two-back": "theory_lab.tasks.tagging:TwoBack",
    "flip-flop": "theory_lab.tasks.tagging:FlipFlop",
    "passkey": "theory_lab.tasks.retrieval:Passkey",
    "multi-needle": "theory_lab.tasks.retrieval:MultiNeedle",
}


def list_tasks() -> list[str]:
    """Names of the tasks that :func:`get_task` knows."""
    return list(_BUILTIN)


def task_class(name: str) -> type[Task]:
    """The class of the task of that name; InputError if there is none."""
    if name not in _BUILTIN:
        raise InputError("task", name, f"{hint(name, _BUILTIN)}{', '.join(_BUILTIN)} are allowed")
    module, _, attribute = _BUILTIN[name].partition(":")
    return getattr(importlib.import_module(module), attribute)


def get_task(name: str, seed: int = 0, **parameters: Any) -> Task:
    """Make a task.

    Parameters
    ----------
    name : str
        One of :func:`list_tasks`.
    seed : int
        0 to 2^63 - 1: the same seed gives the same sequences.
    **parameters
        Keyword arguments of its class, such as ``get_task("recall", queries=8)``. ``passkey`` and ``multi-needle``
        take ``tokenizer``, a tokenizer or a folder that has one.

    Raises
    ------
    InputError
        For an unknown name, an unknown parameter or a value out of range.
    """
    made = task_class(name)
    known = inspect.signature(made).parameters
    for key in parameters:
        if key not in known:
            raise InputError(
                f"task {name}", key, f"{hint(key, known)}{', '.join(k for k in known if k != 'seed')} are allowed"
            )
    return made(seed=seed, **parameters)


def parse_spec(spec: str) -> tuple[str, dict[str, Any]]:
    """A name and its parameters from ``name`` or ``name:key=value,key=value``.

    Values that look like numbers become numbers; the rest stays text.
    """
    name, _, inner = spec.partition(":")
    parameters: dict[str, Any] = {}
    for part in filter(None, (piece.strip() for piece in inner.split(","))):
        key, equals, value = part.partition("=")
        if not equals or not key.strip() or not value.strip():
            raise InputError("task", spec, "a name, or a name with parameters as in recall:queries=8,symbols=64")
        parameters[key.strip().replace("-", "_")] = _value(value.strip())
    return name.strip(), parameters


def takes_text(spec: str) -> bool:
    """Whether a task, or one of several, is made of words, so that it needs a tokenizer and may take a corpus.

    Raises
    ------
    InputError
        If there is no such task.
    """
    return any(task_class(parse_spec(part)[0]).takes_text for part in split_spec(spec))


def split_spec(spec: str) -> list[str]:
    """The tasks of ``passkey + multi-needle:needles=4``; signs without blanks around them belong to a name."""
    return [part.strip() for part in re.split(r"\s\+\s", spec)]


def open_source(
    spec: str | Path, seed: int = 0, split: str = "train", *, tokenizer: Any = None, corpus: str | Path | None = None
) -> Source:
    """Open what a model is trained on.

    Parameters
    ----------
    spec : str or path
        A task (``recall``, ``recall:queries=8``), several in turn (``passkey + multi-needle:needles=4``), or a corpus:
        its folder, or ``corpus:FOLDER``.
    seed : int
        0 to 2^63 - 1.
    split : {'train', 'validation'}
        Of a corpus. Tasks have one stream for both.
    tokenizer, corpus : optional
        Of tasks of words that name none themselves.

    Raises
    ------
    InputError
        If it is neither, or the corpus is damaged.
    """
    text = str(spec)
    if isinstance(spec, Path) or text.startswith("corpus:") or Path(text).is_dir():
        from theory_lab.corpus import Corpus

        return Corpus.open(text.removeprefix("corpus:")).source(split, seed)
    parts = []
    for part in split_spec(text):
        name, parameters = parse_spec(part)
        if name not in _BUILTIN:
            allowed = f"{hint(name, _BUILTIN)}the folder of a corpus, or one of {', '.join(_BUILTIN)} is allowed"
            raise InputError("source", part, allowed)
        if task_class(name).takes_text:
            given = {"tokenizer": tokenizer, "corpus": corpus}
            parameters = {**{key: value for key, value in given.items() if value is not None}, **parameters}
        parts.append(get_task(name, seed, **parameters))
    if len(parts) == 1:
        return parts[0]
    from theory_lab.tasks.mixture import Mixture

    return Mixture(parts, seed)


def _value(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
