"""Plans of campaigns: TOML in, runs out."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from theory_lab.campaigns.answers import parse
from theory_lab.errors import InputError, hint
from theory_lab.reproduce.document import Document
from theory_lab.training.settings import TrainSettings
from theory_lab.training.starting import zoo_names

#: Settings of a training that a plan does not name: where it runs, and where its data and its results lie.
_PLACES = ("out", "device", "corpus", "seed", "tensorboard")
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
    "attention": "a mechanism that takes the place of the trained one before anything is measured",
}
#: Mechanisms of one view without learned parameters: each can weigh the scores of a model trained with another.
EXCHANGED = ("softmax", "adaptive-temperature", "entmax", "sparsemax")
#: Letters of a run's folder, and tokens of a text, at most.
_LONGEST, _LONGEST_TEXT = 100, 1 << 24
_INTO = re.compile(r"[A-Za-z0-9][\w-]*/[A-Za-z0-9][\w-]*(\.[\w-]+)*", re.ASCII)
_FIGURE = ("into", "runs", "columns", "rows", "names", "panels", "value", "series", "x", "scale", "note", "seed")


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
        return InputError(f"{place}, key '{'.'.join(key)}'", value, allowed)

    def campaign(self) -> Campaign:
        data = self.document.data
        self.known((), data, _TOP)
        shared = self.table(("train",))
        measure = self.table(("measure",))
        self.known(("train",), shared, _SETTINGS)
        self.measures(("measure",), measure)
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
            if not isinstance(extra, dict):
                raise self.fail((*key, "measure"), extra, "a table is needed")
            self.measures((*key, "measure"), extra)
            train = {**shared, **own}
            self.exchange(key, train, {**measure, **extra})
            self.settings(key, train, data.get("data", "corpus"))
            chosen = self.seeds((*key, "seeds"), row["seeds"]) if "seeds" in row else seeds
            made.append([Run(name, seed, train, {**measure, **extra}) for seed in chosen])
        runs = tuple(run for rank in itertools.zip_longest(*made) for run in rank if run is not None)
        slugs: dict[str, str] = {}
        for run in runs:
            other = slugs.setdefault(slug(run.name), run.name)
            if other != run.name or not slug(run.name):
                raise self.fail(("runs", run.name), run.name, f"a name whose folder differs from that of '{other}'")
            if len(slug(run.name)) > _LONGEST:
                raise self.fail(("runs", run.name), run.name, f"a name of at most {_LONGEST} letters is allowed")
        figures = data.get("figures", [])
        if not isinstance(figures, list):
            raise self.fail(("figures",), figures, "tables are needed, such as [[figures]]")
        for figure in figures:
            self.figure(figure, rows)
            self.answers(figure, runs)
        title, about = (self.text(name) for name in ("title", "about"))
        return Campaign(self.name, title, about, data.get("data", "corpus"), runs, tuple(figures))

    def figure(self, figure: object, rows: Mapping[str, Any]) -> None:
        """Check an entry of ``figures``: what it is made of, and that its file stays where it belongs."""
        key = ("figures",)
        if not isinstance(figure, dict):
            raise self.fail(key, figure, "a table is needed")
        self.known(key, figure, _FIGURE)
        into = figure.get("into")
        # It becomes a path: names alone, so that it cannot lead out of the folder of results.
        if not isinstance(into, str) or not _INTO.fullmatch(into):
            raise self.fail(key, into, "into = 'paper/name' is needed, of letters, digits, dashes, points between them")
        runs = figure.get("runs", [])
        if not isinstance(runs, list):
            raise self.fail(key, runs, "runs is a list of names")
        for name in runs:
            if not isinstance(name, str) or name not in rows:
                near = hint(name, rows) if isinstance(name, str) else ""
                raise self.fail(key, name, f"{near}runs are {', '.join(rows)}")
        for name in ("columns", "rows", "series", "names", "panels"):
            table = figure.get(name, {})
            if not isinstance(table, dict) or not all(isinstance(value, str) for value in table.values()):
                raise self.fail(key, table, f"{name} is a table of texts, such as {{ 'validation loss' = 'loss' }}")
            for value in table.values():
                base = value.partition(" over ")[2]
                if base and (name == "series" or base not in figure.get("runs", rows)):
                    raise self.fail(
                        key, value, f"{hint(base, rows)}'over' a run of a table is needed: {', '.join(rows)}"
                    )
        panels = figure.get("panels", {})
        shown = runs or list(rows)
        if panels and (not figure.get("x") or set(panels) != set(shown)):
            raise self.fail(key, panels, f"panels gives curves' runs their panels, each of {', '.join(shown)}")
        for name in ("value", "x", "note", "scale"):
            if not isinstance(figure.get(name, ""), str):
                raise self.fail(key, figure[name], f"{name} is a text")
        if not any(figure.get(name) for name in ("columns", "rows", "series", "value")):
            raise self.fail(key, into, "what it shows is needed: columns, rows, series or value")
        if not figure.get("x") and figure.get("series"):
            raise self.fail(key, into, "x is needed beside series: length, layer or step")
        if figure.get("x") and not (figure.get("series") or figure.get("value")):
            raise self.fail(key, into, "series or value is needed beside x")

    def answers(self, figure: Mapping[str, Any], runs: Sequence[Run]) -> None:
        """Refuse an entry of ``figures`` that asks for answers which no run of it gives."""
        named = [run for run in runs if run.name in figure.get("runs", (run.name,))]
        texts = [value for table in ("columns", "rows", "series") for value in figure.get(table, {}).values()]
        for text in [*texts, *([figure["value"]] if "value" in figure else [])]:
            asked = parse(text)
            if asked is None:
                continue
            measured = [run.measure for run in named if run.measure.get("tasks")]
            tests = list(dict.fromkeys(task for measure in measured for task in measure["tasks"]))
            lengths = sorted({n for measure in measured for n in measure.get("task_lengths", ())})
            if (asked.task not in tests) if asked.task else (len(tests) != 1):
                known = ", ".join(tests) or "none"
                raise self.fail(
                    ("figures",), text, f"{hint(asked.task or '', tests)}one of the tasks is needed: {known}"
                )
            if (asked.length is None) != bool(figure.get("x")) or (asked.length and asked.length not in lengths):
                known = ", ".join(map(str, lengths))
                raise self.fail(
                    ("figures",), text, f"a length after @ is needed in a table, of {known}; none in curves"
                )

    def measures(self, key: tuple[str, ...], table: Mapping[str, Any]) -> None:
        """Check what is to be measured."""
        self.known(key, table, MEASURES)
        for name, value in table.items():
            if name in ("loss_lengths", "probe_lengths", "task_lengths"):
                good = isinstance(value, list) and all(type(n) is int and 2 <= n <= _LONGEST_TEXT for n in value)
                allowed = f"a list of whole numbers from 2 to {_LONGEST_TEXT:,}"
            elif name in ("windows", "samples"):
                good, allowed = type(value) is int and value >= 1, "a whole number of at least 1"
            elif name == "ntk":
                good, allowed = isinstance(value, bool), "true or false"
            elif name == "attention":
                good, allowed = value in EXCHANGED, f"{hint(str(value), EXCHANGED)}one of {', '.join(EXCHANGED)}"
            elif name == "tasks":
                good = isinstance(value, list) and all(isinstance(one, str) for one in value)
                allowed = "a list of tasks as theory-lab evaluate takes them"
            else:
                good, allowed = isinstance(value, str), "a text"
            if not good:
                raise self.fail((*key, name), value, f"{allowed} is needed")

    def exchange(self, key: tuple[str, ...], train: Mapping[str, Any], measure: Mapping[str, Any]) -> None:
        """Refuse to measure under another mechanism what was trained with parameters that it would lose."""
        trained = train.get("attention")
        if "attention" in measure and (trained not in EXCHANGED or train.get("attention_parameters")):
            allowed = f"a model trained with {', '.join(EXCHANGED)}, and no parameters, is needed to exchange it"
            raise self.fail((*key, "attention"), trained, allowed)

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
        good = isinstance(value, list) and value and all(type(v) is int and 0 <= v < 1 << 63 for v in value)
        if not good:
            raise self.fail(key, value, "a list of whole numbers from 0 up, below 2^63, is needed")
        assert isinstance(value, list)
        return list(dict.fromkeys(value))

    def settings(self, key: tuple[str, ...], train: Mapping[str, Any], data: str) -> None:
        """Refuse now what the training would refuse an hour later."""
        if data not in ("corpus", "task"):
            raise self.fail(("data",), data, "corpus or task")
        if data == "task" and "task" not in train:
            raise self.fail(key, "no task", "a task is needed in [train] or in the run")
        if "start" in train and train["start"] not in zoo_names():
            # A folder lies on one machine, and a plan is for all.
            allowed = f"{hint(str(train['start']), zoo_names())}models to start from are {', '.join(zoo_names())}"
            raise self.fail(key, train["start"], allowed)
        try:
            TrainSettings(**train, corpus="-" if data == "corpus" else None)
        except (InputError, TypeError) as error:
            raise self.fail(key, str(error), "settings of theory-lab train are needed") from None
