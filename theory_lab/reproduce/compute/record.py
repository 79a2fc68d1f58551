"""The kind ``record``: numbers that somebody's training or evaluation left in a folder of results.

``DATA/<paper>/<name>.csv``, one row a number. A table's file has the columns row, column, value, low, high; a curve's
series, x, value, low, high; a grid's row, column, value as well. ``low`` and ``high`` are the ends of an interval and
may be empty; ``text`` may stand for ``value`` where a table holds words.
"""

from __future__ import annotations

import csv
import hashlib
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from theory_lab.errors import InputError
from theory_lab.reproduce.needs import DATA, Need

if TYPE_CHECKING:
    from collections.abc import Mapping

    import pandas as pd

    from theory_lab.reproduce.run import Context
    from theory_lab.reproduce.spec import Experiment

_SHAPES = {"table": ("row", "column"), "curves": ("series", "x"), "map": ("row", "column")}
_NUMBERS = ("value", "low", "high")


def path_of(experiment: Experiment, data: str) -> Path:
    """Where the numbers would lie."""
    return Path(data) / experiment.folder / f"{experiment.name}.csv"


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
        For missing columns, words where numbers belong, or ends that do not enclose their value; it names the file,
        the line and the column.
    """
    import pandas as pd

    path = path_of(experiment, context.data)
    keys = _SHAPES[settings.get("shape", experiment.draw)]
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            records = _records(csv.DictReader(file), keys, path)
    except UnicodeDecodeError:
        raise InputError(str(path), "not UTF-8 text", "a CSV file is needed") from None
    except csv.Error as error:
        raise InputError(str(path), f"damaged ({error})", "a CSV file is needed") from None
    if not records:
        raise InputError(f"{path}", "no rows", "at least one is needed")
    return pd.DataFrame(records)


def _records(reader: csv.DictReader[str], keys: tuple[str, ...], path: Path) -> list[dict[str, Any]]:
    head = reader.fieldnames or []
    missing = [name for name in (*keys, "value") if name not in head]
    if missing:
        raise InputError(f"{path}, line 1", ", ".join(head) or "empty", f"columns needed: {', '.join(missing)}")
    return [_record(row, keys, path, number) for number, row in enumerate(reader, 2)]


def _record(row: dict[str, Any], keys: tuple[str, ...], path: Path, line: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key in keys:
        text = (row.get(key) or "").strip()
        if not text:
            raise InputError(f"{path}, line {line}, column '{key}'", "empty", "a name is needed")
        found[key] = _number(text, path, line, key) if key == "x" else text
    for name in _NUMBERS:
        text = (row.get(name) or "").strip()
        found[name] = _number(text, path, line, name) if text else math.nan
    found["text"] = (row.get("text") or "").strip()
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
