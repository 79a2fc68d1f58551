"""Settings of runs by name: ``experiments/<paper>/train-<name>.toml``, called ``<paper>.<name>``.

A preset is a TOML file with a ``title``, a ``source`` (where its settings come from), and a table ``[train]`` of
:class:`~theory_lab.training.settings.TrainSettings`. It names no corpus: that is the user's.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from theory_lab.errors import InputError, hint
from theory_lab.training.settings import TrainSettings

PREFIX = "train-"
#: What a preset must not decide.
_USERS = ("corpus", "out", "device", "start")


@dataclass(frozen=True)
class Preset:
    """A named setting.

    Attributes
    ----------
    name, title, source : str
    train : dict
        Fields of ``TrainSettings``.
    """

    name: str
    title: str
    source: str
    train: dict[str, Any]


def presets() -> dict[str, Preset]:
    """Every preset that ships with the toolkit, by name."""
    from theory_lab.audit import experiments_dir

    found = {}
    for path in sorted(experiments_dir().glob(f"*/{PREFIX}*.toml")):
        made = read(path, f"{path.parent.name}.{path.stem.removeprefix(PREFIX)}")
        found[made.name] = made
    return found


def get_preset(name: str) -> Preset:
    """The preset of that name, or of a file whose name ends in .toml; InputError if there is none."""
    if name.endswith(".toml"):
        return read(Path(name), name)
    known = presets()
    if name not in known:
        raise InputError("preset", name, f"{hint(name, known)}known: {', '.join(known)}; or a .toml file")
    return known[name]


def read(path: Path, name: str) -> Preset:
    """Read a preset strictly.

    Raises
    ------
    InputError
        For a file that cannot be read, an unknown key, a wrong type or a value that is not allowed.
    """
    from theory_lab.reproduce.document import Document

    data = Document.read(path, str(path)).data
    for key in data:
        if key not in ("title", "source", "train"):
            raise InputError(str(path), key, "title, source and train are allowed")
    for key in ("title", "source"):
        if not isinstance(data.get(key), str):
            raise InputError(str(path), f"{key} {data.get(key)!r}", "a text is needed")
    table = data.get("train")
    if not isinstance(table, dict):
        raise InputError(str(path), "no [train]", "a table of training settings is needed")
    fields = [f.name for f in dataclasses.fields(TrainSettings) if f.name not in _USERS]
    for key in table:
        if key not in fields:
            raise InputError(str(path), key, f"{hint(key, fields)}in [train] are allowed: {', '.join(fields)}")
    train = {key: tuple(value) if isinstance(value, list) else value for key, value in table.items()}
    # A corpus stands in for the user's, so that everything else is checked now.
    try:
        everything: dict[str, Any] = {"corpus": None if "task" in train else ".", **train}
        TrainSettings(**everything)
    except InputError as error:
        raise InputError(str(path), f"{error.field} {error.value}", error.allowed) from None
    return Preset(name, data["title"], data["source"], train)
