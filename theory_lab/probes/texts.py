"""Texts to probe with: shipped ones, files, standard input; and how windows are cut from them.

A window of length L is the first L tokens that a model would see: the special tokens that its tokenizer puts in front
(and behind, for encoders) and consecutive tokens of the text. The first window of a text begins where the text does;
the others follow without overlap, with gaps drawn from the seed.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from theory_lab.errors import InputError
from theory_lab.outside import read_at_most
from theory_lab.streams import Stream, cell_digest

#: Largest text read, in bytes: far beyond any model's context.
MOST_BYTES = 1 << 28


@dataclass(frozen=True)
class Text:
    """A text and where it comes from."""

    name: str
    content: str

    @property
    def digest(self) -> str:
        """Hash of the content: what makes two texts the same."""
        return hashlib.blake2b(self.content.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


@dataclass(frozen=True)
class Window:
    """Tokens ``start`` to ``start + len(ids) - special`` of a text, with the tokenizer's special tokens around them."""

    text: str
    digest: str
    index: int
    start: int
    ids: tuple[int, ...]


def shipped() -> tuple[Text, ...]:
    """The texts of the package: six openings of works in the public domain, about 12,000 tokens each."""
    folder = resources.files("theory_lab.probes") / "data"
    files = sorted((f for f in folder.iterdir() if f.name.endswith(".txt")), key=lambda f: f.name)
    return tuple(Text(f.name.removesuffix(".txt"), f.read_text(encoding="utf-8")) for f in files)


def read_text(path: str | Path) -> Text:
    """Read a text file; ``-`` is standard input.

    UTF-8 (with or without a byte order mark) and UTF-16 with one are read as such.

    Raises
    ------
    InputError
        No such file, a folder, unreadable, in another encoding, empty or too large.
    """
    name = str(path)
    if name == "-":
        source = getattr(sys.stdin, "buffer", None)
        if source is None:
            raise InputError("text", "-", "standard input is closed: name a file")
        return decode("standard input", read_at_most(source, MOST_BYTES + 1))
    file = Path(path)
    if file.is_dir():
        raise InputError("text", name, "a file is allowed, and this is a folder")
    if not file.exists():
        raise InputError("text", name, "not found: name an existing text file, or - for standard input")
    try:
        with open(file, "rb") as handle:
            raw = read_at_most(handle, MOST_BYTES + 1)
    except OSError as error:
        raise InputError("text", name, f"it cannot be read ({error.strerror or error})") from None
    return decode(name, raw)


def decode(name: str, raw: bytes) -> Text:
    """Make a text of bytes; InputError as for :func:`read_text`."""
    if len(raw) > MOST_BYTES:
        raise InputError("text", name, f"at most {MOST_BYTES >> 20} MiB are allowed")
    utf16 = raw[:2] in (b"\xff\xfe", b"\xfe\xff")
    try:
        content = raw.decode("utf-16" if utf16 else "utf-8-sig")
    except UnicodeDecodeError as error:
        kind = "UTF-16" if utf16 else "UTF-8"
        raise InputError(
            "text", name, f"it is not {kind} (byte {error.start}): convert it, for instance with iconv -t utf-8"
        ) from None
    return as_text(name, content)


def as_text(name: str, content: str) -> Text:
    """A text from a string; InputError if there is nothing in it."""
    if not content.strip():
        raise InputError("text", name, "it is empty: a text with words in it is needed")
    return Text(name, content)


def special_tokens(tokenizer: Any) -> tuple[list[int], list[int]]:
    """What the tokenizer puts in front of and behind a text by itself, such as a BOS token or [CLS] and [SEP]."""
    bare = list(tokenizer("a", add_special_tokens=False)["input_ids"])
    full = list(tokenizer("a")["input_ids"])
    for at in range(len(full) - len(bare) + 1):
        if full[at : at + len(bare)] == bare:
            return full[:at], full[at + len(bare) :]
    return [], []


def tokenize(tokenizer: Any, text: Text) -> list[int]:
    """Tokens of a whole text, without special ones.

    Lengths are our business: the tokenizer's own warning about long texts would only confuse.
    """
    return list(tokenizer(text.content, add_special_tokens=False, verbose=False)["input_ids"])


def cut(
    text: Text, tokens: Sequence[int], length: int, count: int, seed: int, special: tuple[Sequence[int], Sequence[int]]
) -> list[Window]:
    """Cut windows of one length.

    Parameters
    ----------
    text : Text
    tokens : sequence of int
        The whole text's, from :func:`tokenize`.
    length : int
        Tokens a window, special ones included.
    count : int
        Windows; the text must be long enough for them not to overlap.
    seed : int
    special : (front, back)
        From :func:`special_tokens`.

    Raises
    ------
    InputError
        If the text is too short.
    """
    front, back = list(special[0]), list(special[1])
    own = length - len(front) - len(back)
    if own < 1:
        least = len(front) + len(back) + 1
        raise InputError("length", length, f"at least {least}: the tokenizer adds {len(front) + len(back)} tokens")
    if len(tokens) < own * count:
        whole = len(tokens) + len(front) + len(back)
        most = len(tokens) // count + len(front) + len(back)
        many, fewer = "", ""
        if count > 1:
            many, fewer = f" in {count} windows", f" or for at most {len(tokens) // own:,} windows,"
        shorter = f"at most {most:,}," if most > len(front) + len(back) else ""
        ask = f"{shorter}{fewer}".removeprefix(" or for ")
        raise InputError(
            "length",
            f"{length}{many}",
            f"the text '{text.name}' has {whole:,} tokens: ask for {ask} or give a longer text",
        )
    starts = [0]
    if count > 1:
        # What is left over once every window has its tokens is dealt out as gaps.
        spare = len(tokens) - own * count
        digest = cell_digest({"windows": text.digest, "length": length, "count": count}, seed)
        gaps = np.sort(Stream(digest, 0, 0).uniforms(count - 1)) * spare
        starts += [own * (i + 1) + int(gap) for i, gap in enumerate(gaps)]
    return [
        Window(text.name, text.digest, index, start, (*front, *tokens[start : start + own], *back))
        for index, start in enumerate(starts)
    ]
