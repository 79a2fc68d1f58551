"""Which tasks are where, which to send again, and what counts.

A state machine without a cluster and without a clock: the times are handed in. The Dask side drives it with real
ones, the simulation of a thousand workers (``benchmarks/scheduling.py``) with invented ones.

Tasks go out in batches. A task counts once, with the first outcome that arrives; that of a second copy is dropped. (It
would be the same: a block's draws depend on nothing but its cell and index.)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from theory_lab.distributed.pace import FIRST_BATCHES, Pace

#: Batches of a worker: one runs while the next waits there for it.
_DEPTH = 2
#: A batch is late after this many times what it, and the one before it on its worker, should take, and a second; a
#: copy of a copy waits twice as long.
_LATE = 3.0
_GRACE = 1.0
#: Tasks of a batch: some hundred bytes each travel with it.
_MOST_TASKS = 5000


@dataclass(frozen=True)
class Batch:
    """Tasks that were sent together.

    Attributes
    ----------
    number : int
        Its name.
    tasks : tuple of int
        Indices of the tasks.
    expected : float
        Seconds that it should take.
    sent : float
        When it was sent.
    generation : int
        0 for the first batch that holds its tasks, 1 for a copy, 2 for a copy of that.
    copied : bool
        Whether a copy was sent.
    suspect : bool
        Whether a batch that held its task took its workers with it; it is a single task then.
    alone : bool
        Whether nothing else ran when it was sent, nor will while it is out.
    """

    number: int
    tasks: tuple[int, ...]
    expected: float
    sent: float
    generation: int = 0
    copied: bool = False
    suspect: bool = False
    alone: bool = False


class Dispatcher:
    """Tasks of one run on their way.

    Parameters
    ----------
    kinds : sequence of str
        What each task is an example of; tasks of a kind share what is learned of their cost.
    seconds : sequence of float
        Rough cost of each task, by its own estimate.
    pace : Pace
        What is known of the kinds; it is updated.
    startup : float
        Seconds that a worker may need before its first task, such as for a model to be loaded: no batch is late before.
    """

    def __init__(self, kinds: Sequence[str], seconds: Sequence[float], pace: Pace, startup: float = 0.0) -> None:
        self._kinds = kinds
        self._seconds = [max(value, 1e-9) for value in seconds]
        self._pace = pace
        self._startup = startup
        self._waiting = deque(range(len(kinds)))
        self._suspects: deque[int] = deque()
        self._quarantine: deque[int] = deque()
        self._given_up: list[int] = []
        self._open = bytearray(b"\1" * len(kinds))
        self._flying: dict[int, Batch] = {}
        self._number = 0
        # Estimated seconds that wait, by kind: what is left follows the pace without a look at every task.
        self._left: dict[str, float] = {}
        for kind, value in zip(kinds, self._seconds, strict=True):
            self._left[kind] = self._left.get(kind, 0.0) + value

    @property
    def flying(self) -> int:
        """Batches that are out."""
        return len(self._flying)

    @property
    def finished(self) -> bool:
        """Whether nothing is left to send or to wait for."""
        return not (self._flying or self._waiting or self._suspects or self._quarantine)

    @property
    def given_up(self) -> tuple[int, ...]:
        """Tasks that took their worker with them even when they were alone."""
        return tuple(self._given_up)

    def left(self) -> float:
        """Seconds of work that is not sent."""
        return sum(self._pace.expect(kind, value) for kind, value in self._left.items())

    def next(self, now: float, workers: int, until: float) -> Batch | None:
        """The next batch to send, or None if nothing should be.

        Parameters
        ----------
        now : float
            The time.
        workers : int
            Workers that there are.
        until : float
            When nothing more may begin.
        """
        if now >= until or workers < 1:
            return None
        if len(self._flying) >= _DEPTH * workers:
            return None
        if self._suspects:
            return self._send((self._suspects.popleft(),), now, suspect=True)
        if self._waiting:
            if len(self._flying) >= FIRST_BATCHES and not self._pace.knows(self._kinds[self._waiting[0]]):
                return None  # the first results say how much to send
            return self._send(self._take(workers, until - now), now)
        # Nothing shares a worker with what may end it.
        if self._quarantine and not self._flying:
            return self._send((self._quarantine.popleft(),), now, suspect=True, alone=True)
        return None

    def _take(self, workers: int, until: float) -> tuple[int, ...]:
        """Tasks off the queue, worth a batch."""
        target, most = self._pace.target(workers, self.left(), until), _MOST_TASKS
        taken: list[int] = []
        total = 0.0
        while self._waiting and len(taken) < most:
            index = self._waiting[0]
            kind, estimate = self._kinds[index], self._seconds[index]
            if not self._pace.knows(kind):
                first, most = self._pace.first()
                target = min(target, first)
            expected = self._pace.expect(kind, estimate)
            # A task that would overshoot by more than half of itself begins the next batch.
            if taken and total + 0.5 * expected > target:
                break
            self._waiting.popleft()
            self._left[kind] = max(self._left[kind] - estimate, 0.0)
            taken.append(index)
            total += expected
        return tuple(taken)

    def _send(
        self, tasks: tuple[int, ...], now: float, generation: int = 0, suspect: bool = False, alone: bool = False
    ) -> Batch:
        expected = sum(self._pace.expect(self._kinds[index], self._seconds[index]) for index in tasks)
        batch = Batch(self._number, tasks, expected, now, generation, False, suspect, alone)
        self._number += 1
        self._flying[batch.number] = batch
        return batch

    def done(self, number: int, seconds: Sequence[float]) -> tuple[list[int], list[int]]:
        """A batch came back.

        Parameters
        ----------
        number : int
            The batch.
        seconds : sequence of float
            What each of its tasks took; shorter if the batch ended early.

        Returns
        -------
        new : list of int
            Positions in the batch of the outcomes that count.
        needless : list of int
            Batches that have nothing left to do.
        """
        batch = self._flying.pop(number, None)
        if batch is None:
            return [], []
        new = []
        for position, (index, took) in enumerate(zip(batch.tasks, seconds, strict=False)):
            if self._open[index]:
                self._open[index] = 0
                new.append(position)
                self._pace.learn(self._kinds[index], self._seconds[index], took)
        shared = batch.copied or batch.generation > 0
        needless = [b.number for b in self._flying.values() if not self._rest(b)] if shared else []
        for other in needless:
            del self._flying[other]
        return new, needless

    def _rest(self, batch: Batch) -> tuple[int, ...]:
        return tuple(index for index in batch.tasks if self._open[index])

    def lost(self, number: int) -> None:
        """A batch never came back, for no fault of its own: its tasks are sent again."""
        batch = self._flying.pop(number, None)
        if batch is None:
            return
        for index in reversed(self._orphans(batch)):
            self._waiting.appendleft(index)
            self._left[self._kinds[index]] += self._seconds[index]

    def deadly(self, number: int) -> list[int]:
        """A batch took several workers with it.

        Its tasks are sent again one by one; one that does it again waits until nothing else runs; one that does it
        even then is given up.

        Returns
        -------
        list of int
            Tasks that are given up.
        """
        batch = self._flying.pop(number, None)
        if batch is None:
            return []
        rest = self._orphans(batch)
        if not batch.suspect and len(batch.tasks) > 1:
            self._suspects.extend(rest)
            return []
        if not batch.alone:
            self._quarantine.extend(rest)
            return []
        self._given_up += rest
        for index in rest:
            self._open[index] = 0
        return rest

    def _orphans(self, batch: Batch) -> list[int]:
        """Open tasks of a batch that no other one holds."""
        shared = [other for other in self._flying.values() if other.copied or other.generation > 0]
        elsewhere = {index for other in shared for index in other.tasks}
        return [index for index in self._rest(batch) if index not in elsewhere]

    def late(self, now: float, workers: int, until: float) -> list[Batch]:
        """Batches to send again though they are still out: late ones, once nothing waits to be sent.

        Each is cut into as many parts as there are workers without a batch. If all are busy after all, the copies wait
        their turn, and are needless by then.
        """
        if self._waiting or self._suspects or self._quarantine or now >= until:
            return []
        # Two batches may have shared a worker.
        longest = max((batch.expected for batch in self._flying.values()), default=0.0)
        late = [
            batch
            for batch in self._flying.values()
            if not batch.copied
            and now - batch.sent > (_GRACE + self._startup + _LATE * (batch.expected + longest)) * 2**batch.generation
        ]
        idle = workers - len(self._flying)
        found = []
        for batch in sorted(late, key=lambda b: b.sent):
            self._flying[batch.number] = replace(batch, copied=True)
            rest = self._rest(batch)
            parts = min(max(idle, 1), len(rest))
            for part in range(parts):
                found.append(self._send(rest[part::parts], now, batch.generation + 1, batch.suspect, batch.alone))
            idle -= parts
        return found

    def tasks(self, number: int) -> tuple[int, ...]:
        """Tasks of a batch that is out."""
        return self._flying[number].tasks
