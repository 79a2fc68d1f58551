"""One run on a cluster: batches out, results in, and what is done when something is lost."""

from __future__ import annotations

import contextlib
import itertools
import os
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from theory_lab.distributed.dispatch import Batch, Dispatcher
from theory_lab.distributed.pace import Pace
from theory_lab.distributed.work import Done, Order, Report, Sent, laws_of, needs_of, run_order, versions
from theory_lab.engine import PieceTask, Task, TaskResult, run_task
from theory_lab.errors import WorkerError

if TYPE_CHECKING:
    from distributed import Client, Future

#: Seconds without any worker after which a run ends.
_PATIENCE = 300.0
#: Seconds between two looks at how many workers there are.
_LOOK_SECONDS = 1.0
#: Seconds between two looks at whether a batch has ended, where nothing says so before.
_POLL_SECONDS = 0.05
_KEPT = "what was finished is kept"


class Sending:
    """Tasks of one run on the workers of a scheduler.

    Parameters
    ----------
    client : distributed.Client
    address : str
        Of the scheduler, for messages.
    pace : Pace
        What is known of the cost of tasks.
    say : callable
        Told what is worth a line.
    """

    def __init__(self, client: Client, address: str, pace: Pace, say: Callable[[str], None]) -> None:
        from distributed import as_completed

        self._client = client
        self._address = address
        self._pace = pace
        self._say = say
        self._name = f"theory-lab-{uuid.uuid4().hex[:12]}"
        self._keys = itertools.count()
        self._ended = as_completed([], with_results=True, raise_errors=False, loop=client.loop)
        self._out: dict[Future, int] = {}
        self._futures: dict[int, Future] = {}
        self._threads = 0
        self._looked = -_LOOK_SECONDS
        self._last_worker = time.monotonic()
        self._folder = os.getcwd()
        self._tasks: list[Sent] = []

    def run(self, tasks: Sequence[Sent], deadline: float) -> Iterator[list[TaskResult | Done]]:
        """See ``run`` and ``do`` of :class:`theory_lab.distributed.cluster.Cluster`."""
        own = iter([task for task in tasks if isinstance(task, Task | PieceTask) and task.here])
        self._tasks = [task for task in tasks if not task.here]
        self._needs = needs_of(self._tasks)
        startup = max((0.0 if isinstance(t, Task | PieceTask) else t.startup for t in self._tasks), default=0.0)
        seconds = [task.seconds for task in self._tasks]
        self._plan = Dispatcher([kind_of(task) for task in self._tasks], seconds, self._pace, startup)
        try:
            while True:
                self._look()
                self._send(deadline)
                mine = next(own, None) if time.monotonic() < deadline else None
                if mine is not None:
                    yield [run_task(mine)]
                elif not self._out and (self._plan.finished or time.monotonic() >= deadline):
                    break
                for future, result in self._arrived(wait=mine is None):
                    yield from self._receive(future, result)
        finally:
            self._cancel(list(self._out))
        if self._plan.given_up:
            raise WorkerError(self._deadly())

    def _look(self) -> None:
        """See whether the scheduler is there, and how many workers it has."""
        if self._client.status != "running":
            raise WorkerError(f"the scheduler {self._address} is lost; {_KEPT}")
        now = time.monotonic()
        if now - self._looked < _LOOK_SECONDS:
            return
        try:
            self._threads = sum(self._client.nthreads().values())
        except Exception:  # whatever a connection that breaks just now raises
            raise WorkerError(f"the scheduler {self._address} is lost; {_KEPT}") from None
        self._looked = time.monotonic()
        if self._threads:
            self._last_worker = now
        elif now - self._last_worker > _PATIENCE:
            raise WorkerError(f"the scheduler {self._address} had no worker for {_PATIENCE:.0f} s; {_KEPT}")

    def _send(self, deadline: float) -> None:
        now = time.monotonic()
        batches = []
        while (batch := self._plan.next(now, self._threads, deadline)) is not None:
            batches.append(batch)
        for batch in batches:
            self._submit(batch)
        if not batches and not self._ended.has_ready():
            held = list(self._futures.values())
            late = self._plan.late(now, self._threads, deadline)
            others = self._workers_without(held) if late else None
            for batch in late:
                self._submit(batch, others)

    def _workers_without(self, futures: Sequence[Future]) -> list[str] | None:
        """Workers that none of these batches is on; None if there are none such."""
        late = {future.key for future in futures}
        try:
            holding = self._client.processing()
        except Exception:  # the scheduler is being lost: the next look says so
            return None
        return [worker for worker, keys in holding.items() if late.isdisjoint(keys)] or None

    def _submit(self, batch: Batch, workers: list[str] | None = None) -> None:
        """Send a batch, to one of these workers if there is a choice."""
        tasks = tuple(self._tasks[index] for index in batch.tasks)
        order = Order(tasks, versions(self._needs), laws_of(tasks), self._folder)
        key = f"{self._name}-{next(self._keys)}"
        future = self._client.submit(
            run_order, order, key=key, pure=False, workers=workers, allow_other_workers=workers is not None
        )
        self._out[future] = batch.number
        self._futures[batch.number] = future
        self._ended.add(future)

    def _arrived(self, wait: bool) -> list[tuple[Future, Any]]:
        """Batches that have ended; none yet after a while, so that the caller can look around."""
        if wait and not self._ended.has_ready():
            with self._ended.thread_condition:  # one that ends just now, before we wait, is seen a moment later
                self._ended.thread_condition.wait(_POLL_SECONDS)
        return list(self._ended.next_batch(block=False))

    def _receive(self, future: Future, result: Any) -> Iterator[list[TaskResult | Done]]:
        number = self._out.pop(future, None)
        if number is None:
            return  # cancelled: another copy was first
        del self._futures[number]
        if isinstance(result, Report):
            yield from self._take(number, result)
            return
        self._look_into(number, future, result)

    def _take(self, number: int, report: Report) -> Iterator[list[TaskResult | Done]]:
        indices = self._plan.tasks(number)
        new, needless = self._plan.done(number, [outcome.seconds for outcome in report.outcomes])
        self._cancel([self._futures[other] for other in needless])
        found = [(self._tasks[indices[position]], report.outcomes[position]) for position in new]
        if found:
            yield [outcome.of(task) for task, outcome in found]
        if report.error is not None:
            raise report.error

    def _look_into(self, number: int, future: Future, result: Any) -> None:
        """A batch ended without a report."""
        from distributed import CancelledError, KilledWorker

        error = result[1] if isinstance(result, tuple) else result
        if isinstance(error, KilledWorker):
            for index in self._plan.deadly(number):
                self._say(f"{name_of(self._tasks[index])} ended its worker each time it was tried; the rest goes on")
        elif isinstance(error, CancelledError):
            # Not by us: the connection broke, or someone else took it off the scheduler.
            self._plan.lost(number)
            self._looked = -_LOOK_SECONDS
        else:  # a task's own errors come in reports
            raise cannot_load(self._address, error)

    def _cancel(self, futures: Sequence[Future]) -> None:
        for future in futures:
            number = self._out.pop(future, None)
            if number is not None:
                del self._futures[number]
        if futures:
            with contextlib.suppress(Exception):  # a lost scheduler has nothing left to cancel
                self._client.cancel(list(futures))

    def _deadly(self) -> str:
        names = [name_of(self._tasks[index]) for index in self._plan.given_up]
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        what = "its worker each time it was tried" if len(names) == 1 else "their workers each time they were tried"
        return f"{'; '.join(names[:3])}{more} ended {what} (out of memory?); everything else is finished, and {_KEPT}"


def kind_of(task: Sent) -> str:
    """What a task is an example of: tasks of a kind share what is learned of their cost."""
    if not isinstance(task, Task | PieceTask):
        return task.kind
    return task.piece.study if isinstance(task, PieceTask) else f"{task.cell.estimator} {task.cell.statistic}"


def name_of(task: Sent) -> str:
    """A task in words."""
    if not isinstance(task, Task | PieceTask):
        return task.title
    if isinstance(task, PieceTask):
        given = ", ".join(f"{name} {value}" for name, value in task.piece.arguments)
        return f"the piece of {task.piece.study} with {given}" if given else f"the piece of {task.piece.study}"
    point = task.cell.point
    return f"the cell of {task.cell.statistic} with noise {point.noise}, length {point.length}, kappa {point.kappa:g}"


def cannot_load(address: str, error: BaseException) -> WorkerError:
    """What to say where theory_lab's code cannot even be loaded."""
    text = " ".join(str(error.__cause__ or error).split())[:160] or type(error).__name__
    return WorkerError(
        f"the workers or the scheduler of {address} cannot run theory_lab's tasks ({text}): "
        f"install theory-lab {versions()['theory_lab']} there too"
    )
