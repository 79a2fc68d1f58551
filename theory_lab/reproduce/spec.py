"""Experiments as data: one TOML file a figure or table, read strictly."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from theory_lab.errors import InputError, hint
from theory_lab.reproduce.document import Document, Part
from theory_lab.reproduce.kinds import DRAWINGS, KINDS, Kind
from theory_lab.reproduce.printed import Printed, read_printed

#: A file of this name holds a paper's tables for the audit and is no experiment.
_TABLES = "tables.toml"
#: Settings of trainings are read by theory_lab.training.presets.
_PRESETS = "train-"
#: The folder of what is drawn from a user's own files.
OWN = "own"
_TALLEST = 20.0

SIZES = ("full", "quick")


@dataclass(frozen=True)
class Experiment:
    """One figure or table.

    Attributes
    ----------
    folder, name : str
        The paper (``tda``, ``asentmax``, ``eta``, ``ours``) and the file's name; ``own`` for a user's file.
    file : str
        The file, as messages name it.
    title, source, caption : str
        What it is, where it comes from, and what a reader sees, in plain words.
    kind : Kind
        What computes it.
    settings, quick : mapping
        Of the full size, and what differs in the quick one.
    seed : int
        The same seed gives the same bits.
    draw : str
        Name of the drawing.
    options : mapping
        Of the drawing.
    printed : Printed or None
        What the paper printed, if anything.
    needs : str
        What is missing before it can be measured at all; empty if nothing is.
    """

    folder: str
    name: str
    file: str
    title: str
    source: str
    caption: str
    kind: Kind
    settings: Mapping[str, Any]
    quick: Mapping[str, Any]
    seed: int
    draw: str
    options: Mapping[str, Any]
    printed: Printed | None = None
    needs: str = ""
    document: Document = field(default_factory=lambda: Document("", ""), repr=False, compare=False)

    @property
    def id(self) -> str:
        """``tda.figure-sinks``."""
        return f"{self.folder}.{self.name}"

    @property
    def is_table(self) -> bool:
        """Whether it is printed as a table rather than drawn."""
        return self.draw == "table"

    def at(self, size: str) -> dict[str, Any]:
        """Settings at a size."""
        return {**self.settings, **(self.quick if size == "quick" else {})}

    def error(self, key: str, value: object, allowed: str) -> InputError:
        """An error about one of the settings, with its line."""
        return Part(self.document, ("settings",)).error(key, value, allowed)


def load(path: Path, folder: str, file: str) -> Experiment:
    """Read and validate one experiment.

    Raises
    ------
    InputError
        For an unknown key, a wrong type, an empty grid or a value that is not allowed; it names file, line and key.
    """
    document = Document.read(path, file)
    top = Part(document)
    kind = KINDS[top.choice("kind", tuple(KINDS))]
    settings = _settings(top.inside("settings"), kind, required=True) if kind.fields else {}
    quick = _settings(top.inside("quick"), kind, required=False) if top.has("quick") else {}
    draw, options = _draw(top.inside("draw"), kind)
    printed = read_printed(top) if top.has("paper") else None
    seed = top.read("seed", "whole") if top.has("seed") else 0
    if not 0 <= seed < 1 << 63:
        raise top.error("seed", seed, "an integer from 0 to 2^63 - 1 is allowed")
    made = Experiment(
        folder=folder,
        name=path.stem,
        file=file,
        title=top.text("title"),
        source=top.text("source"),
        caption=top.text("caption"),
        kind=kind,
        settings=settings,
        quick=quick,
        seed=seed,
        draw=draw,
        options=options,
        printed=printed,
        needs=top.text("needs") if top.has("needs") else "",
        document=document,
    )
    top.done()
    if made.is_table and printed is None and kind.needs_paper:
        raise top.error("paper", "missing", "a table of the paper's own values is needed to compare with")
    return made


def _settings(part: Part, kind: Kind, required: bool) -> dict[str, Any]:
    found = {name: part.read(name, reader) for name, reader in kind.fields.items() if part.has(name)}
    part.done()
    for name in kind.required if required else ():
        if name not in found:
            raise part.error(name, "missing", f"the kind '{kind.name}' needs it")
    return found


def _draw(part: Part, kind: Kind) -> tuple[str, dict[str, Any]]:
    name = part.choice("as", kind.drawings)
    fields = DRAWINGS[name].fields
    options = {key: part.read(key, reader) for key, reader in fields.items() if part.has(key)}
    part.done()
    if options.get("width", "double") not in ("single", "double"):
        raise part.error("width", options["width"], "known: single, double")
    if "height" in options and not 0.5 <= options["height"] <= _TALLEST:
        raise part.error("height", options["height"], f"0.5 to {_TALLEST:g} inches are allowed")
    return name, options


def experiments() -> dict[str, Experiment]:
    """Every experiment that ships with the toolkit, by id, in the order of the papers."""
    from theory_lab.audit import experiments_dir

    root = experiments_dir()
    order = ("tda", "asentmax", "eta", "ours")
    folders = sorted((p for p in root.iterdir() if p.is_dir()), key=lambda p: (*[p.name != o for o in order], p.name))
    found = {}
    for folder in folders:
        for path in sorted(folder.glob("*.toml")):
            if path.name != _TABLES and not path.name.startswith(_PRESETS):
                made = load(path, folder.name, f"experiments/{folder.name}/{path.name}")
                found[made.id] = made
    return found


def select(names: Sequence[str]) -> list[Experiment]:
    """Experiments by id, by paper, ``all``, or by the path of a user's file.

    Raises
    ------
    InputError
        If a name stands for nothing; the message has the nearest one.
    """
    known = experiments()
    chosen: dict[str, Experiment] = {}
    for name in names:
        if name.endswith(".toml"):
            path = Path(name)
            inside = [e for e in known.values() if path.name == f"{e.name}.toml" and _same(path, e)]
            made = inside[0] if inside else load(path, OWN, name)
            if made.id in chosen and chosen[made.id].file != made.file:
                raise InputError("experiment", name, f"its pictures would overwrite those of {chosen[made.id].file}")
            chosen[made.id] = made
            continue
        folders = {e.folder for e in known.values()}
        some = [e for e in known.values() if name in ("all", e.folder, e.id)]
        if not some:
            options = ["all", *sorted(folders), *known]
            near = hint(name, options)
            raise InputError("experiment", name, f"{near}`theory-lab reproduce` lists them; a path ends in .toml")
        chosen.update((e.id, e) for e in some)
    return list(chosen.values())


def _same(path: Path, experiment: Experiment) -> bool:
    from theory_lab.audit import experiments_dir

    return path.resolve() == (experiments_dir() / experiment.folder / f"{experiment.name}.toml").resolve()
