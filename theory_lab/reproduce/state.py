"""Where each experiment stands: fresh, stale, never drawn, or waiting for something this machine lacks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from theory_lab.outside import read_json
from theory_lab.reproduce import cache
from theory_lab.reproduce.needs import Need
from theory_lab.reproduce.spec import SIZES, Experiment

FRESH, STALE, NEVER = "fresh", "stale", "never drawn"


@dataclass(frozen=True)
class State:
    """One experiment's state.

    Attributes
    ----------
    word : str
        ``fresh``, ``stale``, ``never drawn``, ``needs a GPU``, ``needs a download`` or ``needs data``.
    detail : str
        What is missing, or what is there.
    """

    word: str
    detail: str = ""


def sidecar(out: Path, experiment: Experiment) -> Path:
    """The file that says what the picture beside it was drawn from."""
    return out / experiment.folder / f"{experiment.name}.json"


def drawn(out: Path, experiment: Experiment) -> dict[str, Any] | None:
    """What the sidecar says; None if there is none, it is damaged, or one of its files is gone."""
    path = sidecar(out, experiment)
    try:
        about = read_json(path)
        files, size = about["files"], about["size"]
        # Names alone: such a file may come from anywhere, and what it names is linked and shown.
        good = isinstance(files, list) and all(isinstance(f, str) and f == Path(f).name for f in files)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    whole = good and size in SIZES and all((path.parent / name).is_file() for name in files)
    return about if whole else None


def need(experiment: Experiment, size: str, data: str) -> Need | None:
    """What this machine lacks to compute the experiment at a size."""
    return experiment.kind.need(experiment, experiment.at(size), data)


def state(experiment: Experiment, out: Path, data: str) -> State:
    """The state of what lies in ``out``."""
    about = drawn(out, experiment)
    if about is not None:
        results = cache.results_digest(experiment, about["size"], experiment.kind.inputs(experiment, data))
        if about.get("drawing") == cache.drawing_digest(experiment, results):
            return State(FRESH, "quick size" if about["size"] == "quick" else "")
    lacking = need(experiment, "full", data)
    if lacking is not None:
        before = "stale; " if about is not None else ""
        return State(lacking.state, before + lacking.why)
    if about is not None:
        return State(STALE, "the experiment, its data or the code has changed since")
    return State(NEVER)


def states(chosen: Sequence[Experiment], out: Path, data: str) -> dict[str, State]:
    """States by id."""
    return {experiment.id: state(experiment, out, data) for experiment in chosen}
