"""Copy, reverse and sort: a text, and the same symbols again in another order.

A sequence is ``<bos> x_1 ... x_m <sep> y_1 ... y_m`` with m = (length - 2) // 2, followed by one ``<pad>`` where the
length is odd. Every y is scored, each as a question of its own.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

import numpy as np

from theory_lab.streams import U64
from theory_lab.tasks.base import FIRST, SEPARATOR, SymbolTask, blank
from theory_lab.tasks.source import BOS, I64, PAD, Examples, below


class _Rearrangement(SymbolTask):
    """A text whose symbols follow again in another order.

    Parameters
    ----------
    symbols : int
        Size of the alphabet. The vocabulary is 4 + symbols.
    seed : int
        See :class:`~theory_lab.tasks.base.Task`.
    """

    def shortest(self) -> int:
        """One symbol and its answer."""
        return 4

    def _width(self, length: int) -> int:
        return (length - 2) // 2

    def _make(self, words: U64, length: int) -> Examples:
        size, count = words.shape
        text = FIRST + below(words, self.symbols)
        made = blank(size, length, PAD)
        made.tokens[:, 0] = BOS
        made.tokens[:, 1 : count + 1] = text
        made.tokens[:, count + 1] = SEPARATOR
        answer = slice(count + 2, 2 * count + 2)
        made.tokens[:, answer] = made.labels[:, answer] = self._order(text)
        made.queries[:, answer] = np.arange(count)
        return made

    @staticmethod
    @abstractmethod
    def _order(text: I64) -> I64:
        """The answer to a text, shape (size, m) both."""


class Copy(_Rearrangement):
    """The symbols in their order."""

    name: ClassVar[str] = "copy"
    summary: ClassVar[str] = "the same symbols again"

    @staticmethod
    def _order(text: I64) -> I64:
        return text


class Reverse(_Rearrangement):
    """The symbols from the last to the first."""

    name: ClassVar[str] = "reverse"
    summary: ClassVar[str] = "the same symbols from the last to the first"

    @staticmethod
    def _order(text: I64) -> I64:
        return text[:, ::-1]


class Sort(_Rearrangement):
    """The symbols by their number, from the least."""

    name: ClassVar[str] = "sort"
    summary: ClassVar[str] = "the same symbols in increasing order"

    @staticmethod
    def _order(text: I64) -> I64:
        return np.sort(text, axis=1)
