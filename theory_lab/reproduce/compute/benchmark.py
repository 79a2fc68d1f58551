"""The kind ``benchmark``: times that ``kernels/benchmarks/bench.py`` measured on a GPU.

The times are read, never made here: re-measuring them needs the GPU (see ``kernels/benchmarks/NOTES.md``).
"""

from __future__ import annotations

import csv
import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from theory_lab.errors import InputError
from theory_lab.reproduce.needs import GPU, Need

if TYPE_CHECKING:
    from collections.abc import Mapping

    import pandas as pd

    from theory_lab.reproduce.run import Context
    from theory_lab.reproduce.spec import Experiment

_COLUMNS = ("case", "pattern", "mechanism", "direction", "length", "ms", "ms_p10", "ms_p90", "gpu")


def find(name: str) -> Path | None:
    """The file, as given or beside the experiments folder of a checkout; None if there is none."""
    from theory_lab.audit import experiments_dir

    for path in (Path(name), experiments_dir().resolve().parent / name):
        if path.is_file():
            return path
    return None


def need(experiment: Experiment, settings: Mapping[str, Any], data: str) -> Need | None:
    """A GPU, if nobody has measured yet."""
    if find(settings["results"]) is not None:
        return None
    return Need(GPU, f"no {settings['results']}; measure it with kernels/benchmarks/bench.py")


def inputs(experiment: Experiment, data: str) -> str:
    """Digest of the measured times."""
    path = find(experiment.settings["results"])
    return "" if path is None else hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest()


def read(experiment: Experiment, settings: Mapping[str, Any]) -> list[dict[str, str]]:
    """Rows of the file that hold a time; the columns are checked."""
    path = find(settings["results"])
    if path is None:
        raise experiment.error("results", settings["results"], "there is no such file")
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    missing = [name for name in _COLUMNS if not rows or name not in rows[0]]
    if missing:
        raise InputError(f"{settings['results']}, header", ", ".join(rows[0] if rows else ()) or "empty",
                         f"columns {', '.join(missing)} are missing: it is of another version")  # fmt: skip
    return [row for row in rows if row["ms"]]


def compute(experiment: Experiment, settings: dict[str, Any], context: Context) -> pd.DataFrame:
    """Speedups over one mechanism at equal direction and length.

    Returns
    -------
    DataFrame
        mechanism, direction, length, estimate (ms of the peer over ms of the mechanism), ci_low, ci_high, ms, ms_p10,
        ms_p90, gpu. The ends are those of the 10% and 90% quantiles of both times: a spread of runs, no confidence
        interval.
    """
    import pandas as pd

    peer = settings["peer"]
    rows = read(experiment, settings)
    context.device = ", ".join(sorted({row["gpu"] for row in rows}))
    chosen = [r for r in rows if r["case"] == settings.get("case", "length") and r["pattern"] == "random"]
    at = {(r["mechanism"], r["direction"], r["length"]): r for r in chosen}
    known = sorted({r["mechanism"] for r in chosen})
    for name in (peer, *settings["mechanisms"]):
        if name not in known:
            key = "peer" if name == peer else "mechanisms"
            raise experiment.error(key, name, f"{settings['results']} has times of {', '.join(known)}")
    records = []
    for name in settings["mechanisms"]:
        for (mechanism, direction, length), row in at.items():
            other = at.get((peer, direction, length))
            if mechanism != name or other is None or direction not in settings["directions"]:
                continue
            ms, low, high = (float(row[k]) for k in ("ms", "ms_p10", "ms_p90"))
            peer_ms, peer_low, peer_high = (float(other[k]) for k in ("ms", "ms_p10", "ms_p90"))
            records.append(
                {
                    "mechanism": mechanism, "direction": direction, "length": int(length), "estimate": peer_ms / ms,
                    "ci_low": peer_low / high, "ci_high": peer_high / low, "ms": ms, "ms_p10": low, "ms_p90": high,
                    "gpu": row["gpu"],
                }
            )  # fmt: skip
    if not records:
        raise experiment.error("directions", settings["directions"], "no time of that kind was measured")
    return pd.DataFrame(records).sort_values(["mechanism", "direction", "length"], ignore_index=True)
