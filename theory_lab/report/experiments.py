"""The section of experiments: what ``theory-lab reproduce`` drew, with captions, and tables beside the papers' own."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from theory_lab.errors import InputError
from theory_lab.outside import read_json, reason, undefused
from theory_lab.render import number
from theory_lab.report.parts import Cell, Column, Picture, Section, Table
from theory_lab.report.pictures import shrink

if TYPE_CHECKING:
    from theory_lab.report.sources import Source

_ABOUT = ("experiment", "files", "title", "source", "seed", "size", "device", "version")
_TABLE = ("row", "column", "unit", "paper", "ours", "value", "low", "high", "difference", "difference_value",
          "difference_low", "difference_high")  # fmt: skip


def find_experiments(folder: Path) -> list[dict[str, Any]]:
    """What the files beside the pictures say, in the folders' order; each with ``folder``, where its files lie.

    Only names without a path are followed, and no links out of the folder: such a file may come from anywhere, and what
    it names is shown.
    """
    found = []
    for path in sorted(folder.glob("*/*.json")):
        try:
            about = read_json(path)
        except (OSError, ValueError):
            continue
        if isinstance(about, dict) and all(name in about for name in _ABOUT) and isinstance(about["files"], list):
            files = [name for name in about["files"] if isinstance(name, str) and _is_beside(path.parent, name)]
            found.append({**about, "files": files, "folder": path.parent})
    return found


def _is_beside(folder: Path, name: str) -> bool:
    """Whether a name is that of a file of the folder itself: no path, and no link that leads elsewhere."""
    if name != Path(name).name or "\0" in name:
        return False
    return (folder / name).resolve().parent == folder.resolve()


def experiments_section(source: Source, pictures: bool, say: Callable[[str], None]) -> Section:
    """The section of a folder that ``theory-lab reproduce --out DIR`` wrote."""
    entries = source.about["experiments"]
    captions = _captions()
    shown, tables = [], []
    for entry in entries:
        name = str(entry["experiment"])
        words = " ".join(
            text
            for text in (
                captions.get(name) or str(entry.get("caption", "")),
                "Quick size." if entry["size"] == "quick" else "",
                f"Source: {entry['source']}.",
                f"theory-lab reproduce {_asked(name)}{' --quick' if entry['size'] == 'quick' else ''}",
            )
            if text
        )
        picture = next((file for file in entry["files"] if file.endswith(".png")), None)
        if picture is not None and pictures:
            say(f"taking up {name}")
            shown.append(Picture(name, str(entry["title"]), words, _taken(entry["folder"] / picture, source.name)))
        numbers = next((file for file in entry["files"] if file.endswith(".csv")), None)
        if picture is None and numbers is not None:
            table = _table(str(entry["title"]), words, entry["folder"] / numbers, source.name)
            if table is not None:
                tables.append(table)

    def distinct(name: str) -> str:
        return ", ".join(dict.fromkeys(str(entry[name]) for entry in entries))

    count = sum(1 for entry in entries if any(file.endswith(".png") for file in entry["files"]))
    return Section(
        title=f"Figures and tables: {source.name}",
        lead=(f"{count} figures and {len(tables)} tables. Papers print no intervals; those shown are of ours.",),
        pictures=tuple(shown),
        tables=tuple(tables),
        command=_command(entries),
        settings=tuple((title, distinct(name)) for name, title in
                       (("seed", "seed"), ("size", "size"), ("device", "device"), ("version", "theory-lab"))),
    )  # fmt: skip


def _command(entries: list[dict[str, Any]]) -> str:
    """What repeats it all, one command a size."""
    lines = []
    for size, flag in (("full", []), ("quick", ["--quick"])):
        names = [_asked(str(entry["experiment"])) for entry in entries if entry["size"] == size]
        lines += [shlex.join(["theory-lab", "reproduce", *names, *flag])] if names else []
    return " && ".join(lines)


def _asked(name: str) -> str:
    """What an experiment is called on the command line: a user's own by its file."""
    return f"{name.removeprefix('own.')}.toml" if name.startswith("own.") else name


def _captions() -> dict[str, str]:
    from theory_lab.reproduce import experiments

    return {name: experiment.caption for name, experiment in experiments().items()}


def _taken(path: Path, name: str) -> bytes:
    try:
        return shrink(path.read_bytes())
    except MemoryError:
        raise
    except Exception as error:  # Pillow raises many for a damaged picture, and one of its own for one of absurd size
        why = "it is no PNG" if type(error).__name__ == "UnidentifiedImageError" else reason(error)
        raise InputError("results", name, f"{path.name} is missing or damaged ({why}): draw it again") from None


def _table(title: str, words: str, path: Path, name: str) -> Table | None:
    """A table of the paper's values and ours; None for numbers of another form."""
    import pandas as pd

    try:
        frame = pd.read_csv(path, dtype=str, keep_default_na=False)
    except (OSError, ValueError, pd.errors.ParserError):
        raise InputError("results", name, f"{path.name} is missing or damaged: draw it again") from None
    if list(frame.columns) != list(_TABLE):
        return None
    columns = (Column("row"), Column("column"), Column("paper", "number"), Column("ours", "number"),
               Column("ours - paper", "number"))  # fmt: skip
    lines = []
    for record in frame.map(undefused).itertuples():
        row: Any = record
        unit = f" {row.unit}" if row.unit else ""
        lines.append(
            (
                Cell(row.row),
                Cell(row.column),
                Cell(row.paper + (unit if row.paper else "") or "-", _float(row.paper)),
                _measured(row.ours, row.value, row.low, row.high, unit),
                _measured(row.difference, row.difference_value, row.difference_low, row.difference_high, unit),
            )
        )
    return Table(title, columns, lines, words)


def _measured(text: str, value: str, low: str, high: str, unit: str) -> Cell:
    known = _float(value)
    if known is None:
        return Cell(text or "-")
    ends = [_float(low), _float(high)]
    interval = f" ({number(ends[0])} to {number(ends[1])})" if None not in ends and ends[0] != ends[1] else ""
    return Cell(f"{number(known)}{interval}{unit}", known)


def _float(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None
