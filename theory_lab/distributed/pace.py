"""How long tasks take, as learned from those done, and how many of them to send at once."""

from __future__ import annotations

import math
from dataclasses import dataclass

#: Seconds of work in a batch of a small cluster: at some milliseconds of overhead a batch, below 2% are lost.
_TARGET = 0.5
#: Beyond this a batch is not stretched: it is what a lost worker costs, and the time between two results.
_LONGEST = 20.0
#: While a kind of task was never measured, its estimates may be off a hundredfold: its batches are short, and few.
_FIRST = 0.1
_FIRST_TASKS = 8
FIRST_BATCHES = 64
_SHORTEST = 0.05
#: Part of the time that the sending process may spend on sending and receiving.
_SHARE = 0.4
#: Seconds that a batch costs the sending process and its scheduler: 6 to 9 ms where ``benchmarks/scheduling.py`` ran.
_BATCH_COST = 6e-3
#: Seconds of estimated work that memory of a kind reaches back.
_MEMORY = 30.0
#: Batches that the work left is cut into for each worker, near the end.
_LAST = 3.0


@dataclass
class _Kind:
    estimated: float = 0.0
    measured: float = 0.0


class Pace:
    """Seconds of tasks: their own rough estimates, corrected by what tasks of their kind took.

    Parameters
    ----------
    batch_cost : float
        Seconds that sending and receiving a batch takes.
    """

    def __init__(self, batch_cost: float = _BATCH_COST) -> None:
        self._kinds: dict[str, _Kind] = {}
        self.batch_cost = batch_cost

    def learn(self, kind: str, estimated: float, measured: float) -> None:
        """A task that was thought to take ``estimated`` seconds took ``measured``."""
        known = self._kinds.setdefault(kind, _Kind())
        known.estimated += max(estimated, 1e-9)
        known.measured += measured
        if known.estimated > _MEMORY:
            known.estimated *= 0.5
            known.measured *= 0.5

    def knows(self, kind: str) -> bool:
        """Whether a task of the kind was measured."""
        return kind in self._kinds

    def expect(self, kind: str, estimated: float) -> float:
        """Seconds that a task is expected to take."""
        known = self._kinds.get(kind)
        return estimated if known is None else estimated * known.measured / known.estimated

    def target(self, workers: int, left: float, until: float = math.inf) -> float:
        """Seconds of work for the next batch.

        Half a second on a small cluster; more where the sending process could not keep up with so many workers; less
        towards the end of the work, so that all workers end together, or of the time. Never less than the sending
        process needs for a batch to each worker: shorter ones would only make the workers wait for it.

        Parameters
        ----------
        workers : int
            Workers to keep busy.
        left : float
            Seconds of work that is not sent yet.
        until : float
            Seconds to the deadline.
        """
        round_trip = workers * self.batch_cost
        wanted = min(max(_TARGET, round_trip / _SHARE), _LONGEST)
        return min(max(_SHORTEST, round_trip, min(wanted, left / (_LAST * workers))), max(until / _LAST, _SHORTEST))

    def first(self) -> tuple[float, int]:
        """Seconds of estimated work, and tasks, in a batch of a kind that was never measured."""
        return _FIRST, _FIRST_TASKS
