"""What every task has: examples from a seed, and what counts as right."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from theory_lab.errors import InputError
from theory_lab.streams import U64, cell_digest, validate_seed
from theory_lab.tasks.source import EVALUATION, IGNORED, TRAINING, Examples, check_batch, draw_words

if TYPE_CHECKING:
    from theory_lab.models.loading import LoadedModel
    from theory_lab.settings import Progress
    from theory_lab.tasks.evaluation import TaskResult
    from theory_lab.tasks.source import I64

#: Between the question and the answer of a task, or the text and its questions.
SEPARATOR = 3
#: Ids of a task's own symbols begin here, after the special tokens.
FIRST = 4


class Task(ABC):
    """A task with right answers, made from a seed: a source to train on and a test to take.

    Parameters
    ----------
    seed : int
        0 to 2^63 - 1. Training and evaluation draw from streams of their own, so no sequence is met in both on purpose.
    """

    name: ClassVar[str]
    #: One line for lists.
    summary: ClassVar[str]
    #: Whether it is made of words, so that it needs a tokenizer and may take a corpus.
    takes_text: ClassVar[bool] = False
    #: File of the tokenizer that its words are cut by, if it came from one.
    tokenizer_file: Path | None = None

    def __init__(self, seed: int = 0) -> None:
        self.seed = validate_seed(seed)

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """Tokens are from 0 to ``vocab_size`` - 1."""

    @property
    @abstractmethod
    def parameters(self) -> dict[str, Any]:
        """Keyword arguments that make the same task again, but for the seed."""

    @abstractmethod
    def shortest(self) -> int:
        """The least length of a sequence, in tokens."""

    def longest(self) -> int | None:
        """The largest length of a sequence, in tokens; None without a limit."""
        return None

    @abstractmethod
    def _width(self, length: int) -> int:
        """Random words that one sequence of that length takes."""

    @abstractmethod
    def _make(self, words: U64, length: int) -> Examples:
        """Sequences from random words, shape (size, ``_width(length)``)."""

    def identity(self) -> dict[str, Any]:
        """What decides, with the seed, which sequences are drawn."""
        return {"task": self.name, **self.parameters}

    def describe(self) -> dict[str, Any]:
        """What must be known to make the same task again, in plain JSON."""
        return {"task": self.name, "parameters": self.parameters, "seed": self.seed}

    @property
    def label(self) -> str:
        """The task and its parameters, as :func:`theory_lab.tasks.open_source` reads them."""
        inner = ",".join(f"{key}={value}" for key, value in self.parameters.items())
        return f"{self.name}:{inner}" if inner else self.name

    def check_length(self, length: int) -> None:
        """InputError if there is no sequence of that length."""
        most = self.longest()
        if length < self.shortest():
            raise InputError("length", length, f"task {self.name} takes at least {self.shortest()} tokens")
        if most is not None and length > most:
            raise InputError("length", length, f"task {self.label} takes at most {most:,} tokens")

    def examples(self, step: int, size: int, length: int, *, purpose: int = EVALUATION) -> Examples:
        """Sequences number 0 to ``size`` - 1 of a step, each of exactly ``length`` tokens.

        Parameters
        ----------
        step, size, length : int
        purpose : {TRAINING, EVALUATION}
            Whose stream is read.

        Raises
        ------
        InputError
            If there are no sequences of that length.
        """
        check_batch(step, size, length)
        self.check_length(int(length))
        digest = cell_digest({**self.identity(), "length": int(length)}, self.seed)
        words = draw_words(digest, int(step), int(size), self._width(int(length)), purpose)
        return self._make(words, int(length))

    def batch(self, step: int, size: int, length: int) -> tuple[I64, I64]:
        """Tokens and labels of one training step, each of shape (size, length); see :class:`~.source.Source`."""
        found = self.examples(step, size, length, purpose=TRAINING)
        return found.tokens, found.labels

    def evaluate(
        self,
        model: LoadedModel,
        lengths: Sequence[int],
        *,
        samples: int = 200,
        most_tokens: int | None = None,
        chunk: int | None = None,
        level: float = 0.95,
        progress: Progress | None = None,
    ) -> TaskResult:
        """Let a model take the test; see :func:`theory_lab.tasks.evaluation.evaluate`."""
        from theory_lab.tasks.evaluation import evaluate

        return evaluate(
            model, self, lengths, samples=samples, most_tokens=most_tokens, chunk=chunk, level=level, progress=progress
        )


def blank(size: int, length: int, fill: int) -> Examples:
    """Sequences of one token, of which nothing is scored."""
    return Examples(
        np.full((size, length), fill, dtype=np.int64),
        np.full((size, length), IGNORED, dtype=np.int64),
        np.full((size, length), -1, dtype=np.int64),
    )


def whole(field: str, value: object, least: int, most: int | None = None) -> int:
    """A parameter that is a whole number in a range; InputError otherwise."""
    fine = not isinstance(value, bool) and isinstance(value, (int, np.integer))
    if not fine or int(value) < least or (most is not None and int(value) > most):  # type: ignore[call-overload]  # checked just before
        until = f"to {most:,}" if most is not None else "up"
        raise InputError(field, value, f"a whole number from {least} {until} is allowed")
    return int(value)  # type: ignore[call-overload]  # checked just before


class SymbolTask(Task):
    """A task over one alphabet.

    Parameters
    ----------
    symbols : int
        Size of the alphabet. The vocabulary is 4 + symbols.
    seed : int
        See :class:`Task`.
    """

    def __init__(self, symbols: int = 32, seed: int = 0) -> None:
        super().__init__(seed)
        self.symbols = whole("symbols", symbols, 2, 1 << 16)

    @property
    def vocab_size(self) -> int:
        """Special tokens, then the alphabet."""
        return FIRST + self.symbols

    @property
    def parameters(self) -> dict[str, Any]:
        """Keyword arguments that make the same task again, but for the seed."""
        return {"symbols": self.symbols}
