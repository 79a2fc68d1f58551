"""Commands in processes of their own without the start of Python: a warm process forks one for each.

A start of Python and its imports cost ten times what most commands of the tests do. What a process decides remains
tested: its exit code, streams, folder, environment and signals. What only a fresh interpreter shows, such as what it
imports, is for tests that start one.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

#: Waits for a line that says what to run, answers with the child's number and, at its end, its exit code. It starts
#: no thread, so that its children find no lock held.
_CODE = """
import gc, json, os, sys
import pyarrow.pandas_compat, pyarrow.parquet, pandas, rich.console, rich.progress, rich.table
import theory_lab.cli, theory_lab.experiments, theory_lab.progress, theory_lab.render, theory_lab.store.folder
from theory_lab.main import main
gc.freeze()  # the end of a child would visit, and so copy, every object
print("ready", flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    child = os.fork()
    if child:
        print(child, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
        continue
    os.environ.clear()
    os.environ.update(asked["environment"])
    os.chdir(asked["folder"])
    handles = os.open(os.devnull, os.O_RDONLY), *(os.open(path, os.O_WRONLY) for path in asked["streams"])
    for number, handle in enumerate(handles):
        os.dup2(handle, number)
    sys.argv = ["theory-lab", *asked["words"]]
    main()
    sys.exit()
"""


class Nursery:
    """Runs one command at a time."""

    def __init__(self, root: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", _CODE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0,
            env={**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        )  # fmt: skip
        self._read(120)

    def _read(self, timeout: float) -> str:
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], timeout)[0]:
            raise TimeoutError
        line = self._process.stdout.readline()  # without a buffer, in which another line might wait unseen
        assert line, "the warm process has ended"
        return line.decode().strip()

    def run(
        self, words: Sequence[str], folder: Path, environment: Mapping[str, str], timeout: float
    ) -> subprocess.CompletedProcess[str]:
        """Run ``theory-lab`` with these words and wait for its end, as :func:`subprocess.run` does.

        Raises
        ------
        subprocess.TimeoutExpired
            The command was killed.
        """
        assert self._process.stdin is not None
        with tempfile.TemporaryDirectory() as made:
            streams = [Path(made) / "out", Path(made) / "err"]
            for path in streams:
                path.touch()
            asked = {"words": list(words), "folder": str(folder), "environment": dict(environment)}
            line = json.dumps({**asked, "streams": list(map(str, streams))}) + "\n"
            self._process.stdin.write(line.encode())
            child = int(self._read(60))
            try:
                code = int(self._read(timeout))
            except TimeoutError:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child, signal.SIGKILL)
                self._read(60)
                raise subprocess.TimeoutExpired(list(words), timeout) from None
            out, err = (path.read_text(encoding="utf-8") for path in streams)
        return subprocess.CompletedProcess(list(words), code, out, err)

    def stop(self) -> None:
        """End it."""
        self._process.communicate(timeout=20)  # it ends with its standard input
