"""Passkey and multi-needle retrieval: numbers hidden in a long text, asked for at its end.

These tasks are words, so they need a tokenizer: that of the model, or that of a corpus. Around the needles stands
text of a corpus' validation split, or a few plain sentences again and again. A needle lies anywhere in it, with equal
chance. The passkey follows Mohtashami and Jaggi (2023, arXiv:2305.16300), in words of our own.

A sequence has exactly the length that is asked for: the surrounding text gives way.
"""

from __future__ import annotations

import hashlib
import json
from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from theory_lab.errors import InputError
from theory_lab.outside import expanded
from theory_lab.streams import U64
from theory_lab.tasks.base import Task, blank, whole
from theory_lab.tasks.source import BOS, I64, Examples, below

INTRODUCTION = "Somewhere in this text a number is hidden. Look out for it and keep it in mind."
SENTENCES = (
    "The mill stands by the river.",
    "A cart comes down the hill.",
    "Some of the children play in the yard.",
    "At noon the bell rings twice.",
    "The baker opens the door and looks at the sky.",
    "Later it rains, and the road is wet.",
    "In the evening the lamps are lit.",
    "Everybody goes home, and the street is quiet.",
)
NAMES = (
    "river", "garden", "castle", "market", "forest", "harbor", "bridge", "tower", "valley", "island", "meadow",
    "village", "desert", "temple", "mountain", "station", "library", "museum", "kitchen", "window", "engine", "mirror",
    "candle", "basket", "ladder", "button", "hammer", "needle", "pencil", "pocket", "saddle", "violin",
)  # fmt: skip


class _Words:
    """Text to tokens, whatever the tokenizer: one of the tokenizers package, of transformers, a folder, a model."""

    def __init__(self, tokenizer: Any) -> None:
        self._inner, self.vocab_size, self.bos = _opened(tokenizer)
        self._known: dict[str, list[int]] = {}

    def __call__(self, text: str) -> list[int]:
        if text not in self._known:
            found = self._inner(text)
            if len(self._known) >= 1 << 16:
                self._known.clear()
            self._known[text] = found
        return self._known[text]


def _opened(tokenizer: Any) -> tuple[Any, int, list[int]]:
    """A function from text to tokens, the vocabulary's size, what stands in front of a text."""
    if tokenizer is None:
        raise InputError("tokenizer", "none", "this task is made of words: name a folder with a tokenizer, or a corpus")
    if hasattr(tokenizer, "backbone"):  # a loaded model
        if tokenizer.tokenizer is None:
            raise InputError("model", tokenizer.name, "a model with a tokenizer is needed for a task of words")
        tokenizer = tokenizer.tokenizer
    if isinstance(tokenizer, (str, Path)):
        from theory_lab.corpus.tokenizer import open_tokenizer

        tokenizer = open_tokenizer(tokenizer_file(tokenizer))
    if hasattr(tokenizer, "encode_batch"):
        front = list(tokenizer.encode("").ids)
        return (
            lambda text: list(tokenizer.encode(text, add_special_tokens=False).ids),
            tokenizer.get_vocab_size(),
            front,
        )
    if not callable(tokenizer):
        raise InputError("tokenizer", tokenizer, "a tokenizer, or a folder with a tokenizer.json, is allowed")
    from theory_lab.probes.texts import special_tokens

    front = special_tokens(tokenizer)[0]
    return lambda text: list(tokenizer(text, add_special_tokens=False)["input_ids"]), len(tokenizer), front


class _Retrieval(Task):
    """What both tasks share: needles in a text, and questions.

    Parameters
    ----------
    tokenizer : object
        Of the model: a tokenizer of the tokenizers package or of transformers, a folder with a ``tokenizer.json``, or a
        loaded model. The corpus' own if None.
    corpus : Corpus or path, optional
        Whose validation text surrounds the needles; plain sentences if None.
    digits : int
        Of each number.
    seed : int
        See :class:`~theory_lab.tasks.base.Task`.
    """

    takes_text: ClassVar[bool] = True
    needles = 1

    def __init__(self, tokenizer: Any = None, corpus: Any = None, digits: int = 5, seed: int = 0) -> None:
        super().__init__(seed)
        self.digits = whole("digits", digits, 1, 9)
        self._corpus = _opened_corpus(corpus)
        tokenizer = self._corpus.path if tokenizer is None and self._corpus is not None else tokenizer
        if isinstance(tokenizer, (str, Path)):
            tokenizer = self.tokenizer_file = tokenizer_file(tokenizer)
        self._words = _Words(tokenizer)
        if self._corpus is not None:
            self._check_same_tokenizer()
            # Where a word begins: its token starts with a blank or a line's end, as byte-level BPE writes them.
            known = self._corpus.tokenizer().get_vocab()
            self._begins = np.zeros(self.vocab_size, dtype=bool)
            self._begins[[number for token, number in known.items() if token[0] in "\u0120\u010a"]] = True
        self._front = self._words.bos or ([BOS] if self._corpus is not None else [])
        self._sentences = [self._words(" " + sentence) for sentence in SENTENCES]

    def _check_same_tokenizer(self) -> None:
        """A corpus' tokens mean nothing to another tokenizer."""
        text = INTRODUCTION + " ".join(SENTENCES)
        assert self._corpus is not None
        if self._corpus.tokenizer().encode(text, add_special_tokens=False).ids != self._words(text):
            raise InputError(
                "corpus", self._corpus.name, "its tokenizer is not the model's: leave it out, or name its own"
            )

    @property
    def vocab_size(self) -> int:
        """Of the tokenizer."""
        return int(self._words.vocab_size)

    @property
    def parameters(self) -> dict[str, Any]:
        """Keyword arguments that make the same task again, but for the tokenizer, the corpus and the seed."""
        return {"digits": self.digits}

    def identity(self) -> dict[str, Any]:
        """The parameters, how the tokenizer cuts the fixed words, and the corpus."""
        cut = [self._words(text) for text in (*self._fixed(), *SENTENCES, *(f" {digit}" for digit in range(10)))]
        known = hashlib.blake2b(json.dumps(cut).encode(), digest_size=8).hexdigest()
        text = "" if self._corpus is None else self._corpus.manifest["splits"]["validation"].get("sha256", "")
        return {"task": self.name, **self.parameters, "words": known, "text": text}

    def describe(self) -> dict[str, Any]:
        """As :meth:`Task.describe`, with the corpus' name."""
        about = super().describe()
        return about if self._corpus is None else {**about, "corpus": self._corpus.name}

    def _fixed(self) -> list[str]:
        """All words but the surrounding text and the numbers."""
        return [INTRODUCTION, *(text for name in NAMES for text in (*self._needle(name), self._question(name)))]

    @abstractmethod
    def _needle(self, name: str) -> Sequence[str]:
        """A needle's words, in parts: the number stands between each two of them."""

    @abstractmethod
    def _question(self, name: str) -> str:
        """The words before an answer."""

    def shortest(self) -> int:
        """What fits the words and the longest numbers, with nothing around them."""
        number = max(len(self._words(" " + str(digit) * self.digits)) for digit in range(10))
        number = max(number, self.digits + 1)
        needle = max(sum(len(self._words(part)) for part in self._needle(name)) for name in NAMES)
        question = max(len(self._words(self._question(name))) for name in NAMES)
        each = needle + question + len(self._needle("")) * number
        return len(self._front) + len(self._words(INTRODUCTION)) + self.needles * each

    def _width(self, length: int) -> int:
        return len(NAMES) + 3 * self.needles + 1

    def _make(self, words: U64, length: int) -> Examples:
        made = blank(len(words), length, 0)
        for row, drawn in enumerate(words):
            self._one(drawn, length, *(part[row] for part in made))
        return made

    def _one(self, words: U64, length: int, tokens: I64, labels: I64, queries: I64) -> None:
        """Fill in one sequence."""
        count = self.needles
        names = np.argsort(words[: len(NAMES)], kind="stable")[:count]
        places, orders, numbers, start = np.split(words[len(NAMES) :], [count, 2 * count, 3 * count])
        least = 10 ** (self.digits - 1)
        values = least + below(numbers, 9 * least)
        called = [NAMES[name] for name in names]
        written = [f" {value}" for value in values]
        needles = [self._spell(self._needle(name), number) for name, number in zip(called, written, strict=True)]
        end: list[int] = []
        marks: list[tuple[int, int, int]] = []  # question, first and last place of its answer, from the end's start
        for question, index in enumerate(np.argsort(orders, kind="stable")):
            end += self._words(self._question(called[index]))
            answer = self._words(written[index])
            marks.append((question, len(end), len(end) + len(answer)))
            end += answer
        opening = [*self._front, *self._words(INTRODUCTION)]
        room = length - len(opening) - len(end) - sum(map(len, needles))
        if room < 0:
            raise InputError("length", length, f"too short for task {self.label} with this tokenizer")
        text, breaks = self._surroundings(room, start)
        at = np.sort(breaks[below(places, len(breaks))])
        whole_text = list(opening)
        previous = 0
        for place, needle in zip(at, needles, strict=True):
            whole_text += text[previous:place].tolist() + needle
            previous = int(place)
        whole_text += text[previous:].tolist()
        offset = len(whole_text)
        tokens[:] = [*whole_text, *end]
        for question, first, last in marks:
            labels[offset + first : offset + last] = tokens[offset + first : offset + last]
            queries[offset + first : offset + last] = question

    def _spell(self, parts: Sequence[str], number: str) -> list[int]:
        """A needle's tokens: its parts with the number between them, cut alike wherever it is written."""
        spelled = list(self._words(parts[0]))
        for part in parts[1:]:
            spelled += self._words(number) + self._words(part)
        return spelled

    def _surroundings(self, room: int, start: U64) -> tuple[I64, I64]:
        """Text of ``room`` tokens, and the places where a needle may lie."""
        if self._corpus is not None:
            text = self._corpus.tokens("validation")
            if len(text) < room:
                raise InputError(
                    "length", room, f"the validation split of '{self._corpus.name}' has {len(text):,} tokens"
                )
            first = int(below(start, len(text) - room + 1)[0])
            found = np.asarray(text[first : first + room], dtype=np.int64)
            return found, np.append(np.flatnonzero(self._begins[found]), room)
        first = int(below(start, len(SENTENCES))[0])
        drawn: list[int] = []
        breaks = []
        while len(drawn) < room:
            breaks.append(len(drawn))
            drawn += self._sentences[first % len(SENTENCES)]
            first += 1
        # What is too much goes from the front: the text begins within a sentence and ends with one.
        cut = len(drawn) - room
        kept = np.array([place - cut for place in (*breaks, len(drawn)) if place >= cut], dtype=np.int64)
        return np.array(drawn[cut:], dtype=np.int64), kept


class Passkey(_Retrieval):
    """One number in a long text.

    Parameters
    ----------
    tokenizer, corpus, digits, seed
        See the module.
    """

    name: ClassVar[str] = "passkey"
    summary: ClassVar[str] = "a number hidden in a long text"

    def _needle(self, name: str) -> Sequence[str]:
        return " The pass key is", ". Keep it in mind:", " is the pass key."

    def _question(self, name: str) -> str:
        return "\n\nWhat is the pass key? The pass key is"


class MultiNeedle(_Retrieval):
    """Several numbers, each with a name, in a long text; all are asked for, in another order.

    Parameters
    ----------
    needles : int
        How many, 2 to 32.
    tokenizer, corpus, digits, seed
        See the module.
    """

    name: ClassVar[str] = "multi-needle"
    summary: ClassVar[str] = "several named numbers hidden in a long text"

    def __init__(
        self, tokenizer: Any = None, corpus: Any = None, needles: int = 2, digits: int = 5, seed: int = 0
    ) -> None:
        self.needles = whole("needles", needles, 2, len(NAMES))
        super().__init__(tokenizer, corpus, digits, seed)

    @property
    def parameters(self) -> dict[str, Any]:
        """Keyword arguments that make the same task again, but for the tokenizer, the corpus and the seed."""
        return {"needles": self.needles, "digits": self.digits}

    def _needle(self, name: str) -> Sequence[str]:
        return f" The number of the {name} is", "."

    def _question(self, name: str) -> str:
        return f"\n\nThe number of the {name} is"


def tokenizer_file(place: str | Path) -> Path:
    """The file itself, or ``tokenizer.json`` of a folder."""
    path = expanded(place)
    return path / "tokenizer.json" if path.is_dir() else path


def _opened_corpus(corpus: Any) -> Any:
    if corpus is None or hasattr(corpus, "manifest"):
        return corpus
    from theory_lab.corpus import Corpus

    return Corpus.open(corpus)
