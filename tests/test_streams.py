"""Random streams: reproducible, independent of each other, uniform."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from scipy import stats

from theory_lab.errors import InputError
from theory_lab.streams import Stream, Streams, cell_digest, open_uniform, threshold_word, validate_seed

DIGEST = cell_digest({"test": 1}, 0)


def test_known_words() -> None:
    """The recipe must not change silently: stored results depend on it."""
    assert DIGEST == "fc7078271f20c716093fd0793fc14af5"
    first = Stream("00" * 16, 0, 0).words(2)
    reference = np.random.Philox(key=np.zeros(2, np.uint64), counter=np.zeros(4, np.uint64)).random_raw(2)
    np.testing.assert_array_equal(first, reference)


def test_same_key_same_words_other_key_other_words() -> None:
    keys = list(itertools.product((DIGEST, cell_digest({"test": 1}, 1), cell_digest({"test": 2}, 0)), (0, 1), (0, 1)))
    words = [Stream(*key).words(64) for key in keys]
    np.testing.assert_array_equal(words[0], Stream(*keys[0]).words(64))
    assert len({w.tobytes() for w in words}) == len(keys)


@pytest.mark.parametrize("read", ["words", "lanes8", "lanes16", "uniforms"])
def test_prefix(read: str) -> None:
    """A longer read begins with a shorter one."""
    long = getattr(Stream(DIGEST, 3, 1), read)(1000)
    short = getattr(Stream(DIGEST, 3, 1), read)(333)
    np.testing.assert_array_equal(long[:333], short)


def test_lanes_are_the_words() -> None:
    words = Stream(DIGEST, 0, 0).words(4)
    lanes = Stream(DIGEST, 0, 0).lanes8(32)
    rebuilt = sum(lanes.reshape(4, 8)[:, k].astype(np.uint64) << np.uint64(8 * k) for k in range(8))
    np.testing.assert_array_equal(rebuilt, words)


def test_streams_are_cached_and_continue() -> None:
    streams = Streams(DIGEST, 0)
    both = np.concatenate([streams[0].words(5), streams[0].words(5)])
    np.testing.assert_array_equal(both, Stream(DIGEST, 0, 0).words(10))


def test_bytes_are_uniform_and_serially_independent() -> None:
    lanes = Stream(DIGEST, 0, 0).lanes8(1 << 20)
    assert stats.chisquare(np.bincount(lanes, minlength=256)).pvalue > 1e-6
    pairs = np.bincount(lanes[:-1:2].astype(int) * 256 + lanes[1::2], minlength=65536)
    assert stats.chisquare(pairs).pvalue > 1e-6


def test_streams_do_not_correlate() -> None:
    """Neighboring blocks, purposes and cells: 28 pairs, at a familywise level of 1e-6."""
    rows = [
        Stream(d, b, p).uniforms(20_000) for d in (DIGEST, cell_digest({"test": 2}, 0)) for b in (0, 1) for p in (0, 1)
    ]
    r = np.corrcoef(rows)[np.triu_indices(8, 1)]
    limit = stats.norm.isf(1e-6 / (2 * len(r))) / np.sqrt(20_000)
    assert np.abs(r).max() < limit


def test_open_uniform_never_reaches_the_ends() -> None:
    u = open_uniform(np.array([0, 2**64 - 1], dtype=np.uint64))
    assert 0 < u[0] < u[1] < 1


@pytest.mark.parametrize(
    ("p", "word"), [(0.0, 0), (0.5, 1 << 63), (1.0, (1 << 64) - 1), (2.0**-64, 1), (0.75, 3 << 62)]
)
def test_threshold_word(p: float, word: int) -> None:
    assert threshold_word(p) == word


@pytest.mark.parametrize("seed", [-1, 1.5, "0", None, True, 1 << 63])
def test_bad_seeds(seed: object) -> None:
    with pytest.raises(InputError, match="seed"):
        validate_seed(seed)
