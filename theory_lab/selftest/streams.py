"""Random streams: their words are Philox's, look random, and no two cells share one.

The battery of :mod:`theory_lab.selftest.randomness` reads one stream, and streams taken in turn, a word of each:
neighboring blocks, purposes, seeds and cells. If neighbors had anything in common, the words in turn would show it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from scipy import special

from theory_lab.claims.base import Point
from theory_lab.estimation.base import Cell
from theory_lab.selftest.base import Finding, Setup, chi_square, normal, said, shared
from theory_lab.selftest.randomness import BATTERY
from theory_lab.streams import U64, Stream, Streams, open_uniform, threshold_word

_MASK = (1 << 64) - 1
#: Streams that take turns.
_NEIGHBORS = 64
#: Words that are tested at a time.
_PART = 1 << 22


# ---- Philox, written out -----------------------------------------------------------------------------------------


def philox(counter: int, key: int) -> tuple[int, ...]:
    """Four words of Philox-4x64-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011), in integers.

    Parameters
    ----------
    counter : int
        256 bits.
    key : int
        128 bits.
    """
    c = [counter >> 64 * i & _MASK for i in range(4)]
    k0, k1 = key & _MASK, key >> 64 & _MASK
    for _ in range(10):
        high0, low0 = divmod(0xD2E7470EE14C6C93 * c[0], 1 << 64)
        high1, low1 = divmod(0xCA5A826395121157 * c[2], 1 << 64)
        c = [high1 ^ c[1] ^ k0, low1, high0 ^ c[3] ^ k1, low0]
        k0, k1 = (k0 + 0x9E3779B97F4A7C15) & _MASK, (k1 + 0xBB67AE8584CAA73B) & _MASK
    return tuple(c)


def expected_words(digest: str, block: int, purpose: int, count: int) -> list[int]:
    """What a stream must give: the digest is the key, block and purpose are the high words of the counter.

    NumPy adds one to the counter before it is used.
    """
    key = int.from_bytes(bytes.fromhex(digest), "little")
    top = block << 192 | purpose << 128
    blocks = [philox(top + step, key) for step in range(1, (count + 3) // 4 + 1)]
    return list(itertools.chain.from_iterable(blocks))[:count]


# ---- what is read ------------------------------------------------------------------------------------------------


def _cell(seed: int, **changes: object) -> Cell:
    return Cell("survivors", Point("gaussian", 64).with_(**changes), "direct", seed)


def _sources(setup: Setup) -> dict[str, list[Stream]]:
    """Streams that take turns, by what makes them neighbors."""
    seed = setup.first_seed("streams")
    cell = _cell(seed)
    near = range(_NEIGHBORS)
    return {
        "one stream": [Streams(cell.digest, 0)[0]],
        "neighboring blocks": [Streams(cell.digest, i)[0] for i in near],
        "neighboring purposes": [Streams(cell.digest, 0)[i] for i in near],
        "neighboring seeds": [Streams(_cell(seed + i).digest, 0)[0] for i in near],
        "neighboring cells": [Streams(_cell(seed, length=64 + i).digest, 0)[0] for i in near],
    }


def take_turns(streams: list[Stream], words: int) -> U64:
    """About `words` words: the first of each stream, then the second of each, and so on."""
    each = words // len(streams)
    return np.stack([stream.words(each) for stream in streams], axis=1).reshape(-1)


# ---- checks ------------------------------------------------------------------------------------------------------


def words_are_philox(setup: Setup) -> Iterator[Finding]:
    """Against Philox in integers, and its two derived forms against their definitions."""
    amount, digest = setup.pick(64, 512, 4096), _cell(setup.first_seed("philox")).digest
    wrong = 0
    for block, purpose in ((0, 0), (1, 0), (0, 1), (_MASK, _MASK)):
        got = Streams(digest, block)[purpose].words(amount)
        wrong += sum(int(a) != b for a, b in zip(got, expected_words(digest, block, purpose, amount), strict=True))
    yield Finding("words of Philox-4x64-10", 4 * amount, "words", f"{wrong} differ", passed=wrong == 0)
    words = expected_words(digest, 0, 0, amount)
    spread = b"".join(word.to_bytes(8, "little") for word in words)
    wide = [int.from_bytes(spread[i : i + 2], "little") for i in range(0, len(spread), 2)]
    same = Stream(digest, 0, 0).lanes8(8 * amount).tolist() == list(spread)
    same &= Stream(digest, 0, 0).lanes16(4 * amount).tolist() == wide
    middle = [((word >> 12) * 2 + 1) / (1 << 53) for word in words]
    same &= open_uniform(np.array(words, np.uint64)).tolist() == middle
    same &= Stream(digest, 0, 0).uniforms(amount).tolist() == middle
    ends = open_uniform(np.array([0, _MASK], np.uint64))
    same &= ends[0] > 0.0 and ends[1] < 1.0
    same &= [threshold_word(p) for p in (0.0, 2.0**-64, 0.25, 1.0)] == [0, 1, 1 << 62, _MASK]
    yield Finding(
        "bytes, lanes and uniforms", 3 * amount, "words", "as defined" if same else "differ", passed=bool(same)
    )


@shared
def battery(setup: Setup) -> Iterator[Finding]:
    """Every test of the battery on every source."""
    amount = setup.pick(1 << 18, 1 << 23, 1 << 26)
    for source, streams in setup.share(list(_sources(setup).items())):
        parts = [amount] if amount <= _PART else [_PART] * (amount // _PART)
        # Parts of 2^22 words, so that memory stays the same; each is a test of its own.
        for part, size in enumerate(parts):
            words = take_turns(streams, size)
            for test in BATTERY:
                found = test(words)
                name = f"{found.name}, {source}" + (f", part {part + 1}" if len(parts) > 1 else "")
                yield replace(found, name=name)


def uniforms_are_uniform(setup: Setup) -> Iterator[Finding]:
    """52-bit uniforms: 4,096 equal classes, and as many of the low bits."""
    amount = setup.pick(1 << 18, 1 << 22, 1 << 23)
    u = setup.stream("uniforms").uniforms(amount)
    for name, part in (("leading 12 bits", u), ("next 12 bits", u * 4096 % 1.0)):
        counts = np.bincount((part * 4096).astype(int), minlength=4096)
        statistic, degrees, p = chi_square(counts, np.full(4096, amount / 4096))
        yield Finding(f"uniforms, {name}", amount, "uniforms", f"chi-square {said(statistic)} on {degrees:,}", p)


def cells_share_nothing(setup: Setup) -> Iterator[Finding]:
    """Cells that differ in one field, and blocks and purposes of one cell: no word of any occurs in another."""
    seed = setup.first_seed("cells")
    base = _cell(seed)
    changed = {
        "noise": "spherical", "length": 65, "head_dim": 65, "kappa": 1.0000000000000002, "beta": 0.9999999999999999,
        "sigma": 1.5, "rho": 0.25, "key_rho": 0.25,
    }  # fmt: skip
    cells = {name: _cell(seed, **{name: value}) for name, value in changed.items()}
    cells |= {
        "statistic": replace(base, statistic="consensus"),
        "estimator": replace(base, estimator="tail"),
        "seed": replace(base, seed=seed + 1),
        "device": replace(base, device="cuda"),
    }
    streams = {"itself": Streams(base.digest, 0)[0]}
    streams |= {name: Streams(cell.digest, 0)[0] for name, cell in cells.items()}
    streams |= {"block": Streams(base.digest, 1)[0], "purpose": Streams(base.digest, 0)[1]}
    amount = setup.pick(1 << 13, 1 << 16, 1 << 19)
    drawn = np.stack([stream.words(amount) for stream in streams.values()])
    # Distinct words of all: among N random ones N^2 / 2^65 coincide, less than 1e-6 at any size.
    twice = drawn.size - len(np.unique(drawn))
    yield Finding(
        "words common to two streams", drawn.size, "words", f"{twice:,} in {len(streams)} streams", passed=twice == 0
    )
    uniforms = open_uniform(drawn) - 0.5
    products = 12.0 * (uniforms @ uniforms.T) / np.sqrt(amount)
    pairs = products[np.triu_indices(len(streams), 1)]
    # The largest of the correlations of all pairs, corrected for their number.
    worst = float(np.abs(pairs).max())
    p = min(1.0, len(pairs) * normal(worst))
    yield Finding("correlation of streams", len(pairs), "pairs", f"largest |z| = {worst:.2f}", p)
    differing = np.array([int(np.bitwise_count(a ^ b).sum()) for a, b in itertools.combinations(drawn, 2)], dtype=float)
    z = (differing - 32.0 * amount) / np.sqrt(16.0 * amount)
    worst = float(np.abs(z).max())
    p = min(1.0, len(z) * float(2 * special.ndtr(-worst)))
    yield Finding("bits shared by streams", len(z), "pairs", f"largest |z| = {worst:.2f}", p)


CHECKS = (words_are_philox, battery, uniforms_are_uniform, cells_share_nothing)
