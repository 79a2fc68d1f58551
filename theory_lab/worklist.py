"""The cells of a run as columns: a resumed sweep finds 100,000 of them finished, and has nothing to do for each."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from theory_lab.cases import Cases, Group
from theory_lab.claims import Statistic
from theory_lab.claims.points import Points
from theory_lab.engine import merge
from theory_lab.estimation import CERTAIN, BlockSum, Cell, sampler
from theory_lab.estimation.base import Shape, digests, pooled
from theory_lab.estimation.samples import Samples

I64 = npt.NDArray[np.int64]


@dataclass
class Work:
    """A cell under way."""

    cell: Cell
    target: int = 0
    blocks: list[BlockSum] = field(default_factory=list)
    seconds: float = 0.0
    looks: int = 0
    pending: int = 0
    saved: bool = True

    @property
    def trials(self) -> int:
        """Trials drawn so far."""
        return sum(block.trials for block in self.blocks)

    def add(self, blocks: tuple[BlockSum, ...]) -> None:
        """Take blocks that were drawn."""
        self.blocks = merge(self.blocks, blocks)


@dataclass(frozen=True)
class _Part:
    """Cells that a group of cases brings."""

    statistic: Statistic
    points: Points
    estimators: list[str]
    devices: list[str]


class Cells:
    """What has to be drawn for some cases, each cell once, by number; cases about the same draws share one.

    Attributes
    ----------
    of_case : ndarray of int, shape (cases,)
        Number of each case's cell, -1 where nothing is drawn.
    names : list of str
        Digests of the cells.
    """

    def __init__(self, cases: Cases, seed: int) -> None:
        self._seed = seed
        self._parts: list[_Part] = []
        self.of_case: I64 = np.full(len(cases), -1, dtype=np.int64)
        numbers: dict[str, int] = {}
        start = 0
        for group in cases.groups:
            known, names = len(numbers), _names(group, seed)
            places = np.array([-1 if name is None else numbers.setdefault(name, len(numbers)) for name in names])
            self.of_case[start : start + len(places)] = places
            new = np.flatnonzero(places >= known)
            if len(new):
                how = [[column[row] for row in new.tolist()] for column in (group.estimators, group.devices)]
                self._parts.append(_Part(group.claim.statistic, group.points.take(new), *how))
            start += len(places)
        self.names = list(numbers)
        self._starts = np.cumsum([0, *(len(part.points) for part in self._parts)]).tolist()

    def __len__(self) -> int:
        return len(self.names)

    def cell(self, number: int) -> Cell:
        """One cell."""
        index = bisect_right(self._starts, number) - 1
        part, row = self._parts[index], number - self._starts[index]
        cell = Cell(part.statistic, part.points[row], part.estimators[row], self._seed, part.devices[row])
        vars(cell)["digest"] = self.names[number]
        return cell

    def each(self) -> Iterator[Cell]:
        """The cells one after the other as ONE object that changes, for functions that keep nothing of it."""
        for part in self._parts:
            cell = Cell(part.statistic, part.points[0], "", self._seed)
            state = vars(cell)
            columns = part.points.each(), part.estimators, part.devices
            for state["point"], state["estimator"], state["device"] in zip(*columns, strict=True):
                yield cell
                state.pop("digest", None)  # which is this cell's alone

    def map(self, function: Callable[[Cell], Any]) -> list[Any]:
        """A function of a cell, for every cell; see :meth:`each`."""
        return list(map(function, self.each()))

    @cached_property
    def shapes(self) -> list[Shape]:
        """What the observations of each are."""
        return self.map(lambda cell: sampler(cell).shape(cell))


def _names(group: Group, seed: int) -> list[str | None]:
    """Digests of a group's cells, None where nothing is drawn."""
    how = list(zip(group.estimators, group.devices, strict=True))
    found: list[str | None] = [None] * len(how)
    kinds = dict.fromkeys(how)
    if len(kinds) == 1 and how[0][0] not in CERTAIN:  # as in nearly every sweep
        return [*digests(group.claim.statistic, group.points, how[0][0], seed, how[0][1])]
    for kind in kinds:
        estimator, device = kind
        if estimator in CERTAIN:
            continue
        rows = [row for row, one in enumerate(how) if one == kind]
        names = digests(group.claim.statistic, group.points.take(np.array(rows)), estimator, seed, device)
        for row, name in zip(rows, names, strict=True):
            found[row] = name
    return found


class Worklist:
    """How far each cell of a run is.

    Attributes
    ----------
    works : dict
        Number -> what is under way; the other cells were found whole.
    """

    def __init__(self, cells: Cells) -> None:
        self.cells = cells
        self.works: dict[int, Work] = {}
        self._numbers: dict[str, int] = {}
        size = len(cells)
        self.trials: list[int] = [0] * size
        self.seconds: list[float] = [0.0] * size
        self.total, self.total_sq = np.zeros(size), np.zeros(size)

    def begin(self, number: int, target: int, blocks: list[BlockSum], seconds: float) -> Work:
        """Put a cell under way."""
        work = Work(self.cells.cell(number), target, blocks, seconds)
        self.works[number] = work
        self._numbers[work.cell.digest] = number
        return work

    def found(
        self, targets: Sequence[int], whole: Sequence[tuple[float, float] | None], seconds: list[float]
    ) -> list[int]:
        """Take the cells that are whole, each with its two sums; returns the numbers of the others."""
        self.seconds = seconds
        self.trials = [0 if sums is None else target for sums, target in zip(whole, targets, strict=True)]
        nothing = (0.0, 0.0)
        sums = np.array([one or nothing for one in whole], dtype=float).reshape(len(whole), 2)
        self.total, self.total_sq = sums[:, 0].copy(), sums[:, 1].copy()
        return [number for number, one in enumerate(whole) if one is None]

    def of(self, cell: Cell) -> Work:
        """What is under way for a cell."""
        return self.works[self._numbers[cell.digest]]

    def finished(self) -> npt.NDArray[np.bool_]:
        """Which cells have all their trials, shape (cells,)."""
        done = np.ones(len(self.cells), dtype=bool)
        for number, work in self.works.items():
            done[number] = 0 < work.target <= work.trials
        return done

    def looks(self) -> I64:
        """How often a sequential run has looked at each, shape (cells,)."""
        found = np.zeros(len(self.cells), dtype=np.int64)
        for number, work in self.works.items():
            found[number] = work.looks
        return found

    def samples(self) -> Samples:
        """The pooled observations of every cell."""
        total, total_sq = self.total.copy(), self.total_sq.copy()
        trials = list(self.trials)
        for number, work in self.works.items():
            trials[number], total[number], total_sq[number] = pooled(work.blocks)
            self.seconds[number] = work.seconds
        return Samples(self.cells.shapes, trials, total, total_sq)
