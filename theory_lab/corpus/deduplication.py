"""Leaving out what was there before, word for word or nearly.

Documents and paragraphs that repeat exactly (but for case and white space) are found by a hash. A paragraph that
repeats nearly is found by its shingles, runs of eight words: if at least ``most`` of them were met in what was kept
before, it is left out (containment after Broder, 1997). Only one shingle in four is remembered, those whose hash is a
multiple of four, so that memory grows with a quarter of the words; which they are depends on the words alone, so two
copies of a paragraph remember the same ones.
"""

from __future__ import annotations

import hashlib
import re
import zlib
from dataclasses import dataclass

import numpy as np

from theory_lab.tasks.source import I64

SHINGLE = 8
_SAMPLED = 4
#: Shorter paragraphs are headings and stock phrases, which may repeat.
SHORTEST = 60
_WORD = re.compile(r"\w+")
_MIX = np.uint64(0x9E3779B97F4A7C15)


@dataclass
class Repetition:
    """What was left out, in characters and numbers."""

    documents: int = 0
    paragraphs_exact: int = 0
    paragraphs_near: int = 0
    characters: int = 0


class Deduplicator:
    """Remembers what it has let through.

    Parameters
    ----------
    most : float
        Share of known shingles from which a paragraph counts as a repetition, in (0, 1].
    remnant : float
        A document of which less than this share is left is left out whole.
    """

    def __init__(self, most: float = 0.8, remnant: float = 0.2) -> None:
        self._most, self._remnant = most, remnant
        self._documents: set[bytes] = set()
        self._paragraphs: set[bytes] = set()
        self._shingles: set[int] = set()
        self._words: dict[str, int] = {}
        self.found = Repetition()

    def keep(self, text: str) -> str | None:
        """What is new in a document; None if that is nothing, or a remnant."""
        whole = _digest(text)
        if whole in self._documents:
            self.found.documents += 1
            self.found.characters += len(text)
            return None
        self._documents.add(whole)
        kept: list[str] = []
        fresh_paragraphs: set[bytes] = set()
        fresh: set[int] = set()
        for paragraph in re.split(r"\n\n+", text):
            if len(paragraph) >= SHORTEST:
                digest = _digest(paragraph)
                if digest in self._paragraphs or digest in fresh_paragraphs:
                    self.found.paragraphs_exact += 1
                    continue
                shingles = self._shingle(paragraph)
                # Within a document only exact repetitions go: tables and lists of one kind resemble each other.
                known = sum(shingle in self._shingles for shingle in shingles)
                if shingles and known >= self._most * len(shingles):
                    self.found.paragraphs_near += 1
                    continue
                fresh_paragraphs.add(digest)
                fresh.update(shingles)
            kept.append(paragraph)
        result = "\n\n".join(kept)
        self.found.characters += len(text) - len(result)
        headings = len(result) < len(text) and not any(len(part) >= SHORTEST for part in kept)
        if headings or len(result) < self._remnant * len(text):
            self.found.documents += 1
            self.found.characters += len(result)
            return None
        self._paragraphs |= fresh_paragraphs
        self._shingles |= fresh
        return result

    def _shingle(self, paragraph: str) -> list[int]:
        """Hashes of the remembered shingles; none of a paragraph that is shorter than one."""
        words = _WORD.findall(paragraph.lower())
        if len(words) < SHINGLE:
            return []
        known = self._words
        ids = [known.get(word) or known.setdefault(word, zlib.crc32(word.encode()) | 1) for word in words]
        hashes = rolling(np.array(ids, dtype=np.int64))
        return hashes[hashes % _SAMPLED == 0].tolist()


def rolling(ids: I64) -> I64:
    """A hash of each run of ``SHINGLE`` numbers, shape (n - SHINGLE + 1,)."""
    count = len(ids) - SHINGLE + 1
    words = ids.astype(np.uint64)
    total = np.zeros(count, dtype=np.uint64)
    with np.errstate(over="ignore"):
        for place in range(SHINGLE):
            total = (total ^ words[place : place + count]) * _MIX
            total ^= total >> np.uint64(29)
    return (total >> np.uint64(1)).astype(np.int64)


def _digest(text: str) -> bytes:
    return hashlib.blake2b(" ".join(text.lower().split()).encode("utf-8", "surrogatepass"), digest_size=12).digest()
