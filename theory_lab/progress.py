"""How a run shows that it moves: a bar on a terminal, plain lines in a log."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from theory_lab.experiments import Progress


def make_progress(quiet: bool = False) -> Progress:
    """Pick what fits standard error: a bar, lines, or only the messages that matter."""
    if quiet:
        return Lines(every=float("inf"))
    if sys.stderr.isatty():
        return Bar()
    return Lines()


class Lines:
    """A line at most every ``every`` seconds."""

    def __init__(self, every: float = 10.0) -> None:
        self._every = every
        self._cells = self._done = 0
        self._started = self._last = time.monotonic()

    def start(self, cells: int, done: int) -> None:
        """See :class:`theory_lab.experiments.Progress`."""
        self._cells, self._done = cells, done
        self._started = self._last = time.monotonic()
        if self._every < float("inf") and cells:
            found = f", {done} of them found in the results folder" if done else ""
            self.say(f"to draw: {cells} cells{found}")

    def advance(self, finished: int, seconds: float) -> None:
        """See :class:`theory_lab.experiments.Progress`."""
        self._done += finished
        now = time.monotonic()
        if now - self._last >= self._every:
            self._last = now
            rate = self._done / max(now - self._started, 1e-9)
            left = (self._cells - self._done) / rate if rate else float("nan")
            self.say(f"{self._done} of {self._cells} cells, {rate:.1f} a second, about {left:.0f} s left")

    def say(self, message: str) -> None:
        """See :class:`theory_lab.experiments.Progress`."""
        sys.stderr.write(f"theory-lab: {message}\n")
        sys.stderr.flush()

    def stop(self) -> None:
        """See :class:`theory_lab.experiments.Progress`."""


class Bar:
    """A bar with rate and time left; it vanishes when the run ends."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
        from rich.progress import Progress as RichProgress

        self._bar = RichProgress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("cells, {task.fields[rate]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            transient=True,
        )
        self._task = self._bar.add_task("checking", total=None, rate="")
        self._started = time.monotonic()
        self._finished = 0

    def start(self, cells: int, done: int) -> None:
        """See :class:`theory_lab.experiments.Progress`."""
        self._bar.start()
        self._started = time.monotonic()
        self._bar.update(self._task, total=cells, completed=done)

    def advance(self, finished: int, seconds: float) -> None:
        """See :class:`theory_lab.experiments.Progress`."""
        self._finished += finished
        rate = self._finished / max(time.monotonic() - self._started, 1e-9)
        self._bar.update(self._task, advance=finished, rate=f"{rate:.1f}/s")

    def say(self, message: str) -> None:
        """See :class:`theory_lab.experiments.Progress`."""
        self._bar.console.print(f"theory-lab: {message}", highlight=False, markup=False)

    def stop(self) -> None:
        """See :class:`theory_lab.experiments.Progress`."""
        self._bar.stop()
