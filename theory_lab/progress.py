"""How a run shows that it moves: a bar on a terminal, plain lines in a log."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from theory_lab.settings import Progress


def make_progress(quiet: bool = False, verb: str = "checking", unit: str = "cells") -> Progress:
    """Pick what fits standard error: a bar, lines, or only the messages that matter."""
    if quiet:
        return Lines(every=float("inf"))
    if sys.stderr.isatty():
        return Bar(verb, unit)
    return Lines(unit=unit)


class Lines:
    """A line at most every ``every`` seconds."""

    def __init__(self, every: float = 10.0, unit: str = "cells") -> None:
        self._every = every
        self._unit = unit
        self._note = ""
        self._cells = self._done = 0
        self._work = self._worked = 0.0
        self._started = self._last = time.monotonic()

    def start(self, cells: int, done: int, work: float) -> None:
        """See :class:`theory_lab.settings.Progress`."""
        self._cells, self._done, self._work, self._worked = cells, done, work, 0.0
        self._started = self._last = time.monotonic()
        if self._every < float("inf") and cells:
            found = f", {done} of them found in the results folder" if done else ""
            self.say(f"to {'draw' if self._unit == 'cells' else 'do'}: {cells} {self._unit}{found}")

    def advance(self, finished: int, work: float) -> None:
        """See :class:`theory_lab.settings.Progress`."""
        self._done += finished
        self._worked += work
        now = time.monotonic()
        if now - self._last >= self._every:
            self._last = now
            # Cells differ a thousandfold in cost, so that their number says little about the time left.
            share = self._worked / self._work if self._work else 1.0
            left = (now - self._started) * (1.0 / share - 1.0) if share else float("nan")
            text = f"{self._done} of {self._cells} {self._unit}, {share:.0%} of the work, about {left:.0f} s left"
            self.say(text + self._note)

    def note(self, text: str) -> None:
        """See :class:`theory_lab.settings.Progress`."""
        self._note = f", {text}" if text else ""

    def say(self, message: str) -> None:
        """See :class:`theory_lab.settings.Progress`."""
        sys.stderr.write(f"theory-lab: {message}\n")
        sys.stderr.flush()

    def stop(self) -> None:
        """See :class:`theory_lab.settings.Progress`."""


class Bar:
    """A bar of the work done, with cells, rate and time left; it vanishes when the run ends."""

    def __init__(self, verb: str = "checking", unit: str = "cells") -> None:
        from rich.console import Console
        from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
        from rich.progress import Progress as RichProgress

        self._bar = RichProgress(
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TextColumn("{task.fields[cells]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            transient=True,
        )
        self._task = self._bar.add_task(verb, total=None, cells="")
        self._unit = unit
        self._note = ""
        self._started = time.monotonic()
        self._cells = self._done = self._found = 0

    def start(self, cells: int, done: int, work: float) -> None:
        """See :class:`theory_lab.settings.Progress`."""
        self._bar.start()
        self._started = time.monotonic()
        self._cells, self._done, self._found = cells, done, done
        self._bar.update(self._task, total=work, completed=0, cells=self._text())

    def advance(self, finished: int, work: float) -> None:
        """See :class:`theory_lab.settings.Progress`."""
        self._done += finished
        self._bar.update(self._task, advance=work, cells=self._text())

    def _text(self) -> str:
        rate = (self._done - self._found) / max(time.monotonic() - self._started, 1e-9)
        return f"{self._done} of {self._cells} {self._unit}, {rate:.1f}/s{self._note}"

    def note(self, text: str) -> None:
        """See :class:`theory_lab.settings.Progress`."""
        self._note = f", {text}" if text else ""

    def say(self, message: str) -> None:
        """See :class:`theory_lab.settings.Progress`."""
        self._bar.console.print(f"theory-lab: {message}", highlight=False, markup=False)

    def stop(self) -> None:
        """See :class:`theory_lab.settings.Progress`."""
        self._bar.stop()
