"""Plans of campaigns: TOML in, runs out."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from theory_lab.errors import InputError, hint
from theory_lab.reproduce.document import Document
from theory_lab.training.settings import TrainSettings

#: Settings of a training that a plan does not name: where it runs, and where its data and its results lie.
_PLACES = ("out", "device", "corpus", "seed", "start", "tensorboard")
_SETTINGS = tuple(f.name for f in dataclasses.fields(TrainSettings) if f.name not in _PLACES)
_TOP = ("title", "about", "data", "seeds", "train", "measure", "runs", "figures")

#: What can be measured on a finished model: name -> (types of its value, what is allowed).
MEASURES: dict[str, str] = {
    "loss_lengths": "list of lengths T at which the held-out loss is measured",
    "probe_lengths": "list of lengths T at which every head is probed",
    "windows": "number of held-out texts for both",
    "ntk": "whether rotary positions are stretched beyond the length of training",
    "sentence": "a sentence whose inhibition map is kept",
    "tasks": "list of tasks, as theory-lab evaluate takes them",
    "task_lengths": "list of lengths T of the tasks",
    "samples": "number of sequences of a task at each length",
}
_FIGURE = ("into", "runs", "columns", "rows", "value", "series", "x", "scale", "note", "seed")


@dataclass(frozen=True)
class Run:
    """One training of a campaign.

    Parameters
    ----------
    name : str
        As in the figures and tables, such as "TDA".
    seed : int
    train : mapping
        Fields of :class:`~theory_lab.training.TrainSettings`.
    measure : mapping
        Of :data:`MEASURES`.
    """

    name: str
    seed: int
    train: Mapping[str, Any]
    measure: Mapping[str, Any]

    @property
    def folder(self) -> str:
        """Path of its results inside those of the campaign."""
        return f"{slug(self.name)}/seed-{self.seed}"


@dataclass(frozen=True)
class Campaign:
    """A plan.

    Parameters
    ----------
    name, title, about : str
    data : str
        "corpus", or "task" where every run names its own.
    runs : tuple of Run
        In the order of work: the first seed of every run, then the second, so that whatever is cut off is cut evenly.
    figures : tuple of mapping
        What :func:`~theory_lab.campaigns.gather` makes.
    """

    name: str
    title: str
    about: str
    data: str
    runs: tuple[Run, ...]
    figures: tuple[Mapping[str, Any], ...] = field(default=())

    def names(self) -> list[str]:
        """Of the runs, each once."""
        return list(dict.fromkeys(run.name for run in self.runs))


def slug(name: str) -> str:
    """A name as a folder: letters, digits, points and dashes."""
    return re.sub(r"[^a-z0-9.]+", "-", name.lower()).strip("-.")


def plans_dir() -> Path:
    """The plans that ship with the toolkit."""
    from theory_lab.audit import experiments_dir

    return experiments_dir() / "ours" / "campaigns"


def list_plans() -> dict[str, Path]:
    """Shipped plans by name."""
    return {path.stem: path for path in sorted(plans_dir().glob("*.toml"))}


def read_plan(name: str) -> Campaign:
    """A shipped plan by its name, or a file by its path.

    Raises
    ------
    InputError
        For a plan that does not exist, a key that means nothing, a wrong type, or settings that no training takes; the
        message names the file and the key.
    """
    known = list_plans()
    path = known.get(name, Path(name))
    if not path.is_file():
        raise InputError("plan", name, f"{hint(name, known)}known are {', '.join(known)}; or the path of a TOML file")
    document = Document.read(path, str(path))
    return _Reader(document, path.stem).campaign()


class _Reader:
    """Checks a document."""

    def __init__(self, document: Document, name: str) -> None:
        self.document = document
        self.name = name

    def fail(self, key: tuple[str, ...], value: object, allowed: str) -> InputError:
        place = f"{self.document.file}, line {self.document.line(key)}"
        return InputError(f"{place}, key '{'.'.join(key)}'", str(value), allowed)

    def campaign(self) -> Campaign:
        data = self.document.data
        self.known((), data, _TOP)
        shared = self.table(("train",))
        measure = self.table(("measure",))
        self.known(("train",), shared, _SETTINGS)
        self.known(("measure",), measure, MEASURES)
        seeds = self.seeds(("seeds",), data.get("seeds", [0]))
        rows = data.get("runs")
        if not isinstance(rows, dict) or not rows:
            raise self.fail(("runs",), rows, "a table of runs is needed, such as [runs.TDA]")
        made: list[list[Run]] = []
        for name, row in rows.items():
            key = ("runs", name)
            if not isinstance(row, dict):
                raise self.fail(key, row, "a table is needed")
            own = {k: v for k, v in row.items() if k not in ("seeds", "measure")}
            self.known(key, own, _SETTINGS)
            extra = row.get("measure", {})
            self.known((*key, "measure"), extra, MEASURES)
            train = {**shared, **own}
            self.settings(key, train, data.get("data", "corpus"))
            chosen = self.seeds((*key, "seeds"), row["seeds"]) if "seeds" in row else seeds
            made.append([Run(name, seed, train, {**measure, **extra}) for seed in chosen])
        runs = tuple(run for rank in itertools.zip_longest(*made) for run in rank if run is not None)
        slugs: dict[str, str] = {}
        for run in runs:
            other = slugs.setdefault(slug(run.name), run.name)
            if other != run.name or not slug(run.name):
                raise self.fail(("runs", run.name), run.name, f"a name whose folder differs from that of '{other}'")
        figures = data.get("figures", [])
        for figure in figures:
            self.known(("figures",), figure, _FIGURE)
            for name in figure.get("runs", []):
                if name not in rows:
                    raise self.fail(("figures",), name, f"{hint(name, rows)}runs are {', '.join(rows)}")
        title, about = (self.text(name) for name in ("title", "about"))
        return Campaign(self.name, title, about, data.get("data", "corpus"), runs, tuple(figures))

    def text(self, name: str) -> str:
        value = self.document.data.get(name, "")
        if not isinstance(value, str):
            raise self.fail((name,), value, "text is needed")
        return value

    def table(self, key: tuple[str, ...]) -> dict[str, Any]:
        value = self.document.data.get(key[0], {})
        if not isinstance(value, dict):
            raise self.fail(key, value, "a table is needed")
        return value

    def known(self, key: tuple[str, ...], table: Mapping[str, Any], names: Any) -> None:
        for name in table:
            if name not in names:
                raise self.fail((*key, name), name, f"{hint(name, names)}known are {', '.join(names)}")

    def seeds(self, key: tuple[str, ...], value: object) -> list[int]:
        good = isinstance(value, list) and value and all(type(v) is int and v >= 0 for v in value)
        if not good:
            raise self.fail(key, value, "a list of whole numbers from 0 up is needed")
        assert isinstance(value, list)
        return list(dict.fromkeys(value))

    def settings(self, key: tuple[str, ...], train: Mapping[str, Any], data: str) -> None:
        """Refuse now what the training would refuse an hour later."""
        if data not in ("corpus", "task"):
            raise self.fail(("data",), data, "corpus or task")
        if data == "task" and "task" not in train:
            raise self.fail(key, "no task", "a task is needed in [train] or in the run")
        try:
            TrainSettings(**train, corpus="-" if data == "corpus" else None)
        except (InputError, TypeError) as error:
            raise self.fail(key, error, "settings of theory-lab train are needed") from None
