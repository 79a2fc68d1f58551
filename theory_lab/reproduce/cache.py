"""Results by content: a file's name is a digest of what was asked for and of the code that computed it.

A second run finds the rows and only draws; a changed setting or a changed line of code has another name.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from theory_lab.errors import InputError
from theory_lab.figures.style import SHEET
from theory_lab.reproduce.code import code_digest
from theory_lab.reproduce.kinds import DRAWINGS
from theory_lab.reproduce.spec import Experiment

if TYPE_CHECKING:
    import pandas as pd

FORMAT = 1
_KEY = b"theory_lab"


def cache_folder() -> Path:
    """``THEORY_LAB_CACHE``, or the user's cache folder."""
    own = os.environ.get("THEORY_LAB_CACHE")
    base = Path(own) if own else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "theory-lab"
    return base / "reproduce"


def _digest(content: Any) -> str:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), default=list)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def experiment_hash(experiment: Experiment, size: str) -> str:
    """What is asked for, alone: the same on every version of the toolkit."""
    return _digest([experiment.kind.name, experiment.at(size), experiment.seed])


def results_digest(experiment: Experiment, size: str, inputs: str = "") -> str:
    """What is asked for, the code that computes it and the data it reads (``inputs``, a digest of theirs)."""
    code = code_digest(experiment.kind.modules(experiment.at(size)))
    return _digest([FORMAT, experiment_hash(experiment, size), code, inputs])


def drawing_digest(experiment: Experiment, results: str) -> str:
    """Results, and everything that makes the picture of them."""
    modules = DRAWINGS[experiment.draw].modules()
    printed = experiment.printed and [experiment.printed.source, experiment.printed.units, experiment.printed.rows]
    words = [experiment.title, experiment.source, experiment.caption]
    code = [
        code_digest(modules, "theory_lab.figures"),
        "" if experiment.is_table else SHEET.read_text(encoding="utf-8"),
    ]
    return _digest([results, experiment.draw, experiment.options, printed, words, code])


def _path(digest: str) -> Path:
    return cache_folder() / f"{digest}.parquet"


def has(digest: str) -> bool:
    """Whether there is a file of that name."""
    return _path(digest).is_file()


def load(digest: str) -> tuple[pd.DataFrame, dict[str, Any]] | None:
    """Rows and what is known about them; None if there are none, or none that can be used."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(_path(digest))
        about = json.loads(table.schema.metadata[_KEY])
    except (OSError, pa.ArrowException, KeyError, TypeError, ValueError):
        return None
    if about.get("digest") != digest:
        return None
    frame: pd.DataFrame = table.to_pandas()
    return frame, about


def save(digest: str, frame: pd.DataFrame, about: dict[str, Any]) -> None:
    """Keep rows; StoreError if they cannot be written."""
    from theory_lab.store import rows_to_parquet, write_whole

    path = _path(digest)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError("THEORY_LAB_CACHE", str(path.parent), f"it cannot be made ({error.strerror})") from None
    write_whole(str(path), rows_to_parquet(frame, json.dumps({**about, "digest": digest}, sort_keys=True)))


def partial_folder(digest: str) -> Path:
    """Where an unfinished computation keeps its cells."""
    return cache_folder() / "unfinished" / digest
