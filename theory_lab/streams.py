"""Random bits: counter-based streams keyed by (seed, cell, block, purpose).

Every block of a cell owns streams of its own, so neither the number of workers, nor their order, nor a crash and a
resume changes a bit. Only the raw 64-bit words of NumPy's Philox generator are used, whose sequence NumPy promises
to keep; its distribution methods carry no such promise.

``STREAM_VERSION`` names the recipe by which words become draws. It changes when, and only when, the same seed would
give other draws, and results of two recipes are never mixed in one store.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from theory_lab.errors import InputError

STREAM_VERSION = 1

#: The recipe of cells drawn on a GPU (block sizes and block keys included), in their names; see ``estimation.device``.
GPU_STREAM = "theory_kernels.exceedance-1"

U64 = npt.NDArray[np.uint64]
F64 = npt.NDArray[np.float64]

_TWO64 = 1 << 64
_ENCODER = json.JSONEncoder(sort_keys=True, separators=(",", ":"))


def validate_seed(seed: object) -> int:
    """Return ``seed`` as an int in [0, 2^63).

    Raises
    ------
    InputError
        If it is not an integer in that range.
    """
    if isinstance(seed, bool) or not isinstance(seed, (int, np.integer)) or not 0 <= int(seed) < 1 << 63:
        raise InputError("seed", seed, "an integer from 0 to 2^63 - 1 is allowed")
    return int(seed)


def cell_digest(identity: Mapping[str, Any], seed: int) -> str:
    """Name of a cell: 32 hexadecimal digits of a hash over its identity and the seed.

    Parameters
    ----------
    identity : mapping
        JSON-serializable description of what is drawn. Floats enter by their shortest exact decimal form.
    seed : int
        The run's seed.
    """
    return text_digest(encoded(dict(identity)), seed)


def encoded(value: object) -> str:
    """JSON as it enters names: keys sorted, no spaces."""
    return _ENCODER.encode(value)


def text_digest(identity: str, seed: int) -> str:
    """The same of an identity that is encoded already."""
    return hashlib.blake2b(f"[{STREAM_VERSION},{seed},{identity}]".encode(), digest_size=16).hexdigest()


class Stream:
    """A sequence of raw 64-bit words, read in order.

    Parameters
    ----------
    digest : str
        The cell's name, from :func:`cell_digest`; its 128 bits are the Philox key.
    block, purpose : int
        High words of the 256-bit counter, so that streams of one cell never meet.
    """

    def __init__(self, digest: str, block: int, purpose: int) -> None:
        key = np.frombuffer(bytes.fromhex(digest), dtype="<u8").astype(np.uint64)
        self._bits = np.random.Philox(key=key, counter=np.array([0, 0, purpose, block], dtype=np.uint64))

    def words(self, size: int) -> U64:
        """Return the next ``size`` words, shape (size,)."""
        return self._bits.random_raw(size)

    def lanes8(self, size: int) -> npt.NDArray[np.uint8]:
        """Return ``size`` bytes, eight to a word, least significant first; a part-used last word is dropped."""
        words = self._bits.random_raw((size + 7) // 8)
        return words.astype("<u8", copy=False).view(np.uint8)[:size]

    def lanes16(self, size: int) -> npt.NDArray[np.uint16]:
        """Return ``size`` 16-bit integers, four to a word; a part-used last word is dropped."""
        words = self._bits.random_raw((size + 3) // 4)
        return words.astype("<u8", copy=False).view("<u2")[:size]

    def uniforms(self, size: int) -> F64:
        """Return ``size`` uniforms in (0, 1), 52 bits each and never 0 or 1."""
        return open_uniform(self._bits.random_raw(size))


class Streams:
    """The streams of one block of one cell, made on first use."""

    def __init__(self, digest: str, block: int) -> None:
        self._digest = digest
        self._block = block
        self._made: dict[int, Stream] = {}

    def __getitem__(self, purpose: int) -> Stream:
        if purpose not in self._made:
            self._made[purpose] = Stream(self._digest, self._block, purpose)
        return self._made[purpose]


def open_uniform(words: U64) -> F64:
    """Map words to uniforms in (0, 1): the middle of one of 2^52 equal cells, which a float64 still tells from 1."""
    return ((words >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52


def threshold_word(probability: float) -> int:
    """Return T such that a uniform 64-bit word w satisfies w < T with the given probability, to within 2^-64.

    A probability of 1 becomes 1 - 2^-64, so that T fits a word.
    """
    return min(int(probability * _TWO64), _TWO64 - 1)
