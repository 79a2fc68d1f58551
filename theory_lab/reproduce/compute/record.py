"""The kind ``record``: numbers that training or evaluation left in a file.

``DATA/<paper>/<name>.csv`` if there is one, else ``experiments/<paper>/measured/<name>.csv``, which ships with the
toolkit; one row a number. A table's file has the columns row, column, value, low, high; a curve's series, x, value,
low, high (and panel); a map's row, column, value. ``low`` and ``high`` are the ends of an interval and may be empty;
``text`` may stand for ``value`` where a table holds words. Lines such as ``# device: NVIDIA H200`` before the header
say where the numbers come from.
"""

from __future__ import annotations

import csv
import hashlib
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from theory_lab.errors import InputError
from theory_lab.outside import undefused
from theory_lab.reproduce.needs import DATA, Need

if TYPE_CHECKING:
    from collections.abc import Mapping

    import pandas as pd

    from theory_lab.reproduce.run import Context
    from theory_lab.reproduce.spec import Experiment

_SHAPES = {"table": ("row", "column"), "curves": ("series", "x"), "map": ("row", "column")}
_NUMBERS = ("value", "low", "high")
#: The folder, beside the experiments of a paper, of what was measured for this project.
MEASURED = "measured"
_UNKNOWN = "not recorded"


def path_of(experiment: Experiment, data: str) -> Path:
    """Where the numbers lie, or would lie: the user's own go before those that ship with the toolkit."""
    from theory_lab.audit import experiments_dir

    own = Path(data) / experiment.folder / f"{experiment.name}.csv"
    shipped = experiments_dir() / experiment.folder / MEASURED / own.name
    return shipped if shipped.is_file() and not own.is_file() else own


def need(experiment: Experiment, settings: Mapping[str, Any], data: str) -> Need | None:
    """The file, unless it is there."""
    path = path_of(experiment, data)
    return None if path.is_file() else Need(DATA, f"{experiment.needs or 'measured results'} ({path})")


def inputs(experiment: Experiment, data: str) -> str:
    """Digest of the file."""
    path = path_of(experiment, data)
    return hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest() if path.is_file() else ""


def compute(experiment: Experiment, settings: dict[str, Any], context: Context) -> pd.DataFrame:
    """The file's rows, checked.

    Raises
    ------
    InputError
        For missing columns, words where numbers belong, ends that do not enclose their value, or a number that is
        there twice; it names the file, the line and the column.
    """
    import pandas as pd

    path = path_of(experiment, context.data)
    shape = settings.get("shape", experiment.draw)
    if shape not in _SHAPES:
        raise experiment.error("shape", shape, f"known: {', '.join(_SHAPES)}")
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            about, skipped = _about(file)
            records = _records(csv.DictReader(file), _SHAPES[shape], path, skipped)
    except UnicodeDecodeError:
        raise InputError(str(path), "not UTF-8 text", "a CSV file is needed") from None
    except csv.Error as error:
        raise InputError(str(path), f"damaged ({error})", "a CSV file is needed") from None
    if not records:
        raise InputError(f"{path}", "no rows", "at least one is needed")
    context.device, context.seed = about.get("device", _UNKNOWN), about.get("seed", _UNKNOWN)
    return pd.DataFrame(records)


def _about(file: TextIO) -> tuple[dict[str, str], int]:
    """The lines ``# key: value`` before the header, and how many there are; the file then stands at its header."""
    about: dict[str, str] = {}
    skipped = 0
    place = file.tell()
    while (line := file.readline()).startswith("#"):
        key, _, value = line.lstrip("#").partition(":")
        about[key.strip().lower()] = " ".join(value.split())
        skipped += 1
        place = file.tell()
    file.seek(place)
    return {key: value for key, value in about.items() if value}, skipped


def _records(reader: csv.DictReader[str], keys: tuple[str, ...], path: Path, skipped: int) -> list[dict[str, Any]]:
    head = reader.fieldnames or []
    missing = [name for name in (*keys, "value") if name not in head]
    if missing:
        words = ", ".join(head) or "empty"
        raise InputError(f"{path}, line {skipped + 1}", words, f"columns needed: {', '.join(missing)}")
    if "panel" in head:
        keys = ("panel", *keys)
    found: list[dict[str, Any]] = []
    lines: dict[tuple[Any, ...], int] = {}
    for row in reader:
        line = reader.line_num + skipped
        found.append(_record(row, keys, path, line))
        name = tuple(found[-1][key] for key in keys)
        if name in lines:
            twice = f"{', '.join(keys)} of line {lines[name]} again"
            raise InputError(f"{path}, line {line}", " ".join(map(str, name)), f"{twice}: each may be there once")
        lines[name] = line
    return found


def _record(row: dict[str, Any], keys: tuple[str, ...], path: Path, line: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key in keys:
        text = undefused((row.get(key) or "").strip())
        if not text:
            raise InputError(f"{path}, line {line}, column '{key}'", "empty", "a name is needed")
        found[key] = _number(text, path, line, key) if key == "x" else text
    for name in _NUMBERS:
        text = (row.get(name) or "").strip()
        found[name] = _number(text, path, line, name) if text else math.nan
    found["text"] = undefused((row.get("text") or "").strip())
    if math.isnan(found["value"]) and not found["text"]:
        raise InputError(f"{path}, line {line}, column 'value'", "empty", "a number is needed")
    if found["low"] > found["value"] or found["high"] < found["value"]:
        ends = f"{found['low']:g} to {found['high']:g}"
        raise InputError(f"{path}, line {line}", ends, f"an interval around {found['value']:g} is needed")
    return found


def _number(text: str, path: Path, line: int, column: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise InputError(f"{path}, line {line}, column '{column}'", text, "a finite number is needed")
    return value
