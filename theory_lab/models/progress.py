"""Progress of downloads and conversions: a bar on a terminal, plain lines in a log."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any


def say(message: str, quiet: bool = False) -> None:
    """One line on standard error."""
    if not quiet:
        sys.stderr.write(f"theory-lab: {message}\n")
        sys.stderr.flush()


class Meter:
    """Bytes done, their rate, and the time left; a context manager.

    Parameters
    ----------
    what : str
        What goes on.
    total : int or None
        Bytes in all; None for work whose end is not known, which shows the time it has taken.
    quiet : bool
        Show nothing.
    """

    def __init__(self, what: str, total: int | None, quiet: bool = False) -> None:
        self._what, self._total, self._quiet = what, total, quiet
        self._bar: Any = None
        self._started = self._last = time.monotonic()

    def __enter__(self) -> Meter:
        size = "" if self._total is None else f", {self._total / 1e6:,.0f} MB"
        if self._quiet:
            return self
        if not _draws():
            say(self._what + size)
            return self
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            Progress,
            ProgressColumn,
            SpinnerColumn,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
            TransferSpeedColumn,
        )

        parts: list[ProgressColumn] = [SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()]
        if self._total is not None:
            parts += [BarColumn(), DownloadColumn(), TransferSpeedColumn(), TextColumn("left"), TimeRemainingColumn()]
        self._bar = Progress(*parts, console=Console(file=sys.stderr), transient=True)
        self._task = self._bar.add_task(self._what, total=self._total)
        self._bar.start()
        return self

    def show(self, done: int) -> None:
        """Say how far it is."""
        if self._bar is not None:
            self._bar.update(self._task, completed=min(done, self._total or done))
            return
        now = time.monotonic()
        if self._quiet or self._total is None or now - self._last < 10.0:
            return
        self._last = now
        rate = done / (now - self._started)
        left = f", about {(self._total - done) / rate:.0f} s left" if 0 < done < self._total else ""
        say(f"{self._what}: {done / 1e6:,.0f} of {self._total / 1e6:,.0f} MB, {rate / 1e6:.1f} MB/s{left}")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()


def _draws() -> bool:
    """Whether there is a terminal, and rich to draw on it."""
    if not sys.stderr.isatty():
        return False
    try:
        import rich  # noqa: F401  # only whether it is there
    except ImportError:
        return False
    return True
