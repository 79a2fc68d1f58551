"""What a machine may lack to compute an experiment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from theory_lab.reproduce.spec import Experiment

GPU, DOWNLOAD, DATA = "needs a GPU", "needs a download", "needs data"


@dataclass(frozen=True)
class Need:
    """A state of :data:`GPU`, :data:`DOWNLOAD` or :data:`DATA`, and what exactly is missing."""

    state: str
    why: str


def no_need(experiment: Experiment, settings: Mapping[str, Any], data: str) -> Need | None:
    """Nothing but this machine."""
    return Need(DATA, experiment.needs) if experiment.needs else None
