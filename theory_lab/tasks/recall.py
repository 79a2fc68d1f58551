"""Multi-query associative recall: which value stood behind this key?

A sequence is ``<bos> pair pair ... pair <ask> key value key value ...``: pairs of a key and a value fill the text, and
at its end some of the keys are asked for again. A key is several symbols, so that a text of 65,536 tokens still has
distinct keys of a small alphabet and every symbol is met in training; keys and values have alphabets of their own, so
that no key appears across the border of two pairs.

The number of pairs grows with the length and the number of questions does not: the longer the text, the more keys
compete with the one that is asked for. The task follows the multi-query recall of Arora et al. (2023,
arXiv:2312.04927) and the multi-token keys of ASEntmax's experiments (arXiv 2506.16640); the layout is ours.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from theory_lab.errors import InputError
from theory_lab.streams import U64
from theory_lab.tasks.base import FIRST, SEPARATOR, Task, blank, whole
from theory_lab.tasks.source import BOS, I64, Examples, below


class Recall(Task):
    """Multi-query associative recall.

    Parameters
    ----------
    queries : int
        Questions a sequence, about different pairs.
    key_tokens, value_tokens : int
        Symbols of a key and of a value.
    symbols : int
        Size of either alphabet. The vocabulary is 4 + 2 * symbols.
    seed : int
        See :class:`~theory_lab.tasks.base.Task`.
    """

    name: ClassVar[str] = "recall"
    summary: ClassVar[str] = "multi-query associative recall: the value that stood behind a key"

    def __init__(
        self, queries: int = 4, key_tokens: int = 2, value_tokens: int = 1, symbols: int = 256, seed: int = 0
    ) -> None:
        super().__init__(seed)
        self.queries = whole("queries", queries, 1, 1 << 16)
        self.key_tokens = whole("key_tokens", key_tokens, 1, 4)
        self.value_tokens = whole("value_tokens", value_tokens, 1, 16)
        self.symbols = whole("symbols", symbols, 2, 1 << 14)
        self._keys = self.symbols**self.key_tokens
        if self._keys >= 1 << 32:
            raise InputError("symbols", symbols, f"symbols^key_tokens is {self._keys:,}: fewer than 2^32 are allowed")

    @property
    def vocab_size(self) -> int:
        """Special tokens, then the alphabet of keys, then that of values."""
        return FIRST + 2 * self.symbols

    @property
    def parameters(self) -> dict[str, Any]:
        """Keyword arguments that make the same task again, but for the seed."""
        return {
            "queries": self.queries,
            "key_tokens": self.key_tokens,
            "value_tokens": self.value_tokens,
            "symbols": self.symbols,
        }

    @property
    def _pair(self) -> int:
        return self.key_tokens + self.value_tokens

    def pairs(self, length: int) -> int:
        """Whole pairs in the text of a sequence of that length."""
        return (length - 2) // self._pair - self.queries

    def shortest(self) -> int:
        """As many pairs as questions."""
        return 2 + 2 * self.queries * self._pair

    def longest(self) -> int:
        """As long as the keys can be distinct."""
        return 1 + (self._keys + self.queries + 1) * self._pair

    def _width(self, length: int) -> int:
        pairs = self.pairs(length)
        return self._candidates(pairs) + pairs * self.value_tokens + self._candidates_of_questions(pairs) + self._pair

    def _candidates(self, pairs: int) -> int:
        """Words from which distinct keys are taken: all keys in random order, or draws with room for repetitions."""
        if 4 * pairs >= self._keys:
            return self._keys
        expected = -self._keys * np.log1p(-pairs / self._keys)
        return int(np.ceil(expected + 8.0 * np.sqrt(pairs))) + 16

    def _candidates_of_questions(self, pairs: int) -> int:
        return pairs

    def _make(self, words: U64, length: int) -> Examples:
        size = len(words)
        pairs = self.pairs(length)
        ends = np.cumsum([self._candidates(pairs), pairs * self.value_tokens, self._candidates_of_questions(pairs)])
        for_keys, for_values, for_questions, for_rest = np.split(words, ends, axis=1)
        keys = self._spell(self._distinct(for_keys, pairs))
        values = FIRST + self.symbols + below(for_values, self.symbols).reshape(size, pairs, self.value_tokens)
        text = np.concatenate([keys, values], axis=2)
        asked = np.argsort(for_questions, axis=1, kind="stable")[:, : self.queries]
        questions = np.take_along_axis(text, asked[:, :, None], axis=1)

        made = blank(size, length, SEPARATOR)
        tokens, labels, numbers = made
        tokens[:, 0] = BOS
        asks = length - self.queries * self._pair
        tail = slice(asks, length)
        front = asks - 1 - pairs * self._pair  # where the first whole pair begins: before it, the end of a cut one
        if front > 1:
            cut = np.concatenate(
                [
                    FIRST + below(for_rest[:, : self.key_tokens], self.symbols),
                    FIRST + self.symbols + below(for_rest[:, self.key_tokens :], self.symbols),
                ],
                axis=1,
            )
            tokens[:, 1:front] = cut[:, self._pair - (front - 1) :]
        tokens[:, front : asks - 1] = text.reshape(size, -1)
        tokens[:, tail] = questions.reshape(size, -1)
        scored = np.tile(np.arange(self._pair) >= self.key_tokens, self.queries)
        numbering = np.repeat(np.arange(self.queries), self._pair)
        labels[:, tail][:, scored] = tokens[:, tail][:, scored]
        numbers[:, tail][:, scored] = numbering[scored]
        return made

    def _distinct(self, words: U64, count: int) -> I64:
        """``count`` different keys a row, in random order, shape (size, count)."""
        if words.shape[1] == self._keys:
            return np.argsort(words, axis=1, kind="stable")[:, :count]
        drawn = below(words, self._keys)
        order = np.argsort(drawn, axis=1, kind="stable")
        ranked = np.take_along_axis(drawn, order, axis=1)
        again = np.zeros(drawn.shape, dtype=bool)
        np.put_along_axis(again, order[:, 1:], ranked[:, 1:] == ranked[:, :-1], axis=1)
        # The first appearance of each key, in the order of drawing: the law of draws without replacement.
        first = np.argsort(again, axis=1, kind="stable")[:, :count]
        keys = np.take_along_axis(drawn, first, axis=1)
        for row in np.flatnonzero(np.take_along_axis(again, first, axis=1).any(axis=1)):
            keys[row] = self._more(drawn[row], words[row], count)
        return keys

    def _more(self, drawn: I64, words: U64, count: int) -> I64:
        """One row whose draws repeat too often (hardly ever): go on drawing, from a generator keyed by its words."""
        bits = np.random.Philox(key=words[:2])
        seen = dict.fromkeys(drawn.tolist())
        while len(seen) < count:
            seen.update(dict.fromkeys(below(bits.random_raw(count), self._keys).tolist()))
        return np.array(list(seen)[:count], dtype=np.int64)

    def _spell(self, keys: I64) -> I64:
        """Keys as symbols, shape (..., key_tokens)."""
        powers = self.symbols ** np.arange(self.key_tokens - 1, -1, -1, dtype=np.int64)
        return FIRST + keys[..., None] // powers % self.symbols
