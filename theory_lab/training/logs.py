"""``log.csv`` and ``layers.csv`` of a run, and TensorBoard where it is installed.

A row is written when its step is complete. A run that continues drops what lies after its checkpoint, so that the
files of a killed run and of an uninterrupted one hold the same numbers.
"""

from __future__ import annotations

import contextlib
import csv
import io
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from theory_lab.errors import StoreError
from theory_lab.outside import defused
from theory_lab.store import write_whole
from theory_lab.training.layers import MEASURES

#: One row a logged step. Loss in nats a token, of the step's own batch before its update; tokens/s over the time since
#: the row before, evaluations left out.
COLUMNS = (
    "step", "tokens", "loss", "lr", "grad_norm", "val_loss", "val_loss_se", "val_accuracy", "seconds",
    "tokens_per_second",
)  # fmt: skip
#: One row an evaluation and layer; see :mod:`theory_lab.training.layers`.
LAYER_COLUMNS = ("step", *MEASURES)


class Logs:
    """All of a run's logs.

    Parameters
    ----------
    out : Path or None
        The run's folder; None keeps nothing.
    start : int
        Steps that are done; what the files hold beyond them is dropped.
    tensorboard : bool
    """

    def __init__(self, out: Path | None, start: int, tensorboard: bool) -> None:
        self._steps = Table(None if out is None else out / "log.csv", COLUMNS)
        self._layers = Table(None if out is None else out / "layers.csv", LAYER_COLUMNS)
        self._steps.begin(start)
        self._layers.begin(start)
        self._board = Board(out / "tensorboard" if out is not None and tensorboard else None, start)

    def write(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Rows of ``log.csv``."""
        self._steps.write(rows)
        self._board.write(rows)

    def write_layers(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Rows of ``layers.csv``."""
        kept = list(rows)
        self._layers.write(kept)
        self._board.write(kept)

    def close(self) -> None:
        """Write what is waiting."""
        self._board.close()


class Table:
    """A CSV file that grows by rows.

    Parameters
    ----------
    path : Path or None
        None keeps nothing.
    columns : sequence of str
        Its header; the first is the step.
    """

    def __init__(self, path: Path | None, columns: Sequence[str]) -> None:
        self._path, self._columns = path, tuple(columns)

    def begin(self, step: int) -> None:
        """Keep the rows up to `step`, of a run that continues from there, and drop the rest."""
        if self._path is None:
            return
        rows = [row for row in self.rows() if int(row["step"]) <= step] if step else []
        write_whole(str(self._path), self._text([self._columns, *(tuple(map(defused, row.values())) for row in rows)]))

    def rows(self) -> list[dict[str, str]]:
        """Complete rows that are there."""
        if self._path is None or not self._path.exists():
            return []
        lines = self._path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
        whole = [line for line in lines if line.endswith("\n")]
        try:
            read = list(csv.DictReader(io.StringIO("".join(whole))))
        except csv.Error:  # a field beyond measure
            return []
        good = [row for row in read if tuple(row) == self._columns and None not in row.values()]
        return [row for row in good if re.fullmatch(r"[0-9]{1,18}", row[self._columns[0]])]

    def write(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Append rows; StoreError if the disk is full."""
        text = self._text([tuple(_cell(row.get(name)) for name in self._columns) for row in rows])
        if self._path is None or not text:
            return
        try:
            with open(self._path, "ab") as file:
                file.write(text)
        except OSError as error:
            raise StoreError(f"out: {self._path}; it cannot be written ({error.strerror or error})") from error

    @staticmethod
    def _text(rows: Iterable[Sequence[str]]) -> bytes:
        sink = io.StringIO()
        csv.writer(sink, lineterminator="\n").writerows(rows)
        return sink.getvalue().encode()


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return repr(value)  # exact: what a resumed run must reproduce can be compared
    return str(value)


class Board:
    """TensorBoard events in ``DIR/tensorboard``; nothing if that package is missing."""

    def __init__(self, folder: Path | None, first: int) -> None:
        self._writer: Any = None
        if folder is None:
            return
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            return
        self._writer = SummaryWriter(str(folder), purge_step=first + 1)

    def write(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Add the numbers of rows, each under its column's name."""
        if self._writer is None:
            return
        try:
            for row in rows:
                where = f"layer {row['layer']}/" if "layer" in row else "train/"
                for name, value in row.items():
                    counts = name not in ("step", "layer", "tokens") and isinstance(value, (int, float))
                    if counts and math.isfinite(value):
                        self._writer.add_scalar(where + name, value, row["step"])
        except OSError:
            self._writer = None  # a full disk: a checkpoint or a log will say so, and a picture is no reason to stop

    def close(self) -> None:
        """Write what is waiting."""
        if self._writer is not None:
            with contextlib.suppress(OSError):
                self._writer.close()
