"""What a model is trained on: batches of tokens as a pure function of a seed and a step.

Every source, a task or a corpus, numbers its special tokens alike, so that one model configuration fits them all.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from theory_lab.errors import InputError
from theory_lab.streams import U64, Stream

#: Ids of the special tokens, in every source.
BOS, EOS, PAD = 0, 1, 2

#: The label of a position that is not scored, as PyTorch's cross entropy and transformers have it.
IGNORED = -100

I64 = npt.NDArray[np.int64]

#: High counter words of the streams of one source: what a step of training draws, and what an evaluation draws.
TRAINING, EVALUATION = 0, 1


class Examples(NamedTuple):
    """Sequences of one length.

    Attributes
    ----------
    tokens : ndarray of int64, shape (size, length)
    labels : ndarray of int64, shape (size, length)
        What the model must predict; ``IGNORED`` where nothing is scored. ``labels[:, t]`` belongs to the prediction
        made after ``tokens[:, :t]``: transformers' models shift them by one place. Where a task continues its own text
        a label is the token at its place; where it tags its input, a label is the tag of the token before.
    queries : ndarray of int64, shape (size, length)
        Which question of its sequence a label answers, counted from 0; -1 where nothing is scored. Answers of several
        tokens are right if all of them are.
    """

    tokens: I64
    labels: I64
    queries: I64


@runtime_checkable
class Source(Protocol):
    """Anything that deals out training sequences."""

    @property
    def vocab_size(self) -> int:
        """Tokens are from 0 to ``vocab_size`` - 1."""

    def describe(self) -> dict[str, Any]:
        """What must be known to make the same source again, in plain JSON."""

    def batch(self, step: int, size: int, length: int) -> tuple[I64, I64]:
        """Tokens and labels of one step, each of shape (size, length).

        The same seed, step and length give the same rows, and fewer rows are the first ones: no state is kept, and a
        worker of several takes its share of the rows.
        """


def check_batch(step: object, size: object, length: object) -> None:
    """InputError if a batch of that kind cannot be."""
    for field, value, least in (("step", step, 0), ("size", size, 1), ("length", length, 2)):
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < least:
            raise InputError(field, value, f"a whole number from {least} up is allowed")


def draw_words(digest: str, step: int, size: int, width: int, purpose: int) -> U64:
    """Random words of shape (size, width), row after row: fewer rows are the first ones."""
    return Stream(digest, step, purpose).words(size * width).reshape(size, width)


def below(words: U64, limit: int) -> I64:
    """Whole numbers from 0 to limit - 1, uniform to within limit * 2^-32, from the words' high halves."""
    if not 1 <= limit < 1 << 32:
        raise ValueError(f"limit {limit}: 1 to 2^32 - 1")
    return (((words >> np.uint64(32)) * np.uint64(limit)) >> np.uint64(32)).astype(np.int64)
