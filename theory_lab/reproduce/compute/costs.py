"""The kind ``costs``: what a probe costs beside the plain forward pass, as ``benchmarks/probe.py`` measured it.

The rows are read, never made here: ``DATA/<paper>/<name>.csv``, or the file of that name that ships beside the
experiments (``measured``).
"""

from __future__ import annotations

import csv
import math
from typing import TYPE_CHECKING, Any

from theory_lab.errors import InputError
from theory_lab.reproduce.compute import record

if TYPE_CHECKING:
    from collections.abc import Mapping

    import pandas as pd

    from theory_lab.reproduce.needs import Need
    from theory_lab.reproduce.run import Context
    from theory_lab.reproduce.spec import Experiment

_NUMBERS = ("length", "plain_s", "probed_s", "ratio", "ratio_low", "ratio_high", "plain_peak_gb", "probed_peak_gb")
_WORDS = ("device", "dtype", "weights")
SECONDS, MEMORY, RATIO = "seconds", "peak memory, GB", "probed over plain"


def need(experiment: Experiment, settings: Mapping[str, Any], data: str) -> Need | None:
    """The file, unless it is there."""
    return record.need(experiment, settings, data)


def inputs(experiment: Experiment, data: str) -> str:
    """Digest of the file."""
    return record.inputs(experiment, data)


def compute(experiment: Experiment, settings: dict[str, Any], context: Context) -> pd.DataFrame:
    """Curves of time, memory and their ratio.

    Returns
    -------
    DataFrame
        panel, series, x (tokens), value, low, high: the ratio's ends are the least and largest of the rounds; times
        are medians and memory a peak, without ends.
    """
    import pandas as pd

    rows = _read(experiment, context)
    records = []
    main = [row for row in rows if row["dtype"] == settings["dtype"]]
    other = [row for row in rows if row["dtype"] != settings["dtype"]]
    for row in main:
        x = row["length"]
        if row["weights"] == "model":
            maps = settings["heads"] * x * x * settings["bytes"] / 1e9
            records += [
                _point(SECONDS, name, x, row[key]) for name, key in (("plain", "plain_s"), ("probed", "probed_s"))
            ]
            records += [
                _point(MEMORY, name, x, value)
                for name, value in (("plain", row["plain_peak_gb"]), ("probed", row["probed_peak_gb"]), (_MAPS, maps))
            ]
        records.append(_point(RATIO, _label(row["weights"]), x, row["ratio"], row["ratio_low"], row["ratio_high"]))
    for row in (row for row in other if row["weights"] == "model"):
        name = f"{_label(row['weights'])}, {row['dtype']}"
        records.append(_point(RATIO, name, row["length"], row["ratio"], row["ratio_low"], row["ratio_high"]))
    if not any(r["panel"] == SECONDS for r in records):
        raise experiment.error("dtype", settings["dtype"], "no row of the file has it for the model's own weights")
    return pd.DataFrame(records)


_MAPS = "all maps, if held"


def _label(weights: str) -> str:
    name = weights.partition(":")[0]
    return "own weights" if name == "model" else name.upper()


def _point(
    panel: str, series: str, x: float, value: float, low: float = math.nan, high: float = math.nan
) -> dict[str, Any]:
    return {"panel": panel, "series": series, "x": x, "value": value, "low": low, "high": high, "text": ""}


def _read(experiment: Experiment, context: Context) -> list[dict[str, Any]]:
    path = record.path_of(experiment, context.data)
    with path.open(newline="", encoding="utf-8-sig") as file:
        reader = csv.DictReader(file)
        missing = [name for name in (*_NUMBERS, *_WORDS) if name not in (reader.fieldnames or [])]
        if missing:
            words = ", ".join(reader.fieldnames or []) or "empty"
            raise InputError(f"{path}, line 1", words, f"columns needed: {', '.join(missing)}")
        rows = [
            {**{name: row[name] for name in _WORDS}, **{n: _number(row[n], path, reader.line_num, n) for n in _NUMBERS}}
            for row in reader
        ]
    devices = {str(row["device"]) for row in rows}
    if len(devices) != 1:
        raise InputError(f"{path}, column 'device'", ", ".join(sorted(devices)) or "no rows", "one device is needed")
    context.device = devices.pop()
    return sorted(rows, key=lambda row: float(row["length"]))


def _number(text: str, path: Any, line: int, column: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not value > 0:
        raise InputError(f"{path}, line {line}, column '{column}'", text, "a positive number is needed")
    return value
