"""Batches in time: drawn ahead by one thread, cut into the parts of a step and of a process."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from theory_lab.errors import InputError
from theory_lab.tasks.source import IGNORED

if TYPE_CHECKING:
    from theory_lab.tasks.source import Source
    from theory_lab.training.settings import TrainSettings

I64 = npt.NDArray[np.int64]
F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]


class Segment(NamedTuple):
    """Consecutive updates that nothing interrupts.

    Attributes
    ----------
    first, updates : int
        Updates ``first`` to ``first + updates - 1``, from 0.
    tokens, labels : ndarray of int64, shape (updates, parts, sequences, length)
        This process's share.
    shares : ndarray of float32, shape (updates, parts)
        The part's scored labels over those of the whole step, over all processes: what its mean loss counts.
    rates : ndarray of float64, shape (updates,)
        Learning rates.
    """

    first: int
    updates: int
    tokens: I64
    labels: I64
    shares: F32
    rates: F64


class Feed:
    """Segments of a run from step `start` to its end.

    Parameters
    ----------
    source : Source
    settings : TrainSettings
    start : int
        Updates that are done.
    most : int
        Largest number of updates of a segment. One also ends at an evaluation and at a checkpoint.
    rank, world : int
        This process, and the number of them.
    """

    def __init__(self, source: Source, settings: TrainSettings, start: int, most: int, rank: int, world: int) -> None:
        if settings.micro_batch % world:
            raise InputError(
                "batch",
                settings.batch,
                f"a multiple of accumulation x processes = {settings.accumulation * world} is allowed",
            )
        self._source, self._settings = source, settings
        self._start, self._most, self._rank, self._world = start, most, rank, world

    def __iter__(self) -> Iterator[Segment]:
        """Each segment while the next one is drawn."""
        with ThreadPoolExecutor(1, thread_name_prefix="batches") as pool:
            ahead: Future[Segment] | None = None
            for first, count in self._plan():
                following = pool.submit(self.draw, first, count)
                if ahead is not None:
                    yield ahead.result()
                ahead = following
            if ahead is not None:
                yield ahead.result()

    def _plan(self) -> Iterator[tuple[int, int]]:
        done, end = self._start, self._settings.steps
        stops = [every for every in (self._settings.eval_every, self._settings.save_steps) if every]
        while done < end:
            count = min([self._most, end - done, *(every - done % every for every in stops)])
            yield done, count
            done += count

    def draw(self, first: int, count: int) -> Segment:
        """The segment of these updates."""
        s = self._settings
        tokens = np.empty((count, s.batch, s.length), dtype=np.int64)
        labels = np.empty_like(tokens)
        for i in range(count):
            tokens[i], labels[i] = self._source.batch(first + i, s.batch, s.length)
        cut = (count, s.accumulation, self._world, s.micro_batch // self._world, s.length)
        tokens, labels = tokens.reshape(cut)[:, :, self._rank], labels.reshape(cut)
        # Models shift labels by one place: the first is never scored.
        scored = (labels[..., 1:] != IGNORED).sum((-1, -2))
        if not scored.all():
            raise InputError("batch", s.batch, "at least one scored token in each part of a step; raise it")
        shares = scored[:, :, self._rank] / scored.sum((1, 2))[:, None]
        return Segment(
            first,
            count,
            tokens,
            labels[:, :, self._rank],
            shares.astype(np.float32),
            np.array([s.learning_rate(first + i) for i in range(count)]),
        )
