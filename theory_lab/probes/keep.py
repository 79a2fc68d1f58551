"""Where a probe's results lie: a folder with one Parquet file a finished window.

::

    DIR/manifest.json          what the folder is, versions
    DIR/cells/<digest>.parquet rows of one window of one text, all layers and heads
    DIR/rows.parquet           all rows of the last run
    DIR/summary.csv            its averages with intervals

A file's name is a hash over the model's weights, the text, the window and everything that the numbers depend on, so
that running again into the same folder continues where it ended, and runs with other settings do not mix.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from theory_lab.errors import InputError, StoreError
from theory_lab.outside import defused_frame, read_json
from theory_lab.parquet_pages import check_pages
from theory_lab.store import provenance, require_pyarrow, rows_to_parquet, write_whole

if TYPE_CHECKING:
    import pandas as pd

_FORMAT = 1


class ProbeFolder:
    """A results folder of probes.

    Parameters
    ----------
    path : path
        New, empty, or made by an earlier probe.

    Raises
    ------
    InputError
        If it holds something else.
    StoreError
        If it cannot be written.
    """

    def __init__(self, path: str | Path) -> None:
        require_pyarrow()
        if not str(path):
            raise InputError("out", path, "the path of a folder is allowed")
        self.path = Path(path)
        if self.path.exists() and not self.path.is_dir():
            raise InputError("out", str(path), "a folder is allowed, and this is a file")
        manifest = self.path / "manifest.json"
        try:
            known = manifest.exists()
            others = [p.name for p in self.path.iterdir() if p.name != "cells"] if self.path.exists() else []
            if known:
                about = read_json(manifest)
                if not isinstance(about, dict) or about.get("kind") != "probe":
                    raise InputError("out", str(path), "it holds other results: name another folder")
                if about.get("format") != _FORMAT:
                    raise StoreError(f"out: {path}; it was written by another version: name another folder")
            elif others:
                raise InputError("out", str(path), "a new, empty or probe results folder is allowed")
            self._cells = self.path / "cells"
            self._cells.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=self._cells, prefix=".try-"):
                pass
        except (OSError, ValueError) as error:
            if isinstance(error, InputError):
                raise
            reason = getattr(error, "strerror", None) or error
            raise StoreError(f"out: {path}; it cannot be used ({reason}); name another folder") from None
        if not known:
            text = json.dumps({"kind": "probe", "format": _FORMAT, **provenance()}, indent=2, sort_keys=True) + "\n"
            write_whole(str(manifest), text.encode())

    def load(self, digest: str) -> pd.DataFrame | None:
        """Rows of a finished window, or None; what is damaged is computed again."""
        import pandas as pd

        file = self._cells / f"{digest}.parquet"
        if not file.exists():
            return None
        try:
            check_pages(file)
            return pd.read_parquet(file)
        except Exception:  # whatever is wrong with the file, its rows can be had again
            return None

    def save(self, digest: str, rows: pd.DataFrame, about: Mapping[str, Any]) -> None:
        """Write the rows of a finished window."""
        write_whole(str(self._cells / f"{digest}.parquet"), rows_to_parquet(rows, json.dumps(dict(about))))

    def finish(self, rows: pd.DataFrame, summary: pd.DataFrame, about: Mapping[str, Any]) -> None:
        """Write the rows and the summary of a run."""
        text = json.dumps({**about, **provenance()}, sort_keys=True)
        write_whole(str(self.path / "rows.parquet"), rows_to_parquet(rows, text))
        buffer = io.StringIO()
        defused_frame(summary).to_csv(buffer, index=False)
        write_whole(str(self.path / "summary.csv"), buffer.getvalue().encode())

    def finished(self) -> int:
        """Number of finished windows."""
        with contextlib.suppress(OSError):
            return sum(name.endswith(".parquet") and not name.startswith(".") for name in os.listdir(self._cells))
        return 0
