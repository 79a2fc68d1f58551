"""What an estimator draws, block by block, and what a block leaves behind."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from functools import cached_property, lru_cache
from operator import attrgetter
from typing import Any, Literal, NamedTuple

from theory_lab.claims.base import Point, Statistic
from theory_lab.claims.points import Points
from theory_lab.streams import GPU_STREAM, Streams, cell_digest, encoded, text_digest

#: How the observations of a sample may be trusted, which decides the interval:
#: ``bernoulli``: independent zeros and ones; ``bounded``: independent values in [0, ceiling];
#: ``rows``: independent rows without a useful bound; ``certain``: no randomness at all.
Model = Literal["bernoulli", "bounded", "rows", "certain"]


@dataclass(frozen=True)
class Cell:
    """One statistic at one setting, by one estimator, with one seed."""

    statistic: Statistic
    point: Point
    estimator: str
    seed: int
    device: str = "cpu"

    def identity(self) -> dict[str, Any]:
        """What the draws depend on, apart from the seed."""
        stream = {} if self.device == "cpu" else {"stream": GPU_STREAM}
        return {"statistic": self.statistic, "estimator": self.estimator, **stream, **self.point.identity()}

    @cached_property
    def digest(self) -> str:
        """Name of the cell: the key of its random streams and of its file."""
        values = _numbers(self.point)
        if self.device != "cpu" or type(self.seed) is not int or not _PLAIN.issuperset(map(type, values)):
            return cell_digest(self.identity(), self.seed)
        # The same text, made in a third of the time: resuming a sweep names each of its cells.
        return text_digest(_template(self.statistic, self.estimator, self.point.noise_identity) % values, self.seed)


#: The numbers of a point, by name; and the types whose ``repr`` is their JSON.
_NUMBERS = sorted(field.name for field in fields(Point) if field.name != "noise")
_numbers = attrgetter(*_NUMBERS)
_PLAIN = frozenset((int, float))


@lru_cache(maxsize=1024)
def _template(statistic: str, estimator: str, noise: str, numbers: tuple[str, ...] = ("%r",) * len(_NUMBERS)) -> str:
    """The encoded identity of a cell on the CPU, with places for its numbers, or for some of them."""
    words = {"statistic": statistic, "estimator": estimator, "noise": noise}
    texts = {name: encoded(word).replace("%", "%%") for name, word in words.items()}
    texts |= dict(zip(_NUMBERS, numbers, strict=True))
    return "{" + ",".join(f"{encoded(name)}:{texts[name]}" for name in sorted(texts)) + "}"


def digests(statistic: Statistic, points: Points, estimator: str, seed: int, device: str = "cpu") -> list[str]:
    """:attr:`Cell.digest` of a cell at each of some points, in a small part of the time."""
    if device != "cpu" or type(seed) is not int or not points.plain():
        return [Cell(statistic, point, estimator, seed, device).digest for point in points]
    if not len(points):
        return []
    columns = {name: points.texts(name) for name in _NUMBERS if points.varies(name)}
    numbers = tuple("%s" if name in columns else repr(points.values(name)[0]) for name in _NUMBERS)
    noise = points[0].noise_identity
    template = _template(statistic, estimator, noise, numbers)
    rows = zip(*columns.values(), strict=True) if columns else [()] * len(points)
    return [text_digest(template % row, seed) for row in rows]


def never_exceeds(point: Point) -> bool:
    """Whether P(X > tau) is 0: beyond the law's support, or below what a float64 holds."""
    return point.tail <= 0.0


@dataclass(frozen=True)
class BlockSum:
    """What one block of trials leaves behind.

    Attributes
    ----------
    block : int
        Index of the block within the cell.
    trials : int
        Rows (or weighted samples) drawn.
    total, total_sq : float
        Sum of the observations and of their squares. Whole numbers below 2^53 are exact.
    """

    block: int
    trials: int
    total: float
    total_sq: float


@dataclass(frozen=True)
class Sample:
    """The pooled observations of a cell.

    The estimate of E[statistic] is ``scale * total / size``.

    Attributes
    ----------
    model : Model
        See :data:`Model`.
    trials : int
        Rows (or weighted samples) drawn.
    size : int
        Observations: ``trials`` times the keys of a row for pooled Bernoullis, else ``trials``.
    total, total_sq : float
        Sums over the observations.
    scale : float
        Units of the statistic per unit of observation.
    ceiling : float
        Largest possible observation, for ``bounded``.
    note : str
        How the numbers came about, in a few words.
    resolution : float
        How far the probability of a ``bernoulli`` drawn may lie below the true one.
    """

    model: Model
    trials: int
    size: int
    total: float
    total_sq: float
    scale: float = 1.0
    ceiling: float = math.inf
    note: str = ""
    resolution: float = 0.0

    @property
    def estimate(self) -> float:
        """Point estimate of the expectation."""
        return self.scale * self.total / self.size if self.size else math.nan

    @property
    def variance(self) -> float:
        """Sample variance of an observation."""
        if self.model == "certain" or self.size < 2:
            return 0.0
        mean = self.total / self.size
        if self.model == "bernoulli":
            return mean * (1.0 - mean)
        return max(0.0, (self.total_sq - self.size * mean * mean) / (self.size - 1))

    @property
    def standard_error(self) -> float:
        """Standard error of :attr:`estimate`."""
        return self.scale * math.sqrt(self.variance / self.size) if self.size else math.nan


class Shape(NamedTuple):
    """What the observations of a cell are, before there is one; see :class:`Sample`."""

    model: Model
    note: str
    scale: float = 1.0
    ceiling: float = math.inf
    resolution: float = 0.0
    #: Observations that a trial leaves behind.
    per_trial: int = 1


class Estimator(ABC):
    """A way of estimating E[statistic] at a point.

    A block is the unit of work and of reproducibility: block b of a cell always draws the same numbers, and its first
    trials do not depend on how many follow.
    """

    name: str

    @abstractmethod
    def block_trials(self, cell: Cell) -> int:
        """Trials in a full block."""

    @abstractmethod
    def seconds_per_trial(self, cell: Cell) -> float:
        """Rough cost of a trial, to cut work into pieces and to spend a budget."""

    @abstractmethod
    def run_block(self, cell: Cell, block: int, trials: int, streams: Streams) -> BlockSum:
        """Draw the first ``trials`` trials of a block."""

    @abstractmethod
    def shape(self, cell: Cell) -> Shape:
        """What the observations are."""

    def certain(self, cell: Cell) -> bool:
        """Whether there is nothing to observe, since no score can exceed the threshold."""
        return never_exceeds(cell.point)

    def pool(self, cell: Cell, blocks: Sequence[BlockSum]) -> Sample:
        """Combine blocks."""
        shape, (trials, total, total_sq) = self.shape(cell), pooled(blocks)
        return Sample(
            shape.model,
            trials,
            shape.per_trial * trials,
            total,
            total_sq,
            shape.scale,
            shape.ceiling,
            shape.note,
            shape.resolution,
        )


def pooled(blocks: Iterable[BlockSum]) -> tuple[int, float, float]:
    """Trials of all blocks, and the correctly rounded sums, which do not depend on their order."""
    blocks = list(blocks)
    return (
        sum(block.trials for block in blocks),
        math.fsum(block.total for block in blocks),
        math.fsum(block.total_sq for block in blocks),
    )
