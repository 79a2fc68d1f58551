"""Local count, two-back and flip-flop: something to say after every symbol, or after some.

Local count and two-back tag their input: the label at place t is the tag of the symbol at t - 1, which is what a model
predicts after having read it. Their last symbol has no place for its tag and goes unscored.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from theory_lab.errors import InputError
from theory_lab.streams import U64
from theory_lab.tasks.base import FIRST, SymbolTask, Task, blank, whole
from theory_lab.tasks.source import BOS, IGNORED, Examples, below


class LocalCount(Task):
    """How often did this symbol occur among the last ``window`` symbols, itself included?

    Parameters
    ----------
    symbols : int
        Size of the alphabet.
    window : int
        Symbols looked back on. The vocabulary is 4 + symbols + window: a tag is a count from 1 to ``window``.
    seed : int
        See :class:`~theory_lab.tasks.base.Task`.
    """

    name: ClassVar[str] = "local-count"
    summary: ClassVar[str] = "after each symbol, how often it occurred in a window that ends there"

    def __init__(self, symbols: int = 8, window: int = 16, seed: int = 0) -> None:
        super().__init__(seed)
        self.symbols = whole("symbols", symbols, 2, 1 << 16)
        self.window = whole("window", window, 2, 1 << 10)

    @property
    def vocab_size(self) -> int:
        """Special tokens, the alphabet, the counts."""
        return FIRST + self.symbols + self.window

    @property
    def parameters(self) -> dict[str, Any]:
        """Keyword arguments that make the same task again, but for the seed."""
        return {"symbols": self.symbols, "window": self.window}

    def shortest(self) -> int:
        """One symbol with a tag."""
        return 3

    def _width(self, length: int) -> int:
        return length - 1

    def _make(self, words: U64, length: int) -> Examples:
        text = below(words, self.symbols)
        count = np.ones_like(text)
        for back in range(1, min(self.window, length - 1)):
            count[:, back:] += text[:, back:] == text[:, :-back]
        made = blank(len(text), length, BOS)
        made.tokens[:, 1:] = FIRST + text
        made.labels[:, 2:] = FIRST + self.symbols + count[:, :-1] - 1
        made.queries[:, 2:] = np.arange(length - 2)
        return made


class TwoBack(SymbolTask):
    """Which symbol stood two places before this one?

    Parameters
    ----------
    symbols : int
        Size of the alphabet. The vocabulary is 4 + symbols.
    seed : int
        See :class:`~theory_lab.tasks.base.Task`.
    """

    name: ClassVar[str] = "two-back"
    summary: ClassVar[str] = "after each symbol, the one two places before it"

    def shortest(self) -> int:
        """Three symbols and the place after the last of them."""
        return 5

    def _width(self, length: int) -> int:
        return length - 1

    def _make(self, words: U64, length: int) -> Examples:
        text = FIRST + below(words, self.symbols)
        made = blank(len(text), length, BOS)
        made.tokens[:, 1:] = text
        made.labels[:, 4:] = text[:, : length - 4]
        made.queries[:, 4:] = np.arange(length - 4)
        return made


class FlipFlop(Task):
    """A memory of one bit: what was written last?

    A sequence is a row of pairs, an instruction and a bit: write, ignore or read. After ``read`` the bit must be the
    one last written; bits after the others are random. The first instruction is a write and the last a read
    (flip-flop language modeling, Liu et al. 2023, arXiv:2306.00946).

    Parameters
    ----------
    ignore : float
        Probability of an ignore in [0, 1); write and read share the rest equally.
    seed : int
        See :class:`~theory_lab.tasks.base.Task`.
    """

    name: ClassVar[str] = "flip-flop"
    summary: ClassVar[str] = "a memory of one bit among instructions to write, ignore and read"

    _WRITE, _IGNORE, _READ, _ZERO = FIRST, FIRST + 1, FIRST + 2, FIRST + 3

    def __init__(self, ignore: float = 0.8, seed: int = 0) -> None:
        super().__init__(seed)
        if isinstance(ignore, bool) or not isinstance(ignore, (int, float)) or not 0.0 <= ignore < 1.0:
            raise InputError("ignore", ignore, "a probability in [0, 1) is allowed")
        self.ignore = float(ignore)

    @property
    def vocab_size(self) -> int:
        """Special tokens, three instructions, two bits."""
        return FIRST + 5

    @property
    def parameters(self) -> dict[str, Any]:
        """Keyword arguments that make the same task again, but for the seed."""
        return {"ignore": self.ignore}

    def shortest(self) -> int:
        """A write and a read."""
        return 5

    def _width(self, length: int) -> int:
        return 2 * ((length - 1) // 2)

    def _make(self, words: U64, length: int) -> Examples:
        size, count = words.shape[0], words.shape[1] // 2
        uniform = (words[:, :count] >> np.uint64(11)).astype(np.float64) * 2.0**-53
        chosen = np.where(uniform < self.ignore, self._IGNORE, self._WRITE)
        chosen[uniform >= self.ignore + (1.0 - self.ignore) / 2.0] = self._READ
        chosen[:, 0], chosen[:, -1] = self._WRITE, self._READ
        bits = below(words[:, count:], 2)
        # The place of the last write at or before each instruction.
        last = np.maximum.accumulate(np.where(chosen == self._WRITE, np.arange(count), 0), axis=1)
        stored = np.take_along_axis(bits, last, axis=1)
        reads = chosen == self._READ
        bits = self._ZERO + np.where(reads, stored, bits)

        made = blank(size, length, BOS)
        start = length - 2 * count  # 1, or 2 with a second <bos> where the length is even
        made.tokens[:, start::2] = chosen
        made.tokens[:, start + 1 :: 2] = bits
        made.labels[:, start + 1 :: 2] = np.where(reads, bits, IGNORED)
        made.queries[:, start + 1 :: 2] = np.where(reads, np.cumsum(reads, axis=1) - 1, -1)
        return made
