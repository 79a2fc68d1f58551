"""Several tasks that take turns, so that one model is trained on all of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from theory_lab.errors import InputError
from theory_lab.streams import U64
from theory_lab.tasks.base import Task, blank
from theory_lab.tasks.source import EVALUATION, Examples, check_batch


class Mixture(Task):
    """Tasks in turn: sequence r of step s is of task (r + s) modulo their number.

    They are those of the task alone at that step. Which task a sequence is of shows in its text alone.

    Parameters
    ----------
    parts : sequence of Task
        Two or more; tasks over symbols number them alike, so that they share a vocabulary, that of the largest.
    seed : int
        Every part has its own; this one is told.
    """

    name: ClassVar[str] = "mixture"
    summary: ClassVar[str] = "several tasks in turn"

    def __init__(self, parts: Sequence[Task], seed: int = 0) -> None:
        super().__init__(seed)
        if len(parts) < 2:
            raise InputError("task", len(parts), "at least two tasks are needed to take turns")
        kinds = {part.takes_text for part in parts}
        sizes = {part.vocab_size for part in parts}
        if len(kinds) > 1 or (kinds == {True} and len(sizes) > 1):
            names = ", ".join(part.name for part in parts)
            raise InputError("task", names, "tasks over one vocabulary are needed: symbols, or words of one tokenizer")
        self.parts = tuple(parts)
        files = [part.tokenizer_file for part in parts if part.tokenizer_file is not None]
        self.tokenizer_file: Path | None = files[0] if files else None

    @property
    def vocab_size(self) -> int:
        """Of the largest part."""
        return max(part.vocab_size for part in self.parts)

    @property
    def parameters(self) -> dict[str, Any]:
        """What the parts are called."""
        return {"tasks": [part.label for part in self.parts]}

    @property
    def label(self) -> str:
        """As :func:`theory_lab.tasks.open_source` reads it."""
        return " + ".join(part.label for part in self.parts)

    def describe(self) -> dict[str, Any]:
        """What must be known to make the same task again, in plain JSON."""
        return {"task": self.name, "parts": [part.describe() for part in self.parts], "seed": self.seed}

    def shortest(self) -> int:
        """Of the part that needs most."""
        return max(part.shortest() for part in self.parts)

    def longest(self) -> int | None:
        """Of the part that ends first."""
        return min((most for part in self.parts if (most := part.longest()) is not None), default=None)

    def examples(self, step: int, size: int, length: int, *, purpose: int = EVALUATION) -> Examples:
        """Sequences number 0 to ``size`` - 1 of a step; see :meth:`Task.examples`."""
        check_batch(step, size, length)
        self.check_length(int(length))
        made, count = blank(size, length, 0), len(self.parts)
        for number, part in enumerate(self.parts):
            rows = slice((number - step) % count, size, count)
            own = len(range(size)[rows])
            if own:
                for whole, drawn in zip(made, part.examples(step, own, length, purpose=purpose), strict=True):
                    whole[rows] = drawn
        return made

    def _width(self, length: int) -> int:
        raise NotImplementedError("the parts draw their own words")

    def _make(self, words: U64, length: int) -> Examples:
        raise NotImplementedError("the parts make their own sequences")
